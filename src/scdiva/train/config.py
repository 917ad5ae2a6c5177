"""Configuration of training. Plain dataclasses: they are the command line and the YAML file too; no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from typing import Any, Literal, Self

from scdiva._constants import MAX_LENGTH, PRESETS
from scdiva._nearest import or_nearest, refuse_unknown

ANCHOR_OBJECTIVES = ("genes", "contrast")


def at_least(config: object, low: float, *names: str, strictly: bool = False) -> None:
    """Check that these fields of a configuration are finite numbers of at least `low`, or above it.

    Raises
    ------
    ValueError
        If one is not; the message names it.
    """
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value!r}.")
        if value < low or (strictly and value == low):
            raise ValueError(f"{name} must be {'above' if strictly else 'at least'} {low}, got {value}.")


@dataclass(frozen=True, kw_only=True)
class OptimiserConfig:
    """What every training task shares: AdamW, linear warm-up then cosine, clipping, accumulation, bookkeeping.

    The paper names AdamW and the global batch size; all else here is ours.

    Attributes
    ----------
    steps
        Optimiser steps of the whole run; the learning rate falls along a cosine to their end.
    batch_size
        Cells per batch. The global batch is `batch_size * accumulate * devices * nodes`; the paper's is 768.
    batch_tokens
        Most tokens (genes, and `[LAT]` of each cell) per batch, in place of `batch_size`: each batch then takes about
        the same memory and time, and holds more cells where they are short. `None`: `batch_size` counts.
    accumulate
        Batches per optimiser step.
    micro_batches
        Parts of a batch that the transformer runs over in turn, for one more forward pass; the step stays that of the
        whole batch. When memory runs out it is doubled, and this is said.
    learning_rate
        Highest learning rate, reached after the warm-up.
    final_learning_rate
        Share of `learning_rate` left at the end.
    warmup_steps
        Steps of linear warm-up.
    weight_decay
        Decoupled decay of matrices; norms, biases and embedding tables are spared (a gene that is absent from a batch
        must not fade because of it).
    beta1, beta2
        AdamW's moments.
    clip
        Largest norm of the gradient; 0 does not clip.
    ema_decay
        Share of the running mean of the weights that stays at each optimiser step, such as 0.999; 0 keeps none. With it
        validation looks at the mean, and the mean is what training leaves in the model.
    precision
        `"bf16"`: bfloat16 autocast; `"fp32"`; `"auto"`: bf16 where the device has bfloat16 arithmetic, else fp32.
    compile_blocks
        Whether the transformer blocks are compiled (`torch.compile`, about a minute): `"auto"` where there is a CUDA
        device, `"yes"` or `"no"`.
    autotune
        Time the fused attention kernel's launch configurations on the CUDA device before training (a minute or two the
        first time), instead of taking those chosen for its architecture. The winner goes into the checkpoint: the last
        bits of the weights depend on it, so a resumed run keeps it.
    seed
        Of data order, masks, dropout and initial weights. Together with the step it determines a run.
    log_every, validate_every, checkpoint_every
        In optimiser steps.

    Raises
    ------
    ValueError
        If a value makes no sense; the message names it.
    """

    steps: int = 10_000
    batch_size: int = 64
    batch_tokens: int | None = None
    accumulate: int = 1
    micro_batches: int = 1
    learning_rate: float = 3e-4
    final_learning_rate: float = 0.1
    warmup_steps: int = 500
    weight_decay: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    ema_decay: float = 0.0
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    compile_blocks: Literal["auto", "yes", "no"] = "auto"
    autotune: bool = True
    seed: int = 0
    log_every: int = 10
    validate_every: int = 500
    checkpoint_every: int = 500

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise ValueError(f"{field.name} must be True or False, got {value!r}.")
            elif isinstance(field.default, int) and (not isinstance(value, int) or isinstance(value, bool)):
                raise ValueError(f"{field.name} must be a whole number, got {value!r}.")
        at_least(self, 1, "steps", "batch_size", "accumulate", "micro_batches")
        at_least(self, 1, "log_every", "validate_every", "checkpoint_every")
        if self.batch_tokens is not None:
            if not isinstance(self.batch_tokens, int):
                raise ValueError(f"batch_tokens must be None or a whole number, got {self.batch_tokens!r}.")
            at_least(self, 1, "batch_tokens")
        at_least(self, 0, "warmup_steps", "weight_decay", "clip", "beta1", "beta2", "seed", "final_learning_rate")
        at_least(self, 0, "ema_decay")
        at_least(self, 0, "learning_rate", strictly=True)
        if self.beta1 >= 1 or self.beta2 >= 1 or self.ema_decay >= 1 or self.final_learning_rate > 1:
            raise ValueError("beta1, beta2 and ema_decay must be below 1, final_learning_rate at most 1.")
        if self.compile_blocks not in ("auto", "yes", "no"):
            raise ValueError(f'compile_blocks must be "auto", "yes" or "no", got {self.compile_blocks!r}.')
        if self.precision not in ("auto", "fp32", "bf16"):
            raise ValueError(f'precision must be "auto", "fp32" or "bf16", got {self.precision!r}.')

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain Python values, for a checkpoint or a model card."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a configuration of its fields, such as those of a YAML file; what is not given is the default.

        Parameters
        ----------
        values
            Fields by name.

        Raises
        ------
        ValueError
            If a field is unknown (the message names the nearest one) or makes no sense.
        """
        refuse_unknown(values, [field.name for field in fields(cls)], cls.__name__)
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class PretrainingConfig(OptimiserConfig):
    """Pretraining by masked diffusion. Defaults are ours; :meth:`paper` is the paper's table "Training configuration".

    Attributes
    ----------
    context
        Genes of a cell seen in training: the first so many of its ranking.
    loss_norm
        See :func:`scdiva.diffusion.loss_weights`. `"per_cell"` is the paper's algorithm.
    value_weight
        λ of the value term; 10 in the paper.
    value_mask_rate
        Share of shown genes whose value alone is hidden. 0 in the paper, which so never trains "the value of gene g in
        this context", the question that imputation and perturbation ask.
    min_time
        Least diffusion time.
    scored_genes
        Most hidden genes of a cell (in expectation) whose identity is scored in a step, drawn at random; None scores
        all. The gene head is most of a small model's work, and the hidden genes of one cell tell much the same. Only
        with `loss_norm="per_cell"`, which stays unbiased.
    place_prior
        Whether the network is given what the rank of a masked gene says of it
        (:func:`scdiva.diffusion.place_log_prior`), so that it learns what that does not say. Needs a state head, which
        says what values are expected, and `scored_genes`.
    anchor_objective
        What makes the cell state carry the cell; in a plain denoising pass nothing does directly. `"none"` (the
        paper), or one or more of these joined by `"+"`:

        - `"genes"`: a linear decoder predicts the cell's genes from its state, study as covariate of the decoder;
        - `"contrast"`: InfoNCE between two corruption levels of a cell, negatives from its own study only, so that
          telling studies apart earns nothing.
    anchor_max_time
        A view hides at most this share of the genes in expectation, and cells corrupted beyond it enter neither
        `"genes"` nor `"contrast"`: of an almost empty cell nothing can be known.
    genes_weight, contrast_weight
        Weights of these terms.
    contrast_temperature
        Of InfoNCE.
    """

    context: int = MAX_LENGTH
    loss_norm: Literal["per_cell", "inv_t", "sum"] = "per_cell"
    value_weight: float = 10.0
    value_mask_rate: float = 0.1
    min_time: float = 1e-3
    scored_genes: int | None = None
    place_prior: bool = False
    anchor_objective: str = "genes"
    anchor_max_time: float = 0.8
    genes_weight: float = 1.0
    contrast_weight: float = 0.2
    contrast_temperature: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "context")
        if self.scored_genes is not None:
            if not isinstance(self.scored_genes, int) or self.loss_norm != "per_cell":
                raise ValueError(
                    'scored_genes must be None or a whole number, with loss_norm="per_cell"; got '
                    f"{self.scored_genes!r} with {self.loss_norm!r}."
                )
            at_least(self, 1, "scored_genes")
        elif self.place_prior:
            raise ValueError("place_prior needs scored_genes: all logits of a batch would be held at once.")
        if self.batch_tokens is not None and self.batch_tokens <= self.context:
            raise ValueError(f"batch_tokens must be above context, got {self.batch_tokens} and {self.context}.")
        at_least(self, 0, "value_weight", "value_mask_rate", "genes_weight", "contrast_weight")
        at_least(self, 0, "contrast_temperature", "anchor_max_time", "min_time", strictly=True)
        if self.value_mask_rate > 1 or self.min_time >= 1 or self.anchor_max_time > 1:
            raise ValueError("value_mask_rate and anchor_max_time must be at most 1, min_time below 1.")
        if self.anchor_max_time <= self.min_time:
            raise ValueError(f"anchor_max_time must be above min_time, got {self.anchor_max_time} and {self.min_time}.")
        if self.loss_norm not in ("per_cell", "inv_t", "sum"):
            raise ValueError(f"loss_norm must be one of per_cell, inv_t, sum, got {self.loss_norm!r}.")
        wrong = [name for name in self.anchor_objectives if name not in ANCHOR_OBJECTIVES]
        if wrong:
            raise ValueError(
                f'anchor_objective must be "none" or of {", ".join(ANCHOR_OBJECTIVES)} joined by "+", got {wrong[0]!r}.'
            )

    @property
    def anchor_objectives(self) -> tuple[str, ...]:
        """The parts of `anchor_objective`; empty for `"none"`."""
        return () if self.anchor_objective == "none" else tuple(self.anchor_objective.split("+"))

    @classmethod
    def paper(cls) -> PretrainingConfig:
        """Return what the paper says of its training: 4 epochs, global batch 768, λ = 10, t ~ U(0, 1), one plain pass.

        Its 59,162,450 cells make 308,138 steps in four epochs. Learning rate, warm-up and decay, of which it says
        nothing, are ours.
        """
        steps = round(4 * 59_162_450 / 768)
        return cls(steps=steps, batch_size=768, value_mask_rate=0.0, anchor_objective="none")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> PretrainingConfig:
        """Return the training that goes with :meth:`ScDiVaConfig.preset <scdiva.models.ScDiVaConfig.preset>`.

        Parameters
        ----------
        name
            - `"paper"`: :meth:`paper`. Its `batch_size` is the global batch: divide it by `accumulate` and devices; its
              `steps` are four epochs of the paper's corpus;
            - `"base"`: one GPU; 50,000 steps of 8 batches of 65,536 tokens, some 600 cells of 800 genes a step;
            - `"mini"`: a CPU; 2,500 steps of 32 cells of 128 genes. Steps, batch, context and learning rate are those
              of the transformer's first run in `scripts/train_mini.py`, `scored_genes`, `place_prior` and
              `value_weight` those of its last. That script trains set encoder and state head alone before; in a single
              run the objective `"genes"` trains the one, and the denoising the other.
        **changes
            Fields that differ.

        Raises
        ------
        ValueError
            If there is no such preset or field; the message names the nearest.
        """
        if name not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}; got {name!r}{or_nearest(name, PRESETS)}.")
        refuse_unknown(changes, [field.name for field in fields(cls)], cls.__name__)
        if name == "paper":
            return replace(cls.paper(), **changes)
        shared = {"scored_genes": 32, "place_prior": True, "value_weight": 1.0}
        run = {
            "base": {
                "steps": 50_000, "batch_tokens": 65_536, "accumulate": 8, "learning_rate": 5e-4, "warmup_steps": 2000,
                "validate_every": 1000,
            },
            "mini": {
                "steps": 2500, "batch_size": 32, "context": 128, "learning_rate": 1e-3, "warmup_steps": 125,
                "validate_every": 250, "checkpoint_every": 250, "autotune": False,
            },
        }[name]  # fmt: skip
        return cls(**{**shared, **run, **changes})


@dataclass(frozen=True, kw_only=True)
class AnchorConfig(OptimiserConfig):
    """Training of the set encoder alone (:class:`~scdiva.train.AnchorModule`), before the transformer.

    The paper has no such stage; its figure shows a latent encoder and its text none. Defaults are ours.

    Attributes
    ----------
    genes_weight, contrast_weight
        Weights of the two objectives.
    contrast_temperature
        Of InfoNCE.
    max_time
        A view leaves out at most this share of a cell's genes in expectation, t ~ U(0, max_time) per cell.
    panel_rate
        Share of the views of a batch that go through a random gene panel, one for all its cells, as targeted and
        filtered data do.
    min_panel
        Smallest panel, as a share of the genes; the share is drawn log-uniformly up to 1.
    study_power
        Cells are weighted by the size of their study to minus this power.
    """

    genes_weight: float = 1.0
    contrast_weight: float = 0.2
    contrast_temperature: float = 0.1
    max_time: float = 0.8
    panel_rate: float = 0.3
    min_panel: float = 0.05
    study_power: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "genes_weight", "contrast_weight", "panel_rate", "study_power")
        at_least(self, 0, "contrast_temperature", "max_time", "min_panel", strictly=True)
        if self.max_time > 1 or self.panel_rate > 1 or self.min_panel > 1:
            raise ValueError("max_time, panel_rate and min_panel must be at most 1.")
