"""What a user waits for: seconds and memory of each public call, in a new process and again in the same.

    python benchmarks/face.py --data FOLDER [--cells 700 3000 30000] [--calls NAME ...] [--limit 600] [--before FILE]

`_face_calls.py` says which calls, on which cells. Every row is a process of its own with one thread. `cold`: the call
with the import of the package, of what it loads and compiles; `warm`: the same call again on other cells of the same
set, left out where the first took four minutes. Beside ours stands what a user would call instead, on the same cells.
What a call needs to have been done before, and reading the file, are left out. Each call is measured with 700, 3,000
and 30,000 cells, unless `SIZES` says otherwise. One that takes longer than `--limit` is ended and said to have been.
Rows are written as they are made, each with its commit, in the place of those of the same call and size. `--before`
names the results of an earlier commit, whose seconds then stand beside; there 30,000 cells were copies of cells, each
count kept with probability .9.

CellTypist and scVI are measured where they are installed: a run with all rows needs both.

CPU seconds are the figure to read: on a machine that runs something else at the same time, as the one of the results
did, wall seconds are up to twice as many as on an idle one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

from _face_calls import CALLS, NEW, drawn
from _memory import _status
from _record import commit, record, replaced, rows_so_far
from _timing import goal, report

SIZES = {
    **dict.fromkeys(("tl.integrate", "Harmony on PCA"), (700, 3_000, 12_000, 30_000, 100_000)),
    NEW: (700,),
    "scVI": (700, 3_000),  # 30,000 would take half an hour
    **dict.fromkeys((name for name in CALLS if "cell lines" in name), (1_400,)),
    "pl.integration, cell lines": (700, 3_000, 30_000),
}  # fmt: skip
"""Cells that a call is measured with, where these are not `USUAL`. A set that has hardly fewer is taken whole."""
USUAL = (700, 3_000, 30_000)
ONCE = 240
"""Seconds; what takes longer once is not called again."""
ONE_SIZE = ("cell lines", "--help", "wrong")
"""Calls that are measured with their own cells, whatever `--cells` says."""
WITHIN = {
    ("tl.embed", 700, "cold", "cpu"): 5.0, (NEW, 700, "cold", "cpu"): 5.0,
    ("tl.embed", 3000, "warm", "cpu"): 0.7,
    ("tl.integrate, cell lines", 1400, "warm", "cpu"): 10.0, ("tl.integrate", 12_000, "warm", "cpu"): 25.0,
    ("tl.integrate", 100_000, "warm", "cpu"): 300.0,
    **{(call, 3000, "warm", "cpu"): 10.0 for call in (
        "tl.impute, two genes", "tl.generate, 100 cells", "tl.grn", "tl.regulon", "tl.annotate", "tl.fit_perturbation",
        "tl.predict_perturbation", "tl.adapt",
    )},
    ("pl.umap", 3000, "cold", "cpu"): 12.0, ("pl.umap, of a map that is there", 3000, "warm", "cpu"): 5.0,
    ("pl.grn", 3000, "warm", "cpu"): 5.0, ("pl.generated", 3000, "warm", "cpu"): 5.0,
    **{(call, 3000, "cold", "cpu"): 2.0 for call in (
        "tl.integrate, a wrong key", "command line: a wrong option", "command line: a wrong file",
    )},
}  # fmt: skip
"""Goals: call, cells, of which run, of which clock; seconds. One thread waits for little but the disk: what the clock
of an idle machine shows is close to its CPU seconds, so these are judged where a goal is about waiting, too."""


MEASURED = ("cold_wall", "cold_cpu", "warm_wall", "warm_cpu", "peak_mib")


def spent() -> tuple[float, float]:
    """Wall and CPU seconds of this process and those that it waited for."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(one.ru_utime + one.ru_stime for one in usage)


def measured(name: str, n_cells: int, folder: Path) -> dict:
    """Seconds of a call cold and warm, and the peak of memory; for a process of its own."""
    warnings.filterwarnings("ignore")
    call = CALLS[name]
    found: dict = {}
    for run in ("cold", "warm"):
        if found.get("cold_wall", 0) > ONCE:
            break
        adata = drawn(folder, call.on, n_cells, int(run == "warm"))
        if call.first is not None:
            adata = call.first(adata)
        found["n_cells"] = adata.n_obs
        begun = spent()
        call.measured(adata)
        found |= {
            f"{run}_{clock}": round(now - then, 3)
            for clock, now, then in zip(("wall", "cpu"), spent(), begun, strict=True)
        }
    return {**found, "peak_mib": round(_status("VmHWM") / 2**20)}


def apart(name: str, n_cells: int, folder: Path, limit: float) -> dict:
    """Measure a call in a process of its own, in an empty folder."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    kept = {"NUMBA_CACHE_DIR": "."} if name == NEW else {}  # of the empty folder
    job = json.dumps([name, n_cells, str(folder.resolve())])
    with tempfile.TemporaryDirectory() as empty:
        try:
            answer = subprocess.run(
                [sys.executable, __file__, "--job", job], capture_output=True, text=True, check=False, cwd=empty,
                env={**os.environ, "MPLBACKEND": "agg", "SCDIVA_PROGRESS": "0", **threads, **kept}, timeout=limit,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"n_cells": n_cells, "ended_after": limit}
    if answer.returncode:
        raise RuntimeError(f"{name} of {n_cells:,} cells failed:\n{answer.stderr[-4000:]}")
    return json.loads(answer.stdout.splitlines()[-1])


def sizes_of(call: str) -> tuple[int, ...]:
    """Cells that a call is measured with; what refuses or helps reads none."""
    return SIZES.get(call, (3_000,) if any(part in call for part in ONE_SIZE) else USUAL)


def goals(rows: list[dict]) -> list[dict]:
    """Rows of the goals that were measured."""
    judged = []
    for (call, size, run, clock), most in WITHIN.items():
        for row in rows:
            if (row["call"], row["size"]) == (call, size) and f"{run}_{clock}" in row:
                what = f"{call}, {row['n_cells']:,} cells, {run}: {'CPU' if clock == 'cpu' else 'wall'} seconds"
                judged.append(goal(what, row[f"{run}_{clock}"], at_most=most))
    return judged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the benchmark h5ad files")
    parser.add_argument("--cells", nargs="+", type=int, help="cells, instead of those that each call is measured with")
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS), metavar="NAME")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a call is ended")
    parser.add_argument("--before", type=Path, help="results of an earlier commit")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        name, n_cells, folder = json.loads(options.job)
        sys.stdout.write(f"\n{json.dumps(measured(name, n_cells, Path(folder)))}\n")
        return 0
    before = json.loads(options.before.read_text()) if options.before else {"rows": []}
    earlier = {(row["call"], row["size"]): row for row in before["rows"] if "call" in row}
    judged: list[dict] = []
    failed: list[str] = []
    for call in options.calls:
        fixed = options.cells is None or any(part in call for part in ONE_SIZE)
        for size in sizes_of(call) if fixed else options.cells:
            try:
                found = apart(call, size, options.data, options.limit)
            except RuntimeError as error:  # the rows of the other calls are wanted all the same
                failed.append(str(error))
                continue
            row = {"call": call, "size": size, "commit": commit(), **found}
            if old := earlier.get((call, size)):
                row |= {"before": {key: old[key] for key in MEASURED if key in old} | {"commit": before["commit"]}}
            rows = replaced(rows_so_far("face"), row, ("call", "size"))
            # of calls and sizes that are measured no more none stays
            rows = [row for row in rows if row["call"] in CALLS and row["size"] in (size, *sizes_of(row["call"]))]
            rows.sort(key=lambda row: (list(CALLS).index(row["call"]), row["size"]))
            judged = goals(rows)
            record("face", judged + rows)
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    print(*failed, sep="\n", file=sys.stderr)
    return report(judged) or len(failed)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
