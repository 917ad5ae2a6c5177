from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy.stats import ttest_ind

from scdiva import _constants as C
from scdiva.pl import perturbation


def log_cells(observed, name: str, group: str = "") -> np.ndarray:
    """Log-normalised expression of the observed cells of a condition."""
    x = np.log1p(1e4 * observed.X / observed.X.sum(axis=1, keepdims=True))
    return x[((observed.obs["perturbation"] == name) & (observed.obs["line"] == group)).to_numpy()]


def parts(fig) -> tuple[list[str], list[str], dict[str, np.ndarray]]:
    """Names of genes, those that are bold, and the means drawn of each kind of cells or baseline."""
    axes = fig.axes[0]
    ticks = axes.get_xticklabels()
    means = {dots.get_label().split(" (")[0]: dots.get_offsets()[:, 1] for dots in axes.collections}
    return [t.get_text() for t in ticks], [t.get_text() for t in ticks if t.get_fontweight() == "bold"], means


@pytest.mark.parametrize("name", ["perturbation", "perturbation_alone"])
def test_looks_as_it_did(predicted_screen, looks_as_it_did, name):
    predicted, observed = predicted_screen()
    observed = observed if name == "perturbation" else None
    looks_as_it_did(perturbation(predicted, "A+B", observed, return_fig=True), name)


def test_genes_are_those_of_the_largest_observed_t_and_dots_are_means(predicted_screen):
    predicted, observed = predicted_screen()
    observed = observed[:, ::-1].copy()  # genes are matched by name
    fig = perturbation(predicted, "A+B", observed, n_genes=7, return_fig=True)
    genes, bold, means = parts(fig)
    cells, control = log_cells(observed, "A+B"), log_cells(observed, "control")
    t = ttest_ind(cells, control, equal_var=False).statistic
    order = np.argsort(-np.abs(t))[:7]
    assert genes == list(observed.var_names[order])
    assert set(bold) == {"A", "B"} & set(genes) != set()
    at = predicted.var_names.get_indexer(genes)
    np.testing.assert_allclose(means["observed"], cells[:, order].mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(means["control"], control[:, order].mean(axis=0), rtol=1e-5)
    own = predicted[predicted.obs["perturbation"] == "A+B"].X[:, at]
    np.testing.assert_allclose(means["predicted"], own.mean(axis=0), rtol=1e-5)
    assert fig.axes[0].get_title() == "A+B"
    labels = [text.get_text() for text in fig.axes[0].get_legend().get_texts()]
    assert labels[:3] == [f"{kind} (24 cells)" for kind in ("control", "predicted", "observed")]


def test_alone_genes_are_those_of_the_largest_change_for_its_uncertainty(predicted_screen):
    predicted, _ = predicted_screen()
    delta = predicted.varm[C.VARM_MEAN][:, 1] - predicted.varm[C.VARM_CONTROL][:, 1]
    genes, bold, means = parts(perturbation(predicted, "B", n_genes=5, return_fig=True))
    assert genes == list(predicted.var_names[np.argsort(-np.abs(delta))[:5]])
    assert "B" in bold
    assert set(means) == {"predicted", "mean of control cells"}
    predicted.varm[C.VARM_SD][:, 1] = np.linspace(0.01, 3, 40)
    sure, _, _ = parts(perturbation(predicted, "B", n_genes=5, return_fig=True))
    assert sure == list(predicted.var_names[np.argsort(-np.abs(delta / np.linspace(0.01, 3, 40)))[:5]]) != genes
    for sd in (np.full((40, 5), np.nan, dtype=np.float32), None):  # nothing is known: by the change itself
        if sd is None:
            del predicted.varm[C.VARM_SD]
        else:
            predicted.varm[C.VARM_SD] = sd
        assert parts(perturbation(predicted, "B", n_genes=5, return_fig=True))[0] == genes


def test_a_condition_is_of_one_group(predicted_screen):
    predicted, observed = predicted_screen(("B cell", "T cell"))
    genes, _, means = parts(perturbation(predicted, "A in T cell", observed, n_genes=4, return_fig=True))
    at = observed.var_names.get_indexer(genes)
    for kind, name in (("control", "control"), ("observed", "A")):
        np.testing.assert_allclose(means[kind], log_cells(observed, name, "T cell")[:, at].mean(axis=0), rtol=1e-5)
    with pytest.raises(KeyError, match=r"'A' .*10 predicted.*A in B cell"):
        perturbation(predicted, "A", observed)


def test_the_order_of_parts_does_not_matter(predicted_screen):
    predicted, observed = predicted_screen()
    observed.obs["perturbation"] = observed.obs["perturbation"].replace("A+B", "B+A")
    fig = perturbation(predicted, "B+A", observed, gene_symbols="symbol", return_fig=True)
    genes, bold, _ = parts(fig)
    assert all(name.endswith("-s") for name in genes)
    assert "A-s" in bold
    assert fig.axes[0].get_title() == "A+B"


def test_a_single_cell_is_drawn_and_ranked_by_its_difference(predicted_screen):
    predicted, observed = predicted_screen()
    of_ga = np.flatnonzero(observed.obs["perturbation"] == "A")
    observed = observed[np.setdiff1d(np.arange(observed.n_obs), of_ga[1:])].copy()
    genes, _, _ = parts(perturbation(predicted, "A", observed, n_genes=4, return_fig=True))
    change = log_cells(observed, "A")[0] - log_cells(observed, "control").mean(axis=0)
    assert genes == list(observed.var_names[np.argsort(-np.abs(change))[:4]])


def test_the_users_axes_are_drawn_on_and_nothing_is_changed(predicted_screen, tmp_path):
    predicted, observed = predicted_screen()
    before = predicted.copy(), observed.copy()
    _, (left, right) = plt.subplots(1, 2)
    assert perturbation(predicted, "A", observed, ax=right, save=tmp_path / "a.png") is None
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert right.get_ylabel() == "log-normalised expression"
    assert left.get_ylabel() == ""
    for now, then in zip((predicted, observed), before, strict=True):
        assert np.array_equal(now.X, then.X)
        assert now.uns.keys() == then.uns.keys()
        assert now.obs.equals(then.obs)


def test_what_cannot_be_drawn_is_refused(predicted_screen, tmp_path):
    predicted, observed = predicted_screen(("B cell", "T cell"))
    of = observed.obs
    labelled = (of["line"] != "T cell") | (of["perturbation"] != "control")
    other, twice, unlabelled = (observed.copy() for _ in range(3))
    other.var_names = [f"ENSG{i}" for i in range(40)]
    twice.var_names = ["A", "A", *observed.var_names[2:]]
    unlabelled.obs["perturbation"] = of["perturbation"].where(of["perturbation"] != "C")
    for condition, cells, options, error, words in [
        ("D", observed, {}, KeyError, "'D' must name one of the 10 predicted"),
        ("A in T cell", observed[labelled.to_numpy()], {}, ValueError, "no control cells.*'T cell'"),
        ("A in T cell", observed[(of["perturbation"] != "control").to_numpy()], {}, ValueError, "is a control"),
        (
            "A in T cell",
            observed[(of["perturbation"] != "A").to_numpy()],
            {},
            ValueError,
            r"'A in T cell'\) was observed",
        ),
        ("A in T cell", other, {}, ValueError, "ENSG0"),
        ("A in T cell", twice, {}, ValueError, r"var_names_make_unique\(\)"),
        ("A in T cell", unlabelled, {}, ValueError, "is missing for 48 of 288 cells"),
        ("A in T cell", observed, {"layer": "mine"}, KeyError, "mine"),
        ("A in T cell", observed, {"n_genes": 0}, ValueError, "n_genes must be at least 1"),
        ("A in T cell", observed, {"gene_symbols": "name"}, KeyError, "predicted.var has no column 'name'"),
        ("A in T cell", observed, {"save": tmp_path / "picture"}, ValueError, "picture format"),
    ]:
        with pytest.raises(error, match=words):
            perturbation(predicted, condition, cells, **options)
    del other.obs["line"]
    with pytest.raises(KeyError, match="'line'"):
        perturbation(predicted, "A in T cell", other)
    with pytest.raises(KeyError, match=r"scdiva\.tl\.predict_perturbation"):
        perturbation(observed, "A")
    with pytest.raises(ValueError, match="Pass all cells that"):
        perturbation(predicted[predicted.obs["perturbation"] == "B"], "A in T cell")
    with pytest.raises(TypeError, match="expected an AnnData object"):
        perturbation(predicted, "A in T cell", "observed.h5ad")
    del predicted.obs["scdiva_condition"]
    with pytest.raises(ValueError, match="scdiva_condition"):
        perturbation(predicted, "A in T cell")
    assert plt.get_fignums() == []
