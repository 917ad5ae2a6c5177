from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ttest_ind

from scdiva import _constants as C
from scdiva.perturbation.scores import OURS, observed_responses, read_prediction, response_score
from scdiva.tl import score_perturbation


def logs(observed, name: str, group: str = "") -> np.ndarray:
    """Log-normalised expression of the cells of a condition."""
    x = np.log1p(1e4 * observed.X / observed.X.sum(axis=1, keepdims=True))
    return x[((observed.obs["perturbation"] == name) & (observed.obs["line"] == group)).to_numpy()]


def test_cells_and_means_are_those_of_the_condition_and_its_group(screen, by_hand):
    observed = screen(groups=("one", "two"))
    predicted = by_hand(observed, "line")
    found = observed_responses(read_prediction(predicted), observed[:, ::-1].copy())
    assert list(found.rows) == list(range(10))
    assert list(found.genes) == list(range(40))
    for at, condition in found.conditions.iterrows():
        cells = logs(observed, condition["perturbation"], condition["group"])
        control = logs(observed, "control", condition["group"])
        np.testing.assert_allclose(found.expression[found.rows[at]].toarray(), cells, rtol=1e-5)
        np.testing.assert_allclose(found.perturbed[at].mean, cells.mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(found.perturbed[at].variance, cells.var(axis=0, ddof=1), atol=1e-4)
        np.testing.assert_allclose(found.control_of(at).mean, control.mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(found.reference(at, "control"), control.mean(axis=0), rtol=1e-5)
        train_mean = predicted.varm[C.VARM_BASELINE + "train_mean"][:, at]
        np.testing.assert_allclose(found.reference(at, "mean"), train_mean)
        t = ttest_ind(cells, control, equal_var=False).statistic
        np.testing.assert_allclose(response_score(found, at), t, rtol=1e-3, atol=1e-3)
    assert found.methods(0) == [OURS, "no_change", "train_mean", "matching_mean", "elsewhere"]
    at = int(found.conditions.index[found.conditions["perturbation"] == "A+B"][0])
    assert "additive" in found.methods(at)


def test_only_what_is_asked_for_is_looked_for(screen, by_hand):
    observed = screen(groups=("one", "two"))
    predicted = by_hand(observed, "line")
    without = observed[
        ((observed.obs["line"] == "one") | (observed.obs["perturbation"] != "control")).to_numpy()
    ].copy()
    with pytest.raises(ValueError, match="1 of 2 groups have no control cells"):
        observed_responses(read_prediction(predicted), without)
    of_one = predicted.uns["scdiva"]["perturbation"]["condition"].tolist().index("B in one")
    found = observed_responses(read_prediction(predicted), without, only=[of_one])
    assert list(found.rows) == [of_one]
    assert list(found.control) == ["one"]
    assert len(found.conditions) == 10  # columns keep their numbers
    with pytest.raises(ValueError, match="'B in two'"):
        observed_responses(read_prediction(predicted), without[without.obs["line"] == "one"].copy(), only=[of_one + 1])


def test_what_rests_on_one_cell_or_on_nothing_has_no_score(screen, by_hand):
    observed = screen(n=3)
    predicted = by_hand(observed)
    of_a = np.flatnonzero(observed.obs["perturbation"] == "A")
    found = observed_responses(
        read_prediction(predicted), observed[np.setdiff1d(np.arange(observed.n_obs), of_a[1:])].copy()
    )
    assert response_score(found, 0) is None
    assert response_score(found, 1) is not None
    for key in [key for key in predicted.varm if key.startswith(C.VARM_BASELINE)]:
        del predicted.varm[key]
    found = observed_responses(read_prediction(predicted), observed)
    assert [found.reference(at, "mean") for at in found.rows] == [None] * 5
    assert response_score(found, 1, "mean") is None
    assert found.methods(1) == [OURS]


def test_other_objects_are_refused(screen, by_hand):
    observed = screen()
    with pytest.raises(TypeError, match="expected an AnnData object"):
        score_perturbation(by_hand(observed), "observed.h5ad")
    with pytest.raises(KeyError, match=r"scdiva\.tl\.predict_perturbation"):
        read_prediction(observed)
