"""Predict conditions: what is asked for, the predicted change of its control cells, and AnnData of the cells made."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scdiva import _constants as C
from scdiva._checks import warn
from scdiva._progress import progress_bar
from scdiva._rng import step_seed
from scdiva.data.conditions import listed, perturbation_parts, refuse_twice, wanted_groups
from scdiva.perturbation.model import COLUMNS, PerturbationModel
from scdiva.perturbation.reading import Controls, refuse_unknown
from scdiva.perturbation.screen import Conditions, Screen

if TYPE_CHECKING:
    from anndata import AnnData

BLOCK = 32
"""Control cells that the network reads at once."""
FEW = 20
"""Control cells of a group below which there is a warning."""

Matrix = NDArray[np.float64]


class Targets(NamedTuple):
    """What is to be predicted.

    Attributes
    ----------
    conditions
        Group by group; groups of the screen keep their number, new ones come behind.
    names, groups
        Of each condition the perturbation as it was asked for, and the name of the group.
    states
        Mean states of the groups that the screen does not have.
    """

    conditions: Conditions
    names: list[str]
    groups: list[str]
    states: np.ndarray


def requested(
    fitted: PerturbationModel,
    controls: Controls,
    predict: Sequence[str] | str | None,
    groups: Sequence[str] | str | None,
    dose: float | Sequence[float] | None,
    *,
    argument: str = "predict",
) -> Targets:
    """Read what was asked for; arguments as for :func:`scdiva.tl.predict_perturbation`.

    Parameters
    ----------
    fitted, controls
        The model, fitted or not yet, and the cells to start from.
    predict, groups, dose
        As there; None takes all that were measured, all groups with control cells, and the median dose.
    argument
        How messages name the first.

    Raises
    ------
    ValueError
        If nothing is asked for, the control is, anything is asked for twice, a perturbation is not known, a group has
        no control cells, or a dose makes no sense.
    """
    screen = fitted.screen
    measured = screen.conditions
    if predict is None:
        known = dict(zip(measured.parts, screen.labels, strict=True))
        parts, names = sorted(known), [known[p] for p in sorted(known)]
    else:
        names = listed(predict)
        parts = distinct_parts(names, fitted.control, fitted.separator, argument)
    if not names:
        raise ValueError(f"{argument} names no perturbation; leave it out to take all that were measured.")
    if () in parts:
        raise ValueError(f"{argument} holds the control, {names[parts.index(())]!r}: name what is to be perturbed.")
    for name, given, key in (("dose", dose, fitted.dose_key), ("groups", groups, fitted.groupby)):
        if given is not None and not key:
            column = "dose_key" if name == "dose" else "groupby"
            raise ValueError(f"{name}= is given, but the screen was read without: name the column, {column}=...")
    doses = [float(np.median(measured.dose))] if dose is None else np.atleast_1d(dose).astype(float).tolist()
    if not doses or not all(0 < value < np.inf for value in doses):
        raise ValueError(f"dose must be a number above 0, or several; got {dose!r}.")
    refuse_twice(doses, "dose")
    refuse_unknown(parts, screen, fitted.model)
    wanted = wanted_groups(groups, controls.groups, "have no control cells in adata")
    new = [name for name in controls.groups if name not in screen.groups]
    number = {name: i for i, name in enumerate((*screen.groups, *new))}
    rows = list(itertools.product(wanted, zip(parts, names, strict=True), doses))
    conditions = Conditions(
        tuple(these for _, (these, _), _ in rows),
        np.array([number[group] for group, _, _ in rows], dtype=np.int64),
        np.array([value for *_, value in rows], dtype=np.float64),
    )
    states = controls.states[[controls.groups.index(name) for name in new]]
    return Targets(conditions, [name for _, (_, name), _ in rows], [group for group, _, _ in rows], states)


def distinct_parts(names: Sequence[str], control: str, separator: str, argument: str) -> list[tuple[str, ...]]:
    """Split the names of perturbations into their parts.

    Raises
    ------
    ValueError
        If one is named twice; the message names the argument.
    """
    parts = [perturbation_parts(name, control, separator) for name in names]
    if len(set(parts)) < len(parts):
        twice = next(name for name, p in zip(names, parts, strict=True) if parts.count(p) > 1)
        raise ValueError(f"{argument} holds {twice!r} more than once; the order of parts does not count.")
    return parts


def predicted_cells(
    fitted: PerturbationModel, targets: Targets, controls: Controls, n_cells: int, seed: int, device: str
) -> AnnData:
    """Predict, and lay the result out as :func:`scdiva.tl.predict_perturbation` describes.

    Parameters
    ----------
    fitted, targets, controls
        The model, what to predict, and the cells to start from.
    n_cells, device
        As for :func:`scdiva.tl.predict_perturbation`.
    seed
        Of the choice of control cells, and of how they change.

    Raises
    ------
    ValueError
        If genes of the screen are missing.

    Warns
    -----
    UserWarning
        If a group has fewer than 20 control cells.
    """
    screen, conditions = fitted.screen, targets.conditions
    columns = gene_columns(controls.var.index, screen.genes)
    _warn_of_few(fitted, controls, list(dict.fromkeys(targets.groups)))
    found = fitted.mean_change(conditions, targets.states)
    at_start = controls.means[:, columns].astype(np.float64)[[controls.groups.index(name) for name in targets.groups]]
    changes, values, origin = np.empty_like(found.change), [], []
    with network_on(fitted, device):
        for i, group in enumerate(progress_bar(targets.groups, desc="predicting", unit="condition")):
            parts, dose = conditions.parts[i], float(conditions.dose[i])
            # the same control cells whatever is done to them
            draw = np.random.default_rng(step_seed(seed, 0, f"control cells of {group}"))
            own = np.sort(draw.permutation(controls.of_group(group))[:n_cells])
            change = np.tile(found.change[i], (len(own), 1))
            if fitted.head is not None and not found.measured[i]:
                change = change + network_changes(fitted, controls, own, parts, dose)
            changes[i] = change.mean(axis=0)
            draw = np.random.default_rng(step_seed(seed, 0, f"cells of {sorted(parts)} in {group} at {dose}"))
            cells = controls.expression[controls.rows[own]][:, columns].toarray()
            values.append(shift_cells(cells, change, screen.level, draw, at_start[i]))
            origin.append(controls.names[controls.rows[own]])
    several = len(set(conditions.dose)) > 1
    labels = [
        name + (f" in {group}" if fitted.groupby else "") + (f" at {dose:.15g}" if several else "")
        for name, group, dose in zip(targets.names, targets.groups, conditions.dose.tolist(), strict=True)
    ]
    means = {C.VARM_MEAN: changes, C.VARM_CONTROL: np.zeros_like(changes)}
    means |= {C.VARM_BASELINE + name: change for name, change in found.baselines.items()}
    means = {key: np.maximum(at_start + change, 0.0) for key, change in means.items()}
    from_baseline = np.array([name in C.BASELINES for name in found.base])
    means[C.VARM_SD] = np.where(from_baseline[:, None], np.nan, found.sd)
    same = conditions.same(screen.conditions) & (conditions.group[:, None] == screen.conditions.group)
    notes = {name: getattr(fitted, name) for name in COLUMNS} | {
        "condition": np.array(labels, dtype=object),
        "perturbation": np.array(targets.names, dtype=object),
        "group": np.array(targets.groups, dtype=object),
        "dose": conditions.dose,
        "n_parts": conditions.n_parts,
        "n_seen": n_seen(screen, conditions),
        "trained": same.any(axis=1),
        "base": np.array(found.base, dtype=object),
        "trained_on_interventions": True,
        **{name: dict(value) if isinstance(value, dict) else value for name, value in fitted.notes.items()},
    }
    return laid_out(values, origin, controls.var.iloc[columns], means, notes)


def n_seen(screen: Screen, conditions: Conditions) -> np.ndarray:
    """Count the parts of each condition that the screen measured alone."""
    alone = {p[0] for p in screen.conditions.parts if len(p) == 1}
    return np.array([sum(part in alone for part in parts) for parts in conditions.parts], dtype=np.int64)


def laid_out(
    values: list[np.ndarray],
    origin: list[np.ndarray],
    var: pd.DataFrame,
    means: dict[str, np.ndarray],
    notes: dict[str, Any],
) -> AnnData:
    """Put predicted cells one below the other, their means and notes beside.

    Parameters
    ----------
    values
        Of each condition, cells × genes.
    origin
        Names of the cells that each was made from.
    var
        Of the genes; copied.
    means
        By key of `varm`, `(n_conditions, n_genes)`.
    notes
        What `uns` holds of the prediction; by it `obs` is filled.

    Returns
    -------
    AnnData, with the condition and the cell of origin in `obs`.
    """
    from anndata import AnnData

    of = np.repeat(np.arange(len(values)), [len(part) for part in values])
    cells = np.concatenate(origin)
    obs = pd.DataFrame(
        {
            C.OBS_CONDITION: pd.Categorical.from_codes(of, categories=notes["condition"]),
            C.OBS_CONTROL_CELL: cells,
        },
        index=[f"{notes['condition'][i]} {name}" for i, name in zip(of, cells, strict=True)],
    )
    for column, name in ((notes["perturbation_key"], "perturbation"), (notes["groupby"], "group")):
        if column:
            categories = list(dict.fromkeys(notes[name]))
            obs[column] = pd.Categorical(notes[name][of], categories=categories)
    if notes["dose_key"]:
        obs[notes["dose_key"]] = notes["dose"][of]
    result = AnnData(np.vstack(values).astype(np.float32), obs=obs, var=var.copy())
    for key, part in means.items():
        result.varm[key] = np.asarray(part).T.astype(np.float32)
    result.uns[C.UNS] = {C.PERTURBATION: notes}
    return result


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
    columns: np.ndarray = pd.Index(names).get_indexer(list(genes))
    if (columns < 0).any():
        raise ValueError(
            f"{(columns < 0).sum()} of {len(genes)} genes of the screen are not in adata.var_names, the first is "
            f"{genes[int((columns < 0).argmax())]!r}: a fitted model predicts from cells with all genes of its screen."
        )
    return columns


def _warn_of_few(fitted: PerturbationModel, controls: Controls, groups: list[str]) -> None:
    few = {name: n for name in groups if (n := len(controls.of_group(name))) < FEW}
    if few:
        name, n = next(iter(few.items()))
        where = f"{len(few)} of {len(groups)} groups have fewer than {FEW} control cells, the first is {name!r} with"
        warn(
            f"{where if fitted.groupby else 'adata has'} {n} control cells: so many cells are predicted of "
            "each condition at most, and the mean that a change starts from is as uncertain as that of so few."
        )


@contextlib.contextmanager
def network_on(fitted: PerturbationModel, device: str) -> Iterator[None]:
    """Have the network of a fitted model, if it has one, on a device for the block, and back after it."""
    moved = [] if fitted.head is None else [fitted.model, fitted.head]
    home = next(fitted.model.parameters()).device
    try:
        for module in moved:
            module.to(device)
        yield
    finally:
        for module in moved:
            module.to(home)


def network_changes(
    fitted: PerturbationModel, controls: Controls, own: np.ndarray, parts: tuple[str, ...], dose: float
) -> Matrix:
    """Predict what the network adds for some control cells, `(n_cells, n_genes)`."""
    made = []
    for lo in range(0, len(own), BLOCK):
        batch = controls.cells.take(own[lo : lo + BLOCK])
        n = batch.n_cells
        made.append(fitted.added(batch.packed, [parts] * n, np.full(n, dose)).numpy())
    return np.vstack(made).astype(np.float64)


def shift_cells(
    cells: Matrix,
    change: Matrix,
    level: NDArray[np.floating],
    rng: np.random.Generator,
    start: NDArray[np.floating] | None = None,
) -> Matrix:
    r"""Change the mean of each gene by how many cells express it, then by how much they do.

    In single cells a gene's mean moves with the share p of cells in which it is found. As if counts were Poisson, that
    goes from p to :math:`1 - (1 - p)^{\mu'/\mu}` as the mean goes from :math:`\mu` to :math:`\mu'`: cells that lose or
    gain the gene are drawn at random, those that gain it get the value of one that has it, and all that have it are
    then scaled, so that the mean is met.

    Parameters
    ----------
    cells
        Log-normalised expression, `(n_cells, n_genes)`.
    change
        Of each cell, likewise; its mean over cells is that of the mean, and deviations of single cells from it are
        added to those that express the gene.
    level
        Mean of a gene where it is expressed, `(n_genes,)`, for genes that none of these cells expresses.
    rng
        Draws the cells.
    start
        Mean that the change starts from, `(n_genes,)`; None: that of these cells. If they were drawn from more, it is
        the mean of them all: what the drawn ones miss it by is mended with the change, and a change that is smaller
        than this sampling error is still met.

    Returns
    -------
    float64 `(n_cells, n_genes)`, 0 or above. The mean of a gene is `start + change.mean(axis=0)`, or 0 where that is
    below.
    """
    n = len(cells)
    mean, shift = cells.mean(axis=0), change.mean(axis=0)
    aim = np.maximum((mean if start is None else start) + shift, 0.0)
    on = cells > 0
    n_on = on.sum(axis=0)
    share = n_on / n
    fold = np.divide(aim, mean, out=np.zeros_like(aim), where=mean > 0)
    wanted = np.where(n_on > 0, 1 - (1 - share) ** fold, np.minimum(aim / np.maximum(level, 1e-12), 1.0))
    u = rng.random(len(aim))  # all genes, so that what one draws does not depend on the others
    k = np.where(aim > 1e-9, np.clip(np.floor(wanted * n + u), 1, n), 0).astype(np.int64)
    key, donor = rng.random(cells.shape), rng.random(cells.shape)
    made = cells.copy()

    loses = np.flatnonzero(k < n_on)
    rank = _ranks(np.where(on[:, loses], key[:, loses], 2.0))
    made[:, loses] = np.where(rank < (n_on - k)[loses], 0.0, made[:, loses])

    gains = np.flatnonzero(k > n_on)
    off = ~on[:, gains]
    rank = _ranks(np.where(off, key[:, gains], 2.0))
    held = np.argsort(off, axis=0, kind="stable")  # cells that have the gene first
    row = np.take_along_axis(held, (donor[:, gains] * n_on[gains]).astype(np.int64), axis=0)
    given = np.where(n_on[gains] > 0, np.take_along_axis(cells[:, gains], row, axis=0), level[gains])
    made[:, gains] = np.where(rank < (k - n_on)[gains], given, made[:, gains])

    beyond = change - shift
    if beyond.any():
        apart = np.where(made > 0, np.maximum(made + beyond, 0.0), 0.0)
        # where all cells that have a gene would lose it, they keep it: the mean has to be met by some
        made = np.where(apart.any(axis=0), apart, made)
    now = made.mean(axis=0)
    scaled: Matrix = made * np.divide(aim, now, out=np.zeros_like(aim), where=now > 0)
    return scaled


def _ranks(keys: Matrix) -> NDArray[np.int64]:
    """Rank of each value within its column."""
    return np.argsort(np.argsort(keys, axis=0, kind="stable"), axis=0, kind="stable")
