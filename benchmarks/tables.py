"""Write `docs/benchmarks.md` and a CSV for each task (`docs/_static/benchmarks/`) from `benchmarks/results`.

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
from _run import lead

DOCS = Path(__file__).parents[1] / "docs"
PAGE, TABLES = DOCS / "benchmarks.md", DOCS / "_static" / "benchmarks"
FILES = {
    "embedding": ("embedding",), "learning_curve": ("learning_curve",),
    "integration": ("integration",), "annotation": ("annotation",),
    "perturbation": ("perturbation",), "imputation": ("imputation",), "networks": ("networks",),
    "finetuning": ("finetuning",), "speed": ("speed", "scaling"), "gpu": ("gpu",),
    "reliability": ("faults", "faults_long", "fuzz"),
}  # fmt: skip
"""CSV files, and the results that each contains."""
REJECT = 0.05
SHOWN = (
    "share of matmul", "bf16 vs fp32, speed", "unpadded", "serialize: times as fast as the", "float32: ", "embedding: ",
    *(f"CPU time per cell, {name}" for name in ("backed", "scDataset", "annbatch /", "litdata /")),
    "training step, full", "tl.embed, full", "forward, packed full", "forward + backward, packed full",
    "forward: compiled", "backward: cuDNN", "backward: compiled", "executions", "crashes",
)  # fmt: skip
"""Beginnings of the goals on the page, apart from those that are missed."""
FARTHEST = {"cells": 9, "tissues": 3}
"""Powers of ten of cells and tissues that no corpus has."""
INTERNAL = ("cells", "weights", "weights_from", "weights_note")
KANG = {"kang_pbmc_12k_1287g": "Kang, 8 donors", "kang_ifnb_2800": "Kang, stimulated"}
FOUR = {**KANG, "sc_mixology_cell_lines": "cell lines", "panc8_small_500": "pancreas"}


class Comparison(NamedTuple):
    """A table: rows in which fields have these values, datasets, our arms, rivals, and the score."""

    words: str
    result: str
    where: Mapping[str, object]
    datasets: Mapping[str, str]
    ours: Mapping[str, str]
    rivals: Mapping[str, str]
    key: str


COMPARISONS = {
    "integration": Comparison(
        "Mean of NMI, ARI and the scaled silhouette of cell types after `tl.integrate`, without labels.",
        "integration", {"part": "unlabelled"}, FOUR, {"ours": "`tl.integrate`", "own_components": "without the model"},
        {"pca": "PCA", "combat": "ComBat", "harmony": "Harmony", "scvi": "scVI"}, "average_bio",
    ),
    "mixing": Comparison(
        "Mixing of batches in the same embeddings: iLISI, 0 to 1. More mixing is better only where cell types stay "
        "separate.",
        "integration", {"part": "unlabelled"}, FOUR, {"ours": "`tl.integrate`"},
        {"pca": "PCA", "combat": "ComBat", "harmony": "Harmony", "scvi": "scVI"}, "ilisi",
    ),
    "annotation": Comparison(
        "Macro-F1 of `tl.annotate` with the whole reference labelled.", "annotation", {"part": "full"}, FOUR,
        {"ours": "`tl.annotate`"},
        {"logistic_balanced": "logistic regression", "svm": "linear SVM", "knn": "15-NN on PCA", "scanvi": "scANVI"},
        "macro_f1",
    ),
    "few": Comparison(
        "Macro-F1 with 1% of the reference's cells labelled.", "annotation", {"part": "few", "share": 0.01}, FOUR,
        {"ours": "`tl.annotate`"},
        {"logistic_balanced": "logistic regression", "centroid": "nearest centroid", "scanvi": "scANVI"}, "macro_f1",
    ),
    "perturbation": Comparison(
        "Pearson correlation of the predicted and the observed change of expression, all genes.", "perturbation", {},
        {"norman_doubles": "Norman, 15 doubles", "norman_singles": "Norman, 18 singles", "glioma": "glioma, lines",
         "kang_ifnb": "Kang, IFN-beta, types"}, {"ours": "`tl.predict_perturbation`"},
        {"additive": "additive", "matching_mean": "matching mean", "train_mean": "train mean", "linear": "linear",
         "gears": "GEARS"}, "pearson_delta",
    ),
    "imputation": Comparison(
        "Spearman correlation within cells of removed counts and values imputed by `tl.impute`.", "imputation",
        {"part": "impute"}, {"pbmc3k_raw": "pbmc3k", "kang_pbmc_12k_1287g": "Kang, 8 donors"}, {"ours": "`tl.impute`"},
        {"knn": "30 neighbours", "type_means": "means of cell types", "scvi": "scVI"}, "spearman_cell",
    ),
    "imputation_gene": Comparison(
        "The same within genes.", "imputation", {"part": "impute"},
        {"pbmc3k_raw": "pbmc3k", "kang_pbmc_12k_1287g": "Kang, 8 donors"}, {"ours": "`tl.impute`"},
        {"knn": "30 neighbours", "type_means": "means of cell types", "scvi": "scVI"}, "spearman_gene",
    ),
    "masked": Comparison(
        "Share of masked genes (30%) that `tl.reconstruct` recovers at one step.", "imputation", {"part": "masked"},
        {"pbmc3k_raw": "pbmc3k", "kang_pbmc_12k_1287g": "Kang, 8 donors"},
        {"ours": "with true ranks", "ours_no_places": "without ranks"},
        {"marginals": "frequency of genes", "type_means": "frequency in the true cell type"}, "masked_recall",
    ),
}  # fmt: skip


def rows_of(name: str) -> list[dict]:
    """Rows of a result, each with the command, commit and date of its record; none where there is no result."""
    file = RESULTS / f"{name}.json"
    entry = json.loads(file.read_text()) if file.exists() else {"rows": []}
    about = {key: entry[key] for key in ("command", "commit", "date") if key in entry}
    return [{**about, **row} for row in entry["rows"]]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with its figures aligned right."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def signed(value: float, interval: Sequence[float] | None) -> str:
    """A difference with its interval."""
    return f"{value:+.3f}" + (f" ({interval[0]:+.3f} to {interval[1]:+.3f})" if interval else " (no interval)")


def units(row: dict, key: str) -> dict[str, float]:
    """The score of each cell type, or of each group of held-out cells."""
    if key == "macro_f1":
        return row.get("f1", {})
    return {name: part[key] for name, part in row.get("each", {}).items() if key in part}


def difference(ours: dict, theirs: dict, key: str) -> tuple[float, tuple[float, float] | None]:
    """Difference of two rows with its interval over seeds; where both are deterministic, over types or groups."""
    value, interval = lead(ours, theirs, key)
    one, other = units(ours, key), units(theirs, key)
    names = [name for name in one if name in other]
    if interval is None and len(names) > 1:
        interval = bootstrap([one[name] - other[name] for name in names])
    return value, interval


def standing(signs: Mapping[str, int]) -> str:
    """On how many datasets we are ahead of the best rival beyond noise, and where we are behind."""
    ahead, behind = (sum(sign == side for sign in signs.values()) for side in (1, -1))
    names = ", ".join(name for name, sign in signs.items() if sign < 0)
    return (
        f"Compared with the best of these rivals, scdiva is better on {ahead} of {len(signs)} datasets, worse on "
        f"{behind}{f' ({names})' if names else ''}, and not different beyond noise on {len(signs) - ahead - behind}.\n"
    )


def compared(one: Comparison) -> str:
    """Sentence, table and standing of a comparison. A row without interval counts as within it."""
    rows = [row for row in rows_of(one.result) if all(row.get(key) == value for key, value in one.where.items())]
    at = {(row["set"], row["arm"]): row for row in rows if "arm" in row and one.key in row}
    first = next(iter(one.ours))
    lines, signs = [], {}
    for name, label in one.datasets.items():
        rivals = {arm: at[name, arm] for arm in one.rivals if (name, arm) in at}
        if (name, first) not in at or not rivals:
            continue
        best = max(rivals, key=lambda arm: rivals[arm][one.key])
        value, interval = difference(at[name, first], rivals[best], one.key)
        signs[label] = 0 if interval is None else int(interval[0] > 0) - int(interval[1] < 0)
        shown = [at.get((name, arm), {}).get(one.key) for arm in (*one.ours, *one.rivals)]
        lines.append([label, *("-" if x is None else f"{x:.3f}" for x in shown), signed(value, interval)])
    header = ["", *one.ours.values(), *one.rivals.values(), "difference to the best rival (95% CI)"]
    return f"{one.words}\n\n{table(header, lines)}\n{standing(signs)}"


def embedding() -> str:
    """Accuracy and clustering of every labelled dataset."""
    rows = [row for row in rows_of("embedding") if row.get("group") == "benchmark" and "arm" in row]
    arms = {"adapt": "`tl.adapt`", "embed": "`tl.embed`", "pca20": "PCA-20", "pca50": "PCA-50, scaled", "scvi": "scVI"}
    rival, names = "pca20", {row["set"]: row["set"] for row in rows}
    parts, gains = [], []
    for key, words in {"accuracy": "15-NN accuracy", "average_bio": "mean of NMI, ARI and silhouette"}.items():
        at = {(row["set"], row["arm"]): row[key] for row in rows if key in row}
        if key == "accuracy":
            shown = [[f"{at[n, arm]:.3f}" if (n, arm) in at else "-" for arm in arms] for n in names]
            lines = [[label, *cells] for label, cells in zip(names.values(), shown, strict=True)]
            parts.append(f"15-NN accuracy.\n\n{table(['', *arms.values()], lines)}")
        line = [words]
        for arm in arms:
            apart = [at[n, arm] - at[n, rival] for n in names if (n, arm) in at and (n, rival) in at]
            line.append("" if arm == rival or not apart else signed(float(np.mean(apart)), bootstrap(apart)))
        gains.append(line)
    header = [f"mean difference to {arms[rival]} (95% CI over datasets)", *arms.values()]
    return "\n".join([*parts, table(header, gains)])


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
    for curve, place in sorted(points, key=lambda point: (list(words).index(point[0]), point[1])):
        here = points[curve, place]
        ends = sorted({min(row["at"] for row in here), max(row["at"] for row in here)})
        line = [f"{' to '.join(f'{end:,}' for end in ends)} {words[curve]}".replace("1 tissues", "blood only")]
        for group, key in scores:
            apart = [row[key] - base[row["set"], key] for row in here if row["group"] == group]
            whole = len(apart) == n_sets[group]
            line.append(signed(float(np.mean(apart)), bootstrap(apart)) if whole else "")
        lines.append(line)
    trends = {(row["curve"], row["group"], row["score"]): row for row in rows if row.get("part") == "trend"}
    for curve in ("cells", "tissues"):
        some = [trends[curve, *score] for score in scores if (curve, *score) in trends]
        slopes = [signed(row["slope"], row["slope_interval"]) for row in some]
        lines.append([f"change for 10 times the {curve}", *slopes])
        lines.append([f"{curve} at which it equals PCA-20", *(zero_of(row) for row in some)])
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


def denoising() -> str:
    """Log-loss and correlation of values, means over held-out studies, compared with nearest neighbours."""
    rows = [row for row in rows_of("imputation") if row.get("part") == "denoising"]
    names = {"query head, context": "query head with context", "query head": "query head, the cell alone",
             "neighbors": "nearest neighbours of the study", "population": "state head corrected for the study",
             "means": "gene means of the study"}  # fmt: skip
    at = {(row["set"], row["arm"]): row["log_loss"] for row in rows}
    studies = sorted({name for name, _ in at})
    lines = []
    for arm, label in names.items():
        apart = [at[name, arm] - at[name, "neighbors"] for name in studies]
        shown = "" if arm == "neighbors" else signed(float(np.mean(apart)), bootstrap(apart))
        lines.append([label, f"{np.mean([at[name, arm] for name in studies]):.3f}", shown])
    return table([f"{len(studies)} studies", "log-loss, nats", "difference to neighbours (95% CI over studies)"], lines)


def networks() -> str:
    """Average precision of known edges over chance, with the null distribution."""
    arms = ("embedding", "attention", "correlation", "spearman", "mutual_information", "forest", "expression")
    rows = {(row["set"], row["reference"], row["arm"]): row for row in rows_of("networks") if row["part"] == "edges"}
    lines = []
    for name, reference in dict.fromkeys(key[:2] for key in rows):
        found = [rows.get((name, reference, arm)) for arm in arms]
        lines.append([f"{name}, {reference}", *(
            "-" if row is None else f"{row['auprc_ratio']:.2f}{'*' if row['auprc_ratio_p'] < 0.05 else ''}"
            for row in found
        )])  # fmt: skip
    return table(["", *arms], lines)


def finetuning() -> str:
    """Scores with intervals of each arm of the fine-tuned tasks."""
    rows = rows_of("finetuning")
    parts = []
    for task in dict.fromkeys(row["task"] for row in rows):
        some = {(row["set"], row["arm"]): row for row in rows if row["task"] == task}
        sets, arms = (list(dict.fromkeys(key[i] for key in some)) for i in (0, 1))
        lines = []
        for arm in arms:
            found = [some.get((name, arm)) for name in sets]
            cells = (f"{r['mean']:.3f} ({r['interval'][0]:.3f} to {r['interval'][1]:.3f})" if r else "-" for r in found)
            lines.append([arm, *cells])
        parts.append(table([task, *sets], lines))
    return "\n".join(parts)


def goals(*names: str) -> str:
    """Measured value, goal and verdict of the goals in `SHOWN` and of those that are missed."""
    lines = []
    for name in names:
        for row in rows_of(name):
            if "met" in row and (row["met"] is False or row["what"].startswith(SHOWN)):
                sign, bound = ("≥", row["at_least"]) if "at_least" in row else ("≤", row["at_most"])
                said = verdict(row)
                said = f"**{said}**" if said == "missed" else said
                what = f"{row['what']} ({row['gpu'].split()[1]})" if "gpu" in row else str(row["what"])
                lines.append([what, f"{row['value']:,.3g}", f"{sign} {bound:,g}", said])
    return table(["", "measured", "goal", ""], lines)


def faults() -> str:
    rows = [*rows_of("faults"), *rows_of("faults_long")]
    return table(
        ["fault", "tried", "bit-exact", "steps lost"],
        [[row["fault"], *(str(row[key]) for key in ("tried", "bit_exact", "lost"))] for row in rows],
    )


def flat(row: dict) -> dict:
    """The scalars of a row, and the ends of its intervals."""
    found = {}
    for key, value in row.items():
        if key.endswith("interval") and isinstance(value, list):
            found |= {f"{key}_low": value[0], f"{key}_high": value[1]}
        elif not isinstance(value, list | dict) and key not in INTERNAL:
            found[key] = value
    return found


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
    made = {name: compared(one) for name, one in COMPARISONS.items()} | {
        "embedding": embedding(), "learning_curve": learning_curve(), "rejection": rejection(),
        "population": population(), "denoising": denoising(),
        "networks": networks(), "finetuning": finetuning(), "speed": goals("speed", "scaling"), "faults": faults(),
        "gpu": goals("gpu"), "fuzz": goals("fuzz"),
    }  # fmt: skip
    for name in FILES:
        made[f"csv_{name}"] = f"All rows: {{download}}`{name}.csv <_static/benchmarks/{name}.csv>`."
    for name, filled in made.items():
        text = text.replace(f"{{{{{name}}}}}", filled.strip())
    return text


def main() -> None:
    TABLES.mkdir(exist_ok=True)
    for name, results in FILES.items():
        (TABLES / f"{name}.csv").write_text(csv_of(results), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
