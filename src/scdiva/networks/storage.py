"""Networks of genes as they stand in AnnData."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from scdiva._checks import no_entry, or_nearest, warn
from scdiva._constants import UNS
from scdiva.data.results import our_uns

if TYPE_CHECKING:
    from anndata import AnnData

_WEIGHTS = {
    "attention": "excess attention rank",
    "correlation": "Pearson correlation",
    "embedding": "similarity of genes (z-score)",
}
"""What the weights of each method are."""
_TITLES = {"attention": "Attention", "correlation": "Gene correlation", "embedding": "Gene similarity by embeddings"}


class Network(NamedTuple):
    """A graph that `scdiva.tl.grn` wrote: sources in rows, targets in columns, of all genes of adata."""

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
        """Whether an edge and its reverse are two things."""
        return self.method == "attention"

    def strength(self, weight: NDArray[np.floating]) -> NDArray[np.floating]:
        """Give what edges are ranked by: how far a signed weight is from 0, else how high it is."""
        return np.abs(weight) if self.signed else weight

    @property
    def unit(self) -> str:
        """What the weights are."""
        unit = _WEIGHTS.get(self.method, "weight")
        return f"difference of\n{unit}\n{self.group} − {self.reference}" if self.reference else unit

    @property
    def title(self) -> str:
        """What the network shows, with layers and heads of attention, and its group."""
        parts = [_TITLES.get(self.method, self.method)]
        if self.method == "attention":
            parts += [_numbered("layer", self.layers), _numbered("head", self.heads)]
        return ", ".join([*parts, self.group] if self.group else parts)


def _numbered(what: str, numbers: NDArray[np.int64]) -> str:
    """Name layers or heads: "all layers", "layer 3", "heads 0–2, 5"; none given are all."""
    if not len(numbers):
        return f"all {what}s"
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    text = ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
    return f"{what}{'s' * (len(numbers) > 1)} {text}"


def network_of(adata: AnnData, key: str, group: str | None) -> Network:
    """Read a graph from `varp`; say how it comes about if it is not there."""
    call = f"scdiva.tl.grn(adata, ..., key_added={key!r})"
    about = our_uns(adata).get(key)
    if about is None or "keys" not in about:
        raise KeyError(f"adata.uns[{UNS!r}] has no network {key!r}: call {call} first.")
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
        # looked up as an index does it: numpy would sort the names
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
    """Give the columns of named genes, in their order; warn of those that are not in the graph, refuse if none is."""
    if isinstance(genes, str):
        raise TypeError(f"genes={genes!r} must be a list of names.")
    there = network.sources | network.targets
    column = {name: i for i, name in enumerate(network.names) if there[i]}
    wanted = list(dict.fromkeys(map(str, genes)))
    found = [column[name] for name in wanted if name in column]
    missing = [name for name in wanted if name not in column]
    if not found:
        like = or_nearest(missing[0], column) if missing else ""
        raise KeyError(
            f"none of {len(wanted)} genes ({', '.join(missing[:3])}{', ...' * (len(missing) > 3)}) is in the network "
            f"{key!r} of {len(column):,}{like}. scdiva.tl.grn(adata, sources=..., targets=..., min_fraction=...) "
            "decides which are."
        )
    if missing:
        warn(
            f"{len(missing)} of {len(wanted)} genes are not in the network {key!r} and are left out: "
            f"{', '.join(missing[:5])}{', ...' * (len(missing) > 5)}."
        )
    return np.array(found, dtype=np.intp)
