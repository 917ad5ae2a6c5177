"""Gene sets: transcription factors and gene families."""

from __future__ import annotations

import re
from importlib import resources
from typing import Literal, get_args

from scdiva._checks import check_choices
from scdiva.tokenizer.vocabulary import Vocabulary

Family = Literal["HLA", "HLA class I", "HLA class II", "TNF", "interleukin", "CD"]

_TNF = "TNF|TNFSF.*|TNFRSF.*|LT[AB]|LTBR|CD40|CD40LG|FAS|FASLG|CD27|CD70|NGFR|EDA|EDAR|EDA2R|RELT"
"""Ligands and receptors of the superfamily, including those with other names."""
_PATTERNS: dict[str, str] = {
    "HLA": r"HLA-[A-Z]+\d*",
    "HLA class I": r"HLA-[ABCEFG]",
    "HLA class II": r"HLA-D[MOPQR][AB]\d*",
    "TNF": _TNF,
    # not IL4I1 ("induced")
    "interleukin": r"IL\d+(?!I)[A-Z]*\d?[A-Z]*",
    "CD": r"CD\d+(?!L)[A-Z]?\d?",  # not CD5L ("like")
}


def transcription_factors() -> list[str]:
    """Human transcription factors (Lambert et al. 2018).

    Returns
    -------
    1,633 current symbols, sorted, of the 1,639 genes in the census; six have no current symbol.

    References
    ----------
    .. [1] Lambert et al., The Human Transcription Factors, Cell 2018.

    Examples
    --------
    >>> import scdiva as sd
    >>> factors = sd.datasets.transcription_factors()
    >>> len(factors)
    1633
    >>> "SPI1" in factors
    True
    """
    text = resources.files("scdiva.datasets").joinpath("transcription_factors.txt").read_text(encoding="utf-8")
    return text.split()


def gene_family(name: Family) -> list[str]:
    """Protein-coding human genes of a family, as in the paper's figure of gene networks.

    Parameters
    ----------
    name
        `"HLA"`, `"HLA class I"`, `"HLA class II"`; `"TNF"`, ligands and receptors of its superfamily;
        `"interleukin"`, with their receptors; `"CD"`, surface markers named CD and a number.

    Returns
    -------
    Symbols, sorted.

    Raises
    ------
    ValueError
        If `name` is another family.

    Examples
    --------
    >>> import scdiva as sd
    >>> sd.datasets.gene_family("HLA class I")
    ['HLA-A', 'HLA-B', 'HLA-C', 'HLA-E', 'HLA-F', 'HLA-G']
    """
    check_choices(name=(name, get_args(Family)))
    table = Vocabulary.human().table
    coding = table.loc[table["biotype"] == "protein_coding", "symbol"]
    pattern = re.compile(_PATTERNS[name])
    return sorted(s for s in coding if pattern.fullmatch(s))
