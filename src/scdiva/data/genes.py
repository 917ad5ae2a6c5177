"""From the gene names of a data set to tokens, with the checks that a wrong name list must not pass."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from scdiva._checks import is_second_argument, or_nearest, warn
from scdiva._constants import UNKNOWN
from scdiva.data.columns import GENOME, HUMAN_GENOMES
from scdiva.data.options import DEFAULT_INPUT, InputOptions
from scdiva.tokenizer.names import as_text, by_table, ensembl_id, looks_like_mouse
from scdiva.tokenizer.vocabulary import HOW, Vocabulary

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import ArrayLike, NDArray

    from scdiva._validate import Names

ERROR_SHARE = 0.5
"""Below this share of counts on known genes a data set is refused."""
WARNING_SHARE = 0.8
"""Below this share of counts on known genes there is a warning. Human data sets have 0.95 or more."""

_N_SHOWN = 5
_LOOKED_AT = 1000
"""Names of cells that are looked up among genes."""
_NOT_GENES = frozenset(
    ("antibody capture", "antigen capture", "crispr guide capture", "multiplexing capture", "custom", "peaks",
     "antibody", "protein", "protein expression", "proteins", "prot", "adt", "hto", "hashtag", "multiplexing", "crispr",
     "grna", "sgrna", "guide", "peak", "atac", "chromatin accessibility")
)  # fmt: skip
"""Types of features, in small letters, of columns that hold no RNA of a gene."""
_TYPES = ("feature_types", "feature_type", "Type", "modality")
"""Columns of `var` with them, as Cell Ranger, scanpy, DropletUtils and others name them."""
_SPECIES = "pass species=, a dict from them to human symbols or Ensembl ids"
_ADVICE = (
    (r"[\d.]+$", "The names are numbers: pass as gene_ids= a column of adata.var of symbols or ids, or set var_names"),
    (
        r".*ENSG\d{11}",
        "The names hold an Ensembl id and more: adata.var['id'] = adata.var_names.str.extract(r'(ENSG\\d{11})', "
        "expand=False).fillna(''), and pass gene_ids='id'",
    ),
    (r"ENS(?!G\d)[A-Z]*G\d", f"These are Ensembl ids of another species: {_SPECIES}"),
    (r"ENST\d", "These are transcripts: sum them to genes first"),
    (r"(chr)?[\dXYMT]+[:_-]\d+[_-]\d+$", "These are intervals of the genome, such as peaks: pass the RNA counts"),
    ("", f"Human genes are expected: pass another column of adata.var as gene_ids=, or, of other species, {_SPECIES}"),
)
"""How names may look that are no list of human genes, and what to do then; the last of all others."""


def gene_names(var: pd.DataFrame, reading: InputOptions = DEFAULT_INPUT) -> tuple[list[str], list[str] | None]:
    """Choose the gene names of a data set.

    Parameters
    ----------
    var
        Annotation of the genes, `adata.var` or `adata.raw.var`.
    reading
        What is read: `gene_ids`, and `use_raw` for the messages.

    Returns
    -------
    names
        One name per gene, empty where it is missing.
    fallback
        The index, if `gene_ids` was given: where an Ensembl id is unknown (retired, say), the symbol may still be
        known. None otherwise.

    Raises
    ------
    KeyError
        If there is no such column; the message names those that hold text.
    ValueError
        If `var["feature_types"]` says that there are columns of antibodies, guides or peaks. An antibody bears the name
        of its gene, and its counts would be taken for that gene's RNA.
    """
    for column in [name for name in _TYPES if name in var.columns]:
        kinds = var[column].map(as_text)
        others = kinds.str.lower().isin(_NOT_GENES)
        if others.all() and len(var):
            raise ValueError(
                f"no column is a gene: all {len(var)} are {', '.join(kinds.unique())}. Pass the RNA counts."
            )
        if others.any():
            load = "adata = adata.raw.to_adata(); " if reading.use_raw else ""
            listed, raw = list(kinds[others].unique()), list(var[column][others].unique())
            raise ValueError(
                f"{int(others.sum())} of {len(var)} columns are no genes, but {', '.join(listed)} (first: "
                f"{str(var.index[others.argmax()])!r}): their counts would be mixed with RNA. Leave them out: {load}"
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
            + (
                f"If var_names are such names: {where}[{gene_ids!r}] = {where}_names."
                if is_second_argument()
                else "None takes var_names."
            )
        )
    return ["" if pd.isna(name) else as_text(name) for name in var[gene_ids]], index


class Matched(NamedTuple):
    """The genes of a data set and what the vocabulary knows of them, n each.

    Attributes
    ----------
    names
        As the data have them.
    tokens
        int32, -1 where the vocabulary does not hold the gene.
    how
        How each was found: one of :data:`scdiva.tokenizer.vocabulary.HOW`.
    """

    names: list[str]
    tokens: NDArray[np.int32]
    how: NDArray[np.object_]


def match_columns(var: pd.DataFrame, vocabulary: Vocabulary, reading: InputOptions = DEFAULT_INPUT) -> Matched:
    """Match the genes of a data set with a vocabulary, by their names alone.

    Parameters
    ----------
    var
        Annotation of the genes.
    vocabulary
        The genes to match with.
    reading
        What is read: `gene_ids` and `species`. An Ensembl id in the column `gene_ids` that is unknown is looked up by
        the gene's name in the index instead. No other name is: whoever left a gene without one meant it to be unknown.

    Raises
    ------
    KeyError, ValueError
        As :func:`gene_names`; if `species` is a table that holds none of the genes, or not that of the vocabulary.
    """
    names, fallback = gene_names(var, reading)
    species = reading.species
    if isinstance(species, dict) and names and all(found is None for found in by_table(names, species)):
        raise ValueError(
            f"the table given as species holds none of the {len(names)} genes: its genes are such as "
            f"{_some(species)}, those of the data such as {_some(names)}. It goes from the names in adata.var_names, "
            "or in the column gene_ids=, to human genes"
        )
    match = vocabulary.match(names, species)
    tokens, how = match.tokens, np.asarray(match.how, dtype=object)
    if fallback is not None and not isinstance(species, dict):  # a table says of every gene what it is
        second = vocabulary.match(fallback, species)
        retired = (tokens == UNKNOWN) & np.array([ensembl_id(name) is not None for name in names], dtype=bool)
        tokens = np.where(retired, second.tokens, tokens)
        how = np.where(retired, np.asarray(second.how, dtype=object), how)
    return Matched(names, tokens.astype(np.int32), how)


def column_tokens(
    var: pd.DataFrame, vocabulary: Vocabulary, reading: InputOptions = DEFAULT_INPUT
) -> NDArray[np.int32]:
    """Find the token of each column: the `tokens` of :func:`match_columns`, int32 `(n_vars,)`."""
    return match_columns(var, vocabulary, reading).tokens


def check_unique(names: pd.Index, where: str = "adata") -> None:
    """Refuse genes that bear the name of another.

    Parameters
    ----------
    names
        Of the genes.
    where
        What the data are called in messages.

    Raises
    ------
    ValueError
        If there are any.
    """
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
    """Refuse names under which too few counts are known, and report how the genes were matched.

    Parameters
    ----------
    matched
        What :func:`match_columns` found of n genes.
    vocabulary
        What they were matched with.
    counts_per_gene
        Sum of the counts of each gene over all cells (count scale, not logarithms), shape (n,).
    reading
        What is read: `duplicates`: "sum" lets several names of one gene pass (whoever reads the counts sums them),
        "error" refuses them.
    two_species
        What :func:`scdiva.data.columns.about_two_species` says: the reason why many counts are unknown.
    obs_names, n_obs
        Names and number of the cells: whether the genes are in the rows is told by them.

    Returns
    -------
    Plain numbers and strings: `n_genes`, `n_mapped`, `share_genes`, `share_counts` (of all counts, those on mapped
    genes), `n_duplicates` (names beyond the first of their gene), `vocabulary` (fingerprint) and `how`, a dict with the
    number of names found as "ensembl", "symbol", "previous", "alias", "ortholog" and "unknown".

    Raises
    ------
    ValueError
        If less than half of the counts fall on known genes; if there are no genes, no counts, or as many counts as
        genes; if `duplicates="error"` and two names mean one gene.

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
            f"orthologs, with {share:.0%} of the counts. The model has learned from human cells alone."
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
    """Raise ValueError if most of the names of the cells are those of genes."""
    some = [
        str(obs_names[int(row)]) for row in np.unique(np.linspace(0, n_obs - 1, min(n_obs, _LOOKED_AT)).astype(int))
    ]
    known = np.flatnonzero(vocabulary.match(some).tokens != UNKNOWN)
    if 2 * len(known) > len(some):
        raise ValueError(
            f"the genes are in the rows: {len(known)} of {len(some)} adata.obs_names are genes, such as "
            f"{some[known[0]]!r}, and adata.var_names, such as {names[0]!r}, are not. Exchange rows and columns: "
            "adata = adata.T.copy()"
        )


def _refuse_or_warn(
    matched: Matched, counts: NDArray[np.float64], share: float, vocabulary: Vocabulary, reading: InputOptions
) -> None:
    """Say why many counts are unknown: as an error below half of them, as a warning otherwise."""
    names, mapped = matched.names, matched.tokens != UNKNOWN
    of_human = vocabulary.species == "human" and not isinstance(reading.species, dict)
    of_human &= reading.species != "mouse" and not (matched.how == "ortholog").any()
    heaviest = np.argsort(-counts, kind="stable")
    first = [names[i] for i in heaviest if not mapped[i]][:_N_SHOWN]
    found = (
        f"only {share:.1%} of the counts fall on known genes ({int(mapped.sum())} of {len(names)} names; unknown with "
        f"most counts: {', '.join(map(repr, first))})"
    )
    if share >= ERROR_SHARE:
        mouse = looks_like_mouse(name for name, known in zip(names, mapped, strict=True) if not known)
        column = "var_names" if reading.gene_ids is None else f"var[{reading.gene_ids!r}]"
        drop = f"adata = adata[:, scdiva.tokenizer.load_vocabulary().match(adata.{column}, 'human').tokens >= 0].copy()"
        warn(
            f"{found}: results rest on that part of the data."
            + (f" The unknown genes are those of a mouse. Keep the human ones: {drop}." if mouse and of_human else "")
            + _about_spikes(names, counts)
        )
        return
    if isinstance(reading.species, dict):
        raise ValueError(f"{found}: the table given as species knows too few of the genes, or gives names not human")
    if reading.species is not None and looks_like_mouse(names) != (reading.species == "mouse"):
        raise ValueError(f"{found}: species={reading.species!r}, but by their names they are not. Leave species out")
    if looks_like_mouse(names):
        raise ValueError(advice(names, first))
    raise ValueError(f"{found}. {_about_spikes(names, counts).strip() or advice(names)}")


def _about_spikes(names: Sequence[str], counts: NDArray[np.float64]) -> str:
    """Say what to do about spike-ins, if they hold more than a twentieth of the counts."""
    spikes = np.array([name.startswith("ERCC-") for name in names])
    if counts[spikes].sum() <= 0.05 * counts.sum():
        return ""
    return " ERCC names are spike-ins; leave them out: adata[:, ~adata.var_names.str.startswith('ERCC-')].copy()"


def advice(names: Sequence[str], first: Sequence[str] = ()) -> str:
    """Say what to do about a name list that is no list of human genes.

    Parameters
    ----------
    names
        All of them.
    first
        Some to show of mouse genes; none takes the first of all.
    """
    if looks_like_mouse(names):
        return (
            f"these are mouse (or rat) genes, such as {', '.join(map(repr, first or names[:_N_SHOWN]))}; the "
            "vocabulary is human, and too few have a human ortholog that it holds (scdiva.tokenizer.human_orthologs): "
            f"{_SPECIES}, or a column of adata.var with human symbols as gene_ids="
        )
    prefixes = [found[1] for name in names if (found := GENOME.fullmatch(name))]
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
    said = next(said for like, said in _ADVICE if sum(re.match(like, name) is not None for name in names) > half)
    stem, n = Counter(re.sub(r"\d+$", "", name) for name in names).most_common(1)[0]
    if said == _ADVICE[-1][1] and stem and n > half:
        return (
            f"The names are numbers behind {stem!r}, not gene names: pass another column of adata.var, of symbols or "
            "Ensembl ids, as gene_ids=, or set var_names"
        )
    return said


def _about_duplicates(names: Sequence[str], tokens: NDArray[np.int32], vocabulary: Vocabulary, n_repeats: int) -> str:
    """Name the first genes that several names mean."""
    genes = pd.DataFrame({"name": names, "token": tokens})[tokens != UNKNOWN]
    twice = genes[genes.duplicated("token", keep=False)].groupby("token", sort=False)["name"].agg(list)[:_N_SHOWN]
    pairs = [
        f"{' and '.join(map(repr, of))} ({vocabulary.symbols[int(np.searchsorted(vocabulary.tokens, token))]})"
        for token, of in twice.items()
    ]
    return (
        f"{n_repeats} names mean a gene that another name means already: {', '.join(pairs)}. Pass "
        'duplicates="sum" to sum their counts, or remove columns'
    )


def or_in_raw(adata: AnnData, name: str, use_raw: bool) -> str:
    """Say, as the end of a sentence, that `adata.raw` holds a gene that `adata` lacks; nothing if it does not."""
    there = not use_raw and adata.raw is not None and name in adata.raw.var_names and name not in adata.var_names
    return "; adata.raw has it: pass use_raw=True" if there else ""


def tokens_of_var(adata: AnnData, tokens: NDArray[np.int32], use_raw: bool) -> NDArray[np.int32]:
    """Find the tokens of the genes of `adata`, where those of `adata.raw` may have been read in their place.

    Parameters
    ----------
    adata
        The data; `raw` may hold more genes, in another order, and is matched by name.
    tokens
        int32, token of each gene that was read.
    use_raw
        Whether these are the genes of `adata.raw`.

    Returns
    -------
    int32 `(n_vars,)`, -1 where the gene was not read, or is not known.

    Raises
    ------
    ValueError
        If genes of `adata.raw` bear one name.
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


def columns_of(tokens: NDArray[np.int32], counts: NDArray[np.float64]) -> NDArray[np.int64]:
    """Give the column of each token: of several that name one gene, that with most counts.

    Parameters
    ----------
    tokens
        `(n_vars,)`, token of each column; negative: unknown.
    counts
        `(n_vars,)`, counts of each column over all cells.

    Returns
    -------
    int64 `(largest token + 1,)`; -1 for tokens that no column has.
    """
    found = np.full(int(tokens.max(initial=-1)) + 1, -1, dtype=np.int64)
    order = np.argsort(counts, kind="stable")
    order = order[tokens[order] >= 0]
    found[tokens[order]] = order  # the last written is the busiest
    return found
