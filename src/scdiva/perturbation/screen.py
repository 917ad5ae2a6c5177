"""A perturbation screen as numbers: conditions, mean changes of expression, similarities of genes and of groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scdiva._constants import N_SPECIAL
from scdiva.models.scdiva import ScDiVa

Kind = Literal["single", "combination", "group", "measured"]
"""What is new about a condition: a perturbation of one part, of several, the group of cells it is done to; or nothing,
as it was measured."""
KINDS: tuple[Kind, ...] = ("single", "combination", "group")
"""Those of which something is new."""


@dataclass(frozen=True)
class Conditions:
    """Perturbations of groups of cells.

    Attributes
    ----------
    parts
        Of each condition the genes or labels that are perturbed together, sorted, each once.
    group
        int64 `(n,)`, number of the group of cells.
    dose
        float64 `(n,)`, above 0; 1 where no dose was given.
    """

    parts: tuple[tuple[str, ...], ...]
    group: NDArray[np.int64]
    dose: NDArray[np.float64]

    def __len__(self) -> int:
        """Give the number of conditions."""
        return len(self.parts)

    def only(self, rows: NDArray[np.int64]) -> Conditions:
        """Return some of them, by number."""
        return Conditions(tuple(self.parts[row] for row in rows), self.group[rows], self.dose[rows])

    @property
    def n_parts(self) -> NDArray[np.int64]:
        """Number of parts of each."""
        return np.array([len(parts) for parts in self.parts], dtype=np.int64)

    def same_parts(self, other: Conditions) -> NDArray[np.bool_]:
        """Whether a condition and one of the others perturb the same, bool `(n, m)`."""
        number = {parts: i for i, parts in enumerate(dict.fromkeys([*self.parts, *other.parts]))}
        one, two = (np.array([number[parts] for parts in c.parts], dtype=np.int64) for c in (self, other))
        found: NDArray[np.bool_] = one[:, None] == two
        return found

    def same(self, other: Conditions) -> NDArray[np.bool_]:
        """Whether they do so at the same dose, bool `(n, m)`."""
        found: NDArray[np.bool_] = self.same_parts(other) & (self.dose[:, None] == other.dose)
        return found

    def holding(self, names: Sequence[str]) -> NDArray[np.bool_]:
        """Whether a condition `(n, 1)` perturbs each of the names `(1, m)`, bool `(n, m)`."""
        column = {name: j for j, name in enumerate(names)}
        found = np.zeros((len(self), len(names)), dtype=bool)
        for row, parts in enumerate(self.parts):
            found[row, [column[part] for part in parts if part in column]] = True
        return found


@dataclass(frozen=True)
class Screen:
    """What a perturbation screen measured. Expression is log1p of counts per ten thousand.

    Attributes
    ----------
    genes
        Names of the columns.
    groups
        Names of the groups of cells; `("",)` without.
    conditions
        Those that were measured, not the controls.
    labels
        What the data call the perturbation of each.
    delta
        float32 `(n, n_genes)`, mean of the perturbed cells less that of their group's control cells.
    n_cells
        int64 `(n,)`, cells of each condition.
    control
        float32 `(n_groups, n_genes)`, mean of the control cells.
    n_control
        int64 `(n_groups,)`, their number.
    states
        float32 `(n_groups, state_dim)`, their mean state in the model.
    variance
        float32 `(n_genes,)`, of a gene among cells of one condition (controls too), pooled over conditions.
    level
        float32 `(n_genes,)`, mean of a gene over the cells that express it.
    """

    genes: tuple[str, ...]
    groups: tuple[str, ...]
    conditions: Conditions
    labels: tuple[str, ...]
    delta: NDArray[np.float32]
    n_cells: NDArray[np.int64]
    control: NDArray[np.float32]
    n_control: NDArray[np.int64]
    states: NDArray[np.float32]
    variance: NDArray[np.float32]
    level: NDArray[np.float32]

    def only(self, rows: NDArray[np.int64]) -> Screen:
        """Return the screen as if some conditions, by number, had been measured alone."""
        return replace(self, conditions=self.conditions.only(rows), delta=self.delta[rows], n_cells=self.n_cells[rows])

    @property
    def part_names(self) -> tuple[str, ...]:
        """Genes and labels that were perturbed, alone or with others, sorted."""
        return tuple(sorted({part for parts in self.conditions.parts for part in parts}))


class Examples(NamedTuple):
    """What a network learns from: what a base leaves of a condition's change.

    Attributes
    ----------
    row
        int64 `(n,)`, number of the condition.
    residual
        float32 `(n, n_genes)`.
    held_out
        bool `(n,)`, whether it is looked at and not trained on.
    """

    row: NDArray[np.int64]
    residual: NDArray[np.float32]
    held_out: NDArray[np.bool_]


class Similarities(NamedTuple):
    """Similarities that the model gives.

    Attributes
    ----------
    names
        Perturbed genes and labels.
    parts
        `(n_names, n_names)`, see :func:`part_similarity`.
    groups
        `(n_groups, n_groups)`, see :func:`group_similarity`.
    """

    names: tuple[str, ...]
    parts: NDArray[np.float64]
    groups: NDArray[np.float64]


def kinds(targets: Conditions, measured: Conditions) -> list[Kind]:
    """Say of each target what is new about it, given what was measured.

    One that was measured in its group, at whatever dose, is `"measured"`; one that was in other groups only is new in
    its `"group"`; else a condition is a `"combination"` if it has several parts, or `"single"`.

    Parameters
    ----------
    targets, measured
        Conditions with the same numbers of groups.
    """
    found: list[Kind] = []
    groups: dict[tuple[str, ...], set[int]] = {}
    for parts, group in zip(measured.parts, measured.group, strict=True):
        groups.setdefault(parts, set()).add(int(group))
    for parts, group in zip(targets.parts, targets.group, strict=True):
        known = groups.get(parts, set())
        new: Kind = "combination" if len(parts) > 1 else "single"
        found.append("measured" if int(group) in known else "group" if known else new)
    return found


def part_similarity(model: ScDiVa, names: Sequence[str]) -> NDArray[np.float64]:
    r"""Similarity of perturbed genes by the model, `(n, n)` with ones on the diagonal.

    The product of two cosines, of the genes' token embeddings and of their rows in the set encoder's table, each
    around its mean over the vocabulary: both have to agree. Without a set encoder the first is squared. A name that is
    no gene of the vocabulary is like none but itself.

    Parameters
    ----------
    model
        The model.
    names
        Perturbed genes, or labels.
    """
    tokens = model.vocabulary.match(names).tokens
    known = tokens >= N_SPECIAL
    cosines = []
    tables = [model.embedding.gene.weight]
    table = getattr(getattr(model.anchor, "table", None), "weight", None)
    tables.append(tables[0] if table is None else table)
    for weight in tables:
        rows = weight.detach().double().cpu().numpy()[N_SPECIAL:]
        own = np.zeros((len(names), rows.shape[1]))
        own[known] = rows[tokens[known] - N_SPECIAL] - rows.mean(axis=0)
        own /= np.maximum(np.linalg.norm(own, axis=1, keepdims=True), 1e-12)
        cosines.append(own @ own.T)
    similar: NDArray[np.float64] = cosines[0] * cosines[1]
    np.fill_diagonal(similar, 1.0)
    return similar


def group_similarity(states: NDArray[np.float32], n_measured: int) -> NDArray[np.float64]:
    """Similarity of groups of cells, `(n, n)`: cosines of their control cells' mean states around those of the screen.

    Of two groups such cosines are always -1, which carries no information: of fewer than three measured, each is like
    itself alone.

    Parameters
    ----------
    states
        `(n, state_dim)`, those that the screen measured first.
    n_measured
        Their number.
    """
    if n_measured < 3:
        return np.eye(len(states))
    own = states.astype(np.float64) - states[:n_measured].mean(axis=0)
    own /= np.maximum(np.linalg.norm(own, axis=1, keepdims=True), 1e-12)
    similar: NDArray[np.float64] = own @ own.T
    np.fill_diagonal(similar, 1.0)
    return similar


def similarities_of(
    model: ScDiVa, screen: Screen, targets: Conditions | None = None, states: NDArray[np.float32] | None = None
) -> Similarities:
    """Give the similarities of all perturbed genes, and of all groups, of a screen and of what is predicted.

    Parameters
    ----------
    model
        The model.
    screen, targets
        What was measured, and what is predicted; None: what was measured.
    states
        Of the groups that `targets` has beyond those of the screen.
    """
    parts = () if targets is None else targets.parts
    names = tuple(sorted({*screen.part_names, *(part for names in parts for part in names)}))
    rows = screen.states if states is None else np.vstack([screen.states, states])
    return Similarities(names, part_similarity(model, names), group_similarity(rows, len(screen.groups)))


def gene_tokens(model: ScDiVa, names: Iterable[str], species: str | Mapping[str, str] | None = None) -> dict[str, int]:
    """Tokens of those names that are genes of the vocabulary, as genes of `species` if one is named."""
    ordered = sorted(set(names))
    found = model.vocabulary.match(ordered, species).tokens
    return {name: int(token) for name, token in zip(ordered, found, strict=True) if token >= N_SPECIAL}


def numbered_labels(model: ScDiVa, screen: Screen) -> dict[str, int]:
    """Perturbations of a screen that are no genes of the vocabulary, numbered in the order of their names."""
    genes = gene_tokens(model, screen.part_names)
    return {name: i for i, name in enumerate(name for name in screen.part_names if name not in genes)}
