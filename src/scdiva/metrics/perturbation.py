"""How well the response of cells to a perturbation is predicted: means of expression in, floats out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scdiva._checks import check_arguments, check_choices, check_least

from ._input import finite_arrays, refuse_where

WMSE_ALPHA = 0.1
"""Log-normalised expression added to every gene's mean before the weights of the WMSE are made (the paper's alpha,
which it gives no value)."""
NO_CHANGE = 1e-6
"""Difference of two means, as a share of the larger one or of 1, up to which they are the same: what storing means as
float32 may add."""

Distance = Literal["l1", "l2", "cosine"]


def perturbation_response(
    predicted: ArrayLike,
    observed: ArrayLike,
    reference: ArrayLike,
    *,
    de_score: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    top: Sequence[int] = (20, 100),
) -> dict[str, float]:
    r"""Score the predicted mean expression of one condition.

    A change, :math:`\Delta`, is a difference to `reference`: of the control cells, or of the mean over perturbations,
    which shows what is predicted of this perturbation beside what all of them do. A change below `NO_CHANGE` is none.

    Predictions that don't distinguish genes, such as "no change", score what chance does: their Pearson correlation,
    which has no value, is 0, their signs are half right, and hit rates are expected ones under ties broken at random.

    Parameters
    ----------
    predicted, observed
        Mean log-normalised expression of each gene in the perturbed cells, shape `(n_genes,)`.
    reference
        That from which changes are measured, shape `(n_genes,)`.
    de_score
        Signed score of each gene's differential expression, such as :func:`de_scores`, shape `(n_genes,)`; the top
        genes are those of the largest absolute value, of equal ones the first. None takes the observed change.
    weights
        Mean expression :math:`\bar v` that weighs genes in the WMSE, shape `(n_genes,)`, 0 or above. None takes
        `reference`.
    top
        Numbers of top genes; where there are fewer genes, all are taken.

    Returns
    -------
    `pearson_delta`, the correlation of predicted and observed change over all genes (-1 to 1); `mse`, the mean squared
    error; `wmse`, the squared error weighted by :math:`w_g = (\bar v_g + \alpha) / \sum_h (\bar v_h + \alpha)` with
    :math:`\alpha` = `WMSE_ALPHA` (paper, appendix, eqs. wmse_weights and wmse); for each k of `top`
    `pearson_delta_top{k}` and `mse_top{k}`, the same over the top genes, and `hit_rate_{k}` (:func:`hit_rate`); and
    `sign_accuracy`, the share of the first `top` genes whose change has the right sign, 0 counting half.

    Raises
    ------
    ValueError
        If the arrays differ in length, are empty or hold values that are not finite, weights are negative, or `top` is
        empty or holds a number below 1.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> control = rng.gamma(1.0, size=50)
    >>> observed = control + rng.normal(size=50)
    >>> predicted = observed + 0.3 * rng.normal(size=50)
    >>> sd.metrics.perturbation_response(predicted, observed, control, top=[20])["pearson_delta"] > 0.9
    True
    """
    given = {"predicted": predicted, "observed": observed, "reference": reference}
    if de_score is not None:
        given["de_score"] = de_score
    given["weights"] = reference if weights is None else weights
    arrays = finite_arrays("(n_genes,)", given)
    p, o, ref, v = (arrays[name] for name in ("predicted", "observed", "reference", "weights"))
    if not len(top) or min(top) < 1:
        raise ValueError(f"top must hold numbers of genes from 1 on, got {tuple(top)!r}.")
    refuse_where(v < 0, "weights are negative", "They are mean expression, not changes.")
    change, true_change = _change(p, ref), _change(o, ref)
    score = arrays.get("de_score", true_change)
    order = np.argsort(-np.abs(score), kind="stable")
    error = (p - o) ** 2
    w = v + WMSE_ALPHA
    scores = {
        "pearson_delta": _pearson(change, true_change),
        "mse": float(error.mean()),
        "wmse": float(error @ w / w.sum()),
    }
    for k, hits in zip(top, hit_rate(change, score, top), strict=True):
        genes = order[:k]
        scores[f"pearson_delta_top{k}"] = _pearson(change[genes], true_change[genes])
        scores[f"mse_top{k}"] = float(error[genes].mean())
        scores[f"hit_rate_{k}"] = float(hits)
    first = order[: top[0]]
    scores["sign_accuracy"] = float(np.mean((1 + np.sign(change[first]) * np.sign(true_change[first])) / 2))
    return scores


def hit_rate(predicted_delta: ArrayLike, observed_score: ArrayLike, k: ArrayLike) -> NDArray[np.float64]:
    """Share of the k genes that change most which are also among the k predicted to change most.

    Parameters
    ----------
    predicted_delta
        Predicted change of each gene, shape `(n_genes,)`; its absolute value counts. Of genes that tie for the last
        places each is taken with the same chance, and the expected share returned: k / n_genes if all are equal.
    observed_score
        Change or differential expression observed, shape `(n_genes,)`; its absolute value counts, and of equal genes
        the first ones.
    k
        Numbers of genes, one or several; more than there are take all.

    Returns
    -------
    float64, 0 to 1, of the shape of `k`.

    Raises
    ------
    ValueError
        If the two differ in length, are empty or hold values that are not finite, or a k is below 1 or no whole number.

    Examples
    --------
    >>> import scdiva as sd
    >>> sd.metrics.hit_rate([3.0, -2.0, 0.1, 0.0], [2.5, 0.0, 0.2, -3.0], [1, 2]).tolist()
    [0.0, 0.5]
    """
    arrays = finite_arrays("(n_genes,)", {"predicted_delta": predicted_delta, "observed_score": observed_score})
    size, score = np.abs(arrays["predicted_delta"]), np.abs(arrays["observed_score"])
    given = np.asarray(k)
    if given.dtype.kind not in "iu":
        raise ValueError(f"k must be whole numbers of genes, got {k!r}.")
    numbers = np.minimum(given.astype(np.int64), len(size))
    if (numbers < 1).any():
        raise ValueError(f"k must be 1 or more, got {int(numbers.min())}.")
    true_order = np.argsort(-score, kind="stable")
    descending = np.sort(size)[::-1]
    found = np.empty(numbers.shape)
    for place, n in np.ndenumerate(numbers):
        last = descending[n - 1]
        n_above = int((size > last).sum())
        chance = np.where(size > last, 1.0, np.where(size == last, (n - n_above) / (size == last).sum(), 0.0))
        found[place] = chance[true_order[:n]].sum() / n
    return found


def discrimination(predicted: ArrayLike, observed: ArrayLike, *, metric: Distance = "l1") -> NDArray[np.float64]:
    """Score how well each prediction identifies its own condition among all observed ones.

    Parameters
    ----------
    predicted, observed
        Changes of each condition, rows in the same order, shape `(n_conditions, n_genes)`.
    metric
        How the observed conditions are ranked by closeness to a prediction: mean absolute difference, Euclidean
        distance, or cosine similarity (0 to or from a row of zeros).

    Returns
    -------
    float64 `(n_conditions,)`: 1 - (rank of its own condition - 1) / (n_conditions - 1), tied ranks averaged. 1 is
    best; 0.5 is chance, and the mean over conditions of any prediction that is the same for all. NaN for a single
    condition.

    Raises
    ------
    ValueError
        If the two differ in shape, are empty or hold values that are not finite, or there is no such metric.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> observed = rng.normal(size=(4, 50))  # 4 conditions, 50 genes
    >>> predicted = observed + 0.3 * rng.normal(size=(4, 50))
    >>> sd.metrics.discrimination(predicted, observed).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    return np.diagonal(discrimination_matrix(predicted, observed, metric=metric)).copy()


def discrimination_matrix(
    predicted: ArrayLike,
    observed: ArrayLike,
    *,
    metric: Distance = "l1",
    values: Literal["rank", "similarity"] = "rank",
) -> NDArray[np.float64]:
    """Compare each predicted condition with each observed one.

    Parameters
    ----------
    predicted, observed, metric
        As for :func:`discrimination`.
    values
        `"rank"`: the score that the observed condition would have, were it the true one; its diagonal is
        :func:`discrimination`. `"similarity"`: the cosine, or the negative mean absolute difference or Euclidean
        distance.

    Returns
    -------
    float64 `(n_conditions, n_conditions)`, predicted × observed. Ranks of a single condition are NaN.

    Raises
    ------
    ValueError
        As :func:`discrimination`; or if there are no such values.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> observed = rng.normal(size=(4, 50))  # 4 conditions, 50 genes
    >>> predicted = observed + 0.3 * rng.normal(size=(4, 50))
    >>> sd.metrics.discrimination_matrix(predicted, observed).shape
    (4, 4)
    """
    from scipy.stats import rankdata

    check_choices(values=(values, ("rank", "similarity")), metric=(metric, get_args(Distance)))
    arrays = finite_arrays("(n_conditions, n_genes)", {"predicted": predicted, "observed": observed})
    similarity = _similarity(arrays["predicted"], arrays["observed"], metric)
    if values == "similarity":
        return similarity
    n = len(similarity)
    if n == 1:
        return np.full((1, 1), np.nan)
    return 1 - np.asarray(rankdata(-similarity, axis=1) - 1) / (n - 1)


@check_arguments
def de_scores(
    mean_a: ArrayLike, var_a: ArrayLike, n_a: int, mean_b: ArrayLike, var_b: ArrayLike, n_b: int
) -> NDArray[np.float64]:
    """Score the differential expression of genes by Welch's t.

    Parameters
    ----------
    mean_a, var_a, n_a, mean_b, var_b, n_b
        Mean and variance (with n - 1) of each gene's log-normalised expression in two groups of cells, shape
        `(n_genes,)`, and the number of cells of each.

    Returns
    -------
    float64 `(n_genes,)`, positive where `a` is higher; 0 where neither group varies.

    Raises
    ------
    ValueError
        If arrays differ in length, are empty or hold values that are not finite, a variance is negative, or a group
        has fewer than 2 cells.

    Examples
    --------
    >>> import scdiva as sd
    >>> scores = sd.metrics.de_scores([2.0, 1.0], [1.0, 1.0], 50, [1.0, 1.0], [1.0, 1.0], 50)
    >>> [round(float(score), 1) for score in scores]
    [5.0, 0.0]
    """
    from scipy.stats import ttest_ind_from_stats

    arrays = finite_arrays("(n_genes,)", {"mean_a": mean_a, "var_a": var_a, "mean_b": mean_b, "var_b": var_b})
    check_least(n_a=(n_a, 2), n_b=(n_b, 2))
    for name in ("var_a", "var_b"):
        refuse_where(arrays[name] < 0, f"values of {name} are negative", "Pass variances.")
    spread_a, spread_b = np.sqrt(arrays["var_a"]), np.sqrt(arrays["var_b"])
    with np.errstate(divide="ignore", invalid="ignore"):
        t, _ = ttest_ind_from_stats(arrays["mean_a"], spread_a, n_a, arrays["mean_b"], spread_b, n_b, equal_var=False)
    return np.where((spread_a == 0) & (spread_b == 0), 0.0, t)


def _change(mean: NDArray[np.float64], reference: NDArray[np.float64]) -> NDArray[np.float64]:
    """Subtract the reference; what rounding alone may leave is no change."""
    change = mean - reference
    size = np.maximum(1.0, np.maximum(np.abs(mean), np.abs(reference)))
    return np.where(np.abs(change) <= NO_CHANGE * size, 0.0, change)


def _pearson(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Pearson correlation; 0 if one of the two is constant."""
    if not (_varies(a) and _varies(b)):
        return 0.0
    return float(np.clip(np.corrcoef(a, b)[0, 1], -1.0, 1.0))


def _varies(values: NDArray[np.float64]) -> bool:
    """Tell whether values differ by more than rounding."""
    return bool(np.ptp(values) > NO_CHANGE * np.abs(values).max())


def _similarity(predicted: NDArray[np.float64], observed: NDArray[np.float64], metric: Distance) -> NDArray[np.float64]:
    """Similarity of each row of the one to each of the other."""
    from scipy.spatial.distance import cdist
    from sklearn.metrics.pairwise import cosine_similarity

    if metric == "cosine":  # scipy's is not defined for a row of zeros
        return np.asarray(cosine_similarity(predicted, observed))
    apart: NDArray[np.float64] = cdist(predicted, observed, "cityblock" if metric == "l1" else "euclidean")
    return -apart / (predicted.shape[1] if metric == "l1" else 1)
