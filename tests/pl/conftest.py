from __future__ import annotations

from pathlib import Path

import anndata as ad
import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.testing.compare import compare_images

from scdiva import _constants as C
from scdiva.metrics import calibration

BASELINE = Path(__file__).parent / "baseline"
TYPES = ["B cell", "CD4+ memory T cell", "CD8+ T cell", "Monocyte"]


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


@pytest.fixture
def looks_as_it_did(tmp_path):
    """Compare a figure to its picture in tests/pl/baseline.

    Made anew by: draw, look at it, and copy the file that is named when this fails to tests/pl/baseline.
    """

    def compare(fig, name: str) -> None:
        fig.savefig(tmp_path / f"{name}.png", dpi=50)
        # Of 255: another colour of one group makes 6, another letter in a name 0.5, fonts drawn otherwise 9 and more.
        assert compare_images(str(BASELINE / f"{name}.png"), str(tmp_path / f"{name}.png"), tol=2.0) is None

    with mpl.style.context("default"):
        yield compare


@pytest.fixture
def annotated() -> ad.AnnData:
    """160 cells of four types with the keys of an annotation, made by hand: the T cells are often mixed up.

    The map stands there, so that none is computed. Each type has three genes of its own, in counts.
    """
    rng = np.random.default_rng(0)
    n = 160
    kind = np.arange(n) % 4
    place = np.array([[0.0, 8.0], [0.0, 0.0], [3.0, 1.0], [9.0, 5.0]])[kind]
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
    adata.obsm["X_scdiva_umap"] = place + rng.normal(size=(n, 2))
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
