"""Runtime and peak memory of calls against the number of cells, and of genes.

    python benchmarks/scaling.py [--cells 25000 50000 ...] [--genes 1000 ...] [--calls tl.embed ...]

A cell is drawn from the sum of two cells of one type of `datasets.pbmc3k_small`, times factors of its label, batch and
sample: 90 labels, 8 batches, 1,000 samples, 20,000 genes. Half of the cells have a label. They are written by blocks to
an uncompressed CSR h5ad file in the working folder, which is deleted after its measurement (1.9 GB for 200,000 cells).
In the part `genes`, cells have the 1,000 most frequent genes, and columns without counts are added.

Each call on each file is measured in a process of its own with one thread, after cheap calls on 200 cells, so that
one-time costs do not count. Time is CPU time, with the opening of the file, best of several if it is short. Memory is
the peak of the process, including libraries and the model (Linux). Results of other calls and sizes are kept.
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
from _record import goal, record, recorded_rows, replaced, report, resident

MODEL = "scdiva-mini"
CELLS, GENES = (25_000, 50_000, 100_000, 200_000), (1_000, 3_000, 10_000, 20_000, 40_000)
SMALL = ("pp.gene_entropy", "pp.entropy_serialize", "tl.embed_file")
"""Calls that are also measured against the number of genes."""
CALLS = {
    **dict.fromkeys(SMALL, CELLS),
    **dict.fromkeys(("tl.embed", "tl.embed, backed", "tl.adapt", "tl.adapt, backed"), CELLS),
    **dict.fromkeys(("tl.integrate", "tl.integrate, backed", "tl.annotate", "tl.annotate, backed"), CELLS),
    **dict.fromkeys(("tl.integrate, backed, 1,000 batches", "scdiva integrate", "scdiva annotate"), CELLS[-2:]),
    "tl.impute": CELLS[:2],
    "tl.umap": (50_000,),
}
"""Calls, and the numbers of cells that they are measured at by default."""
FROM_FILES = (*SMALL, *(name for name in CALLS if "backed, " in name or name.startswith("scdiva ")))
"""Calls that read a file by blocks and have no row of the same call in memory."""
WIDTH, N_CELLS, N_USED = 20_000, 10_000, 1_000
"""Genes of a file where cells vary; cells, and genes with counts, where genes vary."""
N_IMPUTED = 500
"""Number of genes for `tl.impute`."""
N_LABELS, N_BATCHES, N_SAMPLES, BLOCK = 10, 8, 1_000, 5_000
"""Number of labels per cell type, of batches, of samples, and of cells that are drawn at once."""
GOALS = (
    ("tl.annotate", "kB a cell beyond the matrix", 8.0, 0), ("tl.annotate", "GB of 500,000 cells", 12.0, 500_000),
    ("tl.integrate, backed", "GB of 1,000,000 cells", 6.0, 1_000_000),
    ("tl.adapt, backed", "GB of 1,000,000 cells", 6.0, 1_000_000),
    ("tl.embed_file", "GB of 1,000,000 cells", 1.5, 1_000_000),
)  # fmt: skip
"""Goals on growth from the second largest to the largest number of cells, and on memory extrapolated with it."""


@functools.cache
def profiles(n_genes: int, n_used: int) -> tuple:
    """Counts of real cells, rows of each cell type, names of the genes, and the factors of labels, batches, samples."""
    import scdiva as sd
    from scdiva.tokenizer import load_vocabulary

    cells, rng = sd.datasets.pbmc3k_small(), np.random.default_rng(0)
    total = np.asarray(cells.X.sum(axis=0)).ravel()
    used = np.argsort(-total, kind="stable")[: min(n_used, np.count_nonzero(total))]
    names = list(cells.var_names[used])
    names = list(dict.fromkeys([*names, *load_vocabulary("human").table["symbol"]]))
    rows = [np.flatnonzero(cells.obs["cell_type"] == name) for name in cells.obs["cell_type"].cat.categories]
    factors = [
        np.exp(spread * rng.normal(size=(n, len(used))).astype(np.float32))
        for n, spread in ((N_LABELS * len(rows), 0.7), (N_BATCHES, 0.3), (N_SAMPLES, 0.1))
    ]
    return cells.X[:, used].tocsr(), rows, names[:n_genes], factors


def draw_block(block: int, n_genes: int, n_used: int) -> tuple:
    """Draw a block of cells: CSR counts, and the numbers of label and sample of each cell."""
    counts, rows, _, (of_label, of_batch, of_sample) = profiles(n_genes, n_used)
    rng = np.random.default_rng(block)
    label, sample = rng.integers(len(of_label), size=BLOCK), rng.integers(N_SAMPLES, size=BLOCK)
    pairs = np.array([rng.choice(rows[number // N_LABELS], 2) for number in label])
    x = (counts[pairs[:, 0]] + counts[pairs[:, 1]]).tocsr()
    cell = np.repeat(np.arange(BLOCK), np.diff(x.indptr))
    factor = of_label[label[cell], x.indices] * of_batch[sample[cell] % N_BATCHES, x.indices]
    x.data = rng.poisson(1.5 * x.data * factor * of_sample[sample[cell], x.indices]).astype(np.float32)
    x.eliminate_zeros()
    x.sort_indices()
    return x, label, sample


def write_cells(path: Path, n_cells: int, n_genes: int, n_used: int = WIDTH) -> int:
    """Write a file of drawn counts by blocks, as AnnData lays it out; gives the number of stored values."""
    import anndata as ad
    import pandas as pd

    var = pd.DataFrame({"entropy": np.linspace(2.0, 0.1, n_genes)}, index=profiles(n_genes, n_used)[2])
    ad.AnnData(var=var).write_h5ad(path)
    lengths, labels, samples = [], [], []
    with h5py.File(path, "r+") as file:
        for old in {"X", "obs"} & set(file):
            del file[old]
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": [n_cells, n_genes]})
        for name, kind in (("indices", np.int32), ("data", np.float32)):
            group.create_dataset(name, (0,), kind, maxshape=(None,), chunks=(2**18,))
        for first in range(0, n_cells, BLOCK):
            x, label, sample = draw_block(first // BLOCK, n_genes, n_used)
            n = min(BLOCK, n_cells - first)
            for parts, part in ((lengths, np.diff(x.indptr)), (labels, label), (samples, sample)):
                parts.append(part[:n])
            for name, part in (("indices", x.indices), ("data", x.data)):
                group[name].resize((group[name].shape[0] + x.indptr[n],))
                group[name][-x.indptr[n] :] = part[: x.indptr[n]]
        group["indptr"] = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
        label, sample = np.concatenate(labels), np.concatenate(samples)
        is_labelled = np.random.default_rng(0).random(n_cells) < 0.5
        obs = pd.DataFrame(index=pd.Index([f"cell{i:07}" for i in range(n_cells)]))
        obs["cell_type"] = pd.Categorical(np.where(is_labelled, np.char.add("type ", label.astype(str)), None))
        obs["batch"], obs["sample"] = (
            pd.Categorical(np.char.add("b", n.astype(str))) for n in (sample % N_BATCHES, sample)
        )
        ad.io.write_elem(file, "obs", obs)
        return int(group["indptr"][-1])


def call(name: str, path: Path, out: Path) -> float:
    """Run a public call on a file, including opening it; return its CPU seconds."""
    import anndata as ad

    import scdiva as sd
    from scdiva.cli import main
    from scdiva.models import load_model

    function, *how = name.split(", ", 2)
    start = time.process_time()
    if function == "tl.embed_file":
        sd.tl.embed_file(path, out, model=MODEL, overwrite=True)
    elif function.startswith("scdiva "):
        key = ("--batch_key", "batch") if function.endswith("integrate") else ("--labels_key", "cell_type")
        assert main([function.split()[1], str(path), "-o", str(out), "--model", MODEL, *key]) == 0
    else:
        cells = ad.read_h5ad(path, backed="r" if how or function in SMALL else None)
        symbols = set(load_model(MODEL).vocabulary.table["symbol"]) if function == "tl.impute" else ()
        arguments = {
            "pp.entropy_serialize": {"entropy_key": "entropy"},
            "tl.integrate": {"batch_key": "sample" if how[1:] else "batch"},
            "tl.annotate": {"labels_key": "cell_type"},
            "tl.impute": {"genes": [name for name in cells.var_names if name in symbols][:N_IMPUTED]},
        }
        if function == "tl.umap":
            sd.tl.embed(cells)
            start = time.process_time()
        module, _, function = function.partition(".")
        getattr(getattr(sd, module), function)(cells, **arguments.get(f"{module}.{function}", {}))
    return time.process_time() - start


def measured(name: str, path: Path, small: Path, repeats: int) -> dict:
    """Seconds and peak of a call; for a process of its own."""
    import torch

    import scdiva as sd

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    sd.settings.progress, sd.settings.threads, sd.settings.device = False, 1, "cpu"
    out = path.with_name("out.h5ad")
    for cheap in (*SMALL, *([name] if name == "tl.umap" else [])):  # tl.umap compiles for ten seconds at its first call
        call(cheap, small, out)
    spent = []
    for _ in range(repeats):
        out.unlink(missing_ok=True)
        spent.append(call(name, path, out))
    return {"cpu_seconds": round(min(spent), 3), "peak_mib": round(resident() / 2**20, 1)}


def in_subprocess(name: str, path: Path, small: Path, repeats: int) -> dict:
    """Measure a call in its own process."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    command = [sys.executable, __file__, "--job", json.dumps([name, str(path), str(small), repeats])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **threads})
    if done.returncode:
        raise RuntimeError(f"{name} of {path.name} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_file(part: str, n_cells: int, n_genes: int, calls: list[str], rows: list[dict]) -> list[dict]:
    """Write one file and measure the calls on it, cheap ones more often; gives `rows` with the results."""
    n_used = N_USED if part == "genes" else WIDTH
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path, small = Path(folder) / "cells.h5ad", Path(folder) / "small.h5ad"
        write_cells(small, 200, n_genes, n_used)
        n_stored = write_cells(path, n_cells, n_genes, n_used)
        for name in calls:
            row = {"part": part, "call": name, "n_cells": n_cells, "n_genes": n_genes, "n_stored": n_stored}
            row |= in_subprocess(name, path, small, 3 if name in SMALL else 1)
            rows = replaced(rows, row, ("part", "call", "n_cells", "n_genes"))
            report([row])
            record("scaling", goals(rows) + rows, model=MODEL)
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


def by_call(rows: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """Rows of each part and call, by size."""
    grouped: dict[tuple[str, str], list[dict]] = {}
    for row in sorted(rows, key=lambda row: (row["n_cells"], row["n_genes"])):
        grouped.setdefault((row["part"], row["call"]), []).append(row)
    return grouped


def growth(rows: list[dict]) -> float:
    """Growth of the peak from the second largest to the largest number of cells, bytes a cell; at least 0."""
    before, last = rows[-2:]
    return max(0.0, last["peak_mib"] - before["peak_mib"]) * 2**20 / (last["n_cells"] - before["n_cells"])


def goals(rows: list[dict]) -> list[dict]:
    """Slopes of time, growth of memory beyond the samples of fits, and the memory of more cells."""
    judged, grouped = [], by_call(rows)
    for (part, name), by_size in grouped.items():
        if name in SMALL and len(by_size) > 1:
            sizes = [row[f"n_{part}"] for row in by_size]
            what = f"{name}: slope of CPU time, {sizes[0]:,} to {sizes[-1]:,} {part}"
            judged.append(slope(what, sizes, [row["cpu_seconds"] for row in by_size], 1.05))
    for name, what, at_most, n_cells in GOALS:
        by_size = grouped.get(("cells", name), [])
        if len(by_size) > 1 and by_size[-2]["n_cells"] >= CELLS[-2]:
            last, each = by_size[-1], growth(by_size)
            matrix = 8 * last["n_stored"] / last["n_cells"]
            extrapolated = last["peak_mib"] * 2**20 + each * (n_cells - last["n_cells"])
            value = extrapolated / 1e9 if n_cells else (each - matrix) / 1e3
            judged.append(goal(f"{name}: memory, {what}", value, at_most=at_most))
    for row in grouped.get(("cells", "tl.umap"), []):
        judged.append(goal(f"tl.umap: CPU seconds, {row['n_cells']:,} cells", row["cpu_seconds"], at_most=40.0))
    return judged


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="*", type=int)
    parser.add_argument("--genes", nargs="*", type=int, default=GENES)
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS))
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job:
        name, path, small, repeats = json.loads(options.job)
        print(json.dumps(measured(name, Path(path), Path(small), repeats)))
        return 0
    rows = recorded_rows("scaling")
    for n_genes in options.genes:
        rows = measure_file("genes", N_CELLS, n_genes, [name for name in options.calls if name in SMALL], rows)
    for n_cells in CELLS if options.cells is None else options.cells:
        calls = [name for name in options.calls if options.cells or n_cells in CALLS[name]]
        rows = measure_file("cells", n_cells, WIDTH, calls, rows)
    return report(goals(rows))


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
