"""How near predictions of a fold come to what was observed, and the means of that."""

from __future__ import annotations

import math

import anndata as ad
import numpy as np
import scipy.sparse as sp
from _judge import over_seeds
from _screens import CONDITION, GROUP, Split

import scdiva as sd
import scdiva._constants as C
from scdiva.data.cells import log_normalised
from scdiva.metrics.perturbation import discrimination_matrix

NETWORK = "scdiva"
"""The method, in the frame of `tl.score_perturbation`, that is no baseline."""
METRICS = (
    "pearson_delta", "pearson_delta_top20", "pearson_delta_top100", "mse", "mse_top20", "wmse", "sign_accuracy",
    "hit_rate_20",
)  # fmt: skip
ABOVE_MEAN = "pearson_delta_mean"
"""The first of them with changes measured from the mean over the training perturbations."""
DISCRIMINATION, AMONG_ALL, AMONG_PART = "discrimination", "discrimination_all", "discrimination_part"
AMONG = {
    DISCRIMINATION: ("group", "fold"),
    AMONG_ALL: ("group",),
    AMONG_PART: ("group", "n_parts", "n_seen"),
}
"""What the conditions among which one is ranked have in common."""
COVERAGE = "coverage"
"""Share of the expressed genes whose mean lies in the predicted interval of 95%, the observed mean's error included."""
EXPRESSED = 0.05
"""Log-normalised mean from which on a gene counts as expressed there."""
ALL_METRICS = (*METRICS, ABOVE_MEAN, *AMONG, COVERAGE)


def conditions(predicted: ad.AnnData, observed: ad.AnnData) -> list[dict]:
    """A row for each method and condition that it is defined for: `METRICS`, `ABOVE_MEAN`, and `means`.

    Those are of the prediction and of what was observed.
    """
    frame = sd.tl.score_perturbation(predicted, observed)
    notes = predicted.uns[C.UNS][C.PERTURBATION]
    place = {str(name): number for number, name in enumerate(notes["condition"])}
    values, var = log_normalised(observed)
    values = values[:, var.index.get_indexer(predicted.var_names)]
    above = frame[frame["reference"] == "mean"].set_index(["method", "condition"])["pearson_delta"]
    rows = []
    # a baseline that is not defined for a condition has NaN for it
    defined = frame[(frame["reference"] == "control") & frame["pearson_delta"].notna()]
    for row in defined.to_dict("records"):
        here = observed.obs[CONDITION] == row["perturbation"]
        if row["group"]:
            here &= observed.obs[GROUP] == row["group"]
        key = C.VARM_MEAN if row["method"] == NETWORK else C.VARM_BASELINE + row["method"]
        predicted_mean = np.asarray(predicted.varm[key])[:, place[row["condition"]]]
        cells = values[here.to_numpy()]
        means = (predicted_mean, np.asarray(cells.mean(axis=0)).ravel())
        names = ("method", "condition", "group", "n_parts", "n_seen", "n_cells", *METRICS)
        of_mean = float(above[row["method"], row["condition"]])
        rows.append({**{name: row[name] for name in names}, ABOVE_MEAN: of_mean, "means": means})
        if row["method"] == NETWORK and C.VARM_SD in predicted.varm:
            sd_ = np.asarray(predicted.varm[C.VARM_SD])[:, place[row["condition"]]]
            rows[-1][COVERAGE] = _covered(*means, sd_, cells)
    return rows


def _covered(value: np.ndarray, mean: np.ndarray, sd_: np.ndarray, cells: sp.csr_matrix) -> float:
    """Share of expressed genes within 1.96 standard deviations."""
    squares = np.asarray(cells.multiply(cells).mean(axis=0)).ravel()
    error = np.maximum(squares - mean**2, 0.0) / max(1, cells.shape[0] - 1)
    there = (mean > EXPRESSED) & np.isfinite(sd_)  # of a baseline's mean nothing is said of how sure it is
    return float((np.abs(value - mean) <= 1.96 * np.sqrt(sd_**2 + error))[there].mean()) if there.any() else math.nan


def asked_for(row: dict, by: Split) -> bool:
    """Whether a condition is of the kind that the split is about; of singles, combinations are held out as well."""
    return by == "group" or (row["n_parts"] > 1) == (by == "combination")


def with_discrimination(rows: list[dict], by: Split) -> list[dict]:
    """The rows of all folds of a seed with the scores of `AMONG` in the place of the means.

    The rank of the true condition by mean absolute difference, among those of its group that the split is about and
    that its fold held out, or all folds of the seed, or all of them with as many parts seen. The same prediction for
    all conditions of a fold scores 0.5 in the first. In the others it scores less, as the mean over the other
    conditions is farther from what was held out.
    """
    wanted = [row for row in rows if asked_for(row, by)]
    for name, keys in AMONG.items():
        places: dict[tuple, list[dict]] = {}
        for row in wanted:
            places.setdefault(tuple(row[key] for key in keys), []).append(row)
        for some in places.values():
            _rank(some, name)
    return [{key: value for key, value in row.items() if key != "means"} for row in rows]


def _rank(rows: list[dict], name: str) -> None:
    """Write the rank of each method's predictions among the conditions of these rows."""
    observed = {row["condition"]: row["means"][1] for row in rows}
    names = list(observed)
    if len(names) < 2:
        return
    for method in {row["method"] for row in rows}:
        own = [row for row in rows if row["method"] == method]
        # what a method does not predict has a line of its own in the matrix, which is not read
        guesses = {**observed, **{row["condition"]: row["means"][0] for row in own}}
        ranks = discrimination_matrix(np.stack([guesses[one] for one in names]), np.stack(list(observed.values())))
        for row in own:
            number = names.index(row["condition"])
            row[name] = float(ranks[number, number])


def part_of(row: dict, by: Split) -> str:
    """Which part of the conditions a row belongs to: its group, or how many of its parts were seen singly."""
    if by == "group":
        return row["group"]
    return "singles" if row["n_parts"] == 1 else f"{row['n_parts']} parts, {row['n_seen']} seen"


def _means(rows: list[dict]) -> dict:
    """Mean of each metric over conditions; a condition that several folds hold out counts as one."""
    by_condition: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        by_condition.setdefault((row["group"], row["condition"]), []).append(row)
    found: dict = {"n_conditions": len(by_condition)}
    for name in ALL_METRICS:
        values = [
            float(np.mean(there))
            for some in by_condition.values()
            if (there := [row[name] for row in some if math.isfinite(row.get(name, math.nan))])
        ]
        if values:
            found[name] = float(np.mean(values))
    return found


def summary(rows: list[dict], by: Split) -> dict:
    """Of one method: mean over conditions, then mean and standard deviation over seeds; means of parts in `each`."""
    seeds = sorted({row["seed"] for row in rows})
    runs = [_means([row for row in rows if row["seed"] == seed and asked_for(row, by)]) for seed in seeds]
    found: dict = {"n_conditions": min(run["n_conditions"] for run in runs)}
    for name in ALL_METRICS:
        if all(name in run for run in runs):
            found |= over_seeds(name, [run[name] for run in runs])
    each = {}
    for part in sorted({part_of(row, by) for row in rows}):
        of_part = [_means([row for row in rows if row["seed"] == seed and part_of(row, by) == part]) for seed in seeds]
        of_part = [run for run in of_part if run["n_conditions"]]
        keys = [key for key in of_part[0] if all(key in run for run in of_part)]
        each[part] = {"n_conditions": max(run["n_conditions"] for run in of_part), "n_seeds": len(of_part)}
        for key in (key for key in keys if key != "n_conditions"):
            each[part] |= over_seeds(key, [run[key] for run in of_part])
    return {**found, "each": each}
