"""The arms of perturbation.py. A job runs in a process of its own, which this file is when it is called:

    python benchmarks/_perturbation_arms.py job.json

A job names the prepared cells (counts; `CONDITION` and `GROUP` in obs), the arm, how they are split, and the seeds;
each fold of each seed is a fit. The process writes the scores of its predictions (npz, one text `rows`: JSON, a row for
each seed, method and condition) and prints, as JSON, the mean seconds of a fit with its prediction, its peak resident
memory and the arm's notes. Importing libraries, reading the file, splitting and scoring are not in the seconds.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import anndata as ad
import numpy as np
from _perturbation_gears import gears
from _perturbation_scores import conditions, with_discrimination
from _process import Watch, do
from _screens import CONDITION, GROUP, n_folds

import scdiva as sd
from scdiva._constants import OBS_SPLIT


class Task(NamedTuple):
    """Cells to fit on, controls of every group among them; what to predict, in which group; and what was observed."""

    train: ad.AnnData
    asked: list[str]
    group: str | None
    observed: ad.AnnData


def task_of(adata: ad.AnnData, job: dict, seed: int, fold: int) -> Task:
    """A fold. The observed cells are those held out and the controls, which all arms are given as well.

    Of a group that is left out, perturbations that no other group has are not asked for.
    """
    split = ad.AnnData(obs=adata.obs.copy())
    grouped = job["by"] == "group"
    sd.pp.split_perturbations(
        split, CONDITION, job["control"], by=job["by"], groupby=GROUP if grouped else None, n_splits=job["folds"],
        fold=fold, separator=job["separator"], rng=seed,
    )  # fmt: skip
    test = (split.obs[OBS_SPLIT] == "test").to_numpy()
    control = (adata.obs[CONDITION].astype(str) == job["control"]).to_numpy()
    names = adata.obs[CONDITION].astype(str)
    asked = sorted(set(names[test]) & set(names[~test])) if grouped else sorted(set(names[test]))
    seen = test & names.isin(asked).to_numpy()
    (group,) = set(adata.obs.loc[test, GROUP]) if grouped else (None,)
    return Task(adata[~test].copy(), asked, group, adata[seen | control].copy())


def ours(task: Task, job: dict) -> tuple[ad.AnnData, dict]:
    """`tl.predict_perturbation` by its defaults."""
    grouped = {} if task.group is None else {"groupby": GROUP, "groups": [task.group]}
    predicted = sd.tl.predict_perturbation(
        task.train, CONDITION, job["control"], predict=task.asked, **grouped, separator=job["separator"],
        model=job["model"], rng=job["seed"],
    )  # fmt: skip
    return predicted, {"base": sorted(set(map(str, predicted.uns["scdiva"]["perturbation"]["base"])))}


ARMS = {"ours": ours, "gears": gears}
"""An arm takes a task and the job; it gives its prediction in the form of `tl.predict_perturbation`, and notes."""


def run(job: dict) -> tuple[dict[str, np.ndarray], dict]:
    """Do a job; gives the scored conditions, and the mean cost of a fit with the arm's notes."""
    adata = ad.read_h5ad(job["file"])
    rows: list[dict] = []
    costs, notes = [], {}
    for seed in job["seeds"]:
        of_seed = []
        for fold in range(n_folds(adata, job["by"], job["folds"])):
            task = task_of(adata, job, seed, fold)
            if not task.asked:
                continue
            watch = Watch()
            predicted, said = ARMS[job["arm"]](task, {**job, "seed": seed})
            costs.append(watch.cost())
            for key, value in said.items():
                notes.setdefault(key, []).append(value)
            of_seed += [{"fold": fold, **row} for row in conditions(predicted, task.observed)]
        rows += [{"seed": seed, **row} for row in with_discrimination(of_seed, job["by"])]
    cost = {key: float(np.mean([one[key] for one in costs])) for key in costs[0]}
    noted = {key: _noted(values) for key, values in notes.items()}
    cost |= {"peak_mib": max(one["peak_mib"] for one in costs), "fits": len(costs), **noted}
    return {"rows": np.array(json.dumps(rows))}, cost


def _noted(values: list) -> object:
    """A note of all fits: what they all say, or how often each was said."""
    texts = [", ".join(value) if isinstance(value, list) else value for value in values]
    counted = {text: texts.count(text) for text in sorted(set(texts))}
    return texts[0] if len(counted) == 1 else counted


if __name__ == "__main__":
    do(run)
