"""Speed and memory on one core: embedding, serialising, loading, loss and training, compared with plain ways to do it.

    python benchmarks/speed.py [--part embed serialise load pack loss train] [--small] [--repeats 5]

Arms take turns and the best CPU time of each counts; intervals are over rounds. Goals are judged, and a missed goal
fails the call. `--small` runs smaller sizes, about ten minutes in all.

- embed: the paper's network with random weights. Share of the matmul rate: (FLOPs of a cell / time of encoding it) /
  (FLOPs of the blocks' linear layers / time of these products alone). bf16 compared with fp32.
- serialise: cells to ranked tokens, compared with a lexsort of each row and a copy of the arrays.
- load: random batches of 64 raw rows from an h5ad file, compared with a backed AnnData object and scDataset; packed
  cells read as by one of 64 processes.
- pack: files of one study each into a packed corpus, in cells per CPU second.
- loss: cross-entropy of masked genes in chunks, compared with full logits: time and peak memory.
- train: a training step of the paper's network, as a share of the rate of a square matrix product.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import anndata as ad
import numpy as np
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from _gpu import embed_flops, spread_lengths, train_flops
from _record import commit, goal, interleaved, machine, ratio_goal, record, recorded_rows, report
from torch import Tensor, nn

from scdiva._constants import MAX_LENGTH, N_SPECIAL
from scdiva._settings import multiplies_bf16
from scdiva.data import PackedCells, pack_files
from scdiva.data.batch import CellBatch
from scdiva.data.matrix import open_matrix, read_ranges
from scdiva.data.sampler import CellPool, Order, TrainingStream
from scdiva.diffusion import masked_cross_entropy
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.models.inference import open_encoder
from scdiva.tokenizer import load_vocabulary
from scdiva.tokenizer.serialize import score_denominator, serialize, to_token_space
from scdiva.train import PretrainingConfig, PretrainingModule

MEDIAN, SPREAD = 900, 0.35
"""Genes of a cell: median, and standard deviation of their logarithm."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Cell = tuple[Tensor, Tensor, Tensor]


def supported_precisions() -> list[str]:
    """Precisions that this CPU computes in hardware; without it bfloat16 takes up to 120 times as long as float32."""
    if multiplies_bf16("cpu"):
        return list(DTYPES)
    print("not run: bf16; this CPU does not support it", flush=True)
    return ["fp32"]


# embedding


def linear_flops(config: ScDiVaConfig, n_genes: int) -> float:
    """FLOPs of the linear layers of all blocks for one cell."""
    return config.n_layers * 2 * (n_genes + 1) * config.dim * (4 * config.dim + 3 * config.ffn_dim)


def cell_of(config: ScDiVaConfig, n_genes: int) -> Cell:
    """A random cell as the serialiser returns it."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randperm(config.n_genes, generator=generator)[:n_genes] + N_SPECIAL
    return tokens, torch.rand(n_genes, generator=generator) * 4, torch.tensor([0, n_genes], dtype=torch.int32)


def products(model: ScDiVa, n_genes: int, dtype: torch.dtype) -> Callable[[], None]:
    """Only the matrix products of the linear layers of all blocks."""
    layers = [layer for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]
    weights = [layer.weight.detach().to(dtype) for layer in layers]
    inputs = {w.shape[1]: torch.randn(n_genes + 1, w.shape[1]).to(dtype) for w in weights}

    def multiply() -> None:
        with torch.inference_mode():
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)

    return multiply


def encode_one(encode: Callable, cell: Cell) -> np.ndarray:
    return np.concatenate(list(encode(lambda one: one, [cell])))


def embed(repeats: int, small: bool) -> Iterator[dict]:
    config = ScDiVaConfig.paper()
    model = ScDiVa(config, generator=torch.Generator().manual_seed(0)).eval()
    n_genes, precisions = config.max_length, supported_precisions()
    cell = cell_of(config, n_genes)
    with ExitStack() as stack:
        arms: dict[str, Callable] = {}
        for name in precisions:
            encode = stack.enter_context(open_encoder(model, precision=name, threads=1))
            arms[name] = partial(encode_one, encode, cell)
        states = {name: arm()[0].astype(np.float64) for name, arm in arms.items()}
        arms |= {f"{name} products": products(model, n_genes, DTYPES[name]) for name in precisions}
        rounds = interleaved(arms, repeats=repeats)
    work = embed_flops(config, [n_genes + 1])
    for name in precisions:
        yield ratio_goal(
            f"share of matmul rate, {name}", rounds[f"{name} products"], rounds[name],
            at_least={"fp32": 0.75, "bf16": 0.60}[name], scale=work / linear_flops(config, n_genes),
            gflops=work / min(rounds[name]) / 1e9,
        )  # fmt: skip
        yield {"what": f"cells per CPU second at {n_genes} genes, {name}", "value": 1 / min(rounds[name])}
    if "bf16" in precisions:
        a, b = states["fp32"], states["bf16"]
        cosine = float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        yield ratio_goal("bf16 vs fp32, speed", rounds["fp32"], rounds["bf16"], at_least=1.8)
        yield goal("bf16 vs fp32, cosine of the states", cosine, at_least=0.9995, counted=True)


# serialising, loading and packing


def synthetic(n_cells: int, n_genes: int) -> sp.csr_matrix:
    """Counts of cells with a realistic number of genes; 4,096 different cells, repeated."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(np.log(MEDIAN), SPREAD, min(n_cells, 4096)))
    lengths = np.clip(np.round(lengths), 1, n_genes // 3).astype(int)
    frequency = np.log(1 / (np.arange(n_genes) + 50.0)).astype(np.float32)
    # the largest of log frequency + Gumbel noise are a draw without replacement
    scores = (rng.gumbel(size=n_genes).astype(np.float32) + frequency for _ in lengths)
    rows = [np.sort(np.argpartition(-score, n)[:n]) for score, n in zip(scores, lengths, strict=True)]
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    values = rng.geometric(0.6, indptr[-1]).astype(np.float32)
    distinct = sp.csr_matrix((values, np.concatenate(rows).astype(np.int32), indptr), shape=(len(rows), n_genes))
    return sp.vstack([distinct] * -(-n_cells // len(rows)), format="csr")[:n_cells]


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


def lexsort_rows(cells: sp.csr_matrix, denominator: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each row by falling score, then rising token."""
    indptr, tokens, values = [0], [], []
    for i in range(cells.shape[0]):
        row = slice(cells.indptr[i], cells.indptr[i + 1])
        token, value = cells.indices[row], cells.data[row]
        order = np.lexsort((token, -(value / denominator[token])))[:MAX_LENGTH]
        tokens.append(token[order])
        values.append(value[order])
        indptr.append(indptr[-1] + len(order))
    return np.array(indptr), np.concatenate(tokens), np.concatenate(values)


def serialise(repeats: int, small: bool) -> Iterator[dict]:
    n_cells = 10_000 if small else 20_000
    entropy = load_vocabulary("human").entropy
    denominator, n_tokens = score_denominator(entropy), len(entropy)
    token_of = np.random.default_rng(1).permutation(np.arange(N_SPECIAL, n_tokens)).astype(np.int32)
    cells = to_token_space(by_detection(n_cells, entropy[token_of]), token_of, n_tokens)
    if not all(map(np.array_equal, serialize(cells, denominator), lexsort_rows(cells, denominator))):
        raise AssertionError("The rankings differ.")

    def fresh() -> sp.csr_matrix:  # scipy keeps whether indices are sorted
        return sp.csr_matrix((cells.data, cells.indices, cells.indptr), shape=cells.shape)

    rounds = interleaved({
        "serialize": lambda: serialize(fresh(), denominator), "lexsort": lambda: lexsort_rows(cells, denominator),
        "copy of the arrays": lambda: (cells.indptr.copy(), cells.indices.copy(), cells.data.copy()),
    }, repeats=repeats)  # fmt: skip
    ours = rounds["serialize"]
    yield ratio_goal("serialize: times as fast as the lexsort loop", rounds["lexsort"], ours, at_least=5)
    yield ratio_goal("serialize: times as slow as a copy", ours, rounds["copy of the arrays"], at_most=10)
    for name, seconds in rounds.items():
        yield {"what": name, "cpu_seconds": min(seconds), "cells_per_cpu_second": round(n_cells / min(seconds))}


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


def read_packed(path: Path, n_cells: int) -> int:
    """An epoch of every eighth of 64 processes."""
    cells = PackedCells(path)
    pool, n_read = CellPool([cells], [cells.study], 200, MAX_LENGTH, 64), 0
    order = Order(pool, 0, 64, None, 64, [(0, 64)])
    for rank in range(0, 64, 8):
        stream = TrainingStream(order, stop=64 * order.deal(0, 0).n_batches, prefetch=False)
        stream.rank, stream.world_size = rank, 64
        n_read += sum(batch.n_cells for batch in stream)
    cells.close()
    return n_read


def write_cells(folder: Path, n_cells: int) -> Path:
    """A file of synthetic counts of 20,000 human genes."""
    adata = ad.AnnData(synthetic(n_cells, 20_000))
    adata.obs_names = [f"cell{i}" for i in range(n_cells)]
    adata.var_names = load_vocabulary("human").ensembl_ids[: adata.n_vars]
    adata.write_h5ad(folder / "cells.h5ad")
    return folder / "cells.h5ad"


def load(repeats: int, small: bool) -> Iterator[dict]:
    n_cells, n_read = (20_000, 8_192) if small else (60_000, 32_768)
    readers = {"ours": read_ours, "backed": read_backed, "packed": read_packed}
    if find_spec("scdataset") is not None:
        readers["scDataset"] = read_scdataset
    with tempfile.TemporaryDirectory() as name:
        path, packed = write_cells(Path(name), n_cells), Path(name) / "packed"
        pack_files([path], "human", packed).close()
        arms = {arm: partial(reader, packed if arm == "packed" else path, n_read) for arm, reader in readers.items()}
        n_cells_of = {arm: call() for arm, call in arms.items()}
        rounds = interleaved(arms, repeats=repeats, warmup=0)
    per_cell = {arm: [seconds / n_cells_of[arm] for seconds in rounds[arm]] for arm in arms}
    for arm, least in {"backed": 12.0, "scDataset": 2.0}.items():
        if arm in per_cell:
            yield ratio_goal(f"CPU time per cell, {arm} / ours", per_cell[arm], per_cell["ours"], at_least=least)
    what, ones = "cells per CPU second, packed parts, 64 processes, batch_size", [1.0] * len(per_cell["packed"])
    yield ratio_goal(what, ones, per_cell["packed"], at_least=10_000)
    for arm, seconds in per_cell.items():
        yield {"what": arm, "cells_per_cpu_second": round(1 / min(seconds))}


PACK = """
import os, sys, time
from scdiva.data import pack_files
start, before = time.perf_counter(), os.times()
n = pack_files(*sys.argv[1:4], workers=int(sys.argv[4])).n_obs
print(n, time.perf_counter() - start, sum(os.times()[:4]) - sum(before[:4]))
"""


def pack(repeats: int, small: bool) -> Iterator[dict]:
    with tempfile.TemporaryDirectory() as name:
        path = write_cells(Path(name), 8_192 if small else 60_000)
        for workers in (1, 2):
            command = [sys.executable, "-c", PACK, str(path), "human", f"{name}/{workers}", str(workers)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            n, wall, cpu = map(float, output.split())
            yield {"what": f"packing, {workers} processes", "cells_per_cpu_second": round(n / cpu),
                   "cells_per_wall_second": round(n / wall)}  # fmt: skip


# loss and training


def peak_bytes(work: Callable[[], object]) -> int:
    """Peak memory of tensors on the CPU during `work`, in bytes, from torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    held = peak = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        if event["args"]["Device Type"] == 0:
            held += event["args"]["Bytes"]
            peak = max(peak, held)
    return peak


def loss(repeats: int, small: bool) -> Iterator[dict]:
    positions, genes, dim = 3072, 41_818, 512
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(positions, dim, generator=generator).requires_grad_()
    weight = (torch.randn(genes, dim, generator=generator) * 0.02).requires_grad_()
    targets = torch.randint(genes, (positions,), generator=generator)
    masked = torch.randperm(positions, generator=generator) < positions // 2
    row_weight = masked / masked.sum()

    def full() -> Tensor:
        return (F.cross_entropy(F.linear(hidden, weight), targets, reduction="none") * row_weight).sum()

    def chunked() -> Tensor:
        return masked_cross_entropy(hidden[masked], weight, targets[masked], row_weight[masked])[0]

    def trained(value: Callable[[], Tensor], precision: str) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            total = value()
        total.backward()
        hidden.grad = weight.grad = None

    for precision in supported_precisions():
        arms = {work.__name__: partial(trained, work, precision) for work in (full, chunked)}
        rounds = interleaved(arms, repeats=repeats)
        mebibytes = {name: peak_bytes(run) / 2**20 for name, run in arms.items()}
        memory = mebibytes["chunked"] / mebibytes["full"]
        yield goal(f"{precision}: memory, chunked / full", memory, at_most=0.25, counted=True)
        yield ratio_goal(f"{precision}: time, chunked / full", rounds["chunked"], rounds["full"], at_most=0.65)
        for name in arms:
            seconds, peak = round(min(rounds[name]), 3), round(mebibytes[name])
            yield {"what": f"{precision}, {name}", "cpu_seconds": seconds, "peak_mib": peak}


def batch_of(config: ScDiVaConfig, lengths: Tensor) -> CellBatch:
    """Random cells of so many genes."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(N_SPECIAL, N_SPECIAL + config.n_genes, (int(lengths.sum()),), generator=draw)
    bounds = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return CellBatch(tokens, torch.rand(len(tokens), generator=draw) * 3, bounds)


def step(
    module: PretrainingModule, batch: CellBatch, optimizer: torch.optim.Optimizer | None, precision: str,
    masked: list[int],
) -> None:  # fmt: skip
    """A training step; the masks are the same in each call."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        value, parts = module.compute_loss(batch, torch.Generator().manual_seed(1))
    value.backward()
    if optimizer is not None:
        optimizer.step()
    module.zero_grad(set_to_none=True)
    masked.append(int(parts["n_masked"]))


def saved_bytes(module: PretrainingModule, batch: CellBatch, precision: str) -> int:
    """Bytes of tensors saved for backward in a training step, each storage once, without parameters."""
    sizes = {parameter.untyped_storage().data_ptr(): 0 for parameter in module.parameters()}
    tensors = []

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes.setdefault(storage.data_ptr(), storage.nbytes())
        tensors.append(tensor)  # no address is used again
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"),
    ):
        module.compute_loss(batch, torch.Generator().manual_seed(1))
    return sum(sizes.values())


def train(repeats: int, small: bool) -> Iterator[dict]:
    config, side = ScDiVaConfig.paper(), 2048
    model = ScDiVa(config, generator=torch.Generator().manual_seed(0)).train()
    module = PretrainingModule(model, PretrainingConfig.paper())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6)
    lengths = {"full": torch.full((2,), config.max_length), "typical": spread_lengths(4, config.max_length)}
    masked: dict[str, list[int]] = {name: [] for name in lengths}
    precisions, arms = supported_precisions(), {}
    for name in precisions:
        matrix = torch.randn(side, side).to(DTYPES[name])
        arms[f"{name} product"] = partial(torch.matmul, matrix, matrix)
        arms[name] = partial(step, module, batch_of(config, lengths["full"]), optimizer, name, masked["full"])
    fastest = precisions[-1]
    typical = batch_of(config, lengths["typical"])
    arms["typical"] = partial(step, module, typical, optimizer, fastest, masked["typical"])
    best = {name: min(seconds) for name, seconds in interleaved(arms, repeats=repeats).items()}
    for arm in (*precisions, "typical"):
        kind, precision = ("typical", fastest) if arm == "typical" else ("full", arm)
        work, n = train_flops(config, lengths[kind] + 1, masked[kind][0]), len(lengths[kind])
        yield {
            "what": f"training, share of matmul rate, {precision}{', typical cells' if arm == 'typical' else ''}",
            "value": work / best[arm] / (2 * side**3 / best[f"{precision} product"]),
            "cells_per_cpu_second": n / best[arm], "gflop_per_cell": work / n / 1e9,
            "genes_per_cell": float(lengths[kind].float().mean()), "gflops": work / best[arm] / 1e9,
        }  # fmt: skip
    for name in precisions:
        one, two = (saved_bytes(module, batch_of(config, torch.full((n,), MEDIAN)), name) for n in (1, 2))
        yield {"what": f"kept for backward: {name}", "bytes_per_token": round((two - one) / MEDIAN)}


PARTS = {"embed": embed, "serialise": serialise, "load": load, "pack": pack, "loss": loss, "train": train}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--small", action="store_true", help="smaller sizes")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    missed = 0
    for part in options.part:
        begun, rows = time.perf_counter(), []
        place = {"part": part, "commit": commit(), "processor": machine()["processor"]}
        for row in PARTS[part](options.repeats, options.small):
            rows.append({**place, **row})
            missed += report([row])
        print(f"== {part}: {time.perf_counter() - begun:.0f} s", flush=True)
        others = [row for row in recorded_rows("speed", goals=True) if row["part"] != part]
        record("speed", [*others, *rows], repeats=options.repeats, small=options.small)
    return missed


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
