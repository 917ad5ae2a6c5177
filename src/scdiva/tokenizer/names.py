"""Spelling of gene names: what public files do to a name, undone. Strings in, strings out."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ENSEMBL = re.compile(r"(ENS[A-Z]*G\d{11})(?:\.\d+)?(?:_PAR_Y)?")
_ORF = re.compile(r"(C(?:\d{1,2}|[XY]))ORF(\d+.*)")
_DATE = re.compile(r"(?:0?(\d{1,2})-(Sep|Mar|Dec)|(Sep|Mar|Dec)-0?(\d{1,2}))")
_REPEAT = re.compile(r"(.+)[.-]\d{1,2}")
# "Gapdh", "Cd8a", "H2-Aa", "mt-Co1", "0610007P14Rik", "Gm1992"; every one holds a lower-case letter after the first.
_MOUSE_SYMBOL = re.compile(r"(?:mt-)?[A-Z][a-z0-9]*[a-z][A-Za-z0-9.-]*|[A-Z0-9]{6,}Rik|H2-[A-Z][a-z]\d*")
_MOUSE_ID = re.compile(r"ENS(?:MUS|RNO)G\d{11}")
_MOUSE_SHARE = 0.3
_SPECIES = {"ENSG0": "human", "ENSMUSG0": "mouse"}


def ensembl_id(name: str) -> str | None:
    """Give the Ensembl gene id in `name` without version and pseudoautosomal suffix, or None if it is no such id.

    Examples
    --------
    >>> ensembl_id("ENSG00000182378.15_PAR_Y")
    'ENSG00000182378'
    """
    found = _ENSEMBL.fullmatch(name)
    return found.group(1) if found else None


def r_name(name: str) -> str:
    """Spell `name` as R's `make.names` does, which data frames apply to their column names.

    Examples
    --------
    >>> r_name("HLA-A"), r_name("7SK")
    ('HLA.A', 'X7SK')
    """
    if name.isascii() and name.isalnum() and name[0].isalpha():  # most are, and the whole vocabulary is asked for
        return name
    spelled = re.sub(r"[^A-Za-z0-9._]", ".", name)
    return spelled if re.match(r"[A-Za-z]|\.(?!\d)", spelled) else f"X{spelled}"


def usual_spelling(name: str) -> str | None:
    """Undo two rewritings of whole files: upper-cased open reading frames, and symbols that a spreadsheet made dates.

    "C12ORF57" is C12orf57. "Sep-07" and "7-Sep" are SEPT7, "Mar-05" is MARCH5, "Dec-01" is DEC1. "Mar-01" and "Mar-02"
    may have been MARCH1 or MARC1 (MARCH2 or MARC2), so they stay unknown.

    Returns
    -------
    The usual spelling (to be looked up as any other name), or None if neither rewriting is recognised.
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
    """Give the name before the ".1" or "-1" that R's `make.unique` and anndata add to a repeated name, or None.

    Whether the suffix was added or belongs to the name can't be seen from the name alone: the caller accepts the answer
    only if the shorter name stands in the same list.
    """
    found = _REPEAT.fullmatch(name)
    return found.group(1) if found else None


def looks_like_mouse(names: Iterable[str]) -> bool:
    """Tell whether names are those of mouse (or rat) genes.

    True if at least 30% of them are spelled as mouse symbols are ("Gapdh", "mt-Co1", "0610007P14Rik") or are mouse or
    rat Ensembl ids. Human symbols hold lower-case letters almost only in open reading frames ("C1orf162"), which don't
    count.

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
    """
    n_names = n_mouse = 0
    for name in names:
        n_names += 1
        if _MOUSE_ID.match(name) or (_MOUSE_SYMBOL.fullmatch(name) and not re.match(r"C(?:\d+|[XY])orf", name)):
            n_mouse += 1
    return n_names > 0 and n_mouse / n_names >= _MOUSE_SHARE


def species_of(ids: Iterable[str]) -> str | None:
    """Tell the species of most Ensembl ids, `"human"` or `"mouse"`; None where they do not say."""
    ids = list(ids)
    for beginning, species in _SPECIES.items():
        if 2 * sum(name.startswith(beginning) for name in ids) > len(ids):
            return species
    return None
