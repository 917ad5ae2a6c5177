"""The plan of docs/scaling.md for 59 M and 100 M cells: each line is worked out from a figure that was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from _markdown import table

BEGIN, END = "<!-- plan: written by benchmarks/tables.py -->", "<!-- end of the plan -->"
SIZES = (59_162_450, 100_000_000)
EPOCHS, STEP, GPUS, CORES = 4, 768, (8, 64), 64
MATMUL = 790e12
"""bf16 matrix products of one H200, FLOP/s, measured on one: 8,192 rows and columns of random numbers."""
GENE, CELL = 6, 6
"""Bytes of a gene and of a cell in a packed corpus: token and value; length and study."""
PER_GPU_HOUR, PER_CORE_HOUR, PER_GB_MONTH = 3.0, 0.04, 0.023
"""Dollars, assumed: a rented H200, a rented core, object storage."""
GOAL = 3000
"""Cells of 1,200 genes that an H200 is to embed a second; taken where no GPU has been measured."""
PACKING = ("packing", "packing, 1 process")
READING = ("loading", "cells per CPU second, packed parts, 64 processes")
ORDER = ("loading", "MB of pool and order")
"""Results, and how the names of their rows begin."""
Figure = tuple[float, str]


def row_of(results: dict[str, dict], name: str, start: str) -> dict | None:
    """The row of a result whose name begins so."""
    rows = results.get(name, {}).get("rows", [])
    return next((row for row in rows if str(row.get("what", "")).startswith(start)), None)


def rate_on_gpu(results: dict[str, dict], what: str) -> Figure | None:
    """Cells/s of a row of a call of `gpu.py`, and the GPU; the newest that has it."""
    for name in ("gpu_partial", "gpu_fit", "gpu"):
        for row in results.get(name, {}).get("rows", []):
            if row.get("what") == what and "cells_per_s" in row:
                return row["cells_per_s"], results[name]["machine"]["gpu"]
    return None


def training_rate(results: dict[str, dict]) -> tuple[Figure, float]:
    """Cells/s that one GPU trains on, typical ones, and on what it rests; mean genes of a cell."""
    fit = rate_on_gpu(results, "fit, packed cells")
    typical = row_of(results, "training", "training, share of matmul rate, bf16, typical cells")
    assert typical is not None
    if fit is not None:
        return (fit[0], f"`fit` on one {fit[1]}"), typical["genes_per_cell"]
    rate = typical["value"] * MATMUL / (typical["gflop_per_cell"] * 1e9)
    rests = f"{typical['value']:.0%} of 790 TFLOP/s, the share that a CPU core keeps"
    return (rate, rests), typical["genes_per_cell"]


def embedding_rate(results: dict[str, dict]) -> Figure:
    """Cells/s of 1,200 genes that one GPU embeds with the paper's network."""
    found = rate_on_gpu(results, "tl.embed, full cells")
    if found is not None:
        return found[0], f"`tl.embed` on one {found[1]}"
    return float(GOAL), "the goal for 1,200 genes"


def bundled_rate(results: dict[str, dict]) -> float:
    """Cells per CPU second of `tl.embed_file` with the bundled model, of the largest file that was embedded."""
    rows = [row for row in results["scaling"]["rows"] if row.get("call") == "embedding" and row.get("part") == "cells"]
    largest = max(rows, key=lambda row: row["n_cells"])
    return largest["n_cells"] / largest["cpu_seconds"]


def lines(results: dict[str, dict]) -> Iterator[tuple[str, str, Sequence[float], str]]:
    """What, on what it rests, the figures of both sizes, and how they are written."""
    (rate, rests), genes = training_rate(results)
    cells = np.array(SIZES)
    stored = cells * (GENE * genes + CELL)
    yield "packed corpus, GB", f"{genes:.0f} genes a cell, {GENE} bytes each", stored / 1e9, ",.0f"
    yield "its object storage, $ a month", f"$ {PER_GB_MONTH} a GB", stored / 1e9 * PER_GB_MONTH, ",.0f"
    if packing := row_of(results, *PACKING):
        speed = packing["cells_per_cpu_second"]
        hours = cells / speed / 3600
        yield "packing, core hours", f"{speed:,.0f} cells a CPU second", hours, ",.1f"
        yield f"packing, minutes on {CORES} cores", "scanning each file first left out", hours / CORES * 60, ",.0f"
        yield "packing, $", f"$ {PER_CORE_HOUR} a core hour", hours * PER_CORE_HOUR, ",.2f"
    hours = cells * EPOCHS / rate / 3600
    yield f"training, {EPOCHS} epochs, GPU hours", f"{rate:,.0f} cells/s; {rests}", hours, ",.0f"
    for number in GPUS:
        said = f"{STEP // number} cells a GPU and step; waiting for each other left out"
        yield f"training, hours on {number} GPUs", said, hours / number, ",.1f"
    yield "training, $", f"$ {PER_GPU_HOUR:g} a GPU hour", hours * PER_GPU_HOUR, ",.0f"
    yield "training, steps", f"of {STEP} cells", np.round(cells * EPOCHS / STEP), ",.0f"
    for number in GPUS:
        speed = rate * number * (GENE * genes + CELL) / 1e6
        yield f"reading, MB/s for {number} GPUs", f"{rate * number:,.0f} cells/s trained on", [speed] * 2, ",.0f"
    if reading := row_of(results, *READING):
        said = f"{reading['value']:,.0f} cells a CPU second at 64 processes"
        yield "reading, cores a GPU", said, [rate / reading["value"]] * 2, ".2f"
    if order := row_of(results, *ORDER):
        said = f"{order['own_mb']:.0f} MB of them its own, the others of all processes of a machine"
        yield "order of the cells, MB a process", said, order["value"] * cells / SIZES[0], ",.0f"
    bundled = bundled_rate(results)
    hours = cells / bundled / 3600
    said = f"{bundled:,.0f} cells a CPU second, file to file"
    yield "embedding, bundled model, core hours", said, hours, ",.1f"
    embed, rests = embedding_rate(results)
    hours = cells / embed / 3600
    yield "embedding, paper's network, GPU hours", f"{embed:,.0f} cells/s; {rests}", hours, ",.1f"
    yield "embedding, paper's network, $", f"$ {PER_GPU_HOUR:g} a GPU hour", hours * PER_GPU_HOUR, ",.0f"


def plan(results: dict[str, dict]) -> str:
    """The table, and where its figures were measured."""
    header = ["what", "rests on", *(f"{n / 1e6:,.1f} M cells".replace(".0", "") for n in SIZES)]
    rows = [[what, rests, *(format(x, shape) for x in figures)] for what, rests, figures, shape in lines(results)]
    used = [name for name in ("packing", "loading", "training", "scaling", "gpu", "gpu_fit") if name in results]
    places = [
        f"`{name}.json` ({results[name]['machine'].get('gpu', results[name]['machine']['processor'])}, "
        f"{results[name]['date']})"
        for name in used
    ]
    return f"{table(header, rows)}\nMeasured: {', '.join(places)}.\n"


def filled(page: str, results: dict[str, dict]) -> str:
    """The page with the plan between its marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{plan(results)}\n{END}{rest.split(END)[1]}"
