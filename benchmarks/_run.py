"""What every benchmark needs: labelled datasets, seconds of a call, hashes, intervals over datasets.

It imports neither scdiva nor torch, so that a rival's own environment can read the same cells.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import anndata as ad
import numpy as np
import pandas as pd

NO_TYPE = ("", "nan", "None", "ND", "Other", "unknown", "Unknown", "unlabelled")
"""Labels of cells without a cell type."""
LEAST_TYPE, LEAST_CELLS = 5, 100
"""Cells of a type, and cells of such types in a dataset, below which a score says nothing."""
DRAWS = 10_000

Made = TypeVar("Made")


def cell_types(obs: pd.DataFrame) -> np.ndarray:
    """The label of each cell as text, empty where it names no cell type."""
    if "cell_type" not in obs:
        return np.full(len(obs), "", dtype=str)
    labels = obs["cell_type"].astype(str).to_numpy(dtype=str)
    return np.where(np.isin(labels, NO_TYPE), "", labels)


def labelled_datasets(folder: Path) -> list[str]:
    """Names of the files of a folder with two cell types of 5 cells or more and 100 such cells."""
    found = []
    for file in sorted(folder.glob("*.h5ad")):
        cells = ad.read_h5ad(file, backed="r")
        counts = pd.Series(cell_types(cells.obs)).value_counts().drop("", errors="ignore")
        cells.file.close()
        counts = counts[counts >= LEAST_TYPE]
        if len(counts) > 1 and counts.sum() >= LEAST_CELLS:
            found.append(file.stem)
    return found


def read_dataset(folder: Path, name: str, max_cells: int, seed: int = 0) -> ad.AnnData:
    """Read a dataset; of more than `max_cells` cells, so many are drawn."""
    adata = ad.read_h5ad(folder / f"{name}.h5ad")
    if adata.n_obs > max_cells:
        adata = adata[np.sort(np.random.default_rng(seed).permutation(adata.n_obs)[:max_cells])].copy()
    return adata


def batch_column(adata: ad.AnnData) -> str | None:
    """`"batch"` if half of the cell types or more have cells of two batches: else batch and type are confounded."""
    if "batch" not in adata.obs:
        return None
    types = cell_types(adata.obs)
    shared = adata.obs["batch"].astype(str).groupby(types).nunique().drop("", errors="ignore") > 1
    return "batch" if shared.mean() >= 0.5 else None


def timed(call: Callable[[], Made]) -> tuple[Made, float]:
    """What a call returns, and its CPU seconds."""
    begun = time.process_time()
    made = call()
    return made, round(time.process_time() - begun, 2)


def digest(*arrays: np.ndarray) -> str:
    """A hash of the values of arrays, 16 hexadecimal digits."""
    found = hashlib.sha256()
    for array in arrays:
        text = array.dtype.kind == "U"
        found.update("\n".join(array.tolist()).encode() if text else np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


def bootstrap(values: Sequence[float], level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """The percentile interval of a mean over datasets, each drawn with replacement."""
    drawn = np.asarray(values, dtype=float)
    means = drawn[np.random.default_rng(seed).integers(len(drawn), size=(DRAWS, len(drawn)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
