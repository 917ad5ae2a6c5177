"""Columns that are not genes of the species that is read: proteins without a feature type, and a second species."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray

from scdiva._constants import UNKNOWN
from scdiva._validate import Names
from scdiva.data.reading import Reading
from scdiva.tokenizer.names import looks_like_mouse, repeated_name, spelled_as_mouse
from scdiva.tokenizer.vocabulary import Vocabulary

GENOME = re.compile(r"((?:GRC[a-z]+\d+|hg\d+|mm\d+|rn\d+)_+)(.+)")
"""Names of a Cell Ranger reference of several genomes: "GRCh38_CD4", "mm10___Cd4"."""
HUMAN_GENOMES = ("GRCh", "hg")

_TAGGED = re.compile(
    r"(?i:(.*[ _.:-])?((ADT|HTO|Hashtag)\d*|TotalSeq[- ]?[A-D]?|antibody|anti|AB|prot|protein)([ _.:-].*)?)"
    r"|CD\d+[A-Za-z]*"
)
"""Names of antibodies that are no gene's: "ADT_CD4", "CD4_TotalSeqC", "anti-CD4", "HTO1", "CD45RA"."""
_CD = re.compile(r"C[Dd]\d+[A-Za-z]?(?![A-Za-z])")
_TIMES, _LEAST_TIMES, _PER_CELL, _SHARE = 10.0, 2.0, 10.0, 0.01
"""A protein has at least so many times the counts of its gene's RNA, within a panel so many; and so many a cell, if it
is named as CD4 is, or else this share of all counts. No two columns of one gene in 59 public data sets are so."""


def protein_columns(
    names: Sequence[str],
    tokens: NDArray[np.int32],
    how: NDArray[np.object_],
    counts: NDArray[np.float64],
    n_obs: int,
    other: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Find columns of antibody counts by their names and counts, where no feature type tells them from genes.

    Such columns have names of antibodies ("ADT_CD4") and a hundredth of all counts together; or they stand for a gene
    that an earlier column is: by the name that `var_names_make_unique` made ("CD4-1"), by the same name, or by an alias
    ("CD56", of NCAM1), with many times its counts. What follows the first of these is taken to be of the same panel if
    it stands for such a gene with fewer counts, or for none with many.

    Parameters
    ----------
    names, tokens, how
        What :func:`scdiva.data.genes.match_columns` found.
    counts
        `(n,)`, sum of each column over all cells.
    n_obs
        Number of cells.
    other
        What :func:`other_species` found: among thousands of human genes those named as antibodies are genes too.

    Returns
    -------
    bool `(n,)`.
    """
    unknown = tokens == UNKNOWN
    found: NDArray[np.bool_] = np.array([bool(_TAGGED.fullmatch(name)) for name in names], dtype=np.bool_) & unknown
    if 2 * found[other].sum() < other.sum():
        found &= ~other
    found &= counts[found].sum() >= _SHARE * counts.sum()
    times = np.zeros(len(names))  # counts of a second column of a gene, in those of the others
    again = np.flatnonzero(~unknown & pd.Series(tokens).duplicated(keep=False).to_numpy())
    for columns in pd.Series(again).groupby(tokens[again]).agg(list) if len(again) else ():
        most = max(columns, key=lambda at: counts[at])
        others = [at for at in columns if at != most]
        is_repeat = names[most] in [names[at] for at in others] or repeated_name(names[most]) is not None
        if most > min(others) and (is_repeat or how[most] in ("alias", "previous")):
            times[most] = counts[most] / max(1.0, sum(counts[at] for at in others))
    as_cd = np.array([bool(_CD.match(name)) for name in names], dtype=np.bool_) & (counts >= _PER_CELL * n_obs)
    found |= (times >= _TIMES) & (as_cd | (counts >= _SHARE * counts.sum()))
    if found.any():
        of_panel = (times >= _LEAST_TIMES) | (unknown & (counts >= _PER_CELL * n_obs))
        of_panel[: found.argmax()] = False
        found |= of_panel
    return found


def other_species(
    names: Sequence[str], tokens: NDArray[np.int32], how: NDArray[np.object_], vocabulary: Vocabulary, reading: Reading
) -> NDArray[np.bool_]:
    """Find genes of the mouse among those of a human data set, or human genes among those of a mouse's.

    Parameters
    ----------
    names, tokens, how
        What :func:`scdiva.data.genes.match_columns` found.
    vocabulary, reading
        What they were matched with.

    Returns
    -------
    bool `(n,)`; none, if a table says what each gene is, or the vocabulary is not human.
    """
    none = np.zeros(len(names), dtype=np.bool_)
    if vocabulary.species != "human" or isinstance(reading.species, dict):
        return none
    split = [(of[1], of[2]) if (of := GENOME.fullmatch(name)) else ("", name) for name in names]
    of_mouse = np.array(
        [not of.startswith(HUMAN_GENOMES) if of else spelled_as_mouse(name) for of, name in split], dtype=np.bool_
    )
    unknown = tokens == UNKNOWN
    if is_read_as_mouse(how, reading):
        rest = np.flatnonzero(unknown & ~of_mouse)
        none[rest] = vocabulary.match([names[int(at)] for at in rest], "human").tokens != UNKNOWN
        return none
    found: NDArray[np.bool_] = unknown & of_mouse
    both = not found.all() and looks_like_mouse(split[at][1] for at in np.flatnonzero(found))
    return found if both else none


def is_read_as_mouse(how: NDArray[np.object_], reading: Reading) -> bool:
    """Tell whether genes are read as those of a mouse."""
    return reading.species == "mouse" or bool((how == "ortholog").any())


def about_two_species(
    blocks: Iterator[tuple[int, sp.csr_matrix]],
    other: NDArray[np.bool_],
    matched_names: Sequence[str],
    reads_mouse: bool,
    obs_names: Names,
    reading: Reading,
) -> str:
    """Count the cells of each species in a matrix that holds both, and say how to split them.

    Parameters
    ----------
    blocks
        The matrix.
    other
        What :func:`other_species` found.
    matched_names
        The names of the genes.
    reads_mouse
        Whether those are human genes, and the other ones are a mouse's.
    obs_names
        Names of the cells.
    reading
        What is read.

    Returns
    -------
    The message; nothing if no cell has most of its counts on genes of the other species, as of human cells with a few
    reads of mouse.
    """
    sums = [[np.asarray(block[:, which].sum(axis=1)).ravel() for which in (~other, other)] for _, block in blocks]
    of_read, of_other = np.concatenate(sums, axis=1)
    foreign = np.flatnonzero(of_other > of_read)
    n_cells = int((of_read > of_other).sum()), len(foreign)
    if not len(foreign) or (not n_cells[0] and reading.species is not None):  # then `species` is wrong
        return ""
    n_human, n_mouse = n_cells[::-1] if reads_mouse else n_cells
    first = ", ".join(repr(str(obs_names[int(row)])) for row in foreign[:3])
    kind = "human" if reads_mouse else "mouse"
    return (
        f"human and mouse (or rat) genes are in one matrix: by their counts {n_human} of {len(of_read)} cells are "
        f"human and {n_mouse} mouse (first {kind}: {first}). Split them, as their genes can't be read alike: "
        f"{_split(matched_names, reading)}"
    )


def _split(matched_names: Sequence[str], reading: Reading) -> str:
    """Give the call that makes `adata` the human cells with the human genes, and `mouse` the others."""
    names = "adata.var_names" if reading.gene_ids is None else f"adata.var[{reading.gene_ids!r}]"
    matrix = "adata.X" if reading.layer is None else f"adata.layers[{reading.layer!r}]"
    genomes = sorted({found[1] for name in matched_names if (found := GENOME.fullmatch(name))})
    of_human = [genome for genome in genomes if genome.startswith(HUMAN_GENOMES)]
    human = f"scdiva.tokenizer.load_vocabulary().match({names}, 'human').tokens >= 0"
    if of_human:
        human = f"np.asarray({names}.str.startswith({of_human[0]!r}))"
    calls = [
        *(["adata = adata.raw.to_adata()"] if reading.use_raw else []),
        f"human = {human}",
        f"of_human = np.asarray({matrix}[:, human].sum(axis=1) > {matrix}[:, ~human].sum(axis=1)).ravel()",
        "mouse = adata[~of_human, ~human].copy()",
        "adata = adata[of_human, human].copy()",
    ]
    for genome in genomes:
        one = names if genome in of_human else names.replace("adata", "mouse", 1)
        calls.append(f"{one} = {one}.str.removeprefix({genome!r})")
    return "; ".join(calls)
