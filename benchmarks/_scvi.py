"""scVI and scANVI given batches, for integration.py and annotation.py; fits of scVI are kept."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import scipy.sparse as sp
import torch
from _prepared import BATCH, KNOWN, UNLABELLED
from _process import Watch
from _rivals import variable_genes


def rounded(adata: ad.AnnData, genes: list[str]) -> ad.AnnData:
    """Integer counts of these genes, as scVI models integers; a set of mixed scales is rounded."""
    part = adata[:, genes]
    matrix = sp.csr_matrix(part.X, copy=True)
    matrix.data = np.round(matrix.data)
    return ad.AnnData(matrix, obs=part.obs[[BATCH, KNOWN]].copy(), var=part.var[[]].copy())


def fitted_scvi(
    adata: ad.AnnData, job: dict, seed: int, genes: list[str] | None = None, **architecture: object
) -> tuple[Any, dict]:
    """scVI with the batches, default epochs with early stopping; kept in the job's folder, as a fit takes minutes.

    Of the cells' own variable genes, or of those given. Gives the network and its epochs. The same cells, genes, seed
    and architecture are fitted once: later calls read the network, and the seconds and memory that its fit took come
    with it.
    """
    from scvi.model import SCVI

    counts = rounded(adata, variable_genes(adata) if genes is None else genes)
    epochs = job.get("max_epochs")
    given = [version("scvi-tools"), counts.obs[BATCH].astype(str).tolist(), list(counts.var_names), seed, architecture,
            epochs]  # fmt: skip
    digest = hashlib.sha256(json.dumps(given, sort_keys=True).encode())
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


def semi_supervised(network: Any, adata: ad.AnnData, job: dict) -> Any:
    """scANVI that starts from an scVI, with the types of this job."""
    from scvi.model import SCANVI

    set_scvi_seed(job["seed"])
    cells = network.adata
    cells.obs[KNOWN] = adata.obs[KNOWN].to_numpy()
    fitted = SCANVI.from_scvi_model(network, UNLABELLED, labels_key=KNOWN, adata=cells)
    fitted.train(job.get("max_epochs"), accelerator="cpu", enable_progress_bar=False)
    return fitted
