"""What reading and writing files have in common."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scdiva._checks import printable
from scdiva._files import output_path, put_whole, tidy, whole_or_not


@pytest.mark.parametrize(
    "path", ["s3://b/o", "S3://b", "gs://b/o.h5ad", "https://x.org/o", "hf://a/b", "file:///tmp/o"]
)
@pytest.mark.parametrize("kind", [str, Path])
def test_a_url_is_no_output(path, kind):
    with pytest.raises(ValueError, match=r"where=.*is a URL"):
        output_path(kind(path), "where")


@pytest.mark.parametrize("path", ["a:b", "./s3:/o", "T cells: x/o.h5ad", "/tmp/x://o", "c/o.h5ad"])
def test_other_names_are(path):
    with pytest.raises(ValueError, match="where"):
        output_path("", "where")
    assert output_path(path) == Path(path)


def test_text_is_escaped_where_a_terminal_would_obey():
    plain = "T cells, CD4\u207a\tβ-catenin 細胞\n\u200d"
    assert printable(plain) == plain
    assert printable("a\x1b[2J\x07\x9b\r\x7f\u202e") == r"a\u001b[2J\u0007\u009b\u000d\u007f\u202e"


def test_only_files_of_dead_processes_are_deleted(tmp_path):
    out = tmp_path / "x[1].txt"
    names = [tmp_path / f".{letter * 32}.x[1].txt" for letter in "abc"]
    unrelated = tmp_path / f".{'d' * 32}.y.txt"
    for name in (*names, unrelated):
        name.write_text("left")
    for name in (names[0], names[1], unrelated):
        os.utime(name, (0, 0))
    with names[1].open() as alive:
        import fcntl

        fcntl.flock(alive, fcntl.LOCK_EX)
        put_whole(out, lambda file: file.write(b"whole"))
        with pytest.raises(ZeroDivisionError):
            put_whole(out, lambda file: file.write(b"new") / 0)
    assert out.read_text() == "whole"
    assert sorted(tmp_path.iterdir()) == sorted([out, names[1], names[2], unrelated])


def test_a_killed_call_is_tidied_up(tmp_path):
    out = tmp_path / "out.zarr"
    (tmp_path / ".out.old.zarr").mkdir()  # between two renames
    (tmp_path / ".out.new.zarr").mkdir()
    (tmp_path / ".out.zarr.writing").write_text("")
    tidy(out)
    assert list(tmp_path.iterdir()) == [out]
    with whole_or_not(out) as new:
        new.mkdir()
        (new / "x").write_text("x")
    assert [path.name for path in tmp_path.rglob("*")] == ["out.zarr", "x"]
