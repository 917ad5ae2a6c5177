"""Which genes, cells and groups a gene network is made of; what all its methods are given."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from anndata import AnnData
from numpy.typing import NDArray

from scdiva._checks import or_nearest
from scdiva._constants import N_SPECIAL
from scdiva._labels import read_labels, wanted_groups
from scdiva.data.cells import CellSource
from scdiva.models import ScDiVa

MIN_CELLS = 10
"""Cells of a group, at least."""
MOST_BYTES = 4 * 2**30
"""Of the sums over cells, for all pairs and groups."""


class Groups(NamedTuple):
    """Groups of cells that a network is made of each, and what it is compared with.

    Attributes
    ----------
    code
        int (n_obs,), number of the group of a cell; -1: none.
    names
        Of the groups that get a network, the first of those numbered. `""` is all cells.
    reference
        The group, numbered last, whose network is taken from those of the others; None: nothing is.
    """

    code: NDArray[np.int64]
    names: list[str]
    reference: str | None

    @property
    def numbered(self) -> list[str]:
        """All groups whose cells are read."""
        return self.names if self.reference is None else [*self.names, self.reference]

    def without(self, cells: NDArray[np.bool_]) -> Groups:
        """Give the groups without some cells, in none of them fewer than `MIN_CELLS`, or raise ValueError."""
        code = np.where(cells, -1, self.code)
        sizes = np.bincount(code[code >= 0], minlength=len(self.numbered))
        if self.names == [""] and sizes[0] < MIN_CELLS:
            raise ValueError(f"there are {sizes[0]} cells: a network of fewer than {MIN_CELLS} says nothing.")
        if len(small := np.flatnonzero(sizes < MIN_CELLS)):
            raise ValueError(
                f"{len(small)} of {len(sizes)} groups have fewer than {MIN_CELLS} cells (first: "
                f"{self.numbered[small[0]]!r}, {sizes[small[0]]}): a network of so few says nothing. Name the others "
                "with groups=[...]."
            )
        return self._replace(code=code)


class Pairs(NamedTuple):
    """Sources, targets and cells of a network.

    Attributes
    ----------
    model, source
        The model, and the cells as it reads them.
    tokens
        int (n_genes,), the genes that take part, sources and targets.
    sources, targets
        Positions in `tokens`, ascending.
    group
        int (n_obs,), the graph to which a cell adds; -1: none.
    n_groups
        Graphs.
    layers, heads
        Layers and heads whose attention is averaged; None: all.
    """

    model: ScDiVa
    source: CellSource
    tokens: NDArray[np.int64]
    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    group: NDArray[np.int64]
    n_groups: int
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of an array with a number for each group, source and target."""
        return self.n_groups, len(self.sources), len(self.targets)

    def rows_of(self, which: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give the row of each token of the model among `which`, positions in `tokens`; -1 where it is not of them."""
        row = np.full(self.source.n_tokens, -1)
        row[self.tokens[which]] = np.arange(len(which))
        return row


def expressed_share(source: CellSource, group: NDArray[np.int64], n_groups: int) -> NDArray[np.float64]:
    """Count in which share of the cells of each group a gene is expressed: (n_groups, n_tokens)."""
    n_expressing = np.zeros((n_groups, source.n_tokens))
    for first, block in source.expression_blocks():
        of_block = group[first : first + block.shape[0]]
        for number in np.unique(of_block[of_block >= 0]):
            rows = block[np.flatnonzero(of_block == number)]
            n_expressing[number] += np.bincount(rows.indices, minlength=source.n_tokens)
    return n_expressing / np.bincount(group[group >= 0], minlength=n_groups)[:, None]


def choose_genes(
    sources: Sequence[str] | str | None,
    targets: Sequence[str] | str | None,
    cells: CellSource,
    share: NDArray[np.float64],
    known: NDArray[np.bool_],
    min_fraction: float,
    raw_only: Collection[str] = (),
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Choose genes by name, or those that are expressed widely enough.

    Parameters
    ----------
    sources, targets, min_fraction
        As for :func:`scdiva.tl.grn`.
    cells
        The cells.
    share
        (n_groups, n_tokens) share of cells that express a gene.
    known
        bool (n_tokens,), genes that the model has learned of.
    raw_only
        Names of genes that `adata.raw` has and `adata` lacks: a network of `adata` can't hold them.

    Returns
    -------
    Tokens, ascending, and the positions of the sources and of the targets among them.

    Raises
    ------
    ValueError
        If a gene that was named is unknown, not measured or expressed too rarely, or none is left.
    """
    there = known & np.isin(np.arange(len(known)), cells.measured_tokens)
    most = share.max(axis=0)
    wide = there & (most >= min_fraction) & (most > 0)

    def tokens_of(names: Sequence[str] | str | None, what: str) -> NDArray[np.int64]:
        if names is None:
            return np.flatnonzero(wide)
        wanted = [names] if isinstance(names, str) else [str(name) for name in names]
        if not wanted:
            raise ValueError(f"{what} names no gene; leave it out to take all.")
        tokens = cells.vocabulary.match(wanted, cells.reading.species).tokens.astype(np.int64)
        if missing := [name for name, token in zip(wanted, tokens, strict=True) if token < 0 or not there[token]]:
            if missing[0] in raw_only:
                raise ValueError(
                    f"{len(missing)} of {len(wanted)} {what} are not among the genes of adata, the first is "
                    f"{missing[0]!r}, which adata.raw has. A network is written for the genes of adata: "
                    f"adata = adata.raw.to_adata(), and scdiva.tl.grn(adata, {what}=...) without use_raw."
                )
            human = cells.reading.species in (None, "human")
            symbols = cells.vocabulary.symbols[np.flatnonzero(there) - N_SPECIAL]
            raise ValueError(
                f"{len(missing)} of {len(wanted)} {what} are not among the genes of adata that the model knows (first: "
                f"{missing[0]!r}{or_nearest(missing[0], symbols if human else ())}). Name them "
                f"{'by symbol or Ensembl id' if human else 'as the data have them'}."
            )
        if rare := [name for name, token in zip(wanted, tokens, strict=True) if not wide[token]]:
            found = most[tokens[wanted.index(rare[0])]]
            raise ValueError(
                f"{len(rare)} of {len(wanted)} {what} are expressed in fewer than {min_fraction:.2%} of the cells "
                f"(first: {rare[0]!r}, {found:.2%}), too few to say what goes with them. Leave them out, or lower "
                "min_fraction."
            )
        return np.unique(tokens)

    factors_only = isinstance(sources, str) and sources == "tf"
    if factors_only:
        from scdiva.datasets import transcription_factors

        factors = cells.vocabulary.match(transcription_factors()).tokens
        chosen = np.intersect1d(factors, np.flatnonzero(wide))
    else:
        chosen = tokens_of(sources, "sources")
    aims = tokens_of(targets, "targets")
    for name, found in (("sources", chosen), ("targets", aims)):
        if not len(found):
            what = "transcription factor" if name == "sources" and factors_only else "gene known to the model"
            raise ValueError(
                f"there are no {name}: no {what} is expressed in at least {min_fraction:.2%} of the cells. Lower "
                "min_fraction."
            )
    tokens = np.union1d(chosen, aims)
    return tokens, np.searchsorted(tokens, chosen), np.searchsorted(tokens, aims)


def choose_groups(
    adata: AnnData, groupby: str | None, groups: Sequence[str] | str | None, reference: str | None
) -> Groups:
    """Give each group of cells a number, as :func:`scdiva.tl.grn` is asked for them.

    Raises
    ------
    KeyError
        If there is no such column.
    ValueError
        If there is no such group.
    """
    if groupby is None:
        if groups is not None or reference is not None:
            raise ValueError("groups or reference are given without the column that holds them: groupby=...")
        return Groups(np.zeros(adata.n_obs, dtype=np.int64), [""], None)
    of_cell = read_labels(adata, groupby)
    present, lack = sorted(set(of_cell.tolist())), f"are not in adata.obs[{groupby!r}]"
    if reference is not None:  # names of groups are text, here as in `groups`
        (reference,) = wanted_groups(str(reference), present, lack)
    names = [name for name in wanted_groups(groups, present, lack) if name != reference]
    if not names:
        raise ValueError(f"there is no group but the reference {reference!r} to compare it with.")
    found = Groups(np.empty(0, dtype=np.int64), names, reference)
    number = {name: i for i, name in enumerate(found.numbered)}
    return found._replace(code=np.array([number.get(name, -1) for name in of_cell], dtype=np.int64))


def check_size(shape: tuple[int, int, int], bytes_each: int, min_fraction: float) -> None:
    """Refuse sums that would not fit, with what would make them smaller."""
    if (needed := int(np.prod(shape, dtype=np.float64)) * bytes_each) > MOST_BYTES:
        groups, sources, targets = shape
        said = f" and {groups} groups" if groups > 1 else ""
        raise ValueError(
            f"{sources} sources × {targets} targets{said} would take {needed / 2**30:.0f} GiB, more than the "
            f"{MOST_BYTES // 2**30} that are allowed. Take fewer: sources='tf', a higher min_fraction (now "
            f"{min_fraction}), targets=[...], or some groups at a time."
        )
