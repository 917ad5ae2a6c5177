"""The benchmarks page on scaling: its tables, and the figure."""

from __future__ import annotations

from pathlib import Path

from _markdown import table

WORDS = (
    "From file to file on one thread: `pp.gene_entropy` of a backed h5ad, `pp.entropy_serialize` of one to another "
    "with `out=` (removed after this), `tl.embed_file` with the bundled model. Counts are synthetic, an "
    "uncompressed h5ad: where cells vary, numbers of genes per cell as in pbmc3k_raw (median 817) of 20,000; where "
    "genes vary, 10,000 cells of 500. The bundled model knows 19,623 genes and passes over the others, so that it "
    "reads fewer than 500 of a cell where there are 40,000. Slopes are exponents of a power law, by least squares "
    "over the sizes that are named: below them, what a call costs whatever the size is most of it. Peak memory is "
    "that of a process, libraries and model included, which for 200 cells stand in brackets."
)
CALLS = {"entropy": "`pp.gene_entropy`", "ranks": "`pp.entropy_serialize`", "embedding": "`tl.embed_file`"}
PARTS = {"cells": "n_cells", "genes": "n_genes"}
FIGURE = Path(__file__).parents[1] / "docs" / "_static" / "scaling.png"


def scaling_tables(result: dict) -> list[str]:
    """The figure, and the figures that it is drawn from: a table of cells, of genes, and of memory at two sizes."""
    parts = [f"![CPU time and peak memory by cells and genes](../{FIGURE.parent.name}/{FIGURE.name})\n"]
    for part, size in {**PARTS, "memory": "n_cells"}.items():
        some = [row for row in result["rows"] if row.get("part") == part]
        if not some:
            continue
        calls = [call for call in CALLS if any(row["call"] == call for row in some)]
        header = [part if part in PARTS else "cells"]
        header += [f"{CALLS[call]}, {what}" for call in calls for what in ("CPU seconds", "peak MiB")]
        rows = []
        for n in dict.fromkeys(row[size] for row in some):
            found = {row["call"]: row for row in some if row[size] == n}
            cells = [
                text
                for call in calls
                for text in (
                    f"{found[call]['cpu_seconds']:,.2f}",
                    f"{found[call]['peak_mib']:,.0f} ({found[call]['peak_mib_of_200_cells']:,.0f})",
                )
            ]
            rows.append([f"{n:,}", *cells])
        parts.append(table(header, rows))
    return parts


def draw_scaling(result: dict, file: Path, fingerprint: str) -> None:
    """Draw time and peak memory against cells and genes. The same rows give the same file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 5.6), layout="constrained")
    axes = figure.subplots(2, len(PARTS), sharex="col", sharey="row", squeeze=False)
    for column, (part, size) in enumerate(PARTS.items()):
        rows = [row for row in result["rows"] if row.get("part") == part]
        for axis, measure in zip(axes[:, column], ("cpu_seconds", "peak_mib"), strict=True):
            for number, call in enumerate(CALLS):
                some = [row for row in rows if row["call"] == call]
                axis.plot(
                    [row[size] for row in some], [row[measure] for row in some], color=f"C{number}", marker="o", ms=4,
                    label=CALLS[call].strip("`"),
                )  # fmt: skip
            axis.set_xscale("log")
        if part == "cells" and rows:  # what is in proportion
            most = max(rows, key=lambda row: (row[size], row["cpu_seconds"]))
            ends = [most[size] / 100, most[size]]
            axes[0, column].plot(
                ends, [most["cpu_seconds"] * 1.6 * end / ends[1] for end in ends], "k--", lw=0.8, label="slope 1"
            )
        axes[-1, column].set_xlabel({"cells": "cells", "genes": "genes (10,000 cells of 500)"}[part])
    axes[0, 0].set_yscale("log")
    axes[0, 0].set_ylabel("CPU seconds")
    axes[1, 0].set_ylabel("peak memory, MiB")
    axes[1, 0].set_ylim(bottom=0)
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=110, metadata={"Software": None, "Description": fingerprint})
