"""Fit an annotator to labelled cells in memory, and calibrate it on held-out cells.

:func:`fit_annotator` fits a head and does not change the model: temperature and novelty are calibrated on predictions
of each cell by a head fitted on other folds. :func:`finetune_annotator` trains the model too, and calibrates on one
held-out part of the cells.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from torch import Tensor, nn

from scdiva._checks import warn
from scdiva._labels import many_labels_accepted
from scdiva._rng import step_seed
from scdiva._settings import one_blas_thread, progress_bar, to_device, torch_threads_kept
from scdiva.annotation.annotator import CLIP, AnnotationHead, Annotator, HeadSizes, Neighbors
from scdiva.data.batch import InMemoryCells
from scdiva.embedding.dataset_pcs import N_DIRECTIONS, own_directions
from scdiva.metrics.annotation import calibration
from scdiva.models.inference import RunConfig, embed_all, runs_transformer
from scdiva.models.scdiva import ScDiVa
from scdiva.train.finetune import network_for, planned, tuned_config
from scdiva.train.linear_map import DEVIATION_OFFSET
from scdiva.train.objectives import Objective, encode_cells
from scdiva.train.steps import shuffled, train_steps

INVERSE_PENALTY, NOVELTY_INVERSE_PENALTY = 0.01, 0.1
"""C of the logistic regressions for labels and for novelty: the quadratic penalty is 1 / (2 C)."""
N_GENES = 2000
"""Maximum number of single genes that are read: those of the highest variance."""
GENE_WEIGHT = 2.0
"""Root of the total variance of the genes that labels are taken from, relative to that of the state."""
FOLD_TOLERANCE = 3e-3
"""Tolerance of the logistic regressions for labels that are fitted for calibration only."""
FOLDS = 3
"""Folds in which cells are held out for calibration."""
MOST_FITTED, MOST_HELD_OUT, LEAST_OF_LABEL = 20_000, 5_000, 50
"""Maximum number of cells that a classifier is fitted on and that are held out in turn, and minimum number kept of each
label (or all)."""
FEW = 5
"""Held-out cells below which the mean and standard deviation of all labels are used for a label."""
MOST_UNLABELLED = 5_000
"""Maximum number of unlabelled cells that the logistic regression for novelty is fitted on."""
MOST_READ, MOST_UNLABELLED_READ = 50_000, 20_000
"""Maximum number of labelled and of unlabelled cells that are read for a fit without fine-tuning."""
FEW_LABELLED = 50
"""Mean number of labelled cells per label from which on unlabelled cells are not used."""
SHARPNESS = 20.0
"""Logits per unit of cosine with a centroid, for pseudo-labels of unlabelled cells."""
VARIANCE_OFFSET = 1e-12
"""Added to the variance of a feature, which may be 0."""
ABSENT = -30.0
"""Logit of a label without training cells."""
BLOCK_CELLS = 2048
"""Cells read at once."""
MOST_OPERATIONS = 10**9
"""Operations of a product up to which a logistic regression uses one thread."""
CELLS, BATCHES = "held-out cells", "held-out batches"
"""Cells whose novelties `reject` is calibrated on."""
HELD_OUT = 0.1
"""Minimum share of the labelled cells that fine-tuning holds out."""
PROBE_STEPS, PROBE_EPOCHS, PROBE_CELLS, PROBE_RATE = 300, 100, 256, 2e-3
"""Maximum number of training steps of the multilayer perceptron and of passes over its cells, cells of a step, and
maximum learning rate."""


class Reference(NamedTuple):
    """Reference cells.

    Attributes
    ----------
    cells
        Their genes.
    states
        Their cell states, float32 `(n_cells, state_dim)`.
    labels
        Label numbers from 0, int64 `(n_cells,)`; -1 for unlabelled cells.
    """

    cells: InMemoryCells
    states: Tensor
    labels: np.ndarray


class HeldOut(NamedTuple):
    """Predictions for cells that were not used for fitting.

    Attributes
    ----------
    rows
        Numbers of the cells in the reference `(n,)`.
    labels
        True labels `(n,)`.
    logits, novelty_logits, cosines
        `(n, n_labels)`: logits of the labels and of novelty, and cosines with the centroids of the other cells.
    """

    rows: np.ndarray
    labels: np.ndarray
    logits: np.ndarray
    novelty_logits: np.ndarray
    cosines: np.ndarray


def cells_to_read(labels: np.ndarray, seed: int) -> np.ndarray:
    """Select the cells of a reference that are read: all, or about 50,000 labelled and 20,000 unlabelled cells.

    Parameters
    ----------
    labels
        Label numbers from 0, -1 for none, `(n_cells,)`.
    seed
        Seed of subsampling, which is stratified by label and keeps at least 50 cells of each.

    Returns
    -------
    bool `(n_cells,)`.
    """
    selected, unlabelled = np.zeros(len(labels), dtype=bool), np.flatnonzero(labels < 0)
    selected[_subsample(labels, MOST_READ, seed)] = True
    rng = np.random.default_rng(step_seed(seed, MOST_UNLABELLED_READ, "subset"))
    selected[rng.choice(unlabelled, min(len(unlabelled), MOST_UNLABELLED_READ), replace=False)] = True
    return selected


def fit_annotator(
    reference: Reference,
    types: pd.CategoricalDtype,
    model: ScDiVa,
    n_tokens: int,
    method: str,
    n_neighbors: int,
    seed: int,
) -> Annotator:
    """Fit an annotator on the cell states of a model, which is not changed.

    Parameters
    ----------
    reference
        Labelled cells, and possibly unlabelled ones.
    types
        The labels, in their original type.
    model
        Model of the cell states.
    n_tokens
        Number of tokens in the vocabulary of the reference, which may contain more genes than the model.
    method, n_neighbors
        As for :func:`annotate`.
    seed
        Seed of the fit.

    Raises
    ------
    ValueError
        If no cell of a label has a gene that is read.
    """
    n_labels = _count_labels(types, reference.labels)
    with torch_threads_kept(None if runs_transformer(model, "state") else 1):
        head = fit_head(reference, method, n_labels, n_tokens, seed, n_neighbors)
        by_cell, batch = predict_folds(head, reference, seed), reference.cells.batch[reference.labels >= 0]
        several = batch.min() < batch.max()
        notes = calibrate(head, by_cell, predict_folds(head, reference, seed, by_batch=True) if several else None)
    return _annotator(model, head, types, reference, notes)


def finetune_annotator(
    cells: InMemoryCells,
    labels: np.ndarray,
    types: pd.CategoricalDtype,
    model: ScDiVa,
    tuning: dict[str, Any],
    run_config: RunConfig,
    seed: int,
    checkpoint_dir: str | PathLike[str] | None,
) -> Annotator:
    """Fine-tune a copy of a model together with a head of method `"probe"`, which is first trained on the given model.

    Parameters
    ----------
    cells, labels
        Reference cells and their label numbers `(n_cells,)`, -1 for unlabelled cells.
    types, model
        As for :func:`fit_annotator`.
    tuning
        From :func:`scdiva.train.finetune.finetune_config`.
    run_config
        How cells are run through the model.
    seed, checkpoint_dir
        Seed of fine-tuning, and folder of its checkpoints (None: no checkpoints).

    Raises
    ------
    ValueError
        As :func:`fit_annotator`.

    Warns
    -----
    UserWarning
        If the loss of the held-out cells is no lower than before and was not 0.
    """
    from scdiva.train.finetune_module import finetune

    n_labels, held_out = _count_labels(types, labels), hold_out(labels, cells.batch, seed)
    training, rows = np.flatnonzero(~held_out & (labels >= 0)), np.flatnonzero(held_out)
    config = planned(tuning, len(training), seed, run_config.precision)
    cells = cells.subset(np.arange(cells.n_cells), tuned_config(model, config).input_length)
    reference = Reference(cells, torch.from_numpy(embed_all(model, cells, run_config)), labels)
    with torch_threads_kept(None if runs_transformer(model, "state") else 1):
        rest = np.flatnonzero(~held_out)
        part = Reference(cells.subset(rest), reference.states[rest], labels[rest])
        head = fit_head(part, "probe", n_labels, model.config.n_tokens, seed)
        before = calibrate(copy.deepcopy(head), predict(head, reference, rows))
        network = network_for(model, config, seed)
        objective = AnnotationObjective(
            cells.subset(training), labels[training], head, context=network.config.input_length
        )
        history = finetune(network, objective, config, device=run_config.device, checkpoint_dir=checkpoint_dir)
        head.cpu()
        reference = reference._replace(states=torch.from_numpy(embed_all(network, cells, run_config)))
        features = read_features(head, reference, training)[0]
        set_moments(head, features)
        head.centroids.copy_(state_centroids(head, features, labels[training]))
        notes = calibrate(head, predict(head, reference, rows))
    batch_and_label = cells.batch * n_labels + labels
    if len(rows) and not np.isin(batch_and_label[rows], batch_and_label[training]).any():
        notes["max_novelty_from"] = BATCHES
    if notes["loss"] >= before["loss"] and round(before["loss"], 3) > 0:
        warn(
            f"fine-tuning did not lower the loss of the {len(rows)} held-out cells: {before['loss']:.3f} before, "
            f"{notes['loss']:.3f} after (accuracy {before['accuracy']:.3f} and {notes['accuracy']:.3f}). Compare "
            'method="probe", which keeps the model as it is, or pass a lower lr or fewer epochs.'
        )
    notes |= {f"{name}_before": before[name] for name in ("loss", "accuracy")}
    notes |= {"steps": len(history["loss"]), "history": {name: np.asarray(column) for name, column in history.items()}}
    return _annotator(network, head, types, reference, notes)


def _count_labels(types: pd.CategoricalDtype, labels: np.ndarray) -> int:
    """Number of labels; raise an error for a label without cells."""
    names = types.categories.tolist()
    if len(absent := np.setdiff1d(np.arange(len(names)), labels)):
        raise ValueError(
            f"No cell of {len(absent)} label(s), the first is {str(names[absent[0]])!r}, has a gene that is read: "
            "leave these cells out of the reference."
        )
    return len(names)


def _annotator(
    model: ScDiVa, head: AnnotationHead, types: pd.CategoricalDtype, reference: Reference, notes: dict[str, Any]
) -> Annotator:
    """Annotator of a calibrated head and its notes."""
    head.requires_grad_(False).eval()
    novelty, dtype = notes.pop("novelty"), str(types.categories.dtype)
    notes |= {"own_directions": head.sizes.own_dim, "n_labelled": int((reference.labels >= 0).sum())}
    notes["finetuned"] = "history" in notes
    labels, tokens = tuple(types.categories.tolist()), reference.cells.measured.astype(np.int32)
    return Annotator(model, head, labels, tokens, novelty, notes=notes, dtype=dtype, ordered=bool(types.ordered))


class AnnotationObjective(Objective):
    r"""Cross-entropy of an MLP head on the cell state (paper, section on annotation).

    Labels have equal weights: :math:`\sum_i w_{y_i} \ell_i / \sum_i w_{y_i}` over the cells of a batch, with w the
    inverse number of training cells of the label. The paper names no weights.

    Features are standardised within the batch (Ioffe & Szegedy 2015, without their affine map), since the moments of
    the former state no longer hold once the state changes.

    Parameters
    ----------
    cells
        Training cells.
    labels
        Label numbers from 0, int64 `(n_cells,)`.
    head
        A head of method `"probe"`; its classifier is trained in place. Its moments are neither used nor changed:
        :func:`set_moments`.
    context
        Genes kept of each cell.
    """

    task = "annotate"
    weights: Tensor

    def __init__(self, cells: InMemoryCells, labels: np.ndarray, head: AnnotationHead, *, context: int) -> None:
        super().__init__()
        self.cells, self.labels, self.context, self.n_items = cells, labels, context, cells.n_cells
        self.head = head.requires_grad_(True)
        self.register_buffer("weights", balanced_weights(labels, head.sizes.n_labels), persistent=False)

    def data(self) -> Iterator[np.ndarray]:
        """Cells and labels."""
        yield from (self.cells.indptr, self.cells.tokens, self.cells.values, self.labels)  # noqa: PD011

    def forward(
        self, network: ScDiVa, rows: np.ndarray, progress: float, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss, and `accuracy`, the share of the cells whose label has the largest logit."""
        cells = self.cells.take(rows, self.context)
        packed = (to_device(part, self.weights.device) for part in cells.packed)
        features = self.head.features(encode_cells(network, cells), *packed)
        variance, mean = torch.var_mean(features, dim=0)
        logits = self.head.classifier((features - mean) / (variance + VARIANCE_OFFSET).sqrt()).float()
        labels = to_device(torch.from_numpy(self.labels[rows]), logits.device)
        accuracy = (logits.detach().argmax(dim=1) == labels).float().mean()
        return F.cross_entropy(logits, labels, weight=self.weights), {"accuracy": accuracy}


@torch.no_grad()
def fit_head(
    reference: Reference, method: str, n_labels: int, n_tokens: int, seed: int, n_neighbors: int = 15
) -> AnnotationHead:
    """Fit a head on a reference.

    Principal components, means and standard deviations are fitted on unlabelled cells too. Where labels have fewer than
    50 cells on average and other cells have none, the logistic regression for novelty gives the labels too. It is
    fitted twice, the second time with the unlabelled cells: each then counts as a cell of the label on which the first
    fit and the nearest centroid agree, weighted by the square of its probability. With more labelled cells that does
    not help, and cells of types without a label would be assigned to labelled types.

    The multilayer perceptron of `"probe"` is trained on the labelled cells by cross-entropy with balanced label weights
    (AdamW, 300 steps of 256 cells or 100 epochs, cosine decay of the learning rate from 2e-3).

    Parameters
    ----------
    reference
        Reference cells with at least two labels.
    method
        See `AnnotationHead`.
    n_labels, n_tokens
        Number of labels, and of tokens in the vocabulary.
    seed
        Seed of subsampling, of the perceptron's initial weights and of the order of its cells.
    n_neighbors
        Neighbours that vote.

    Returns
    -------
    The head, before :func:`calibrate`.
    """
    cells, linear = reference.cells, method == "linear"
    components = own_directions(cells, n_tokens, N_DIRECTIONS) if linear else torch.zeros(n_tokens, 0)
    genes = _variable_genes(cells, n_tokens) if linear else np.zeros(0, dtype=np.int64)
    rows, unlabelled = _subsample(reference.labels, MOST_FITTED, seed), _unlabelled_rows(reference.labels, seed)
    n_labelled = len(rows)
    sizes = HeadSizes(
        method, n_labels, reference.states.shape[1], n_tokens, components.shape[1], len(genes),
        n_labelled if method == "knn" else 0, n_neighbors, linear and len(unlabelled) > 0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):  # initial weights are overwritten
        head = AnnotationHead(sizes)
    if head.own is not None:
        head.own.weight.copy_(components)
    head.gene_tokens.copy_(torch.from_numpy(genes))
    _set_scales(head, reference)
    if linear:
        rows = np.concatenate([rows, unlabelled])
    y = reference.labels[rows]
    if not sizes.self_trained:
        u, x = read_inputs(head, reference, rows[:n_labelled], head.inputs)
        _fit_classifier(head.classifier, x, y[:n_labelled], seed)
        del x  # 160 MB
    if linear:
        u, x = read_inputs(head, reference, rows, head.novelty_inputs)
        _fit_novelty(head.novelty_classifier or head.classifier, x, u, y)
    head.centroids.copy_(state_centroids(head, u[:n_labelled], y[:n_labelled]))
    return head


@torch.no_grad()
def predict_folds(head: AnnotationHead, reference: Reference, seed: int, *, by_batch: bool = False) -> HeldOut:
    """Predict the labelled cells of each fold by classifiers that are fitted on the other folds.

    Folds are stratified by label. A cell is predicted only if its label occurs in other folds, so the only cell of a
    label is not predicted.

    Parameters
    ----------
    head
        From :func:`fit_head`; not changed.
    reference, seed
        As for :func:`fit_head`.
    by_batch
        Whether folds consist of whole batches. With one batch no cell is predicted.
    """
    rows, s = _subsample(reference.labels, MOST_HELD_OUT, seed), head.sizes
    if by_batch:
        fold = _batch_folds(reference.cells.batch[rows])
    else:
        fold = _label_folds(reference.labels[rows], np.random.default_rng(step_seed(seed, 0, "folds")))
    if s.method == "linear":  # unlabelled cells are in no fold and in every fit
        unlabelled = _unlabelled_rows(reference.labels, seed)
        rows, fold = np.concatenate([rows, unlabelled]), np.concatenate([fold, np.full(len(unlabelled), -1)])
    u, expression = read_features(head, reference, rows)
    x, novelty_x, y = head.inputs(u, expression), head.novelty_inputs(u, expression), reference.labels[rows]
    none = np.zeros((0, s.n_labels), dtype=np.float32)
    parts = [(rows[:0], rows[:0], none, none, none)]
    for number in progress_bar(range(FOLDS), desc="calibrating", unit="fold"):
        training = fold != number
        labelled = training & (y >= 0)
        present = np.unique(y[labelled])
        test = np.flatnonzero(~training & np.isin(y, present))
        if len(present) < 2 or not len(test):
            continue
        classifier = copy.deepcopy(head.classifier)
        if s.method == "knn":
            classifier = Neighbors(int(training.sum()), s.dim, s.n_labels, s.n_neighbors)
        if s.self_trained:
            _fit_novelty(classifier, x[training], u[training], y[training])
        else:
            _fit_classifier(classifier, x[labelled], y[labelled], seed, FOLD_TOLERANCE)
        logits = novelty_logits = classifier(x[test]).numpy()
        if head.novelty_classifier is not None:
            layer = copy.deepcopy(head.novelty_classifier)
            _fit_novelty(layer, novelty_x[training], u[training], y[training])
            novelty_logits = layer(novelty_x[test]).numpy()
        cosines = head.cosines(u[test], state_centroids(head, u[labelled], y[labelled]))
        parts.append((rows[test], y[test], logits, novelty_logits, cosines.numpy()))
    return HeldOut(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def hold_out(labels: np.ndarray, batch: np.ndarray, seed: int) -> np.ndarray:
    """Select labelled cells to hold out: whole batches, at least a tenth of the cells; else a tenth of the cells.

    Every label keeps a training cell: cells of labels that occur only in the selected batches are not held out. Single
    cells are held out if there is one batch or no label occurs in two batches, and no cell if each label has one cell.

    Parameters
    ----------
    labels
        Label numbers from 0, -1 for none, `(n_cells,)`.
    batch
        Batch numbers, `(n_cells,)`.
    seed
        Seed of the selection.

    Returns
    -------
    bool `(n_cells,)`.
    """
    rng = np.random.default_rng(step_seed(seed, 0, "split"))
    labelled = np.flatnonzero(labels >= 0)
    batches, held_out = rng.permutation(np.unique(batch[labelled])), np.zeros(len(labels), dtype=bool)
    shares = np.array([(batch[labelled] == one).mean() for one in batches]).cumsum()
    selected = np.isin(batch, batches[: min(int(np.searchsorted(shares, HELD_OUT)) + 1, len(batches) - 1)])
    held_out[labelled] = selected[labelled] & np.isin(labels[labelled], labels[~selected])
    if not held_out.any():
        left = np.bincount(labels[labelled])
        for cell in rng.permutation(labelled):
            if left[labels[cell]] > 1 and held_out.sum() < max(1, round(HELD_OUT * len(labelled))):
                held_out[cell] = True
                left[labels[cell]] -= 1
    return held_out


@torch.no_grad()
def predict(head: AnnotationHead, reference: Reference, rows: np.ndarray) -> HeldOut:
    """Predict cells by a head of method `"probe"` that was not fitted on them.

    Parameters
    ----------
    head
        Not changed.
    reference
        Labelled cells.
    rows
        Numbers of the cells to predict.
    """
    u, genes = read_features(head, reference, rows)
    logits = head.classifier(head.inputs(u, genes)).numpy()
    return HeldOut(rows, reference.labels[rows], logits, logits, head.cosines(u, head.centroids).numpy())


@torch.no_grad()
def calibrate(head: AnnotationHead, held_out: HeldOut, by_batch: HeldOut | None = None) -> dict[str, Any]:
    """Fit a head's temperature, by cross-entropy, and the moments of its novelty on held-out cells; in place.

    Parameters
    ----------
    head
        Changed in place, unless there are no held-out cells.
    held_out
        Predictions for held-out cells.
    by_batch
        Predictions for cells whose whole batch was held out. Their novelties replace those from `held_out` as the ones
        that `reject` is calibrated on.

    Returns
    -------
    `temperature`, `n_held_out`, `ece`, `accuracy` and `loss` (cross-entropy of the calibrated probabilities) of the
    held-out cells (NaN without), `reliability` (arrays `confidence`, `accuracy`, `n_cells`), `novelty`, the novelties
    that rejection is calibrated on, ascending, and `max_novelty_from`, `"held-out batches"` or `"held-out cells"`.
    """
    rows, y, logits, novelty_logits, cosines = held_out
    notes: dict[str, Any] = {"temperature": 1.0, "n_held_out": len(y), "max_novelty_from": CELLS}
    notes |= dict.fromkeys(("accuracy", "loss", "ece"), np.nan)
    if not len(y):
        return notes | {"reliability": {}, "novelty": np.zeros(0, dtype=np.float32)}
    true_label = np.arange(len(y)), y

    def cross_entropy(log_temperature: float) -> float:
        return -float(log_softmax(logits / np.exp(log_temperature), axis=1)[true_label].mean())

    best = minimize_scalar(cross_entropy, bounds=(-3.0, 3.0), method="bounded")
    head.temperature.fill_(float(np.exp(best.x)))
    largest, label = novelty_logits.max(axis=1), novelty_logits.argmax(axis=1)
    _set_label_moments(head.logit_mean, head.logit_scale, largest, label)
    _set_label_moments(head.cosine_mean, head.cosine_scale, cosines[true_label], y)
    correct = logits.argmax(axis=1) == y
    reliability = calibration(softmax(logits / float(head.temperature), axis=1).max(axis=1), correct)
    head.novelty_mean.zero_()
    novelty = _novelty(head, held_out)
    head.novelty_mean.fill_(float(novelty.mean()))
    novelty = novelty - head.novelty_mean
    if by_batch is not None and len(by_batch.rows):
        others = torch.from_numpy(~np.isin(rows, by_batch.rows))
        novelty = torch.cat([novelty[others], _novelty(head, by_batch)])
        notes["max_novelty_from"] = BATCHES
    notes |= {"temperature": float(head.temperature), "accuracy": float(correct.mean()), "loss": float(best.fun)}
    notes["ece"] = reliability.pop("ece")
    return notes | {"reliability": reliability, "novelty": np.sort(novelty.numpy())}


def _novelty(head: AnnotationHead, held_out: HeldOut) -> Tensor:
    """Novelties `(n,)` of held-out cells."""
    return head.novelty(torch.from_numpy(held_out.novelty_logits).float(), torch.from_numpy(held_out.cosines).float())


def read_features(head: AnnotationHead, reference: Reference, rows: np.ndarray) -> tuple[Tensor, Tensor | None]:
    """Features `(n, dim)` of some cells, and their single genes `(n, n_genes)`, None without any."""
    s = head.sizes
    features, genes = torch.empty(len(rows), s.dim), torch.empty(len(rows), s.n_genes) if s.n_genes else None
    for start in range(0, len(rows), BLOCK_CELLS):
        at = slice(start, start + BLOCK_CELLS)
        packed = reference.cells.take(rows[at]).packed
        features[at] = head.features(reference.states[rows[at]], *packed)
        if (expression := head.genes(*packed)) is not None and genes is not None:
            genes[at] = expression
    return features, genes


def read_inputs(
    head: AnnotationHead, reference: Reference, rows: np.ndarray, inputs: Callable[[Tensor, Tensor | None], Tensor]
) -> tuple[Tensor, Tensor]:
    """Features `(n, dim)` of some cells, and the result of a method of the head for them, computed by blocks."""
    u = torch.empty(len(rows), head.sizes.dim)
    x = torch.empty(len(rows), inputs(*read_features(head, reference, rows[:1])).shape[1])
    for start in range(0, len(rows), BLOCK_CELLS):
        at = slice(start, start + BLOCK_CELLS)
        u[at], genes = read_features(head, reference, rows[at])
        x[at] = inputs(u[at], genes)
    return u, x


def _set_scales(head: AnnotationHead, reference: Reference) -> None:
    """Set the moments of features and genes and the weights of the genes, from at most 20,000 cells; in place."""
    rows = np.arange(reference.cells.n_cells)[:: -(-reference.cells.n_cells // MOST_FITTED)]
    u, expression = read_features(head, reference, rows)
    set_moments(head, u)
    if expression is None:
        return
    head.gene_mean.copy_(expression.mean(dim=0))
    head.gene_scale.copy_(expression.std(dim=0) + DEVIATION_OFFSET)
    squares = [
        ((block - head.gene_mean) / head.gene_scale).clamp_(-CLIP, CLIP).square().sum(dim=1)
        for block in expression.split(BLOCK_CELLS)
    ]
    # genes and features have the same weight, however many genes there are
    head.gene_weight.fill_((head.sizes.dim / float(torch.cat(squares).mean().clamp_min(1e-12))) ** 0.5)
    width, total = head.sizes.state_dim, expression.var(dim=0, correction=0).sum().clamp_min(VARIANCE_OFFSET)
    head.state_factor.fill_((width / head.feature_scale[:width].square().sum()) ** 0.5)
    head.gene_factor.fill_(GENE_WEIGHT * (width / total) ** 0.5)


@torch.no_grad()
def set_moments(head: AnnotationHead, u: Tensor) -> None:
    """Set the mean and standard deviation for standardisation to those of features `(n, dim)`; in place."""
    variance, mean = torch.var_mean(u, dim=0)
    head.feature_mean.copy_(mean)
    head.feature_scale.copy_((variance + VARIANCE_OFFSET).sqrt())


def state_centroids(head: AnnotationHead, u: Tensor, y: np.ndarray) -> Tensor:
    """Centroids `(n_labels, state_dim)` of the states in features u `(n, dim)`."""
    return _centroids(F.normalize(u[:, : head.sizes.state_dim], dim=1), y, head.sizes.n_labels)


def _centroids(u: Tensor, y: np.ndarray, n_labels: int) -> Tensor:
    """Mean direction of each label, of length 1; 0 for a label without cells."""
    sums = torch.zeros(n_labels, u.shape[1]).index_add_(0, torch.from_numpy(y), u)
    return F.normalize(sums, dim=1)


def _variable_genes(cells: InMemoryCells, n_tokens: int) -> np.ndarray:
    """Tokens of the 2,000 genes of the highest variance, ascending, without genes that do not vary."""
    (mean, square), share = np.zeros((2, n_tokens)), 1 / cells.n_cells
    for start in range(0, cells.n_cells, BLOCK_CELLS):
        block = slice(*cells.indptr[[start, min(start + BLOCK_CELLS, cells.n_cells)]])
        tokens, values = cells.tokens[block], cells.values[block].astype(np.float64)  # noqa: PD011
        # added cell by cell, so that the sums do not depend on the blocks
        np.add.at(mean, tokens, values * share)
        np.add.at(square, tokens, values * values * share)
    variance = square - mean**2
    genes = np.argsort(-variance, kind="stable")[:N_GENES]
    varying: np.ndarray = np.sort(genes[variance[genes] > VARIANCE_OFFSET])
    return varying


def _subsample(labels: np.ndarray, most: int, seed: int) -> np.ndarray:
    """Rows of labelled cells, ascending: all, or about `most`, stratified by label, at least 50 of each."""
    n_labelled = (labels >= 0).sum()
    rng = np.random.default_rng(step_seed(seed, most, "subset"))
    selected = [np.zeros(0, dtype=np.int64)]
    for label in np.unique(labels[labels >= 0]):
        rows = np.flatnonzero(labels == label)
        n = min(len(rows), max(LEAST_OF_LABEL, round(most * len(rows) / n_labelled)))
        selected.append(rng.choice(rows, n, replace=False))
    return np.sort(np.concatenate(selected))


def _unlabelled_rows(labels: np.ndarray, seed: int) -> np.ndarray:
    """Rows of unlabelled cells that are fitted on where few cells are labelled, ascending: all, 5,000, or none."""
    rows, labelled = np.flatnonzero(labels < 0), labels[labels >= 0]
    if len(labelled) >= FEW_LABELLED * len(np.unique(labelled)):
        return rows[:0]
    rng = np.random.default_rng(step_seed(seed, 0, "unlabelled"))
    return np.sort(rng.choice(rows, min(len(rows), MOST_UNLABELLED), replace=False))


def _label_folds(y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Fold of each cell, stratified by label and of equal sizes over all labels."""
    order = rng.permutation(len(y))
    order = order[np.argsort(y[order], kind="stable")]
    fold = np.empty(len(y), dtype=np.int64)
    fold[order] = np.arange(len(y)) % FOLDS
    return fold


def _batch_folds(batch: np.ndarray) -> np.ndarray:
    """Fold of each cell: whole batches, from the largest to the smallest, each to the fold with fewest cells."""
    _, of_cell, counts = np.unique(batch, return_inverse=True, return_counts=True)
    fold, sizes = np.empty(len(counts), dtype=np.int64), np.zeros(FOLDS, dtype=np.int64)
    for number in np.argsort(-counts, kind="stable"):
        fold[number] = sizes.argmin()
        sizes[fold[number]] += counts[number]
    return fold[of_cell]


def _set_label_moments(mean: Tensor, scale: Tensor, values: np.ndarray, labels: np.ndarray) -> None:
    """Set mean and standard deviation of the values of each label; those of all values where a label has few."""
    spread = float(values.std())
    mean.fill_(float(values.mean()))
    scale.fill_(spread)
    for label in range(len(mean)):
        of_label = values[labels == label]
        if len(of_label) >= FEW:
            mean[label], scale[label] = float(of_label.mean()), float(of_label.std())
    scale.clamp_(min=1e-3 * max(1e-3, spread))


def balanced_weights(labels: np.ndarray, n_labels: int) -> Tensor:
    """Weights `(n_labels,)` that balance the labels; the mean weight of a cell is 1.

    Parameters
    ----------
    labels
        Label numbers of the cells, from 0; a label without cells gets 0.
    n_labels
        Number of labels.
    """
    counts = np.bincount(labels, minlength=n_labels)
    return torch.from_numpy(np.where(counts, len(labels) / (counts > 0).sum() / np.maximum(counts, 1), 0.0)).float()


def _fit_classifier(classifier: nn.Module, x: Tensor, y: np.ndarray, seed: int, tolerance: float = 1e-4) -> None:
    """Fit a classifier on inputs x and labels y; in place."""
    if isinstance(classifier, Neighbors):
        classifier.known.copy_(x)
        classifier.label.copy_(torch.from_numpy(y))
    elif isinstance(classifier, nn.Sequential):
        _fit_perceptron(classifier, x, y, seed)
    else:
        assert isinstance(classifier, nn.Linear)
        # between studies many genes shift together, and an intercept would absorb the shift into one label
        _fit_linear(classifier, x, y, INVERSE_PENALTY, tolerance=tolerance, intercept=False)


def _fit_novelty(classifier: nn.Module, x: Tensor, u: Tensor, y: np.ndarray) -> None:
    """Fit the layer for the logits of novelty; in place. Cells with label -1 get pseudo-labels."""
    assert isinstance(classifier, nn.Linear)
    labelled = y >= 0
    if labelled.all():  # without a copy
        _fit_linear(classifier, x, y, NOVELTY_INVERSE_PENALTY)
    else:
        _fit_linear(classifier, x[labelled], y[labelled], NOVELTY_INVERSE_PENALTY)
        cosines = u @ _centroids(u[labelled], y[labelled], classifier.out_features).T
        agreement = (classifier(x).log_softmax(dim=1) + (SHARPNESS * cosines).log_softmax(dim=1)).softmax(dim=1)
        probability, label = (part.numpy() for part in agreement.max(dim=1))
        label[labelled] = y[labelled]
        weight = np.where(labelled, 1.0, probability.astype(np.float64) ** 2)
        _fit_linear(classifier, x, label, NOVELTY_INVERSE_PENALTY, weight)


def _fit_linear(
    classifier: nn.Linear,
    x: Tensor,
    y: np.ndarray,
    inverse_penalty: float,
    sample_weight: np.ndarray | None = None,
    *,
    tolerance: float = 1e-4,
    intercept: bool = True,
) -> None:
    """Fit a multinomial logistic regression with a quadratic penalty and balanced label weights; in place."""
    from sklearn.linear_model import LogisticRegression

    regression = LogisticRegression(
        C=inverse_penalty, class_weight="balanced", max_iter=500, tol=tolerance, fit_intercept=intercept
    )
    n_operations = 2 * x.numel() * (int(y.max()) + 1)  # of one product
    with many_labels_accepted(), one_blas_thread(n_operations < MOST_OPERATIONS):
        regression.fit(x.numpy(), y, sample_weight=sample_weight)
    weight = regression.coef_
    bias = regression.intercept_ if intercept else np.zeros(len(weight))
    if len(regression.classes_) == 2:  # sklearn has one row for both
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    classifier.weight.zero_()
    classifier.bias.fill_(ABSENT)
    classes = torch.from_numpy(regression.classes_)
    classifier.weight[classes] = torch.from_numpy(weight).float()
    classifier.bias[classes] = torch.from_numpy(bias).float()


@torch.enable_grad()
def _fit_perceptron(classifier: nn.Sequential, x: Tensor, y: np.ndarray, seed: int) -> None:
    """Train a multilayer perceptron from new weights, by cross-entropy with balanced label weights; in place."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(step_seed(seed, 0, "probe"))
        for layer in classifier:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
    size = min(PROBE_CELLS, len(y))
    labels, weight = torch.from_numpy(y), balanced_weights(y, len(classifier(x[:1])[0]))
    batches = shuffled(np.arange(len(y)), size, seed, drop_last=True)
    steps = min(PROBE_STEPS, PROBE_EPOCHS * (len(y) // size))

    def loss_of(step: int) -> Tensor:
        rows = torch.from_numpy(next(batches))
        return F.cross_entropy(classifier(x[rows]), labels[rows], weight=weight)

    def rate_of(step: int) -> float:
        return float(PROBE_RATE * (0.05 + 0.95 * 0.5 * (1 + np.cos(np.pi * (step - 1) / steps))))

    _, stopped = train_steps(classifier, loss_of, rate_of, steps=steps, desc="training the classifier")
    if stopped == "interrupted":
        raise KeyboardInterrupt
