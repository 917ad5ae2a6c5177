"""How far sets of genes overlap."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from scdiva._docs import with_shared_docs
from scdiva._extras import from_extra
from scdiva.pl._figure import axes_for, check_file, finish

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CIRCLES = 3
"""Sets up to which circles can show every overlap in its size."""
_MAX_SETS, _MAX_OVERLAPS = 12, 40
_COLOURS = ("#d1495b", "#2e86ab", "#e9a03b")
_NEEDS = "Plots of overlaps need matplotlib-venn and marsilea"


@with_shared_docs
def gene_overlap(
    gene_sets: Mapping[str, Iterable[str]],
    *,
    ax: Axes | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw how many genes sets of genes share, such as those well reconstructed in each of several data sets.

    Two or three sets are drawn as circles (Venn); areas follow the numbers as far as circles can, so read the numbers.
    From four sets on (UpSet [1]_) a column is an overlap: the genes that are in the sets with a dot and in no other.
    The largest come first, at most 40 of them, or all of the largest size where more are of that; bars at the side are
    the sets. In both every gene is counted once.

    Parameters
    ----------
    gene_sets
        Names of genes of each set, by the name of the set; a gene that a set names twice counts once. See
        `scdiva.get.reconstructed_genes`. Sets of different data must use the same gene names.
    ax
        The matplotlib axes to draw on, for two or three sets; None makes a figure.
    %(return_fig)s
    %(save)s

    Returns
    -------
    Figure or None
        The figure if `return_fig`, else None.

    Raises
    ------
    TypeError
        If `gene_sets` is no mapping, a set is one string, or a gene is no string.
    ValueError
        If there are fewer than 2 sets or more than 12, a set is empty, `ax` is given for more than three sets, or
        `save` ends in no picture format.
    ImportError
        If matplotlib-venn or marsilea is not installed.

    Warns
    -----
    UserWarning
        If no two sets share a gene, since they may name genes differently; or if overlaps are left out.

    References
    ----------
    .. [1] Lex, Gehlenborg, Strobelt, Vuillemot & Pfister, UpSet: visualization of intersecting sets, IEEE Transactions
       on Visualization and Computer Graphics 2014.

    Examples
    --------
    >>> import scdiva as sd
    >>> found = {"first": ["CD3D", "LYZ", "NKG7"], "second": ["LYZ", "NKG7", "MS4A1"]}
    >>> sd.pl.gene_overlap(found, save="overlap.png")
    """
    check_file(save)
    sets = _checked(gene_sets)
    if len(sets) <= _CIRCLES:
        return finish(_venn(sets, ax), own=ax is None, return_fig=return_fig, save=save)
    if ax is not None:
        raise ValueError(f"{len(sets)} sets take a figure of their own: leave ax out, or draw at most {_CIRCLES} sets.")
    return finish(_upset(sets), own=True, return_fig=return_fig, save=save)


def _checked(gene_sets: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Give the sets as sets, once they can be compared."""
    if not isinstance(gene_sets, Mapping):
        raise TypeError(f"gene_sets must be a mapping, {{name: genes}}, got {type(gene_sets).__name__}.")
    sets: dict[str, set[str]] = {}
    for name, genes in gene_sets.items():
        if isinstance(genes, str):
            raise TypeError(f"gene_sets[{name!r}] is one string, {genes!r}: give a list of gene names.")
        listed = list(genes)
        strange = [gene for gene in listed if not isinstance(gene, str)]
        if strange:
            raise TypeError(
                f"gene_sets[{name!r}] holds {len(strange):,} things that are no gene names (first: {strange[0]!r}): "
                "give names, such as adata.var_names[chosen]."
            )
        if not listed:
            raise ValueError(f"gene_sets[{name!r}] is empty: leave it out.")
        sets[str(name)] = set(listed)
    if not 2 <= len(sets) <= _MAX_SETS:
        raise ValueError(f"gene_sets has {len(sets)} sets: give 2 to {_MAX_SETS} of different names.")
    if sum(map(len, sets.values())) == len(set().union(*sets.values())):
        first, second = list(sets)[:2]
        warnings.warn(
            f"no two sets share a gene (the first of {first!r} is {min(sets[first])!r}, of {second!r} "
            f"{min(sets[second])!r}): do they use the same gene names?",
            stacklevel=3,
        )
    return sets


def _venn(sets: dict[str, set[str]], ax: Axes | None) -> Figure:
    """Draw two or three circles."""
    venn = from_extra("matplotlib_venn", "plot", _NEEDS)
    fig, axes = axes_for(ax, (4.2, 3.8))
    names = [f"{name}\n({len(genes):,})" for name, genes in sets.items()]
    draw = venn.venn2 if len(sets) == 2 else venn.venn3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # circles that cannot show an overlap: its number is written all the same
        drawn = draw(
            tuple(sets.values()),
            names,
            set_colors=_COLOURS[: len(sets)],
            alpha=0.55,
            ax=axes,
            subset_label_formatter=lambda n: f"{n:,}",
        )
    for text in [*drawn.set_labels, *drawn.subset_labels]:
        if text is not None:
            text.set_fontsize(9)
    return fig


def _upset(sets: dict[str, set[str]]) -> Figure:
    """Draw a column for each overlap."""
    from_extra("marsilea.upset", "plot", _NEEDS)
    import matplotlib.pyplot as plt
    from marsilea.plotter import Numbers
    from marsilea.upset import Upset, UpsetData

    genes = sorted(set().union(*sets.values()))  # in an order of their own, sets would give ties another one each run
    member = np.array([[gene in these for these in sets.values()] for gene in genes], dtype=int)
    data = UpsetData(member, sets_names=list(sets), items=genes)
    sizes = np.sort(data.cardinality().to_numpy())[::-1]
    least = 1
    if len(sizes) > _MAX_OVERLAPS:
        least = min(sizes[_MAX_OVERLAPS] + 1, sizes[0])
    if sizes[-1] < least:
        warnings.warn(
            f"{(sizes < least).sum():,} of {len(sizes):,} overlaps, of fewer than {least:,} genes, are not drawn",
            stacklevel=3,
        )
    # The largest first, in spite of the minus. Bars are added here, as those of Upset leave no way to their axes.
    upset = Upset(
        data,
        color="0.25",
        sort_subsets="-cardinality",
        min_cardinality=int(least),
        add_intersections=False,
        add_sets_size=False,
    )
    bars: dict[str, Any] = {"color": "0.25", "fmt": "{:,.0f}", "props": {"fontsize": 7}}
    upset.add_top(Numbers(upset.sets_table["cardinality"], **bars), size=1.2, pad=0.1, name="overlaps")
    upset.add_left(Numbers(upset.sets_size, **bars), size=1.0, pad=0.1, name="sets")
    upset.set_margin(0.4)  # inches, in which the axes' names stand
    fig = plt.figure()
    upset.render(fig)
    upset.get_ax("overlaps").set_ylabel("genes of the overlap", fontsize=8)
    upset.get_ax("sets").set_xlabel("genes of the set", fontsize=8)
    for name in ("overlaps", "sets"):
        upset.get_ax(name).tick_params(labelsize=7)
    return fig
