from __future__ import annotations

import warnings

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from scipy.stats import rankdata

from scdiva._validate import find_scale, one_count, scan
from scdiva.data.matrix import row_blocks

SCALES = {"log1p": np.log1p, "linear": lambda u: u}
OTHERS = {
    "log2": lambda u: np.log2(1 + u),
    "log10": lambda u: np.log10(1 + u),
    "log1p twice": lambda u: np.log1p(np.log1p(u)),
    "square root": np.sqrt,
    "unit length": lambda u: np.log1p(u) / np.linalg.norm(np.log1p(u), axis=1, keepdims=True),
    "scaled genes": lambda u: np.log1p(u) / np.maximum(np.log1p(u).std(0), 0.1),
}


def counts(seed: int = 0, n_cells: int = 40, n_genes: int = 300) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.negative_binomial(1, 1 / (1 + rng.lognormal(0, 1.5, n_genes)), (n_cells, n_genes)).astype(np.float64)


def scale_of(x: np.ndarray) -> str | None:
    x = x[(x > 0).any(axis=1)].astype(np.float32)
    return find_scale(x[x > 0].astype(np.float64), np.concatenate([[0], np.cumsum((x > 0).sum(1))]))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("size_factors", ["total", "scran", "none"])
@pytest.mark.parametrize("n_genes", [300, 60])
def test_counts_and_logarithms_are_distinguished(scale, size_factors, n_genes):
    """Also where genes are selected after normalisation, so that totals differ."""
    c = counts()
    total = c.sum(1, keepdims=True)
    per_cell = {"total": 1e4 / total, "scran": np.random.default_rng(1).lognormal(0, 0.3, (40, 1)), "none": 1.0}
    assert scale_of(SCALES[scale](c * per_cell[size_factors])[:, :n_genes]) == scale


@pytest.mark.parametrize("scale", SCALES)
def test_tpm_are_recognised_by_their_totals(scale):
    tpm = counts() / np.random.default_rng(1).uniform(0.5, 8, 300)
    assert scale_of(SCALES[scale](tpm * 10 / tpm.sum(1, keepdims=True))) == scale


@pytest.mark.parametrize("scale", OTHERS)
@pytest.mark.parametrize("n_genes", [300, 100])
def test_other_scales_bring_a_warning(scale, n_genes):
    x = OTHERS[scale](counts() / counts().sum(1, keepdims=True) * 1e4)[:, :n_genes]
    with pytest.warns(UserWarning, match=r"not normalised counts .*layer=|is read as counts"):
        scan(row_blocks(np.minimum(x, 14.9)), n_genes)


def test_too_few_values_have_no_scale():
    assert find_scale(np.zeros(0), np.array([0])) is None
    assert scale_of(np.log2(1 + counts(n_cells=2, n_genes=20))) is None


def test_normalised_counts_of_small_totals_are_no_logarithms():
    c = counts()[:, :100]
    x = c / c.sum(1, keepdims=True)
    with pytest.warns(UserWarning, match="read as counts"):
        assert scan(row_blocks(x), 100).kind == "counts"
    with pytest.raises(ValueError, match=r"normalised counts without a logarithm.*input='auto'"):
        scan(row_blocks(x), 100, input="lognorm")


@pytest.mark.parametrize("first", [0, 30])
def test_counts_beside_logarithms_are_refused(first):
    """A batch that was normalised before the data sets were joined, as in a public set of 20 PBMC studies."""
    mixed = counts()
    rows = np.arange(first, first + 10)
    mixed[rows] = np.log1p(mixed[rows] * 0.7)
    first_count_row = 0 if first else 10
    message = (
        rf"mixes scales: 30 cells.*first: row {first_count_row}\), 10 cells hold log-normalised values .*row {first}"
    )
    for input in ("auto", "lognorm"):
        with pytest.raises(ValueError, match=message):
            scan(row_blocks(mixed, 7), 300, input=input)


def test_the_mixture_can_be_mended_as_said():
    x = counts().astype(np.float32)
    x[:10] = np.log1p(x[:10] * 0.7)
    with pytest.raises(ValueError, match="mixes scales") as error:
        scan(row_blocks(sp.csr_matrix(x)), 300)
    mended = {"adata": ad.AnnData(sp.csr_matrix(x)), "np": np}
    exec(str(error.value).split("or here: ")[1].rstrip("."), mended)
    with pytest.warns(UserWarning, match="read as counts"):
        assert scan(row_blocks(mended["adata"].X), 300).kind == "counts"
    np.testing.assert_allclose(mended["adata"].X[:10].toarray(), counts()[:10] * 0.7, rtol=1e-5)


def test_one_count_is_the_smallest_value_of_a_cell_if_the_others_are_multiples_of_it():
    x = counts()
    x = x[(x == 1).any(axis=1)]
    indptr = np.concatenate([[0], np.cumsum((x > 0).sum(axis=1))])
    size = 1e4 / x.sum(axis=1)
    values = np.log1p(x * size[:, None]).astype(np.float32)[x > 0]
    np.testing.assert_allclose(one_count(values, indptr), size, rtol=1e-4)
    blurred = np.log1p(np.expm1(values) * np.random.default_rng(0).uniform(0.7, 1.3, len(values)))
    assert one_count(blurred, indptr) is None
    short_indptr = indptr[: np.flatnonzero(indptr > 40)[0]]  # too few values to tell
    assert one_count(blurred[: short_indptr[-1]], short_indptr) is not None


def molecules(n_cells=150, depth=1.0):
    """Counts of 400 genes: rates that differ by gene, cell and type, drawn as molecules are."""
    rng = np.random.default_rng(0)
    rate = rng.lognormal(-0.5, 1.6, 400) * rng.lognormal(0, 0.4, (n_cells, 1)) * rng.gamma(4, 0.25, (n_cells, 400))
    return rng.binomial(rng.poisson(rate), depth).astype(np.float64)


@pytest.mark.parametrize("how", ["ordinal", "min", "max", "average", "dense"])
@pytest.mark.parametrize("sign", [1, -1])
def test_ranks_within_cells_are_no_counts(how, sign):
    x = molecules()
    for row in x:
        values = sign * row[row > 0] + np.arange((row > 0).sum()) / 1e3 * (how == "dense")
        row[row > 0] = rankdata(values, how)
    with pytest.raises(ValueError, match=r"holds ranks of genes within each cell.*layer=.*input='counts'"):
        scan(row_blocks(x), 400)


@pytest.mark.parametrize("depth", [1.0, 0.05])
@pytest.mark.parametrize("n_cells", [3, 40, 150])
def test_counts_at_any_depth_are_counts(depth, n_cells):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scan(row_blocks(molecules(n_cells, depth)), 400).kind == "counts"
