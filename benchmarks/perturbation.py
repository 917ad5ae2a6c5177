"""Responses to held-out perturbations: predicted, compared with simple baselines.

    python benchmarks/perturbation.py --data FOLDER [--sets norman_doubles ...] [--seeds 0 1 2] [--again]

- norman_doubles, norman_singles: K562 cells of Norman's screen (15 doubles and 18 singles, 500 genes). A fifth of the
  combinations is held out, or of the single perturbations with every combination that contains one of them; five folds.
- glioma: each of three cell lines is left out except for its control cells.
- kang_ifnb: the same for each cell type and IFN-beta.
- norman_2019_doubles, norman_2019_singles, adamson_2016, kang_2018: the complete screens. By default the sets whose
  file is in FOLDER are run; `sd.datasets.norman(download=True)` and others download them.

ours is `tl.predict_perturbation` with its defaults (fine-tuned: finetuning.py); the baselines of its result have their
own rows. GEARS requires older scipy and pandas in its own environment; its rows are from the commit that they name.

At most `--max-cells` cells of a perturbation in a group are used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
from _record import commit, machine, record, recorded_rows, replaced
from _run import fingerprint, has_row, in_subprocess, over_seeds, parser_of

import scdiva as sd
import scdiva._constants as C
from scdiva.models import ScDiVa
from scdiva.perturbation.conditions import ScreenDesign

NAME = "perturbation"
CONDITION, GROUP, ALL = "condition", "group", "all"
MIN_CELLS, MAX_CELLS, FOLDS, SEPARATOR = 20, 500, 5, "+"
NETWORK = "scdiva"
"""The method, in the frame of `tl.score_perturbation`, that is not a baseline."""
METRICS = ["pearson_delta", "pearson_delta_top20", "pearson_delta_top100", "mse", "mse_top20", "wmse", "sign_accuracy",
           "hit_rate_20", "pearson_delta_mean"]  # fmt: skip
"""The last is the correlation of changes from the mean of all perturbations, the others from controls."""


class Screen(NamedTuple):
    """File, what is held out, column of groups, cells to keep, and the reader of `scdiva.datasets`."""

    file: str
    by: str
    groupby: str | None = None
    cell_types: tuple[str, ...] = ()
    reader: str = ""


DEVEL = "perturbench_devel_norman_mcfaline_5961_500g"
SCREENS = {
    "norman_doubles": Screen(DEVEL, "combination", cell_types=("k562",)),
    "norman_singles": Screen(DEVEL, "single", cell_types=("k562",)),
    "glioma": Screen(DEVEL, "group", "cell_type", ("A172", "T98G", "U87MG")),
    "kang_ifnb": Screen("kang_ifnb_2800", "group", "cell_type"),
    "norman_2019_doubles": Screen("norman_2019_raw", "combination", reader="norman"),
    "norman_2019_singles": Screen("norman_2019_raw", "single", reader="norman"),
    "adamson_2016": Screen("adamson_2016_upr_perturb_seq", "single", reader="adamson"),
    "kang_2018": Screen("kang_2018", "group", "cell_type", reader="kang"),
}


def prepared(adata: ad.AnnData, screen: Screen, max_cells: int = MAX_CELLS) -> ad.AnnData:
    """Counts with `CONDITION` and `GROUP`, always the same cells.

    Perturbations with fewer than 20 cells in a group are removed, and groups with fewer than 20 control cells.
    """
    mask = adata.obs["perturbation"].notna().to_numpy()
    if screen.cell_types:
        mask &= adata.obs["cell_type"].astype(str).isin(screen.cell_types).to_numpy()
    group = adata.obs[screen.groupby] if screen.groupby else pd.Series(ALL, index=adata.obs_names)
    mask &= group.notna().to_numpy()
    naming = ScreenDesign("", ("control",), SEPARATOR)
    labels = adata.obs["perturbation"].astype(str)
    names = {label: SEPARATOR.join(naming.parts(label)) or "control" for label in labels[mask].unique()}
    obs = pd.DataFrame({CONDITION: labels.map(names), GROUP: group.astype(str)})
    kept_obs = obs.reset_index(drop=True)[mask]
    sizes = kept_obs.groupby([GROUP, CONDITION], observed=True).size()
    enough = sizes[sizes >= MIN_CELLS].reset_index()
    control = enough[CONDITION] == "control"
    groups = set(enough.loc[control, GROUP]) & set(enough.loc[~control, GROUP])
    rows_of, rng = kept_obs.groupby([GROUP, CONDITION], observed=True).indices, np.random.default_rng(0)
    rows = [
        kept_obs.index.to_numpy()[rng.permutation(rows_of[group_name, condition])[: max_cells or None]]
        for group_name, condition in enough[[GROUP, CONDITION]].itertuples(index=False)
        if group_name in groups
    ]
    chosen = np.sort(np.concatenate(rows))
    counts = sp.csr_matrix(adata.X, dtype=np.float32)[chosen]
    return ad.AnnData(counts, obs=obs.iloc[chosen].astype("category"), var=adata.var[[]].copy())


class Task(NamedTuple):
    """Cells to fit on, controls included; perturbations to predict, in which group; and the observed cells."""

    train: ad.AnnData
    predict: list[str]
    group: str | None
    observed: ad.AnnData


def task_of(adata: ad.AnnData, by: str, seed: int, fold: int) -> Task:
    """A fold. In a group that is left out, only perturbations that another group has are predicted."""
    split, grouped = ad.AnnData(obs=adata.obs.copy()), by == "group"
    sd.pp.split_perturbations(
        split, CONDITION, "control", by=by, groupby=GROUP if grouped else None, n_splits=FOLDS, fold=fold,
        separator=SEPARATOR, rng=seed,
    )  # fmt: skip
    test = (split.obs[C.OBS_SPLIT] == "test").to_numpy()
    names = adata.obs[CONDITION].astype(str)
    predict = sorted(set(names[test]) & set(names[~test])) if grouped else sorted(set(names[test]))
    observed = (test & names.isin(predict).to_numpy()) | (names == "control").to_numpy()
    (group,) = set(adata.obs.loc[test, GROUP]) if grouped else (None,)
    return Task(adata[~test].copy(), predict, group, adata[observed].copy())


def ours(task: Task, model: str | ScDiVa, seed: int, **tuning: Any) -> ad.AnnData:
    """`tl.predict_perturbation` with its defaults, or with options of fine-tuning."""
    options = tuning if task.group is None else {"groupby": GROUP, "groups": [task.group], **tuning}
    return sd.tl.predict_perturbation(
        task.train, CONDITION, "control", predict=task.predict, separator=SEPARATOR, model=model, rng=seed, **options
    )


def scored(predicted: ad.AnnData, observed: ad.AnnData) -> pd.DataFrame:
    """A row for each method and condition with its `METRICS`."""
    frame = sd.tl.score_perturbation(predicted, observed)
    keys = ["method", "condition", "group"]
    of_mean = frame[frame["reference"] == "mean"].rename(columns={"pearson_delta": "pearson_delta_mean"})
    frame = frame[(frame["reference"] == "control") & frame["pearson_delta"].notna()]
    return frame.merge(of_mean[[*keys, "pearson_delta_mean"]], how="left", on=keys)


def fit(adata: ad.AnnData, by: str, model: str, seed: int) -> pd.DataFrame:
    """Scored conditions of all folds."""
    frames = []
    for fold in range(adata.obs[GROUP].nunique() if by == "group" else FOLDS):
        task = task_of(adata, by, seed, fold)
        if task.predict:
            frames.append(scored(ours(task, model, seed), task.observed))
    return pd.concat(frames, ignore_index=True)


def summary(frames: list[pd.DataFrame], by: str) -> dict:
    """Scores of one method over conditions, then over seeds; the same of each part in `each`.

    `units` has the correlation of each perturbation, or of each group where there is only one perturbation.

    Parts are groups, or singles and doubles by how many of their genes were seen alone. The first scores are those of
    the conditions that the split holds out: singles for folds of singles, doubles for doubles.
    """

    def means(frame: pd.DataFrame) -> dict:
        of_condition = frame.groupby(["group", "condition"])[METRICS].mean()  # several folds can hold one out
        return {"n_conditions": len(of_condition), **of_condition.mean().dropna().to_dict()}

    def part(row: pd.Series) -> str:
        if by == "group":
            return row["group"]
        return "singles" if row["n_parts"] == 1 else f"2 parts, {row['n_seen']} seen"

    frames = [frame.assign(part=frame.apply(part, axis=1)) for frame in frames]
    parts = sorted({name for frame in frames for name in frame["part"]})
    held_out = [frame[(by == "group") | ((frame["n_parts"] == 1) == (by == "single"))] for frame in frames]
    of_part = {name: [means(frame[frame["part"] == name]) for frame in frames] for name in parts}
    each = {name: over_seeds(runs) for name, runs in of_part.items()}
    every = pd.concat(held_out)
    by_unit = "condition" if len(set(every["condition"])) > 1 else "group"
    units = every.groupby(by_unit)["pearson_delta"].mean().round(4)
    return {**over_seeds(list(map(means, held_out))), "units": units.to_dict(), "each": each}


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, tuple(SCREENS), ("ours",), ("heldout",))
    parser.set_defaults(sets=None, max_cells=MAX_CELLS)
    options = parser.parse_args(argv)
    here = [name for name, screen in SCREENS.items() if (options.data / f"{screen.file}.h5ad").exists()]
    for name in options.sets or here:
        screen = SCREENS[name]
        file = options.data / f"{screen.file}.h5ad"
        adata = getattr(sd.datasets, screen.reader)(file) if screen.reader else ad.read_h5ad(file)
        adata = prepared(adata, screen, options.max_cells)
        inputs = {
            "split": screen.by, "cells": fingerprint(adata, (CONDITION, GROUP)), "folds": FOLDS, "n_cells": adata.n_obs,
            "seeds": options.seeds, **({} if options.max_cells == MAX_CELLS else {"max_cells": options.max_cells}),
        }  # fmt: skip
        if has_row(NAME, {"set": name, "arm": "ours", **inputs}, options):
            continue
        fits = [
            in_subprocess(fit, adata, screen.by, options.model, seed, threads=options.threads) for seed in options.seeds
        ]
        cost = pd.DataFrame([cost for _, cost in fits]).mean().round(2).to_dict()
        for method in fits[0][0]["method"].unique():
            row = {"set": name, "arm": "ours" if method == NETWORK else method, **inputs, "commit": commit()}
            row |= {"processor": machine()["processor"], **(cost if method == NETWORK else {})}
            row |= summary([frame[frame["method"] == method] for frame, _ in fits], screen.by)
            record(NAME, replaced(recorded_rows(NAME), row, ("set", "arm")), model=options.model)
            print(f"{name} {row['arm']}: {' '.join(f'{key} {row[key]:.3f}' for key in METRICS[:2])}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
