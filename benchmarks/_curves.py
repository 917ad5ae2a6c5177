"""The benchmarks page on the set encoder: learning curves, what was tried, sister studies."""

from __future__ import annotations

from statistics import mean, stdev

from _markdown import in_two, table

MEASURES = {
    "accuracy": "15-NN accuracy",
    "average_bio": "mean of NMI, ARI, ASW",
    "linear_accuracy": "accuracy, linear part",
    "linear_average_bio": "mean, linear part",
}


def _spread(values: list[float]) -> str:
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def learning_curve(result: dict) -> str:
    """Scores by cells and by steps, and the lines through them."""
    runs = [row for row in result["rows"] if "curve" in row]
    points: dict[tuple[str, int, int], list[dict]] = {}
    for row in runs:
        points.setdefault((row["curve"], row["cells"], row["steps"]), []).append(row)
    rows = [
        [curve, f"{cells:,}", f"{steps:,}", *(_spread([row[key] for row in some]) for key in MEASURES)]
        for (curve, cells, steps), some in points.items()
    ]
    lines = [
        f"- Over {fit['fit']}, {MEASURES[fit['measure']]}: {fit['per_tenfold']:+.3f} ± {fit['per_tenfold_se']:.3f} for "
        f"each tenfold number; {fit['at_ten_times']:.3f} at ten times {fit['most']:,}, if the line holds."
        for fit in result["rows"]
        if "fit" in fit
    ]
    header = ["curve", "cells", "steps", *MEASURES.values()]
    return f"{table(header, rows)}\n" + "\n".join(lines) + "\n"


def learning_curve_mouse(result: dict) -> str:
    """Scores of each set and arm: trained with the cells of mice, and without."""
    arms = [row for row in result["rows"] if "arm" in row]
    rows = [row for name in dict.fromkeys(row["set"] for row in arms) for row in arms if row["set"] == name]
    lines = [
        [f"{row['set']} ({row['n_cells']:,})", f"{row['arm']} ({row['trained_on']:,} cells)",
         *(_spread(row[f"{key}_seeds"]) for key in MEASURES)]
        for row in rows
    ]  # fmt: skip
    return table(["set (cells scored)", "trained", *MEASURES.values()], lines)


def attempts(result: dict) -> str:
    """Scores of each attempt, mean over the sets, its mean of NMI, ARI and ASW on each, its accuracy on few counts."""
    arms: dict[str, list[dict]] = {}
    for row in result["rows"]:
        arms.setdefault(row["arm"], []).append(row)
    base = next(iter(arms))
    sets, thinned = list(arms[base][0]["sets"]), list(arms[base][0]["thinned"])
    rows = []
    for name, some in arms.items():
        line = [name, some[0]["what"]]
        for key in ("accuracy", "average_bio"):
            apart = mean(row[key] for row in some) - mean(row[key] for row in arms[base])
            line.append(_spread([row[key] for row in some]) + ("" if name == base else f" ({apart:+.3f})"))
        line += [_spread([row["sets"][one]["average_bio"] for row in some]) for one in sets]
        rows.append(line + [_spread([row["thinned"][one]["accuracy"] for row in some]) for one in thinned])
    linear = ["linear", "its linear part alone"]
    linear += [_spread([row[f"linear_{key}"] for row in arms[base]]) for key in ("accuracy", "average_bio")]
    linear += [_spread([row["sets"][one]["linear_average_bio"] for row in arms[base]]) for one in sets]
    rows.append(linear + ["-"] * len(thinned))
    header = ["arm", "", MEASURES["accuracy"], MEASURES["average_bio"], *(f"mean, {one}" for one in sets)]
    header += [f"accuracy at 10% depth, {one}" for one in thinned]
    return in_two(header, rows, 2, 7)


SISTERS = {"shipped": "in training (scdiva-mini)", "left_out": "left out of training"}


def sister_studies(result: dict) -> str:
    """A line for each set and call with the study in training, and one without it; a column for each score there is."""
    names = {**MEASURES, "macro_f1": "macro-F1", "nmi": "NMI", "ari": "ARI", "asw": "ASW", "ilisi": "iLISI",
             "batch_asw": "batch ASW", "ece": "ECE"}  # fmt: skip
    keys = [key for key in names if any(key in row for row in result["rows"])]
    rows = []
    for row in result["rows"]:
        scores = [
            f"{row[key]:.3f}" + (f" ± {sd:.3f}" if (sd := row.get(f"{key}_sd", 0.0)) >= 0.0005 else "")
            if key in row
            else "-"
            for key in keys
        ]
        rows.append([row["set"], f"`{row['task']}`", SISTERS.get(row["trained"], row["trained"]), *scores])
    return in_two(["set", "call", "its sister study", *(names[key] for key in keys)], rows, 3, 6)
