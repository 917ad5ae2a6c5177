"""`tl.adapt`: a model trained on, without labels, on the user's cells."""

from __future__ import annotations

import copy
import operator
import time
import warnings
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from scdiva._constants import DEFAULT_MODEL
from scdiva._settings import logger, settings
from scdiva._threads import torch_threads_kept
from scdiva.data.writing import check_anndata
from scdiva.tl._notes import seed_of
from scdiva.tl._training_cells import batch_numbers, training_cells

if TYPE_CHECKING:
    import torch
    from anndata import AnnData

    from scdiva.models import ScDiVa
    from scdiva.train.adaptation import AdaptationCells, Limits, Split

WARMUP = 20
"""Steps over which the learning rate rises."""
CONTEXT = 512
"""Most genes of a cell that the transformer is trained on."""
SCORED = 64
"""Hidden genes of a cell whose identity is scored in a step, of a model with a state head."""


def adapt(
    adata: AnnData,
    model: ScDiVa | str | PathLike[str] = DEFAULT_MODEL,
    *,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    gene_ids: str | None = None,
    duplicates: Literal["sum", "error"] = "sum",
    batch_key: str | None = None,
    method: Literal["auto", "full", "lora"] = "auto",
    minutes: float | None = None,
    max_epochs: int = 30,
    patience: int = 3,
    validation_share: float = 0.1,
    batch_size: int = 128,
    learning_rate: float = 1e-3,
    rng: int | np.random.Generator | torch.Generator | None = None,
    device: str | None = None,
) -> ScDiVa:
    r"""Train a model on, without labels, on your own cells.

    Of a model that embeds cells by its set encoder alone, as the bundled one does, the set encoder is adapted. Its
    linear part is refitted first: of the directions that come from the corpus the 20 stay in which these cells vary
    most within batches, and up to 20 principal components of the cells themselves join them, shrunk by what is
    noise in them (:func:`scdiva.train.linear_refit.refit_linear`). Then its learned part (and, by `method`, the
    gene table) is trained on the new coordinates, with the objectives it had before: predict the genes of a cell
    from its state, with the batch as covariate of the decoder, and tell a cell by two thinned views of it from the
    others of its batch. A state head is then trained on the states as they now are. Of any other model the
    transformer is trained on, by masked diffusion, with the same prediction of genes from the state.

    A tenth of the cells is held out. Training ends once their loss no longer falls, and leaves the best weights seen.
    Of a set encoder the held-out cells then choose between the given, the refitted and the trained weights: those whose
    20 leading directions carry most of their expression (:func:`scdiva.train.linear_refit.carried_variance`). The cells
    are held in memory, 8 bytes per value above zero.

    Ctrl-C ends the training and returns the best model so far; `model.adaptation["stopped"]` is then `"interrupted"`.

    Parameters
    ----------
    adata
        Cells × genes, raw counts or log-normalised expression; not changed. Cells without a known gene are left out,
        with a warning.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`; not changed.
    layer, use_raw, input, gene_ids, duplicates
        What to read, as for :func:`embed`.
    batch_key
        Column of `adata.obs` with the batch of each cell. What only tells batches apart is then not learned.
    method
        `"full"`: all weights of the set encoder, or of a transformer. `"lora"`: the learned part and a low-rank update
        (rank 8) of the gene table, or, of a transformer, low-rank updates of the linear layers of its blocks; they are
        merged into the weights at the end. `"auto"`: `"lora"`.
    minutes
        Most wall time, in minutes; None sets no limit. A run that meets it depends on the machine's speed.
    max_epochs
        Most passes over the cells.
    patience
        Looks at the held-out cells (one an epoch, and at most one in ten steps) without a better loss after which
        training ends.
    validation_share
        Share of the cells held out, above 0 and below 1.
    batch_size
        Cells of a step.
    learning_rate
        Of AdamW.
    rng
        Seed of the split, of the order and of the views; None takes `scdiva.settings.seed`. Global random state is
        never touched. On a CPU the same seed gives the same model.
    device
        Torch device to train on; None takes `scdiva.settings.device`. The model returned stays there.

    Returns
    -------
    A new model for `model=` of every tool, with the same configuration, vocabulary and entropies, to be kept by
    `new.save(folder)`. Its `adaptation` is a plain dict: `improved`, whether held-out cells are better told by it;
    `kept` (`"given"`, `"refitted"` or `"trained"`) and of a set encoder `variance_given`, `variance_refitted`,
    `variance_trained`; of a state head `head_kept` (`"given"` or `"trained"`), `head_start_loss` and `head_best_loss`;
    `start_loss` and `best_loss` of the training (held-out cells, nats per cell; at the start with a decoder fitted to
    the network as it is), `steps`, `seconds`, `stopped` (`"patience"`, `"max_epochs"`, `"minutes"` or `"interrupted"`),
    `n_training`, `n_validation`, `history` (lists `step`, `training_loss`, `validation_loss`) and the arguments. If
    nothing helped, a warning says so and the weights are the given model's.

    Raises
    ------
    ValueError
        If an argument is out of range, the batch of a cell is missing, fewer than 20 cells have a known gene, the model
        has integrated batches, or the matrix is refused as by :func:`embed`.
    KeyError
        If `layer`, `gene_ids` or `batch_key` does not exist.
    TypeError
        If `adata` is no AnnData object.
    FloatingPointError
        If the loss becomes NaN or infinite.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> own = sd.tl.adapt(adata, minutes=0.02)
    >>> sd.tl.embed(adata, own)
    >>> "kept" in own.adaptation
    True
    """
    begun = time.monotonic()
    _check(adata, method, minutes, max_epochs, patience, validation_share, batch_size, learning_rate)
    target = settings.resolve_device(device)
    batch = batch_numbers(adata, batch_key)

    from scdiva.models.inference import runs_transformer
    from scdiva.models.pretrained import load_for
    from scdiva.train.adaptation import Limits

    seed = seed_of(rng)
    given = load_for(model, target)
    if given.integration is not None:
        raise ValueError(
            "This model has integrated batches, and adapting would change what that was fitted on. Adapt first."
        )
    cells, _ = training_cells(
        adata, given, batch, layer=layer, use_raw=use_raw, input=input, gene_ids=gene_ids, duplicates=duplicates
    )
    new = copy.deepcopy(given).to(target)
    chosen: Literal["full", "lora"] = "lora" if method == "auto" else method
    settled = {"batch_size": min(batch_size, cells.n_cells), "learning_rate": learning_rate, "seed": seed}
    limits = Limits(max_epochs, patience, np.inf if minutes is None else 60 * minutes)
    split = cells.split(validation_share, seed)
    through = runs_transformer(new)
    adapted = _adapt_transformer if through else _adapt_encoder
    with torch_threads_kept(None if through else 1):  # products of the set encoder are too small to share
        found = adapted(new, cells, split, limits, chosen, settled)
        if new.state_head is not None and not through:
            left = limits._replace(seconds=max(0.0, limits.seconds - (time.monotonic() - begun)))
            found |= _adapt_head(new, cells, split, left, settled)
    found |= {
        "improved": found["kept"] != "given" or found.get("head_kept") == "trained",
        "seconds": time.monotonic() - begun,
        "n_training": len(split.training),
        "n_validation": len(split.held_out),
        "n_batches": cells.n_batches,
    }
    new.requires_grad_(True).eval()
    arguments = {"method": chosen, "minutes": minutes, "max_epochs": max_epochs, "patience": patience, **settled}
    object.__setattr__(new, "adaptation", {**found, **arguments})
    if not found["improved"]:
        warnings.warn(
            f"nothing that was tried on these {cells.n_cells} cells helped those held out (training ended by "
            f"{found['stopped']}): the model returned has the weights it was given. More cells, more minutes or a "
            "lower learning_rate may help.",
            UserWarning,
            stacklevel=2,
        )
    logger.info("adapted: %s weights kept", found["kept"])
    return new


def _check(
    adata: AnnData,
    method: str,
    minutes: float | None,
    max_epochs: int,
    patience: int,
    validation_share: float,
    batch_size: int,
    learning_rate: float,
) -> None:
    check_anndata(adata)
    if method not in ("auto", "full", "lora"):
        raise ValueError(f'method must be "auto", "full" or "lora", got {method!r}.')
    if minutes is not None and not 0 < minutes < np.inf:
        raise ValueError(f"minutes must be a number above 0, or None for no limit; got {minutes!r}.")
    for name, value in {"max_epochs": max_epochs, "patience": patience, "batch_size": batch_size}.items():
        if operator.index(value) < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if not 0 < validation_share < 1:
        raise ValueError(f"validation_share must be above 0 and below 1, got {validation_share!r}.")
    if not 0 < learning_rate < np.inf:
        raise ValueError(f"learning_rate must be a number above 0, got {learning_rate!r}.")


def _adapt_encoder(
    model: ScDiVa,
    cells: AdaptationCells,
    split: Split,
    limits: Limits,
    method: Literal["full", "lora"],
    settled: dict[str, Any],
) -> dict[str, Any]:
    """Adapt the set encoder alone."""
    from scdiva.train.config import AnchorConfig
    from scdiva.train.encoder_adaptation import adapt_encoder

    config = AnchorConfig(precision="fp32", warmup_steps=WARMUP, **settled)
    return adapt_encoder(model, config, cells, split, limits, method, progress=settings.progress)


def _adapt_head(
    model: ScDiVa, cells: AdaptationCells, split: Split, limits: Limits, settled: dict[str, Any]
) -> dict[str, Any]:
    """Train the state head on what the states now are; keep it if it says more of held-out cells."""
    from scdiva.train.adaptation import continue_training
    from scdiva.train.state_head import StateHeadModule
    from scdiva.train.task_config import StateHeadConfig

    before = copy.deepcopy(model.state_head.state_dict()) if model.state_head is not None else {}
    config = StateHeadConfig(warmup_steps=WARMUP, **settled)
    module = StateHeadModule(model, config, cells.measured).to(next(model.parameters()).device)
    found = continue_training(module, cells, split, limits, progress=settings.progress)
    kept = "trained" if found["best_loss"] < found["start_loss"] else "given"
    if kept == "given" and model.state_head is not None:
        model.state_head.load_state_dict(before)
    return {"head_kept": kept, "head_start_loss": found["start_loss"], "head_best_loss": found["best_loss"]}


def _adapt_transformer(
    model: ScDiVa,
    cells: AdaptationCells,
    split: Split,
    limits: Limits,
    method: Literal["full", "lora"],
    settled: dict[str, Any],
) -> dict[str, Any]:
    """Train the whole network, or low-rank updates of the blocks' linear layers."""
    from torch import nn

    from scdiva._rng import step_generator
    from scdiva.train.adaptation import continue_training
    from scdiva.train.config import PretrainingConfig
    from scdiva.train.low_rank import RANK, add_low_rank, merge_low_rank
    from scdiva.train.pretraining import PretrainingModule

    scored = None if model.state_head is None else SCORED
    config = PretrainingConfig(
        precision="fp32", compile_blocks="no", warmup_steps=WARMUP, scored_genes=scored, **settled
    )
    n_batches = cells.n_batches if cells.n_batches > 1 else 0
    before = copy.deepcopy(model.state_dict())
    module = PretrainingModule(model, config, n_batches, cells.frequency(model.config.n_tokens))
    module.to(next(model.parameters()).device)
    model.requires_grad_(method == "full")
    if method == "lora":
        for number, layer in enumerate(m for m in model.blocks.modules() if isinstance(m, nn.Linear)):
            add_low_rank(layer, RANK, step_generator(settled["seed"], number, "low rank"))
    context = min(CONTEXT, model.config.max_length)
    found = continue_training(module, cells, split, limits, max_length=context, progress=settings.progress)
    merge_low_rank(model)
    kept = "trained" if found["best_loss"] < found["start_loss"] else "given"
    if kept == "given":
        model.load_state_dict(before)
    return {"kept": kept, **found}
