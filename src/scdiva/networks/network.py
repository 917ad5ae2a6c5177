"""Networks that `tl.grn` wrote: reading them, their modules (`tl.grn_modules`) and regulons (`tl.regulon`)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray

from scdiva import _constants as C
from scdiva._checks import check_arguments, check_least, check_positive, from_extra, no_entry, or_nearest, warn
from scdiva._docs import with_shared_docs
from scdiva._labels import read_labels
from scdiva._rng import given_seed, step_seed
from scdiva.data.cells import log_normalised
from scdiva.data.results import check_anndata, check_writable, our_uns, write
from scdiva.metrics import hub_scores

if TYPE_CHECKING:
    import torch
    from anndata import AnnData

_WEIGHTS = {
    "attention": "excess attention rank",
    "correlation": "Pearson correlation",
    "embedding": "similarity of genes (z-score)",
}
"""Unit of the weights of each method."""
_TITLES = {"attention": "Attention", "correlation": "Gene correlation", "embedding": "Gene similarity by embeddings"}


class Network(NamedTuple):
    """A network written by `scdiva.tl.grn`: sources in rows and targets in columns, over all genes of adata."""

    weights: sp.csr_matrix
    names: NDArray[Any]
    sources: NDArray[np.bool_]
    targets: NDArray[np.bool_]
    method: str
    group: str
    reference: str
    signed: bool
    layers: NDArray[np.int64]
    heads: NDArray[np.int64]

    @property
    def directed(self) -> bool:
        """Whether an edge and its reverse have different weights."""
        return self.method == "attention"

    def strength(self, weight: NDArray[np.floating]) -> NDArray[np.floating]:
        """Strength by which edges are ranked: the absolute value of signed weights, else the weight."""
        return np.abs(weight) if self.signed else weight

    @property
    def unit(self) -> str:
        """Unit of the weights."""
        unit = _WEIGHTS.get(self.method, "weight")
        return f"difference of\n{unit}\n{self.group} − {self.reference}" if self.reference else unit

    @property
    def title(self) -> str:
        """Method, layers and heads of attention, and group."""
        parts = [_TITLES.get(self.method, self.method)]
        if self.method == "attention":
            parts += [_as_text("layer", self.layers), _as_text("head", self.heads)]
        return ", ".join([*parts, self.group] if self.group else parts)


def _as_text(what: str, numbers: NDArray[np.int64]) -> str:
    """Layers or heads as text: "all layers", "layer 3", "heads 0–2, 5"."""
    if not len(numbers):
        return f"all {what}s"
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    text = ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
    return f"{what}{'s' * (len(numbers) > 1)} {text}"


def network_of(adata: AnnData, key: str, group: str | None) -> Network:
    """Read a network from `varp`."""
    call = f"scdiva.tl.grn(adata, ..., key_added={key!r})"
    about = our_uns(adata).get(key)
    if about is None or "keys" not in about:
        raise KeyError(f"adata.uns[{C.UNS!r}] has no network {key!r}: call {call} first.")
    groups = [str(name) for name in np.atleast_1d(about["groups"])]
    if not groups and group is not None:
        raise KeyError(
            f"group={group!r}, and the network {key!r} is of all cells: leave group out, or call scdiva.tl.grn(adata, "
            f"..., groupby=..., key_added={key!r}) for one network a group."
        )
    if groups and (group not in groups) and (group is not None or len(groups) > 1):
        raise KeyError(f"group={group!r} must be one of those that {key!r} has a network of: {', '.join(groups)}.")
    at = groups.index(group) if group is not None else 0
    stored = str(np.atleast_1d(about["keys"])[at])
    if stored not in adata.varp:
        raise no_entry("adata.varp", stored, adata.varp, call)
    names = adata.var_names.astype(str)
    return Network(
        weights=sp.csr_matrix(adata.varp[stored]),
        names=np.asarray(names),
        sources=names.isin(list(map(str, np.atleast_1d(about["sources"])))),
        targets=names.isin(list(map(str, np.atleast_1d(about["targets"])))),
        method=str(about["method"]),
        group=groups[at] if groups else "",
        reference=str(about["reference"]),
        signed=bool(about["signed"]),
        layers=np.atleast_1d(about.get("layers", np.empty(0, np.int64))),
        heads=np.atleast_1d(about.get("heads", np.empty(0, np.int64))),
    )


def genes_of(network: Network, genes: Sequence[str], key: str) -> NDArray[np.intp]:
    """Columns of named genes, in their order; warns of genes that are not in the network."""
    if isinstance(genes, str):
        raise TypeError(f"genes={genes!r} must be a list of names.")
    in_network = network.sources | network.targets
    column = {name: i for i, name in enumerate(network.names) if in_network[i]}
    names = list(dict.fromkeys(map(str, genes)))
    columns = [column[name] for name in names if name in column]
    missing = [name for name in names if name not in column]
    if not columns:
        like = or_nearest(missing[0], column) if missing else ""
        raise KeyError(
            f"none of {len(names)} genes ({', '.join(missing[:3])}{', ...' * (len(missing) > 3)}) is in the network "
            f"{key!r} of {len(column):,}{like}. scdiva.tl.grn(adata, sources=..., targets=..., min_fraction=...) "
            "decides which are."
        )
    if missing:
        warn(
            f"{len(missing)} of {len(names)} genes are not in the network {key!r} and are left out: "
            f"{', '.join(missing[:5])}{', ...' * (len(missing) > 5)}."
        )
    return np.array(columns, dtype=np.intp)


@check_arguments
@with_shared_docs
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

    For each gene, the strongest positive edges are kept, in either direction; if both directions have a weight, the
    larger one is used. Modules are the communities of that graph by modularity (Traag et al. 2019).

    Parameters
    ----------
    adata
        Data with a network of :func:`grn`.
    key
        `key_added` of that call.
    group
        Group of cells, if there is a network for each.
    n_neighbors
        Number of edges kept for each gene.
    resolution
        Higher values give more modules.
    rng
        Seed. None: `scdiva.settings.seed`.
    key_added
        Column of `adata.var` to write.
    %(copy)s

    Returns
    -------
    `None`, or the copy if `copy=True`. Results are

    `adata.var[key_added]`
        Categorical; `"0"` is the largest module, NaN are genes without a positive edge.
    `adata.var[f"{key_added}_hub"]`
        float32, Kleinberg's hub score of the absolute weights of the whole network, 1 for the first hub: a source has a
        high score if its targets are also targets of other hubs (:func:`scdiva.metrics.hub_scores`). NaN for genes that
        are not sources.
    `adata.uns["scdiva"][key_added]`
        The parameters of the call.

    Raises
    ------
    KeyError
        If there is no such network or group.
    ValueError
        If an argument is out of range, or no edge is positive.
    ImportError
        If `igraph` is not installed (extra `scdiva[leiden]`).

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
    linked = np.flatnonzero(np.diff(graph.indptr))
    if not len(linked):
        raise ValueError(f"the network {key!r} has no edge of positive weight, and so no modules.")
    number = _leiden(igraph, graph[linked][:, linked], resolution, seed)
    names, size = np.unique(number, return_counts=True)
    code = np.full(adata.n_vars, -1)
    code[linked] = np.argsort(np.lexsort((names, -size)))[number]  # the largest is 0
    hubs = np.full(adata.n_vars, np.nan, dtype=np.float32)
    hubs[network.sources] = hub_scores(abs(network.weights[network.sources]))
    modules = pd.Categorical.from_codes(code, [str(i) for i in range(len(names))])
    parameters = {
        "key": key,
        "group": network.group,
        "n_neighbors": int(n_neighbors),
        "resolution": float(resolution),
        "seed": str(seed),
    }
    columns = dict(zip(written, (modules, hubs), strict=True))
    return write(adata, "tl.grn_modules", key_added, parameters, copy=copy, var=columns)


def strongest(weights: sp.csr_matrix, n_neighbors: int) -> sp.csr_matrix:
    """Strongest positive edges of each gene, in either direction, as a symmetric graph.

    Parameters
    ----------
    weights
        (n, n), directed.
    n_neighbors
        Number of edges of each gene, not counting those kept for other genes.

    Returns
    -------
    (n, n), symmetric.
    """
    positive = weights.maximum(0)
    symmetric = sp.csr_matrix(positive.maximum(positive.T))
    symmetric.eliminate_zeros()
    symmetric.sort_indices()
    is_strongest = np.zeros(symmetric.nnz, dtype=bool)
    for start, stop in zip(symmetric.indptr[:-1], symmetric.indptr[1:], strict=True):
        is_strongest[start + np.argsort(-symmetric.data[start:stop], kind="stable")[:n_neighbors]] = True
    symmetric.data[~is_strongest] = 0
    symmetric.eliminate_zeros()
    return sp.csr_matrix(symmetric.maximum(symmetric.T))


def _leiden(igraph: ModuleType, graph: sp.csr_matrix, resolution: float, seed: int) -> NDArray[np.int64]:
    upper = sp.triu(graph, k=1).tocoo()
    edges = igraph.Graph(n=graph.shape[0], edges=np.column_stack([upper.row, upper.col]))
    # by default igraph draws from Python's global generator
    igraph.set_random_number_generator(random.Random(step_seed(seed, 0, "modules")))
    try:
        clusters = edges.community_leiden(
            objective_function="modularity", weights=upper.data, resolution=resolution, n_iterations=-1
        )
    finally:
        igraph.set_random_number_generator(random)
    return np.array(clusters.membership, dtype=np.int64)


@check_arguments
def regulon(
    adata: AnnData,
    source: str,
    *,
    key: str = C.VARP_GRN,
    group: str | None = None,
    n_targets: int = 20,
    known: pd.DataFrame | None = None,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
) -> pd.DataFrame:
    """List the strongest targets of a gene, with the sign of the correlation and known regulation.

    Parameters
    ----------
    adata
        Data with a network of :func:`grn`.
    source
        Var name of the source gene, such as a transcription factor.
    key
        `key_added` of that call.
    group
        Group of cells, if there is a network for each.
    n_targets
        Number of targets, the strongest, ranked as in :func:`scdiva.get.grn_df`.
    known
        Known regulation: a data frame with columns `source` (or `tf`), `target`, and optionally the sign as `mor` or
        `weight`, as in decoupler and TRRUST.
    layer, use_raw, input
        Expression from which correlations are computed, as for :func:`embed`.

    Returns
    -------
    `source`, `target`; `weight` of the edge; `correlation`, the Pearson correlation of log-normalised expression
    over the cells of the network's group; `sign`, 1, -1 or 0, of the weight if it is a correlation, otherwise of the
    correlation. With `known`, also `known`: 1, -1 or 0 (sign unknown) for pairs in it, else NaN. Sorted by strength.

    Raises
    ------
    KeyError
        If there is no such network or group, or the gene is not among its sources.
    ValueError
        If `n_targets` is below 1, `known` lacks a column, or the matrix is not valid for :func:`embed`.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.pbmc3k_small()
    >>> sd.tl.grn(adata, sources="tf")
    >>> targets = sd.tl.regulon(adata, "SPI1")
    >>> "sign" in targets
    True
    """
    check_anndata(adata)
    check_least(n_targets=(n_targets, 1))
    network = network_of(adata, key, group)
    at = np.flatnonzero((network.names == source) & network.sources)
    if not len(at):
        raise KeyError(
            f"{source!r} is not a source of the network {key!r}: call scdiva.tl.grn(adata, sources=[{source!r}], ...) "
            "first; a gene that too few cells express takes part with a lower min_fraction."
        )
    modes = None if known is None else _modes(known, source)
    edges = network.weights[at[0]]
    order = np.argsort(-network.strength(edges.data), kind="stable")[:n_targets]
    targets, weight = edges.indices[order], edges.data[order].astype(np.float64)
    values, var = log_normalised(adata, layer=layer, use_raw=use_raw, input=input)
    if network.group:
        values = values[np.flatnonzero(read_labels(adata, str(adata.uns[C.UNS][key]["groupby"])) == network.group)]
    columns = np.array([at[0], *targets])
    if use_raw:  # raw has other columns
        first = np.flatnonzero(~var.index.duplicated())
        at_column = var.index[first].get_indexer(network.names[columns])
        columns = np.where(at_column >= 0, first[at_column], -1)
    if (columns < 0).any():
        raise ValueError(
            f"{int((columns < 0).sum())} genes of the network are not in the matrix that correlations are taken of: "
            "pass the same layer= and use_raw= as to scdiva.tl.grn."
        )
    x = values[:, columns].toarray()
    x = x - x.mean(axis=0)
    scale = np.sqrt(np.square(x).sum(axis=0))
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation = np.nan_to_num((x[:, 1:].T @ x[:, 0]) / (scale[1:] * scale[0]))
    signed = weight if network.signed and not network.reference else correlation
    frame = pd.DataFrame(
        {
            "source": source,
            "target": network.names[targets],
            "weight": weight,
            "correlation": correlation,
            "sign": np.sign(signed).astype(np.int64),
        }
    )
    if modes is not None:
        frame["known"] = frame["target"].map(modes).astype(np.float64)
    return frame


def _modes(prior: pd.DataFrame, source: str) -> pd.Series:
    """Sign of the regulation of each known target: 1, -1, or 0 if it is unknown or contradictory."""
    factor = next((name for name in ("source", "tf") if name in prior), None)
    if factor is None or "target" not in prior:
        raise ValueError(f"known needs columns source (or tf) and target; it has {', '.join(map(str, prior.columns))}.")
    rows = prior[prior[factor] == source]
    sign = next((name for name in ("mor", "weight") if name in prior), None)
    mode = np.zeros(len(rows)) if sign is None else np.sign(rows[sign].fillna(0).to_numpy(dtype=np.float64))
    of_target = pd.Series(mode).groupby(rows["target"].astype(str).to_numpy())
    return np.sign(of_target.min() + of_target.max())
