"""Faults of what is drawn: maps taken for embeddings, values that are missing, colours that are not there."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

import scdiva as sd

mpl.use("Agg")
import matplotlib.pyplot as plt

# --- a map as a basis -------------------------------------------------------------------------------------------------
BASES = {"X_umap": 2, "X_umap of three": 3, "X_tsne": 2, "spatial": 2, "X_scdiva_umap": 2}
DRAW = {
    "umap": lambda a, basis: sd.pl.umap(a, "cell_type", basis=basis, return_fig=True),
    "annotation": lambda a, basis: sd.pl.annotation(a, key="cell_type", basis=basis, return_fig=True),
    "integration": lambda a, basis: sd.pl.integration(a, "batch", before=basis, after=basis, return_fig=True),
}


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def dots(axes):
    return np.concatenate([np.asarray(layer.get_offsets()) for layer in axes.collections])


@pytest.mark.fault("a map as a basis")
@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("call", DRAW)
def test_a_map_is_drawn_and_no_map_of_it(cells, hashed, monkeypatch, name, call):
    basis = name.split()[0]
    cells.obsm[basis] = np.random.default_rng(0).normal(size=(80, BASES[name]))
    monkeypatch.delattr("scdiva.embedding.umap.umap_of")
    before = hashed(cells)
    shown = dots(DRAW[call](cells, basis).axes[0])
    del cells.uns["batch_colors" if call == "integration" else "cell_type_colors"]
    assert hashed(cells) == before
    places = set(map(tuple, cells.obsm[basis][:, :2]))
    assert places <= set(map(tuple, shown))


# --- values that are missing ------------------------------------------------------------------------------------------
MISSING = {
    "NaN": lambda n: np.where(np.arange(n) % 4 == 0, np.nan, np.arange(n) / n),
    "infinite": lambda n: np.where(np.arange(n) % 4 == 0, np.inf, np.arange(n) / n),
    "integers with NA": lambda n: pd.array([None if i % 4 == 0 else i for i in range(n)], dtype="Int64"),
    "float32 with NaN": lambda n: np.where(np.arange(n) % 4 == 0, np.nan, 1.0).astype(np.float32),
    "all NaN": lambda n: np.full(n, np.nan),
}


@pytest.mark.fault("numbers missing as colours")
@pytest.mark.parametrize("name", MISSING)
def test_no_cell_leaves_the_picture_for_a_missing_number(cells, name):
    cells.obs["number"] = MISSING[name](80)
    fig = sd.pl.umap(cells, "number", basis="X_own", return_fig=True)
    assert set(map(tuple, dots(fig.axes[0]))) == set(map(tuple, cells.obsm["X_own"]))
    assert "grey: NA" in fig.axes[0].get_xlabel()


# --- colours that are not there ---------------------------------------------------------------------------------------
COLOURS = {
    "misspelt column": ("cell_types", {}, KeyError, "did you mean 'cell_type'"),
    "misspelt in a list": (["batch", "cell_types"], {}, KeyError, "did you mean 'cell_type'"),
    "number": (3, {}, TypeError, "color must be one or several names or None; got 3"),
    "number in a list": (["batch", 3], {}, TypeError, "by name; got 3"),
    "none of them": ([], {}, ValueError, "color names nothing"),
    "no such layer": ("cell_type", {"layer": "count"}, KeyError, "did you mean 'counts'"),
    "layer and raw": ("cell_type", {"layer": "counts", "use_raw": True}, ValueError, "exclude each other"),
    "fewer titles": (["batch", "cell_type"], {"title": "one"}, ValueError, "title has 1 entries for 2 panels"),
}


@pytest.mark.fault("colours that are not there")
@pytest.mark.parametrize("name", COLOURS)
def test_a_colour_that_is_not_there_is_said_before_a_map_is_made(cells, refused, monkeypatch, name):
    color, options, error, said = COLOURS[name]
    cells.obsm["X_scdiva"] = np.random.default_rng(0).normal(size=(80, 5))
    monkeypatch.delattr("scdiva.embedding.umap.umap_of")
    refused(lambda a: sd.pl.umap(a, color, **options), cells, error, said)
    assert plt.get_fignums() == []
