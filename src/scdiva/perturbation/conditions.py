"""Perturbation labels of cells: combinations, controls, guides, and other names of perturbed genes."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scdiva._checks import nearest, no_column, warn
from scdiva._constants import UNKNOWN
from scdiva._labels import read_labels, refuse_twice
from scdiva.data.genes import Species
from scdiva.tokenizer.names import looks_like_mouse, repeated_name
from scdiva.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

GeneFilter = Callable[[Iterable[str]], set[str]]
"""Function that selects the names that are genes."""

_MAX_LISTED = 10
"""Maximum number of control labels that a message lists; more are described by a pattern."""
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

_GUIDE = re.compile(r"(?:sg)?[-_]?(.+?)(?:[-_.:](?:sg|g|guide|sh)?[-_]?\d+|(?:sg|g|guide)\d+)", flags=re.IGNORECASE)
"""A guide's name after its gene: `KLF1g1`, `KLF1_sg2`, `sgKLF1-3`."""


@dataclass(frozen=True)
class ScreenDesign:
    """Experimental design of a perturbation screen: columns of `obs`, and how labels name perturbations.

    Attributes
    ----------
    perturbation_key, groupby, dose_key
        Columns of `obs` with the perturbation, the group and the dose of each cell; `""`: no such column.
    control
        Labels of the control cells.
    separator
        Text between the parts of a combination; empty: there are no combinations.
    whole
        Names that contain the separator and are one part, such as the gene HLA-DRA with `"-"`.
    guides
        Gene, or combination of genes, of each label that contains guides.
    """

    perturbation_key: str
    control: tuple[str, ...] = ("control",)
    separator: str = "+"
    groupby: str = ""
    dose_key: str = ""
    whole: frozenset[str] = frozenset()
    guides: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        perturbation_key: str | None,
        control: Iterable[str] | str = "control",
        groupby: str | None = None,
        dose_key: str | None = None,
        separator: str = "+",
    ) -> ScreenDesign:
        """Design described by the arguments of a call; control labels of a set are sorted.

        Raises
        ------
        TypeError
            If `control` is an array of other than one dimension.
        ValueError
            If `control` is empty or repeats a label.
        """
        if getattr(control, "ndim", 1) != 1:
            raise TypeError(
                f"control must be a label or a list of labels, got {type(control).__name__} of "
                f"{control.ndim} dimensions. Pass a list, control=['control']."  # type: ignore[union-attr]
            )
        is_one = isinstance(control, str | bytes) or not isinstance(control, Iterable)
        listed: list[Any] = [control] if is_one else list(control)
        labels = [label.decode() if isinstance(label, bytes) else str(label) for label in listed]
        labels = sorted(labels) if isinstance(control, Set) else labels
        if not labels:
            raise ValueError("control is empty. Pass the label of the control cells, or a list of labels.")
        refuse_twice(labels, "control")
        return cls(perturbation_key or "", tuple(labels), separator, groupby or "", dose_key or "")

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any]) -> ScreenDesign:
        """Design of a prediction or a saved model, from :attr:`arguments` and :attr:`Perturbations.notes`."""
        guides = notes.get("guides", {"label": (), "gene": ()})
        columns = (str(notes[name]) for name in ("groupby", "dose_key", "separator"))
        return replace(
            cls.of(str(notes["perturbation_key"]), notes["control"], *columns),
            whole=frozenset(map(str, np.asarray(notes.get("whole", ()), dtype=object))),
            guides=dict(zip(map(str, guides["label"]), map(str, guides["gene"]), strict=True)),
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the call in types that h5ad files support."""
        return {
            "perturbation_key": self.perturbation_key,
            "control": np.array(self.control, dtype=object),
            "groupby": self.groupby,
            "dose_key": self.dose_key,
            "separator": self.separator,
        }

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
        """Sorted unique parts of a perturbation; empty for the control.

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

    def with_whole_names(
        self, labels: Iterable[str], genes_among: GeneFilter, columns: Collection[str] = ()
    ) -> ScreenDesign:
        """Add the names within labels that contain the separator and are one part.

        Parameters
        ----------
        labels
            Labels of perturbations.
        genes_among
            Function that selects the names that are genes.
        columns
            Gene names of the dataset; they are one part, too, unless all pieces are genes.
        """
        if not self.separator:
            return self
        spans = set()
        for label in labels:
            pieces = str(label).split(self.separator)
            for start, stop in itertools.combinations(range(len(pieces) + 1), 2):
                if stop > start + 1:
                    spans.add(self.separator.join(pieces[start:stop]).strip())
        whole = genes_among(spans) if spans else set()
        for span in spans - whole:
            pieces = [piece.strip() for piece in span.split(self.separator)]
            # "NTC_B" is one label, but "control_B" is gene B with the control
            is_control = is_control_like(span) and not (span[-1].isalpha() and pieces[0] in self.control)
            if is_control or (span in columns and genes_among(pieces) != set(pieces)):
                whole.add(span)
        return replace(self, whole=self.whole | whole)


def is_control_like(label: str) -> bool:
    """Whether screens use a label for negative controls."""
    return _CONTROL_LIKE.fullmatch(label) is not None


@dataclass(frozen=True)
class Perturbations:
    """Perturbation of each cell.

    Attributes
    ----------
    parts
        Parts of each perturbation, sorted, singles first. Number 0 is the control, which has no parts.
    labels
        Label of each perturbation in the dataset; if it has several, the first in alphabetical order.
    code
        int64 `(n_obs,)`, number of each cell's perturbation.
    design
        Design of the screen, with the genes of each label that contains guides.
    """

    parts: tuple[tuple[str, ...], ...]
    labels: tuple[str, ...]
    code: NDArray[np.int64]
    design: ScreenDesign

    @property
    def is_control(self) -> NDArray[np.bool_]:
        """Whether each cell is a control."""
        return np.equal(self.code, 0)

    @property
    def notes(self) -> dict[str, Any]:
        """Guides and names that contain the separator, if there are any, as h5ad can hold them."""
        guides = self.design.guides
        columns = {
            "label": np.array(list(guides), dtype=object),
            "gene": np.array(list(guides.values()), dtype=object),
        }
        return ({"guides": columns} if guides else {}) | whole_names(self.parts, self.design.separator)


def whole_names(parts: Iterable[Iterable[str]], separator: str) -> dict[str, Any]:
    """Parts whose names contain the separator, as the entry `whole`; an empty dict if there are none."""
    names = sorted({name for of_one in parts for name in of_one if separator and separator in name})
    return {"whole": np.array(names, dtype=object)} if names else {}


def perturbations(adata: AnnData, design: ScreenDesign, *, where: str = "adata") -> Perturbations:
    """Read the perturbation of each cell by the design of a fitted model.

    Parameters
    ----------
    adata
        The cells.
    design
        Design of the screen that the model was fitted on.
    where
        Name of the cells in messages.

    Returns
    -------
    The perturbations. Labels with the same parts are one perturbation.

    Raises
    ------
    KeyError
        If the column does not exist.
    ValueError
        If a label is missing or has an empty part, or no cell is a control.
    """
    key = design.perturbation_key
    labels = read_labels(adata, key, where=where, kind="perturbation", meant=design.control)
    genes = genes_of_guides(np.unique(labels).tolist(), design.guides, design)
    return _numbered(labels, replace(design, guides=genes), f"{where}.obs[{key!r}]", is_fitted=True)


def _numbered(labels: NDArray[np.str_], design: ScreenDesign, column: str, *, is_fitted: bool) -> Perturbations:
    """Number the perturbations of cells."""
    names, number = np.unique(labels, return_inverse=True)
    names, merged = np.unique([design.guides.get(name, name) for name in names.tolist()], return_inverse=True)
    split = [design.parts(str(name)) for name in names]
    if () not in split:
        raise ValueError(_no_control_message(names.tolist(), design, column, is_fitted=is_fitted))
    distinct = sorted(set(split), key=lambda parts: (len(parts) > 1, parts) if parts else (False, ()))
    code = {parts: i for i, parts in enumerate(distinct)}
    label_of = {parts: str(name) for parts, name in zip(reversed(split), reversed(names), strict=True)}
    codes = np.array([code[parts] for parts in split], dtype=np.int64)
    label = tuple(label_of[parts] for parts in distinct)
    return Perturbations(tuple(distinct), label, codes[merged[number]], design)


def _no_control_message(names: list[str], design: ScreenDesign, column: str, *, is_fitted: bool) -> str:
    """Describe a dataset without control cells, and suggest labels that may be controls."""
    control = design.control[0] if len(design.control) == 1 else list(design.control)
    likely = [name for name in names if is_control_like(name)] or nearest(design.control[0], names, n=1)
    shown = ", ".join(map(repr, names[:10])) + (", ..." if len(names) > 10 else "")
    message = (
        f"no cell of {column.partition('.obs[')[0]} is a control: {column} never is {control!r}; it holds {shown}."
    )
    if is_fitted:
        first = repr(likely[0]) if likely else "..."
        return (
            f"{message} The model was fitted with that control label. Rename the controls: {column} = "
            f"{column}.astype(str).replace({first}, {design.control[0]!r})."
        )
    call = f"control=, perhaps {_controls(likely, column)}" if likely else "control="
    return f"{message} Pass the label of the control cells with {call}."


def _controls(labels: Sequence[str], column: str) -> str:
    """Write the argument that names control labels; many are described by a pattern."""
    if len(labels) > _MAX_LISTED:
        return f"control={column}[{column}.astype(str).str.fullmatch({_pattern(labels)})].unique().tolist()"
    return f"control={labels[0]!r}" if len(labels) == 1 else f"control={list(labels)!r}"


def _pattern(labels: Sequence[str]) -> str:
    """Write a regular expression of whole labels."""
    kinds = dict.fromkeys(re.sub(r"\d+", r"\\d+", re.escape(label)) for label in labels)
    return f'r"^(?:{"|".join(kinds)})$"'


def doses(adata: AnnData, key: str, *, where: str = "adata") -> NDArray[np.float64]:
    """Read a column of doses; values that are not numbers are NaN.

    Parameters
    ----------
    adata, key, where
        As for :func:`scdiva._labels.read_labels`.

    Raises
    ------
    KeyError
        If the column does not exist.
    """
    if key not in adata.obs:
        raise no_column(f"{where}.obs", key, adata.obs.columns)
    return np.asarray(pd.to_numeric(adata.obs[key].astype(object), errors="coerce"), dtype=np.float64)


def species_of(names: Sequence[str], vocabulary: Vocabulary, species: Species) -> Species:
    """Infer the species of perturbed genes: mouse if the genes of the dataset are matched as mouse orthologs.

    Parameters
    ----------
    names
        Gene names of the dataset.
    vocabulary
        Vocabulary of the model.
    species
        As in :func:`scdiva.tl.embed`; returned unless it is None.
    """
    if species is None and looks_like_mouse(names) and "ortholog" in set(vocabulary.match(names).how):
        return "mouse"
    return species


def match_perturbed(
    names: Sequence[str], vocabulary: Vocabulary, species: Species
) -> tuple[NDArray[np.int32], NDArray[np.object_]]:
    """Match perturbed genes to the vocabulary, by the names of the species or else by those of the vocabulary.

    Parameters
    ----------
    names
        Perturbed genes, or labels.
    vocabulary
        Vocabulary of the model.
    species
        Species of the genes, see :func:`species_of`.

    Returns
    -------
    Token of each name (-1: not a gene), and how it was matched.
    """
    match = vocabulary.match(names, species)
    tokens, how = match.tokens, np.asarray(match.how, dtype=object)
    if species is not None:
        direct, missing = vocabulary.match(names, vocabulary.species), tokens == UNKNOWN
        tokens = np.where(missing, direct.tokens, tokens)
        how = np.where(missing, np.asarray(direct.how, dtype=object), how)
    return tokens, how


def gene_filter(vocabulary: Vocabulary, species: Species = None) -> GeneFilter:
    """Select names of genes: symbols, previous symbols, Ensembl ids, and orthologs of a species.

    Aliases are ignored: many are short words ("B", "IFN") that also occur in labels of other perturbations.
    """
    kinds = {"ensembl", "symbol", "previous"} | ({"ortholog"} if species is not None else set())

    def genes_among(names: Iterable[str]) -> set[str]:
        return {name for name, (_, how) in _genes_of(names, vocabulary, species).items() if how in kinds}

    return genes_among


def _genes_of(names: Iterable[str], vocabulary: Vocabulary, species: Species) -> dict[str, tuple[int, str]]:
    """Token of each name that is a gene, and how it was matched."""
    genes: dict[str, tuple[int, str]] = {}
    # matched in one list, "KLF1-1" would be a repetition of "KLF1"
    for _, part in itertools.groupby(sorted(set(names), key=_n_suffixes), key=_n_suffixes):
        listed = list(part)
        matched = zip(listed, *match_perturbed(listed, vocabulary, species), strict=True)
        genes |= {name: (int(token), str(how)) for name, token, how in matched if token != UNKNOWN}
    return genes


def _n_suffixes(name: str) -> int:
    shorter = repeated_name(name)
    return 0 if shorter is None else 1 + _n_suffixes(shorter)


def same_genes(
    names: Iterable[str], measured: Collection[str], vocabulary: Vocabulary, species: Species, where: str
) -> dict[str, str]:
    """Map other names of measured genes to the measured ones: aliases, Ensembl ids, symbols of another species.

    Parameters
    ----------
    names
        Genes and labels.
    measured
        Genes and labels that were measured.
    vocabulary, species
        Vocabulary of the model, and species of the genes (:func:`species_of`).
    where
        Where the names occur, for messages.

    Returns
    -------
    The measured name of each other name. If a gene that was not measured has several names, they are mapped to the
    first.

    Raises
    ------
    ValueError
        If a name is the gene of several measured labels.
    """
    genes = _genes_of({*names, *measured}, vocabulary, species)
    names_of: dict[int, list[str]] = {}
    for name in sorted(set(measured) & genes.keys()):
        names_of.setdefault(genes[name][0], []).append(name)
    renamed = {}
    for name in sorted(set(names).difference(measured) & genes.keys()):
        first, *others = names_of.setdefault(genes[name][0], [name])
        if others:
            raise ValueError(
                f"{where} holds {name!r}, which is the gene of {1 + len(others)} labels that were measured, {first!r} "
                f"and {others[0]!r}: name one of these."
            )
        if first != name:
            renamed[name] = first
    return renamed


def _refuse_two_names(
    labels: Mapping[str, str], exempt: Collection[str], design: ScreenDesign, vocabulary: Vocabulary, species: Species
) -> None:
    """Raise an error if two parts are names of one gene and not `exempt`; `labels` maps each label to its genes."""
    parts = {part for label in labels.values() for part in design.parts(label)}
    genes = _genes_of(parts.difference(exempt), vocabulary, species)
    names: dict[int, list[str]] = {}
    for name in sorted(genes, key=lambda name: (genes[name][1] != "symbol", name)):
        names.setdefault(genes[name][0], []).append(name)
    several = [of for of in names.values() if len(of) > 1]
    if several:
        first, other = several[0][:2]
        joined = {name: of[0] for of in several for name in of[1:]}
        mapped = [label for label, gene in labels.items() if label != gene]
        for label in mapped:
            pieces = design.split(labels[label])
            if not joined.keys().isdisjoint(pieces):
                joined[label] = design.separator.join(joined.get(piece, piece) for piece in pieces)
        call = f"guides={{{'**guides, ' * bool(mapped)}{str(joined)[1:-1]}}}"
        raise ValueError(
            f"{len(several)} genes have more than one name in adata.obs[{design.perturbation_key!r}], the first is "
            f"both {first!r} and {other!r}. Pass {call} to make them one perturbation; guides={{{other!r}: {other!r}}} "
            "keeps a label as a perturbation, guides={} keeps all labels."
        )


def genes_of_guides(labels: Iterable[str], guides: Mapping[str, str], design: ScreenDesign) -> dict[str, str]:
    """Replace guides by their genes.

    Parameters
    ----------
    labels
        Labels of perturbations.
    guides
        Gene, or combination of genes, of each guide; or of a whole label.
    design
        How labels are read.

    Returns
    -------
    The genes of each label that is, or contains, one of the guides.

    Raises
    ------
    ValueError
        If a part is empty.
    """
    genes = {}
    for label in labels if guides else ():
        parts = design.split(label)
        if label in guides or any(part in guides for part in parts):
            genes[label] = guides.get(label) or design.separator.join(guides.get(part, part) for part in parts)
            design.parts(genes[label])  # raises an error for empty parts
    return genes


def _check_controls(
    labels: Collection[str],
    guides: Mapping[str, str],
    genes_among: GeneFilter,
    design: ScreenDesign,
    *,
    is_fitted: bool,
) -> None:
    """Raise an error for labels of negative controls that `control` lacks; warn if such a label is a gene symbol."""
    parts = {design.parts(label) for label in labels}
    names = sorted({part for of in parts for part in of} - {*guides, *guides.values()})
    pairs = re.compile(r"[/|,;&+_]")  # "NT/NT"
    listed = [name for name in names if is_control_like(name) or all(map(is_control_like, pairs.split(name)))]
    if () not in parts or not listed:  # without any control, another error follows
        return
    column, genes = f"adata.obs[{design.perturbation_key!r}]", genes_among(listed)
    if is_fitted:  # the control labels of a fitted model are fixed
        many = len(listed) > _MAX_LISTED
        call = f"rename them: {column} = {column}.astype(str).replace({_pattern(listed) if many else listed}, "
        call += f"{design.control[0]!r}{', regex=True' * many})"
    else:
        call = f"pass {_controls([*design.control, *listed], column)}"
    message = (
        f"{len(listed)} of {len(names)} perturbations in {column} look like negative controls (first: {listed[0]!r}). "
        f"If they are, {call}; guides={{{listed[0]!r}: {listed[0]!r}}} keeps a label as a perturbation, guides={{}} "
        "keeps all labels."
    )
    if len(genes) < len(listed):
        raise ValueError(message)
    warn(message)


def _warn_of_guides(labels: Iterable[str], genes_among: GeneFilter, design: ScreenDesign, column: str) -> None:
    """Warn if several labels look like guides of one gene: `KLF1_g1`, `KLF1-sg2`, `sgKLF1_3`."""
    names = {part for label in labels for part in design.parts(label)}
    parts = sorted(names - genes_among(names))
    gene_of = {part: match[1] for part in parts if (match := _GUIDE.fullmatch(part))}
    genes = genes_among(list(gene_of.values()))
    guides = {part: gene for part, gene in gene_of.items() if gene in genes}
    shared = [gene for gene, n in Counter(guides.values()).items() if n > 1]
    if shared:
        more = f", and so on for all {len(guides)}" * (len(guides) > _MAX_LISTED)
        warn(
            f"{len(guides)} labels in {column} look like guides of {len(set(guides.values()))} genes, such as "
            f"{shared[0]!r}, and are read as separate perturbations. Pass the gene of each: guides="
            f"{dict(itertools.islice(guides.items(), _MAX_LISTED))}{more}; or guides={{}} if they are not guides."
        )


def read_perturbations(
    adata: AnnData,
    design: ScreenDesign,
    guides: Mapping[str, str] | None,
    vocabulary: Vocabulary,
    species: Species = None,
    *,
    is_fitted: bool = False,
) -> Perturbations:
    """Read the perturbation of each cell of a screen.

    Parameters
    ----------
    adata
        The cells.
    design
        Column, control labels and separator; see :func:`perturbations` for the errors.
    guides
        Gene, or combination of genes, of each guide. A label that is mapped to itself is kept as a perturbation; an
        empty mapping keeps all labels.
    vocabulary, species
        Vocabulary of the model, and species of the perturbed genes (:func:`species_of`).
    is_fitted
        Whether a model was fitted with these control labels.

    Raises
    ------
    TypeError
        If `guides` is not a mapping.
    ValueError
        If a control label or all of `guides` do not occur, labels look like negative controls that `control` lacks, or
        two labels are names of one gene.

    Warns
    -----
    UserWarning
        If a gene symbol looks like a negative control.
    """
    if not isinstance(guides, Mapping | None):
        raise TypeError(f"guides must map guides to genes, such as {{'KLF1g1': 'KLF1'}}, or be None; got {guides!r}.")
    key = design.perturbation_key
    species = species_of(list(adata.var_names), vocabulary, species)
    genes_among, column = gene_filter(vocabulary, species), f"adata.obs[{key!r}]"
    labels = read_labels(adata, key, kind="perturbation", meant=design.control)
    names, columns = np.unique(labels).tolist(), frozenset(map(str, adata.var_names))
    design = design.with_whole_names(names, genes_among, columns)
    mapping = {str(guide): str(gene) for guide, gene in (guides or {}).items()}
    genes = genes_of_guides(names, mapping, design)
    if mapping and not genes:
        raise ValueError(
            f"none of {len(mapping)} guides (first: {next(iter(mapping))!r}) is a label of {column}, which holds "
            f"{', '.join(map(repr, names[:3]))}{', ...' * (len(names) > 3)}."
        )
    design = design.with_whole_names(genes.values(), genes_among, columns)
    renamed = {name: genes.get(name, name) for name in names}
    absent = [one for one in design.control if not any(one in design.split(label) for label in renamed.values())]
    if len(design.control) > len(absent) > 0:
        raise ValueError(
            f"control holds {absent[0]!r}, which {column} never is: remove it from control={list(design.control)!r}"
            + (f", or write {near[0]!r}." if (near := nearest(absent[0], names, n=1)) else ".")
        )
    if guides is None or guides:
        _check_controls(renamed.values(), mapping, genes_among, design, is_fitted=is_fitted)
        if not is_fitted:
            exempt = {guide for guide, gene in mapping.items() if guide == gene}
            _refuse_two_names(renamed, exempt, design, vocabulary, species)
        if not is_fitted:
            unmapped = [label for label in renamed.values() if label not in genes.values()]
            _warn_of_guides(unmapped, genes_among, design, column)
    return _numbered(labels, replace(design, guides=genes), column, is_fitted=False)
