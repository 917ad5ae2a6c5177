r"""Responses to held-out perturbations: predicted, compared with simple baselines and GEARS.

    python benchmarks/perturbation.py --data FOLDER [--sets norman_doubles ...] [--arms ours gears]
        [--seeds 0 1 2] [--gene-sets GMT] [--again]

- norman_doubles, norman_singles: K562 cells of Norman's screen (15 doubles and 18 singles, 500 genes). A fifth of the
  combinations is held out, or of the single perturbations with every combination that contains one of them; five folds.
- glioma: each of three cell lines is left out except for its control cells.
- kang_ifnb: the same for each cell type and IFN-beta.
- norman_2019_doubles, norman_2019_singles, adamson_2016, kang_2018: the complete screens. By default the sets whose
  file is in FOLDER are run; `sd.datasets.norman(download=True)` and others download them.

ours is `tl.predict_perturbation` by its defaults; the baselines of its result have their own rows. gears is GEARS
(cell-gears 0.1.2) in its own environment, as it requires older scipy and pandas; its perturbation graph is built from
the gene sets of a GMT file (Jaccard index above 0.1), not from the gene ontology, which it would download:

    pip install torch torch_geometric cell-gears==0.1.2 'scipy<1.14' 'pandas<3'; pip install scdiva
    python benchmarks/perturbation.py --data FOLDER --sets norman_doubles --arms gears --seeds 0 --gene-sets FILE

At most `--max-cells` cells of a perturbation in a group are used.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
from _record import commit, machine, record, replaced, rows_so_far
from _tasks import Found, apart, fingerprint, missing, over_seeds, parser_of

import scdiva as sd
import scdiva._constants as C
from scdiva.data.cells import log_normalised
from scdiva.metrics.perturbation import discrimination_matrix
from scdiva.perturbation.conditions import Naming

NAME = "perturbation"
CONDITION, GROUP, ALL = "condition", "group", "all"
LEAST_CELLS, MAX_CELLS, FOLDS, SEPARATOR = 20, 500, 5, "+"
NETWORK = "scdiva"
"""The method, in the frame of `tl.score_perturbation`, that is no baseline."""
METRICS = ("pearson_delta", "pearson_delta_top20", "pearson_delta_top100", "mse", "mse_top20", "wmse", "sign_accuracy",
           "hit_rate_20")  # fmt: skip
ABOVE_MEAN, DISCRIMINATION = "pearson_delta_mean", "discrimination"


class Screen(NamedTuple):
    """File, what is held out, column of groups, cells to keep, and the reader of `scdiva.datasets`."""

    file: str
    by: str
    groupby: str | None = None
    keep: dict[str, list[str]] | None = None
    reader: str = ""


DEVEL = "perturbench_devel_norman_mcfaline_5961_500g"
SCREENS = {
    "norman_doubles": Screen(DEVEL, "combination", keep={"cell_type": ["k562"]}),
    "norman_singles": Screen(DEVEL, "single", keep={"cell_type": ["k562"]}),
    "glioma": Screen(DEVEL, "group", "cell_type", {"cell_type": ["A172", "T98G", "U87MG"]}),
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
    kept = adata.obs["perturbation"].notna().to_numpy()
    for key, values in (screen.keep or {}).items():
        kept &= adata.obs[key].astype(str).isin(values).to_numpy()
    group = adata.obs[screen.groupby] if screen.groupby else pd.Series(ALL, index=adata.obs_names)
    kept &= group.notna().to_numpy()
    naming = Naming(("control",), SEPARATOR)
    labels = adata.obs["perturbation"].astype(str)
    names = {label: SEPARATOR.join(naming.parts(label)) or "control" for label in labels[kept].unique()}
    obs = pd.DataFrame({CONDITION: labels.map(names), GROUP: group.astype(str)})
    some = obs.reset_index(drop=True)[kept]
    sizes = some.groupby([GROUP, CONDITION], observed=True).size()
    enough = sizes[sizes >= LEAST_CELLS].reset_index()
    control = enough[CONDITION] == "control"
    groups = set(enough.loc[control, GROUP]) & set(enough.loc[~control, GROUP])
    by_place, rng = some.groupby([GROUP, CONDITION], observed=True).indices, np.random.default_rng(0)
    rows = [
        some.index.to_numpy()[rng.permutation(by_place[place[0], place[1]])[: max_cells or None]]
        for place in enough[[GROUP, CONDITION]].itertuples(index=False)
        if place[0] in groups
    ]
    chosen = np.sort(np.concatenate(rows))
    counts = sp.csr_matrix(adata.X, dtype=np.float32)[chosen]
    return ad.AnnData(counts, obs=obs.iloc[chosen].astype("category"), var=adata.var[[]].copy())


class Task(NamedTuple):
    """Cells to fit on, controls included; what to predict, in which group; and what was observed."""

    train: ad.AnnData
    asked: list[str]
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
    asked = sorted(set(names[test]) & set(names[~test])) if grouped else sorted(set(names[test]))
    seen = (test & names.isin(asked).to_numpy()) | (names == "control").to_numpy()
    (group,) = set(adata.obs.loc[test, GROUP]) if grouped else (None,)
    return Task(adata[~test].copy(), asked, group, adata[seen].copy())


def ours(task: Task, model: str, gene_sets: Path | None, seed: int) -> ad.AnnData:
    """`tl.predict_perturbation` by its defaults."""
    grouped: dict[str, Any] = {} if task.group is None else {"groupby": GROUP, "groups": [task.group]}
    return sd.tl.predict_perturbation(
        task.train, CONDITION, "control", predict=task.asked, **grouped, separator=SEPARATOR, model=model, rng=seed
    )


def gears(task: Task, model: str, gene_sets: Path | None, seed: int) -> ad.AnnData:
    """GEARS by its defaults on the log-normalised cells; a tenth of the perturbations selects the best epoch."""
    assert gene_sets is not None
    values, _ = log_normalised(task.train)
    labels = task.train.obs[CONDITION].astype(str).to_numpy()
    names = ["ctrl" if name == "control" else name if "+" in name else f"{name}+ctrl" for name in labels]
    cells = ad.AnnData(
        sp.csr_matrix(values.astype(np.float32)), obs={CONDITION: names, "cell_type": "cells"},
        var={"gene_name": task.train.var_names.to_numpy()},
    )  # fmt: skip
    cells.obs_names, cells.var_names = task.train.obs_names, task.train.var_names
    asked = [name.split(SEPARATOR) for name in task.asked]
    file = gene_sets.resolve()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        means = _gears_means(cells, asked, file, seed, Path(folder) / "data")
    of_label = {name: np.asarray(values[labels == name].mean(axis=0)).ravel() for name in np.unique(labels)}
    control = of_label.pop("control")
    train_mean = np.mean(list(of_label.values()), axis=0).astype(np.float32)
    n = len(task.asked)
    found = ad.AnnData(
        means.astype(np.float32), obs={CONDITION: task.asked}, var=task.train.var.copy(),
        varm={C.VARM_MEAN: means.T, C.VARM_CONTROL: np.repeat(control[:, None], n, axis=1),
              C.VARM_BASELINE + "train_mean": np.repeat(train_mean[:, None], n, axis=1)},
    )  # fmt: skip
    found.uns[C.UNS] = {
        C.PERTURBATION: {
            "perturbation_key": CONDITION, "control": "control", "groupby": "", "dose_key": "",
            "separator": SEPARATOR, "condition": np.array(task.asked), "perturbation": np.array(task.asked),
            "group": np.array([""] * n), "dose": np.full(n, np.nan),
            "n_parts": np.array([len(parts) for parts in asked]),
            "n_seen": np.array([sum(part in of_label for part in parts) for parts in asked]),
            "trained": np.zeros(n, dtype=bool),
        }
    }  # fmt: skip
    return found


def _gears_means(cells: ad.AnnData, asked: list[list[str]], file: Path, seed: int, data: Path) -> np.ndarray:
    import torch
    from gears import GEARS, PertData
    from gears.utils import make_GO

    data.mkdir()
    parts = {part for name in cells.obs[CONDITION] for part in name.split("+")} - {"ctrl"}
    genes = set(cells.var_names) | parts | {part for name in asked for part in name}
    sets: dict[str, set[str]] = {gene: set() for gene in genes}
    for line in file.read_text().splitlines():
        name, _, *members = line.split("\t")
        for gene in genes.intersection(members):
            sets[gene].add(name)
    (data / "gene2go_all.pkl").write_bytes(pickle.dumps({gene: some or {f"\t{gene}"} for gene, some in sets.items()}))
    (data / "genes.pkl").write_bytes(pickle.dumps(sorted(genes)))
    np.random.seed(seed)  # noqa: NPY002, GEARS uses the global state
    torch.manual_seed(seed)
    screen = PertData(str(data), gene_set_path=str(data / "genes.pkl"), default_pert_graph=False)
    screen.new_data_process("screen", adata=cells)
    screen.prepare_split("no_test", seed=seed)
    screen.get_dataloader(32, 128)
    network = GEARS(screen, device="cpu")
    make_GO(str(data), network.pert_list, screen.dataset_name, num_workers=1)  # by default it starts 25 processes
    network.model_initialize(hidden_size=64)
    network.train(epochs=20)
    found = network.predict(asked)
    return np.stack([found["_".join(parts)] for parts in asked])


ARMS = {"ours": ours, "gears": gears}


def conditions(predicted: ad.AnnData, observed: ad.AnnData) -> list[dict]:
    """A row for each method and condition: `METRICS`, `ABOVE_MEAN`, and predicted and observed `means`."""
    frame = sd.tl.score_perturbation(predicted, observed)
    place = {str(name): n for n, name in enumerate(predicted.uns[C.UNS][C.PERTURBATION]["condition"])}
    values, var = log_normalised(observed)
    values = values[:, var.index.get_indexer(predicted.var_names)]
    above = frame[frame["reference"] == "mean"].set_index(["method", "condition"])["pearson_delta"]
    rows = []
    defined = frame[(frame["reference"] == "control") & frame["pearson_delta"].notna()]
    for row in defined.to_dict("records"):
        cells = observed.obs[CONDITION] == row["perturbation"]
        if row["group"]:
            cells &= observed.obs[GROUP] == row["group"]
        key = C.VARM_MEAN if row["method"] == NETWORK else C.VARM_BASELINE + row["method"]
        guess = np.asarray(predicted.varm[key])[:, place[row["condition"]]]
        means = (guess, np.asarray(values[cells.to_numpy()].mean(axis=0)).ravel())
        names = ("method", "condition", "group", "n_parts", "n_seen", *METRICS)
        of_mean = float(above[row["method"], row["condition"]])
        rows.append({**{name: row[name] for name in names}, ABOVE_MEAN: of_mean, "means": means})
    return rows


def rank(rows: list[dict]) -> None:
    """Write the discrimination score of each method among the conditions of one fold and group."""
    observed = {row["condition"]: row["means"][1] for row in rows}
    names = list(observed)
    if len(names) < 2:
        return
    for method in {row["method"] for row in rows}:
        own = [row for row in rows if row["method"] == method]
        guesses = {**observed, **{row["condition"]: row["means"][0] for row in own}}
        ranks = discrimination_matrix(np.stack([guesses[one] for one in names]), np.stack(list(observed.values())))
        for row in own:
            number = names.index(row["condition"])
            row[DISCRIMINATION] = float(ranks[number, number])


def asked_for(row: dict, by: str) -> bool:
    """Whether a condition is of the kind that a split holds out: singles of a fold of singles, doubles of doubles."""
    return by == "group" or (row["n_parts"] == 1) == (by == "single")


def fit(adata: ad.AnnData, by: str, arm: str, model: str, gene_sets: Path | None, seed: int) -> Found:
    """Scored conditions of all folds."""
    rows = []
    for fold in range(adata.obs[GROUP].nunique() if by == "group" else FOLDS):
        task = task_of(adata, by, seed, fold)
        if not task.asked:
            continue
        found = conditions(ARMS[arm](task, model, gene_sets, seed), task.observed)
        for group in {row["group"] for row in found}:
            rank([row for row in found if row["group"] == group and asked_for(row, by)])
        rows += [{key: value for key, value in row.items() if key != "means"} for row in found]
    return {"rows": rows}


def means(rows: list[dict]) -> dict:
    """Mean of each metric over conditions; a condition that several folds hold out counts once."""
    by_condition: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        by_condition.setdefault((row["group"], row["condition"]), []).append(row)
    found: dict = {"n_conditions": len(by_condition)}
    for name in (*METRICS, ABOVE_MEAN, DISCRIMINATION):
        each = [[row[name] for row in some if math.isfinite(row.get(name, math.nan))] for some in by_condition.values()]
        if values := [float(np.mean(some)) for some in each if some]:
            found[name] = float(np.mean(values))
    return found


def part_of(row: dict, by: str) -> str:
    """Group of a condition, or how many of its parts were seen alone."""
    return row["group"] if by == "group" else "singles" if row["n_parts"] == 1 else f"2 parts, {row['n_seen']} seen"


def summary(runs: list[list[dict]], by: str) -> dict:
    """Scores of one method: mean over conditions, then over seeds; the same of each part in `each`."""
    found = over_seeds([means([row for row in run if asked_for(row, by)]) for run in runs])
    parts = sorted({part_of(row, by) for run in runs for row in run})
    of_part = {part: [means([row for row in run if part_of(row, by) == part]) for run in runs] for part in parts}
    return {**found, "each": {part: over_seeds(some) for part, some in of_part.items()}}


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, tuple(SCREENS), tuple(ARMS), ("heldout",))
    parser.add_argument("--gene-sets", type=Path, help="GMT file, for the graph of GEARS")
    parser.set_defaults(sets=None, max_cells=MAX_CELLS)
    options = parser.parse_args(argv)
    here = [name for name, screen in SCREENS.items() if (options.data / f"{screen.file}.h5ad").exists()]
    for name in options.sets or here:
        screen = SCREENS[name]
        file = options.data / f"{screen.file}.h5ad"
        adata = getattr(sd.datasets, screen.reader)(file) if screen.reader else ad.read_h5ad(file)
        adata = prepared(adata, screen, options.max_cells)
        same = {
            "split": screen.by, "cells": fingerprint(adata, (CONDITION, GROUP)), "folds": FOLDS, "n_cells": adata.n_obs,
            "seeds": options.seeds, **({} if options.max_cells == MAX_CELLS else {"max_cells": options.max_cells}),
        }  # fmt: skip
        for arm in options.arms:
            place = {"set": name, "arm": arm}
            done = any({**place, **same}.items() <= row.items() for row in rows_so_far(NAME))
            if (done and not options.again) or (arm == "gears" and screen.by == "group"):
                continue
            if (why := missing(arm)) or (arm == "gears" and options.gene_sets is None):
                print(f"{name} {arm} not run: {why or '--gene-sets FILE is missing'}", flush=True)
                continue
            runs, costs = [], []
            for seed in options.seeds:
                given = (adata, screen.by, arm, options.model, options.gene_sets, seed)
                found, cost = apart(fit, *given, threads=options.threads)
                runs.append(found["rows"])
                costs.append(cost)
            for method in dict.fromkeys(row["method"] for run in runs for row in run):
                if method != NETWORK and arm != "ours":
                    continue
                scores = summary([[row for row in run if row["method"] == method] for run in runs], screen.by)
                cost = {key: round(float(np.mean([one[key] for one in costs])), 2) for key in costs[0]}
                name_of = arm if method == NETWORK else method
                row = {**place, "arm": name_of, **same, "commit": commit(), "processor": machine()["processor"]}
                row |= {**(cost if method == NETWORK else {}), **scores}
                record(NAME, replaced(rows_so_far(NAME), row, ("set", "arm")), model=options.model)
                print(f"{name} {row['arm']}: {' '.join(f'{key} {row[key]:.3f}' for key in METRICS[:2])}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
