"""Tables of finetuning.py."""

from __future__ import annotations

import numpy as np
from _markdown import table

WORDS = (
    "Each model is compared frozen and fine-tuned (`finetune=True`, three epochs, fewer than by default) with "
    "simple methods on the same cells and splits, three seeds. `scdiva-paper-mini` is a small model of the "
    "paper's kind; it is no evidence about a model of 94 million parameters trained on 59 million cells. "
    "Intervals are 95% bootstrap intervals over cell types, batches or perturbations, not over seeds. The third "
    "column is the paired difference to the first method. Two choices are not blind to these datasets: features "
    "are standardised within the batch in annotation after runs on kang_scgen_valid_1975, which shares cells with "
    "kang_ifnb_2800, and the input of the response head is standardised after runs on held-out Norman doubles. "
    "The number of arms, datasets and epochs was set by the runtime; an arm that a table "
    "lacks was not run. The results file names the commit of each "
    "row."
)
TASKS = {
    "annotation": ("Annotation", "macro-F1", "cell types"),
    "integration": ("Integration", "accuracy of held-out cells", "batches"),
    "perturbation": (
        "Perturbation, Norman et al., doubles, 500 genes",
        "Pearson correlation of the change",
        "doubles",
    ),
}
REFERENCE = {"annotation": "logistic regression", "integration": "PCA-20", "perturbation": "additive"}
"""The simple method that the others are compared with."""
DRAWS = 2000


def difference(row: dict, reference: dict) -> str:
    """Paired difference to a reference with its 95% bootstrap interval over the units."""
    units = sorted(row["units"])
    each = np.array([row["units"][unit] - reference["units"][unit] for unit in units])
    draws = np.random.default_rng(0).integers(len(each), size=(DRAWS, len(each)))
    low, high = np.percentile(each[draws].mean(axis=1), [2.5, 97.5])
    return f"{each.mean():+.3f} ({low:+.3f} to {high:+.3f})"


def finetuning(result: dict) -> str:
    """A table for each task and dataset, best method first after the reference."""
    parts = []
    for task, (title, score, units) in TASKS.items():
        rows = [row for row in result["rows"] if row["task"] == task]
        for name in dict.fromkeys(row["set"] for row in rows):
            some = [row for row in rows if row["set"] == name]
            reference = next(row for row in some if row["arm"] == REFERENCE[task])
            some.sort(key=lambda row: (row is not reference, -row["mean"]))
            n = len(reference["units"])
            lines = [
                [
                    row["arm"],
                    f"{row['mean']:.3f} ({row['interval'][0]:.3f} to {row['interval'][1]:.3f})",
                    "" if row is reference else difference(row, reference),
                    f"{row['cpu_seconds']:.0f}",
                ]
                for row in some
            ]
            header = ["method", f"{score} (95% CI, n = {n} {units})", f"difference to {REFERENCE[task]}", "CPU s a run"]
            heading = title if task == "perturbation" else f"{title}: {name} ({some[0]['n_cells']:,} cells)"
            parts.append(f"### {heading}\n\n{table(header, lines)}")
    return "\n".join(parts)
