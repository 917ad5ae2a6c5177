"""The ablation's part of the benchmarks page."""

from __future__ import annotations

from math import inf
from statistics import mean, median, stdev

from _markdown import table

STATE = ("accuracy", "average_bio")
DENOISED = ("identity", "identity_drawn", "value", "value_shown")
ABLATED = {
    "accuracy": ("15-NN accuracy", True),
    "average_bio": ("mean of NMI, ARI, ASW", True),
    "identity": ("identity, nats", False),
    "identity_drawn": ("identity, drawn genes", False),
    "value": ("value", False),
    "value_shown": ("value, gene shown", False),
}
"""Heading of each measure, and whether more of it is better."""


def compared(rows: list[dict], base: list[dict], key: str) -> tuple[float, float] | None:
    """Mean difference of an arm to its base over the seeds that both have, and its own standard error."""
    of_base = {row["seed"]: row[key] for row in base if key in row}
    apart = [row[key] - of_base[row["seed"]] for row in rows if key in row and row["seed"] in of_base]
    if not apart:
        return None
    return mean(apart), stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else inf


def family(rows: list[dict], base: str) -> str:
    """The table of a family of arms, and what of it is more than noise."""
    arms: dict[str, list[dict]] = {}
    for row in rows:
        arms.setdefault(row["arm"], []).append(row)
    keys = [key for key in ABLATED if any(key in row for row in rows)]
    found = {
        key: {arm: one for arm in arms if arm != base and (one := compared(arms[arm], arms[base], key))} for key in keys
    }
    # three seeds say little of an arm's own spread: it counts as no smaller than that of the family's middle arm
    least = {key: median(error for _, error in found[key].values()) if found[key] else inf for key in keys}
    lines = []
    better, worse = {}, {}
    for arm, some in arms.items():
        line = {"arm": arm, "": some[0]["what"], "cells seen": f"{round(mean(row['cells_seen'] for row in some)):,}"}
        for key in keys:
            values = [row[key] for row in some if key in row]
            cell = f"{mean(values):.3f}" if values else "-"
            if len(values) > 1:
                cell += f" ± {stdev(values):.3f}"
            if (one := found[key].get(arm)) is not None:
                cell += f" ({one[0]:+.3f})"
                clear = abs(one[0]) > 2 * max(one[1], least[key])
                side = better if (one[0] > 0) == ABLATED[key][1] else worse
                if clear:
                    side.setdefault(arm, []).append(ABLATED[key][0])
                    cell = f"**{cell}**"
            line[key] = cell
        lines.append(line)

    def named(side: dict[str, list[str]]) -> str:
        return "; ".join(f"`{arm}` ({', '.join(measures)})" for arm, measures in side.items()) or "none"

    alike = [f"`{arm}`" for arm in arms if arm not in better and arm != base]
    words = (
        f"Better than `{base}` by more than two standard errors: {named(better)}. Worse: {named(worse)}. "
        f"Did not help, in no measure here: {', '.join(alike) or 'none'}.\n"
    )
    tables = []
    for measured in (STATE, DENOISED):  # side by side they are wider than a page
        if shown := [key for key in keys if key in measured]:
            columns = ["arm", "", "cells seen"][: 2 if tables else 3] + shown
            header = [ABLATED[key][0] if key in ABLATED else key for key in columns]
            tables.append(table(header, [[line[key] for key in columns] for line in lines]))
    return "\n".join([*tables, words])


def ablation(result: dict) -> str:
    """A table for each family; the base of the anchors is the base of the diffusion arms too."""
    rows, parts = result["rows"], []
    seeds = sorted({row["seed"] for row in rows})
    done = {seed: sum(row["seed"] == seed for row in rows) for seed in seeds}
    parts.append(
        f"{len(result['not_trained_on'])} studies are held out, {result['n_cells']:,} cells of the other "
        f"{result['n_studies']} are trained on, each base for {result['seconds']:g} CPU seconds. "
        f"Scored: {', '.join(result['sets'])}. Arms "
        f"done: {', '.join(f'{n} with seed {seed}' for seed, n in done.items())}. "
        "The options `pooled`, `two_view`, `contrast` (of the transformer arms) and `inv_t` were removed after this: "
        "their rows can't be made again.\n"
    )
    for name, base in result["bases"].items():
        some = [row for row in rows if row["family"] == name or row["arm"] == base]
        if any(row["arm"] == base for row in some) and any(row["family"] == name for row in some):
            some.sort(key=lambda row: row["arm"] != base)
            keys = set(DENOISED if name == "diffusion" else STATE if name == "set encoder" else ABLATED)
            some = [{key: row[key] for key in row if key not in ABLATED or key in keys} for row in some]
            parts.append(f"### {name.capitalize()}\n\n{family(some, base)}")
    return "\n".join(parts)
