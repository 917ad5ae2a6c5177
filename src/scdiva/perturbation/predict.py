"""Predicted cells of perturbations, and perturbations ranked by their predicted change."""

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
from scdiva.data.genes import InputOptions, check_unique
from scdiva.perturbation.conditions import ScreenDesign, gene_filter, same_genes, species_of, whole_names
from scdiva.perturbation.model import PerturbationModel
from scdiva.perturbation.screen import Conditions, Controls, OpenScreen, controls_of, group_names, refuse_unknown

FEW = 20
"""Number of control cells of a group below which there is a warning."""

Matrix = NDArray[np.float64]


class Targets(NamedTuple):
    """Conditions to predict.

    Attributes
    ----------
    conditions
        Conditions, group by group, under the names of the screen; groups of the screen keep their number, new groups
        follow.
    names, groups
        Requested name of each perturbation, and name of its group.
    requested
        Parts under the requested names.
    """

    conditions: Conditions
    names: list[str]
    groups: list[str]
    requested: list[tuple[str, ...]]


def find_targets(
    source: OpenScreen | PerturbationModel,
    adata: AnnData,
    reading: InputOptions,
    present: Iterable[str],
    predict: Sequence[str] | str | None,
    groups: Sequence[str] | str | None,
    dose: float | Sequence[float] | None,
    *,
    argument: str = "predict",
    add_pairs: bool = False,
) -> Targets:
    """Find the requested conditions; expression is not read.

    Parameters
    ----------
    source
        The screen, or the fitted model.
    adata, reading
        The cells, and how their matrix is read.
    present
        Groups of the control cells.
    predict, groups, dose
        As for :func:`scdiva.tl.predict_perturbation`. None: all measured perturbations, all groups with control cells,
        the median dose.
    argument
        Name of `predict` in messages.
    add_pairs
        Whether to add all pairs of genes and labels that were measured alone.

    Raises
    ------
    ValueError
        If no perturbation or the control is requested, anything is requested twice, a perturbation is unknown, a group
        has no control cells, a dose is not above 0, gene names repeat, or genes of the screen are missing.
    """
    screen, design, vocabulary = source.screen, source.design, source.model.vocabulary
    genes, present, measured = reading.var(adata).index, sorted(set(present)), screen.conditions
    check_unique(genes)
    gene_columns(genes, screen.genes)
    species = species_of(list(map(str, genes)), vocabulary, reading.species)
    if predict is None:
        labels = dict(zip(measured.parts, screen.labels, strict=True))
        requested = parts = sorted(labels)
        names = [labels[of_one] for of_one in parts]
    else:
        names = listed(predict)
        query_design = design.with_whole_names(names, gene_filter(vocabulary, species), frozenset(screen.genes))
        requested = [query_design.parts(name) for name in names]
        renamed = same_genes(set().union(*requested), measured.part_names, vocabulary, species, argument)
        for name, gene in renamed.items():
            logger.info("%s: %r is the measured gene %r", argument, name, gene)
        parts = distinct_parts(names, query_design, argument, screen.labels, renamed) if names or not add_pairs else []
    if add_pairs:
        alone = sorted(of_one[0] for of_one in set(measured.parts) if len(of_one) == 1)
        pairs = [pair for pair in itertools.combinations(alone, 2) if pair not in parts]
        requested, parts = [*requested, *pairs], [*parts, *pairs]
        names = [*names, *map(design.separator.join, pairs)]
    for name, value, by in (("dose", dose, "dose_key"), ("groups", groups, "groupby")):
        if value is not None and not getattr(design, by):
            raise ValueError(f"{name} requires a model that was fitted with {by}=. Fit it with {by}=, or omit {name}.")
    doses = [float(np.median(measured.dose))] if dose is None else np.atleast_1d(dose).astype(float).tolist()
    if not doses or not all(0 < value < np.inf for value in doses):
        raise ValueError(f"dose must be a number above 0, or several; got {dose!r}.")
    refuse_twice(doses, "dose")
    refuse_unknown(source.model, parts, species, measured.part_names)
    chosen_groups = wanted_groups(groups, present, "have no control cells in adata")
    number = {name: i for i, name in enumerate(dict.fromkeys((*screen.groups, *present)))}
    rows = list(itertools.product(chosen_groups, zip(parts, names, strict=True), doses))
    conditions = Conditions.of((of_one, number[group], value) for group, (of_one, _), value in rows)
    return Targets(conditions, [name for _, (_, name), _ in rows], [group for group, _, _ in rows], requested)


def distinct_parts(
    names: Sequence[str], design: ScreenDesign, argument: str, measured: Collection[str], renamed: Mapping[str, str]
) -> list[tuple[str, ...]]:
    """Split the names of perturbations into parts, under the names of the screen.

    Parameters
    ----------
    names
        The perturbations.
    design
        How labels are split.
    argument
        Name of the argument in messages.
    measured
        Labels of the screen.
    renamed
        Names of the screen for parts that have another one there (:func:`same_genes`).

    Raises
    ------
    ValueError
        If there is no perturbation, one is the control, one is named twice, or one that is not a label of the screen
        contains a part twice.
    """
    if not names:
        raise ValueError(f"{argument} is empty; pass at least one perturbation.")
    parts = [tuple(sorted({renamed.get(part, part) for part in design.parts(name)})) for name in names]
    if () in parts:
        raise ValueError(
            f"{argument} has {names[parts.index(())]!r}, which is not a perturbation. Pass genes or labels other than "
            "the control."
        )
    for name, of_one in zip(names, parts, strict=True):
        pieces = [renamed.get(part, part) for part in design.split(name)]
        if name not in measured and (twice := [part for part in of_one if pieces.count(part) > 1]):
            raise ValueError(
                f"{argument} holds {name!r}, which names {twice[0]!r} twice: pass {design.separator.join(of_one)!r}."
            )
    if len(set(parts)) < len(parts):
        twice_named = next(name for name, of_one in zip(names, parts, strict=True) if parts.count(of_one) > 1)
        raise ValueError(
            f"{argument} holds {twice_named!r} more than once. Perturbations are equal in any order of their parts and "
            "by any name of a gene; pass each once."
        )
    return parts


def predicted_cells(
    fitted: PerturbationModel, targets: Targets, controls: Controls, n_cells: int, seed: int
) -> AnnData:
    """Predict the cells that :func:`scdiva.tl.predict_perturbation` returns.

    Parameters
    ----------
    fitted, targets, controls
        The fitted model, the conditions to predict, and the control cells.
    n_cells
        As for :func:`scdiva.tl.predict_perturbation`.
    seed
        Seed of the choice of control cells, and of the cells that gain or lose a gene.

    Warns
    -----
    UserWarning
        If a group has fewer than 20 control cells.
    """
    screen, design, conditions = fitted.screen, fitted.design, targets.conditions
    columns = gene_columns(controls.var.index, screen.genes)
    _warn_of_few(controls, list(dict.fromkeys(targets.groups)), bool(design.groupby))
    predicted = fitted.predict(conditions, controls)
    start = controls.means[:, columns].astype(np.float64)[[controls.groups.index(name) for name in targets.groups]]
    values, origin = [], []
    for i, group in enumerate(progress_bar(targets.groups, desc="predicting", unit="condition")):
        # the same control cells for every perturbation
        rng = np.random.default_rng(step_seed(seed, 0, f"control cells of {group}"))
        rows = controls.rows[np.sort(rng.permutation(controls.of_group(group))[:n_cells])]
        stream = f"cells of {sorted(conditions.parts[i])} in {group} at {float(conditions.dose[i])}"
        rng = np.random.default_rng(step_seed(seed, 0, stream))
        cells = controls.expression[rows][:, columns].toarray()
        values.append(shift_cells(cells, start[i] + predicted.change[i], screen.level, rng))
        origin.append(controls.names[rows])
    several_doses = len(set(conditions.dose)) > 1
    labels = [
        name + (f" in {group}" if design.groupby else "") + (f" at {dose:.15g}" if several_doses else "")
        for name, group, dose in zip(targets.names, targets.groups, conditions.dose.tolist(), strict=True)
    ]
    condition, control_cell = np.repeat(np.arange(len(values)), [len(part) for part in values]), np.concatenate(origin)
    obs = pd.DataFrame(
        {
            C.OBS_CONDITION: pd.Categorical.from_codes(condition, categories=np.array(labels, dtype=object)),
            C.OBS_CONTROL_CELL: control_cell,
        },
        index=[f"{labels[i]} {name}" for i, name in zip(condition, control_cell, strict=True)],
    )
    names, groups = np.array(targets.names, dtype=object), np.array(targets.groups, dtype=object)
    for key, column in ((design.perturbation_key, names), (design.groupby, groups)):
        if key:
            obs[key] = pd.Categorical(column[condition], categories=list(dict.fromkeys(column)))
    if design.dose_key:
        obs[design.dose_key] = conditions.dose[condition]
    result = AnnData(np.vstack(values).astype(np.float32), obs=obs, var=controls.var.iloc[columns].copy())
    changes = {C.VARM_MEAN: predicted.change, C.VARM_CONTROL: np.zeros_like(start)}
    changes |= {C.VARM_BASELINE + name: change for name, change in predicted.baselines.items()}
    means = {key: np.maximum(start + change, 0.0) for key, change in changes.items()}
    has_sd = np.array([name == C.EXPECTED for name in predicted.base])
    means[C.VARM_SD] = np.where(has_sd[:, None], predicted.sd, np.nan)
    for key, part in means.items():
        result.varm[key] = np.asarray(part).T.astype(np.float32)
    is_measured = conditions.same(screen.conditions) & (conditions.group[:, None] == screen.conditions.group)
    result.uns[C.UNS] = {
        C.PERTURBATION: {
            **design.arguments,
            "base": np.array(predicted.base, dtype=object),
            "condition": np.array(labels, dtype=object),
            "perturbation": names,
            "group": groups,
            "dose": conditions.dose,
            "n_parts": conditions.n_parts,
            "n_seen": conditions.n_seen(screen.conditions),
            "trained": is_measured.any(axis=1),
            **{name: dict(value) if isinstance(value, dict) else value for name, value in fitted.notes.items()},
            **whole_names([*targets.requested, *conditions.parts, *screen.conditions.parts], design.separator),
        }
    }
    return result


def gene_columns(names: pd.Index, genes: tuple[str, ...]) -> np.ndarray:
    """Columns of the screen's genes, in the order of the screen.

    Parameters
    ----------
    names
        Names of the columns.
    genes
        Genes of the screen.

    Raises
    ------
    ValueError
        If a gene is missing.
    """
    remedy = ": a fitted model requires cells with all genes of its screen"
    refuse_absent(genes, names, "genes of the screen are not in adata.var_names", remedy, ValueError)
    return np.asarray(pd.Index(names).get_indexer(list(genes)))


def _warn_of_few(controls: Controls, groups: list[str], is_grouped: bool) -> None:
    small = {name: n for name in groups if (n := len(controls.of_group(name))) < FEW}
    if small:
        name, n = next(iter(small.items()))
        where = f"{len(small)} of {len(groups)} groups have fewer than {FEW} control cells (first: {name!r} with {n})"
        warn(
            f"{where if is_grouped else f'adata has {n} control cells'}: at most so many cells are predicted of each "
            "condition, and the mean that changes are added to is uncertain."
        )


def shift_cells(cells: Matrix, mean: Matrix, level: NDArray[np.floating], rng: np.random.Generator) -> Matrix:
    r"""Change the mean of each gene by the number of cells that express it, then by its level in these cells.

    A gene's mean depends on the share p of cells that express it. For Poisson counts, this share changes from p to
    :math:`1 - (1 - p)^{\mu'/\mu}` when the mean changes from :math:`\mu` to :math:`\mu'`. Cells that lose or gain the
    gene are drawn at random; a cell that gains it gets the value of a random cell that expresses it. All values are
    then scaled to the requested mean.

    Parameters
    ----------
    cells
        Log-normalised expression, `(n_cells, n_genes)`.
    mean
        Mean to reach, `(n_genes,)`. It corrects the sampling error of the drawn control cells, too.
    level
        Mean of a gene over the cells that express it, `(n_genes,)`; the value of genes that none of `cells` expresses.
    rng
        Random generator.

    Returns
    -------
    float64 `(n_cells, n_genes)`, at least 0. The mean of a gene is `mean`, or 0 if `mean` is negative.
    """
    n, before = len(cells), cells.mean(axis=0)
    target = np.maximum(mean, 0.0)
    on = cells > 0
    n_on = on.sum(axis=0)
    fold = np.divide(target, before, out=np.zeros_like(target), where=before > 0)
    share = np.where(n_on > 0, 1 - (1 - n_on / n) ** fold, np.minimum(target / np.maximum(level, 1e-12), 1.0))
    u = rng.random(len(target))  # one for every gene, so that genes do not influence each other's draws
    k = np.where(target > 1e-9, np.clip(np.floor(share * n + u), 1, n), 0).astype(np.int64)
    key, donor = rng.random(cells.shape), rng.random(cells.shape)
    shifted = cells.copy()

    loses = np.flatnonzero(k < n_on)
    rank = rankdata(np.where(on[:, loses], key[:, loses], 2.0), "ordinal", axis=0)
    shifted[:, loses] = np.where(rank <= (n_on - k)[loses], 0.0, shifted[:, loses])

    gains = np.flatnonzero(k > n_on)
    off = ~on[:, gains]
    rank = rankdata(np.where(off, key[:, gains], 2.0), "ordinal", axis=0)
    expressing_first = np.argsort(off, axis=0, kind="stable")
    row = np.take_along_axis(expressing_first, (donor[:, gains] * n_on[gains]).astype(np.int64), axis=0)
    value = np.where(n_on[gains] > 0, np.take_along_axis(cells[:, gains], row, axis=0), level[gains])
    shifted[:, gains] = np.where(rank <= (k - n_on)[gains], value, shifted[:, gains])

    after = shifted.mean(axis=0)
    return np.asarray(shifted * np.divide(target, after, out=np.zeros_like(target), where=after > 0))


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
    """Rank perturbations; see :func:`scdiva.tl.rank_perturbations` for the result and the errors.

    Parameters
    ----------
    adata, state_key, start, target, candidates, combinations, dose
        As for :func:`scdiva.tl.rank_perturbations`.
    fitted
        The fitted model.
    device, reading
        Torch device, and how the matrix is read.
    """
    screen, design = fitted.screen, fitted.design
    states = read_labels(adata, state_key)
    for name in (start, target):
        if name not in states:
            shown = ", ".join(map(repr, sorted(set(states.tolist()))[:10]))
            raise ValueError(f"adata.obs[{state_key!r}] has no group {name!r}; it has {shown}.")
    if start == target:
        raise ValueError(f"start and target are both {start!r}. Pass two different groups.")
    if combinations and not design.separator:
        raise ValueError("combinations require a screen that was fitted with a separator. Fit with separator='+'.")
    rows = np.flatnonzero(states == start)
    group = group_names(adata, design.groupby)[rows]
    if len(names_of := sorted(set(group))) > 1:
        raise ValueError(
            f"the start cells are of {len(names_of)} groups of adata.obs[{design.groupby!r}] (first: "
            f"{', '.join(map(repr, names_of[:5]))}), which respond differently. Pass cells of one group."
        )
    measured = dict(zip(screen.conditions.parts, screen.labels, strict=True))
    names = [measured[parts] for parts in sorted(measured)] if candidates is None else listed(candidates)
    targets = find_targets(
        fitted, adata, reading, group, names, None, dose, argument="candidates", add_pairs=combinations
    )

    source = open_cells(adata, fitted.model, reading, empty="nan")
    expression, columns = source.log_normalised(), gene_columns(source.var.index, screen.genes)
    from_, to = (np.asarray(expression[states == name].mean(axis=0)).ravel()[columns] for name in (start, target))
    needed = to - from_
    length = float(np.linalg.norm(needed))
    if length < 1e-9:
        raise ValueError(f"{start!r} and {target!r} have the same mean expression. Pass groups that differ.")
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
