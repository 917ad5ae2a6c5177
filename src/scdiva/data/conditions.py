"""What labels of perturbed cells name: parts of combinations, the control, guides of genes (`KLF1g1`, `sgKLF1-1`)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
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
_MANY = 10
"""Control labels that a message lists; more are described by a pattern."""


_FILLERS = (
    r"(?:[-_.:# ]?(?:controls?|ctrl|for|human|mouse|guides?|sequence|[sc]?grna|s[hi]rna|rna))*"
    r"[-_.:# ]?(?:\d*|(?<=[-_.:# ])[a-z])(?:[-_ ]?\([^()\d]*\))?"
)
_CONTROL_LIKE = re.compile(
    r"(?:\d+x[-_ ])?(?:ntc?|ctrls?|ctl|controls?|unperturbed|(?:s[hi])?scr(?:am(?:bled?)?)?|inert|no[-_ ]?site|"
    r"no[-_ ]?(?:guide|[sc]?grna)s?|non?[-_ ]?(?:target(?:ing|ed)?|perturbed|cutting|specific)|"
    r"neg(?:ative)?[-_ ]?(?:ctrl|control)s?|neg[-_ ]?con|neg(?:ative)?(?=[-_ ]\d)|"
    r"s[gih][-_ ]?nc|nc(?=[-_ ]\d{1,2}(?!\d))|"
    r"safe[-_ ]?(?:target(?:ing)?|harbou?r|cutting)|(?:one[-_ ]|chr[\dxy]+[-_ ])?intergenic(?:[-_ ]site)?)" + _FILLERS,
    flags=re.IGNORECASE,
)
"""Labels of negative controls, with a guide's number or letter: `NT1`, `NTC_B`, `non-targeting_00013`,
`INTERGENIC216151`."""
_GENES_TOO = frozenset(
    ["NT3", "NT4", "NT5", "CTL1", "CTL2", "CTL3", "CTL4", "CTL5", "NTC31", "NTC90", "SCR2", "SCR3", "SCR10", "SCR59",
     "SCRG-1"]
)  # fmt: skip
"""Of these, old and second names of genes (NT3 is neurotrophin 3)."""
_AMOUNT = r"(?:[-_ ]?\d[\d.]*[-_ ]?(?:%|h|hrs?|hours?|min|d|days?|[nuµm]?m|[nuµm]g|x))*"
_MAYBE_CONTROL = re.compile(
    r"(?:aavs1|rosa26|lacz|e?gfp|bfp|mcherry|tdtomato|luc(?:iferase)?|mock|dmso|pbs|saline|vehicle|isotype|random|"
    r"(?:un|non?[-_ ]?)(?:treated|stim(?:ulated)?|transduced|transfected|infected|edited)|neg(?:ative)?|nc(?!rna|\d\d)|"
    r"wt|wild[-_ ]?type|ev|empty(?:[-_ ]?vector)?)" + _FILLERS + _AMOUNT,
    flags=re.IGNORECASE,
)
"""Labels that are controls in many screens, and a condition like any other in some, with a dose or time."""


@dataclass(frozen=True)
class Naming:
    """How labels name perturbations.

    Attributes
    ----------
    control
        Labels of the control cells.
    separator
        Text between the parts of a combination; empty: there are no combinations.
    whole
        Names that contain the separator and are one part all the same, such as the gene HLA-DRA with `"-"`.
    """

    control: tuple[str, ...] = ("control",)
    separator: str = "+"
    whole: frozenset[str] = frozenset()

    @classmethod
    def of(cls, control: Iterable[str] | str, separator: str, whole: Iterable[str] = ()) -> Naming:
        """Make it of one control label or several, in any collection; those of a set are sorted.

        Raises
        ------
        ValueError
            If `control` names no label, or one twice.
        """
        one = isinstance(control, str | bytes) or not isinstance(control, Iterable)
        given: Any = [control] if one else control
        labels = [_as_text(label) for label in (np.ravel(given) if hasattr(given, "dtype") else given)]
        labels = sorted(labels) if isinstance(control, Set) else labels
        if not labels:
            raise ValueError("control names no label: pass that of the unperturbed cells, or several in a list.")
        refuse_twice(labels, "control")
        return cls(tuple(labels), separator, frozenset(map(str, whole)))

    def split(self, label: str) -> list[str]:
        """Split a label at its separators; control labels and gene names that contain the separator are kept."""
        if label in self.control or not self.separator:
            return [label]
        pieces, parts, start = label.split(self.separator), [], 0
        while start < len(pieces):
            for stop in range(len(pieces), start, -1):
                part = self.separator.join(pieces[start:stop]).strip()
                if stop == start + 1 or part in self.whole or part in self.control:
                    break
            parts.append(part)
            start = stop
        return parts

    def parts(self, label: str) -> tuple[str, ...]:
        """Give the parts of a perturbation in the order of their names, none for the control.

        `"B+A"` is `"A+B"`; a part that is a control, as in `"A+control"`, is left out, and one that is named twice
        counts once.

        Raises
        ------
        ValueError
            If a part is empty.
        """
        parts = self.split(label)
        if not all(parts):
            raise ValueError(
                f"{label!r} has an empty part. If {self.separator!r} does not join the parts of combinations here, "
                "pass another separator."
            )
        return tuple(sorted(set(parts) - set(self.control)))

    def knowing(self, labels: Iterable[str], known: Known, columns: Collection[str] = ()) -> Naming:
        """Find the names within labels that contain the separator and are one part.

        Parameters
        ----------
        labels
            Of perturbations.
        known
            Which names are genes.
        columns
            Names of the data's genes, which count too unless they read as guides or combinations of known genes.
        """
        if not self.separator:
            return self
        spans = {span for label in labels for span in _spans(str(label), self.separator)}
        whole = known(spans) if spans else set()
        # "NTC_B" is one label, and "control_B" a gene B with the control
        with_control = {
            span for span in spans if span[-1].isalpha() and span[: -1 - len(self.separator)] in self.control
        }
        whole |= {span for span in spans - with_control if is_control_like(span)}
        for span in spans.intersection(columns) - whole:
            pieces = {piece.strip() for piece in span.split(self.separator)}
            if not known(without_affixes(span)) and known(pieces) != pieces:
                whole.add(span)
        return replace(self, whole=self.whole | whole)


def _as_text(label: object) -> str:
    return label.decode() if isinstance(label, bytes) else str(label)


def _spans(label: str, separator: str) -> Iterator[str]:
    """Give what two or more neighbouring pieces of a label are together."""
    pieces = label.split(separator)
    for start, stop in itertools.combinations(range(len(pieces) + 1), 2):
        if stop > start + 1:
            yield separator.join(pieces[start:stop]).strip()


def is_control_like(label: str) -> bool:
    """Whether a label is one by which screens name their negative controls, with or without what guides add."""
    return any(_CONTROL_LIKE.fullmatch(form) for form in (label, *without_affixes(label)))


def _is_of_controls(label: str) -> bool:
    """Whether a label is that of a control, or names several at once (`NT/NT`)."""
    pieces = re.split(r"[/|,;&+_]", label)
    return is_control_like(label) or (len(pieces) > 1 and all(map(_CONTROL_LIKE.fullmatch, pieces)))


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
    naming
        How labels were read.
    guides
        Of labels that name guides, what they are with genes instead.
    """

    parts: tuple[tuple[str, ...], ...]
    labels: tuple[str, ...]
    code: NDArray[np.int64]
    naming: Naming
    guides: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_control(self) -> NDArray[np.bool_]:
        """Which cells are controls."""
        return np.equal(self.code, 0)

    @property
    def notes(self) -> dict[str, Any]:
        """What is noted of how labels were read, as h5ad holds it: `guides` and `whole`, where there are any."""
        columns = {
            "label": np.array(list(self.guides), dtype=object),
            "gene": np.array(list(self.guides.values()), dtype=object),
        }
        return ({"guides": columns} if self.guides else {}) | whole_names(self.parts, self.naming.separator)


def whole_names(parts: Iterable[Iterable[str]], separator: str) -> dict[str, Any]:
    """Give the `whole` names among parts as they are noted; nothing where there are none."""
    names = sorted({name for these in parts for name in these if separator and separator in name})
    return {"whole": np.array(names, dtype=object)} if names else {}


def perturbations(
    adata: AnnData,
    perturbation_key: str,
    naming: Naming,
    guides: Callable[[list[str]], Mapping[str, str]] | None = None,
    *,
    where: str = "adata",
) -> Perturbations:
    """Read the perturbation of each cell, as labels were read when a model was fitted.

    Parameters
    ----------
    adata
        The cells.
    perturbation_key
        A column of `adata.obs`.
    naming
        How labels are read, see :func:`naming_as_noted`.
    guides
        Given the labels that occur, says of those that name guides what they are with genes instead
        (:func:`scdiva.data.conditions.guides_as_noted`).
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
    labels = read_labels(adata, perturbation_key, where=where, kind="perturbation", meant=naming.control)
    genes = {} if guides is None else guides(np.unique(labels).tolist())
    return _numbered(labels, naming, genes, f"{where}.obs[{perturbation_key!r}]", as_noted=True)


def _numbered(
    labels: NDArray[np.str_], naming: Naming, genes: Mapping[str, str], column: str, *, as_noted: bool
) -> Perturbations:
    """Make numbers of the labels of cells."""
    names, number = np.unique(labels, return_inverse=True)
    names, again = np.unique([genes.get(name, name) for name in names.tolist()], return_inverse=True)
    split = [naming.parts(str(name)) for name in names]
    if () not in split:
        raise ValueError(_without_controls(names.tolist(), naming, column, as_noted=as_noted))
    known = sorted(set(split), key=lambda parts: (len(parts) > 1, parts) if parts else (False, ()))
    code = {parts: i for i, parts in enumerate(known)}
    called = {parts: str(name) for parts, name in zip(reversed(split), reversed(names), strict=True)}
    chosen = tuple(called[parts] for parts in known)
    codes = np.array([code[parts] for parts in split], dtype=np.int64)
    return Perturbations(tuple(known), chosen, codes[again[number]], naming, genes)


def _without_controls(names: list[str], naming: Naming, column: str, *, as_noted: bool) -> str:
    """Say that no cell is a control, and which labels are perhaps those of controls."""
    where = column.partition(".obs[")[0]
    control = naming.control[0] if len(naming.control) == 1 else list(naming.control)
    likely = [name for name in names if is_control_like(name)] or nearest(naming.control[0], names, n=1)
    shown = ", ".join(map(repr, names[:10])) + (", ..." if len(names) > 10 else "")
    message = f"no cell of {where} is a control: {column} never is {control!r}; it holds {shown}."
    if as_noted:
        first = repr(likely[0]) if likely else "..."
        return (
            f"{message} The model was fitted with that label of the unperturbed cells: rename theirs, {column} = "
            f"{column}.astype(str).replace({first}, {naming.control[0]!r})."
        )
    return (
        f"{message} Name the label of the unperturbed cells with control="
        f"{f', perhaps {_controls(likely, column)}' if likely else ''}."
    )


def _controls(labels: Sequence[str], column: str) -> str:
    """Write the argument that names control labels; of many by the pattern that they have in common."""
    if len(labels) <= _MANY:
        return f"control={labels[0]!r}" if len(labels) == 1 else f"control={list(labels)!r}"
    return f"control={column}[{column}.astype(str).str.fullmatch({_labels(labels)})].unique().tolist()"


def _labels(labels: Sequence[str]) -> str:
    """Write labels, many as a pattern of whole labels."""
    if len(labels) <= _MANY:
        return repr(list(labels))
    kinds = dict.fromkeys(re.sub(r"\d+", r"\\d+", re.escape(label)) for label in labels)
    return f'r"^(?:{"|".join(kinds)})$"'


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
        return {name for name, (_, how) in _genes_of(names, vocabulary, species).items() if how in meant}

    return known


def _genes_of(names: Iterable[str], vocabulary: Vocabulary, species: Species) -> dict[str, tuple[int, str]]:
    """Give the token of each name that is a gene, and how it is known."""
    found: dict[str, tuple[int, str]] = {}
    # "KLF1-1" in a list with "KLF1" would be taken for KLF1 again, and is to be told from it here
    for _, part in itertools.groupby(sorted(set(names), key=_numbers_behind), key=_numbers_behind):
        listed = list(part)
        matched = zip(listed, *match_perturbed(listed, vocabulary, species), strict=True)
        found |= {name: (int(token), str(how)) for name, token, how in matched if token != UNKNOWN}
    return found


def same_genes(
    names: Iterable[str], measured: Collection[str], vocabulary: Vocabulary, species: Species, where: str
) -> dict[str, str]:
    """Find other names of the genes that were measured: an alias, an Ensembl id, the symbol of another species.

    Parameters
    ----------
    names
        Genes and labels.
    measured
        Those that were measured.
    vocabulary, species
        Genes that are known, and whose they are, see :func:`species_of`.
    where
        Where the names stand, for messages.

    Returns
    -------
    Of each name that was not measured as it is written, what the gene is called among those that were; of a gene that
    was not measured, the first of its names.

    Raises
    ------
    ValueError
        If several of those that were measured are this gene.
    """
    genes = _genes_of({*names, *measured}, vocabulary, species)
    called: dict[int, list[str]] = {}
    for name in sorted(set(measured) & genes.keys()):
        called.setdefault(genes[name][0], []).append(name)
    found = {}
    for name in sorted(set(names).difference(measured) & genes.keys()):
        first, *others = called.setdefault(genes[name][0], [name])
        if others:
            raise ValueError(
                f"{where} holds {name!r}, which is the gene of {1 + len(others)} labels that were measured, {first!r} "
                f"and {others[0]!r}: name one of these."
            )
        if first != name:
            found[name] = first
    return found


def _refuse_two_names(
    labels: Mapping[str, str],
    guides: Guides,
    naming: Naming,
    vocabulary: Vocabulary,
    species: Species,
    key: str,
) -> None:
    """Refuse parts that are names of one gene, unless `guides` keeps them; `labels` has each as it is read."""
    kept = {guide for guide, gene in guides.items() if guide == gene} if isinstance(guides, Mapping) else set()
    parts = {part for label in labels.values() for part in naming.parts(label)} - kept
    genes = _genes_of(parts, vocabulary, species)
    names: dict[int, list[str]] = {}
    for name in sorted(genes, key=lambda name: (genes[name][1] != "symbol", name)):
        names.setdefault(genes[name][0], []).append(name)
    several = [of for of in names.values() if len(of) > 1]
    if not several:
        return
    first = {name: of[0] for of in several for name in of[1:]}
    if guides is None:
        call = f"Pass guides={first!r}"
    else:
        renamed = {
            held: naming.separator.join(first.get(part, part) for part in naming.split(label))
            for held, label in labels.items()
            if not first.keys().isdisjoint(naming.split(label))
        }
        call = f"Write adata.obs[{key!r}] = adata.obs[{key!r}].astype(str).replace({renamed!r})"
    other = several[0][1]
    raise ValueError(
        f"{len(several)} genes have more than one name in adata.obs[{key!r}], the first is both {several[0][0]!r} and "
        f"{other!r}, and would be two perturbations. {call} to make them one; "
        f"guides={{{other!r}: {other!r}}} keeps a label as a perturbation of its own, guides={{}} keeps all labels."
    )


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


def genes_of_guides(labels: Iterable[str], known: Known, naming: Naming) -> dict[str, str]:
    """Find the labels that are guides of known genes, or of a control.

    Parameters
    ----------
    labels
        Of perturbations.
    known
        Which names are genes.
    naming
        How labels are read.

    Returns
    -------
    Of each such label what it is with genes instead of guides. A label that is a gene, or whose parts are, is none.
    """
    every = sorted({str(label) for label in labels}.difference(naming.control))
    naming = naming.knowing([form for label in every for form in (label, *without_affixes(label))], known)
    forms = {name: without_affixes(name) for label in every for name in {label, *naming.split(label)}}
    genes = set(naming.control) | known(
        part for name, shorter in forms.items() for form in (name, *shorter) for part in naming.split(form) if part
    )

    def named(name: str) -> str | None:
        return next((form for form in forms[name] if genes.issuperset(naming.split(form))), None)

    found = {}
    for label in every:
        parts = naming.split(label)
        if genes.issuperset(parts):
            continue
        gene = named(label)
        if gene is None and len(parts) > 1 and all(parts):
            # where the separator is also what stands before a guide's number, that has become a part
            real = [part if part in genes else named(part) or part for part in parts if not part.isdigit()]
            gene = naming.separator.join(real) if real and real != parts else None
        if gene not in (None, label):
            found[label] = str(gene)
    return found


def read_guides(
    labels: Iterable[str], guides: Guides, known: Known, naming: Naming, *, key: str, fitted: bool = False
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
    naming
        How labels are read.
    key
        Column of the labels.
    fitted
        Whether a model was fitted with this control, so that no other can be named.

    Returns
    -------
    Of labels that name guides, what they are with genes instead.

    Raises
    ------
    ValueError
        If labels look like controls and are not named as such; if most labels are guides of known genes, or
        combinations with another separator, or if controls are, and `guides` does not declare it; if no label holds any
        of the guides that are given, or if `guides` is no mapping.

    Warns
    -----
    UserWarning
        If a few are.
    """
    every = sorted({str(label) for label in labels})
    automatic = isinstance(guides, str) or not isinstance(guides, Mapping | None)
    if automatic and guides != "auto":
        raise ValueError(f"guides must be 'auto', a mapping of guides to genes, or None; got {guides!r}.")
    given = {} if not isinstance(guides, Mapping) else {str(guide): str(gene) for guide, gene in guides.items()}
    found = genes_of_guides(every, known, naming) if automatic else {}
    for label in every if given else ():
        parts = naming.split(label)
        gene = given.get(label) or naming.separator.join(given.get(part, part) for part in parts)
        if label in given or any(part in given for part in parts):
            naming.parts(gene)  # refuses what is empty
            found[label] = gene
    if given and not found:
        raise ValueError(
            f"none of {len(given)} guides (first: {next(iter(given))!r}) is a label of adata.obs[{key!r}], which holds "
            f"{', '.join(map(repr, every[:_SHOWN]))}{', ...' * (len(every) > _SHOWN)}."
        )
    if automatic or guides is None or given:
        _check_controls([found.get(label, label) for label in every], given, known, naming, key, fitted=fitted)
    if not automatic and (guides is None or given):
        rest = [label for label in every if label not in found and label not in naming.control]
        unsaid = genes_of_guides(rest, known, naming)
        if unsaid:
            shown = [f"{label!r}: {gene!r}" for label, gene in list(unsaid.items())[:_SHOWN]]
            mapping = ", ".join(["**guides"] * bool(found) + shown + ["..."] * (len(unsaid) > _SHOWN))
            message = (
                f"{len(unsaid)} of {len(rest)} perturbations in adata.obs[{key!r}] are no genes as they are written, "
                "but are once a guide's number or prefix is taken off, or in capitals. Pass guides='auto' to take them "
                f"all so, or guides={{{mapping}}} to name the genes yourself; guides={{}} leaves labels as they are, "
                "each a perturbation of its own."
            )
            no_control = not set(naming.control) & set(every) and bool(set(naming.control) & set(unsaid.values()))
            _refuse_or_warn(message, unsaid, rest, refuse=no_control)
        elif naming.separator:
            _check_separator(rest, known, key, naming)
    return found


def _check_controls(
    labels: Sequence[str], given: Mapping[str, str], known: Known, naming: Naming, key: str, *, fitted: bool
) -> None:
    """Refuse labels of negative controls that are not named as such, and warn of labels that may be such."""
    naming = naming.knowing(labels, known)
    if () not in (split := [naming.parts(label) for label in labels]):
        return  # there is no control at all, which is refused
    names = sorted({part for parts in split for part in parts} - given.keys() - set(given.values()))
    forms = {name: [name, *without_affixes(name)] for name in names}
    genes = known(form for of in forms.values() for form in of)
    too = genes | _GENES_TOO  # CTRL is a human gene, and NT5 was the name of one
    numbered = {re.sub(r"\d+$", "", one) for one in naming.control}  # NT3 beside NT1 is no gene
    too -= {name for name in _GENES_TOO - genes if re.sub(r"\d+$", "", name) in numbered}
    certain = [name for name in names if name not in too and _is_of_controls(name)]
    maybe = [
        name
        for name in names
        if (_CONTROL_LIKE.fullmatch(name) if name in too else any(map(_MAYBE_CONTROL.fullmatch, {*forms[name]} - too)))
    ]
    listed = certain + [name for name in maybe if name not in certain]
    if not listed:
        return
    column = f"adata.obs[{key!r}]"
    if fitted:  # whose control can't be named anew
        call = f"rename them, {column} = {column}.astype(str).replace({_labels(listed)}, {naming.control[0]!r}"
        call += ", regex=True)" if len(listed) > _MANY else ")"
    else:
        call = f"pass {_controls([*naming.control, *listed], column)}"
    message = (
        f"{len(listed)} of {len(names)} perturbations in {column} {'look like' if certain else 'may be'} negative "
        f"controls (first: {listed[0]!r}). If they are, {call}; "
        f"guides={{{listed[0]!r}: {listed[0]!r}}} keeps a label as a perturbation, guides={{}} keeps all labels."
    )
    if certain:
        raise ValueError(message)
    warn(message)


def read_perturbations(
    adata: AnnData,
    perturbation_key: str,
    control: Sequence[str] | str,
    separator: str,
    guides: Guides,
    vocabulary: Vocabulary,
    species: Species = None,
    *,
    fitted: bool = False,
) -> Perturbations:
    """Read the perturbation of each cell, where labels may name guides.

    Parameters
    ----------
    adata, perturbation_key
        As for :func:`scdiva.data.conditions.perturbations`, which says what is refused.
    control, separator
        As for :class:`Naming`.
    guides, vocabulary
        As for :func:`read_guides`; genes of the vocabulary are known.
    species
        Whose genes perturbations are, see :func:`species_of`.
    fitted
        Whether a model was fitted with this control, and only the control cells are wanted.

    Raises
    ------
    ValueError
        If labels are names of one gene, and `guides` does not say that they are kept apart.

    Warns
    -----
    UserWarning
        If a label can be read as one gene and as a combination.
    """
    naming = Naming.of(control, separator)
    species = species_of(list(adata.var_names), vocabulary, species)
    known = genes_among(vocabulary, species)
    labels = read_labels(adata, perturbation_key, kind="perturbation", meant=naming.control)
    names, columns = np.unique(labels).tolist(), frozenset(map(str, adata.var_names))
    naming = naming.knowing(names, known, columns)
    genes = read_guides(names, guides, known, naming, key=perturbation_key, fitted=fitted)
    naming = naming.knowing(genes.values(), known, columns)
    column = f"adata.obs[{perturbation_key!r}]"
    lacking = [one for one in naming.control if not any(one in naming.split(genes.get(name, name)) for name in names)]
    if len(naming.control) > len(lacking) > 0:
        raise ValueError(
            f"control holds {lacking[0]!r}, which {column} never is: leave it out of control={list(naming.control)!r}"
            + (f", or write {near[0]!r}." if (near := nearest(lacking[0], names, n=1)) else ".")
        )
    read = {name: genes.get(name, name) for name in names}
    warn_of_ambiguous(read.values(), known, naming, column)
    if not fitted and (guides is None or guides):
        _refuse_two_names(read, guides, naming, vocabulary, species, perturbation_key)
    return _numbered(labels, naming, genes, column, as_noted=False)


def warn_of_ambiguous(labels: Iterable[str], known: Known, naming: Naming, where: str) -> None:
    """Warn of names that are a gene, and several genes if split at the separator (INS-IGF2 with `"-"`)."""
    parts = {part for label in labels for part in naming.split(label)}
    pieces = {part: part.split(naming.separator) for part in parts & naming.whole - set(naming.control)}
    genes = known(piece for of in pieces.values() for piece in of)
    if both := sorted(part for part, of in pieces.items() if genes.issuperset(of)):
        swapped = naming.separator.join(reversed(pieces[both[0]]))
        warn(
            f"{len(both)} names in {where} are a gene, and also several genes with {naming.separator!r} between them "
            f"(first: {both[0]!r}). They are read as one gene; a combination can be written in another order, "
            f"{swapped!r}."
        )


def _check_separator(rest: list[str], known: Known, key: str, naming: Naming) -> None:
    """Refuse, or warn of, labels that are combinations of genes with another separator."""
    for joint in _JOINTS:
        labels = [label for label in rest if joint in label.strip(joint) and naming.separator not in label]
        other = Naming(naming.control, joint).knowing(labels, known)
        read = genes_of_guides(labels, known, other)
        split = {label: other.split(read.get(label, label)) for label in labels}
        genes = set(naming.control) | known(part for parts in split.values() for part in parts)
        joined = [label for label, parts in split.items() if len(parts) > 1 and genes.issuperset(parts)]
        if joined:
            message = (
                f"{len(joined)} of {len(rest)} perturbations in adata.obs[{key!r}] are several genes with {joint!r} "
                f"between them, such as {joined[0]!r}, and would be taken for one: pass separator={joint!r}, or "
                "guides={} to leave labels as they are."
            )
            return _refuse_or_warn(message, joined, rest)
    return None


def naming_as_noted(notes: Mapping[str, Any]) -> Naming:
    """Read labels as they were read before, by what was noted then."""
    return Naming.of(notes["control"], str(notes["separator"]), np.asarray(notes.get("whole", ()), dtype=object))


def guides_as_noted(
    notes: Mapping[str, Any], known: Iterable[str], naming: Naming
) -> Callable[[Iterable[str]], dict[str, str]]:
    """Read guides as they were read before, where they were.

    Parameters
    ----------
    notes
        What :attr:`Perturbations.notes` gave among others.
    known
        Genes of which guides that were not there before are known by their names, beside those of the control.
    naming
        How labels are read.

    Returns
    -------
    What :func:`scdiva.data.conditions.perturbations` takes.
    """
    stored = notes.get("guides", {"label": (), "gene": ()})
    before = dict(zip(map(str, stored["label"]), map(str, stored["gene"]), strict=True))
    if not before:
        return lambda labels: {}
    genes = set(known)
    return lambda labels: genes_of_guides(set(labels) - before.keys(), genes.intersection, naming) | before


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
