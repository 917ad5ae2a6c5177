"""Fit of the annotation head: classifiers compared with sklearn's, and held-out cells that are not used in any fit."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax, softmax
from sklearn.linear_model import LogisticRegression
from sklearn.utils.class_weight import compute_sample_weight
from torch import nn

from scdiva._constants import N_SPECIAL
from scdiva.annotation import fit as A
from scdiva.annotation.annotator import METHODS, AnnotationHead, HeadSizes, Neighbors
from scdiva.data.batch import InMemoryCells
from scdiva.metrics import calibration

N_TOKENS, STATE_DIM, N_LABELS = 33, 5, 3


def make_reference(n: int = 90, unlabelled: int = 0, seed: int = 0) -> A.Reference:
    """Cells of two batches; each label has a third of the genes as markers and its own direction of the state."""
    draw = np.random.default_rng(seed)
    labels = draw.permutation(np.arange(n) % N_LABELS)
    liked = np.arange(30) // 10 == labels[:, None]
    x = draw.gamma(2, np.where(liked, 0.8, 0.4)) * (draw.random((n, 30)) < np.where(liked, 0.8, 0.3))
    x, measured = sp.csr_matrix(x, dtype=np.float32), np.arange(30) + N_SPECIAL
    tokens = x.indices.astype(np.int64) + N_SPECIAL
    cells = InMemoryCells(x.indptr.astype(np.int64), tokens, x.data, np.arange(n) * 2 // n, measured, 2)
    states = torch.from_numpy(draw.normal(size=(n, STATE_DIM)) + 2 * np.eye(N_LABELS, STATE_DIM)[labels]).float()
    labels[:unlabelled] = -1
    return A.Reference(cells, states, labels)


def fit(reference, method, n_labels=N_LABELS, seed=0) -> AnnotationHead:
    return A.fit_head(reference, method, n_labels, N_TOKENS, seed, n_neighbors=5)


@pytest.fixture(scope="module")
def reference():
    return make_reference()


@pytest.fixture(scope="module")
def heads(reference):
    """A head of each method, and its predictions for held-out cells."""
    fitted = {method: fit(reference, method) for method in METHODS}
    return {method: (head, A.predict_folds(head, reference, 0)) for method, head in fitted.items()}


def dense(reference) -> np.ndarray:
    cells = reference.cells
    return sp.csr_matrix((cells.values, cells.tokens, cells.indptr), shape=(cells.n_cells, N_TOKENS)).toarray()


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(first, second) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def test_moments_are_those_of_the_reference(heads, reference):
    head = heads["linear"][0]
    assert head.sizes.own_dim > 0
    u, genes = A.read_features(head, reference, np.arange(90))
    torch.testing.assert_close(head.feature_mean, u.mean(dim=0))
    torch.testing.assert_close(head.feature_scale, u.std(dim=0).clamp_min(1e-6))
    expected = dense(reference)[:, head.gene_tokens.numpy()]
    np.testing.assert_allclose(genes, expected, rtol=1e-6)
    np.testing.assert_allclose(head.gene_mean, expected.mean(axis=0), rtol=1e-5)
    for label in range(N_LABELS):
        states = reference.states[torch.from_numpy(reference.labels == label)]
        mean = (states / states.norm(dim=1, keepdim=True)).sum(dim=0)
        torch.testing.assert_close(head.centroids[label], mean / mean.norm())


def test_genes_are_the_measured_ones_of_highest_variance(heads, reference, monkeypatch):
    tokens = heads["linear"][0].gene_tokens.numpy()
    assert set(tokens) <= set(reference.cells.measured)
    assert (np.diff(tokens) > 0).all()
    monkeypatch.setattr(A, "N_GENES", 7)
    top_tokens = fit(reference, "linear").gene_tokens.numpy()
    x = dense(reference)
    measured = reference.cells.measured
    assert set(top_tokens) == set(measured[np.argsort(-x.var(axis=0)[measured])[:7]])


@pytest.mark.parametrize("novelty", [False, True])
def test_linear_is_the_logistic_regression_of_sklearn(reference, monkeypatch, novelty):
    monkeypatch.setattr(A, "INVERSE_PENALTY", 0.3)
    monkeypatch.setattr(A, "NOVELTY_INVERSE_PENALTY", 0.3)
    rare = np.where((reference.labels == 2) & (np.arange(90) > 40), 0, reference.labels)
    data = reference._replace(labels=rare)
    head = fit(data, "linear")
    layer, inputs = (head.novelty_classifier, head.novelty_inputs) if novelty else (head.classifier, head.inputs)
    x = inputs(*A.read_features(head, data, np.arange(90))).detach().numpy()
    weights = compute_sample_weight("balanced", rare)
    regression = LogisticRegression(C=0.3, max_iter=5000, tol=1e-8, fit_intercept=novelty)
    regression.fit(x.astype(np.float64), rare, sample_weight=weights)
    probability = layer(torch.from_numpy(x)).softmax(dim=1).detach()
    np.testing.assert_allclose(probability, regression.predict_proba(x), atol=3e-3)


def test_labels_are_taken_from_the_centred_state_and_from_genes_that_are_not(heads, reference):
    head = heads["linear"][0]
    u, genes = A.read_features(head, reference, np.arange(90))
    x = head.inputs(u, genes).detach().numpy()
    state = nn.functional.normalize(reference.states, dim=1).numpy()
    state -= state.mean(axis=0)
    factor = (STATE_DIM / state.var(axis=0, ddof=1).sum()) ** 0.5
    np.testing.assert_allclose(x[:, :STATE_DIM], factor * state, rtol=1e-3, atol=1e-5)
    factor = A.GENE_WEIGHT * (STATE_DIM / genes.numpy().var(axis=0).sum()) ** 0.5
    np.testing.assert_allclose(x[:, STATE_DIM:], factor * genes, rtol=1e-4)


def test_two_classes_and_a_class_that_a_fold_lacks():
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.normal(size=(40, 4))).float()
    y = (x[:, 0] + 0.5 * torch.from_numpy(draw.normal(size=40)) > 0).long().numpy()
    layer = nn.Linear(4, 3)
    layer.requires_grad_(False)
    A._fit_novelty(layer, x, x, np.where(y == 1, 2, 0))  # nothing of label 1
    regression = LogisticRegression(C=A.NOVELTY_INVERSE_PENALTY, class_weight="balanced").fit(x.numpy(), y)
    probability = layer(x).softmax(dim=1).numpy()
    np.testing.assert_allclose(probability[:, [0, 2]], regression.predict_proba(x.numpy()), atol=1e-5)
    assert probability[:, 1].max() < 1e-9


@pytest.mark.parametrize("method", METHODS)
def test_no_held_out_cell_is_in_its_own_fit(method, heads, reference, monkeypatch):
    """Other labels, genes and states for the cells of one fold do not change the fit that predicts these cells."""
    fold = np.arange(90) % A.FOLDS
    monkeypatch.setattr(A, "_label_folds", lambda y, rng: fold)
    head, part = heads[method][0], fold == 1
    before = A.predict_folds(head, reference, 0)
    np.testing.assert_array_equal(before.labels, np.concatenate([reference.labels[fold == k] for k in range(3)]))
    renamed = np.where(part, (reference.labels + 1) % N_LABELS, reference.labels)
    after = A.predict_folds(head, reference._replace(labels=renamed), 0)
    at = np.sort(fold) == 1
    np.testing.assert_array_equal(after.logits[at], before.logits[at])
    np.testing.assert_array_equal(after.cosines[at], before.cosines[at])
    assert not np.array_equal(after.logits[~at], before.logits[~at])
    one = int(np.flatnonzero(part)[4])  # another cell in its place: the others of its part hear the same
    values, states = reference.cells.values.copy(), reference.states.clone()
    values[reference.cells.indptr[one] : reference.cells.indptr[one + 1]] *= 3
    states[one] *= -1
    changed = A.Reference(replace(reference.cells, values=values), states, reference.labels)
    after = A.predict_folds(head, changed, 0)
    at[np.flatnonzero(at)[4]] = False
    np.testing.assert_allclose(after.logits[at], before.logits[at], atol=1e-5)
    assert np.abs(after.logits[np.sort(fold) != 1] - before.logits[np.sort(fold) != 1]).max() > 1e-4


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=80), st.integers(0, 99))
def test_each_label_is_dealt_out(labels, seed):
    y = np.array(labels)
    fold = A._label_folds(y, np.random.default_rng(seed))
    for label in np.unique(y):
        counts = np.bincount(fold[y == label], minlength=A.FOLDS)
        assert counts.max() - counts.min() <= 1
    sizes = np.bincount(fold, minlength=A.FOLDS)
    assert sizes.max() - sizes.min() <= 1  # few labels of few cells do not all land in the first part


def test_singletons_are_left_out_and_pairs_are_not(reference):
    labels = np.where(reference.labels == 2, 0, reference.labels)
    labels[[3, 8]], labels[50] = 2, 3
    data = reference._replace(labels=labels)
    head = fit(data, "linear", 4)
    held_out = A.predict_folds(head, data, 0)
    assert np.bincount(held_out.labels, minlength=4).tolist()[2:] == [2, 0]
    assert len(held_out.labels) == 89
    alone = reference._replace(labels=np.where(np.arange(90) == 0, 0, np.where(np.arange(90) == 1, 1, -1)))
    head = fit(alone, "linear", 2)
    held_out = A.predict_folds(head, alone, 0)
    assert [part.shape for part in held_out] == [(0,), (0,), (0, 2), (0, 2), (0, 2)]
    before = state_of(head)
    notes = A.calibrate(head, held_out)
    assert same(state_of(head), before)
    assert (notes["temperature"], notes["n_held_out"], notes["reliability"], len(notes["novelty"])) == (1.0, 0, {}, 0)
    assert np.isnan([notes["ece"], notes["accuracy"]]).all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=80))
def test_whole_batches_are_dealt_out(batch):
    batch = np.array(batch)
    part = A._batch_folds(batch)
    assert all(len(set(part[batch == name])) == 1 for name in batch)
    counts = np.bincount(batch)
    sizes = np.bincount(part, minlength=A.FOLDS)
    assert np.count_nonzero(sizes) == min(A.FOLDS, np.count_nonzero(counts))
    assert sizes.max() - sizes.min() <= counts.max()


@torch.no_grad()
@pytest.mark.parametrize("method", ["linear", "knn"])
def test_a_held_out_batch_is_predicted_from_the_other_batches(heads, reference, method):
    """Cells 0 to 44 are one batch. A label that the other batch lacks is left out; of one batch all cells are."""
    labels = reference.labels.copy()
    labels[45:][labels[45:] == 2] = 0
    data, head = reference._replace(labels=labels), heads[method][0]
    held_out = A.predict_folds(head, data, 0, by_batch=True)
    assert sorted(held_out.rows) == [cell for cell in range(90) if labels[cell] != 2]
    np.testing.assert_array_equal(held_out.labels, labels[held_out.rows])
    u, genes = A.read_features(head, data, np.arange(90))
    x, second = head.inputs(u, genes), held_out.rows >= 45
    classifier = copy.deepcopy(head.classifier)
    if method == "knn":
        classifier = Neighbors(45, head.sizes.dim, N_LABELS, head.sizes.n_neighbors)
    A._fit_classifier(classifier, x[:45], labels[:45], 0, A.FOLD_TOLERANCE)
    np.testing.assert_allclose(held_out.logits[second], classifier(x[held_out.rows[second]]), atol=1e-5)
    centroids = A.state_centroids(head, u[:45], labels[:45])
    np.testing.assert_allclose(held_out.cosines[second], head.cosines(u[held_out.rows[second]], centroids), atol=1e-5)
    alone = data._replace(cells=replace(data.cells, batch=np.zeros(90, dtype=np.int64)))
    assert len(A.predict_folds(head, alone, 0, by_batch=True).rows) == 0


@pytest.mark.parametrize(("shift", "raised"), [(0.0, False), (2.0, True)])
def test_a_shift_between_batches_raises_the_novelty_that_rejection_is_calibrated_on(shift, raised):
    """States of the second batch are shifted by a vector that no label has; nothing else changes."""
    data = make_reference(240)
    states = data.states.clone()
    states[120:, 4] += shift
    data = data._replace(states=states)
    head = fit(data, "linear")
    of_cells, of_batches = (A.predict_folds(head, data, 0, by_batch=by_batch) for by_batch in (False, True))
    alone, head_alone = A.calibrate(head, of_cells), state_of(head)
    notes = A.calibrate(head, of_cells, of_batches)
    assert same(state_of(head), head_alone)
    assert (alone["max_novelty_from"], notes["max_novelty_from"]) == ("held-out cells", "held-out batches")
    changed = {"novelty", "max_novelty_from", "reliability"}
    assert all(notes[key] == alone[key] for key in notes.keys() - changed)
    thresholds = [np.quantile(one["novelty"], 0.95) for one in (alone, notes)]
    assert (thresholds[1] > thresholds[0] + 0.3) == raised
    expected = head.novelty(torch.from_numpy(of_batches.novelty_logits), torch.from_numpy(of_batches.cosines))
    np.testing.assert_allclose(notes["novelty"], np.sort(expected.numpy()), atol=1e-5)
    one = A.HeldOut(*(part[:1] for part in of_batches))  # the other cells keep what single cells gave
    assert len(A.calibrate(head, of_cells, one)["novelty"]) == 240


def made_up(seed: int, n: int, sharp: float = 4.0) -> A.HeldOut:
    """Overconfident logits."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(n, N_LABELS))
    labels = np.array([draw.choice(N_LABELS, p=p) for p in softmax(logits, axis=1)])
    return A.HeldOut(np.arange(n), labels, sharp * logits, sharp * logits, draw.uniform(-1, 1, (n, N_LABELS)))


def test_what_calibration_finds():
    held_out = made_up(0, n=300)
    head = AnnotationHead(HeadSizes("linear", N_LABELS, STATE_DIM, N_TOKENS)).requires_grad_(False)
    notes = A.calibrate(head, held_out)
    assert 3 < notes["temperature"] < 5.5  # the truth is 4
    assert float(head.temperature) == pytest.approx(notes["temperature"])
    at_label = np.arange(300), held_out.labels
    losses = [-log_softmax(held_out.logits / t, axis=1)[at_label].mean() for t in np.exp(np.linspace(-3, 3, 300))]
    assert notes["loss"] <= min(losses) + 1e-5
    predicted, y = held_out.logits.argmax(axis=1), held_out.labels
    assert notes["accuracy"] == (predicted == y).mean()
    p = softmax(held_out.logits / notes["temperature"], axis=1).max(axis=1)
    assert notes["ece"] == pytest.approx(calibration(p, predicted == y)["ece"], abs=1e-6)
    assert notes["reliability"].keys() == {"confidence", "accuracy", "n_cells"}
    assert notes["reliability"]["n_cells"].sum() == notes["n_held_out"] == 300
    for k in range(N_LABELS):
        largest, cosine = held_out.logits[predicted == k, k], held_out.cosines[y == k, k]
        actual = [head.logit_mean[k], head.logit_scale[k], head.cosine_mean[k], head.cosine_scale[k]]
        expected = [largest.mean(), largest.std(), cosine.mean(), cosine.std()]
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
    expected = head.novelty(
        torch.from_numpy(held_out.novelty_logits).float(), torch.from_numpy(held_out.cosines).float()
    )
    np.testing.assert_array_equal(notes["novelty"], np.sort(expected.numpy()))
    assert notes["novelty"].dtype == np.float32


def test_moments_of_few_are_those_of_all():
    values, group = np.array([1.0, 2, 3, 4, 5, 60, 70]), np.array([0, 0, 0, 0, 0, 1, 1])
    mean, scale = torch.zeros(3), torch.zeros(3)
    A._set_label_moments(mean, scale, values, group)
    np.testing.assert_allclose(mean, [3, values.mean(), values.mean()], rtol=1e-6)
    np.testing.assert_allclose(scale, [np.std([1, 2, 3, 4, 5]), values.std(), values.std()], rtol=1e-6)
    A._set_label_moments(mean, scale, np.ones(9), np.zeros(9, dtype=int))
    assert (scale > 0).all()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([1, 3, 60, 900]), min_size=1, max_size=5), st.integers(0, 5))
def test_a_subset_keeps_rare_labels(counts, seed):
    labels = np.concatenate([np.repeat(np.arange(len(counts)), counts), [-1] * 7])
    labels = np.random.default_rng(seed).permutation(labels)
    rows = A._subsample(labels, 400, seed)
    assert (np.diff(rows) > 0).all()
    assert (labels[rows] >= 0).all()
    np.testing.assert_array_equal(rows, A._subsample(labels, 400, seed))
    for label, count in enumerate(counts):
        n_rows = int((labels[rows] == label).sum())
        share = count if sum(counts) <= 400 else round(400 * count / sum(counts))
        assert n_rows == min(count, max(A.LEAST_OF_LABEL, share)) if sum(counts) > 400 else n_rows == count
    assert A._subsample(labels, 10**6, seed).tolist() == np.flatnonzero(labels >= 0).tolist()


@pytest.mark.parametrize("method", ["linear", "knn"])
def test_of_many_cells_some_are_fitted_and_held_out(method, reference, monkeypatch):
    monkeypatch.setattr(A, "MOST_FITTED", 40)
    monkeypatch.setattr(A, "MOST_HELD_OUT", 20)
    monkeypatch.setattr(A, "LEAST_OF_LABEL", 2)
    monkeypatch.setattr(A, "BLOCK_CELLS", 7)
    head = fit(reference, method)
    assert 17 <= len(A.predict_folds(head, reference, 0).labels) <= 23
    if method == "knn":
        assert 37 <= head.sizes.n_known <= 43


def test_of_few_labels_unlabelled_cells_take_part(reference):
    labels = reference.labels.copy()
    labelled_rows = np.concatenate([np.flatnonzero(labels == label)[:3] for label in range(N_LABELS)])
    few_labels = np.full_like(labels, -1)
    few_labels[labelled_rows] = labels[labelled_rows]
    data = reference._replace(labels=few_labels)
    assert (A._unlabelled_rows(few_labels, 0) == np.flatnonzero(few_labels < 0)).all()
    helped, alone = fit(data, "linear"), fit(data, "linear")
    assert helped.novelty_classifier is None  # one layer gives labels and novelty
    u, genes = A.read_features(alone, data, labelled_rows)
    with torch.no_grad():
        A._fit_novelty(alone.classifier, alone.inputs(u, genes), u, few_labels[labelled_rows])
    assert not torch.equal(helped.classifier.weight, alone.classifier.weight)
    held_out = A.predict_folds(helped, data, 0)
    assert np.array_equal(held_out.logits, held_out.novelty_logits)


def test_of_many_labels_unlabelled_cells_take_no_part():
    labels = np.repeat([0, 1, -1], [A.FEW_LABELLED + 10, A.FEW_LABELLED - 10, 30])
    assert not len(A._unlabelled_rows(labels, 0))
    assert len(A._unlabelled_rows(labels[1:], 0)) == 30


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 4)), min_size=2, max_size=80), st.integers(0, 9))
def test_every_label_keeps_a_training_cell(cells, seed):
    labels, batch = np.array(cells).T
    labelled = labels >= 0
    if not labelled.any():
        return
    held = A.hold_out(labels, batch, seed)
    assert not held[~labelled].any()
    training, testing = set(labels[labelled & ~held]), set(labels[held])
    assert training == set(labels[labelled])  # so the one cell of a label is never held out
    assert testing or len(training) == labelled.sum()  # something is, unless all labels have one cell
    np.testing.assert_array_equal(held, A.hold_out(labels, batch, seed))


def test_a_tenth_is_held_out_and_whole_batches_where_there_are_some():
    labels = np.arange(200) % 3
    assert A.hold_out(labels, np.zeros(200, dtype=int), 0).sum() == 20
    batch = np.repeat([0, 1, 2, 3], [8, 8, 8, 176])
    for seed in range(8):
        held = A.hold_out(labels, batch, seed)
        of = set(batch[held])
        assert held.sum() == np.isin(batch, list(of)).sum()
        assert held.mean() >= 0.1 or of == {0, 1, 2}
        assert len(of) < 4
    assert len({A.hold_out(labels, batch, seed).tobytes() for seed in range(8)}) > 1
    assert A.hold_out(labels, np.repeat([0, 1], 100), 0).sum() == 100


def test_labels_that_are_in_one_batch_each_are_held_out_cell_by_cell():
    labels = np.repeat([0, 1], [30, 10])
    assert A.hold_out(labels, labels, 0).sum() == 4
    assert not A.hold_out(np.arange(5), np.zeros(5, dtype=int), 0).any()


def test_weights_of_labels_are_those_of_sklearn():
    labels = np.repeat([0, 1, 3], [5, 2, 13])
    weights = A.balanced_weights(labels, 5)
    np.testing.assert_allclose(weights[labels], compute_sample_weight("balanced", labels), rtol=1e-6)
    assert weights[[2, 4]].tolist() == [0, 0]


def test_a_probe_learns_what_no_linear_classifier_can():
    """Two labels by the sign of a product of two coordinates of the state."""
    draw = np.random.default_rng(0)
    states = draw.normal(size=(400, STATE_DIM)).astype(np.float32)
    labels = (states[:, 0] * states[:, 1] > 0).astype(np.int64)
    data = A.Reference(make_reference(400).cells, torch.from_numpy(states), labels)
    held_out = A.predict_folds(fit(data, "probe", 2), data, 0)
    assert (held_out.logits.argmax(axis=1) == held_out.labels).mean() > 0.85


@pytest.mark.parametrize("method", METHODS)
def test_a_fit_does_not_depend_on_the_blocks(method, monkeypatch):
    data = make_reference(90, unlabelled=20)
    state = state_of(fit(data, method))
    monkeypatch.setattr(A, "BLOCK_CELLS", 7)
    assert same(state, state_of(fit(data, method)))
