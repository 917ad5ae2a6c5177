"""Turn `results/*.json` into the tables of the docs and of the model card, so that no figure is typed by hand."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
SCORES = {"accuracy": "15-NN accuracy", "macro_f1": "macro-F1", "nmi": "NMI", "ari": "ARI", "asw": "ASW"}
ARMS = {"scdiva": "scdiva-mini, zero-shot", "linear": "its linear part alone", "pca": "PCA fitted on the set"}


def load(name: str) -> dict | None:
    """Read a result; None where it was not run yet."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def zero_shot(result: dict) -> str:
    """Scores of each set and arm: mean over seeds, spread (one standard deviation) where it shows."""

    def said(row: dict, key: str) -> str:
        spread = row[f"{key}_sd"]
        return f"{row[key]:.3f}" + (f" ± {spread:.3f}" if spread >= 0.0005 else "")

    rows = [
        [f"{row['set']} ({row['n_cells']:,})", ARMS[row["arm"]], *(said(row, key) for key in [*SCORES, "average_bio"])]
        for row in result["rows"]
    ]
    return table(["set (cells scored)", "embedding", *SCORES.values(), "mean of NMI, ARI, ASW"], rows)


def memory(result: dict) -> str:
    """Peak memory of each size."""
    rows = [
        [f"{row['n_cells']:,}" if row["n_cells"] else "0 (libraries and model)", f"{row['peak_mib']:,}",
         f"{row['cells_per_second']:,}" if "cells_per_second" in row else "-"]
        for row in result["rows"]
    ]  # fmt: skip
    return table(["cells", "peak memory, MiB", "cells per second"], rows)


def origin(result: dict) -> str:
    """Where a result comes from, in one line."""
    machine = result["machine"]
    return (
        f"`{result['command']}`, commit `{result['commit'][:12]}`, {result['date']}, {machine['processor']} "
        f"({machine['cores']} cores)."
    )


def page() -> str:
    """The benchmarks page of the docs."""
    parts = ["# Benchmarks\n\nEvery figure here is generated from `benchmarks/results`, written by the script named.\n"]
    if result := load("zero_shot"):
        parts.append(
            "## Zero-shot embedding\n\nThe bundled model was trained on none of these cells and fits nothing; PCA is "
            "fitted on each set (2,000 highly variable genes, scaled, 50 components); the linear part is the model's "
            "projection on the corpus SVD, from which its set encoder starts. Seeds shuffle the folds, the "
            "clusters and the sample of large sets. What to read off it: where the tissue was in the corpus (blood) "
            "the model is ahead of PCA; where it was not (pancreas, lung cancer lines), PCA, which has seen the set, "
            "separates the types better. And what 800 steps of training added "
            "to the linear start is little: accuracy within its spread, clusters no better. A checkpoint that "
            f"earns its training is the next step.\n\n{zero_shot(result)}\n{origin(result)}\n"
        )
    if result := load("memory"):
        parts.append(
            "## Memory\n\nPeak resident memory of `tl.embed_file` on the same cells, repeated on disk. Largest to "
            f"smallest: {result['ratio']:.3f}.\n\n{memory(result)}\n{origin(result)}\n"
        )
    return "\n".join(parts)
