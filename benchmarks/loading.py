"""Random mini-batches of raw rows from one h5ad file: our block shuffle beside AnnData's and scDataset's ways.

    python benchmarks/loading.py [--cells 60000] [--genes 20000] [--read 32768] [--repeats 7]

Every arm opens the same file anew and gives batches of 64 cells as rows of a CSR matrix until it gave `--read` cells:

- `ours`: the stream that training reads, blocks of 64 rows, 64 of them in the buffer that is permuted, over a source
  that hands on raw rows instead of ranking them. `ours, thread`: the next buffer is read in a thread, as training does.
- `backed`: 64 random rows of a backed AnnData object at a time, in the order of the file.
- `scDataset`: 64 × 64 (`BlockShuffling(64)`, batches of 64, fetch factor 64) on a backed AnnData object, each fetch
  loaded by `to_memory`; `scDataset, matrix`: the same on its backed matrix alone. Goals are against the faster.
- `AnnLoader`: anndata's, on a backed object, shuffled, batches of 64; as it is slow it gives `--read` / 16 cells.
- `ours, gzip`: ours on the same cells compressed with gzip.
- `TileDB-SOMA-ML`: its `ExperimentDataset` on the same cells as a SOMA experiment, shuffled by chunks of 64, 4,096
  cells at once.
- `packed, 64 processes`: the same cells packed (ranked tokens and values), read as every eighth of 64 processes does,
  an epoch of its lane, with batches of 64 cells or of 32,768 tokens.

Beside the times: what 64 processes read of what they use, counted over an epoch of 307,200 cells; how many blocks a
batch comes from; memory of pool and order of 59 M cells and the time to find a batch, of a simulated index
(`_loading_ranks.py`). annbatch needs Python 3.12.

The counts are made up: the number of genes of a cell is log-normal with the median and spread of the embedding
benchmark, genes are drawn by a power law. The file is uncompressed CSR as AnnData writes it, and in the page cache
after the first round. Arms in turn, best of the rounds. Goals are on CPU time (`process_time`) per cell of `ours`,
which like its rivals has one thread; wall time stands beside. Two threads that share a core or its memory count more
CPU time for the same work, so with the thread both ratios are given without a goal.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import anndata as ad
import numpy as np
import scipy.sparse as sp
import torch
from _judge import judge_times
from _loading_ranks import atlas_rows, counted_rows, packed_arms
from _record import PACKAGES, record, versions
from _timing import interleaved, report
from embedding_speed import MEDIAN, SPREAD

from scdiva.data import pack_files
from scdiva.data.blocks import open_matrix, read_ranges
from scdiva.data.order import Order
from scdiva.data.pool import CellPool
from scdiva.data.stream import TrainingStream
from scdiva.tokenizer import load_vocabulary

BATCH = BLOCK = BLOCKS = 64
WHOLE = 1 << 30
SLOW = 16
"""AnnLoader gives so many times fewer cells."""
DISTINCT = 4096
NO_SCDATASET = "scDataset is not installed: pip install -c constraints.txt scdataset"
NO_SOMA = "not installed: pip install tiledbsoma tiledbsoma-ml"
NO_ANNBATCH = "needs Python 3.12"
CELLS_PER_SECOND = 10_000
"""Goal of a process of 64, of one CPU: what 14 GPUs train on at 720 cells a second."""


def synthetic(n_cells: int, n_genes: int) -> sp.csr_matrix:
    """Counts of cells with a realistic number of genes; 4,096 different ones, repeated."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(np.log(MEDIAN), SPREAD, min(n_cells, DISTINCT)))
    lengths = np.clip(np.round(lengths), 1, n_genes // 3).astype(int)
    frequency = 1 / (np.arange(n_genes) + 50.0)
    # the largest of log frequency + Gumbel noise are a draw without replacement
    noise = rng.gumbel(size=(len(lengths), n_genes)).astype(np.float32) + np.log(frequency).astype(np.float32)
    rows = [np.sort(np.argpartition(-noise[i], n)[:n]) for i, n in enumerate(lengths)]
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    values = rng.geometric(0.6, indptr[-1]).astype(np.float32)
    distinct = sp.csr_matrix((values, np.concatenate(rows).astype(np.int32), indptr), shape=(len(rows), n_genes))
    copies = -(-n_cells // distinct.shape[0])
    return sp.vstack([distinct] * copies, format="csr")[:n_cells]


class RawRows:
    """Rows as they are stored, in the form of a source of training: the column is the token."""

    def __init__(self, path: Path) -> None:
        self._opened = open_matrix(path)
        self.n_obs = self._opened.shape[0]
        self.lengths = np.ones(self.n_obs, dtype=np.int32)  # every cell is wanted, an empty one too

    def read_ranges(self, ranges: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        block = read_ranges(self._opened.matrix, ranges)
        return block.indptr, block.indices, block.data

    def close(self) -> None:
        self._opened.close()


def ours(path: Path, n_cells: int, prefetch: bool = False) -> int:
    source = RawRows(path)
    pool = CellPool([source], [np.zeros(source.n_obs, dtype=np.int64)], 1, WHOLE, BLOCK)
    order = Order(pool, 0, BATCH, n_blocks=BLOCKS)
    stream = TrainingStream(order, stop=n_cells // BATCH, prefetch=prefetch)
    given = sum(batch.n_cells for batch in stream)
    source.close()
    return given


def backed(path: Path, n_cells: int) -> int:
    adata = ad.read_h5ad(path, backed="r")
    rng = np.random.default_rng(0)
    given = 0
    while given < n_cells:
        given += adata.X[np.sort(rng.choice(adata.n_obs, BATCH, replace=False))].shape[0]
    adata.file.close()
    return given


class Matrix:
    """A backed matrix that knows its length, as scDataset asks."""

    def __init__(self, adata: ad.AnnData) -> None:
        self._matrix, self._length = adata.X, adata.n_obs

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, rows: np.ndarray) -> sp.csr_matrix:
        return self._matrix[rows]


def in_memory(fetched: ad.AnnData) -> sp.csr_matrix:
    return fetched.to_memory().X


def sc_dataset(path: Path, n_cells: int, whole: bool = True) -> int:
    from scdataset import BlockShuffling, scDataset

    adata = ad.read_h5ad(path, backed="r")
    batches = scDataset(
        adata if whole else Matrix(adata),
        BlockShuffling(block_size=BLOCK),
        batch_size=BATCH,
        fetch_factor=BLOCKS,
        fetch_transform=in_memory if whole else None,
        seed=0,
    )
    given = 0
    for batch in batches:
        given += batch.shape[0]
        if given >= n_cells:
            break
    adata.file.close()
    return given


def ann_loader(path: Path, n_cells: int) -> int:
    from anndata.experimental import AnnLoader

    adata = ad.read_h5ad(path, backed="r")
    given = 0
    for batch in AnnLoader([adata], batch_size=BATCH, shuffle=True):
        given += batch.X.shape[0]
        if given >= n_cells:
            break
    adata.file.close()
    return given


def soma(experiment: Path, n_cells: int) -> int:
    import tiledbsoma
    from tiledbsoma_ml import ExperimentDataset, experiment_dataloader

    one_thread = {"sm.compute_concurrency_level": "1", "sm.io_concurrency_level": "1"}
    context = tiledbsoma.SOMATileDBContext(tiledb_config=one_thread)
    with tiledbsoma.Experiment.open(str(experiment), context=context) as opened, opened.axis_query("RNA") as query:
        batches = ExperimentDataset(
            query, layer_name="data", batch_size=BATCH, io_batch_size=BATCH * BLOCKS, shuffle_chunk_size=BLOCK,
            seed=0, return_sparse_X=True, use_eager_fetch=False,
        )  # fmt: skip
        given = 0
        for x, _ in experiment_dataloader(batches):
            given += x.shape[0]
            if given >= n_cells:
                break
    return given


def make_arms(plain: Path, gzip: Path, n_cells: int) -> dict[str, Callable[[], int]]:
    """Arms by name; each returns the number of cells that it gave."""
    arms = {
        "ours": lambda: ours(plain, n_cells),
        "ours, thread": lambda: ours(plain, n_cells, prefetch=True),
        "ours, gzip": lambda: ours(gzip, n_cells),
        "backed": lambda: backed(plain, n_cells),
        "AnnLoader": lambda: ann_loader(plain, max(n_cells // SLOW, BATCH)),
    }
    if find_spec("tiledbsoma_ml") is not None:
        arms["TileDB-SOMA-ML"] = lambda: soma(plain.with_name("soma"), n_cells)
    if find_spec("scdataset") is not None:
        arms["scDataset"] = lambda: sc_dataset(plain, n_cells)
        arms["scDataset, matrix"] = lambda: sc_dataset(plain, n_cells, whole=False)
    return arms


def timed(arms: dict[str, Callable[[], int]], repeats: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """CPU and wall microseconds per cell of each arm in each round."""
    given: dict[str, int] = {}
    wall: dict[str, list[float]] = {name: [] for name in arms}

    def run(name: str) -> None:
        start = time.perf_counter()
        given[name] = arms[name]()
        wall[name].append(time.perf_counter() - start)

    cpu = interleaved({name: lambda name=name: run(name) for name in arms}, repeats=repeats)
    return tuple({name: [one / given[name] * 1e6 for one in some[name]] for name in arms} for some in (cpu, wall))


def rows_of(rounds: dict[str, list[float]], wall_rounds: dict[str, list[float]]) -> list[dict]:
    """The goals, then every arm, by the best of the rounds."""
    cpu, wall = ({name: min(some) for name, some in of.items()} for of in (rounds, wall_rounds))
    rivals = {"backed": 12.0}
    if "scDataset" in cpu:
        rivals[min(("scDataset", "scDataset, matrix"), key=lambda name: cpu[name])] = 2.0
    goals = [
        judge_times(
            f"CPU time per cell, {name} / ours",
            rounds[name],
            rounds["ours"],
            at_least=least,
            wall_time=round(wall[name] / wall["ours"], 2),
        )
        for name, least in rivals.items()
    ]
    goals += [
        judge_times(
            f"cells per CPU second, packed parts,{name.removeprefix('packed,')}",
            [1e6] * len(rounds[name]),
            rounds[name],
            at_least=CELLS_PER_SECOND,
        )
        for name in rounds
        if name.startswith("packed")
    ]
    ratios = [{"what": "CPU time per cell, ours on gzip / ours", "value": cpu["ours, gzip"] / cpu["ours"]}]
    ratios += [
        {
            "what": f"CPU time per cell, {name} / ours with the thread",
            "value": cpu[name] / cpu["ours, thread"],
            "wall_time": round(wall[name] / wall["ours, thread"], 2),
        }
        for name in rivals
    ]
    arms = [
        {
            "what": name,
            "cpu_microseconds_per_cell": round(cpu[name], 2),
            "wall_microseconds_per_cell": round(wall[name], 2),
            "cells_per_cpu_second": round(1e6 / cpu[name]),
        }
        for name in cpu
    ]
    return [*goals, *ratios, *arms]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=60_000)
    parser.add_argument("--genes", type=int, default=20_000)
    parser.add_argument("--read", type=int, default=32_768)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        plain, gzip = Path(folder) / "plain.h5ad", Path(folder) / "gzip.h5ad"
        matrix = synthetic(options.cells, options.genes)
        median = int(np.median(np.diff(matrix.indptr)))
        adata = ad.AnnData(matrix)
        adata.obs_names = [f"cell{i}" for i in range(adata.n_obs)]
        adata.var_names = load_vocabulary("human").ensembl_ids[: adata.n_vars]
        adata.write_h5ad(plain)
        adata.write_h5ad(gzip, compression="gzip")
        mebibytes = plain.stat().st_size / 2**20
        if find_spec("tiledbsoma_ml") is not None:
            import tiledbsoma.io

            tiledbsoma.io.from_anndata(str(Path(folder) / "soma"), adata, measurement_name="RNA")
        del adata, matrix
        pack_files([plain], "human", Path(folder) / "packed").close()
        arms = make_arms(plain, gzip, options.read) | packed_arms(Path(folder) / "packed")
        rows = rows_of(*timed(arms, options.repeats))
        rows += [*counted_rows(MEDIAN, SPREAD), *atlas_rows(Path(folder), MEDIAN, SPREAD)]
    if find_spec("scdataset") is None:
        rows.append({"what": "scDataset", "left_out": NO_SCDATASET})
    if find_spec("tiledbsoma_ml") is None:
        rows.append({"what": "TileDB-SOMA-ML", "left_out": NO_SOMA})
    rows.append({"what": "annbatch", "left_out": NO_ANNBATCH})
    record(
        "loading",
        rows,
        cells=options.cells,
        genes=options.genes,
        median_genes=median,
        file_mib=round(mebibytes),
        read=options.read,
        versions=versions((*PACKAGES, "h5py", "scdataset", "tiledbsoma", "tiledbsoma-ml")),
    )
    return report(rows)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
