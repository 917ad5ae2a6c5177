"""Write `docs/benchmarks.md`, a CSV file and figures of each task, and the table of `docs/large_data.md`.

Intervals are percentile bootstraps of paired differences over what a result should generalise to: datasets, pairs of
reference and query, or held-out perturbations. Datasets of one study are drawn together.

python benchmarks/tables.py
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from _record import RESULTS, bootstrap, verdict
from scaling import CALLS, CELLS, FROM_FILES, by_call, growth

DOCS = Path(__file__).parents[1] / "docs"
PAGE, TABLES, LARGE = DOCS / "benchmarks.md", DOCS / "_static" / "benchmarks", DOCS / "large_data.md"
FILES = {
    "embedding": ("embedding",), "learning_curve": ("learning_curve",),
    "integration": ("integration",), "annotation": ("annotation",),
    "perturbation": ("perturbation",), "imputation": ("imputation",), "networks": ("networks",),
    "finetuning": ("finetuning",), "speed": ("speed", "scaling"), "gpu": ("gpu",),
    "reliability": ("faults", "faults_long", "fuzz"),
}  # fmt: skip
"""CSV files, and the results that each contains."""
REJECT = 0.05
FARTHEST = {"cells": 9, "tissues": 3}
"""Powers of ten of cells and tissues that no corpus has."""
QUESTIONS = {
    "bf16 vs fp32, speed": "bfloat16 on this CPU: times as fast as float32",
    "unpadded vs padded": "packed cells: times as fast as padded cells",
    "CPU time per cell, backed / ours": "training data: times as fast as backed AnnData",
    "CPU time per cell, scDataset, matrix": "training data: times as fast as scDataset",
    "CPU time per cell, annbatch /": "training data: times as fast as annbatch",
    "CPU time per cell, litdata /": "training data: times as fast as litdata",
    "pp.entropy_serialize: slope of CPU time, 25,000": "ranks: growth of CPU time with cells (1: proportional)",
    "tl.embed_file: slope of CPU time, 25,000": "`tl.embed_file`: growth of CPU time with cells (1: proportional)",
    "tl.embed_file: slope of CPU time, 1,000": "`tl.embed_file`: growth of CPU time with undetected genes (0: none)",
    "tl.embed_file: memory": "`tl.embed_file`: memory for 1,000,000 cells, extrapolated, GB",
    "tl.adapt, backed: memory": "`tl.adapt`, backed: memory for 1,000,000 cells, extrapolated, GB",
    "tl.integrate, backed: memory": "`tl.integrate`, backed: memory for 1,000,000 cells, extrapolated, GB",
    "tl.annotate: memory, GB": "`tl.annotate`: memory for 500,000 cells, extrapolated, GB",
    "tl.umap: CPU seconds": "`tl.umap`: CPU seconds for 50,000 cells",
    "tl.embed, full cells: share": "`tl.embed`: share of the bfloat16 matrix product rate",
    "tl.embed, full cells: cells/s": "`tl.embed`: cells per second",
    "training step, full cells": "training step: share of the bfloat16 matrix product rate",
    "fit, packed cells: rate": "training with its data loader: rate over that of the step alone",
    "fit: waits": "training: synchronisations per step",
    "forward + backward, packed full": "attention with backward pass: times as fast as FlexAttention",
    "forward + backward: compiled": "attention with backward pass: times as fast as flash attention",
    "forward: cuDNN": "attention: times as fast as cuDNN, which has no rotation",
    "executions": None, "crashes": None,
}  # fmt: skip
"""Beginnings of the goals on the page, and their words there; all others are in the CSV files."""
INTERNAL = ("cells", "weights", "weights_from", "weights_note")
NAMES = {
    "kang_pbmc_12k_1287g": "Kang, 8 donors †", "kang_ifnb_2800": "Kang, stimulated †",
    "kang_scgen_valid_1975": "Kang, scGen split †", "pbmc3k_raw": "pbmc3k †", "sc_mixology_cell_lines": "cell lines †",
    "panc8_small_500": "panc8, pancreas", "baron2016_mouse_pancreas": "Baron, mouse pancreas",
    "mouse_pancreas_bastidasponce_739": "Bastidas-Ponce, pancreas", "darmanis_brain_320": "Darmanis, brain",
    "mouse_brain_zeisel_550": "Zeisel, mouse brain", "han2018_mca_stomach_intestine": "Han, mouse gut",
    "perturbench_devel_norman_mcfaline_5961_500g": "Norman, McFaline, 4 lines", "norman_doubles": "Norman, doubles †",
    "norman_singles": "Norman, singles †", "norman": "Norman, doubles †", "glioma": "McFaline, glioma lines †",
    "kang_ifnb": "Kang, IFN-beta in types †",
}  # fmt: skip
"""Names of datasets; choices of scdiva were made on those with a dagger."""
OURS = "#c8102e"
MIN_UNITS = 5
"""Fewer datasets, studies or perturbations have no interval."""
STUDIES = ("kang", "panc8", "sc_mixology", "baron")


class Comparison(NamedTuple):
    """A score of rows in which fields have these values; our arms, of which the first is compared, and rivals."""

    words: str
    result: str
    where: Mapping[str, object]
    ours: Mapping[str, str]
    rivals: Mapping[str, str]
    key: str
    units: str = "datasets"
    """What differences are paired and resampled over."""
    within: bool = False
    """Whether each dataset has several units and an interval of its own."""
    brief: bool = False
    """Whether only means are shown."""


PCA = {"pca20": "PCA-20", "pca50": "PCA-50, scaled", "scvi": "scVI"}
EMBED = {"adapt": "`tl.adapt`", "embed": "`tl.embed`"}
BATCHES = {"pca20": "PCA-20", "combat": "ComBat", "harmony20": "Harmony on PCA-20", "scanorama": "Scanorama",
           "scvi": "scVI"}  # fmt: skip
TYPES = {
    "logistic": "logistic regression (LR)", "logistic_balanced": "balanced LR", "logistic_genes": "LR on all genes",
    "celltypist": "CellTypist", "knn": "15-NN on PCA", "scanvi": "scANVI",
}  # fmt: skip
IMPUTED = {"knn": "30 neighbours", "magic": "MAGIC", "type_means": "means of true types", "scvi": "scVI"}
TUNED = {"fine-tuned": "fine-tuned", "scdiva-paper-mini, fine-tuned": "`scdiva-paper-mini`, fine-tuned",
         "random weights, fine-tuned": "random weights, fine-tuned"}  # fmt: skip
COMPARISONS = {
    "embedding": Comparison("15-NN accuracy", "embedding", {"group": "benchmark"}, EMBED, PCA, "accuracy"),
    "clusters": Comparison(
        "Mean of NMI, ARI and the scaled silhouette", "embedding", {"group": "benchmark"}, EMBED, PCA, "average_bio",
        brief=True,
    ),
    "integration": Comparison(
        "Mean of NMI, ARI and the scaled silhouette of cell types", "integration", {"part": "unlabelled"},
        {"ours": "`tl.integrate`"}, BATCHES, "average_bio", brief=True,
    ),
    "mixing": Comparison(
        "Mixing of batches: iLISI, 0 to 1", "integration", {"part": "unlabelled"}, {"ours": "`tl.integrate`"}, BATCHES,
        "ilisi", brief=True,
    ),
    "labelled": Comparison(
        "With half of the labels: 15-NN accuracy of cells with hidden labels", "integration", {"part": "labelled"},
        {"ours": "`tl.integrate`"}, {"scanvi": "scANVI"}, "accuracy", brief=True,
    ),
    "annotation": Comparison(
        "Macro-F1 of cell types", "annotation", {"part": "full"}, {"ours": "`tl.annotate`"}, TYPES, "macro_f1",
        "queries",
    ),
    "few": Comparison(
        "Macro-F1 with 1% of the reference's cells labelled", "annotation", {"part": "few"},
        {"ours": "`tl.annotate`"},
        {"logistic_balanced": "logistic regression, balanced", "centroid": "nearest centroid", "scanvi": "scANVI"},
        "macro_f1", "queries", brief=True,
    ),
    "perturbation": Comparison(
        "Pearson correlation of predicted and observed changes of expression, all genes", "perturbation", {},
        {"ours": "`tl.predict_perturbation`"},
        {"additive": "additive", "matching_mean": "matching mean", "train_mean": "train mean", "linear": "linear",
         "gears": "GEARS"}, "pearson_delta", "perturbations or types", within=True,
    ),
    "imputation": Comparison(
        "Spearman correlation within genes of removed counts and imputed values", "imputation", {"part": "impute"},
        {"ours": "`tl.impute`"}, IMPUTED, "spearman_gene", brief=True,
    ),
    "imputation_cell": Comparison(
        "The same within cells", "imputation", {"part": "impute"}, {"ours": "`tl.impute`"}, IMPUTED, "spearman_cell",
        brief=True,
    ),
    "masked": Comparison(
        "Share of masked genes (30%) that `tl.reconstruct` recovers at one step", "imputation", {"part": "masked"},
        {"ours_no_places": "without ranks", "ours": "with true ranks"},
        {"marginals": "frequency of genes", "type_means": "frequency in the true type"}, "masked_recall", brief=True,
    ),
    "tuned_annotation": Comparison(
        "Annotation, macro-F1", "finetuning", {"task": "annotation"}, {"default": "default"},
        {**TUNED, "logistic regression": "logistic regression", "15-NN on PCA-20": "15-NN on PCA-20"},
        "mean", brief=True,
    ),
    "tuned_integration": Comparison(
        "Integration with half of the labels: 15-NN accuracy on cells with hidden labels", "finetuning",
        {"task": "integration"},
        {"default": "default"}, {**TUNED, "PCA-20": "PCA-20", "Harmony on PCA-20": "Harmony on PCA-20"}, "mean",
        brief=True,
    ),
    "tuned_perturbation": Comparison(
        "Perturbation, Pearson correlation of changes", "finetuning", {"task": "perturbation"},
        {"default": "default"},
        {**TUNED, "additive": "additive", "matching_mean": "matching mean"}, "mean", "doubles", within=True,
    ),
}  # fmt: skip
TASKS = {
    "embedding": ("embedding", "one embedding for several datasets; later cells"),
    "integration": ("integration", "strong batch effects in cells of the same types; later batches"),
    "annotation": ("annotation", "types that are absent from the reference"),
    "perturbation": ("perturbation", "combinations of measured perturbations"),
    "imputation": ("imputation-reconstruction-and-generation", "ranking cells by one gene"),
}
"""Section of each task, and when scdiva is useful."""


def rows_of(name: str) -> list[dict]:
    """Rows of a result, each with the command, commit and date of its record; none where there is no result."""
    file = RESULTS / f"{name}.json"
    entry = json.loads(file.read_text()) if file.exists() else {"rows": []}
    about = {key: entry[key] for key in ("command", "commit", "date") if key in entry}
    return [{**about, **row} for row in entry["rows"]]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], aligned: str = "--:") -> str:
    """A Markdown table, its columns after the first aligned right, as figures are."""
    lines = [header, ["---", *[aligned] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def signed(value: float, interval: Sequence[float] | None) -> str:
    """A difference with its interval; a bound that would round to 0 has more digits."""
    bounds = [f"{bound:+.3f}" if abs(bound) >= 5e-4 else f"{bound:+.1g}" for bound in interval or ()]
    return f"{value:+.3f}" + (f" ({' to '.join(bounds)})" if bounds else "")


Scores = dict[str, dict[tuple[str, str], float]]
"""Scores of each method, by dataset and by query, cell type or perturbation."""


def scores(one: Comparison, *, units: bool = False) -> Scores:
    """Scores of a comparison, by default one for each dataset or query."""
    by_arm: Scores = {arm: {} for arm in (*one.ours, *one.rivals)}
    for row in rows_of(one.result):
        if row.get("arm") not in by_arm or not one.where.items() <= row.items():
            continue
        parts = row.get("by_query", {"": row})
        values = (
            row.get("units", {}) if units else {name: part[one.key] for name, part in parts.items() if one.key in part}
        )
        by_arm[row["arm"]] |= {(row["set"], name): value for name, value in values.items()}
    return by_arm


def label(key: tuple[str, str]) -> str:
    """Name of a dataset and a query."""
    name, query = key
    if " + " in name:  # a pair of studies
        words = " → ".join(NAMES[part] for part in query.split(" → "))
    else:
        words = NAMES[name.split(",")[0]] + (f": {query}" if query not in ("", "STIM", "stimulated") else "")
    return words.replace(" †", "") + (" †" if "†" in words else "")


class Gap(NamedTuple):
    """Mean paired difference of our score to another, its interval, and the number of units and of studies."""

    value: float
    interval: tuple[float, float] | None
    n: int
    n_studies: int

    def verdict(self) -> str:
        """The statement that every page makes of this difference."""
        if self.interval is None:
            return "no interval"
        if self.interval[0] <= 0 <= self.interval[1]:
            return "no difference"
        return "better" if self.value > 0 else "worse"


def gap(ours: Mapping[tuple[str, str], float], theirs: Mapping[tuple[str, str], float], within: bool = False) -> Gap:
    """Difference over the units of both.

    Datasets of a study are drawn together. `within` a dataset, cells of a perturbation in several groups are.
    """
    keys = [key for key in ours if key in theirs]
    differences = [ours[key] - theirs[key] for key in keys]
    studies = [next((study for study in STUDIES if study in name and " + " not in name), name) for name, _ in keys]
    groups = [query.partition(" in ")[0] for _, query in keys] if within else studies
    if within and len(set(groups)) == 1:  # one perturbation in several cell types
        groups = [query for _, query in keys]
    interval = bootstrap(differences, groups) if len(set(groups)) >= MIN_UNITS else None
    return Gap(float(np.mean(differences)), interval, len(set(groups)) if within else len(keys), len(set(studies)))


def gaps(one: Comparison, arm: str | None = None) -> dict[str, Gap]:
    """Difference of one of our arms, by default the first, to every other arm."""
    by_arm = scores(one)
    ours = by_arm.pop(arm or next(iter(one.ours)))
    return {arm: gap(ours, theirs) for arm, theirs in by_arm.items() if set(ours) & set(theirs)}


def best(one: Comparison, differences: Mapping[str, Gap]) -> str:
    """The rival that is best compared with us, of those with an interval if there are any."""
    rivals = [arm for arm in one.rivals if arm in differences]
    tested = [arm for arm in rivals if differences[arm].interval]
    return min(tested or rivals, key=lambda arm: differences[arm].value)


def unit_gaps(one: Comparison) -> dict[tuple[str, str], tuple[str, Gap]]:
    """For each dataset with units, the best rival and the difference to it over the units."""
    by_arm, units, first = scores(one), scores(one, units=True), next(iter(one.ours))
    chosen = {}
    for dataset in by_arm[first]:
        rival = max((arm for arm in one.rivals if dataset in by_arm[arm]), key=lambda arm: by_arm[arm][dataset])
        ours, theirs = ({key: x for key, x in units[arm].items() if key[0] == dataset[0]} for arm in (first, rival))
        chosen[dataset] = rival, gap(ours, theirs, within=True)
    return chosen


def statement(one: Comparison, rival: str, difference: Gap) -> str:
    """A difference in words."""
    value, interval, n, n_studies = difference
    units = one.units + (f" of {n_studies} studies" if n_studies < n and not one.within else "")
    outcome = "too few for an interval" if interval is None else difference.verdict()
    return f"{signed(value, interval)} compared with {one.rivals[rival]}, n = {n} {units}: {outcome}"


def compared(name: str) -> str:
    """Score in words, table and statement of a comparison."""
    one = COMPARISONS[name]
    by_arm, arms = scores(one), {**one.ours, **one.rivals}
    arms = {arm: words for arm, words in arms.items() if by_arm[arm]}
    first = next(iter(arms))
    lines = [
        [label(key), *(f"{by_arm[arm][key]:.3f}" if key in by_arm[arm] else "-" for arm in arms)]
        for key in by_arm[first] if not one.brief
    ]  # fmt: skip
    if one.within:
        statements = [
            f"{label(key)}: {statement(one, rival, difference)}." for key, (rival, difference) in unit_gaps(one).items()
        ]
        return f"{one.words}.\n\n{table(['', *arms.values()], lines)}\n" + "\n".join(f"- {line}" for line in statements)
    differences = gaps(one)
    rival = best(one, differences)
    lines.append(["mean", *(
        f"{np.mean(list(by_arm[arm].values())):.3f}" if len(by_arm[arm]) == len(by_arm[first]) else "-" for arm in arms
    )])  # fmt: skip
    lines.append([f"{arms[first]} minus this (95% CI)", "", *(
        signed(differences[arm].value, differences[arm].interval)
        + (f", n = {differences[arm].n}" if differences[arm].n < len(by_arm[first]) else "")
        for arm in arms if arm != first
    )])  # fmt: skip
    statements = [f"{words}: {statement(one, rival, gaps(one, arm)[rival])}." for arm, words in one.ours.items()]
    return f"{one.words}.\n\n{table(['', *arms.values()], lines)}\n" + "\n".join(statements) + "\n"


def commits() -> str:
    """How many rows of each task are from the commit that most of them have."""
    of_task = {name: [row["commit"][:8] for row in rows_of(name)] for name in (*TASKS, "finetuning")}
    ((commonest, _),) = Counter(commit for hashes in of_task.values() for commit in hashes).most_common(1)
    counts = (f"{hashes.count(commonest)} of {len(hashes)} rows of {name}" for name, hashes in of_task.items())
    return f"Measured at commit `{commonest}`: {', '.join(counts)}."


def recommendations() -> str:
    """For each task the best simple method, the difference of scdiva to it, and which to start with."""
    lines = []
    for name, (section, useful) in TASKS.items():
        one = COMPARISONS[name]
        ours = next(iter(one.ours.values()))
        if one.within:
            pairs = unit_gaps(one)
        else:
            differences = gaps(one)
            rival = best(one, differences)
            pairs = {("", ""): (rival, differences[rival])}
        for key, (rival, difference) in pairs.items():
            task = f"[{name}](#{section})" + (f", {label(key).removesuffix(' †')}" if one.within else "")
            start = ours if difference.verdict() == "better" else one.rivals[rival]
            words = f"{difference.verdict()}: {signed(difference.value, difference.interval)}, n = {difference.n}"
            lines.append([task, one.rivals[rival], ours, words, start, useful])
            useful = ""
    header = ["task", "best of the others", "scdiva", "difference (95% CI)", "start with", "scdiva is useful for"]
    return table(header, lines, "---")  # text, which wraps


def figure(name: str) -> None:
    """Draw a comparison: scores of each method on each dataset, and differences of scdiva to each method."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    one = COMPARISONS[name]
    by_arm = {arm: values for arm, values in scores(one).items() if values}
    first, names = next(iter(by_arm)), {**one.ours, **one.rivals}
    keys = list(by_arm[first])[::-1]
    if one.within:
        rows = {f"{label(key)}\nminus {one.rivals[rival]}, n = {difference.n}": difference
                for key, (rival, difference) in unit_gaps(one).items()}  # fmt: skip
    else:
        rows = {f"{names[arm]}, n = {difference.n}": difference for arm, difference in gaps(one).items()}
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "axes.spines.top": False,
                         "axes.spines.right": False, "font.family": "sans-serif"}):  # fmt: skip
        n_lines = max(len(keys), len(rows) * (1 + one.within))
        drawn = Figure(figsize=(9, 1.6 + 0.24 * n_lines), layout="constrained")
        left, right = drawn.subplots(1, 2, width_ratios=(3, 2))
        for number, (arm, values) in enumerate(by_arm.items()):
            points = {keys.index(key): value for key, value in values.items() if key in keys}
            left.scatter(
                list(points.values()), list(points), 34 if arm in one.ours else 20, label=names[arm].replace("`", ""),
                color=OURS if arm == first else f"C{number % 10}", marker="osD^vPX<>p*"[number % 11], alpha=0.85,
                zorder=4 if arm == first else 3,
            )  # fmt: skip
        left.set_yticks(range(len(keys)), [label(key) for key in keys])
        left.set_xlabel(one.words.replace("`", ""))
        left.grid(axis="x", alpha=0.3)
        drawn.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
        for at, difference in enumerate(list(rows.values())[::-1]):
            low, high = difference.interval or (difference.value, difference.value)
            right.plot([low, high], [at, at], color=OURS, lw=1.5)
            right.plot(difference.value, at, "o", color=OURS, ms=5)
        right.set_yticks(range(len(rows)), [row.replace("`", "") for row in list(rows)[::-1]])
        right.axvline(0, color="0.4", lw=0.8, ls="--")
        ours = names[first].replace("`", "")
        right.set_xlabel(f"{ours}\nminus other method\n(95% CI over {one.units};\n> 0: scdiva is better)")
        for panel, n in ((left, len(keys)), (right, len(rows))):
            panel.set_ylim(-0.7, n - 0.3)
            panel.grid(axis="y", alpha=0.15)
        drawn.savefig(TABLES / f"{name}.svg", metadata={"Date": None}, transparent=True)


def learning_curve() -> str:
    """Difference from PCA-20 at each point of the curves, with their lines."""
    rows = rows_of("learning_curve")
    scores = [(group, key) for group in ("other", "blood") for key in ("accuracy", "average_bio")]
    pca20 = [row for row in rows if row.get("curve") == "pca20"]
    base = {(row["set"], key): row[key] for row in pca20 for _, key in scores}
    n_sets = Counter(row["group"] for row in pca20)
    words = {
        "cells": "cells of all tissues",
        "tissues": "tissues, 3,000 cells",
        "same_tissue": "cells, tissue not held out",
    }
    measured = [row for row in rows if row.get("curve") in words and "part" not in row]
    points: dict[tuple[str, int], list[dict]] = {}
    for row in measured:
        same = sorted(one["at"] for one in measured if (one["curve"], one["set"]) == (row["curve"], row["set"]))
        points.setdefault((row["curve"], same.index(row["at"])), []).append(row)
    lines = []
    for curve, position in sorted(points, key=lambda point: (list(words).index(point[0]), point[1])):
        here = points[curve, position]
        ends = sorted({min(row["at"] for row in here), max(row["at"] for row in here)})
        line = [f"{' to '.join(f'{end:,}' for end in ends)} {words[curve]}".replace("1 tissues", "blood only")]
        for group, key in scores:
            differences = [row[key] - base[row["set"], key] for row in here if row["group"] == group]
            complete = len(differences) == n_sets[group]
            line.append(signed(float(np.mean(differences)), bootstrap(differences)) if complete else "")
        lines.append(line)
    trends = {(row["curve"], row["group"], row["score"]): row for row in rows if row.get("part") == "trend"}
    for curve in ("cells", "tissues"):
        curve_trends = [trends[curve, *score] for score in scores if (curve, *score) in trends]
        slopes = [signed(row["slope"], row["slope_interval"]) for row in curve_trends]
        lines.append([f"change for 10 times the {curve}", *slopes])
        lines.append([f"{curve} at which it equals PCA-20", *(zero_of(row) for row in curve_trends)])
    kinds = {"accuracy": "15-NN accuracy", "average_bio": "mean of NMI, ARI and silhouette"}
    header = [f"{kinds[key]}, {'blood and marrow' if group == 'blood' else 'other tissues'}" for group, key in scores]
    return table(["corpus: difference to PCA-20 (95% CI over datasets)", *header], lines)


def zero_of(row: dict) -> str:
    """Where the line of a curve reaches PCA-20; without a sensible upper limit, only a lower one beyond all points."""
    if row["at_zero"] is None:
        return "not known"
    low, high = row["at_zero_interval"]
    shown = [f"{float(f'{10 ** max(0, one):.2g}'):,.0f}" for one in (row["at_zero"], low, high)]
    if high > FARTHEST[row["curve"]]:
        return f"not known, at least {shown[1]}" if low > row["last_at"] else "not known"
    return f"{shown[0]} ({shown[1]} to {shown[2]})"


def rejection() -> str:
    """Shares of cells called unknown on another study."""
    lines = [
        [f"{row['set']}, {row['arm']}", *(
            f"{row[key]:.3f} ({row[f'{key}_interval'][0]:.3f} to {row[f'{key}_interval'][1]:.3f})"
            for key in ("known", "removed")
        )]
        for row in rows_of("annotation") if row.get("part") == "rejection" and row["share"] == REJECT
    ]  # fmt: skip
    header = ["reference → query, calibration", "called unknown, known types", "called unknown, removed types"]
    return table(header, lines)


def population() -> str:
    """Classifiers that separate generated from held-out cells."""
    names = {"other_real": "other real cells", "ours": "`tl.generate`", "independent": "genes drawn independently"}
    rows = [row for row in rows_of("imputation") if row.get("part") == "population" and row["arm"] in names]
    keys = ("forest", "logistic", "correlations")
    lines = [[f"{row['set']}, {names[row['arm']]}", *(f"{row[key]:.3f}" for key in keys)] for row in rows]
    return table(["", "AUROC, random forest", "AUROC, logistic regression", "agreement of gene correlations"], lines)


def networks() -> str:
    """Average precision of known edges over chance, with the null distribution."""
    arms = ("embedding", "attention", "correlation", "spearman", "mutual_information", "forest", "expression")
    rows = {(row["set"], row["reference"], row["arm"]): row for row in rows_of("networks") if row["part"] == "edges"}
    lines = []
    for name, reference in dict.fromkeys(key[:2] for key in rows):
        arm_rows = [rows.get((name, reference, arm)) for arm in arms]
        lines.append([f"{name}, {reference}", *(
            "-" if row is None else f"{row['auprc_ratio']:.2f}{'*' if row['auprc_ratio_p'] < 0.05 else ''}"
            for row in arm_rows
        )])  # fmt: skip
    return table(["", *arms], lines)


def goals(*names: str) -> str:
    """Measured value, interval, goal and verdict of the `QUESTIONS`."""
    lines = []
    for row in (row for name in names for row in rows_of(name)):
        prefix = next((prefix for prefix in QUESTIONS if row.get("what", "").startswith(prefix)), None)
        if prefix is None or "met" not in row:
            continue
        sign, bound = ("≥", row["at_least"]) if "at_least" in row else ("≤", row["at_most"])
        interval = f" ({row['interval'][0]:,.3g} to {row['interval'][1]:,.3g})" if "interval" in row else ""
        what = (QUESTIONS[prefix] or row["what"]) + (f" ({row['gpu'].split()[1]})" if "gpu" in row else "")
        lines.append([what, f"{row['value']:,.3g}{interval}", f"{sign} {bound:,g}", verdict(row)])
    return table(["", "measured", "goal", ""], lines)


def scaling() -> str:
    """CPU seconds of each call by the number of cells, and its peak memory and growth, in memory and from files."""
    grouped, lines = by_call(large := [row for row in rows_of("scaling") if row.get("part") == "cells"]), []
    for name in (name for name in CALLS if name not in (f"{other}, backed" for other in CALLS)):
        label = f"`{name.partition(', ')[0]}`" + ", 1,000 batches" * name.endswith("1,000 batches")
        loaded, backed = (grouped.get(("cells", one), []) for one in (name, f"{name}, backed"))
        if name in FROM_FILES:
            loaded, backed = [], loaded
        seconds = {row["n_cells"]: f"{row['cpu_seconds']:,.0f}" for row in (*backed, *loaded)}
        memory = ["-" if not rows else f"{rows[-1]['peak_mib'] * 2**20 / 1e9:.1f}" for rows in (loaded, backed)]
        for i, rows in enumerate((loaded, backed)):
            if len(rows) > 1 and rows[-2]["n_cells"] >= CELLS[-2]:
                memory[i] += f" ({growth(rows) / 1e3:.1f})"
        if seconds:
            lines.append([label, *(seconds.get(n, "-") for n in CELLS), *memory])
    detected = sum(row["n_stored"] for row in large) / sum(row["n_cells"] for row in large)
    words = f"A cell expresses {detected:,.0f} of {large[0]['n_genes']:,} genes on average.\n\n"
    return words + table(
        ["CPU seconds for", *(f"{n:,} cells" for n in CELLS), "GB, in memory", "GB, from a file"], lines
    )


def with_scaling(page: str) -> str:
    """The page on large data with its table of runtime and memory."""
    before, mark, after = page.partition("<!-- scaling -->\n\n")
    return before + mark + scaling() + "\n" + after[after.index("<!-- end of scaling -->") :]


def faults() -> str:
    rows = [*rows_of("faults"), *rows_of("faults_long")]
    return table(
        ["fault", "tried", "bit-exact", "steps lost"],
        [[row["fault"], *(str(row[key]) for key in ("tried", "bit_exact", "lost"))] for row in rows],
    )


def flat(row: dict) -> dict:
    """The scalars of a row, and the ends of its intervals."""
    scalars = {}
    for key, value in row.items():
        if key.endswith("interval") and isinstance(value, list):
            scalars |= {f"{key}_low": value[0], f"{key}_high": value[1]}
        elif not isinstance(value, list | dict) and key not in INTERNAL:
            scalars[key] = value
    return scalars


def csv_of(names: Sequence[str]) -> str:
    """All rows of some results as CSV."""
    rows = [flat({"result": name, **row}) for name in names for row in rows_of(name)]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def page() -> str:
    """The page: its template with every `{{table}}` filled."""
    text = Path(__file__).with_name("benchmarks_page.md").read_text(encoding="utf-8")
    tables = {name: compared(name) for name in COMPARISONS} | {
        "which": recommendations(), "commits": commits(), "learning_curve": learning_curve(), "rejection": rejection(),
        "population": population(), "networks": networks(),
        "speed": goals("speed", "scaling"), "faults": faults(), "gpu": goals("gpu"),
        "fuzz": goals("fuzz"),
    }  # fmt: skip
    for name in FILES:
        tables[f"csv_{name}"] = f"All rows: {{download}}`{name}.csv <_static/benchmarks/{name}.csv>`."
    for name, filled in tables.items():
        text = text.replace(f"{{{{{name}}}}}", filled.strip())
    return text


def main() -> None:
    TABLES.mkdir(exist_ok=True)
    for name, results in FILES.items():
        (TABLES / f"{name}.csv").write_text(csv_of(results), encoding="utf-8")
    for name in TASKS:
        figure(name)
    PAGE.write_text(page(), encoding="utf-8")
    LARGE.write_text(with_scaling(LARGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
