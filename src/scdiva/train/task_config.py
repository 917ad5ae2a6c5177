"""Configuration of training a part of a network for one task; like :mod:`scdiva.train.config`, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scdiva.train.config import OptimiserConfig, at_least


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

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "value_weight")
        at_least(self, 0, "min_time", strictly=True)
        if self.min_time >= 1:
            raise ValueError(f"min_time must be below 1, got {self.min_time}.")


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
        Genes are hidden with probability t ~ U(0, max_time), drawn for each cell.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = ("target_weight", "supervised_weight", "pairs_weight", "reversal_weight")
        at_least(self, 0, *weights, "reversal_rise", "max_time")
        at_least(self, 0, "temperature", "pairs_temperature", strictly=True)
        at_least(self, 1, "n_neighbors")
        at_least(self, -1, "alike")
        if self.max_time > 1:
            raise ValueError(f"max_time must be at most 1, got {self.max_time}.")


@dataclass(frozen=True, kw_only=True)
class AnnotationConfig(OptimiserConfig):
    """Fit of an annotation head (:mod:`scdiva.train.annotation`).

    The paper probes a frozen backbone with an MLP and fine-tunes, and says no more; all values here are ours.

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
        While fine-tuning, genes are hidden with probability t ~ U(0, max_time), drawn for each cell.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "n_neighbors", "hidden", "probe_steps")
        at_least(self, 0, "inverse_penalty", "probe_learning_rate", strictly=True)
        at_least(self, 0, "max_time")
        if self.max_time > 1:
            raise ValueError(f"max_time must be at most 1, got {self.max_time}.")


@dataclass(frozen=True, kw_only=True)
class PerturbationConfig(OptimiserConfig):
    """Fit of what a network adds to expected responses (:mod:`scdiva.perturbation.training`).

    The paper names the weighted error and says no more; all values here are ours.

    Attributes
    ----------
    batch_size, learning_rate, warmup_steps, weight_decay
        With defaults of their own.
    loss
        `"wmse"`, the paper's error weighted by expression; `"de"`, weighted half evenly and half by how clearly a gene
        changes; `"mse"`, unweighted.
    hidden, rank
        Width of the network's hidden layers, and directions of change it can combine.
    """

    batch_size: int = 32
    learning_rate: float = 3e-4
    warmup_steps: int = 20
    weight_decay: float = 0.01
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    loss: Literal["wmse", "de", "mse"] = "wmse"
    hidden: int = 256
    rank: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "hidden", "rank")
        if self.loss not in ("wmse", "de", "mse"):
            raise ValueError(f'loss must be "wmse", "de" or "mse", got {self.loss!r}.')


@dataclass(frozen=True, kw_only=True)
class QueryConfig(OptimiserConfig):
    """Training of a query head (:class:`~scdiva.train.QueryModule`). Ours, not the paper's.

    Attributes
    ----------
    batch_size, learning_rate, warmup_steps, weight_decay
        With defaults of their own; the first counts the cells of a batch that are asked about.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 16, "context_cells")
        at_least(self, 2, "queries")
        at_least(self, 0, "value_weight", "alone_rate", "captured_rate")
