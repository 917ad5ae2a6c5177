"""Speed on one core: embedding, and loading of training data.

    python benchmarks/speed.py [--part embed load] [--small] [--repeats 5]

Arms take turns and the best CPU time of each counts; intervals are over rounds. A missed goal fails the call.

- embed: the paper's network with random weights, bfloat16 compared with float32.
- load: random batches of 64 raw rows from an h5ad file, compared with a backed AnnData object and scDataset.

scaling.py and gpu.py measure the other calls, and training.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import _record
import anndata as ad
import numpy as np
import scipy.sparse as sp
import torch
from _gpu import embed_flops
from torch import Tensor

from scdiva._constants import N_SPECIAL
from scdiva._settings import multiplies_bf16
from scdiva.data.matrix import open_matrix, read_ranges
from scdiva.data.sampler import CellPool, Order, TrainingStream
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.models.inference import open_encoder
from scdiva.tokenizer import load_vocabulary

MEDIAN, SPREAD = 900, 0.35
"""Genes of a cell: median, and standard deviation of their logarithm."""
Cell = tuple[Tensor, Tensor, Tensor]


def supported_precisions() -> list[str]:
    """Precisions that this CPU computes in hardware; without it bfloat16 takes up to 120 times as long as float32."""
    if multiplies_bf16("cpu"):
        return ["fp32", "bf16"]
    print("not run: bf16; this CPU does not support it", flush=True)
    return ["fp32"]


# embedding


def cell_of(config: ScDiVaConfig, n_genes: int) -> Cell:
    """A random cell as the serialiser returns it."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randperm(config.n_genes, generator=generator)[:n_genes] + N_SPECIAL
    return tokens, torch.rand(n_genes, generator=generator) * 4, torch.tensor([0, n_genes], dtype=torch.int32)


def encode_one(encode: Callable, cell: Cell) -> np.ndarray:
    return np.concatenate(list(encode(lambda one: one, [cell])))


def embed(repeats: int, small: bool) -> Iterator[dict]:
    config = ScDiVaConfig.paper()
    model = ScDiVa(config, generator=torch.Generator().manual_seed(0)).eval()
    cell, work = cell_of(config, config.max_length), embed_flops(config, [config.max_length + 1])
    with ExitStack() as stack:
        arms: dict[str, Callable] = {}
        for name in supported_precisions():
            encode = stack.enter_context(open_encoder(model, precision=name, threads=1))
            arms[name] = partial(encode_one, encode, cell)
        states = {name: arm()[0].astype(np.float64) for name, arm in arms.items()}
        rounds = _record.interleaved(arms, repeats=repeats)
    for name, seconds in rounds.items():
        rate = {"value": 1 / min(seconds), "gflops": work / min(seconds) / 1e9}
        yield {"what": f"cells per CPU second at {config.max_length} genes, {name}", **rate}
    if "bf16" in rounds:
        a, b = states["fp32"], states["bf16"]
        cosine = float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        yield _record.ratio_goal("bf16 vs fp32, speed", rounds["fp32"], rounds["bf16"], at_least=1.8)
        yield _record.goal("bf16 vs fp32, cosine of the states", cosine, at_least=0.9995, counted=True)


# loading


def by_detection(n_cells: int, entropy: np.ndarray) -> sp.csr_matrix:
    """Counts of genes that are detected as often as their entropy says, with ties; a column for each gene."""
    rng, rate = np.random.default_rng(0), np.linspace(1e-6, 0.5, 100_000)
    upto = np.cumsum(np.interp(entropy, -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)), rate))
    genes = []
    for length in np.clip(MEDIAN * rng.lognormal(0, SPREAD, n_cells), 100, 6000).astype(int):
        drawn = np.unique(np.searchsorted(upto, rng.random(2 * length) * upto[-1]))
        genes.append(np.sort(rng.permutation(drawn)[:length]).astype(np.int32))
    indices = np.concatenate(genes)
    counts = 1 + rng.poisson(0.1 * np.exp(2 * entropy[indices]) * rng.standard_exponential(len(indices)))
    indptr = np.cumsum([0, *map(len, genes)])
    return sp.csr_matrix((counts.astype(np.float32), indices, indptr), shape=(n_cells, len(entropy)))


class RawRows:
    """Stored rows as a source of training cells: the column is the token."""

    def __init__(self, path: Path) -> None:
        self._opened = open_matrix(path)
        self.n_obs = self._opened.shape[0]
        self.lengths = np.ones(self.n_obs, dtype=np.int32)

    def read_ranges(self, ranges: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        block = read_ranges(self._opened.matrix, ranges)
        return block.indptr, block.indices, block.data

    def close(self) -> None:
        self._opened.close()


def read_ours(path: Path, n_cells: int) -> int:
    source = RawRows(path)
    pool = CellPool([source], [np.zeros(source.n_obs, dtype=np.int64)], 1, 1 << 30, 64)
    stream = TrainingStream(Order(pool, 0, 64, n_blocks=64), stop=n_cells // 64, prefetch=False)
    n_read = sum(batch.n_cells for batch in stream)
    source.close()
    return n_read


def read_backed(path: Path, n_cells: int) -> int:
    adata, rng, n_read = ad.read_h5ad(path, backed="r"), np.random.default_rng(0), 0
    while n_read < n_cells:
        n_read += adata.X[np.sort(rng.choice(adata.n_obs, 64, replace=False))].shape[0]
    adata.file.close()
    return n_read


def read_scdataset(path: Path, n_cells: int) -> int:
    from scdataset import BlockShuffling, scDataset

    adata, n_read = ad.read_h5ad(path, backed="r"), 0
    options = {"fetch_factor": 64, "fetch_transform": lambda fetched: fetched.to_memory().X, "seed": 0}
    for batch in scDataset(adata, BlockShuffling(block_size=64), batch_size=64, **options):
        n_read += batch.shape[0]
        if n_read >= n_cells:
            break
    adata.file.close()
    return n_read


def write_cells(folder: Path, n_cells: int) -> Path:
    """A file of counts of 20,000 human genes."""
    human = load_vocabulary("human")
    adata = ad.AnnData(by_detection(n_cells, human.entropy[N_SPECIAL : N_SPECIAL + 20_000]))
    adata.obs_names = [f"cell{i}" for i in range(n_cells)]
    adata.var_names = human.ensembl_ids[: adata.n_vars]
    adata.write_h5ad(folder / "cells.h5ad")
    return folder / "cells.h5ad"


def load(repeats: int, small: bool) -> Iterator[dict]:
    n_cells, n_read = (20_000, 8_192) if small else (60_000, 32_768)
    readers = {"ours": read_ours, "backed": read_backed}
    if find_spec("scdataset") is not None:
        readers["scDataset"] = read_scdataset
    with tempfile.TemporaryDirectory() as name:
        path = write_cells(Path(name), n_cells)
        arms = {arm: partial(reader, path, n_read) for arm, reader in readers.items()}
        n_cells_of = {arm: call() for arm, call in arms.items()}
        rounds = _record.interleaved(arms, repeats=repeats, warmup=0)
    per_cell = {arm: [seconds / n_cells_of[arm] for seconds in rounds[arm]] for arm in arms}
    for arm, least in {"backed": 12.0, "scDataset": 2.0}.items():
        if arm in per_cell:
            yield _record.ratio_goal(
                f"CPU time per cell, {arm} / ours", per_cell[arm], per_cell["ours"], at_least=least
            )
    for arm, seconds in per_cell.items():
        yield {"what": arm, "cells_per_cpu_second": round(1 / min(seconds))}


PARTS = {"embed": embed, "load": load}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--small", action="store_true", help="smaller sizes")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    missed = 0
    for part in options.part:
        start_time, rows = time.perf_counter(), []
        about = {"part": part, "commit": _record.commit(), "processor": _record.machine()["processor"]}
        for row in PARTS[part](options.repeats, options.small):
            rows.append({**about, **row})
            missed += _record.report([row])
        print(f"== {part}: {time.perf_counter() - start_time:.0f} s", flush=True)
        others = [row for row in _record.recorded_rows("speed", goals=True) if row["part"] != part]
        _record.record("speed", [*others, *rows], repeats=options.repeats, small=options.small)
    return missed


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
