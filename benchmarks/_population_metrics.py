"""How far a population of generated cells is from a real one: log-normalised expression in, floats out.

Every score takes both populations as CSR or dense, of the same genes in the same order.
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
TREES = 200
"""Trees of the forest."""
FOREST_COMPONENTS = 50
"""Principal components that the forest sees."""
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


def mmd(real: Any, generated: Any, n_components: int = 50, *, rng: int | np.random.Generator | None = 0) -> MMD:
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
    n_components
        Principal components; where there are fewer, all are taken.
    rng
        Seed, or a generator, which goes on; None is 0. It draws the halves, and the cells of the median where there
        are more than `MEDIAN_CELLS`.

    Returns
    -------
    `mmd`, around 0 for new cells of the same population, at most 10; as it is unbiased, it is negative as often as not
    where there is no difference. And `floor`, the same between random halves of the real cells that are compared: one
    draw of what chance gives, and a wide one, since these are fewer.

    Raises
    ------
    ValueError
        If populations differ in genes, have too few cells, or hold values that are negative or not finite; if
        `n_components` is below 1; or if half of the pairs of real cells are equal, so that the kernels have no width.

    References
    ----------
    .. [1] Gretton, Borgwardt, Rasch, Schölkopf & Smola, A kernel two-sample test, JMLR 2012.
    """
    from scipy.spatial.distance import pdist

    a, b = _checked(real, generated, at_least=(8, 2))
    random = _random(rng)
    order = random.permutation(a.shape[0])
    half = len(order) // 2
    found, floors = [], []
    for fit, kept in ((order[:half], order[half:]), (order[half:], order[:half])):
        place = _components(a[fit], n_components)
        at_real, at_generated = place(a[kept]), place(b)
        median = float(np.median(pdist(at_real[:MEDIAN_CELLS], "sqeuclidean")))
        if median <= _SAME * np.square(at_real).sum(axis=1).max():
            raise ValueError(
                "At least half of the pairs of real cells are at one point: the kernels have no width. Leave equal "
                "cells out, or take more components."
            )
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

    Raises
    ------
    ValueError
        If populations differ in genes, have fewer than 2 cells, or hold values that are negative or not finite.
    """
    from scipy.stats import rankdata

    a, b = _checked(real, generated, at_least=(2, 2))
    scores = []
    for first, second in zip(_moments(a), _moments(b), strict=True):
        scores += [
            _pearson(first, second),
            _pearson(rankdata(first), rankdata(second)),
            float(np.sqrt(np.mean((first - second) ** 2))),
        ]
    return GeneStatistics(*scores)


def correlation_agreement(real: Any, generated: Any, n_genes: int = 200) -> float:
    """Tell how well generated cells keep the correlations between genes.

    Parameters
    ----------
    real, generated
        Log-normalised expression, shapes `(n, n_genes)` and `(m, n_genes)`; at least 3 cells each.
    n_genes
        Number of genes, those that vary most among the real cells, of equal ones the first; where fewer vary, all
        that do. At least 3.

    Returns
    -------
    Pearson correlation, over all pairs of these genes, between their correlation among the real cells and that among
    the generated ones, -1 to 1. A gene that is constant among the generated cells correlates with none, 0. NaN where
    all correlations of one population are the same.

    Raises
    ------
    ValueError
        If populations differ in genes, have fewer than 3 cells, or hold values that are negative or not finite; if
        fewer than 3 genes are asked for or vary among the real cells.
    """
    a, b = _checked(real, generated, at_least=(3, 3))
    if n_genes < 3:
        raise ValueError(f"n_genes must be 3 or more, got {n_genes}: fewer have too few pairs.")
    variance = _moments(a)[1]
    n_vary = int((variance > 0).sum())
    if n_vary < 3:
        raise ValueError(f"{n_vary} of {len(variance)} genes vary among the real cells; at least 3 are needed.")
    genes = np.sort(np.argsort(-variance, kind="stable")[: min(n_genes, n_vary)])
    pairs = np.triu_indices(len(genes), 1)
    return _pearson(_correlations(a[:, genes])[pairs], _correlations(b[:, genes])[pairs])


def discriminator_auroc(
    real: Any,
    generated: Any,
    *,
    classifier: Literal["forest", "logistic"] = "forest",
    n_splits: int = 5,
    rng: int | np.random.Generator | None = 0,
) -> float:
    """Tell how well a classifier that is trained to tells real cells from generated ones it was not shown.

    Of the larger population as many random cells are taken as the smaller one has.

    Parameters
    ----------
    real, generated
        Log-normalised expression, shapes `(n, n_genes)` and `(m, n_genes)`; at least `n_splits` cells each. Pass real
        cells that the generator was not trained on: copies of cells in `real` take the score below 0.5, since a
        classifier trained on one of the two gets the other wrong.
    classifier
        `"forest"`: random forest of `TREES` trees on the `FOREST_COMPONENTS` first principal components of both
        together.
        `"logistic"`: L2-penalised logistic regression (C = 1) on the `VARIABLE_GENES` genes that vary most among both
        together, standardised on the training cells; it sees single genes and no combination of them.
    n_splits
        Folds, stratified, 2 or more.
    rng
        Seed, or a generator, which goes on; None is 0. It draws cells, folds and trees.

    Returns
    -------
    Area under the ROC curve, the mean over folds, 0 to 1: 0.5 where they cannot be distinguished, 1 where always.

    Raises
    ------
    ValueError
        If populations differ in genes, have fewer cells than folds, or hold values that are negative or not finite; if
        all cells are equal, `n_splits` is below 2, or there is no such classifier.
    """
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if classifier not in ("forest", "logistic"):
        raise ValueError(f"classifier must be 'forest' or 'logistic', got {classifier!r}.")
    if n_splits < 2:
        raise ValueError(f"n_splits must be 2 or more, got {n_splits}.")
    a, b = _checked(real, generated, at_least=(n_splits, n_splits))
    random = _random(rng)
    n = min(a.shape[0], b.shape[0])
    drawn = [m[np.sort(random.permutation(m.shape[0])[:n])] for m in (a, b)]
    both = _pooled(*drawn)
    is_real = np.repeat([1, 0], n)
    folds_seed, forest_seed = (int(seed) for seed in random.integers(2**31, size=2))
    model: Any
    if classifier == "forest":
        features = _components(both, FOREST_COMPONENTS)(both)
        model = RandomForestClassifier(n_estimators=TREES, random_state=forest_seed)
    else:
        variance = _moments(both)[1]
        if not variance.any():
            raise ValueError("All cells are equal: there is nothing to tell apart.")
        features = _dense(both[:, np.sort(np.argsort(-variance, kind="stable")[:VARIABLE_GENES])])
        model = make_pipeline(StandardScaler(), LogisticRegression(C=1.0, max_iter=1_000))
    folds = StratifiedKFold(n_splits, shuffle=True, random_state=folds_seed)
    return float(cross_val_score(model, features, is_real, cv=folds, scoring="roc_auc").mean())


def copies(real: Any, generated: Any, *, n_components: int | None = None) -> Copies:
    """Look for generated cells that are copies, or nearly, of the cells a generator was trained on.

    The distance of each generated cell to its nearest real one is held against that of each real cell to its nearest
    other one. Real cells that are equal count as one, since distances of 0 between them would hide every copy.

    Parameters
    ----------
    real
        Log-normalised expression of the cells trained on, shape `(n, n_genes)`; at least 2 that differ.
    generated
        That of the generated cells, shape `(m, n_genes)`.
    n_components
        None takes Euclidean distances of expression itself. A number takes so many principal components, or all where
        there are fewer; they see past noise. They are those of both populations together: components of the real cells
        fit these better than new ones, which would then lie closer in and look like copies.

    Returns
    -------
    `exact`, the number of generated cells with the same genes and values as a real one, at the precision of float32;
    `share_closer`, the share of generated cells nearer to a real one than the `CLOSE` quantile of the distances
    between nearest real cells, about `CLOSE` for new cells of the same population; and `ratio`, the median distance of
    the generated cells / that of the real ones, about 1 for such.

    Raises
    ------
    ValueError
        If populations differ in genes, have too few cells, or hold values that are negative or not finite;
        `n_components` is below 1; or so many real cells share their components that distances tell no copies.
    """
    from sklearn.neighbors import NearestNeighbors

    a, b = _checked(real, generated, at_least=(2, 1))
    known: dict[bytes, int] = {}
    for i, key in enumerate(_keys(a)):
        known.setdefault(key, i)
    if len(known) < 2:
        raise ValueError(f"All {a.shape[0]} real cells are equal; how near others are needs two that differ.")
    exact = sum(key in known for key in _keys(b))
    a = a[np.array(list(known.values()))]
    if n_components is None:
        at_real, at_generated = a, b
    else:
        place = _components(_pooled(a, b), n_components)
        at_real, at_generated = place(a), place(b)
    search = NearestNeighbors(n_neighbors=1).fit(at_real)
    between = search.kneighbors()[0].ravel()
    nearest = search.kneighbors(at_generated)[0].ravel()
    close = float(np.quantile(between, CLOSE))
    # below this, distances are what rounding leaves of 0
    if close <= 1e-6 * np.sqrt((at_real * at_real).sum(axis=1).max()):
        raise ValueError(
            f"{(between <= close).sum()} of {len(between)} real cells, none of them equal, are where another one is. "
            "Take more components, or n_components=None."
        )
    return Copies(
        exact=exact,
        share_closer=float((nearest < close).mean()),
        ratio=float(np.median(nearest) / np.median(between)),
    )


def _checked(real: Any, generated: Any, *, at_least: tuple[int, int]) -> tuple[Any, Any]:
    """Give expression of both as float64, both CSR without stored zeros or both dense.

    Refuses other genes, too few cells, and values that are negative or not finite.
    """
    from scipy.sparse import csr_array, issparse

    sparse = issparse(real) or issparse(generated)
    checked = []
    for name, given, n_least in zip(("real", "generated"), (real, generated), at_least, strict=True):
        matrix: Any = csr_array(given, dtype=np.float64, copy=True) if sparse else np.asarray(given, dtype=np.float64)
        if matrix.ndim != 2 or not matrix.shape[1]:
            raise ValueError(f"{name} has shape {matrix.shape}; it must be (n_cells, n_genes).")
        if matrix.shape[0] < n_least:
            raise ValueError(f"{name} has {matrix.shape[0]} cells; at least {n_least} are needed.")
        if sparse:
            matrix.sum_duplicates()
        values = matrix.data if sparse else matrix.ravel()
        bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
        if len(bad):
            first = int(bad[0])
            cell = np.searchsorted(matrix.indptr, first, side="right") - 1 if sparse else first // matrix.shape[1]
            gene = matrix.indices[first] if sparse else first % matrix.shape[1]
            raise ValueError(
                f"{len(bad)} values of {name} are negative or not finite (the first in cell {cell}, gene {gene}). Pass "
                "log-normalised expression, not scaled."
            )
        if sparse:
            matrix.eliminate_zeros()
        checked.append(matrix)
    if checked[0].shape[1] != checked[1].shape[1]:
        raise ValueError(
            f"real has {checked[0].shape[1]} genes and generated {checked[1].shape[1]}; both must be of the same genes "
            "in the same order."
        )
    return checked[0], checked[1]


def _moments(matrix: Any) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Mean, variance with n - 1, and share of zeros of each gene; a variance that is rounding is 0."""
    from sklearn.utils.sparsefuncs import mean_variance_axis

    n = matrix.shape[0]
    if isinstance(matrix, np.ndarray):
        mean, variance, expressed = matrix.mean(axis=0), matrix.var(axis=0), np.count_nonzero(matrix, axis=0)
    else:
        mean, variance = mean_variance_axis(matrix, axis=0)
        expressed = np.bincount(matrix.indices, minlength=matrix.shape[1])
    variance = np.where(variance > (_SAME * mean) ** 2, variance, 0.0)
    return mean, variance * n / (n - 1), 1 - expressed / n


def _components(cells: Any, n_components: int) -> Callable[[Any], NDArray[np.float64]]:
    """Give what places cells on the principal components of these; components without variance are left out."""
    from sklearn.decomposition import PCA

    if n_components < 1:
        raise ValueError(f"n_components must be 1 or more, got {n_components}.")
    smaller = min(cells.shape)
    full = smaller <= _FULL_SVD or n_components >= smaller
    pca = PCA(min(n_components, smaller), svd_solver="full" if full else "arpack", random_state=0)
    with np.errstate(invalid="ignore"):  # of equal cells, refused below, the share of variance is 0 / 0
        pca.fit(_dense(cells) if full else cells)
    # along those of no variance the cells all stand at one point, and the direction is the solver's whim
    kept = pca.singular_values_ > _SAME * np.sqrt((cells * cells).sum())
    if not kept.any():
        raise ValueError(f"All {cells.shape[0]} cells are equal: they have no principal components.")
    axes = pca.components_[kept].T
    return lambda others: np.asarray(others @ axes) - pca.mean_ @ axes


def _pooled(a: Any, b: Any) -> Any:
    """Put the cells of both in one matrix."""
    from scipy.sparse import vstack

    return np.vstack([a, b]) if isinstance(a, np.ndarray) else vstack([a, b], format="csr")


def _dense(matrix: Any) -> NDArray[np.float64]:
    """Give a CSR matrix as an array, an array as it is."""
    return matrix if isinstance(matrix, np.ndarray) else matrix.toarray()


def _random(rng: int | np.random.Generator | None) -> np.random.Generator:
    return np.random.default_rng(0 if rng is None else rng)


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
        found = np.corrcoef(_dense(matrix), rowvar=False)
    return np.where(varies[:, None] & varies, found, 0.0)


def _pearson(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Pearson correlation; NaN where one of the two is constant."""
    if any(np.ptp(values) <= _SAME * np.abs(values).max() for values in (a, b)):
        return np.nan
    return float(np.clip(np.corrcoef(a, b)[0, 1], -1.0, 1.0))


def _keys(matrix: Any) -> list[bytes]:
    """One key for each cell, the same for the same genes and values at the precision of float32."""
    if isinstance(matrix, np.ndarray):
        return [(row + np.float32(0)).tobytes() for row in matrix.astype(np.float32)]  # of -0 and 0 the key is one
    values = matrix.data.astype(np.float32)
    rows = [slice(*matrix.indptr[i : i + 2]) for i in range(matrix.shape[0])]
    return [matrix.indices[row].astype(np.int64).tobytes() + values[row].tobytes() for row in rows]
