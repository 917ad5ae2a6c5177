from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_ind

import scdiva as sd
from scdiva.data.cells import log_normalised
from scdiva.metrics import discrimination, perturbation_response
from scdiva.perturbation.scores import observed_responses, read_prediction, response_score

SCORES = [
    "pearson_delta", "mse", "wmse", "pearson_delta_top20", "mse_top20", "hit_rate_20", "pearson_delta_top100",
    "mse_top100", "hit_rate_100", "sign_accuracy", "discrimination",
]  # fmt: skip
ABOUT = ["method", "condition", "perturbation", "group", "n_parts", "n_seen", "trained", "n_cells", "reference"]


def by_method(scores, reference="control"):
    part = scores[scores["reference"] == reference]
    return part.set_index(["method", "condition"])


def test_equals_the_metrics_of_means_taken_by_hand(screen, by_hand):
    observed = screen()
    predicted = by_hand(observed)
    scores = sd.tl.score_perturbation(predicted, observed)
    assert list(scores.columns[: len(ABOUT)]) == ABOUT
    assert set(scores.columns[len(ABOUT) :]) == set(SCORES)
    values = log_normalised(observed)[0].toarray()
    label = observed.obs["perturbation"].to_numpy()
    control = values[label == "control"]
    names = ["A", "B", "C", "A+B", "C+B"]
    truth = np.stack([values[label == name].mean(0) for name in names])
    for key, method in (("scdiva_mean", "scdiva"), ("scdiva_baseline_train_mean", "train_mean")):
        mean = predicted.varm[key].astype(np.float64)
        ranks = discrimination(mean.T, truth)
        for reference, start in (
            ("control", control.mean(0)),
            ("mean", predicted.varm["scdiva_baseline_train_mean"][:, 0]),
        ):
            method_scores = by_method(scores, reference).loc[method]
            for i, name in enumerate(names):
                cells = values[label == name]
                moved = control - control.mean(0) + start
                t = np.nan_to_num(ttest_ind(cells, moved, equal_var=False).statistic)
                expected = perturbation_response(mean[:, i], truth[i], start, de_score=t, weights=control.mean(0))
                assert method_scores.loc[name, list(expected)].to_dict() == pytest.approx(expected)
            np.testing.assert_allclose(method_scores.loc[names, "discrimination"].astype(float), ranks)


def test_rows_say_what_was_scored(screen, by_hand):
    observed = screen()
    scores = sd.tl.score_perturbation(by_hand(observed), observed)
    assert list(dict.fromkeys(scores["method"])) == ["scdiva", "no_change", "train_mean", "matching_mean", "additive"]
    assert len(scores) == 5 * 5 * 2
    assert (scores["n_cells"] == 12).all()
    trained = {"A": True, "B": True, "C": True, "A+B": False, "C+B": False}
    assert scores.groupby("condition")["trained"].first().to_dict() == trained
    control = by_method(scores)
    none = control.loc["no_change"]
    assert (none["pearson_delta"] == 0).all()
    assert (none["sign_accuracy"] == 0.5).all()
    assert none["discrimination"].mean() == pytest.approx(0.5)
    assert (by_method(scores, "mean").loc["train_mean", "pearson_delta"] == 0).all()
    additive = control.loc["additive"]
    assert additive.loc[["A", "B", "C"], SCORES].isna().all(axis=None)
    assert (additive.loc[["A+B", "C+B"], "pearson_delta"] > 0.7).all()


def test_groups_have_their_own_controls_and_rivals(screen, by_hand):
    observed = screen(groups=("k562", "a172"))
    predicted = by_hand(observed, "line")
    scores = sd.tl.score_perturbation(predicted, observed)
    assert {"elsewhere"} < set(scores["method"])
    for line in ("k562", "a172"):
        cells = observed[observed.obs["line"] == line].copy()
        alone = sd.tl.score_perturbation(predicted, cells)
        here = scores[scores["group"] == line].reset_index(drop=True)
        pd.testing.assert_frame_equal(alone, here)
    again = observed[np.random.default_rng(0).permutation(observed.n_obs)].copy()
    pd.testing.assert_frame_equal(sd.tl.score_perturbation(predicted, again), scores)


def test_doses_are_matched(screen, by_hand):
    observed = screen()
    predicted = by_hand(observed)
    observed.obs["dose"] = np.where(np.arange(observed.n_obs) % 3 == 0, "1.0", "2.5")
    notes = predicted.uns["scdiva"]["perturbation"]
    notes["dose_key"], notes["dose"] = "dose", np.array([1.0, 2.5, 1.0, np.nan, 9.0])
    scores = sd.tl.score_perturbation(predicted, observed)
    assert scores.groupby("condition")["n_cells"].first().to_dict() == {"A": 4, "B": 8, "C": 4, "A+B": 12}
    with pytest.raises(KeyError, match="no column 'dose'"):
        sd.tl.score_perturbation(predicted, screen())


def test_single_cells_and_few_conditions(screen, by_hand):
    observed = screen()
    predicted = by_hand(observed)
    keep = observed.obs["perturbation"].isin(["control", "A"]).to_numpy()
    keep = keep & np.r_[np.ones(13, dtype=bool), np.zeros(observed.n_obs - 13, dtype=bool)]
    scores = sd.tl.score_perturbation(predicted, observed[keep].copy())
    assert set(scores["condition"]) == {"A"}
    assert (scores["n_cells"] == 1).all()
    assert scores["discrimination"].isna().all()
    defined = scores[scores["method"] != "additive"]
    assert defined[SCORES].drop(columns="discrimination").notna().all(axis=None)


def test_genes_that_only_one_has_are_said(screen, by_hand):
    observed = screen()
    predicted = by_hand(observed)
    counts = observed.X.sum(axis=1)
    observed.layers["log"] = np.log1p(observed.X / counts[:, None] * 1e4)
    subset = observed[:, [f"G{i}" for i in range(5, 40)]].copy()
    with pytest.warns(UserWarning, match=r"5 of 40 predicted genes .* 'G0'.* 35 others"):
        scores = sd.tl.score_perturbation(predicted, subset, layer="log")
    cut = predicted[:, subset.var_names].copy()
    pd.testing.assert_frame_equal(sd.tl.score_perturbation(cut, subset, layer="log"), scores)


def _labels(*labels):
    return lambda a: a.obs.__setitem__("perturbation", np.resize(labels, a.n_obs))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a: a.obs.pop("perturbation"), KeyError, "observed.obs has no column 'perturbation'"),
        (_labels("D", "control"), ValueError, "5 predicted .*'A'.*1 perturbations .*'D'"),
        (_labels("A"), ValueError, "no cell of observed is a control"),
        (lambda a: setattr(a, "var_names", [f"X{i}" for i in range(40)]), ValueError, "0 genes in common.*'G0'.*'X0'"),
        (lambda a: setattr(a, "var_names", ["G1", *a.var_names[1:]]), ValueError, "1 of 40 genes of observed repeat"),
        (lambda a: a._inplace_subset_var(a.var_names[:3]), ValueError, "different scales"),
        (lambda a: setattr(a, "X", a.X - 1), ValueError, r"observed\.X holds .* negative .*in observed\.X"),
    ],
)
def test_what_cannot_be_scored_is_refused(screen, by_hand, change, error, message):
    observed = screen()
    predicted = by_hand(observed)
    change(observed)
    with pytest.raises(error, match=message):
        sd.tl.score_perturbation(predicted, observed)


def test_other_objects_are_refused(screen, by_hand):
    observed = screen()
    with pytest.raises(KeyError, match=r"not a prediction.*scdiva\.tl\.predict_perturbation"):
        sd.tl.score_perturbation(observed, by_hand(observed))
    with pytest.raises(TypeError, match="expected an AnnData object"):
        sd.tl.score_perturbation(by_hand(observed), "observed.h5ad")


def test_plots_look_for_one_condition_only(screen, by_hand):
    observed = screen(groups=("one", "two"))
    predicted = by_hand(observed, "line")
    without = observed[(observed.obs["line"] == "one") | (observed.obs["perturbation"] != "control")].copy()
    with pytest.raises(ValueError, match=r"1 of 2 groups .*no control cells in observed .*'two'"):
        sd.tl.score_perturbation(predicted, without)
    of_one = predicted.uns["scdiva"]["perturbation"]["condition"].tolist().index("B in one")
    responses = observed_responses(read_prediction(predicted), without, only=[of_one])
    assert (list(responses.rows), list(responses.control)) == ([of_one], ["one"])
    assert len(responses.conditions) == 10  # columns keep their numbers
    with pytest.raises(ValueError, match="'B in two'"):
        observed_responses(read_prediction(predicted), without[without.obs["line"] == "one"].copy(), only=[of_one + 1])


def test_what_rests_on_one_cell_or_on_nothing_has_no_score(screen, by_hand):
    observed = screen(n=3)
    predicted = by_hand(observed)
    of_a = np.flatnonzero(observed.obs["perturbation"] == "A")
    responses = observed_responses(
        read_prediction(predicted), observed[np.setdiff1d(np.arange(observed.n_obs), of_a[1:])].copy()
    )
    assert response_score(responses, 0) is None
    assert response_score(responses, 1) is not None
    for key in [key for key in predicted.varm if key.startswith("scdiva_baseline")]:
        del predicted.varm[key]
    responses = observed_responses(read_prediction(predicted), observed)
    assert response_score(responses, 1, "mean") is None
    assert responses.methods(1) == ["scdiva"]
