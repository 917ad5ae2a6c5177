"""Fit an annotator on a user's labelled cells, run one over cells, and name what it says."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scdiva._checks import warn
from scdiva._constants import REJECTED
from scdiva._running import Cells, RunConfig, embed_all, run_cells
from scdiva._settings import logger, torch_threads_kept
from scdiva.data.cells import CellSource, take_cells
from scdiva.data.genes import advice

if TYPE_CHECKING:
    from scdiva.annotation.fit import Reference
    from scdiva.annotation.head import AnnotationHead
    from scdiva.data.memory import InMemoryCells
    from scdiva.models import Annotator, ScDiVa

LEAST_GENES = 50
"""Genes that reference and cells must share."""
BLOCK_CELLS = 1024
FAR_ABOVE, UNLIKELY = 3.0, 1e-3
"""Rejection warns where the share of unknown cells is above this multiple of the rate, and such a share has at most
this binomial probability."""


def shared_tokens(reference: CellSource, cells: CellSource) -> np.ndarray:
    """Genes that the model knows and both have a column for, as tokens, ascending.

    Raises
    ------
    ValueError
        If they are fewer than 50.
    """
    both = np.intersect1d(reference.measured_tokens, cells.measured_tokens)
    if len(both) < LEAST_GENES:
        known = {"adata's": cells, "the reference's": reference}
        sizes = ", ".join(f"{len(one.measured_tokens)} of {name} {len(one.tokens)}" for name, one in known.items())
        first = " and ".join(str(one.var.index[:1].tolist()) for one in known.values())
        fewer = min(known.values(), key=lambda one: len(one.measured_tokens))
        raise ValueError(
            f"adata and the reference share {len(both)} genes that the model knows ({sizes}; they begin with {first}): "
            f"{LEAST_GENES} or more are needed. {advice([str(name) for name in fewer.var.index])}"
        )
    return both.astype(np.int32)


def check_genes(annotator: Annotator, measured: np.ndarray) -> None:
    """Refuse cells that have too few of an annotator's genes, and warn of those that lack half.

    Parameters
    ----------
    annotator
        Fitted on other cells.
    measured
        Tokens that the cells have a column for.

    Raises
    ------
    ValueError
        If the cells have fewer than 50 of the genes that the annotator reads.
    """
    n_measured, n_read = int(np.isin(annotator.tokens, measured).sum()), len(annotator.tokens)
    if n_measured < LEAST_GENES:
        raise ValueError(
            f"adata has {n_measured} of the {n_read} genes that the annotator reads; {LEAST_GENES} or more are needed. "
            "Name the column of adata.var that holds symbols or Ensembl ids: gene_ids=..."
        )
    if 2 * n_measured < n_read:
        warn(
            f"adata has {n_measured} of the {n_read} genes that the annotator reads. Fitted anew on the genes that "
            "both have it may do better: tl.annotate(adata, labels_key, reference)."
        )


def fit_annotator(
    reference: Reference, types: pd.CategoricalDtype, model: ScDiVa, method: str, n_neighbors: int, seed: int
) -> Annotator:
    """Fit an annotator on the states of a model that stays as it is.

    Parameters
    ----------
    reference
        Labelled cells, and perhaps unlabelled ones beside them.
    types
        The labels, in the type that they came in.
    model
        Not changed.
    method, n_neighbors
        See :func:`annotate`.
    seed
        Of the fit.

    Raises
    ------
    ValueError
        If no cell of a label has a gene that is read.
    """
    from scdiva.annotation.fit import calibrate, fit_head, held_out
    from scdiva.models.inference import runs_transformer

    n_labels = _checked(types, reference.labels)
    with torch_threads_kept(None if runs_transformer(model, "state") else 1):
        head = fit_head(reference, method, n_labels, model.config.n_tokens, seed, n_neighbors)
        found, batch = held_out(head, reference, seed), reference.cells.batch[reference.labels >= 0]
        several = batch.min() < batch.max()
        notes = calibrate(head, found, held_out(head, reference, seed, by_batch=True) if several else None)
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
    """Fine-tune a copy of a model and a head of method `"probe"`, from a head trained on the given model.

    Parameters
    ----------
    cells, labels
        The reference, and label numbers `(n_cells,)`, -1 for none.
    types, model
        As for :func:`fit_annotator`.
    tuning
        From :func:`scdiva.train.finetune.finetune_config`.
    run_config
        How cells are run through the model.
    seed, checkpoint_dir
        Of fine-tuning.

    Raises
    ------
    ValueError
        As :func:`fit_annotator`.

    Warns
    -----
    UserWarning
        If the loss of the held-out cells is no lower than before, and it was not 0 already.
    """
    import torch

    from scdiva.annotation.finetune import finetune_for_annotation
    from scdiva.annotation.fit import (
        BATCHES,
        Reference,
        calibrate,
        fit_head,
        hold_out,
        predicted,
        read_cells,
        set_moments,
        state_centroids,
    )
    from scdiva.models.inference import runs_transformer
    from scdiva.train.finetune import planned, tuned_config

    n_labels, held = _checked(types, labels), hold_out(labels, cells.batch, seed)
    training, rest, asked = np.flatnonzero(~held & (labels >= 0)), np.flatnonzero(~held), np.flatnonzero(held)
    config = planned(tuning, len(training), seed, run_config.precision)
    cells = cells.subset(np.arange(cells.n_cells), tuned_config(model, config).input_length)
    reference = Reference(cells, torch.from_numpy(embed_all(model, cells, run_config)), labels)
    with torch_threads_kept(None if runs_transformer(model, "state") else 1):
        part = Reference(cells.subset(rest), reference.states[rest], labels[rest])
        head = fit_head(part, "probe", n_labels, model.config.n_tokens, seed)
        before = calibrate(copy.deepcopy(head), predicted(head, reference, asked))
        network, history = finetune_for_annotation(
            model, cells.subset(training), labels[training], head, config, run_config.device, checkpoint_dir
        )
        reference = reference._replace(states=torch.from_numpy(embed_all(network, cells, run_config)))
        features = read_cells(head, reference, training)[0]
        set_moments(head, features)
        head.centroids.copy_(state_centroids(head, features, labels[training]))
        notes = calibrate(head, predicted(head, reference, asked))
    kind = cells.batch * n_labels + labels
    if len(asked) and not np.isin(kind[asked], kind[training]).any():  # whole batches were held out, not single cells
        notes["max_novelty_from"] = BATCHES
    if notes["loss"] >= before["loss"] and round(before["loss"], 3) > 0:
        warn(
            f"fine-tuning did not lower the loss of the {len(asked)} held-out cells: {before['loss']:.3f} before, "
            f"{notes['loss']:.3f} after (accuracy {before['accuracy']:.3f} and {notes['accuracy']:.3f}). Compare "
            'method="probe", which keeps the model as it is, or pass a lower lr or fewer epochs.'
        )
    notes |= {f"{name}_before": before[name] for name in ("loss", "accuracy")}
    notes |= {"steps": len(history["loss"]), "history": {name: np.asarray(column) for name, column in history.items()}}
    return _annotator(network, head, types, reference, notes)


def _checked(types: pd.CategoricalDtype, labels: np.ndarray) -> int:
    """Return the number of labels; refuse a label without cells."""
    names = types.categories.tolist()
    lost = np.setdiff1d(np.arange(len(names)), labels)
    if len(lost):
        raise ValueError(
            f"No cell of {len(lost)} label(s), the first is {str(names[lost[0]])!r}, has a gene that is read: leave "
            "these cells out of the reference."
        )
    return len(names)


def _annotator(
    model: ScDiVa, head: AnnotationHead, types: pd.CategoricalDtype, reference: Reference, notes: dict[str, Any]
) -> Annotator:
    """Make an annotator of a calibrated head and its notes."""
    from scdiva.models import Annotator

    head.requires_grad_(False).eval()
    novelty, dtype = notes.pop("novelty"), str(types.categories.dtype)
    notes |= {"own_directions": head.sizes.own_dim, "n_labelled": int((reference.labels >= 0).sum())}
    notes["finetuned"] = "history" in notes
    labels, tokens = tuple(types.categories.tolist()), reference.cells.measured.astype(np.int32)
    return Annotator(model, head, labels, tokens, novelty, notes=notes, dtype=dtype, ordered=bool(types.ordered))


def annotated(
    annotator: Annotator, cells: Cells, measured: np.ndarray, run_config: RunConfig, states: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Run an annotator over cells.

    Parameters
    ----------
    annotator
        Fitted.
    cells
        Opened cells, or cells in memory, with the annotator's genes alone.
    measured
        Tokens that they have a column for.
    run_config
        How they are run, and what is read out of the annotator's model.
    states
        What the model makes of cells in memory, if that is known.

    Returns
    -------
    Probabilities float32 `(n_obs, n_labels)` and novelty float32 `(n_obs,)`; NaN for cells without a gene that is read.
    """
    import torch

    from scdiva.annotation.head import Read
    from scdiva.data.batch import from_ragged

    windows = run_cells(annotator.model, cells, run_config)
    if states is not None:
        windows = ((rows, ragged, iter([(rows, states)])) for rows, ragged in cells.windows(cells.n_obs))
    head = annotator.head
    of_head = torch.from_numpy(np.isin(head.gene_tokens.numpy(), measured))
    probability = np.full((cells.n_obs, len(annotator.labels)), np.nan, dtype=np.float32)
    novelty = np.full(cells.n_obs, np.nan, dtype=np.float32)
    with torch.inference_mode():
        for rows, ragged, results in windows:
            found = torch.empty(len(rows), head.sizes.state_dim)
            for at, part in results:
                found[at] = torch.from_numpy(part)
            for start in range(0, len(rows), BLOCK_CELLS):
                block = np.arange(start, min(start + BLOCK_CELLS, len(rows)))
                batch = from_ragged(*take_cells(ragged, block))
                shares, novel = head(Read(found[block], *batch.packed), of_head)
                probability[rows[block]], novelty[rows[block]] = shares.numpy(), novel.numpy()
    if left_out := int(np.isnan(novelty).sum()):
        logger.info("%d cells have no gene that is read; they get no label", left_out)
    return probability, novelty


def warn_of_shift(novelty: np.ndarray, reject: float, annotator: Annotator) -> None:
    """Warn if far more cells are rejected than the rate, which a shift between studies does.

    Parameters
    ----------
    novelty
        Of the query's cells `(n,)`, without NaN.
    reject
        See :func:`annotate`.
    annotator
        What they were annotated with.

    Warns
    -----
    UserWarning
        See above.
    """
    from scipy.stats import binom

    threshold = np.quantile(annotator.novelty, 1 - reject)
    unknown = novelty > threshold
    n, n_unknown = len(novelty), int(unknown.sum())
    if n_unknown <= n * min(FAR_ABOVE * reject, (1 + reject) / 2) or binom.sf(n_unknown - 1, n, reject) > UNLIKELY:
        return
    median = np.median(annotator.novelty[annotator.novelty <= threshold])
    others = ""
    if n_unknown < n:  # missing types leave the other cells where they are
        above = (novelty[~unknown] > median).mean()
        others = f" ({above:.0%} of the other cells exceed its median novelty; without a shift 50% do)"
    by_batch = annotator.notes.get("max_novelty_from") == "held-out batches"
    batches = "" if by_batch else ", or a reference of several studies with batch_key=..."
    warn(
        f"{n_unknown} of {n} cells ({n_unknown / n:.0%}) are {REJECTED!r} with reject={reject:g}: the reference lacks "
        f"their types, or there is a shift between query and reference{others}. If it is a shift, pass a lower rate, "
        f"reject={reject / 5:g}{batches}; reject=None names every cell."
    )


def named(
    probability: np.ndarray, labels: tuple[str, ...], parents: Mapping[str, str], backoff: float
) -> tuple[np.ndarray, np.ndarray]:
    """Name the label of each cell; the group above it where that is too uncertain.

    Parameters
    ----------
    probability
        `(n, n_labels)`, without NaN.
    labels, parents
        Names, and the group above each label or group.
    backoff
        A label or group below this probability gives way to the group above it, if there is one.

    Returns
    -------
    Names `(n,)` (object) and their probabilities `(n,)`; that of a group is the sum over its labels.
    """
    best = probability.argmax(axis=1)
    names = np.array(labels, dtype=object)[best]
    confidence = probability[np.arange(len(best)), best]
    if not parents:
        return names, confidence
    above = ancestors(labels, parents)
    for number in range(max(map(len, above))):
        at = np.array([chain[number] if number < len(chain) else "" for chain in above], dtype=object)
        unsure = (confidence < backoff) & (at[best] != "")
        if not unsure.any():
            break
        # all labels below a group, at whatever depth
        below = np.array([[name in chain for chain in above] for name in at])
        confidence[unsure] = (probability[unsure] * below[best[unsure]]).sum(axis=1)
        names[unsure] = at[best[unsure]]
    return names, np.minimum(confidence, 1.0)


def as_categories(names: np.ndarray, fitted: Annotator) -> pd.Categorical:
    """Give what was named in the type of the reference's labels; text where groups of `parents` are named.

    Numbers, truth values and ordered categories cannot hold "unknown": rejected cells are missing there.
    """
    plain = fitted.dtype == "object" and not fitted.ordered
    groups = list(dict.fromkeys(fitted.parents.values()))
    used = set(names[names != None])  # noqa: E711
    if plain or groups:
        order = dict.fromkeys([*fitted.names, *groups, REJECTED])
        return pd.Categorical(names, categories=[name for name in order if name in used])
    if REJECTED in used:
        warn(
            f"{(names == REJECTED).sum()} of {len(names)} cells are rejected, and missing among the labels: these "
            f"are {'ordered categories' if fitted.dtype == 'object' else fitted.dtype}, which {REJECTED!r} is not. "
            "Labels that are text hold it."
        )
    numbers = {name: number for number, name in enumerate(fitted.names) if name in used}
    categories = pd.Index([fitted.labels[number] for number in numbers.values()], dtype=fitted.dtype)
    of = {name: code for code, name in enumerate(numbers)}
    return pd.Categorical.from_codes([of.get(name, -1) for name in names], categories, ordered=fitted.ordered)


def ancestors(labels: tuple[str, ...], parents: Mapping[str, str]) -> list[list[str]]:
    """Find the groups above each label, from the lowest to the highest.

    Raises
    ------
    ValueError
        If a group is above itself, a label is a group too, or a name is neither a label nor a group.
    """
    chains = []
    for label in labels:
        chain: list[str] = []
        name = label
        while name in parents:
            name = parents[name]
            if name in chain or name == label:
                raise ValueError(f"parents goes in a circle: {' > '.join([label, *chain, name])}.")
            chain.append(name)
        chains.append(chain)
    groups = {name for chain in chains for name in chain}
    if both := sorted(groups & set(labels)):
        raise ValueError(f"parents names {both[0]!r} as a group, but it is a label too: give the group another name.")
    if foreign := sorted(set(parents) - set(labels) - groups):
        raise ValueError(
            f"parents names {len(foreign)} label(s) that the reference lacks, the first is {foreign[0]!r}; it has "
            f"{', '.join(map(repr, labels[:20]))}."
        )
    return chains
