"""Time and peak memory against the number of cells and of genes: entropy, ranks, embedding, from a file.

    python benchmarks/scaling.py [--quick]

Counts are synthetic: numbers of genes per cell as in pbmc3k_raw, values above zero as 1 / n², genes by a power law.
They are written by blocks to an uncompressed CSR h5ad in the working folder, deleted once it is measured: a million
cells take 7 GB, and their ranks, in memory, another 7. 16 blocks of 256 cells are drawn once and repeated. Every point
is a process of its own with one thread. It first makes the same call on 200 cells, so that what is loaded once a
process does not count. Time is CPU time of the call, best of some; memory is the peak of the process, libraries and
model included (Linux).
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
from _record import record
from _timing import goal, report, resident

LENGTHS = (
    212, 435, 540, 606, 650, 690, 724, 750, 777, 796, 817, 838, 859, 886, 920, 953, 997, 1075, 1180, 1368, 3422,
)  # fmt: skip
"""Genes found in a cell of pbmc3k_raw, at every twentieth."""
MODEL = "scdiva-mini"
CALLS = ("entropy", "ranks", "embedding")
CELLS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
GENES = (1_000, 3_000, 10_000, 20_000, 40_000)
MEMORY = (60_000, 600_000)
PROCESSES = 3
"""In which the peak of memory is measured, each its own."""
QUICK_CELLS, QUICK_GENES = (1_000, 10_000, 100_000), (1_000, 10_000, 40_000)
WIDTH, N_CELLS, N_FOUND = 20_000, 10_000, 500
"""Genes of a file where cells vary; cells, and genes found in each, where genes vary."""
FROM = {"cells": 10_000, "genes": 1_000}
"""From where on a slope is taken: what a call costs whatever the size is most of the time of smaller files."""
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
def drawn(n_genes: int, n_found: int | None, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw cells: how many genes each has, which (ascending), and their counts."""
    rng = np.random.default_rng([block, n_genes])
    lengths = np.quantile(LENGTHS, rng.random(BLOCK)).astype(int) if n_found is None else np.full(BLOCK, n_found)
    lengths = np.minimum(lengths, n_genes)
    # Gumbel's trick: the largest of log p + noise are a draw without replacement
    noise = rng.gumbel(size=(BLOCK, n_genes)).astype(np.float32) - 0.5 * np.log(np.arange(1, n_genes + 1))
    order = np.argsort(-noise, axis=1)
    genes = np.concatenate([np.sort(order[row, :length]) for row, length in enumerate(lengths)])
    return lengths, genes.astype(np.int32), np.minimum(rng.zipf(2.0, len(genes)), 1000).astype(np.float32)


def write_counts(path: Path, n_cells: int, n_genes: int, n_found: int | None = None) -> int:
    """Write a file of synthetic counts by blocks, as AnnData lays it out; gives the number of stored values."""
    import anndata as ad
    import pandas as pd

    var = pd.DataFrame(index=gene_names(n_genes))
    var["entropy"] = np.linspace(2.0, 0.1, n_genes, dtype=np.float32)
    ad.AnnData(var=var).write_h5ad(path)
    blocks = [drawn(n_genes, n_found, block) for block in range(min(N_BLOCKS, -(-n_cells // BLOCK)))]
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
    """Measure a call in a process of its own."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    job = json.dumps([name, str(path), str(small), repeats])
    answer = subprocess.run(
        [sys.executable, __file__, "--job", job], capture_output=True, text=True, check=False,
        env={**os.environ, **threads},
    )  # fmt: skip
    if answer.returncode:
        raise RuntimeError(f"{name} of {path.name} failed:\n{answer.stderr[-4000:]}")
    return json.loads(answer.stdout.splitlines()[-1])


def repeats_of(n_stored: int) -> int:
    """Small files are measured more often: a moment of other work on the machine weighs more there."""
    return 5 if n_stored < 10_000_000 else 3 if n_stored < 100_000_000 else 2


def points(part: str, n_cells: int, n_genes: int, n_found: int | None, calls: tuple[str, ...]) -> list[dict]:
    """Write one file and measure the calls on it."""
    rows = []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path, small = Path(folder) / "cells.h5ad", Path(folder) / "small.h5ad"
        write_counts(small, 200, n_genes, n_found)
        n_stored = write_counts(path, n_cells, n_genes, n_found)
        for name in calls:
            if part == "memory":
                found, *more = (apart(name, path, small, 1) for _ in range(PROCESSES))
                found["peaks_mib"] = [found["peak_mib"], *(one["peak_mib"] for one in more)]
            else:
                found = apart(name, path, small, repeats_of(n_stored))
            place = {"part": part, "call": name, "n_cells": n_cells, "n_genes": n_genes, "n_stored": n_stored}
            rows.append({**place, **found})
            print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    return rows


def slope(what: str, sizes: list[int], seconds: list[float], at_most: float) -> dict:
    """Exponent of a power law through the points, by least squares in logarithms, with the interval of the fit."""
    from scipy.stats import linregress, t  # not for the processes whose memory is measured

    found, n = linregress(np.log(sizes), np.log(seconds)), len(sizes)
    value = float(found.slope)
    width = float(t.ppf(0.975, n - 2) * found.stderr) if n > 2 else None
    interval = {} if width is None else {"interval": (value - width, value + width), "over": f"{n} sizes"}
    return goal(what, value, at_most=at_most, **interval)


def goals(rows: list[dict]) -> list[dict]:
    """Slopes of time, and the growth of the embedding's memory."""
    found = []
    for part, size in (("cells", "n_cells"), ("genes", "n_genes")):
        for name in CALLS:
            some = [row for row in rows if (row["part"], row["call"]) == (part, name) and row[size] >= FROM[part]]
            if len(some) > 1:
                sizes = [row[size] for row in some]
                what = f"{name}: slope of CPU time, {min(sizes):,} to {max(sizes):,} {part}"
                found.append(slope(what, sizes, [row["cpu_seconds"] for row in some], 1.05))
    peaks = {row["n_cells"]: row.get("peaks_mib", [row["peak_mib"]]) for row in rows if row["part"] == "memory"}
    if len(peaks) > 1:
        least, most = min(peaks), max(peaks)
        what = f"embedding: peak memory, {most:,} cells / {least:,}"
        interval = (min(peaks[most]) / max(peaks[least]), max(peaks[most]) / min(peaks[least]))
        value = np.median(peaks[most]) / np.median(peaks[least])
        of = {"interval": interval, "over": f"{len(peaks[most])} processes"} if len(peaks[most]) > 1 else {}
        found.append(goal(what, float(value), at_most=1.10, **of))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller sizes, some minutes")
    parser.add_argument("--cells", nargs="+", type=int, default=())
    parser.add_argument("--genes", nargs="+", type=int, default=())
    parser.add_argument("--memory", nargs="+", type=int, default=())
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job:
        name, path, small, repeats = json.loads(options.job)
        print(json.dumps(measured(name, Path(path), Path(small), repeats)))
        return 0
    sizes = {
        "cells": options.cells or (QUICK_CELLS if options.quick else CELLS),
        "genes": options.genes or (QUICK_GENES if options.quick else GENES),
        "memory": options.memory or MEMORY,
    }
    rows = [row for size in sizes["memory"] for row in points("memory", size, WIDTH, None, ("embedding",))]
    rows += [row for size in sizes["genes"] for row in points("genes", N_CELLS, size, N_FOUND, CALLS)]
    rows += [row for size in sizes["cells"] for row in points("cells", size, WIDTH, None, CALLS)]
    judged = goals(rows)
    record("scaling", judged + rows, model=MODEL)
    return report(judged)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
