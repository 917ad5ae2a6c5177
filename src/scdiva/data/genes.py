"""Options of the input, and gene names matched to tokens; antibodies, a second species and wrong names are detected."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray

from scdiva._checks import check_choices, or_nearest, warn
from scdiva._constants import MATCH, UNKNOWN, UNS
from scdiva._validate import Names
from scdiva.data.results import our_uns
from scdiva.tokenizer.names import (
    FOREIGN,
    as_text,
    by_table,
    checked_species,
    ensembl_id,
    human_orthologs,
    looks_like_mouse,
    repeated_name,
    spelled_as_mouse,
)
from scdiva.tokenizer.vocabulary import HOW, Vocabulary

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import ArrayLike, NDArray

    from scdiva._validate import Input, Names


# --- options of the input ---------------------------------------------------------------------------------------------
Duplicates = Literal["sum", "error"]
Empty = Literal["error", "nan"]
Species: TypeAlias = str | Mapping[str, str] | pd.Series | None
"""`"human"`, `"mouse"`, or a table from genes to human genes; None infers human or mouse."""


@dataclass(frozen=True)
class InputOptions:
    """How cells are read.

    Attributes
    ----------
    layer, use_raw, input, gene_ids, species, duplicates
        As in :func:`scdiva.tl.embed_file`. A species table is stored as a dict; `""` means that there is no human gene.
    empty
        Cells without a known gene: `"error"` raises an error, `"nan"` skips them.

    Raises
    ------
    ValueError
        If `species`, `duplicates` or `empty` is not one of the choices.
    """

    layer: str | None = None
    use_raw: bool = False
    input: Input = "auto"
    gene_ids: str | None = None
    species: Species = None
    duplicates: Duplicates = "sum"
    empty: Empty = "error"

    def __post_init__(self) -> None:
        check_choices(duplicates=(self.duplicates, ("sum", "error")), empty=(self.empty, ("error", "nan")))
        object.__setattr__(self, "species", checked_species(self.species))

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for calls without `empty`."""
        return {name: value for name, value in vars(self).items() if name != "empty"}

    def parameters(self) -> dict[str, Any]:
        """Parameters for `uns`: scalars that h5ad and zarr can store, `""` for None, `"table"` for a species table."""
        species = "table" if isinstance(self.species, dict) else self.species
        return {
            name: "" if value is None else value for name, value in (self.arguments() | {"species": species}).items()
        }

    def var(self, adata: AnnData) -> pd.DataFrame:
        """Annotation of the genes: `adata.raw.var` with `use_raw`, otherwise `adata.var`."""
        return adata.raw.var if self.use_raw and adata.raw is not None else adata.var


DEFAULT_INPUT = InputOptions()
ORTHOLOGS = "orthologs"
"""Entry of `uns["scdiva"]["match"]` with the table of species: arrays `gene` and `human_gene`."""


def input_options(
    adata: AnnData, layer: str | None, use_raw: bool, input: Input, empty: Empty = "error"
) -> InputOptions:
    """Options of a call on `adata`: genes as :func:`scdiva.pp.match_genes` recorded, otherwise the defaults.

    Raises
    ------
    ValueError
        If the record is damaged, or another argument is not one of its choices.
    """
    options = InputOptions(layer, use_raw, input, empty=empty)
    match = our_uns(adata).get(MATCH)
    if match is None:
        return options
    try:
        params: dict[str, Any] = {name: match["params"][name] for name in ("gene_ids", "species", "duplicates")}
        for name, value in params.items():
            if not isinstance(value, Hashable):
                raise TypeError(f"{name}={value!r:.80}")
            params[name] = None if value == "" else value
        if params["species"] == "table":
            genes, human = (map(str, np.asarray(match[ORTHOLOGS][name])) for name in ("gene", "human_gene"))
            params["species"] = dict(zip(genes, human, strict=True))
        return replace(options, **params)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"adata.uns[{UNS!r}][{MATCH!r}] is damaged ({error}). Call sd.pp.match_genes(adata, ...) again."
        ) from error


# --- antibodies and a second species ----------------------------------------------------------------------------------
GENOME = re.compile(r"((?:GRC[a-z]+\d+|hg\d+|mm\d+|rn\d+)_+)(.+)")
"""Gene names of a Cell Ranger reference of several genomes: "GRCh38_CD4", "mm10___Cd4"."""
HUMAN_GENOMES = ("GRCh", "hg")

_TAGGED = re.compile(
    r"(?i:(.*[ _.:-])?((ADT|HTO|Hashtag)\d*|TotalSeq[- ]?[A-D]?|antibody|anti|AB|prot|protein)([ _.:-].*)?)"
    r"|(Hu|Ms|Rt){1,3}[._].+|(Isotype|CITE)_.+|.+[|._]pAbO"
)
"""Names of antibodies: "ADT_CD4", "CD4_TotalSeqC", "anti-CD4", "HTO1", "HuMs.CD44", "CD4|CD4|AHS0032|pAbO"."""
_OF_CD = re.compile(r"([Aa]b-?)?CD\d+[A-Za-z]*([ _.:|/(-](?!(AS|DT|IT|OT)\d*$|\d{3}$).*)?")
"""Antibodies unless these are genes: "CD45RA", "CD3-UCHT1", "abCD4"; not transcripts ("CD4-201", "CD27-AS1")."""
_CD = re.compile(r"C[Dd]\d+[A-Za-z]?(?![A-Za-z])")
_TIMES, _LEAST_TIMES, _PER_CELL, _SHARE = 10.0, 2.0, 10.0, 0.01
"""Thresholds of a protein: its counts relative to the RNA of its gene, alone and within a panel; and counts per cell if
its name is like CD4, otherwise its share of all counts. No pair of columns of one gene in 59 public datasets passes."""
_SEVERAL, _LEAST_PER_CELL = 3, 0.5
"""Minimum number of adjacent columns like CD4-1, with ten times the counts of CD4, and minimum counts per cell of each,
that make a panel."""
_GAP, _OF_MEDIAN = 3, 0.1
"""Maximum distance of the columns of a panel; minimum counts of columns between them, relative to their median."""


def protein_columns(
    names: Sequence[str],
    tokens: NDArray[np.int32],
    how: NDArray[np.object_],
    counts: NDArray[np.float64],
    n_obs: int,
    other: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Detect columns of antibody counts by names and counts, if no feature type marks them.

    A column is an antibody if its name is an antibody's ("ADT_CD4") and no gene's, and all such columns have at least
    1% of the counts. Or it is a second column of a gene, by the suffix of `var_names_make_unique` ("CD4-1"), the same
    name, or an alias ("CD56", of NCAM1), with many times the counts of the first; fewer are enough if several such
    columns are adjacent. Columns next to them belong to the same panel if they are second columns with fewer counts, or
    have no gene and many counts, or lie between them with similar counts. Next to tagged names ("ADT_CD4") there is no
    such panel.

    Parameters
    ----------
    names, tokens, how
        Result of :func:`match_columns`.
    counts
        `(n,)`, sum of each column over all cells.
    n_obs
        Number of cells.
    other
        Result of :func:`other_species`: among thousands of human genes, names like those of antibodies are genes, too.

    Returns
    -------
    bool `(n,)`.
    """
    of_mouse = bool((how == "ortholog").any())
    unknown, heavy = tokens == UNKNOWN, counts >= _PER_CELL * n_obs
    tagged, of_cd = _named_as_antibodies(names, unknown, of_mouse)
    is_antibody: NDArray[np.bool_] = np.logical_or(tagged, of_cd)
    if 2 * is_antibody[other].sum() < other.sum():
        is_antibody &= ~other
    is_antibody &= counts[is_antibody].sum() >= _SHARE * counts.sum()
    times = np.zeros(len(names))  # counts of a second column of a gene, relative to its other columns
    is_rna = np.zeros(len(names), dtype=np.bool_)  # the other columns
    again = np.flatnonzero(~unknown & pd.Series(tokens).duplicated(keep=False).to_numpy())
    for columns in pd.Series(again).groupby(tokens[again]).agg(list) if len(again) else ():
        largest = max(columns, key=lambda at: counts[at])
        others = [at for at in columns if at != largest]
        is_repeat = names[largest] in [names[at] for at in others] or repeated_name(names[largest]) is not None
        if largest > min(others) and (is_repeat or how[largest] in ("alias", "previous")):
            times[largest] = counts[largest] / max(1.0, sum(counts[at] for at in others))
            is_rna[others] = True
    as_cd = np.array([bool(_CD.match(name)) for name in names], dtype=np.bool_)
    is_antibody |= (times >= _TIMES) & ((as_cd & heavy) | (counts >= _SHARE * counts.sum()))
    one_of_several = as_cd & (times >= _TIMES) & (counts >= _LEAST_PER_CELL * n_obs)
    if not is_antibody.any() and one_of_several.sum() < _SEVERAL:
        return is_antibody
    members = (is_antibody & ~tagged) | (times >= _LEAST_TIMES)  # all columns of a tagged panel have the tag
    loud = np.flatnonzero(unknown & heavy & ~is_antibody).tolist()
    members[loud] = ~_are_genes([names[at] for at in loud], of_mouse)
    for panel in _side_by_side(members, is_rna):
        if not is_antibody[panel].any() and one_of_several[panel].sum() < _SEVERAL:
            continue
        is_antibody[panel] = True
        around = names[max(0, panel[0] - _GAP) : panel[-1] + _GAP + 1]
        if len(panel) >= _SEVERAL and list(around) != sorted(around):  # unless all columns are sorted
            between = np.arange(panel[0], panel[-1])
            enough = heavy | (counts >= _OF_MEDIAN * np.median(counts[panel]))
            is_antibody[between[enough[between]]] = True
            for at, step in ((panel[0] - 1, -1), (panel[-1] + 1, 1)):
                while 0 <= at < len(names) and as_cd[at] and heavy[at] and not is_rna[at]:
                    is_antibody[at] = True
                    at += step
    return is_antibody


def _named_as_antibodies(names: Sequence[str], unknown: NDArray[np.bool_], of_mouse: bool) -> NDArray[np.bool_]:
    """Mask unknown names that are antibodies and not genes, bool `(2, n)`: with a tag, and like CD45RA."""
    is_antibody = np.zeros((2, len(names)), dtype=np.bool_)
    for kind, form in zip(is_antibody, (_TAGGED, _OF_CD), strict=True):
        candidates = [at for at in np.flatnonzero(unknown).tolist() if form.fullmatch(names[at])]
        kind[candidates] = ~_are_genes([repeated_name(names[at]) or names[at] for at in candidates], of_mouse)
    if is_antibody[1].sum() > (~unknown).sum():  # the genes themselves have such names ("CD4__chr12")
        is_antibody[1] = False
    return is_antibody


def _are_genes(names: Sequence[str], of_mouse: bool) -> NDArray[np.bool_]:
    """Mask names of mouse genes, and of human genes unless `of_mouse`, whether or not a model has them."""
    if not len(names):
        return np.zeros(0, dtype=np.bool_)
    is_gene: NDArray[np.bool_] = np.array(
        [not name.startswith(FOREIGN) for name in human_orthologs(names)], dtype=np.bool_
    )
    if not of_mouse:
        how = np.asarray(Vocabulary.human().match(names, "human").how)
        is_gene |= np.isin(how, ["ensembl", "symbol", "previous"])
    return is_gene


def _side_by_side(members: NDArray[np.bool_], is_rna: NDArray[np.bool_]) -> Iterator[NDArray[np.int64]]:
    """Yield the columns of each panel: members close to each other, without the RNA of a gene between them."""
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
    """Mask mouse genes in data that are read as human, or human genes in data that are read as mouse.

    Parameters
    ----------
    names, tokens, how
        Result of :func:`match_columns`.
    vocabulary, reading
        Its arguments.

    Returns
    -------
    bool `(n,)`; all False if `species` is a table or the vocabulary is not human.
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
    is_mouse_gene: NDArray[np.bool_] = unknown & of_mouse
    has_human = not unknown.all() or any(of.startswith(HUMAN_GENOMES) for of, _ in split)
    both = has_human and looks_like_mouse(split[at][1] for at in np.flatnonzero(is_mouse_gene))
    return is_mouse_gene if both else none


def is_read_as_mouse(how: NDArray[np.object_], reading: InputOptions) -> bool:
    """Whether the genes are read as mouse genes."""
    return reading.species == "mouse" or bool((how == "ortholog").any())


def about_two_species(
    blocks: Iterator[tuple[int, sp.csr_matrix]],
    other: NDArray[np.bool_],
    matched_names: Sequence[str],
    reads_mouse: bool,
    obs_names: Names,
    reading: InputOptions,
) -> str:
    """Count the cells of each species in a matrix with human and mouse genes, and describe how to split them.

    Parameters
    ----------
    blocks
        The matrix.
    other
        Result of :func:`other_species`.
    matched_names
        Names of all genes.
    reads_mouse
        Whether `other` are human genes in data that are read as mouse.
    obs_names
        Names of the cells.
    reading
        Options of the input.

    Returns
    -------
    The message; empty if no cell has most of its counts on genes of the other species.
    """
    sums = [[np.asarray(block[:, which].sum(axis=1)).ravel() for which in (~other, other)] for _, block in blocks]
    of_read, of_other = np.concatenate(sums, axis=1)
    other_cells = np.flatnonzero(of_other > of_read)
    n_cells = int((of_read > of_other).sum()), len(other_cells)
    if not len(other_cells) or (not n_cells[0] and reading.species is not None):  # `species` is wrong
        return ""
    n_human, n_mouse = n_cells[::-1] if reads_mouse else n_cells
    first = ", ".join(repr(str(obs_names[int(row)])) for row in other_cells[:3])
    kind = "human" if reads_mouse else "mouse"
    return (
        f"human and mouse (or rat) genes are in one matrix: by their counts {n_human} of {len(of_read)} cells are "
        f"human and {n_mouse} mouse (first {kind}: {first}). Split them, as their genes can't be read alike: "
        f"{_split(matched_names, reading)}"
    )


def _split(matched_names: Sequence[str], reading: InputOptions) -> str:
    """Code that splits `adata` into human cells with human genes and `mouse`."""
    names = "adata.var_names" if reading.gene_ids is None else f"adata.var[{reading.gene_ids!r}]"
    matrix = "adata.X" if reading.layer is None else f"adata.layers[{reading.layer!r}]"
    genomes = sorted({match[1] for name in matched_names if (match := GENOME.fullmatch(name))})
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


# --- gene names -------------------------------------------------------------------------------------------------------
ERROR_SHARE = 0.5
"""Below this share of counts on known genes there is an error."""
WARNING_SHARE = 0.8
"""Below this share of counts on known genes there is a warning. Human datasets have 0.95 or more."""

_N_SHOWN = 5
_LOOKED_AT = 1000
"""Number of cell names that are compared with gene names."""
_NOT_GENES = frozenset(
    ("antibody capture", "antigen capture", "crispr guide capture", "multiplexing capture", "custom", "peaks",
     "antibody", "protein", "protein expression", "proteins", "prot", "adt", "hto", "hashtag", "multiplexing", "crispr",
     "grna", "sgrna", "guide", "peak", "atac", "chromatin accessibility")
)  # fmt: skip
"""Feature types, in lower case, of columns that are not RNA of a gene."""
_TYPES = ("feature_types", "feature_type", "Type", "modality")
"""Columns of `var` with feature types, as in Cell Ranger, scanpy, DropletUtils and others."""
_GENE_IDS = "sd.pp.match_genes(adata, gene_ids=...) (of a file: gene_ids=)"
_SPECIES = (
    "pass a dict from them to human symbols or Ensembl ids: sd.pp.match_genes(adata, species=...) (of a file: species=)"
)
_ADVICE = (
    (
        r"[\d.]+$",
        f"The names are numbers: pass a column of adata.var with symbols or ids, {_GENE_IDS}, or set var_names",
    ),
    (
        r".*ENSG\d{11}",
        "The names hold an Ensembl id and more: adata.var['id'] = adata.var_names.str.extract(r'(ENSG\\d{11})', "
        "expand=False).fillna(''); sd.pp.match_genes(adata, gene_ids='id')",
    ),
    (r"ENS(?!G\d)[A-Z]*G\d", f"These are Ensembl ids of another species: {_SPECIES}"),
    (r"ENST\d", "These are transcripts: sum them to genes first"),
    (r"(chr)?[\dXYMT]+[:_-]\d+[_-]\d+$", "These are intervals of the genome, such as peaks: pass the RNA counts"),
    ("", f"Human genes are expected: pass another column of adata.var, {_GENE_IDS}, or, of other species, {_SPECIES}"),
)
"""Patterns of names that are not human genes, and the remedy; the last entry is for all other names."""


def gene_names(var: pd.DataFrame, reading: InputOptions = DEFAULT_INPUT) -> tuple[list[str], list[str] | None]:
    """Gene names of a dataset.

    Parameters
    ----------
    var
        Annotation of the genes, `adata.var` or `adata.raw.var`.
    reading
        Options of the input.

    Returns
    -------
    names
        One name per gene, empty where it is missing.
    fallback
        The index if `gene_ids` is given, to look up the symbol of an unknown (retired) Ensembl id; otherwise None.

    Raises
    ------
    KeyError
        If the column `gene_ids` does not exist; the message lists the columns of text.
    ValueError
        If `var["feature_types"]` has antibodies, guides or peaks: the counts of an antibody named like its gene would
        be taken for RNA.
    """
    for column in [name for name in _TYPES if name in var.columns]:
        kinds = var[column].map(as_text)
        not_genes = kinds.str.lower().isin(_NOT_GENES)
        if not_genes.all() and len(var):
            raise ValueError(
                f"no column is a gene: all {len(var)} are {', '.join(kinds.unique())}. Pass the RNA counts."
            )
        if not_genes.any():
            load = "adata = adata.raw.to_adata(); " if reading.use_raw else ""
            listed, raw = list(kinds[not_genes].unique()), list(var[column][not_genes].unique())
            raise ValueError(
                f"{int(not_genes.sum())} of {len(var)} columns are not genes, but {', '.join(listed)} (first: "
                f"{str(var.index[not_genes.argmax()])!r}): their counts would be mixed with RNA. Leave them out: {load}"
                f"adata = adata[:, ~adata.var[{column!r}].isin({raw})].copy()"
            )
    index = [as_text(name) for name in var.index]
    gene_ids = reading.gene_ids
    if gene_ids is None:
        return index, None
    if gene_ids not in var.columns:
        text = [str(c) for c in var.columns if not pd.api.types.is_numeric_dtype(var[c])]
        where = "adata.raw.var" if reading.use_raw else "adata.var"
        raise KeyError(
            f"{where} has no column {gene_ids!r}{or_nearest(gene_ids, var.columns)}; columns that hold text: {text}. "
            f"Call {_GENE_IDS} again, or sd.pp.match_genes(adata) to read var_names."
        )
    return ["" if pd.isna(name) else as_text(name) for name in var[gene_ids]], index


class Matched(NamedTuple):
    """Matched genes of a dataset.

    Attributes
    ----------
    names
        The n gene names.
    tokens
        int32, -1 if the gene is not in the vocabulary.
    how
        How each name was matched: one of :data:`scdiva.tokenizer.vocabulary.HOW`.
    """

    names: list[str]
    tokens: NDArray[np.int32]
    how: NDArray[np.object_]


def match_columns(var: pd.DataFrame, vocabulary: Vocabulary, reading: InputOptions = DEFAULT_INPUT) -> Matched:
    """Match the genes of a dataset with a vocabulary, by name.

    An unknown Ensembl id in the column `gene_ids` is looked up by the name in the index; other names are not.

    Parameters
    ----------
    var
        Annotation of the genes.
    vocabulary
        The vocabulary.
    reading
        Options of the input.

    Raises
    ------
    KeyError, ValueError
        As :func:`gene_names`; if `species` is a table without any of the genes, or does not fit the vocabulary.
    """
    names, fallback = gene_names(var, reading)
    species = reading.species
    if isinstance(species, dict) and names and all(ortholog is None for ortholog in by_table(names, species)):
        raise ValueError(
            f"the table given as species holds none of the {len(names)} genes: its genes are such as "
            f"{_some(species)}, those of the data such as {_some(names)}. It maps the names in adata.var_names, or in "
            "the column gene_ids, to human genes: sd.pp.match_genes(adata, species=...)"
        )
    match = vocabulary.match(names, species)
    tokens, how = match.tokens, np.asarray(match.how, dtype=object)
    if fallback is not None and not isinstance(species, dict):  # a table is complete
        second = vocabulary.match(fallback, species)
        retired = (tokens == UNKNOWN) & np.array([ensembl_id(name) is not None for name in names], dtype=bool)
        tokens = np.where(retired, second.tokens, tokens)
        how = np.where(retired, np.asarray(second.how, dtype=object), how)
    return Matched(names, tokens.astype(np.int32), how)


def column_tokens(
    var: pd.DataFrame, vocabulary: Vocabulary, reading: InputOptions = DEFAULT_INPUT
) -> NDArray[np.int32]:
    """Token of each column, int32 `(n_vars,)`; see :func:`match_columns`."""
    return match_columns(var, vocabulary, reading).tokens


def check_unique(names: pd.Index, where: str = "adata") -> None:
    """Raise ValueError if gene names are not unique; `where` is the name of the data in the message."""
    again = names[names.duplicated()]
    if len(again):
        raise ValueError(
            f"{len(again)} of {len(names)} genes of {where} repeat a name, the first is {again[0]!r}: call "
            f"{where}.var_names_make_unique() first, in one order of genes for all data that are compared."
        )


def _some(names: Iterable[str]) -> str:
    return ", ".join(map(repr, itertools.islice(names, 3)))


def judge_genes(
    matched: Matched,
    vocabulary: Vocabulary,
    counts_per_gene: ArrayLike,
    reading: InputOptions = DEFAULT_INPUT,
    *,
    two_species: str = "",
    obs_names: Names | None = None,
    n_obs: int = 0,
) -> dict[str, Any]:
    """Check that enough counts fall on known genes, and report how the genes were matched.

    Parameters
    ----------
    matched
        The n matched genes.
    vocabulary
        The vocabulary.
    counts_per_gene
        Sum of the counts of each gene over all cells (count scale), shape (n,).
    reading
        Options of the input; `duplicates="error"` raises an error for several names of one gene.
    two_species
        Message of :func:`about_two_species`, which explains unknown counts.
    obs_names, n_obs
        Names and number of cells, to detect a transposed matrix.

    Returns
    -------
    `n_genes`, `n_mapped`, `share_genes`, `share_counts` (share of counts on mapped genes), `n_duplicates` (names beyond
    the first of their gene), `vocabulary` (fingerprint) and `how`, a dict with the number of names matched as
    "ensembl", "symbol", "previous", "alias", "ortholog" and "unknown".

    Raises
    ------
    ValueError
        If less than half of the counts fall on known genes; if there are no genes or no counts; if
        `duplicates="error"` and two names mean one gene.

    Warns
    -----
    UserWarning
        If less than 80% of the counts fall on known genes; if genes are read as their human orthologs.
    """
    names, tokens, how = matched
    counts = np.asarray(counts_per_gene, dtype=np.float64)
    if not names:
        raise ValueError("there are no genes to match: the data set has no columns")
    if counts.shape != (len(names),) or not (np.isfinite(counts).all() and (counts >= 0).all()):
        raise ValueError(f"counts_per_gene must hold a sum of counts for each of {len(names)} genes")
    total = counts.sum()
    if total == 0:
        raise ValueError(f"the matrix holds no counts: all values of its {len(names)} genes are zero")

    mapped = tokens != UNKNOWN
    share = float(counts[mapped].sum() / total)
    if share >= ERROR_SHARE and vocabulary.species == "human" and (how == "ortholog").any():
        kind = "genes of another species" if isinstance(reading.species, dict) else "mouse genes"
        first = _some(name for name, way in zip(names, how, strict=True) if way == "ortholog")
        warn(
            f"these are {kind}, such as {first}: {int(mapped.sum()):,} of {len(names):,} are read as their human "
            f"orthologs, with {share:.0%} of the counts. The model was trained on human cells only."
        )
    if two_species and share >= ERROR_SHARE:
        warn(two_species)
    elif two_species:
        raise ValueError(two_species)
    elif share < WARNING_SHARE:
        if share < ERROR_SHARE and obs_names is not None:
            _refuse_genes_in_rows(obs_names, n_obs, names, vocabulary)
        _refuse_or_warn(matched, counts, share, vocabulary, reading)

    repeats = pd.Series(tokens[mapped]).duplicated()
    if reading.duplicates == "error" and repeats.any():
        raise ValueError(_about_duplicates(names, tokens, vocabulary, int(repeats.sum())))
    return {
        "n_genes": len(names),
        "n_mapped": int(mapped.sum()),
        "share_genes": float(mapped.mean()),
        "share_counts": share,
        "n_duplicates": int(repeats.sum()),
        "vocabulary": vocabulary.fingerprint,
        "how": {kind: int((how == kind).sum()) for kind in HOW},
    }


def _refuse_genes_in_rows(obs_names: Names, n_obs: int, names: Sequence[str], vocabulary: Vocabulary) -> None:
    """Raise ValueError if most cell names are gene names."""
    sampled = [
        str(obs_names[int(row)]) for row in np.unique(np.linspace(0, n_obs - 1, min(n_obs, _LOOKED_AT)).astype(int))
    ]
    matched = np.flatnonzero(vocabulary.match(sampled).tokens != UNKNOWN)
    if 2 * len(matched) > len(sampled):
        raise ValueError(
            f"the genes are in the rows: {len(matched)} of {len(sampled)} adata.obs_names are genes, such as "
            f"{sampled[matched[0]]!r}, and adata.var_names, such as {names[0]!r}, are not. Exchange rows and columns: "
            "adata = adata.T.copy()"
        )


def _refuse_or_warn(
    matched: Matched, counts: NDArray[np.float64], share: float, vocabulary: Vocabulary, reading: InputOptions
) -> None:
    """Explain why many counts are unknown: an error below half of them, otherwise a warning."""
    names, mapped = matched.names, matched.tokens != UNKNOWN
    of_human = vocabulary.species == "human" and not isinstance(reading.species, dict)
    of_human &= reading.species != "mouse" and not (matched.how == "ortholog").any()
    heaviest = np.argsort(-counts, kind="stable")
    first = [names[i] for i in heaviest if not mapped[i]][:_N_SHOWN]
    summary = (
        f"only {share:.1%} of the counts fall on known genes ({int(mapped.sum())} of {len(names)} names; unknown with "
        f"most counts: {', '.join(map(repr, first))})"
    )
    if share >= ERROR_SHARE:
        mouse = looks_like_mouse(name for name, is_known in zip(names, mapped, strict=True) if not is_known)
        column = "var_names" if reading.gene_ids is None else f"var[{reading.gene_ids!r}]"
        drop = f"adata = adata[:, scdiva.tokenizer.load_vocabulary().match(adata.{column}, 'human').tokens >= 0].copy()"
        warn(
            f"{summary}: results use only that part of the data."
            + (f" The unknown genes are those of a mouse. Keep the human ones: {drop}." if mouse and of_human else "")
            + _about_spikes(names, counts)
        )
        return
    if isinstance(reading.species, dict):
        raise ValueError(f"{summary}: the table given as species knows too few of the genes, or gives names not human")
    if reading.species is not None and looks_like_mouse(names) != (reading.species == "mouse"):
        raise ValueError(
            f"{summary}: species={reading.species!r}, but by their names they are not. Leave "
            "species out: sd.pp.match_genes(adata)"
        )
    if looks_like_mouse(names):
        raise ValueError(advice(names, first))
    raise ValueError(f"{summary}. {_about_spikes(names, counts).strip() or advice(names)}")


def _about_spikes(names: Sequence[str], counts: NDArray[np.float64]) -> str:
    """Advice about spike-ins, if they have more than 5% of the counts."""
    spikes = np.array([name.startswith("ERCC-") for name in names])
    if counts[spikes].sum() <= 0.05 * counts.sum():
        return ""
    return " ERCC names are spike-ins; leave them out: adata[:, ~adata.var_names.str.startswith('ERCC-')].copy()"


def advice(names: Sequence[str], first: Sequence[str] = ()) -> str:
    """Advice about names that are not human genes; `first` are mouse genes to show (default: the first names)."""
    if looks_like_mouse(names):
        return (
            f"these are mouse (or rat) genes, such as {', '.join(map(repr, first or names[:_N_SHOWN]))}; the "
            "vocabulary is human, and too few have a human ortholog that it holds (scdiva.tokenizer.human_orthologs): "
            f"{_SPECIES}, or a column of adata.var with human symbols: {_GENE_IDS}"
        )
    prefixes = [match[1] for name in names if (match := GENOME.fullmatch(name))]
    if len(prefixes) > len(names) / 2:
        genome = min(set(prefixes), key=lambda one: (not one.startswith(HUMAN_GENOMES), one))
        call = f"adata.var_names = adata.var_names.str.removeprefix({genome!r})"
        if len(set(prefixes)) > 1:
            call = (
                f"genes = adata.var_names.str.startswith({genome!r}); "
                "cells = np.asarray(adata.X[:, genes].sum(axis=1) > adata.X[:, ~genes].sum(axis=1)).ravel(); "
                f"adata = adata[cells, genes].copy(); {call}"
            )
        return (
            f"The names begin with a genome, such as {genome!r}: keep the cells of one species, with its genes: {call}"
        )
    half = len(names) / 2
    hint = next(hint for like, hint in _ADVICE if sum(re.match(like, name) is not None for name in names) > half)
    stem, n = Counter(re.sub(r"\d+$", "", name) for name in names).most_common(1)[0]
    if hint == _ADVICE[-1][1] and stem and n > half:
        return (
            f"The names are numbers behind {stem!r}, not gene names: pass another column of adata.var, of symbols or "
            f"Ensembl ids, {_GENE_IDS}, or set var_names"
        )
    return hint


def _about_duplicates(names: Sequence[str], tokens: NDArray[np.int32], vocabulary: Vocabulary, n_repeats: int) -> str:
    """Message that lists the first genes with several names."""
    genes = pd.DataFrame({"name": names, "token": tokens})[tokens != UNKNOWN]
    twice = genes[genes.duplicated("token", keep=False)].groupby("token", sort=False)["name"].agg(list)[:_N_SHOWN]
    pairs = [
        f"{' and '.join(map(repr, of))} ({vocabulary.symbols[int(np.searchsorted(vocabulary.tokens, token))]})"
        for token, of in twice.items()
    ]
    return (
        f"{n_repeats} names mean a gene that another name means already: {', '.join(pairs)}. Call "
        'sd.pp.match_genes(adata, duplicates="sum") to sum their counts, or remove columns'
    )


def or_in_raw(adata: AnnData, name: str, use_raw: bool) -> str:
    """End of a message: `adata.raw` has a gene that `adata` lacks. Empty if it does not."""
    in_raw = not use_raw and adata.raw is not None and name in adata.raw.var_names and name not in adata.var_names
    return "; adata.raw has it: pass use_raw=True" if in_raw else ""


def tokens_of_var(adata: AnnData, tokens: NDArray[np.int32], use_raw: bool) -> NDArray[np.int32]:
    """Tokens of the genes of `adata`, also if the genes of `adata.raw` were read.

    Parameters
    ----------
    adata
        The data; the genes of `raw` are matched by name.
    tokens
        int32, token of each gene that was read.
    use_raw
        Whether these are the genes of `adata.raw`.

    Returns
    -------
    int32 `(n_vars,)`, -1 for genes that were not read or are unknown.

    Raises
    ------
    ValueError
        If the gene names of `adata.raw` are not unique.
    """
    if not use_raw:
        return tokens
    names = adata.raw.var_names
    if not names.is_unique:
        raise ValueError(
            "adata.raw.var_names repeat names, so adata.var can't be matched with them; pass use_raw=False, or work on "
            "adata.raw.to_adata()."
        )
    row = names.get_indexer(adata.var_names)
    return np.where(row >= 0, tokens[row], UNKNOWN).astype(np.int32)


def first_columns(tokens: NDArray[np.int32], n_tokens: int) -> NDArray[np.int64]:
    """First column of each token, int64 `(n_tokens,)`; -1 for tokens without a column."""
    columns, matched = np.full(n_tokens, -1), np.flatnonzero(tokens >= 0)[::-1]
    columns[tokens[matched]] = matched  # the first column is written last
    return columns


def columns_of(tokens: NDArray[np.int32], counts: NDArray[np.float64]) -> NDArray[np.int64]:
    """Column of each token; of several columns of one gene, the one with most counts.

    Parameters
    ----------
    tokens
        `(n_vars,)`, token of each column; negative: unknown.
    counts
        `(n_vars,)`, counts of each column over all cells.

    Returns
    -------
    int64 `(largest token + 1,)`; -1 for tokens without a column.
    """
    columns = np.full(int(tokens.max(initial=-1)) + 1, -1, dtype=np.int64)
    order = np.argsort(counts, kind="stable")
    order = order[tokens[order] >= 0]
    columns[tokens[order]] = order  # the last one written has most counts
    return columns
