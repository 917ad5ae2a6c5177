"""What was found out about genes and pairs of them, and what a perturbation is predicted to change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from anndata import AnnData
from numpy.typing import NDArray

from scdiva._checks import check_arguments, check_least, no_entry, refuse_absent
from scdiva._constants import PREDICTED, VARM_EMBEDDING, VARP_GRN
from scdiva.data.results import check_anndata
from scdiva.networks.storage import genes_of, network_of
from scdiva.perturbation.predictions import read_prediction


@check_arguments
def gene_embedding_df(adata: AnnData, *, key: str = VARM_EMBEDDING) -> pd.DataFrame:
    """Give the genes that have an embedding, one row each.

    Parameters
    ----------
    adata
        Data that :func:`scdiva.tl.gene_embedding` wrote to.
    key
        Its `key_added`.

    Returns
    -------
    float32, index var names, columns `0 ... dim - 1`. Genes without an embedding are left out.

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
    """List the edges of a gene network, one row each.

    Parameters
    ----------
    adata
        Data that `scdiva.tl.grn` wrote to.
    key
        Its `key_added`.
    group
        Which network, where there is one for each group of cells.
    sources, targets
        Genes whose edges are listed, by var name; None: all. Those that are not in the network are left out, with a
        warning.
    top
        Edges listed, the first ones; None lists all.

    Returns
    -------
    Columns `source`, `target` (var names) and `weight` (float64), the strongest first; what decoupler takes as `net`.
    Strong is an edge of large weight, or of large absolute weight where one below 0 is as strong
    (`"correlation"`, differences of groups).

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
def perturbation_df(
    predicted: AnnData, *, condition: Sequence[str] | str | None = None, top: int | None = None, key: str = PREDICTED
) -> pd.DataFrame:
    """List the predicted change of each gene, one row per condition and gene.

    Parameters
    ----------
    predicted
        What `scdiva.tl.predict_perturbation` returned, or the adata that was given to it.
    condition
        Conditions, in the order wanted; None takes all.
    top
        Genes listed of each condition, the first ones; None lists all.
    key
        Of the adata that was given, the entry of `uns` with the prediction: the `key_added` of the call.

    Returns
    -------
    `condition`, `perturbation`, `group` (categorical), `gene`, and as float64: `control` and `mean`, the mean
    log-normalised expression of control cells and of predicted ones; `delta`, their difference; `sd`, the standard
    deviation of the predicted mean, its uncertainty; `z`, delta / sd; `p`, two-sided under a normal distribution; and
    `padj`, by Benjamini and Hochberg over the genes of the condition. By condition, the largest absolute z first; where
    the prediction has no standard deviation, z, p and padj are NaN and the largest absolute delta comes first.

    p tells how sure the prediction is of a change, not how large it is, and rests on the prediction's own uncertainty.

    Raises
    ------
    KeyError
        If `predicted` is no prediction, or there is no such condition.
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
        raise ValueError("condition names none: leave it out to list all, or name some.")
    shown = f"{', '.join(map(repr, names[:10]))}{', ...' if len(names) > 10 else ''}"
    refuse_absent(wanted, names, "conditions are not in the prediction", f"; it has {shown}")
    parts = []
    for name in wanted:
        at = names.index(name)
        mean, control = prediction.mean[:, at].astype(np.float64), prediction.control[:, at].astype(np.float64)
        sd = np.full(len(mean), np.nan) if prediction.sd is None else prediction.sd[:, at].astype(np.float64)
        part = _tested(control, mean, sd)
        order = np.lexsort((-part["delta"].abs(), -part["z"].abs()))[:top]  # NaN stands last
        part = part.iloc[order]
        part.insert(0, "gene", np.asarray(prediction.genes)[order])
        for place, column in enumerate(("condition", "perturbation", "group")):
            values = pd.Categorical([conditions.loc[at, column]], conditions[column].unique())
            part.insert(place, column, values.repeat(len(part)))
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def _tested(control: NDArray[np.float64], mean: NDArray[np.float64], sd: NDArray[np.float64]) -> pd.DataFrame:
    """Test changes against their own uncertainty."""
    from scipy.stats import false_discovery_control, norm

    delta = mean - control
    with np.errstate(divide="ignore", invalid="ignore"):
        z = delta / sd
    z[(sd == 0) & (delta == 0)] = 0.0
    z[~np.isfinite(z)] = np.nan  # a change without uncertainty is one whose uncertainty is not known
    p = 2 * norm.sf(np.abs(z))
    padj = np.full(len(p), np.nan)
    known = ~np.isnan(p)
    if known.any():
        padj[known] = false_discovery_control(p[known])
    return pd.DataFrame({"control": control, "mean": mean, "delta": delta, "sd": sd, "z": z, "p": p, "padj": padj})
