"""Cells of an annbatch loader become the batches that files give; annbatch is played by a stand-in."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch

from scdiva.data.annbatch import annbatch_batches, open_annbatch
from scdiva.data.cells import open_cells


class Loader:
    """What annbatch.Loader shows: `var`, and batches as mappings with X, obs, var and index."""

    def __init__(self, adata, size: int = 16, form=lambda x: x, **options) -> None:
        self.var, self.options = adata.var, options
        self._batches = [form(adata.X[i : i + size]) for i in range(0, adata.n_obs, size)]

    def use_collection(self, collection):
        self.collection = collection
        return self

    def __iter__(self):
        for x in self._batches:
            yield {"X": x, "obs": None, "var": self.var, "index": None}


def as_torch(x: sp.csr_matrix) -> torch.Tensor:
    return torch.sparse_csr_tensor(*map(torch.from_numpy, (x.indptr, x.indices, x.data)), size=x.shape)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:Sparse invariant")
@pytest.mark.parametrize("form", [lambda x: x, as_torch, sp.csr_array, lambda x: x.toarray()])
def test_batches_are_those_of_the_file(cells, vocabulary, form):
    cells.X[[3, 4]] = 0
    cells.X.eliminate_zeros()
    source = open_cells(cells, vocabulary, max_length=20, empty="nan")
    indptr, tokens, values = source.read(0, cells.n_obs)
    batches = list(annbatch_batches(Loader(cells, form=form), vocabulary, context=20))
    assert [batch.n_cells for batch in batches] == [14, 16, 16, 12]
    np.testing.assert_array_equal(np.concatenate([batch.tokens.numpy() for batch in batches]), tokens)
    np.testing.assert_array_equal(np.concatenate([batch.packed[1].numpy() for batch in batches]), values)
    lengths = np.concatenate([np.diff(batch.cu_seqlens.numpy()) for batch in batches])
    np.testing.assert_array_equal(lengths, np.diff(indptr)[np.diff(indptr) > 0])


def test_names_in_a_column_and_a_batch_without_known_genes(cells, vocabulary):
    cells.X[16:32] = 0
    cells.X.eliminate_zeros()
    plain = [batch.tokens for batch in annbatch_batches(Loader(cells), vocabulary)]
    assert len(plain) == 3
    cells.var["symbol"] = cells.var_names
    cells.var.index = [f"g{i}" for i in range(cells.n_vars)]
    named = [batch.tokens for batch in annbatch_batches(Loader(cells), vocabulary, gene_ids="symbol")]
    assert all(torch.equal(a, b) for a, b in zip(plain, named, strict=True))


def test_what_cannot_be_read_is_refused(cells, vocabulary):
    loader = Loader(cells)
    loader.var = None
    with pytest.raises(ValueError, match="loader has no var, hence no gene names"):
        list(annbatch_batches(loader, vocabulary))
    loader.var = pd.DataFrame(index=cells.var_names[:-1])
    with pytest.raises(ValueError, match="batch 0 of the loader has 80 genes, but the loader's var names 79"):
        list(annbatch_batches(loader, vocabulary))
    with pytest.raises(ValueError, match="kind must be 'counts' or 'lognorm', got 'auto'"):
        list(annbatch_batches(Loader(cells), vocabulary, kind="auto"))
    with pytest.raises(ValueError, match="context must be at least 1"):
        list(annbatch_batches(Loader(cells), vocabulary, context=0))
    cells.X.data[-1] = np.nan
    batches = annbatch_batches(Loader(cells), vocabulary)
    assert next(batches).n_cells == 16
    with pytest.raises(ValueError, match="batch 3 of the loader"):
        list(batches)


def test_without_annbatch_the_error_has_the_line_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "annbatch", None)
    with pytest.raises(ImportError) as caught:
        open_annbatch(tmp_path)
    assert "pip install 'scdiva[annbatch]'" in str(caught.value)
    assert ("needs Python 3.12 or newer" in str(caught.value)) == (sys.version_info < (3, 12))


def test_a_collection_is_opened_to_be_read_only(cells, monkeypatch, vocabulary, tmp_path):
    stand_in = ModuleType("annbatch")
    stand_in.DatasetCollection = lambda path, *, mode: (path, mode)
    stand_in.Loader = lambda **options: Loader(cells, **options)
    monkeypatch.setitem(sys.modules, "annbatch", stand_in)
    loader = open_annbatch(tmp_path / "x.zarr", batch_size=16, shuffle=False)
    assert loader.collection == (str(tmp_path / "x.zarr"), "r")
    assert loader.options == {"to_torch": False, "preload_to_gpu": False, "batch_size": 16, "shuffle": False}
    assert sum(batch.n_cells for batch in annbatch_batches(loader, vocabulary)) == 60
