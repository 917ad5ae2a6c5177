"""Mouse genes as their human orthologs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import resources

import pandas as pd

from scdiva.tokenizer.names import ensembl_id, repeated_name

FOREIGN = "mouse "
"""What stands before a mouse gene without an ortholog, so that it is taken for no human gene of that name."""


def human_orthologs(names: Iterable[str]) -> list[str]:
    """Give the human Ensembl id of each mouse gene.

    One-to-one orthologs where there is one; of several human genes that with the higher confidence, then the higher
    gene-order conservation (Ensembl BioMart, GRCm39 and GRCh38.p13). Several mouse genes may have one human gene. No
    name is found by changing its case.

    Parameters
    ----------
    names
        Mouse symbols, Ensembl ids (with or without version), or a mixture.

    Returns
    -------
    Human Ensembl ids; `"mouse NAME"`, which no vocabulary knows, for a gene without one.

    Examples
    --------
    >>> from scdiva.tokenizer import human_orthologs
    >>> human_orthologs(["Cd3d", "ENSMUSG00000032094.8", "Gm42418"])
    ['ENSG00000167286', 'ENSG00000167286', 'mouse Gm42418']
    """
    table, clean = _table(), [str(name).strip() for name in names]
    present = set(clean)
    found = []
    for name in clean:
        human = table.get(ensembl_id(name) or name)
        if human is None and (base := repeated_name(name)) in present:
            human = table.get(str(base))
        found.append(f"{FOREIGN}{name}" if human is None else human)
    return found


@cache
def _table() -> dict[str, str]:
    """Mouse ids and symbols, with their human ids; a symbol of two genes with different orthologs is left out."""
    with resources.files("scdiva.tokenizer").joinpath("mouse_orthologs.tsv.gz").open("rb") as file:
        pairs = pd.read_csv(file, sep="\t", compression="gzip", keep_default_na=False, dtype={"mouse_symbol": str})
    human = [f"ENSG{number:011d}" for number in pairs["human_id"]]
    by_id = dict(zip((f"ENSMUSG{number:011d}" for number in pairs["mouse_id"]), human, strict=True))
    by_symbol: dict[str, str] = {}
    for symbol, gene in zip(pairs["mouse_symbol"], human, strict=True):
        by_symbol[symbol] = gene if by_symbol.get(symbol, gene) == gene else ""
    return {symbol: gene for symbol, gene in by_symbol.items() if symbol and gene} | by_id
