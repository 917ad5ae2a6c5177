"""A file embedded by many jobs is the file that one job makes, whatever happens to them."""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import scdiva as sd
from scdiva.data.matrix import OpenMatrix
from scdiva.data.output import as_shard, scan_once
from scdiva.embedding import embed_file as _embed_file
from scdiva.embedding.embed_file import Parts

N = 4096 * 4 + 100
"""Five windows."""


@pytest.fixture(scope="module")
def file(write_many):
    """Cells of five windows; the last of the second window and the last of all have no genes."""
    return write_many(N, [*range(8100, 8192), *range(N - 3, N)])


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
def whole(embed, tmp_path_factory):
    return digest(embed(tmp_path_factory.mktemp("whole") / "z.h5ad"))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_shards_in_any_order_are_the_file_of_one_run(embed, whole, tmp_path, order):
    out = tmp_path / "z.h5ad"
    for i in order:
        assert not out.exists()
        assert embed(out, (i, 3)) == out
    assert digest(out) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["z.h5ad"]


@pytest.mark.parametrize("when", ["part", "join"])
def test_a_killed_job_is_started_again_and_the_result_has_the_same_hash(
    embed, whole, tmp_path, when, monkeypatch, killed, kill
):
    out = tmp_path / "z.h5ad"
    if when == "join":
        embed(out, (0, 2))
    save = Parts.save

    def killed_in_it(self, first, *given):
        if first == 12288:  # while the part is written, before it has a name
            monkeypatch.setattr("os.fsync", kill)
        save(self, first, *given)

    with monkeypatch.context() as patch:
        patch.setattr(*((Parts, "save", killed_in_it) if when == "part" else (_embed_file, "new_rows", kill)))
        killed(lambda: embed(out, (1, 2)))
    assert not out.exists()
    starts, embed_cells = [], _embed_file.embed_cells
    monkeypatch.setattr(
        _embed_file, "embed_cells", lambda *args, **at: starts.append(at["start"]) or embed_cells(*args, **at)
    )
    for i in (1, 0) if when == "part" else (0,):
        embed(out, (i, 2))
    # of the killed shard, rows 8,192 on, one part had been finished
    assert starts == ([12288, 0] if when == "part" else [])
    assert digest(out) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["z.h5ad"]


def test_the_matrix_is_checked_once_for_all_jobs(embed, whole, tmp_path, monkeypatch):
    passes, scan = [], OpenMatrix.scan
    monkeypatch.setattr(OpenMatrix, "scan", lambda *args, **options: passes.append(1) or scan(*args, **options))
    out = tmp_path / "z.h5ad"
    embed(out, (1, 3))
    embed(out, (0, 3))
    assert len(passes) == 1
    (tmp_path / ".z.h5ad.parts" / "scan.npz").write_bytes(b"damaged")
    embed(out, (2, 3))
    assert len(passes) == 2
    assert digest(out) == whole


def test_of_jobs_that_start_at_once_one_scans(tmp_path):
    from scdiva._validate import Scan

    made, found = [], []

    def make():
        made.append(1)
        time.sleep(0.1)
        return Scan("counts", True, 7.0, np.arange(3.0), np.arange(4, dtype=np.int32), np.zeros(4, np.int32))

    out = tmp_path / "z.h5ad"
    jobs = [threading.Thread(target=lambda: found.append(scan_once(out, {"a": 1}, make))) for _ in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert len(made) == 1
    for one in found:
        assert (one.kind, one.integer, one.max, one.n_obs) == ("counts", True, 7.0, 4)
        assert one.counts_per_gene.tolist() == [0, 1, 2]
        assert one.genes_per_cell.dtype == np.int32
    scan_once(out, {"a": 2}, make)
    assert len(made) == 2


def test_shards_of_other_arguments_are_not_mixed(embed, tmp_path):
    out = tmp_path / "z.h5ad"
    embed(out, (0, 2), batch_size=100)
    embed(out, (1, 2))
    assert not out.exists()
    embed(out, (1, 2), batch_size=100)
    one = embed(tmp_path / "one.h5ad", batch_size=100)
    assert digest(out) == digest(one)


def test_a_damaged_part_is_refused_and_made_again(embed, whole, tmp_path):
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
    assert digest(out) == whole


def test_parts_serve_any_number_of_shards(embed, whole, tmp_path):
    out = tmp_path / "z.h5ad"
    embed(out, (1, 5))
    for i in range(2):
        embed(out, (i, 2))
    assert digest(out) == whole


def test_a_job_leaves_the_joining_to_the_one_that_is_at_it(embed, whole, tmp_path, caplog):
    from scdiva._files import open_alone

    out = tmp_path / "z.h5ad"
    embed(out, (0, 2))
    held = open_alone(tmp_path / ".z.h5ad.parts" / "joining.lock")
    with caplog.at_level(logging.INFO, logger="scdiva"):
        embed(out, (1, 2))
    assert "another call joins them" in caplog.text
    assert not out.exists()
    held.close()
    embed(out, (1, 2))
    assert digest(out) == whole


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
