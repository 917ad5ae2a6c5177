"""The table of what a user waits for."""

from __future__ import annotations

from _markdown import table


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
