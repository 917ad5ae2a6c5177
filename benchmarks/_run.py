"""Runner of the task benchmarks: datasets, rivals, fits in their own processes, seeds, intervals and result rows."""

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
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scanpy as sc
import scipy.sparse as sp
import torch
from _record import commit, machine, record, recorded_rows, replaced, resident

import scdiva as sd

MAX_CELLS = 6000
BATCH, LABELS, TRAINING_LABELS = "batch", "cell_type", "training_label"
"""Columns of obs: batches and cell types of a prepared dataset, and the labels that a method receives."""
UNLABELLED = "unlabelled"
NO_TYPE = ("", "nan", "None", "ND", "Other", "unknown", "Unknown", UNLABELLED)
"""Labels of cells without a cell type."""
MIN_CELLS_PER_TYPE, MIN_LABELLED_CELLS = 5, 100
N_HVG, N_PCS, CLIP = 2000, 50, 10.0
RIVALS = {
    "harmony20": ("harmonypy", "harmonypy"), "scanorama": ("scanorama",) * 2,
    "scvi": ("scvi-tools", "scvi"), "scanvi": ("scvi-tools", "scvi"),
    "celltypist": ("celltypist",) * 2, "magic": ("magic-impute", "magic"),
}  # fmt: skip
"""Package and module of the arms that need one."""
SLOW = ("scvi", "scanvi")
Result = dict[str, Any]


# datasets


def cell_types(obs: pd.DataFrame) -> np.ndarray:
    """The cell type of each cell as text, empty for cells without one."""
    if LABELS not in obs:
        return np.full(len(obs), "", dtype=str)
    labels = obs[LABELS].astype(str).to_numpy(dtype=str)
    return np.where(np.isin(labels, NO_TYPE), "", labels)


def labelled_datasets(folder: Path) -> list[str]:
    """Files with at least two cell types of 5 cells, and 100 cells of such types."""
    names = []
    for file in sorted(folder.glob("*.h5ad")):
        adata = ad.read_h5ad(file, backed="r")
        sizes = pd.Series(cell_types(adata.obs)).value_counts().drop("", errors="ignore")
        adata.file.close()
        sizes = sizes[sizes >= MIN_CELLS_PER_TYPE]
        if len(sizes) > 1 and sizes.sum() >= MIN_LABELLED_CELLS:
            names.append(file.stem)
    return names


def subsampled(adata: ad.AnnData, max_cells: int) -> ad.AnnData:
    """At most `max_cells` cells, always the same ones."""
    return adata[np.sort(np.random.default_rng(0).permutation(adata.n_obs)[:max_cells])].copy()


def prepared(adata: ad.AnnData, max_cells: int, *columns: str) -> ad.AnnData:
    """Counts of at most `max_cells` cells with `BATCH`, `LABELS` and other columns of obs."""
    adata = subsampled(adata, max_cells)
    counts = sp.csr_matrix(adata.X, dtype=np.float32)
    if (counts.data < 0).any():
        raise ValueError(f"X has {(counts.data < 0).sum()} negative values; benchmarks need counts.")
    names = [name for name in dict.fromkeys((BATCH, LABELS, *columns)) if name in adata.obs]
    obs = adata.obs[names].astype(str).astype("category")
    return ad.AnnData(counts, obs=obs, var=adata.var.copy())


def fingerprint(adata: ad.AnnData, keys: Sequence[str] = (BATCH, LABELS)) -> str:
    """A hash of counts, genes and columns of obs."""
    digest = hashlib.sha256()
    for part in (adata.X.data, adata.X.indices, adata.X.indptr):
        digest.update(part.tobytes())
    for names in (adata.var_names, *(adata.obs[key] for key in keys if key in adata.obs)):
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
    first, second = (log_normalised(cells)[:, genes].X.toarray() for cells in (reference, query))
    mean, std = first.mean(axis=0), first.std(axis=0, ddof=1)
    std[std == 0] = 1.0
    return np.clip((first - mean) / std, -CLIP, CLIP), np.clip((second - mean) / std, -CLIP, CLIP)


# rivals


def pca(adata: ad.AnnData, n_components: int = N_PCS, *, scale: bool = True) -> np.ndarray:
    """Principal components of the 2,000 variable genes, scaled or not."""
    values = scaled(adata, adata)[0] if scale else log_normalised(adata)[:, variable_genes(adata)].X
    work = ad.AnnData(values)
    sc.pp.pca(work, n_comps=min(n_components, min(work.shape) - 1))
    return work.obsm["X_pca"]


def projected_pca(reference: ad.AnnData, query: ad.AnnData) -> tuple[np.ndarray, np.ndarray]:
    """50 principal components of the reference's scaled variable genes, and the query projected on them."""
    first, second = scaled(reference, query)
    work = ad.AnnData(first)
    sc.pp.pca(work, n_comps=min(N_PCS, min(first.shape) - 1))
    return work.obsm["X_pca"], (second - first.mean(axis=0)) @ work.varm["PCs"]


def harmony(components: np.ndarray, adata: ad.AnnData, seed: int) -> np.ndarray:
    """Harmony on principal components."""
    import harmonypy

    components = components.astype(np.float64)
    corrected = np.asarray(harmonypy.run_harmony(components, adata.obs, BATCH, random_state=seed, verbose=False).Z_corr)
    return corrected if corrected.shape == components.shape else corrected.T  # versions differ


def combat(adata: ad.AnnData) -> np.ndarray:
    """50 principal components of variable genes corrected by ComBat."""
    work = log_normalised(adata)[:, variable_genes(adata)].copy()
    work.X = work.X.toarray()
    sc.pp.combat(work, BATCH)
    sc.pp.scale(work, max_value=CLIP)
    sc.pp.pca(work, n_comps=min(N_PCS, min(work.shape) - 1))
    return work.obsm["X_pca"]


def scanorama(adata: ad.AnnData) -> np.ndarray:
    """Scanorama on 20 principal components that are not scaled, as scanpy calls it."""
    order = np.argsort(adata.obs[BATCH].astype(str).to_numpy(), kind="stable")  # it requires contiguous batches
    components = pca(adata, 20, scale=False)[order]
    work = ad.AnnData(components, obs=adata.obs.iloc[order], obsm={"X_pca": components})
    sc.external.pp.scanorama_integrate(work, BATCH, verbose=0)
    return work.obsm["X_scanorama"][np.argsort(order)]


def fitted_scvi(adata: ad.AnnData, seed: int, genes: list[str] | None = None, batch_key: str | None = BATCH) -> Any:
    """scVI with its defaults and early stopping on variable genes; counts are rounded."""
    import scvi

    part = adata[:, variable_genes(adata) if genes is None else genes]
    counts = sp.csr_matrix(part.X, copy=True)
    counts.data = np.round(counts.data)
    cells = ad.AnnData(counts, obs=part.obs.copy(), var=part.var[[]].copy())
    scvi.settings.seed = seed
    threads = torch.get_num_threads()
    scvi.model.SCVI.setup_anndata(cells, batch_key=batch_key)
    network = scvi.model.SCVI(cells)
    network.train(early_stopping=True, accelerator="cpu", enable_progress_bar=False)
    torch.set_num_threads(threads)
    return network


def fitted_scanvi(adata: ad.AnnData, seed: int, genes: list[str] | None = None) -> Any:
    """scANVI with `TRAINING_LABELS`, started from such an scVI, with its defaults."""
    from scvi.model import SCANVI

    fitted = SCANVI.from_scvi_model(fitted_scvi(adata, seed, genes), UNLABELLED, labels_key=TRAINING_LABELS)
    fitted.train(accelerator="cpu", enable_progress_bar=False)
    return fitted


def missing(arm: str) -> str | None:
    """Why an arm cannot run here; None if it can."""
    if arm not in RIVALS or find_spec(RIVALS[arm][1]) is not None:
        return None
    return f"{RIVALS[arm][0]} is not installed: pip install -c constraints.txt {RIVALS[arm][0]}"


# fits and rows


def _run_measured(function: Callable[..., Any], arguments: tuple, threads: int) -> tuple[Any, dict]:
    torch.set_num_threads(threads)
    sd.settings.progress, sd.settings.threads = False, threads
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "harmonypy", "scvi"):
        logging.getLogger(name).setLevel(logging.ERROR)
    cpu, wall = time.process_time(), time.perf_counter()
    result = function(*arguments)
    cost = {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.perf_counter() - wall}
    return result, {**cost, "peak_mib": resident() / 2**20}


def in_subprocess(function: Callable[..., Any], *arguments: Any, threads: int = 1) -> tuple[Any, dict]:
    """Call a function of a module in its own process; its result, and the seconds and memory of the call."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = str(threads)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_run_measured, function, arguments, threads).result()


def over_seeds(runs: Sequence[Mapping[str, Any]]) -> Result:
    """Mean of each score over the seeds, its standard deviation (`_sd`) and its values (`_seeds`).

    Of dictionaries only the means; other values are those of the first seed.
    """
    row: Result = {}
    for key, first in runs[0].items():
        values = [run[key] for run in runs if key in run]
        if isinstance(first, Mapping):
            row[key] = _means(values)
        elif not isinstance(first, float):
            row[key] = first
        elif np.isfinite(values).all():  # undefined scores, such as a correlation with a constant, are not recorded
            row |= {key: round(fmean(values), 4), f"{key}_sd": round(pstdev(values), 4)}
            row[f"{key}_seeds"] = [round(value, 5) for value in values]
    return row


def _means(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Mapping):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _means([value[key] for value in values if key in value]) for key in keys}
    return round(fmean(values), 4) if isinstance(values[0], float) else values[0]


def has_row(name: str, row: dict[str, Any], options: argparse.Namespace) -> bool:
    """Whether the results have such a row; with `--again`, whether they have one of this commit."""
    if options.again:
        row = {**row, "commit": commit()}
        if "+" in row["commit"] or row["commit"] == "unknown":  # the state of the code is not identified
            return False
    return any(row.items() <= other.items() for other in recorded_rows(name))


def measure(
    name: str,
    row_key: dict[str, Any],
    inputs: dict[str, Any],
    fit: Callable[..., Result],
    arguments: tuple,
    score: Callable[[Result, int], dict],
    options: argparse.Namespace,
    *,
    deterministic: bool = False,
) -> None:
    """Fit an arm for each seed in its own process, score it, and write the row into the results.

    `row_key` identifies the row (its `arm` too); if a row with the same `inputs` (cells, seeds) exists, the arm is
    skipped. `fit(*arguments, seed)` must be a function of a module. A deterministic arm is fitted once and scored for
    every seed; scVI and scANVI, which take minutes, have the first seed only.
    """
    seeds = options.seeds[:1] if row_key["arm"] in SLOW else options.seeds
    inputs = {**inputs, "seeds": seeds}
    if has_row(name, {**row_key, **inputs}, options):
        return
    what = " ".join(map(str, row_key.values()))
    if (why := missing(row_key["arm"])) is not None:
        print(f"{what} not run: {why}", flush=True)
        return
    runs, costs = [], []
    for seed in seeds:
        if not (deterministic and costs):
            result, cost = in_subprocess(fit, *arguments, seed, threads=options.threads)
            costs.append(cost)
        runs.append(score(result, seed))
    package = RIVALS[row_key["arm"]][0] if row_key["arm"] in RIVALS else "scdiva"
    row = {
        **row_key, **inputs, "fits": len(costs), "commit": commit(), "processor": machine()["processor"],
        "package": f"{package} {version(package)}",
        **{key: round(fmean(cost[key] for cost in costs), 1) for key in costs[0]}, **over_seeds(runs),
    }  # fmt: skip
    record(name, replaced(recorded_rows(name), row, tuple(row_key)), model=options.model)
    scores = " ".join(f"{key} {value:.3f}" for key, value in row.items() if isinstance(value, float))
    print(f"{what}: {scores}", flush=True)


def parser_of(text: str, datasets: Sequence[str], arms: Sequence[str], parts: Sequence[str]) -> argparse.ArgumentParser:
    """The options of every task; without `datasets` any name is accepted."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the benchmark h5ad files")
    parser.add_argument("--sets", nargs="+", default=list(datasets), choices=list(datasets) or None)
    parser.add_argument("--part", nargs="+", default=list(parts), choices=list(parts))
    parser.add_argument("--arms", nargs="+", default=list(arms), choices=list(arms))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--model", default="scdiva-mini")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-cells", type=int, default=MAX_CELLS, help="of a dataset, drawn at random")
    parser.add_argument("--again", action="store_true", help="repeat rows of other commits")
    return parser
