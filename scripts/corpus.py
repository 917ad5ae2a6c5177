"""Tissue and publication of each study of the corpus (`corpus.csv`), and the table by tissue in model cards."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd

from scdiva.data.packed import PackedCells
from scdiva.models.storage import CARD, SUMMED, write_sums

STUDIES = pd.read_csv(Path(__file__).with_suffix(".csv"), index_col="study")
"""Columns `tissue` and `publication`, by study."""
HEADING = "### Corpus by tissue\n\n"


def by_tissue(packed: PackedCells) -> dict[str, list[int]]:
    """Studies, cells and detected genes of each tissue, largest first; studies that the table lacks are apart."""
    tissue = STUDIES["tissue"].reindex(packed.study_names).fillna("not listed").to_numpy()
    n_studies = len(packed.study_names)
    columns = {
        "studies": np.ones(n_studies), "cells": np.bincount(packed.study, minlength=n_studies),
        "genes": np.bincount(packed.study, packed.lengths, n_studies),
    }  # fmt: skip
    sums = pd.DataFrame(columns).groupby(tissue).sum().astype(int).sort_values("cells", ascending=False)
    return {str(name): row.tolist() for name, row in zip(sums.index, sums.to_numpy(), strict=True)}


def tissue_table(tissues: dict[str, list[int]]) -> str:
    """The section of a card."""
    by_cells = dict(sorted(tissues.items(), key=lambda item: -item[1][1]))
    rows = {**by_cells, "all": np.sum(list(tissues.values()), axis=0).tolist()}
    lines = [f"| {name} | {' | '.join(f'{number:,}' for number in row)} |\n" for name, row in rows.items()]
    header = "| tissue | studies | cells | detected genes, summed over cells |\n|---|--:|--:|--:|\n"
    return f"{HEADING}{header}{''.join(lines)}"


def set_table(folder: Path, tissues: dict[str, list[int]]) -> None:
    """Write the section into the card of a saved model, in place of an earlier one or at the end."""
    file, earlier = folder / CARD, re.compile(re.escape(HEADING) + r"(\|.*\n)*")
    card = file.read_text(encoding="utf-8")
    if HEADING not in card:
        card = f"{card.rstrip()}\n\n{HEADING}"
    file.write_text(earlier.sub(lambda _: tissue_table(tissues), card), encoding="utf-8")
    write_sums(folder, SUMMED)
