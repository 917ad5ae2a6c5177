"""Ranks, which look like counts; counts that are read as counts; and datasets with few of the model's genes."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import scdiva as sd


@pytest.fixture(scope="module")
def counted():
    """Counts of 400 genes in 150 cells: rates that differ by gene, cell and type, drawn as molecules are."""
    adata = sd.datasets.toy(150, 400, rng=2)
    rng = np.random.default_rng(0)
    rate = rng.lognormal(-0.5, 1.6, 400) * rng.lognormal(0, 0.4, (150, 1)) * rng.gamma(4, 0.25, (150, 400))
    adata.X = sp.csr_matrix(rng.poisson(rate).astype(np.float32))
    return adata


@pytest.fixture(scope="module")
def bundled():
    """The model that a call without one loads, half a second each time."""
    return sd.models.load_model(device="cpu")


@pytest.fixture(scope="module")
def embed(bundled):
    def call(adata, **options):
        return sd.tl.embed(adata, bundled, **options)

    return call


@pytest.fixture
def cells(counted):
    return counted.copy()


def per_cell(x, change):
    """Change the values above zero of each cell."""
    x = sp.csr_matrix(x, dtype=np.float64)
    for start, stop in zip(x.indptr[:-1], x.indptr[1:], strict=True):
        x.data[start:stop] = change(x.data[start:stop])
    x.eliminate_zeros()
    return x


def ranked(values, how):
    from scipy.stats import rankdata

    return rankdata(values, how)


def without_warnings(adata, embed):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="the data have .* of the .* genes")
        embed(adata)


@pytest.mark.fault("ranks as counts")
@pytest.mark.parametrize("how", ["ordinal", "min", "max", "average", "dense"])
@pytest.mark.parametrize("order", ["rising", "falling"])
def test_ranks_within_cells(cells, embed, refused, how, order):
    sign = 1 if order == "rising" else -1
    cells.X = per_cell(cells.X, lambda values: ranked(sign * values, how))
    largest = cells.X.max()
    if how == "dense" and largest < 40:
        cells.X = per_cell(cells.X, lambda values: ranked(values + np.arange(len(values)) / 1e3, how))
    refused(embed, cells, ValueError, "holds ranks of genes within each cell", "layer=", "input='counts'")


# --- counts stay counts ----------------------------------------------------------------------------------------------
@pytest.mark.fault("ranks as counts")
@pytest.mark.parametrize("depth", [1.0, 0.05])
@pytest.mark.parametrize("n_cells", [3, 40, 150])
def test_counts_at_any_depth_are_counts(cells, embed, depth, n_cells):
    cells = cells[:n_cells].copy()
    kept = np.random.default_rng(0).binomial(cells.X.data.astype(int), depth)
    cells.X.data = kept.astype(np.float32)
    cells.X.eliminate_zeros()
    cells = cells[cells.X.getnnz(1) > 0].copy()
    without_warnings(cells, embed)


# --- few genes -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def panel(bundled):
    """Cells with 500 of the genes that the bundled model knows, and with all of them in raw."""
    vocabulary = bundled.vocabulary
    rng = np.random.default_rng(0)
    rows = np.sort(rng.permutation(vocabulary.n_genes)[:15_000])
    x = sp.random(30, 15_000, density=0.1, format="csr", random_state=0, data_rvs=lambda n: rng.poisson(1, n) + 1.0)
    import anndata as ad

    whole = ad.AnnData(x.astype(np.float32))
    whole.var_names, whole.obs_names = vocabulary.symbols[rows], [f"cell{i}" for i in range(30)]
    whole.obs["batch"] = ["one", "two"] * 15
    few = whole[:, :500].copy()
    few.raw = whole
    return few


CALLS = {
    "tl.embed": lambda a, m: sd.tl.embed(a, m, empty="nan"),
    "tl.gene_embedding": lambda a, m: sd.tl.gene_embedding(a, m),
    "tl.integrate": lambda a, m: sd.tl.integrate(a, "batch", model=m, steps=1, rng=0, device="cpu"),
    "tl.impute": lambda a, m: sd.tl.impute(a, model=m, rng=0),
    "tl.generate": lambda a, m: sd.tl.generate(a, 2, m, rng=0),
}


@pytest.mark.fault("few genes")
@pytest.mark.parametrize("name", CALLS)
def test_few_genes_are_warned_of(panel, bundled, name):
    said = r"the data have 500 of the 19,623 genes that the model knows, \d% of them by entropy: .* about 0\.\d"
    with pytest.warns(UserWarning, match=said) as found:
        CALLS[name](panel.copy(), bundled)
    ours = [one for one in found if "genes that the model knows" in str(one.message)]
    assert {Path(one.filename).name for one in ours} == {Path(__file__).name}  # the line that called: shown there once
    assert len({str(one.message) for one in ours}) == 1
