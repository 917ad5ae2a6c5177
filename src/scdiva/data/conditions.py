"""What labels of perturbed cells name: parts of combinations, the control, guides of genes (`KLF1g1`, `sgKLF1-1`)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from scdiva._checks import nearest, no_column, refuse_absent, warn
from scdiva._constants import UNKNOWN
from scdiva._labels import read_labels
from scdiva.data.reading import Species
from scdiva.tokenizer.names import looks_like_mouse, repeated_name
from scdiva.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

Guides = Mapping[str, str] | Literal["auto"] | None
Known = Callable[[Iterable[str]], set[str]]
"""Gives those of some names that are known."""

_AFFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        r"[-_.:# ]\d{1,2}$",  # KLF1_2, KLF1-1, KLF1.1
        r"(?i:[-_.: ]?(?:sg|sh|si|g|guide|[sc]?grna|crrna|shrna)[-_.: ]?\d{1,3})$",  # KLF1g1, KLF1_sg2, KLF1-gRNA_3
        r"(?i:^(?:sg|sh|si|g|guide|[sc]?grna|crrna|shrna)[-_.: ]?\d{0,3}[-_.: ])",  # g1-KLF1, sgRNA_KLF1
        r"^(?:sg|sh|si|g|sgRNA|gRNA)(?=[A-Z])",  # sgKLF1
        r"^\d{1,3}[-_.:# ]",  # 1_KLF1
        r"[-_.:][ACGTU]{15,}$",  # KLF1_GGCGAGGTCGCCGCCGCACG
        r"_[-+]_\d.*$",  # KLF1_+_12997982.23-P1P2
        r"[-_](?:P\d)+$",  # KLF1_P1P2
        r"_p[A-Z]{2,3}\d{2,4}$",  # KLF1_pDS258, the plasmid
        r"[-_](?i:ko|kd|oe|crispr|crispra|crispri|guide|sgrna|grna)$",  # KLF1_KO
    )
)
_JOINTS = ("+", "_", "|", ",", ";", "&", "/", ":", "-", " ")
_SHOWN = 3


@dataclass(frozen=True)
class Perturbations:
    """The labels of cells.

    Attributes
    ----------
    parts
        Parts of each perturbation, in the order of their names; none for the control, which is number 0 and always
        there. Perturbations come in the order of their parts, singles first.
    labels
        What the data call each, of several names the first in the order of the alphabet.
    code
        Number of each cell's perturbation, int64 `(n_obs,)`.
    guides
        Of labels that name guides, what they are with genes instead.
    """

    parts: tuple[tuple[str, ...], ...]
    labels: tuple[str, ...]
    code: NDArray[np.int64]
    guides: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_control(self) -> NDArray[np.bool_]:
        """Which cells are controls."""
        return np.equal(self.code, 0)


def perturbation_parts(label: str, control: str = "control", separator: str = "+") -> tuple[str, ...]:
    """Split the label of a perturbation into its parts.

    `"B+A"` is `"A+B"`; a part that is the control, as in `"A+control"`, is none; neither is one that is named twice.

    Parameters
    ----------
    label
        The label.
    control
        That of the control cells.
    separator
        What stands between the parts of a combination; empty: there are no combinations.

    Returns
    -------
    The parts in the order of their names, none for the control.

    Raises
    ------
    ValueError
        If a part is empty.
    """
    if label == control:
        return ()
    parts = _split(label, separator)
    if not all(parts):
        raise ValueError(
            f"{label!r} has an empty part. If {separator!r} does not join the parts of combinations here, pass another "
            "separator."
        )
    return tuple(sorted(set(parts) - {control}))


def _split(label: str, separator: str) -> list[str]:
    return [part.strip() for part in label.split(separator)] if separator else [label]


def perturbations(
    adata: AnnData,
    perturbation_key: str,
    control: str = "control",
    separator: str = "+",
    guides: Callable[[list[str]], Mapping[str, str]] | None = None,
    *,
    where: str = "adata",
) -> Perturbations:
    """Read the perturbation of each cell.

    Parameters
    ----------
    adata
        The cells.
    perturbation_key
        A column of `adata.obs`.
    control, separator
        See :func:`perturbation_parts`.
    guides
        Given the labels that occur, says of those that name guides what they are with genes instead
        (:func:`scdiva.data.conditions.read_guides`).
    where
        What the cells are called in messages.

    Returns
    -------
    The perturbations; labels with the same parts are one.

    Raises
    ------
    KeyError
        If there is no such column.
    ValueError
        If a label is missing or has an empty part, or no cell is a control.
    """
    labels = read_labels(adata, perturbation_key, where=where, kind="perturbation", meant=(control,))
    names, number = np.unique(labels, return_inverse=True)
    genes = {} if guides is None else guides(names.tolist())
    names, again = np.unique([genes.get(name, name) for name in names.tolist()], return_inverse=True)
    split = [perturbation_parts(str(name), control, separator) for name in names]
    if () not in split:
        shown = ", ".join(repr(str(name)) for name in names[:10])
        near = nearest(control, names, n=1)
        raise ValueError(
            f"no cell of {where} is a control: {where}.obs[{perturbation_key!r}] never is {control!r}; it holds "
            f"{shown}{', ...' if len(names) > 10 else ''}. Name the label of the unperturbed cells with control="
            + (f", perhaps control={near[0]!r}." if near else ".")
        )
    known = sorted(set(split), key=lambda parts: (len(parts) > 1, parts) if parts else (False, ()))
    code = {parts: i for i, parts in enumerate(known)}
    called = {parts: str(name) for parts, name in zip(reversed(split), reversed(names), strict=True)}
    chosen = tuple(called[parts] for parts in known)
    codes = np.array([code[parts] for parts in split], dtype=np.int64)
    return Perturbations(tuple(known), chosen, codes[again[number]], genes)


def doses(adata: AnnData, key: str, *, where: str = "adata") -> NDArray[np.float64]:
    """Read a column of doses, NaN where there is no number.

    Parameters
    ----------
    adata, key, where
        As for :func:`scdiva._labels.read_labels`.

    Raises
    ------
    KeyError
        If there is no such column.
    """
    if key not in adata.obs:
        raise no_column(f"{where}.obs", key, adata.obs.columns)
    return np.asarray(pd.to_numeric(adata.obs[key].astype(object), errors="coerce"), dtype=np.float64)


def species_of(names: Sequence[str], vocabulary: Vocabulary, species: Species) -> Species:
    """Say whose genes perturbations are: as given, or a mouse's where the columns are read as its orthologs.

    Parameters
    ----------
    names
        Genes of the data.
    vocabulary
        Genes that are known.
    species
        As in :func:`scdiva.tl.embed`.
    """
    if species is None and looks_like_mouse(names) and "ortholog" in set(vocabulary.match(names).how):
        return "mouse"
    return species


def match_perturbed(
    names: Sequence[str], vocabulary: Vocabulary, species: Species
) -> tuple[NDArray[np.int32], NDArray[np.object_]]:
    """Find tokens of perturbed genes, and how: as genes of the data's species, or as they are, as guides may name them.

    Parameters
    ----------
    names
        Perturbed genes, or labels.
    vocabulary
        Genes that are known.
    species
        Whose genes they are, see :func:`species_of`.
    """
    match = vocabulary.match(names, species)
    tokens, how = match.tokens, np.asarray(match.how, dtype=object)
    if species is not None:
        own, missing = vocabulary.match(names, vocabulary.species), tokens == UNKNOWN
        tokens, how = np.where(missing, own.tokens, tokens), np.where(missing, np.asarray(own.how, dtype=object), how)
    return tokens, how


def genes_among(vocabulary: Vocabulary, species: Species = None) -> Known:
    """Say which names are genes of a vocabulary: by symbol, previous symbol or Ensembl id, or as those of a species.

    Aliases are left out: many are short words ("B", "IFN") that are as well the rest of a label of something else.
    """
    meant = {"ensembl", "symbol", "previous"} | ({"ortholog"} if species is not None else set())

    def known(names: Iterable[str]) -> set[str]:
        found: set[str] = set()
        # "KLF1-1" in a list with "KLF1" would be taken for KLF1 again, which is what is to be found out here
        for _, part in itertools.groupby(sorted(set(names), key=_numbers_behind), key=_numbers_behind):
            listed = list(part)
            _, how = match_perturbed(listed, vocabulary, species)
            found |= {name for name, kind in zip(listed, how, strict=True) if kind in meant}
        return found

    return known


def _numbers_behind(name: str) -> int:
    shorter = repeated_name(name)
    return 0 if shorter is None else 1 + _numbers_behind(shorter)


def without_affixes(name: str) -> list[str]:
    """Name what a label may be of which affixes of guides were taken off, fewest first; each also in capitals.

    Not if it has both: "IFNb" and "TNFa" are how cytokines are written.
    """
    found, last = [name], [name]
    for _ in range(3):
        last = [shorter for one in last for affix in _AFFIXES if (shorter := affix.sub("", one)) not in ("", one)]
        found += last
    return [one for one in dict.fromkeys(form for one in found for form in _in_capitals(one)) if one != name]


def _in_capitals(name: str) -> tuple[str, ...]:
    return (name,) if any(letter.isupper() for letter in name[1:]) else (name, name.upper())


def genes_of_guides(labels: Iterable[str], known: Known, control: str, separator: str) -> dict[str, str]:
    """Find the labels that are guides of known genes, or of the control.

    Parameters
    ----------
    labels
        Of perturbations.
    known
        Which names are genes.
    control, separator
        As for :func:`scdiva.data.conditions.perturbation_parts`.

    Returns
    -------
    Of each such label what it is with genes instead of guides. A label that is a gene, or whose parts are, is none.
    """
    parts_of = partial(_split, separator=separator)
    every = sorted({str(label) for label in labels} - {control})
    forms = {name: without_affixes(name) for label in every for name in {label, *parts_of(label)}}
    genes = {control} | known(
        part for name, shorter in forms.items() for form in (name, *shorter) for part in parts_of(form) if part
    )

    def named(name: str) -> str | None:
        return next((form for form in forms[name] if genes.issuperset(parts_of(form))), None)

    found = {}
    for label in every:
        parts = parts_of(label)
        if genes.issuperset(parts):
            continue
        gene = named(label)
        if gene is None and len(parts) > 1 and all(parts):
            # where the separator is also what stands before a guide's number, that has become a part
            real = [part for part in parts if not part.isdigit()]
            gene = separator.join(part if part in genes else named(part) or part for part in real) or None
        if gene not in (None, label):
            found[label] = str(gene)
    return found


def read_guides(
    labels: Iterable[str], guides: Guides, known: Known, *, key: str, control: str, separator: str
) -> dict[str, str]:
    """Find out which labels name guides, and refuse those that are not declared.

    Parameters
    ----------
    labels
        Of the cells.
    guides
        `"auto"`; or the gene, or combination of genes, of each guide; an empty mapping: labels are as they are.
    known
        Which names are genes.
    key, control, separator
        Column of the labels, and as for :func:`scdiva.data.conditions.perturbation_parts`.

    Returns
    -------
    Of labels that name guides, what they are with genes instead.

    Raises
    ------
    ValueError
        If most labels are guides of known genes, or combinations with another separator, or if controls are, and
        `guides` does not declare it; if no label holds any of the guides that are given, or if `guides` is no mapping.

    Warns
    -----
    UserWarning
        If a few are.
    """
    every = sorted({str(label) for label in labels})
    if isinstance(guides, str) or not isinstance(guides, Mapping | None):
        if guides != "auto":
            raise ValueError(f"guides must be 'auto', a mapping of guides to genes, or None; got {guides!r}.")
        return genes_of_guides(every, known, control, separator)
    given = {str(guide): str(gene) for guide, gene in (guides or {}).items()}
    found: dict[str, str] = {}
    for label in every:
        parts = _split(label, separator)
        gene = given.get(label) or separator.join(given.get(part, part) for part in parts)
        if label in given or any(part in given for part in parts):
            perturbation_parts(gene, control, separator)  # refuses what is empty
            found[label] = gene
    if given and not found:
        raise ValueError(
            f"none of {len(given)} guides (first: {next(iter(given))!r}) is a label of adata.obs[{key!r}], which holds "
            f"{', '.join(map(repr, every[:_SHOWN]))}{', ...' * (len(every) > _SHOWN)}."
        )
    if guides is None or given:
        rest = [label for label in every if label not in found and label != control]
        unsaid = genes_of_guides(rest, known, control, separator)
        if unsaid:
            shown = [f"{label!r}: {gene!r}" for label, gene in list(unsaid.items())[:_SHOWN]]
            mapping = ", ".join(["**guides"] * bool(found) + shown + ["..."] * (len(unsaid) > _SHOWN))
            message = (
                f"{len(unsaid)} of {len(rest)} perturbations in adata.obs[{key!r}] are no genes as they are written, "
                "but are once a guide's number or prefix is taken off, or in capitals. Pass guides='auto' to take them "
                f"all so, or guides={{{mapping}}} to name the genes yourself; guides={{}} leaves labels as they are, "
                "each a perturbation of its own."
            )
            no_control = control not in every and control in unsaid.values()
            _refuse_or_warn(message, unsaid, rest, refuse=no_control)
        elif separator:
            _check_separator(rest, known, key, control, separator)
    return found


def read_perturbations(
    adata: AnnData,
    perturbation_key: str,
    control: str,
    separator: str,
    guides: Guides,
    vocabulary: Vocabulary,
    species: Species = None,
) -> Perturbations:
    """Read the perturbation of each cell, where labels may name guides.

    Parameters
    ----------
    adata, perturbation_key, control, separator
        As for :func:`scdiva.data.conditions.perturbations`, which says what is refused.
    guides, vocabulary
        As for :func:`read_guides`; genes of the vocabulary are known.
    species
        Whose genes perturbations are, see :func:`species_of`.
    """
    known = genes_among(vocabulary, species_of(list(adata.var_names), vocabulary, species))

    def genes_of(labels: list[str]) -> dict[str, str]:
        return read_guides(labels, guides, known, key=perturbation_key, control=control, separator=separator)

    return perturbations(adata, perturbation_key, control, separator, genes_of)


def _check_separator(rest: list[str], known: Known, key: str, control: str, separator: str) -> None:
    """Refuse, or warn of, labels that are combinations of genes with another separator."""
    for joint in _JOINTS:
        split = {label: label.split(joint) for label in rest if joint in label.strip(joint) and separator not in label}
        read = genes_of_guides(split, known, control, joint)
        split = {label: [part.strip() for part in read.get(label, label).split(joint)] for label in split}
        genes = {control} | known(part for parts in split.values() for part in parts)
        whole = known(split)
        joined = [label for label, p in split.items() if len(p) > 1 and genes.issuperset(p) and label not in whole]
        if joined and joint != separator:
            message = (
                f"{len(joined)} of {len(rest)} perturbations in adata.obs[{key!r}] are several genes with {joint!r} "
                f"between them, such as {joined[0]!r}, and would be taken for one: pass separator={joint!r}, or "
                "guides={} to leave labels as they are."
            )
            return _refuse_or_warn(message, joined, rest)
    return None


def stored_guides(genes: Mapping[str, str]) -> dict[str, Any]:
    """Give what is noted of labels that name guides: `guides`, as h5ad holds it; nothing where there are none."""
    columns = {"label": np.array(list(genes), dtype=object), "gene": np.array(list(genes.values()), dtype=object)}
    return {"guides": columns} if genes else {}


def guides_as_noted(
    notes: Mapping[str, Any], known: Iterable[str], control: str, separator: str
) -> Callable[[Iterable[str]], dict[str, str]]:
    """Read guides as they were read before, where they were.

    Parameters
    ----------
    notes
        What :func:`stored_guides` gave among others.
    known
        Genes of which guides that were not there before are known by their names, beside those of the control.
    control, separator
        As for :func:`scdiva.data.conditions.perturbation_parts`.

    Returns
    -------
    What :func:`scdiva.data.conditions.perturbations` takes.
    """
    stored = notes.get("guides", {"label": (), "gene": ()})
    before = dict(zip(map(str, stored["label"]), map(str, stored["gene"]), strict=True))
    if not before:
        return lambda labels: {}
    genes = set(known)
    return lambda labels: genes_of_guides(set(labels) - before.keys(), genes.intersection, control, separator) | before


def _refuse_or_warn(message: str, some: Collection[str], of: Collection[str], *, refuse: bool = False) -> None:
    """Refuse labels that as a whole were meant otherwise, else warn: one alone may be what it is by chance."""
    if refuse or (len(some) > 1 and 2 * len(some) > len(of)):
        raise ValueError(message)
    warn(message)


def listed(given: Sequence[str] | str) -> list[str]:
    """Give one name, or several, as a list."""
    return [given] if isinstance(given, str) else [str(name) for name in given]


def refuse_twice(given: Sequence[object], argument: str) -> None:
    """Refuse what is asked for twice."""
    if len(set(given)) < len(given):
        raise ValueError(f"{argument} holds {max(given, key=given.count)!r} more than once.")


def wanted_groups(groups: Sequence[str] | str | None, present: Sequence[str], lack: str) -> list[str]:
    """Name the groups that are asked for, all if None; refuse those that are not there.

    Raises
    ------
    ValueError
        If there is none, one is named twice, or some are not present; `lack` is what the message then states of them.
    """
    wanted = list(present) if groups is None else listed(groups)
    if not wanted:
        raise ValueError("groups names no group; leave it out to take all.")
    refuse_twice(wanted, "groups")
    refuse_absent(wanted, present, f"groups {lack}", f"; there are {', '.join(map(repr, present[:10]))}", ValueError)
    return wanted
