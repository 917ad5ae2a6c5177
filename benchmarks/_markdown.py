"""Markdown for the benchmarks page."""

from __future__ import annotations

import re

FIGURE = re.compile(r"(\*\*)?[-+±<>≤≥~]?\s?\.?\d|[-–—]?$")
"""How a figure begins, or nothing in its place."""


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table. The first column is text; so is one with a long cell or one that does not begin as a figure."""
    figures = [i > 0 and all(FIGURE.match(row[i]) and len(row[i]) < 80 for row in rows) for i in range(len(header))]
    lines = [header, ["--:" if one else "---" for one in figures], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def in_two(header: list[str], rows: list[list[str]], named: int, after: int) -> str:
    """The table as two, cut after a column, each with the first `named` columns: one would run off the page."""
    parts = range(after), (*range(named), *range(after, len(header)))
    return "\n".join(table([header[i] for i in part], [[row[i] for i in part] for row in rows]) for part in parts)


def arm_name(row: dict, names: dict[str, str]) -> str:
    """An arm in words: those of its table, or of the row itself (`name`), which a new arm brings along."""
    return names.get(row["arm"], row.get("name", row["arm"]))
