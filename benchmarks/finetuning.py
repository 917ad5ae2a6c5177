"""Fine-tuned models compared with the defaults, random weights and baselines, on the fine-tuned tasks of the paper.

    python benchmarks/finetuning.py --data FOLDER [--part annotation integration perturbation] [--sets NAME ...]
        [--arms default "scdiva-paper-mini, fine-tuned" ...] [--seeds 0 1] [--epochs 3] [--again]

Datasets have at most 1,000 cells, and perturbations at most 500. Hidden labels, folds and scores are the same as in the
benchmarks of the tasks: macro-F1 of one query (annotation.py), accuracy of a hidden half of the labels by 15 labelled
neighbours (integration.py; PCA-20, Harmony and the frozen model use labels for this only), Pearson correlation of the
change of held-out doubles (perturbation.py). "random weights" is the network of scdiva-paper-mini with random weights.
`--model` is ignored.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import _run
import anndata as ad
import annotation
import integration
import numpy as np
import pandas as pd
import perturbation
import torch
from sklearn.neighbors import KNeighborsClassifier

import scdiva as sd
from scdiva._constants import N_SPECIAL
from scdiva.metrics.annotation import labelled
from scdiva.models import ScDiVa, load_model

NAME = "finetuning"
MINI, PAPER, RANDOM = "scdiva-mini", "scdiva-paper-mini", "random weights"
TUNED = {"fine-tuned": MINI, f"{PAPER}, fine-tuned": PAPER, f"{RANDOM}, fine-tuned": RANDOM}
"""Arms with `finetune=True`, and their models."""
OTHERS = {
    "annotation": {
        "default": ("ours", MINI), f"{PAPER}, probe": ("ours_probe", PAPER),
        "logistic regression": ("logistic", ""), "15-NN on PCA-20": ("pca20", ""),
    },
    "integration": {
        "default": ("ours", MINI), f"{PAPER}, frozen": ("scdiva", PAPER), "PCA-20": ("pca20", ""),
        "Harmony on PCA-20": ("harmony20", ""),
    },
    "perturbation": {"default": ("ours", MINI), "additive": ("ours", MINI), "matching_mean": ("ours", MINI)},
}  # fmt: skip
"""Other arms of each task: the arm of the task's script, and the model."""
ARMS = (*TUNED, *dict.fromkeys(arm for arms in OTHERS.values() for arm in arms))
QUERIES = {
    "kang_ifnb_2800": ("batch", ["STIM"]),
    "kang_pbmc_12k_1287g": ("batch", ["107", "1244", "1256", "1488"]),
    "panc8_small_500": ("assay", ["smartseq2"]),
    "sc_mixology_cell_lines": ("assay", ["Drop-seq"]),
    "baron2016_mouse_pancreas": ("batch", ["mouse2"]),
}
"""Column that splits each dataset of the part annotation, and its values for the query."""
SETS = {
    "annotation": tuple(QUERIES),
    "integration": ("kang_scgen_valid_1975", "panc8_small_500", "sc_mixology_cell_lines", "baron2016_mouse_pancreas"),
    "perturbation": ("norman_doubles",),
}
MAX_CELLS, SPLIT = 1000, "combination"


def network(model: str) -> str | ScDiVa:
    """A model by name, or the network of scdiva-paper-mini with random weights."""
    if model != RANDOM:
        return model
    trained = load_model(PAPER)
    random = ScDiVa(trained.config, generator=torch.Generator().manual_seed(0)).eval()
    random.vocabulary = trained.vocabulary
    return random


def annotate(adata: ad.AnnData, name: str, arm: str, tuning: dict[str, Any], seed: int) -> _run.Result:
    """Predicted types of the query."""
    split = QUERIES[name][0], {"query": QUERIES[name][1]}
    (task,) = annotation.tasks(adata, *split, None, seed)
    if arm == "15-NN on PCA-20":
        components, types = _run.pca(adata, 20, scale=False), adata.obs[_run.LABELS].astype(str).to_numpy()
        fitted = KNeighborsClassifier(annotation.NEIGHBORS).fit(components[task.labelled], types[task.labelled])
        return {"tasks": [{"predicted": fitted.predict(components[task.query])}]}
    if arm not in TUNED:
        return annotation.fit(adata, *split, None, *OTHERS["annotation"][arm], seed)
    reference, query = adata[task.labelled].copy(), adata[task.query].copy()
    del query.obs[_run.LABELS]
    sd.tl.annotate(query, _run.LABELS, reference, model=network(TUNED[arm]), rng=seed, **tuning)
    return {"tasks": [{"predicted": query.obs["scdiva_label"].to_numpy().astype(str)}]}


def integrate(adata: ad.AnnData, name: str, arm: str, tuning: dict[str, Any], seed: int) -> _run.Result:
    """Embedding of all cells, fitted with half of the labels; the other half is scored."""
    if arm == "default":
        return integration.fit(adata, "labelled", *OTHERS["integration"][arm], seed)
    if arm not in TUNED:
        return integration.fit(adata, "unlabelled", *OTHERS["integration"][arm], seed)
    types = adata.obs[_run.LABELS].astype(str).to_numpy().astype(object)
    types[integration.hidden_half(types, seed)] = _run.UNLABELLED
    adata.obs[_run.TRAINING_LABELS] = types.astype(str)
    sd.tl.integrate(
        adata, _run.BATCH, _run.TRAINING_LABELS, unlabeled_category=_run.UNLABELLED, model=network(TUNED[arm]),
        rng=seed, **tuning,
    )  # fmt: skip
    return {"embedding": adata.obsm["X_scdiva_integrated"]}


def perturb(adata: ad.AnnData, name: str, arm: str, tuning: dict[str, Any], seed: int) -> _run.Result:
    """Scored doubles of all folds by one method; without those of genes that scdiva-paper-mini lacks."""
    model, options = (TUNED[arm], tuning) if arm in TUNED else (MINI, {})
    frames = []
    match = load_model(PAPER).vocabulary.match
    for fold in range(perturbation.FOLDS):
        task = perturbation.task_of(adata, SPLIT, seed, fold)
        genes = [name.split(perturbation.SEPARATOR) for name in task.predict]
        predict = [perturbation.SEPARATOR.join(of) for of in genes if (match(of).tokens >= N_SPECIAL).all()]
        predicted = perturbation.ours(task._replace(predict=predict), network(model), seed, **options)
        frames.append(perturbation.scored(predicted, task.observed))
    frame = pd.concat(frames, ignore_index=True)
    return {"frame": frame[frame["method"] == (arm if arm in ("additive", "matching_mean") else perturbation.NETWORK)]}


FITS = {"annotation": annotate, "integration": integrate, "perturbation": perturb}


def scores(adata: ad.AnnData, part: str, name: str, result: _run.Result, seed: int) -> dict[str, Any]:
    """Mean score, and in `units` the score of each cell type or pair of perturbed genes."""
    if part == "annotation":
        tasks = annotation.tasks(adata, QUERIES[name][0], {"query": QUERIES[name][1]}, None, seed)
        summary = annotation.scores(adata, tasks, result["tasks"])
        return {"mean": summary["macro_f1"], "units": summary["f1"]}
    if part == "perturbation":
        summary = perturbation.summary([result["frame"]], SPLIT)
        return {"mean": summary["pearson_delta"], "units": summary["units"]}
    labels = adata.obs[_run.LABELS].astype(str).to_numpy()
    hidden = integration.hidden_half(labels, seed)
    reference = np.setdiff1d(np.flatnonzero(labelled(labels)), hidden)
    nearest = KNeighborsClassifier(annotation.NEIGHBORS).fit(result["embedding"][reference], labels[reference])
    return {"mean": float((nearest.predict(result["embedding"][hidden]) == labels[hidden]).mean())}


def main(argv: list[str] | None = None) -> int:
    parser = _run.parser_of(
        __doc__, dict.fromkeys(name for names in SETS.values() for name in names), ARMS, tuple(SETS)
    )
    parser.add_argument("--epochs", type=int, default=3, help="number of epochs of fine-tuning")
    parser.set_defaults(max_cells=MAX_CELLS, seeds=[0])
    options = parser.parse_args(argv)
    for part in options.part:
        for name in (name for name in SETS[part] if name in options.sets):
            if part == "perturbation":
                screen = perturbation.SCREENS[name]
                adata = perturbation.prepared(ad.read_h5ad(options.data / f"{screen.file}.h5ad"), screen)
            else:
                columns = QUERIES[name][0] if part == "annotation" else _run.BATCH
                adata = _run.prepared(ad.read_h5ad(options.data / f"{name}.h5ad"), options.max_cells, columns)
            inputs = {"cells": _run.fingerprint(adata, tuple(adata.obs)), "epochs": options.epochs}
            for arm in (arm for arm in (*TUNED, *OTHERS[part]) if arm in options.arms):
                _run.measure(
                    NAME, {"task": part, "set": name, "arm": arm}, inputs, FITS[part],
                    (adata, name, arm, {"finetune": True, "epochs": options.epochs}),
                    partial(scores, adata, part, name), options,
                )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
