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


def parts(fig) -> tuple[list[str], list[str], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Names of genes, those that are bold, and the changes drawn of each kind, with half the length of their bars."""
    axes = fig.axes[0]
    ticks = axes.get_yticklabels()
    changes, bars = {}, {}
    for drawn in axes.containers:
        kind = drawn.get_label().split()[0].rstrip(",")
        changes[kind] = drawn.lines[0].get_xdata()
        if drawn.has_xerr:
            bars[kind] = np.array([np.ptp(line[:, 0]) / 2 for line in drawn.lines[2][0].get_segments()])
    return [t.get_text() for t in ticks], [t.get_text() for t in ticks if t.get_fontweight() == "bold"], changes, bars


@pytest.mark.parametrize("name", ["perturbation", "perturbation_alone"])
def test_looks_as_it_did(predicted_screen, looks_as_it_did, name):
    predicted, observed = predicted_screen()
    observed = observed if name == "perturbation" else None
    looks_as_it_did(perturbation(predicted, "A+B", observed, return_fig=True), name)


def test_genes_are_those_of_the_largest_observed_t_and_dots_are_changes(predicted_screen):
    predicted, observed = predicted_screen()
    observed = observed[:, ::-1].copy()  # genes are matched by name
    fig = perturbation(predicted, "A+B", observed, n_genes=7, return_fig=True)
    genes, bold, changes, bars = parts(fig)
    cells, control = log_cells(observed, "A+B"), log_cells(observed, "control")
    t = ttest_ind(cells, control, equal_var=False).statistic
    order = np.argsort(-np.abs(t))[:7]
    assert genes == list(observed.var_names[order])
    assert set(bold) == {"A", "B"} & set(genes) != set()
    change = cells.mean(axis=0) - control.mean(axis=0)
    np.testing.assert_allclose(changes["observed"], change[order], rtol=1e-4)
    np.testing.assert_allclose(bars["observed"], 1.96 * np.abs(change / t)[order], rtol=1e-4)
    at = predicted.var_names.get_indexer(genes)
    number = list(predicted.uns[C.UNS][C.PERTURBATION]["condition"]).index("A+B")
    expected = predicted.varm[C.VARM_MEAN][at, number] - control.mean(axis=0)[order]
    np.testing.assert_allclose(changes["predicted"], expected, rtol=1e-4)
    np.testing.assert_allclose(bars["predicted"], predicted.varm[C.VARM_SD][at, number], rtol=1e-4)
    assert fig.axes[0].get_title() == "A+B: change of 7 top genes"
    labels = [text.get_text() for text in fig.axes[0].get_legend().get_texts()]
    assert labels == ["predicted ± sd", "observed, 95% CI\n(24 cells, 24 control)"]


def test_alone_genes_are_those_of_the_largest_change_for_its_uncertainty(predicted_screen):
    predicted, _ = predicted_screen()
    delta = predicted.varm[C.VARM_MEAN][:, 1] - predicted.varm[C.VARM_CONTROL][:, 1]
    genes, bold, changes, _ = parts(perturbation(predicted, "B", n_genes=5, return_fig=True))
    assert genes == list(predicted.var_names[np.argsort(-np.abs(delta))[:5]])
    assert "B" in bold
    assert set(changes) == {"predicted"}
    np.testing.assert_allclose(changes["predicted"], delta[predicted.var_names.get_indexer(genes)], rtol=1e-5)
    predicted.varm[C.VARM_SD][:, 1] = np.linspace(0.01, 3, 40)
    sure, *_ = parts(perturbation(predicted, "B", n_genes=5, return_fig=True))
    assert sure == list(predicted.var_names[np.argsort(-np.abs(delta / np.linspace(0.01, 3, 40)))[:5]]) != genes
    for sd in (np.full((40, 5), np.nan, dtype=np.float32), None):  # nothing is known: by the change itself
        if sd is None:
            del predicted.varm[C.VARM_SD]
        else:
            predicted.varm[C.VARM_SD] = sd
        assert parts(perturbation(predicted, "B", n_genes=5, return_fig=True))[0] == genes


def test_a_condition_is_of_one_group(predicted_screen):
    predicted, observed = predicted_screen(("B cell", "T cell"))
    genes, _, changes, _ = parts(perturbation(predicted, "A in T cell", observed, n_genes=4, return_fig=True))
    at = observed.var_names.get_indexer(genes)
    perturbed, control = (log_cells(observed, name, "T cell")[:, at].mean(axis=0) for name in ("A", "control"))
    np.testing.assert_allclose(changes["observed"], perturbed - control, rtol=1e-4)
    with pytest.raises(KeyError, match=r"'A' .*10 predicted.*A in B cell"):
        perturbation(predicted, "A", observed)


def test_the_order_of_parts_does_not_matter(predicted_screen):
    predicted, observed = predicted_screen()
    observed.obs["perturbation"] = observed.obs["perturbation"].replace("A+B", "B+A")
    fig = perturbation(predicted, "B+A", observed, gene_symbols="symbol", return_fig=True)
    genes, bold, *_ = parts(fig)
    assert all(name.endswith("-s") for name in genes)
    assert "A-s" in bold
    assert fig.axes[0].get_title().startswith("A+B: ")


def test_a_single_cell_is_drawn_and_ranked_by_its_difference(predicted_screen):
    predicted, observed = predicted_screen()
    of_ga = np.flatnonzero(observed.obs["perturbation"] == "A")
    observed = observed[np.setdiff1d(np.arange(observed.n_obs), of_ga[1:])].copy()
    genes, _, _, bars = parts(perturbation(predicted, "A", observed, n_genes=4, return_fig=True))
    assert set(bars) <= {"predicted"}
    change = log_cells(observed, "A")[0] - log_cells(observed, "control").mean(axis=0)
    assert genes == list(observed.var_names[np.argsort(-np.abs(change))[:4]])


def test_the_users_axes_are_drawn_on_and_nothing_is_changed(predicted_screen, tmp_path):
    predicted, observed = predicted_screen()
    before = predicted.copy(), observed.copy()
    _, (left, right) = plt.subplots(1, 2)
    assert perturbation(predicted, "A", observed, ax=right, save=tmp_path / "a.png") is None
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert right.get_xlabel().startswith("change from control")
    assert left.get_xlabel() == ""
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
    with pytest.raises(TypeError, match="expected an AnnData object"):
        perturbation(predicted, "A in T cell", "observed.h5ad")
    assert plt.get_fignums() == []
