"""The arms of the embedding benchmarks: each is made once and then embeds any cells with the same genes.

`scdiva` and the corpus SVD never see the set they are scored on; PCA and scVI are fitted on it, without its labels, and
without its batches unless they are named.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import anndata as ad
import numpy as np
import scanpy as sc
import scipy.sparse as sp
import torch

import scdiva as sd
from scdiva.data.cells import open_cells
from scdiva.data.packed import PackedCells
from scdiva.models import ScDiVa
from scdiva.tokenizer import Vocabulary
from scdiva.train import LinearMap, fit_linear_map

Arm = Callable[[ad.AnnData], np.ndarray]
"""Cells in, float embedding `(n_cells, n_dims)` out; the cells are left as they were."""
N_HVG = 2000
N_PCS = 50
SVD_DIMS, SVD_GENES = 64, 4000
"""Of the plain corpus SVD."""
CLIP = 10.0
NO_SCVI = "scvi-tools is not installed: pip install -c constraints.txt scvi-tools"
NO_CORPUS = "the packed corpus is not there: pass --prepared, the folder that scripts/train_mini.py prepares"


def scdiva_arm(model: ScDiVa) -> Arm:
    """Zero-shot embedding by a loaded model."""

    def embed(adata: ad.AnnData) -> np.ndarray:
        return sd.tl.embed(adata, model, key_added="X_scdiva", copy=True).obsm["X_scdiva"]

    return embed


def linear_part(embedding: np.ndarray, model: ScDiVa) -> np.ndarray | None:
    """What the model's set encoder takes from its linear start; None for a model without one."""
    config = model.config
    return embedding[:, : config.anchor_linear_dim] if config.anchor == "encoder" else None


def log_normalised(adata: ad.AnnData) -> ad.AnnData:
    """A copy with log1p of counts per ten thousand."""
    work = ad.AnnData(adata.X.copy(), obs=adata.obs.copy(), var=adata.var.copy())
    sc.pp.normalize_total(work, target_sum=1e4)
    sc.pp.log1p(work)
    return work


def variable_genes(adata: ad.AnnData) -> list[str]:
    """The highly variable genes that `fit_pca` takes as well, so that all rivals see the same."""
    work = log_normalised(adata)
    sc.pp.highly_variable_genes(work, n_top_genes=min(N_HVG, work.n_vars))
    return list(work.var_names[work.var["highly_variable"]])


def fit_pca(adata: ad.AnnData) -> Arm:
    """PCA(50) of scaled, highly variable genes, as scanpy's tutorials make it; other cells are projected.

    Mean, standard deviation and directions are those of the cells it was fitted on.
    """
    fitted = log_normalised(adata)
    sc.pp.highly_variable_genes(fitted, n_top_genes=min(N_HVG, fitted.n_vars))
    genes = fitted.var_names[fitted.var["highly_variable"]]
    fitted = fitted[:, genes].copy()
    fitted.X = fitted.X.toarray() if sp.issparse(fitted.X) else np.asarray(fitted.X)
    sc.pp.scale(fitted, max_value=CLIP)
    mean, std = fitted.var["mean"].to_numpy(), fitted.var["std"].to_numpy()
    std = np.where(std == 0, 1.0, std)
    sc.pp.pca(fitted, n_comps=N_PCS)
    centre, directions = np.asarray(fitted.X).mean(axis=0), fitted.varm["PCs"]

    def project(cells: ad.AnnData) -> np.ndarray:
        values = log_normalised(cells)[:, genes].X
        values = values.toarray() if sp.issparse(values) else np.asarray(values)
        scaled = np.clip((values - mean) / std, -CLIP, CLIP)
        return ((scaled - centre) @ directions).astype(np.float32)

    return project


def corpus_svd(prepared: Path | None) -> Arm | None:
    """The plain SVD of the corpus, each study centred on its own mean: 4,000 genes, 64 directions, no network.

    Every cell of the corpus counts alike and directions are not rescaled, unlike in the start of scdiva's set encoder.
    Kept beside the packed corpus, as it takes half a minute. None where there is no packed corpus.
    """
    if prepared is None or not (prepared / "train.h5").exists():
        return None
    vocabulary = Vocabulary.read(prepared / "vocabulary.safetensors")
    file = prepared / f"corpus_svd_{SVD_GENES}_{SVD_DIMS}.npz"
    if not file.exists():
        cells = PackedCells(prepared / "train.h5", vocabulary)
        fitted = fit_linear_map(cells, SVD_DIMS, n_genes=SVD_GENES, study_power=0.0, spectral_power=0.0)
        cells.close()
        np.savez(file, fingerprint=vocabulary.fingerprint, **fitted._asdict())
    with np.load(file) as saved:
        if str(saved["fingerprint"]) != vocabulary.fingerprint:
            raise ValueError(f"{file.name} was made with another vocabulary than the one beside it: delete it.")
        return project_on(LinearMap(*(saved[name] for name in LinearMap._fields)), vocabulary)


def project_on(linear_map: LinearMap, vocabulary: Vocabulary) -> Arm:
    """Embedding by a linear map over a vocabulary's tokens; genes that the map does not know count nothing."""

    def project(cells: ad.AnnData) -> np.ndarray:
        source = open_cells(cells, vocabulary, ranked=False, empty="nan")
        blocks = [block @ linear_map.weight + linear_map.bias for _, block in source.expression_blocks()]
        return np.vstack(blocks).astype(np.float32)

    return project


def has_scvi() -> bool:
    """Whether scvi-tools can be imported."""
    return find_spec("scvi") is not None


def fit_scvi(adata: ad.AnnData, seed: int, max_epochs: int | None = None, batch_key: str | None = None) -> Arm:
    """scVI with its default architecture, epochs and early stopping, on the raw counts of 2,000 genes.

    Genes are the highly variable ones that PCA takes. Counts that are no integers (a set of mixed scales) are rounded,
    as scVI models integers. Other cells go through the encoder of the fit. `max_epochs` is for tests: None, the default
    of scvi-tools, is 400 for up to 20,000 cells. The arm's `epochs` says after how many it stopped.
    """
    import scvi

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    scvi.settings.verbosity = logging.ERROR
    scvi.settings.seed = seed
    chosen = log_normalised(adata)
    sc.pp.highly_variable_genes(chosen, n_top_genes=min(N_HVG, chosen.n_vars))
    genes = chosen.var_names[chosen.var["highly_variable"]]

    def counts(cells: ad.AnnData) -> ad.AnnData:
        part = cells[:, genes]
        matrix = sp.csr_matrix(part.X, copy=True)
        matrix.data = np.round(matrix.data)
        kept = [] if batch_key is None else [batch_key]
        return ad.AnnData(matrix, obs=part.obs[kept].astype(str), var=part.var[[]].copy())

    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = counts(adata)
        scvi.model.SCVI.setup_anndata(fitted, batch_key=batch_key)
        network = scvi.model.SCVI(fitted)
        network.train(max_epochs, early_stopping=True, accelerator="cpu", enable_progress_bar=False)
    torch.set_num_threads(threads)

    def encode(cells: ad.AnnData) -> np.ndarray:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return network.get_latent_representation(counts(cells))

    encode.epochs = len(network.history["elbo_train"])  # type: ignore[attr-defined]
    return encode
