"""The table of what a user waits for."""

from __future__ import annotations

from _markdown import table

WORDS = (
    "Every public call, each in a process of its own, one thread, without reading the file and without what has to be "
    "done before: cold, from the import on with what it loads and compiles, and warm, again in the same process on "
    "other cells. Below some of ours stands what a user would call instead on the same cells. Two figures differ by "
    "up to a half by what else runs, and these were made beside one job, at times two, on the two threads of one "
    "core: read CPU seconds. All rows are of one call of the script, but those of integration and of what stands "
    "below them, which are of a later one. `the same before` is an earlier commit. A call that did not end, cold and "
    "warm, in the time that it was given is said to take more; one that took four minutes cold was not called again. "
    "`tl.reconstruct` asks the query head about all genes of each cell: .1 CPU seconds a cell when these rows were "
    "made, half of that since masked genes of a cell share one row of logits. scVI was given 3,000 at most. A first "
    "UMAP compiles for 9 seconds with pynndescent 0.6, which scanpy 1.11 needs for its neighbours, and for 2 with "
    "pynndescent 0.7. In a new installation the first `tl.embed` compiles our kernels, which numba then keeps. One "
    "goal is missed, integrating 1,400 cells: where the seconds go, and what was tried, stands in "
    "[Decisions](../decisions.md)."
)


def face(result: dict) -> str:
    """Seconds and memory of each call and size, and the CPU seconds that a warm call took before."""
    rows = [
        [row["call"], f"{row['n_cells']:,}", *(_seconds(row, key) for key in ("cold_cpu", "cold_wall", "warm_cpu")),
         f"{row['before']['warm_cpu']:.2f}" if "warm_cpu" in row.get("before", {}) else "-", _seconds(row, "warm_wall"),
         f"{row['peak_mib']:,}" if "peak_mib" in row else "-"]
        for row in result["rows"]
        if "call" in row
    ]  # fmt: skip
    header = ["call", "cells", "cold, CPU s", "cold, s", "warm, CPU s", "the same before", "warm, s", "peak MiB"]
    return table(header, rows)


def _seconds(row: dict, key: str) -> str:
    if key in row:
        return f"{row[key]:.2f}"
    return f"> {row['ended_after']:.0f} in all" if "ended_after" in row else "-"
