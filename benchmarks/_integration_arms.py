"""The arms of integration.py. Each fit runs in a process of its own, which this file is when it is called:

    python benchmarks/_integration_arms.py job.json

A job names the prepared cells (counts; `BATCH` and `LABELS` in obs), the arm and the seed. The process writes the
embeddings (npz) and prints, as JSON, the seconds of fitting and embedding, its peak resident memory and the arm's
notes. Importing libraries and reading the file are not in the seconds; they are in the memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
import warnings
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import scanpy as sc
import scipy.sparse as sp
import torch
from _memory import _status as status
from _rivals import CLIP, N_HVG, N_PCS, fit_pca, log_normalised, scdiva_arm

import scdiva as sd
from scdiva.metrics.annotation import labelled

BATCH, LABELS, KNOWN = "batch", "cell_type", "known_type"
"""Columns of obs: batches and types of the prepared cells, and the types that an arm is told of."""
UNLABELLED = "unlabelled"
APART = 0.2
"""Spread of a type in the arm `apart`, as a share of that of the types."""
Found = dict[str, np.ndarray]
"""`embedding` of the cells fitted on; `query` of cells that came later; `predicted`, types that the method itself names
for the cells in question."""
Made = tuple[Found, dict]
"""With what an arm has to say of itself; `kept` is the cost of a fit that was read, not made."""
PACKAGES = {"harmony": "harmonypy", "scvi": "scvi-tools", "scanvi": "scvi-tools", "scarches": "scvi-tools"}
MODULES = {"harmonypy": "harmonypy", "scvi-tools": "scvi"}
ARCHES = {"n_layers": 2, "dropout_rate": 0.2, "encode_covariates": True, "use_layer_norm": "both",
          "use_batch_norm": "none"}  # fmt: skip
"""What the tutorial of scArches in scvi-tools sets, so that the encoder can learn of a new batch."""


def missing(arm: str) -> str | None:
    """Why an arm can't run here; None where it can."""
    package = PACKAGES.get(arm)
    if package is None or find_spec(MODULES[package]) is not None:
        return None
    return f"{package} is not installed: pip install -c constraints.txt {package}"


def version_of(arm: str) -> str:
    """The package that an arm comes from, with its version."""
    package = PACKAGES.get(arm, "scanpy" if arm in ("pca", "combat") else "scdiva")
    return f"{package} {sd.__version__ if package == 'scdiva' else version(package)}"


def variable_genes(adata: ad.AnnData) -> list[str]:
    """The highly variable genes that `fit_pca` takes as well, so that all rivals see the same."""
    work = log_normalised(adata)
    sc.pp.highly_variable_genes(work, n_top_genes=min(N_HVG, work.n_vars))
    return list(work.var_names[work.var["highly_variable"]])


def hidden_half(labels: np.ndarray, seed: int) -> np.ndarray:
    """Rows of a random half of the cells whose label names a type."""
    rows = np.flatnonzero(labelled(labels))
    return np.sort(np.random.default_rng(seed).permutation(rows)[: len(rows) // 2])


def parted(adata: ad.AnnData, job: dict) -> tuple[ad.AnnData, ad.AnnData | None]:
    """Cells to fit on, with the types that are told in `KNOWN`, and the cells that come later."""
    labels = adata.obs[LABELS].astype(str).to_numpy()
    known = np.where(labelled(labels), labels, UNLABELLED).astype(object)
    if job["part"] == "labelled":
        known[hidden_half(labels, job["seed"])] = UNLABELLED
    adata.obs[KNOWN] = known.astype(str)
    if job["part"] != "query":
        return adata, None
    left_out = (adata.obs[BATCH].astype(str) == job["left_out"]).to_numpy()
    if not left_out.any() or left_out.all():
        raise ValueError(f"{left_out.sum()} of {len(left_out)} cells are of batch {job['left_out']!r}.")
    query = adata[left_out].copy()
    query.obs[KNOWN] = UNLABELLED
    return adata[~left_out].copy(), query


def ours(adata: ad.AnnData, query: ad.AnnData | None, job: dict) -> Made:
    """`tl.integrate` with its defaults, told of no labels in the part without; a query is embedded by the fit.

    `predicted` is what `tl.annotate` says with its defaults, of the same model and reference.
    """
    told = {} if job["part"] == "unlabelled" else {"labels_key": KNOWN, "unlabeled_category": UNLABELLED}
    fitted = sd.tl.integrate(adata, BATCH, model=job["model"], rng=job["seed"], **told)
    found = {"embedding": adata.obsm["X_scdiva_integrated"]}
    if query is not None:
        found["query"] = scdiva_arm(fitted)(query)
    if told:
        asked = adata if query is None else query
        reference = {} if query is None else {"reference": adata}
        sd.tl.annotate(asked, **told, **reference, model=fitted, batch_key=BATCH, rng=job["seed"])
        found["predicted"] = asked.obs["scdiva_label"].to_numpy().astype(str)
    return found, {"strategy": str(adata.uns["scdiva"]["integrate"]["strategy"])}


def ours_hvg(adata: ad.AnnData, query: ad.AnnData | None, job: dict) -> Made:
    """The same, of the rivals' genes alone."""
    return ours(adata[:, variable_genes(adata)].copy(), query, job)


def apart(adata: ad.AnnData, query: ad.AnnData | None, job: dict) -> Made:
    """No method, but what can be had: each type in a place of its own, and its cells in it in no order."""
    rng = np.random.default_rng(job["seed"])
    names, types = np.unique(adata.obs[LABELS].astype(str), return_inverse=True)
    places = rng.normal(size=(len(names), N_PCS))
    return {"embedding": places[types] + APART * rng.normal(size=(adata.n_obs, N_PCS))}, {}


def zero_shot(adata: ad.AnnData, query: ad.AnnData | None, job: dict) -> Made:
    """The model as it is, told of no batches."""
    return {"embedding": scdiva_arm(sd.models.load_model(job["model"]))(adata)}, {}


def pca(adata: ad.AnnData, query: ad.AnnData | None, job: dict) -> Made:
    """2,000 highly variable genes, scaled, 50 components; no batches."""
    return {"embedding": fit_pca(adata)(adata)}, {}


def harmony(adata: ad.AnnData, query: ad.AnnData | None, job: dict) -> Made:
    """Harmony on that PCA, with harmonypy's defaults."""
    import harmonypy

    coordinates = fit_pca(adata)(adata)
    fitted = harmonypy.run_harmony(
        coordinates.astype(np.float64), adata.obs, BATCH, random_state=job["seed"], verbose=False, ncores=job["threads"]
    )
    corrected = np.asarray(fitted.Z_corr)  # cells are columns in harmonypy 0.0, rows since
    return {"embedding": corrected if corrected.shape == coordinates.shape else corrected.T}, {}


def combat(adata: ad.AnnData, query: ad.AnnData | None, job: dict) -> Made:
    """ComBat on the log-normalised values of those genes, then scaled and PCA as above."""
    work = log_normalised(adata)[:, variable_genes(adata)].copy()
    work.X = work.X.toarray() if sp.issparse(work.X) else np.asarray(work.X)
    sc.pp.combat(work, BATCH)
    sc.pp.scale(work, max_value=CLIP)
    sc.pp.pca(work, n_comps=N_PCS)
    return {"embedding": work.obsm["X_pca"]}, {}


def rounded(adata: ad.AnnData, genes: list[str]) -> ad.AnnData:
    """Integer counts of these genes, as scVI models integers; a set of mixed scales is rounded."""
    part = adata[:, genes]
    matrix = sp.csr_matrix(part.X, copy=True)
    matrix.data = np.round(matrix.data)
    return ad.AnnData(matrix, obs=part.obs[[BATCH, KNOWN]].copy(), var=part.var[[]].copy())


def fitted_scvi(adata: ad.AnnData, job: dict, seed: int, **architecture: object) -> tuple[Any, dict]:
    """scVI told of the batches, default epochs with early stopping; kept in the job's folder, as a fit takes minutes.

    Gives the network and its epochs. The same cells, seed and architecture are fitted once: later calls read the
    network, and the seconds and memory that its fit took come with it.
    """
    from scvi.model import SCVI

    counts = rounded(adata, variable_genes(adata))
    epochs = job.get("max_epochs")
    told = [version("scvi-tools"), counts.obs[BATCH].astype(str).tolist(), list(counts.var_names), seed, architecture,
            epochs]  # fmt: skip
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for part in (counts.X.data, counts.X.indices, counts.X.indptr):
        digest.update(part.tobytes())
    folder = Path(job["keep"]) / f"scvi_{digest.hexdigest()[:16]}"
    fit = folder / "fit.json"
    if fit.exists():
        return SCVI.load(str(folder), adata=counts, accelerator="cpu"), json.loads(fit.read_text())
    watch = Watch()
    set_scvi_seed(seed)
    SCVI.setup_anndata(counts, batch_key=BATCH)
    network = SCVI(counts, **architecture)
    network.train(epochs, early_stopping=True, accelerator="cpu", enable_progress_bar=False)
    torch.set_num_threads(job["threads"])
    notes = {"epochs": len(network.history["elbo_train"])}
    network.save(str(folder), overwrite=True)
    fit.write_text(json.dumps({**notes, "kept": watch.cost()}))
    return network, notes


def set_scvi_seed(seed: int) -> None:
    """Of scvi-tools, whose networks and order of cells draw from the global state."""
    import scvi

    scvi.settings.seed = seed


def latent_scvi(adata: ad.AnnData, query: ad.AnnData | None, job: dict) -> Made:
    """scVI with batch_key, otherwise its defaults, and early stopping."""
    network, notes = fitted_scvi(adata, job, job["seed"])
    return {"embedding": network.get_latent_representation()}, notes


def scanvi(adata: ad.AnnData, query: ad.AnnData | None, job: dict) -> Made:
    """scANVI from that scVI (of the first seed), with its defaults; `predicted` by its own classifier."""
    network, notes = fitted_scvi(adata, job, job["base_seed"])
    fitted = semi_supervised(network, adata, job)
    return {
        "embedding": fitted.get_latent_representation(),
        "predicted": np.asarray(fitted.predict()).astype(str),
    }, notes


def semi_supervised(network: Any, adata: ad.AnnData, job: dict) -> Any:
    """scANVI that starts from an scVI, told of the types of this job."""
    from scvi.model import SCANVI

    set_scvi_seed(job["seed"])
    cells = network.adata
    cells.obs[KNOWN] = adata.obs[KNOWN].to_numpy()
    fitted = SCANVI.from_scvi_model(network, UNLABELLED, labels_key=KNOWN, adata=cells)
    fitted.train(job.get("max_epochs"), accelerator="cpu", enable_progress_bar=False)
    return fitted


def scarches(adata: ad.AnnData, query: ad.AnnData | None, job: dict) -> Made:
    """scANVI of the reference, then surgery: the query trains what its batch adds, default epochs, no weight decay."""
    from scvi.model import SCANVI

    assert query is not None
    network, notes = fitted_scvi(adata, job, job["seed"], **ARCHES)
    reference = semi_supervised(network, adata, job)
    later = rounded(query, list(reference.adata.var_names))
    grown = SCANVI.load_query_data(later, reference, accelerator="cpu")
    grown.train(job.get("max_epochs"), accelerator="cpu", plan_kwargs={"weight_decay": 0.0}, enable_progress_bar=False)
    found = {"query": grown.get_latent_representation(), "predicted": np.asarray(grown.predict()).astype(str)}
    return {**found, "embedding": grown.get_latent_representation(reference.adata)}, notes


ARMS = {
    "unlabelled": {
        "ours": ours, "ours_hvg": ours_hvg, "scdiva": zero_shot, "pca": pca, "combat": combat, "harmony": harmony,
        "scvi": latent_scvi, "apart": apart,
    },
    "labelled": {"ours": ours, "scanvi": scanvi},
    "query": {"ours": ours, "scarches": scarches},
}  # fmt: skip
"""By part. An arm takes cells to fit on, cells that come later, and the job."""
ALIKE = ("scdiva", "pca", "combat")
"""Arms in which nothing is drawn: one fit stands for every seed."""


class Watch:
    """Seconds since it was made, and the most resident memory of the process so far."""

    def __init__(self) -> None:
        self.cpu, self.wall = time.process_time(), time.perf_counter()

    def cost(self) -> dict[str, float]:
        seconds = {"cpu_seconds": time.process_time() - self.cpu, "wall_seconds": time.perf_counter() - self.wall}
        # not ru_maxrss, which a process inherits from the one that started it
        return {**seconds, "peak_mib": status("VmHWM") / 2**20}


def run(job: dict) -> tuple[Found, dict]:
    """Do a job; gives the embeddings, and what it cost beside what the arm has to say."""
    adata, query = parted(ad.read_h5ad(job["file"]), job)
    watch = Watch()
    found, notes = ARMS[job["part"]][job["arm"]](adata, query, job)
    cost = watch.cost()
    if kept := notes.pop("kept", None):
        cost = {key: max(cost[key], kept[key]) if key == "peak_mib" else cost[key] + kept[key] for key in cost}
    return found, {**cost, **notes}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    sd.settings.progress, sd.settings.threads = False, job["threads"]
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "harmonypy", "scvi"):
        logging.getLogger(name).setLevel(logging.ERROR)
    found, cost = run(job)
    for name, values in found.items():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise ValueError(f"{job['arm']}: {(~np.isfinite(values)).any(axis=1).sum()} rows of {name} are not finite.")
    np.savez(job["out"], **found)
    print(json.dumps(cost))


if __name__ == "__main__":
    main()
