from __future__ import annotations

import warnings

import anndata as ad
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from scdiva.data.cells import log_normalised, open_cells
from scdiva.tokenizer.serialize import score_denominator
from scdiva.tokenizer.vocabulary import Vocabulary


def slow_cells(adata, vocabulary, max_length=1200, lognorm=False):
    """Each cell on its own: dense normalisation in float64, then a lexicographic sort."""
    token_of = dict(zip(vocabulary.symbols, vocabulary.tokens, strict=True))
    denominator = score_denominator(vocabulary.entropy)
    x = adata.X.toarray().astype(np.float64)
    x = np.expm1(x) if lognorm else x
    out = []
    for cell in x:
        v = np.zeros(len(denominator))
        for name, count in zip(adata.var_names, cell, strict=True):
            if name in token_of:
                v[token_of[name]] += count
        v = np.log1p(v / max(cell.sum(), 1e-300) * 1e4).astype(np.float32)
        score = v / denominator
        order = np.lexsort((np.arange(len(v)), -score))
        order = order[v[order] > 0][:max_length]
        out.append((order, v[order]))
    return out


def as_lists(source, n_cells=7):
    """Row → (tokens, values)."""
    out = {}
    for rows, (indptr, tokens, values) in source.windows(n_cells):
        assert len(rows) == len(indptr) - 1
        assert len(tokens) == len(values) == indptr[-1]
        for row, start, stop in zip(rows.tolist(), indptr[:-1], indptr[1:], strict=True):
            assert row not in out
            out[row] = (tokens[start:stop], values[start:stop])
    return out


def assert_equal_cells(a, b):
    assert a.keys() == b.keys()
    for row in a:
        np.testing.assert_array_equal(a[row][0], b[row][0])
        np.testing.assert_array_equal(a[row][1], b[row][1])


@pytest.mark.parametrize("max_length", [1200, 9])
def test_windows_equal_the_slow_way(cells, vocabulary, max_length):
    source = open_cells(cells, vocabulary, max_length=max_length, block_rows=16)
    assert (source.n_obs, source.kind) == (60, "counts")
    got, expected = as_lists(source), slow_cells(cells, vocabulary, max_length)
    assert list(got) == list(range(60))
    for row, (tokens, values) in enumerate(expected):
        np.testing.assert_array_equal(got[row][0], tokens)
        np.testing.assert_allclose(got[row][1], values, rtol=2e-7)


def test_report_and_tokens(cells, vocabulary):
    source = open_cells(cells, vocabulary)
    known = ~cells.var_names.isin(["NOGENE1", "NOGENE2"])
    np.testing.assert_array_equal(source.tokens >= 0, known)
    np.testing.assert_array_equal(vocabulary.symbols[source.tokens[known] - 3], cells.var_names[known])
    np.testing.assert_array_equal(source.measured_tokens, np.sort(source.tokens[known]))
    np.testing.assert_array_equal(source.lengths, (cells.X[:, known] > 0).sum(1).A1)
    assert source.report["n_mapped"] == 78


@pytest.mark.parametrize("n_cells", [1, 7, 60, 1000])
@pytest.mark.parametrize("block_rows", [1, 16, 4096])
def test_window_and_block_sizes_change_nothing(cells, vocabulary, n_cells, block_rows):
    expected = as_lists(open_cells(cells, vocabulary))
    source = open_cells(cells, vocabulary, block_rows=block_rows)
    assert_equal_cells(as_lists(source, n_cells), expected)
    sizes = [len(rows) for rows, _ in source.windows(n_cells)]
    assert all(n_cells <= size < n_cells + block_rows for size in sizes[:-1])
    rows = np.concatenate([rows for rows, _ in source.windows(n_cells, 11, 29)])
    np.testing.assert_array_equal(rows, np.arange(11, 29))


@pytest.mark.parametrize(
    "change",
    [
        lambda a: ad.AnnData(a.X.tocsc(), a.obs, a.var),
        lambda a: ad.AnnData(a.X.toarray(), a.obs, a.var),
        lambda a: ad.AnnData(a.X.astype(np.int64), a.obs, a.var),
        lambda a: ad.AnnData(da.from_array(a.X.toarray(), chunks=(13, 80)).map_blocks(sp.csr_matrix), a.obs, a.var),
        lambda a: ad.AnnData(a.X, a.obs, a.var.assign(symbol=a.var_names).set_axis([f"g{i}" for i in range(80)])),
        lambda a: ad.AnnData(np.zeros(a.shape), a.obs, a.var, layers={"counts": a.X}),
        lambda a: a[:, np.random.default_rng(1).permutation(80)],
        lambda a: a[:, np.random.default_rng(2).permutation(80)].copy(),
    ],
)
def test_storage_and_column_order_change_no_bit(cells, vocabulary, change):
    expected = as_lists(open_cells(cells, vocabulary))
    changed = change(cells)
    options = {"layer": "counts" if "counts" in changed.layers else None}
    options["gene_ids"] = "symbol" if "symbol" in changed.var else None
    assert_equal_cells(as_lists(open_cells(changed, vocabulary, **options)), expected)


def test_lognormalised_cells_are_ranked_like_their_counts(cells, vocabulary):
    logs = cells.copy()
    logs.X = cells.X.multiply(1e4 / cells.X.sum(1)).tocsr().log1p()
    source = open_cells(logs, vocabulary)
    assert source.kind == "lognorm"
    got, expected = as_lists(source), as_lists(open_cells(cells, vocabulary))
    for row in expected:
        assert sorted(got[row][0]) == sorted(expected[row][0])
        np.testing.assert_allclose(np.sort(got[row][1]), np.sort(expected[row][1]), rtol=1e-5)


def test_two_columns_of_one_gene_are_summed_or_refused(cells, vocabulary):
    x = cells.X.toarray()
    extra = np.random.default_rng(3).poisson(2, (60, 1)).astype(np.float32)
    summed = x.copy()
    at = int(np.flatnonzero(cells.var_names.isin(vocabulary.symbols))[4])
    name = cells.var_names[at]
    summed[:, [at]] += extra
    gene_id = vocabulary.ensembl_ids[np.flatnonzero(vocabulary.symbols == name)[0]]
    twice = ad.AnnData(np.hstack([x, extra]), cells.obs)
    twice.var_names = [*cells.var_names, gene_id]
    assert_equal_cells(
        as_lists(open_cells(twice, vocabulary)),
        as_lists(open_cells(ad.AnnData(summed, cells.obs, cells.var), vocabulary)),
    )
    with pytest.raises(ValueError, match=f"'{name}' and '{gene_id}'"):
        open_cells(twice, vocabulary, duplicates="error")


def test_cells_without_counts_are_refused_by_name(cells, vocabulary):
    x = cells.X.toarray()
    x[[3, 50]] = 0
    adata = ad.AnnData(x, cells.obs, cells.var)
    with pytest.raises(ValueError, match=r"2 of 60 cells .*'s0c3', 's0c50'") as error:
        open_cells(adata, vocabulary)
    scope = {"adata": adata, "np": np}
    exec(str(error.value).split("Remove them: ")[1].split(". Calls with")[0], scope)  # the advice works
    assert scope["adata"].n_obs == 58
    assert open_cells(scope["adata"], vocabulary).n_obs == 58


def test_cells_of_unknown_genes_are_refused_by_name(cells, vocabulary):
    x = cells.X.toarray()
    x[[3, 50]] = 0
    x[3, cells.var_names.get_loc("NOGENE1")] = 4
    adata = ad.AnnData(x, cells.obs, cells.var)
    with pytest.raises(ValueError, match=r"2 of 60 cells.*vocabulary.*empty='nan'"):
        open_cells(adata, vocabulary)


def test_empty_nan_leaves_their_rows_out(cells, vocabulary):
    x = cells.X.toarray()
    empty = [0, 14, 15, 16, 17, 18, 19, 20, 59]
    x[empty] = 0
    source = open_cells(ad.AnnData(x, cells.obs, cells.var), vocabulary, empty="nan", block_rows=14)
    assert source.n_obs == 60
    got, expected = as_lists(source), as_lists(open_cells(cells, vocabulary))
    assert set(got) == set(range(60)) - set(empty)
    assert_equal_cells(got, {row: expected[row] for row in got})


def test_expression_needs_no_entropy(cells):
    human = Vocabulary.human()
    human = human.with_entropy(np.full(human.n_genes, np.nan))
    with pytest.raises(ValueError, match="holds no entropies"):
        open_cells(cells, human)
    source = open_cells(cells, human, ranked=False)
    (start, block), *rest = source.expression_blocks()
    assert start == 0
    assert not rest
    assert block.shape == (60, human.n_genes + 3)
    with pytest.raises(ValueError, match="opened to be counted"):
        source.read(0, 1)


def test_wrong_calls_say_what_to_do_and_change_nothing(cells, vocabulary, tmp_path):
    before = cells.copy()
    with pytest.raises(KeyError, match="no column 'symbol'"):
        open_cells(cells, vocabulary, gene_ids="symbol")
    with pytest.raises(ValueError, match="empty must be"):
        open_cells(cells, vocabulary, empty="drop")
    with pytest.raises(ValueError, match="max_length must be at least 1"):
        open_cells(cells, vocabulary, max_length=0)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_cells(tmp_path / "nowhere.h5ad", vocabulary)
    renamed = cells.copy()
    renamed.var_names = [f"GENE{i}" for i in range(80)]
    with pytest.raises(ValueError, match=r"0\.0% of the counts"):
        open_cells(renamed, vocabulary)
    source = open_cells(cells, vocabulary)
    with pytest.raises(ValueError, match="n_cells must be at least 1"):
        next(source.windows(0))
    assert (cells.X != before.X).nnz == 0
    assert list(cells.var) == list(before.var)
    assert not cells.uns


def test_cells_of_another_species_among_human_ones_are_told_of(cells, vocabulary):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_cells(cells, vocabulary)
    foreign = np.zeros((61, 40), dtype=np.float32)
    foreign[60] = 1  # 40 mouse genes, and two human ones
    x = sp.vstack([cells.X, sp.csr_matrix((np.ones(2), ([0, 0], [3, 7])), shape=(1, cells.n_vars))])
    names = [*cells.var_names, *(f"foreign{i}" for i in range(40))]
    mixed = ad.AnnData(sp.hstack([x, sp.csr_matrix(foreign)]).tocsr(), var=pd.DataFrame(index=names))
    with pytest.warns(UserWarning, match="1 of 61 cells.*'60'.*half"):
        open_cells(mixed, vocabulary)


# --- a matrix whole, log-normalised ----------------------------------------------------------------------------------
@pytest.fixture
def counts():
    return np.random.default_rng(0).poisson(1.0, (30, 12)).astype(np.float32) * 3


def test_counts_are_divided_by_their_total_whatever_the_genes_are_called(counts):
    counts[4] = 0
    adata = ad.AnnData(counts, var={"name": [f"no gene {j}" for j in range(12)]})
    values, var = log_normalised(adata)
    total = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    np.testing.assert_allclose(values.toarray(), np.log1p(counts / total * 1e4), rtol=1e-6)
    assert var is adata.var or var.equals(adata.var)
    assert values[4].nnz == 0


def test_logarithms_of_any_total_become_those_of_counts_per_ten_thousand(counts):
    expected = np.log1p(1e4 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))
    adata = ad.AnnData(sp.csr_matrix(counts), layers={"log": np.log1p(counts / 2)})
    for where in ({}, {"layer": "log", "input": "lognorm"}):
        np.testing.assert_allclose(log_normalised(adata, **where)[0].toarray(), expected, rtol=1e-6)


def test_opened_cells_give_the_same_of_any_storage(counts, cells, vocabulary, tmp_path):
    cells.write_h5ad(tmp_path / "cells.h5ad")
    expected, var = log_normalised(cells)
    for data in (cells, tmp_path / "cells.h5ad"):
        source = open_cells(data, vocabulary, block_rows=16)
        assert (source.log_normalised() != expected).nnz == 0
        assert source.var.index.equals(var.index)
        source.close()
