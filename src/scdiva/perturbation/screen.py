"""A perturbation screen: its conditions and control cells, and what was measured of them as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray

from scdiva._checks import nearest, warn
from scdiva._constants import N_SPECIAL
from scdiva._labels import read_labels
from scdiva._running import RunConfig, embed_all
from scdiva.data.cells import CellSource, open_cells, take_cells
from scdiva.data.corpus import warn_left_out
from scdiva.data.genes import check_unique
from scdiva.data.memory import InMemoryCells, means_by
from scdiva.data.options import InputOptions, Species
from scdiva.models.scdiva import ScDiVa
from scdiva.perturbation.conditions import (
    Perturbations,
    doses,
    match_perturbed,
    species_of,
)

if TYPE_CHECKING:
    from anndata import AnnData


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

    @classmethod
    def of(cls, listed: Iterable[tuple[tuple[str, ...], int, float]]) -> Conditions:
        """Make them of the parts, group and dose of each."""
        parts, group, dose = zip(*listed, strict=True)
        return cls(parts, np.array(group, dtype=np.int64), np.array(dose, dtype=np.float64))

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

    @property
    def part_names(self) -> tuple[str, ...]:
        """Genes and labels that are perturbed, alone or with others, sorted."""
        return tuple(sorted({part for parts in self.parts for part in parts}))

    def same_parts(self, other: Conditions) -> NDArray[np.bool_]:
        """Whether a condition and one of the others perturb the same, bool `(n, m)`."""
        number = {parts: i for i, parts in enumerate(dict.fromkeys([*self.parts, *other.parts]))}
        return np.equal.outer(*([number[parts] for parts in c.parts] for c in (self, other)))

    def same(self, other: Conditions) -> NDArray[np.bool_]:
        """Whether they do so at the same dose, bool `(n, m)`."""
        return self.same_parts(other) & np.equal.outer(self.dose, other.dose)

    def holding(self, names: Sequence[str]) -> NDArray[np.bool_]:
        """Whether a condition `(n, 1)` perturbs each of the names `(1, m)`, bool `(n, m)`."""
        column = {name: j for j, name in enumerate(names)}
        found = np.zeros((len(self), len(names)), dtype=bool)
        for row, parts in enumerate(self.parts):
            found[row, [column[part] for part in parts if part in column]] = True
        return found

    def n_seen(self, measured: Conditions) -> NDArray[np.int64]:
        """Count the parts of each that were measured alone."""
        alone = {parts[0] for parts in measured.parts if len(parts) == 1}
        return np.array([sum(part in alone for part in parts) for parts in self.parts], dtype=np.int64)


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


class Controls(NamedTuple):
    """Control cells, by group.

    Attributes
    ----------
    var
        Annotation of the genes.
    names
        Of the cells, in the order of `expression`.
    groups
        Names of the groups, sorted.
    number
        int64, group of each cell.
    expression
        CSR, cells × genes, log1p of counts per ten thousand.
    rows
        Rows of `expression` ordered by group, without cells of no known gene.
    states
        float32 `(n_groups, state_dim)`, mean state of each group's cells.
    species
        Whose genes these are, see :func:`scdiva.perturbation.conditions.species_of`.
    cells
        The serialised cells, in the order of `rows`; their `batch` is the number of the group.
    """

    var: pd.DataFrame
    names: np.ndarray
    groups: tuple[str, ...]
    number: np.ndarray
    expression: sp.csr_matrix
    rows: np.ndarray
    states: np.ndarray
    species: Species
    cells: InMemoryCells

    @property
    def means(self) -> np.ndarray:
        """Mean expression of each group, float32 `(n_groups, n_genes)`."""
        return _group_means(self.expression, self.number, len(self.groups)).astype(np.float32)

    def states_beyond(self, screen: Screen) -> np.ndarray:
        """Give the mean states of the groups that a screen does not have."""
        return self.states[~np.isin(self.groups, screen.groups)]

    def of_group(self, name: str) -> np.ndarray:
        """Give the numbers, in `rows`, of the cells of a group."""
        return np.flatnonzero(self.number[self.rows] == self.groups.index(name))


def design(
    adata: AnnData, known: Perturbations, groupby: str | None, dose_key: str | None, reading: InputOptions
) -> tuple[Screen, NDArray[np.int64]]:
    """Say what was measured, by labels and names alone: no expression is read.

    Parameters
    ----------
    adata
        Cells.
    known
        Their perturbations.
    groupby, dose_key
        As for :func:`scdiva.tl.fit_perturbation`.
    reading
        What will be read.

    Returns
    -------
    The screen, whose expression and states are still empty; and the number of each cell's condition, behind which the
    control cells of each group count as one more.

    Raises
    ------
    KeyError
        If a column is not there.
    ValueError
        If nothing but controls was measured, or nothing in two cells; a group is missing or has perturbed cells and no
        control cells, a dose of a perturbed cell is not above 0, or genes have one name.

    Warns
    -----
    UserWarning
        If conditions were measured in a single cell.
    """
    control = known.is_control
    groups, dose = group_names(adata, groupby), _doses(adata, dose_key, ~control)
    if control.all():
        raise ValueError(f"all {adata.n_obs} cells are control cells: there is no perturbation to learn from.")
    without = sorted(set(groups[~control]) - set(groups[control]))
    if without:
        raise ValueError(
            f"{len(without)} of {len(set(groups))} groups have perturbed cells and no control cells, the first is "
            f"{without[0]!r}: leave such groups out, or name a coarser groupby."
        )
    genes, present = reading.var(adata).index, sorted(set(groups[control]))
    check_unique(genes)
    number = {name: i for i, name in enumerate(present)}
    keys = [(known.parts[p], number[g], d) for p, g, d in zip(known.code, groups, dose, strict=True)]
    measured = sorted({key for key in keys if key[0]})
    n, n_groups = len(measured), len(present)
    if n + n_groups == adata.n_obs:
        raise ValueError(
            f"each of {n} conditions was measured in one cell, and so were the control cells of each group: "
            "nothing says how much of a change is chance. Two or more control cells would."
        )
    row_of = {key: i for i, key in enumerate(measured)} | {((), g, 1.0): n + g for g in range(n_groups)}
    within = np.array([row_of[key] for key in keys])
    size = np.bincount(within, minlength=n + n_groups).astype(np.int64)
    n_cells, none = size[:n], np.empty(0, dtype=np.float32)
    if (n_cells == 1).any():
        first = " and ".join(measured[int((n_cells == 1).argmax())][0])
        warn(
            f"{(n_cells == 1).sum()} of {n} conditions were measured in one cell, the first is {first!r}: "
            "they count for as little as their sampling error, which is taken from the other conditions, lets them."
        )
    conditions = Conditions.of(measured)
    labels = dict(zip(known.parts, known.labels, strict=True))
    screen = Screen(
        genes=tuple(map(str, genes)),
        groups=tuple(present),
        conditions=conditions,
        labels=tuple(labels[names] for names in conditions.parts),
        n_cells=n_cells,
        n_control=size[n:],
        **dict.fromkeys(("delta", "control", "states", "variance", "level"), none),
    )
    return screen, within


def read_screen(
    adata: AnnData, screen: Screen, number: NDArray[np.int64], model: ScDiVa, device: str, reading: InputOptions
) -> tuple[Screen, Controls]:
    """Read what was measured.

    Parameters
    ----------
    adata, reading
        Cells, and what to read.
    screen, number
        From :func:`design`.
    model
        The model.
    device
        Torch device to run the model on.

    Raises
    ------
    ValueError
        If the matrix is refused, or no control cell of a group has a gene that the model knows.
    """
    source = open_cells(adata, model, reading, empty="nan")
    expression, n = source.log_normalised(), len(screen.conditions)
    rows, size = np.flatnonzero(number >= n), np.concatenate([screen.n_cells, screen.n_control])
    controls = controls_of(source, expression, rows, np.array(screen.groups)[number[rows] - n], model, device)
    mean = _group_means(expression, number, len(size))
    squares = np.asarray(expression.multiply(expression).sum(axis=0)).ravel()
    left = np.maximum(squares - (np.square(mean) * size[:, None]).sum(axis=0), 0.0)
    level = np.asarray(expression.sum(axis=0)).ravel() / np.maximum(expression.getnnz(axis=0), 1)
    measured = replace(
        screen,
        delta=(mean[:n] - mean[n:][screen.conditions.group]).astype(np.float32),
        control=mean[n:].astype(np.float32),
        states=controls.states,
        variance=(left / max(1, adata.n_obs - len(size))).astype(np.float32),
        level=level.astype(np.float32),
    )
    return measured, controls


def group_names(adata: AnnData, groupby: str | None) -> np.ndarray:
    """Give the group of each cell, `""` without a column."""
    return read_labels(adata, groupby).astype(object) if groupby else np.full(adata.n_obs, "", dtype=object)


def _doses(adata: AnnData, dose_key: str | None, treated: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Give the dose of each cell: 1 without a column, and of control cells."""
    dose = np.ones(adata.n_obs)
    if dose_key is not None:
        given = doses(adata, dose_key)
        bad = treated & ~(np.isfinite(given) & (given > 0))
        if bad.any():
            raise ValueError(
                f"adata.obs[{dose_key!r}] is no number above 0 for {bad.sum()} of {treated.sum()} perturbed cells, the "
                f"first is {adata.obs_names[bad.argmax()]!r}: give their dose, or leave dose_key out."
            )
        dose[treated] = given[treated]
    return dose


def controls_of(
    source: CellSource, expression: sp.csr_matrix, rows: np.ndarray, group: np.ndarray, model: ScDiVa, device: str
) -> Controls:
    """Give the control cells of each group, and encode them.

    Parameters
    ----------
    source, expression
        Cells that were opened, and their log-normalised expression.
    rows
        Numbers of the control cells, ascending.
    group
        Name of the group of each of these.
    model
        The model.
    device
        Torch device to encode them on.

    Raises
    ------
    ValueError
        If no control cell of a group has a gene that the model knows.

    Warns
    -----
    UserWarning
        If cells are left out because they have none.
    """
    names, number = np.unique(group.astype(str), return_inverse=True)
    runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    ragged = source.read_ranges([(int(run[0]), int(run[-1]) + 1) for run in runs])
    order = np.argsort(number, kind="stable")
    order = order[np.diff(ragged[0])[order] > 0]
    there = np.bincount(number[order], minlength=len(names))
    warn_left_out("adata", len(rows) - len(order), len(rows), 1)
    if (there == 0).any():
        raise ValueError(
            f"in {(there == 0).sum()} of {len(names)} groups no control cell has a gene that the model knows, the "
            f"first is {str(names[there.argmin()])!r}: leave such groups out."
        )
    cells = InMemoryCells(*take_cells(ragged, order), number[order], source.measured_tokens, len(names))
    return Controls(
        var=source.var,
        names=np.asarray(source.obs_names)[rows],
        groups=tuple(map(str, names)),
        number=number,
        expression=expression[rows] if len(rows) < source.n_obs else expression,
        rows=order,
        states=group_states(model, cells, device),
        species=species_of(list(map(str, source.var.index)), model.vocabulary, source.reading.species),
        cells=cells,
    )


def group_states(model: ScDiVa, cells: InMemoryCells, device: str) -> NDArray[np.float32]:
    """Mean cell state of each group of control cells, float32 `(n_groups, state_dim)`.

    Parameters
    ----------
    model, cells, device
        The model, the cells, whose `batch` is the number of the group, and the torch device to run on.
    """
    states = embed_all(model, cells, RunConfig(None, device, "fp32", "state"))
    return means_by(states, cells.batch, cells.n_batches).astype(np.float32)


def read_controls(
    adata: AnnData, rows: NDArray[np.int64], group: np.ndarray, model: ScDiVa, device: str, reading: InputOptions
) -> Controls:
    """Read the control cells that a fitted model predicts from, and encode them.

    Parameters
    ----------
    adata, reading
        Cells, and what to read.
    rows, group
        Those to read, and the group of each (:func:`scdiva.perturbation.model.control_cells`).
    model, device
        The model, and where to run it.
    """
    own = adata[rows]
    source = open_cells(own.to_memory() if own.isbacked else own, model, reading, empty="nan")
    return controls_of(source, source.log_normalised(), np.arange(source.n_obs), group, model, device)


def refuse_unknown(model: ScDiVa, parts: Iterable[tuple[str, ...]], species: Species, measured: Sequence[str]) -> None:
    """Refuse perturbations of which nothing is known.

    Parameters
    ----------
    model
        The model, whose vocabulary is looked into.
    parts
        Of the perturbations.
    species
        Whose genes they are.
    measured
        Genes and labels that a screen measured, which need no token.

    Raises
    ------
    ValueError
        If a name is neither; the message names close ones.
    """
    asked = sorted({part for names in parts for part in names})
    tokens = gene_tokens(model, asked, species)
    unknown = [part for part in asked if part not in tokens and part not in measured]
    if unknown:
        near = nearest(unknown[0], [*measured, *model.vocabulary.symbols])
        raise ValueError(
            f"{len(unknown)} of {len(asked)} perturbed genes or labels are neither in the screen nor in the model's "
            f"vocabulary, the first is {unknown[0]!r}"
            + (f"; close names are {', '.join(map(repr, near))}" if near else "")
            + ". Name genes by symbol or Ensembl id: of what is not known nothing can be predicted."
        )


def gene_tokens(model: ScDiVa, names: Iterable[str], species: Species) -> dict[str, int]:
    """Tokens of those names that are genes of the vocabulary."""
    ordered = sorted(set(names))
    found, _ = match_perturbed(ordered, model.vocabulary, species)
    return {name: int(token) for name, token in zip(ordered, found, strict=True) if token >= N_SPECIAL}


def _group_means(matrix: sp.csr_matrix, number: np.ndarray, n: int) -> np.ndarray:
    size = np.bincount(number, minlength=n)
    indicator = sp.csr_matrix((np.ones(len(number)), (number, np.arange(len(number)))), shape=(n, len(number)))
    return np.asarray((indicator @ matrix).toarray() / np.maximum(size, 1)[:, None])
