"""Fit an annotation head on labelled cells held in memory, and calibrate its predictions on held-out ones.

:func:`fit_head` fits it, :func:`held_out` predicts held-out cells in three folds, and :func:`calibrate` fits
temperature and novelty on these predictions. For a model that is fine-tuned (:mod:`scdiva.train.finetune`) there is one
split in place of the folds: :func:`hold_out` and :func:`predicted`.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from torch import Tensor, nn

from scdiva._labels import many_labels_accepted
from scdiva._rng import step_seed
from scdiva._settings import progress_bar
from scdiva.annotation.head import CLIP, AnnotationHead, HeadSizes, Neighbors, Read
from scdiva.data.memory import InMemoryCells
from scdiva.embedding.dataset_pcs import N_DIRECTIONS, own_directions
from scdiva.metrics.annotation import calibration
from scdiva.train.linear_map import DEVIATION_OFFSET
from scdiva.train.loop import shuffled, train_steps

INVERSE_PENALTY, NOVELTY_INVERSE_PENALTY = 0.01, 0.1
"""C of the logistic regressions for labels and for novelty: the quadratic penalty is 1 / (2 C)."""
N_GENES = 2000
"""Maximum number of single genes that are read: those of the highest variance."""
GENE_WEIGHT = 2.0
"""Root of the total variance of the genes that labels are taken from, relative to that of the state."""
FOLD_TOLERANCE = 3e-3
"""Tolerance of the logistic regressions for labels that are fitted for calibration only."""
FOLDS = 3
"""Parts in which cells are held out to see how good predictions are."""
MOST_FITTED, MOST_HELD_OUT, LEAST_OF_LABEL = 20_000, 5_000, 50
"""Most cells that a classifier is fitted on, most that are held out in turn, and how many of each label are then kept
at least (or all)."""
FEW = 5
"""Held-out cells of a label below which its mean and deviation are those of all labels."""
MOST_UNLABELLED = 5_000
"""Most unlabelled cells that a logistic regression is fitted on too."""
FEW_LABELLED = 50
"""Labelled cells of a label, on average, from which on it is fitted on these alone."""
SHARPNESS = 20.0
"""Logits per unit of cosine with a centroid, in guessing the labels of those."""
VARIANCE_OFFSET = 1e-12
"""Added to the variance of a feature, which may be 0."""
ABSENT = -30.0
"""Logit of a label that a fold has no cell of."""
BLOCK_CELLS = 2048
"""Cells read at once."""
CELLS, BATCHES = "held-out cells", "held-out batches"
"""What the novelties that rejection is calibrated on were measured on."""
HELD_OUT = 0.1
"""Minimum share of the labelled cells that fine-tuning holds out."""
PROBE_STEPS, PROBE_EPOCHS, PROBE_CELLS, PROBE_RATE = 300, 100, 256, 2e-3
"""Maximum number of training steps of the multilayer perceptron and of passes over its cells, cells of a step, and
maximum learning rate."""


class Reference(NamedTuple):
    """Cells that are known.

    Attributes
    ----------
    cells
        Their genes.
    states
        What the model makes of each, float32 `(n_cells, state_dim)`.
    labels
        Label numbers from 0, int64 `(n_cells,)`; -1 for none.
    """

    cells: InMemoryCells
    states: Tensor
    labels: np.ndarray


class HeldOut(NamedTuple):
    """Predictions of classifiers for cells that they were not fitted on.

    Attributes
    ----------
    rows
        Numbers of the cells in the reference `(n,)`.
    labels
        True labels `(n,)`.
    logits, novelty_logits, cosines
        `(n, n_labels)`: their logits, those that novelty is measured by, and the cosines with centroids of the other
        cells.
    """

    rows: np.ndarray
    labels: np.ndarray
    logits: np.ndarray
    novelty_logits: np.ndarray
    cosines: np.ndarray


@torch.no_grad()
def fit_head(
    reference: Reference, method: str, n_labels: int, n_tokens: int, seed: int, n_neighbors: int = 15
) -> AnnotationHead:
    """Fit a head on a reference.

    Unlabelled cells have a part in what is fitted without labels: the own projection, means and deviations. And where
    labels have fewer than 50 cells on average, the logistic regression for novelty is fitted twice, the second time on
    them too: each then counts as a cell of the label that the first fit and the nearest centroid name together, by the
    square of how sure they are. Of more labelled cells that is no help, and types that have no label yet would be drawn
    to those that have one.

    The multilayer perceptron of `"probe"` is trained on the labelled cells by cross-entropy with balanced label weights
    (AdamW, 300 steps of 256 cells or 100 epochs, cosine decay of the learning rate from 2e-3).

    Parameters
    ----------
    reference
        At least two labels.
    method
        See `AnnotationHead`.
    n_labels, n_tokens
        Sizes.
    seed
        Of the cells that are drawn from many, and of the perceptron's initial weights and the order of its cells.
    n_neighbors
        Neighbours that vote.

    Returns
    -------
    The head; its temperature and what novelty is measured by are not settled yet (:func:`calibrate`).
    """
    cells, linear = reference.cells, method == "linear"
    own = own_directions(cells, n_tokens, N_DIRECTIONS) if linear else torch.zeros(n_tokens, 0)
    genes = _variable_genes(cells, n_tokens) if linear else np.zeros(0, dtype=np.int64)
    rows = _subset(reference.labels, MOST_FITTED, seed)
    known = len(rows)
    state_dim, own_dim, n_known = reference.states.shape[1], own.shape[1], known if method == "knn" else 0
    sizes = HeadSizes(method, n_labels, state_dim, n_tokens, own_dim, len(genes), n_known, n_neighbors)
    with torch.random.fork_rng(devices=[]):  # what layers begin with is overwritten, and the user's stream stays
        head = AnnotationHead(sizes)
    if head.own is not None:
        head.own.weight.copy_(own)
    head.gene_tokens.copy_(torch.from_numpy(genes))
    u, expression = read_cells(head, reference, np.arange(cells.n_cells)[:: -(-cells.n_cells // MOST_FITTED)])
    set_moments(head, u)
    if expression is not None:
        head.gene_mean.copy_(expression.mean(dim=0))
        head.gene_scale.copy_(expression.std(dim=0) + DEVIATION_OFFSET)
        scaled = ((expression - head.gene_mean) / head.gene_scale).clamp_(-CLIP, CLIP)
        # genes and features weigh the same, however many genes there are
        head.gene_weight.fill_((sizes.dim / float(scaled.square().sum(dim=1).mean().clamp_min(1e-12))) ** 0.5)
        width, total = sizes.state_dim, expression.var(dim=0, correction=0).sum().clamp_min(VARIANCE_OFFSET)
        head.state_factor.fill_((width / head.feature_scale[:width].square().sum()) ** 0.5)
        head.gene_factor.fill_(GENE_WEIGHT * (width / total) ** 0.5)
        rows = np.concatenate([rows, _helpers(reference.labels, seed)])
    y = reference.labels[rows]
    u, expression = read_cells(head, reference, rows)
    labelled = y >= 0
    _train(head.classifier, head.inputs(u, expression)[labelled], y[labelled], seed)
    if head.novelty_classifier is not None:
        _train_novelty(head.novelty_classifier, head.novelty_inputs(u, expression), u, y)
    head.centroids.copy_(state_centroids(head, u[:known], y[:known]))
    return head


@torch.no_grad()
def held_out(head: AnnotationHead, reference: Reference, seed: int, *, by_batch: bool = False) -> HeldOut:
    """Fit classifiers anew on all but a part of the labelled cells, and predict that part, in turn.

    Each label is dealt out over the parts, so that a label of two cells or more is known to every classifier but that
    of one part; the only cell of a label is left out.

    Parameters
    ----------
    head
        From :func:`fit_head`; not changed.
    reference, seed
        As there.
    by_batch
        Hold out whole batches instead. Cells of a label that no other part has are then left out, and all cells if
        there is one batch.
    """
    rows, s = _subset(reference.labels, MOST_HELD_OUT, seed), head.sizes
    if by_batch:
        fold = _batches_dealt(reference.cells.batch[rows])
    else:
        fold = _dealt(reference.labels[rows], np.random.default_rng(step_seed(seed, 0, "folds")))
    if s.method == "linear":  # unlabelled cells are in no part, and help every fit
        others = _helpers(reference.labels, seed)
        rows, fold = np.concatenate([rows, others]), np.concatenate([fold, np.full(len(others), -1)])
    u, expression = read_cells(head, reference, rows)
    x, of_novelty, y = head.inputs(u, expression), head.novelty_inputs(u, expression), reference.labels[rows]
    none = np.zeros((0, s.n_labels), dtype=np.float32)
    parts = [(rows[:0], rows[:0], none, none, none)]
    for number in progress_bar(range(FOLDS), desc="calibrating", unit="fold"):
        training = fold != number
        known = training & (y >= 0)
        present = np.unique(y[known])
        asked = np.flatnonzero(~training & np.isin(y, present))
        if len(present) < 2 or not len(asked):
            continue
        fitted = copy.deepcopy(head.classifier)
        if s.method == "knn":
            fitted = Neighbors(int(training.sum()), s.dim, s.n_labels, s.n_neighbors)
        _train(fitted, x[known], y[known], seed, FOLD_TOLERANCE)
        logits = novelty_logits = fitted(x[asked]).numpy()
        if head.novelty_classifier is not None:
            layer = copy.deepcopy(head.novelty_classifier)
            _train_novelty(layer, of_novelty[training], u[training], y[training])
            novelty_logits = layer(of_novelty[asked]).numpy()
        cosines = head.cosines(u[asked], state_centroids(head, u[known], y[known]))
        parts.append((rows[asked], y[asked], logits, novelty_logits, cosines.numpy()))
    return HeldOut(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def hold_out(labels: np.ndarray, batch: np.ndarray, seed: int) -> np.ndarray:
    """Select labelled cells to hold out: whole batches, at least a tenth of the cells; else a tenth of the cells.

    Every label keeps a training cell: no cell is held out of a label that is in the selected batches only. Single cells
    are held out where there is one batch or no label is in two; none is where each label has one cell.

    Parameters
    ----------
    labels
        Label numbers from 0, -1 for none, `(n_cells,)`.
    batch
        Batch numbers, `(n_cells,)`.
    seed
        Of the selection.

    Returns
    -------
    bool `(n_cells,)`.
    """
    rng = np.random.default_rng(step_seed(seed, 0, "split"))
    known = np.flatnonzero(labels >= 0)
    names, held = rng.permutation(np.unique(batch[known])), np.zeros(len(labels), dtype=bool)
    shares = np.array([(batch[known] == name).mean() for name in names]).cumsum()
    whole = np.isin(batch, names[: min(int(np.searchsorted(shares, HELD_OUT)) + 1, len(names) - 1)])
    held[known] = whole[known] & np.isin(labels[known], labels[~whole])
    if not held.any():
        left = np.bincount(labels[known])
        for cell in rng.permutation(known):
            if left[labels[cell]] > 1 and held.sum() < max(1, round(HELD_OUT * len(known))):
                held[cell] = True
                left[labels[cell]] -= 1
    return held


@torch.no_grad()
def predicted(head: AnnotationHead, reference: Reference, rows: np.ndarray) -> HeldOut:
    """Predict cells that a head was not fitted on.

    Parameters
    ----------
    head
        That of `"probe"`; not changed.
    reference
        Labelled cells.
    rows
        Numbers of those to predict.
    """
    if not len(rows):
        none = np.zeros((0, head.sizes.n_labels), dtype=np.float32)
        return HeldOut(rows, reference.labels[rows], none, none, none)
    u, genes = read_cells(head, reference, rows)
    logits = head.classifier(head.inputs(u, genes)).numpy()
    return HeldOut(rows, reference.labels[rows], logits, logits, head.cosines(u, head.centroids).numpy())


@torch.no_grad()
def calibrate(head: AnnotationHead, found: HeldOut, of_batches: HeldOut | None = None) -> dict[str, Any]:
    """Fit a head's temperature, and the moments that its novelty is measured by; in place.

    The temperature is that of least cross-entropy.

    Parameters
    ----------
    head
        Changed in place. Without a held-out cell it is left as it is.
    found
        Predictions for held-out cells.
    of_batches
        Predictions for cells whose whole batch was held out. They replace `found` for these cells in the novelties that
        rejection is calibrated on, and nowhere else.

    Returns
    -------
    `temperature`, `n_held_out`, `ece`, `accuracy` and `loss` (cross-entropy of the calibrated probabilities) of the
    held-out cells (NaN without), `reliability` (arrays `confidence`, `accuracy`, `n_cells`), `novelty`, the novelties
    that rejection is calibrated on, ascending, and `max_novelty_from`, `"held-out batches"` or `"held-out cells"`.
    """
    (rows, y, logits, novelty_logits, cosines), n_labels = found, head.sizes.n_labels
    notes: dict[str, Any] = {"temperature": 1.0, "n_held_out": len(y), "max_novelty_from": CELLS}
    notes |= dict.fromkeys(("accuracy", "loss", "ece"), np.nan)
    if not len(y):
        return notes | {"reliability": {}, "novelty": np.zeros(0, dtype=np.float32)}
    own = np.arange(len(y)), y

    def cross_entropy(log_temperature: float) -> float:
        return -float(log_softmax(logits / np.exp(log_temperature), axis=1)[own].mean())

    best = minimize_scalar(cross_entropy, bounds=(-3.0, 3.0), method="bounded")
    head.temperature.fill_(float(np.exp(best.x)))
    named = logits.argmax(axis=1)
    for name, values, group in (
        ("logit", novelty_logits.max(axis=1), novelty_logits.argmax(axis=1)),
        ("cosine", cosines[own], y),
    ):
        mean, scale = _moments(values, group, n_labels)
        getattr(head, f"{name}_mean").copy_(torch.from_numpy(mean))
        getattr(head, f"{name}_scale").copy_(torch.from_numpy(scale))
    judged = calibration(softmax(logits / float(head.temperature), axis=1).max(axis=1), named == y)
    head.novelty_mean.zero_()
    novelty = _novelty(head, found)
    head.novelty_mean.fill_(float(novelty.mean()))
    novelty = novelty - head.novelty_mean
    if of_batches is not None and len(of_batches.rows):
        others = torch.from_numpy(~np.isin(rows, of_batches.rows))
        novelty = torch.cat([novelty[others], _novelty(head, of_batches)])
        notes["max_novelty_from"] = BATCHES
    notes |= {"temperature": float(head.temperature), "accuracy": float((named == y).mean()), "loss": float(best.fun)}
    notes["ece"] = judged.pop("ece")
    return notes | {"reliability": judged, "novelty": np.sort(novelty.numpy())}


def _novelty(head: AnnotationHead, found: HeldOut) -> Tensor:
    """Novelties `(n,)` of held-out cells."""
    return head.novelty(torch.from_numpy(found.novelty_logits).float(), torch.from_numpy(found.cosines).float())


def read_cells(head: AnnotationHead, reference: Reference, rows: np.ndarray) -> tuple[Tensor, Tensor | None]:
    """Features `(n, dim)` of some cells, and their single genes `(n, n_genes)`, None without any."""
    features, genes = [], []
    for start in range(0, len(rows), BLOCK_CELLS):
        block = rows[start : start + BLOCK_CELLS]
        read = Read(reference.states[block], *reference.cells.take(block).packed)
        features.append(head.features(read))
        if (of_cells := head.genes(read)) is not None:
            genes.append(of_cells)
    return torch.cat(features), torch.cat(genes) if genes else None


@torch.no_grad()
def set_moments(head: AnnotationHead, u: Tensor) -> None:
    """Set the mean and standard deviation by which a head standardises, to those of features `(n, dim)`; in place."""
    variance, mean = torch.var_mean(u, dim=0)
    head.feature_mean.copy_(mean)
    head.feature_scale.copy_((variance + VARIANCE_OFFSET).sqrt())


def state_centroids(head: AnnotationHead, u: Tensor, y: np.ndarray) -> Tensor:
    """Centroids `(n_labels, state_dim)` of the states in features u `(n, dim)`."""
    return _centroids(F.normalize(u[:, : head.sizes.state_dim], dim=1), y, head.sizes.n_labels)


def _variable_genes(cells: InMemoryCells, n_tokens: int) -> np.ndarray:
    """Tokens of the 2,000 genes of the highest variance, ascending; none of a gene that does not vary."""
    matrix = cells.matrix(n_tokens).astype(np.float64)
    mean = np.asarray(matrix.mean(axis=0)).ravel()
    variance = np.asarray(matrix.multiply(matrix).mean(axis=0)).ravel() - mean**2
    genes = np.argsort(-variance, kind="stable")[:N_GENES]
    varying: np.ndarray = np.sort(genes[variance[genes] > VARIANCE_OFFSET])
    return varying


def _subset(labels: np.ndarray, most: int, seed: int) -> np.ndarray:
    """Rows of labelled cells, ascending: all, or about `most`, in proportion, but of no label too few."""
    rows = np.flatnonzero(labels >= 0)
    rng = np.random.default_rng(step_seed(seed, most, "subset"))
    kept = []
    for label in np.unique(labels[rows]):
        own = np.flatnonzero(labels == label)
        n = min(len(own), max(LEAST_OF_LABEL, round(most * len(own) / len(rows))))
        kept.append(rng.choice(own, n, replace=False))
    return np.sort(np.concatenate(kept))


def _helpers(labels: np.ndarray, seed: int) -> np.ndarray:
    """Rows of unlabelled cells that help where few are labelled, ascending: all, 5,000, or none."""
    rows, known = np.flatnonzero(labels < 0), labels[labels >= 0]
    if len(known) >= FEW_LABELLED * len(np.unique(known)):
        return rows[:0]
    rng = np.random.default_rng(step_seed(seed, 0, "unlabelled"))
    return np.sort(rng.choice(rows, min(len(rows), MOST_UNLABELLED), replace=False))


def _dealt(y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Deal cells out: those of a label, shuffled, go to the parts in turn, on from where the last label ended."""
    order = rng.permutation(len(y))
    order = order[np.argsort(y[order], kind="stable")]
    fold = np.empty(len(y), dtype=np.int64)
    fold[order] = np.arange(len(y)) % FOLDS
    return fold


def _batches_dealt(batch: np.ndarray) -> np.ndarray:
    """Assign whole batches to the parts, from the largest to the smallest, each to the part of fewest cells."""
    _, of_cell, counts = np.unique(batch, return_inverse=True, return_counts=True)
    part, sizes = np.empty(len(counts), dtype=np.int64), np.zeros(FOLDS, dtype=np.int64)
    for number in np.argsort(-counts, kind="stable"):
        part[number] = sizes.argmin()
        sizes[part[number]] += counts[number]
    return part[of_cell]


def _moments(values: np.ndarray, group: np.ndarray, n_groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of each group; those of all values for groups of few."""
    mean, scale = np.full(n_groups, values.mean()), np.full(n_groups, values.std())
    for number in range(n_groups):
        own = values[group == number]
        if len(own) >= FEW:
            mean[number], scale[number] = own.mean(), own.std()
    return mean.astype(np.float32), np.maximum(scale, 1e-3 * max(1e-3, float(values.std()))).astype(np.float32)


def _centroids(u: Tensor, y: np.ndarray, n_labels: int) -> Tensor:
    """Mean direction of each label, of length 1; 0 for a label without cells."""
    sums = torch.zeros(n_labels, u.shape[1]).index_add_(0, torch.from_numpy(y), u)
    return F.normalize(sums, dim=1)


def balanced_weights(labels: np.ndarray, n_labels: int) -> Tensor:
    """Weights `(n_labels,)` by which every label counts the same; the mean weight of a cell is 1.

    Parameters
    ----------
    labels
        Label numbers of the cells, from 0; a label without cells gets 0.
    n_labels
        Number of labels.
    """
    counts = np.bincount(labels, minlength=n_labels)
    return torch.from_numpy(np.where(counts, len(labels) / (counts > 0).sum() / np.maximum(counts, 1), 0.0)).float()


def _train(classifier: nn.Module, x: Tensor, y: np.ndarray, seed: int, tolerance: float = 1e-4) -> None:
    """Fit a classifier on inputs x and labels; in place."""
    if isinstance(classifier, Neighbors):
        classifier.known.copy_(x)
        classifier.label.copy_(torch.from_numpy(y))
        return
    if isinstance(classifier, nn.Sequential):
        _train_perceptron(classifier, x, y, seed)
        return
    assert isinstance(classifier, nn.Linear)
    # between studies many genes shift together, and a free intercept calls all cells the same
    _train_linear(classifier, x, y, INVERSE_PENALTY, tolerance=tolerance, intercept=False)


def _train_novelty(classifier: nn.Linear, x: Tensor, u: Tensor, y: np.ndarray) -> None:
    """Fit the layer of the novelty's logits; in place. It takes labels of -1 too."""
    known = y >= 0
    _train_linear(classifier, x[known], y[known], NOVELTY_INVERSE_PENALTY)
    if not known.all():
        cosines = u @ _centroids(u[known], y[known], classifier.out_features).T
        guess = (classifier(x).log_softmax(dim=1) + (SHARPNESS * cosines).log_softmax(dim=1)).softmax(dim=1)
        sure, named = (part.numpy() for part in guess.max(dim=1))
        named[known] = y[known]
        _train_linear(classifier, x, named, NOVELTY_INVERSE_PENALTY, np.where(known, 1.0, sure.astype(np.float64) ** 2))


def _train_linear(
    classifier: nn.Linear,
    x: Tensor,
    y: np.ndarray,
    inverse_penalty: float,
    sample_weight: np.ndarray | None = None,
    *,
    tolerance: float = 1e-4,
    intercept: bool = True,
) -> None:
    """Multinomial logistic regression with a quadratic penalty, in which every label counts the same."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(
        C=inverse_penalty, class_weight="balanced", max_iter=500, tol=tolerance, fit_intercept=intercept
    )
    with many_labels_accepted():
        found = model.fit(x.numpy(), y, sample_weight=sample_weight)
    weight, bias = found.coef_, found.intercept_ if intercept else np.zeros(len(found.coef_))
    if len(found.classes_) == 2:  # one column for both
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    classifier.weight.zero_()
    classifier.bias.fill_(ABSENT)
    classes = torch.from_numpy(found.classes_)
    classifier.weight[classes] = torch.from_numpy(weight).float()
    classifier.bias[classes] = torch.from_numpy(bias).float()


@torch.enable_grad()
def _train_perceptron(classifier: nn.Sequential, x: Tensor, y: np.ndarray, seed: int) -> None:
    """Train a multilayer perceptron from new weights, by cross-entropy in which every label counts the same."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(step_seed(seed, 0, "probe"))
        for layer in classifier:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
    size = min(PROBE_CELLS, len(y))
    labels, weight = torch.from_numpy(y), balanced_weights(y, len(classifier(x[:1])[0]))
    rows, steps = shuffled(np.arange(len(y)), size, seed, whole=True), min(PROBE_STEPS, PROBE_EPOCHS * (len(y) // size))

    def loss_of(step: int) -> Tensor:
        chosen = torch.from_numpy(next(rows))
        return F.cross_entropy(classifier(x[chosen]), labels[chosen], weight=weight)

    _, stopped = train_steps(
        classifier,
        loss_of,
        lambda step: PROBE_RATE * (0.05 + 0.95 * 0.5 * (1 + np.cos(np.pi * (step - 1) / steps))),
        steps=steps,
        desc="training the classifier",
    )
    if stopped == "interrupted":
        raise KeyboardInterrupt
