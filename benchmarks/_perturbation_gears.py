"""GEARS (cell-gears) as perturbation.py runs it: from the package, without its downloads.

Its graph of perturbations is made from the gene ontology, which it downloads. Where nothing can be downloaded, the same
graph is made from other gene sets in a GMT file (Reactome): an edge for a Jaccard index of more than 0.1, at most 20 to
a gene, as GEARS does it itself. A gene of no set has an edge to itself alone. What it gets of a perturbation that it
was not trained on is this graph.
"""

from __future__ import annotations

import contextlib
import pickle
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import scipy.sparse as sp
from _screens import CONDITION

import scdiva._constants as C
from scdiva.data.cells import log_normalised
from scdiva.data.conditions import Naming

if TYPE_CHECKING:
    from _perturbation_arms import Task

EPOCHS, BATCH_SIZE, TEST_BATCH_SIZE, HIDDEN = 20, 32, 128, 64
"""Of the package and its tutorial."""
CONTROL = "ctrl"
"""GEARS' name of it; a single perturbation is written `A+ctrl`, and `+` is its separator."""


def name_for_gears(name: str, control: str, separator: str) -> str:
    """A condition as GEARS writes it."""
    parts = name.split(separator)
    return CONTROL if name == control else "+".join(parts if len(parts) > 1 else [*parts, CONTROL])


def gene_sets(file: Path, genes: set[str]) -> dict[str, set[str]]:
    """The sets of each gene; a gene of none is alone in one of its own, which no set of the file is called."""
    found: dict[str, set[str]] = {gene: set() for gene in genes}
    for line in file.read_text().splitlines():
        name, _, *members = line.split("\t")
        for gene in genes.intersection(members):
            found[gene].add(name)
    return {gene: sets or {f"\t{gene}"} for gene, sets in found.items()}


def gears(task: Task, job: dict) -> tuple[ad.AnnData, dict]:
    """Train GEARS by its defaults on the log-normalised cells; a tenth of the perturbations tell the best epoch."""
    values, _ = log_normalised(task.train)
    names = [name_for_gears(name, job["control"], job["separator"]) for name in task.train.obs[CONDITION].astype(str)]
    cells = ad.AnnData(
        sp.csr_matrix(values.astype(np.float32)), obs={CONDITION: names, "cell_type": "cells"},
        var={"gene_name": task.train.var_names.to_numpy()},
    )  # fmt: skip
    cells.obs_names, cells.var_names = task.train.obs_names, task.train.var_names
    asked = [name.split(job["separator"]) for name in task.asked]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        means = _trained(cells, asked, job, Path(folder))
    note = f"graph of perturbations from {Path(job['gene_sets']).name}, not the gene ontology"
    return as_predicted(task, job, values, means), {"graph": note}


def _trained(cells: ad.AnnData, asked: list[list[str]], job: dict, folder: Path) -> np.ndarray:
    """Mean expression predicted, conditions × genes. Works in `folder`, where GEARS writes whatever it makes."""
    import torch
    from gears import GEARS, PertData
    from gears.utils import make_GO

    data = folder / "data"
    data.mkdir()
    parts = {part for name in cells.obs[CONDITION] for part in name.split("+")} - {CONTROL}
    genes = set(cells.var_names) | parts | {part for name in asked for part in name}
    (data / "gene2go_all.pkl").write_bytes(pickle.dumps(gene_sets(Path(job["gene_sets"]), genes)))
    (data / "genes.pkl").write_bytes(pickle.dumps(sorted(genes)))
    np.random.seed(job["seed"])  # noqa: NPY002, GEARS draws from the global state
    torch.manual_seed(job["seed"])
    screen = PertData(str(data), gene_set_path=str(data / "genes.pkl"), default_pert_graph=False)
    screen.new_data_process("screen", adata=cells)
    screen.prepare_split("no_test", seed=job["seed"])
    screen.get_dataloader(BATCH_SIZE, TEST_BATCH_SIZE)
    network = GEARS(screen, device="cpu")
    # by itself it would start 25 processes for this; what is written is read again
    make_GO(str(data), network.pert_list, screen.dataset_name, num_workers=1)
    network.model_initialize(hidden_size=HIDDEN)
    network.train(epochs=job.get("max_epochs", EPOCHS))
    found = network.predict(asked)
    return np.stack([found["_".join(parts)] for parts in asked])


def as_predicted(task: Task, job: dict, values: sp.csr_matrix, means: np.ndarray) -> ad.AnnData:
    """Means in the form that `tl.predict_perturbation` gives, the train mean as baseline, without spread."""
    labels = task.train.obs[CONDITION].astype(str).to_numpy()
    of_label = {name: np.asarray(values[labels == name].mean(axis=0)).ravel() for name in np.unique(labels)}
    control = of_label.pop(job["control"])
    naming = Naming((job["control"],), job["separator"])
    parts = [naming.parts(name) for name in task.asked]
    found = ad.AnnData(
        means.astype(np.float32), obs={CONDITION: task.asked}, var=task.train.var.copy(),
        varm={C.VARM_MEAN: means.T, C.VARM_CONTROL: np.repeat(control[:, None], len(means), axis=1)},
    )  # fmt: skip
    # from where a change is measured too; of the baselines those in the rows of `ours` count
    train_mean = np.mean(list(of_label.values()), axis=0).astype(np.float32)
    found.varm[C.VARM_BASELINE + "train_mean"] = np.repeat(train_mean[:, None], len(means), axis=1)
    found.uns[C.UNS] = {
        C.PERTURBATION: {
            "perturbation_key": CONDITION, "control": job["control"], "groupby": "", "dose_key": "",
            "separator": job["separator"],
            "condition": np.array(task.asked), "perturbation": np.array(task.asked),
            "group": np.array([""] * len(parts)), "dose": np.full(len(parts), np.nan),
            "n_parts": np.array([len(these) for these in parts]),
            "n_seen": np.array([sum(part in of_label for part in these) for these in parts]),
            "trained": np.zeros(len(parts), dtype=bool),
        }
    }  # fmt: skip
    return found
