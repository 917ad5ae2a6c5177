"""Predict conditions: what is asked for, the predicted change of control cells, and the cells made; and rank them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from anndata import AnnData
from numpy.typing import NDArray
from scipy.stats import rankdata

from scdiva import _constants as C
from scdiva._checks import refuse_absent, warn
from scdiva._labels import listed, read_labels, refuse_twice, wanted_groups
from scdiva._rng import step_seed
from scdiva._settings import logger, progress_bar
from scdiva.data.cells import open_cells
from scdiva.data.genes import check_unique
from scdiva.data.options import InputOptions, Species
from scdiva.perturbation.conditions import Naming, genes_among, same_genes, species_of, whole_names
from scdiva.perturbation.model import COLUMNS, PerturbationModel
from scdiva.perturbation.screen import Conditions, Controls, controls_of, group_names, refuse_unknown

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
    asked
        Parts as they were asked for; `conditions` has the names by which the screen measured them.
    """

    conditions: Conditions
    names: list[str]
    groups: list[str]
    asked: list[tuple[str, ...]]


def requested(
    fitted: PerturbationModel,
    adata: AnnData,
    reading: InputOptions,
    present: Iterable[str],
    predict: Sequence[str] | str | None,
    groups: Sequence[str] | str | None,
    dose: float | Sequence[float] | None,
    *,
    argument: str = "predict",
) -> Targets:
    """Say what was asked for, before any cell is read; arguments as for :func:`scdiva.tl.predict_perturbation`.

    Parameters
    ----------
    fitted
        The model, fitted or not yet.
    adata, reading
        The cells, and what will be read of them.
    present
        Groups of the cells to start from.
    predict, groups, dose
        As there; None takes all that were measured, all groups with control cells, and the median dose.
    argument
        How messages name the first.

    Raises
    ------
    ValueError
        If nothing is asked for, the control is, anything is asked for twice, a perturbation is not known, a group has
        no control cells, a dose makes no sense, or genes repeat a name or those of the screen are missing.
    """
    screen, genes, present = fitted.screen, reading.var(adata).index, sorted(set(present))
    measured = screen.conditions
    check_unique(genes)
    gene_columns(genes, screen.genes)
    species = species_of(list(map(str, genes)), fitted.model.vocabulary, reading.species)
    if predict is None:
        known = dict(zip(measured.parts, screen.labels, strict=True))
        asked = parts = sorted(known)
        names = [known[p] for p in parts]
    else:
        names = listed(predict)
        naming = naming_of(fitted, names, species)
        asked = [naming.parts(name) for name in names]
        called = same_genes(set().union(*asked), measured.part_names, fitted.model.vocabulary, species, argument)
        for name, of in called.items():
            logger.info("%s: %r is read as %r, the same gene", argument, name, of)
        parts = distinct_parts(names, naming, argument, screen.labels, called)
    for name, given, by in (("dose", dose, "dose_key"), ("groups", groups, "groupby")):
        if given is not None and not getattr(fitted, by):
            raise ValueError(f"{name}= is given, but the screen was read without: name the column, {by}=...")
    doses = [float(np.median(measured.dose))] if dose is None else np.atleast_1d(dose).astype(float).tolist()
    if not doses or not all(0 < value < np.inf for value in doses):
        raise ValueError(f"dose must be a number above 0, or several; got {dose!r}.")
    refuse_twice(doses, "dose")
    refuse_unknown(fitted.model, parts, species, measured.part_names)
    wanted = wanted_groups(groups, present, "have no control cells in adata")
    number = {name: i for i, name in enumerate(dict.fromkeys((*screen.groups, *present)))}
    rows = list(itertools.product(wanted, zip(parts, names, strict=True), doses))
    conditions = Conditions.of((these, number[group], value) for group, (these, _), value in rows)
    return Targets(conditions, [name for _, (_, name), _ in rows], [group for group, _, _ in rows], asked)


def naming_of(fitted: PerturbationModel, names: Sequence[str], species: Species) -> Naming:
    """Say how names of perturbations are read that a model is asked for."""
    known = genes_among(fitted.model.vocabulary, species)
    return fitted.naming.knowing(names, known, frozenset(fitted.screen.genes))


def distinct_parts(
    names: Sequence[str], naming: Naming, argument: str, measured: Collection[str], called: Mapping[str, str]
) -> list[tuple[str, ...]]:
    """Split the names of perturbations into their parts.

    Parameters
    ----------
    names
        The perturbations.
    naming
        How they are read.
    argument
        Where they were given.
    measured
        Labels that the data hold.
    called
        Of parts that have another name in the data, that name (:func:`scdiva.perturbation.conditions.same_genes`).

    Raises
    ------
    ValueError
        If there is none, one is the control, one is named twice, or one that the data do not hold names a part twice;
        the message names the argument.
    """
    if not names:
        raise ValueError(f"{argument} names no perturbation: name one or more.")
    parts = [tuple(sorted({called.get(part, part) for part in naming.parts(name)})) for name in names]
    if () in parts:
        raise ValueError(
            f"{argument} holds {names[parts.index(())]!r}, which is no perturbation: name what is to be perturbed."
        )
    for name, of in zip(names, parts, strict=True):
        pieces = [called.get(part, part) for part in naming.split(name)]
        if name not in measured and (twice := [part for part in of if pieces.count(part) > 1]):
            raise ValueError(
                f"{argument} holds {name!r}, which names {twice[0]!r} twice: pass {naming.separator.join(of)!r}."
            )
    if len(set(parts)) < len(parts):
        twice_named = next(name for name, p in zip(names, parts, strict=True) if parts.count(p) > 1)
        raise ValueError(
            f"{argument} holds {twice_named!r} more than once; the order of parts does not count, nor does by which of "
            "its names a gene is called."
        )
    return parts


def predicted_cells(
    fitted: PerturbationModel, targets: Targets, controls: Controls, n_cells: int, seed: int
) -> AnnData:
    """Predict, and lay the result out as :func:`scdiva.tl.predict_perturbation` describes.

    Parameters
    ----------
    fitted, targets, controls
        The model, what to predict, and the cells to start from.
    n_cells
        As for :func:`scdiva.tl.predict_perturbation`.
    seed
        Of the choice of control cells, and of how they change.

    Warns
    -----
    UserWarning
        If a group has fewer than 20 control cells.
    """
    screen, conditions = fitted.screen, targets.conditions
    columns = gene_columns(controls.var.index, screen.genes)
    _warn_of_few(fitted, controls, list(dict.fromkeys(targets.groups)))
    found = fitted.predict(conditions, controls)
    start = controls.means[:, columns].astype(np.float64)[[controls.groups.index(name) for name in targets.groups]]
    values, origin = [], []
    for i, group in enumerate(progress_bar(targets.groups, desc="predicting", unit="condition")):
        # the same control cells whatever is done to them
        draw = np.random.default_rng(step_seed(seed, 0, f"control cells of {group}"))
        rows = controls.rows[np.sort(draw.permutation(controls.of_group(group))[:n_cells])]
        what = f"cells of {sorted(conditions.parts[i])} in {group} at {float(conditions.dose[i])}"
        draw = np.random.default_rng(step_seed(seed, 0, what))
        cells = controls.expression[rows][:, columns].toarray()
        values.append(shift_cells(cells, start[i] + found.change[i], screen.level, draw))
        origin.append(controls.names[rows])
    changes = {C.VARM_MEAN: found.change, C.VARM_CONTROL: np.zeros_like(start)}
    changes |= {C.VARM_BASELINE + name: change for name, change in found.baselines.items()}
    means = {key: np.maximum(start + change, 0.0) for key, change in changes.items()}
    expected = np.array([name == C.EXPECTED for name in found.base])
    means[C.VARM_SD] = np.where(expected[:, None], found.sd, np.nan)
    design = {name: getattr(fitted, name) for name in COLUMNS}
    design["control"] = np.array(fitted.control, dtype=object)
    several = len(set(conditions.dose)) > 1
    labels = [
        name + (f" in {of}" if design["groupby"] else "") + (f" at {dose:.15g}" if several else "")
        for name, of, dose in zip(targets.names, targets.groups, conditions.dose.tolist(), strict=True)
    ]
    condition = np.repeat(np.arange(len(values)), [len(part) for part in values])
    controlled = np.concatenate(origin)
    obs = pd.DataFrame(
        {
            C.OBS_CONDITION: pd.Categorical.from_codes(condition, categories=np.array(labels, dtype=object)),
            C.OBS_CONTROL_CELL: controlled,
        },
        index=[f"{labels[i]} {name}" for i, name in zip(condition, controlled, strict=True)],
    )
    names, groups = np.array(targets.names, dtype=object), np.array(targets.groups, dtype=object)
    for name, named in ((design["perturbation_key"], names), (design["groupby"], groups)):
        if name:
            obs[name] = pd.Categorical(named[condition], categories=list(dict.fromkeys(named)))
    if design["dose_key"]:
        obs[design["dose_key"]] = conditions.dose[condition]
    result = AnnData(np.vstack(values).astype(np.float32), obs=obs, var=controls.var.iloc[columns].copy())
    for key, part in means.items():
        result.varm[key] = np.asarray(part).T.astype(np.float32)
    same = conditions.same(screen.conditions) & (conditions.group[:, None] == screen.conditions.group)
    result.uns[C.UNS] = {
        C.PERTURBATION: {
            **design,
            "base": np.array(found.base, dtype=object),
            "condition": np.array(labels, dtype=object),
            "perturbation": names,
            "group": groups,
            "dose": conditions.dose,
            "n_parts": conditions.n_parts,
            "n_seen": conditions.n_seen(screen.conditions),
            "trained": same.any(axis=1),
            **{name: dict(value) if isinstance(value, dict) else value for name, value in fitted.notes.items()},
            **whole_names([*targets.asked, *conditions.parts, *screen.conditions.parts], fitted.separator),
        }
    }
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
    mend = ": a fitted model predicts from cells with all genes of its screen"
    refuse_absent(genes, names, "genes of the screen are not in adata.var_names", mend, ValueError)
    return np.asarray(pd.Index(names).get_indexer(list(genes)))


def _warn_of_few(fitted: PerturbationModel, controls: Controls, groups: list[str]) -> None:
    few = {name: n for name in groups if (n := len(controls.of_group(name))) < FEW}
    if few:
        name, n = next(iter(few.items()))
        where = f"{len(few)} of {len(groups)} groups have fewer than {FEW} control cells, the first is {name!r} with"
        warn(
            f"{where if fitted.groupby else 'adata has'} {n} control cells: so many cells are predicted of "
            "each condition at most, and the mean that a change starts from is as uncertain as that of so few."
        )


def shift_cells(cells: Matrix, mean: Matrix, level: NDArray[np.floating], rng: np.random.Generator) -> Matrix:
    r"""Change the mean of each gene by how many cells express it, then by how much they do.

    In single cells a gene's mean moves with the share p of cells in which it is found. As if counts were Poisson, that
    goes from p to :math:`1 - (1 - p)^{\mu'/\mu}` as the mean goes from :math:`\mu` to :math:`\mu'`: cells that lose or
    gain the gene are drawn at random, those that gain it get the value of one that has it, and all that have it are
    then scaled, so that the mean is met.

    Parameters
    ----------
    cells
        Log-normalised expression, `(n_cells, n_genes)`.
    mean
        Mean to reach, `(n_genes,)`. If the cells were drawn from more, it is the mean of them all with the change: what
        the drawn ones miss the former by is mended too, and a change that is smaller than this sampling error is met.
    level
        Mean of a gene where it is expressed, `(n_genes,)`, for genes that none of these cells expresses.
    rng
        Draws the cells.

    Returns
    -------
    float64 `(n_cells, n_genes)`, 0 or above. The mean of a gene is `mean`, or 0 where that is below.
    """
    n, was = len(cells), cells.mean(axis=0)
    aim = np.maximum(mean, 0.0)
    on = cells > 0
    n_on = on.sum(axis=0)
    fold = np.divide(aim, was, out=np.zeros_like(aim), where=was > 0)
    wanted = np.where(n_on > 0, 1 - (1 - n_on / n) ** fold, np.minimum(aim / np.maximum(level, 1e-12), 1.0))
    u = rng.random(len(aim))  # all genes, so that what one draws does not depend on the others
    k = np.where(aim > 1e-9, np.clip(np.floor(wanted * n + u), 1, n), 0).astype(np.int64)
    key, donor = rng.random(cells.shape), rng.random(cells.shape)
    made = cells.copy()

    loses = np.flatnonzero(k < n_on)
    rank = rankdata(np.where(on[:, loses], key[:, loses], 2.0), "ordinal", axis=0)
    made[:, loses] = np.where(rank <= (n_on - k)[loses], 0.0, made[:, loses])

    gains = np.flatnonzero(k > n_on)
    off = ~on[:, gains]
    rank = rankdata(np.where(off, key[:, gains], 2.0), "ordinal", axis=0)
    held = np.argsort(off, axis=0, kind="stable")  # cells that have the gene first
    row = np.take_along_axis(held, (donor[:, gains] * n_on[gains]).astype(np.int64), axis=0)
    given = np.where(n_on[gains] > 0, np.take_along_axis(cells[:, gains], row, axis=0), level[gains])
    made[:, gains] = np.where(rank <= (k - n_on)[gains], given, made[:, gains])

    now = made.mean(axis=0)
    return np.asarray(made * np.divide(aim, now, out=np.zeros_like(aim), where=now > 0))


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
    reading: InputOptions,
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
    states = read_labels(adata, state_key)
    for name in (start, target):
        if name not in states:
            there = ", ".join(map(repr, sorted(set(states.tolist()))[:10]))
            raise ValueError(f"adata.obs[{state_key!r}] never is {name!r}; there are {there}.")
    if start == target:
        raise ValueError(f"start and target are both {start!r}: there is no change to look for.")
    if combinations and not fitted.separator:
        raise ValueError("combinations need a separator, and the screen was read without: separator='+'")
    screen = fitted.screen
    rows = np.flatnonzero(states == start)
    group = group_names(adata, fitted.groupby)[rows]
    if len(lines := sorted(set(group))) > 1:
        raise ValueError(
            f"the start cells are of {len(lines)} groups of adata.obs[{fitted.groupby!r}], the first are "
            f"{', '.join(map(repr, lines[:5]))}; perturbations change each in its own way: start from cells of one."
        )
    measured = dict(zip(screen.conditions.parts, screen.labels, strict=True))
    names = [measured[parts] for parts in sorted(measured)] if candidates is None else listed(candidates)
    if combinations:
        alone = sorted(parts[0] for parts in measured if len(parts) == 1)
        species = species_of(list(map(str, reading.var(adata).index)), fitted.model.vocabulary, reading.species)
        asked = [naming_of(fitted, names, species).parts(name) for name in names]
        known = screen.conditions.part_names
        called = same_genes(set().union(*asked), known, fitted.model.vocabulary, species, "candidates")
        named = {tuple(sorted(called.get(part, part) for part in parts)) for parts in asked}
        names += [fitted.separator.join(pair) for pair in itertools.combinations(alone, 2) if pair not in named]
    targets = requested(fitted, adata, reading, group, names, None, dose, argument="candidates")

    source = open_cells(adata, fitted.model, reading, empty="nan")
    expression, columns = source.log_normalised(), gene_columns(source.var.index, screen.genes)
    from_, to = (np.asarray(expression[states == name].mean(axis=0)).ravel()[columns] for name in (start, target))
    needed = to - from_
    length = float(np.linalg.norm(needed))
    if length < 1e-9:
        raise ValueError(f"{start!r} and {target!r} have the same mean expression: there is no change to look for.")
    controls = controls_of(source, expression, rows, group, fitted.model, device)
    conditions = targets.conditions
    change = fitted.predict(conditions, controls).change
    along = change @ needed / length
    frame = pd.DataFrame(
        {
            "perturbation": targets.names,
            "n_parts": conditions.n_parts,
            "n_seen": conditions.n_seen(screen.conditions),
            "trained": [parts in measured for parts in conditions.parts],
            "cosine": along / np.maximum(np.linalg.norm(change, axis=1), 1e-12),
            "reached": along / length,
            "distance": np.linalg.norm(needed - change, axis=1) / length,
        }
    )
    return frame.sort_values("cosine", ascending=False, kind="stable").reset_index(drop=True)
