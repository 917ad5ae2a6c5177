from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.sparse import coo_array, csc_matrix, csr_array
from scipy.stats import pearsonr, spearmanr
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import _population_metrics as population
    from _population_metrics import copies, correlation_agreement, discriminator_auroc, gene_statistics, mmd

two_folds = partial(discriminator_auroc, n_splits=2)
"""Five folds of 200 trees take seconds, and are asked for where they count."""
EVERY = [mmd, gene_statistics, correlation_agreement, two_folds, copies]
LEVELS = st.sampled_from([0.0, 0.0, 0.5, 1.0, 1.5, 4.0])
"""Expression with many zeros and ties."""
same = pytest.approx


def cells(n, n_genes=12, *, seed=0, n_types=3):
    """Log-normalised cells of a few types, with zeros; another seed gives new cells of the same population."""
    programs = np.random.default_rng(99).gamma(0.7, 3.0, (n_types, n_genes))
    rng = np.random.default_rng(seed)
    depth = rng.uniform(0.5, 1.5, (n, 1))
    return np.log1p(rng.poisson(depth * programs[rng.integers(n_types, size=n)]).astype(float))


def shuffled_genes(matrix, seed=0):
    """Each gene as it was, none beside another as it was."""
    return np.random.default_rng(seed).permuted(matrix, axis=0)


@st.composite
def two_populations(draw, least=3):
    n_genes = draw(st.integers(3, 6))
    return [draw(arrays(float, (draw(st.integers(least, 12)), n_genes), elements=LEVELS)) for _ in range(2)]


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


@pytest.mark.parametrize("n_components", [2, 5, 50])
def test_mmd_equals_loops(n_components, monkeypatch):
    monkeypatch.setattr(population, "_BLOCK", 4)
    real, generated = cells(21, 8, seed=1), cells(9, 8, seed=2) * 1.5
    order = np.random.default_rng(5).permutation(21)
    expected, floors = [], []
    for fit, kept in ((order[:10], order[10:]), (order[10:], order[:10])):
        _, a = slow_components(real[fit], real[kept], n_components)
        _, b = slow_components(real[fit], generated, n_components)
        median = np.median([((a[i] - a[j]) ** 2).sum() for i in range(len(a)) for j in range(i)])
        expected.append(slow_mmd(a, b, median))
        floors.append(slow_mmd(a[: len(a) // 2], a[len(a) // 2 :], median))
    assert mmd(real, generated, n_components, rng=5) == same((np.mean(expected), np.mean(floors)), rel=1e-6)


def test_components_are_the_same_by_either_solver(monkeypatch):
    """Many cells and genes take the solver that finds some components only, sparse cells without being spread out."""
    fit, other = cells(60, 40, seed=1), cells(20, 40, seed=2)
    for matrices in ((fit, other), (csr_array(fit), csr_array(other))):
        full = population._components(matrices[0], 7)(matrices[1])
        with monkeypatch.context() as patch:
            patch.setattr(population, "_FULL_SVD", 10)
            some = population._components(matrices[0], 7)(matrices[1])
        for found in (full, some):
            assert np.abs(found) == same(np.abs(slow_components(fit, other, 7)[1]), abs=1e-6)


def test_directions_without_variance_are_left_out():
    """What no real cell does has no coordinate, whatever the solver returns for it."""
    fit = np.column_stack([np.arange(6.0), np.ones(6), np.ones(6)])
    assert population._components(fit, 50)(fit + np.array([0, 5, 7])).shape == (6, 1)


def test_mmd_of_new_cells_is_around_zero_and_not_of_changed_ones():
    """Many genes and few cells: beside the very cells that components were found on, new ones would score 0.03."""
    real, new = ([cells(120, 400, seed=start + i) for i in range(40)] for start in (1_000, 5_000))
    scores = np.array([mmd(a, b, rng=i) for i, (a, b) in enumerate(zip(real, new, strict=True))])
    changed = [mmd(a, shuffled_genes(b)).mmd for a, b in zip(real[:3], new[:3], strict=True)]
    spread = scores.std(axis=0, ddof=1)
    assert (np.abs(scores.mean(axis=0)) < 3 * spread / np.sqrt(40)).all()
    assert ((scores < 0).mean(axis=0) > 0.25).all()  # unbiased
    assert min(changed) > 10 * spread[0]


def slow_statistics(real, generated):
    scores = []
    for of in (lambda x: x.mean(), lambda x: x.var(ddof=1), lambda x: (x == 0).mean()):
        a, b = ([of(gene) for gene in m.T] for m in (real, generated))
        varies = np.ptp(a) > 1e-9 and np.ptp(b) > 1e-9
        scores += [
            pearsonr(a, b).statistic if varies else np.nan,
            spearmanr(np.round(a, 9), np.round(b, 9)).statistic if varies else np.nan,
            np.sqrt(np.mean([(x - y) ** 2 for x, y in zip(a, b, strict=True)])),
        ]
    return scores


@given(two_populations(least=2))
@settings(deadline=None, max_examples=60)
def test_statistics_equal_loops(populations):
    expected = slow_statistics(*populations)
    for form in (np.asarray, csr_array):
        found = list(gene_statistics(*map(form, populations)))
        assert found[::3] + found[2::3] == same(expected[::3] + expected[2::3], nan_ok=True, abs=1e-7)


def test_ranks_of_statistics_equal_scipy():
    real, generated = cells(30, 20, seed=1), shuffled_genes(cells(40, 20, seed=2))
    assert list(gene_statistics(real, generated)) == same(slow_statistics(real, generated))
    assert gene_statistics(real, real) == same((1, 1, 0) * 3)


def test_statistics_of_constant_genes_are_not_ranked():
    """0.1 summed seven times is not 0.7: what rounding leaves is no difference between genes."""
    found = gene_statistics(np.full((7, 3), 0.1), np.full((10, 3), 0.1))
    assert found == same((np.nan, np.nan, 0) * 3, nan_ok=True, abs=1e-12)


def slow_agreement(real, generated, n_genes):
    genes = sorted(range(real.shape[1]), key=lambda g: (-np.round(real[:, g].var(), 9), g))[:n_genes]
    genes = [g for g in genes if np.ptp(real[:, g]) > 0]
    pairs = [[], []]
    for i, g in enumerate(genes):
        for h in genes[:i]:
            for listed, m in zip(pairs, (real, generated), strict=True):
                constant = not (np.ptp(m[:, g]) and np.ptp(m[:, h]))
                listed.append(0.0 if constant else pearsonr(m[:, g], m[:, h]).statistic)
    return pearsonr(*pairs).statistic if min(map(np.ptp, pairs)) > 1e-9 else np.nan


@given(two_populations())
@settings(deadline=None, max_examples=60)
def test_correlation_agreement_equals_loops(populations):
    assume((np.ptp(populations[0], axis=0) > 0).sum() >= 3)
    expected = slow_agreement(*populations, 200)
    for form in (np.asarray, csr_array):
        assert correlation_agreement(*map(form, populations)) == same(expected, nan_ok=True, abs=1e-7)


def test_correlation_agreement_takes_the_most_variable_genes():
    real, generated = cells(80, 30, seed=1), cells(90, 30, seed=2)
    found = correlation_agreement(real, generated, n_genes=6)
    assert found == same(slow_agreement(real, generated, 6))
    assert found > 0.8
    assert abs(correlation_agreement(real, shuffled_genes(real), n_genes=30)) < 0.3
    assert correlation_agreement(real, real) == same(1)


def slow_auroc(features, n, make, folds_seed):
    """Fold by fold, as it is said."""
    is_real = np.r_[np.ones(n), np.zeros(n)]
    scores = []
    for train, test in StratifiedKFold(4, shuffle=True, random_state=folds_seed).split(features, is_real):
        model, of_train, of_test = make(features[train], features[test])
        model.fit(of_train, is_real[train])
        scores.append(roc_auc_score(is_real[test], model.predict_proba(of_test)[:, 1]))
    return np.mean(scores)


@pytest.mark.parametrize("classifier", ["forest", "logistic"])
def test_discriminator_equals_folds_by_hand(classifier, monkeypatch):
    monkeypatch.setattr(population, "VARIABLE_GENES", 5)
    monkeypatch.setattr(population, "FOREST_COMPONENTS", 4)
    real, generated = cells(40, 10, seed=1), cells(30, 10, seed=2) * 1.2
    rng = np.random.default_rng(3)
    both = np.vstack([m[np.sort(rng.permutation(len(m))[:30])] for m in (real, generated)])
    folds_seed, forest_seed = map(int, rng.integers(2**31, size=2))
    if classifier == "forest":
        features = population._components(both, 4)(both)

        def make(train, test):
            return RandomForestClassifier(200, random_state=forest_seed), train, test
    else:
        features = both[:, np.sort(np.argsort(-both.var(axis=0))[:5])]

        def make(train, test):
            mean, sd = train.mean(axis=0), train.std(axis=0)
            return LogisticRegression(max_iter=1_000), (train - mean) / sd, (test - mean) / sd

    expected = slow_auroc(features, 30, make, folds_seed)
    found = discriminator_auroc(real, generated, classifier=classifier, n_splits=4, rng=3)
    assert found == same(expected, abs=1e-3)
    assert 0 <= found <= 1


def test_discriminators_tell_what_can_be_told():
    """The forest sees genes together; to the logistic regression shuffled genes are the same cells."""
    real, new = cells(150, 30, seed=1), cells(150, 30, seed=2)
    alone = shuffled_genes(new)
    auroc = partial(discriminator_auroc, n_splits=3)
    for classifier in ("forest", "logistic"):
        assert auroc(real, new, classifier=classifier) == same(0.5, abs=0.12)
        assert auroc(real, new + 1, classifier=classifier) > 0.99
    assert auroc(real, alone) > 0.9
    assert auroc(real, alone, classifier="logistic") < 0.65
    assert auroc(real, real) < 0.2  # copies, as the docstring warns


def slow_copies(real, generated):
    distinct = [list(row) for row in {tuple(row) for row in real.tolist()}]

    def nearest(row, others):
        return min(np.sqrt(((np.array(row) - np.array(o)) ** 2).sum()) for o in others)

    between = [nearest(row, [o for o in distinct if o != row]) for row in distinct]
    distances = [nearest(row, distinct) for row in generated.tolist()]
    close = np.quantile(between, 0.01)
    return (
        sum(row in distinct for row in generated.tolist()),
        np.mean([d < close for d in distances]),
        np.median(distances) / np.median(between),
    )


@given(two_populations())
@settings(deadline=None, max_examples=60)
def test_copies_equal_loops(populations):
    real, generated = populations
    assume(len({tuple(row) for row in real.tolist()}) > 1)
    # levels are half apart, and a distance must not tie with the quantile
    generated = np.where(generated > 0, generated + np.array([0, 0.013] * 6)[: len(generated), None], 0)
    expected = slow_copies(real, generated)
    for form in (np.asarray, csr_array):
        found = copies(form(real), form(generated))
        assert found.exact == expected[0]
        assert found == same(expected, abs=1e-6) or np.isclose(slow_gap(real, generated), 0, atol=1e-6)


def slow_gap(real, generated):
    """Least difference of a generated cell's distance from the quantile that it is held against."""
    distinct = np.unique(real, axis=0)
    square = np.sqrt(((distinct[:, None] - distinct) ** 2).sum(axis=2)) + np.where(np.eye(len(distinct)), np.inf, 0)
    distances = np.sqrt(((generated[:, None] - distinct) ** 2).sum(axis=2)).min(axis=1)
    return np.abs(distances - np.quantile(square.min(axis=1), 0.01)).min()


@pytest.mark.parametrize("n_components", [None, 10])
def test_copies_are_found_and_new_cells_are_none(n_components):
    """Few cells of many genes, where components of the real cells alone would take new ones for copies."""
    real, new = cells(200, 400, seed=1), cells(400, 400, seed=2)
    fresh = copies(real, new, n_components=n_components)
    assert fresh.exact == 0
    assert fresh.share_closer < 0.05
    assert fresh.ratio == same(1, abs=0.1)
    mixed = np.vstack([new[:50], real[:20], real[20:50] * 1.0001])
    found = copies(real, mixed, n_components=n_components)
    assert found.exact == 20
    assert found.share_closer == same(0.5, abs=0.05)
    assert copies(real, real, n_components=n_components) == same((200, 1, 0), abs=1e-4)


def test_copies_are_found_behind_equal_real_cells_and_other_precision():
    real = cells(60, 10, seed=1)
    doubled = np.vstack([real, real])  # nearest others at distance 0
    assert copies(doubled, real) == same(copies(real, real), abs=1e-6)
    assert copies(real, real.astype(np.float32)).exact == 60
    assert copies(-0.0 * real + real, np.where(real == 0, -0.0, real)).exact == 60


@pytest.fixture
def few_trees(monkeypatch):
    monkeypatch.setattr(population, "TREES", 20)


@pytest.mark.usefixtures("few_trees")
@pytest.mark.parametrize("function", EVERY)
def test_the_order_of_cells_and_their_form_change_nothing(function):
    real, generated = cells(40, 9, seed=1), cells(40, 9, seed=2) * 1.1
    expected = function(real, generated)
    for form in (csr_array, csc_matrix, coo_array):
        assert function(form(real), form(generated)) == same(expected)
        assert function(real, form(generated)) == same(expected)
    with_zeros = csr_array(real)
    with_zeros.data[:5] = 0.0
    stored = with_zeros.copy()
    assert function(with_zeros, generated) == same(function(with_zeros.toarray(), generated))
    assert (with_zeros != stored).nnz == 0
    assert with_zeros.nnz == stored.nnz  # what was given is not changed
    if function is not two_folds:  # its folds follow the order
        turned = function(real, generated[::-1])
        assert turned == same(expected)
    if function not in (two_folds, mmd):  # so do these halves
        assert function(real[::-1], generated) == same(expected)
    genes = np.random.default_rng(0).permutation(9)
    if function is not two_folds:  # a forest draws columns
        assert function(real[:, genes], generated[:, genes]) == same(expected)


@pytest.mark.usefixtures("few_trees")
@pytest.mark.parametrize("function", [mmd, two_folds])
def test_what_is_drawn_follows_the_seed(function):
    real, generated = cells(50, 6, seed=1), cells(30, 6, seed=2)
    first = function(real, generated, rng=7)
    assert function(real, generated, rng=7) == first
    assert function(real, generated, rng=8) != first
    assert function(real, generated, rng=None) == function(real, generated, rng=0) == function(real, generated)
    generator = np.random.default_rng(7)
    assert function(real, generated, rng=generator) == first
    assert function(real, generated, rng=generator) != first


@pytest.mark.parametrize("function", EVERY)
@pytest.mark.parametrize("form", [np.asarray, csr_array])
def test_other_genes_and_values_are_refused(function, form):
    good = cells(20, 6)
    with pytest.raises(ValueError, match="real has 6 genes and generated 5; both must be of the same genes"):
        function(form(good), form(good[:, :5]))
    for bad in (np.nan, np.inf, -0.5):
        spoilt = good.copy()
        spoilt[7, 0] = spoilt[9, 3] = bad  # the first that a row stores
        message = r"2 values of {} are negative or not finite \(the first in cell 7, gene 0\). Pass log-norm"
        with pytest.raises(ValueError, match=message.format("real")):
            function(form(spoilt), form(good))
        with pytest.raises(ValueError, match=message.format("generated")):
            function(form(good), form(spoilt))


@pytest.mark.parametrize("function", EVERY)
def test_other_shapes_are_refused(function):
    with pytest.raises(ValueError, match=r"real has shape \(6,\); it must be \(n_cells, n_genes\)"):
        function(np.ones(6), cells(20, 6))
    with pytest.raises(ValueError, match=r"generated has shape \(20, 0\)"):
        function(cells(20, 6), np.ones((20, 0)))


@pytest.mark.parametrize(
    ("function", "n_real", "n_generated"),
    [(mmd, 8, 2), (gene_statistics, 2, 2), (correlation_agreement, 3, 3), (discriminator_auroc, 5, 5), (copies, 2, 1)],
)
def test_too_few_cells_are_refused(function, n_real, n_generated):
    many = cells(30, 6)
    function(many[:n_real], many[-n_generated:])
    with pytest.raises(ValueError, match=f"real has {n_real - 1} cells; at least {n_real} are needed"):
        function(many[: n_real - 1], many)
    with pytest.raises(ValueError, match=f"generated has {n_generated - 1} cells; at least {n_generated} are needed"):
        function(many, many[: n_generated - 1])


def test_cells_that_tell_nothing_are_refused():
    real, equal = cells(20, 6), np.ones((20, 6))
    with pytest.raises(ValueError, match="All 10 cells are equal: they have no principal components"):
        mmd(equal, real)
    with pytest.raises(ValueError, match="At least half of the pairs of real cells are at one point"):
        mmd(np.vstack([np.ones((60, 6)), real[:8]]), real)
    with pytest.raises(ValueError, match="All 40 cells are equal"):
        discriminator_auroc(equal, equal)
    with pytest.raises(ValueError, match="All cells are equal: there is nothing to tell apart"):
        discriminator_auroc(equal, equal, classifier="logistic")
    with pytest.raises(ValueError, match="All 20 real cells are equal; how near others are needs two that differ"):
        copies(equal, real)
    two_of_three = np.where([[1, 1, 0, 0, 0, 0]], real, 1.0)
    with pytest.raises(ValueError, match="2 of 6 genes vary among the real cells; at least 3 are needed"):
        correlation_agreement(two_of_three, real)


def test_real_cells_on_one_spot_of_few_components_are_refused():
    """Cells that differ only beside the first component: distances of 0 would hide every copy."""
    real = np.repeat(np.array([[0.0, 0.0, 5.0], [50.0, 0.0, 5.0]]), 10, axis=0)
    real[:, 1] = np.tile(np.arange(10.0), 2)
    with pytest.raises(ValueError, match=r"of 20 real cells, none of them equal, are where another one is"):
        copies(real, real, n_components=1)
    assert copies(real, real).exact == 20


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (mmd, {"n_components": 0}, "n_components must be 1 or more, got 0"),
        (copies, {"n_components": 0}, "n_components must be 1 or more, got 0"),
        (correlation_agreement, {"n_genes": 2}, "n_genes must be 3 or more, got 2"),
        (discriminator_auroc, {"n_splits": 1}, "n_splits must be 2 or more, got 1"),
        (discriminator_auroc, {"classifier": "svm"}, "classifier must be 'forest' or 'logistic', got 'svm'"),
    ],
)
def test_other_arguments_are_refused(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(cells(20, 6), cells(20, 6), **arguments)
