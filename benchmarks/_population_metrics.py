"""How far a population of generated cells is from a real one: log-normalised expression in, floats out.

Every score takes both populations as CSR, of the same genes in the same order, real cells first. Pass real cells that
the generator was not trained on, but for `copies`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

KERNEL_WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Widths of the kernels of `mmd`, in median squared distances between real cells."""
MEDIAN_CELLS = 2_000
"""Real cells between which that median is taken; of more, so many random ones."""
VARIABLE_GENES = 2_000
"""Most variable genes that the logistic discriminator sees."""
CORRELATED_GENES = 200
"""Most variable genes between which correlations are compared."""
FOLDS = 5
"""Stratified folds of the discriminators."""
TREES = 200
"""Trees of the forest."""
COMPONENTS = 50
"""Principal components that `mmd` and the forest see."""
CLOSE = 0.01
"""Quantile of the distances between nearest real cells below which a generated cell is a near copy."""
_BLOCK = 1_000
"""Cells whose distances to all others are held at once."""
_SAME = 1e-9
"""Difference of numbers, as a share of the largest one, up to which they are the same."""
_FULL_SVD = 500
"""Cells or genes, whichever are fewer, up to which all components are found at once; beyond, only those asked for."""


class MMD(NamedTuple):
    """Squared maximum mean discrepancy, and that of two halves of the real cells."""

    mmd: float
    floor: float


class GeneStatistics(NamedTuple):
    """Agreement of the moments of each gene."""

    mean_pearson: float
    mean_spearman: float
    mean_rmse: float
    variance_pearson: float
    variance_spearman: float
    variance_rmse: float
    zeros_pearson: float
    zeros_spearman: float
    zeros_rmse: float


class Copies(NamedTuple):
    """How many generated cells are real ones, or nearer to one than real cells are to each other."""

    exact: int
    share_closer: float
    ratio: float


def mmd(real: Any, generated: Any, *, rng: int) -> MMD:
    r"""Squared maximum mean discrepancy between real and generated cells [1]_.

    The unbiased estimate (its Lemma 6), with the kernel :math:`\sum_m \exp(-\|x - y\|^2 / m \tilde d)` over m =
    `KERNEL_WIDTHS`, :math:`\tilde d` being the median squared distance between real cells. Cells stand at principal
    components of real ones, so that nothing is measured by what was generated.

    Components fit the cells they were found on, and new cells lie closer in: beside those very cells, other real ones
    would seem far off. So components are found on one random half of the real cells, the other half is compared with
    the generated cells, and the same is done the other way round; the mean of the two is returned. Time grows with the
    square of the number of cells.

    Parameters
    ----------
    real
        Log-normalised expression, shape `(n, n_genes)`, at least 8 cells. Pass cells that the generator was not trained
        on: copies of cells in `real` score above 0, as components were found on half of them.
    generated
        Log-normalised expression, shape `(m, n_genes)`, at least 2 cells.
    rng
        Seed. It draws the halves, and the cells of the median where there are more than `MEDIAN_CELLS`.

    Returns
    -------
    `mmd`, around 0 for new cells of the same population, at most 10; as it is unbiased, it is negative as often as not
    where there is no difference. And `floor`, the same between random halves of the real cells that are compared: one
    draw of what chance gives, and a wide one, since these are fewer.

    Raises
    ------
    ValueError
        If values are negative or not finite; or if half of the pairs of real cells are equal, so that the kernels have
        no width.

    References
    ----------
    .. [1] Gretton, Borgwardt, Rasch, Schölkopf & Smola, A kernel two-sample test, JMLR 2012.
    """
    from scipy.spatial.distance import pdist

    a, b = _checked(real, generated)
    order = np.random.default_rng(rng).permutation(a.shape[0])
    half = len(order) // 2
    found, floors = [], []
    for fit, kept in ((order[:half], order[half:]), (order[half:], order[:half])):
        place = _components(a[fit], COMPONENTS)
        at_real, at_generated = place(a[kept]), place(b)
        median = float(np.median(pdist(at_real[:MEDIAN_CELLS], "sqeuclidean")))
        if median <= _SAME * np.square(at_real).sum(axis=1).max():
            raise ValueError("At least half of the pairs of real cells are at one point: the kernels have no width.")
        widths = median * np.array(KERNEL_WIDTHS)
        quarter = len(kept) // 2
        found.append(_squared_mmd(at_real, at_generated, widths))
        floors.append(_squared_mmd(at_real[:quarter], at_real[quarter:], widths))
    return MMD(mmd=float(np.mean(found)), floor=float(np.mean(floors)))


def gene_statistics(real: Any, generated: Any) -> GeneStatistics:
    """Compare mean, variance and share of zeros of each gene between real and generated cells.

    Genes that neither expresses agree in all three: leave them out beforehand.

    Parameters
    ----------
    real, generated
        Log-normalised expression, shapes `(n, n_genes)` and `(m, n_genes)`; at least 2 cells each.

    Returns
    -------
    Of `mean`, `variance` (with n - 1) and `zeros` (share of cells without the gene), over the genes: `_pearson` and
    `_spearman`, -1 to 1, NaN where the genes of one population don't differ; and `_rmse`, the root-mean-square
    difference, in the unit of the statistic.
    """
    from scipy.stats import rankdata

    a, b = _checked(real, generated)
    scores = []
    for first, second in zip(_moments(a), _moments(b), strict=True):
        scores += [
            _pearson(first, second),
            _pearson(rankdata(first), rankdata(second)),
            float(np.sqrt(np.mean((first - second) ** 2))),
        ]
    return GeneStatistics(*scores)


def correlation_agreement(real: Any, generated: Any) -> float:
    """Tell how well generated cells keep the correlations between genes.

    Parameters
    ----------
    real, generated
        Log-normalised expression, shapes `(n, n_genes)` and `(m, n_genes)`; at least 3 cells each.

    Returns
    -------
    Pearson correlation, over all pairs of the `CORRELATED_GENES` genes that vary most among the real cells (of equal
    ones the first), between their correlation among the real cells and that among the generated ones, -1 to 1. A gene
    that is constant among the generated cells correlates with none, 0. NaN where all correlations of one population are
    the same.
    """
    a, b = _checked(real, generated)
    variance = _moments(a)[1]
    genes = np.sort(np.argsort(-variance, kind="stable")[: min(CORRELATED_GENES, int((variance > 0).sum()))])
    pairs = np.triu_indices(len(genes), 1)
    return _pearson(_correlations(a[:, genes])[pairs], _correlations(b[:, genes])[pairs])


def discriminator_auroc(
    real: Any, generated: Any, *, classifier: Literal["forest", "logistic"] = "forest", rng: int
) -> float:
    """Tell how well a classifier that is trained to tells real cells from generated ones it was not shown.

    Of the larger population as many random cells are taken as the smaller one has.

    Parameters
    ----------
    real, generated
        Log-normalised expression, shapes `(n, n_genes)` and `(m, n_genes)`. Copies of cells in `real` take the score
        below 0.5, since a classifier trained on one of the two gets the other wrong.
    classifier
        `"forest"`: random forest of `TREES` trees on the `COMPONENTS` first principal components of both together.
        `"logistic"`: L2-penalised logistic regression (C = 1) on the `VARIABLE_GENES` genes that vary most among both
        together, standardised on the training cells; it sees single genes and no combination of them.
    rng
        Seed. It draws cells, folds and trees.

    Returns
    -------
    Area under the ROC curve, the mean over `FOLDS`, 0 to 1: 0.5 where they cannot be distinguished, 1 where always.
    """
    from scipy.sparse import vstack
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    a, b = _checked(real, generated)
    random = np.random.default_rng(rng)
    n = min(a.shape[0], b.shape[0])
    both: Any = vstack([m[np.sort(random.permutation(m.shape[0])[:n])] for m in (a, b)], format="csr")
    is_real = np.repeat([1, 0], n)
    folds_seed, forest_seed = (int(seed) for seed in random.integers(2**31, size=2))
    model: Any
    if classifier == "forest":
        features = _components(both, COMPONENTS)(both)
        model = RandomForestClassifier(n_estimators=TREES, random_state=forest_seed)
    else:
        variance = _moments(both)[1]
        features = both[:, np.sort(np.argsort(-variance, kind="stable")[:VARIABLE_GENES])].toarray()
        model = make_pipeline(StandardScaler(), LogisticRegression(C=1.0, max_iter=1_000))
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=folds_seed)
    return float(cross_val_score(model, features, is_real, cv=folds, scoring="roc_auc").mean())


def copies(real: Any, generated: Any) -> Copies:
    """Look for generated cells that are copies, or nearly, of the cells a generator was trained on.

    The Euclidean distance of each generated cell to its nearest real one is held against that of each real cell to its
    nearest other one. Real cells that are equal count as one, since distances of 0 between them would hide every copy.

    Parameters
    ----------
    real
        Log-normalised expression of the cells trained on, shape `(n, n_genes)`; at least 2 that differ.
    generated
        That of the generated cells, shape `(m, n_genes)`.

    Returns
    -------
    `exact`, the number of generated cells with the same genes and values as a real one, at the precision of float32;
    `share_closer`, the share of generated cells nearer to a real one than the `CLOSE` quantile of the distances
    between nearest real cells, about `CLOSE` for new cells of the same population; and `ratio`, the median distance of
    the generated cells / that of the real ones, about 1 for such.
    """
    from sklearn.neighbors import NearestNeighbors

    a, b = _checked(real, generated)
    known: dict[bytes, int] = {}
    for i, key in enumerate(_keys(a)):
        known.setdefault(key, i)
    exact = sum(key in known for key in _keys(b))
    a = a[np.array(list(known.values()))]
    search = NearestNeighbors(n_neighbors=1).fit(a)
    between = search.kneighbors()[0].ravel()
    nearest = search.kneighbors(b)[0].ravel()
    return Copies(
        exact=exact,
        share_closer=float((nearest < np.quantile(between, CLOSE)).mean()),
        ratio=float(np.median(nearest) / np.median(between)),
    )


def _checked(*given: Any) -> list[Any]:
    """Give expression of each as float64 without stored zeros; refuse what is negative or not finite."""
    from scipy.sparse import csr_array

    checked = []
    for matrix in (csr_array(one, dtype=np.float64, copy=True) for one in given):
        matrix.sum_duplicates()
        matrix.eliminate_zeros()
        if bad := np.count_nonzero(~(np.isfinite(matrix.data) & (matrix.data >= 0))):
            raise ValueError(f"{bad} values are negative or not finite: pass log-normalised expression, not scaled.")
        checked.append(matrix)
    return checked


def _moments(matrix: Any) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Mean, variance with n - 1, and share of zeros of each gene; a variance that is rounding is 0."""
    from sklearn.utils.sparsefuncs import mean_variance_axis

    n = matrix.shape[0]
    mean, variance = mean_variance_axis(matrix, axis=0)
    expressed = np.bincount(matrix.indices, minlength=matrix.shape[1])
    variance = np.where(variance > (_SAME * mean) ** 2, variance, 0.0)
    return mean, variance * n / (n - 1), 1 - expressed / n


def _components(cells: Any, n_components: int) -> Callable[[Any], NDArray[np.float64]]:
    """Give what places cells on the principal components of these; components without variance are left out."""
    from sklearn.decomposition import PCA

    smaller = min(cells.shape)
    full = smaller <= _FULL_SVD or n_components >= smaller
    pca = PCA(min(n_components, smaller), svd_solver="full" if full else "arpack", random_state=0)
    with np.errstate(invalid="ignore"):  # of equal cells, refused below, the share of variance is 0 / 0
        pca.fit(cells.toarray() if full else cells)
    # along those of no variance the cells all stand at one point, and the direction is the solver's whim
    kept = pca.singular_values_ > _SAME * np.sqrt((cells * cells).sum())
    if not kept.any():
        raise ValueError(f"All {cells.shape[0]} cells are equal: they have no principal components.")
    axes = pca.components_[kept].T
    return lambda others: np.asarray(others @ axes) - pca.mean_ @ axes


def _squared_mmd(a: NDArray[np.float64], b: NDArray[np.float64], widths: NDArray[np.float64]) -> float:
    """Unbiased estimate: means of the kernel within each sample, cells with themselves left out, and between."""
    itself = len(widths)  # of a cell with itself each kernel is 1
    n, m = len(a), len(b)
    within_a = (_kernel_sum(a, a, widths) - n * itself) / (n * (n - 1))
    within_b = (_kernel_sum(b, b, widths) - m * itself) / (m * (m - 1))
    return within_a + within_b - 2 * _kernel_sum(a, b, widths) / (n * m)


def _kernel_sum(a: NDArray[np.float64], b: NDArray[np.float64], widths: NDArray[np.float64]) -> float:
    from scipy.spatial.distance import cdist

    total = 0.0
    for start in range(0, len(a), _BLOCK):
        distance = cdist(a[start : start + _BLOCK], b, "sqeuclidean")
        total += sum(float(np.exp(-distance / width).sum()) for width in widths)
    return total


def _correlations(matrix: Any) -> NDArray[np.float64]:
    """Correlations between genes; 0 for one that doesn't vary."""
    varies = _moments(matrix)[1] > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.corrcoef(matrix.toarray(), rowvar=False)
    return np.where(varies[:, None] & varies, found, 0.0)


def _pearson(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Pearson correlation; NaN where one of the two is constant."""
    if any(np.ptp(values) <= _SAME * np.abs(values).max() for values in (a, b)):
        return np.nan
    return float(np.clip(np.corrcoef(a, b)[0, 1], -1.0, 1.0))


def _keys(matrix: Any) -> list[bytes]:
    """One key for each cell, the same for the same genes and values at the precision of float32."""
    values = matrix.data.astype(np.float32)
    rows = [slice(*matrix.indptr[i : i + 2]) for i in range(matrix.shape[0])]
    return [matrix.indices[row].astype(np.int64).tobytes() + values[row].tobytes() for row in rows]
