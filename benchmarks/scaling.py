"""Time and peak memory against the number of cells and of genes: entropy, ranks, embedding, from a file.

    python benchmarks/scaling.py [--cells 1000 3000 ...] [--genes 1000 ...] [--memory 60000 600000]

Counts are synthetic: numbers of genes per cell as in pbmc3k_raw, values above zero as 1 / n², genes by a power law.
They are written by blocks to an uncompressed CSR h5ad in the working folder, deleted once it is measured: a million
cells take 7 GB, and their ranks, in memory, another 7. 16 blocks of 256 cells are drawn once and repeated. Every point
is a process of its own with one thread. It first makes the same call on 200 cells, so that one-time costs do not count.
Time is CPU time of the call, best of some; memory is the peak of the process, libraries and model included (Linux).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import h5py
import numpy as np
from _record import goal, record, report, resident

LENGTHS = (
    212, 435, 540, 606, 650, 690, 724, 750, 777, 796, 817, 838, 859, 886, 920, 953, 997, 1075, 1180, 1368, 3422,
)  # fmt: skip
"""Genes detected in a cell of pbmc3k_raw, at every twentieth."""
MODEL = "scdiva-mini"
CALLS = ("entropy", "ranks", "embedding")
CELLS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
GENES = (1_000, 3_000, 10_000, 20_000, 40_000)
MEMORY = (60_000, 600_000)
PROCESSES = 3
"""Processes in which each peak of memory is measured."""
WIDTH, N_CELLS, N_DETECTED = 20_000, 10_000, 500
"""Genes of a file where cells vary; cells, and genes detected in each, where genes vary."""
FROM = {"cells": 10_000, "genes": 1_000}
"""Sizes from which the slope is fitted: constant costs dominate below."""
BLOCK, N_BLOCKS = 256, 16


@functools.cache
def gene_names(n_genes: int) -> list[str]:
    """Genes of the human vocabulary, those that the model knows first."""
    import scdiva as sd
    from scdiva.tokenizer import load_vocabulary

    known = list(sd.models.load_model(MODEL).vocabulary.ensembl_ids)
    rest = set(known)
    return (known + [name for name in load_vocabulary("human").ensembl_ids if name not in rest])[:n_genes]


@functools.cache
def drawn(n_genes: int, n_detected: int | None, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw cells: how many genes each has, which (ascending), and their counts."""
    rng = np.random.default_rng([block, n_genes])
    lengths = np.quantile(LENGTHS, rng.random(BLOCK)).astype(int) if n_detected is None else np.full(BLOCK, n_detected)
    lengths = np.minimum(lengths, n_genes)
    # Gumbel's trick: the largest of log p + noise are a draw without replacement
    noise = rng.gumbel(size=(BLOCK, n_genes)).astype(np.float32) - 0.5 * np.log(np.arange(1, n_genes + 1))
    order = np.argsort(-noise, axis=1)
    genes = np.concatenate([np.sort(order[row, :length]) for row, length in enumerate(lengths)])
    return lengths, genes.astype(np.int32), np.minimum(rng.zipf(2.0, len(genes)), 1000).astype(np.float32)


def write_counts(path: Path, n_cells: int, n_genes: int, n_detected: int | None = None) -> int:
    """Write a file of synthetic counts by blocks, as AnnData lays it out; gives the number of stored values."""
    import anndata as ad
    import pandas as pd

    var = pd.DataFrame(index=gene_names(n_genes))
    var["entropy"] = np.linspace(2.0, 0.1, n_genes, dtype=np.float32)
    ad.AnnData(var=var).write_h5ad(path)
    blocks = [drawn(n_genes, n_detected, block) for block in range(min(N_BLOCKS, -(-n_cells // BLOCK)))]
    lengths = np.concatenate([blocks[i % N_BLOCKS][0] for i in range(-(-n_cells // BLOCK))])[:n_cells]
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    with h5py.File(path, "r+") as file:
        for old in ("X", "obs"):
            if old in file:
                del file[old]
        names = pd.DataFrame(index=pd.Index([f"cell{i:07}" for i in range(n_cells)]))
        ad.io.write_elem(file, "obs", names)
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": [n_cells, n_genes]})
        group["indptr"] = indptr
        total = int(indptr[-1])
        stored = {
            "indices": group.create_dataset("indices", (total,), np.int32, maxshape=(None,)),
            "data": group.create_dataset("data", (total,), np.float32, maxshape=(None,)),
        }
        for number, first in enumerate(range(0, n_cells, BLOCK)):
            lo, hi = int(indptr[first]), int(indptr[min(first + BLOCK, n_cells)])
            _, genes, counts = blocks[number % N_BLOCKS]
            stored["indices"][lo:hi], stored["data"][lo:hi] = genes[: hi - lo], counts[: hi - lo]
    return total


def call(name: str, path: Path, out: Path) -> None:
    """Do what a user would, from a file."""
    import anndata as ad

    import scdiva as sd

    if name == "embedding":
        sd.tl.embed_file(path, out, model=MODEL, overwrite=True)
        return
    cells = ad.read_h5ad(path, backed="r")
    if name == "entropy":
        sd.pp.gene_entropy(cells)
    else:
        sd.pp.entropy_serialize(cells, entropy_key="entropy")
    cells.file.close()


def measured(name: str, path: Path, small: Path, repeats: int) -> dict:
    """Seconds and peak of a call; for a process of its own."""
    import torch

    import scdiva as sd

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    sd.settings.progress, sd.settings.threads, sd.settings.device = False, 1, "cpu"
    out = path.with_name("out.h5ad")
    call(name, small, out)
    at_first, spent = resident(), []
    for _ in range(repeats):
        out.unlink(missing_ok=True)
        start = time.process_time()
        call(name, path, out)
        spent.append(time.process_time() - start)
    return {
        "cpu_seconds": round(min(spent), 3),
        "peak_mib": round(resident() / 2**20, 1),
        "peak_mib_of_200_cells": round(at_first / 2**20, 1),
    }


def apart(name: str, path: Path, small: Path, repeats: int) -> dict:
    """Measure a call in its own process."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    command = [sys.executable, __file__, "--job", json.dumps([name, str(path), str(small), repeats])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **threads})
    if done.returncode:
        raise RuntimeError(f"{name} of {path.name} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def points(part: str, n_cells: int, n_genes: int) -> list[dict]:
    """Write one file and measure the calls on it, small files more often."""
    rows, n_detected = [], N_DETECTED if part == "genes" else None
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path, small = Path(folder) / "cells.h5ad", Path(folder) / "small.h5ad"
        write_counts(small, 200, n_genes, n_detected)
        n_stored = write_counts(path, n_cells, n_genes, n_detected)
        for name in ("embedding",) if part == "memory" else CALLS:
            if part == "memory":
                result, *more = (apart(name, path, small, 1) for _ in range(PROCESSES))
                result["peaks_mib"] = [result["peak_mib"], *(one["peak_mib"] for one in more)]
            else:
                result = apart(name, path, small, 5 if n_stored < 10_000_000 else 2)
            place = {"part": part, "call": name, "n_cells": n_cells, "n_genes": n_genes, "n_stored": n_stored}
            rows.append({**place, **result})
            report([rows[-1]])
    return rows


def slope(what: str, sizes: list[int], seconds: list[float], at_most: float) -> dict:
    """Exponent of a power law through the points, by least squares in logarithms, with the interval of the fit."""
    from scipy.stats import linregress, t  # not for the processes whose memory is measured

    fitted, n = linregress(np.log(sizes), np.log(seconds)), len(sizes)
    value = float(fitted.slope)
    if n < 3:
        return goal(what, value, at_most=at_most)
    width = float(t.ppf(0.975, n - 2) * fitted.stderr)
    return goal(what, value, at_most=at_most, interval=(value - width, value + width), over=f"{n} sizes")


def goals(rows: list[dict]) -> list[dict]:
    """Slopes of time, and the growth of the embedding's memory."""
    judged = []
    for part, size in (("cells", "n_cells"), ("genes", "n_genes")):
        for name in CALLS:
            some = [row for row in rows if (row["part"], row["call"]) == (part, name) and row[size] >= FROM[part]]
            if len(some) > 1:
                sizes = [row[size] for row in some]
                what = f"{name}: slope of CPU time, {min(sizes):,} to {max(sizes):,} {part}"
                judged.append(slope(what, sizes, [row["cpu_seconds"] for row in some], 1.05))
    peaks = {row["n_cells"]: row["peaks_mib"] for row in rows if row["part"] == "memory"}
    if len(peaks) > 1:
        least, most = min(peaks), max(peaks)
        interval = (min(peaks[most]) / max(peaks[least]), max(peaks[most]) / min(peaks[least]))
        value, what = np.median(peaks[most]) / np.median(peaks[least]), f"{most:,} cells / {least:,}"
        what = f"embedding: peak memory, {what}"
        judged.append(goal(what, float(value), at_most=1.10, interval=interval, over=f"{PROCESSES} processes"))
    return judged


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", type=int, default=CELLS)
    parser.add_argument("--genes", nargs="+", type=int, default=GENES)
    parser.add_argument("--memory", nargs="+", type=int, default=MEMORY)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job:
        name, path, small, repeats = json.loads(options.job)
        print(json.dumps(measured(name, Path(path), Path(small), repeats)))
        return 0
    rows = [row for size in options.memory for row in points("memory", size, WIDTH)]
    rows += [row for size in options.genes for row in points("genes", N_CELLS, size)]
    rows += [row for size in options.cells for row in points("cells", size, WIDTH)]
    judged = goals(rows)
    record("scaling", judged + rows, model=MODEL)
    return report(judged)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
