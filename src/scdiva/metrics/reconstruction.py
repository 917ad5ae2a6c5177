"""Scores of the reconstructed genes and values of one cell."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scdiva._checks import check_arguments, check_least

from ._input import finite_arrays, refuse_where, truth_values


class LDist(NamedTuple):
    """Mean displacement of the genes of one cell, and its expectation by chance."""

    l_dist: float
    """Mean |position - predicted position| over the predicted genes."""
    chance: float
    """Its expectation for a random order of the true genes."""
    coverage: float
    """Fraction of the true genes that were predicted."""
    by_length: float
    """`l_dist` / length of the true sequence."""


class ReconstructionScores(NamedTuple):
    """Scores of one cell: masked positions, visible positions, and the whole sequence."""

    n_masked: int
    masked_recall: float
    masked_match: float
    masked_value_spearman: float
    masked_value_rmse: float
    n_visible: int
    visible_recall: float
    visible_match: float
    visible_value_spearman: float
    visible_value_rmse: float
    l_dist: float
    l_dist_chance: float
    l_dist_by_length: float
    coverage: float
    bleu: float
    value_spearman: float


def l_dist(true: ArrayLike, predicted: ArrayLike) -> LDist:
    r"""Mean displacement of genes between a cell's true sequence and the predicted one (L-Dist).

    Spearman's footrule over the length: :math:`\frac{1}{L} \sum_k |k - \hat\pi(g_k)|`, where :math:`\hat\pi` is the
    position in the predicted sequence (paper, appendix, eq. ldist). The mean is over the predicted genes only, so
    report it together with `coverage`.

    Parameters
    ----------
    true
        Genes in their true order, as numbers or tokens, each once, shape `(L,)`.
    predicted
        Genes in the predicted order, shape `(M,)`. If a gene is predicted more than once, its first position is used.

    Returns
    -------
    `l_dist` in positions, 0 at best, NaN if no true gene was predicted; `chance`, its mean over all orders of the true
    genes, :math:`(L^2 - 1) / 3L`, about L / 3; `coverage`, the fraction of true genes that were predicted; and
    `by_length`, `l_dist` / L.

    Raises
    ------
    ValueError
        If `true` is empty or holds a gene twice; if either has more than one axis or a negative number.
    TypeError
        If either does not hold integers.
    """
    genes, guessed = _sequence(true, "true", once=True), _sequence(predicted, "predicted")
    _, position, predicted_position = np.intersect1d(genes, guessed, return_indices=True)
    length = len(genes)
    mean = float(np.abs(position - predicted_position).mean()) if len(position) else np.nan
    return LDist(
        l_dist=mean, chance=(length**2 - 1) / (3 * length), coverage=len(position) / length, by_length=mean / length
    )


@check_arguments
def bleu(true: ArrayLike, predicted: ArrayLike, max_n: int = 4) -> float:
    r"""BLEU of a predicted sequence of genes against the true one [1]_.

    :math:`\mathrm{BP} \exp(\frac{1}{N} \sum_{n \le N} \log p_n)` (paper, appendix, eq. bleu). :math:`p_n` is the
    clipped precision: the fraction of predicted n-grams that occur in the true sequence, each counted at most as often
    as it occurs there. The brevity penalty BP is 1, or :math:`e^{1 - L / M}` if the M predicted genes are fewer than
    the L true genes. There is no smoothing: BLEU is 0 if one precision is 0, also if the prediction is too short to
    contain an n-gram.

    If most positions are visible, copying them gives a score near 1: evaluate masked positions separately
    (:func:`reconstruction_scores`).

    Parameters
    ----------
    true
        Genes in their true order, as numbers or tokens, shape `(L,)`.
    predicted
        Genes in the predicted order, shape `(M,)`.
    max_n
        N, the longest n-gram, 1 or more.

    Returns
    -------
    BLEU-N, 0 to 1; NaN if the true sequence is shorter than N.

    Raises
    ------
    ValueError
        If `true` is empty, `max_n` is below 1, or either has more than one axis or a negative number.
    TypeError
        If either does not hold integers.

    References
    ----------
    .. [1] Papineni, Roukos, Ward & Zhu, BLEU: a method for automatic evaluation of machine translation, ACL 2002.
    """
    check_least(max_n=(max_n, 1))
    genes, guessed = _sequence(true, "true"), _sequence(predicted, "predicted")
    if len(genes) < max_n:
        return np.nan
    log_precision = 0.0
    for n in range(1, max_n + 1):
        n_right = (_n_grams(genes, n) & _n_grams(guessed, n)).total()
        if not n_right:
            return 0.0
        log_precision += np.log(n_right / (len(guessed) - n + 1))
    return float(np.exp(log_precision / max_n + min(0.0, 1 - len(genes) / len(guessed))))


def value_spearman(true: ArrayLike, predicted: ArrayLike) -> float:
    """Rank correlation of true and predicted values, corrected for ties.

    The paper's formula (appendix, eq. spearman) is valid without ties only; this is the Pearson correlation of the
    mean ranks, which is then the same.

    Parameters
    ----------
    true, predicted
        Values of the same genes or positions, shape `(n,)`.

    Returns
    -------
    -1 to 1; NaN if either is constant.

    Raises
    ------
    ValueError
        If the two differ in shape, have more than one axis, or hold a value that is not finite.
    """
    from scipy.stats import spearmanr

    a, b = finite_arrays("(n,)", {"true": true, "predicted": predicted}, empty=True).values()
    if len(a) < 2 or not (np.ptp(a) > 0 and np.ptp(b) > 0):
        return np.nan
    return float(spearmanr(a, b).statistic)


def marginal_recall(true: ArrayLike, shown: ArrayLike, frequency: ArrayLike) -> float:
    """Fraction of k masked genes among the k most frequent genes that are not visible: a baseline.

    Parameters
    ----------
    true
        The k masked genes, as row numbers of `frequency`, each once, shape `(k,)`.
    shown
        The visible genes of the cell, each once, shape `(n_shown,)`; may be empty.
    frequency
        Frequency of each gene, such as the fraction of training cells that express it, shape `(n_genes,)`. Ties are
        broken by the order of genes.

    Returns
    -------
    The fraction, 0 to 1.

    Raises
    ------
    ValueError
        If there are no masked genes; a gene occurs twice, is both masked and visible, is negative or is not a row of
        `frequency`; or if a frequency is negative or not finite.
    TypeError
        If genes are not integers.
    """
    genes, visible = _sequence(true, "true", once=True), _sequence(shown, "shown", once=True)
    often = np.asarray(frequency, dtype=np.float64)
    if often.ndim != 1:
        raise ValueError(f"frequency has shape {often.shape}; it must be (n_genes,).")
    refuse_where(~(np.isfinite(often) & (often >= 0)), "frequencies are negative or not finite", "Leave them out.")
    for name, numbers in (("true", genes), ("shown", visible)):
        beyond = numbers[numbers >= len(often)]
        if len(beyond):
            raise ValueError(
                f"{len(beyond)} of {len(numbers)} genes of {name} are not rows of frequency, which has {len(often)} "
                f"(first: {beyond[0]}). Pass row numbers, not tokens."
            )
    overlap = np.intersect1d(genes, visible)
    if len(overlap):
        raise ValueError(f"{len(overlap)} of {len(genes)} masked genes are visible too (such as gene {overlap[0]}).")
    order = np.argsort(-often, kind="stable")
    return _recall(genes, order[~np.isin(order, visible)][: len(genes)])


def reconstruction_scores(
    true: ArrayLike, predicted: ArrayLike, true_values: ArrayLike, predicted_values: ArrayLike, masked: ArrayLike
) -> ReconstructionScores:
    """Scores of the reconstruction of one cell, separately for masked and visible positions.

    The sequences are aligned by position. For means over cells, ignore NaN (`numpy.nanmean`).

    Parameters
    ----------
    true
        Genes of the cell in their order, as numbers or tokens, each once, shape `(L,)`.
    predicted
        The gene predicted at each position, shape `(L,)`. The first position of a repeated gene is used.
    true_values, predicted_values
        Value at each position, shape `(L,)`.
    masked
        Whether the position was masked, boolean, shape `(L,)`.

    Returns
    -------
    A named tuple. For masked positions, and for visible ones with `visible` instead of `masked`: `n_masked`, their
    number; `masked_recall`, the fraction of their genes that were predicted at any of them; `masked_match`, the
    fraction of positions with the correct gene; `masked_value_spearman`
    (:func:`value_spearman`) and `masked_value_rmse`, the root-mean-square error in the unit of the values, both
    position by position whatever gene was predicted there. NaN without such positions. For the whole sequence:
    `l_dist`, `l_dist_chance`, `l_dist_by_length`, `coverage` (:func:`l_dist`), `bleu` (BLEU-4, :func:`bleu`), and
    `value_spearman` over the genes in both sequences, gene by gene.

    Raises
    ------
    ValueError
        If lengths differ, the cell is empty or holds a gene twice, a gene is negative, a value is not finite, or
        `masked` holds other than truth values.
    TypeError
        If genes are not integers.

    Examples
    --------
    >>> import scdiva as sd
    >>> true, found, masked = [5, 3, 9, 7], [5, 9, 3, 7], [False, True, True, False]
    >>> sd.metrics.bleu(true, true), sd.metrics.l_dist(true, found).l_dist
    (1.0, 0.5)
    >>> sd.metrics.marginal_recall([2, 3], [0], [0.9, 0.8, 0.7, 0.1])
    0.5
    >>> round(sd.metrics.value_spearman([1.0, 2.0, 3.0, 4.0], [1.1, 1.9, 4.0, 3.0]), 2)
    0.8
    >>> sd.metrics.reconstruction_scores(true, found, [3.0, 2.0, 1.0, 0.5], [3.0, 1.8, 1.1, 0.5], masked).masked_recall
    1.0
    """
    genes, guessed = _sequence(true, "true", once=True), _sequence(predicted, "predicted")
    inputs = {"true_values": true_values, "predicted_values": predicted_values}
    values, predicted_values = finite_arrays("(n,)", inputs, empty=True).values()
    at = np.asarray(masked)
    shapes = {"true": genes.shape, "predicted": guessed.shape, "values": values.shape, "masked": at.shape}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"all must be of the same positions, shape (L,), got {shapes}.")
    at = truth_values(at, "masked")
    distance = l_dist(genes, guessed)
    _, position, predicted_position = np.intersect1d(genes, guessed, return_indices=True)
    at_masked, at_visible = (
        _at(genes[part], guessed[part], values[part], predicted_values[part]) for part in (at, ~at)
    )
    return ReconstructionScores(
        *at_masked,
        *at_visible,
        l_dist=distance.l_dist,
        l_dist_chance=distance.chance,
        l_dist_by_length=distance.by_length,
        coverage=distance.coverage,
        bleu=bleu(genes, guessed),
        value_spearman=value_spearman(values[position], predicted_values[predicted_position]),
    )


def _at(
    genes: NDArray[np.int64], guessed: NDArray[np.int64], values: ArrayLike, predicted_values: ArrayLike
) -> tuple[int, float, float, float, float]:
    """Number of positions, recall, matches, and rank correlation and error of their values."""
    if not len(genes):
        return 0, np.nan, np.nan, np.nan, np.nan
    return (
        len(genes),
        _recall(genes, guessed),
        float((genes == guessed).mean()),
        value_spearman(values, predicted_values),
        float(np.sqrt(np.mean(np.subtract(values, predicted_values) ** 2))),
    )


def _recall(genes: NDArray[np.int64], guessed: NDArray[np.int64]) -> float:
    """Fraction of genes that are predicted."""
    return float(np.isin(genes, guessed).mean())


def _n_grams(genes: NDArray[np.int64], n: int) -> Counter[tuple[int, ...]]:
    listed = genes.tolist()
    return Counter(zip(*(listed[i:] for i in range(n)), strict=False))


def _sequence(values: ArrayLike, name: str, *, once: bool = False) -> NDArray[np.int64]:
    """Genes as int64; raises an error for other values and, with `once`, for duplicates."""
    genes = np.asarray(values)
    if genes.ndim != 1:
        raise ValueError(f"{name} has shape {genes.shape}; it must be the genes of one cell, (n,).")
    if not genes.size:
        if name == "true":
            raise ValueError("true holds no gene: there is nothing to score. Leave the cell out.")
        return np.empty(0, dtype=np.int64)  # an empty list is float64
    if not np.issubdtype(genes.dtype, np.integer):
        raise TypeError(f"{name} must hold genes as integers, not {genes.dtype} such as {genes[0]!r}.")
    refuse_where(genes < 0, f"genes of {name} are negative", "Remove positions that are not genes.")
    if once:
        numbers, times = np.unique(genes, return_counts=True)
        if len(numbers) < len(genes):
            raise ValueError(
                f"{(times > 1).sum()} of {len(numbers)} genes of {name} occur more than once (such as gene "
                f"{numbers[times > 1][0]}); each may occur once."
            )
    return genes.astype(np.int64)
