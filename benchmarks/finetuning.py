"""Fine-tuned models compared with frozen ones and with simple baselines, on the three fine-tuned tasks of the paper.

    python benchmarks/finetuning.py --data FOLDER [--tasks annotation integration perturbation] [--seeds 0 1 2]
        [--models scdiva-paper-mini scdiva-mini] [--max-cells 1000] [--epochs 3]

- annotation: the reference is one part of a dataset, the query another (condition, technology, donors). F1 of each cell
  type of the query with at least 10 cells; the interval is over types.
- integration: half of the cells of each batch have a label, which supervised methods are trained with. The others are
  labelled by their 15 nearest labelled cells of other batches. Accuracy for each batch; the interval is over batches.
- perturbation: doubles of Norman et al. (K562) that were held out. Pearson correlation of the mean
  change for each; the interval is over doubles.

Intervals are 95% percentiles of 2,000 bootstrap draws of the units, after averaging over seeds. Rows are written as
they are made; an arm whose row exists with the same seeds and cells is not run again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import scanpy as sc
import torch
from _record import commit, record, replaced, rows_so_far
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score
from sklearn.neighbors import KNeighborsClassifier

import scdiva as sd
from scdiva._constants import N_SPECIAL
from scdiva.models import ScDiVa, load_model

NAME = "finetuning"
ANNOTATION = {
    "kang_ifnb_2800": ("batch", ["STIM"]),
    "kang_pbmc_12k_1287g": ("batch", ["107", "1244", "1256", "1488"]),
    "panc8_small_500": ("assay", ["smartseq2"]),
    "sc_mixology_cell_lines": ("assay", ["Drop-seq"]),
    "baron2016_mouse_pancreas": ("batch", ["mouse2"]),
}
"""Column that splits each dataset, and the values that make up the query."""
INTEGRATION = ("kang_scgen_valid_1975", "panc8_small_500", "sc_mixology_cell_lines", "baron2016_mouse_pancreas")
SCREEN = "perturbench_devel_norman_mcfaline_5961_500g"
LEAST_OF_TYPE, DRAWS, N_COMPONENTS, N_NEIGHBORS = 10, 2000, 20, 15
NO_TYPE = ("unlabelled", "nan", "None")
Scores = dict[str, float]
"""A score for each unit that is drawn by the bootstrap: type, batch or condition."""


def interval(values: np.ndarray) -> list[float]:
    """95% interval of the mean by bootstrap over the units."""
    draws = np.random.default_rng(0).integers(len(values), size=(DRAWS, len(values)))
    return [round(float(bound), 4) for bound in np.percentile(values[draws].mean(axis=1), [2.5, 97.5])]


def read(data: Path, name: str, max_cells: int) -> ad.AnnData:
    """Labelled cells of a dataset, at most so many, always the same."""
    adata = ad.read_h5ad(data / f"{name}.h5ad")
    adata = adata[~adata.obs["cell_type"].astype(str).isin(NO_TYPE)]
    rows = np.sort(np.random.default_rng(0).permutation(adata.n_obs)[:max_cells])
    return adata[rows].copy()


def components(adata: ad.AnnData) -> np.ndarray:
    """20 principal components of 2,000 highly variable genes, log-normalised and not scaled."""
    work = ad.AnnData(adata.X.copy(), obs=adata.obs.copy(), var=adata.var.copy())
    sc.pp.normalize_total(work, target_sum=1e4)
    sc.pp.log1p(work)
    sc.pp.highly_variable_genes(work, n_top_genes=min(2000, work.n_vars))
    sc.pp.pca(work, n_comps=N_COMPONENTS)
    return work.obsm["X_pca"]


def random_network(model: str) -> ScDiVa:
    """The network of a model with random weights."""
    trained = load_model(model)
    network = ScDiVa(trained.config, generator=torch.Generator().manual_seed(0)).eval()
    network.vocabulary = trained.vocabulary
    return network


def annotation_arms(models: list[str], epochs: int) -> dict[str, Callable[[ad.AnnData, ad.AnnData, int], np.ndarray]]:
    """Predicted types of a query, given reference, query and seed."""

    def ours(**options: object) -> Callable[[ad.AnnData, ad.AnnData, int], np.ndarray]:
        def run(reference: ad.AnnData, query: ad.AnnData, seed: int) -> np.ndarray:
            sd.tl.annotate(query, "cell_type", reference, rng=seed, **options)
            return query.obs["scdiva_label"].astype(str).to_numpy()

        return run

    def logistic(reference: ad.AnnData, query: ad.AnnData, seed: int) -> np.ndarray:
        both = ad.concat([reference, query])
        sc.pp.normalize_total(both, target_sum=1e4)
        sc.pp.log1p(both)
        known = both[: reference.n_obs].copy()
        sc.pp.highly_variable_genes(known, n_top_genes=min(2000, known.n_vars))
        x = both[:, known.var["highly_variable"]].X.toarray()
        fitted = LogisticRegression(max_iter=1000).fit(x[: reference.n_obs], reference.obs["cell_type"].astype(str))
        return fitted.predict(x[reference.n_obs :])

    def knn(reference: ad.AnnData, query: ad.AnnData, seed: int) -> np.ndarray:
        x, n = components(ad.concat([reference, query])), reference.n_obs
        types = reference.obs["cell_type"].astype(str)
        return KNeighborsClassifier(N_NEIGHBORS).fit(x[:n], types).predict(x[n:])

    arms: dict[str, Callable[[ad.AnnData, ad.AnnData, int], np.ndarray]] = {
        "logistic regression": logistic, "15-NN on PCA-20": knn,
    }  # fmt: skip
    for model in models:
        arms[f"{model}, probe"] = ours(model=model, method="probe")
        arms[f"{model}, fine-tuned"] = ours(model=model, finetune=True, epochs=epochs)
    arms[f"{models[0]} with random weights, fine-tuned"] = ours(
        model=random_network(models[0]), finetune=True, epochs=epochs
    )
    arms["scdiva-mini, linear (default)"] = ours()
    return arms


def annotation(arm: Callable[..., np.ndarray], adata: ad.AnnData, split: tuple[str, list[str]], seed: int) -> Scores:
    """F1 of each type of the query."""
    asked = adata.obs[split[0]].astype(str).isin(split[1]).to_numpy()
    reference, query = adata[~asked].copy(), adata[asked].copy()
    truth = query.obs.pop("cell_type").astype(str).to_numpy()
    named = arm(reference, query, seed)
    types = [name for name in np.unique(truth) if (truth == name).sum() >= LEAST_OF_TYPE]
    return dict(zip(types, f1_score(truth, named, labels=types, average=None), strict=True))


def integration_arms(models: list[str], epochs: int) -> dict[str, Callable[[ad.AnnData, int], np.ndarray]]:
    """Embedding of cells with the columns batch and known_type, given a seed."""

    def harmony(adata: ad.AnnData, seed: int) -> np.ndarray:
        import harmonypy

        found = harmonypy.run_harmony(components(adata), adata.obs, ["batch"], random_state=seed).Z_corr
        return found.T if found.shape[0] == N_COMPONENTS else found

    def frozen(model: str) -> Callable[[ad.AnnData, int], np.ndarray]:
        return lambda adata, seed: sd.tl.embed(adata, model, copy=True).obsm["X_scdiva"]

    def fitted(labels_key: str | None, **options: object) -> Callable[[ad.AnnData, int], np.ndarray]:
        def run(adata: ad.AnnData, seed: int) -> np.ndarray:
            category = None if labels_key is None else "unknown"
            sd.tl.integrate(adata, "batch", labels_key, unlabeled_category=category, rng=seed, **options)
            return adata.obsm["X_scdiva_integrated"]

        return run

    arms: dict[str, Callable[[ad.AnnData, int], np.ndarray]] = {
        "PCA-20": lambda adata, seed: components(adata), "Harmony on PCA-20": harmony,
    }  # fmt: skip
    for model in models:
        arms[f"{model}, frozen"] = frozen(model)
        arms[f"{model}, fine-tuned with labels"] = fitted("known_type", model=model, finetune=True, epochs=epochs)
    arms[f"{models[0]} with random weights, fine-tuned with labels"] = fitted(
        "known_type", model=random_network(models[0]), finetune=True, epochs=epochs
    )
    arms["scdiva-mini, head with labels (default)"] = fitted("known_type")
    return arms


def integration(arm: Callable[..., np.ndarray], adata: ad.AnnData, seed: int) -> Scores:
    """Accuracy of held-out cells by their nearest labelled cells of other batches, for each batch."""
    types, batch = (adata.obs[key].astype(str).to_numpy() for key in ("cell_type", "batch"))
    hidden = np.random.default_rng([seed, 1]).random(adata.n_obs) < 0.5
    adata = adata.copy()
    adata.obs["known_type"] = np.where(hidden, "unknown", types)
    del adata.obs["cell_type"]
    x = np.asarray(arm(adata, seed))
    scores = {}
    for name in np.unique(batch):
        known, asked = ~hidden & (batch != name), hidden & (batch == name)
        named = KNeighborsClassifier(N_NEIGHBORS).fit(x[known], types[known]).predict(x[asked])
        scores[name] = accuracy_score(types[asked], named)
    return scores


def perturbation_arms(models: list[str], epochs: int) -> dict[str, dict[str, object]]:
    """Arguments of the fit; baselines come with each."""
    arms: dict[str, dict[str, object]] = {
        f"{model}, fine-tuned": {"model": model, "finetune": True, "epochs": epochs} for model in models
    }
    return {**arms, "expected response (default)": {}}


def known_doubles(screen: ad.AnnData, models: list[str]) -> list[str]:
    """Doubles of genes that all models know."""
    doubles = sorted({name for name in screen.obs["perturbation"].astype(str) if "+" in name})
    for model in models:
        vocabulary = load_model(model).vocabulary
        doubles = [name for name in doubles if (vocabulary.match(name.split("+")).tokens >= N_SPECIAL).all()]
    return doubles


def perturbation(options: dict[str, object], screen: ad.AnnData, doubles: list[str], seed: int) -> dict[str, Scores]:
    """Pearson correlation of the predicted change of held-out doubles, by method."""
    found: dict[str, Scores] = {}
    parts = np.array_split(np.random.default_rng(seed).permutation(doubles), 3)
    for part in parts:
        train = screen[~screen.obs["perturbation"].astype(str).isin(part)].copy()
        predicted = sd.tl.predict_perturbation(train, "perturbation", predict=list(part), rng=seed, **options)
        scores = sd.tl.score_perturbation(predicted, screen)
        for row in scores[scores["reference"] == "control"].itertuples():
            found.setdefault(row.method, {})[row.perturbation] = row.pearson_delta
    return found


def keep(row: dict, **notes: object) -> None:
    """Write a row in the place of the one that it replaces."""
    record(NAME, replaced(rows_so_far(NAME), row, ("task", "set", "arm")), **notes)
    print(f"{row['task']} {row['set']} {row['arm']}: {row['mean']:.3f} {row['interval']}, {row['cpu_seconds']} s CPU")


def row_of(task: str, name: str, arm: str, runs: list[Scores], seconds: float, n_cells: int) -> dict:
    """Mean over seeds of each unit's score, and its mean with an interval over the units."""
    units = sorted(runs[0])
    each = np.array([[run[unit] for unit in units] for run in runs])
    return {
        "task": task,
        "set": name,
        "arm": arm,
        "n_cells": n_cells,
        "n_seeds": len(runs),
        "mean": round(float(each.mean()), 4),
        "interval": interval(each.mean(axis=0)),
        "seed_means": [round(float(value), 4) for value in each.mean(axis=1)],
        "units": {unit: round(float(value), 4) for unit, value in zip(units, each.mean(axis=0), strict=True)},
        "cpu_seconds": round(seconds / len(runs), 1),
        "commit": commit(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=["annotation", "integration", "perturbation"])
    parser.add_argument("--models", nargs="+", default=["scdiva-paper-mini", "scdiva-mini"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max-cells", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=3, help="of fine-tuning")
    arguments = parser.parse_args()
    sd.settings.progress = False
    seeds, models, epochs = arguments.seeds, arguments.models, arguments.epochs
    notes = {"max_cells": arguments.max_cells, "seeds": seeds, "epochs": epochs}

    def there(task: str, name: str, arm: str) -> bool:
        alike = [row for row in rows_so_far(NAME) if (row["task"], row["set"], row["arm"]) == (task, name, arm)]
        return any(row["n_seeds"] >= len(seeds) for row in alike)

    def timed(task: str, name: str, arm: str, run: Callable[[int], Scores], n_cells: int) -> None:
        if there(task, name, arm):
            return
        begun = time.process_time()
        runs = [run(seed) for seed in seeds]
        keep(row_of(task, name, arm, runs, time.process_time() - begun, n_cells), **notes)

    if "annotation" in arguments.tasks:
        for name, split in ANNOTATION.items():
            adata = read(arguments.data, name, arguments.max_cells)
            for arm, call in annotation_arms(models, epochs).items():
                timed(
                    "annotation",
                    name,
                    arm,
                    lambda seed, c=call, a=adata, s=split: annotation(c, a, s, seed),
                    adata.n_obs,
                )
    if "integration" in arguments.tasks:
        for name in INTEGRATION:
            adata = read(arguments.data, name, arguments.max_cells)
            for arm, call in integration_arms(models, epochs).items():
                timed("integration", name, arm, lambda seed, c=call, a=adata: integration(c, a, seed), adata.n_obs)
    if "perturbation" in arguments.tasks:
        screen = ad.read_h5ad(arguments.data / f"{SCREEN}.h5ad")
        screen = screen[screen.obs["cell_type"].astype(str) == "k562"].copy()
        doubles = known_doubles(screen, models)
        for arm, options in perturbation_arms(models, epochs).items():
            if there("perturbation", "norman", arm):
                continue
            begun = time.process_time()
            runs = [perturbation(options, screen, doubles, seed) for seed in seeds]
            seconds = time.process_time() - begun
            for method in runs[0]:
                shown = arm if method == "scdiva" else method
                if method == "scdiva" or not options:
                    scores = [run[method] for run in runs]
                    keep(row_of("perturbation", "norman", shown, scores, seconds, screen.n_obs), **notes)


if __name__ == "__main__":
    main()
