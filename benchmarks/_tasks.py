"""What the task benchmarks share: datasets, fits in their own process, seeds, intervals and rows."""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from math import sqrt
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scanpy as sc
import scipy.sparse as sp
import torch
from _record import commit, machine, record, replaced, rows_so_far
from _timing import resident

import scdiva as sd

MAX_CELLS = 6000
BATCH, LABELS, KNOWN = "batch", "cell_type", "known_type"
"""Columns of obs: batches and cell types of a prepared dataset, and the cell types that a method receives."""
UNLABELLED = "unlabelled"
N_HVG, N_PCS, CLIP = 2000, 50, 10.0
RIVALS = {"harmony": "harmonypy", "scvi": "scvi-tools", "scanvi": "scvi-tools", "gears": "cell-gears"}
MODULES = {"harmonypy": "harmonypy", "scvi-tools": "scvi", "cell-gears": "gears"}
Found = dict[str, Any]


# datasets


def prepared(adata: ad.AnnData, batch_key: str, labels_key: str, max_cells: int = MAX_CELLS) -> ad.AnnData:
    """Counts, `BATCH` and `LABELS` of at most `max_cells` cells, always the same cells."""
    rows = np.sort(np.random.default_rng(0).permutation(adata.n_obs)[:max_cells])
    counts = sp.csr_matrix(adata.X, dtype=np.float32)[rows]
    if (counts.data < 0).any():
        raise ValueError(f"X has {(counts.data < 0).sum()} negative values; benchmarks need counts.")
    columns = {BATCH: batch_key, LABELS: labels_key}
    obs = {name: adata.obs[key].astype(str).to_numpy()[rows] for name, key in columns.items()}
    frame = pd.DataFrame(obs, index=adata.obs_names[rows]).astype("category")
    return ad.AnnData(counts, obs=frame, var=adata.var.copy())


def fingerprint(adata: ad.AnnData, keys: Sequence[str] = (BATCH, LABELS)) -> str:
    """A hash of counts, genes and columns of obs."""
    digest = hashlib.sha256()
    for part in (adata.X.data, adata.X.indices, adata.X.indptr):
        digest.update(part.tobytes())
    for names in (adata.var_names, *(adata.obs[key] for key in keys)):
        digest.update("\n".join(names.astype(str)).encode())
    return digest.hexdigest()[:16]


def log_normalised(adata: ad.AnnData) -> ad.AnnData:
    """A copy with log1p of counts per ten thousand."""
    work = ad.AnnData(adata.X.copy(), obs=adata.obs.copy(), var=adata.var[[]].copy())
    sc.pp.normalize_total(work, target_sum=1e4)
    sc.pp.log1p(work)
    return work


def variable_genes(adata: ad.AnnData) -> list[str]:
    """The 2,000 highly variable genes that every rival uses."""
    work = log_normalised(adata)
    sc.pp.highly_variable_genes(work, n_top_genes=min(N_HVG, work.n_vars))
    return list(work.var_names[work.var["highly_variable"]])


def scaled(reference: ad.AnnData, query: ad.AnnData) -> tuple[np.ndarray, np.ndarray]:
    """Both on the reference's variable genes, scaled by its mean and standard deviation, clipped at ten."""
    genes = variable_genes(reference)
    values = [log_normalised(cells)[:, genes].X.toarray() for cells in (reference, query)]
    mean, std = values[0].mean(axis=0), values[0].std(axis=0, ddof=1)
    std[std == 0] = 1.0
    first, second = (np.clip((some - mean) / std, -CLIP, CLIP) for some in values)
    return first, second


def pca(reference: ad.AnnData, query: ad.AnnData) -> tuple[np.ndarray, np.ndarray]:
    """50 principal components of the reference on its scaled variable genes, as scanpy's tutorials compute them."""
    first, second = scaled(reference, query)
    work = ad.AnnData(first)
    sc.pp.pca(work, n_comps=min(N_PCS, min(first.shape) - 1))
    return work.obsm["X_pca"], (second - first.mean(axis=0)) @ work.varm["PCs"]


def fitted_scvi(adata: ad.AnnData, seed: int, genes: list[str] | None = None) -> Any:
    """scVI with batches on variable genes, default epochs with early stopping."""
    import scvi

    part = adata[:, variable_genes(adata) if genes is None else genes]
    counts = sp.csr_matrix(part.X, copy=True)
    counts.data = np.round(counts.data)
    cells = ad.AnnData(counts, obs=part.obs.copy(), var=part.var[[]].copy())
    scvi.settings.seed = seed
    threads = torch.get_num_threads()
    scvi.model.SCVI.setup_anndata(cells, batch_key=BATCH)
    network = scvi.model.SCVI(cells)
    network.train(early_stopping=True, accelerator="cpu", enable_progress_bar=False)
    torch.set_num_threads(threads)
    return network


def fitted_scanvi(adata: ad.AnnData, seed: int, genes: list[str] | None = None) -> Any:
    """scANVI with the cell types of `KNOWN`, started from such an scVI, with its defaults."""
    from scvi.model import SCANVI

    network = fitted_scvi(adata, seed, genes)
    fitted = SCANVI.from_scvi_model(network, UNLABELLED, labels_key=KNOWN)
    fitted.train(accelerator="cpu", enable_progress_bar=False)
    return fitted


# fits


def missing(arm: str) -> str | None:
    """Why an arm can't run here; None where it can."""
    package = RIVALS.get(arm)
    if package is None or find_spec(MODULES[package]) is not None:
        return None
    return f"{package} is not installed: pip install -c constraints.txt {package}"


def _apart(function: Callable[..., Any], arguments: tuple, threads: int) -> tuple[Any, dict]:
    torch.set_num_threads(threads)
    sd.settings.progress, sd.settings.threads = False, threads
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "harmonypy", "scvi"):
        logging.getLogger(name).setLevel(logging.ERROR)
    cpu, wall = time.process_time(), time.perf_counter()
    found = function(*arguments)
    cost = {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.perf_counter() - wall}
    return found, {**cost, "peak_mib": resident() / 2**20}


def apart(function: Callable[..., Any], *arguments: Any, threads: int = 1) -> tuple[Any, dict]:
    """Call a function of a module in its own process; its result, and the seconds and memory of the call."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = str(threads)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_apart, function, arguments, threads).result()


# rows


def over_seeds(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean of each score over the seeds, its standard deviation (`_sd`) and its values (`_seeds`).

    Of dictionaries the means alone; other values are those of the first seed.
    """
    row: dict[str, Any] = {}
    for key, first in runs[0].items():
        values = [run[key] for run in runs if key in run]
        if isinstance(first, Mapping):
            row[key] = _means(values)
        elif isinstance(first, float):
            if not np.isfinite(values).all():  # not defined, such as a correlation with a constant
                continue
            row |= {key: round(fmean(values), 4), f"{key}_sd": round(pstdev(values), 4)}
            row[f"{key}_seeds"] = [round(value, 5) for value in values]
        else:
            row[key] = first
    return row


def _means(some: Sequence[Any]) -> Any:
    if isinstance(some[0], Mapping):
        keys = dict.fromkeys(key for one in some for key in one)
        return {key: _means([one[key] for one in some if key in one]) for key in keys}
    return round(fmean(some), 4) if isinstance(some[0], float) else some[0]


def lead(ours: dict, theirs: dict, key: str) -> tuple[float, tuple[float, float] | None]:
    """Difference of a score between two rows, and its 95% interval over seeds; None where nothing was random.

    Of paired differences where both rows have the score of each seed, otherwise of two means (Welch).
    """
    from scipy.stats import t

    value = round(ours[key] - theirs[key], 5)
    each = [row.get(f"{key}_seeds", []) for row in (ours, theirs)]
    width = 0.0
    if len(each[0]) == len(each[1]) > 1:
        differences = [a - b for a, b in zip(*each, strict=True)]
        width = t.ppf(0.975, len(differences) - 1) * stdev(differences) / sqrt(len(differences))
    else:
        parts = [(_error(row, key), _n_seeds(row)) for row in (ours, theirs)]
        if known := [(error**2, n - 1) for error, n in parts if error and n > 1]:
            total = sum(square for square, _ in known)
            width = t.ppf(0.975, total**2 / sum(square**2 / n for square, n in known)) * sqrt(total)
    return value, (value - width, value + width) if width > 0 else None


def _n_seeds(row: dict) -> int:
    return int(row.get("n_seeds", len(row.get("seeds", ()))))


def _error(row: dict, key: str) -> float | None:
    """Standard error over the seeds, of a population standard deviation."""
    n = _n_seeds(row)
    return row[f"{key}_sd"] / sqrt(n - 1) if n > 1 and f"{key}_sd" in row else None


def measure(
    name: str,
    place: dict[str, Any],
    same: dict[str, Any],
    fit: Callable[..., Found],
    arguments: tuple,
    score: Callable[[Found, int], dict],
    options: argparse.Namespace,
    *,
    once: bool = False,
) -> None:
    """Fit an arm for each seed in its own process, score it, and write the row into the results.

    `place` identifies the row (its `arm` too); a row with the same `same` (cells, seeds) exists already and is skipped,
    unless `--again`. `fit(*arguments, seed)` must be a function of a module. With `once` nothing is random and the
    first fit is used for every seed.
    """
    same = {**same, "seeds": options.seeds}
    if not options.again and any({**place, **same}.items() <= row.items() for row in rows_so_far(name)):
        return
    what = " ".join(map(str, place.values()))
    if (why := missing(place["arm"])) is not None:
        print(f"{what} not run: {why}", flush=True)
        return
    runs, costs = [], []
    for seed in options.seeds:
        if not (once and costs):
            found, cost = apart(fit, *arguments, seed, threads=options.threads)
            costs.append(cost)
        runs.append(score(found, seed))
    package = RIVALS.get(place["arm"], "scdiva")
    row = {
        **place, **same, "fits": len(costs), "commit": commit(), "processor": machine()["processor"],
        "package": f"{package} {version(package)}",
        **{key: round(fmean(cost[key] for cost in costs), 1) for key in costs[0]}, **over_seeds(runs),
    }  # fmt: skip
    record(name, replaced(rows_so_far(name), row, tuple(place)), model=options.model)
    scores = " ".join(f"{key} {value:.3f}" for key, value in row.items() if isinstance(value, float))
    print(f"{what}: {scores}", flush=True)


def parser_of(text: str, datasets: Sequence[str], arms: Sequence[str], parts: Sequence[str]) -> argparse.ArgumentParser:
    """The options that every task has."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the benchmark h5ad files")
    parser.add_argument("--sets", nargs="+", default=list(datasets), choices=list(datasets))
    parser.add_argument("--part", nargs="+", default=list(parts), choices=list(parts))
    parser.add_argument("--arms", nargs="+", default=list(arms), choices=list(arms))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--model", default="scdiva-mini")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-cells", type=int, default=MAX_CELLS, help="of a dataset, drawn at random")
    parser.add_argument("--again", action="store_true", help="repeat rows that exist")
    return parser
