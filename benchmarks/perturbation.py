r"""Responses to held-out perturbations: predicted, compared with simple baselines and GEARS.

    python benchmarks/perturbation.py --data FOLDER [--sets norman_doubles ...] [--arms ours ours_finetune gears]
        [--seeds 0 1 2] [--gene-sets GMT] [--again]

- norman_doubles, norman_singles: K562 cells of Norman's screen (15 doubles and 18 singles, 500 genes). A fifth of the
  combinations is held out, or of the single perturbations with every combination that contains one of them; five folds.
- glioma: each of three cell lines is left out except for its control cells.
- kang_ifnb: the same for each cell type and IFN-beta.
- norman_2019_doubles, norman_2019_singles, adamson_2016, kang_2018: the complete screens. By default the sets whose
  file is in FOLDER are run; `sd.datasets.norman(download=True)` and others download them.

ours is `tl.predict_perturbation` with its defaults, ours_finetune the same with `finetune=True`; the baselines of its
result have their own rows. gears is GEARS (cell-gears 0.1.2) in its own environment, as it requires older scipy and
pandas; its perturbation graph is built from the gene sets of a GMT file (Jaccard index above 0.1), not from the gene
ontology, which it would download:

    pip install torch torch_geometric cell-gears==0.1.2 'scipy<1.14' 'pandas<3'; pip install scdiva
    python benchmarks/perturbation.py --data FOLDER --sets norman_doubles --arms gears --seeds 0 --gene-sets FILE

At most `--max-cells` cells of a perturbation in a group are used.
"""

from __future__ import annotations

import contextlib
import pickle
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
from _record import commit, machine, record, recorded_rows, replaced
from _run import apart, fingerprint, missing, over_seeds, parser_of

import scdiva as sd
import scdiva._constants as C
from scdiva.data.cells import log_normalised
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
    naming = ScreenDesign("", ("control",), SEPARATOR)
    labels = adata.obs["perturbation"].astype(str)
    names = {label: SEPARATOR.join(naming.parts(label)) or "control" for label in labels[kept].unique()}
    obs = pd.DataFrame({CONDITION: labels.map(names), GROUP: group.astype(str)})
    some = obs.reset_index(drop=True)[kept]
    sizes = some.groupby([GROUP, CONDITION], observed=True).size()
    enough = sizes[sizes >= MIN_CELLS].reset_index()
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
    seen = (test & names.isin(predict).to_numpy()) | (names == "control").to_numpy()
    (group,) = set(adata.obs.loc[test, GROUP]) if grouped else (None,)
    return Task(adata[~test].copy(), predict, group, adata[seen].copy())


def ours(task: Task, model: str, seed: int, finetune: bool = False) -> ad.AnnData:
    """`tl.predict_perturbation` with its defaults, or fine-tuned."""
    options: dict[str, Any] = {} if task.group is None else {"groupby": GROUP, "groups": [task.group]}
    options |= {"finetune": True} if finetune else {}
    return sd.tl.predict_perturbation(
        task.train, CONDITION, "control", predict=task.predict, separator=SEPARATOR, model=model, rng=seed, **options
    )


def gears(task: Task, gene_sets: Path, seed: int) -> ad.AnnData:
    """GEARS with its defaults on the log-normalised cells; a tenth of the perturbations selects the best epoch."""
    values, _ = log_normalised(task.train)
    labels = task.train.obs[CONDITION].astype(str).to_numpy()
    names = ["ctrl" if name == "control" else name if "+" in name else f"{name}+ctrl" for name in labels]
    obs = pd.DataFrame({CONDITION: names, "cell_type": "cells"}, index=task.train.obs_names)
    var = pd.DataFrame({"gene_name": task.train.var_names.to_numpy()}, index=task.train.var_names)
    cells, parts = ad.AnnData(sp.csr_matrix(values.astype(np.float32)), obs, var), _parts(task.predict)
    file = gene_sets.resolve()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        means = _gears_means(cells, parts, file, seed, Path(folder) / "data")
    of_label = {name: np.asarray(values[labels == name].mean(axis=0)).ravel() for name in np.unique(labels)}
    control, n = of_label.pop("control"), len(parts)
    train_mean = np.mean(list(of_label.values()), axis=0).astype(np.float32)
    predicted = ad.AnnData(
        means.astype(np.float32), obs={CONDITION: task.predict}, var=task.train.var.copy(),
        varm={C.VARM_MEAN: means.T, C.VARM_CONTROL: np.repeat(control[:, None], n, axis=1),
              C.VARM_BASELINE + "train_mean": np.repeat(train_mean[:, None], n, axis=1)},
    )  # fmt: skip
    predicted.uns[C.UNS] = {
        C.PERTURBATION: {
            "perturbation_key": CONDITION, "control": "control", "groupby": "", "dose_key": "",
            "separator": SEPARATOR, "condition": np.array(task.predict), "perturbation": np.array(task.predict),
            "group": np.array([""] * n), "dose": np.full(n, np.nan), "n_parts": np.array(list(map(len, parts))),
            "n_seen": np.array([sum(part in of_label for part in some) for some in parts]),
            "trained": np.zeros(n, dtype=bool),
        }
    }  # fmt: skip
    return predicted


def _parts(names: list[str]) -> list[list[str]]:
    return [name.split(SEPARATOR) for name in names]


def _gears_means(cells: ad.AnnData, predict: list[list[str]], file: Path, seed: int, data: Path) -> np.ndarray:
    import torch
    from gears import GEARS, PertData
    from gears.utils import make_GO

    data.mkdir()
    parts = {part for name in cells.obs[CONDITION] for part in name.split("+")} - {"ctrl"}
    genes = set(cells.var_names) | parts | {part for name in predict for part in name}
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
    found = network.predict(predict)
    return np.stack([found["_".join(parts)] for parts in predict])


ARMS = ("ours", "ours_finetune", "gears")


def scored(predicted: ad.AnnData, observed: ad.AnnData) -> pd.DataFrame:
    """A row for each method and condition with its `METRICS`."""
    frame = sd.tl.score_perturbation(predicted, observed)
    keys = ["method", "condition", "group"]
    of_mean = frame[frame["reference"] == "mean"].rename(columns={"pearson_delta": "pearson_delta_mean"})
    frame = frame[(frame["reference"] == "control") & frame["pearson_delta"].notna()]
    return frame.merge(of_mean[[*keys, "pearson_delta_mean"]], how="left", on=keys)


def fit(adata: ad.AnnData, by: str, arm: str, model: str, gene_sets: Path | None, seed: int) -> pd.DataFrame:
    """Scored conditions of all folds."""
    frames = []
    for fold in range(adata.obs[GROUP].nunique() if by == "group" else FOLDS):
        task = task_of(adata, by, seed, fold)
        if not task.predict:
            continue
        if arm == "gears":
            assert gene_sets is not None
            predicted = gears(task, gene_sets, seed)
        else:
            predicted = ours(task, model, seed, finetune=arm == "ours_finetune")
        frames.append(scored(predicted, task.observed))
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
    each = {name: over_seeds(some) for name, some in of_part.items()}
    every = pd.concat(held_out)
    by_unit = "condition" if len(set(every["condition"])) > 1 else "group"
    units = every.groupby(by_unit)["pearson_delta"].mean().round(4)
    return {**over_seeds(list(map(means, held_out))), "units": units.to_dict(), "each": each}


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, tuple(SCREENS), ARMS, ("heldout",))
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
            exists = any({**place, **same}.items() <= row.items() for row in recorded_rows(NAME))
            if (exists and not options.again) or (arm == "gears" and screen.by == "group"):
                continue
            if (why := missing(arm)) or (arm == "gears" and options.gene_sets is None):
                print(f"{name} {arm} not run: {why or '--gene-sets FILE is missing'}", flush=True)
                continue
            fits = [
                apart(fit, adata, screen.by, arm, options.model, options.gene_sets, seed, threads=options.threads)
                for seed in options.seeds
            ]
            cost = pd.DataFrame([cost for _, cost in fits]).mean().round(2).to_dict()
            for method in fits[0][0]["method"].unique():
                if method != NETWORK and arm != "ours":  # baselines have rows of their own
                    continue
                row = {**place, "arm": arm if method == NETWORK else method, **same, "commit": commit()}
                row |= {"processor": machine()["processor"], **(cost if method == NETWORK else {})}
                row |= summary([frame[frame["method"] == method] for frame, _ in fits], screen.by)
                record(NAME, replaced(recorded_rows(NAME), row, ("set", "arm")), model=options.model)
                print(f"{name} {row['arm']}: {' '.join(f'{key} {row[key]:.3f}' for key in METRICS[:2])}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
