"""`tl.generate`: what new cells are like, what is kept of the data, what is refused, and that no cell is malformed."""

from __future__ import annotations

import anndata as ad
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import scdiva as sd
from scdiva._constants import TARGET_SUM
from scdiva.data.cells import log_normalised


def drawn(adata, model, n_cells=10, **arguments):
    return sd.tl.generate(adata, n_cells, model, **{"rng": 3} | arguments)


def same_cells(first, second):
    return (
        (first.X != second.X).nnz == 0
        and (first.layers["counts"] != second.layers["counts"]).nnz == 0
        and first.obs.equals(second.obs)
    )


def source_rows(generated, adata):
    return adata.obs_names.get_indexer(generated.obs["scdiva_source"])


@pytest.fixture(scope="module")
def generated(adata, headed):
    """Ten cells of each type; never written to."""
    return drawn(adata, headed, groupby="cell_type")


def test_what_is_documented_is_returned(adata, headed, hashed):
    was = hashed(adata)
    generated = drawn(adata, headed, groupby="cell_type", groups=["type C", "type A"], n_cells=4)
    assert hashed(adata) == was
    assert generated.shape == (8, 55)
    assert isinstance(generated.X, sp.csr_matrix)
    assert generated.X.dtype == generated.layers["counts"].dtype == np.float32
    assert list(generated.obs) == ["scdiva_source", "cell_type"]
    assert generated.obs_names.is_unique
    assert list(generated.obs["cell_type"]) == ["type C"] * 4 + ["type A"] * 4
    assert list(generated.obs["cell_type"].cat.categories) == ["type A", "type C"]
    pd.testing.assert_frame_equal(generated.var, adata.var.iloc[:55])
    notes = generated.uns["scdiva"]["generate"]
    assert set(generated.uns) == {"scdiva"}
    assert list(notes["groups"]) == ["type C", "type A"]
    assert (notes["model"], notes["input"], notes["groupby"]) == ("ScDiVa", "counts", "cell_type")
    assert (notes["from_state"], notes["fixed"]) == (True, {})


def test_a_new_cell_shows_as_many_genes_as_its_source(generated, adata):
    """One gene fewer if the source expresses all: a gene that is always present has no finite log-odds."""
    rows = source_rows(generated, adata)
    lengths = (adata.X[rows][:, :55].toarray() > 0).sum(1)
    np.testing.assert_array_equal(np.diff(generated.X.indptr), np.minimum(lengths, 54))
    assert (adata.obs["cell_type"].to_numpy()[rows] == generated.obs["cell_type"].to_numpy()).all()


def test_counts_are_whole_and_x_is_their_log_normalisation(generated, adata):
    """Normalised, new cells have the sum that their sources have over the genes that the model knows."""
    counts, x = generated.layers["counts"].toarray(), generated.X.toarray()
    np.testing.assert_array_equal(counts, counts.round())
    np.testing.assert_array_equal(generated.layers["counts"].indices, generated.X.indices)
    assert generated.layers["counts"].data.min() >= 1
    totals = np.expm1(log_normalised(adata)[0][:, :55].toarray()).sum(1)[source_rows(generated, adata)]
    np.testing.assert_allclose(x, np.log1p(totals[:, None] * counts / counts.sum(1, keepdims=True)), rtol=1e-4)


def module_means(cells, module, by):
    """Mean log-normalised expression of each module of the truth (rows) in each group of cells."""
    x = cells.X.toarray() if sp.issparse(cells.X) else cells.X
    of_module = [x[:, module == number].mean(1) for number in range(module.max() + 1)]
    return pd.DataFrame({k: pd.Series(v).groupby(np.asarray(by)).mean() for k, v in enumerate(of_module)}).T


@pytest.fixture(scope="module")
def typed():
    """Log-normalised cells whose modules are known, those means by type, and the module of each gene."""
    cells = sd.datasets.toy(160, 200, rng=1)
    cells.X = log_normalised(cells)[0]
    return cells, module_means(cells, cells.uns["truth"]["module"], cells.obs["cell_type"])


def test_groups_have_the_genes_of_their_types(typed):
    """A type's module stands above its level in other types by most of what it does in the data; bundled model."""
    cells, real = typed
    generated = sd.tl.generate(cells, 40, groupby="cell_type", rng=0)
    module = cells.uns["truth"]["module"][cells.var_names.get_indexer(generated.var_names)]
    means = module_means(generated, module, generated.obs["cell_type"]).to_numpy()
    diagonal, off_diagonal = np.eye(4, dtype=bool), ~np.eye(4, dtype=bool)
    gap, real_gap = (t[diagonal] - t[off_diagonal].reshape(4, 3).max(1) for t in (means, real.to_numpy()))
    assert (gap > 0.6 * real_gap).all()
    assert np.abs(means - real.to_numpy()).max() < 0.6


def test_between_two_groups_cells_go_from_one_to_the_other(typed):
    cells, real = typed
    generated = sd.tl.generate(
        cells, 40, groupby="cell_type", between=("type A", "type B"), fraction=[0.0, 0.5, 1.0], rng=0
    )
    assert list(generated.obs["scdiva_fraction"]) == [0.0] * 40 + [0.5] * 40 + [1.0] * 40
    assert set(generated.obs["cell_type"]) == {"type A to type B"}
    of_source = cells.obs["cell_type"].to_numpy()[source_rows(generated, cells)]
    assert set(of_source[:40]) == {"type A"}
    assert set(of_source[80:]) == {"type B"}
    module = cells.uns["truth"]["module"][cells.var_names.get_indexer(generated.var_names)]
    means = module_means(generated, module, generated.obs["scdiva_fraction"]).loc[[0, 1]]
    assert np.abs(means[0.0] - real.loc[[0, 1], "type A"]).max() < 0.6
    assert np.abs(means[1.0] - real.loc[[0, 1], "type B"]).max() < 0.6
    slope = means.loc[1] - means.loc[0]
    assert slope[0.0] + 0.5 < slope[0.5] < slope[1.0] - 0.5


@pytest.mark.parametrize("how", [{}, {"from_state": False}])
def test_fixed_genes_have_their_values_in_every_cell(adata, headed, how):
    one, two, absent = adata.var_names[[3, 20, 7]]
    generated = drawn(adata, headed, n_cells=12, fixed={one: 2.0, two: 4.5, absent: 0}, **how)
    x = generated.to_df()
    np.testing.assert_allclose(x[one], 2.0, rtol=1e-6)
    np.testing.assert_allclose(x[two], 4.5, rtol=1e-6)
    assert (x[absent] == 0).all()
    assert (np.expm1(x).sum(1) < TARGET_SUM * 1.001).all()
    totals = np.expm1(log_normalised(adata)[0][:, :55].toarray()).sum(1)[source_rows(generated, adata)]
    assert how or np.expm1(x).sum(1).to_numpy() == pytest.approx(totals, rel=1e-3)  # fixed genes are part of the total
    assert (generated[:, [one, two]].layers["counts"].toarray() >= 1).all()
    lengths = (adata.X[source_rows(generated, adata)][:, :55].toarray() > 0).sum(1)
    limit = headed.config.max_length if how else 54
    np.testing.assert_array_equal(np.diff(generated.X.indptr), np.minimum(lengths, limit))


@settings(max_examples=25, deadline=None)
@given(
    how=st.fixed_dictionaries({"from_state": st.booleans(), "rng": st.integers(0, 99)}),
    fixed=st.dictionaries(st.integers(0, 54), st.sampled_from([0.0, 0.5, 3.0]), max_size=4),
    fraction=st.none() | st.floats(0, 1),
)
def test_no_cell_is_malformed(adata, headed, how, fixed, fraction):
    """Genes are unique and in the panel, and values are positive and finite."""
    groups = {} if fraction is None else {"between": ("type A", "type D"), "fraction": fraction}
    fixed = {adata.var_names[gene]: value for gene, value in fixed.items()}
    generated = drawn(adata, headed, n_cells=3, groupby="cell_type", fixed=fixed, **groups, **how)
    assert generated.X.has_canonical_format
    for stored in (generated.X, generated.layers["counts"]):
        assert np.isfinite(stored.data).all()
        assert (stored.data > 0).all()
    assert (np.diff(generated.X.indptr) > 0).all()
    np.testing.assert_array_equal(generated.layers["counts"].data, generated.layers["counts"].data.round())


def test_the_map_and_a_file_take_the_cells(generated, adata, tmp_path):
    real = adata[:, generated.var_names].copy()
    fig = sd.pl.generated(real, generated, color="cell_type", return_fig=True)
    assert len(fig.axes) == 2
    plt.close(fig)
    generated.write_h5ad(tmp_path / "cells.h5ad")
    assert same_cells(ad.read_h5ad(tmp_path / "cells.h5ad"), generated)


def test_raw_values_layers_and_other_names_are_read(adata, headed):
    plain = drawn(adata, headed)
    data = adata.copy()
    data.layers["counts"] = data.X.copy()
    data.X = data.X.toarray() - 3
    assert same_cells(drawn(data, headed, layer="counts"), plain)
    data = adata.copy()
    data.raw = adata
    data = data[:, :40].copy()
    assert same_cells(drawn(data, headed, use_raw=True), plain)
    with pytest.raises(ValueError, match=r"not a gene of adata; adata\.raw has it: pass use_raw=True"):
        drawn(data, headed, fixed={adata.var_names[50]: 1.5})
    renamed = adata.copy()
    renamed.var["symbol"], renamed.var_names = adata.var_names.to_numpy(), [f"g{i}" for i in range(60)]
    sd.pp.match_genes(renamed, headed.vocabulary, gene_ids="symbol")
    cells = drawn(renamed, headed, fixed={"g2": 1.5})
    np.testing.assert_allclose(cells[:, "g2"].X.toarray(), 1.5)


def test_cells_of_one_gene_are_not_generated(adata, headed):
    data = adata[adata.X[:, [0]].toarray().ravel() > 0, :1].copy()
    with pytest.raises(ValueError, match=r"^adata has 1 of the genes that the model knows\. "):
        drawn(data, headed, n_cells=2)


BETWEEN = {"groupby": "cell_type", "between": ("type A", "type B")}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (BETWEEN | {"fraction": np.nan}, "fraction must lie in"),
        (BETWEEN | {"fraction": []}, "fraction must lie in"),
        ({"fraction": 0.5}, r"fraction .*between=\(one, two\)"),
        ({"groups": "type A"}, "groups or between .*column"),
        ({"between": ("type A", "type B")}, "groups or between .*column"),
        ({"groupby": "cell_type", "groups": []}, "groups is empty"),
        ({"groupby": "cell_type", "groups": ["type A", "T"]}, "1 of 2 groups.*'T'; there are 'type A', 'type B'"),
        ({"groupby": "cell_type", "between": ("type A",)}, "between must name two groups, got 1"),
        (BETWEEN | {"groups": "type A"}, "Give groups or between, not both"),
        ({"groupby": "known", "layer": "blank"}, "cell of 'no'"),
        ({"fixed": {57: 1.0}}, "known to the model"),
        ({"fixed": {0: -1.0}}, "0 or more, got -1.0"),
        ({"fixed": {0: np.nan}}, "0 or more, got nan"),
        ({"fixed": {0: 9.0, 1: 9.0}}, "stand for 16,204 of the 10,000 counts"),
        ({"fixed": dict.fromkeys(range(54), 0.0)}, "fixed leaves 1 of the genes"),
        ({"fixed": dict.fromkeys(range(40), 1.0), "from_state": False}, "fixed shows 40 genes, and .* 40"),
        ({"n_steps": 4}, "all at once: leave out n_steps"),
        ({"prompt": "genes"}, "leave out prompt"),
    ],
)
def test_refused_calls_say_why(adata, headed, hashed, arguments, match):
    data = adata.copy()
    data.obs["known"] = np.where(np.arange(90) < 5, "no", "yes")
    data.layers["blank"] = data.X.toarray() * ((np.arange(90) > 4)[:, None] | (np.arange(60) > 54))
    if "fixed" in arguments:
        arguments = arguments | {"fixed": {data.var_names[k]: value for k, value in arguments["fixed"].items()}}
    was = hashed(data)
    with pytest.raises(ValueError, match=match):
        sd.tl.generate(data, **{"n_cells": 2, "model": headed} | arguments)
    assert hashed(data) == was
