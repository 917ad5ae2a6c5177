"""Markdown for the benchmarks page."""

from __future__ import annotations


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def arm_name(row: dict, names: dict[str, str]) -> str:
    """An arm in words: those of its table, or of the row itself (`name`), which a new arm brings along."""
    return names.get(row["arm"], row.get("name", row["arm"]))
