"""Fit an annotation head on labelled cells held in memory, and calibrate its predictions on held-out ones."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, cast

import numpy as np
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from torch import Tensor, nn

from scdiva._rng import step_generator, step_seed
from scdiva._settings import progress_bar, progress_clock
from scdiva.metrics.annotation import calibration
from scdiva.nn.annotation import CENTROID_SCALE, CLIP, AnnotationHead, HeadSizes, Neighbors, Read
from scdiva.train.adaptation import AdaptationCells
from scdiva.train.config import AnnotationConfig
from scdiva.train.linear_map import DEVIATION_OFFSET, DISPERSION_OFFSET
from scdiva.train.loop import train_steps
from scdiva.train.own_components import N_DIRECTIONS, centred, own_directions

N_GENES = 2000
"""Genes that are read one by one, those of the highest dispersion."""
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
ABSENT = -30.0
"""Logit of a label that a fold has no cell of."""
BLOCK_CELLS = 2048
"""Cells read at once."""


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

    cells: AdaptationCells
    states: Tensor
    labels: np.ndarray


class HeldOut(NamedTuple):
    """Predictions of classifiers for cells that they were not fitted on.

    Attributes
    ----------
    labels
        True labels `(n,)`.
    logits, cosines
        `(n, n_labels)`: their logits, and the cosines with centroids of the other cells.
    """

    labels: np.ndarray
    logits: np.ndarray
    cosines: np.ndarray


@torch.no_grad()
def fit_head(
    reference: Reference, method: str, n_labels: int, n_tokens: int, config: AnnotationConfig
) -> AnnotationHead:
    """Fit a head on a reference; `"finetune"` begins with what this gives for it.

    Unlabelled cells have a part in what is fitted without labels: the own projection, means and deviations. And where
    labels have fewer than 50 cells on average, a logistic regression is fitted twice, the second time on them too: each
    then counts as a cell of the label that the first fit and the nearest centroid name together, by the square of how
    sure they are. Of more labelled cells that is no help, and types that have no label yet would be drawn to those that
    have one.

    Parameters
    ----------
    reference
        At least two labels.
    method
        See :class:`~scdiva.nn.AnnotationHead`.
    n_labels, n_tokens
        Sizes.
    config
        Of the fit.

    Returns
    -------
    The head; its temperature and what novelty is measured by are not settled yet (:func:`calibrate`).
    """
    cells, linear = reference.cells, method in ("linear", "finetune")
    own = own_directions(cells, n_tokens, N_DIRECTIONS) if linear else torch.zeros(n_tokens, 0)
    genes = _variable_genes(cells, n_tokens) if linear else np.zeros(0, dtype=np.int64)
    n_known = len(_subset(reference.labels, MOST_FITTED, config.seed)) if method == "knn" else 0
    sizes = HeadSizes(
        method,
        n_labels,
        reference.states.shape[1],
        n_tokens,
        own_dim=own.shape[1],
        n_genes=len(genes),
        hidden=config.hidden if method == "probe" else 0,
        n_known=n_known,
        n_neighbors=config.n_neighbors,
    )
    with torch.random.fork_rng(devices=[]):  # what layers begin with is overwritten, and the user's stream stays
        head = AnnotationHead(sizes)
    if head.own is not None:
        head.own.weight.copy_(centred(own, cells))
    head.gene_tokens.copy_(torch.from_numpy(genes))
    rows = np.arange(cells.n_cells)[:: -(-cells.n_cells // MOST_FITTED)]
    u, expression = read_cells(head, reference, rows)
    head.feature_mean.copy_(u.mean(dim=0))
    head.feature_scale.copy_(u.std(dim=0).clamp_min(1e-6))
    if expression is not None:
        head.gene_mean.copy_(expression.mean(dim=0))
        head.gene_scale.copy_(expression.std(dim=0) + DEVIATION_OFFSET)
        scaled = ((expression - head.gene_mean) / head.gene_scale).clamp_(-CLIP, CLIP)
        # genes and features weigh the same, however many genes there are
        head.gene_weight.fill_((sizes.dim / float(scaled.square().sum(dim=1).mean().clamp_min(1e-12))) ** 0.5)
    rows = _subset(reference.labels, MOST_FITTED, config.seed)
    known = len(rows)
    if linear:
        rows = np.concatenate([rows, _helpers(reference.labels, config.seed)])
    y = reference.labels[rows]
    with progress_clock("fitting"):
        u, expression = read_cells(head, reference, rows)
        _train(head.classifier, head.inputs(u, expression), u, y, config)
    head.centroids.copy_(state_centroids(head, u[:known], y[:known]))
    return head


@torch.no_grad()
def held_out(head: AnnotationHead, reference: Reference, config: AnnotationConfig) -> HeldOut:
    """Fit classifiers anew on all but a part of the labelled cells, and predict that part, in turn.

    Each label is dealt out over the parts, so that a label of two cells or more is known to every classifier but that
    of one part; the only cell of a label is left out.

    Parameters
    ----------
    head
        From :func:`fit_head`; not changed.
    reference, config
        As there.
    """
    rows, n_labels = _subset(reference.labels, MOST_HELD_OUT, config.seed), head.sizes.n_labels
    fold = _dealt(reference.labels[rows], np.random.default_rng(step_seed(config.seed, 0, "folds")))
    if head.sizes.method in ("linear", "finetune"):  # unlabelled cells are in no part, and help every fit
        others = _helpers(reference.labels, config.seed)
        rows, fold = np.concatenate([rows, others]), np.concatenate([fold, np.full(len(others), -1)])
    u, expression = read_cells(head, reference, rows)
    x, y = head.inputs(u, expression), reference.labels[rows]
    parts = []
    for number in progress_bar(range(FOLDS), desc="calibrating", unit="fold"):
        training = fold != number
        present = np.unique(y[training & (y >= 0)])
        asked = np.flatnonzero(~training & np.isin(y, present))
        if len(present) < 2 or not len(asked):
            continue
        fitted = _blank(head, int(training.sum()))
        _train(fitted, x[training], u[training], y[training], config)
        known = training & (y >= 0)
        cosines = head.cosines(u[asked], state_centroids(head, u[known], y[known]))
        parts.append((y[asked], fitted(x[asked]).numpy(), cosines.numpy()))
    if not parts:
        return HeldOut(np.zeros(0, dtype=np.int64), np.zeros((0, n_labels)), np.zeros((0, n_labels)))
    return HeldOut(*(np.concatenate(part) for part in zip(*parts, strict=True)))


@torch.no_grad()
def calibrate(head: AnnotationHead, found: HeldOut) -> dict[str, Any]:
    """Fit a head's temperature, and the moments that its novelty is measured by; in place.

    The temperature is that of least cross-entropy.

    Parameters
    ----------
    head
        Changed in place. Without a held-out cell it is left as it is.
    found
        Predictions for held-out cells.

    Returns
    -------
    `temperature`, `n_held_out`, `ece` and `accuracy` of the held-out cells (NaN without), `reliability` (arrays
    `confidence`, `accuracy`, `n_cells`), and `novelty`, their novelties, ascending.
    """
    y, n_labels = found.labels, head.sizes.n_labels
    if not len(y):
        nothing = np.zeros(0, dtype=np.float32)
        return {
            "temperature": 1.0,
            "n_held_out": 0,
            "accuracy": np.nan,
            "ece": np.nan,
            "reliability": {},
            "novelty": nothing,
        }
    own = np.arange(len(y)), y

    def cross_entropy(log_temperature: float) -> float:
        return -float(log_softmax(found.logits / np.exp(log_temperature), axis=1)[own].mean())

    best = minimize_scalar(cross_entropy, bounds=(-3.0, 3.0), method="bounded")
    head.temperature.fill_(float(np.exp(best.x)))
    named = found.logits.argmax(axis=1)
    for name, values, group in (("logit", found.logits.max(axis=1), named), ("cosine", found.cosines[own], y)):
        mean, scale = _moments(values, group, n_labels)
        getattr(head, f"{name}_mean").copy_(torch.from_numpy(mean))
        getattr(head, f"{name}_scale").copy_(torch.from_numpy(scale))
    judged = calibration(softmax(found.logits / float(head.temperature), axis=1).max(axis=1), named == y)
    logits, cosines = (torch.from_numpy(part).float() for part in (found.logits, found.cosines))
    head.novelty_mean.zero_()
    head.novelty_mean.fill_(float(head.novelty(logits, cosines).mean()))
    return {
        "temperature": float(head.temperature),
        "n_held_out": len(y),
        "accuracy": float((named == y).mean()),
        "ece": judged.pop("ece"),
        "reliability": judged,
        "novelty": np.sort(head.novelty(logits, cosines).numpy()),
    }


def read_cells(head: AnnotationHead, reference: Reference, rows: np.ndarray) -> tuple[Tensor, Tensor | None]:
    """Features `(n, dim)` of some cells, and their genes that are read one by one `(n, n_genes)`, None without such."""
    features, genes = [], []
    for start in range(0, len(rows), BLOCK_CELLS):
        block = rows[start : start + BLOCK_CELLS]
        batch = reference.cells.take(block)
        read = Read(reference.states[block], *batch.packed)
        features.append(head.features(read))
        if head.sizes.n_genes:
            genes.append(head.genes(read))
    return torch.cat(features), torch.cat(genes) if genes else None


def state_centroids(head: AnnotationHead, u: Tensor, y: np.ndarray) -> Tensor:
    """Centroids `(n_labels, state_dim)` of the states in features u `(n, dim)`."""
    return _centroids(F.normalize(u[:, : head.sizes.state_dim], dim=1), y, head.sizes.n_labels)


def label_weights(y: np.ndarray, n_labels: int, balanced: bool) -> np.ndarray:
    """Weight of each label in a loss: inverse to its number of cells if balanced, 1 on average over the cells."""
    counts = np.bincount(y, minlength=n_labels)
    if not balanced:
        return np.ones(n_labels)
    return np.where(counts > 0, len(y) / np.maximum(counts, 1) / max(1, (counts > 0).sum()), 0.0)


def _variable_genes(cells: AdaptationCells, n_tokens: int) -> np.ndarray:
    """Tokens of the measured genes of the highest dispersion, ascending."""
    matrix = sp.csr_matrix(
        (cells.values.astype(np.float64), cells.tokens.copy(), cells.indptr), shape=(cells.n_cells, n_tokens)
    )
    mean = np.asarray(matrix.mean(axis=0)).ravel()
    variance = np.maximum(np.asarray(matrix.multiply(matrix).mean(axis=0)).ravel() - mean**2, 0)
    dispersion = np.full(n_tokens, -1.0)
    dispersion[cells.measured] = (variance / np.maximum(mean, DISPERSION_OFFSET))[cells.measured]
    kept = np.argsort(-dispersion, kind="stable")[: min(N_GENES, len(cells.measured))]
    return np.sort(kept[dispersion[kept] > 0]).astype(np.int64)


def _subset(labels: np.ndarray, most: int, seed: int) -> np.ndarray:
    """Rows of labelled cells, ascending: all, or about `most`, in proportion, but of no label too few."""
    rows = np.flatnonzero(labels >= 0)
    if len(rows) <= most:
        return rows
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
    if len(rows) <= MOST_UNLABELLED:
        return rows
    rng = np.random.default_rng(step_seed(seed, 0, "unlabelled"))
    return np.sort(rng.choice(rows, MOST_UNLABELLED, replace=False))


def _dealt(y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Deal cells out: those of a label, shuffled, go to the parts in turn, on from where the last label ended."""
    order = rng.permutation(len(y))
    order = order[np.argsort(y[order], kind="stable")]
    fold = np.empty(len(y), dtype=np.int64)
    fold[order] = np.arange(len(y)) % FOLDS
    return fold


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


def _blank(head: AnnotationHead, n_known: int) -> nn.Module:
    """Make a classifier like a head's, for another number of cells."""
    s = head.sizes
    if s.method == "knn":
        return Neighbors(n_known, s.dim, s.n_labels, s.n_neighbors)
    return copy.deepcopy(head.classifier)


def _train(classifier: nn.Module, x: Tensor, u: Tensor, y: np.ndarray, config: AnnotationConfig) -> None:
    """Fit a classifier of any kind on inputs x and labels; in place. Logistic regression takes labels of -1 too."""
    if isinstance(classifier, Neighbors):
        classifier.known.copy_(x)
        classifier.label.copy_(torch.from_numpy(y))
    elif isinstance(classifier, nn.Linear) and classifier.bias is None:
        classifier.weight.copy_(CENTROID_SCALE * _centroids(x, y, classifier.out_features))
    elif isinstance(classifier, nn.Linear):
        known = y >= 0
        _train_linear(classifier, x[known], y[known], None, config)
        if not known.all():
            cosines = u @ _centroids(u[known], y[known], classifier.out_features).T
            guess = (classifier(x).log_softmax(dim=1) + (SHARPNESS * cosines).log_softmax(dim=1)).softmax(dim=1)
            sure, named = (part.numpy() for part in guess.max(dim=1))
            named[known] = y[known]
            _train_linear(classifier, x, named, np.where(known, 1.0, sure.astype(np.float64) ** 2), config)
    else:
        _train_network(cast(nn.Sequential, classifier), x, y, config)


def _train_linear(
    classifier: nn.Linear, x: Tensor, y: np.ndarray, sample_weight: np.ndarray | None, config: AnnotationConfig
) -> None:
    """Multinomial logistic regression with a quadratic penalty."""
    from sklearn.linear_model import LogisticRegression

    weights = "balanced" if config.balanced else None
    model = LogisticRegression(C=config.inverse_penalty, class_weight=weights, max_iter=500)
    found = model.fit(x.numpy(), y, sample_weight=sample_weight)
    weight, bias = found.coef_, found.intercept_
    if len(found.classes_) == 2:  # one column for both
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    classifier.weight.zero_()
    classifier.bias.fill_(ABSENT)
    classes = torch.from_numpy(found.classes_)
    classifier.weight[classes] = torch.from_numpy(weight).float()
    classifier.bias[classes] = torch.from_numpy(bias).float()


def _train_network(classifier: nn.Sequential, x: Tensor, y: np.ndarray, config: AnnotationConfig) -> None:
    """AdamW from weights that the seed alone gives; the learning rate falls along a line."""
    labels, n_labels = torch.from_numpy(y), cast(nn.Linear, classifier[-1]).out_features
    weight = torch.from_numpy(label_weights(y, n_labels, config.balanced)).float()

    def loss_of(step: int) -> Tensor:
        draw = step_generator(config.seed, step - 1, "probe")
        rows = torch.randint(len(y), (min(config.batch_size, len(y)),), generator=draw)
        return F.cross_entropy(classifier(x[rows]), labels[rows], weight=weight)

    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(step_seed(config.seed, 0, "probe"))
        for layer in classifier:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        classifier.requires_grad_(True)
        train_steps(
            classifier,
            loss_of,
            lambda step: config.probe_learning_rate * (1 - (step - 1) / config.probe_steps),
            steps=config.probe_steps,
            groups=[{"params": list(classifier.parameters()), "weight_decay": config.weight_decay}],
        )
    classifier.requires_grad_(False)
