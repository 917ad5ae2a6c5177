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

from scdiva import _constants as C
from scdiva.metrics import calibration

BASELINE = Path(__file__).parent / "baseline"
PERTURBED = ("GA", "GB", "GC", "GA+GB")
GENES = ["GA", "GB", "GC", *[f"G{i}" for i in range(37)]]
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


@pytest.fixture
def screen():
    """A function that gives predicted and observed cells of a small screen, in some groups of cells."""
    return _screen


def _screen(groups: tuple[str, ...] = ("",), n_cells: int = 24) -> tuple[ad.AnnData, ad.AnnData]:
    """Give predicted and observed cells, counts of 40 genes; the prediction is right but for noise and too weak.

    GA raises itself and ten genes, GB lowers ten others, GC does both a little. The additive baseline is defined for
    the combination only, the one from elsewhere where there are groups.
    """
    rng = np.random.default_rng(0)
    fold = {name: np.ones(len(GENES)) for name in ("control", *PERTURBED)}
    fold["GA"][[0, *range(3, 13)]] = np.linspace(6, 2, 11)
    fold["GB"][[1, *range(13, 23)]] = np.linspace(0.1, 0.5, 11)
    fold["GC"][[2, *range(8, 18)]] = np.linspace(3, 0.4, 11)
    fold["GA+GB"] = fold["GA"] * fold["GB"]
    counts, obs = [], []
    for g, group in enumerate(groups):
        base = np.random.default_rng(g).gamma(2.0, 3.0, len(GENES))
        for name, change in fold.items():
            counts.append(rng.poisson(base * change, (n_cells, len(GENES))))
            obs.append(pd.DataFrame({"perturbation": [name] * n_cells, "cell type": group}))
    about = pd.concat(obs)
    about.index = [f"cell{i}" for i in range(len(about))]
    observed = ad.AnnData(np.vstack(counts).astype(np.float32), obs=about)
    observed.var = pd.DataFrame({"symbol": [f"{name}-s" for name in GENES]}, index=GENES)
    return _prediction(observed, groups, rng), observed


def _log_normalised(cells: ad.AnnData) -> np.ndarray:
    """Logarithms as by definition, dense."""
    return np.log1p(1e4 * cells.X / cells.X.sum(axis=1, keepdims=True))


def _mean_of(observed: ad.AnnData, perturbation: str, group: str = "") -> np.ndarray:
    """Mean log expression of the cells of a condition."""
    chosen = (observed.obs["perturbation"] == perturbation) & (observed.obs["cell type"] == group)
    return _log_normalised(observed)[chosen.to_numpy()].mean(axis=0)


def _prediction(observed: ad.AnnData, groups: tuple[str, ...], rng: np.random.Generator) -> ad.AnnData:
    conditions = [(name, group) for group in groups for name in PERTURBED]
    values: dict[str, list[np.ndarray]] = {name: [] for name in ("mean", "sd", "control", *C.BASELINES)}
    cells, obs = [], []
    nowhere = np.full(len(GENES), np.nan)
    for name, group in conditions:
        control = _mean_of(observed, "control", group)
        change = {part: _mean_of(observed, part, group) - control for part in PERTURBED}
        mean = control + 0.8 * change[name] + rng.normal(0, 0.1, len(GENES))
        train_mean = control + np.mean([change[part] for part in PERTURBED[:3]], axis=0)
        others = [_mean_of(observed, name, other) for other in groups if other != group]
        values["mean"].append(mean)
        values["sd"].append(np.full(len(GENES), 0.1))
        values["control"].append(control)
        values["no_change"].append(control)
        values["train_mean"].append(train_mean)
        values["matching_mean"].append(nowhere)
        values["additive"].append(control + change["GA"] + change["GB"] if "+" in name else nowhere)
        values["linear"].append(0.5 * (train_mean + mean))
        values["elsewhere"].append(np.mean(others, axis=0) if others else nowhere)
        of_group = (observed.obs["perturbation"] == "control") & (observed.obs["cell type"] == group)
        cells.append(np.maximum(_log_normalised(observed)[of_group.to_numpy()] + mean - control, 0))
        names = observed.obs_names[of_group]
        obs.append(pd.DataFrame({"perturbation": name, "cell type": group, "control_cell": names}))
    about = pd.concat(obs)
    about.index = [f"predicted{i}" for i in range(len(about))]
    predicted = ad.AnnData(np.vstack(cells).astype(np.float32), obs=about)
    predicted.obs["perturbation"] = predicted.obs["perturbation"].astype("category")
    predicted.var = observed.var.copy()
    keys = {"mean": C.VARM_MEAN, "sd": C.VARM_SD, "control": C.VARM_CONTROL}
    for name, columns in values.items():
        predicted.varm[keys.get(name, C.VARM_BASELINE + name)] = np.array(columns, dtype=np.float32).T
    n_parts = np.array([name.count("+") + 1 for name, _ in conditions])
    predicted.uns[C.UNS] = {
        C.PERTURBATION: {
            "perturbation_key": "perturbation",
            "control": "control",
            "groupby": "cell type" if any(groups) else "",
            "dose_key": "",
            "separator": "+",
            "condition": np.array([f"{name} in {group}" if group else name for name, group in conditions]),
            "perturbation": np.array([name for name, _ in conditions]),
            "group": np.array([group for _, group in conditions]),
            "dose": np.ones(len(conditions)),
            "n_parts": n_parts,
            "n_seen": n_parts,
            "trained": np.zeros(len(conditions), dtype=bool),
            "train_mean": predicted.varm[C.VARM_BASELINE + "train_mean"][:, 0],
        }
    }
    return predicted
