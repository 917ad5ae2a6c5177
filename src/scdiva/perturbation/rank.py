"""Rank perturbations by how near they would bring the cells of one group to those of another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scdiva._progress import progress_bar
from scdiva.data.cells import open_cells
from scdiva.data.conditions import column, listed, perturbation_parts
from scdiva.data.genes import check_unique
from scdiva.data.reading import Reading
from scdiva.perturbation.model import PerturbationModel
from scdiva.perturbation.predict import gene_columns, n_seen, network_changes, network_on, requested
from scdiva.perturbation.reading import controls_of

if TYPE_CHECKING:
    from anndata import AnnData

NETWORK_CELLS = 32
"""Cells whose changes by the network are averaged."""


def ranked(
    adata: AnnData,
    state_key: str,
    start: str,
    target: str,
    fitted: PerturbationModel,
    candidates: Sequence[str] | str | None,
    combinations: bool,
    dose: float | None,
    device: str,
    reading: Reading,
) -> pd.DataFrame:
    """Rank perturbations; arguments, result and errors as for :func:`scdiva.tl.rank_perturbations`.

    Parameters
    ----------
    adata, state_key, start, target, candidates, combinations, dose, device
        As there.
    fitted
        The model.
    reading
        What to read.
    """
    states = column(adata, state_key)
    for name in (start, target):
        if name not in states:
            there = ", ".join(map(repr, sorted(set(states.tolist()))[:10]))
            raise ValueError(f"adata.obs[{state_key!r}] never is {name!r}; there are {there}.")
    if start == target:
        raise ValueError(f"start and target are both {start!r}: there is no change to look for.")
    if dose is not None and np.ndim(dose):
        raise ValueError(f"dose must be one number for all, got {dose!r}.")
    if combinations and not fitted.separator:
        raise ValueError("combinations need a separator, and the screen was read without: separator='+'")
    own = states == start
    group, screen = _group(adata, fitted, own), fitted.screen
    measured = dict(zip(screen.conditions.parts, screen.labels, strict=True))
    names = [measured[parts] for parts in sorted(measured)] if candidates is None else listed(candidates)
    if combinations:
        alone = sorted(parts[0] for parts in measured if len(parts) == 1)
        named = {perturbation_parts(name, fitted.control, fitted.separator) for name in names}
        names += [fitted.separator.join(pair) for pair in itertools.combinations(alone, 2) if pair not in named]

    source = open_cells(adata, fitted.model, reading, empty="nan")
    check_unique(source.var.index)
    expression, columns = source.log_normalised(), gene_columns(source.var.index, screen.genes)
    from_, to = (np.asarray(expression[states == name].mean(axis=0)).ravel()[columns] for name in (start, target))
    needed = to - from_
    length = float(np.linalg.norm(needed))
    if length < 1e-9:
        raise ValueError(f"{start!r} and {target!r} have the same mean expression: there is no change to look for.")
    rows = np.flatnonzero(own)
    controls = controls_of(source, expression, rows, np.full(len(rows), group, dtype=object), fitted.model, device)
    targets = requested(fitted, controls, names, None, dose, argument="candidates")
    conditions = targets.conditions
    found = fitted.mean_change(conditions, targets.states)
    change = found.change
    if fitted.head is not None:
        few = np.arange(min(NETWORK_CELLS, len(controls.rows)))
        with network_on(fitted, device):
            for row in progress_bar(np.flatnonzero(~found.measured), desc="predicting", unit="condition"):
                added = network_changes(fitted, controls, few, conditions.parts[row], conditions.dose[row])
                change[row] += added.mean(axis=0)
    along = change @ needed / length
    frame = pd.DataFrame(
        {
            "perturbation": targets.names,
            "n_parts": conditions.n_parts,
            "n_seen": n_seen(screen, conditions),
            "trained": [parts in measured for parts in conditions.parts],
            "cosine": along / np.maximum(np.linalg.norm(change, axis=1), 1e-12),
            "reached": along / length,
            "distance": np.linalg.norm(needed - change, axis=1) / length,
        }
    )
    return frame.sort_values("cosine", ascending=False, kind="stable").reset_index(drop=True)


def _group(adata: AnnData, fitted: PerturbationModel, chosen: np.ndarray) -> str:
    """Return the group of the screen that the start cells are of."""
    if not fitted.groupby:
        return ""
    found = sorted(set(column(adata, fitted.groupby)[chosen].tolist()))
    if len(found) > 1:
        raise ValueError(
            f"the start cells are of {len(found)} groups of adata.obs[{fitted.groupby!r}], the first are "
            f"{', '.join(map(repr, found[:5]))}; perturbations change each in its own way: start from cells of one."
        )
    result: str = found[0]
    return result
