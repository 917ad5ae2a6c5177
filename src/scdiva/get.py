"""Tidy tables of what scdiva wrote into AnnData."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import scipy.sparse as sp

from scdiva._constants import (
    GROUPS,
    LAYER_RANK,
    OBS_LABEL,
    PERTURBATION,
    PROBABILITY,
    UNS,
    VARM_CONTROL,
    VARM_EMBEDDING,
    VARM_MEAN,
    VARM_SD,
    VARP_GRN,
)
from scdiva.data.conditions import predicted_conditions
from scdiva.data.network import genes_of, network_of

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray


def serialized_df(
    adata: AnnData, *, key: str = LAYER_RANK, cells: Sequence[str] | str | None = None, max_rank: int | None = None
) -> pd.DataFrame:
    """List the ranked genes of cells, one row per cell and gene.

    Parameters
    ----------
    adata
        Data that :func:`scdiva.pp.entropy_serialize` ranked.
    key
        The layer it wrote.
    cells
        Names of the cells, in the order wanted; None takes all.
    max_rank
        Last rank listed; None lists all.

    Returns
    -------
    Columns `cell`, `rank` (int32, from 1) and `gene` (var name), by cell and rank.

    Raises
    ------
    KeyError
        If there is no such layer or cell.
    """
    if key not in adata.layers:
        raise KeyError(f"adata has no layer {key!r}: call scdiva.pp.entropy_serialize(adata) first.")
    names = adata.obs_names
    if cells is None:
        rows = np.arange(adata.n_obs)
    else:
        wanted = [cells] if isinstance(cells, str) else list(cells)
        missing = [cell for cell in wanted if cell not in names]
        if missing:
            raise KeyError(f"{len(missing)} of {len(wanted)} cells are not in adata (first: {missing[0]!r}).")
        if not names.is_unique:
            raise KeyError("adata.obs_names repeat names: call adata.obs_names_make_unique() first.")
        rows = names.get_indexer(wanted)
    ranks = sp.csr_matrix(adata.layers[key])[rows]
    frame = pd.DataFrame(
        {
            "cell": np.asarray(names)[np.repeat(rows, np.diff(ranks.indptr))],
            "rank": ranks.data,
            "gene": np.asarray(adata.var_names)[ranks.indices],
        }
    )
    place = np.repeat(np.arange(len(rows)), np.diff(ranks.indptr))
    frame = frame.iloc[np.lexsort((ranks.data, place))]
    if max_rank is not None:
        frame = frame[frame["rank"] <= max_rank]
    return frame.reset_index(drop=True)


def gene_embedding_df(adata: AnnData, *, key: str = VARM_EMBEDDING, group: str | None = None) -> pd.DataFrame:
    """Give the genes that have an embedding, one row each.

    Parameters
    ----------
    adata
        Data that :func:`scdiva.tl.gene_embedding` wrote to.
    key
        Its `key_added`.
    group
        A group of cells, for contextual embeddings; None gives the static ones.

    Returns
    -------
    float32, index var names, columns `0 ... dim - 1`. Genes without an embedding are left out.

    Raises
    ------
    KeyError
        If there is no such embedding or group.
    """
    if group is None:
        if key not in adata.varm:
            raise KeyError(f"adata.varm has no {key!r}: call scdiva.tl.gene_embedding(adata) first.")
        values = np.asarray(adata.varm[key])
    else:
        at = f"{key}_{GROUPS}"
        if at not in adata.varm or at not in adata.uns.get(UNS, {}):
            raise KeyError(f"adata.varm has no {at!r}: call scdiva.tl.gene_embedding(adata, groupby=...) first.")
        names = [str(name) for name in adata.uns[UNS][at]["groups"]]
        if group not in names:
            raise KeyError(f"there is no group {group!r}; the groups: {names}.")
        values = np.asarray(adata.varm[at])[:, names.index(group)]
    known = ~np.isnan(values).any(axis=1)
    return pd.DataFrame(values[known], index=adata.var_names[known])


def annotation_df(adata: AnnData, *, key: str = OBS_LABEL, top_k: int = 1) -> pd.DataFrame:
    """List the most probable labels of cells, one row per cell and label.

    These are the labels that the annotator knows. A cell that it rejected, or named by a parent type only, is listed
    with them too; what such a cell is called is in ``adata.obs[key]``.

    Parameters
    ----------
    adata
        Data that `scdiva.tl.annotate` wrote to, or some of its cells.
    key
        Its `key_added`.
    top_k
        Labels listed of each cell, the most probable first; more than there are lists all.

    Returns
    -------
    Columns `cell`, `rank` (int32, from 1), `label` (categorical, all that the annotator knows) and `probability`
    (float32), by cell and rank. Of equally probable labels the first of the annotator's comes first. Cells without a
    probability, which have no known gene, are left out.

    Raises
    ------
    KeyError
        If there is no such annotation.
    ValueError
        If `top_k` is below 1, or labels and probabilities do not belong together.
    """
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}.")
    at = f"{key}_{PROBABILITY}"
    ours = adata.uns.get(UNS, {})
    if at not in adata.obsm or key not in ours:
        where = f"adata.obsm has no {at!r}" if at not in adata.obsm else f"adata.uns[{UNS!r}] has no {key!r}"
        raise KeyError(f"{where}: call scdiva.tl.annotate(adata, ..., key_added={key!r}) first.")
    labels = [str(name) for name in ours[key]["labels"]]
    probability = np.asarray(adata.obsm[at], dtype=np.float32)
    if probability.shape != (adata.n_obs, len(labels)):
        raise ValueError(
            f"adata.obsm[{at!r}] has shape {probability.shape}, but there are {adata.n_obs} cells and {len(labels)} "
            "labels: the two are of different annotations. Annotate the cells anew."
        )
    rows = np.flatnonzero(~np.isnan(probability).any(axis=1))
    probability = probability[rows]
    best = np.argsort(-probability, axis=1, kind="stable")[:, :top_k]
    k = best.shape[1]
    return pd.DataFrame(
        {
            "cell": np.repeat(np.asarray(adata.obs_names)[rows], k),
            "rank": np.tile(np.arange(1, k + 1, dtype=np.int32), len(rows)),
            "label": pd.Categorical.from_codes(best.ravel(), labels),
            "probability": np.take_along_axis(probability, best, axis=1).ravel(),
        }
    )


def perturbation_df(
    predicted: AnnData, *, condition: Sequence[str] | str | None = None, top: int | None = None
) -> pd.DataFrame:
    """List the predicted change of each gene, one row per condition and gene.

    Parameters
    ----------
    predicted
        What `scdiva.tl.predict_perturbation` or `scdiva.tl.in_silico_perturbation` returned.
    condition
        Conditions, in the order wanted; None takes all.
    top
        Genes listed of each condition, the first ones; None lists all.

    Returns
    -------
    `condition`, `perturbation`, `group` (categorical), `gene`, and as float64: `control` and `mean`, the mean
    log-normalised expression of control cells and of predicted ones; `delta`, their difference; `sd`, the standard
    deviation of the predicted mean, its uncertainty; `z`, delta / sd; `p`, two-sided under a normal distribution; and
    `padj`, by Benjamini and Hochberg over the genes of the condition. By condition, the largest absolute z first; where
    the prediction has no standard deviation, z, p and padj are NaN and the largest absolute delta comes first.

    p tells how sure the prediction is of a change, not how large it is, and rests on the prediction's own uncertainty.
    Of an in-silico perturbation p and padj are NaN: its sd is that over cells, and says nothing of what is true.

    Raises
    ------
    KeyError
        If `predicted` is no prediction, or there is no such condition.
    ValueError
        If `top` is below 1, or `condition` is an empty list.
    """
    if top is not None and top < 1:
        raise ValueError(f"top must be at least 1, got {top}.")
    conditions = predicted_conditions(predicted)
    names = conditions["condition"].tolist()
    wanted = names if condition is None else [condition] if isinstance(condition, str) else list(condition)
    if not wanted:
        raise ValueError("condition names none: leave it out to list all, or name some.")
    missing = [name for name in wanted if name not in names]
    if missing:
        raise KeyError(
            f"{len(missing)} of {len(wanted)} conditions are not in the prediction (first: {missing[0]!r}); it has "
            f"{', '.join(map(repr, names[:10]))}{', ...' if len(names) > 10 else ''}."
        )
    sds = np.asarray(predicted.varm[VARM_SD]) if VARM_SD in predicted.varm else None
    learned = predicted.uns[UNS][PERTURBATION].get("trained_on_interventions", True)
    parts = []
    for name in wanted:
        at = names.index(name)
        mean = np.asarray(predicted.varm[VARM_MEAN])[:, at].astype(np.float64)
        control = np.asarray(predicted.varm[VARM_CONTROL])[:, at].astype(np.float64)
        sd = np.full(len(mean), np.nan) if sds is None else sds[:, at].astype(np.float64)
        part = _tested(control, mean, sd)
        if not learned:
            part[["p", "padj"]] = np.nan
        order = np.lexsort((-part["delta"].abs(), -part["z"].abs()))[:top]  # NaN stands last
        part = part.iloc[order]
        part.insert(0, "gene", np.asarray(predicted.var_names)[order])
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


def grn_df(
    adata: AnnData,
    *,
    key: str = VARP_GRN,
    group: str | None = None,
    sources: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
    top: int | None = None,
) -> pd.DataFrame:
    """List the edges of a network of genes, one row each.

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
    (`"correlation"`, knock-outs of values, differences).

    Raises
    ------
    KeyError
        If there is no such network or group, or none of the genes is in it.
    ValueError
        If `top` is below 1.
    """
    if top is not None and top < 1:
        raise ValueError(f"top must be at least 1, got {top}.")
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
