from __future__ import annotations

import anndata as ad
import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

mpl.use("Agg")
import matplotlib.pyplot as plt

import scdiva as sd
from scdiva import _constants as C
from scdiva.data.cells import log_normalised
from scdiva.datasets import toy
from scdiva.metrics import calibration

GREY = (0.83, 0.83, 0.83, 1.0)
"""Colour of cells without a value."""
TYPES = ["B cell", "CD4+ memory T cell", "CD8+ T cell", "Monocyte"]


def texts(labels) -> list[str]:
    return [label.get_text() for label in labels]


def legend(fig) -> list[str]:
    return texts(fig.axes[0].get_legend().get_texts())


def heatmap(fig) -> tuple[list[str], list[str], np.ndarray]:
    """Names of rows and columns, and the fields of a heatmap, NaN where there is none."""
    axes = fig.axes[0]
    fields = np.ma.filled(np.ma.asarray(axes.collections[0].get_array()).astype(float), np.nan)
    rows, columns = texts(axes.get_yticklabels()), texts(axes.get_xticklabels())
    return rows, columns, fields.reshape(-1, len(columns) or len(fields))


def dots(axes) -> np.ndarray:
    """Points of all layers."""
    return np.concatenate([np.asarray(layer.get_offsets()) for layer in axes.collections])


def colours_at(axes) -> dict[tuple, str]:
    """Colour of the cell at each place."""
    cells = axes.collections[0]
    return {tuple(p): mpl.colors.to_hex(c) for p, c in zip(cells.get_offsets(), cells.get_facecolors(), strict=True)}


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


@pytest.fixture
def no_umap(monkeypatch):
    """Fail where a UMAP is computed."""
    monkeypatch.delattr("scdiva.embedding.umap.umap_of")


@pytest.fixture
def mapped() -> ad.AnnData:
    """60 cells of three groups on a map, and nothing from which another one could be computed."""
    rng = np.random.default_rng(0)
    group = np.arange(60) % 3
    cells = ad.AnnData(sp.csr_matrix(rng.poisson(2.0, (60, 4)).astype(np.float32)))
    cells.var_names = ["CD3E", "MS4A1", "LYZ", "GNLY"]
    cells.obs["kind"] = pd.Categorical.from_codes(group, ["T cell", "B cell", "Monocyte", "never seen"])
    cells.obs["depth"] = rng.uniform(size=60)
    cells.obsm["X_umap"] = rng.normal(size=(60, 2)) + 6 * np.eye(3)[group][:, :2]
    return cells


@pytest.fixture
def integrated() -> ad.AnnData:
    """Three types in two batches, separate before and mixed after; UMAPs are stored, so that none is computed."""
    n = 90
    rng = np.random.default_rng(0)
    kind, batch = np.arange(n) % 3, np.arange(n) // 3 % 2
    centre = np.array([[0.0, 0.0], [9.0, 1.0], [4.0, 8.0]])[kind]
    adata = ad.AnnData(np.zeros((n, 1), np.float32), obs=pd.DataFrame(index=[f"cell{i}" for i in range(n)]))
    adata.obs["cell type"] = pd.Categorical.from_codes(kind, ["T cell", "B cell", "Monocyte"])
    adata.obs["donor"] = pd.Categorical.from_codes(batch, ["Anna", "Ben"])
    adata.obs["run"] = batch + 9
    noise = rng.normal(size=(2, n, 2))
    adata.obsm["X_scdiva_umap"] = centre + noise[0] + 3.0 * batch[:, None]
    adata.obsm["X_scdiva_integrated_umap"] = centre + noise[1]
    adata.obsm["X_scdiva"] = rng.normal(size=(n, 4)).astype(np.float32)
    adata.obsm["X_scdiva_integrated"] = rng.normal(size=(n, 4)).astype(np.float32)
    return adata


@pytest.fixture
def real_and_made() -> tuple[ad.AnnData, ad.AnnData]:
    """Real counts of 90 toy cells, and 30 of them with noise, log-normalised to ten thousand."""
    real = toy(90, 60)
    generated = real[::3].copy()
    noise = np.random.default_rng(0).normal(1, 0.2, generated.shape)
    counts = np.expm1(np.maximum(log_normalised(generated)[0].toarray() * noise, 0))
    generated.X = sp.csr_matrix(np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True)).astype(np.float32))
    generated.obs_names = [f"made{i}" for i in range(30)]
    return real, generated


@pytest.fixture
def components(monkeypatch):
    """Replace UMAP by the first two components, and record its arguments."""
    calls = []
    monkeypatch.setattr("scdiva.pl._umap.umap_of", lambda z, seed: calls.append((z, seed)) or z[:, :2])
    return calls


@pytest.fixture
def embedded(annotated) -> ad.AnnData:
    """Types at known places: B cells and monocytes alike, the T cells alike, in features of very different sizes."""
    rng = np.random.default_rng(3)
    centres = rng.normal(size=(2, 12))
    kind = annotated.obs["cell type"].cat.codes.to_numpy()
    z = centres[np.array([0, 1, 1, 0])[kind]] + 0.3 * rng.normal(size=(4, 12))[kind]
    z = z + 0.2 * rng.normal(size=(160, 12))
    annotated.obsm["X_scdiva"] = (z * 10.0 ** np.arange(-3, 9)).astype(np.float64)
    return annotated


@pytest.fixture
def targets() -> pd.DataFrame:
    """Thirteen targets of a factor, the strongest first."""
    weight = np.linspace(0.9, 0.3, 13) * np.where(np.arange(13) % 4 == 1, -1, 1)
    rows = pd.DataFrame({"source": "SPI1", "target": [f"TARGET{i}" for i in range(13)], "weight": weight})
    rows["correlation"] = weight / 2
    rows["sign"] = np.sign(weight)
    rows["known"] = [1.0, np.nan, -1.0, 0.0, *[np.nan] * 9]
    return rows


@pytest.fixture
def scores(predicted_screen) -> pd.DataFrame:
    return sd.tl.score_perturbation(*predicted_screen())


@pytest.fixture
def three(reconstruct) -> ad.AnnData:
    """The columns of the paper's figure, written in another order than they are drawn."""
    adata = reconstruct(key="many", n_steps=32, recall=0.8)
    reconstruct(adata, key="none", mask_ratio=0.0)
    return reconstruct(adata, key="one", n_steps=1)


def sets_of(n: int) -> dict[str, list[str]]:
    """Sets of 40 to 110 of 160 genes."""
    draw = np.random.default_rng(0)
    names = ("PBMC", "pancreas", "immune", "Zheng68k", "lung", "cortex", "skin")[:n]
    return {name: [f"G{i}" for i in draw.permutation(160)[: 110 - 10 * k]] for k, name in enumerate(names)}


@pytest.fixture
def annotated() -> ad.AnnData:
    """160 cells of four types with the keys of an annotation, made by hand: the T cells are often mixed up.

    The map stands there, so that none is computed. Each type has three genes of its own, in counts.
    """
    rng = np.random.default_rng(0)
    n = 160
    kind = np.arange(n) % 4
    centre = np.array([[0.0, 8.0], [0.0, 0.0], [3.0, 1.0], [9.0, 5.0]])[kind]
    logits = 4.0 * np.eye(4)[kind] + np.array([[0, 0, 0, 0], [0, 0, 3, 0], [0, 3, 0, 0], [0, 0, 0, 0]])[kind]
    logits = logits + rng.normal(size=(n, 4))
    probability = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    best, sure = probability.argmax(axis=1), probability.max(axis=1)
    rate = np.full((4, 14), 1.0)
    for i in range(4):
        rate[i, 3 * i : 3 * i + 3] = 9.0
    adata = ad.AnnData(
        rng.poisson(rate[kind]).astype(np.float32),
        obs=pd.DataFrame(index=[f"cell{i}" for i in range(n)]),
        var=pd.DataFrame({"symbol": [f"G{i}" for i in range(14)]}, index=[f"ENSG{i:05d}" for i in range(14)]),
    )
    adata.obs["cell type"] = pd.Categorical.from_codes(kind, TYPES)
    label = np.array(TYPES, dtype=object)[best]
    label[sure < 0.5] = "unknown"
    adata.obs["scdiva_label"] = pd.Categorical(label)
    adata.obs["scdiva_label_confidence"] = sure.astype(np.float32)
    adata.obsm["scdiva_label_probability"] = probability.astype(np.float32)
    adata.obsm["X_scdiva"] = rng.normal(size=(n, 4)).astype(np.float32)
    adata.obsm["X_scdiva_umap"] = centre + rng.normal(size=(n, 2))
    scores = calibration(sure[::2] ** 2, (best == kind)[::2])
    adata.uns["scdiva"] = {
        "scdiva_label": {
            "labels": np.array(TYPES),
            "ece": scores["ece"],
            "reliability": {name: scores[name] for name in ("confidence", "accuracy", "n_cells")},
        }
    }
    return adata


@pytest.fixture
def predicted_screen(screen, by_hand):
    """A function that gives a prediction of 24 cells a condition, and the screen that was observed.

    Three genes are called like the perturbations A, B and C, which raise them; predicted cells are control cells moved
    by the change.
    """

    def make(groups=("",)):
        observed = screen(groups=groups, n=24)
        observed.var_names = ["A", "B", "C", *observed.var_names[3:]]
        observed.var["symbol"] = [f"{name}-s" for name in observed.var_names]
        for gene, name in enumerate("ABC"):
            observed.X[observed.obs["perturbation"].str.contains(name).to_numpy(), gene] += 100
        predicted = by_hand(observed, "line" if any(groups) else None)
        names = predicted.obs["perturbation"].to_numpy()
        cells, obs = [], []
        for i, name in enumerate(names):
            group = predicted.obs["line"].iloc[i]
            control = observed[(observed.obs["perturbation"] == "control") & (observed.obs["line"] == group)]
            log = np.log1p(1e4 * control.X / control.X.sum(axis=1, keepdims=True))
            cells.append(np.maximum(log + predicted.varm[C.VARM_MEAN][:, i] - predicted.varm[C.VARM_CONTROL][:, i], 0))
            condition = predicted.uns[C.UNS][C.PERTURBATION]["condition"][i]
            obs.append(pd.DataFrame({C.OBS_CONDITION: condition, "perturbation": name, "line": group}, index=range(24)))
        about = pd.concat(obs)
        about.index = [f"predicted{i}" for i in range(len(about))]
        x = np.vstack(cells).astype(np.float32)
        return ad.AnnData(x, obs=about, var=predicted.var, varm=dict(predicted.varm), uns=predicted.uns), observed

    return make


@pytest.fixture
def with_network():
    """A function that gives 26 genes in three modules with a network as `scdiva.tl.grn` writes it, and its matrix.

    Weights are large within a module, two between modules are below 0 if they may be; a gene, "lone", has none.
    """

    def make(method="correlation", signed=True, groups=(), reference="", sources=None):
        rng = np.random.default_rng(1)
        kind = np.repeat([0, 1, 2, 2], [12, 8, 5, 1])
        n = len(kind)
        weights = np.where(kind[:, None] == kind, rng.uniform(0.4, 1.0, (n, n)), 0.0)
        weights[rng.random((n, n)) < 0.5] = 0
        weights[0, 12], weights[3, 20] = (-0.9, -0.8) if signed else (0.9, 0.8)
        if method in ("correlation", "embedding"):
            weights = np.where(np.abs(weights) >= np.abs(weights.T), weights, weights.T)
        weights[-1] = weights[:, -1] = 0
        np.fill_diagonal(weights, 0)
        names = [*(f"GENE{i}" for i in range(n - 1)), "lone"]
        is_source = np.ones(n, dtype=bool) if sources is None else np.isin(names, sources)
        weights[~is_source] = 0
        adata = ad.AnnData(
            np.ones((3, n), dtype=np.float32),
            var=pd.DataFrame({"symbol": [f"{name}-s" for name in names]}, index=names),
        )
        adata.var["scdiva_grn_module"] = pd.Categorical(kind.astype(str))
        keys = [f"scdiva_grn_{group}" for group in groups] or ["scdiva_grn"]
        for i, key in enumerate(keys):
            adata.varp[key] = sp.csr_matrix((weights * (1 - 0.5 * i)).astype(np.float32))
        adata.uns["scdiva"] = {
            "scdiva_grn": {
                "method": method, "model": "scdiva-mini", "groupby": "line" if groups else "", "reference": reference,
                "groups": np.array(groups, dtype=object), "keys": np.array(keys), "signed": signed, "n_targets": 0,
                "sources": np.array(names)[is_source], "targets": np.array(names), "n_cells": np.full(len(keys), 3),
            }
        }  # fmt: skip
        return adata, weights

    return make
