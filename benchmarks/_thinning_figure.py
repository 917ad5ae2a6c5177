"""The figure of embeddings of thinned cells."""

from __future__ import annotations

from pathlib import Path

from _markdown import arm_name

FIGURE = Path(__file__).parents[1] / "docs" / "_static" / "thinning.png"
THINNED = {"cosine": "cosine", "cosine_centred": "cosine, centred", "accuracy": "15-NN accuracy"}


def draw_thinning(result: dict, file: Path, names: dict[str, str], fingerprint: str) -> None:
    """Draw centred cosine and accuracy against depth, a column for each set. The same rows give the same file."""
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if "arm" in row]
    sets, measures = list(dict.fromkeys(row["set"] for row in rows)), ("cosine_centred", "accuracy")
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    figure = Figure(figsize=(3.6 * len(sets), 5.6), layout="constrained")
    axes = figure.subplots(len(measures), len(sets), sharex=True, sharey="row", squeeze=False)
    for column, name in enumerate(sets):
        axes[0, column].set_title(name)
        axes[-1, column].set_xlabel("share of the counts kept")
        for arm in arms:
            some = [row for row in rows if (row["set"], row["arm"]) == (name, arm)]
            color = f"C{[*names, *(other for other in arms if other not in names)].index(arm)}"
            for axis, key in zip(axes[:, column], measures, strict=True):
                depths, values = [row["depth"] for row in some], [row[key] for row in some]
                axis.errorbar(
                    depths,
                    values,
                    [row[f"{key}_sd"] for row in some],
                    color=color,
                    marker="o",
                    ms=4,
                    label=arm_name(some[0], names),
                )
    for axis, key in zip(axes[:, 0], measures, strict=True):
        axis.set_ylabel(THINNED[key])
    axes[0, 0].set_xscale("log")
    depths = sorted({row["depth"] for row in rows})
    axes[0, 0].set_xticks(depths, [f"{depth:.0%}" for depth in depths], minor=False)
    axes[0, 0].minorticks_off()
    axes[0, -1].legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=110, metadata={"Software": None, "Description": fingerprint})
