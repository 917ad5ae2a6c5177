"""Gene names: undo changes of spelling in public files, and map genes of other species to human orthologs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd

from scdiva._checks import or_nearest

_ENSEMBL = re.compile(r"(ENS[A-Z]*G\d{11})(?:\.\d+)?(?:_PAR_Y)?")
_ORF = re.compile(r"(C(?:\d{1,2}|[XY]))ORF(\d+.*)")
_DATE = re.compile(r"(?:0?(\d{1,2})-(Sep|Mar|Dec)|(Sep|Mar|Dec)-0?(\d{1,2}))")
_NOT_R, _BEGINS_R = re.compile(r"[^A-Za-z0-9._]"), re.compile(r"[A-Za-z]|\.(?!\d)")
_REPEAT = re.compile(r"(.+)[.-]\d{1,2}")
# "Gapdh", "Cd8a", "H2-Aa", "mt-Co1", "0610007P14Rik", "Gm1992"; every one holds a lower-case letter after the first.
_MOUSE_SYMBOL = re.compile(r"(?:mt-)?[A-Z][a-z0-9]*[a-z][A-Za-z0-9.-]*|[A-Z0-9]{6,}Rik|H2-[A-Z][a-z]\d*")
_MOUSE_ID = re.compile(r"ENS(?:MUS|RNO)G\d{11}")
_MOUSE_ONLY = re.compile(r"ENS(?:MUS|RNO)G\d{11}|Gm\d+|[A-Z0-9]{6,}Rik|mt-|H2-")
"""Names that only mouse genes have."""
_SMALL = re.compile(r"(?!mt-)[a-z]")
_MOUSE_SHARE, _SMALL_SHARE, _KNOWN_SHARE, _MANY = 0.3, 0.2, 0.1, 20
_SPECIES = {"ENSG0": "human", "ENSMUSG0": "mouse"}


def as_text(name: Any) -> str:
    """Convert a name to text; bytes, from some HDF5 readers, are decoded."""
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)


def ensembl_id(name: str) -> str | None:
    """Ensembl gene id without version and pseudoautosomal suffix, or None if `name` is not such an id.

    Examples
    --------
    >>> ensembl_id("ENSG00000182378.15_PAR_Y")
    'ENSG00000182378'
    """
    match = _ENSEMBL.fullmatch(name)
    return match.group(1) if match else None


def r_name(name: str) -> str:
    """Spelling of `name` after R's `make.names`, which data frames apply to column names.

    Examples
    --------
    >>> r_name("HLA-A"), r_name("7SK")
    ('HLA.A', 'X7SK')
    """
    if name.isascii() and name.isalnum() and name[0].isalpha():  # fast path for most names
        return name
    spelled = _NOT_R.sub(".", name)
    return spelled if _BEGINS_R.match(spelled) else f"X{spelled}"


def usual_spelling(name: str) -> str | None:
    """Undo two common changes: upper-case open reading frames, and symbols that a spreadsheet converted to dates.

    "C12ORF57" is C12orf57. "Sep-07" and "7-Sep" are SEPT7, "Mar-05" is MARCH5, "Dec-01" is DEC1. "Mar-01" and "Mar-02"
    may have been MARCH1 or MARC1 (MARCH2 or MARC2), so they stay unknown.

    Returns
    -------
    The usual spelling, or None if neither change is recognised.
    """
    orf = _ORF.fullmatch(name)
    if orf:
        return f"{orf.group(1)}orf{orf.group(2)}"
    date = _DATE.fullmatch(name)
    if date:
        month, number = date.group(2) or date.group(3), int(date.group(1) or date.group(4))
        if month == "Mar" and number <= 2:
            return None
        return {"Sep": "SEPT", "Mar": "MARCH", "Dec": "DEC"}[month] + str(number)
    return None


def repeated_name(name: str) -> str | None:
    """Name before the ".1" or "-1" that R's `make.unique` and anndata append to repeated names, or None.

    The suffix may belong to the name: use the result only if the shorter name is in the same list.
    """
    match = _REPEAT.fullmatch(name)
    return match.group(1) if match else None


def spelled_as_mouse(name: str) -> bool:
    """Whether a name is spelled like a mouse (or rat) symbol, or is a mouse or rat Ensembl id.

    Lower-case letters in human symbols are rare outside of open reading frames ("C1orf162"), which are excluded. Names
    such as "Gene1" match, too: see :func:`looks_like_mouse`.
    """
    return bool(_MOUSE_ID.match(name) or (_MOUSE_SYMBOL.fullmatch(name) and not re.match(r"C(?:\d+|[XY])orf", name)))


def looks_like_mouse(names: Iterable[str]) -> bool:
    """Whether names are mouse (or rat) genes.

    True if at least 30% of them are spelled like mouse symbols ("Gapdh", "mt-Co1", "0610007P14Rik") or are mouse or rat
    Ensembl ids. Since names such as "Gene1" or "Peak12" match, too, at least 10% of 20 or more such names must be known
    mouse genes; of fewer names, less than 20% may begin with a lower-case letter, like genes of flies, worms and fish
    ("dpp").

    Parameters
    ----------
    names
        Gene names, any number.

    Returns
    -------
    bool
        False for an empty list.

    Examples
    --------
    >>> from scdiva.tokenizer import looks_like_mouse
    >>> looks_like_mouse(["Cd3d", "Lyz2", "Gapdh"]), looks_like_mouse(["CD3D", "LYZ", "GAPDH"])
    (True, False)
    >>> looks_like_mouse(f"Gene{i}" for i in range(100)), looks_like_mouse(["Act5C", "Rpl5", "dpp", "wg"])
    (False, False)
    """
    names = list(names)
    spelled = [name for name in names if spelled_as_mouse(name)]
    if not spelled or len(spelled) < _MOUSE_SHARE * len(names):
        return False
    if len(spelled) < _MANY:
        return sum(bool(_SMALL.match(name)) for name in names) < _SMALL_SHARE * len(names)
    n_known = sum(bool(_MOUSE_ONLY.match(name)) or name in _table() for name in spelled)
    return n_known >= _KNOWN_SHARE * len(spelled)


def species_of(ids: Iterable[str]) -> str | None:
    """Species of most Ensembl ids, `"human"` or `"mouse"`; None if there are too few."""
    ids = list(ids)
    for beginning, species in _SPECIES.items():
        if 2 * sum(name.startswith(beginning) for name in ids) > len(ids):
            return species
    return None


FOREIGN = "mouse "
"""Prefix of mouse genes without an ortholog, so that they match no human gene."""
SPECIES = ("human", "mouse")
"""Species that need no table of orthologs."""


def checked_species(species: Any) -> str | dict[str, str] | None:
    """Check `species`; a table becomes a dict of stripped names, with `""` for no human gene.

    Parameters
    ----------
    species
        None, `"human"`, `"mouse"`, or a mapping or pandas Series from genes to human symbols or Ensembl ids.

    Raises
    ------
    ValueError
        If it is anything else, or the table has no human gene, values that are not names, or two values for one gene.
    """
    if species is None or (isinstance(species, str) and species in SPECIES):
        return species
    if not isinstance(species, Mapping | pd.Series):
        received = repr(species) + or_nearest(species, SPECIES) if isinstance(species, str) else type(species).__name__
        raise ValueError(
            'species must be None, "human", "mouse", or a table of orthologs: a dict or pandas Series from your genes '
            f"to human symbols or Ensembl ids; got {received}. Of a file with two columns: "
            "sd.pp.match_genes(adata, species=pd.read_csv(file, index_col=0).iloc[:, 0])"
        )
    table: dict[str, str] = {}
    for gene, human in species.items():
        missing = not isinstance(human, str) and pd.api.types.is_scalar(human) and pd.isna(human)
        ortholog = "" if missing else human
        if not isinstance(ortholog, str):
            raise ValueError(f"species maps {gene!r} to {human!r}, which is not a gene symbol or Ensembl id.")
        name, ortholog = str(gene).strip(), ortholog.strip()
        if table.setdefault(name, ortholog) != ortholog:
            raise ValueError(f"species gives {name!r} two human genes, {table[name]!r} and {ortholog!r}: keep one.")
    if not any(table.values()):
        raise ValueError(f"species is a table of {len(table)} genes without a human one: it maps your genes to those.")
    return table


def read_species(species: Any) -> Any:
    """Read a table of orthologs from a file.

    Parameters
    ----------
    species
        A file of two columns, gene and human gene, separated by commas if its name ends in .csv, otherwise by tabs.
        None, the name of a species and a table are returned unchanged.

    Returns
    -------
    Input of :func:`checked_species`.

    Raises
    ------
    FileNotFoundError
        If a text is neither a species nor a file.
    ValueError
        If the file does not have two columns.
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
    return table.set_index(0)[1]  # checked_species refuses repeated genes


def by_table(names: Iterable[str], table: Mapping[str, str]) -> list[str | None]:
    """Look up genes in a table from :func:`checked_species`, Ensembl ids also without their version.

    Returns
    -------
    Human genes, `""` if there is none; None for a gene that is not in the table.
    """
    clean = [str(name).strip() for name in names]
    return [table.get(name, table.get(ensembl_id(name) or name)) for name in clean]


def human_orthologs(names: Iterable[str]) -> list[str]:
    """Human Ensembl ids of mouse genes.

    One-to-one orthologs if possible, otherwise the human gene with the highest confidence, then the highest gene-order
    conservation (Ensembl BioMart, GRCm39 and GRCh38.p13). Several mouse genes may have the same human gene. Case is
    significant.

    Parameters
    ----------
    names
        Mouse symbols, Ensembl ids (with or without version), or a mixture.

    Returns
    -------
    Human Ensembl ids; `"mouse NAME"`, which is in no vocabulary, for a gene without an ortholog.

    Examples
    --------
    >>> from scdiva.tokenizer import human_orthologs
    >>> human_orthologs(["Cd3d", "ENSMUSG00000032094.8", "Gm42418"])
    ['ENSG00000167286', 'ENSG00000167286', 'mouse Gm42418']
    """
    table, clean = _table(), [str(name).strip() for name in names]
    present = set(clean)
    orthologs = []
    for name in clean:
        human = table.get(ensembl_id(name) or name)
        if human is None and (base := repeated_name(name)) in present:
            human = table.get(str(base))
        orthologs.append(f"{FOREIGN}{name}" if human is None else human)
    return orthologs


@cache
def _table() -> dict[str, str]:
    """Human id by mouse id and symbol, without symbols of two genes with different orthologs."""
    with resources.files("scdiva.tokenizer").joinpath("mouse_orthologs.tsv.gz").open("rb") as file:
        pairs = pd.read_csv(file, sep="\t", compression="gzip", keep_default_na=False, dtype={"mouse_symbol": str})
    human = [f"ENSG{number:011d}" for number in pairs["human_id"]]
    by_id = dict(zip((f"ENSMUSG{number:011d}" for number in pairs["mouse_id"]), human, strict=True))
    by_symbol: dict[str, str] = {}
    for symbol, gene in zip(pairs["mouse_symbol"], human, strict=True):
        by_symbol[symbol] = gene if by_symbol.get(symbol, gene) == gene else ""
    return {symbol: gene for symbol, gene in by_symbol.items() if symbol and gene} | by_id
