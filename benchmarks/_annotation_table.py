"""The part of the benchmarks page on annotation, and what the paper and the literature print of it."""

from __future__ import annotations

from _integration_table import made_at, value
from _markdown import in_two, table

ANNOTATED = {
    "ours": "`tl.annotate` (default, `linear`)",
    "ours_knn": '`method="knn"`',
    "ours_centroid": '`method="centroid"`',
    "ours_probe": '`method="probe"`',
    "ours_finetune": '`method="finetune"`',
    "logistic": "logistic regression",
    "logistic_balanced": "logistic regression, balanced",
    "svm": "linear SVM",
    "centroid": "nearest centroid, correlation",
    "knn": "15-NN on PCA",
    "scanvi": "scANVI",
}
NAMING = {"accuracy": "accuracy", "macro_f1": "macro-F1", "ece_pooled": "ECE"}
COSTS = {"cpu_seconds": "CPU seconds", "wall_seconds": "seconds", "peak_mib": "peak MiB"}
WORDS = (
    "Types of a query, from a labelled reference: kang_pbmc_12k, four donors to the other four; kang_ifnb, control to "
    "stimulated; sc_mixology, CEL-seq2 to Drop-seq; panc8, each of five technologies from the others, mean over them. "
    "The same cells for all, at most 6,000 of a set. Rivals take the reference's 2,000 most variable genes, "
    "log-normalised and scaled by the reference: multinomial logistic regression and a linear SVM (sklearn's defaults, "
    "C = 1), 15-NN on 50 components; the centroids' correlation is of log-normalised values. scANVI sees the query's "
    "cells and batches too, without their types; it starts from an scVI of both, defaults and early stopping, which is "
    "fitted once for all seeds, its seconds included. `tl.annotate` is given all genes. Macro-F1 is over the query's "
    "types that the whole reference has. ECE is the expected calibration error of the confidence in the query, 15 "
    "bins, all queries of a set together. Seeds draw the fits and which labels are given; logistic regression, SVM, "
    "centroids and 15-NN draw nothing. The fits of a row ran on one thread in a process of their own; seconds are of "
    "one fit and its annotation, peak MiB is all that the process held, libraries included; the machine had other work "
    'to do. `method="centroid"` was removed after this. The rows of `method="probe"` and `method="finetune"` are of an '
    "earlier version with other heads, whose fine-tuning trained low-rank updates; the present "
    '`method="probe"` and `finetune=True` were not measured here.'
)

LITERATURE = {
    "logistic regression": {"MS": ("0.812", "0.642"), "Myeloid": ("0.683", "0.364"), "hPancreas": ("0.973", "0.718")},
    "scGPT": {"MS": ("0.859", "0.720"), "Myeloid": ("0.627", "0.340"), "hPancreas": ("0.965", "0.748")},
    "GeneMamba, in the scDiVa paper": {"MS": ("-", "0.5342")},
    "scDiVa, in its paper": {"MS": ("-", "0.7271"), "hPancreas": ("0.986", "0.7919")},
}
"""Accuracy and macro-F1 as printed; a figure that is only drawn has a dash. None was measured here."""
LITERATURE_WORDS = (
    "Accuracy / macro-F1 that the literature prints for these sets, and what the scDiVa paper claims (section on "
    "annotation; its other figures are only drawn). **Nothing of it was measured here**: neither the paper's weights "
    "nor these sets come with this package. With such a file, `python benchmarks/annotation.py --h5ad ms.h5ad "
    "--labels-key celltype --batch-key batch --query 1 --max-cells 0` runs all arms above on it, the batches after "
    "`--query` being annotated from the others; likewise Myeloid and hPancreas, with the columns and batches that the "
    "file has."
)


def joined(*parts: str) -> str:
    """Paragraphs and tables with a blank line between each."""
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def by_method(rows: list[dict], key: str, columns: dict[str, list[dict]], first: str) -> str:
    """A line for each set and method, a column for each list of rows that may hold it."""
    places = dict.fromkeys((row["set"], row["arm"]) for row in rows)
    lines = []
    for place in places:
        of_place = [[row for row in some if (row["set"], row["arm"]) == place] for some in columns.values()]
        lines.append([place[0], ANNOTATED[place[1]], *(value(some[0], key) if some else "-" for some in of_place)])
    return table([first, "method", *columns], lines)


def by_type(rows: list[dict], key: str) -> str:
    """A line for each set and type, a column for each method."""
    arms = [arm for arm in ANNOTATED if any(row["arm"] == arm for row in rows)]
    lines = []
    for name in dict.fromkeys(row["set"] for row in rows):
        of_arm = {row["arm"]: row[key] for row in rows if row["set"] == name}
        for what in dict.fromkeys(what for found in of_arm.values() for what in found):
            lines.append([f"{name}, {what}", *(_figure(of_arm.get(arm, {}).get(what)) for arm in arms)])
    header = ["set, type", *(ANNOTATED[arm] for arm in arms)]
    return in_two(header, lines, 1, 6) if len(arms) > 6 else table(header, lines)


def by_query(rows: list[dict], key: str) -> str:
    """A line for each query of sets with several, a column for each method; empty without such sets."""
    some = [row for row in rows if len(row["by_query"]) > 1]
    scores = [{**row, key: {name: found[key] for name, found in row["by_query"].items()}} for row in some]
    return by_type(scores, key).replace("set, type", "set, query", 1) if some else ""


def _figure(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}"


def full(rows: list[dict]) -> str:
    """Scores and costs with all labels; then each query, and each type."""
    lines = [
        [
            f"{row['set']} ({row['n_cells']:,})",
            ANNOTATED[row["arm"]],
            *(value(row, key) for key in NAMING),
            *(f"{row[key]:,.1f}" if key != "peak_mib" else f"{row[key]:,.0f}" for key in COSTS),
        ]
        for row in rows
    ]
    parts = ["### All labels", table(["set (cells scored)", "method", *NAMING.values(), *COSTS.values()], lines)]
    if each := by_query(rows, "macro_f1"):
        parts += ["Macro-F1 of each query:", each]
    return joined(*parts, "F1 of each type:", by_type(rows, "f1"))


def few(rows: list[dict]) -> str:
    """Macro-F1 by the share of the labels."""
    shares = sorted({row["share"] for row in rows})
    columns = {f"{share:.0%}": [row for row in rows if row["share"] == share] for share in shares}
    order = sorted(rows, key=lambda row: list(dict.fromkeys(row["set"] for row in rows)).index(row["set"]))
    words = "Macro-F1 by the share of the reference's cells whose label is given."
    return joined("### Few labels", words, by_method(order, "macro_f1", columns, "set"))


def unknown(rows: list[dict]) -> str:
    """Rejection of types that the reference lacks: means over types, then each."""
    sets = dict.fromkeys(row["set"] for row in rows)
    arms = [arm for arm in ANNOTATED if any(row["arm"] == arm for row in rows)]
    lines = []
    for arm in arms:
        of_set = {row["set"]: row for row in rows if row["arm"] == arm}
        each = [auroc for row in of_set.values() for auroc in row["rejection"].values()]
        mean = f"{sum(each) / len(each):.3f}" if len(of_set) == len(sets) else "-"
        scores = (value(of_set[name], "rejection_auroc") if name in of_set else "-" for name in sets)
        lines.append([ANNOTATED[arm], *scores, mean])
    words = (
        "Each type in turn is removed from the reference. AUROC of the score of novelty: the query's cells of that "
        "type against its other cells; mean over types. The score is `scdiva_label_novelty` for `tl.annotate`; one "
        "minus the largest probability for logistic regression; the margin between the first two types for the SVM; "
        "one minus the largest correlation for centroids; the mean distance to the neighbours for 15-NN."
    )
    header = ["method", *sets, "mean over all types"]
    return joined("### An unknown type", words, table(header, lines), by_type(rows, "rejection"))


def annotation_tables(result: dict) -> list[str]:
    """The tables of each part that was run, what they were made with, and arms left out."""
    rows = [row for row in result["rows"] if "arm" in row]
    writers = {"full": full, "few": few, "unknown": unknown}
    parts = {part: [row for row in rows if row["part"] == part] for part in writers}
    found = [writers[part](some) for part, some in parts.items() if some]
    missing = [f"Left out: {ANNOTATED[arm]}; {why}.\n" for arm, why in result.get("left_out", {}).items()]
    return [*found, *([f"{made_at(rows)}\n"] if rows else []), *missing]


def literature() -> str:
    """The figures of others, marked as such."""
    sets = ("MS", "Myeloid", "hPancreas")
    lines = [
        [name, *(" / ".join(found[where]) if where in found else "-" for where in sets)]
        for name, found in LITERATURE.items()
    ]
    head = "### What the paper and the literature report"
    return joined(head, LITERATURE_WORDS, table(["figures of others", *sets], lines))
