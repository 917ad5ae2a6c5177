"""Modules of a gene network and its hubs (`tl.grn_modules`)."""

from __future__ import annotations

import random
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import scipy.sparse as sp

from scdiva import _constants as C
from scdiva._checks import check_arguments, check_least, check_positive, from_extra
from scdiva._rng import given_seed, step_seed
from scdiva.data.results import check_writable, write
from scdiva.metrics import hub_scores
from scdiva.networks.storage import network_of

if TYPE_CHECKING:
    import torch
    from anndata import AnnData
    from numpy.typing import NDArray


@check_arguments
def grn_modules(
    adata: AnnData,
    *,
    key: str = C.VARP_GRN,
    group: str | None = None,
    n_neighbors: int = 15,
    resolution: float = 1.0,
    rng: int | np.random.Generator | torch.Generator | None = None,
    key_added: str = C.VAR_MODULE,
    copy: bool = False,
) -> AnnData | None:
    """Find modules of a gene network by the Leiden algorithm, and score its hubs.

    Of each gene the strongest positive edges are kept, in whatever direction; where both directions have a weight the
    larger one counts. The communities of that graph by modularity (Traag et al. 2019) are the modules.

    Parameters
    ----------
    adata
        Data that :func:`grn` wrote to.
    key
        Its `key_added`.
    group
        Which network, where there is one for each group of cells.
    n_neighbors
        Edges kept of each gene.
    resolution
        Higher values give more modules.
    rng
        Seed; None takes `scdiva.settings.seed`.
    key_added
        Column of `adata.var` to write.
    copy
        Return a copy of `adata` with the modules instead of writing into it.

    Returns
    -------
    `None`, or the copy if `copy=True`. Written are

    `adata.var[key_added]`
        Categorical, `"0"` the largest module; NaN for genes without a positive edge.
    `adata.var[f"{key_added}_hub"]`
        float32, Kleinberg's hub score of the whole network's absolute weights, 1 for the first hub: a source scores
        high whose targets are the targets of other hubs (:func:`scdiva.metrics.hub_scores`). NaN for genes that are no
        source.
    `adata.uns["scdiva"][key_added]`
        The parameters of the call.

    Raises
    ------
    KeyError
        If there is no such network or group.
    ValueError
        If an argument is out of range, or no edge is positive.
    ImportError
        If `igraph` is not installed; it is GPL and so part of the extra `scdiva[leiden]`.

    References
    ----------
    .. [1] Traag et al., From Louvain to Leiden: guaranteeing well-connected communities, Scientific Reports 2019.
    .. [2] Kleinberg, Authoritative sources in a hyperlinked environment, Journal of the ACM 1999.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.pbmc3k_small()
    >>> sd.tl.grn(adata)
    >>> sd.tl.grn_modules(adata)
    >>> adata.var["scdiva_grn_module"].cat.categories[0]
    '0'
    """
    igraph = from_extra("igraph", "leiden", "Leiden modules need igraph")
    written = [key_added, f"{key_added}_{C.HUB}"]
    check_writable(adata, copy=copy, call="tl.grn_modules", entry=key_added, var=written)
    check_least(n_neighbors=(n_neighbors, 1))
    check_positive(resolution=resolution)
    network = network_of(adata, key, group)
    seed = given_seed(rng)
    graph = strongest(network.weights, n_neighbors)
    taking_part = np.flatnonzero(np.diff(graph.indptr))
    if not len(taking_part):
        raise ValueError(f"the network {key!r} has no edge of positive weight, and so no modules.")
    number = _leiden(igraph, graph[taking_part][:, taking_part], resolution, seed)
    names, size = np.unique(number, return_counts=True)
    code = np.full(adata.n_vars, -1)
    code[taking_part] = np.argsort(np.lexsort((names, -size)))[number]  # the largest is 0
    hubs = np.full(adata.n_vars, np.nan, dtype=np.float32)
    hubs[network.sources] = hub_scores(abs(network.weights[network.sources]))
    found = pd.Categorical.from_codes(code, [str(i) for i in range(len(names))])
    given = {"n_neighbors": int(n_neighbors), "resolution": float(resolution)}
    parameters = {"key": key, "group": network.group, **given, "seed": str(seed)}
    columns = dict(zip(written, (found, hubs), strict=True))
    return write(adata, "tl.grn_modules", key_added, parameters, copy=copy, var=columns)


def strongest(weights: sp.csr_matrix, n_neighbors: int) -> sp.csr_matrix:
    """Keep the strongest positive edges of each gene, in whatever direction, as a symmetric graph.

    Parameters
    ----------
    weights
        (n, n), directed.
    n_neighbors
        Edges of each gene; a gene has more where others have chosen it.

    Returns
    -------
    (n, n), symmetric.
    """
    positive = weights.maximum(0)
    both = sp.csr_matrix(positive.maximum(positive.T))
    both.eliminate_zeros()
    both.sort_indices()
    kept = np.zeros(both.nnz, dtype=bool)
    for start, stop in zip(both.indptr[:-1], both.indptr[1:], strict=True):
        kept[start + np.argsort(-both.data[start:stop], kind="stable")[:n_neighbors]] = True
    both.data[~kept] = 0
    both.eliminate_zeros()
    return sp.csr_matrix(both.maximum(both.T))


def _leiden(igraph: ModuleType, graph: sp.csr_matrix, resolution: float, seed: int) -> NDArray[np.int64]:
    upper = sp.triu(graph, k=1).tocoo()
    edges = igraph.Graph(n=graph.shape[0], edges=np.column_stack([upper.row, upper.col]))
    # igraph draws from Python's generator unless given one of its own; the user's global state stays untouched.
    igraph.set_random_number_generator(random.Random(step_seed(seed, 0, "modules")))
    try:
        found = edges.community_leiden(
            objective_function="modularity", weights=upper.data, resolution=resolution, n_iterations=-1
        )
    finally:
        igraph.set_random_number_generator(random)
    return np.array(found.membership, dtype=np.int64)
