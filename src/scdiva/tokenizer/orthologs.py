"""Genes of another species as their human orthologs: of a mouse, or by a table of the user's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd

from scdiva._nearest import or_nearest
from scdiva.tokenizer.names import ensembl_id, repeated_name

FOREIGN = "mouse "
"""What stands before a mouse gene without an ortholog, so that it is taken for no human gene of that name."""
SPECIES = ("human", "mouse")
"""Species whose genes are known without a table."""


def checked_species(species: Any) -> str | dict[str, str] | None:
    """Give `species` as it is if it names one, or its table as a dict of names without blanks, `""` for none.

    Parameters
    ----------
    species
        None, `"human"`, `"mouse"`, or a mapping or pandas Series from genes to human symbols or Ensembl ids.

    Raises
    ------
    ValueError
        If it is anything else, the table is without a human gene, holds what is no name, or two for one gene.
    """
    if species is None or (isinstance(species, str) and species in SPECIES):
        return species
    if not isinstance(species, Mapping | pd.Series):
        given = repr(species) + or_nearest(species, SPECIES) if isinstance(species, str) else type(species).__name__
        raise ValueError(
            'species must be None, "human", "mouse", or a table of orthologs: a dict or pandas Series from your genes '
            f"to human symbols or Ensembl ids; got {given}. Of a file with two columns: "
            "species=pd.read_csv(file, index_col=0).iloc[:, 0]"
        )
    table: dict[str, str] = {}
    for gene, human in species.items():
        missing = not isinstance(human, str) and pd.api.types.is_scalar(human) and pd.isna(human)
        found = "" if missing else human
        if not isinstance(found, str):
            raise ValueError(f"species gives {gene!r} the human gene {human!r}, which is no name: symbols and ids are.")
        name, found = str(gene).strip(), found.strip()
        if table.setdefault(name, found) != found:
            raise ValueError(
                f"species gives {name!r} two human genes, {table[name]!r} and {found!r}: keep one of them."
            )
    if not any(table.values()):
        raise ValueError(f"species is a table of {len(table)} genes without a human one: it maps your genes to those.")
    return table


def read_species(species: Any) -> Any:
    """Read the table of orthologs that a file holds.

    Parameters
    ----------
    species
        A file of two columns, gene and human gene, separated by commas if its name ends in .csv, else by tabs. None, a
        species' name and a table are given back as they are.

    Returns
    -------
    What :func:`checked_species` takes.

    Raises
    ------
    FileNotFoundError
        If it is a text that names neither a species nor a file.
    ValueError
        If the file has not two columns.
    """
    if not isinstance(species, str) or species in SPECIES:
        return species
    file = Path(species).expanduser()
    if not file.is_file():
        raise FileNotFoundError(
            f"species is human, mouse, or a file with a table of orthologs, and there is no file {species!r}"
            f"{or_nearest(species, SPECIES)}."
        )
    try:
        table = pd.read_csv(
            file, sep="," if ".csv" in file.suffixes else "\t", header=None, dtype=str, keep_default_na=False
        )
    except ValueError as error:
        raise ValueError(f"{species!r} can't be read as a table of orthologs: {error}") from error
    if table.shape[1] != 2:
        raise ValueError(f"{species!r} has {table.shape[1]} columns, not two, gene and human gene.")
    return table.set_index(0)[1]  # a gene named twice is refused by whoever checks the table


def by_table(names: Iterable[str], table: Mapping[str, str]) -> list[str | None]:
    """Look genes up in a table, Ensembl ids also without their version.

    Parameters
    ----------
    names
        Genes.
    table
        What :func:`checked_species` made of a mapping.

    Returns
    -------
    Human genes, `""` where the table says that there is none; None for a gene that it does not hold.
    """
    clean = [str(name).strip() for name in names]
    return [table.get(name, table.get(ensembl_id(name) or name)) for name in clean]


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
