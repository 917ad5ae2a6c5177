"""`tl.grn`: which genes go together, as the model or the data have it."""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Literal

import numpy as np
import scipy.sparse as sp

from scdiva import _constants as C
from scdiva._checks import check_arguments, check_choices, check_least
from scdiva._docs import with_shared_docs
from scdiva._running import open_cells_for_model, resolve_run_config
from scdiva._settings import progress_bar
from scdiva.data.genes import tokens_of_var
from scdiva.data.options import InputOptions, Species
from scdiva.data.results import check_writable, write

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

    from scdiva.models import ScDiVa


@check_arguments
@with_shared_docs
def grn(
    adata: AnnData,
    method: Literal["embedding", "attention", "correlation"] = "embedding",
    *,
    sources: Sequence[str] | str | None = None,
    targets: Sequence[str] | str | None = None,
    groupby: str | None = None,
    groups: Sequence[str] | str | None = None,
    reference: str | None = None,
    n_targets: int | None = 100,
    min_fraction: float = 0.01,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    model: ScDiVa | str | PathLike[str] = C.DEFAULT_MODEL,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    empty: Literal["error", "nan"] = "error",
    device: str | None = None,
    key_added: str = C.VARP_GRN,
    copy: bool = False,
) -> AnnData | None:
    r"""Infer a gene network from what the model has learned, from these cells, or from both.

    All methods find genes that go together, none which one causes the other; that a transcription factor is the
    source is what `sources="tf"` adds. What each recovers of known regulation stands in the docs' benchmarks.

    Parameters
    ----------
    adata
        Cells × genes, raw counts or log-normalised expression.
    method
        `"embedding"`
            Similarity of two genes: the cosine of the model's whitened gene embeddings, and the covariance of their
            expression as far as it is linear in the states that :func:`embed` gives these cells. Each is taken in
            standard deviations over all pairs of genes, and the weight is their mean.
        `"attention"`
            Attention from key (source) to query (target), averaged over `layers` and `heads`, ranked within the query
            and divided by the number of keys (paper, section "Gene Regulatory Network Inference and Logic"); 0 in a
            cell without the source. The weight is the mean of that over the cells that hold the target, less its mean
            over all genes of these and all other cells: above 0 the target attends to the source more than genes
            usually do. Targets of few cells are drawn towards 0, as if a hundred cells more attended as usual. Known
            targets of factors stand out in it about as far as they do by which genes are expressed together alone,
            gene families further (the benchmarks in the docs).
        `"correlation"`
            Pearson's correlation of log-normalised expression. It needs no model but for the names of genes, and is
            there to be compared with.
    sources
        Genes from which edges go out: a list of names, `"tf"` for the human transcription factors
        (:func:`scdiva.datasets.transcription_factors`), or None for all genes. Symbols and Ensembl ids are understood.
    targets
        Genes to which they go; None: all genes.
    groupby
        Column of `adata.obs` with groups of cells: a network is made of each.
    groups
        Those to make networks of; None: all.
    reference
        A group: the weights become differences from its network's.
    n_targets
        Edges kept of each source, those of largest weight (for `"correlation"` and differences, of largest absolute
        weight); None keeps all.
    min_fraction
        Genes expressed in a smaller share of the cells, in each group, take no part.
    layers, heads
        For `"attention"`: layers and attention heads of the model, counted from 0, that are averaged; one number, a
        list, or None for all.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`.
    %(reading)s
    empty
        What to do with cells that have no known gene: `"error"` refuses them, `"nan"` leaves them out.
    device
        Torch device; None takes `scdiva.settings.device`.
    key_added
        Key of `adata.varp` to write, or the beginning of the keys.
    copy
        Return a copy of `adata` with the network instead of writing into it.

    Returns
    -------
    `None`, or the copy if `copy=True`. Written are

    `adata.varp[key_added]`
        float32 CSR `(n_vars, n_vars)`: row = source, column = target. What is not stored is no edge. With `groupby`,
        `adata.varp[f"{key_added}_{group}"]` for each group instead (a slash in its name becomes an underscore).
    `adata.uns["scdiva"][key_added]`
        The parameters of the call, `layers` and `heads` as lists (empty: all); `groups` and the `keys` of their
        networks; the names of the `sources` and `targets` that took part; `cells`, the number of cells of each
        network; `signed`, whether a weight below 0 is as strong as one above.

    :func:`scdiva.get.grn_df` lists the edges. Of several columns of one gene the first stands for it.

    Raises
    ------
    KeyError
        If `groupby`, `layer` or `gene_ids` does not exist.
    ValueError
        If a gene that is named is unknown, not measured or expressed too rarely; if a group does not exist or has fewer
        than 10 cells; if `layers` or `heads` are given for another method than `"attention"`, or name one that the
        model lacks; if the sums over cells would take more than 4 GiB; if an argument is out of range; or
        for what :func:`embed` refuses.
    TypeError
        If `adata` is no AnnData object, or a layer or head is no whole number.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.pbmc3k_small()
    >>> sd.tl.grn(adata, sources="tf")
    >>> len(sd.get.grn_df(adata, top=100))
    100
    """
    begun = time.monotonic()
    from scdiva.networks.gene_selection import Pairs, check_size, choose_genes, choose_groups, expressed_share
    from scdiva.networks.methods import METHODS

    check_choices(method=(method, tuple(METHODS)))
    chosen_layers, chosen_heads = _numbers("layers", layers, method), _numbers("heads", heads, method)
    check_least(n_targets=(1 if n_targets is None else n_targets, 1))
    if not 0 <= min_fraction <= 1:
        raise ValueError(f"min_fraction must be a share, from 0 to 1, got {min_fraction}.")
    check_writable(adata, copy=copy, call="tl.grn", entry=key_added)
    chosen = choose_groups(adata, groupby, groups, reference)
    keys = [key_added] if groupby is None else _keys(key_added, chosen.names)
    check_writable(adata, copy=copy, call="tl.grn", entry=key_added, varp=keys)
    reading = InputOptions(layer, use_raw, input, gene_ids, species, duplicates)
    run_config = resolve_run_config(None, device, "fp32")
    loaded, source, parameters = open_cells_for_model(
        model, adata, run_config, reading, empty=empty, embeds=method != "correlation"
    )
    del parameters["precision"]
    _check_numbers("layers", chosen_layers, loaded.config.n_layers)
    _check_numbers("heads", chosen_heads, loaded.config.n_heads)

    chosen, n_groups = chosen.without(source.lengths == 0), len(chosen.numbered)
    of_var = tokens_of_var(adata, source.tokens, source.reading.use_raw)
    column_of, names = np.full(source.n_tokens, -1), np.asarray(adata.var_names).astype(object)
    known_columns = np.flatnonzero(of_var >= 0)[::-1]  # of several columns of a gene the first is written last
    column_of[of_var[known_columns]] = known_columns
    share = expressed_share(source, chosen.code, n_groups)
    known = loaded.seen_tokens & (column_of >= 0)
    raw_only = set() if adata.raw is None else set(adata.raw.var_names).difference(adata.var_names)
    tokens, of_sources, of_targets = choose_genes(sources, targets, source, share, known, min_fraction, raw_only)
    way = METHODS[method]
    check_size((n_groups, len(of_sources), len(of_targets)), way.bytes_each, min_fraction)
    pairs = Pairs(loaded, source, tokens, of_sources, of_targets, chosen.code, n_groups, chosen_layers, chosen_heads)

    sums = way.sums(pairs, run_config)
    signed, columns = way.signed or chosen.reference is not None, column_of[tokens]
    base = 0.0 if chosen.reference is None else way.weights(pairs, *(part[-1] for part in sums))
    graphs = {}
    for number, key in enumerate(progress_bar(keys, desc="choosing edges", unit="network")):
        weights = way.weights(pairs, *(part[number] for part in sums)) - base
        strength = np.abs(weights) if signed else weights
        graphs[key] = _matrix(weights, strength, columns[of_sources], columns[of_targets], n_targets, adata.n_vars)
    parameters |= {
        "method": method,
        "groupby": groupby or "",
        "groups": np.array([] if groupby is None else chosen.names, dtype=object),
        "keys": np.array(keys, dtype=object),
        "reference": chosen.reference or "",
        "sources": names[columns[of_sources]],
        "targets": names[columns[of_targets]],
        "n_targets": n_targets or 0,
        "min_fraction": float(min_fraction),
        "layers": np.array(chosen_layers or (), dtype=np.int64),
        "heads": np.array(chosen_heads or (), dtype=np.int64),
        "cells": np.bincount(chosen.code[chosen.code >= 0], minlength=n_groups)[: len(keys)],
        "signed": signed,
        "seconds": time.monotonic() - begun,
    }
    return write(adata, "tl.grn", key_added, parameters, copy=copy, varp=graphs)


def _numbers(name: str, given: int | Sequence[int] | None, method: str) -> tuple[int, ...] | None:
    """Return chosen layers or heads in ascending order, each once; refuse them for a method that has none."""
    if given is None:
        return None
    if method != "attention":
        raise ValueError(f'{name}={given!r} selects attention weights. Pass method="attention", or leave {name} out.')
    each = list(given) if isinstance(given, Sequence | np.ndarray) else [given]
    numbers = tuple(sorted({operator.index(number) for number in each}))
    if not numbers:
        raise ValueError(f"{name} is empty. Name at least one, or pass None for all.")
    return numbers


def _check_numbers(name: str, chosen: tuple[int, ...] | None, n: int) -> None:
    """Refuse layers or heads that the model lacks."""
    wrong = [number for number in chosen or () if not 0 <= number < n]
    if wrong:
        raise ValueError(f"the model has {n} {name}, 0 to {n - 1}; {name} names {wrong[0]}.")


def _keys(key_added: str, groups: Sequence[str]) -> list[str]:
    """Name the key of each group's network; what h5ad and zarr take for a path becomes an underscore."""
    keys = [f"{key_added}_{name.replace('/', '_').replace(chr(92), '_')}" for name in groups]
    if repeated := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"two groups would be written to adata.varp[{repeated[0]!r}]: rename the one with a slash.")
    return keys


def _matrix(
    weights: NDArray[np.floating],
    strength: NDArray[np.floating],
    sources: NDArray[np.int64],
    targets: NDArray[np.int64],
    n_targets: int | None,
    n_vars: int,
) -> sp.csr_matrix:
    """Put the strongest edges of each source into a matrix of all genes."""
    rows, columns, values = [], [], []
    for of_source, strong, source in zip(weights, strength, sources, strict=True):
        edges = np.flatnonzero(np.isfinite(of_source) & (of_source != 0) & (targets != source))
        if n_targets is not None and len(edges) > n_targets:
            edges = edges[strong[edges] >= np.partition(strong[edges], -n_targets)[-n_targets]]
            # of equal weights the first columns
            edges = edges[np.argsort(-strong[edges], kind="stable")[:n_targets]]
        rows.append(np.full(len(edges), source))
        columns.append(targets[edges])
        values.append(of_source[edges].astype(np.float32))
    where = np.concatenate(rows), np.concatenate(columns)
    graph = sp.csr_matrix((np.concatenate(values), where), shape=(n_vars, n_vars))
    graph.sort_indices()
    return graph
