"""Networks of genes: their hubs, and which gene sets their modules hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from scdiva._checks import check_least

from ._input import refuse_where

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray


def hub_scores(graph: Any) -> NDArray[np.float64]:
    r"""Score each source as a hub, one that points to what other hubs point to as well [1]_.

    The scores :math:`h` are the principal eigenvector of :math:`|W| |W|^T`, to which repeated steps from equal scores
    lead. Its blocks, sources that share targets directly or through others, are solved one by one: each has one such
    vector, which a solver given several of the same strength would mix at random.

    Parameters
    ----------
    graph
        Weight of each pair, source × target, shape `(n_sources, n_targets)`, sparse or dense; signs are dropped.

    Returns
    -------
    float64 `(n_sources,)`, 0 to 1: the largest is 1, or all are 0 if there are no edges. Sources outside of the
    strongest block are 0.

    Raises
    ------
    ValueError
        If the graph has another number of axes or holds values that are not finite.

    References
    ----------
    .. [1] Kleinberg, Authoritative sources in a hyperlinked environment, Journal of the ACM 1999.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> graph = rng.random((40, 40))
    >>> graph[:10, :10] += 2  # the first ten genes go together
    >>> sd.metrics.hub_scores(graph).shape
    (40,)
    """
    from scipy.sparse import block_array, csr_array
    from scipy.sparse.csgraph import connected_components

    weights: Any = csr_array(graph, dtype=np.float64, copy=True)
    if weights.ndim != 2 or not min(weights.shape):
        raise ValueError(f"graph has shape {weights.shape}; it must be (n_sources, n_targets).")
    weights.sum_duplicates()
    refuse_where(~np.isfinite(weights.data), "weights of graph are not finite", "Store no pair that was not measured.")
    weights = abs(weights)
    weights.eliminate_zeros()
    scores = np.zeros(weights.shape[0])
    if not weights.nnz:
        return scores
    weights = weights / weights.max()  # squares of tiny weights would be lost
    # sources and then targets: a source that is a target too stands twice
    both = block_array([[None, weights], [weights.T, None]]).tocsr()
    _, block = connected_components(both, directed=False)
    block = block[: weights.shape[0]]
    linked = np.flatnonzero(np.diff(weights.indptr))
    order = linked[np.argsort(block[linked], kind="stable")]
    members = np.split(order, np.flatnonzero(np.diff(block[order])) + 1)
    solved = [_principal(weights[rows]) for rows in members]
    strongest = max(strength for strength, _ in solved)
    for rows, (strength, vector) in zip(members, solved, strict=True):
        if strength >= (1 - 1e-9) * strongest:  # or as strong but for rounding
            scores[rows] = vector * vector.sum()  # its share in equal scores
    return np.asarray(scores / scores.max())


def enrichment(
    modules: Mapping[str, Iterable[str]],
    gene_sets: Mapping[str, Iterable[str]],
    background: Iterable[str],
    *,
    min_genes: int = 5,
    max_genes: int = 500,
) -> pd.DataFrame:
    """Test which gene sets are over-represented in which modules.

    Parameters
    ----------
    modules
        Genes of each module. A gene named twice counts once, here as in gene sets.
    gene_sets
        Genes of each set.
    background
        All genes that could have been in a module, such as those of the graph; others are dropped from modules and
        sets.
    min_genes, max_genes
        Sets with fewer or more genes in the background are not tested.

    Returns
    -------
    A row for each module and each tested set, those without a common gene too, the smallest p first: `module`,
    `gene_set`, `n_module` and `n_set` (genes in the background), `n_overlap`, `fold` (n_overlap over what chance is
    expected to give), `p` (hypergeometric: chance of `n_overlap` or more), `padj` (Benjamini-Hochberg over all rows),
    and `genes`, the common ones, by name, with commas between.

    Raises
    ------
    ValueError
        If there are no modules, a module has no gene in the background, no set has `min_genes` to `max_genes` there, or
        `min_genes` is below 1.

    Examples
    --------
    >>> import scdiva as sd
    >>> genes = [f"g{i}" for i in range(100)]
    >>> found = sd.metrics.enrichment({"module": genes[:20]}, {"set": genes[:15]}, genes)
    >>> bool(found["padj"].iloc[0] < 0.01)
    True
    """
    import pandas as pd
    from scipy.stats import false_discovery_control, hypergeom

    check_least(min_genes=(min_genes, 1))
    universe = set(background)
    in_modules = {str(name): set(genes) & universe for name, genes in modules.items()}
    in_sets = {str(name): set(genes) & universe for name, genes in gene_sets.items()}
    empty = [name for name, genes in in_modules.items() if not genes]
    if empty or not in_modules:
        raise ValueError(
            f"{len(empty)} of {len(in_modules)} modules have no gene among the {len(universe)} of the background"
            f"{f' (the first is {empty[0]!r})' if empty else ''}. All must use the same gene names."
        )
    tested = {name: genes for name, genes in in_sets.items() if min_genes <= len(genes) <= max_genes}
    if not tested:
        raise ValueError(
            f"None of {len(in_sets)} gene sets (first: {next(iter(in_sets), None)!r}) has {min_genes} to {max_genes} "
            f"of the {len(universe)} genes of the background (first: {min(universe, default=None)!r}): do both use the "
            "same names? In tl.enrich_modules, gene_symbols= names the column of adata.var with those of the sets."
        )
    rows = []
    for module, genes in in_modules.items():
        for name, others in tested.items():
            common = genes & others
            rows.append((module, name, len(genes), len(others), len(common), ",".join(sorted(common))))
    frame = pd.DataFrame(rows, columns=["module", "gene_set", "n_module", "n_set", "n_overlap", "genes"])
    expected = frame["n_module"] * frame["n_set"] / len(universe)
    frame.insert(5, "fold", frame["n_overlap"] / expected)
    frame.insert(6, "p", hypergeom.sf(frame["n_overlap"] - 1, len(universe), frame["n_set"], frame["n_module"]))
    frame["p"] = frame["p"].clip(0.0, 1.0)  # a sum of chances may pass 1 in its last digit
    frame.insert(7, "padj", false_discovery_control(frame["p"]))
    return frame.sort_values(["padj", "p", "module", "gene_set"], kind="stable", ignore_index=True)


def _principal(weights: Any) -> tuple[float, NDArray[np.float64]]:
    """Give the largest eigenvalue of W W^T and its vector, of length 1 and nowhere negative, for one block."""
    from scipy.sparse.linalg import LinearOperator, eigsh

    n = weights.shape[0]
    if n == 1:
        return float(weights.multiply(weights).sum()), np.ones(1)
    transposed = weights.T.tocsr()
    square = LinearOperator((n, n), matvec=lambda h: weights @ (transposed @ h), dtype=np.float64)
    values, vectors = eigsh(square, k=1, which="LA", v0=np.ones(n))
    return float(values[0]), np.abs(vectors[:, 0])
