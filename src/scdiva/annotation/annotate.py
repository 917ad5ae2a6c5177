"""`tl.annotate`: cell type labels from a labelled reference, with confidence, novelty and rejection."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scdiva import _constants as C
from scdiva._checks import check_arguments, check_choices, check_least, check_positive, from_extra, speaking_of, warn
from scdiva._docs import with_shared_docs
from scdiva._labels import batch_numbers, label_numbers, read_labels, refuse_missing
from scdiva._rng import seed_of
from scdiva._settings import logger, torch_threads_kept
from scdiva.data.cells import ENOUGH_ENTROPY, CellSource, has_gene_below, open_cells, restricted, share_of_entropy
from scdiva.data.genes import InputOptions, advice, input_options
from scdiva.data.results import check_anndata, check_writable, our_uns, write
from scdiva.models.inference import Cells, RunConfig, embed_all, model_name, resolve_run_config

if TYPE_CHECKING:
    import torch
    from anndata import AnnData

    from scdiva.models import Annotator, ScDiVa


LEAST_GENES = 50
"""Minimum number of genes that reference and cells share."""
FAR_ABOVE, UNLIKELY = 3.0, 1e-3
"""Rejection warns if the share of unknown cells is above this multiple of the rate and has at most this binomial
probability."""


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
    majority_voting: bool | str = False,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
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

    Both datasets are restricted to the genes that they share, and are normalised over these genes. The labelled cells
    may also be in `adata` itself, together with the cells to annotate.

    - `"linear"`, the default: logistic regression without an intercept on the cell state and on the 2,000 genes of
      highest variance in the reference. These may include human genes that the model lacks. The state is centred and
      the genes are not; each of these two blocks has one scale. Novelty comes from a second logistic regression, which
      also uses principal components of the reference (within batches), all standardised. If labels have fewer than 50
      cells on average and the reference has unlabelled cells, this second regression also predicts the labels. It is
      then also fitted to the unlabelled cells, with labels predicted by a first fit, and its confidence in these cells
      is too high.
    - `"probe"`: a multilayer perceptron with two hidden layers of 128 units on the cell state alone, scaled to length 1
      and standardised. The model is not changed. The paper calls this zero-shot annotation.
    - `"knn"`: nearest neighbours in the embedding. Nothing is trained. For a model that has integrated batches, this is
      the integrated embedding; the other methods use the cell state before integration.

    With `finetune=True` all weights of the model that the cell state depends on are trained together with the head of
    `"probe"`, by cross-entropy (paper, section on annotation), from the given model and a head trained on it. At least
    a tenth of the labelled cells is held out and never trained on: whole batches of `batch_key`, or single cells if
    there is one batch or no label is in two. The result is always the fine-tuned model. `accuracy_before` and
    `loss_before` are measured on the held-out cells before fine-tuning.

    In all fits each label has the same weight, whatever its number of cells. A fit without fine-tuning uses at most
    about 50,000 labelled cells (stratified by label, at least 50 of each) and 20,000 unlabelled cells; all cells of
    `adata` are then annotated in blocks, so that memory does not depend on the size of a backed file.

    Probabilities are calibrated on held-out cells of the reference [1]_. The labelled cells are divided into three
    folds, each predicted by a classifier that was fitted on the two others; with `finetune=True`, the held-out cells
    described above are used. With few held-out cells (`n_held_out` below a few hundred), the confidence is only
    approximate. `novelty` has mean 0 on the same cells. It is higher for cells of types that the reference lacks;
    `AnnotationHead` has the formula.

    Novelty is also higher for cells of another study. The threshold of `reject` is the 1 - `reject` quantile of the
    novelty of held-out cells. With a `batch_key` whole batches are held out, in up to three parts, so the threshold
    includes the shift between batches. (Labels that only one part has keep the novelty of single held-out cells.) The
    entry `max_novelty_from` states which were used. In queries of another study, `reject=0.05` with a threshold from
    held-out cells labelled 3% to 57% of the cells of known types as unknown, although the most probable label of most
    of them was correct, and 56% to 95% of the cells of types that were removed from the reference (four pairs of
    studies, section "Annotation" of the benchmarks). With held-out batches these shares were 0% to 15% and 28% to 72%
    (three pairs). Pass a `batch_key` if the reference has batches of different studies, technologies or treatments;
    with few batches, rejection is conservative. With a reference of one batch, `reject=0.01` is closer to a rate of 5%.

    Parameters
    ----------
    adata
        Cells × genes to annotate, raw counts or log-normalised expression.
    labels_key
        Column with the labels, of `reference.obs`, or without a reference of `adata.obs`.
    reference
        The labelled cells. None: those cells of `adata` that have a label. `layer`, `use_raw` and `input` apply to
        both, :func:`scdiva.pp.match_genes` to the object that it was called on.
    method
        `"linear"`: logistic regression on the cell state and genes. `"probe"`: a multilayer perceptron on the cell
        state. `"knn"`: nearest neighbours in the embedding. `finetune=True` uses `"probe"`, also if the method is not
        given.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`; not changed. Or an
        annotator returned by this function, or its folder: then nothing is fitted.
    batch_key
        Column with the batch of each labelled cell: principal components are then those within batches, `reject` is
        calibrated on held-out batches, and fine-tuning holds out whole batches.
    unlabeled_category
        Value of `labels_key` that means "no label". Without a reference a missing value always does.
    reject
        Share of the cells of known types that may be called unknown, such as 0.05: cells whose novelty exceeds the 95th
        percentile of held-out cells, or of held-out batches, are labelled `"unknown"`. None: every cell gets a label.
    parents
        For each label the group above it, such as `{"CD4 T": "T", "CD8 T": "T", "T": "lymphoid"}`.
    backoff
        With `parents`: a label whose probability is below this is replaced by the group above it, whose probability is
        the sum over its labels.
    n_neighbors
        Neighbours of `"knn"` that vote; fewer where labels have fewer cells on average.
    majority_voting
        Whether to also give each cell the most frequent label of its cluster, as in CellTypist [2]_. True or
        `"leiden"`: Leiden clusters of the embedding at a high resolution (5 below 5,000 cells, up to 30), computed from
        the genes that are read. Or a column of `adata.obs` with clusters. Types that are the majority in no cluster do
        not appear.
    %(reading)s
    %(finetuning)s
    key_added
        Key of `adata.obs` to write; the others begin with it.
    rng
        Seed of the random numbers. None: `scdiva.settings.seed`. The global random state is neither read nor changed.
        On a CPU the same seed gives the same result.
    device
        Torch device. None: `scdiva.settings.device`.

    Returns
    -------
    The fitted annotator, for `tl.annotate(later, model=annotator)`; `annotator.save(folder)` saves it. The call writes

    `adata.obs[key_added]`
        Categorical: the label, the group above it, or `"unknown"`. Missing for cells that express no gene of the
        model. Labels that are numbers, truth values or ordered categories keep that type (text with groups of
        `parents`), and rejected cells are then missing, as none of these can hold `"unknown"`.
    `adata.obs[key_added + "_confidence"]`
        float32, the calibrated probability of the label or group; for a rejected cell, that of its most probable label.
    `adata.obs[key_added + "_novelty"]`
        float32, dissimilarity to the labels of the reference: mean 0 over its held-out cells, higher for types that it
        lacks.
    `adata.obs[key_added + "_majority"]`
        With `majority_voting`: the most frequent label (in `key_added`) of the cell's cluster, or `"unknown"`.
        Confidence, novelty and probabilities are those of the cell's own label.
    `adata.obs[key_added + "_cluster"]`
        With `majority_voting=True` or `"leiden"`: the cluster.
    `adata.obsm[key_added + "_probability"]`
        float32 `(n_cells, n_labels)`, rows that sum to 1.
    `adata.uns["scdiva"][key_added]`
        `labels` (the columns of the probabilities), `groups` (the names that `parents` gives), `n_cells`, `method`,
        `finetuned`, `labels_key`, `temperature`, `ece` (expected calibration error of held-out cells), `accuracy` and
        `loss` (cross-entropy of the calibrated probabilities) of these cells, `n_held_out` (their number),
        `reliability` (arrays `confidence`, `accuracy`, `n_cells` of 15 bins of confidence), `max_novelty` (the
        threshold of `reject`, else NaN), `max_novelty_from` (`"held-out batches"` or `"held-out cells"`, on which
        `reject` is calibrated), `n_genes` (number of shared genes), `n_labelled` (cells used in the fit),
        `own_directions`, `model`, `seed`, `seconds`; with `finetune=True` also `accuracy_before` and `loss_before`,
        `steps`, and `history` (arrays `loss` and `accuracy` with a value for each step, of its training cells).

    Raises
    ------
    KeyError
        If a column or layer does not exist.
    ValueError
        If the reference has no or only one label, or cells without one; if a label is a text such as `"nan"` or
        `"unknown"` and not the `unlabeled_category`; if labels or batches are continuous numbers, or nearly as many as
        cells; if cells and reference share fewer than 50 genes; if a key that would be written holds data that scdiva
        did not write, or is not a valid h5ad or zarr key; if an annotator is given together with arguments of a fit; if
        an argument is out of range; if fewer than ten cells are to be clustered; if `finetune=True` and the method is
        `"knn"`, or `checkpoint_dir` holds another run; if fewer than 20 cells of the reference have a known gene, or a
        matrix is not valid for :func:`embed`.
    TypeError
        If `adata` or `reference` is not an AnnData object, or `key_added` is not text.
    ImportError
        If `majority_voting` needs clusters and `igraph` is not installed (extra `scdiva[leiden]`).
    FloatingPointError
        If the loss of fine-tuning becomes NaN or infinite.

    Warns
    -----
    UserWarning
        If all cells of `adata` are labelled already, or it has a column `labels_key` without a label of the reference
        (which is not changed); if fine-tuning did not lower the loss of the held-out cells; if rejected cells are
        missing, as the labels are not text; if a word such as `"unknown"` is a batch; if far more cells are unknown
        than `reject` allows (above three times the rate, and beyond binomial chance), as the reference lacks their
        types or there is a shift between query and reference.

    References
    ----------
    .. [1] Guo, Pleiss, Sun & Weinberger, On calibration of modern neural networks, ICML 2017.
    .. [2] Domínguez Conde et al., Cross-tissue immune cell analysis reveals tissue-specific features in humans, Science
       2022.

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
    from scdiva.models.pretrained import given_fitted
    from scdiva.models.storage import find_model

    start_time = time.monotonic()
    columns = [key_added, *(f"{key_added}_{name}" for name in (C.CONFIDENCE, C.NOVELTY, C.MAJORITY, C.CLUSTER))]
    probability_key = f"{key_added}_{C.PROBABILITY}"
    # the last two are written by majority voting only, the last by Leiden clusters only
    written = columns[: 5 if majority_voting in (True, "leiden") else 4 if majority_voting else 3]
    check_writable(adata, call="tl.annotate", entry=key_added, obs=written, obsm=[probability_key])
    if reference is not None:
        with speaking_of("reference"):
            check_anndata(reference)
    _check_options(method, n_neighbors, reject, backoff, finetune=finetune)
    overwritten = "adata.obs[{!r}] holds the {} and would be overwritten: name a key_added."
    if majority_voting in columns:
        raise ValueError(overwritten.format(majority_voting, "clusters"))
    clusters = None
    if not isinstance(majority_voting, bool) and majority_voting != "leiden":
        clusters = np.unique(read_labels(adata, majority_voting), return_inverse=True)[1]
    elif majority_voting:
        from_extra("igraph", "leiden", "majority_voting needs igraph")
    groups = None if parents is None else {str(label): str(group) for label, group in parents.items()}
    run_config, seed = resolve_run_config(None, device, None), None
    reading = partial(input_options, layer=layer, use_raw=use_raw, input=input, empty="nan")
    tuning = {
        "epochs": epochs, "lr": lr, "freeze": freeze, "lora": lora, "context": context,
        "checkpoint_dir": checkpoint_dir,
    }  # fmt: skip

    annotator = given_fitted(Annotator, model, run_config.device)
    # nearest neighbours use the embedding, the other methods the cell state before an integration head
    by_embedding = (method if annotator is None else annotator.method) == "knn"
    run_config = run_config._replace(what="embedding" if by_embedding else "state")
    if annotator is not None:
        fit_arguments = {
            "labels_key": labels_key, "reference": reference, "batch_key": batch_key,
            "unlabeled_category": unlabeled_category,
            "method": None if method in ("linear", annotator.method) else method,  # "linear" is the default
            "finetune": finetune or None, **tuning,
        }  # fmt: skip
        if excess := [name for name, value in fit_arguments.items() if value is not None]:
            raise ValueError(f"This annotator is fitted: leave {' and '.join(excess)} out, or name a model to fit one.")
        fitted = _open_for(annotator, adata, reading, groups)
    elif labels_key is None:
        if isinstance(model, str | PathLike):
            find_model(model)  # raises an error if it does not exist
        raise ValueError("Name the column with the labels, labels_key, or a fitted annotator as model=.")
    elif reference is None and labels_key in columns:
        raise ValueError(overwritten.format(labels_key, "labels"))
    else:
        labelled = _read_labels(adata, reference, labels_key, unlabeled_category, batch_key)
        labels, names = labelled.labels, tuple(map(str, labelled.types.categories))
        ancestors(names, groups or {})
        _check_reject(reject, np.bincount(labels[labels >= 0]).max() > 1, names, groups or {})
        seed = seed_of(rng)
        fitted = _fit(
            adata, reference, labelled, cast("ScDiVa | str | PathLike[str]", model), run_config, reading, method=method,
            n_neighbors=n_neighbors, finetune=finetune, tuning=tuning, seed=seed,
        )  # fmt: skip
        # h5ad and JSON readers cannot hold the seed as an integer
        notes = fitted.annotator.notes | {"labels_key": labels_key, "seed": str(seed)}
        fitted = fitted._replace(annotator=replace(fitted.annotator, parents=groups or {}, notes=notes))
    annotator, source = fitted.annotator, fitted.source
    _check_reject(reject, len(annotator.novelty) > 0, annotator.names, annotator.parents)

    probability = np.full((adata.n_obs, len(annotator.labels)), np.nan, dtype=np.float32)
    novelty, confidence = np.full((2, adata.n_obs), np.nan, dtype=np.float32)
    probability[fitted.rows], novelty[fitted.rows] = annotator._predict(
        fitted.cells, source.measured_tokens, run_config, fitted.states
    )
    predicted, names_of_cells = ~np.isnan(novelty), np.full(adata.n_obs, None, dtype=object)
    names_of_cells[predicted], confidence[predicted] = name_cells(
        probability[predicted], annotator.names, annotator.parents, backoff
    )
    threshold = np.nan
    if reject is not None:
        threshold = float(np.quantile(annotator.novelty, 1 - reject))
        names_of_cells[predicted & (novelty > threshold)] = C.REJECTED
        warn_of_shift(novelty[predicted & fitted.unlabelled], reject, annotator)
    notes = {
        "model": model_name(model),
        **annotator.notes,
        "labels": np.array(annotator.labels, dtype=annotator.dtype),
        "groups": np.array(sorted(set(annotator.parents.values())), dtype=object),
        "n_cells": adata.n_obs,
        "method": annotator.method,
        "max_novelty": threshold,
        "n_genes": len(annotator.tokens),
        "seconds": time.monotonic() - start_time,
    }
    labels_of_cells = as_categories(names_of_cells, annotator)
    obs: dict[str, Any] = dict(zip(columns, (labels_of_cells, confidence, novelty), strict=False))
    if majority_voting:
        if clusters is None:
            embedding = embed_all(annotator.model, source, run_config._replace(what="embedding"))
            embedding[~predicted] = np.nan
            clusters = over_cluster(embedding, seed_of(rng) if seed is None else seed)
            obs[columns[4]] = pd.Categorical.from_codes(clusters, list(map(str, range(clusters.max() + 1))))
        obs[columns[3]] = majority_labels(labels_of_cells, clusters)
        notes["majority_voting"] = "leiden" if majority_voting is True else majority_voting
    voted = our_uns(adata).get(key_added, {}).get("majority_voting")  # in an earlier call
    for name in columns[3 : 5 if voted == "leiden" else 4 if voted else 3]:
        if name in adata.obs and name not in obs:
            del adata.obs[name]
    write(adata, "tl.annotate", key_added, notes, obs=obs, obsm={probability_key: probability})
    return annotator


def _check_options(method: str, n_neighbors: int, reject: float | None, backoff: float, *, finetune: bool) -> None:
    """Raise an error for arguments out of range, and for fine-tuning of nearest neighbours."""
    from scdiva.annotation.annotator import METHODS

    check_choices(method=(method, METHODS))
    check_least(n_neighbors=(n_neighbors, 1))
    check_positive(reject=reject, backoff=backoff)
    if finetune and method == "knn":
        raise ValueError(
            'finetune=True trains the model with the head of method="probe", and method="knn" trains nothing: leave '
            "method out."
        )
    if backoff > 1:
        raise ValueError(f"backoff must be at most 1, got {backoff!r}.")
    if reject is not None and reject >= 1:
        raise ValueError(f"reject must be below 1, or None to name a label for every cell; got {reject!r}.")


class _Labelled(NamedTuple):
    """Labelled cells: label numbers, -1 for none, and batch numbers, `(n_cells,)` each, and the labels."""

    labels: np.ndarray
    types: pd.CategoricalDtype
    batch: np.ndarray


class _Fitted(NamedTuple):
    """An annotator, and the cells to annotate.

    Attributes
    ----------
    annotator
        The fitted annotator.
    source
        All cells, with the genes that the annotator reads.
    cells, rows
        `source`, or its cells in memory, and the rows of these in `adata`.
    states
        Their cell states, if known.
    unlabelled
        bool `(n_obs,)`, cells that the annotator was not fitted to.
    """

    annotator: Annotator
    source: CellSource
    cells: Cells
    rows: np.ndarray
    states: np.ndarray | None
    unlabelled: np.ndarray


def _open_for(
    annotator: Annotator, adata: AnnData, reading: Callable[..., InputOptions], groups: dict[str, str] | None
) -> _Fitted:
    """Cells to annotate by an annotator that was fitted before; `groups` replace those that it has."""
    if groups is not None:
        annotator = replace(annotator, parents=groups)
    ancestors(annotator.names, annotator.parents)
    opened = open_cells(adata, annotator.model, reading(adata), all_genes=annotator.method == "linear")
    source = restricted(opened, annotator.tokens)
    check_genes(annotator, source.measured_tokens)
    return _Fitted(annotator, source, source, np.arange(adata.n_obs), None, np.ones(adata.n_obs, dtype=bool))


def _fit(
    adata: AnnData,
    reference: AnnData | None,
    labelled: _Labelled,
    model: ScDiVa | str | PathLike[str],
    run_config: RunConfig,
    reading: Callable[..., InputOptions],
    *,
    method: str,
    n_neighbors: int,
    finetune: bool,
    tuning: dict[str, Any],
    seed: int,
) -> _Fitted:
    """Fit an annotator to the labelled cells, with the genes that they and the cells to annotate have."""
    import torch

    from scdiva.annotation.fit import AnnotationObjective, Reference, cells_to_read, finetune_annotator, fit_annotator
    from scdiva.data.batch import read_cells
    from scdiva.models.pretrained import load_for
    from scdiva.train.finetune import finetune_config

    labels, types, batch = labelled
    pretrained = load_for(model, run_config.device)
    config = finetune_config(finetune, pretrained, AnnotationObjective, **tuning)
    all_genes = method == "linear" and config is None
    source = reference_source = open_cells(adata, pretrained, reading(adata), all_genes=all_genes)
    if reference is not None:
        # one warning of few genes is enough
        embeds = share_of_entropy(source, pretrained.vocabulary) >= ENOUGH_ENTROPY
        with speaking_of("reference"):
            reference_source = open_cells(reference, pretrained, reading(reference), embeds=embeds, all_genes=all_genes)
    tokens = shared_tokens(reference_source, source)
    logger.info(
        "annotating %d cells by %r, %d labels, %d genes",
        adata.n_obs, "finetune" if finetune else method, len(types.categories), len(tokens),
    )  # fmt: skip
    source = restricted(source, tokens)
    with speaking_of("adata" if reference is None else "reference"):
        reference_source = source if reference is None else restricted(reference_source, tokens)
        is_read = reference_source.lengths > 0
        if config is None:  # fine-tuning uses all cells
            is_read[is_read] = cells_to_read(labels[is_read], seed)
        cells, rows = read_cells(reference_source, batch, only=is_read)
    if not (has_gene := has_gene_below(cells.indptr, cells.tokens, pretrained.config.n_tokens)).all():
        cells, rows = cells.subset(np.flatnonzero(has_gene)), rows[has_gene]
    states = None
    if config is None:
        states = embed_all(pretrained, cells, run_config)
        fit_to = Reference(cells, torch.from_numpy(states), labels[rows])
        annotator = fit_annotator(fit_to, types, pretrained, source.n_tokens, method, n_neighbors, seed)
    else:
        annotator = finetune_annotator(
            cells, labels[rows], types, pretrained, config, run_config, seed, tuning["checkpoint_dir"]
        )
        source = replace(source, max_length=annotator.model.config.input_length)
        cells = cells.subset(np.arange(cells.n_cells), source.max_length)
    unlabelled = labels < 0 if reference is None else np.ones(adata.n_obs, dtype=bool)
    if reference is None and len(rows) == np.count_nonzero(source.lengths):
        # these are all cells; their states are known unless the model was fine-tuned
        return _Fitted(annotator, source, cells, rows, states, unlabelled)
    return _Fitted(annotator, source, source, np.arange(adata.n_obs), None, unlabelled)


def _read_labels(
    adata: AnnData, reference: AnnData | None, labels_key: str, unlabeled_category: str | None, batch_key: str | None
) -> _Labelled:
    """Labels and batches of the reference."""
    if reference is None:
        labels, types = label_numbers(adata, labels_key, unlabeled_category)
        if (labels >= 0).all():
            warn(
                f"all {adata.n_obs} cells have a label in adata.obs[{labels_key!r}]: the predictions are for cells "
                "that were used for fitting. Name other cells as adata and these as reference, or an "
                "unlabeled_category."
            )
        return _Labelled(labels, types, batch_numbers(adata, batch_key))
    labels, types = label_numbers(reference, labels_key, unlabeled_category, where="reference")
    refuse_missing(reference, labels_key, "reference", "give them an unlabeled_category")
    if labels_key in adata.obs:
        reference_names = list(map(str, types.categories))
        names = set(adata.obs[labels_key].dropna().astype(str)) - {str(unlabeled_category), C.REJECTED, ""}
        if names and names.isdisjoint(reference_names):
            warn(
                f"adata.obs[{labels_key!r}] and reference.obs[{labels_key!r}] have no label in common "
                f"({', '.join(map(repr, sorted(names)[:5]))} and {', '.join(map(repr, reference_names[:5]))}). The "
                "column of adata is neither read nor changed."
            )
    return _Labelled(labels, types, batch_numbers(reference, batch_key, where="reference"))


def _check_reject(reject: float | None, held_out: bool, names: Collection[str], parents: Mapping[str, str]) -> None:
    """Raise an error for `reject` without held-out cells, or if a label has the name of rejected cells."""
    if reject is None:
        return
    if not held_out:
        raise ValueError(
            "reject needs labelled cells that can be held out, but each label has only one. Label more, or leave "
            "reject out."
        )
    if C.REJECTED in (*names, *parents.values()):
        raise ValueError(
            f"{C.REJECTED!r} is a label of the reference, or a group of parents, and would be the name of rejected "
            f"cells too: rename it, or pass unlabeled_category={C.REJECTED!r} if it means that there is no label."
        )


def shared_tokens(reference: CellSource, cells: CellSource) -> np.ndarray:
    """Known genes that were measured in both datasets, as tokens in ascending order.

    Raises
    ------
    ValueError
        If they are fewer than 50.
    """
    shared = np.intersect1d(reference.measured_tokens, cells.measured_tokens)
    if len(shared) < LEAST_GENES:
        sources = {"adata's": cells, "the reference's": reference}
        sizes = ", ".join(
            f"{len(one.measured_tokens):,} of {name} {len(one.tokens):,}" for name, one in sources.items()
        )
        first = " and ".join(str(one.var.index[:1].tolist()) for one in sources.values())
        fewer = min(sources.values(), key=lambda one: len(one.measured_tokens))
        raise ValueError(
            f"adata and the reference share {len(shared)} known genes ({sizes}; they begin with "
            f"{first}): {LEAST_GENES} or more are needed. {advice(list(map(str, fewer.var.index)))}"
        )
    return shared.astype(np.int32)


def check_genes(annotator: Annotator, measured: np.ndarray) -> None:
    """Raise an error for cells with fewer than 50 of an annotator's genes; warn if they lack more than half of them.

    Parameters
    ----------
    annotator
        Annotator that was fitted on other cells.
    measured
        Tokens that the cells have a column for.
    """
    n_measured, n_genes = int(np.isin(annotator.tokens, measured).sum()), len(annotator.tokens)
    share = f"adata has {n_measured:,} of the {n_genes:,} genes that the annotator reads"
    if n_measured < LEAST_GENES:
        raise ValueError(
            f"{share}; {LEAST_GENES} or more are needed. If a column of adata.var has symbols or Ensembl ids: "
            "sd.pp.match_genes(adata, gene_ids=...)."
        )
    if 2 * n_measured < n_genes:
        warn(
            f"{share}. An annotator fitted on the genes that both have may be more accurate: tl.annotate(adata, "
            "labels_key, reference)."
        )


def warn_of_shift(novelty: np.ndarray, reject: float, annotator: Annotator) -> None:
    """Warn if far more cells are rejected than `reject`, which indicates a shift between studies or missing types.

    Parameters
    ----------
    novelty
        Novelty of the query's cells `(n,)`, without NaN.
    reject
        See :func:`annotate`.
    annotator
        Annotator of the cells.
    """
    from scipy.stats import binom

    threshold = np.quantile(annotator.novelty, 1 - reject)
    unknown = novelty > threshold
    n, n_unknown = len(novelty), int(unknown.sum())
    if n_unknown <= n * min(FAR_ABOVE * reject, (1 + reject) / 2) or binom.sf(n_unknown - 1, n, reject) > UNLIKELY:
        return
    evidence = ""
    if n_unknown < n:  # types that the reference lacks do not change the novelty of the other cells
        median = np.median(annotator.novelty[annotator.novelty <= threshold])
        above = (novelty[~unknown] > median).mean()
        evidence = f" ({above:.0%} of the other cells exceed its median novelty; without a shift 50% do)"
    by_batch = annotator.notes.get("max_novelty_from") == "held-out batches"
    batches = "" if by_batch else ", or a reference of several studies with batch_key=..."
    warn(
        f"{n_unknown} of {n} cells ({n_unknown / n:.0%}) are {C.REJECTED!r} with reject={reject:g}: the reference "
        f"lacks their types, or there is a shift between query and reference{evidence}. If it is a shift, pass a lower "
        f"rate, reject={reject / 5:g}{batches}; reject=None names every cell."
    )


def name_cells(
    probability: np.ndarray, labels: Sequence[str], parents: Mapping[str, str], backoff: float
) -> tuple[np.ndarray, np.ndarray]:
    """Most probable label of each cell, or the group above it where its probability is below `backoff`.

    Parameters
    ----------
    probability
        `(n, n_labels)`, without NaN.
    labels, parents
        Names, and the group above each label or group.
    backoff
        A label or group with a lower probability is replaced by the group above it, if there is one.

    Returns
    -------
    Names `(n,)` (object) and their probabilities `(n,)`; that of a group is the sum over its labels.
    """
    best = probability.argmax(axis=1)
    names = np.array(labels, dtype=object)[best]
    confidence = probability[np.arange(len(best)), best]
    chains = ancestors(labels, parents)
    for level in range(max(map(len, chains))):
        group = np.array([chain[level] if level < len(chain) else "" for chain in chains], dtype=object)
        unsure = (confidence < backoff) & (group[best] != "")
        members = np.array([[name in chain for chain in chains] for name in group])  # at any level
        confidence[unsure] = (probability[unsure] * members[best[unsure]]).sum(axis=1)
        names[unsure] = group[best[unsure]]
    return names, np.minimum(confidence, 1.0)


def ancestors(labels: Sequence[str], parents: Mapping[str, str]) -> list[list[str]]:
    """Groups above each label, from the lowest to the highest.

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
    if absent := sorted(set(parents) - set(labels) - groups):
        raise ValueError(
            f"parents names {len(absent)} label(s) that the reference lacks, the first is {absent[0]!r}; it has "
            f"{', '.join(map(repr, labels[:20]))}."
        )
    return chains


def as_categories(names: np.ndarray, annotator: Annotator) -> pd.Categorical:
    """Labels in the type of the reference's labels; as text where groups of `parents` are among them.

    Numbers, truth values and ordered categories cannot hold "unknown": rejected cells are missing.
    """
    used, groups = set(names) - {None}, dict.fromkeys(annotator.parents.values())
    if groups or (annotator.dtype == "object" and not annotator.ordered):
        order = dict.fromkeys([*annotator.names, *groups, C.REJECTED])
        return pd.Categorical(names, categories=[name for name in order if name in used])
    if C.REJECTED in used:
        kind = "ordered categories" if annotator.dtype == "object" else annotator.dtype
        warn(
            f"{(names == C.REJECTED).sum()} of {len(names)} cells are rejected and have no label: the labels are "
            f"{kind}, which cannot hold {C.REJECTED!r}. Convert the labels of the reference to text to keep it."
        )
    numbers = [number for number, name in enumerate(annotator.names) if name in used]
    code = {annotator.names[number]: code for code, number in enumerate(numbers)}
    categories = pd.Index([annotator.labels[number] for number in numbers], dtype=annotator.dtype)
    return pd.Categorical.from_codes([code.get(name, -1) for name in names], categories, ordered=annotator.ordered)


# --- majority voting --------------------------------------------------------------------------------------------------
_N_NEIGHBORS = 10
_LEAST_CELLS = 10
"""Minimum number of cells with an embedding to cluster."""


def over_cluster(embedding: NDArray[np.float32], seed: int) -> NDArray[np.int64]:
    """Leiden clusters of an embedding at a high resolution, by the number of cells as in CellTypist [1]_.

    Parameters
    ----------
    embedding
        `(n_cells, dim)`; rows with NaN are not clustered.
    seed
        Seed for neighbours and clusters.

    Returns
    -------
    Number of each cell's cluster, `(n_cells,)`; -1 for cells without an embedding.

    Raises
    ------
    ImportError
        If `igraph` is not installed.
    ValueError
        If fewer than ten cells have an embedding.

    References
    ----------
    .. [1] Domínguez Conde et al., Cross-tissue immune cell analysis reveals tissue-specific features in humans, Science
       2022.
    """
    import scanpy as sc
    from anndata import AnnData

    finite = np.flatnonzero(np.isfinite(embedding).all(axis=1))
    if len(finite) < _LEAST_CELLS:
        raise ValueError(
            f"majority_voting clusters at least {_LEAST_CELLS} cells, and {len(finite)} have an embedding: pass a "
            "column of adata.obs with clusters, or leave majority_voting out."
        )
    cells = AnnData(obsm={"embedding": embedding[finite]}, shape=(len(finite), 0))
    resolution = 5.0 * (1 + np.searchsorted([5_000, 20_000, 40_000, 100_000, 200_000], len(finite), side="right"))
    state = seed % 2**32
    with torch_threads_kept():
        sc.pp.neighbors(cells, min(_N_NEIGHBORS, len(finite) - 1), use_rep="embedding", random_state=state)
    sc.tl.leiden(cells, resolution, random_state=state, flavor="igraph", n_iterations=2, directed=False)
    clusters = np.full(len(embedding), -1)
    clusters[finite] = cells.obs["leiden"].astype(int)
    return clusters


def majority_labels(labels: pd.Categorical, clusters: NDArray[np.int64]) -> pd.Categorical:
    """Most frequent label of the cells of each cluster; the first category in a tie.

    Parameters
    ----------
    labels
        Label of each cell; missing ones have no vote.
    clusters
        Number of each cell's cluster; the label of cells with -1 is missing.
    """
    votes = np.zeros((clusters.max(initial=-1) + 2, max(len(labels.categories), 1)), dtype=np.int64)
    voting = (clusters >= 0) & (labels.codes >= 0)
    np.add.at(votes, (clusters[voting], labels.codes[voting]), 1)
    winner = np.where(votes.any(axis=1), votes.argmax(axis=1), -1)  # the last row, of -1, has no vote
    return pd.Categorical.from_codes(winner[clusters], dtype=labels.dtype).remove_unused_categories()
