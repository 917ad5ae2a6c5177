"""Peak memory of embedding a file, as the file grows.

    python benchmarks/memory.py --data gasperini_k562_highmoi_40002_366g.h5ad [--copies 1 10]

The cells of the file are repeated on disk; each size is embedded by `tl.embed_file` in a process of its own, whose peak
resident memory is read at the end (Linux). The peak of importing the libraries and loading the model is printed beside.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import anndata as ad
from _record import record
from _timing import goal, report

EMBED = """
import time
import scdiva as sd
sd.settings.progress = False
model = sd.models.load_model({model!r})
if {path!r}:
    import anndata, h5py
    start = time.perf_counter()
    sd.tl.embed_file({path!r}, {path!r} + ".out", model=model)
    seconds = time.perf_counter() - start
else:
    seconds = 0.0
# not ru_maxrss, which a process inherits from the one that started it
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) / 1024, seconds)
"""


def peak(path: str, model: str) -> tuple[float, float]:
    code = EMBED.format(path=path, model=model)
    answer = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    mebibytes, seconds = answer.stdout.split()
    return float(mebibytes), float(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--copies", nargs="+", type=int, default=(1, 10))
    parser.add_argument("--model", default="scdiva-mini")
    arguments = parser.parse_args()

    cells = ad.read_h5ad(arguments.data)
    cells = ad.AnnData(cells.X, obs=cells.obs[[]], var=cells.var[[]])
    rows = [{"n_cells": 0, "peak_mib": round(peak("", arguments.model)[0])}]
    print(f"libraries and model: {rows[0]['peak_mib']} MiB")
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for copies in arguments.copies:
            file = Path(folder) / f"{copies}.h5ad"
            ad.concat([cells] * copies, index_unique="-" if copies > 1 else None).write_h5ad(file)
            mebibytes, seconds = peak(str(file), arguments.model)
            rows.append({
                "n_cells": copies * cells.n_obs, "peak_mib": round(mebibytes), "seconds": round(seconds, 1),
                "cells_per_second": round(copies * cells.n_obs / seconds),
            })  # fmt: skip
            print(f"{copies * cells.n_obs:,} cells: {mebibytes:.0f} MiB, {seconds:.0f} s")
            file.unlink()
    rows.append(goal("peak memory, most cells / fewest", rows[-1]["peak_mib"] / rows[1]["peak_mib"], at_most=1.10))
    record("memory", rows, data=arguments.data.stem, model=arguments.model)
    sys.exit(1 if report(rows[-1:]) else 0)


if __name__ == "__main__":
    main()
