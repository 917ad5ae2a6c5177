"""What all plots share: pictures as before, the user's axes, files, data that stay as they were, and refusals."""

from __future__ import annotations

import inspect
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.testing.compare import compare_images

import scdiva as sd

from .conftest import sets_of

pytestmark = pytest.mark.usefixtures("components")
BASELINE = Path(__file__).parent / "baseline"


DATA = {
    "annotated": lambda get: {"adata": get("annotated")},
    "embedded": lambda get: {"adata": get("embedded")},
    "mapped": lambda get: {"adata": get("mapped")},
    "integrated": lambda get: {"adata": get("integrated")},
    "generated": lambda get: dict(zip(("real", "generated"), get("real_and_made"), strict=True)),
    "network": lambda get: {"adata": get("with_network")()[0]},
    "attention": lambda get: {"adata": get("with_network")("attention")[0]},
    "excess": lambda get: {"adata": get("with_network")("attention", signed=False)[0]},
    "difference": lambda get: {"adata": get("with_network")("attention", groups=("T cell",), reference="rest")[0]},
    "regulon": lambda get: {"regulon": get("targets")},
    "unknown": lambda get: {"regulon": get("targets").drop(columns="known")},
    "screen": lambda get: dict(zip(("predicted", "observed"), get("predicted_screen")(), strict=True)),
    "alone": lambda get: {"predicted": get("predicted_screen")()[0], "observed": None},
    "scores": lambda get: {"scores": get("scores")},
    "three": lambda get: {"adata": get("three")},
    "two sets": lambda get: {"gene_sets": sets_of(2)},
    "four sets": lambda get: {"gene_sets": sets_of(4)},
}
PICTURES = {
    "umap": ("umap", "mapped", {"color": "kind", "basis": "umap"}),
    "integration": ("integration", "integrated", {"batch_key": "donor", "labels_key": "cell type"}),
    "annotation": ("annotation", "annotated", {"labels_key": "cell type"}),
    "generated": ("generated", "generated", {"color": "cell_type"}),
    "confusion_matrix": ("confusion_matrix", "annotated", {"labels_key": "cell type"}),
    "marker_heatmap": ("marker_heatmap", "annotated", {"n_genes": 3}),
    "feature_heatmap": ("feature_heatmap", "embedded", {"groupby": "cell type", "n_cells": 15}),
    "reliability": ("reliability", "annotated", {}),
    "reliability_both": ("reliability", "annotated", {"labels_key": "cell type"}),
    "grn": ("grn", "network", {"n_labels": 12}),
    "grn_arrows": ("grn", "attention", {"n_edges": 40, "n_labels": 10}),
    "attention": ("attention", "excess", {"n_genes": 18}),
    "attention_difference": ("attention", "difference", {"n_genes": 18}),
    "regulon": ("regulon", "unknown", {}),
    "regulon_known": ("regulon", "regulon", {}),
    "perturbation": ("perturbation", "screen", {"condition": "A+B"}),
    "perturbation_alone": ("perturbation", "alone", {"condition": "A+B"}),
    "delta_scatter": ("delta_scatter", "screen", {"condition": "A+B"}),
    "hit_rate": ("hit_rate", "screen", {}),
    "discrimination": ("discrimination", "screen", {}),
    "perturbation_scores_pearson_delta": ("perturbation_scores", "scores", {"metric": "pearson_delta"}),
    "perturbation_scores_mse": ("perturbation_scores", "scores", {"metric": "mse"}),
    "reconstruction": ("reconstruction", "three", {}),
    "gene_overlap_2": ("gene_overlap", "two sets", {}),
    "gene_overlap_4": ("gene_overlap", "four sets", {}),
}
"""Plot, data and options of each picture."""
OF_PLOTS = {plot: name for name, (plot, *_) in PICTURES.items()}
"""A picture of each plot."""


@pytest.fixture
def get(request):
    return request.getfixturevalue


def draw(name, get, data=None, **options):
    plot, of, more = PICTURES[name]
    return getattr(sd.pl, plot)(**more | (DATA[of](get) if data is None else data) | options)


def test_every_plot_is_here():
    assert set(OF_PLOTS) == set(sd.pl.__all__)


@pytest.mark.parametrize("name", PICTURES)
def test_looks_as_it_did(name, get, tmp_path):
    """To update a baseline: check the figure named in the failure, and copy it to tests/pl/baseline."""
    with mpl.style.context("default"):
        draw(name, get, return_fig=True).savefig(tmp_path / f"{name}.png", dpi=50)
    # Of 255: another colour of one group makes 6, another letter in a name 0.5, fonts drawn otherwise 9 and more.
    assert compare_images(str(BASELINE / f"{name}.png"), str(tmp_path / f"{name}.png"), tol=2.0) is None


@pytest.mark.parametrize("name", OF_PLOTS.values())
def test_a_file_is_written_its_figure_closed_and_nothing_else_changed(name, get, hashed, tmp_path):
    data = DATA[PICTURES[name][1]](get)
    before, figures = hashed(data), plt.get_fignums()
    assert draw(name, get, data, save=tmp_path / "new" / "map.png") is None
    assert (tmp_path / "new" / "map.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["map.png"]
    assert plt.get_fignums() == figures
    for key in [key for key in getattr(data.get("adata"), "uns", ()) if key.endswith("_colors")]:
        assert PICTURES[name][0] in ("umap", "integration", "annotation")
        del data["adata"].uns[key]
    assert hashed(data) == before
    with pytest.raises(ValueError, match="must end in a picture format"):
        draw(name, get, data, save=tmp_path / "map")


@pytest.mark.parametrize(
    "name", [name for plot, name in OF_PLOTS.items() if "ax" in inspect.signature(getattr(sd.pl, plot)).parameters]
)
def test_the_users_axes_are_drawn_on_and_left_open(name, get, tmp_path):
    fig, (left, right) = plt.subplots(1, 2)
    assert draw(name, get, ax=right, save=tmp_path / "a.png") is None
    assert right.has_data() or right.child_axes
    assert not left.has_data()
    assert plt.get_fignums() == [fig.number]


def test_figures_axes_or_nothing_are_returned_as_asked(mapped, no_umap, monkeypatch):
    n_figures = []
    monkeypatch.setattr(plt, "show", lambda: n_figures.append(len(plt.get_fignums())))
    assert sd.pl.umap(mapped, "kind", basis="umap") is None
    assert n_figures == []
    assert sd.pl.umap(mapped, "kind", basis="umap", show=True) is None
    assert len(n_figures) == 1
    assert len(sd.pl.umap(mapped, ["kind", "depth", "LYZ"], basis="umap", ncols=2, show=False)) == 3  # no colour bars
    ax = plt.subplots()[1]
    assert sd.pl.umap(mapped, "depth", basis="umap", ax=ax, show=False) is ax


# --- refusals ---------------------------------------------------------------------------------------------------------
def changed(cells, part, key, value):
    cells = cells.copy()
    getattr(cells, part)[key] = value
    return cells


def assigned(cells, **parts):
    """A copy of cells with another X or other names."""
    cells = cells.copy()
    for name, value in parts.items():
        setattr(cells, name, value)
    return cells


def unsaid(part, key):
    """Delete an entry."""

    def change(data):
        cells = data["adata"].copy()
        del getattr(cells, part)[key]
        return {"adata": cells}

    return change


def adata(part, key, value):
    return lambda data: {"adata": changed(data["adata"], part, key, value)}


def adata_with(**parts):
    return lambda data: {"adata": assigned(data["adata"], **parts)}


def with_generated(change):
    return lambda data: {"generated": change(data["generated"])}


def rows(change):
    return lambda data: {"regulon": change(data["regulon"])}


def table(change):
    return lambda data: {"scores": change(data["scores"])}


def observed(change):
    return lambda data: {"observed": change(data["observed"])}


def of(labels, keep=True):
    """Observed cells with some labels, or without them."""
    return observed(lambda cells: cells[(cells.obs["perturbation"].isin(labels) == keep).to_numpy()].copy())


NO_PLACE, FLAT = np.full((3, 2), np.nan), np.full((160, 14), 400.0, np.float32)
FOUR = np.where(np.arange(60)[:, None] < 4, np.eye(60, 4), np.nan)
REFUSED = {
    "umap": [
        ({"basis": "X_pca"}, KeyError, r"'X_pca'.*'X_umap'.*tl\.embed"),
        ({"color": "Kind"}, KeyError, r"'Kind' .*did you mean 'kind'.*kind, depth"),
        ({"color": ["kind", "MS4A2"]}, KeyError, "'MS4A2' .*'MS4A1'"),
        ({"color": []}, ValueError, "color names nothing"),
        ({"color": 3}, TypeError, "color must be one or several names or None; got 3"),
        ({"color": ["LYZ", 3]}, TypeError, r"color must be .*got 3"),
        (
            {"color": "LYZ"},
            ValueError,
            "2 columns are called 'LYZ'",
            adata_with(var_names=["LYZ", "LYZ", "CD3E", "GNLY"]),
        ),
        ({"color": "LYZ"}, ValueError, "adata has no X", adata_with(X=None)),
        ({"layer": "count"}, KeyError, "layer 'count' .*'counts'", adata("layers", "counts", np.ones((60, 4)))),
        ({"layer": "counts", "use_raw": True}, ValueError, "exclude each other"),
        ({"use_raw": True}, ValueError, r"adata\.raw is None"),
        ({"gene_symbols": "name"}, KeyError, "no column 'name'"),
        ({"legend_loc": "left"}, ValueError, r"legend_loc .*'auto', .* got 'left'"),
        ({"title": ["a", "b"]}, ValueError, "title has 2 entries for 1 panels"),
        ({"groups": "B cells"}, KeyError, "did you mean 'B cell'"),
        ({"vmax": [1, 2]}, ValueError, "vmax has 2 entries for 1 panels"),
        ({"vmax": "p101"}, ValueError, "vmax='p101'"),
        ({"size": [1, 2]}, ValueError, "size must be a number"),
        ({"marker": ["o", "x"]}, TypeError, "marker must be one"),
        ({"colour": "kind"}, TypeError, r"scdiva\.pl\.umap\(\) has no argument 'colour' \(did you mean 'color'"),
        ({"palette": "no such map"}, ValueError, "palette must be one of"),
        ({"cmap": "no such map", "marker": "no marker"}, ValueError, "no such map"),
        ({"palette": {"B cell": "red"}}, KeyError, "no colour in palette"),
        (
            {},
            ValueError,
            "0 finite rows of 3",
            lambda data: {"adata": changed(data["adata"][:3], "obsm", "X_umap", NO_PLACE)},
        ),
        ({"basis": "X_new"}, ValueError, r"4 finite rows of 60: .*5", adata("obsm", "X_new", FOUR)),
    ],
    "integration": [
        ({"batch_key": "Donor"}, KeyError, "adata.obs has no column 'Donor'.*; it has 'cell type', 'donor', 'run'"),
        ({"labels_key": "kind"}, KeyError, "no column 'kind'"),
        ({"batch_key": []}, ValueError, "batch_key must name a column of adata.obs, or several; got none"),
        ({}, ValueError, "has 0 different values in 90 cells", adata("obs", "donor", np.nan)),
        ({}, KeyError, r"call scdiva.tl.integrate\(adata, 'donor'\)", unsaid("obsm", "X_scdiva_integrated")),
    ],
    "annotation": [
        ({"labels_key": "type"}, KeyError, "no column 'type'"),
        ({"key": "mine"}, KeyError, r"no 'mine', it has .*annotate\(adata, ..., key_added='mine'\)"),
        ({"basis": "X_pca"}, KeyError, "no 'X_pca'.*call scdiva.tl.embed"),
    ],
    "generated": [
        ({}, ValueError, "1 genes of the generated .* not among", lambda data: {"real": data["real"][:, 1:].copy()}),
        (
            {},
            ValueError,
            "var_names_make_unique",
            with_generated(lambda a: assigned(a, var_names=[*a.var_names[:59], a.var_names[0]])),
        ),
        ({}, ValueError, r"generated\.X .*negative", with_generated(lambda a: assigned(a, X=a.X.toarray() - 1))),
        ({}, ValueError, r"generated\.X .*count", lambda data: {"generated": data["real"]}),
        ({}, ValueError, "4 real and 30 generated cells", lambda data: {"real": data["real"][:4].copy()}),
        ({}, ValueError, "90 real and 0 generated cells", with_generated(lambda a: a[:0].copy())),
        ({}, ValueError, "2 genes in common", lambda data: {key: a[:, :2].copy() for key, a in data.items()}),
        (
            {},
            KeyError,
            "obs of the generated cells .*'cell_type'",
            with_generated(lambda a: assigned(a, obs=a.obs[[]])),
        ),
    ],
    "confusion_matrix": [
        ({"labels_key": "type"}, KeyError, "no column 'type'"),
        ({"key": "mine"}, KeyError, "call scdiva.tl.annotate"),
        ({}, ValueError, "has 160 different values", adata("obs", "cell type", [f"T{i}" for i in range(160)])),
    ],
    "marker_heatmap": [
        ({"key": "mine"}, KeyError, "call scdiva.tl.annotate"),
        ({"key": "one"}, ValueError, "holds 1 types, the largest of 160 cells", adata("obs", "one", "T cell")),
        (
            {"key": "two"},
            ValueError,
            "holds 2 types, the largest of 1 cells",
            adata("obs", "two", ["a", "b"] + 158 * [None]),
        ),
        ({"n_genes": 0}, ValueError, "n_genes must be at least 1"),
        ({"layer": "counts"}, KeyError, "no layer 'counts'"),
        ({"gene_symbols": "name"}, KeyError, "adata.var has no column 'name'; it has 'symbol'"),
        ({}, ValueError, "negative values", adata_with(X=-np.ones((160, 14), np.float32))),
        ({"key": "cell type"}, ValueError, "no gene is higher in one type", adata_with(X=FLAT)),
    ],
    "feature_heatmap": [
        ({"groupby": "type"}, KeyError, "type"),
        ({"basis": "X_no"}, KeyError, "scdiva.tl.embed"),
        ({}, ValueError, "is the same in all 160 cells", adata("obsm", "X_scdiva", np.ones((160, 3)))),
        ({"n_cells": 0}, ValueError, "n_cells must be"),
    ],
    "reliability_both": [
        ({"key": "mine"}, KeyError, r"call scdiva\.tl\.annotate"),
        (
            {},
            ValueError,
            "no cell has both a label",
            adata("obsm", "scdiva_label_probability", np.full((160, 4), np.nan)),
        ),
    ],
    "grn": [
        ({"key": "other"}, KeyError, r"no network 'other': call scdiva.tl.grn\(adata, ..., key_added='other'\)"),
        ({"group": "T cell"}, KeyError, "is of all cells: leave group out"),
        ({"genes": ["GENES", "TNF"]}, KeyError, r"none of 2 genes \(GENES, TNF\) is in the network"),
        ({"genes": "GENE1"}, TypeError, "must be a list"),
        ({"genes": ["lone", "GENE1"]}, ValueError, "no edge between the 2 genes asked for"),
        ({"modules": "other"}, KeyError, r"call scdiva.tl.grn_modules\(adata, ..., key_added='other'\)"),
        ({"n_edges": 0}, ValueError, "n_edges must be"),
        ({"n_labels": -1}, ValueError, "n_labels must be"),
        ({"gene_symbols": "name"}, KeyError, "has no column 'name'"),
        ({}, KeyError, r"adata\.varp .*'scdiva_grn'.*call scdiva.tl.grn", unsaid("varp", "scdiva_grn")),
    ],
    "attention": [
        ({"key": "other"}, KeyError, "no network 'other': call scdiva.tl.grn"),
        ({"genes": ["TNF"]}, KeyError, r"none of 1 genes \(TNF\) is in the network 'scdiva_grn' of 26"),
        ({"genes": ["GENE1", "lone"]}, ValueError, "no weight between these genes is kept: call scdiva.tl.grn"),
        ({"n_genes": 0}, ValueError, "n_genes must be"),
        ({"gene_symbols": "name"}, KeyError, "has no column 'name'"),
    ],
    "regulon": [
        ({}, KeyError, "regulon has no column 'weight'", rows(lambda r: r.drop(columns="weight"))),
        ({}, KeyError, "of the 2 of the frame: SPI1, X", rows(lambda r: pd.concat([r, r.assign(source="X")]))),
        ({"source": "GATA1"}, KeyError, "source='GATA1' must be one of the 1 of the frame: SPI1"),
        ({}, ValueError, "no target with a weight: call scdiva.tl.regulon", rows(lambda r: r.assign(weight=np.nan))),
        ({}, ValueError, "1 targets of SPI1 come twice, first 'TAR", rows(lambda r: pd.concat([r, r.tail(1)]))),
        ({"n_targets": 0}, ValueError, "n_targets must be"),
    ],
    "perturbation": [
        ({"condition": "D"}, KeyError, "'D' must name one of the 5 predicted"),
        ({}, TypeError, r"condition must be the name .* got AnnData", lambda data: {"condition": data["observed"]}),
        ({}, ValueError, "is a control", of(["control"], False)),
        ({}, ValueError, r"'A\+B'\) was observed", of(["A+B"], False)),
        ({}, ValueError, "ENSG0", observed(lambda a: assigned(a, var_names=[f"ENSG{i}" for i in range(40)]))),
        ({}, ValueError, r"var_names_make_unique\(\)", observed(lambda a: assigned(a, var_names=["A"] * 40))),
        (
            {},
            ValueError,
            "is missing for 144 of 144 cells",
            observed(lambda a: changed(a, "obs", "perturbation", None)),
        ),
        ({"layer": "mine"}, KeyError, "mine"),
        ({"n_genes": 0}, ValueError, "n_genes must be at least 1"),
        ({"gene_symbols": "name"}, KeyError, "predicted.var has no column 'name'"),
        ({}, KeyError, r"scdiva\.tl\.predict_perturbation", lambda data: {"predicted": data["observed"]}),
    ],
    "delta_scatter": [
        ({"condition": "D"}, KeyError, "'D' must name one of the 5 predicted"),
        ({"n_names": -1}, ValueError, "n_names must be"),
        ({}, ValueError, r"'A\+B'\) was observed", of(["A+B"], False)),
    ],
    "hit_rate": [({}, ValueError, "none of 5 predicted conditions", of(["control"]))],
    "discrimination": [
        ({}, ValueError, "only one predicted condition was observed, 'A'", of(["A", "control"])),
        ({"group": "NK cell"}, KeyError, "group='NK cell' must"),
    ],
    "perturbation_scores_mse": [
        ({"metric": "pearson"}, KeyError, "'pearson' is not a numeric column"),
        ({"metric": "group"}, KeyError, "'group' is not a numeric column"),
        ({}, KeyError, "'method' is not a numeric column", table(lambda t: t.drop(columns="method"))),
        ({"reference": "other"}, ValueError, "no row has a mse with reference='other'"),
        ({}, ValueError, "no row has a mse", table(lambda t: t.assign(mse=np.nan))),
    ],
    "reconstruction": [
        ({"keys": "mine"}, KeyError, r"call scdiva.tl.reconstruct\(adata, ..., key_added='mine'\)"),
        ({"keys": []}, ValueError, r"keys=\[\] must name one reconstruction"),
        ({"keys": ["one", "one"]}, ValueError, "several different ones"),
        (
            {"keys": "one"},
            ValueError,
            "recovered in the reconstruction 'one'",
            adata("layers", "one_rank", np.zeros((40, 80), int)),
        ),
        ({}, KeyError, r"no reconstruction: call scdiva.tl.reconstruct\(adata\)", unsaid("uns", "scdiva")),
    ],
    "gene_overlap_2": [
        ({"gene_sets": [["X"], ["Y"]]}, TypeError, "gene_sets .*mapping.*got list"),
        ({"gene_sets": {"a": "SPI1", "b": ["X"]}}, TypeError, "gene_sets.'a'. must be"),
        ({"gene_sets": {"a": ["X"], "b": [0.5, "X", 1]}}, TypeError, "gene_sets.'b'. must be"),
        ({"gene_sets": {"a": ["X"], "b": []}}, ValueError, "gene_sets.'b'. is empty"),
        ({"gene_sets": {"a": ["X"]}}, ValueError, "gene_sets has 1 sets: give 2 to 12"),
        ({"gene_sets": {str(i): ["X"] for i in range(13)}}, ValueError, "gene_sets has 13 sets"),
        ({"gene_sets": {1: ["X"], "1": ["Y"]}}, ValueError, "gene_sets has 1 sets.*2 to 12"),
    ],
}
"""Of a picture's call: other options, the error, what it says, and a change of the data if there is one."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_drawn_is_refused(name, get, hashed):
    inputs = DATA[PICTURES[name][1]](get)
    for options, error, message, *change in REFUSED[name]:
        data = inputs | (change[0](inputs) if change else {})
        before = hashed(data)
        with pytest.raises(error, match=message):
            draw(name, get, data, **options)
        assert hashed(data) == before
    assert plt.get_fignums() == []
