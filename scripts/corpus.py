"""Tissue and publication of each study of the corpus (`corpus.csv`), and the table by tissue in model cards.

    python scripts/corpus.py [--corpus FOLDER] [--out FOLDER]

Writes the table into the cards of the models of the package, from the studies that each was trained on. The corpus is
packed again for this; its numbers of cells and genes must be those that the model recorded.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np
import pandas as pd

from scdiva.data.packed import PackedCells
from scdiva.data.packing import pack_files
from scdiva.models import load_model
from scdiva.models.storage import CARD, SUMMED, write_sums

STUDIES = pd.read_csv(Path(__file__).with_suffix(".csv"), index_col="study")
"""Columns `tissue` and `publication`, by study."""
CHECKPOINTS = Path(__file__).parents[1] / "src" / "scdiva" / "checkpoints"
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
    rows = {**tissues, "all": np.sum(list(tissues.values()), axis=0).tolist()}
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


def write_card(folder: Path, corpus: Path, out: Path) -> None:
    """Write the table of a model's corpus into its card."""
    from train_mini import MIN_GENES_PER_CELL, clean

    model = load_model(folder)
    corpus_then = (model.metadata or {})["corpus"]
    recorded = (len(corpus_then["studies"]), corpus_then["n_cells"], corpus_then["n_tokens"])
    files = [file for file in clean(corpus, out / "clean") if file.stem in corpus_then["studies"]]
    packed = pack_files(
        files, model.vocabulary, out / folder.name, max_length=model.config.input_length, min_genes=MIN_GENES_PER_CELL,
        entropy_floor=model.config.entropy_floor,
    )  # fmt: skip
    tissues = by_tissue(packed)
    packed.close()
    if (sums := tuple(np.sum(list(tissues.values()), axis=0).tolist())) != recorded:
        raise SystemExit(
            f"{corpus} is not the corpus of {folder.name}: studies, cells and genes are {sums}, the model recorded "
            f"{recorded}."
        )
    set_table(folder, tissues)
    print(f"{folder.name}: {len(tissues)} tissues, {sums[1]:,} cells")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument("--out", type=Path, default=Path("runs/corpus"), help="folder of the packed corpora")
    arguments = parser.parse_args()
    for name in ("scdiva-mini", "scdiva-paper-mini"):
        write_card(CHECKPOINTS / name, arguments.corpus, arguments.out)


if __name__ == "__main__":
    main()
