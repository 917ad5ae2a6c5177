"""Ranks, which look like counts; counts that are read as counts; and datasets with few of the model's genes."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import scdiva as sd

DATA = Path(__file__).parents[3] / "shared" / "data"


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


def logs(values, total=1e4):
    return np.log1p(values / values.sum() * total)


def without_warnings(adata, embed):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="the data have .* of the .* genes")
        embed(adata)


READ = {
    "tl.embed": sd.tl.embed,
    "pp.gene_entropy": lambda a, _: sd.pp.gene_entropy(a),
    "tl.grn": lambda a, m: sd.tl.grn(a, model=m),
    "tl.impute": lambda a, m: sd.tl.impute(a, model=m, rng=0),
}


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


@pytest.mark.fault("ranks as counts")
@pytest.mark.parametrize("name", READ)
def test_ranks_are_refused_by_every_call(cells, bundled, refused, name):
    cells.X = per_cell(cells.X, lambda values: ranked(values, "average"))
    refused(lambda a: READ[name](a, bundled), cells, ValueError, "holds ranks of genes within each cell")


@pytest.mark.fault("ranks as counts")
@pytest.mark.parametrize("what", ["of all genes", "as shares", "scdiva's own"])
def test_other_ranks(cells, embed, refused, what):
    layer = None
    if what == "scdiva's own":
        sd.pp.entropy_serialize(cells)
        layer = "scdiva_rank"
    elif what == "as shares":
        cells.X = per_cell(cells.X, lambda values: ranked(values, "average") / len(values))
    else:
        cells.X = np.stack([ranked(cell, "average") for cell in cells.X.toarray()])
    refused(lambda a: embed(a, layer=layer), cells, ValueError, "holds ranks of genes within each cell")


@pytest.mark.fault("log-normalised")
@pytest.mark.parametrize("factor", ["size factors", "geometric mean"])
def test_logarithms_of_scaled_counts_are_read_as_ever(cells, counted, embed, factor):
    """PF before the logarithm, scran's factors, CLR over a cell: what divides counts is undone by their total."""
    by = {"size factors": lambda v: v.sum() / 300, "geometric mean": lambda v: np.exp(np.log1p(v).sum() / 400)}[factor]
    cells.X = per_cell(cells.X, lambda values: np.log1p(values / by(values))).astype(np.float32)
    without_warnings(cells, embed)
    expected = embed(counted, copy=True).obsm["X_scdiva"]
    np.testing.assert_allclose(cells.obsm["X_scdiva"], expected, atol=1e-4)


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


@pytest.mark.fault("ranks as counts")
@pytest.mark.parametrize("rate", [0.2, 3.0, 8.0])
def test_poisson_counts_of_one_rate_are_counts(cells, embed, rate):
    cells.X = np.random.default_rng(0).poisson(rate, cells.shape).astype(np.float32)
    cells = cells[:, :150].copy()
    without_warnings(cells, embed)


@pytest.mark.fault("ranks as counts")
@pytest.mark.skipif(not DATA.is_dir(), reason="the shared data are not beside the repository")
def test_counts_of_real_studies_are_counts():
    """All of them, whole, of the first cells, of genes with most and with few counts, and thinned to a twentieth."""
    import anndata as ad

    from scdiva._validate import scan
    from scdiva.data.matrix import row_blocks

    tried = 0
    for file in sorted(DATA.glob("*/*.h5ad")):
        x = sp.csr_matrix(ad.read_h5ad(file, backed="r").X[:300])
        if (np.abs(x.data - np.rint(x.data)) > 1e-3).any():
            continue
        x.data = np.rint(x.data)
        busy = np.argsort(-np.asarray(x.sum(axis=0)).ravel(), kind="stable")
        thin = x.copy()
        thin.data = np.random.default_rng(0).binomial(x.data.astype(int), 0.05).astype(np.float32)
        for part in (x, x[:10], x[:60], x[:, busy[:100]], x[:, busy[:1000]], x[:, busy[1000:1400]], thin):
            if not part.shape[1]:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert scan(row_blocks(part), part.shape[1]).kind == "counts", file.name
            tried += 1
    assert tried > 200


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


@pytest.mark.fault("few genes")
def test_the_remedy_is_named_where_there_is_one(panel, embed):
    with pytest.warns(UserWarning, match=r"Pass use_raw=True: adata\.raw has 15,000 of them"):
        embed(panel.copy(), empty="nan")
    alone = panel.copy()
    del alone.raw
    with pytest.warns(UserWarning, match=r"as it was before genes were selected, as by sc\.pp\.highly_variable_genes"):
        embed(alone, empty="nan")


@pytest.mark.fault("few genes")
@pytest.mark.parametrize("how", ["use_raw", "file"])
def test_enough_genes_are_not(panel, embed, bundled, tmp_path, how):
    whole = panel.raw.to_adata()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the data have .* of the .* genes")
        if how == "use_raw":
            embed(panel.copy(), use_raw=True)
        else:
            whole.write_h5ad(tmp_path / "cells.h5ad")
            sd.tl.embed_file(tmp_path / "cells.h5ad", tmp_path / "out.h5ad", model=bundled)


@pytest.mark.fault("few genes")
def test_what_does_not_embed_does_not_warn(panel, bundled):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the data have .* of the .* genes")
        sd.tl.grn(panel[:, :50].copy(), "correlation", model=bundled, empty="nan")
        sd.pp.match_genes(panel.copy())
