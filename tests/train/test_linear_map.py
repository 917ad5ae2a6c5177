"""The corpus SVD by blocks against one of the dense matrix, written cell by cell."""

from __future__ import annotations

import numpy as np
import pytest

from scdiva._constants import N_SPECIAL
from scdiva.data.packed import PackedCells
from scdiva.data.packing import pack_files
from scdiva.datasets import toy
from scdiva.train import fit_linear_map
from scdiva.train import linear_map as module

K = 6


def dense(cells: PackedCells) -> np.ndarray:
    """All values, (n_obs, n_tokens)."""
    out = np.zeros((cells.n_obs, cells.n_tokens))
    indptr, tokens, values = cells.read(0, cells.n_obs)
    for i in range(cells.n_obs):
        for j in range(indptr[i], indptr[i + 1]):
            out[i, tokens[j]] = values[j]
    return out


def slow_map(cells: PackedCells, k: int, n_genes: int = 8000, study_power: float = 0.5, spectral_power: float = 0.35):
    """The map's definition: weight of each cell, moments of each gene, SVD of the weighted, centred, scaled matrix."""
    x, study, n = dense(cells), cells.study, cells.n_obs
    w = np.array([float((study == s).sum()) ** -study_power for s in study])
    w *= n / w.sum()
    centred = np.zeros_like(x)
    mean, variance, frequency, dispersion = (np.zeros(cells.n_tokens) for _ in range(4))
    for g in range(N_SPECIAL, cells.n_tokens):
        measured = cells.measured[study, g]
        if not measured.any():
            continue
        for s in np.unique(study[measured]):
            centred[study == s, g] = x[study == s, g] - x[study == s, g].mean()
        mean[g] = np.average(x[measured, g], weights=w[measured])
        variance[g] = np.average(centred[measured, g] ** 2, weights=w[measured])
        frequency[g] = np.average(np.expm1(x[measured, g]) / 1e4, weights=w[measured])
        if w[measured].sum() > n / 2:
            dispersion[g] = variance[g] / max(mean[g], 1e-3)
    best = sorted(range(cells.n_tokens), key=lambda g: -dispersion[g])[:n_genes]
    selected = sorted(g for g in best if dispersion[g] > 0)
    deviation = np.sqrt(variance[selected]) + 0.05
    scaled = np.clip(centred[:, selected] / deviation, -module.CLIP, module.CLIP)
    _, s, vt = np.linalg.svd(np.sqrt(w)[:, None] * scaled, full_matrices=False)
    directions = vt[:k].T
    for j in range(k):
        directions[:, j] *= np.sign(directions[np.abs(directions[:, j]).argmax(), j])
        directions[:, j] *= (s[j] / s[0]) ** spectral_power
    weight = np.zeros((cells.n_tokens, k))
    weight[selected] = directions / deviation[:, None]
    return weight, -mean @ weight, s[:k] ** 2 / (s**2).sum(), frequency, 0.7 * np.average(x.sum(axis=1), weights=w)


def assert_is(got, expected, atol=1e-4):
    for actual_part, expected_part in zip(got, expected, strict=True):
        np.testing.assert_allclose(actual_part, expected_part, atol=atol)


@pytest.mark.parametrize(
    "options",
    [{}, {"study_power": 0.0}, {"study_power": 1.0}, {"spectral_power": 0.0}, {"n_genes": 12}, {"n_genes": 6}],
    ids=str,
)
def test_it_is_the_svd_of_the_dense_matrix(corpus, options):
    got = fit_linear_map(corpus, K, **options)
    assert_is(got, slow_map(corpus, K, **options))
    assert got.weight.dtype == got.bias.dtype == np.float32
    assert got.weight.shape == (corpus.n_tokens, K)
    assert not got.weight[:N_SPECIAL].any()
    assert (np.abs(got.weight).sum(1) > 0).sum() == min(options.get("n_genes", 40), 40)
    assert (np.diff(got.explained) <= 0).all()
    assert 0 < got.explained.sum() <= 1 + 1e-6


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_blocks_change_nothing(corpus, monkeypatch, rows):
    expected = fit_linear_map(corpus, K)
    monkeypatch.setattr(module, "BLOCK_ROWS", rows)
    assert_is(fit_linear_map(corpus, K), expected, atol=1e-5)


def test_genes_that_half_of_the_corpus_lacks_are_left_out(corpus):
    cells = PackedCells(corpus.path)
    cells.measured = cells.measured.copy()
    gene = N_SPECIAL + 20
    cells.measured[0, gene] = False  # the largest study
    got = fit_linear_map(cells, K, study_power=0)
    assert not got.weight[gene].any()
    assert got.frequency[gene] > 0  # the decoder still starts from what the others say of it
    assert_is(got, slow_map(cells, K, study_power=0))


@pytest.mark.parametrize("n_rows", [9, 20, 45])
def test_leading_directions_are_singular_vectors(n_rows):
    """Of fewer rows than columns, as many, and more; the largest entry is positive, and rounding is left out."""
    matrix = np.random.default_rng(0).normal(size=(n_rows, 20))
    blocks = iter([matrix[:4], matrix[4:]])
    vectors, values, total = module.leading_directions(blocks, n_rows, 20, 5)
    assert (vectors[np.abs(vectors).argmax(axis=0), np.arange(5)] > 0).all()
    singular, right = np.linalg.svd(matrix)[1:]
    np.testing.assert_allclose(values, singular[:5] ** 2, rtol=1e-5)
    np.testing.assert_allclose(np.abs((vectors * right[:5].T).sum(axis=0)), 1, atol=1e-5)
    assert total == pytest.approx((matrix**2).sum(), rel=1e-5)
    result = module.leading_directions(iter([matrix[:3]]), 3, 20, 5)
    assert result[0].shape == (20, 3)


def test_directions_that_are_too_many_are_refused(corpus, tiny, vocabulary, tmp_path):
    for n_dims in (0, 41):
        with pytest.raises(ValueError, match=rf"n_dims must be in 1 \.\.\. 40, .* got {n_dims}"):
            fit_linear_map(corpus, n_dims)
    toy(145, 40)[:9].copy().write_h5ad(tmp_path / "few.h5ad")
    small_corpus = pack_files([tmp_path / "few.h5ad"], vocabulary, tmp_path / "few.h5")
    assert fit_linear_map(small_corpus, 8).weight.any()
    with pytest.raises(ValueError, match="9 cells span 8 directions only; pass n_dims=8"):
        fit_linear_map(small_corpus, 12)
    encoder = tiny().anchor
    before = encoder.table.weight.detach().clone()
    with pytest.raises(ValueError, match=r"\(43, 6\).*\(33, 8\).*n_dims=8"):
        module.set_linear_map(encoder, fit_linear_map(corpus, K))
    assert encoder.table.weight.equal(before)
