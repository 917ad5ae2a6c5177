from __future__ import annotations

from pathlib import Path

import anndata as ad
import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.testing.compare import compare_images

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
    told = calibration(sure[::2] ** 2, (best == kind)[::2])
    adata.uns["scdiva"] = {
        "scdiva_label": {
            "labels": np.array(TYPES),
            "ece": told["ece"],
            "reliability": {name: told[name] for name in ("confidence", "accuracy", "n_cells")},
        }
    }
    return adata
