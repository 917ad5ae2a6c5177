"""`tl.regulon`: the targets of one gene in a network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from scdiva import _constants as C
from scdiva._checks import check_arguments, check_least
from scdiva._labels import read_labels
from scdiva.data.cells import log_normalised
from scdiva.data.results import check_anndata
from scdiva.networks.storage import network_of

if TYPE_CHECKING:
    from anndata import AnnData


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
    """List the strongest targets of a gene, with the sign of their relation and what is known of them.

    Parameters
    ----------
    adata
        Data that :func:`grn` wrote to.
    source
        The gene, such as a transcription factor, by var name.
    key
        Its `key_added`.
    group
        Which network, where there is one for each group of cells.
    n_targets
        Targets listed, the strongest, as :func:`scdiva.get.grn_df` has them.
    known
        Known regulation to compare with: a data frame with columns `source` (or `tf`), `target`, and, if its sign is
        known, `mor` or `weight`, as decoupler's and TRRUST's have them.
    layer, use_raw, input
        Expression of which the correlations are taken, as for :func:`embed`.

    Returns
    -------
    `source`, `target`; `weight` of the edge; `correlation`, Pearson's, of log-normalised expression over the cells of
    the network's group; `sign`, 1 or -1, of the weight if the method distinguishes more from less (`"correlation"`;
    not of differences of groups), else of the correlation, 0 if that is 0. With `known` also `known`:
    1, -1 or 0 (sign not known) for a pair that it holds, else NaN. The strongest first.

    Raises
    ------
    KeyError
        If there is no such network or group, or the gene is no source of it.
    ValueError
        If `n_targets` is below 1, `known` lacks a column, or the matrix is refused as by :func:`embed`.

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
            f"{source!r} is no source of the network {key!r}: call scdiva.tl.grn(adata, sources=[{source!r}], ...) "
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
    if use_raw:  # its columns are others
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


def _modes(known: pd.DataFrame, source: str) -> pd.Series:
    """Give what is known of the targets of a gene: 1, -1, or 0 where sources disagree or give no sign."""
    factor = next((name for name in ("source", "tf") if name in known), None)
    if factor is None or "target" not in known:
        raise ValueError(f"known needs columns source (or tf) and target; it has {', '.join(map(str, known.columns))}.")
    own = known[known[factor] == source]
    sign = next((name for name in ("mor", "weight") if name in known), None)
    mode = np.zeros(len(own)) if sign is None else np.sign(own[sign].fillna(0).to_numpy(dtype=np.float64))
    of_target = pd.Series(mode).groupby(own["target"].astype(str).to_numpy())
    # a sign outweighs none, contradictions leave it open
    return np.sign(of_target.min() + of_target.max())
