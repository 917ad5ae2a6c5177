"""Data larger than memory are read in blocks from any storage, with the same results as in memory."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

import scdiva as sd

KEY = "scdiva_entropy"


@pytest.fixture(scope="module")
def files(adata, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cells")
    adata.write_h5ad(folder / "cells.h5ad")
    adata.write_zarr(folder / "cells.zarr")
    return folder


@pytest.mark.parametrize("name", ["cells.h5ad", "cells.zarr"])
def test_lazy_cells_give_the_same(plain, adata, files, name):
    """Backed files and dask arrays are in tests/faults/test_storage.py."""
    pytest.importorskip("xarray", reason="anndata reads annotation lazily with xarray")
    expected, cells = adata.copy(), ad.experimental.read_lazy(files / name)
    for one in (expected, cells):
        sd.pp.gene_entropy(one)
        sd.pp.entropy_serialize(one, entropy_key=KEY)
        sd.tl.embed(one, plain)
    np.testing.assert_array_equal(np.asarray(cells.var[KEY]), expected.var[KEY])
    assert (cells.layers["scdiva_rank"] != expected.layers["scdiva_rank"]).nnz == 0
    np.testing.assert_array_equal(cells.obsm["X_scdiva"], expected.obsm["X_scdiva"])
    assert not isinstance(cells.X, np.ndarray | sp.spmatrix)  # it is where it was


def test_what_is_written_into_a_file_that_is_open_for_writing_stays(plain, adata, files, tmp_path):
    path = tmp_path / "cells.h5ad"
    path.write_bytes((files / "cells.h5ad").read_bytes())
    cells = ad.read_h5ad(path, backed="r+")
    sd.pp.gene_entropy(cells)
    sd.pp.entropy_serialize(cells, entropy_key=KEY)
    sd.tl.embed(cells, plain)
    cells.write()
    cells.file.close()
    stored, expected = ad.read_h5ad(path), cells
    assert (stored.X != adata.X).nnz == 0
    assert stored.var[KEY].equals(expected.var[KEY])
    assert (stored.layers["scdiva_rank"] != expected.layers["scdiva_rank"]).nnz == 0
    np.testing.assert_array_equal(stored.obsm["X_scdiva"], expected.obsm["X_scdiva"])


@pytest.fixture(scope="module")
def large(adata, tmp_path_factory):
    """A file of so many cells that a block of them is little beside it, and the bytes of its X."""
    x = sp.vstack([adata.X] * 400, format="csr", dtype=np.float32)
    path = tmp_path_factory.mktemp("large") / "cells.h5ad"
    cells = ad.AnnData(x, var=adata.var[[]])
    cells.write_h5ad(path)
    return path, x.data.nbytes + x.indices.nbytes


CALLS = {
    "gene_entropy": lambda cells, plain: sd.pp.gene_entropy(cells, plain.vocabulary),
    "entropy_serialize": lambda cells, plain: sd.pp.entropy_serialize(cells, plain.vocabulary),
    "embed": lambda cells, plain: sd.tl.embed(cells, plain),
}


@pytest.mark.parametrize("call", CALLS)
def test_neither_x_nor_a_second_copy_of_the_result_is_held(plain, adata, large, monkeypatch, call):
    path, size = large
    monkeypatch.setattr("scdiva.data.cells.KEPT_BYTES", 2**20)  # this matrix stands for one too large to be kept
    CALLS[call](adata.copy(), plain)  # what is loaded once does not count
    cells = ad.read_h5ad(path, backed="r")
    tracemalloc.start()
    CALLS[call](cells, plain)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    cells.file.close()
    if call == "entropy_serialize":
        ranks = cells.layers["scdiva_rank"]
        peak -= ranks.data.nbytes + ranks.indices.nbytes
    if call == "embed":
        assert peak < cells.obsm["X_scdiva"].nbytes + size  # windows of 4,096 cells, the next one too
    else:
        assert peak < size / 2


def test_the_page_says_what_works(tmp_path, monkeypatch):
    """The first section of docs/large_data.md runs."""
    page = (Path(__file__).parents[2] / "docs" / "large_data.md").read_text(encoding="utf-8")
    page = page[: page.index("## Object storage")]
    sd.datasets.toy(70, 200).write_h5ad(tmp_path / "atlas.h5ad")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 6
    names: dict = {}
    with sd.settings.override():
        for block in blocks:
            if "tcp://scheduler" in block:  # tests/embedding/test_embed_cluster.py has one
                continue
            if "read_lazy" in block:
                pytest.importorskip("xarray")
            exec(block, names)
    written = ad.read_h5ad("atlas.h5ad")
    assert np.array_equal(written.obsm["X_scdiva"], ad.read_h5ad("atlas_scdiva.h5ad").obsm["X_scdiva"])
    assert written.obsm["X_scdiva"].nbytes == 768 * 70
    assert np.isfinite(ad.read_h5ad("atlas_adapted.h5ad").obsm["X_scdiva"]).all()
    assert set(names["atlas"].obs["scdiva_label"]) <= set(written.obs["cell_type"])
    written_files = {"atlas.h5ad", "atlas_scdiva.h5ad", "atlas_adapted.h5ad", "labels.csv"}
    assert {path.name for path in tmp_path.iterdir()} == written_files
