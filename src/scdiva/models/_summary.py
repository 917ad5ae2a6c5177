"""Tables that models and configurations show of themselves in a notebook, every text of them escaped."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

LONGEST = 200
"""Characters of an entry that are shown."""


def table(title: str, rows: Mapping[str, object]) -> str:
    """Lay out a title and rows as HTML for a notebook.

    Parameters
    ----------
    title
        Name of the class.
    rows
        What is said of it, by name. Entries that are None are left out, long ones cut.

    Returns
    -------
    HTML in which nothing of `title` and `rows` is markup.
    """
    lines = "".join(
        f"<tr><th style='text-align:left'>{html.escape(_cut(name))}</th>"
        f"<td style='text-align:left'>{html.escape(_cut(value))}</td></tr>"
        for name, value in rows.items()
        if value is not None
    )
    return f"<div><strong>{html.escape(_cut(title))}</strong><table>{lines}</table></div>"


def corpus_said(metadata: Mapping[str, Any]) -> str | None:
    """Say what a model was trained on, as far as its metadata tell."""
    corpus = metadata.get("corpus")
    corpus = corpus if isinstance(corpus, Mapping) else {}
    cells = corpus.get("n_cells", metadata.get("n_training_cells"))
    studies = corpus.get("studies", metadata.get("studies"))
    said = [f"{cells:,} cells"] if isinstance(cells, int) else []
    said += [f"{len(studies):,} studies"] if isinstance(studies, list | tuple) else []
    return " of ".join(said) or None


def steps_said(metadata: Mapping[str, Any]) -> str | None:
    """Say how many steps a model was trained, part by part where it was trained in parts."""
    said = [f"{metadata['steps']:,} steps"] if isinstance(metadata.get("steps"), int) else []
    for part, notes in metadata.items():
        if isinstance(notes, Mapping) and isinstance(notes.get("steps"), int):
            said.append(f"{part.replace('_', ' ')} {notes['steps']:,} steps")
    return ", ".join(said) or None


def _cut(value: object) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
