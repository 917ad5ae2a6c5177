"""Write the latent space of scVI for the labelled datasets of a folder, for `embedding.py --scvi`.

    python benchmarks/scvi_latent.py --data FOLDER --out FOLDER [--batches] [--datasets NAME ...] [--max-cells 3000]

It needs scvi-tools and scanpy, not scdiva, so it runs in an environment of its own. Default architecture on the raw
counts of 2,000 highly variable genes, rounded where they are no integers; at most 200 epochs with early stopping, on
one thread of a CPU. A fit that reaches 240 CPU seconds ends there, and its file says so. With `--batches`, datasets
whose types have cells of two batches or more are fitted with `batch_key`, into `<name>.scvi_batch.npz` in place of
`<name>.scvi.npz`. Files that exist are left as they are.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from pathlib import Path

import anndata as ad
import lightning.pytorch as pl
import numpy as np
import scanpy as sc
import scipy.sparse as sp
import scvi
import torch
from _run import batch_column, labelled_datasets, read_dataset

EPOCHS, CPU_SECONDS, GENES = 200, 240, 2000


class TimeLimit(pl.Callback):
    """Ends a fit after some CPU seconds."""

    def __init__(self) -> None:
        self.begun, self.reached = time.process_time(), False

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if time.process_time() - self.begun > CPU_SECONDS:
            self.reached = trainer.should_stop = True


def latent(adata: ad.AnnData, batch_key: str | None, seed: int = 0) -> dict:
    """The latent space, and how it was made."""
    lognorm = ad.AnnData(adata.X.copy(), var=adata.var[[]].copy())
    sc.pp.normalize_total(lognorm, target_sum=1e4)
    sc.pp.log1p(lognorm)
    sc.pp.highly_variable_genes(lognorm, n_top_genes=min(GENES, adata.n_vars))
    part = adata[:, lognorm.var["highly_variable"].to_numpy()]
    counts = sp.csr_matrix(part.X, copy=True)
    counts.data = np.round(counts.data)
    obs = part.obs[[] if batch_key is None else [batch_key]].astype(str)
    cells = ad.AnnData(counts, obs=obs, var=part.var[[]].copy())
    begun, limit = time.process_time(), TimeLimit()
    scvi.settings.seed = seed
    scvi.model.SCVI.setup_anndata(cells, batch_key=batch_key)
    network = scvi.model.SCVI(cells)
    network.train(EPOCHS, early_stopping=True, accelerator="cpu", enable_progress_bar=False, callbacks=[limit])
    return {
        "latent": network.get_latent_representation().astype(np.float32),
        "obs_names": np.asarray(adata.obs_names, dtype=str),
        "epochs": len(network.history["elbo_train"]),
        "time_limit": limit.reached,
        "cpu_seconds": round(time.process_time() - begun, 1),
        "scvi_tools": scvi.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", action="store_true")
    parser.add_argument("--datasets", nargs="+")
    parser.add_argument("--max-cells", type=int, default=3000)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.datasets or labelled_datasets(arguments.data):
        file = arguments.out / f"{name}.{'scvi_batch' if arguments.batches else 'scvi'}.npz"
        adata = read_dataset(arguments.data, name, arguments.max_cells)
        batch_key = batch_column(adata) if arguments.batches else None
        if file.exists() or (arguments.batches and batch_key is None):
            continue
        made = latent(adata, batch_key)
        np.savez(file, **made)
        print(file.stem, made["epochs"], "epochs", made["cpu_seconds"], "CPU s", made["time_limit"], flush=True)


if __name__ == "__main__":
    main()
