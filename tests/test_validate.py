from __future__ import annotations

import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from scdiva._validate import _Totals, scan
from scdiva.data.matrix import open_matrix, row_blocks

CELLS = [f"cell{i}" for i in range(60)]
GENES = [f"gene{j}" for j in range(20)]
DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture
def counts() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.negative_binomial(1, 1 / (1 + rng.uniform(1, 20, 20)), (60, 20)).astype(np.float32)


def lognorm(counts: np.ndarray, target: float = 1e4) -> np.ndarray:
    return np.log1p(counts / counts.sum(1, keepdims=True) * target).astype(np.float32)


def scan_of(x, **kwargs):
    kwargs = {"obs_names": CELLS, "var_names": GENES, "where": "adata.X"} | kwargs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return scan(row_blocks(x, 16), x.shape[1], **kwargs)


@pytest.mark.parametrize("input", ["auto", "counts"])
def test_counts_are_counts(counts, input):
    counts[7] = 0
    gene_mask = np.arange(20) < 12
    result = scan_of(counts, input=input, is_known_gene=gene_mask)
    assert result.kind == "counts"
    assert result.integer
    assert (result.n_obs, len(result.counts_per_gene), result.max) == (60, 20, counts.max())
    np.testing.assert_array_equal(result.counts_per_gene, counts.sum(0, dtype=np.float64))
    np.testing.assert_array_equal(result.genes_per_cell, (counts > 0).sum(1))
    np.testing.assert_array_equal(result.known_per_cell, (counts[:, :12] > 0).sum(1))


@pytest.mark.parametrize("target", [1, 1e3, 1e4, 1e6])
@pytest.mark.parametrize("input", ["auto", "lognorm"])
def test_lognormalised_values_are_recognised(counts, input, target):
    logs = lognorm(counts, target)
    result = scan_of(logs, input=input)
    assert result.kind == "lognorm"
    assert not result.integer
    np.testing.assert_allclose(result.counts_per_gene, np.expm1(logs.astype(np.float64)).sum(0), rtol=1e-6)


def test_genes_cut_after_normalising_are_still_lognormalised(counts):
    assert scan_of(lognorm(counts)[:, :9], var_names=GENES[:9]).kind == "lognorm"


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 80))
def test_block_size_changes_nothing(block_rows):
    x = np.random.default_rng(1).poisson(1.0, (50, 7)).astype(np.float32)
    a, b = scan(row_blocks(x, block_rows), 7), scan(row_blocks(sp.csc_matrix(x), 50), 7)
    np.testing.assert_array_equal(a.counts_per_gene, b.counts_per_gene)
    np.testing.assert_array_equal(a.genes_per_cell, b.genes_per_cell)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0, 0.25, 0.5, 1, 1.0009, 1.0011, 2, 7.25, 150, 200.0015, 2**23]), min_size=60))
def test_totals_are_those_of_a_plain_computation(values):
    x = np.resize(np.float32(values), (len(values) // 6, 6))
    gene_mask, totals = np.arange(6) % 2 == 0, _Totals(6, None, None)
    for start, block in row_blocks(x, 4):
        totals.add(start, block, gene_mask)
    wide = x.astype(np.float64)
    away = np.abs(wide - np.rint(wide))
    fraction = (wide > 0) & ((away > np.maximum(1e-3, 1e-5 * wide)) | (wide < 0.5))
    blocks = [wide[at : at + 4] for at in range(0, len(wide), 4)]  # sums are rounded in this order
    np.testing.assert_array_equal(totals.sum, sum(_summed(block) for block in blocks))
    np.testing.assert_array_equal(totals.sum_squares, sum(_summed(block * block) for block in blocks))
    np.testing.assert_array_equal(np.concatenate(totals.known_per_cell), ((x > 0) & gene_mask).sum(1))
    assert (totals.max, totals.n_values) == (wide.max(), (wide > 0).sum())
    assert totals.fraction.count == fraction.sum()
    assert totals.fractional.count == fraction.any(1).sum()
    if fraction.any():
        i, j = np.argwhere(fraction)[0]
        assert totals.fraction.first == f"first {x[i, j]:g} at row {i}, column {j}"


def _summed(block):
    """Column sums, row after row."""
    total = np.zeros(block.shape[1])
    for row in block:
        total += row
    return total


def test_near_integers_are_counts(counts):
    recovered = np.expm1(np.log1p(counts.astype(np.float32)))
    assert not np.array_equal(recovered, counts)
    assert scan_of(recovered, input="counts").integer


def test_corrected_counts_are_counts_with_a_warning(counts):
    counts[:, ::3] *= 0.87
    with pytest.warns(UserWarning, match=r"adata\.X .*counts, .*\d+ of \d+ values"):
        result = scan(row_blocks(counts), 20, where="adata.X")
    assert result.kind == "counts"
    assert not result.integer
    with pytest.raises(ValueError, match=r"not integers: .*cell 'cell\d+', gene 'gene\d+'.*input='auto'"):
        scan_of(counts, input="counts")


def test_counts_per_million_are_counts_with_a_warning(counts):
    with pytest.warns(UserWarning, match="TPM"):
        assert scan(row_blocks(counts / counts.sum(1, keepdims=True) * 1e6), 20).kind == "counts"


def test_lognormalised_where_counts_are_expected(counts):
    with pytest.raises(ValueError, match=r"looks log-normalised.*Pass input='lognorm'"):
        scan_of(lognorm(counts), input="counts")


def test_counts_where_lognormalised_is_expected(counts):
    assert counts.max() > 15
    with pytest.raises(ValueError, match=r"too large for a logarithm.*input='counts'"):
        scan_of(counts, input="lognorm")
    with pytest.raises(ValueError, match=r"integers only.*input='counts'"):
        scan_of(np.minimum(counts, 9), input="lognorm")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0])
@pytest.mark.parametrize("store", [np.asarray, sp.csr_matrix, sp.csc_matrix])
def test_impossible_values_are_counted_and_located(counts, value, store):
    counts[[20, 41, 59], [3, 0, 19]] = value
    what = {"nan": "3 NaN values", "inf": "3 infinite values", "-inf": "3 infinite values", "-1.0": "3 negative values"}
    with pytest.raises(ValueError, match=rf"adata\.X holds {what[str(value)]} .*cell 'cell20', gene 'gene3'"):
        scan_of(store(counts))


@pytest.mark.parametrize("store", [np.asarray, sp.csr_matrix])
def test_genes_that_a_dataset_did_not_measure_are_to_be_left_out(counts, store):
    """An outer join fills them with NaN, which is not a count of zero."""
    x = counts.astype(np.float32)
    x[: len(x) // 2, :3] = x[len(x) // 2 :, 5:9] = np.nan
    with pytest.raises(ValueError, match=rf"holds {7 * len(x) // 2} NaN values") as error:
        scan(row_blocks(store(x)), x.shape[1], where="adata.X")
    names = {"adata": ad.AnnData(x), "np": np}
    exec(str(error.value).split("keep the shared genes: ")[1].split(" (for sparse")[0], names)
    np.testing.assert_array_equal(names["adata"].X, np.delete(x, [0, 1, 2, 5, 6, 7, 8], axis=1))


@pytest.mark.parametrize("of", [lambda c: c, lognorm])
def test_scaling_without_centring_is_recognised(counts, of):
    x = of(counts)
    with pytest.raises(ValueError, match="is scaled: its genes have variance 1"):
        scan_of(x / x.std(0, ddof=1))


@pytest.mark.parametrize(
    ("dtype", "value", "message"),
    [
        (np.float64, 1e300, "holds 1 infinite values"),
        (np.float32, 3e38, "holds 1 values of 2,147,483,647 or more"),
        (np.uint64, 2**64 - 1, "holds 1 values of 2,147,483,647 or more"),
        (np.int32, 2**31 - 1, "holds 1 values of 2,147,483,647 or more"),
        (np.int64, -(2**63), "holds 1 negative values"),
    ],
)
def test_an_overflow_is_no_count(counts, dtype, value, message):
    x = counts.astype(dtype)
    x[0, 3] = value
    with pytest.raises(ValueError, match=rf"{message} .first .* at row 0, column 3"):
        scan(row_blocks(x), 20)


def test_nothing_to_scan():
    for shape in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match=f"adata.X is empty: {shape[0]} cells × {shape[1]} genes"):
            scan_of(sp.csr_matrix(shape, dtype=np.float32))
    result = scan_of(sp.csr_matrix((4, 3), dtype=np.float32))
    assert result.kind == "counts"
    assert not result.genes_per_cell.any()


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared data are not beside the repository")
@pytest.mark.parametrize(
    ("file", "integer"),
    [
        ("corpus/ucell_sample_600", True),
        ("corpus/zilionis_scgate_300", True),
        ("benchmark/panc8_small_500", False),
        ("benchmark/kang_scgen_valid_1975", True),
    ],
)
def test_recovered_and_corrected_counts_of_real_studies_are_counts(file, integer):
    with open_matrix(DATA / f"{file}.h5ad") as opened, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = scan(row_blocks(opened.matrix), opened.shape[1])
    assert result.kind == "counts"
    assert result.integer is integer
    assert bool(caught) is not integer


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared data are not beside the repository")
def test_a_real_study_that_joins_counts_and_logarithms_is_refused():
    with (
        open_matrix(DATA / "corpus" / "tidytranscriptomics_pbmc_3000.h5ad") as opened,
        pytest.raises(ValueError, match=r"1721 cells .* 900 cells"),
    ):
        scan(row_blocks(opened.matrix), opened.shape[1])


def test_zeros_and_ones_are_not_counts():
    cells = sp.random(200, 100, density=0.6, format="csr", rng=0)
    cells.data[:] = 1
    with pytest.raises(ValueError, match="the matrix is binary: all of its 12000 values above 0 are 1"):
        scan([(0, cells)], 100)
    assert scan([(0, cells)], 100, input="counts").kind == "counts"
