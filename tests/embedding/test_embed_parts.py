"""A file embedded by several jobs, or by a job that is interrupted and resumed, equals that of a single job."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import os
import threading
import time
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import torch

import scdiva as sd
from scdiva._files import open_alone
from scdiva._validate import Scan
from scdiva.data.matrix import OpenMatrix
from scdiva.data.output import as_shard, scan_once
from scdiva.embedding import embed_file as _embed_file
from scdiva.embedding.embed_file import Parts

N = 4096 * 4 + 100
"""Five windows."""


@pytest.fixture(scope="module")
def file(write_many):
    """Cells of five windows; the last of the second window and all of the last window have no genes."""
    return write_many(N, [*range(8100, 8192), *range(4 * 4096, N)])


@pytest.fixture(scope="module")
def model(plain, tmp_path_factory):
    return sd.models.save_model(plain, plain.vocabulary, tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def embed(file, model):
    """Embed the file, or a shard of it."""

    def call(out, shard=None, **options):
        with sd.settings.override(progress=False, device="cpu"):
            return sd.tl.embed_file(file, out, model=model, empty="nan", shard=shard, **options)

    return call


@pytest.fixture(scope="module")
def expected_bytes(embed, tmp_path_factory):
    """The output file of an uninterrupted run."""
    out = embed(tmp_path_factory.mktemp("whole") / "z.h5ad")
    missing = np.flatnonzero(np.isnan(ad.read_h5ad(out).obsm["X_scdiva"][:, 0]))
    assert missing.tolist() == [*range(8100, 8192), *range(4 * 4096, N)]
    return out.read_bytes()


@pytest.fixture
def starts(monkeypatch):
    """Rows from which cells were embedded, call by call."""
    rows, embed_cells = [], _embed_file.embed_cells

    def watched(*args, start=0, **options):
        rows.append(start)
        return embed_cells(*args, start=start, **options)

    monkeypatch.setattr(_embed_file, "embed_cells", watched)
    return rows


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_shards_in_any_order_are_the_file_of_one_run(embed, expected_bytes, tmp_path, order):
    out = tmp_path / "z.h5ad"
    for i in order:
        assert not out.exists()
        assert embed(out, (i, 3)) == out
    assert out.read_bytes() == expected_bytes
    assert [path.name for path in tmp_path.iterdir()] == ["z.h5ad"]


@pytest.mark.fault("SIGKILL in embed_file")
@pytest.mark.parametrize("when", ["run", "part", "join"])
def test_a_killed_job_is_started_again_and_the_result_has_the_same_bits(
    embed, expected_bytes, tmp_path, when, starts, monkeypatch, killed, kill
):
    out, shard = tmp_path / "z.h5ad", None if when == "run" else (1, 2)
    if when == "join":
        embed(out, (0, 2))
    save = Parts.save

    def killed_in_it(self, first, *arguments):
        if first == 12288:  # while the part is written, before it has a name
            monkeypatch.setattr("os.fsync", kill)
        save(self, first, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(*((_embed_file, "new_rows", kill) if when == "join" else (Parts, "save", killed_in_it)))
        killed(lambda: embed(out, shard))
    assert not out.exists()
    starts.clear()
    for again in {"run": [None], "part": [(1, 2), (0, 2)], "join": [(0, 2)]}[when]:
        embed(out, again)
    # of the killed shard, rows 8,192 on, one part had been finished
    assert starts == {"run": [12288], "part": [12288, 0], "join": []}[when]
    assert out.read_bytes() == expected_bytes
    assert [path.name for path in tmp_path.iterdir()] == ["z.h5ad"]


def test_the_matrix_is_checked_once_for_all_jobs(embed, expected_bytes, tmp_path, monkeypatch):
    passes, scan = [], OpenMatrix.scan
    monkeypatch.setattr(OpenMatrix, "scan", lambda *args, **options: passes.append(1) or scan(*args, **options))
    out = tmp_path / "z.h5ad"
    embed(out, (1, 3))
    embed(out, (0, 3))
    assert len(passes) == 1
    (tmp_path / ".z.h5ad.parts" / "scan.npz").write_bytes(b"damaged")
    embed(out, (2, 3))
    assert len(passes) == 2
    assert out.read_bytes() == expected_bytes


def test_of_jobs_that_start_at_once_one_scans(tmp_path):
    calls, scans = [], []
    scanned = Scan("counts", True, 7.0, np.arange(3.0), np.arange(4, dtype=np.int32), np.zeros(4, np.int32))

    def make():
        calls.append(1)
        time.sleep(0.1)
        return scanned

    out = tmp_path / "z.h5ad"
    jobs = [threading.Thread(target=lambda: scans.append(scan_once(out, {"a": 1}, make))) for _ in range(4)]
    for step in (threading.Thread.start, threading.Thread.join):
        for job in jobs:
            step(job)
    assert len(calls) == 1
    for one in scans:
        for name, value in vars(scanned).items():
            np.testing.assert_array_equal(getattr(one, name), value)
    scan_once(out, {"a": 2}, make)
    assert len(calls) == 2


def test_shards_of_other_arguments_are_not_mixed(embed, tmp_path):
    out = tmp_path / "z.h5ad"
    embed(out, (0, 2), batch_size=100)
    embed(out, (1, 2))
    assert not out.exists()
    embed(out, (1, 2), batch_size=100)
    one = embed(tmp_path / "one.h5ad", batch_size=100)
    assert out.read_bytes() == one.read_bytes()


def test_a_damaged_part_is_refused_and_made_again(embed, expected_bytes, tmp_path):
    out = tmp_path / "z.h5ad"
    embed(out, (0, 2))
    part = next((tmp_path / ".z.h5ad.parts").glob("*/000000004096.npz"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with pytest.raises(ValueError, match="part from row 4096 on is damaged"):
        embed(out, (1, 2))
    assert not out.exists()
    embed(out, (0, 2))
    assert out.read_bytes() == expected_bytes


def test_parts_serve_any_number_of_shards(embed, expected_bytes, tmp_path):
    out = tmp_path / "z.h5ad"
    embed(out, (1, 5))
    for i in range(2):
        embed(out, (i, 2))
    assert out.read_bytes() == expected_bytes


def test_a_job_leaves_the_joining_to_the_one_that_is_at_it(embed, expected_bytes, tmp_path, caplog):
    out = tmp_path / "z.h5ad"
    embed(out, (0, 2))
    held = open_alone(tmp_path / ".z.h5ad.parts" / "joining.lock")
    with caplog.at_level(logging.INFO, logger="scdiva"):
        embed(out, (1, 2))
    assert "another call joins them" in caplog.text
    assert not out.exists()
    held.close()
    embed(out, (1, 2))
    assert out.read_bytes() == expected_bytes


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0), (0,), 3, ("a", "b"), (0.5, 2)])
def test_what_is_no_shard_is_refused(embed, tmp_path, shard):
    with pytest.raises(ValueError, match="shard must be"):
        embed(tmp_path / "z.h5ad", shard)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("n_obs", "window"), [(1, 7), (7, 7), (50, 7), (4096 * 10 + 1, 4096)])
def test_shards_cover_all_rows_once_and_end_where_windows_do(n_obs, window):
    n_windows = -(-n_obs // window)
    for n in range(1, n_windows + 1):
        rows = [Parts(Path("z"), n_obs, window, 2).range_of(*as_shard((i, n))) for i in range(n)]
        assert rows[0][0] == 0
        assert rows[-1][1] == n_obs
        assert all(a[1] == b[0] and a[1] % window == 0 for a, b in itertools.pairwise(rows))
        assert all(stop > first for first, stop in rows)
        sizes = [-(-(stop - first) // window) for first, stop in rows]
        assert max(sizes) - min(sizes) <= 1
    with pytest.raises(ValueError, match=f"at most {n_windows} shards"):
        Parts(Path("z"), n_obs, window, 2).range_of(0, n_windows + 1)


@contextlib.contextmanager
def cut_off(parts, error=KeyboardInterrupt):
    """Let a run end after some parts."""
    save = Parts.save

    def failing(self, first, *arguments):
        if first >= parts * 4096:
            raise error
        save(self, first, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parts, "save", failing)
        yield


def test_a_result_that_stands_is_replaced_only_by_a_whole_one(embed, expected_bytes, tmp_path, monkeypatch):
    out = tmp_path / "z.h5ad"
    out.write_bytes(expected_bytes)
    with cut_off(2), pytest.raises(KeyboardInterrupt):
        embed(out, batch_size=100, overwrite=True)
    assert out.read_bytes() == expected_bytes

    def failing(*args):
        raise OSError("no space left")

    monkeypatch.setattr(_embed_file, "new_rows", failing)
    with pytest.raises(OSError, match="no space"):
        embed(out, overwrite=True)
    assert out.read_bytes() == expected_bytes
    assert sorted(path.name for path in tmp_path.iterdir()) == [".z.h5ad.parts", "z.h5ad"]


def other_model(plain, file):
    model = copy.deepcopy(plain)
    with torch.no_grad():
        next(iter(model.parameters())).view(-1)[0] += 1e-3
    return {"model": model}


def other_time(plain, file):
    os.utime(file, ns=(1, 1))
    return {}


OTHER = {
    "a weight": other_model,
    "the file": other_time,
    "batch_size": lambda plain, file: {"batch_size": 100},
}


@pytest.mark.parametrize("what", OTHER)
def test_another_run_starts_anew_and_says_so(plain, file, tmp_path, starts, caplog, what):
    copied, out = tmp_path / "cells.h5ad", tmp_path / "z.h5ad"
    copied.write_bytes(file.read_bytes())
    with cut_off(1), pytest.raises(KeyboardInterrupt):
        sd.tl.embed_file(copied, out, model=plain, empty="nan")
    changed = {"model": plain, "empty": "nan", **OTHER[what](plain, copied)}
    info = sd.settings.override(verbosity="info"), caplog.at_level(logging.INFO, "scdiva")
    with info[0], info[1], cut_off(0), pytest.raises(KeyboardInterrupt):
        sd.tl.embed_file(copied, out, **changed)
    assert starts == [0, 0]
    assert "of another run: starting again" in caplog.text


def test_a_file_that_changes_meanwhile_is_an_error(plain, file, tmp_path, monkeypatch):
    copied, embed_cells = tmp_path / "cells.h5ad", _embed_file.embed_cells
    copied.write_bytes(file.read_bytes())

    def touched(*args, **kwargs):
        yield from embed_cells(*args, **kwargs)
        os.utime(copied, ns=(1, 1))

    monkeypatch.setattr(_embed_file, "embed_cells", touched)
    with pytest.raises(ValueError, match=r"cells\.h5ad' was changed"):
        sd.tl.embed_file(copied, tmp_path / "z.h5ad", model=plain, empty="nan")
    assert [path.name for path in tmp_path.iterdir()] == ["cells.h5ad"]


@pytest.mark.fault("two processes on one cache")
def test_two_at_once_do_not_mix(embed, expected_bytes, tmp_path, monkeypatch):
    """The second is refused while the first runs, and the first gives what it gives alone."""
    out, save, refused = tmp_path / "z.h5ad", Parts.save, []

    def beside(self, *arguments):
        if not refused:
            with pytest.raises(RuntimeError, match="another call is writing"):
                embed(out, overwrite=True)
            refused.append(True)
        save(self, *arguments)

    monkeypatch.setattr(Parts, "save", beside)
    embed(out)
    assert refused
    assert out.read_bytes() == expected_bytes


def test_a_lock_on_a_deleted_file_is_no_lock(tmp_path, monkeypatch):
    """Its owner finishes, and deletes it, between our opening and our lock."""
    import fcntl

    path, flock, deleted = tmp_path / "parts", fcntl.flock, []

    def late(file, how):
        if not deleted:
            path.unlink()
            deleted.append(True)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with open_alone(path):
        assert path.exists()
