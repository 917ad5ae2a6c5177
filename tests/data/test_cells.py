from __future__ import annotations

import warnings

import anndata as ad
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scdiva.data.cells import log_normalised, open_cells, restricted
from scdiva.tokenizer.serialize import score_denominator
from scdiva.tokenizer.vocabulary import Vocabulary


def slow_cells(adata, vocabulary, max_length=1200):
    """Each cell on its own: dense normalisation in float64, then a lexicographic sort."""
    denominator = score_denominator(vocabulary.entropy)
    tokens = vocabulary.match(adata.var_names).tokens
    for cell in adata.X.toarray().astype(np.float64):
        v = np.zeros(len(denominator))
        np.add.at(v, tokens[tokens >= 0], cell[tokens >= 0])
        v = np.log1p(v / cell.sum() * 1e4).astype(np.float32)
        order = np.lexsort((np.arange(len(v)), -(v / denominator)))
        order = order[v[order] > 0][:max_length]
        yield order, v[order]


def as_lists(source, n_cells=7):
    """Row → (tokens, values)."""
    out = {}
    for rows, (indptr, tokens, values) in source.windows(n_cells):
        assert len(rows) == len(indptr) - 1
        assert len(tokens) == len(values) == indptr[-1]
        for row, start, stop in zip(rows.tolist(), indptr[:-1], indptr[1:], strict=True):
            assert row not in out
            out[row] = (tokens[start:stop].tolist(), values[start:stop].tolist())
    return out


@pytest.mark.parametrize("max_length", [1200, 9])
def test_windows_equal_the_slow_way(cells, vocabulary, max_length):
    source = open_cells(cells, vocabulary, max_length=max_length, block_rows=16)
    assert (source.n_obs, source.kind, source.report["n_mapped"]) == (60, "counts", 78)
    got = as_lists(source)
    for row, (tokens, values) in enumerate(slow_cells(cells, vocabulary, max_length)):
        assert got[row][0] == tokens.tolist()
        np.testing.assert_allclose(got[row][1], values, rtol=2e-7)
    matched = ~cells.var_names.isin(["NOGENE1", "NOGENE2"])
    np.testing.assert_array_equal(vocabulary.symbols[source.tokens[matched] - 3], cells.var_names[matched])
    assert (source.tokens[~matched] == -1).all()
    np.testing.assert_array_equal(source.measured_tokens, np.sort(source.tokens[matched]))
    np.testing.assert_array_equal(source.lengths, (cells.X[:, matched] > 0).sum(1).A1)


@pytest.mark.parametrize("n_cells", [1, 7, 1000])
@pytest.mark.parametrize("block_rows", [1, 16, 4096])
def test_window_and_block_sizes_change_nothing(cells, vocabulary, n_cells, block_rows):
    source = open_cells(cells, vocabulary, block_rows=block_rows)
    assert as_lists(source, n_cells) == as_lists(open_cells(cells, vocabulary))
    sizes = [len(rows) for rows, _ in source.windows(n_cells)]
    assert all(n_cells <= size < n_cells + block_rows for size in sizes[:-1])
    rows = np.concatenate([rows for rows, _ in source.windows(n_cells, 11, 29)])
    np.testing.assert_array_equal(rows, np.arange(11, 29))


@pytest.mark.parametrize(
    "change",
    [
        lambda a: ad.AnnData(da.from_array(a.X.toarray(), chunks=(13, 80)).map_blocks(sp.csr_matrix), a.obs, a.var),
        lambda a: ad.AnnData(a.X, a.obs, a.var.assign(symbol=a.var_names).set_axis([f"g{i}" for i in range(80)])),
        lambda a: ad.AnnData(np.zeros(a.shape), a.obs, a.var, layers={"counts": a.X}),
        lambda a: a[:, np.random.default_rng(1).permutation(80)],
    ],
)
def test_storage_and_column_order_change_no_bit(cells, vocabulary, change):
    changed = change(cells)
    options = {"layer": "counts" if "counts" in changed.layers else None}
    options["gene_ids"] = "symbol" if "symbol" in changed.var else None
    assert as_lists(open_cells(changed, vocabulary, **options)) == as_lists(open_cells(cells, vocabulary))


def test_empty_cells_are_refused_by_name_or_left_out(cells, vocabulary):
    x, empty = cells.X.toarray(), [0, 14, 15, 16, 17, 18, 19, 20, 59]
    x[empty] = 0
    adata = ad.AnnData(x, cells.obs, cells.var)
    with pytest.raises(ValueError, match=r"9 of 60 cells .*'s0c0', 's0c14'") as error:
        open_cells(adata, vocabulary)
    scope = {"adata": adata, "np": np}
    exec(str(error.value).split("Remove them: ")[1].split("; with")[0], scope)  # the advice works
    assert open_cells(scope["adata"], vocabulary).n_obs == 51
    source = open_cells(adata, vocabulary, empty="nan", block_rows=14)
    expected = as_lists(open_cells(cells, vocabulary))
    assert source.n_obs == 60
    assert as_lists(source) == {row: expected[row] for row in range(60) if row not in empty}
    adata.X[0, cells.var_names.get_loc("NOGENE1")] = 4
    with pytest.raises(ValueError, match=r"9 of 60 cells.*vocabulary.*empty='nan'"):
        open_cells(adata, vocabulary)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gene_ids": "symbol"}, KeyError, "no column 'symbol'"),
        ({"empty": "drop"}, ValueError, "empty must be"),
        ({"max_length": 0}, ValueError, "max_length must be at least 1"),
        ({"data": "nowhere.h5ad"}, FileNotFoundError, "nowhere"),
    ],
)
def test_wrong_calls_say_what_to_do_and_change_nothing(cells, vocabulary, options, error, message):
    before = cells.copy()
    with pytest.raises(error, match=message):
        open_cells(options.pop("data", cells), vocabulary, **options)
    with pytest.raises(ValueError, match="n_cells must be at least 1"):
        next(open_cells(cells, vocabulary).windows(0))
    assert (cells.X != before.X).nnz == 0
    assert list(cells.var) == list(before.var)
    assert not cells.uns


def test_expression_needs_no_entropy(cells):
    human = Vocabulary.human()
    human = human.with_entropy(np.full(human.n_genes, np.nan))
    with pytest.raises(ValueError, match="holds no entropies"):
        open_cells(cells, human)
    source = open_cells(cells, human, ranked=False)
    (start, block), *later_blocks = source.expression_blocks()
    assert start == 0
    assert not later_blocks
    assert block.shape == (60, human.n_genes + 3)
    with pytest.raises(ValueError, match="opened to be counted"):
        source.read(0, 1)


def test_cells_of_another_species_among_human_ones_are_told_of(cells, vocabulary):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_cells(cells, vocabulary)
    mouse_counts = np.zeros((61, 40), dtype=np.float32)
    mouse_counts[60] = 1  # 40 mouse genes, and two human ones
    x = sp.vstack([cells.X, sp.csr_matrix((np.ones(2), ([0, 0], [3, 7])), shape=(1, cells.n_vars))])
    names = [*cells.var_names, *(f"foreign{i}" for i in range(40))]
    mixed = ad.AnnData(sp.hstack([x, sp.csr_matrix(mouse_counts)]).tocsr(), var=pd.DataFrame(index=names))
    with pytest.warns(UserWarning, match="1 of 61 cells.*'60'.*half"):
        open_cells(mixed, vocabulary)


def test_all_genes_as_logarithms_of_counts_per_ten_thousand(cells, vocabulary, tmp_path):
    """Of counts and of logarithms of any total, known genes or not, in memory and in files."""
    cells.X[4] = 0
    cells.layers["log"] = (cells.X / 2).log1p()
    counts = cells.X.toarray()
    expected = np.log1p(1e4 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))
    for where in ({}, {"layer": "log", "input": "lognorm"}):
        values, var = log_normalised(cells, **where)
        np.testing.assert_allclose(values.toarray(), expected, rtol=1e-6)
        assert var.equals(cells.var)
    assert values[4].nnz == 0
    cells.write_h5ad(tmp_path / "cells.h5ad")
    for data in (cells, tmp_path / "cells.h5ad"):
        source = open_cells(data, vocabulary, block_rows=16, empty="nan")
        assert (source.log_normalised() != log_normalised(cells)[0]).nnz == 0
        assert source.var.index.equals(var.index)
        source.close()


# --- cells read as if their data had no other genes -------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:only")
@pytest.mark.parametrize("lognorm", [False, True])
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000), n=st.integers(1, 77))
def test_restricted_cells_are_those_of_data_without_the_other_columns(cells, vocabulary, lognorm, seed, n):
    """Two columns are of one gene. Few genes leave some cells empty; all leave out the unknown ones."""
    data = cells.copy()
    if lognorm:
        counts = data.X.toarray()
        data.X = sp.csr_matrix(np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True)).astype(np.float32))
    names = data.var_names.to_numpy().copy()
    first, second = np.flatnonzero(~data.var_names.isin(["NOGENE1", "NOGENE2"]))[:2]
    names[second] = names[first]
    data.var["symbol"] = names
    how = {"gene_ids": "symbol", "empty": "nan"}
    source = open_cells(data, vocabulary, block_rows=16, **how)
    before = as_lists(source)
    tokens = np.random.default_rng(seed).choice(source.measured_tokens, n, replace=False)
    part = restricted(source, tokens)
    columns = data[:, np.isin(source.tokens, tokens)].copy()
    n_genes = columns.X.astype(bool).sum(axis=1).A1
    np.testing.assert_array_equal(part.lengths, n_genes)
    np.testing.assert_array_equal(part.measured_tokens, np.sort(tokens))
    assert (part.n_obs, part.kind) == (source.n_obs, source.kind)
    if n > 10:  # fewer counts may look like another scale
        expected = open_cells(columns, vocabulary, **how, input="lognorm" if lognorm else "counts")
        assert as_lists(part) == as_lists(expected)
        unrestricted = restricted(expected, expected.measured_tokens)
        assert unrestricted is expected
    assert set(as_lists(part)) == set(np.flatnonzero(n_genes).tolist())
    assert as_lists(source) == before
