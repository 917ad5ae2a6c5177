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
from scdiva.data.options import InputOptions
from scdiva.tokenizer.names import FOREIGN, human_orthologs, looks_like_mouse, repeated_name, spelled_as_mouse
from scdiva.tokenizer.vocabulary import Vocabulary

GENOME = re.compile(r"((?:GRC[a-z]+\d+|hg\d+|mm\d+|rn\d+)_+)(.+)")
"""Names of a Cell Ranger reference of several genomes: "GRCh38_CD4", "mm10___Cd4"."""
HUMAN_GENOMES = ("GRCh", "hg")

_TAGGED = re.compile(
    r"(?i:(.*[ _.:-])?((ADT|HTO|Hashtag)\d*|TotalSeq[- ]?[A-D]?|antibody|anti|AB|prot|protein)([ _.:-].*)?)"
    r"|(Hu|Ms|Rt){1,3}[._].+|(Isotype|CITE)_.+|.+[|._]pAbO"
)
"""Names of antibodies: "ADT_CD4", "CD4_TotalSeqC", "anti-CD4", "HTO1", "HuMs.CD44", "CD4|CD4|AHS0032|pAbO"."""
_OF_CD = re.compile(r"([Aa]b-?)?CD\d+[A-Za-z]*([ _.:|/(-](?!(AS|DT|IT|OT)\d*$|\d{3}$).*)?")
"""Names of antibodies, if of no gene: "CD45RA", "CD3-UCHT1", "abCD4"; of no transcript, as "CD4-201" and "CD27-AS1"."""
_CD = re.compile(r"C[Dd]\d+[A-Za-z]?(?![A-Za-z])")
_TIMES, _LEAST_TIMES, _PER_CELL, _SHARE = 10.0, 2.0, 10.0, 0.01
"""A protein has at least so many times the counts of its gene's RNA, within a panel so many; and so many a cell, if it
is named as CD4 is, or else this share of all counts. No two columns of one gene in 59 public data sets are so."""
_SEVERAL, _LEAST_PER_CELL = 3, 0.5
"""So many columns side by side that are named as CD4-1 is, with that many times the counts of CD4 and that many counts
a cell, are a panel."""
_GAP, _OF_MEDIAN = 3, 0.1
"""Columns of one panel are at most so far apart. What lies between them has that share of their median of counts."""


def protein_columns(
    names: Sequence[str],
    tokens: NDArray[np.int32],
    how: NDArray[np.object_],
    counts: NDArray[np.float64],
    n_obs: int,
    other: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Find columns of antibody counts by their names and counts, where no feature type tells them from genes.

    Such columns have names of antibodies ("ADT_CD4") that no gene has, and a hundredth of all counts together. Or they
    stand for a gene that an earlier column is: by the name that `var_names_make_unique` made ("CD4-1"), by the same
    name, or by an alias ("CD56", of NCAM1), with many times its counts; with fewer where several stand side by side.
    What stands beside these is of the same panel, if it stands for such a gene with fewer counts or for none with many,
    or lies between them, and is as heavy as they are. Beside names with a tag ("ADT_CD4") nothing is.

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
    of_mouse = bool((how == "ortholog").any())
    unknown, heavy = tokens == UNKNOWN, counts >= _PER_CELL * n_obs
    tagged, of_cd = _named_as_antibodies(names, unknown, of_mouse)
    found: NDArray[np.bool_] = np.logical_or(tagged, of_cd)
    if 2 * found[other].sum() < other.sum():
        found &= ~other
    found &= counts[found].sum() >= _SHARE * counts.sum()
    times = np.zeros(len(names))  # counts of a second column of a gene, in those of the others
    is_rna = np.zeros(len(names), dtype=np.bool_)  # the others
    again = np.flatnonzero(~unknown & pd.Series(tokens).duplicated(keep=False).to_numpy())
    for columns in pd.Series(again).groupby(tokens[again]).agg(list) if len(again) else ():
        most = max(columns, key=lambda at: counts[at])
        others = [at for at in columns if at != most]
        is_repeat = names[most] in [names[at] for at in others] or repeated_name(names[most]) is not None
        if most > min(others) and (is_repeat or how[most] in ("alias", "previous")):
            times[most] = counts[most] / max(1.0, sum(counts[at] for at in others))
            is_rna[others] = True
    as_cd = np.array([bool(_CD.match(name)) for name in names], dtype=np.bool_)
    found |= (times >= _TIMES) & ((as_cd & heavy) | (counts >= _SHARE * counts.sum()))
    one_of_several = as_cd & (times >= _TIMES) & (counts >= _LEAST_PER_CELL * n_obs)
    if not found.any() and one_of_several.sum() < _SEVERAL:
        return found
    members = (found & ~tagged) | (times >= _LEAST_TIMES)  # tags are on all columns of a panel
    loud = np.flatnonzero(unknown & heavy & ~found).tolist()
    members[loud] = ~_are_genes([names[at] for at in loud], of_mouse)
    for panel in _side_by_side(members, is_rna):
        if not found[panel].any() and one_of_several[panel].sum() < _SEVERAL:
            continue
        found[panel] = True
        around = names[max(0, panel[0] - _GAP) : panel[-1] + _GAP + 1]
        if len(panel) >= _SEVERAL and list(around) != sorted(around):  # else all are sorted, and RNA lies between them
            between = np.arange(panel[0], panel[-1])
            enough = heavy | (counts >= _OF_MEDIAN * np.median(counts[panel]))
            found[between[enough[between]]] = True
            for at, step in ((panel[0] - 1, -1), (panel[-1] + 1, 1)):
                while 0 <= at < len(names) and as_cd[at] and heavy[at] and not is_rna[at]:
                    found[at] = True
                    at += step
    return found


def _named_as_antibodies(names: Sequence[str], unknown: NDArray[np.bool_], of_mouse: bool) -> NDArray[np.bool_]:
    """Tell which unknown names are those of antibodies, and of no gene: with a tag, and as CD45RA is; bool `(2, n)`."""
    found = np.zeros((2, len(names)), dtype=np.bool_)
    for kind, form in zip(found, (_TAGGED, _OF_CD), strict=True):
        named = [at for at in np.flatnonzero(unknown).tolist() if form.fullmatch(names[at])]
        kind[named] = ~_are_genes([repeated_name(names[at]) or names[at] for at in named], of_mouse)
    if found[1].sum() > (~unknown).sum():  # genes themselves are named so, as "CD4__chr12" is
        found[1] = False
    return found


def _are_genes(names: Sequence[str], of_mouse: bool) -> NDArray[np.bool_]:
    """Tell which names are those of genes, whether or not a model knows them: of mouse genes, or also of human ones."""
    if not len(names):
        return np.zeros(0, dtype=np.bool_)
    found: NDArray[np.bool_] = np.array(
        [not name.startswith(FOREIGN) for name in human_orthologs(names)], dtype=np.bool_
    )
    if not of_mouse:
        how = np.asarray(Vocabulary.human().match(names, "human").how)
        found |= np.isin(how, ["ensembl", "symbol", "previous"])
    return found


def _side_by_side(members: NDArray[np.bool_], is_rna: NDArray[np.bool_]) -> Iterator[NDArray[np.int64]]:
    """Give the columns of each panel: members at most so far apart, without a gene's RNA between them."""
    at = np.flatnonzero(members)
    n_rna = np.cumsum(is_rna)
    ends = np.flatnonzero((np.diff(at) > _GAP + 1) | (np.diff(n_rna[at]) > 0)) + 1
    yield from np.split(at, ends) if len(at) else ()


def other_species(
    names: Sequence[str],
    tokens: NDArray[np.int32],
    how: NDArray[np.object_],
    vocabulary: Vocabulary,
    reading: InputOptions,
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
    has_human = not unknown.all() or any(of.startswith(HUMAN_GENOMES) for of, _ in split)
    both = has_human and looks_like_mouse(split[at][1] for at in np.flatnonzero(found))
    return found if both else none


def is_read_as_mouse(how: NDArray[np.object_], reading: InputOptions) -> bool:
    """Tell whether genes are read as those of a mouse."""
    return reading.species == "mouse" or bool((how == "ortholog").any())


def about_two_species(
    blocks: Iterator[tuple[int, sp.csr_matrix]],
    other: NDArray[np.bool_],
    matched_names: Sequence[str],
    reads_mouse: bool,
    obs_names: Names,
    reading: InputOptions,
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


def _split(matched_names: Sequence[str], reading: InputOptions) -> str:
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
