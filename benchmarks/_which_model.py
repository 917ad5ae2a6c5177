"""The page "which model when": of each task every method's figure, what it costs, and on how many sets ours leads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from _markdown import table
from _summary import TASKS, Line, Task, compared, value_of
from _timing import verdict

ARMS = {
    "embedding": {"pca20": "PCA, 20 components", "pca50": "PCA, scaled", "scvi": "scVI", "embed": "`tl.embed`",
                  "adapt": "`tl.adapt`"},
    "integration": {"ours": "`tl.integrate`", "pca": "PCA", "combat": "ComBat", "harmony": "Harmony", "scvi": "scVI"},
    "annotation": {
        "ours": "`tl.annotate`", "logistic_balanced": "logistic regression", "svm": "linear SVM", "scanvi": "scANVI",
    },
    "perturbation": {
        "ours": "`tl.predict_perturbation`", "additive": "additive", "linear": "linear", "train_mean": "train mean",
        "gears": "GEARS",
    },
    "reconstruction": {"ours": "`tl.impute`", "scvi": "scVI", "knn": "30 neighbours"},
}  # fmt: skip
"""Of each result the arms that stand side by side, in the order of the columns."""
FOREWORD = """# Which model when

Every figure is of the same cells, splits and seeds, on two CPU cores, made by `benchmarks/tables.py`; bold is the
best of a row, whether or not the lead is beyond noise. The sentence above a table says what is. Costs are CPU
seconds of one fit and its use, the median over sets, on a machine that had other work to do: read them as rough.

Some of our choices were made on these sets, which flatters us; the pages of all tables say which.

**In short.** Use PCA first. It takes seconds, and in tissues other than blood and marrow it separates cell types
better than the bundled model without fitting. `tl.adapt` and PCA with 20 components are alike on average over the
labelled benchmark datasets, and each is better on some of them ([all tables](results/embedding.md)). Use scdiva
if later cells must be mapped to the same space without refitting, if batch correction must apply to later batches, or
if a classifier should reject types that are not in the reference. Use Harmony if a corrected PCA of these cells is
sufficient; it is the fastest. Use scVI if you need its likelihood (differential expression, posterior of denoised
counts); on a CPU it takes minutes. Only trust a perturbation model that beats the additive baseline on perturbations
that you held out.
"""
OTHERS = """## scGPT, Geneformer, scFoundation

They were not run here: their weights are not at hand, and no figure of ours speaks of them. What the paper reports
of scGPT stands on the pages of [integration](results/integration.md) and [annotation](results/annotation.md), and
is of other splits and cells. Independent studies found their zero-shot embeddings often behind highly variable
genes, Harmony and scVI (Kedzierska et al., Genome Biology 2025), and their predictions of perturbations not ahead
of an additive or linear baseline (Ahlmann-Eltze et al., Nature Methods 2025). They have tens of millions of
weights, and fine-tuning wants a GPU; `scdiva-mini` has ten million, of which an embedding on a CPU reads the set
encoder alone.
"""


def cost(rows: Sequence[dict], lines: Sequence[Line], arm: str) -> str:
    """CPU seconds of an arm, the median over the sets of a task."""
    found = [
        row["cpu_seconds"]
        for line in lines
        for row in rows
        if row.get("arm") == arm and "cpu_seconds" in row and all(row.get(k) == v for k, v in line.where.items())
    ]
    return (f"{median(found):,.0f}" if median(found) >= 1 else "< 1") if found else "-"


def standing(rows: Sequence[dict], task: Task) -> str:
    """On how many sets the lead over the best rival of the goal is beyond noise."""
    found = Counter(verdict(one[3]) for line in task.lines if (one := compared(rows, line)) is not None)
    said = {"met": "goal met", "within noise": "within noise", "missed": "missed"}
    return ", ".join(f"{words} on {found[kind]}" for kind, words in said.items() if found[kind])


def which_model(results: Mapping[str, dict]) -> str:
    """The whole page."""
    parts = [FOREWORD]
    for task in TASKS:
        rows = results.get(task.result, {"rows": []})["rows"]
        found = {arm: [value_of(rows, line, arm) for line in task.lines] for arm in ARMS.get(task.result, ()) if rows}
        known = {arm: values for arm, values in found.items() if any(value is not None for value in values)}
        if not known:
            continue
        lines, shown_before = [], []
        for i, line in enumerate(task.lines):
            if (place := (line.key, line.where)) in shown_before:
                continue
            shown_before.append(place)
            shown = {arm: f"{values[i]:.3f}" for arm, values in known.items() if values[i] is not None}
            best = max(shown.values(), key=float, default="")
            cells = [f"**{shown[arm]}**" if shown.get(arm) == best else shown.get(arm, "-") for arm in known]
            lines.append([line.label.partition(": `")[0], *cells])
        costs = [cost(rows, task.lines, arm) for arm in known]
        if set(costs) != {"-"}:
            lines.append(["CPU seconds", *costs])
        names = [ARMS[task.result][arm] for arm in known]
        words = f"{task.words} Of {len(task.lines)} comparisons: {standing(rows, task)}."
        words += f" [All tables](results/{task.page}.md)."
        parts += [f"## {task.title}\n\n{words}\n", table(["", *names], lines)]
    return "\n".join([*parts, OTHERS])
