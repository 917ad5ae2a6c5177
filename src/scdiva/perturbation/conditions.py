"""Labels of perturbed cells: parts of combinations, controls, and guides that are mapped to genes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scdiva._checks import nearest, no_column, warn
from scdiva._constants import UNKNOWN
from scdiva._labels import read_labels, refuse_twice
from scdiva.data.options import Species
from scdiva.tokenizer.names import looks_like_mouse, repeated_name
from scdiva.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

Known = Callable[[Iterable[str]], set[str]]
"""Returns the names that are genes."""

_MANY = 10
"""Control labels that a message lists; more are described by a pattern."""
_CONTROL_LIKE = re.compile(
    r"(?:\d+x[-_ ])?(?:s[gi]|sh)?[-_]?"
    r"(?:ntc?|ctrls?|ctl|controls?|unperturbed|(?:s[hi])?scr(?:am(?:bled?)?)?|inert|no[-_ ]?site|"
    r"no[-_ ]?(?:guide|[sc]?grna)s?|non?[-_ ]?(?:target(?:ing|ed)?|perturbed|cutting|specific)|"
    r"neg(?:ative)?[-_ ]?(?:ctrl|control)s?|neg[-_ ]?con|neg(?:ative)?(?=[-_ ]\d)|"
    r"s[gih][-_ ]?nc|nc(?=[-_ ]\d{1,2}(?!\d))|"
    r"safe[-_ ]?(?:target(?:ing)?|harbou?r|cutting)|(?:one[-_ ]|chr[\dxy]+[-_ ])?intergenic(?:[-_ ]site)?)"
    r"(?:[-_.:# ]?(?:controls?|ctrl|for|human|mouse|guides?|sequence|[sc]?grna|s[hi]rna|rna))*"
    r"(?:[-_.:# ]?(?:\d*|(?<=[-_.:# ])[a-z])(?:[-_ ]?\([^()\d]*\))?|[-_.:][acgtu]{15,})",
    flags=re.IGNORECASE,
)
"""Labels of negative controls, with a guide's number, letter or sequence: `NT1`, `NTC_B`, `non-targeting_00013`,
`INTERGENIC216151`."""


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
        Names that contain the separator and are one part, such as the gene HLA-DRA with `"-"`.
    """

    control: tuple[str, ...] = ("control",)
    separator: str = "+"
    whole: frozenset[str] = frozenset()

    @classmethod
    def of(cls, control: Iterable[str] | str, separator: str, whole: Iterable[str] = ()) -> Naming:
        """Construct it from one control label or a collection of them; those of a set are sorted.

        Raises
        ------
        TypeError
            If `control` is an array of other than one dimension.
        ValueError
            If `control` names no label, or one twice.
        """
        if getattr(control, "ndim", 1) != 1:
            raise TypeError(
                f"control must be a label or a list of labels, got {type(control).__name__} of "
                f"{control.ndim} dimensions. Pass a list, control=['control']."  # type: ignore[union-attr]
            )
        one = isinstance(control, str | bytes) or not isinstance(control, Iterable)
        given: list[Any] = [control] if one else list(control)
        labels = [label.decode() if isinstance(label, bytes) else str(label) for label in given]
        labels = sorted(labels) if isinstance(control, Set) else labels
        if not labels:
            raise ValueError("control names no label. Pass the label of the control cells, or a list of labels.")
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
        """Parts of a perturbation, sorted and each once; none for the control.

        `"B+A"` is `"A+B"`, and `"A+control"` is `"A"`.

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
            Labels of perturbations.
        known
            Returns the names that are genes.
        columns
            Names of the dataset's genes; they count as well, unless all pieces are known genes.
        """
        if not self.separator:
            return self
        spans = set()
        for label in labels:
            pieces = str(label).split(self.separator)
            for start, stop in itertools.combinations(range(len(pieces) + 1), 2):
                if stop > start + 1:
                    spans.add(self.separator.join(pieces[start:stop]).strip())
        whole = known(spans) if spans else set()
        for span in spans - whole:
            pieces = [piece.strip() for piece in span.split(self.separator)]
            # "NTC_B" is one label, but "control_B" is gene B with the control
            of_control = is_control_like(span) and not (span[-1].isalpha() and pieces[0] in self.control)
            if of_control or (span in columns and known(pieces) != set(pieces)):
                whole.add(span)
        return replace(self, whole=self.whole | whole)


def is_control_like(label: str) -> bool:
    """Whether screens use a label for negative controls."""
    return _CONTROL_LIKE.fullmatch(label) is not None


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
        """How labels were read, in a form that h5ad can hold: `guides` and `whole`, if there are any."""
        columns = {
            "label": np.array(list(self.guides), dtype=object),
            "gene": np.array(list(self.guides.values()), dtype=object),
        }
        return ({"guides": columns} if self.guides else {}) | whole_names(self.parts, self.naming.separator)


def whole_names(parts: Iterable[Iterable[str]], separator: str) -> dict[str, Any]:
    """Note the names of parts that contain the separator, as `whole`; empty if there are none."""
    names = sorted({name for these in parts for name in these if separator and separator in name})
    return {"whole": np.array(names, dtype=object)} if names else {}


def perturbations(
    adata: AnnData, perturbation_key: str, naming: Naming, guides: Mapping[str, str], *, where: str = "adata"
) -> Perturbations:
    """Read the perturbation of each cell as labels were read when a model was fitted.

    Parameters
    ----------
    adata
        The cells.
    perturbation_key
        A column of `adata.obs`.
    naming
        How labels are read, see :func:`naming_as_noted`.
    guides
        Gene of each guide, see :func:`guides_as_noted`.
    where
        Name of the cells in messages.

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
    genes = genes_of_guides(np.unique(labels).tolist(), guides, naming)
    return _numbered(labels, naming, genes, f"{where}.obs[{perturbation_key!r}]", as_noted=True)


def _numbered(
    labels: NDArray[np.str_], naming: Naming, genes: Mapping[str, str], column: str, *, as_noted: bool
) -> Perturbations:
    """Assign a number to the perturbation of each cell."""
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
    """Message for a dataset without control cells, with the labels that may be controls."""
    control = naming.control[0] if len(naming.control) == 1 else list(naming.control)
    likely = [name for name in names if is_control_like(name)] or nearest(naming.control[0], names, n=1)
    shown = ", ".join(map(repr, names[:10])) + (", ..." if len(names) > 10 else "")
    message = (
        f"no cell of {column.partition('.obs[')[0]} is a control: {column} never is {control!r}; it holds {shown}."
    )
    if as_noted:
        first = repr(likely[0]) if likely else "..."
        return (
            f"{message} The model was fitted with that control label. Rename the controls: {column} = "
            f"{column}.astype(str).replace({first}, {naming.control[0]!r})."
        )
    call = f"control=, perhaps {_controls(likely, column)}" if likely else "control="
    return f"{message} Pass the label of the control cells with {call}."


def _controls(labels: Sequence[str], column: str) -> str:
    """Write the argument that names control labels; many are described by a pattern."""
    if len(labels) > _MANY:
        return f"control={column}[{column}.astype(str).str.fullmatch({_pattern(labels)})].unique().tolist()"
    return f"control={labels[0]!r}" if len(labels) == 1 else f"control={list(labels)!r}"


def _pattern(labels: Sequence[str]) -> str:
    """Write a regular expression of whole labels."""
    kinds = dict.fromkeys(re.sub(r"\d+", r"\\d+", re.escape(label)) for label in labels)
    return f'r"^(?:{"|".join(kinds)})$"'


def doses(adata: AnnData, key: str, *, where: str = "adata") -> NDArray[np.float64]:
    """Read a column of doses; NaN where a value is not a number.

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


def _numbers_behind(name: str) -> int:
    shorter = repeated_name(name)
    return 0 if shorter is None else 1 + _numbers_behind(shorter)


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
    labels: Mapping[str, str], kept: Collection[str], naming: Naming, vocabulary: Vocabulary, species: Species, key: str
) -> None:
    """Raise an error if two parts are names of one gene and not `kept`; `labels` maps each label to its genes."""
    parts = {part for label in labels.values() for part in naming.parts(label)}
    genes = _genes_of(parts.difference(kept), vocabulary, species)
    names: dict[int, list[str]] = {}
    for name in sorted(genes, key=lambda name: (genes[name][1] != "symbol", name)):
        names.setdefault(genes[name][0], []).append(name)
    several = [of for of in names.values() if len(of) > 1]
    if several:
        first, other = several[0][:2]
        joined = {name: of[0] for of in several for name in of[1:]}
        mapped = [label for label, gene in labels.items() if label != gene]
        for label in mapped:
            pieces = naming.split(labels[label])
            if not joined.keys().isdisjoint(pieces):
                joined[label] = naming.separator.join(joined.get(piece, piece) for piece in pieces)
        call = f"guides={{{'**guides, ' * bool(mapped)}{str(joined)[1:-1]}}}"
        raise ValueError(
            f"{len(several)} genes have more than one name in adata.obs[{key!r}], the first is both {first!r} and "
            f"{other!r}. Pass {call} to make them one perturbation; guides={{{other!r}: {other!r}}} keeps a label as a "
            "perturbation, guides={} keeps all labels."
        )


def genes_of_guides(labels: Iterable[str], guides: Mapping[str, str], naming: Naming) -> dict[str, str]:
    """Replace guides by their genes.

    Parameters
    ----------
    labels
        Labels of perturbations.
    guides
        Gene, or combination of genes, of each guide; or of a whole label.
    naming
        How labels are read.

    Returns
    -------
    The genes of each label that is, or contains, one of the guides.

    Raises
    ------
    ValueError
        If a part is empty.
    """
    found = {}
    for label in labels if guides else ():
        parts = naming.split(label)
        if label in guides or any(part in guides for part in parts):
            found[label] = guides.get(label) or naming.separator.join(guides.get(part, part) for part in parts)
            naming.parts(found[label])  # refuses empty parts
    return found


def _check_controls(
    labels: Collection[str], guides: Mapping[str, str], known: Known, naming: Naming, key: str, *, fitted: bool
) -> None:
    """Raise an error for labels of negative controls that `control` lacks; warn if such a label is a gene symbol."""
    parts = {naming.parts(label) for label in labels}
    names = sorted({part for of in parts for part in of} - {*guides, *guides.values()})
    pairs = re.compile(r"[/|,;&+_]")  # "NT/NT"
    listed = [name for name in names if is_control_like(name) or all(map(is_control_like, pairs.split(name)))]
    if () not in parts or not listed:  # without any control, another error follows
        return
    column, genes = f"adata.obs[{key!r}]", known(listed)
    if fitted:  # the control of a fitted model is fixed
        many = len(listed) > _MANY
        call = f"rename them: {column} = {column}.astype(str).replace({_pattern(listed) if many else listed}, "
        call += f"{naming.control[0]!r}{', regex=True' * many})"
    else:
        call = f"pass {_controls([*naming.control, *listed], column)}"
    message = (
        f"{len(listed)} of {len(names)} perturbations in {column} look like negative controls (first: {listed[0]!r}). "
        f"If they are, {call}; guides={{{listed[0]!r}: {listed[0]!r}}} keeps a label as a perturbation, guides={{}} "
        "keeps all labels."
    )
    if len(genes) < len(listed):
        raise ValueError(message)
    warn(message)


def read_perturbations(
    adata: AnnData,
    perturbation_key: str,
    control: Sequence[str] | str,
    separator: str,
    guides: Mapping[str, str] | None,
    vocabulary: Vocabulary,
    species: Species = None,
    *,
    fitted: bool = False,
) -> Perturbations:
    """Read the perturbation of each cell of a screen.

    Parameters
    ----------
    adata, perturbation_key
        As for :func:`scdiva.perturbation.conditions.perturbations`, which states what raises an error.
    control, separator
        As for :class:`Naming`.
    guides
        Gene, or combination of genes, of each guide. A label that is mapped to itself is kept as it is, and all labels
        are with an empty mapping.
    vocabulary
        The known genes.
    species
        Species of the perturbed genes, see :func:`species_of`.
    fitted
        Whether a model was fitted with this control.

    Raises
    ------
    TypeError
        If `guides` is not a mapping.
    ValueError
        If a label of `control` or all of `guides` do not occur, labels look like negative controls that `control`
        lacks, or two labels are names of one gene.

    Warns
    -----
    UserWarning
        If a gene symbol looks like a negative control.
    """
    if not isinstance(guides, Mapping | None):
        raise TypeError(f"guides must map guides to genes, such as {{'KLF1g1': 'KLF1'}}, or be None; got {guides!r}.")
    naming = Naming.of(control, separator)
    species = species_of(list(adata.var_names), vocabulary, species)
    known, column = genes_among(vocabulary, species), f"adata.obs[{perturbation_key!r}]"
    labels = read_labels(adata, perturbation_key, kind="perturbation", meant=naming.control)
    names, columns = np.unique(labels).tolist(), frozenset(map(str, adata.var_names))
    naming = naming.knowing(names, known, columns)
    mapped = {str(guide): str(gene) for guide, gene in (guides or {}).items()}
    genes = genes_of_guides(names, mapped, naming)
    if mapped and not genes:
        raise ValueError(
            f"none of {len(mapped)} guides (first: {next(iter(mapped))!r}) is a label of {column}, which holds "
            f"{', '.join(map(repr, names[:3]))}{', ...' * (len(names) > 3)}."
        )
    naming = naming.knowing(genes.values(), known, columns)
    read = {name: genes.get(name, name) for name in names}
    lacking = [one for one in naming.control if not any(one in naming.split(label) for label in read.values())]
    if len(naming.control) > len(lacking) > 0:
        raise ValueError(
            f"control holds {lacking[0]!r}, which {column} never is: remove it from control={list(naming.control)!r}"
            + (f", or write {near[0]!r}." if (near := nearest(lacking[0], names, n=1)) else ".")
        )
    if guides is None or guides:
        _check_controls(read.values(), mapped, known, naming, perturbation_key, fitted=fitted)
        if not fitted:
            kept = {guide for guide, gene in mapped.items() if guide == gene}
            _refuse_two_names(read, kept, naming, vocabulary, species, perturbation_key)
    return _numbered(labels, naming, genes, column, as_noted=False)


def naming_as_noted(notes: Mapping[str, Any]) -> Naming:
    """How labels were read, from the notes of a prediction."""
    return Naming.of(notes["control"], str(notes["separator"]), np.asarray(notes.get("whole", ()), dtype=object))


def guides_as_noted(notes: Mapping[str, Any]) -> dict[str, str]:
    """Gene of each guide, from the notes of a prediction or a fitted model (:attr:`Perturbations.notes`)."""
    stored = notes.get("guides", {"label": (), "gene": ()})
    return dict(zip(map(str, stored["label"]), map(str, stored["gene"]), strict=True))
