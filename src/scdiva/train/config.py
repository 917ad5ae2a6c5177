"""Configuration of training. Plain dataclasses: they are the command line and the YAML file too; no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from scdiva._checks import or_nearest, refuse_unknown
from scdiva._constants import MAX_LENGTH, PRESETS

ANCHOR_OBJECTIVES = ("genes", "contrast")


_LEAST = {
    **dict.fromkeys(("steps", "batch_size", "batch_tokens", "accumulate", "micro_batches"), 1),
    **dict.fromkeys(("log_every", "validate_every", "checkpoint_every", "context", "scored_genes"), 1),
    **dict.fromkeys(("n_neighbors", "hidden", "probe_steps"), 1),
    "context_cells": 16,
    "queries": 2,
    "alike": -1,
}
"""Least values of numbers by name of the field; that of all others is 0."""
_ABOVE_0 = {
    "learning_rate", "probe_learning_rate", "temperature", "pairs_temperature", "contrast_temperature", "min_time",
    "anchor_max_time", "min_panel", "inverse_penalty",
}  # fmt: skip
_BELOW_1 = {"beta1", "beta2", "ema_decay", "min_time"}
_AT_MOST_1 = {"final_learning_rate", "value_mask_rate", "anchor_max_time", "max_time", "panel_rate", "min_panel"}


def _check(config: OptimiserConfig) -> None:
    """Raise ValueError if a field of a configuration is not of its type, or a number out of its bounds."""
    for name, kind in get_type_hints(type(config)).items():
        value, kinds = getattr(config, name), get_args(kind)
        if get_origin(kind) is Literal:
            if value not in kinds:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, kinds))}, got {value!r}.")
        elif kind is bool:
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}.")
        elif kind is not str and not (value is None and type(None) in kinds):
            _check_number(name, value, whole=kind is not float)


def _check_number(name: str, value: Any, *, whole: bool) -> None:
    number = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, number) or not isfinite(value):
        raise ValueError(f"{name} must be a {'whole' if whole else 'finite'} number, got {value!r}.")
    least = _LEAST.get(name, 0)
    wrong = (
        (value < least, f"at least {least}"),
        (value <= 0 and name in _ABOVE_0, "above 0"),
        (value >= 1 and name in _BELOW_1, "below 1"),
        (value > 1 and name in _AT_MOST_1, "at most 1"),
    )
    for is_wrong, bound in wrong:
        if is_wrong:
            raise ValueError(f"{name} must be {bound}, got {value}.")


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
        whole batch. When memory runs out it is doubled, with a warning.
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
        validation uses the mean, and the mean is what training leaves in the model.
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
        _check(self)

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
        Share of visible genes whose value alone is masked. 0 in the paper, which never trains "the value of gene g in
        this context", the question that imputation and perturbation ask.
    min_time
        Least diffusion time.
    scored_genes
        Most masked genes of a cell (in expectation) whose identity is scored in a step, drawn at random; None scores
        all. The gene head is most of a small model's work, and the masked genes of one cell are largely redundant. Only
        with `loss_norm="per_cell"`, which stays unbiased.
    place_prior
        Whether the network is given what the rank of a masked gene implies
        (:func:`scdiva.diffusion.rank_log_prior`), so that it learns the rest. Needs a state head, which predicts
        values, and `scored_genes`.
    anchor_objective
        What makes the cell state carry the cell; in a plain denoising pass nothing does directly. `"none"` (the
        paper), or one or more of these joined by `"+"`:

        - `"genes"`: a linear decoder predicts the cell's genes from its state, study as covariate of the decoder;
        - `"contrast"`: InfoNCE between two corruption levels of a cell, negatives from its own study only, so that
          distinguishing studies earns nothing.
    anchor_max_time
        A view leaves out at most this share of the genes in expectation, and cells corrupted beyond it enter neither
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
        if self.scored_genes is not None and self.loss_norm != "per_cell":
            raise ValueError(f'scored_genes needs loss_norm="per_cell", got {self.loss_norm!r}.')
        if self.place_prior and self.scored_genes is None:
            raise ValueError("place_prior needs scored_genes: all logits of a batch would be held at once.")
        if self.batch_tokens is not None and self.batch_tokens <= self.context:
            raise ValueError(f"batch_tokens must be above context, got {self.batch_tokens} and {self.context}.")
        if self.anchor_max_time <= self.min_time:
            raise ValueError(f"anchor_max_time must be above min_time, got {self.anchor_max_time} and {self.min_time}.")
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
        """Return the paper's training: 4 epochs, global batch 768, λ = 10, t ~ U(0, 1), one plain pass.

        Its 59,162,450 cells make 308,138 steps in four epochs. Learning rate, warm-up and decay, which it does
        not give, are ours.
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
        if self.max_time == 0:
            raise ValueError("max_time must be above 0: two views of a cell would be the same.")


@dataclass(frozen=True, kw_only=True)
class StateHeadConfig(OptimiserConfig):
    """Training of the state head alone (:class:`~scdiva.train.StateHeadModule`). Ours, not the paper's.

    Attributes
    ----------
    batch_size, learning_rate, warmup_steps, weight_decay
        With defaults of their own.
    value_weight
        λ of the value term.
    min_time
        Least diffusion time.
    """

    batch_size: int = 256
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    value_weight: float = 1.0
    min_time: float = 1e-3


@dataclass(frozen=True, kw_only=True)
class IntegrationConfig(OptimiserConfig):
    """Training of an integration head (:class:`~scdiva.train.integration.IntegrationModule`).

    The paper names a discriminator of batches with gradient reversal, and supervised contrast (section on integration),
    without schedule or weights. The schedule is that of Ganin & Lempitsky 2015; denoising and weights are ours.

    Attributes
    ----------
    steps, batch_size, learning_rate, final_learning_rate, warmup_steps, weight_decay
        As in every task, with defaults of their own.
    target_weight
        Weight of the denoising loss: a thinned cell is to get the corrected state of the whole one.
    supervised_weight, temperature
        Weight and temperature τ of the supervised contrast.
    pairs_weight, pairs_temperature
        Weight and τ of the contrast without labels: of a cell with itself thinned and with a partner in another batch.
    n_neighbors
        Cells of another batch are partners where each is among so many nearest of the other.
    alike
        Cells whose corrected states have a cosine above this are not pushed apart.
    reversal_weight, reversal_rise
        Weight of the reversed gradient at the end of its schedule, and the γ of
        `2 / (1 + exp(-γ p)) - 1` with p the share of the steps done.
    max_time
        Genes are masked with probability t ~ U(0, max_time), drawn for each cell.
    """

    steps: int = 1000
    batch_size: int = 256
    learning_rate: float = 1e-3
    final_learning_rate: float = 0.01
    warmup_steps: int = 20
    weight_decay: float = 0.01
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    target_weight: float = 10.0
    supervised_weight: float = 3.0
    temperature: float = 0.1
    pairs_weight: float = 0.8
    pairs_temperature: float = 0.2
    n_neighbors: int = 10
    alike: float = 0.85
    reversal_weight: float = 1.2
    reversal_rise: float = 10.0
    max_time: float = 0.3


@dataclass(frozen=True, kw_only=True)
class AnnotationConfig(OptimiserConfig):
    """Fit of an annotation head (:mod:`scdiva.train.annotation`).

    The paper probes a frozen backbone with an MLP and fine-tunes, without details; all values here are ours.

    Attributes
    ----------
    batch_size, learning_rate, warmup_steps, weight_decay
        Of the fine-tuning, with defaults of their own; the first and the last also of the probe.
    balanced
        Whether labels count equally in the loss, or cells.
    inverse_penalty
        C of the logistic regression: its quadratic penalty is 1 / (2 C).
    n_neighbors
        Neighbours that vote.
    hidden, probe_steps, probe_learning_rate
        Width of the probe's two hidden layers, and its training.
    max_time
        While fine-tuning, genes are masked with probability t ~ U(0, max_time), drawn for each cell.
    """

    batch_size: int = 256
    learning_rate: float = 3e-4
    warmup_steps: int = 20
    weight_decay: float = 0.01
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    balanced: bool = True
    inverse_penalty: float = 0.1
    n_neighbors: int = 15
    hidden: int = 256
    probe_steps: int = 600
    probe_learning_rate: float = 1e-3
    max_time: float = 0.3


@dataclass(frozen=True, kw_only=True)
class QueryConfig(OptimiserConfig):
    """Training of a query head (:class:`~scdiva.train.QueryModule`). Ours, not the paper's.

    Attributes
    ----------
    batch_size, learning_rate, warmup_steps, weight_decay
        With defaults of their own; the first counts the cells of a batch that are queried.
    context_cells
        Most cells of the study around them.
    queries
        Queries of presence, and of values, of a cell, at most.
    value_weight
        λ of the value term.
    alone_rate
        Share of the batches without context.
    captured_rate
        Share of the batches whose genes are captured with efficiencies of their own.
    """

    batch_size: int = 24
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    context_cells: int = 256
    queries: int = 320
    value_weight: float = 1.0
    alone_rate: float = 0.2
    captured_rate: float = 0.5
