"""The arms of integration.py. Each fit runs in a process of its own, which this file is when it is called:

    python benchmarks/_integration_arms.py job.json

A job names the prepared cells (counts; `BATCH` and `LABELS` in obs), the arm and the seed. The process writes the
embeddings (npz) and prints, as JSON, the seconds of fitting and embedding, its peak resident memory and the arm's
notes. Importing libraries and reading the file are not in the seconds; they are in the memory.
"""

from __future__ import annotations

import anndata as ad
import numpy as np
import scanpy as sc
import scipy.sparse as sp
import torch
from _prepared import BATCH, KNOWN, LABELS, UNLABELLED
from _process import Watch, do
from _rivals import CLIP, N_PCS, fit_pca, log_normalised, scdiva_arm, variable_genes
from _scvi import fitted_scvi, rounded, semi_supervised

import scdiva as sd
from scdiva.metrics.annotation import labelled

APART = 0.2
"""Spread of a type in the arm `apart`, as a share of that of the types."""
Found = dict[str, np.ndarray]
"""`embedding` of the cells fitted on; `query` of cells that came later; `predicted`, types that the method itself names
for the cells in question."""
Made = tuple[Found, dict]
"""With what an arm has to say of itself; `kept` is the cost of a fit that was read, not made."""
ARCHES = {"n_layers": 2, "dropout_rate": 0.2, "encode_covariates": True, "use_layer_norm": "both",
          "use_batch_norm": "none"}  # fmt: skip
"""What the tutorial of scArches in scvi-tools sets, so that the encoder can learn of a new batch."""


def hidden_half(labels: np.ndarray, seed: int) -> np.ndarray:
    """Rows of a random half of the cells whose label names a type."""
    rows = np.flatnonzero(labelled(labels))
    return np.sort(np.random.default_rng(seed).permutation(rows)[: len(rows) // 2])


def parted(adata: ad.AnnData, job: dict) -> tuple[ad.AnnData, ad.AnnData | None]:
    """Cells to fit on, with the types that are given in `KNOWN`, and the cells that come later."""
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
    """`tl.integrate` with its defaults, without labels in the part that has none; a query is embedded by the fit.

    `predicted` is what `tl.annotate` says with its defaults, of the same model and reference.
    """
    labels = {} if job["part"] == "unlabelled" else {"labels_key": KNOWN, "unlabeled_category": UNLABELLED}
    fitted = sd.tl.integrate(adata, BATCH, model=job["model"], rng=job["seed"], **labels)
    found = {"embedding": adata.obsm["X_scdiva_integrated"]}
    if query is not None:
        found["query"] = scdiva_arm(fitted)(query)
    if labels:
        asked = adata if query is None else query
        reference = {} if query is None else {"reference": adata}
        sd.tl.annotate(asked, **labels, **reference, model=fitted, batch_key=BATCH, rng=job["seed"])
        found["predicted"] = asked.obs["scdiva_label"].to_numpy().astype(str)
    return found, {}


def ours_hvg(adata: ad.AnnData, query: ad.AnnData | None, job: dict) -> Made:
    """The same, of the rivals' genes alone."""
    return ours(adata[:, variable_genes(adata)].copy(), query, job)


def own_components(adata: ad.AnnData, query: ad.AnnData | None, job: dict) -> Made:
    """`tl.integrate` without the model: the head is given principal components of these cells alone, no state."""
    from scdiva.nn.heads import IntegrationHead

    both = IntegrationHead.features

    def of_own(head: IntegrationHead, state: torch.Tensor, *packed: torch.Tensor) -> torch.Tensor:
        return both(head, torch.zeros_like(state), *packed)

    IntegrationHead.features = of_own  # type: ignore[method-assign]  # each fit is a process of its own
    return ours(adata, query, job)


def teacher(adata: ad.AnnData, query: ad.AnnData | None, job: dict) -> Made:
    """What the head of `tl.integrate` learns from: its input after the cluster-wise correction, nothing trained."""
    from scdiva._labels import batch_numbers
    from scdiva._rng import seed_of, step_seed
    from scdiva.data.cells import open_cells
    from scdiva.train.adaptation import encoded, read_cells
    from scdiva.train.batch_correction import correct_batches
    from scdiva.train.integration import fit_projection, of_cells, with_head

    given, seed = sd.models.load_model(job["model"]), seed_of(job["seed"])
    batches = batch_numbers(adata, BATCH)
    cells, rows = read_cells(open_cells(adata, given, empty="nan"), batches)
    model = with_head(given, seed)
    fit_projection(model.integration, cells)
    features = of_cells(model.integration.features, cells, encoded(given, cells))
    rng = np.random.default_rng(step_seed(seed, 0, "clusters"))
    found = np.full((adata.n_obs, model.integration.dim), np.nan, dtype=np.float32)
    found[rows] = correct_batches(features.numpy(), [batches[rows]], rng)
    return {"embedding": found}, {}


def apart(adata: ad.AnnData, query: ad.AnnData | None, job: dict) -> Made:
    """No method, but what can be had: each type in a place of its own, and its cells in it in no order."""
    rng = np.random.default_rng(job["seed"])
    names, types = np.unique(adata.obs[LABELS].astype(str), return_inverse=True)
    places = rng.normal(size=(len(names), N_PCS))
    return {"embedding": places[types] + APART * rng.normal(size=(adata.n_obs, N_PCS))}, {}


def zero_shot(adata: ad.AnnData, query: ad.AnnData | None, job: dict) -> Made:
    """The model as it is, without batches."""
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
    work.X = np.array(work.X)  # of pandas 3 it can't be written to
    sc.pp.scale(work, max_value=CLIP)
    sc.pp.pca(work, n_comps=N_PCS)
    return {"embedding": work.obsm["X_pca"]}, {}


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
        "ours": ours, "ours_hvg": ours_hvg, "own_components": own_components, "teacher": teacher, "scdiva": zero_shot,
        "pca": pca, "combat": combat, "harmony": harmony,
        "scvi": latent_scvi, "apart": apart,
    },
    "labelled": {"ours": ours, "scanvi": scanvi},
    "query": {"ours": ours, "scarches": scarches},
}  # fmt: skip
"""By part. An arm takes cells to fit on, cells that come later, and the job."""
ALIKE = ("scdiva", "pca", "combat")
"""Arms in which nothing is drawn: one fit stands for every seed."""


def run(job: dict) -> tuple[Found, dict]:
    """Do a job; gives the embeddings, and what it cost beside what the arm has to say."""
    adata, query = parted(ad.read_h5ad(job["file"]), job)
    watch = Watch()
    found, notes = ARMS[job["part"]][job["arm"]](adata, query, job)
    cost = watch.cost()
    if kept := notes.pop("kept", None):
        cost = {key: max(cost[key], kept[key]) if key == "peak_mib" else cost[key] + kept[key] for key in cost}
    return found, {**cost, **notes}


if __name__ == "__main__":
    do(run)
