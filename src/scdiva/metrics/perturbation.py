"""Metrics of predicted responses to perturbations, on arrays of mean expression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scdiva._checks import check_arguments, check_choices, check_least

from ._input import finite_arrays, refuse_where

WMSE_ALPHA = 0.1
"""Log-normalised expression that is added to every gene's mean in the weights of the WMSE (alpha in the paper, which
does not state its value)."""
NO_CHANGE = 1e-6
"""Tolerance for equal means, relative to the larger one or to 1: the rounding error of means stored as float32."""

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

    A change, :math:`\Delta`, is the difference from `reference`: the mean of the control cells, or the mean over
    perturbations, which leaves the effect specific to this perturbation. A change below `NO_CHANGE` counts as 0.

    Predictions that do not distinguish genes, such as "no change", get the scores of chance: their Pearson correlation,
    which is undefined, is 0, their signs are half right, and hit rates are expected values under random tie breaking.

    Parameters
    ----------
    predicted, observed
        Mean log-normalised expression of each gene in the perturbed cells, shape `(n_genes,)`.
    reference
        Mean expression from which changes are measured, shape `(n_genes,)`.
    de_score
        Signed score of each gene's differential expression, such as :func:`de_scores`, shape `(n_genes,)`. The top
        genes have the largest absolute values; of equal ones the first are taken. None: the observed change.
    weights
        Mean expression :math:`\bar v` that weights genes in the WMSE, shape `(n_genes,)`, 0 or above. None:
        `reference`.
    top
        Numbers of top genes; at most all genes are used.

    Returns
    -------
    `pearson_delta`, the correlation of predicted and observed change over all genes (-1 to 1); `mse`, the mean squared
    error; `wmse`, the squared error weighted by :math:`w_g = (\bar v_g + \alpha) / \sum_h (\bar v_h + \alpha)` with
    :math:`\alpha` = `WMSE_ALPHA` (paper, appendix, eqs. wmse_weights and wmse); for each k of `top`
    `pearson_delta_top{k}` and `mse_top{k}`, the same over the top genes, and `hit_rate_{k}` (:func:`hit_rate`); and
    `sign_accuracy`, the share of the top genes (first number of `top`) whose change has the right sign; 0 counts half.

    Raises
    ------
    ValueError
        If the arrays differ in length, are empty or contain values that are not finite, weights are negative, or `top`
        is empty or contains a number below 1.

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
    inputs = {"predicted": predicted, "observed": observed, "reference": reference}
    if de_score is not None:
        inputs["de_score"] = de_score
    inputs["weights"] = reference if weights is None else weights
    arrays = finite_arrays("(n_genes,)", inputs)
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
    """Share of the top k observed genes that are among the top k predicted genes.

    Parameters
    ----------
    predicted_delta
        Predicted change of each gene, shape `(n_genes,)`, ranked by absolute value. Ties are broken at random, and the
        expected share is returned: k / n_genes if all values are equal.
    observed_score
        Observed change or differential expression, shape `(n_genes,)`, ranked by absolute value; of equal genes the
        first are taken.
    k
        One or several numbers of genes; at most all genes are used.

    Returns
    -------
    float64, 0 to 1, of the shape of `k`.

    Raises
    ------
    ValueError
        If the two differ in length, are empty or contain values that are not finite, or a k is not a whole number of 1
        or more.

    Examples
    --------
    >>> import scdiva as sd
    >>> sd.metrics.hit_rate([3.0, -2.0, 0.1, 0.0], [2.5, 0.0, 0.2, -3.0], [1, 2]).tolist()
    [0.0, 0.5]
    """
    arrays = finite_arrays("(n_genes,)", {"predicted_delta": predicted_delta, "observed_score": observed_score})
    size, score = np.abs(arrays["predicted_delta"]), np.abs(arrays["observed_score"])
    if np.asarray(k).dtype.kind not in "iu":
        raise ValueError(f"k must be whole numbers of genes, got {k!r}.")
    numbers = np.minimum(np.asarray(k, dtype=np.int64), len(size))
    if (numbers < 1).any():
        raise ValueError(f"k must be 1 or more, got {int(numbers.min())}.")
    true_order = np.argsort(-score, kind="stable")
    descending = np.sort(size)[::-1]
    rates = np.empty(numbers.shape)
    for index, n in np.ndenumerate(numbers):
        last = descending[n - 1]
        n_above = int((size > last).sum())
        chance = np.where(size > last, 1.0, np.where(size == last, (n - n_above) / (size == last).sum(), 0.0))
        rates[index] = chance[true_order[:n]].sum() / n
    return rates


def discrimination(predicted: ArrayLike, observed: ArrayLike, *, metric: Distance = "l1") -> NDArray[np.float64]:
    """Rank of the true condition among all observed conditions, by similarity to the prediction.

    Parameters
    ----------
    predicted, observed
        Changes of each condition, rows in the same order, shape `(n_conditions, n_genes)`.
    metric
        Mean absolute difference, Euclidean distance, or cosine similarity (0 for a row of zeros).

    Returns
    -------
    float64 `(n_conditions,)`: 1 - (rank of the true condition - 1) / (n_conditions - 1), tied ranks averaged. 1 is
    best, 0.5 is chance and the mean of predictions that are the same for all conditions. NaN for a single condition.

    Raises
    ------
    ValueError
        If the two differ in shape, are empty or contain values that are not finite, or `metric` is invalid.

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
    """Discrimination scores, or similarities, of each predicted and each observed condition.

    Parameters
    ----------
    predicted, observed, metric
        As for :func:`discrimination`.
    values
        `"rank"`: the score of each observed condition if it were the true one; the diagonal is :func:`discrimination`.
        `"similarity"`: the cosine, or the negative mean absolute difference or Euclidean distance.

    Returns
    -------
    float64 `(n_conditions, n_conditions)`, predicted × observed. Ranks of a single condition are NaN.

    Raises
    ------
    ValueError
        As :func:`discrimination`; or if `values` is invalid.

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
    """Welch's t of the differential expression of genes.

    Parameters
    ----------
    mean_a, var_a, n_a, mean_b, var_b, n_b
        Mean and sample variance of each gene's log-normalised expression in two groups of cells, shape `(n_genes,)`,
        and number of cells of each group.

    Returns
    -------
    float64 `(n_genes,)`, positive if `a` is higher; 0 if neither group varies.

    Raises
    ------
    ValueError
        If arrays differ in length, are empty or contain values that are not finite, a variance is negative, or a group
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
    """Difference from the reference; 0 within the rounding error."""
    change = mean - reference
    size = np.maximum(1.0, np.maximum(np.abs(mean), np.abs(reference)))
    return np.where(np.abs(change) <= NO_CHANGE * size, 0.0, change)


def _pearson(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Pearson correlation; 0 if an array is constant."""
    if not (_varies(a) and _varies(b)):
        return 0.0
    return float(np.clip(np.corrcoef(a, b)[0, 1], -1.0, 1.0))


def _varies(values: NDArray[np.float64]) -> bool:
    """Whether values differ by more than rounding."""
    return bool(np.ptp(values) > NO_CHANGE * np.abs(values).max())


def _similarity(predicted: NDArray[np.float64], observed: NDArray[np.float64], metric: Distance) -> NDArray[np.float64]:
    """Similarity of each pair of rows."""
    from scipy.spatial.distance import cdist
    from sklearn.metrics.pairwise import cosine_similarity

    if metric == "cosine":  # scipy's is not defined for a row of zeros
        return np.asarray(cosine_similarity(predicted, observed))
    distance: NDArray[np.float64] = cdist(predicted, observed, "cityblock" if metric == "l1" else "euclidean")
    return -distance / (predicted.shape[1] if metric == "l1" else 1)
