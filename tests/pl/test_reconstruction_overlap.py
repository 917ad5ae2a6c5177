from __future__ import annotations

import itertools
import sys
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection

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


@pytest.mark.parametrize("n", [2, 3, 4])
def test_looks_as_it_did(looks_as_it_did, n):
    looks_as_it_did(gene_overlap(sets_of(n), return_fig=True), f"gene_overlap_{n}")


@pytest.mark.parametrize("n", [2, 3])
def test_circles_hold_the_number_of_each_overlap(n):
    sets = sets_of(n)
    fig = gene_overlap(sets, return_fig=True)
    texts = [text.get_text() for text in fig.axes[0].texts]
    assert [text for text in texts if "\n" in text] == [f"{name}\n({len(genes)})" for name, genes in sets.items()]
    numbers = sorted(int(text) for text in texts if text.isdigit())
    assert numbers == sorted(overlaps(sets).values())


def columns(fig) -> list[tuple[int, tuple[bool, ...]]]:
    """Height of each column's bar, and which dots of it are dark, from above."""
    bars = next(ax for ax in fig.axes if ax.get_ylabel() == "genes of the overlap")
    main = max(fig.axes, key=lambda ax: len(ax.collections))
    every, *others = (dots for dots in main.collections if isinstance(dots, PathCollection))
    dark = {tuple(place) for dots in others for place in dots.get_offsets().tolist()}
    across, down = (sorted(set(places)) for places in every.get_offsets().T.tolist())
    assert main.yaxis_inverted()
    return [
        (round(bar.get_height()), tuple((x, y) in dark for y in down))
        for bar, x in zip(bars.patches, across, strict=True)
    ]


def test_columns_are_the_overlaps_and_the_largest_comes_first():
    sets = sets_of(4)
    found = columns(gene_overlap(sets, return_fig=True))
    by_size = sorted(sets, key=lambda name: -len(sets[name]))
    expected = {tuple(name in chosen for name in by_size): count for chosen, count in overlaps(sets).items() if count}
    assert {dark: height for height, dark in found} == expected
    heights = [height for height, _ in found]
    assert heights == sorted(heights, reverse=True)


def test_many_overlaps_are_cut_and_that_is_said():
    sets = sets_of(7)
    counts = sorted((count for count in overlaps(sets).values() if count), reverse=True)
    assert len(counts) > 40
    with pytest.warns(UserWarning, match=rf"of {len(counts)} overlaps, of fewer than {counts[40] + 1} genes, are not"):
        fig = gene_overlap(sets, return_fig=True)
    heights = [height for height, _ in columns(fig)]
    assert heights == [count for count in counts if count > counts[40]]
    assert 0 < len(heights) <= 40
    side = next(ax for ax in fig.axes if ax.get_xlabel() == "genes of the set")
    assert sorted(round(bar.get_width()) for bar in side.patches) == sorted(map(len, sets.values()))


def test_of_overlaps_of_one_size_none_is_left_out():
    """And nothing is said of any that were."""
    members = [number for number in range(1, 4096) if number % 89 == 0]
    assert len(members) == 46
    sets = {f"set {i}": [f"gene {number}" for number in members if number >> i & 1] for i in range(12)}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fig = gene_overlap(sets, return_fig=True)
    assert [height for height, _ in columns(fig)] == [1] * 46


def test_any_iterable_of_names_will_do_and_repeats_count_once():
    drawn = [
        gene_overlap({"a": genes, "b": {"X"}}, return_fig=True)
        for genes in (["X", "Y", "Y"], ("Y", "X"), pd.Index(["X", "Y"]), (name for name in "XY"), np.array(["X", "Y"]))
    ]
    texts = [[text.get_text() for text in fig.axes[0].texts if text.get_text()] for fig in drawn]
    assert all(these == texts[0] for these in texts)
    assert "a\n(2)" in texts[0]


def test_the_users_axes_are_drawn_on_where_circles_are(tmp_path):
    _, (left, right) = plt.subplots(1, 2)
    assert gene_overlap(sets_of(3), ax=right, save=tmp_path / "a.pdf") is None
    assert (tmp_path / "a.pdf").read_bytes()[:4] == b"%PDF"
    assert right.patches
    assert not left.patches
    with pytest.raises(ValueError, match="4 sets take a figure of their own: leave ax out"):
        gene_overlap(sets_of(4), ax=right)
    plt.close("all")
    assert gene_overlap(sets_of(4), save=tmp_path / "b.png") is None
    assert plt.get_fignums() == []


def test_sets_that_share_nothing_are_drawn_with_a_warning():
    with pytest.warns(UserWarning, match=r"no two sets share a gene .the first of 'a' is 'ENSG1', of 'b' 'SPI1'"):
        gene_overlap({"a": ["ENSG1"], "b": ["SPI1", "TP53"]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gene_overlap({"a": ["X"], "b": ["X", "Y"], "c": ["Z"]})


@pytest.mark.parametrize(
    ("sets", "error", "words"),
    [
        ([["X"], ["Y"]], TypeError, "gene_sets must be a mapping, .name: genes., got list"),
        ({"a": "SPI1", "b": ["X"]}, TypeError, "gene_sets.'a'. is one string, 'SPI1'"),
        (
            {"a": ["X"], "b": [0.5, "X", 1]},
            TypeError,
            "gene_sets.'b'. holds 2 entries that are no gene names .first: 0.5",
        ),
        ({"a": ["X"], "b": []}, ValueError, "gene_sets.'b'. is empty: leave it out"),
        ({"a": ["X"]}, ValueError, "gene_sets has 1 sets: give 2 to 12"),
        ({str(i): ["X"] for i in range(13)}, ValueError, "gene_sets has 13 sets: give 2 to 12"),
        ({1: ["X"], "1": ["Y"]}, ValueError, "gene_sets has 1 sets: give 2 to 12 of different names"),
    ],
)
def test_what_is_no_set_of_genes_is_refused(sets, error, words):
    with pytest.raises(error, match=words):
        gene_overlap(sets)
    assert plt.get_fignums() == []


def test_a_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib_venn", None)
    monkeypatch.setitem(sys.modules, "marsilea", None)
    for n in (3, 4):
        with pytest.raises(ImportError, match=r"pip install 'scdiva\[plot\]'"):
            gene_overlap(sets_of(n))
    with pytest.raises(ValueError, match="picture format"):
        gene_overlap(sets_of(3), save=tmp_path / "picture")
    assert plt.get_fignums() == []
