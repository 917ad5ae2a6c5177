"""Which genes, cells and groups a gene network is made of; what all its methods are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scdiva._constants import N_SPECIAL
from scdiva._nearest import nearest

if TYPE_CHECKING:
    from anndata import AnnData

    from scdiva.data.source import CellSource
    from scdiva.models import ScDiVa

MIN_CELLS = 10
"""Cells of a group, at least."""
MOST_BYTES = 4 * 2**30
"""Of the sums over cells, for all pairs and groups."""


@dataclass(frozen=True)
class Pairs:
    """Sources, targets and cells of a network.

    Attributes
    ----------
    model, source
        The model, and the cells as it reads them.
    tokens
        int (n_genes,), the genes that take part, sources and targets.
    sources, targets
        Places in `tokens`, ascending.
    group
        int (n_obs,), the graph to which a cell adds; -1: none.
    n_groups
        Graphs.
    """

    model: ScDiVa
    source: CellSource
    tokens: NDArray[np.int64]
    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    group: NDArray[np.int64]
    n_groups: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of an array with a number for each group, source and target."""
        return self.n_groups, len(self.sources), len(self.targets)

    def places(self, which: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give the row of each token of the model among `which`, places in `tokens`; -1 where it is not of them."""
        place = np.full(self.source.n_tokens, -1)
        place[self.tokens[which]] = np.arange(len(which))
        return place

    def drawn(self, n_cells: int | None, rng: np.random.Generator) -> NDArray[np.bool_]:
        """Draw cells, at most so many of each group; None takes all. bool (n_obs,)."""
        chosen = np.zeros(len(self.group), dtype=bool)
        for number in range(self.n_groups):
            cells = np.flatnonzero(self.group == number)
            chosen[cells if n_cells is None else rng.permutation(cells)[:n_cells]] = True
        return chosen


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

    Returns
    -------
    Tokens, ascending, and the places of the sources and of the targets among them.

    Raises
    ------
    ValueError
        If a gene that was named is unknown, not measured or expressed too rarely, or none is left.
    """
    there = known & np.isin(np.arange(len(known)), cells.measured_tokens)
    wide = there & (share.max(axis=0) >= min_fraction) & (share.max(axis=0) > 0)
    if sources == "tf":
        from scdiva.datasets import transcription_factors

        factors = cells.vocabulary.match(transcription_factors()).tokens
        chosen = np.intersect1d(factors, np.flatnonzero(wide))
    else:
        chosen = _named(sources, "sources", cells, share, there, wide, min_fraction)
    aims = _named(targets, "targets", cells, share, there, wide, min_fraction)
    for name, found in (("sources", chosen), ("targets", aims)):
        if not len(found):
            what = "transcription factor" if name == "sources" and sources == "tf" else "gene known to the model"
            raise ValueError(
                f"there are no {name}: no {what} is expressed in at least {min_fraction:.2%} of the cells. Lower "
                "min_fraction."
            )
    tokens = np.union1d(chosen, aims)
    return tokens, np.searchsorted(tokens, chosen), np.searchsorted(tokens, aims)


def _named(
    names: Sequence[str] | str | None,
    what: str,
    cells: CellSource,
    share: NDArray[np.float64],
    there: NDArray[np.bool_],
    wide: NDArray[np.bool_],
    min_fraction: float,
) -> NDArray[np.int64]:
    """Give the tokens of named genes, ascending; of all that are expressed widely if none are named."""
    if names is None:
        return np.flatnonzero(wide)
    wanted = [names] if isinstance(names, str) else [str(name) for name in names]
    if not wanted:
        raise ValueError(f"{what} names no gene; leave it out to take all.")
    tokens = cells.vocabulary.match(wanted, cells.reading.species).tokens.astype(np.int64)
    missing = [name for name, token in zip(wanted, tokens, strict=True) if token < 0 or not there[token]]
    if missing:
        of_adata = cells.reading.species not in (None, "human")
        near = [] if of_adata else nearest(missing[0], cells.vocabulary.symbols[np.flatnonzero(there) - N_SPECIAL])
        how = "as the data have them" if of_adata else "by symbol or Ensembl id"
        raise ValueError(
            f"{len(missing)} of {len(wanted)} {what} are not among the genes of adata that the model knows (first: "
            f"{missing[0]!r}){f'; did you mean {_or(near)}?' if near else ''}. Name them {how}."
        )
    if rare := [name for name, token in zip(wanted, tokens, strict=True) if not wide[token]]:
        most = share[:, tokens[wanted.index(rare[0])]].max()
        raise ValueError(
            f"{len(rare)} of {len(wanted)} {what} are expressed in fewer than {min_fraction:.2%} of the cells (first: "
            f"{rare[0]!r}, {most:.2%}), too few to tell what goes with them. Leave them out, or lower min_fraction."
        )
    return np.unique(tokens)


def _or(names: Sequence[str]) -> str:
    return " or ".join(map(repr, names))


def choose_groups(
    adata: AnnData, groupby: str | None, groups: Sequence[str] | str | None, reference: str | None
) -> tuple[NDArray[np.int64], list[str], list[str]]:
    """Give each group of cells a number, as :func:`scdiva.tl.grn` is asked for them.

    Returns
    -------
    int (n_obs,), the group of a cell, -1 for none; the groups to draw; and all that are numbered, those first.

    Raises
    ------
    KeyError
        If there is no such column.
    ValueError
        If there is no such group, or one is too small.
    """
    from scdiva.data.conditions import column

    if groupby is None:
        if groups is not None or reference is not None:
            raise ValueError("groups or reference are given without the column that holds them: groupby=...")
        code = np.zeros(adata.n_obs, dtype=np.int64)
        check_groups(code, [], [""], None)
        return code, [], [""]
    of_cell = column(adata, groupby)
    present = sorted(set(of_cell.tolist()))
    wanted = [groups] if isinstance(groups, str) else None if groups is None else [str(name) for name in groups]
    asked = [*(wanted or []), *([] if reference in (None, "rest") else [str(reference)])]
    if absent := [name for name in asked if name not in present]:
        raise ValueError(
            f"{len(absent)} of the groups are not in adata.obs[{groupby!r}], the first is {absent[0]!r}; there are "
            f"{', '.join(map(repr, present[:10]))}."
        )
    if wanted is not None and (not wanted or len(set(wanted)) < len(wanted)):
        raise ValueError(
            "groups names none." if not wanted else f"groups holds {max(wanted, key=wanted.count)!r} twice."
        )
    if reference == "rest" and "rest" in present:
        raise ValueError(f'adata.obs[{groupby!r}] has a group named "rest": give it another name.')
    drawn = [name for name in (present if wanted is None else wanted) if name != reference]
    if not drawn or (reference == "rest" and len(present) < 2):
        raise ValueError(f"there is no group but the reference {reference!r} to compare it with.")
    # the rest is made of the sums over all other groups
    read = present if reference == "rest" else [*drawn, *([] if reference is None else [str(reference)])]
    numbered = [*drawn, *(name for name in read if name not in drawn)]
    number = {name: i for i, name in enumerate(numbered)}
    code = np.array([number.get(name, -1) for name in of_cell], dtype=np.int64)
    check_groups(code, drawn, numbered, reference)
    return code, drawn, numbered


def check_groups(code: NDArray[np.int64], drawn: list[str], numbered: list[str], reference: str | None) -> None:
    """Refuse groups of too few cells; arguments are what :func:`choose_groups` returns, and the reference.

    Raises
    ------
    ValueError
        With the first.
    """
    size = dict(zip(numbered, np.bincount(code[code >= 0], minlength=len(numbered)), strict=True))
    if not drawn and size[""] < MIN_CELLS:
        raise ValueError(f"there are {size['']} cells: a network of fewer than {MIN_CELLS} says nothing.")
    counted = [name for name in numbered if name in drawn or name == reference]
    if small := [name for name in counted if size[name] < MIN_CELLS]:
        raise ValueError(
            f"{len(small)} of {len(counted)} groups have fewer than {MIN_CELLS} cells (first: {small[0]!r}, "
            f"{size[small[0]]}): a network of so few says nothing. Name the others with groups=[...]."
        )
    rest = {name: sum(size.values()) - size[name] for name in drawn}
    if reference == "rest" and (alone := [name for name in drawn if rest[name] < MIN_CELLS]):
        raise ValueError(
            f"only {rest[alone[0]]} cells are not of group {alone[0]!r}: a network of fewer than {MIN_CELLS} says "
            'nothing. Leave out reference="rest".'
        )


def check_size(shape: tuple[int, int, int], bytes_each: int, **settings: Any) -> None:
    """Refuse sums that would not fit.

    Raises
    ------
    ValueError
        With what would make them smaller.
    """
    if (needed := int(np.prod(shape, dtype=np.float64)) * bytes_each) > MOST_BYTES:
        groups, sources, targets = shape
        said = f" and {groups} groups" if groups > 1 else ""
        raise ValueError(
            f"{sources} sources × {targets} targets{said} would take {needed / 2**30:.0f} GiB, more than the "
            f"{MOST_BYTES // 2**30} that are allowed. Take fewer: sources='tf', a higher min_fraction (now "
            f"{settings['min_fraction']}), targets=[...], or some groups at a time."
        )
