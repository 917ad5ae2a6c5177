"""Fit an annotator on a user's labelled cells, and run one over cells."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from scdiva._constants import REJECTED
from scdiva._running import Running, run_cells
from scdiva._settings import logger, settings
from scdiva._threads import torch_threads_kept
from scdiva.data.genes import advice, column_tokens
from scdiva.data.reading import Reading
from scdiva.tl._embed import open_for
from scdiva.tl._training_cells import training_cells

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

    from scdiva.models import Annotator, ScDiVa
    from scdiva.train.annotation import Reference
    from scdiva.train.config import AnnotationConfig

LEAST_GENES = 50
"""Genes that reference and cells must share."""
BLOCK_CELLS = 1024


class Known(NamedTuple):
    """The labelled cells, as the user gave them.

    Attributes
    ----------
    adata
        The cells.
    batch, labels
        Numbers from 0 `(n_obs,)`; a label of -1 is none.
    types
        The labels, in the type that they came in.
    """

    adata: AnnData
    batch: np.ndarray
    labels: np.ndarray
    types: pd.CategoricalDtype

    @property
    def names(self) -> list[str]:
        """Of the labels, as text."""
        return [str(name) for name in self.types.categories.tolist()]


def shared_tokens(reference: AnnData, adata: AnnData, model: ScDiVa, reading: Reading) -> np.ndarray:
    """Genes that the model knows and both have a column for, as tokens, ascending.

    Raises
    ------
    ValueError
        If they are fewer than 50.
    """
    parts = []
    for data in (reference, adata):
        tokens = column_tokens(reading.var(data), model.vocabulary, reading)
        parts.append(np.unique(tokens[tokens >= 0]))
    both = np.intersect1d(parts[0], parts[1])
    if len(both) < LEAST_GENES:
        fewer = reference if len(parts[0]) < len(parts[1]) else adata
        raise ValueError(
            f"adata and the reference share {len(both)} genes that the model knows ({len(parts[1])} of adata's "
            f"{adata.n_vars}, {len(parts[0])} of the reference's {reference.n_vars}; the first names are "
            f"{_first(adata)} and {_first(reference)}): {LEAST_GENES} or more are needed. "
            + advice([str(name) for name in fewer.var_names])
        )
    return both.astype(np.int32)


def _first(adata: AnnData) -> str:
    return repr(str(adata.var_names[0])) if adata.n_vars else "none (0 genes)"


def fit_annotator(
    known: Known,
    model: ScDiVa,
    method: str,
    tokens: np.ndarray,
    running: Running,
    config: AnnotationConfig,
    reading: Reading,
    *,
    strategy: Literal["lora", "full"] = "lora",
    max_epochs: int = 100,
    patience: int = 5,
    minutes: float | None = None,
) -> Annotator:
    """Fit an annotator.

    Parameters
    ----------
    known
        Labelled cells, and perhaps unlabelled ones beside them.
    model
        Not changed.
    method
        See :func:`annotate`.
    tokens
        Genes to read.
    running
        How cells are run through the model.
    config
        Of the fit.
    reading
        What to read.
    strategy, max_epochs, patience, minutes
        Of `"finetune"`.
    """
    import torch

    from scdiva.models import Annotator
    from scdiva.models.inference import runs_transformer
    from scdiva.train.annotation import Reference, calibrate, fit_head, held_out

    cells, rows = training_cells(known.adata, model, known.batch, reading, only=tokens)
    states = np.full((known.adata.n_obs, running.width(model)), np.nan, dtype=np.float32)
    for at, _, found in _blocks(model, known.adata, tokens, running, reading)[1]:
        states[at] = found
    labels = known.labels[rows]
    present = np.unique(labels[labels >= 0])
    if len(present) < len(known.names):  # all cells of a label have no gene that is read
        lost = np.setdiff1d(np.arange(len(known.names)), present)
        raise ValueError(
            f"No cell of {len(lost)} label(s), the first is {known.names[lost[0]]!r}, has a gene that is read: leave "
            "these cells out of the reference."
        )
    reference = Reference(cells, torch.from_numpy(states[rows]), labels)
    notes: dict[str, Any] = {}
    with torch_threads_kept(None if runs_transformer(model, running.what) else 1):
        if method == "finetune":
            limits = max_epochs, patience, np.inf if minutes is None else 60 * minutes
            model, head, notes, heard = _finetuned(
                model, reference, known, rows, config, strategy, limits, running.device
            )
        else:
            head = fit_head(reference, method, len(known.names), model.config.n_tokens, config)
            heard = held_out(head, reference, config)
        found = calibrate(head, heard)
    head.requires_grad_(False).eval()
    novelty = found.pop("novelty")
    notes |= {**found, "own_directions": head.sizes.own_dim, "n_labelled": int((labels >= 0).sum())}
    return Annotator(
        model, head, tuple(known.types.categories.tolist()), tokens, novelty, notes=notes,
        dtype=str(known.types.categories.dtype), ordered=bool(known.types.ordered),
    )  # fmt: skip


def _finetuned(
    model: ScDiVa,
    reference: Reference,
    known: Known,
    rows: np.ndarray,
    config: AnnotationConfig,
    strategy: Literal["lora", "full"],
    limits: tuple[int, int, float],
    device: str,
) -> tuple[ScDiVa, Any, dict[str, Any], Any]:
    """Fit a head on some of the labelled cells, train on with the model, and hear what is said of the others."""
    from dataclasses import replace

    from scdiva.train.annotation import Reference, fit_head, held_out
    from scdiva.train.finetuning import finetune, split_by_batch
    from scdiva.train.loop import Limits

    order = np.argsort(reference.labels, kind="stable")
    order = order[reference.labels[order] >= 0]
    labels = reference.labels[order]
    ragged = reference.cells.take(order)
    cells = replace(
        reference.cells, indptr=ragged.cu_seqlens.numpy(), tokens=ragged.tokens.numpy(),
        values=ragged.values.numpy(), batch=labels, n_batches=len(known.names),  # noqa: PD011
    )  # fmt: skip
    labelled = Reference(cells, reference.states[order], labels)
    split = split_by_batch(labels, known.batch[rows][order], config.seed)
    n_labels, n_tokens = len(known.names), model.config.n_tokens
    if not len(split.held_out):
        warnings.warn(
            "no labelled cell can be held out to end fine-tuning by, as each label has one cell: what is returned is "
            "the logistic regression that it would begin with.",
            UserWarning,
            stacklevel=5,
        )
        head = fit_head(reference, "finetune", n_labels, n_tokens, config)
        return model, head, {"improved": False}, held_out(head, reference, config)
    # all that is not held out, by batch: principal components are those within batches, not within labels
    rest = np.setdiff1d(np.arange(reference.cells.n_cells), order[split.held_out])
    part = Reference(reference.cells.subset(rest), reference.states[rest], reference.labels[rest])
    head = fit_head(part, "finetune", n_labels, n_tokens, config)
    new = copy.deepcopy(model).to(device)
    found, heard = finetune(new, head, labelled, split, strategy, config, Limits(*limits), progress=settings.progress)
    notes = {key: found[key] for key in ("steps", "stopped", "start_loss", "best_loss", "improved", "history")}
    if not found["improved"]:
        warnings.warn(
            f"fine-tuning did not tell the {len(split.held_out)} held-out cells any better than the logistic "
            "regression that it began with: that is what is returned, fitted on all labelled cells.",
            UserWarning,
            stacklevel=5,
        )
        head = fit_head(reference, "finetune", n_labels, n_tokens, config)
        return model, head, notes, held_out(head, reference, config)
    return new, head, notes, heard


def annotated(
    annotator: Annotator, adata: AnnData, running: Running, reading: Reading
) -> tuple[np.ndarray, np.ndarray]:
    """Run an annotator over cells.

    Parameters
    ----------
    annotator
        Fitted.
    adata
        The cells.
    running, reading
        As for :func:`fit_annotator`.

    Returns
    -------
    Probabilities float32 `(n_obs, n_labels)` and novelty float32 `(n_obs,)`; NaN for cells without a gene that is read.

    Raises
    ------
    ValueError
        If the cells have fewer than 50 of the genes that the annotator reads.

    Warns
    -----
    UserWarning
        If they have less than half of them.
    """
    import torch

    from scdiva.data.batch import from_ragged
    from scdiva.data.packed import take_cells
    from scdiva.nn.annotation import Read

    head = annotator.head
    source, blocks = _blocks(annotator.model, adata, annotator.tokens, running, reading)
    n_measured = int(np.isin(annotator.tokens, source.measured_tokens).sum())
    if n_measured < LEAST_GENES:
        raise ValueError(
            f"adata has {n_measured} of the {len(annotator.tokens)} genes that the annotator reads; {LEAST_GENES} or "
            "more are needed. Name the column of adata.var that holds symbols or Ensembl ids: gene_ids=..."
        )
    if 2 * n_measured < len(annotator.tokens):
        warnings.warn(
            f"adata has {n_measured} of the {len(annotator.tokens)} genes that the annotator reads. Fitted anew on the "
            "genes that both have it may do better: tl.annotate(adata, labels_key, reference).",
            UserWarning,
            stacklevel=3,
        )
    measured = torch.from_numpy(np.isin(head.gene_tokens.numpy(), source.measured_tokens))
    probability = np.full((adata.n_obs, len(annotator.labels)), np.nan, dtype=np.float32)
    novelty = np.full(adata.n_obs, np.nan, dtype=np.float32)
    with torch.inference_mode():
        for rows, ragged, states in blocks:
            for start in range(0, len(rows), BLOCK_CELLS):
                block = np.arange(start, min(start + BLOCK_CELLS, len(rows)))
                batch = from_ragged(*take_cells(ragged, block))
                read = Read(torch.from_numpy(states[block]), *batch.packed)
                found = head(read, measured)
                probability[rows[block]], novelty[rows[block]] = found[0].numpy(), found[1].numpy()
    if left_out := int(np.isnan(novelty).sum()):
        logger.info("%d cells have no gene that is read; they get no label", left_out)
    return probability, novelty


def _blocks(model: ScDiVa, adata: AnnData, tokens: np.ndarray, running: Running, reading: Reading) -> Any:
    """Open cells with these genes alone; the source, and an iterator over rows, genes and states of its windows."""
    from scdiva.data.source import restricted

    loaded, source, _ = open_for(model, adata, running, reading, empty="nan")
    source = restricted(source, tokens)

    def windows() -> Any:
        for rows, ragged, results in run_cells(loaded, source, running):
            states = np.empty((len(rows), running.width(loaded)), dtype=np.float32)
            for cells, found in results:
                states[cells] = found
            yield rows, ragged, states

    return source, windows()


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

    Numbers, truth values and ordered categories have no place for "unknown": rejected cells are missing there.
    """
    import pandas as pd

    plain = fitted.dtype == "object" and not fitted.ordered
    groups = list(dict.fromkeys(fitted.parents.values()))
    used = set(names[names != None])  # noqa: E711
    if plain or groups:
        order = dict.fromkeys([*fitted.names, *groups, REJECTED])
        return pd.Categorical(names, categories=[name for name in order if name in used])
    if REJECTED in used:
        warnings.warn(
            f"{(names == REJECTED).sum()} of {len(names)} cells are rejected, and missing among the labels: these "
            f"are {'ordered categories' if fitted.dtype == 'object' else fitted.dtype}, which {REJECTED!r} is not. "
            "Labels that are text hold it.",
            UserWarning,
            stacklevel=4,
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
