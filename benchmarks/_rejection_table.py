"""The table of rejection across studies."""

from __future__ import annotations

from _markdown import table

WORDS = (
    "Query and reference are different studies, at most 1,500 cells each. `tl.annotate` with its default method and "
    "`reject`, whose threshold is calibrated on held-out cells of the reference or, with `batch_key`, on held-out "
    "batches (control and stimulated cells of kang_ifnb; technologies of panc8, each one study; pbmc3k is one "
    "batch). Known types: cells of types that the reference has, with 95% Wilson intervals over cells. Right label: "
    "share of those called unknown whose most probable label is right. Removed types: each type with at least 10 cells "
    "in both studies is removed from the reference in turn; mean over the types, with 95% bootstrap intervals over "
    "types. Reference labels are the study's own; types are compared by names that both studies use. Calibration on "
    "held-out batches calls fewer cells of both kinds unknown: no threshold is good for both where novelty of removed "
    "and known types overlaps."
)


def percent(row: dict, key: str) -> str:
    """A share with its interval."""
    low, high = row[f"{key}_interval"]
    return f"{row[key]:.0%} ({low:.0%} to {high:.0%})"


def rejection_table(result: dict) -> str:
    """Shares of cells called unknown, then those of each removed type."""
    rows, names = result["rows"], {"cells": "held-out cells", "batches": "held-out batches"}
    lines = [
        [row["pair"], names[row["arm"]], f"{row['rate']:g}", percent(row, "known"),
         "-" if row["right"] is None else f"{row['right']:.0%}", percent(row, "removed"),
         "yes" if row["warned"] else "no"]
        for row in rows
    ]  # fmt: skip
    header = ["reference → query", "calibrated on", "`reject`", "known types called unknown", "right label",
              "removed types called unknown", "warns"]  # fmt: skip
    each = [
        [
            row["pair"],
            names[row["arm"]],
            name,
            f"{row['removed_types'][name]:.0%}",
            f"{other['removed_types'][name]:.0%}",
        ]
        for row, other in zip(rows[::2], rows[1::2], strict=True)
        for name in row["removed_types"]
    ]
    columns = ["reference → query", "calibrated on", "removed type", *(f"`reject={rate:g}`" for rate in (0.05, 0.01))]
    return f"{table(header, lines)}\nShare called unknown of each removed type:\n\n{table(columns, each)}"
