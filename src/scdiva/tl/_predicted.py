"""Make AnnData of predicted cells."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scdiva import _constants as C
from scdiva._progress import progress_bar
from scdiva._rng import step_seed
from scdiva.data.conditions import perturbation_parts
from scdiva.tl._notes import seed_of
from scdiva.tl._screen import Controls

if TYPE_CHECKING:
    import torch
    from anndata import AnnData

    from scdiva.models import PerturbationModel
    from scdiva.perturbation.screen import Conditions

BLOCK = 32
"""Control cells that the network reads at once."""
FEW = 20
"""Control cells of a group below which it is said that they are few."""


@dataclass(frozen=True)
class Asked:
    """What is to be predicted.

    Attributes
    ----------
    parts
        Of each perturbation.
    names
        As they were asked for.
    groups
        Names; None for all that have control cells.
    doses
        In the unit of the screen.
    """

    parts: list[tuple[str, ...]]
    names: list[str]
    groups: list[str] | None
    doses: list[float]

    @classmethod
    def of(
        cls,
        fitted: PerturbationModel,
        predict: Sequence[str] | str | None,
        groups: Sequence[str] | str | None,
        dose: float | Sequence[float] | None,
        *,
        called: str = "predict",
    ) -> Asked:
        """Read what was asked for; arguments as for :func:`scdiva.tl.predict_perturbation`.

        Messages name the first as `called`.

        Raises
        ------
        ValueError
            If nothing is asked for, the control is, anything is asked for twice, or a dose makes no sense.
        """
        measured = fitted.screen.conditions
        if predict is None:
            known = dict(zip(measured.parts, fitted.screen.labels, strict=True))
            parts, names = sorted(known), [known[p] for p in sorted(known)]
        else:
            names = [predict] if isinstance(predict, str) else [str(name) for name in predict]
            parts = [perturbation_parts(name, fitted.control, fitted.separator) for name in names]
        if not names:
            raise ValueError(f"{called} names no perturbation; leave it out to take all that were measured.")
        if () in parts:
            raise ValueError(f"{called} holds the control, {names[parts.index(())]!r}: name what is to be perturbed.")
        if len(set(parts)) < len(parts):
            twice = next(name for name, p in zip(names, parts, strict=True) if parts.count(p) > 1)
            raise ValueError(f"{called} holds {twice!r} more than once; the order of parts does not count.")
        if dose is not None and not fitted.dose_key:
            raise ValueError("dose is given, but the screen was read without doses: name its column, dose_key=...")
        doses = [float(np.median(measured.dose))] if dose is None else np.atleast_1d(dose).astype(float).tolist()
        if not doses or not all(0 < value < np.inf for value in doses):
            raise ValueError(f"dose must be a number above 0, or several; got {dose!r}.")
        listed = [groups] if isinstance(groups, str) else None if groups is None else [str(name) for name in groups]
        if listed is not None and not fitted.groupby:
            raise ValueError("groups are given, but the screen was read without: name their column, groupby=...")
        if listed is not None and not listed:
            raise ValueError("groups names no group; leave it out to predict in all that have control cells.")
        for name, given in (("dose", doses), ("groups", listed or [])):
            if len(set(given)) < len(given):
                raise ValueError(f"{name} holds {max(given, key=given.count)!r} more than once.")
        return cls(parts, names, listed, doses)

    def groups_in(self, controls: Controls) -> list[str]:
        """Give the groups in which to predict.

        Parameters
        ----------
        controls
            Cells to start from.

        Raises
        ------
        ValueError
            If a group has no control cells.
        """
        groups = list(controls.groups) if self.groups is None else self.groups
        absent = [name for name in groups if name not in controls.groups]
        if absent:
            raise ValueError(
                f"{len(absent)} of {len(groups)} groups have no control cells in adata, the first is {absent[0]!r}; "
                f"there are {', '.join(map(repr, controls.groups[:10]))}."
            )
        return groups

    def targets(
        self, fitted: PerturbationModel, groups: list[str], controls: Controls
    ) -> tuple[Conditions, np.ndarray]:
        """Give the conditions to predict, group by group, and the states of groups that the screen does not have.

        Parameters
        ----------
        fitted
            The model.
        groups
            In which to predict.
        controls
            Cells to start from.
        """
        from scdiva.perturbation.screen import Conditions

        # groups of the screen keep their number, new ones come behind
        new = [name for name in controls.groups if name not in fitted.screen.groups]
        number = {name: i for i, name in enumerate((*fitted.screen.groups, *new))}
        wanted = [(parts, number[group], dose) for group in groups for parts in self.parts for dose in self.doses]
        targets = Conditions(
            tuple(parts for parts, _, _ in wanted),
            np.array([group for _, group, _ in wanted], dtype=np.int64),
            np.array([dose for _, _, dose in wanted], dtype=np.float64),
        )
        return targets, controls.states[[controls.groups.index(name) for name in new]]


def predicted_cells(
    var: pd.DataFrame,
    fitted: PerturbationModel,
    asked: Asked,
    controls: Controls,
    n_cells: int,
    rng: int | np.random.Generator | torch.Generator | None,
    device: str,
) -> AnnData:
    """Predict, and lay the result out as :func:`scdiva.tl.predict_perturbation` says.

    Parameters
    ----------
    var
        Annotation of the genes, which is copied.
    fitted, asked, controls
        The model, what to predict, and the cells to start from.
    n_cells, rng, device
        As for :func:`scdiva.tl.predict_perturbation`.

    Raises
    ------
    ValueError
        If a group has no control cells, or genes of the screen are missing.

    Warns
    -----
    UserWarning
        If a group has fewer than 20 control cells.
    """
    from scdiva.perturbation.shifted import shift_cells

    screen = fitted.screen
    places = gene_columns(var.index, screen.genes)
    groups = asked.groups_in(controls)
    _warn_of_few(fitted, controls, groups)
    wanted = [(p, n, g, d) for g in groups for p, n in zip(asked.parts, asked.names, strict=True) for d in asked.doses]
    targets, states = asked.targets(fitted, groups, controls)
    found = fitted.mean_change(targets, states)

    means = controls.means[:, places].astype(np.float64)
    seed = seed_of(rng)
    rows: list[np.ndarray] = []
    values: list[np.ndarray] = []
    changes = np.empty_like(found.change)
    with network_on(fitted, device):
        for i, (parts, _, group, dose) in enumerate(progress_bar(wanted, desc="predicting", unit="condition")):
            at = controls.groups.index(group)
            # the same control cells whatever is done to them
            own = np.flatnonzero(controls.number[controls.rows] == at)
            draw = np.random.default_rng(step_seed(seed, 0, f"control cells of {group}"))
            own = np.sort(draw.permutation(own)[:n_cells])
            cells = controls.expression[controls.rows[own]][:, places].toarray()
            change = np.tile(found.change[i], (len(cells), 1))
            if fitted.head is not None and not found.measured[i]:
                change = change + _network(fitted, controls, own, parts, dose)
            changes[i] = change.mean(axis=0)
            rows.append(controls.rows[own])
            source_of = step_seed(seed, 0, f"cells of {sorted(parts)} in {group} at {dose}")
            values.append(shift_cells(cells, change, screen.level, np.random.default_rng(source_of), means[at]))

    labels = [_label(fitted, name, group, dose, len(asked.doses) > 1) for _, name, group, dose in wanted]
    result = laid_out(values, [controls.names[part] for part in rows], labels, var.iloc[places])
    of = result.obs[C.OBS_CONDITION].cat.codes.to_numpy()
    result.obs[fitted.perturbation_key] = pd.Categorical([wanted[i][1] for i in of], categories=asked.names)
    if fitted.groupby:
        result.obs[fitted.groupby] = pd.Categorical([wanted[i][2] for i in of], categories=list(dict.fromkeys(groups)))
    if fitted.dose_key:
        result.obs[fitted.dose_key] = targets.dose[of]
    at_start = means[[controls.groups.index(g) for _, _, g, _ in wanted]]
    result.varm[C.VARM_MEAN] = np.maximum(at_start + changes, 0.0).T.astype(np.float32)
    from_baseline = np.array([name in C.BASELINES for name in found.base])
    result.varm[C.VARM_SD] = np.where(from_baseline[:, None], np.nan, found.sd).T.astype(np.float32)
    result.varm[C.VARM_CONTROL] = at_start.T.astype(np.float32)
    for name, change in found.baselines.items():
        result.varm[C.VARM_BASELINE + name] = np.maximum(at_start + change, 0.0).T.astype(np.float32)
    alone = {p[0] for p in screen.conditions.parts if len(p) == 1}
    same = targets.same(screen.conditions) & (targets.group[:, None] == screen.conditions.group)
    result.uns[C.UNS] = {
        C.PERTURBATION: {
            "perturbation_key": fitted.perturbation_key,
            "control": fitted.control,
            "groupby": fitted.groupby,
            "dose_key": fitted.dose_key,
            "separator": fitted.separator,
            "condition": np.array(labels, dtype=object),
            "perturbation": np.array([name for _, name, _, _ in wanted], dtype=object),
            "group": np.array([group for _, _, group, _ in wanted], dtype=object),
            "dose": targets.dose,
            "n_parts": targets.n_parts,
            "n_seen": np.array([sum(part in alone for part in parts) for parts in targets.parts], dtype=np.int64),
            "trained": same.any(axis=1),
            "base": np.array(found.base, dtype=object),
            "trained_on_interventions": True,
            **_written(fitted.notes),
        }
    }
    return result


def _warn_of_few(fitted: PerturbationModel, controls: Controls, groups: list[str]) -> None:
    n = np.bincount(controls.number[controls.rows], minlength=len(controls.groups))
    few = [(name, number) for name in groups if (number := n[controls.groups.index(name)]) < FEW]
    if few:
        where = (
            f"{len(few)} of {len(groups)} groups have fewer than {FEW} control cells, the first is {few[0][0]!r} with"
        )
        warnings.warn(
            f"{where if fitted.groupby else 'adata has'} {few[0][1]} control cells: so many cells are predicted of "
            "each condition at most, and the mean that a change starts from is as uncertain as that of so few.",
            UserWarning,
            stacklevel=4,
        )


@contextlib.contextmanager
def network_on(fitted: PerturbationModel, device: str) -> Iterator[None]:
    """Have the network of a fitted model, if it has one, on a device for the block, and back after it."""
    home = next(fitted.model.parameters()).device
    try:
        if fitted.head is not None:
            fitted.model.to(device)
            fitted.head.to(device)
        yield
    finally:
        if fitted.head is not None:
            fitted.model.to(home)
            fitted.head.to(home)


def laid_out(values: list[np.ndarray], cells: list[np.ndarray], labels: list[str], var: pd.DataFrame) -> AnnData:
    """Put predicted cells one below the other.

    Parameters
    ----------
    values
        Of each condition, cells × genes.
    cells
        Names of the cells that each was made from.
    labels
        Of the conditions.
    var
        Of the genes.

    Returns
    -------
    With the condition and the cell of origin in `obs`.
    """
    from anndata import AnnData

    of = np.repeat(np.arange(len(cells)), [len(part) for part in cells])
    origin = np.concatenate(cells)
    obs = pd.DataFrame(
        {C.OBS_CONDITION: pd.Categorical.from_codes(of, categories=labels), C.OBS_CONTROL_CELL: origin},
        index=[f"{labels[i]} {name}" for i, name in zip(of, origin, strict=True)],
    )
    return AnnData(np.vstack(values).astype(np.float32), obs=obs, var=var.copy())


def _label(fitted: PerturbationModel, name: str, group: str, dose: float, several: bool) -> str:
    """Name a condition."""
    return name + (f" in {group}" if fitted.groupby else "") + (f" at {dose:.15g}" if several else "")


def gene_columns(names: pd.Index, genes: tuple[str, ...]) -> np.ndarray:
    """Find the columns of the screen's genes, in its order.

    Parameters
    ----------
    names
        Of the columns.
    genes
        Of the screen.

    Raises
    ------
    ValueError
        If some are missing.
    """
    places: np.ndarray = pd.Index(names).get_indexer(list(genes))
    if (places < 0).any():
        raise ValueError(
            f"{(places < 0).sum()} of {len(genes)} genes of the screen are not in adata.var_names, the first is "
            f"{genes[int((places < 0).argmax())]!r}: a fitted model predicts from cells with all genes of its screen."
        )
    return places


def _network(
    fitted: PerturbationModel, controls: Controls, own: np.ndarray, parts: tuple[str, ...], dose: float
) -> np.ndarray:
    made = []
    for lo in range(0, len(own), BLOCK):
        block = own[lo : lo + BLOCK]
        batch = controls.cells.take(block)
        made.append(fitted.added(batch.packed, [parts] * len(block), np.full(len(block), dose)).numpy())
    return np.vstack(made).astype(np.float64)


def _written(notes: dict[str, Any]) -> dict[str, Any]:
    """Copy what was found in fitting, as h5ad can hold it."""
    return {name: (dict(value) if isinstance(value, dict) else value) for name, value in notes.items()}
