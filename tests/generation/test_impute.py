"""`tl.impute`: what is written where, what stays, what is refused, and that expected values follow the truth."""

from __future__ import annotations

import warnings

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import scdiva as sd
from scdiva.data.cells import log_normalised, open_cells

KEY = "scdiva_imputed"


def imputed(adata, model, genes=None, **arguments):
    """Expected values and their standard deviations."""
    done = sd.tl.impute(adata, genes, model, copy=True, **{"rng": 3} | arguments)
    assert (KEY in done.layers, KEY in done.obsm) == (genes is None, genes is not None)
    if genes is None:
        return done.layers[KEY], done.layers[KEY + "_sd"]
    return done.obsm[KEY], done.obsm[KEY + "_sd"]


def test_what_is_documented_is_written(adata, headed):
    data = adata.copy()
    assert sd.tl.impute(data, model=headed, rng=3) is None
    for key in (KEY, KEY + "_sd"):
        assert isinstance(data.layers[key], np.ndarray)
        assert data.layers[key].dtype == np.float32
        assert (data.layers[key][:, :55] >= 0).all()
        assert np.isnan(data.layers[key][:, 55:]).all()  # five genes are not known to the model
    notes = data.uns["scdiva"][KEY]
    assert (notes["n_genes"], notes["keep_observed"], notes["input"], notes["model"]) == (55, True, "counts", "ScDiVa")


def test_observed_values_are_kept_and_have_no_spread(adata, headed):
    values = log_normalised(adata)[0].toarray()[:, :55]
    observed = values > 0
    mean, sd_ = (layer[:, :55] for layer in imputed(adata, headed))
    np.testing.assert_allclose(mean[observed], values[observed], rtol=1e-5)
    assert (sd_[observed] == 0).all()
    assert (sd_[~observed] > 0).all()
    free, spread = (layer[:, :55] for layer in imputed(adata, headed, keep_observed=False))
    np.testing.assert_array_equal(free[~observed], mean[~observed])
    assert (spread > 0).all()
    assert (free[observed] != mean[observed]).mean() > 0.99


@pytest.mark.parametrize("name", ["headed", "querying", "reading"])
def test_some_genes_have_the_values_that_they_have_among_all(adata, request, name):
    headed = request.getfixturevalue(name)
    full = imputed(adata, headed)
    names = list(adata.var_names[[12, 3]])
    for genes, columns in ((names, [12, 3]), (names[0], [12]), (np.array(names), [12, 3]), (names * 2, [12, 3])):
        for part, every in zip(imputed(adata, headed, genes), full, strict=True):
            assert list(part.columns) == list(adata.var_names[columns])
            assert (part.dtypes == np.float32).all()
            assert part.index.equals(adata.obs_names)
            np.testing.assert_allclose(part, every[:, columns], rtol=1e-5, atol=1e-6)


def test_few_genes_have_the_same_values_whatever_else_is_asked_for():
    """The bundled model's state is wider than the components that are fitted to, so that a draw decides which.

    One of the genes is expressed by two cells, too few for a spread of its own.
    """
    cells = sd.datasets.toy(120, 200, rng=1)
    counts = cells.X.tolil()
    counts[2:, 3] = 0
    counts[:2, 3] = 2
    cells.X = counts.tocsr()
    full = imputed(cells, "scdiva-mini")[0]
    for columns in ([3], [190, 3], [77], [10, 11, 12]):
        part = imputed(cells, "scdiva-mini", list(cells.var_names[columns]))[0]
        np.testing.assert_allclose(part, full[:, columns], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", [None, [3]])
def test_an_earlier_result_of_that_name_is_replaced_whatever_its_form(adata, headed, first):
    data = adata.copy()
    for genes in (first, [12] if first is None else None):
        sd.tl.impute(data, None if genes is None else list(adata.var_names[genes]), headed)
    assert (KEY in data.layers, f"{KEY}_sd" in data.layers) == (first is not None,) * 2
    assert (KEY in data.obsm, f"{KEY}_sd" in data.obsm) == (first is None,) * 2
    assert data.uns["scdiva"][KEY]["n_genes"] == (1 if first is None else 55)


def test_raw_values_are_read_for_the_genes_that_adata_has(adata, headed):
    data = adata.copy()
    data.raw = adata
    data = data[:, :20].copy()
    data.X = np.full(data.shape, -1.0, dtype=np.float32)
    mean, spread = imputed(data, headed, use_raw=True)
    full, full_spread = imputed(adata, headed)
    np.testing.assert_allclose(mean, full[:, :20], rtol=1e-5)
    np.testing.assert_allclose(spread, full_spread[:, :20], rtol=1e-5, atol=1e-6)
    for at in (4, 25):  # the second is a gene of raw alone
        one, _ = imputed(data, headed, adata.var_names[at], use_raw=True)
        np.testing.assert_allclose(one[adata.var_names[at]], full[:, at], rtol=1e-5)
    with pytest.raises(ValueError, match=r"not in adata\.var_names.*adata\.raw has it: pass use_raw=True"):
        sd.tl.impute(data, adata.var_names[25], headed)
    with pytest.raises(ValueError, match=r"not in adata\.raw\.var_names"):
        sd.tl.impute(data, "no gene", headed, use_raw=True)


def test_a_cell_with_a_single_gene_has_finite_values(adata, headed):
    """If that gene is masked, the cell has no visible gene for its state."""
    data = adata.copy()
    counts = data.X.toarray()
    counts[0] = 0
    counts[0, 3] = 5
    data.X = sp.csr_matrix(counts)
    mean, spread = imputed(data, headed)
    assert np.isfinite(mean[:, :55]).all()
    assert np.isfinite(spread[:, :55]).all()


def test_one_gene_has_all_counts_of_each_cell(adata, reading):
    data = adata[:, :1].copy()
    data = data[data.X.toarray().ravel() > 0].copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        mean, spread = imputed(data, reading, keep_observed=False)
    np.testing.assert_allclose(mean, np.log1p(1e4), rtol=0.02)
    assert (spread >= 0).all()


def test_identical_cells_have_the_same_values(adata, headed):
    data = ad.AnnData(sp.vstack([adata.X[:1]] * 20, format="csr"), var=adata.var)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        mean, _ = imputed(data, headed, keep_observed=False)
    mean, observed = mean[:, :55], log_normalised(adata[:1])[0].toarray()[0, :55]
    np.testing.assert_allclose(mean, np.broadcast_to(mean[0], mean.shape), rtol=1e-3, atol=1e-4)
    assert mean[0, observed > 0].min() > mean[0, observed == 0].max()


def test_expected_values_follow_the_truth_better_than_means_do():
    """What a type shows of its modules' genes is learned from half of the cells and compared with the other half."""
    cells = sd.datasets.toy(320, 200, rng=1)
    in_module = cells.uns["truth"]["module"] >= 0
    kinds = cells.obs["cell_type"].to_numpy()
    expected = imputed(cells[:160].copy(), "scdiva-mini", keep_observed=False)[0]
    in_module &= np.isfinite(expected[0])
    counts, expected = np.expm1(log_normalised(cells)[0].toarray()[:, in_module]), expected[:, in_module]
    held = np.log1p([counts[160:][kinds[160:] == kind].mean(0) for kind in kinds[:160]])
    mean = np.log1p(counts[:160].mean(0))
    error, of_mean = (np.sqrt(np.mean((guess - held) ** 2)) for guess in (expected, mean))
    assert error < 0.75 * of_mean
    along = [np.corrcoef(expected[:, gene], held[:, gene])[0, 1] for gene in range(in_module.sum())]
    assert np.median(along) > 0.7


def test_a_gene_that_is_expressed_shows_a_count_at_least(adata, headed):
    values = log_normalised(adata)[0].toarray()[:, :55]
    observed = values > 0
    least = np.where(observed, values, np.inf).min(axis=1)
    mean, spread = (layer[:, :55] for layer in imputed(adata, headed, expressed=True))
    usual, _ = (layer[:, :55] for layer in imputed(adata, headed))
    np.testing.assert_allclose(mean[observed], values[observed], rtol=1e-5)
    assert (spread[observed] == 0).all()
    assert (spread[~observed] > 0).all()
    assert (mean >= least[:, None] - 1e-5)[~observed].all()
    assert (mean >= usual - 1e-5)[~observed].all()
    assert np.median((mean - usual)[~observed]) > 0.2
    done = sd.tl.impute(adata, model=headed, expressed=True, copy=True)
    assert done.uns["scdiva"][KEY]["expressed"] is True
    assert done.uns["scdiva"][KEY]["expressed_as"] == "Poisson"


def test_values_that_are_no_counts_have_the_mean_where_they_are_shown(adata, headed):
    """As TPM, of which a cell's smallest value is no count."""
    data, draw = adata.copy(), np.random.default_rng(0)
    data.X = log_normalised(adata)[0].astype(np.float64)
    data.X.data = np.log1p(np.expm1(data.X.data) * draw.uniform(0.7, 1.3, data.X.nnz))
    done = sd.tl.impute(data, model=headed, expressed=True, keep_observed=False, rng=3, copy=True)
    assert done.uns["scdiva"][KEY]["expressed_as"] == "mean"
    mean = done.layers[KEY]
    observed = data.X.toarray()[:, :55] > 0
    centre = [np.median(data.X.toarray()[:, gene][observed[:, gene]]) for gene in range(55)]
    assert np.corrcoef(mean[:, :55].mean(axis=0), centre)[0, 1] > 0.9
    assert abs(np.mean(mean[:, :55][observed] - data.X.toarray()[:, :55][observed])) < 0.1


@pytest.mark.parametrize(
    ("genes", "arguments", "match"),
    [
        ([], {}, "genes is empty"),
        (["nowhere", 3], {}, "1 of 2 genes .*adata.var_names.*'nowhere'"),
        ([3, 57], {}, "lacks 1 of 2 genes"),
        (None, {"layer": "blank"}, "1 of 90 cells .*vocabulary"),
    ],
)
def test_a_refused_call_leaves_all_as_it_was(adata, headed, hashed, genes, arguments, match):
    data = adata.copy()
    data.layers["blank"] = data.X.toarray() * ((np.arange(90) > 0)[:, None] | (np.arange(60) > 54))
    if genes is not None:
        genes = [data.var_names[gene] if isinstance(gene, int) else gene for gene in genes]
    was = hashed(data)
    with pytest.raises(ValueError, match=match):
        sd.tl.impute(data, genes, headed, **arguments)
    assert hashed(data) == was


def test_a_result_that_is_too_large_is_refused_before_anything_is_read(adata, headed, monkeypatch):
    monkeypatch.setattr("scdiva.generation.impute.MAX_VALUES", 5_000)
    with pytest.raises(ValueError, match=r"90 x 60 values, .*Name the genes"):
        sd.tl.impute(adata.copy(), model=headed)
    sd.tl.impute(adata.copy(), list(adata.var_names[:55]), headed)
    with pytest.raises(ValueError, match=r"90 x 58 values, .*fewer genes"):
        sd.tl.impute(adata.copy(), list(adata.var_names[:58]), headed)


@pytest.mark.filterwarnings("ignore:Variable names are not unique")
def test_few_cells_and_repeated_names_are_refused(adata, headed):
    with pytest.raises(ValueError, match=r"10 cells have a known gene; at least 20"):
        sd.tl.impute(adata[:10].copy(), model=headed)
    twice = ad.AnnData(adata.X, var=adata.var.set_axis([adata.var_names[0], *adata.var_names[:-1]]))
    with pytest.raises(ValueError, match=r"call adata.var_names_make_unique"):
        sd.tl.impute(twice, model=headed)


def test_a_table_of_what_was_imputed(adata, headed):
    genes = list(adata.var_names[[12, 3]])
    selected = sd.tl.impute(adata, genes, headed, copy=True, rng=3)
    full = sd.tl.impute(adata, model=headed, copy=True, rng=3)
    assert list(sd.get.imputed_df(selected).columns) == genes
    assert list(sd.get.imputed_df(full).columns) == list(adata.var_names[:55])
    for key in (KEY, KEY + "_sd"):
        frames = [sd.get.imputed_df(cells, genes[::-1], key=key) for cells in (selected, full)]
        pd.testing.assert_frame_equal(*frames, rtol=1e-5, atol=1e-6)
    pd.testing.assert_frame_equal(sd.get.imputed_df(selected[5:9], genes[0]), selected.obsm[KEY].iloc[5:9, :1])
    table = sd.get.imputed_df(selected)
    table.iloc[:, 0] = -1.0
    assert (selected.obsm[KEY] >= 0).all(axis=None)
    with pytest.raises(KeyError, match=r"1 of 2 genes .*call scdiva.tl.impute"):
        sd.get.imputed_df(selected, [genes[0], adata.var_names[0]])
    with pytest.raises(KeyError, match=r"did you mean 'scdiva_imputed'"):
        sd.get.imputed_df(selected, key="scdiva_imputd")


def test_a_query_head_is_read_and_a_cell_does_not_see_its_own_value(adata, querying):
    """A masked gene of a cell is predicted from other cells only."""
    from scdiva.data.batch import read_cells
    from scdiva.data.cells import open_cells
    from scdiva.generation.state_head import context_of, on_cpu, predict, states_of

    cells, _ = read_cells(open_cells(adata, querying), np.zeros(adata.n_obs, dtype=np.int64), all_genes=True)
    genes = cells.measured[[3, 12]].astype(np.int64)
    with on_cpu(querying):
        all_states = states_of(querying, cells)
        around = context_of(querying, cells, all_states, genes)
        without_genes = cells.keeping(~np.isin(cells.tokens, genes))
        states = states_of(querying, without_genes)._replace(own_row=np.arange(cells.n_cells))
        alone = predict(querying, genes, states)
        predicted = predict(querying, genes, states, around)
        values = around.values.clone()  # noqa: PD011
        values[7] += 2.0
        shifted = predict(querying, genes, states, around._replace(values=values))
    for part, changed, state_head in zip(predicted, shifted, alone, strict=True):
        assert not np.allclose(part, state_head)
        np.testing.assert_allclose(part[7], changed[7], rtol=1e-5)
        assert not np.allclose(np.delete(part, 7, axis=0), np.delete(changed, 7, axis=0))


def test_a_reader_is_averaged_with_the_heads_for_counts_only(adata, reading, monkeypatch):
    """The mean of both logarithms, scaled so that the counts of each gene remain."""
    without = {"keep_observed": False}
    averaged, spread = (layer[:, :55] for layer in imputed(adata, reading, **without))
    tpm = adata.copy()
    tpm.X = log_normalised(adata)[0]
    tpm.X.data *= np.random.default_rng(0).uniform(0.5, 1, tpm.X.nnz).astype(np.float32)
    of_tpm = imputed(tpm, reading, input="lognorm", **without)[0][:, :55]
    readings = []
    original = sd.generation.imputation.read_counts
    monkeypatch.setattr(
        sd.generation.imputation,
        "read_counts",
        lambda *arguments: readings.append(original(*arguments)) or readings[-1],
    )
    assert not np.isnan(of_tpm).any()
    imputed(tpm, reading, input="lognorm", **without)
    assert not readings
    again = imputed(adata, reading, **without)[0][:, :55]
    np.testing.assert_array_equal(averaged, again)
    assert len(readings) == 10
    monkeypatch.setattr(sd.generation.imputation, "read_counts", lambda *_: None)
    heads = imputed(adata, reading, **without)[0][:, :55]
    assert not np.allclose(heads, averaged, rtol=0.01)
    np.testing.assert_allclose(np.expm1(heads).sum(axis=0), np.expm1(averaged).sum(axis=0), rtol=1e-4)
    assert (spread > 0).all()


def test_counts_of_summed_cells_are_counts(adata, headed):
    """No gene of such a cell has one count, so the value of one count follows from its total."""
    cells, factors = adata.copy(), np.random.default_rng(0).integers(2, 4, adata.n_vars)
    cells.X = sp.csr_matrix(cells.X.toarray() * factors, dtype=np.float32)
    data = sd.tl.impute(cells, None, headed, expressed=True, rng=3, copy=True)
    assert data.uns["scdiva"][KEY]["expressed_as"] == "Poisson"
    source, rows = open_cells(cells, headed), np.arange(adata.n_obs)[::-1]
    indptr, _, values = source.read(0, adata.n_obs)
    unit = source.value_of_one_count(values, indptr, rows)
    np.testing.assert_allclose(unit, 1e4 / cells.X.toarray().sum(axis=1)[rows])


def test_rounded_counts_per_million_are_read_as_the_counts(adata, headed):
    cells = adata.copy()
    cells.X = sp.csr_matrix(np.rint(1e6 * adata.X.toarray() / adata.X.sum(axis=1).reshape(-1, 1)), dtype=np.float32)
    of_counts, of_rounded = (imputed(data, headed, expressed=True)[0][:, :55] for data in (adata, cells))
    np.testing.assert_allclose(of_counts, of_rounded, rtol=1e-3, atol=1e-3)
    cells.X.data = np.rint(cells.X.data * np.random.default_rng(0).uniform(0.5, 2, cells.X.nnz)).astype(np.float32)
    cells.X = sp.csr_matrix(np.rint(1e6 * cells.X.toarray() / cells.X.sum(axis=1).reshape(-1, 1)), dtype=np.float32)
    tpm = sd.tl.impute(cells, None, headed, expressed=True, rng=3, copy=True)
    assert tpm.uns["scdiva"][KEY]["expressed_as"] == "mean"


def test_a_fine_tuned_copy_has_no_reader(adata, reading):
    """Fine-tuning changes the gene codes with which the reader was trained."""
    cells = adata.copy()
    cells.obs["half"] = np.where(np.arange(cells.n_obs) % 2, "a", "b")
    new = sd.tl.integrate(cells, "half", model=reading, finetune=True, epochs=1, rng=3)
    assert (new.reader, new.config.reader) == (None, False)
    assert reading.reader is not None


def test_a_reader_does_not_run_without_other_genes(adata, reading):
    one = adata[adata[:, 0].X.toarray()[:, 0] > 0, :1].copy()
    assert np.isfinite(imputed(one, reading)[0]).all()


def test_a_mask_names_no_genes(adata, headed):
    mask = np.arange(adata.n_vars) < 3
    with pytest.raises(
        TypeError, match=rf"{adata.n_vars} of {adata.n_vars} are not text.*adata\.var_names\[genes\]"
    ) as error:
        imputed(adata, headed, mask)
    assert "did you mean" not in str(error.value)


@pytest.mark.filterwarnings("ignore:1 columns hold the counts of antibodies")
def test_a_protein_is_not_imputed(adata, headed):
    """CD4-1, an antibody, is not matched to any gene of the model, nor to the last gene."""
    x = np.hstack([adata.X.toarray() if sp.issparse(adata.X) else adata.X, np.full((adata.n_obs, 2), [[1, 4000]])])
    data = ad.AnnData(sp.csr_matrix(x.astype(np.float32)), var=pd.DataFrame(index=[*adata.var_names, "x", "x"]))
    data.var_names = [*adata.var_names, "late", f"{adata.var_names[0]}-1"]
    with pytest.raises(ValueError, match=f"'{adata.var_names[0]}-1' is read as no gene's RNA"):
        imputed(data, headed, [data.var_names[-1]])
