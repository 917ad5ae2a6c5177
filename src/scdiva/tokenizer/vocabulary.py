"""The genes of a model: a table whose row i has token i + 3, and the matching of gene names to tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scdiva._checks import printable
from scdiva._constants import N_SPECIAL, UNKNOWN
from scdiva._files import output_path, put_whole, read_bytes
from scdiva.tokenizer.names import (
    by_table,
    checked_species,
    ensembl_id,
    human_orthologs,
    looks_like_mouse,
    r_name,
    repeated_name,
    species_of,
    usual_spelling,
)

HOW = ("ensembl", "symbol", "previous", "alias", "ortholog", "unknown")
"""Kinds of matches, in the order in which they are tried."""
MOST_HUMAN = 0.1
"""Maximum share of mouse genes that match human names, too; a larger share suggests cells of both species."""

_HUMAN = Path(__file__).parent / "human.safetensors"
_FILE = "vocabulary.safetensors"
_CHECKPOINTS = Path(__file__).parent.parent / "checkpoints"


@dataclass(frozen=True)
class GeneMatch:
    """Result of :meth:`Vocabulary.match`.

    Attributes
    ----------
    tokens
        int32 (n_names,), -1 if the gene is not in the vocabulary.
    how
        Categorical (n_names,): "ensembl", "symbol", "previous", "alias", "ortholog" or "unknown".
    """

    tokens: NDArray[np.int32]
    how: pd.Categorical


class Vocabulary:
    """Genes with their tokens, names and entropies. Immutable: methods return a new vocabulary.

    Parameters
    ----------
    table
        One row per gene, in token order, with the columns `ensembl_id` (without version; may be empty), `symbol`
        (unique), `previous` and `alias` (names joined by "|", may be empty), `biotype` and `entropy` (nats; NaN if the
        gene was not in the corpus). The index is ignored. The table is copied.
    foreign
        Names that match nothing, although a rule of spelling leads to a gene of the vocabulary: without the gene "A.B",
        "A.B" would match "A-B" in R's spelling. Set by :meth:`subset`.

    Raises
    ------
    ValueError
        If a column is missing, unknown or of another dtype; if a symbol is empty; if a symbol or Ensembl id is
        repeated; if an entropy is negative or infinite; if there is no gene; if a foreign name is the symbol or Ensembl
        id of a gene.
    """

    def __init__(self, table: pd.DataFrame, foreign: Iterable[str] = ()) -> None:
        self._table = _checked(table)
        self._foreign = tuple(sorted(set(foreign) - {""}))
        if any("\n" in name for name in self._foreign):
            raise ValueError("a foreign name holds a line break")
        wrong = sorted({*self._table["symbol"], *self._table["ensembl_id"]}.intersection(self._foreign))
        if wrong:
            raise ValueError(f"{len(wrong)} foreign names are those of genes here, first: {wrong[0]!r:.80}")

    def __len__(self) -> int:
        return self.n_genes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self._foreign == other._foreign and self._table.equals(other._table)

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        n_known = int(self._table["entropy"].notna().sum())
        return f"Vocabulary({self.n_genes} genes, entropy known for {n_known}, fingerprint {self.fingerprint[:12]})"

    # --- making one --------------------------------------------------------------------------------------------------
    @classmethod
    @cache
    def human(cls) -> Vocabulary:
        """The 41,818 human genes of the package (rules in `scripts/build_vocabulary.py`)."""
        return cls.read(_HUMAN)

    @classmethod
    def read(cls, path: str | Path, data: bytes | None = None) -> Vocabulary:
        """Read a vocabulary file, see :meth:`write`.

        Parameters
        ----------
        path
            The file.
        data
            Its content, if it was already read; messages still name `path`.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If the file is damaged, is not a vocabulary, or is larger than 256 MiB.
        """
        path = Path(path)
        if data is None and not path.is_file():
            raise FileNotFoundError(f"there is no vocabulary file {path}")
        return _read(read_bytes(path, MOST_BYTES) if data is None else data, path)

    def write(self, path: str | Path) -> None:
        """Write the vocabulary to a safetensors file. Equal vocabularies give equal bytes."""
        write_file(self._table, self._foreign, path)

    def with_entropy(self, values: NDArray[np.floating]) -> Vocabulary:
        """Replace the entropies.

        Parameters
        ----------
        values
            Entropies in nats, (n_genes,), in row order; NaN for genes outside the corpus.
        """
        values = np.asarray(values)
        if values.shape != (self.n_genes,):
            raise ValueError(f"entropy of {self.n_genes} genes needs shape ({self.n_genes},), got {values.shape}")
        return Vocabulary(self._table.assign(entropy=values.astype(np.float32)), self._foreign)

    def subset(self, tokens: Sequence[int] | NDArray[np.integer]) -> Vocabulary:
        """Keep some genes, in the order of this vocabulary, with new tokens.

        The name of a dropped gene never matches a kept gene: previous names and aliases are kept only if they match the
        same gene here, and names of dropped genes that resemble a kept one ("A.B" and "A-B", "C1ORF5" and "C1orf5",
        "MIR1-2" and "MIR1") become foreign names.

        Parameters
        ----------
        tokens
            Tokens of this vocabulary, each once, any order.

        Raises
        ------
        ValueError
            If a token is not in this vocabulary or is repeated, or there are no tokens.
        """
        requested = np.asarray(tokens, dtype=np.int64).ravel()
        outside = requested[(requested < N_SPECIAL) | (requested >= N_SPECIAL + self.n_genes)]
        if outside.size:
            last = N_SPECIAL + self.n_genes - 1
            raise ValueError(f"{outside.size} tokens are not genes ({N_SPECIAL} to {last}) here, first: {outside[0]}")
        unique = np.unique(requested)
        if unique.size != requested.size:
            raise ValueError(f"{requested.size - unique.size} tokens stand more than once")
        table = self._table.iloc[unique - N_SPECIAL].copy()
        for column in ("previous", "alias"):
            table[column] = [
                "|".join(name for name in _split(names) if self._names.get(name, (UNKNOWN,))[0] == token)
                for token, names in zip(unique, table[column], strict=True)
            ]
        part, stay = Vocabulary(table), set(unique.tolist())
        dropped = [name for name, (token, _) in self._names.items() if token not in stay]
        doubtful = [name for name in dropped if name in part._names or name in self._respelled]
        upper = [name.upper() for name in dropped if usual_spelling(name.upper()) == name]  # "C1ORF5" for C1orf5
        doubtful += [name for name in upper if name not in self._names]
        return Vocabulary(table, (name for name in doubtful if part._resembles(name)))

    def with_genes_of(self, other: Vocabulary) -> Vocabulary:
        """Append the genes of another vocabulary that are missing here.

        Genes are the same if they share the symbol or an Ensembl id. Genes of this vocabulary keep their tokens, names
        and entropies; new genes have the names and entropy of `other`.

        Parameters
        ----------
        other
            A vocabulary.

        Returns
        -------
        A new vocabulary, or this one if no gene is missing.

        Examples
        --------
        >>> import scdiva as sd
        >>> mini, human = sd.tokenizer.load_vocabulary("scdiva-mini"), sd.tokenizer.load_vocabulary("human")
        >>> more = mini.with_genes_of(human)
        >>> mini.n_genes, more.n_genes, bool((more.symbols[: mini.n_genes] == mini.symbols).all())
        (19623, 41818, True)
        """
        symbols, ids = set(self.symbols), {name for names in self.ensembl_ids for name in _split(names)}
        is_new = [
            symbol not in symbols and ids.isdisjoint(_split(names))
            for symbol, names in zip(other.symbols, other.ensembl_ids, strict=True)
        ]
        if not any(is_new):
            return self
        table = pd.concat([self._table, other._table[is_new]])
        gene_names = set(self._names) - set(self._foreign)
        added = {name for name, (token, _) in other._names.items() if token != UNKNOWN and is_new[token - N_SPECIAL]}
        foreign = (set(self._foreign) - added) | (set(other._foreign) - gene_names)
        return Vocabulary(table, foreign - set(table["symbol"]) - set(table["ensembl_id"]))

    # --- looking at it -----------------------------------------------------------------------------------------------
    @property
    def n_genes(self) -> int:
        """Number of genes, without special tokens."""
        return len(self._table)

    @property
    def table(self) -> pd.DataFrame:
        """A copy of the table; its index is the token."""
        return self._table.copy()

    @cached_property
    def tokens(self) -> NDArray[np.int32]:
        """Tokens of the genes, int32 of shape (n_genes,): 3, 4, ..."""
        return _frozen(np.arange(N_SPECIAL, N_SPECIAL + self.n_genes, dtype=np.int32))

    @cached_property
    def symbols(self) -> NDArray[np.object_]:
        """Current symbols, shape (n_genes,)."""
        return _frozen(self._table["symbol"].to_numpy(copy=True))

    @cached_property
    def ensembl_ids(self) -> NDArray[np.object_]:
        """Ensembl ids without version, shape (n_genes,)."""
        return _frozen(self._table["ensembl_id"].to_numpy(copy=True))

    @cached_property
    def entropy(self) -> NDArray[np.float32]:
        """Entropy by token in nats, float32 (3 + n_genes,): 0 for special tokens, the median for unseen genes.

        Raises
        ------
        ValueError
            If no gene has an entropy.
        """
        rows = self._table["entropy"].to_numpy()
        if np.isnan(rows).all():
            raise ValueError(
                "this vocabulary holds no entropies, which come from a corpus: take the vocabulary of a model "
                '(`load_vocabulary("scdiva-mini")`) or count a corpus (`scdiva.pp.corpus_entropy`)'
            )
        by_token = np.zeros(N_SPECIAL + self.n_genes, dtype=np.float32)
        by_token[N_SPECIAL:] = np.where(np.isnan(rows), np.nanmedian(rows), rows)
        return _frozen(by_token)

    @cached_property
    def species(self) -> str | None:
        """Species of most Ensembl ids, `"human"` or `"mouse"`; None if there are too few."""
        return species_of(map(str, self.ensembl_ids))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of Ensembl ids and symbols in token order; equal if tokens mean the same genes."""
        lines = (f"{i}\t{s}\n" for i, s in zip(self._table["ensembl_id"], self._table["symbol"], strict=True))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    # --- matching ----------------------------------------------------------------------------------------------------
    def match(self, names: Iterable[str], species: str | Mapping[str, str] | pd.Series | None = None) -> GeneMatch:
        """Find the token of each name.

        A name matches, in this order: an Ensembl id (without version and `_PAR_Y`); a current symbol; a previous
        symbol; an alias; a current symbol in R's spelling ("HLA.A"). A previous symbol or alias of several genes is
        unknown. Case is significant, surrounding blanks are not. Unknown names are looked up again in their usual
        spelling ("C12ORF57" → C12orf57, "Sep-07" → SEPT7), and then, if `make.unique` numbered a repeat ("PSMA2.1" in a
        list with PSMA2), by the name that they repeat.

        If the vocabulary is human and the names are mouse genes (:func:`scdiva.tokenizer.looks_like_mouse`), each is
        matched by its human ortholog only (:func:`scdiva.tokenizer.human_orthologs`).

        Parameters
        ----------
        names
            Symbols, Ensembl ids, or a mixture.
        species
            Species of the names: `"human"`, `"mouse"`, or a table from genes to names in the vocabulary. None: infer
            human or mouse. A vocabulary with mouse Ensembl ids takes mouse names unchanged; one whose ids have no known
            species takes all names unchanged.

        Returns
        -------
        GeneMatch
            Tokens and how each was found. Several names may have one token.

        Raises
        ------
        TypeError
            If `names` is a single name, whose letters would be looked up.
        ValueError
            If `species` is invalid, or `"human"` for a vocabulary of mouse genes.
        """
        if isinstance(names, str):
            raise TypeError(f"names={names!r} must be a list of names.")
        clean = [str(name).strip() for name in names]
        matches = self._matched(clean)
        orthologs = self._orthologs(clean, matches, checked_species(species))
        if orthologs is not None:
            matches = [(token, "unknown" if token == UNKNOWN else "ortholog") for token, _ in self._matched(orthologs)]
        return GeneMatch(
            tokens=np.fromiter((token for token, _ in matches), dtype=np.int32, count=len(matches)),
            how=pd.Categorical([how for _, how in matches], categories=list(HOW)),
        )

    def _orthologs(
        self, names: list[str], matches: list[tuple[int, str]], species: str | dict[str, str] | None
    ) -> list[str] | None:
        """Orthologs to look up instead of the names; None to use the names."""
        if isinstance(species, dict):
            return [ortholog or "" for ortholog in by_table(names, species)]
        if species is None:
            n_matched = sum(token != UNKNOWN for token, _ in matches)
            are_mouse = n_matched < MOST_HUMAN * len(names) and looks_like_mouse(names) and self.species == "human"
            return human_orthologs(names) if are_mouse else None
        if self.species in (None, species):
            return None
        if species == "human":
            raise ValueError(
                'species="human", but the vocabulary holds genes of the mouse: leave species out, or pass a table from '
                "your genes to those of the mouse"
            )
        return human_orthologs(names)

    def _matched(self, names: list[str]) -> list[tuple[int, str]]:
        """Token and kind of match of each stripped name."""
        present = set(names)
        return [self._find(name) or self._find_repeated(name, present) or (UNKNOWN, "unknown") for name in names]

    def _find(self, name: str) -> tuple[int, str] | None:
        """Token and kind of match of a stripped name; None if the name is unknown."""
        answer = self._names.get(ensembl_id(name) or name)
        if answer is None and (usual := usual_spelling(name)) is not None:
            answer = self._names.get(usual)
        return answer

    def _find_repeated(self, name: str, present: Container[str]) -> tuple[int, str] | None:
        """Match of the name that `name` repeats, if it is in the list and not an alias."""
        base = repeated_name(name)
        answer = self._find(base) if base is not None and base in present else None
        return answer if answer is not None and answer[1] in ("symbol", "previous") else None

    def _resembles(self, name: str) -> bool:
        """Whether `name` matches a gene in some list of names."""
        answer = self._find(name) or self._find_repeated(name, {repeated_name(name) or ""})
        return answer is not None and answer[0] != UNKNOWN

    @cached_property
    def _respelled(self) -> frozenset[str]:
        """Names that the rules of spelling change."""
        rules = (ensembl_id, usual_spelling, repeated_name)
        return frozenset(name for name in self._names if any(rule(name) not in (None, name) for rule in rules))

    @cached_property
    def _names(self) -> dict[str, tuple[int, str]]:
        """Token and kind of match by name; ambiguous and foreign names have UNKNOWN, so that no later rule applies."""
        tokens, symbols = self._table.index.tolist(), self._table["symbol"].tolist()
        kinds = [
            ("ensembl", *_one_by_one(self._table["ensembl_id"].tolist(), tokens)),
            ("symbol", symbols, tokens),
            ("previous", *_one_by_one(self._table["previous"].tolist(), tokens)),
            ("alias", *_one_by_one(self._table["alias"].tolist(), tokens)),
            ("symbol", list(map(r_name, symbols)), tokens),
        ]
        matches: dict[str, tuple[int, str]] = {}
        for kind, names, of in reversed(kinds):  # earlier rules replace the matches of later ones
            level = dict(zip(names, zip(of, repeat(kind)), strict=False))
            if len(level) < len(names):
                for name, token in zip(names, of, strict=True):
                    if level[name][0] != token:
                        level[name] = (UNKNOWN, "unknown")
            matches |= level
        return matches | dict.fromkeys(self._foreign, (UNKNOWN, "unknown"))


@lru_cache(maxsize=8)
def with_human_genes(vocabulary: Vocabulary) -> Vocabulary:
    """Append the human genes that a vocabulary lacks; one of another species is returned unchanged."""
    return vocabulary.with_genes_of(Vocabulary.human()) if vocabulary.species == "human" else vocabulary


def load_vocabulary(vocabulary: Vocabulary | str | Path = "human") -> Vocabulary:
    """Load a vocabulary.

    Parameters
    ----------
    vocabulary
        A :class:`Vocabulary` (returned unchanged), "human", the name of a bundled model, the folder of a saved model,
        or a file from :meth:`Vocabulary.write`.

    Raises
    ------
    FileNotFoundError
        If it does not exist.
    ValueError
        If the file is damaged or not a vocabulary.

    Examples
    --------
    >>> from scdiva.tokenizer import load_vocabulary
    >>> genes = load_vocabulary("human")
    >>> genes.n_genes
    41818
    >>> genes.match(["CD3D", "ENSG00000167286.11", "no gene"]).tokens.tolist()
    [2643, 2643, -1]
    """
    if isinstance(vocabulary, Vocabulary):
        return vocabulary
    if vocabulary == "human":
        return Vocabulary.human()
    location = Path(vocabulary)
    for path in (location, location / _FILE, _CHECKPOINTS / location / _FILE):
        if path.is_file():
            return Vocabulary.read(path)
    bundled = sorted(path.parent.name for path in _CHECKPOINTS.glob(f"*/{_FILE}"))
    raise FileNotFoundError(
        f"no vocabulary {str(vocabulary)!r}: give 'human', a bundled model {bundled}, the folder of a saved model "
        f"(it holds {_FILE}), or the file of a vocabulary"
    )


@lru_cache(maxsize=4)
def _read(data: bytes, path: Path) -> Vocabulary:
    """Vocabulary from the content of a file; cached, as the checks take 0.3 s."""
    table, foreign = read_file(data, path)
    try:
        return Vocabulary(table, foreign)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _split(names: str) -> list[str]:
    """Names of a "|"-joined string."""
    return [name for name in names.split("|") if name] if names else []


def _one_by_one(texts: Iterable[str], tokens: Iterable[int]) -> tuple[list[str], list[int]]:
    """Names of "|"-joined strings, and the token of each name."""
    names: list[str] = []
    repeated: list[int] = []
    for text, token in zip(texts, tokens, strict=True):
        if "|" in text:
            parts = _split(text)
            names += parts
            repeated += [token] * len(parts)
        elif text:
            names.append(text)
            repeated.append(token)
    return names, repeated


def _frozen(values: NDArray[Any]) -> NDArray[Any]:
    """Make an array read-only."""
    values.setflags(write=False)
    return values


def _checked(table: pd.DataFrame) -> pd.DataFrame:
    """Copy of a valid table with tokens as index; ValueError for any other."""
    if set(table.columns) != set(COLUMNS) or len(table.columns) != len(COLUMNS):
        raise ValueError(f"a vocabulary has the columns {list(COLUMNS)}, got {list(table.columns)}")
    if len(table) == 0:
        raise ValueError("a vocabulary needs at least one gene")
    checked = pd.DataFrame({name: table[name].to_numpy(copy=True) for name in COLUMNS})
    for name in TEXTS:  # a line break would end a name in the file
        wrong = [i for i, value in enumerate(checked[name].tolist()) if not isinstance(value, str) or "\n" in value]
        if wrong:
            raise ValueError(
                f"column {name!r} holds {len(wrong)} values that are not strings or hold a line break, first in row "
                f"{wrong[0]}"
            )
    if not pd.api.types.is_float_dtype(checked["entropy"].dtype):
        raise ValueError(f"column 'entropy' holds {checked['entropy'].dtype}, not numbers with NaN for unseen genes")
    checked["entropy"] = checked["entropy"].astype(np.float32)
    bad = np.flatnonzero((checked["entropy"] < 0) | np.isinf(checked["entropy"]))
    if bad.size:
        raise ValueError(f"{bad.size} entropies are negative or infinite, first of {checked['symbol'][bad[0]]!r:.80}")
    if (checked["symbol"] == "").any():
        raise ValueError(f"{int((checked['symbol'] == '').sum())} genes have no symbol")
    for name in ("symbol", "ensembl_id"):
        again = checked[name].duplicated() & (checked[name] != "")
        if again.any():
            first = checked[name][again].iloc[0]
            raise ValueError(f"{int(again.sum())} genes repeat the {name} of another, first: {first!r:.80}")
    checked.index = pd.RangeIndex(N_SPECIAL, N_SPECIAL + len(checked), name="token")
    return checked


# --- file -------------------------------------------------------------------------------------------------------------
TEXTS = ("ensembl_id", "symbol", "previous", "alias", "biotype")
COLUMNS = (*TEXTS, "entropy")
"""Columns of a vocabulary table. All are strings but `entropy` (float32, nats)."""
MOST_BYTES = 2**28
"""Maximum size of a vocabulary file; the human one has 3 MB."""

_VERSION, _FOREIGN = "scdiva_vocabulary", "foreign"
_FORMAT = 2


def read_file(data: bytes, path: Path) -> tuple[pd.DataFrame, list[str]]:
    """Read a vocabulary's table and its foreign names from the bytes of a file.

    Parameters
    ----------
    data
        Content of the file.
    path
        The file, for messages.

    Raises
    ------
    ValueError
        If it is not a vocabulary, damaged or too large; the message names the file.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        held = load(data)
        texts = {name: array.tobytes().decode() for name, array in held.items() if array.dtype == np.uint8}
    except (SafetensorError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged or is not a vocabulary: {printable(f'{error!s:.300}')}") from error
    expected = sorted([*COLUMNS, _VERSION, _FOREIGN])
    if sorted(held) != expected:
        raise ValueError(f"{path} is not a vocabulary: it holds {sorted(held)!s:.300}, not {expected}")
    if held[_VERSION].tolist() != [_FORMAT]:
        raise ValueError(f"{path} states version {held[_VERSION].tolist()!s:.40} of the format, not {_FORMAT}")
    entropy, foreign = held["entropy"], texts.pop(_FOREIGN, "")
    lines = {name: text.split("\n") for name, text in texts.items()}
    counts = {name: len(names) for name, names in lines.items()}
    fits = set(counts) == set(TEXTS) and entropy.dtype == np.float32 and entropy.ndim == 1
    if not fits or set(counts.values()) != {len(entropy)}:
        raise ValueError(
            f"{path} is damaged or is not a vocabulary: entropy is {entropy.dtype} {entropy.shape}, and the numbers of "
            f"names are {counts}"
        )
    return pd.DataFrame({**lines, "entropy": entropy}), foreign.split("\n") if foreign else []


def write_file(table: pd.DataFrame, foreign: tuple[str, ...], path: Any) -> None:
    """Write a gene table and its foreign names to a path or an open file, always with the same bytes."""
    from safetensors.numpy import save

    lines = {**{name: table[name] for name in TEXTS}, _FOREIGN: foreign}
    texts = {name: np.frombuffer("\n".join(names).encode(), dtype=np.uint8) for name, names in lines.items()}
    entropy = table["entropy"].to_numpy(dtype=np.float32)
    data = save({**texts, "entropy": entropy, _VERSION: np.array([_FORMAT], dtype=np.int64)})
    if hasattr(path, "write"):
        path.write(data)
    else:
        put_whole(output_path(path, "path"), lambda file: file.write(data))
