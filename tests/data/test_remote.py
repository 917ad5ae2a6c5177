"""Cells from object storage are bit-identical to those from a disk; errors name unreachable files and a remedy."""

from __future__ import annotations

import contextlib
import functools
import gc
import http.server
import io
import re
import shutil
import sys
import threading
import warnings
from importlib.util import find_spec
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import torch
import zarr
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

import scdiva as sd
from scdiva._files import as_path
from scdiva.data import CellDataModule
from scdiva.data.cells import open_cells
from scdiva.data.corpus import data_files, file_note
from scdiva.data.datamodule import check_manifest, manifest_of
from scdiva.data.packing import pack_files
from scdiva.train import pretrain

upath = pytest.importorskip("upath", reason="universal-pathlib, of the extra remote, is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:study2", "ignore:the data have")


@pytest.fixture(scope="module")
def folder(study_files, tmp_path_factory) -> Path:
    """Three studies: zarr of both formats, one of them with consolidated metadata, and h5ad."""
    where = tmp_path_factory.mktemp("remote") / "train"
    where.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path, version in zip(study_files[:2], (2, 3), strict=True):
            with ad.settings.override(zarr_write_format=version):
                ad.read_h5ad(path).write_zarr(where / f"{path.stem}.zarr")
        zarr.consolidate_metadata(where / "study1.zarr")
    shutil.copy(study_files[2], where)
    return where


@pytest.fixture(scope="module")
def bucket(s3, folder) -> str:
    """A bucket with the studies."""
    s3().mkdir("atlas")
    s3().put(str(folder), "atlas/train", recursive=True)
    return "s3://atlas"


@pytest.fixture(scope="module")
def packed(folder, vocabulary) -> Path:
    """The studies as packed parts."""
    pack_files(folder, vocabulary, folder.parent / "packed", part_cells=50).close()
    return folder.parent / "packed"


@pytest.fixture(scope="module")
def site(folder):
    """A web server of the studies that lists no folder, as most don't, and sends the bytes that are asked for."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def list_directory(self, path):
            self.send_error(404)

        def do_GET(self):
            byte_range = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or "")
            path = Path(self.translate_path(self.path))
            if byte_range is None or "deaf" in self.path or not path.is_file():
                return super().do_GET()
            first, last = map(int, byte_range.groups())
            content = path.read_bytes()
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            self.send_header("Content-Length", str(len(content[first : last + 1])))
            self.end_headers()
            self.wfile.write(content[first : last + 1])

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder.parent))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def same_cells(one, two) -> None:
    for a, b in zip(one.read(0, one.n_obs), two.read(0, two.n_obs), strict=True):
        np.testing.assert_array_equal(a, b)
    assert list(one.var.index) == list(two.var.index)
    assert str(one.obs_names[3]) == str(two.obs_names[3])


@pytest.mark.parametrize("name", ["study0.zarr", "study1.zarr", "study2.h5ad"])
@pytest.mark.parametrize("where", ["bucket", "site"])
def test_cells_are_those_of_the_file(where, name, folder, vocabulary, request):
    url = f"{request.getfixturevalue(where)}/train/{name}"
    how = {"keep": False, "empty": "nan"}
    far, near = open_cells(url, vocabulary, **how), open_cells(folder / name, vocabulary, **how)
    same_cells(far, near)
    ranges = [(40, 55), (3, 4), (9, 9), (10, 12)] if near.n_obs > 55 else [(20, 25), (0, 3)]
    for a, b in zip(far.read_ranges(ranges), near.read_ranges(ranges), strict=True):
        np.testing.assert_array_equal(a, b)
    far.close()
    same_cells(far, near)  # opened anew


def test_no_garbage_is_collected_while_h5py_reads_from_afar(folder, vocabulary, monkeypatch):
    """Otherwise a fetching thread can deadlock: closing a file needs h5py's lock, whose holder waits for the thread."""
    collects = []

    def noted(self, buffer):
        collects.append(gc.isenabled())
        return io.BytesIO.readinto(self, buffer)

    MemoryFileSystem().pipe("/quiet/cells.h5ad", (folder / "study2.h5ad").read_bytes())
    monkeypatch.setattr(MemoryFile, "readinto", noted, raising=False)
    far, near = "memory://quiet/cells.h5ad", folder / "study2.h5ad"
    far, near = (open_cells(one, vocabulary, keep=False, empty="nan") for one in (far, near))
    same_cells(far, near)
    assert len(collects) > 10
    assert not any(collects)
    assert gc.isenabled()


def test_a_folder_in_a_bucket_is_its_files(s3, bucket, folder, vocabulary, tmp_path):
    names = ["study0.zarr", "study1.zarr", "study2.h5ad"]
    urls = [f"{bucket}/train/{name}" for name in names]
    for of in (f"{bucket}/train", bucket):
        assert [str(one) for one in data_files([of])] == urls
    s3().pipe(f"{bucket}/notes/none.txt", b"no cells")
    with pytest.raises(ValueError, match="folder 's3://atlas/notes' holds no"):
        data_files([f"{bucket}/notes"])
    assert sd.pp.corpus_entropy(urls, vocabulary) == sd.pp.corpus_entropy([folder / name for name in names], vocabulary)
    far, near = (pack_files([of], vocabulary, tmp_path / out) for of, out in ((bucket, "far"), (folder, "near")))
    assert far.study_names == near.study_names
    for a, b in zip(far.read(0, far.n_obs), near.read(0, near.n_obs), strict=True):
        np.testing.assert_array_equal(a, b)
    how = {"empty": "nan", "batch_size": 16}  # and an embedding of one
    files = (sd.tl.embed_file(of, tmp_path / "e.h5ad", overwrite=True, **how) for of in (urls[1], folder / names[1]))
    one, two = map(ad.read_h5ad, files)
    np.testing.assert_array_equal(one.obsm["X_scdiva"], two.obsm["X_scdiva"])
    assert one.obs.equals(two.obs)


@pytest.mark.parametrize("where", ["bucket", "site"])
def test_packed_parts_from_afar_give_the_same_stream(where, packed, s3, vocabulary, request):
    url = f"{request.getfixturevalue(where)}/packed"
    if where == "bucket":
        s3().put(str(packed), url, recursive=True)
    far, near = (
        CellDataModule(of, vocabulary=vocabulary, batch_size=16, context=40, n_blocks=2, block_rows=8)
        for of in (url, packed)
    )
    assert far.n_cells == near.n_cells == 214
    for number in range(14):
        one, two = far.training_stream().batch(number), near.training_stream().batch(number)
        assert all(map(torch.equal, (one.tokens, one.values, one.study), (two.tokens, two.values, two.study)))
    (note,) = far.manifest()["files"]["train"].values()
    assert note["sha256"] == file_note(packed)["sha256"]
    if where == "bucket":
        s3().rm(url, recursive=True)


def test_a_server_that_sends_no_ranges_is_named(packed, site, vocabulary):
    shutil.copytree(packed, packed.with_name("deaf"))
    with pytest.raises(ValueError, match="server sends no ranges of bytes"):
        sd.data.PackedCells(f"{site}/deaf", vocabulary).read(3, 9)


def test_a_note_tells_another_content_of_the_same_size(s3, bucket, folder):
    files, url = s3(), f"{bucket}/noted/study.zarr"
    files.put(str(folder / "study0.zarr"), url, recursive=True)
    note = file_note(url)
    assert set(note) == {"files", "size", "listing_sha256"}
    assert note["files"] == len(files.find(url))
    assert note == file_note(as_path(url))
    before = manifest_of([url])
    chunk = next(name for name in files.find(f"{url}/X/data") if name[-1].isdigit())
    content = files.cat(chunk)
    files.pipe(chunk, content[:-1] + bytes([content[-1] ^ 1]))
    assert file_note(url)["size"] == note["size"]
    with pytest.raises(ValueError, match=r"1 of 1 files have changed .*'study.zarr'"):
        check_manifest(before, manifest_of([url]))


@pytest.mark.parametrize("where", ["bucket", "site"])
@pytest.mark.parametrize("name", ["study0.zarr", "study1.zarr"])
def test_a_chunk_that_is_gone_is_no_zero(where, name, folder, s3, bucket, vocabulary, request):
    chunk = f"train/{name}/X/data/{'0' if name == 'study0.zarr' else 'c/0'}"
    with contextlib.ExitStack() as back:
        if where == "bucket":
            files = s3()
            back.callback(files.pipe, f"{bucket}/{chunk}", files.cat(f"{bucket}/{chunk}"))
            files.rm(f"{bucket}/{chunk}")
        else:
            path = folder.parent / chunk
            path.rename(path.with_name("away"))
            back.callback(path.with_name("away").rename, path)
        with pytest.raises(ValueError, match=r"(s3|http)://.*is damaged"):
            open_cells(f"{request.getfixturevalue(where)}/train/{name}", vocabulary)


@pytest.mark.parametrize("name", ["s3://no-such-bucket/x.zarr", "bucket/x.zarr", "bucket/x.h5ad", "site/x.zarr"])
def test_what_is_not_there_is_named(name, bucket, site, vocabulary, tmp_path):
    url = {"bucket": bucket, "site": site}.get(name.split("/")[0], "s3:") + name[name.index("/") :]
    with pytest.raises(FileNotFoundError, match=f"'{url}' can't be read .*Is there such a bucket"):
        open_cells(url, vocabulary)
    with pytest.raises(FileNotFoundError, match=f"'{url}'"):
        sd.tl.embed_file(url, tmp_path / "out.h5ad")
    with pytest.raises(FileNotFoundError, match=f"'{url}'"):
        pretrain(url, str(tmp_path / "run"), vocabulary="scdiva-mini", progress=False)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"out='s3://.*' is a URL"):
        sd.tl.embed_file(f"{bucket}/train/study0.zarr", f"{bucket}/out.zarr")


def test_who_may_not_read_is_told_what_to_set(s3, bucket, vocabulary, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    s3.clear_instance_cache()
    try:
        with pytest.raises(OSError, match=r"'s3://atlas/train/study0.zarr' .*NoCred.*AWS_PROFILE"):
            open_cells(f"{bucket}/train/study0.zarr", vocabulary)
    finally:
        s3.clear_instance_cache()


def test_a_missing_package_is_named(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "upath", None)
        with pytest.raises(ImportError, match=r"universal-pathlib: .*'scdiva\[remote\]'"):
            as_path("s3://a/b.zarr")
    with pytest.raises(ValueError, match="'nothing'"):
        as_path("nothing://a/b.zarr")
    if find_spec("gcsfs") is None:
        with pytest.raises(ImportError, match=r"'gs://a/b.zarr' .*gcsfs.*'scdiva\[remote\]'"):
            as_path("gs://a/b.zarr")
