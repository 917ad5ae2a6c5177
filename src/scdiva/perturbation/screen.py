"""Perturbation screens: their conditions and control cells, read from AnnData."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray

from scdiva._checks import nearest, warn
from scdiva._constants import N_SPECIAL
from scdiva._labels import read_labels
from scdiva.data.batch import InMemoryCells, means_by
from scdiva.data.cells import CellSource, open_cells, take_cells, warn_left_out
from scdiva.data.genes import InputOptions, Species, check_unique
from scdiva.models.inference import RunConfig, embed_all, model_name
from scdiva.models.pretrained import load_for
from scdiva.models.scdiva import ScDiVa
from scdiva.perturbation.conditions import (
    Perturbations,
    ScreenDesign,
    doses,
    match_perturbed,
    read_perturbations,
    species_of,
)

if TYPE_CHECKING:
    from anndata import AnnData


@dataclass(frozen=True)
class Conditions:
    """Conditions of a screen: perturbation, group of cells and dose.

    Attributes
    ----------
    parts
        Genes or labels that are perturbed together in each condition, sorted and unique.
    group
        int64 `(n,)`, number of the group of cells.
    dose
        float64 `(n,)`, above 0; 1 without doses.
    """

    parts: tuple[tuple[str, ...], ...]
    group: NDArray[np.int64]
    dose: NDArray[np.float64]

    @classmethod
    def of(cls, listed: Iterable[tuple[tuple[str, ...], int, float]]) -> Conditions:
        """Conditions from the parts, group and dose of each."""
        parts, group, dose = zip(*listed, strict=True)
        return cls(parts, np.array(group, dtype=np.int64), np.array(dose, dtype=np.float64))

    def __len__(self) -> int:
        """Number of conditions."""
        return len(self.parts)

    def only(self, rows: NDArray[np.int64]) -> Conditions:
        """Subset of the conditions, by number."""
        return Conditions(tuple(self.parts[row] for row in rows), self.group[rows], self.dose[rows])

    @property
    def n_parts(self) -> NDArray[np.int64]:
        """Number of parts of each condition."""
        return np.array([len(parts) for parts in self.parts], dtype=np.int64)

    @property
    def part_names(self) -> tuple[str, ...]:
        """Sorted names of all parts."""
        return tuple(sorted({part for parts in self.parts for part in parts}))

    def same_parts(self, other: Conditions) -> NDArray[np.bool_]:
        """Whether two conditions perturb the same parts, bool `(n, m)`."""
        number = {parts: i for i, parts in enumerate(dict.fromkeys([*self.parts, *other.parts]))}
        return np.equal.outer(*([number[parts] for parts in c.parts] for c in (self, other)))

    def same(self, other: Conditions) -> NDArray[np.bool_]:
        """Whether two conditions perturb the same parts at the same dose, bool `(n, m)`."""
        return self.same_parts(other) & np.equal.outer(self.dose, other.dose)

    def holding(self, names: Sequence[str]) -> NDArray[np.bool_]:
        """Whether each condition `(n, 1)` perturbs each of the names `(1, m)`, bool `(n, m)`."""
        column = {name: j for j, name in enumerate(names)}
        holds = np.zeros((len(self), len(names)), dtype=bool)
        for row, parts in enumerate(self.parts):
            holds[row, [column[part] for part in parts if part in column]] = True
        return holds

    def n_seen(self, measured: Conditions) -> NDArray[np.int64]:
        """Number of parts of each condition that were measured alone."""
        alone = {parts[0] for parts in measured.parts if len(parts) == 1}
        return np.array([sum(part in alone for part in parts) for parts in self.parts], dtype=np.int64)


@dataclass(frozen=True, repr=False)
class ScreenLayout:
    """Conditions of a screen and their numbers of cells; known without reading expression.

    Attributes
    ----------
    genes
        Names of the columns.
    groups
        Names of the groups of cells; `("",)` without groups.
    conditions
        Measured conditions, without the controls.
    labels
        Label of each condition's perturbation in the dataset.
    n_cells
        int64 `(n,)`, cells of each condition.
    n_control
        int64 `(n_groups,)`, control cells of each group.
    """

    genes: tuple[str, ...]
    groups: tuple[str, ...]
    conditions: Conditions
    labels: tuple[str, ...]
    n_cells: NDArray[np.int64]
    n_control: NDArray[np.int64]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self.conditions)} conditions, {len(self.groups)} group(s) of cells, "
            f"{self.n_cells.sum():,} perturbed and {self.n_control.sum():,} control cells, {len(self.genes):,} genes)"
        )


@dataclass(frozen=True, repr=False)
class Screen(ScreenLayout):
    """Measurements of a screen. Expression is log1p of counts per ten thousand.

    Attributes
    ----------
    delta
        float32 `(n, n_genes)`, mean of the perturbed cells minus that of their group's control cells.
    control
        float32 `(n_groups, n_genes)`, mean of the control cells.
    states
        float32 `(n_groups, state_dim)`, mean cell state of the control cells.
    variance
        float32 `(n_genes,)`, variance within conditions (controls included), pooled.
    level
        float32 `(n_genes,)`, mean of a gene over the cells that express it.
    """

    delta: NDArray[np.float32]
    control: NDArray[np.float32]
    states: NDArray[np.float32]
    variance: NDArray[np.float32]
    level: NDArray[np.float32]

    def only(self, rows: NDArray[np.int64]) -> Screen:
        """Screen with a subset of the conditions, by number."""
        return replace(
            self,
            conditions=self.conditions.only(rows),
            labels=tuple(self.labels[row] for row in rows),
            delta=self.delta[rows],
            n_cells=self.n_cells[rows],
        )


@dataclass(frozen=True)
class OpenScreen:
    """A screen whose labels were read, and whose expression was not.

    Attributes
    ----------
    model
        Model to fit.
    design
        Columns, and how labels are read.
    screen
        Conditions and numbers of cells.
    condition
        int64 `(n_obs,)`, number of each cell's condition; the control cells of group g have number `n + g`.
    reading
        How the matrix is read.
    notes
        Name of the model; guides, and names that contain the separator.
    """

    model: ScDiVa
    design: ScreenDesign
    screen: ScreenLayout
    condition: NDArray[np.int64]
    reading: InputOptions
    notes: dict[str, object]


class Controls(NamedTuple):
    """Control cells, by group.

    Attributes
    ----------
    var
        Annotation of the genes.
    names
        Names of the cells, in the order of `expression`.
    groups
        Sorted names of the groups.
    number
        int64, group of each cell.
    expression
        CSR, cells × genes, log1p of counts per ten thousand.
    rows
        Rows of `expression` ordered by group, without cells in which no gene is in the vocabulary.
    states
        float32 `(n_groups, state_dim)`, mean cell state of each group.
    species
        Species of the genes, see :func:`scdiva.perturbation.conditions.species_of`.
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

    def of_group(self, name: str) -> np.ndarray:
        """Indices, in `rows`, of the cells of a group."""
        return np.flatnonzero(self.number[self.rows] == self.groups.index(name))


def open_screen(
    adata: AnnData,
    design: ScreenDesign,
    guides: Mapping[str, str] | None,
    model: ScDiVa | str | PathLike[str],
    device: str,
    reading: InputOptions,
) -> OpenScreen:
    """Load the model to fit and read the labels of a screen, not its expression.

    Parameters
    ----------
    adata, guides, model
        As for :func:`scdiva.tl.fit_perturbation`.
    design
        Design of the screen, from the arguments of the call.
    device
        Torch device.
    reading
        How the matrix will be read.

    Raises
    ------
    ValueError
        If no column of perturbations is given, or as :func:`read_perturbations` and :func:`screen_layout`.
    """
    if not design.perturbation_key:
        raise ValueError(
            "perturbation_key is missing: name the column of adata.obs with the perturbations, or pass a fitted model "
            "as model=."
        )
    loaded = load_for(model, device)
    perturbations = read_perturbations(adata, design, guides, loaded.vocabulary, reading.species)
    screen, condition = screen_layout(adata, perturbations, design, reading)
    if len(screen.conditions) == 1:
        warn(
            "the screen has only one condition: every perturbation is predicted to have its effect, and predictions "
            "cannot be validated."
        )
    design = ScreenDesign.from_notes({**design.arguments, **perturbations.notes})
    notes = {"model": model_name(model), **perturbations.notes}
    return OpenScreen(loaded, design, screen, condition, reading, notes)


def screen_layout(
    adata: AnnData, perturbations: Perturbations, design: ScreenDesign, reading: InputOptions
) -> tuple[ScreenLayout, NDArray[np.int64]]:
    """Collect the conditions of a screen from labels and names; expression is not read.

    Parameters
    ----------
    adata
        The cells.
    perturbations
        Their perturbations.
    design
        Columns of groups and doses.
    reading
        How the matrix will be read.

    Returns
    -------
    The layout, and the number of each cell's condition (:attr:`OpenScreen.condition`).

    Raises
    ------
    KeyError
        If a column does not exist.
    ValueError
        If all cells are controls, no condition has two cells, a group is missing or has perturbed cells and no control
        cells, a dose of a perturbed cell is not above 0, or gene names repeat.

    Warns
    -----
    UserWarning
        If conditions were measured in a single cell.
    """
    is_control = perturbations.is_control
    group, dose = group_names(adata, design.groupby), _doses(adata, design.dose_key, ~is_control)
    if is_control.all():
        raise ValueError(f"all {adata.n_obs} cells are control cells: there is no perturbation to learn from.")
    without = sorted(set(group[~is_control]) - set(group[is_control]))
    if without:
        raise ValueError(
            f"{len(without)} of {len(set(group))} groups have perturbed cells and no control cells (first: "
            f"{without[0]!r}). Remove these groups, or pass a coarser groupby."
        )
    genes, groups = reading.var(adata).index, sorted(set(group[is_control]))
    check_unique(genes)
    number = {name: i for i, name in enumerate(groups)}
    keys = [(perturbations.parts[p], number[g], d) for p, g, d in zip(perturbations.code, group, dose, strict=True)]
    measured = sorted({key for key in keys if key[0]})
    n, n_groups = len(measured), len(groups)
    if n + n_groups == adata.n_obs:
        raise ValueError(
            f"each of {n} conditions, and the control cells of each group, has one cell: sampling error cannot be "
            "estimated. Pass two or more control cells."
        )
    row_of = {key: i for i, key in enumerate(measured)} | {((), g, 1.0): n + g for g in range(n_groups)}
    condition = np.array([row_of[key] for key in keys])
    size = np.bincount(condition, minlength=n + n_groups).astype(np.int64)
    single = size[:n] == 1
    if single.any():
        warn(
            f"{single.sum()} of {n} conditions have one cell (first: {' and '.join(measured[single.argmax()][0])!r}). "
            "Their sampling error is taken from the other conditions, and they have little weight."
        )
    conditions, labels = Conditions.of(measured), dict(zip(perturbations.parts, perturbations.labels, strict=True))
    return (
        ScreenLayout(
            genes=tuple(map(str, genes)),
            groups=tuple(groups),
            conditions=conditions,
            labels=tuple(labels[parts] for parts in conditions.parts),
            n_cells=size[:n],
            n_control=size[n:],
        ),
        condition,
    )


def read_screen(adata: AnnData, opened: OpenScreen, device: str) -> tuple[Screen, Controls]:
    """Read the expression of a screen, and encode its control cells.

    Parameters
    ----------
    adata
        The cells.
    opened
        The screen.
    device
        Torch device to run the model on.

    Raises
    ------
    ValueError
        If the matrix is not valid for :func:`scdiva.tl.embed`, or no control cell of a group has a gene of the
        vocabulary.
    """
    layout, number = opened.screen, opened.condition
    source = open_cells(adata, opened.model, opened.reading, empty="nan")
    expression, n = source.log_normalised(), len(layout.conditions)
    rows, size = np.flatnonzero(number >= n), np.concatenate([layout.n_cells, layout.n_control])
    controls = controls_of(source, expression, rows, np.array(layout.groups)[number[rows] - n], opened.model, device)
    mean = _group_means(expression, number, len(size))
    squares = np.asarray(expression.multiply(expression).sum(axis=0)).ravel()
    left = np.maximum(squares - (np.square(mean) * size[:, None]).sum(axis=0), 0.0)
    level = np.asarray(expression.sum(axis=0)).ravel() / np.maximum(expression.getnnz(axis=0), 1)
    screen = Screen(
        **vars(layout),
        delta=(mean[:n] - mean[n:][layout.conditions.group]).astype(np.float32),
        control=mean[n:].astype(np.float32),
        states=controls.states,
        variance=(left / max(1, adata.n_obs - len(size))).astype(np.float32),
        level=level.astype(np.float32),
    )
    return screen, controls


def group_names(adata: AnnData, groupby: str) -> np.ndarray:
    """Group of each cell; `""` without a column."""
    return read_labels(adata, groupby).astype(object) if groupby else np.full(adata.n_obs, "", dtype=object)


def _doses(adata: AnnData, dose_key: str, is_perturbed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Dose of each cell: 1 without a column, and for control cells."""
    dose = np.ones(adata.n_obs)
    if dose_key:
        column = doses(adata, dose_key)
        bad = is_perturbed & ~(np.isfinite(column) & (column > 0))
        if bad.any():
            raise ValueError(
                f"adata.obs[{dose_key!r}] is not a number above 0 for {bad.sum()} of {is_perturbed.sum()} perturbed "
                f"cells (first: {adata.obs_names[bad.argmax()]!r}). Fill in these doses, or omit dose_key."
            )
        dose[is_perturbed] = column[is_perturbed]
    return dose


def controls_of(
    source: CellSource, expression: sp.csr_matrix, rows: np.ndarray, group: np.ndarray, model: ScDiVa, device: str
) -> Controls:
    """Collect the control cells of each group, and encode them.

    Parameters
    ----------
    source, expression
        The opened cells, and their log-normalised expression.
    rows
        Row numbers of the control cells, ascending.
    group
        Name of the group of each control cell.
    model, device
        The model, and the torch device to run it on.

    Raises
    ------
    ValueError
        If no control cell of a group has a gene of the vocabulary.

    Warns
    -----
    UserWarning
        If cells without a gene of the vocabulary are ignored.
    """
    names, number = np.unique(group.astype(str), return_inverse=True)
    runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    ragged = source.read_ranges([(int(run[0]), int(run[-1]) + 1) for run in runs])
    order = np.argsort(number, kind="stable")
    order = order[np.diff(ragged[0])[order] > 0]
    size = np.bincount(number[order], minlength=len(names))
    warn_left_out("adata", len(rows) - len(order), len(rows), 1)
    if (size == 0).any():
        raise ValueError(
            f"in {(size == 0).sum()} of {len(names)} groups no control cell has a gene of the model's vocabulary "
            f"(first: {str(names[size.argmin()])!r}). Remove these groups."
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
    """Read and encode the control cells that a fitted model predicts from.

    Parameters
    ----------
    adata, reading
        The cells, and how the matrix is read.
    rows, group
        Row numbers of the control cells, and the group of each.
    model, device
        The model, and the torch device to run it on.
    """
    control = adata[rows]
    source = open_cells(control.to_memory() if control.isbacked else control, model, reading, empty="nan")
    return controls_of(source, source.log_normalised(), np.arange(source.n_obs), group, model, device)


def refuse_unknown(model: ScDiVa, parts: Iterable[tuple[str, ...]], species: Species, measured: Sequence[str]) -> None:
    """Raise an error for perturbed names that are neither genes of the vocabulary nor measured.

    Parameters
    ----------
    model
        The model.
    parts
        Parts of the perturbations.
    species
        Species of the genes.
    measured
        Genes and labels that a screen measured.

    Raises
    ------
    ValueError
        If a name is neither; the message contains similar names.
    """
    names = sorted({part for of_one in parts for part in of_one})
    tokens = gene_tokens(model, names, species)
    unknown = [name for name in names if name not in tokens and name not in measured]
    if unknown:
        near = nearest(unknown[0], [*measured, *model.vocabulary.symbols])
        raise ValueError(
            f"{len(unknown)} of {len(names)} perturbed genes or labels are neither in the screen nor in the model's "
            f"vocabulary (first: {unknown[0]!r}"
            + (f"; similar names: {', '.join(map(repr, near))}" if near else "")
            + "). Pass gene symbols, Ensembl ids, or labels of the screen."
        )


def gene_tokens(model: ScDiVa, names: Iterable[str], species: Species) -> dict[str, int]:
    """Tokens of the names that are genes of the vocabulary."""
    ordered = sorted(set(names))
    tokens, _ = match_perturbed(ordered, model.vocabulary, species)
    return {name: int(token) for name, token in zip(ordered, tokens, strict=True) if token >= N_SPECIAL}


def _group_means(matrix: sp.csr_matrix, number: np.ndarray, n: int) -> np.ndarray:
    size = np.bincount(number, minlength=n)
    indicator = sp.csr_matrix((np.ones(len(number)), (number, np.arange(len(number)))), shape=(n, len(number)))
    return np.asarray((indicator @ matrix).toarray() / np.maximum(size, 1)[:, None])
