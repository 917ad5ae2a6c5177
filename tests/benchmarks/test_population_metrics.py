"""Scores of populations beside slow obvious ones; they tell apart what differs, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.stats import pearsonr, spearmanr
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold

same = pytest.approx


@pytest.fixture
def population(script):
    return script("_population_metrics")


def cells(n, n_genes=12, *, seed=0):
    """Log-normalised cells of three types, with zeros and ties; another seed gives new cells of the same population."""
    programs = np.random.default_rng(99).gamma(0.7, 3.0, (3, n_genes))
    rng = np.random.default_rng(seed)
    depth = rng.uniform(0.5, 1.5, (n, 1))
    return np.log1p(rng.poisson(depth * programs[rng.integers(3, size=n)]).astype(float))


def shuffled_genes(matrix):
    """Each gene as it was, none beside another as it was."""
    return np.random.default_rng(0).permuted(matrix, axis=0)


def slow_components(fit, other, n_components):
    """Coordinates by the eigenvectors of the covariance."""
    values, vectors = np.linalg.eigh(np.cov(fit, rowvar=False))
    axes = vectors[:, np.argsort(-values)[:n_components]]
    return [(m - fit.mean(axis=0)) @ axes for m in (fit, other)]


def slow_mmd(a, b, median):
    """Lemma 6 of Gretton et al., pair by pair."""

    def k(x, y):
        return sum(np.exp(-((x - y) ** 2).sum() / (m * median)) for m in (0.25, 0.5, 1, 2, 4))

    n, m = len(a), len(b)
    within_a = sum(k(a[i], a[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    within_b = sum(k(b[i], b[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    return within_a + within_b - 2 * sum(k(x, y) for x in a for y in b) / (n * m)


@pytest.mark.parametrize(("n_components", "full"), [(2, 500), (5, 4), (50, 500)])
def test_mmd_equals_loops(population, monkeypatch, n_components, full):
    """In blocks, and by either solver of components."""
    for name, value in (("_BLOCK", 4), ("_FULL_SVD", full), ("COMPONENTS", n_components)):
        monkeypatch.setattr(population, name, value)
    real, generated = cells(21, 8, seed=1), cells(9, 8, seed=2) * 1.5
    order = np.random.default_rng(5).permutation(21)
    expected, floors = [], []
    for fit, kept in ((order[:10], order[10:]), (order[10:], order[:10])):
        _, a = slow_components(real[fit], real[kept], n_components)
        _, b = slow_components(real[fit], generated, n_components)
        median = np.median([((a[i] - a[j]) ** 2).sum() for i in range(len(a)) for j in range(i)])
        expected.append(slow_mmd(a, b, median))
        floors.append(slow_mmd(a[: len(a) // 2], a[len(a) // 2 :], median))
    assert population.mmd(real, generated, rng=5) == same((np.mean(expected), np.mean(floors)), rel=1e-6)


def test_mmd_of_new_cells_is_around_zero_and_not_of_changed_ones(population):
    """Many genes and few cells: beside the very cells that components were found on, new ones would score 0.03."""
    real, new = ([cells(120, 400, seed=start + i) for i in range(40)] for start in (1_000, 5_000))
    scores = np.array([population.mmd(a, b, rng=i) for i, (a, b) in enumerate(zip(real, new, strict=True))])
    spread = scores.std(axis=0, ddof=1)
    assert (np.abs(scores.mean(axis=0)) < 3 * spread / np.sqrt(40)).all()
    assert ((scores < 0).mean(axis=0) > 0.25).all()  # unbiased
    assert population.mmd(real[0], shuffled_genes(new[0]), rng=0).mmd > 10 * spread[0]


def test_statistics_of_genes_equal_scipys(population):
    real, generated = cells(30, 20, seed=1), shuffled_genes(cells(40, 20, seed=2))
    expected = []
    for of in (lambda x: x.mean(), lambda x: x.var(ddof=1), lambda x: (x == 0).mean()):
        a, b = ([of(gene) for gene in m.T] for m in (real, generated))
        rmse = np.sqrt(np.mean(np.subtract(a, b) ** 2))
        expected += [pearsonr(a, b).statistic, spearmanr(a, b).statistic, rmse]
    assert population.gene_statistics(real, generated) == same(expected)


def test_correlations_of_the_most_variable_genes_equal_loops(population, monkeypatch):
    monkeypatch.setattr(population, "CORRELATED_GENES", 6)
    real, generated = cells(80, 30, seed=1), cells(90, 30, seed=2)
    genes = np.argsort(-real.var(axis=0))[:6]
    generated[:, genes[2]] = 1.0  # constant: correlates with none
    pairs = [[], []]
    for g, h in ((g, h) for i, g in enumerate(genes) for h in genes[:i]):
        for listed, m in zip(pairs, (real, generated), strict=True):
            listed.append(pearsonr(m[:, g], m[:, h]).statistic if np.ptp(m[:, g]) and np.ptp(m[:, h]) else 0.0)
    assert population.correlation_agreement(real, generated) == same(pearsonr(*pairs).statistic)
    assert abs(population.correlation_agreement(real, shuffled_genes(real))) < 0.5


@pytest.mark.parametrize("classifier", ["forest", "logistic"])
def test_discriminator_equals_folds_by_hand(population, monkeypatch, classifier):
    for name, value in (("VARIABLE_GENES", 5), ("COMPONENTS", 4), ("TREES", 20), ("FOLDS", 4)):
        monkeypatch.setattr(population, name, value)
    real, generated = cells(40, 10, seed=1), cells(30, 10, seed=2) * 1.2
    rng = np.random.default_rng(3)
    both = np.vstack([m[np.sort(rng.permutation(len(m))[:30])] for m in (real, generated)])
    folds_seed, forest_seed = map(int, rng.integers(2**31, size=2))
    forest, features = classifier == "forest", both[:, np.sort(np.argsort(-both.var(axis=0))[:5])]
    if forest:
        features = population._components(csr_array(both), 4)(both)
    is_real, expected = np.repeat([1, 0], 30), []
    for train, test in StratifiedKFold(4, shuffle=True, random_state=folds_seed).split(features, is_real):
        mean, sd = (0, 1) if forest else (features[train].mean(axis=0), features[train].std(axis=0))
        model = RandomForestClassifier(20, random_state=forest_seed) if forest else LogisticRegression(max_iter=1_000)
        model.fit((features[train] - mean) / sd, is_real[train])
        expected.append(roc_auc_score(is_real[test], model.predict_proba((features[test] - mean) / sd)[:, 1]))
    found = population.discriminator_auroc(real, generated, classifier=classifier, rng=3)
    assert found == same(np.mean(expected), abs=1e-3)


def test_copies_are_found_and_new_cells_are_none(population):
    real, new = cells(200, 400, seed=1), cells(400, 400, seed=2)
    fresh = population.copies(real, new)
    distance = np.sqrt(((real[:, None] - np.vstack([real, new])) ** 2).sum(axis=2))
    between, nearest = (distance[:, :200] + np.diag([np.inf] * 200)).min(axis=0), distance[:, 200:].min(axis=0)
    assert fresh == same((0, np.mean(nearest < np.quantile(between, 0.01)), np.median(nearest) / np.median(between)))
    mixed = np.vstack([new[:50], real[:20].astype(np.float32), real[20:50] * 1.0001])
    found = population.copies(np.vstack([real, real]), mixed)  # of equal real cells one counts
    assert found.exact == 20
    assert found.share_closer == same(0.5, abs=0.05)
    with pytest.raises(ValueError, match="400 values"):
        population.copies(real, [[-0.5] * 400])
