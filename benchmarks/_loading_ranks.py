"""Training at 64 processes, as loading.py tells it: what each reads, how fast, and what the order of an atlas takes.

`python benchmarks/_loading_ranks.py LENGTHS STUDY` is the process whose memory is measured; it prints its figures.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from _timing import goal

from scdiva.data.order import Order
from scdiva.data.pool import CellPool
from scdiva.data.stream import TrainingStream

PROCESSES = 64
BATCHES = {"batch_size": (64, None), "batch_tokens": (64, 32_768)}
ATLAS, STUDIES = 59_162_450, 1200
"""Cells of the paper's corpus; studies of the simulated index."""
COUNTED = 307_200
CONTEXT, MIN_GENES, BLOCK, BLOCKS = 1200, 200, 64, 64
Range = tuple[int, int]


def drawn_lengths(n_cells: int, median: float, spread: float) -> np.ndarray:
    """Genes per cell, uint16."""
    drawn = np.random.default_rng(0).normal(np.log(median), spread, n_cells).astype(np.float32)
    return np.clip(np.exp(drawn), 150, 4000).astype(np.uint16)


class Asked:
    """A source that counts the rows it is asked for, and gives zeros."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths, self.n_rows = lengths, 0

    def read_ranges(self, ranges: Sequence[Range]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        lengths = np.concatenate([self.lengths[start:stop] for start, stop in ranges])
        self.n_rows += len(lengths)
        indptr = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        return indptr, np.zeros(indptr[-1], np.uint16), np.zeros(indptr[-1], np.float32)


def streams(pool: CellPool, how: str, ranks: Sequence[int]) -> Iterator[tuple[Order, TrainingStream]]:
    """An epoch of each of these processes of 64, one by one."""
    order = Order(pool, 0, *BATCHES[how], BLOCKS, [(0, PROCESSES)])
    for rank in ranks:
        stream = TrainingStream(order, stop=PROCESSES * order.deal(0, 0).n_batches, prefetch=False)
        stream.rank, stream.world_size = rank, PROCESSES
        yield order, stream


def packed_arms(path: Path) -> dict[str, Callable[[], int]]:
    """Arms that read a packed corpus as every eighth of 64 processes does."""
    from scdiva.data import PackedCells

    def epoch(how: str) -> int:
        cells = PackedCells(path)
        pool = CellPool([cells], [cells.study], MIN_GENES, CONTEXT, BLOCK)
        given = sum(batch.n_cells for _, stream in streams(pool, how, range(0, PROCESSES, 8)) for batch in stream)
        cells.close()
        return given

    return {f"packed, {PROCESSES} processes, {how}": lambda how=how: epoch(how) for how in BATCHES}


def counted_rows(median: float, spread: float) -> list[dict]:
    """What 64 processes read of what they use, over an epoch, and how well batches are mixed and filled."""
    lengths = drawn_lengths(COUNTED, median, spread)
    study = np.repeat(np.arange(STUDIES // 20, dtype=np.int16), COUNTED // (STUDIES // 20))
    rows = []
    for how, (_, budget) in BATCHES.items():
        asked = Asked(lengths)
        pool = CellPool([asked], [study], MIN_GENES, CONTEXT, BLOCK)
        used = most = tokens = n = 0
        for _, stream in streams(pool, how, range(PROCESSES)):
            for batch in stream:
                n += 1
                used += batch.n_cells
                tokens += len(batch.tokens) + batch.n_cells
                most = max(most, len(batch.tokens) + batch.n_cells)
        assert used == pool.n_cells, "an epoch is every cell once"
        filled = {} if budget is None else {"mean_tokens": round(tokens / n), "most_tokens": most}
        what = f"rows read / cells used, {PROCESSES} processes, {how}"
        rows.append(goal(what, asked.n_rows / used, at_most=1.1, counted=True, cells=used, batches=n, **filled))
    blocks = {lanes: blocks_of_batches(pool, lanes) for lanes in (1, PROCESSES)}
    # of 64 cells from 64 blocks of 64, which is how they were drawn for one process before there were lanes
    expected = BLOCKS * (1 - np.prod([(BLOCKS * BLOCK - BLOCK - i) / (BLOCKS * BLOCK - i) for i in range(64)]))
    rows += [
        goal(
            f"blocks in a batch of 64 / expected of a buffer of 64 blocks, {n} lanes",
            of / expected,
            at_least=0.98,
            counted=True,
            blocks=round(of, 2),
        )
        for n, of in blocks.items()
    ]
    return rows


def blocks_of_batches(pool: CellPool, lanes: int) -> float:
    """Blocks that the cells of a batch come from, in the mean over the batches of 64 buffers."""
    order, found = Order(pool, 0, *BATCHES["batch_size"], BLOCKS, [(0, lanes)]), []
    numbers = range(lanes * order.deal(0, 0).n_batches)
    buffers = list(dict.fromkeys(order.find(number)[0] for number in numbers))[:PROCESSES]
    for buffer in buffers:
        cells, batches = order.cells_of(buffer)
        block = np.searchsorted(pool.starts, cells, side="right")
        found += [len(np.unique(block[batch])) for batch in batches]
    return float(np.mean(found))


def atlas_rows(folder: Path, median: float, spread: float) -> list[dict]:
    """Memory of order and pool of 59 M cells, and the time to find a batch, in a process of its own."""
    files = [folder / name for name in ("lengths", "study")]
    drawn_lengths(ATLAS, median, spread).tofile(files[0])
    np.repeat(np.arange(STUDIES, dtype=np.int16), -(-ATLAS // STUDIES))[:ATLAS].tofile(files[1])
    order = [sys.executable, __file__, *map(str, files)]
    runs = [json.loads(subprocess.run(order, check=True, capture_output=True, text=True).stdout) for _ in range(3)]
    found = {name: sorted(run[name] for run in runs) for name in runs[0]}

    def bound(what: str, name: str, at_most: float, **details: float) -> dict:
        least, _, most = found[name]
        return goal(f"{what}, {size}", most, at_most=at_most, interval=(least, most), over="3 processes", **details)

    size = f"{ATLAS:,} cells, {PROCESSES} processes, batch_tokens"
    return [
        bound("MB of pool and order", "mb", 300, own_mb=found["own_mb"][-1]),
        bound("MB once 2, 1, 4 processes, and 64, 48, shared an epoch", "resized_mb", 300),
        bound("ms to find a batch and its cells, epochs 0, 20 and 1,000", "find_ms", 50),
        {"what": f"CPU seconds to make the pool, {size}", "value": found["pool_s"][1]},
        {"what": f"ms to draw an epoch, {size}", "value": found["draw_ms"][1]},
        {"what": f"CPU seconds to deal a half-read epoch to 48 processes, {size}", "value": found["resized_s"][1]},
    ]


def memory() -> dict[str, float]:
    """MB of this process: the most so far, and what is its own now."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[name].split()[0]) * 1024 / 1e6 for name in ("VmHWM", "RssAnon")}


def measure(lengths: Path, study: Path) -> dict[str, float]:
    """The figures of `atlas_rows`, of mapped files."""

    def seconds(work: Callable[[], object]) -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    source, codes = Asked(np.memmap(lengths, np.uint16, "r")), np.memmap(study, np.int16, "r")
    few = CellPool([Asked(np.full(99, 999, np.uint16))], [np.zeros(99, np.int16)], MIN_GENES, CONTEXT, BLOCK)
    few.n_tokens(Order(few, 0, 9).cells_of(Order(few, 0, 9).find(0)[0])[0])  # loads what only code takes
    before, found = memory(), []
    start = time.process_time()
    pool = CellPool([source], [codes], MIN_GENES, CONTEXT, BLOCK)
    pool_s = time.process_time() - start
    order = Order(pool, 0, *BATCHES["batch_tokens"], BLOCKS, [(0, PROCESSES)])
    n = order.deal(0, 0).n_batches
    drawn = max(seconds(lambda: order.deal(0, epoch)) for epoch in (20, 1000))  # noqa: B023
    for epoch in (0, 20, 1000):
        order.deal(0, epoch)
        for number in range(epoch * n * PROCESSES, (epoch + 1) * n * PROCESSES, n * PROCESSES // 50):
            found.append(seconds(lambda: order.cells_of(order.find(number)[0])))  # noqa: B023
    after = memory()
    order, n, resized = None, n * PROCESSES, 0.0  # a run has one order
    for lanes in ([(0, 2), (n // 4, 1), (n // 2, 4)], [(0, PROCESSES), (n // 2, 48)]):
        resized = seconds(lambda: Order(pool, 0, *BATCHES["batch_tokens"], BLOCKS, lanes).find(n))  # noqa: B023
    return {
        "mb": round(after["VmHWM"] - before["VmHWM"], 1),
        "own_mb": round(after["RssAnon"] - before["RssAnon"], 1),
        "find_ms": round(1e3 * max(found), 2),
        "pool_s": round(pool_s, 2),
        "draw_ms": round(1e3 * drawn, 1),
        "resized_s": round(resized, 2),
        "resized_mb": round(memory()["VmHWM"] - before["VmHWM"], 1),
    }


if __name__ == "__main__":
    print(json.dumps(measure(*map(Path, sys.argv[1:3]))))
