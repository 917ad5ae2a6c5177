"""The part of the benchmarks page on perturbations, and what the paper and the literature print of them."""

from __future__ import annotations

from _annotation_table import joined
from _integration_table import made_at, value
from _markdown import in_two, table
from _perturbation_scores import ABOVE_MEAN, AMONG_ALL, AMONG_PART, COVERAGE, DISCRIMINATION

PREDICTED = {
    "ours": "`tl.predict_perturbation`",
    "ours_head": "with a network (removed since)",
    "ours_network": "a network alone (removed since)",
    "gears": "GEARS",
    "no_change": "no change",
    "train_mean": "mean of the training perturbations",
    "matching_mean": "matching mean",
    "additive": "additive",
    "linear": "linear",
    "elsewhere": "the same perturbation elsewhere",
}
SCORES = {
    "pearson_delta": "Pearson Δ",
    "pearson_delta_top20": "top 20",
    "pearson_delta_top100": "top 100",
    ABOVE_MEAN: "from the mean",
    "mse_top20": "MSE, top 20",
    "hit_rate_20": "hits of 20",
    "sign_accuracy": "signs",
    DISCRIMINATION: "discrimination",
    AMONG_ALL: "among all",
    COVERAGE: "in 95%",
}
COSTS = {"cpu_seconds": "CPU seconds", "peak_mib": "peak MiB"}
SMALL = {"norman_doubles": "{} doubles, 500 genes", "norman_singles": "{} singles, 500 genes"}
"""Sets that are a small part of a published screen."""
EACH = {
    "pearson_delta": "Pearson Δ",
    "pearson_delta_top20": "Pearson Δ of the top 20",
    AMONG_PART: "discrimination",
}
WORDS = (
    "Log-normalised mean expression of conditions that were held out, all cells of a perturbation being one condition "
    "(in a group where groups are left out). norman_doubles and norman_singles: 15 doubles and 18 singles of a subset "
    "of Norman's screen in K562, 3,375 cells with 500 genes, not the complete screen of the literature; a fifth of "
    "the combinations is held out in turn, or of the single perturbations with every combination that one of them is "
    "part of (scores are over the singles); folds are drawn anew for each seed. glioma: nine perturbations in "
    "three lines, of one line in turn the control cells alone are given; kang_ifnb: IFN-beta, the same for each cell "
    "type with 20 cells of both kinds. The simple baselines are those that the result of `tl.predict_perturbation` "
    "carries. Pearson Δ is the correlation of predicted and observed change from the control cells over all genes, or "
    'the 20 or 100 with the largest Welch t; "from the mean": of changes from the mean over the training '
    "perturbations; hits: share of the 20 among the 20 predicted to change most; signs: share of the 20 whose "
    "direction is right. A prediction that knows no genes has 0, 0.5 for signs. Discrimination is the rank of the "
    "true condition among those that its fold held out, 1 the best, 0.5 chance and any prediction that is the same "
    "for all; among all: of all folds, where the mean over the others is below 0.5, for it lacks what was held out; "
    "of each part: of all folds, with as many parts seen. In 95%: share of expressed genes whose mean lies in the "
    "predicted interval of 95%. Means over conditions, then over seeds. A method that is "
    "not defined for every condition has their number in brackets. Each fit ran on one thread in a process of its "
    "own; CPU seconds are of one fit and its prediction, peak MiB is all that the process held."
)
GEARS_WORDS = (
    "GEARS is cell-gears with its defaults (20 epochs, a tenth of the training perturbations selects the best). Its "
    "graph of perturbations is made from the gene sets named in its notes, as the gene ontology that it downloads was "
    "not at hand; where a perturbed gene is in none of them, GEARS knows nothing of it but what it was trained on."
)
ATTEMPT_WORDS = (
    "norman_doubles (15 doubles, 500 genes) and norman_singles (18 singles, 500 genes) as above, by the expected "
    "response alone, with one number or step of it changed: what was tried to tell combinations better, above all "
    "those both of whose parts were perturbed alone, where adding the parts up is hard to beat. Discrimination there "
    "is among all of these combinations."
)

PAPER = {
    "scDiVa, in its paper": {"Adamson": ("0.837", "0.134"), "Norman": ("0.709", "-")},
}
"""Pearson correlation and MSE of differentially expressed genes, as printed in the text; others are only drawn."""
LITERATURE = {
    "linear model": "0.776", "train mean": "0.749", "GEARS": "0.715", "scGPT": "0.710", "scFoundation": "0.636",
}  # fmt: skip
"""Pearson Δ over the 100 most changed genes, Norman's combinations."""
PAPER_WORDS = (
    "What the paper prints (section on perturbation prediction; the rest is drawn): Pearson correlation / MSE of "
    "differentially expressed genes. Which genes, splits and seeds is not said, nor whether the correlation is of "
    "changes. **None of it was measured here**: these files do not come with the package. `python "
    "benchmarks/perturbation.py --data FOLDER --sets norman_2019_doubles norman_2019_singles adamson_2016` runs all "
    "arms above on the complete screens, once their files are in FOLDER (`sd.datasets.norman(download=True)`, "
    "`sd.datasets.adamson(download=True)`)."
)
LITERATURE_WORDS = (
    "What others report for Norman's combinations, Pearson Δ over the top 100 genes; splits differ. Simple baselines "
    "are above the networks there. **Not measured here** either."
)


def named(name: str, n_conditions: int) -> str:
    """Return a set with its conditions, and its genes where these are a small part of all."""
    return f"{name}: {SMALL[name].format(n_conditions)}" if name in SMALL else f"{name} ({n_conditions})"


def scores(rows: list[dict]) -> str:
    """A line for each set and method."""
    keys = [key for key in SCORES if any(key in row for row in rows)]
    lines = []
    for row in rows:
        most = max(other["n_conditions"] for other in rows if other["set"] == row["set"])
        fewer = f" ({row['n_conditions']})" if row["n_conditions"] < most else ""
        costs = (f"{row[key]:,.0f}" if key in row else "-" for key in COSTS)
        name = named(row["set"], most)
        lines.append([name, PREDICTED[row["arm"]] + fewer, *(value(row, key) for key in keys), *costs])
    header = ["set (conditions)", "method", *(SCORES[key] for key in keys), *COSTS.values()]
    return in_two(header, lines, 2, 7) if len(header) > 9 else table(header, lines)


def each(rows: list[dict], metric: str) -> str:
    """A line for each part of a set's conditions, a column for each method; empty where no set has this."""
    arms = [arm for arm in PREDICTED if any(row["arm"] == arm for row in rows)]
    lines = []
    for name in dict.fromkeys(row["set"] for row in rows):
        parts = {row["arm"]: row["each"] for row in rows if row["set"] == name}
        label = name
        if name in SMALL:
            label = named(name, max(row["n_conditions"] for row in rows if row["set"] == name))
        for part in sorted({part for of_arm in parts.values() for part in of_arm}):
            found = [parts.get(arm, {}).get(part, {}) for arm in arms]
            if any(metric in one for one in found):
                n = max(one.get("n_conditions", 0) for one in found)
                figures = (f"{one[metric]:.3f}" if metric in one else "-" for one in found)
                lines.append([f"{label}, {part} ({n})", *figures])
    return table(["set, part (conditions)", *(PREDICTED[arm] for arm in arms)], lines) if lines else ""


def _notes(rows: list[dict]) -> str:
    """What our fits chose to build on, and GEARS its graph from."""
    found = []
    for row in rows:
        for key, word in {"base": "base ", "strategy": "strategy ", "network": "network ", "graph": ""}.items():
            if key in row and row["arm"] in ("ours", "gears"):
                said = row[key]
                text = ", ".join(f"{what} ({n})" for what, n in said.items()) if isinstance(said, dict) else said
                found.append(f"{row['set']}, {PREDICTED[row['arm']]}: {word}{text}.")
    return " ".join(found)


def perturbation_tables(result: dict) -> list[str]:
    """The tables, what they were made with, and arms left out."""
    rows = [row for row in result["rows"] if "arm" in row]
    if not rows:
        return []
    parts = ["### Held-out responses", scores(rows)]
    for metric, title in EACH.items():
        if text := each(rows, metric):
            parts += [f"{title[0].upper()}{title[1:]} of each part:", text]
    known = GEARS_WORDS if any(row["arm"] == "gears" for row in rows) else ""
    missing = [f"Left out: {PREDICTED[arm]}; {why}." for arm, why in result.get("left_out", {}).items()]
    return [joined(*parts, known, _notes(rows), made_at(rows), *missing)]


def perturbation_attempts(result: dict) -> str:
    """A line for each attempt."""
    parts = {
        "norman_doubles": "15 doubles, 500 genes", "both_seen": "5 of them, both parts seen",
        "norman_singles": "18 singles, 500 genes",
    }  # fmt: skip
    names = {"pearson_delta": "Pearson Δ", "pearson_delta_top20": "top 20"}
    lines = [
        [f"{row['attempt']}: {row['what']}", *(" / ".join(f"{v:.3f}" for v in row[part].values()) for part in parts)]
        for row in result["rows"]
    ]
    words = f"{' / '.join(names.values())} / discrimination:"
    return joined(words, table(["attempt", *parts.values()], lines))


def reported() -> str:
    """The figures of others, marked as such."""
    sets = ("Adamson", "Norman")
    of_paper = [[name, *(" / ".join(found[one]) for one in sets)] for name, found in PAPER.items()]
    others = [[name, figure] for name, figure in LITERATURE.items()]
    return joined(
        "### What the paper and the literature report on perturbations", PAPER_WORDS,
        table(["the paper's figures", *sets], of_paper), LITERATURE_WORDS,
        table(["figures of others", "Norman, combinations"], others),
    )  # fmt: skip
