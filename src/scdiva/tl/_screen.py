"""Read a perturbation screen: what was done to each cell, and what that changed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp

from scdiva._nearest import nearest, no_column
from scdiva._progress import progress_bar
from scdiva._settings import settings
from scdiva.data.cells import log_normalised
from scdiva.data.conditions import column, perturbations
from scdiva.data.guides import genes_among, genes_of_guides
from scdiva.data.reading import Reading
from scdiva.data.writing import check_columns
from scdiva.tl._training_cells import training_cells

if TYPE_CHECKING:
    from anndata import AnnData

    from scdiva.models import ScDiVa
    from scdiva.perturbation.screen import Screen
    from scdiva.train.adaptation import AdaptationCells


class Done(NamedTuple):
    """What was done to each cell.

    Attributes
    ----------
    parts
        Perturbed genes and labels, sorted, each once; `()` for control cells.
    labels
        What the data call each.
    group
        Name of the group; `""` without.
    dose
        float64, 1 where none is given, and for control cells.
    """

    parts: list[tuple[str, ...]]
    labels: dict[tuple[str, ...], str]
    group: np.ndarray
    dose: np.ndarray

    @property
    def is_control(self) -> np.ndarray:
        """Whether a cell is a control cell, bool."""
        return np.array([not parts for parts in self.parts], dtype=bool)


class Controls(NamedTuple):
    """Control cells, by group.

    Attributes
    ----------
    names
        Of the cells, in the order of `expression`.
    groups
        Names of the groups, sorted.
    number
        int64, group of each cell.
    expression
        CSR, cells × genes, log1p of counts per ten thousand.
    cells, rows
        The same cells as the model reads them, ordered by group, and the row of `expression` of each.
    states
        float32 `(n_groups, state_dim)`, mean state of each group's cells.
    """

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


def what_was_done(
    adata: AnnData,
    perturbation_key: str,
    control: str,
    groupby: str | None,
    dose_key: str | None,
    separator: str,
    guides: Mapping[str, str] | None = None,
) -> Done:
    """Read what was done to each cell.

    Parameters
    ----------
    adata
        The cells.
    perturbation_key, control, groupby, dose_key, separator
        As for :func:`scdiva.tl.predict_perturbation`.
    guides
        What labels that name guides are with genes instead.

    Raises
    ------
    KeyError
        If a column is not there.
    ValueError
        If a value is missing, no cell is a control cell, or a dose of a perturbed cell is not above 0.
    """
    check_columns(perturbation_key, groupby, dose_key)
    found = perturbations(adata, perturbation_key, control, separator, guides)
    parts = [found.parts[code] for code in found.code]
    treated = ~found.is_control
    group = np.full(adata.n_obs, "", dtype=object) if groupby is None else column(adata, groupby).astype(object)
    dose = np.ones(adata.n_obs)
    if dose_key is not None:
        if dose_key not in adata.obs:
            raise no_column("adata.obs", dose_key, adata.obs.columns)
        given = pd.to_numeric(adata.obs[dose_key], errors="coerce").to_numpy(dtype=np.float64)
        bad = treated & ~(np.isfinite(given) & (given > 0))
        if bad.any():
            raise ValueError(
                f"adata.obs[{dose_key!r}] is no number above 0 for {bad.sum()} of {treated.sum()} perturbed cells, the "
                f"first is {adata.obs_names[bad.argmax()]!r}: give their dose, or leave dose_key out."
            )
        dose[treated] = given[treated]
    labels = dict(zip(found.parts, found.labels, strict=True))
    return Done(parts, labels, group, dose)


def read_controls(
    adata: AnnData, chosen: np.ndarray, group: np.ndarray, model: ScDiVa, device: str | None, reading: Reading
) -> Controls:
    """Read the control cells of each group, and run them through the model.

    Parameters
    ----------
    adata
        Cells.
    chosen
        bool, which are control cells.
    group
        Name of the group of every cell.
    model
        The model.
    device
        Torch device to run it on. None does not run it: `states` has no columns, and each cell has all of its genes,
        also those beyond what the model reads at once.
    reading
        What to read.

    Raises
    ------
    ValueError
        If no control cell of a group has a gene that the model knows.

    Warns
    -----
    UserWarning
        If cells are left out because they have none.
    """
    from scdiva.data.packed import warn_left_out
    from scdiva.models.inference import open_encoder

    own = adata[chosen]
    own = own.to_memory() if own.isbacked else own.copy()
    groups, number = np.unique(group[chosen].astype(str), return_inverse=True)
    number = number.astype(np.int64)
    expression, _ = log_normalised(own, **reading.matrix())
    cells, rows = training_cells(own, model, number, reading, least=1, whole=device is None)
    there = np.bincount(number[rows], minlength=len(groups))
    if (there == 0).any():
        raise ValueError(
            f"in {(there == 0).sum()} of {len(groups)} groups no control cell has a gene that the model knows, the "
            f"first is {str(groups[there.argmin()])!r}: leave such groups out."
        )
    names = np.asarray(own.obs_names), tuple(map(str, groups))
    if device is None:
        warn_left_out("adata", len(number) - len(rows), len(number), 1)
        return Controls(*names, number, expression, cells, rows, np.zeros((len(groups), 0), dtype=np.float32))
    blocks = [np.arange(lo, min(lo + 64, len(rows))) for lo in range(0, len(rows), 64)]
    with (
        open_encoder(model, device=device, threads=settings.threads, what="state") as encode,
        progress_bar(desc="running the model", unit="cell", total=len(rows)) as bar,
    ):
        parts = []
        for part in encode(lambda block: cells.take(block).packed, blocks):
            parts.append(part)
            bar.update(len(part))
        states = np.vstack(parts)
    order = number[rows]
    mean = np.zeros((len(groups), states.shape[1]))
    np.add.at(mean, order, states)
    mean /= there[:, None]
    # `training_cells` numbers the groups without gaps, and none is missing
    return Controls(*names, number, expression, cells, rows, mean.astype(np.float32))


def read_screen(adata: AnnData, model: ScDiVa, done: Done, device: str, reading: Reading) -> tuple[Screen, Controls]:
    """Read what was measured.

    Parameters
    ----------
    adata
        Cells.
    model
        The model.
    done
        What was done to each cell.
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
    from scdiva.perturbation.screen import Conditions, Screen

    control = done.is_control
    if control.all():
        raise ValueError(f"all {adata.n_obs} cells are control cells: there is no perturbation to learn from.")
    without = sorted(set(done.group[~control]) - set(done.group[control]))
    if without:
        raise ValueError(
            f"{len(without)} of {len(set(done.group))} groups have perturbed cells and no control cells, the first is "
            f"{without[0]!r}: leave such groups out, or name a coarser groupby."
        )
    expression, var = log_normalised(adata, **reading.matrix())
    check_genes(var.index)
    controls = read_controls(adata, control, done.group, model, device, reading)
    place = {name: i for i, name in enumerate(controls.groups)}
    numbers = np.full(adata.n_obs, -1, dtype=np.int64)
    order = sorted({(p, place[g], d) for p, g, d in zip(done.parts, done.group, done.dose, strict=True) if p})
    keys = {key: i for i, key in enumerate(order)}
    for i, (parts, group, dose) in enumerate(zip(done.parts, done.group, done.dose, strict=True)):
        if parts:
            numbers[i] = keys[parts, place[group], dose]
    conditions = Conditions(
        tuple(key[0] for key in order),
        np.array([key[1] for key in order], dtype=np.int64),
        np.array([key[2] for key in order], dtype=np.float64),
    )
    # control cells of a group stand behind the conditions, as one more each
    within = np.where(numbers >= 0, numbers, len(order) + np.array([place.get(g, 0) for g in done.group]))
    n = len(order) + len(controls.groups)
    if n == adata.n_obs:
        raise ValueError(
            f"each of {len(order)} conditions was measured in one cell, and so were the control cells of each group: "
            "nothing says how much of a change is chance. Two or more control cells would."
        )
    mean, size = _group_means(expression, within, n), np.bincount(within, minlength=n)
    squares = np.asarray(expression.multiply(expression).sum(axis=0)).ravel()
    left = np.maximum(squares - (np.square(mean) * size[:, None]).sum(axis=0), 0.0)
    variance = left / max(1, adata.n_obs - n)
    n_cells = size[: len(order)].astype(np.int64)
    if (n_cells == 1).any():
        first = " and ".join(order[int((n_cells == 1).argmax())][0])
        warnings.warn(
            f"{(n_cells == 1).sum()} of {len(order)} conditions were measured in one cell, the first is {first!r}: "
            "they count for as little as their sampling error, which is taken from the other conditions, lets them.",
            UserWarning,
            stacklevel=4,
        )
    base = mean[len(order) :]
    screen = Screen(
        tuple(map(str, var.index)),
        controls.groups,
        conditions,
        tuple(done.labels[parts] for parts in conditions.parts),
        (mean[: len(order)] - base[conditions.group]).astype(np.float32),
        n_cells,
        base.astype(np.float32),
        size[len(order) :].astype(np.int64),
        controls.states,
        variance.astype(np.float32),
        (np.asarray(expression.sum(axis=0)).ravel() / np.maximum(expression.getnnz(axis=0), 1)).astype(np.float32),
    )
    return screen, controls


def check_genes(names: Sequence[str] | pd.Index) -> None:
    """Refuse genes of one name.

    Raises
    ------
    ValueError
        If there are any.
    """
    twice = pd.Index(names).duplicated()
    if twice.any():
        raise ValueError(
            f"{twice.sum()} of {len(twice)} genes repeat a name, the first is {names[int(twice.argmax())]!r}: call "
            "adata.var_names_make_unique() first."
        )


def refuse_unknown(parts: Iterable[tuple[str, ...]], screen: Screen, model: ScDiVa) -> None:
    """Refuse perturbations of which nothing is known: neither measured nor a gene of the vocabulary.

    Raises
    ------
    ValueError
        If there are any; the message names close ones.
    """
    from scdiva.perturbation.model import gene_tokens

    asked = sorted({part for names in parts for part in names})
    genes = gene_tokens(model, asked)
    unknown = [part for part in asked if part not in genes and part not in screen.part_names]
    if unknown:
        near = nearest(unknown[0], [*screen.part_names, *model.vocabulary.symbols])
        near = list(dict.fromkeys([*_gene_of_guide(unknown[0], screen, model), *near]))[:3]
        raise ValueError(
            f"{len(unknown)} of {len(asked)} perturbed genes or labels are neither in the screen nor in the model's "
            f"vocabulary, the first is {unknown[0]!r}"
            + (f"; close names are {', '.join(map(repr, near))}" if near else "")
            + ". Nothing can be predicted of what is not known."
        )


def _gene_of_guide(name: str, screen: Screen, model: ScDiVa) -> list[str]:
    """Name the gene that a guide is of, if the name looks like one's."""
    of_vocabulary, measured = genes_among(model.vocabulary), set(screen.part_names)
    found = genes_of_guides([name], lambda names: of_vocabulary(names := set(names)) | (names & measured), "", "")
    return list(found.values())


def _group_means(matrix: sp.csr_matrix, number: np.ndarray, n: int) -> np.ndarray:
    size = np.bincount(number, minlength=n)
    indicator = sp.csr_matrix((np.ones(len(number)), (number, np.arange(len(number)))), shape=(n, len(number)))
    found: np.ndarray = (indicator @ matrix).toarray() / np.maximum(size, 1)[:, None]
    return found
