"""Results of scdiva in AnnData as tidy data frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata import AnnData
from numpy.typing import NDArray

from scdiva._checks import check_arguments, check_least, no_entry, refuse_absent
from scdiva._constants import (
    IMPUTED,
    LAYER_RANK,
    MASKED,
    OBS_LABEL,
    PREDICTED,
    PROBABILITY,
    RANK,
    RECONSTRUCTED,
    REJECTED,
    TRUE,
    TRUE_RANK,
    UNS,
    VARM_EMBEDDING,
    VARP_GRN,
)
from scdiva._docs import with_shared_docs
from scdiva.data.results import check_anndata, our_uns
from scdiva.networks.network import genes_of, network_of
from scdiva.perturbation.scores import read_prediction


@check_arguments
def serialized_df(
    adata: AnnData, *, key: str = LAYER_RANK, cells: Sequence[str] | str | None = None, max_rank: int | None = None
) -> pd.DataFrame:
    """Ranked genes of cells, one row per cell and gene.

    Parameters
    ----------
    adata
        Cells with a layer from :func:`scdiva.pp.entropy_serialize`.
    key
        Key of the layer.
    cells
        Names of the cells, in order. None: all cells.
    max_rank
        Highest rank. None: all ranks.

    Returns
    -------
    Columns `cell`, `rank` (int32, from 1) and `gene` (var name), by cell and rank.

    Raises
    ------
    KeyError
        If the layer or a cell does not exist.
    ValueError
        If `max_rank` is below 1.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> sd.pp.entropy_serialize(adata, "scdiva-mini")
    >>> sd.get.serialized_df(adata, cells="cell0", max_rank=3).shape[0]
    3
    """
    check_anndata(adata)
    check_least(max_rank=(1 if max_rank is None else max_rank, 1))
    if key not in adata.layers:
        raise no_entry("adata.layers", key, adata.layers, "scdiva.pp.entropy_serialize(adata)")
    names = adata.obs_names
    if cells is None:
        rows = np.arange(adata.n_obs)
    else:
        cell_names = [cells] if isinstance(cells, str) else list(cells)
        refuse_absent(cell_names, names, "cells are not in adata")
        if not names.is_unique:
            raise KeyError("adata.obs_names repeat names: call adata.obs_names_make_unique() first.")
        rows = names.get_indexer(cell_names)
    ranks = sp.csr_matrix(adata.layers[key])[rows].tocoo()
    order = np.lexsort((ranks.data, ranks.row))
    if max_rank is not None:
        order = order[ranks.data[order] <= max_rank]
    return pd.DataFrame(
        {
            "cell": np.asarray(names)[rows[ranks.row[order]]],
            "rank": ranks.data[order],
            "gene": np.asarray(adata.var_names)[ranks.col[order]],
        }
    )


@check_arguments
def annotation_df(adata: AnnData, *, key: str = OBS_LABEL, top_k: int = 1) -> pd.DataFrame:
    """Most probable labels of cells, one row per cell and label.

    All cells are listed with the labels of the annotator, including cells that were rejected or labelled by a parent
    type; their final label is in ``adata.obs[key]``.

    Parameters
    ----------
    adata
        Cells annotated by :func:`scdiva.tl.annotate`, or a part of them.
    key
        `key_added` of the annotation.
    top_k
        Maximum number of labels per cell, the most probable first.

    Returns
    -------
    Columns `cell`, `rank` (int32, from 1), `label` (categorical with all labels of the annotator) and `probability`
    (float32), by cell and rank. Ties are in the annotator's order. Cells without a known gene are excluded.

    Raises
    ------
    KeyError
        If the annotation does not exist, or `uns` lacks the names of its labels (`anndata.concat` drops them).
    ValueError
        If `top_k` is below 1, or labels and probabilities are from different annotations, as after ``anndata.concat``
        with ``uns_merge="first"``.

    Examples
    --------
    >>> import scdiva as sd
    >>> cells = sd.datasets.toy(120, 100)
    >>> reference, query = cells[:80].copy(), cells[80:].copy()
    >>> annotator = sd.tl.annotate(query, "cell_type", reference, method="knn")
    >>> sd.get.annotation_df(query, top_k=2).columns.to_list()
    ['cell', 'rank', 'label', 'probability']
    """
    check_anndata(adata)
    check_least(top_k=(top_k, 1))
    at = f"{key}_{PROBABILITY}"
    uns = our_uns(adata)
    if at not in adata.obsm or "labels" not in uns.get(key, ()):
        where = f"adata.obsm has no {at!r}" if at not in adata.obsm else f"adata.uns[{UNS!r}][{key!r}] names no labels"
        raise KeyError(
            f"{where}: call scdiva.tl.annotate(adata, ..., key_added={key!r}) first. anndata.concat leaves out `uns`, "
            "and with it the names of labels; uns_merge='same' keeps what all parts agree on."
        )
    labels = np.asarray(uns[key]["labels"])
    if labels.dtype.kind not in "biuf":  # zarr returns numpy's string dtype
        labels = np.array([str(name) for name in labels], dtype=object)
    probability = np.asarray(adata.obsm[at], dtype=np.float32)
    if probability.shape != (adata.n_obs, len(labels)):
        raise ValueError(
            f"adata.obsm[{at!r}] has shape {probability.shape}, but there are {adata.n_obs} cells and {len(labels)} "
            "labels: the two are of different annotations. Annotate the cells again."
        )
    rows = np.flatnonzero(~np.isnan(probability).any(axis=1))
    probability = probability[rows]
    best = np.argsort(-probability, axis=1, kind="stable")[:, :top_k]
    if adata.n_obs > uns[key].get("n_cells", adata.n_obs) and key in adata.obs:
        names = adata.obs[key].iloc[rows]
        is_label = (
            names.notna().to_numpy() & ~names.astype(str).isin([REJECTED, *map(str, uns[key]["groups"])]).to_numpy()
        )
        differs = is_label & (names.astype(str).to_numpy() != labels[best[:, 0]].astype(str))
        if differs.any():
            first = int(differs.argmax())
            raise ValueError(
                f"adata.uns[{UNS!r}][{key!r}] describes {uns[key]['n_cells']} of {adata.n_obs} cells, and its labels "
                f"do not fit {differs.sum()} others (first: {adata.obs_names[rows[first]]!r}, {names.iloc[first]!r}): "
                "different annotations were concatenated. Use anndata.concat(..., uns_merge='same') on cells annotated "
                "with one annotator, scdiva.tl.annotate(adata, model=annotator), or annotate the cells again."
            )
    k = best.shape[1]
    return pd.DataFrame(
        {
            "cell": np.repeat(np.asarray(adata.obs_names)[rows], k),
            "rank": np.tile(np.arange(1, k + 1, dtype=np.int32), len(rows)),
            "label": pd.Categorical.from_codes(best.ravel(), labels),
            "probability": np.take_along_axis(probability, best, axis=1).ravel(),
        }
    )


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
    has_embedding = ~np.isnan(values).any(axis=1)
    return pd.DataFrame(values[has_embedding], index=adata.var_names[has_embedding])


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
    selected = np.ones(edges.nnz, dtype=bool)
    for names, genes in ((sources, edges.row), (targets, edges.col)):
        if names is not None:
            selected &= np.isin(genes, genes_of(network, [names] if isinstance(names, str) else names, key))
    source, target, weight = edges.row[selected], edges.col[selected], edges.data[selected].astype(np.float64)
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
    chosen = names if condition is None else [condition] if isinstance(condition, str) else list(condition)
    if not chosen:
        raise ValueError("condition is empty. Omit it to list all conditions, or name one or more.")
    shown = f"{', '.join(map(repr, names[:10]))}{', ...' if len(names) > 10 else ''}"
    refuse_absent(chosen, names, "conditions are not in the prediction", f"; it has {shown}")
    frames = []
    for name in chosen:
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


@check_arguments
def reconstruction_df(adata: AnnData, *, key: str = RECONSTRUCTED) -> pd.DataFrame:
    """Reconstructed cells compared with the input cells, one row per cell and rank.

    Parameters
    ----------
    adata
        Data with a reconstruction by `scdiva.tl.reconstruct`, or a subset of its cells.
    key
        `key_added` of that call.

    Returns
    -------
    `obs_name` (categorical), `rank` (int32, from 1), `gene` and `reconstructed_gene` (categorical, var names), the
    genes at this rank in the input and in the reconstructed cell; `value` and `reconstructed_value` (float32), their
    log-normalised values; and `masked` (bool), whether the input gene was masked. Sorted by cell and rank. If the
    reconstructed gene is not in adata, its name and value are missing.

    Raises
    ------
    KeyError
        If there is no such reconstruction.
    ValueError
        If names of cells or genes repeat, the layers do not match, or genes were removed afterwards.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(12, 60)
    >>> sd.tl.reconstruct(adata)
    >>> sd.get.reconstruction_df(adata).columns.to_list()
    ['obs_name', 'rank', 'gene', 'reconstructed_gene', 'value', 'reconstructed_value', 'masked']
    """
    check_anndata(adata)
    for names, what in ((adata.obs_names, "obs_names"), (adata.var_names, "var_names")):
        if not names.is_unique:
            raise ValueError(f"adata.{what} repeat names: call adata.{what}_make_unique() first.")
    recovered = recovered_of(adata, key)
    return pd.DataFrame(
        {
            "obs_name": pd.Categorical.from_codes(recovered.cell, adata.obs_names),
            "rank": recovered.rank,
            "gene": pd.Categorical.from_codes(recovered.gene, adata.var_names),
            "reconstructed_gene": pd.Categorical.from_codes(recovered.gene_at_rank, adata.var_names),
            "value": recovered.value,
            "reconstructed_value": recovered.value_at_rank,
            "masked": recovered.masked,
        }
    )


@check_arguments
def reconstructed_genes(
    adata: AnnData, *, key: str = RECONSTRUCTED, min_cells: int = 10, min_recall: float = 0.5
) -> list[str]:
    """Genes that are frequently recovered when they are masked.

    The recall of a gene is the fraction of the cells with this gene masked in which the reconstruction contains it, at
    any rank and with any value. Widely expressed genes are recovered more easily, so only compare lists with the same
    `min_recall` and the same share of masked genes.

    Parameters
    ----------
    adata
        Data with a reconstruction by `scdiva.tl.reconstruct`, or a subset of its cells.
    key
        `key_added` of that call.
    min_cells
        Minimum number of cells in which a gene was masked.
    min_recall
        Minimum recall, 0 to 1.

    Returns
    -------
    Var names, in their order.

    Raises
    ------
    KeyError
        If there is no such reconstruction.
    ValueError
        If `min_cells` is below 1, `min_recall` is not between 0 and 1, no gene was masked in `min_cells` cells, the
        layers do not match, or genes were removed afterwards.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(20, 60)
    >>> sd.tl.reconstruct(adata)
    >>> genes = sd.get.reconstructed_genes(adata, min_cells=3)
    >>> set(genes) <= set(adata.var_names)
    True
    """
    check_anndata(adata)
    check_least(min_cells=(min_cells, 1))
    if not 0 <= min_recall <= 1:
        raise ValueError(f"min_recall must be between 0 and 1, got {min_recall}.")
    genes = recovered_of(adata, key)
    n_masked = np.bincount(genes.gene[genes.masked], minlength=adata.n_vars)
    if n_masked.max(initial=0) < min_cells:
        raise ValueError(
            f"no gene was masked in {min_cells} cells, the most in {n_masked.max(initial=0)}: take a lower min_cells, "
            "or reconstruct more cells with a higher mask_ratio."
        )
    n_recovered = np.bincount(genes.gene[genes.masked & (genes.reconstructed_rank > 0)], minlength=adata.n_vars)
    selected = (n_masked >= min_cells) & (n_recovered / np.maximum(n_masked, 1) >= min_recall)
    return list(adata.var_names[selected])


@check_arguments
def imputed_df(adata: AnnData, genes: Sequence[str] | str | None = None, *, key: str = IMPUTED) -> pd.DataFrame:
    """Imputed values, one row per cell and one column per gene.

    Parameters
    ----------
    adata
        Data with a result of `scdiva.tl.impute`, or a subset of its cells.
    genes
        Names of genes, in the order of the columns. None: all imputed genes.
    key
        `key_added` of that call; with the suffix ``"_sd"``, the spread around the values.

    Returns
    -------
    float32, indexed by obs names, with gene names as columns: log1p of counts per 10,000, or its standard deviation.

    Raises
    ------
    KeyError
        If there is no such result, or a gene was not imputed.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> sd.tl.impute(adata, list(adata.var_names[:2]))
    >>> sd.get.imputed_df(adata).shape
    (60, 2)
    >>> adata.obs["imputed"] = sd.get.imputed_df(adata)[adata.var_names[0]]  # for scanpy plots
    """
    check_anndata(adata)
    imputed = adata.obsm.get(key)
    if not isinstance(imputed, pd.DataFrame):
        if key not in adata.layers:
            present = [*adata.obsm, *adata.layers]
            raise no_entry("adata, in obsm and layers,", key, present, "scdiva.tl.impute(adata)")
        layer = np.asarray(adata.layers[key])
        is_imputed = ~np.isnan(layer).all(axis=0)
        imputed = pd.DataFrame(layer[:, is_imputed], adata.obs_names, adata.var_names[is_imputed])
    if genes is None:
        return imputed.copy()
    names = [genes] if isinstance(genes, str) else list(genes)
    refuse_absent(names, imputed.columns, "genes were not imputed", ": call scdiva.tl.impute(adata, [...]) with them")
    return imputed[names].copy()


class Recovered(NamedTuple):
    """Genes of the input cells, one element for each cell and rank, and their reconstruction."""

    cell: NDArray[np.intp]
    gene: NDArray[np.intp]
    """Column of the gene."""
    rank: NDArray[np.int32]
    """Rank in the input cell, from 1."""
    reconstructed_rank: NDArray[np.int32]
    """Rank in the reconstructed cell; 0: not in it."""
    value: NDArray[np.float32]
    reconstructed_value: NDArray[np.float32]
    """NaN: not in the reconstructed cell."""
    masked: NDArray[np.bool_]
    gene_at_rank: NDArray[np.intp]
    """Column of the gene at this rank of the reconstructed cell; -1: none."""
    value_at_rank: NDArray[np.float32]
    """Value of that gene; NaN: none."""


def parameters_of(adata: AnnData, key: str) -> Mapping[str, Any]:
    """Parameters of a reconstruction.

    Parameters
    ----------
    adata
        Data with the reconstruction.
    key
        `key_added` of that call.

    Raises
    ------
    KeyError
        If a layer or the parameters are missing.
    """
    layers = [key, *(f"{key}_{ending}" for ending in (RANK, TRUE, TRUE_RANK, MASKED))]
    missing = [name for name in layers if name not in adata.layers]
    uns = our_uns(adata)
    if missing or key not in uns:
        where = f"adata.layers has no {missing[0]!r}" if missing else f"adata.uns[{UNS!r}] has no {key!r}"
        raise KeyError(f"{where}: call scdiva.tl.reconstruct(adata, ..., key_added={key!r}) first.")
    return dict(uns[key])


def recovered_of(adata: AnnData, key: str) -> Recovered:
    """Input and reconstructed cells, gene by gene and rank by rank.

    Parameters
    ----------
    adata
        Data with the reconstruction, or a subset of its cells.
    key
        `key_added` of that call.

    Returns
    -------
    One element for each gene, and so each rank, of each input cell.

    Raises
    ------
    KeyError
        If there is no such reconstruction.
    ValueError
        If the layers do not match, or genes were removed afterwards.
    """
    parameters_of(adata, key)
    true = _entries(adata, f"{key}_{TRUE_RANK}")
    order = np.lexsort((true.data, true.row))
    cell, gene, rank = true.row[order].astype(np.intp), true.col[order].astype(np.intp), true.data[order]
    n_genes = np.bincount(cell, minlength=adata.n_obs)
    starts = np.cumsum(n_genes) - n_genes
    broken = rank != np.arange(len(rank)) - starts[cell] + 1
    if broken.any():
        cells = np.unique(cell[broken])
        raise ValueError(
            f"adata.layers[{f'{key}_{TRUE_RANK}'!r}] skips or repeats ranks in {len(cells):,} of {adata.n_obs:,} "
            f"cells (first: {adata.obs_names[cells[0]]!r}). Were genes dropped after scdiva.tl.reconstruct? Keep all "
            "columns, or reconstruct the cells again."
        )
    masked = _values_at(adata, f"{key}_{MASKED}", cell, gene).astype(bool)
    reconstructed = _entries(adata, f"{key}_{RANK}")
    at = starts[reconstructed.row] + reconstructed.data - 1
    ranked = (reconstructed.data >= 1) & (reconstructed.data <= n_genes[reconstructed.row])
    for ending, fits in (
        (MASKED, _entries(adata, f"{key}_{MASKED}").nnz == masked.sum()),
        (RANK, ranked.all() and len(np.unique(at)) == len(at)),
    ):
        if not fits:
            raise ValueError(
                f"adata.layers[{f'{key}_{ending}'!r}] holds other genes or ranks than the cells as they were: it was "
                "changed since scdiva.tl.reconstruct wrote it. Reconstruct the cells again."
            )
    gene_at_rank = np.full(len(gene), -1, dtype=np.intp)
    value_at_rank = np.full(len(gene), np.nan, dtype=np.float32)
    gene_at_rank[at] = reconstructed.col
    filled = gene_at_rank >= 0
    value_at_rank[filled] = _values_at(adata, key, cell[filled], gene_at_rank[filled])
    reconstructed_rank = _values_at(adata, f"{key}_{RANK}", cell, gene).astype(np.int32)
    value = _values_at(adata, key, cell, gene).astype(np.float32)
    value[reconstructed_rank == 0] = np.nan
    true_value = _values_at(adata, f"{key}_{TRUE}", cell, gene)
    return Recovered(
        cell, gene, rank.astype(np.int32), reconstructed_rank, true_value, value, masked, gene_at_rank, value_at_rank
    )


def _entries(adata: AnnData, key: str) -> sp.coo_matrix:
    """Stored entries of a layer without zeros."""
    entries = sp.coo_matrix(adata.layers[key])
    entries.eliminate_zeros()
    return entries


def _values_at(adata: AnnData, key: str, rows: NDArray[np.intp], columns: NDArray[np.intp]) -> NDArray[Any]:
    """Entries of a layer at cells and genes; 0 if not stored."""
    matrix = sp.csr_matrix(adata.layers[key]).sorted_indices()  # look-up in unsorted rows is slow
    return np.asarray(matrix[rows, columns]).ravel() if len(rows) else np.zeros(0, matrix.dtype)
