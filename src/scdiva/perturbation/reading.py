"""Read a perturbation screen: the study design, control cells as the model reads them, and what was measured."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp

from scdiva._checks import nearest, warn
from scdiva._progress import progress_bar
from scdiva._settings import settings
from scdiva.data.cells import open_cells
from scdiva.data.conditions import (
    Guides,
    Perturbations,
    column,
    doses,
    genes_among,
    genes_of_guides,
    guides_as_noted,
    perturbations,
    read_perturbations,
    stored_guides,
)
from scdiva.data.genes import check_unique
from scdiva.data.packed import take_cells, warn_left_out
from scdiva.data.reading import Reading
from scdiva.data.source import CellSource
from scdiva.data.writing import check_columns
from scdiva.models.inference import open_encoder
from scdiva.models.scdiva import ScDiVa
from scdiva.perturbation.model import EXPECTED, PerturbationModel
from scdiva.perturbation.screen import KINDS, Conditions, Screen, gene_tokens, numbered_labels
from scdiva.train.adaptation import AdaptationCells

if TYPE_CHECKING:
    from anndata import AnnData

BLOCK = 64
"""Control cells that the model encodes at once."""


class Design(NamedTuple):
    """The study design: what each cell was given.

    Attributes
    ----------
    known
        The perturbations, and the number of each cell's.
    group
        Name of the group; `""` without.
    dose
        float64, 1 where none is given, and for control cells.
    """

    known: Perturbations
    group: np.ndarray
    dose: np.ndarray


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
    cells, rows
        The same cells as the model reads them, ordered by group, and the row of `expression` of each; without those of
        no known gene.
    states
        float32 `(n_groups, state_dim)`, mean state of each group's cells.
    """

    var: pd.DataFrame
    names: np.ndarray
    groups: tuple[str, ...]
    number: np.ndarray
    expression: sp.csr_matrix
    cells: AdaptationCells
    rows: np.ndarray
    states: np.ndarray

    @property
    def means(self) -> np.ndarray:
        """Mean expression of each group, float32 `(n_groups, n_genes)`."""
        return _group_means(self.expression, self.number, len(self.groups)).astype(np.float32)

    def of_group(self, name: str) -> np.ndarray:
        """Give the numbers, in `cells`, of the cells of a group."""
        return np.flatnonzero(self.number[self.rows] == self.groups.index(name))


def open_screen(
    adata: AnnData,
    perturbation_key: str,
    control: str,
    groupby: str | None,
    dose_key: str | None,
    separator: str,
    guides: Guides,
    model: ScDiVa,
    device: str,
    reading: Reading,
) -> tuple[PerturbationModel, Controls]:
    """Open a screen that a model is to be fitted on.

    Parameters
    ----------
    adata, perturbation_key, control, groupby, dose_key, separator, guides, device
        As for :func:`scdiva.tl.fit_perturbation`.
    model
        The model.
    reading
        What to read.

    Returns
    -------
    The model before it is fitted, and the control cells.
    """
    begun = time.monotonic()
    check_columns(perturbation_key, groupby, dose_key)
    known = read_perturbations(adata, perturbation_key, control, separator, guides, model.vocabulary)
    screen, controls = read_screen(adata, model, read_design(adata, known, groupby, dose_key), device, reading)
    if len(screen.conditions) == 1:
        warn(
            "the screen holds one condition: what is predicted of others is what it changed, and nothing can be said "
            "of how good that is."
        )
    notes: dict[str, Any] = {
        "labels": np.array(list(numbered_labels(model, screen)), dtype=object),
        "seconds": time.monotonic() - begun,
        **stored_guides(known.guides),
    }
    base = dict.fromkeys((*KINDS, "measured"), EXPECTED)
    columns = perturbation_key, control, groupby or "", dose_key or "", separator
    return PerturbationModel(model, screen, base, None, *columns, notes), controls


def read_design(adata: AnnData, known: Perturbations, groupby: str | None, dose_key: str | None) -> Design:
    """Read groups and doses beside the perturbation of each cell.

    Parameters
    ----------
    adata
        The cells.
    known
        Their perturbations.
    groupby, dose_key
        As for :func:`scdiva.tl.fit_perturbation`.

    Raises
    ------
    KeyError
        If a column is not there.
    ValueError
        If a group is missing, or a dose of a perturbed cell is not above 0.
    """
    group = np.full(adata.n_obs, "", dtype=object) if groupby is None else column(adata, groupby).astype(object)
    dose = np.ones(adata.n_obs)
    if dose_key is not None:
        given, treated = doses(adata, dose_key), ~known.is_control
        bad = treated & ~(np.isfinite(given) & (given > 0))
        if bad.any():
            raise ValueError(
                f"adata.obs[{dose_key!r}] is no number above 0 for {bad.sum()} of {treated.sum()} perturbed cells, the "
                f"first is {adata.obs_names[bad.argmax()]!r}: give their dose, or leave dose_key out."
            )
        dose[treated] = given[treated]
    return Design(known, group, dose)


def open_controls(adata: AnnData, fitted: PerturbationModel, guides: Guides, device: str, reading: Reading) -> Controls:
    """Open control cells to predict from; all cells are, if there is no column of perturbations.

    Parameters
    ----------
    adata, guides, device
        As for :func:`scdiva.tl.predict_perturbation`.
    fitted
        The model to predict with.
    reading
        What to read.
    """
    check_unique(reading.var(adata).index)
    key, how = fitted.perturbation_key, (fitted.control, fitted.separator)
    group = column(adata, fitted.groupby).astype(object) if fitted.groupby else np.full(adata.n_obs, "", dtype=object)
    if key not in adata.obs:
        chosen = np.ones(adata.n_obs, dtype=bool)
    elif guides is not None:
        chosen = read_perturbations(adata, key, *how, guides, fitted.model.vocabulary).is_control
    else:  # as in the screen; guides of the control that it did not have are known by its name
        chosen = perturbations(adata, key, *how, guides_as_noted(fitted.notes, (), *how)).is_control
    return read_controls(adata, chosen, group, fitted.model, device, reading)


def read_controls(
    adata: AnnData, chosen: np.ndarray, group: np.ndarray, model: ScDiVa, device: str | None, reading: Reading
) -> Controls:
    """Open control cells apart from others.

    Parameters
    ----------
    adata
        Cells.
    chosen
        bool, which are control cells; others are not looked at.
    group
        Name of the group of every cell.
    model, device
        As for :func:`controls_of`.
    reading
        What to read.
    """
    own = adata[chosen]
    source = open_cells(own.to_memory() if own.isbacked else own, model, reading, empty="nan")
    return controls_of(source, source.log_normalised(), np.arange(source.n_obs), group[chosen], model, device)


def controls_of(
    source: CellSource,
    expression: sp.csr_matrix,
    rows: np.ndarray,
    group: np.ndarray,
    model: ScDiVa,
    device: str | None,
) -> Controls:
    """Give the control cells of each group, as the model reads them, and encode them.

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
        Torch device to encode them on. None does not: `states` has no columns, and each cell has all of its genes,
        also those beyond what the model reads at once.

    Raises
    ------
    ValueError
        If no control cell of a group has a gene that the model knows.

    Warns
    -----
    UserWarning
        If cells are left out because they have none.
    """
    if device is None:
        source = replace(source, max_length=model.vocabulary.n_genes)
    names, number = np.unique(group.astype(str), return_inverse=True)
    number = number.astype(np.int64)
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
    cells = AdaptationCells(*take_cells(ragged, order), number[order], source.measured_tokens, len(names))
    states = np.zeros((len(names), 0))
    if device is not None:
        encoded = _states(cells, model, device)
        states = np.zeros((len(names), encoded.shape[1]))
        np.add.at(states, cells.batch, encoded)
        states /= there[:, None]
    cell_names, groups = np.asarray(source.obs_names)[rows], tuple(map(str, names))
    own = expression[rows] if len(rows) < source.n_obs else expression
    return Controls(source.var, cell_names, groups, number, own, cells, order, states.astype(np.float32))


def _states(cells: AdaptationCells, model: ScDiVa, device: str) -> np.ndarray:
    """Encode cells: the state of each."""
    blocks = [np.arange(lo, min(lo + BLOCK, cells.n_cells)) for lo in range(0, cells.n_cells, BLOCK)]
    with (
        open_encoder(model, device=device, threads=settings.threads, what="state") as encode,
        progress_bar(desc="running the model", unit="cell", total=cells.n_cells) as bar,
    ):
        parts = []
        for part in encode(lambda block: cells.take(block).packed, blocks):
            parts.append(part)
            bar.update(len(part))
    return np.vstack(parts)


def read_screen(
    adata: AnnData, model: ScDiVa, design: Design, device: str, reading: Reading
) -> tuple[Screen, Controls]:
    """Read what was measured.

    Parameters
    ----------
    adata
        Cells.
    model
        The model.
    design
        What each cell was given.
    device
        Torch device to run the model on.
    reading
        What to read.

    Raises
    ------
    ValueError
        If nothing but controls was measured, or nothing in two cells; a group with perturbed cells has no control
        cells, genes have one name, or the matrix is refused.

    Warns
    -----
    UserWarning
        If conditions were measured in a single cell.
    """
    control, groups = design.known.is_control, design.group
    if control.all():
        raise ValueError(f"all {adata.n_obs} cells are control cells: there is no perturbation to learn from.")
    without = sorted(set(groups[~control]) - set(groups[control]))
    if without:
        raise ValueError(
            f"{len(without)} of {len(set(groups))} groups have perturbed cells and no control cells, the first is "
            f"{without[0]!r}: leave such groups out, or name a coarser groupby."
        )
    source = open_cells(adata, model, reading, empty="nan")
    check_unique(source.var.index)
    expression = source.log_normalised()
    controls = controls_of(source, expression, np.flatnonzero(control), groups[control], model, device)
    number = {name: i for i, name in enumerate(controls.groups)}
    parts = design.known.parts
    keys = [(parts[p], number[g], d) for p, g, d in zip(design.known.code, groups, design.dose, strict=True)]
    measured = sorted({key for key in keys if key[0]})
    n, n_groups = len(measured), len(controls.groups)
    # control cells of a group stand behind the conditions, as one more each
    row_of = {key: i for i, key in enumerate(measured)} | {((), g, 1.0): n + g for g in range(n_groups)}
    within = np.array([row_of[key] for key in keys])
    if n + n_groups == adata.n_obs:
        raise ValueError(
            f"each of {n} conditions was measured in one cell, and so were the control cells of each group: "
            "nothing says how much of a change is chance. Two or more control cells would."
        )
    mean, size = _group_means(expression, within, n + n_groups), np.bincount(within, minlength=n + n_groups)
    squares = np.asarray(expression.multiply(expression).sum(axis=0)).ravel()
    left = np.maximum(squares - (np.square(mean) * size[:, None]).sum(axis=0), 0.0)
    n_cells, base = size[:n].astype(np.int64), mean[n:]
    if (n_cells == 1).any():
        first = " and ".join(measured[int((n_cells == 1).argmax())][0])
        warn(
            f"{(n_cells == 1).sum()} of {n} conditions were measured in one cell, the first is {first!r}: "
            "they count for as little as their sampling error, which is taken from the other conditions, lets them."
        )
    conditions = Conditions(
        tuple(key[0] for key in measured),
        np.array([key[1] for key in measured], dtype=np.int64),
        np.array([key[2] for key in measured], dtype=np.float64),
    )
    labels = dict(zip(parts, design.known.labels, strict=True))
    screen = Screen(
        tuple(map(str, source.var.index)),
        controls.groups,
        conditions,
        tuple(labels[names] for names in conditions.parts),
        (mean[:n] - base[conditions.group]).astype(np.float32),
        n_cells,
        base.astype(np.float32),
        size[n:].astype(np.int64),
        controls.states,
        (left / max(1, adata.n_obs - n - n_groups)).astype(np.float32),
        (np.asarray(expression.sum(axis=0)).ravel() / np.maximum(expression.getnnz(axis=0), 1)).astype(np.float32),
    )
    return screen, controls


def refuse_unknown(parts: Iterable[tuple[str, ...]], screen: Screen, model: ScDiVa) -> None:
    """Refuse perturbations of which nothing is known: neither measured nor a gene of the vocabulary.

    Raises
    ------
    ValueError
        If there are any; the message names close ones.
    """
    asked = sorted({part for names in parts for part in names})
    measured, genes = set(screen.part_names), gene_tokens(model, asked)
    unknown = [part for part in asked if part not in measured and part not in genes]
    if unknown:
        of_vocabulary = genes_among(model.vocabulary)

        def known(names: Iterable[str]) -> set[str]:
            listed = set(names)
            return of_vocabulary(listed) | (listed & measured)

        of_guide = genes_of_guides(unknown[:1], known, "", "").values()
        near = list(dict.fromkeys([*of_guide, *nearest(unknown[0], [*screen.part_names, *model.vocabulary.symbols])]))[
            :3
        ]
        raise ValueError(
            f"{len(unknown)} of {len(asked)} perturbed genes or labels are neither in the screen nor in the model's "
            f"vocabulary, the first is {unknown[0]!r}"
            + (f"; close names are {', '.join(map(repr, near))}" if near else "")
            + ". Nothing can be predicted of what is not known."
        )


def _group_means(matrix: sp.csr_matrix, number: np.ndarray, n: int) -> np.ndarray:
    size = np.bincount(number, minlength=n)
    indicator = sp.csr_matrix((np.ones(len(number)), (number, np.arange(len(number)))), shape=(n, len(number)))
    found: np.ndarray = (indicator @ matrix).toarray() / np.maximum(size, 1)[:, None]
    return found
