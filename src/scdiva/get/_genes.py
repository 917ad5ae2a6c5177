"""Tables of gene embeddings, gene networks and predicted perturbations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from anndata import AnnData
from numpy.typing import NDArray

from scdiva._checks import check_arguments, check_least, no_entry, refuse_absent
from scdiva._constants import PREDICTED, VARM_EMBEDDING, VARP_GRN
from scdiva._docs import with_shared_docs
from scdiva.data.results import check_anndata
from scdiva.networks.network import genes_of, network_of
from scdiva.perturbation.scores import read_prediction


@check_arguments
def gene_embedding_df(adata: AnnData, *, key: str = VARM_EMBEDDING) -> pd.DataFrame:
    """Gene embeddings, one row per gene.

    Parameters
    ----------
    adata
        Data with a result of :func:`scdiva.tl.gene_embedding`.
    key
        `key_added` of that call.

    Returns
    -------
    float32, indexed by var names, with columns `0 ... dim - 1`, without genes that have no embedding.

    Raises
    ------
    KeyError
        If there is no such embedding.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> sd.tl.gene_embedding(adata)
    >>> sd.get.gene_embedding_df(adata).shape
    (89, 128)
    """
    check_anndata(adata)
    if key not in adata.varm:
        raise no_entry("adata.varm", key, adata.varm, "scdiva.tl.gene_embedding(adata)")
    values = np.asarray(adata.varm[key])
    known = ~np.isnan(values).any(axis=1)
    return pd.DataFrame(values[known], index=adata.var_names[known])


@check_arguments
def grn_df(
    adata: AnnData,
    *,
    key: str = VARP_GRN,
    group: str | None = None,
    sources: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
    top: int | None = None,
) -> pd.DataFrame:
    """Edges of a gene network, one row per edge.

    Parameters
    ----------
    adata
        Data with a network of `scdiva.tl.grn`.
    key
        `key_added` of that call.
    group
        Group of cells, if there is a network for each.
    sources, targets
        Var names of genes whose edges are listed. None: all. Genes that are not in the network are ignored with a
        warning.
    top
        Number of edges, the strongest. None: all.

    Returns
    -------
    Columns `source`, `target` (var names) and `weight` (float64), as decoupler takes them as `net`. Sorted by weight,
    or by absolute weight if weights have a sign (`"correlation"`, differences of groups).

    Raises
    ------
    KeyError
        If there is no such network or group, or none of the genes is in it.
    ValueError
        If `top` is below 1.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> sd.tl.grn(adata, "correlation")
    >>> sd.get.grn_df(adata, top=3).columns.to_list()
    ['source', 'target', 'weight']
    """
    check_anndata(adata)
    check_least(top=(1 if top is None else top, 1))
    network = network_of(adata, key, group)
    edges = network.weights.tocoo()
    kept = np.ones(edges.nnz, dtype=bool)
    for wanted, genes in ((sources, edges.row), (targets, edges.col)):
        if wanted is not None:
            kept &= np.isin(genes, genes_of(network, [wanted] if isinstance(wanted, str) else wanted, key))
    source, target, weight = edges.row[kept], edges.col[kept], edges.data[kept].astype(np.float64)
    order = np.lexsort((target, source, -network.strength(weight)))[:top]
    return pd.DataFrame(
        {"source": network.names[source[order]], "target": network.names[target[order]], "weight": weight[order]}
    )


@check_arguments
@with_shared_docs
def perturbation_df(
    predicted: AnnData, *, condition: Sequence[str] | str | None = None, top: int | None = None, key: str = PREDICTED
) -> pd.DataFrame:
    """Predicted change of each gene, one row per condition and gene.

    Parameters
    ----------
    %(predicted)s
    condition
        Names of conditions, in the order of the rows. None: all.
    top
        Number of genes of each condition. None: all.
    %(prediction_key)s

    Returns
    -------
    `condition`, `perturbation`, `group` (categorical), `gene`, and as float64: `control` and `mean`, the mean
    log-normalised expression of the control and of the predicted cells; `delta`, their difference; `sd`, the standard
    deviation of the predicted mean; `z`, delta / sd; `p`, two-sided under a normal distribution; and `padj`, by
    Benjamini and Hochberg over the genes of the condition. Genes of a condition are sorted by absolute z, descending;
    without a standard deviation, z, p and padj are NaN, and genes are sorted by absolute delta.

    p measures the certainty of a predicted change, not its size, and depends on the uncertainty that the model states.

    Raises
    ------
    KeyError
        If `predicted` is not a prediction, or a condition does not exist.
    ValueError
        If `top` is below 1, or `condition` is an empty list.

    Examples
    --------
    >>> import scdiva as sd
    >>> screen = sd.datasets.toy(120, 100)
    >>> screen.obs["perturbation"] = ["control", "A", "B", "A+B", "C", "B+C"] * 20
    >>> train = screen[screen.obs["perturbation"] != "A+B"].copy()
    >>> predicted = sd.tl.predict_perturbation(train, "perturbation", predict=["A+B"])
    >>> sd.get.perturbation_df(predicted, top=2).shape[0]
    2
    """
    check_anndata(predicted)
    check_least(top=(1 if top is None else top, 1))
    prediction = read_prediction(predicted, key)
    conditions = prediction.conditions
    names = conditions["condition"].tolist()
    wanted = names if condition is None else [condition] if isinstance(condition, str) else list(condition)
    if not wanted:
        raise ValueError("condition is empty. Omit it to list all conditions, or name one or more.")
    shown = f"{', '.join(map(repr, names[:10]))}{', ...' if len(names) > 10 else ''}"
    refuse_absent(wanted, names, "conditions are not in the prediction", f"; it has {shown}")
    frames = []
    for name in wanted:
        at = names.index(name)
        mean, control = prediction.mean[:, at].astype(np.float64), prediction.control[:, at].astype(np.float64)
        sd = np.full(len(mean), np.nan) if prediction.sd is None else prediction.sd[:, at].astype(np.float64)
        frame = _tested(control, mean, sd)
        order = np.lexsort((-frame["delta"].abs(), -frame["z"].abs()))[:top]  # NaN is last
        frame = frame.iloc[order]
        frame.insert(0, "gene", np.asarray(prediction.genes)[order])
        for index, column in enumerate(("condition", "perturbation", "group")):
            values = pd.Categorical([conditions.loc[at, column]], conditions[column].unique())
            frame.insert(index, column, values.repeat(len(frame)))
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def _tested(control: NDArray[np.float64], mean: NDArray[np.float64], sd: NDArray[np.float64]) -> pd.DataFrame:
    """Test changes against their standard deviation."""
    from scipy.stats import false_discovery_control, norm

    delta = mean - control
    with np.errstate(divide="ignore", invalid="ignore"):
        z = delta / sd
    z[(sd == 0) & (delta == 0)] = 0.0
    z[~np.isfinite(z)] = np.nan  # sd 0: the uncertainty is unknown
    p = 2 * norm.sf(np.abs(z))
    padj = np.full(len(p), np.nan)
    defined = ~np.isnan(p)
    if defined.any():
        padj[defined] = false_discovery_control(p[defined])
    return pd.DataFrame({"control": control, "mean": mean, "delta": delta, "sd": sd, "z": z, "p": p, "padj": padj})
