from __future__ import annotations

import warnings

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from scdiva._scale import REMEDIES, find_scale, one_count
from scdiva._validate import scan
from scdiva.data.blocks import row_blocks

SCALES = {
    "log1p": np.log1p,
    "log2": lambda u: np.log2(1 + u),
    "log10": lambda u: np.log10(1 + u),
    "log1p twice": lambda u: np.log1p(np.log1p(u)),
    "square root": np.sqrt,
    "linear": lambda u: u,
}


def counts(seed: int = 0, n_cells: int = 40, n_genes: int = 300) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.negative_binomial(1, 1 / (1 + rng.lognormal(0, 1.5, n_genes)), (n_cells, n_genes)).astype(np.float64)


def scale_of(x: np.ndarray) -> str | None:
    x = x[(x > 0).any(axis=1)].astype(np.float32)
    return find_scale(x[x > 0].astype(np.float64), np.concatenate([[0], np.cumsum((x > 0).sum(1))]))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("size_factors", ["total", "scran", "none"])
@pytest.mark.parametrize("kept", [300, 60])
def test_the_scale_is_told(scale, size_factors, kept):
    """Also where genes were chosen after normalising, so that totals differ."""
    c = counts()
    total = c.sum(1, keepdims=True)
    per_cell = {"total": 1e4 / total, "scran": np.random.default_rng(1).lognormal(0, 0.3, (40, 1)), "none": 1.0}
    assert scale_of(SCALES[scale](c * per_cell[size_factors])[:, :kept]) == scale


@pytest.mark.parametrize("scale", ["log1p", "log2", "log10", "square root"])
def test_tpm_and_corrected_counts_are_told_by_their_totals(scale):
    tpm = counts() / np.random.default_rng(1).uniform(0.5, 8, 300)
    tpm *= 1e6 / tpm.sum(1, keepdims=True)
    assert scale_of(SCALES[scale](tpm)) == scale
    assert scale_of(SCALES[scale](tpm)[:, :60]) in ("unlike counts", None)


def test_what_comes_from_no_counts_is_not_taken_for_it():
    log = np.log1p(counts() * 3)
    assert scale_of(log / np.maximum(log.std(0), 0.1)) == "unlike counts"
    assert scale_of(np.random.default_rng(0).uniform(0, 5, (40, 300))) == "unlike counts"


def test_too_little_says_nothing():
    assert find_scale(np.zeros(0), np.array([0])) is None
    assert scale_of(np.log2(1 + counts(n_cells=2, n_genes=20))) is None


@given(seed=st.integers(0, 10_000), depth=st.floats(0.01, 50), n_genes=st.integers(40, 400))
@settings(max_examples=40, deadline=None)
def test_natural_logarithms_and_counts_are_never_refused(seed, depth, n_genes):
    c = np.rint(counts(seed, 20, n_genes) * np.random.default_rng(seed).lognormal(0, 0.5, (20, 1)))
    assert scale_of(np.log1p(depth * c)) not in REMEDIES
    assert scale_of(depth * c) not in REMEDIES


@pytest.mark.parametrize("scale", REMEDIES)
@pytest.mark.parametrize("input", ["auto", "lognorm"])
def test_the_call_in_the_message_mends_it(scale, input):
    x = SCALES[scale](counts() * 0.7)[:, :100]
    with pytest.raises(ValueError, match="scdiva reads counts and natural logarithms"):
        scan(row_blocks(x), 100, input=input)
    mend = REMEDIES[scale].split(" (")[0]
    mended = {"adata": type("", (), {"X": x}), "np": np}
    exec(mend, mended)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = scan(row_blocks(mended["adata"].X), 100)
    back = mended["adata"].X if found.kind == "counts" else np.expm1(mended["adata"].X)
    np.testing.assert_allclose(back, counts()[:, :100] * 0.7, rtol=1e-4, atol=1e-6)


def test_normalised_counts_of_small_totals_are_no_logarithms():
    c = counts()[:, :100]
    x = c / c.sum(1, keepdims=True)
    with pytest.warns(UserWarning, match="taken as counts"):
        assert scan(row_blocks(x), 100).kind == "counts"
    with pytest.raises(ValueError, match=r"normalised values, no logarithms.*input='auto'"):
        scan(row_blocks(x), 100, input="lognorm")


def test_values_that_could_be_anything_are_told_of():
    log = np.log1p(counts())
    with pytest.warns(UserWarning, match="exponentials"):
        assert scan(row_blocks(np.minimum(log / np.maximum(log.std(0), 0.1), 4)), 300).kind == "lognorm"


def test_a_binary_matrix_is_refused_unless_it_is_said_to_hold_counts():
    x = counts() > 0
    with pytest.raises(ValueError, match=r"is binary.*input='counts'"):
        scan(row_blocks(x), 300)
    assert scan(row_blocks(x), 300, input="counts").kind == "counts"
    assert scan(row_blocks(x[:2]), 300).kind == "counts"


@pytest.mark.parametrize("block_rows", [1, 7, 100])
def test_blocks_change_nothing(block_rows):
    x = np.log2(1 + counts())
    with pytest.raises(ValueError, match="base 2"):
        scan(row_blocks(x, block_rows), 300)


@pytest.mark.parametrize("scale", ["log1p", "log2", "square root"])
@pytest.mark.parametrize("first", [0, 30])
def test_counts_beside_logarithms_are_refused(scale, first):
    """A batch that was normalised before the data sets were joined, as in a public set of 20 PBMC studies."""
    mixed = counts()
    rows = np.arange(first, first + 10)
    mixed[rows] = SCALES[scale](mixed[rows] * 0.7)
    whole = 0 if first else 10
    said = rf"mixes scales: 30 cells.*first: row {whole}\), 10 hold values on the scale '{scale}'.*row {first}"
    for input in ("auto", "lognorm"):
        with pytest.raises(ValueError, match=said):
            scan(row_blocks(mixed, 7), 300, input=input)


def test_the_mixture_can_be_mended_as_said():
    x = counts().astype(np.float32)
    x[:10] = np.log1p(x[:10] * 0.7)
    with pytest.raises(ValueError, match="mixes scales") as said:
        scan(row_blocks(sp.csr_matrix(x)), 300)
    mended = {"adata": ad.AnnData(sp.csr_matrix(x)), "np": np}
    exec(str(said.value).split("for instance with ")[1].split(" for log1p")[0], mended)
    with pytest.warns(UserWarning, match="taken as counts"):
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
    few = indptr[: np.flatnonzero(indptr > 40)[0]]  # too few values to tell
    assert one_count(blurred[: few[-1]], few) is not None
