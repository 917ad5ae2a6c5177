"""`tl.annotate`: labels of cells from a labelled reference, how sure they are, and what is of no known type."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import pandas as pd

from scdiva import _constants as C
from scdiva._checks import check_arguments, check_choices, check_least, check_positive, speaking_of, warn
from scdiva._docs import with_shared_docs
from scdiva._labels import batch_numbers, label_numbers, refuse_missing
from scdiva._rng import seed_of
from scdiva._running import Cells, embed_all, model_name, resolve_run_config
from scdiva._settings import logger
from scdiva.annotation.prediction import (
    ancestors,
    annotated,
    as_categories,
    check_genes,
    finetune_annotator,
    fit_annotator,
    named,
    shared_tokens,
    warn_of_shift,
)
from scdiva.data.cells import ENOUGH_ENTROPY, open_cells, restricted, share_of_entropy
from scdiva.data.options import InputOptions, Species
from scdiva.data.results import check_anndata, check_writable, write

if TYPE_CHECKING:
    import torch
    from anndata import AnnData

    from scdiva.models import Annotator, ScDiVa


@check_arguments
@with_shared_docs
def annotate(
    adata: AnnData,
    labels_key: str | None = None,
    reference: AnnData | None = None,
    *,
    method: Literal["linear", "knn", "probe"] = "linear",
    model: ScDiVa | Annotator | str | PathLike[str] = C.DEFAULT_MODEL,
    batch_key: str | None = None,
    unlabeled_category: str | None = None,
    reject: float | None = None,
    parents: Mapping[str, str] | None = None,
    backoff: float = 0.5,
    n_neighbors: int = 15,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    finetune: bool = False,
    epochs: int | None = None,
    lr: float | None = None,
    freeze: int | None = None,
    lora: int | None = None,
    context: int | None = None,
    checkpoint_dir: str | PathLike[str] | None = None,
    key_added: str = C.OBS_LABEL,
    rng: int | np.random.Generator | torch.Generator | None = None,
    device: str | None = None,
) -> Annotator:
    r"""Annotate cells from a labelled reference, with calibrated confidence, and reject types that it lacks.

    Reference and cells are read as if they had only the genes that both have. The labelled cells may also be in `adata`
    itself, together with the cells to annotate.

    - `"linear"`, the default: logistic regression without an intercept on the cell state and on the 2,000 genes of
      highest variance in the reference. The state is centred, the genes are not, and each of the two has one scale.
      Novelty comes from a second logistic regression, which also reads principal components of the reference (within
      batches), all standardised.
    - `"probe"`: a multilayer perceptron with two hidden layers of 128 units on the cell state alone, scaled to length 1
      and standardised. The model stays as it is. The paper calls this zero-shot annotation.
    - `"knn"`: nearest neighbours in the embedding. Nothing is trained. For a model that has integrated batches, this is
      the integrated embedding; the other methods read the state before it.

    With `finetune=True` all weights of the model that the cell state depends on are trained together with the head of
    `"probe"`, by cross-entropy (paper, section on annotation), from the given model and a head trained on it. At least
    a tenth of the labelled cells is held out and never trained on: whole batches of `batch_key`, or single cells if
    there is one batch or no label is in two. The result is always the fine-tuned model. `accuracy_before` and
    `loss_before` are measured on the held-out cells before fine-tuning.

    In all fits each label has the same weight, however few cells it has.

    Probabilities are calibrated on held-out cells of the reference [1]_. The labelled cells are divided into three
    folds, each predicted by a classifier that was fitted on the two others; with `finetune=True`, the cells held out
    above are used. With few of them (`n_held_out` below some hundred) confidence is a rough guide. `novelty` has mean 0
    on the same cells. It is higher for cells of types that the reference lacks; `AnnotationHead` has
    the formula.

    Novelty is also higher for cells of another study. The threshold of `reject` is the 1 - `reject` quantile of the
    novelty of held-out cells. With a `batch_key` whole batches are held out, in up to three parts, so the threshold
    includes the shift between batches. (Labels that only one part has keep the novelty of single held-out cells.) The
    result says which of the two was done: `max_novelty_from`. In queries of another study, `reject=0.05` with a
    threshold from held-out cells called 3% to 56% of the cells of known types unknown, most of which had the right
    most probable label, and 56% to 93% of the cells of types that were removed from the reference (four pairs of
    studies, see the benchmark page "Annotation"). With held-out batches these shares were 0% to 13% and 25% to 72%
    (three pairs). So pass a `batch_key` if the reference has batches of different studies, technologies or treatments;
    with few batches rejection is conservative. With a reference of one batch, `reject=0.01` is closer to a rate of 5%.

    Parameters
    ----------
    adata
        Cells × genes to annotate, raw counts or log-normalised expression.
    labels_key
        Column with the labels, of `reference.obs`, or without a reference of `adata.obs`.
    reference
        The labelled cells. None: those cells of `adata` that have a label. What to read holds for both: beside a human
        reference, a table of `species` has to hold the human genes too, each as itself.
    method
        `"linear"`: logistic regression on the cell state and genes. `"probe"`: a multilayer perceptron on the cell
        state. `"knn"`: nearest neighbours in the embedding. With `finetune=True` it is `"probe"`, which need not be
        given.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`; not changed. Or an
        annotator that this function returned, or its folder: then nothing is fitted.
    batch_key
        Column with the batch of each labelled cell: principal components are then those within batches, `reject` is
        calibrated on held-out batches, and fine-tuning holds out whole batches.
    unlabeled_category
        Value of `labels_key` that means "no label". Without a reference a missing value always does.
    reject
        Share of the cells of known types that may be called unknown, such as 0.05: cells whose novelty exceeds the 95th
        percentile of held-out cells, or of held-out batches, are labelled `"unknown"`. None names a label for every
        cell.
    parents
        For each label the group above it, such as `{"CD4 T": "T", "CD8 T": "T", "T": "lymphoid"}`.
    backoff
        With `parents`: where the probability of a label is below this, the group above it is named, whose probability
        is the sum over its labels.
    n_neighbors
        Neighbours of `"knn"` that vote; fewer where labels have fewer cells on average.
    %(reading)s
    %(finetuning)s
    key_added
        Key of `adata.obs` to write; the others begin with it.
    rng
        Seed; None takes `scdiva.settings.seed`. Global random state is never touched. On a CPU the same seed gives the
        same result.
    device
        Torch device; None takes `scdiva.settings.device`.

    Returns
    -------
    The fitted annotator, for `tl.annotate(later, model=annotator)`; `annotator.save(folder)` keeps it. Written are

    `adata.obs[key_added]`
        Categorical: the label, the group above it, or `"unknown"`. Missing for cells without a gene that is read.
        Labels that are numbers, truth values or ordered categories come in that type (text beside groups of `parents`),
        and rejected cells are then missing, as none of these can hold `"unknown"`.
    `adata.obs[key_added + "_confidence"]`
        float32, the calibrated probability of the label or group. Of a rejected cell, of what would have been named.
    `adata.obs[key_added + "_novelty"]`
        float32, how far a cell is from the labels of the reference: mean 0 over its held-out cells, higher for types
        that it lacks.
    `adata.obsm[key_added + "_probability"]`
        float32 `(n_cells, n_labels)`, rows that sum to 1.
    `adata.uns["scdiva"][key_added]`
        `labels` (the columns of the probabilities), `groups` (the names that `parents` gives), `n_cells`, `method`,
        `finetuned`, `labels_key`, `temperature`, `ece` (expected calibration error of held-out cells), `accuracy`,
        `loss` (cross-entropy of the calibrated probabilities) and `n_held_out` (theirs and their number), `reliability`
        (arrays `confidence`, `accuracy`, `n_cells` of 15 bins of confidence), `max_novelty` (the threshold of `reject`,
        else NaN), `max_novelty_from` (`"held-out batches"` or `"held-out cells"`: what `reject` is calibrated on),
        `n_genes` (that both have), `n_labelled`, `own_directions`, `model`, `seed`, `seconds`; with `finetune=True`
        also `accuracy_before` and `loss_before`, `steps`, and `history` (arrays `loss` and `accuracy` with a value for
        each step, of its training cells).

    Raises
    ------
    KeyError
        If a column or layer does not exist.
    ValueError
        If the reference has no or only one label, or cells without one; if a label is a text such as `"nan"` or
        `"unknown"` and not the `unlabeled_category`; if labels or batches are continuous numbers, or nearly as many as
        cells; if cells and reference share fewer than 50 genes; if something that scdiva did not write stands under a
        key that would be written, or the key is none for a file; if an annotator is given and something that only a fit
        takes; if an argument is out of range; if `finetune=True` and the method is `"knn"`, or `checkpoint_dir` holds
        another run; if fewer than 20 cells of the reference have a known gene, or a matrix is refused as by
        :func:`embed`.
    TypeError
        If `adata` or `reference` is no AnnData object, or `key_added` no text.
    FloatingPointError
        If the loss of fine-tuning becomes NaN or infinite.

    Warns
    -----
    UserWarning
        If all cells of `adata` are labelled already, or it has a column `labels_key` without a label of the reference
        (left as it is); if fine-tuning did not lower the loss of the held-out cells; if rejected cells are missing, as
        the labels are no text; if a word such as `"unknown"` is a batch; if far more cells are unknown than `reject`
        allows (above three times the rate, and beyond binomial chance), as the reference lacks their types or there is
        a shift between query and reference.

    References
    ----------
    .. [1] Guo, Pleiss, Sun & Weinberger, On calibration of modern neural networks, ICML 2017.

    Examples
    --------
    >>> import scdiva as sd
    >>> cells = sd.datasets.toy(160, 100)
    >>> reference, query, later = cells[:80].copy(), cells[80:120].copy(), cells[120:].copy()
    >>> annotator = sd.tl.annotate(query, "cell_type", reference, reject=0.05)
    >>> set(query.obs["scdiva_label"]) <= {*cells.obs["cell_type"], "unknown"}
    True
    >>> same = sd.tl.annotate(later, model=annotator)
    """
    from scdiva.annotation.annotator import Annotator
    from scdiva.models._fitted import given_fitted

    begun = time.monotonic()
    written = {
        "obs": [key_added, f"{key_added}_{C.CONFIDENCE}", f"{key_added}_{C.NOVELTY}"],
        "obsm": [f"{key_added}_{C.PROBABILITY}"],
    }
    check_writable(adata, copy=False, call="tl.annotate", entry=key_added, **written)
    if reference is not None:
        with speaking_of("reference"):
            check_anndata(reference)
    check_choices(method=(method, ("linear", "knn", "probe")))
    if finetune and method == "knn":
        raise ValueError(
            'finetune=True trains the model with the head of method="probe", and method="knn" trains nothing: leave '
            "method out."
        )
    check_least(n_neighbors=(n_neighbors, 1))
    check_positive(reject=reject, backoff=backoff)
    if backoff > 1:
        raise ValueError(f"backoff must be at most 1, got {backoff!r}.")
    if reject is not None and reject >= 1:
        raise ValueError(f"reject must be below 1, or None to name a label for every cell; got {reject!r}.")
    run_config = resolve_run_config(None, device, None)
    reading = InputOptions(layer, use_raw, input, gene_ids, species, duplicates, "nan")
    groups = None if parents is None else {str(label): str(group) for label, group in parents.items()}
    fitted = given_fitted(Annotator, model, run_config.device)
    # neighbours look at the embedding, the others at the state before what an integrated model makes of it
    by_neighbors = (method if fitted is None else fitted.method) == "knn"
    run_config = run_config._replace(what="embedding" if by_neighbors else "state")
    cells: Cells
    states: np.ndarray | None = None
    rows, unlabelled = np.arange(adata.n_obs), np.ones(adata.n_obs, dtype=bool)
    if fitted is not None:
        of_a_fit: dict[str, object] = {"labels_key": labels_key, "reference": reference, "batch_key": batch_key}
        # the default method is as good as not given
        other_method = None if method in ("linear", fitted.method) else method
        of_a_fit |= {"unlabeled_category": unlabeled_category, "method": other_method, "finetune": finetune or None}
        of_a_fit |= {"epochs": epochs, "lr": lr, "freeze": freeze, "lora": lora, "context": context}
        of_a_fit |= {"checkpoint_dir": checkpoint_dir}
        if extra := [name for name, value in of_a_fit.items() if value is not None]:
            raise ValueError(f"This annotator is fitted: leave {' and '.join(extra)} out, or name a model to fit one.")
        fitted = replace(fitted, parents=fitted.parents if groups is None else groups)
        ancestors(fitted.names, fitted.parents)
        _check_reject(reject, len(fitted.novelty) > 0, fitted.names, fitted.parents)
        source = cells = restricted(open_cells(adata, fitted.model, reading), fitted.tokens)
        check_genes(fitted, source.measured_tokens)
    else:
        if labels_key is None:
            raise ValueError("Name the column with the labels, labels_key, or a fitted annotator as model=.")
        if reference is None and labels_key == key_added:
            raise ValueError(f"adata.obs[{labels_key!r}] holds the labels and would be overwritten: name a key_added.")
        labels, types, batch = _labelled(adata, reference, labels_key, unlabeled_category, batch_key)

        import torch

        from scdiva.annotation.finetune import AnnotationObjective
        from scdiva.annotation.fit import Reference
        from scdiva.data.memory import read_cells
        from scdiva.models.pretrained import load_for
        from scdiva.train.finetune import finetune_config

        given = load_for(cast("ScDiVa | str | PathLike[str]", model), run_config.device)  # an annotator is dealt with
        tuning = finetune_config(
            finetune, given, AnnotationObjective, epochs=epochs, lr=lr, freeze=freeze, lora=lora, context=context,
            checkpoint_dir=checkpoint_dir,
        )  # fmt: skip
        ancestors(tuple(map(str, types.categories.tolist())), groups or {})
        _check_reject(reject, np.bincount(labels[labels >= 0]).max() > 1, types.categories.tolist(), groups or {})
        seed = seed_of(rng)
        source = open_cells(adata, given, reading)
        other = source
        if reference is not None:
            warned = share_of_entropy(source) < ENOUGH_ENTROPY  # of few genes, which once is enough
            with speaking_of("reference"):
                other = open_cells(reference, given, reading, embeds=not warned)
        tokens = shared_tokens(other, source)
        how = "finetune" if finetune else method
        n_labels = len(types.categories)
        logger.info("annotating %d cells by %r, %d labels, %d genes", adata.n_obs, how, n_labels, len(tokens))
        source = cells = restricted(source, tokens)
        with speaking_of("adata" if reference is None else "reference"):
            known, known_rows = read_cells(source if reference is None else restricted(other, tokens), batch)
        if tuning is None:
            states = embed_all(given, known, run_config)
            labelled = Reference(known, torch.from_numpy(states), labels[known_rows])
            fitted = fit_annotator(labelled, types, given, method, n_neighbors, seed)
        else:
            fitted = finetune_annotator(
                known, labels[known_rows], types, given, tuning, run_config, seed, checkpoint_dir
            )
            length = fitted.model.config.input_length
            cells, known = replace(source, max_length=length), known.subset(np.arange(known.n_cells), length)
        # the seed as text: it is beyond the integers that JSON and h5ad readers agree on
        found = fitted.notes | {"labels_key": labels_key, "seed": str(seed)}
        fitted = replace(fitted, parents=groups or {}, notes=found)
        if reference is None:  # read already, and encoded too unless the model was fine-tuned
            cells, rows, unlabelled = known, known_rows, labels < 0
        else:
            states = None
    # once more: cells may have been left out
    _check_reject(reject, len(fitted.novelty) > 0, fitted.names, fitted.parents)
    probability = np.full((adata.n_obs, len(fitted.labels)), np.nan, dtype=np.float32)
    novelty = np.full(adata.n_obs, np.nan, dtype=np.float32)
    probability[rows], novelty[rows] = annotated(fitted, cells, source.measured_tokens, run_config, states)
    names, confidence = np.full(adata.n_obs, None, dtype=object), np.full(adata.n_obs, np.nan, dtype=np.float32)
    there = ~np.isnan(novelty)
    names[there], confidence[there] = named(probability[there], fitted.names, fitted.parents, backoff)
    threshold = np.nan if reject is None else float(np.quantile(fitted.novelty, 1 - reject))
    if reject is not None:
        names[there & (novelty > threshold)] = C.REJECTED
        warn_of_shift(novelty[there & unlabelled], reject, fitted)
    columns = as_categories(names, fitted), confidence, novelty
    notes = {
        "model": model_name(model),
        **fitted.notes,
        "labels": np.array(fitted.labels, dtype=fitted.dtype),
        "groups": np.array(sorted(set((fitted.parents or {}).values())), dtype=object),
        "n_cells": adata.n_obs,
        "method": fitted.method,
        "max_novelty": threshold,
        "n_genes": len(fitted.tokens),
        "seconds": time.monotonic() - begun,
    }
    obs, obsm = dict(zip(written["obs"], columns, strict=True)), {written["obsm"][0]: probability}
    write(adata, "tl.annotate", key_added, notes, obs=obs, obsm=obsm)
    return fitted


def _labelled(
    adata: AnnData, reference: AnnData | None, labels_key: str, unlabeled_category: str | None, batch_key: str | None
) -> tuple[np.ndarray, pd.CategoricalDtype, np.ndarray]:
    """Label codes, labels and batch codes of the labelled cells; raise an error for invalid ones."""
    if reference is None:
        labels, types = label_numbers(adata, labels_key, unlabeled_category)
        if (labels >= 0).all():
            warn(
                f"all {adata.n_obs} cells have a label in adata.obs[{labels_key!r}]: what is predicted of them are "
                "cells that were fitted on. Name other cells as adata and these as reference, or an "
                "unlabeled_category."
            )
        return labels, types, batch_numbers(adata, batch_key)
    labels, types = label_numbers(reference, labels_key, unlabeled_category, where="reference")
    refuse_missing(reference, labels_key, "reference", "give them an unlabeled_category")
    known = tuple(map(str, types.categories.tolist()))
    if labels_key in adata.obs:
        own = set(adata.obs[labels_key].dropna().astype(str)) - {str(unlabeled_category), C.REJECTED, ""}
        if own and not own & set(known):
            warn(
                f"adata.obs[{labels_key!r}] and reference.obs[{labels_key!r}] have no label in common "
                f"({', '.join(map(repr, sorted(own)[:5]))} and {', '.join(map(repr, known[:5]))}). That of adata "
                "is not read and stays as it is."
            )
    return labels, types, batch_numbers(reference, batch_key, where="reference")


def _check_reject(reject: float | None, held_out: bool, names: Collection[str], parents: Mapping[str, str]) -> None:
    """Refuse to reject where there is nothing to measure by, or a label has the name."""
    if reject is None:
        return
    if not held_out:
        raise ValueError(
            "reject needs labelled cells that can be held out: of each label there is one only. Label more, or leave "
            "reject out."
        )
    if C.REJECTED in (*names, *parents.values()):
        raise ValueError(
            f"{C.REJECTED!r} is a label of the reference, or a group of parents, and would be the name of rejected "
            f"cells too: rename it, or pass unlabeled_category={C.REJECTED!r} if it means that there is no label."
        )
