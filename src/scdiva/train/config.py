"""Configuration of training. Plain dataclasses: they are the command line and the YAML file too; no torch here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from scdiva._checks import check_choices, check_fields, refuse_unknown
from scdiva._constants import MAX_LENGTH, PRESETS

_ZERO = {
    "warmup_steps", "seed", "final_learning_rate", "weight_decay", "clip", "value_weight", "value_mask_rate", "freeze",
    "lora",
}  # fmt: skip
"""Numbers that may be 0."""
_MOST = {"final_learning_rate": 1, "value_mask_rate": 1}


@dataclass(frozen=True, kw_only=True)
class OptimiserConfig:
    """What every training task shares: AdamW, linear warm-up then cosine, clipping, accumulation, bookkeeping.

    The paper names AdamW and the global batch size; all else here is ours.

    Attributes
    ----------
    steps
        Optimiser steps of the whole run; the learning rate falls along a cosine to their end.
    batch_size
        Most cells of a batch. The global batch is `batch_size * accumulate * devices * nodes`; the paper's is 768.
    batch_tokens
        Most tokens (genes, and `[LAT]` of each cell) per batch, in place of `batch_size`: each batch then takes about
        the same memory and time, and holds more cells where they are short. `None`: `batch_size` counts.
    accumulate
        Batches per optimiser step and process. Each has a buffer of 4,096 cells in memory, about 30 MB.
    micro_batches
        Parts of a batch that each block of the transformer runs over in turn, for one more forward pass; the step stays
        that of the whole batch. From 2 on only what goes into each block is held. When memory runs out it is doubled,
        with a warning.
    learning_rate
        Highest learning rate, reached after the warm-up.
    final_learning_rate
        Share of `learning_rate` left at the end.
    warmup_steps
        Steps of linear warm-up.
    weight_decay
        Decoupled decay of matrices; norms, biases and embedding tables are spared (a gene that is absent from a batch
        must not fade because of it).
    clip
        Largest norm of the gradient; 0 does not clip.
    precision
        `"bf16"`: bfloat16 autocast; `"fp32"`; `"auto"`: bf16 where the device has bfloat16 arithmetic, else fp32.
    compile_blocks
        Whether the transformer blocks are compiled (`torch.compile`, about a minute): `"auto"` where there is a CUDA
        device, `"yes"` or `"no"`.
    autotune
        Time the fused attention kernel's launch configurations on the CUDA device before training (under a minute, the
        first time), instead of taking those chosen for its architecture. The winner goes into the checkpoint: the last
        bits of the weights depend on it, so a resumed run keeps it.
    seed
        Of data order, masks, dropout and initial weights. Together with the step it determines a run.
    log_every, validate_every, checkpoint_every
        In optimiser steps.

    Raises
    ------
    TypeError, ValueError
        If a value has the wrong type or makes no sense; the message names it.
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
    clip: float = 1.0
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    compile_blocks: Literal["auto", "yes", "no"] = "auto"
    autotune: bool = True
    seed: int = 0
    log_every: int = 10
    validate_every: int = 500
    checkpoint_every: int = 500

    def __post_init__(self) -> None:
        check_fields(self, _ZERO, _MOST)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain Python values, for a checkpoint or a model card."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class PretrainingConfig(OptimiserConfig):
    """Pretraining by masked diffusion. Defaults are ours; :meth:`paper` is the paper's table "Training configuration".

    Attributes
    ----------
    context
        Genes of a cell seen in training: the first so many of its ranking.
    value_weight
        λ of the value term; 10 in the paper.
    value_mask_rate
        Share of visible genes whose value alone is masked. 0 in the paper, which never trains "the value of gene g in
        this context", the question that imputation and perturbation ask.
    scored_genes
        Most masked genes of a cell (in expectation) whose identity is scored in a step, drawn at random; None scores
        all. The gene head is most of a small model's work, and the masked genes of one cell are largely redundant. The
        loss stays unbiased.
    place_prior
        Whether the network is given what the rank of a masked gene implies
        (:func:`scdiva.diffusion.rank_log_prior`), so that it learns the rest. Needs a state head, which predicts
        values, and `scored_genes`.
    anchor_objective
        What makes the cell state carry the cell; in a plain denoising pass nothing does directly. `"none"` (the
        paper), or `"genes"`: a linear decoder predicts the cell's genes from its state, study as covariate of the
        decoder, of cells with at most 80% of their genes masked: of an almost empty cell nothing can be known.
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
        if self.batch_tokens is not None and self.batch_tokens < 2 * (self.context + 1):
            raise ValueError(
                f"batch_tokens={self.batch_tokens} must be at least {2 * (self.context + 1)}: two cells of "
                f"context={self.context} genes, and their [LAT]."
            )

    @classmethod
    def paper(cls) -> PretrainingConfig:
        """Return the paper's training: 4 epochs, global batch 768, λ = 10, t ~ U(0, 1), one plain pass.

        Its 59,162,450 cells make 308,138 steps in four epochs. Learning rate, warm-up and decay, which it does
        not give, are ours.
        """
        return cls(steps=round(4 * 59_162_450 / 768), batch_size=768, value_mask_rate=0.0, anchor_objective="none")

    def check_scored_genes(self, state_head: bool) -> None:
        """Raise ValueError if a model with a state head would be trained on all masked genes of a batch at once."""
        if state_head and self.scored_genes is None:
            raise ValueError(
                "A model with a state head needs scored_genes: its logits are all held at once. Pass "
                "training=PretrainingConfig(scored_genes=32), or --training.scored_genes 32."
            )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> PretrainingConfig:
        """Return the training that goes with :meth:`ScDiVaConfig.preset <scdiva.models.ScDiVaConfig.preset>`.

        Parameters
        ----------
        name
            - `"paper"`: :meth:`paper`. Its `batch_size` is the global batch: divide it by `accumulate` and devices; its
              `steps` are four epochs of the paper's corpus;
            - `"base"`, `"base-lat"`: one GPU; 50,000 steps of 8 batches of 65,536 tokens, some 600 cells of 800 genes a
              step;
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
    """Fine-tuning of a pretrained model on a task of the paper: integration, annotation or perturbation.

    The paper names the losses of the three tasks and no other setting; all defaults are ours.

    Attributes
    ----------
    freeze
        Number of transformer blocks, counted from the first, whose weights stay fixed, together with the embeddings; 0
        trains all weights.
    lora
        Rank of low-rank updates of the blocks' linear layers (Hu et al. 2022), which are then all that is trained of
        the model; 0 trains the weights themselves.
    context
        Maximum number of genes per cell, the top-ranked ones. A fine-tuned model whose state comes from the transformer
        reads that many later on, too.
    batch_size, learning_rate, final_learning_rate, warmup_steps, weight_decay
        With defaults of their own. Layers that are new (classifier, discriminator, response head) learn at ten times
        the learning rate.
    """

    freeze: int = 0
    lora: int = 0
    context: int = 128
    batch_size: int = 32
    learning_rate: float = 3e-4
    final_learning_rate: float = 0.05
    warmup_steps: int = 20
    weight_decay: float = 0.01
    compile_blocks: Literal["auto", "yes", "no"] = "no"
