"""Configuration of training: dataclasses that also define the command line and the YAML file, without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from typing import Any, Literal

from scdiva._checks import check_choices, check_fields, refuse_unknown
from scdiva._constants import MAX_LENGTH, PRESETS
from scdiva.models.config import ScDiVaConfig

_ZERO = {
    "warmup_steps", "seed", "final_learning_rate", "weight_decay", "clip", "value_weight", "value_mask_rate", "freeze",
    "lora",
}  # fmt: skip
"""Numbers that may be 0."""
_MOST = {"final_learning_rate": 1, "value_mask_rate": 1}
GIB_PER_CELL, GIB_FIXED = 0.3, 2.5
"""GPU memory of a training step of the paper's model in bfloat16, in GiB: per cell of 1,200 genes, and without cells.
From batches of 96 (31.2 GiB) and 192 (60.0 GiB) in `benchmarks/results/gpu.json`."""
GPU_SHARE = 0.9
"""Share of the memory of a GPU that a training step may use."""
CPU_CELLS = 16
"""Maximum number of cells per batch on a CPU if `batch_size` is None."""
LOGGERS = ("csv", "tensorboard", "wandb")
"""Loggers by name; all but the first are packages."""


def check_logger(logger: Any) -> None:
    """Check a logger: ValueError for an unknown name, ImportError without its package, TypeError for another object."""
    loggers = logger if isinstance(logger, list | tuple) else [logger]
    if not isinstance(logger, str | bool) and not all(hasattr(one, "log_metrics") for one in loggers):
        raise TypeError(f"logger must be one of {LOGGERS}, a logger of Lightning or several, or False; got {logger!r}.")
    if logger is True:
        raise TypeError(f"logger=True is not a logger: pass one of {LOGGERS}, or False for none.")
    if isinstance(logger, str):
        check_choices(logger=(logger, LOGGERS))
        if logger != "csv" and find_spec(logger) is None:
            raise ImportError(f"logger={logger!r} needs the package {logger}: pip install {logger}")


@dataclass(frozen=True, kw_only=True)
class OptimiserConfig:
    """Options of all training tasks: AdamW, warm-up and cosine decay, clipping, accumulation, logging.

    The paper specifies AdamW and the global batch size; all other defaults are ours.

    Attributes
    ----------
    steps
        Optimiser steps of the run; the learning rate follows a cosine until the end.
    batch_size
        Maximum number of cells per batch. The global batch is `batch_size * accumulate * devices * nodes`, 768 in the
        paper. None: as many as fit in the memory of a device (:meth:`PretrainingConfig.for_devices`); requires
        `cells_per_step`.
    batch_tokens
        Maximum number of tokens (genes, and one `[LAT]` per cell) per batch, in place of `batch_size`: all batches then
        need about the same memory and time, and short cells make larger batches. `None`: use `batch_size`.
    accumulate
        Batches per optimiser step and process. Each needs a buffer of 4,096 cells, about 30 MB. Derived from
        `cells_per_step` if that is set.
    cells_per_step
        Number of cells per optimiser step, over all devices and nodes. :func:`scdiva.train.pretrain` computes
        `accumulate` from it. None: `batch_size * accumulate * devices * nodes`.
    micro_batches
        Parts of a batch that each transformer block processes in turn. From 2 on, only the input of each block is kept
        in memory, at the cost of one more forward pass; the step equals that of the whole batch. If memory runs out,
        the number is doubled, with a warning.
    learning_rate
        Maximum learning rate, reached after the warm-up.
    final_learning_rate
        Learning rate at the end, relative to `learning_rate`.
    warmup_steps
        Steps of linear warm-up.
    weight_decay
        Decoupled weight decay of matrices. Norms, biases and embedding tables have none: otherwise genes that are
        absent from a batch would decay.
    clip
        Maximum norm of the gradient; 0: no clipping.
    precision
        `"bf16"`: bfloat16 autocast; `"fp32"`; `"auto"`: bf16 if the device has bfloat16 arithmetic, else fp32.
        `"bf16-residual"`: bfloat16 autocast with the residual stream in bfloat16 too; norms are computed in float32.
        Compiled blocks keep the stream once per token and block for the backward pass, so that it takes 2 · `dim` bytes
        instead of 4 · `dim`: 1 KiB less of about 22 KiB with `dim=512`, and 14 MiB less of 0.3 GiB per cell of 1,200
        genes with the paper's model. Blocks that are not compiled need more memory instead.
    compile_blocks
        Whether to compile the transformer blocks (`torch.compile`, about a minute): `"yes"`, `"no"`, or `"auto"`, on
        CUDA devices only.
    autotune
        Whether to time launch configurations of the fused attention kernel on the CUDA device before training (less
        than a minute), instead of using those of its architecture. The fastest is stored in checkpoints, because the
        last bits of the weights depend on it.
    seed
        Seed of data order, masks, dropout and initial weights.
    log_every, validate_every, checkpoint_every
        Intervals in optimiser steps.
    checkpoint_minutes
        Minutes between two checkpoints, in place of `checkpoint_every`. A checkpoint is copied to memory, which stops
        training for about a second per GB, and written while training continues. None: use `checkpoint_every`.

    Raises
    ------
    TypeError, ValueError
        If a value has the wrong type or is out of range; the message names the field.
    """

    steps: int = 10_000
    batch_size: int | None = 64
    batch_tokens: int | None = None
    accumulate: int = 1
    cells_per_step: int | None = None
    micro_batches: int = 1
    learning_rate: float = 3e-4
    final_learning_rate: float = 0.1
    warmup_steps: int = 500
    weight_decay: float = 0.05
    clip: float = 1.0
    precision: Literal["auto", "fp32", "bf16", "bf16-residual"] = "auto"
    compile_blocks: Literal["auto", "yes", "no"] = "auto"
    autotune: bool = True
    seed: int = 0
    log_every: int = 10
    validate_every: int = 500
    checkpoint_every: int = 500
    checkpoint_minutes: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, _ZERO, _MOST)
        if self.batch_size is None and self.cells_per_step is None:
            raise ValueError("batch_size=None needs cells_per_step, which it is derived from, such as 768.")
        if self.batch_tokens is not None and self.cells_per_step is not None:
            raise ValueError(
                "batch_tokens and cells_per_step can't both hold. Pass cells_per_step=None, and accumulate."
            )

    def to_dict(self) -> dict[str, Any]:
        """Fields as plain Python values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class PretrainingConfig(OptimiserConfig):
    """Options of pretraining by masked diffusion. :meth:`paper` is the paper's table "Training configuration".

    Attributes
    ----------
    context
        Maximum number of genes per cell, the top-ranked ones.
    value_weight
        Weight λ of the value term; 10 in the paper.
    value_mask_rate
        Share of visible genes whose value alone is masked. It is 0 in the paper, which therefore does not train the
        prediction of the value of a known gene, as in imputation and perturbation.
    scored_genes
        Expected number of masked genes per cell whose identity is scored in a step, drawn at random; None: all. The
        gene head dominates the runtime of a small model, and the masked genes of a cell are largely redundant. The loss
        is unbiased.
    place_prior
        Whether to add the prior of a masked gene from its rank (:func:`scdiva.diffusion.rank_log_prior`) to the logits.
        Requires a state head, which predicts values, and `scored_genes`.
    anchor_objective
        Objective of the cell state, which the denoising loss does not train directly. `"none"` (the paper), or
        `"genes"`: a linear decoder with the study as covariate predicts the genes of a cell from its state, in cells
        with at most 80% of their genes masked.
    """

    context: int = MAX_LENGTH
    value_weight: float = 10.0
    value_mask_rate: float = 0.1
    scored_genes: int | None = None
    place_prior: bool = False
    anchor_objective: Literal["none", "genes"] = "genes"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.place_prior and self.scored_genes is None:
            raise ValueError("place_prior needs scored_genes: all logits of a batch would be held at once.")

    @classmethod
    def paper(cls) -> PretrainingConfig:
        """Training of the paper: 4 epochs, global batch 768, λ = 10, t ~ U(0, 1), no anchor objective.

        Four epochs of its 59,162,450 cells are 308,138 steps. The paper does not state learning rate, warm-up and
        decay, which are our defaults. :func:`scdiva.train.pretrain` divides the 768 cells by devices and memory.
        """
        return cls(
            steps=round(4 * 59_162_450 / 768),
            batch_size=None,
            cells_per_step=768,
            value_mask_rate=0.0,
            anchor_objective="none",
            checkpoint_minutes=15,
        )

    def for_devices(self, n_devices: int, gib: float | None, model: ScDiVaConfig) -> PretrainingConfig:
        """Divide `cells_per_step` into batches: their size, unless it is set, and `accumulate`.

        A cell of `context` genes needs 0.3 GiB with the paper's model, and in proportion to blocks, width and genes
        with another one (twice as much in fp32). Parameters, optimiser and the gene head need 2.5 GiB. 90% of the
        memory is used: with the paper's model 192 cells on a GPU of 80 GB, and 96 on one of 40 GB.

        Parameters
        ----------
        n_devices
            Number of devices on all nodes.
        gib
            Memory of a device in GiB; None: a CPU, with at most 16 cells per batch.
        model
            Architecture.

        Returns
        -------
        The same configuration if `cells_per_step` is None; otherwise one with
        `batch_size * accumulate * n_devices == cells_per_step`.

        Raises
        ------
        ValueError
            If `cells_per_step` is not a multiple of the devices, or of `batch_size` times the devices.
        """
        if self.cells_per_step is None:
            return self
        of_device, remainder = divmod(self.cells_per_step, n_devices)
        size = self.batch_size
        if size is None and not remainder:
            max_cells = CPU_CELLS
            if gib is not None:
                share = model.n_layers * model.dim * (self.context + 1) / (12 * 512 * (MAX_LENGTH + 1))
                of_cell = GIB_PER_CELL * share * (2 if self.precision == "fp32" else 1)
                max_cells = int((GPU_SHARE * gib - GIB_FIXED) / of_cell)
            size = max(n for n in range(1, of_device + 1) if of_device % n == 0 and n <= max(1, max_cells))
        if remainder or not size or of_device % size:
            batch = "" if size is None else f"batch_size={size} times "
            raise ValueError(
                f"cells_per_step={self.cells_per_step} is not a multiple of {batch}the number of devices, {n_devices}. "
                f"Use another number of devices{'' if size is None else ' or batch_size'}, or pass cells_per_step=None."
            )
        return replace(self, batch_size=size, accumulate=of_device // size)

    def check_scored_genes(self, state_head: bool) -> None:
        """ValueError if a model with a state head would be trained on all masked genes of a batch at once."""
        if state_head and self.scored_genes is None:
            raise ValueError(
                "A model with a state head needs scored_genes: its logits are all held at once. Pass "
                "training=PretrainingConfig(scored_genes=32), or --training.scored_genes 32."
            )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> PretrainingConfig:
        """Training for the model of :meth:`ScDiVaConfig.preset <scdiva.models.ScDiVaConfig.preset>`.

        Parameters
        ----------
        name
            - `"paper"`: :meth:`paper`, 768 cells per step on any number of devices that divides 768;
            - `"base"`, `"base-lat"`: one GPU; 50,000 steps of 8 batches of 65,536 tokens, about 600 cells of 800 genes
              per step;
            - `"mini"`: a CPU; 2,500 steps of 32 cells of 128 genes. Steps, batch, context and learning rate are those
              of the first run of the transformer in `scripts/train_mini.py`, `scored_genes`, `place_prior` and
              `value_weight` those of the last. That script trains set encoder and state head separately before; in a
              single run the objective `"genes"` trains the set encoder, and the denoising loss the state head.
        **changes
            Fields that differ from the preset.

        Raises
        ------
        ValueError
            If there is no such preset or field; the message names the nearest.
        """
        check_choices(preset=(name, PRESETS))
        refuse_unknown(changes, [field.name for field in fields(cls)], cls.__name__)
        if name == "paper":
            return replace(cls.paper(), **changes)
        shared = {"scored_genes": 32, "place_prior": True, "value_weight": 1.0}
        base = {
            "steps": 50_000, "batch_tokens": 65_536, "accumulate": 8, "learning_rate": 5e-4, "warmup_steps": 2000,
            "validate_every": 1000,
        }  # fmt: skip
        run = {
            "base": base,
            "base-lat": base,
            "mini": {
                "steps": 2500, "batch_size": 32, "context": 128, "learning_rate": 1e-3, "warmup_steps": 125,
                "validate_every": 250, "checkpoint_every": 250, "autotune": False,
            },
        }[name]  # fmt: skip
        return cls(**{**shared, **run, **changes})


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(OptimiserConfig):
    """Options of fine-tuning a pretrained model for integration, annotation or perturbation.

    The paper specifies only the losses of the three tasks; all defaults are ours.

    Attributes
    ----------
    freeze
        Number of transformer blocks, counted from the first, whose weights are fixed together with the embeddings; 0:
        all weights are trained.
    lora
        Rank of low-rank updates of the linear layers in the blocks (Hu et al. 2022), which are trained in place of the
        weights; 0: the weights are trained.
    context
        Maximum number of genes per cell, the top-ranked ones. A fine-tuned model whose state comes from the transformer
        uses the same number afterwards.
    batch_size, learning_rate, final_learning_rate, warmup_steps, weight_decay
        As in :class:`OptimiserConfig`, with other defaults. New layers (classifier, discriminator, response head) have
        ten times the learning rate. Calls without `lr` that train transformer blocks wider than 192 multiply the
        default by 192 / width (after Yang et al. 2022).
    """

    freeze: int = 0
    lora: int = 0
    context: int = 128
    batch_size: int = 32
    learning_rate: float = 1e-3
    final_learning_rate: float = 0.05
    warmup_steps: int = 20
    weight_decay: float = 0.01
    compile_blocks: Literal["auto", "yes", "no"] = "no"
