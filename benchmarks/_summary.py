"""The first page of the benchmarks: of each task one figure and one short table, ours beside the best rival."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from _markdown import table
from _timing import verdict

COLORS = {"met": "#009E73", "within noise": "#7F7F7F", "missed": "#D55E00"}
"""Of verdicts; of Okabe and Ito's palette, which colour-blind readers tell apart."""
NAMES = {
    "pca": "PCA",
    "pca20": "PCA, 20 components",
    "harmony": "Harmony",
    "scvi": "scVI",
    "scanvi": "scANVI",
    "logistic": "logistic regression",
    "logistic_balanced": "logistic regression",
    "svm": "linear SVM",
    "additive": "additive",
    "matching_mean": "matching mean",
    "train_mean": "train mean",
    "linear": "linear model",
    "no_change": "no change",
    "knn": "30 nearest neighbours",
    "diffused": "diffusion",
    "marginals": "training cells",
    "head_mlp": "MLP on the state",
    "head_offsets": "gene offsets fitted to 200 cells",
    "neighbors": "nearest neighbours of the study",
}


class Line(NamedTuple):
    """A comparison: which goal judges it, and in which rows both figures stand.

    Attributes
    ----------
    label
        Data set and measure, as the table says them.
    what
        The goal's own words in the results.
    where
        Entries of the rows, but for the arm.
    ours, rivals
        Arms. The best of the rivals is shown.
    key
        The figure; lower is better where the goal's lead is of a loss.
    lower
        Whether it is.
    """

    label: str
    what: str
    where: Mapping[str, object]
    ours: str
    rivals: Sequence[str]
    key: str
    lower: bool = False


class Task(NamedTuple):
    """A task: its heading, its result, the page of its tables, a sentence, and its comparisons."""

    title: str
    result: str
    page: str
    words: str
    lines: Sequence[Line]


def _sets(
    names: Mapping[str, str], what: str, ours: str, rivals: Sequence[str], key: str, **where: object
) -> list[Line]:
    """The same comparison on several sets; `{}` of `what` is the set."""
    return [Line(label, what.format(name), {"set": name, **where}, ours, rivals, key) for name, label in names.items()]


BLOOD = {"pbmc3k_raw": "pbmc3k", "kang_pbmc_12k_1287g": "Kang, 8 donors", "kang_ifnb_2800": "Kang, stimulated"}
FOUR = {
    "kang_pbmc_12k_1287g": "Kang, 8 donors",
    "kang_ifnb_2800": "Kang, stimulated",
    "sc_mixology_cell_lines": "cell lines, 5 protocols",
    "panc8_small_500": "pancreas, 8 batches",
}
TASKS = (
    Task(
        "Embedding", "embedding", "embedding",
        "`tl.embed` (nothing fitted) and `tl.adapt`, means over the labelled benchmark datasets, beside PCA with 20 "
        "components of the same cells. Goals: `tl.embed` not below PCA, `tl.adapt` at least .02 above it.",
        [
            Line(f"{measure}: `tl.{arm}`", f"{arm}: {measure} less that of pca20", {"group": "benchmark"}, arm,
                 ["pca20"], key)
            for arm in ("embed", "adapt")
            for key, measure in (("accuracy", "15-NN accuracy"), ("average_bio", "mean of NMI, ARI, ASW"))
        ],
    ),
    Task(
        "Integration", "integration", "integration",
        "Mean of NMI, ARI and ASW of `tl.integrate` without labels. Goal: above the better of Harmony and scVI.",
        _sets(
            FOUR, "{}: mean of NMI, ARI, ASW above the better of Harmony and scVI", "ours", ["harmony", "scvi"],
            "average_bio", part="unlabelled",
        ),
    ),
    Task(
        "Annotation", "annotation", "annotation",
        "Macro-F1 of `tl.annotate`, batches left out, beside balanced logistic regression. Goal: above it.",
        _sets(
            FOUR, "{}: macro-F1, default above balanced logistic regression", "ours", ["logistic_balanced"],
            "macro_f1", part="full",
        ),
    ),
    Task(
        "Perturbation", "perturbation", "perturbation",
        "Pearson correlation of predicted and observed change, all genes, of perturbations left out. Goal: above the "
        "best simple baseline.",
        _sets(
            {
                "norman_doubles": "Norman, 15 doubles, 500 genes",
                "norman_singles": "Norman, 18 singles, 500 genes",
            },
            "{}: pearson_delta, above the best baseline", "ours",
            ["no_change", "train_mean", "matching_mean", "additive", "linear"], "pearson_delta",
        ),
    ),
    Task(
        "Imputation", "reconstruction", "generation",
        "Spearman correlation per cell of counts taken away and imputed ones. Goal: above scVI (default epochs).",
        _sets(
            {name: BLOOD[name] for name in ("pbmc3k_raw", "kang_pbmc_12k_1287g")},
            "{}: imputation, Spearman per cell above scVI", "ours", ["scvi"], "spearman_cell", part="impute",
        ),
    ),
    Task(
        "Studies never seen", "denoising", "generation",
        "Log-loss (nats, lower is better) of whether a gene is expressed, over twelve studies held out by publication; "
        "with context, 200 other cells of the study are read and nothing is fitted.",
        [
            Line("query head, the cell alone", "query head: log_loss ahead of head_mlp", {}, "query head",
                 ["head_mlp"], "log_loss", lower=True),
            Line("query head, with context", "query head, context: log_loss ahead of head_offsets", {},
                 "query head, context", ["head_offsets"], "log_loss", lower=True),
            Line("query head, with context", "query head, context: log_loss ahead of neighbors", {},
                 "query head, context", ["neighbors"], "log_loss", lower=True),
        ],
    ),
)  # fmt: skip


def value_of(rows: Sequence[dict], line: Line, arm: str) -> float | None:
    """Mean of the figure over the rows of an arm; None if there is none, or if it has fewer rows than ours."""
    known = [row for row in rows if line.key in row and all(row.get(key) == of for key, of in line.where.items())]
    found = [row[line.key] for row in known if row.get("arm") == arm]
    ours = sum(row.get("arm") == line.ours for row in known)
    return sum(found) / len(found) if found and len(found) >= ours else None


def compared(rows: Sequence[dict], line: Line) -> tuple[float, str, float, dict] | None:
    """Our figure, the best rival and its figure, and the goal; None where one is missing."""
    goal = next((row for row in rows if row.get("what") == line.what), None)
    ours = value_of(rows, line, line.ours)
    known = {arm: value for arm in line.rivals if (value := value_of(rows, line, arm)) is not None}
    if goal is None or ours is None or not known:
        return None
    best = min(known, key=known.__getitem__) if line.lower else max(known, key=known.__getitem__)
    return ours, NAMES[best], known[best], goal


def summary(results: Mapping[str, dict]) -> str:
    """Heading, sentence, figure and table of each task that has rows."""
    parts = []
    for task in TASKS:
        lines = []
        for line in task.lines:
            found = compared(results[task.result]["rows"], line) if task.result in results else None
            if found is None:
                continue
            ours, rival, theirs, goal = found
            low, high = goal.get("interval", (float("nan"),) * 2)
            lines.append([
                line.label, f"{ours:.3f}", f"{rival} {theirs:.3f}", f"{goal['value']:+.3f} ({low:+.3f} to {high:+.3f})",
                f"**{verdict(goal)}**" if verdict(goal) == "missed" else verdict(goal),
            ])  # fmt: skip
        if lines:
            header = ["", "scdiva", "best rival", "lead (95% interval)", "goal"]
            parts += [
                f"## {task.title}\n\n{task.words} [All tables](results/{task.page}.md).\n",
                f"![{task.title}: lead over the best rival](_static/summary_{task.result}.png)\n",
                table(header, lines),
            ]
    return "\n".join(parts)


def draw_summaries(results: Mapping[str, dict], folder: Path, description: Mapping[str, str]) -> None:
    """Draw of each task the lead over the best rival. The same rows give the same files."""
    from matplotlib.figure import Figure

    for task in TASKS:
        rows = results.get(task.result, {"rows": []})["rows"]
        found = [(line.label, one[1], one[3]) for line in task.lines if (one := compared(rows, line)) is not None]
        if not found:
            continue
        figure = Figure(figsize=(6.4, 0.9 + 0.36 * len(found)), layout="constrained")
        axis = figure.subplots()
        for number, (_, _, goal) in enumerate(found):
            color = COLORS.get(verdict(goal), "#7F7F7F")
            low, high = goal.get("interval", (goal["value"],) * 2)
            axis.plot([low, high], [number, number], color=color, lw=2, solid_capstyle="butt")
            axis.plot(goal["value"], number, "o", color=color, ms=6)
        axis.axvline(0, color="black", lw=0.8)
        axis.set_yticks(range(len(found)), [f"{label} vs {rival}" for label, rival, _ in found])
        axis.set_ylim(len(found) - 0.5, -0.5)
        axis.set_xlabel("lead of scdiva (95% interval)")
        axis.spines[["top", "right"]].set_visible(False)
        metadata = {"Software": None, "Description": description[task.result]}
        figure.savefig(folder / f"summary_{task.result}.png", dpi=160, metadata=metadata)
