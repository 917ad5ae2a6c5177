from __future__ import annotations

import itertools
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pytest

from scdiva.pl import gene_overlap


def sets_of(n: int, rng: int = 0) -> dict[str, list[str]]:
    """Sets of 40 to 110 of 160 genes."""
    draw = np.random.default_rng(rng)
    names = ("PBMC", "pancreas", "immune", "Zheng68k", "lung", "cortex", "skin")[:n]
    return {name: [f"G{i}" for i in draw.permutation(160)[: 110 - 10 * k]] for k, name in enumerate(names)}


def overlaps(sets: dict[str, list[str]]) -> dict[tuple[str, ...], int]:
    """Genes in all of some sets and in no other, by the definition."""
    found = {}
    for size in range(1, len(sets) + 1):
        for chosen in itertools.combinations(sets, size):
            inside = set.intersection(*(set(sets[name]) for name in chosen))
            outside = set().union(*(sets[name] for name in sets if name not in chosen))
            found[chosen] = len(inside - outside)
    return found


@pytest.mark.parametrize("n", [2, 4])
def test_looks_as_it_did(looks_as_it_did, n):
    looks_as_it_did(gene_overlap(sets_of(n), return_fig=True), f"gene_overlap_{n}")


def columns(fig) -> list[tuple[int, tuple[bool, ...]]]:
    """Height of each column's bar, and which dots of it are dark, from above."""
    below, above = fig.axes[0].child_axes
    n = len(below.get_yticks())
    dark = [line.get_color() == "0.25" for line in below.lines]
    assert below.yaxis_inverted()
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in below.lines] == [
        (x, y) for x in range(len(above.patches)) for y in range(n)
    ]
    return [(round(bar.get_height()), tuple(dark[i * n : i * n + n])) for i, bar in enumerate(above.patches)]


def names(fig) -> list[str]:
    return [text.get_text() for text in fig.axes[0].child_axes[0].get_yticklabels()]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_columns_are_the_overlaps_and_the_largest_comes_first(n):
    sets = sets_of(n)
    fig = gene_overlap(sets, return_fig=True)
    found = columns(fig)
    expected = {tuple(name in chosen for name in sets): count for chosen, count in overlaps(sets).items() if count}
    assert {dark: height for height, dark in found} == expected
    heights = [height for height, _ in found]
    assert heights == sorted(heights, reverse=True)
    assert names(fig) == [f"{name} ({len(genes)})" for name, genes in sets.items()]


def test_many_overlaps_are_cut_and_that_is_said():
    sets = sets_of(7)
    counts = sorted((count for count in overlaps(sets).values() if count), reverse=True)
    assert len(counts) > 40
    with pytest.warns(UserWarning, match=rf"{len(counts) - 40} of {len(counts)} overlaps, the smallest, are not drawn"):
        fig = gene_overlap(sets, return_fig=True)
    assert [height for height, _ in columns(fig)] == counts[:40]


def test_sets_that_share_nothing_are_drawn_with_a_warning():
    with pytest.warns(UserWarning, match="share a gene .*'ENSG1'.*'SPI1'"):
        gene_overlap({"a": ["ENSG1"], "b": ["SPI1", "TP53"]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gene_overlap({"a": ["X"], "b": ["X", "Y"], "c": ["Z"]})


@pytest.mark.parametrize(
    ("sets", "error", "words"),
    [
        ([["X"], ["Y"]], TypeError, "gene_sets .*mapping.*got list"),
        ({"a": "SPI1", "b": ["X"]}, TypeError, "gene_sets.'a'. must be"),
        (
            {"a": ["X"], "b": [0.5, "X", 1]},
            TypeError,
            "gene_sets.'b'. must be",
        ),
        ({"a": ["X"], "b": []}, ValueError, "gene_sets.'b'. is empty"),
        ({"a": ["X"]}, ValueError, "gene_sets has 1 sets: give 2 to 12"),
        ({str(i): ["X"] for i in range(13)}, ValueError, "gene_sets has 13 sets: give 2 to 12"),
        ({1: ["X"], "1": ["Y"]}, ValueError, "gene_sets has 1 sets.*2 to 12"),
    ],
)
def test_what_is_no_set_of_genes_is_refused(sets, error, words):
    with pytest.raises(error, match=words):
        gene_overlap(sets)
    assert plt.get_fignums() == []
