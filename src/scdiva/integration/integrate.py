"""`tl.integrate`: batch integration, and a model that embeds later cells in the integrated space."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from scdiva import _constants as C
from scdiva._checks import check_arguments, check_least, warn
from scdiva._docs import with_shared_docs
from scdiva._labels import batch_numbers, label_numbers
from scdiva._rng import seed_of
from scdiva._settings import logger, torch_threads_kept
from scdiva.data.genes import input_options
from scdiva.data.results import check_writable, write
from scdiva.models.inference import RunConfig, embed_all, model_name, open_cells_for_model, resolve_run_config

if TYPE_CHECKING:
    import torch
    from anndata import AnnData

    from scdiva.data.batch import InMemoryCells
    from scdiva.data.cells import CellSource
    from scdiva.models import ScDiVa

CONFOUNDED = 0.5
"""Cramér's V of batch and label above which a warning is given."""
STEPS = 1000
"""Maximum number of training steps without fine-tuning."""


@check_arguments
@with_shared_docs
def integrate(
    adata: AnnData,
    batch_key: str | Sequence[str],
    labels_key: str | None = None,
    *,
    model: ScDiVa | str | PathLike[str] = C.DEFAULT_MODEL,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    unlabeled_category: str | None = None,
    fit_cells: int = 100_000,
    steps: int | None = None,
    finetune: bool = False,
    epochs: int | None = None,
    lr: float | None = None,
    freeze: int | None = None,
    lora: int | None = None,
    context: int | None = None,
    checkpoint_dir: str | PathLike[str] | None = None,
    key_added: str = C.OBSM_INTEGRATED,
    rng: int | np.random.Generator | torch.Generator | None = None,
    device: str | None = None,
) -> ScDiVa:
    r"""Integrate batches, with or without labels, and return a model that embeds later cells in the same space.

    By default the weights of the model are not changed. A head maps the components of these cells, computed within
    batches as by :func:`adapt`, to an integrated state. Its losses are

    - denoising: from the whole cell, and from the cell with each gene left out with probability t ~ U(0, 0.3), it
      predicts the components of the whole cell, corrected for batch effects cluster by cluster [1]_. The correction is
      smaller for a batch that has fewer cells in a cluster than expected from its size, so that small batches and cell
      types of one batch are merged with others less often. Labels (`labels_key`) prevent it;
    - gradient reversal: a discriminator predicts the batch from the integrated state, and its reversed gradient removes
      what it uses beyond the batch frequencies among similar cells (paper, section on batch integration; schedule of
      [2]_);
    - with labels, a supervised contrastive loss over the labelled cells [3]_; clusters then never join two labels.

    With `finetune=True` all weights of the model are trained instead, as in the paper: gradient reversal against a
    batch discriminator, with the same schedule, plus the supervised contrastive loss. Without labels, the positive of a
    cell is the same cell with genes left out, and the negatives are the other cells of its batch. The embedding is then
    the cell state itself.

    The batch is not an input of the model. A cell's embedding does not depend on the other cells, and cells of a new
    batch are mapped without refitting: `tl.embed(query, model)`.

    Parameters
    ----------
    adata
        Cells × genes, raw counts or log-normalised expression.
    batch_key
        Column of `adata.obs` with the batch of each cell, or several, all of which are corrected for.
    labels_key
        Column of `adata.obs` with cell types, of all cells or of some.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`; not changed.
    %(reading)s
    unlabeled_category
        Value of `labels_key` that means "no label", as a missing value always does.
    fit_cells
        Maximum number of cells to fit to. More are sampled, equally many from each batch, and half of them labelled, as
        far as there are such cells. Only the sample is held in memory, and the fitted model then embeds all cells by
        blocks of rows.
    steps
        Without fine-tuning: maximum number of training steps, of 256 cells; None: 1,000. The weight of the
        reversal increases during the first quarter. Once the other losses have converged, the learning rate falls to 0
        within half of the steps, and training ends; weights are averaged over the last steps. Matrix products are
        computed in bfloat16 where the device supports it and `scdiva.settings.precision` allows it; weights and losses
        are float32.
    %(finetuning)s
    key_added
        Key of `adata.obsm` to write.
    rng
        Seed of clusters, order, thinning and initial weights. None: `scdiva.settings.seed`. The global random state is
        neither read nor changed. On a CPU the same seed gives the same result.
    device
        Torch device to train on. None: `scdiva.settings.device`. The returned model is on it.

    Returns
    -------
    A model for `tl.embed(query, model)`, which `new.save(folder)` saves; :func:`corrected_expression` predicts genes
    from the embedding. It writes

    `adata.obsm[key_added]`
        float32 array of shape `(n_cells, dim)`, rows of length 1 unless fine-tuned; NaN for a cell without a known
        gene.
    `adata.uns["scdiva"]["integrate"]`
        `batch_key`, `labels_key`, `cramers_v` (NaN without labels), `fit_cells` (number of cells that were fitted to),
        `n_components` (width of the embedding; 0 if fine-tuned), `steps`, `seconds`, `stopped` (`"converged"`,
        `"steps"` or `"interrupted"`), `history` (arrays with a value for each step: `loss`, `denoising`, not of
        fine-tuning, `reversal` and `contrast`, 0 without labels unless fine-tuned), `finetuned`, `model` and `seed`.

    Raises
    ------
    KeyError
        If a column, layer or gene does not exist.
    ValueError
        If an argument is out of range, the batch of a cell is missing, no cell or only one type is labelled, there is
        one batch only, each batch has one cell or the cells are identical within batches without fine-tuning,
        `checkpoint_dir` holds another run, the model has integrated batches before, or the matrix is not valid for
        :func:`embed`.
    TypeError
        If `adata` is not an AnnData object.
    FloatingPointError
        If the loss becomes NaN or infinite.

    Warns
    -----
    UserWarning
        If training is interrupted (Ctrl-C): the embedding at that step is written. If no cell has the
        `unlabeled_category`. If batch and label are confounded (Cramér's V above 0.5): types that occur in
        one batch only cannot be separated from its effect.

    References
    ----------
    .. [1] Korsunsky et al., Fast, sensitive and accurate integration of single-cell data with Harmony, Nature Methods
       2019.
    .. [2] Ganin & Lempitsky, Unsupervised domain adaptation by backpropagation, ICML 2015.
    .. [3] Khosla et al., Supervised contrastive learning, NeurIPS 2020.

    Examples
    --------
    >>> import scdiva as sd
    >>> cells = sd.datasets.toy(120, 100)
    >>> adata, query = cells[:80].copy(), cells[80:].copy()
    >>> model = sd.tl.integrate(adata, "batch", steps=20)
    >>> sd.tl.embed(query, model)
    >>> query.obsm["X_scdiva_integrated"].shape[0]
    40
    """
    start_time = time.monotonic()
    check_writable(adata, call="tl.integrate", entry=key_added, obsm=[key_added])
    check_writable(adata, call="tl.integrate", entry=C.INTEGRATE)
    keys = [batch_key] if isinstance(batch_key, str) else list(batch_key)
    if not keys or len(set(keys)) < len(keys):
        raise ValueError(f"batch_key must name a column of adata.obs, or several, each once; got {keys!r:.80}.")
    if finetune and steps is not None:
        raise ValueError(f"steps={steps!r} trains a head on a fixed model. With finetune=True pass epochs instead.")
    steps = STEPS if steps is None else steps
    check_least(steps=(steps, 1))
    if labels_key is None and unlabeled_category is not None:
        raise ValueError(f"unlabeled_category={unlabeled_category!r} is a value of labels_key: name that column too.")
    run_config = resolve_run_config(None, device, None)
    batches = [batch_numbers(adata, key) for key in keys]
    labels = None if labels_key is None else label_numbers(adata, labels_key, unlabeled_category)[0]
    association = np.nan if labels is None else max(cramers_v(b[labels >= 0], labels[labels >= 0]) for b in batches)
    reading = input_options(adata, layer, use_raw, input, "nan")

    from scdiva.data.batch import LEAST_CELLS
    from scdiva.integration.objective import IntegrationObjective
    from scdiva.models.pretrained import load_for
    from scdiva.train.finetune import finetune_config

    check_least(fit_cells=(fit_cells, LEAST_CELLS))
    pretrained = load_for(model, run_config.device)
    if pretrained.integration is not None or pretrained.finetuned_for == "integrate":
        raise ValueError(
            "This model has integrated batches before. Embed new cells with it: tl.embed(adata, model); or integrate "
            f"with the model it came from, such as {C.DEFAULT_MODEL!r}."
        )
    tuning = finetune_config(
        finetune, pretrained, IntegrationObjective, epochs=epochs, lr=lr, freeze=freeze, lora=lora, context=context,
        checkpoint_dir=checkpoint_dir,
    )  # fmt: skip
    seed = seed_of(rng)

    _, source, parameters = open_cells_for_model(pretrained, adata, run_config, reading)
    sample = _read_sample(source, keys, batches, labels_key, labels, fit_cells, finetune=finetune, seed=seed)
    if association > CONFOUNDED:
        warn(
            f"batch and label are confounded (Cramér's V {association:.2f}): differences between types that come from "
            "one batch each may be taken for batch effects, or the other way round."
        )
    logger.info(
        "integrating %d cells, %s %d cells of %d batches on %s",
        adata.n_obs, "fine-tuned on" if finetune else "fitted to", sample.cells.n_cells, sample.cells.n_batches,
        run_config.device,
    )  # fmt: skip
    if tuning is None:
        new, embedding, result = _fit_head(pretrained, sample, run_config, steps, seed)
    else:
        new, embedding, result = _finetune(pretrained, sample, run_config, tuning, checkpoint_dir, seed)
    if embedding is None:
        all_rows = embed_all(new, replace(source, max_length=new.config.input_length), run_config)
    else:
        all_rows = np.full((adata.n_obs, embedding.shape[1]), np.nan, dtype=np.float32)
        all_rows[sample.rows] = embedding

    notes: dict[str, Any] = {
        "batch_key": keys,
        "labels_key": labels_key or "",
        "cramers_v": float(association),
        "fit_cells": sample.cells.n_cells,
        "model": model_name(model),
        "seed": str(seed),
        "finetuned": finetune,
        **result,
        "seconds": time.monotonic() - start_time,
        "history": {name: np.asarray(column, dtype=np.float64) for name, column in result["history"].items()},
    }
    write(adata, "tl.integrate", key_added, parameters, obsm={key_added: all_rows})
    write(adata, "tl.integrate", C.INTEGRATE, notes)
    return new


class _Sample(NamedTuple):
    """The cells that a model is fitted to.

    Attributes
    ----------
    cells, rows
        The cells in memory, and their rows in `adata`.
    batches
        Their batch numbers from 0, by covariate.
    labels
        Their label numbers, -1 for none; None without labels.
    is_complete
        Whether these are all cells with known genes.
    """

    cells: InMemoryCells
    rows: np.ndarray
    batches: list[np.ndarray]
    labels: np.ndarray | None
    is_complete: bool


def _read_sample(
    source: CellSource,
    keys: list[str],
    batches: list[np.ndarray],
    labels_key: str | None,
    labels: np.ndarray | None,
    fit_cells: int,
    *,
    finetune: bool,
    seed: int,
) -> _Sample:
    """Read at most `fit_cells` cells into memory.

    Raises ValueError if the sample has labels but fewer than two of them, one batch, or, without fine-tuning, one cell
    in each batch. Batches without cells in the sample cause a warning.
    """
    from scdiva.data.batch import read_cells

    combined = np.unique(np.stack(batches), axis=1, return_inverse=True)[1].ravel()
    # labelled cells are sampled apart from the others, as they may be few
    group = combined if labels is None else 2 * combined + (labels >= 0)
    cells, rows = read_cells(source, combined, max_cells=fit_cells, balanced=group, seed=seed)
    is_complete = cells.n_cells == int(np.count_nonzero(source.lengths))
    labels = None if labels is None else labels[rows]
    if labels is not None and len(np.unique(labels[labels >= 0])) < 2:
        larger = "" if is_complete else f"pass a larger fit_cells than {fit_cells}, or "
        raise ValueError(
            f"the {cells.n_cells} cells with known genes, to which the model would be fitted, have fewer than two "
            f"labels: {larger}omit labels_key."
        )
    if cells.n_batches == 1:
        what, instead = "embed them by their own components", "sd.tl.embed(adata, sd.tl.adapt(adata))"
        if finetune and labels is not None:
            what, instead = "fine-tune on labels", f"sd.tl.annotate(query, {labels_key!r}, adata, finetune=True)"
        columns = " and ".join(f"adata.obs[{key!r}]" for key in keys)
        raise ValueError(
            f"the {cells.n_cells} cells with known genes are of one batch of {columns}, so there is nothing to "
            f"integrate. To {what}: {instead}."
        )
    if not is_complete and (n_lost := len(np.unique(combined)) - cells.n_batches):
        warn(
            f"the model is fitted to {cells.n_cells} cells, in which {n_lost} of the batches have none: pass a larger "
            f"fit_cells than {fit_cells}."
        )
    if cells.n_batches == cells.n_cells and not finetune:
        larger = "" if is_complete else ", or pass a larger fit_cells"
        raise ValueError(
            f"each of the {cells.n_batches} batches has one cell, so batch effects cannot be told from differences "
            f"between cells: name a column with several cells in each batch{larger}."
        )
    numbers = [np.unique(batch[rows], return_inverse=True)[1].astype(np.int64) for batch in batches]
    return _Sample(cells, rows, numbers, labels, is_complete)


def _fit_head(
    pretrained: ScDiVa, sample: _Sample, run_config: RunConfig, steps: int, seed: int
) -> tuple[ScDiVa, np.ndarray | None, dict[str, Any]]:
    """Copy a model with an integration head fitted to a sample.

    Returns the copy, the integrated states `(n_cells, dim)` if the sample contains all cells, and the report of the
    fit.
    """
    import torch

    from scdiva.embedding.dataset_pcs import every_nth, with_dataset_components
    from scdiva.integration.objective import components_of, integrate_model, with_head

    cells = sample.cells
    states = embed_all(pretrained, cells, run_config._replace(what="state"))
    states_on_device = torch.from_numpy(states).to(run_config.device)
    subset = every_nth(cells)
    with torch_threads_kept():
        adapted, _ = with_dataset_components(
            pretrained.to(run_config.device), cells, (subset, torch.from_numpy(states[subset]))
        )
    new = with_head(adapted, seed)
    with torch_threads_kept(1):  # the products are too small for several threads
        result = {"n_components": new.config.adapted} | integrate_model(
            new, cells, states_on_device, sample.batches, sample.labels, steps=steps, seed=seed,
            precision=run_config.precision,
        )  # fmt: skip
    if result["stopped"] == "interrupted":
        warn(
            f"training was interrupted after {result['steps']} of {steps} steps: the embedding of the weights at that "
            "step is written, and adata.uns['scdiva']['integrate']['stopped'] is 'interrupted'. Repeat the call to "
            "train to the end."
        )
    if not sample.is_complete:
        return new, None, result
    assert new.integration is not None
    with torch.no_grad():
        return new, new.integration(components_of(new, cells, states_on_device)).numpy(force=True), result


def _finetune(
    pretrained: ScDiVa,
    sample: _Sample,
    run_config: RunConfig,
    tuning: dict[str, Any],
    checkpoint_dir: str | PathLike[str] | None,
    seed: int,
) -> tuple[ScDiVa, np.ndarray | None, dict[str, Any]]:
    """Copy a model with all weights trained on a sample; returns as :func:`_fit_head`."""
    from scdiva.integration.objective import IntegrationObjective
    from scdiva.train.finetune import network_for, planned
    from scdiva.train.finetune_module import finetune

    cells = sample.cells
    config = planned(tuning, cells.n_cells, seed, run_config.precision)
    new = network_for(pretrained, config, seed)
    context = new.config.input_length
    objective = IntegrationObjective(
        cells, sample.batches, sample.labels, state_dim=new.state_dim, context=context, seed=seed
    )
    history = finetune(new, objective, config, device=run_config.device, checkpoint_dir=checkpoint_dir)
    result = {"n_components": 0, "steps": len(history["loss"]), "stopped": "steps", "history": history}
    if not sample.is_complete:
        return new, None, result
    return new, embed_all(new, cells.subset(np.arange(cells.n_cells), context), run_config), result


def cramers_v(one: np.ndarray, other: np.ndarray) -> float:
    """Association of two groupings, 0 (none) to 1 (one follows from the other): Cramér's V, from chi squared.

    Parameters
    ----------
    one, other
        Group numbers, `(n,)`.
    """
    from scipy.stats.contingency import association, crosstab

    table = crosstab(one, other).count
    return float(association(table, "cramer")) if min(table.shape) > 1 else 0.0
