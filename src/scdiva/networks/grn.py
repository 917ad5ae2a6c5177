"""Gene networks (`tl.grn`): sources, targets and groups, and the strongest edges."""

from __future__ import annotations

import operator
import time
from collections.abc import Collection, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from scdiva import _constants as C
from scdiva._checks import check_arguments, check_choices, check_least, or_nearest
from scdiva._docs import with_shared_docs
from scdiva._labels import read_labels, wanted_groups
from scdiva._settings import progress_bar
from scdiva.data.genes import first_columns, input_options, tokens_of_var
from scdiva.data.results import check_writable, write
from scdiva.models.inference import open_cells_for_model, resolve_run_config

if TYPE_CHECKING:
    from anndata import AnnData

    from scdiva.data.cells import CellSource
    from scdiva.models import ScDiVa


MIN_CELLS = 10
"""Minimum number of cells in a group."""
MAX_BYTES = 4 * 2**30
"""Maximum memory of the sums over cells, for all pairs of genes and groups."""


class Pairs(NamedTuple):
    """Genes and cells of a network.

    Attributes
    ----------
    model, source
        The model and the cells.
    tokens
        int (n_genes,), sources and targets.
    sources, targets
        Positions in `tokens`, ascending.
    group
        int (n_obs,), number of the group of each cell; -1: none.
    n_groups
        Number of groups.
    layers, heads
        Layers and heads over which attention is averaged; None: all.
    """

    model: ScDiVa
    source: CellSource
    tokens: NDArray[np.int64]
    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    group: NDArray[np.int64]
    n_groups: int
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of an array over groups, sources and targets."""
        return self.n_groups, len(self.sources), len(self.targets)

    def rows_of(self, which: NDArray[np.int64]) -> NDArray[np.int64]:
        """Row of each token among `which` (sources or targets); -1: not among them."""
        row = np.full(self.source.n_tokens, -1)
        row[self.tokens[which]] = np.arange(len(which))
        return row


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
    empty: Literal["error", "nan"] = "error",
    device: str | None = None,
    key_added: str = C.VARP_GRN,
    copy: bool = False,
) -> AnnData | None:
    r"""Infer a gene network from the model and the expression of the cells.

    Edges are associations, not causal effects, for all methods; `sources="tf"` restricts the sources to transcription
    factors. The recovery of known regulation by each method is listed in the benchmarks.

    Parameters
    ----------
    %(cells)s
    method
        `"embedding"`
            The mean of two similarities, each in standard deviations over all pairs of genes: the cosine of the model's
            whitened gene embeddings, and the covariance of the genes' expression that is linear in the cell states of
            :func:`embed`.
        `"attention"`
            Attention from key (source) to query (target), averaged over `layers` and `heads`, ranked within the query
            and divided by the number of keys (paper, section "Gene Regulatory Network Inference and Logic"); 0 in a
            cell without the source. The weight is its mean over the cells that express the target, minus its mean over
            all genes of all cells: above 0, the target attends to the source more than other genes do. Targets in few
            cells are shrunk towards 0 (100 pseudo-cells). Known targets of transcription factors are recovered about as
            well as by co-expression alone (see the benchmarks).
        `"correlation"`
            Pearson correlation of log-normalised expression, as a baseline. The model only sets the genes.
    sources
        Source genes: a list of names, `"tf"` for the human transcription factors
        (:func:`scdiva.datasets.transcription_factors`), or None for all genes. Symbols and Ensembl ids are accepted.
    targets
        Target genes. None: all genes.
    groupby
        Column of `adata.obs` with groups of cells: one network is inferred for each.
    groups
        Groups for which networks are inferred. None: all.
    reference
        A group: weights are differences from the network of this group.
    n_targets
        Number of edges kept for each source, the ones with largest weight (for `"correlation"` and differences, largest
        absolute weight). None: all.
    min_fraction
        Genes that are expressed in a smaller fraction of the cells, in each group, are ignored.
    layers, heads
        For `"attention"`: layers and attention heads of the model, counted from 0, over which attention is averaged: a
        number, a list, or None for all.
    %(model)s
    %(reading)s
    empty
        How to handle cells without a known gene: `"error"` raises an error, `"nan"` ignores them.
    device
        Torch device. None: `scdiva.settings.device`.
    key_added
        Key of `adata.varp`, or prefix of the keys of groups.
    %(copy)s

    Returns
    -------
    `None`, or the copy if `copy=True`. Results are

    `adata.varp[key_added]`
        float32 CSR `(n_vars, n_vars)`: row = source, column = target. Values that are not stored are not edges. With
        `groupby`, `adata.varp[f"{key_added}_{group}"]` for each group instead (a slash in its name becomes an
        underscore).
    `adata.uns["scdiva"][key_added]`
        The parameters of the call, `layers` and `heads` as lists (empty: all); `groups` and the `keys` of their
        networks; the names of `sources` and `targets`; `cells`, the number of cells of each network; `signed`, whether
        negative weights are as strong as positive ones.

    :func:`scdiva.get.grn_df` lists the edges. If several columns belong to one gene, the first is used.

    Raises
    ------
    KeyError
        If `groupby`, `layer` or the column of gene names does not exist.
    ValueError
        If a named gene is unknown, not measured or too rarely expressed; if a group does not exist or has fewer than 10
        cells; if `layers` or `heads` are given for another method than `"attention"` or do not exist in the model; if
        the sums over cells would take more than 4 GiB; if an argument is out of range; or if the matrix is not valid
        for :func:`embed`.
    TypeError
        If `adata` is not an AnnData object, or a layer or head is not an integer.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.pbmc3k_small()
    >>> sd.tl.grn(adata, sources="tf")
    >>> len(sd.get.grn_df(adata, top=100))
    100
    """
    start_time = time.monotonic()
    from scdiva.networks.methods import METHODS

    check_choices(method=(method, tuple(METHODS)))
    chosen_layers, chosen_heads = _numbers("layers", layers, method), _numbers("heads", heads, method)
    check_least(n_targets=(1 if n_targets is None else n_targets, 1))
    if not 0 <= min_fraction <= 1:
        raise ValueError(f"min_fraction must be a share, from 0 to 1, got {min_fraction}.")
    check_writable(adata, copy=copy, call="tl.grn", entry=key_added)
    group, names, reference = _groups(adata, groupby, groups, reference)
    keys = [key_added] if groupby is None else _keys(key_added, names)
    check_writable(adata, copy=copy, call="tl.grn", entry=key_added, varp=keys)
    reading = input_options(adata, layer, use_raw, input)
    run_config = resolve_run_config(None, device, "fp32")
    loaded, source, parameters = open_cells_for_model(
        model, adata, run_config, reading, empty=empty, embeds=method != "correlation"
    )
    del parameters["precision"]
    for name, chosen, n in (
        ("layers", chosen_layers, loaded.config.n_layers),
        ("heads", chosen_heads, loaded.config.n_heads),
    ):
        if wrong := [number for number in chosen or () if not 0 <= number < n]:
            raise ValueError(f"the model has {n} {name}, 0 to {n - 1}; {name} names {wrong[0]}.")

    all_names = names if reference is None else [*names, reference]
    group = np.where(source.lengths == 0, -1, group)
    sizes = _check_sizes(group, all_names)
    column_of = first_columns(tokens_of_var(adata, source.tokens, source.reading.use_raw), source.n_tokens)
    var_names = np.asarray(adata.var_names).astype(object)
    fraction = expressed_fraction(source, group, len(all_names))
    supported = loaded.seen_tokens & (column_of >= 0)
    raw_only = set() if adata.raw is None else set(adata.raw.var_names).difference(adata.var_names)
    tokens, of_sources, of_targets = _choose_genes(
        sources, targets, source, fraction, supported, min_fraction, raw_only
    )
    pairs = Pairs(loaded, source, tokens, of_sources, of_targets, group, len(all_names), chosen_layers, chosen_heads)
    network = METHODS[method]
    _check_memory(pairs.shape, network.bytes_each, min_fraction)

    sums = network.sums(pairs, run_config)
    signed, columns = network.signed or reference is not None, column_of[tokens]
    base = 0.0 if reference is None else network.weights(pairs, *(part[-1] for part in sums))
    graphs = {}
    for number, key in enumerate(progress_bar(keys, desc="choosing edges", unit="network")):
        weights = network.weights(pairs, *(part[number] for part in sums)) - base
        strength = np.abs(weights) if signed else weights
        graphs[key] = _matrix(weights, strength, columns[of_sources], columns[of_targets], n_targets, adata.n_vars)
    parameters |= {
        "method": method,
        "groupby": groupby or "",
        "groups": np.array([] if groupby is None else names, dtype=object),
        "keys": np.array(keys, dtype=object),
        "reference": reference or "",
        "sources": var_names[columns[of_sources]],
        "targets": var_names[columns[of_targets]],
        "n_targets": n_targets or 0,
        "min_fraction": float(min_fraction),
        "layers": np.array(chosen_layers or (), dtype=np.int64),
        "heads": np.array(chosen_heads or (), dtype=np.int64),
        "cells": sizes[: len(keys)],
        "signed": signed,
        "seconds": time.monotonic() - start_time,
    }
    return write(adata, "tl.grn", key_added, parameters, copy=copy, varp=graphs)


def _numbers(name: str, chosen: int | Sequence[int] | None, method: str) -> tuple[int, ...] | None:
    """Layers or heads in ascending order, without duplicates."""
    if chosen is None:
        return None
    if method != "attention":
        raise ValueError(f'{name}={chosen!r} selects attention weights. Pass method="attention", or leave {name} out.')
    each = list(chosen) if isinstance(chosen, Sequence | np.ndarray) else [chosen]
    numbers = tuple(sorted({operator.index(number) for number in each}))
    if not numbers:
        raise ValueError(f"{name} is empty. Name at least one, or pass None for all.")
    return numbers


def _groups(
    adata: AnnData, groupby: str | None, groups: Sequence[str] | str | None, reference: str | None
) -> tuple[NDArray[np.int64], list[str], str | None]:
    """Number of the group of each cell (-1: none), names of the groups with a network, and the reference, the last."""
    if groupby is None:
        if groups is not None or reference is not None:
            raise ValueError("groups or reference are given without the column that holds them: groupby=...")
        return np.zeros(adata.n_obs, dtype=np.int64), [""], None
    labels = read_labels(adata, groupby)
    present, lack = sorted(set(labels.tolist())), f"are not in adata.obs[{groupby!r}]"
    if reference is not None:
        (reference,) = wanted_groups(str(reference), present, lack)
    names = [name for name in wanted_groups(groups, present, lack) if name != reference]
    if not names:
        raise ValueError(f"there is no group but the reference {reference!r} to compare it with.")
    number = {name: i for i, name in enumerate([*names, reference])}
    return np.array([number.get(name, -1) for name in labels], dtype=np.int64), names, reference


def _check_sizes(group: NDArray[np.int64], names: list[str]) -> NDArray[np.int64]:
    """Number of cells of each group, if none has too few."""
    sizes = np.bincount(group[group >= 0], minlength=len(names))
    if names == [""] and sizes[0] < MIN_CELLS:
        raise ValueError(f"there are {sizes[0]} cells: a network needs {MIN_CELLS} or more.")
    if len(small := np.flatnonzero(sizes < MIN_CELLS)):
        raise ValueError(
            f"{len(small)} of {len(sizes)} groups have fewer than {MIN_CELLS} cells (first: {names[small[0]]!r}, "
            f"{sizes[small[0]]}), too few for a network. Name the others with groups=[...]."
        )
    return sizes


def _keys(key_added: str, groups: Sequence[str]) -> list[str]:
    """Key of each group's network; slashes, which separate paths in h5ad and zarr, become underscores."""
    keys = [f"{key_added}_{name.replace('/', '_').replace(chr(92), '_')}" for name in groups]
    if repeated := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"two groups would be written to adata.varp[{repeated[0]!r}]: rename the one with a slash.")
    return keys


def expressed_fraction(source: CellSource, group: NDArray[np.int64], n_groups: int) -> NDArray[np.float64]:
    """Fraction of the cells of each group that express a gene, `(n_groups, n_tokens)`."""
    n_expressing = np.zeros((n_groups, source.n_tokens))
    for first, block in source.expression_blocks():
        of_block = group[first : first + block.shape[0]]
        for number in np.unique(of_block[of_block >= 0]):
            rows = block[np.flatnonzero(of_block == number)]
            n_expressing[number] += np.bincount(rows.indices, minlength=source.n_tokens)
    return n_expressing / np.bincount(group[group >= 0], minlength=n_groups)[:, None]


def _choose_genes(
    sources: Sequence[str] | str | None,
    targets: Sequence[str] | str | None,
    cells: CellSource,
    fraction: NDArray[np.float64],
    supported: NDArray[np.bool_],
    min_fraction: float,
    raw_only: Collection[str],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Tokens of sources and targets, ascending, and the positions of the sources and of the targets among them.

    `fraction` is that of cells that express a gene, `(n_groups, n_tokens)`; `supported` are the genes of the training
    corpus that `adata` has; `raw_only` are names that only `adata.raw` has.
    """
    measured = supported & np.isin(np.arange(len(supported)), cells.measured_tokens)
    largest = fraction.max(axis=0)
    frequent = measured & (largest >= min_fraction) & (largest > 0)

    def tokens_of(names: Sequence[str] | str | None, what: str) -> NDArray[np.int64]:
        if names is None:
            return np.flatnonzero(frequent)
        genes = [names] if isinstance(names, str) else [str(name) for name in names]
        if not genes:
            raise ValueError(f"{what} is empty; omit it to use all genes.")
        tokens = cells.vocabulary.match(genes, cells.reading.species).tokens.astype(np.int64)
        if missing := [name for name, token in zip(genes, tokens, strict=True) if token < 0 or not measured[token]]:
            if missing[0] in raw_only:
                raise ValueError(
                    f"{len(missing)} of {len(genes)} {what} are not among the genes of adata, the first is "
                    f"{missing[0]!r}, which adata.raw has. A network is written for the genes of adata: "
                    f"adata = adata.raw.to_adata(), and scdiva.tl.grn(adata, {what}=...) without use_raw."
                )
            human = cells.reading.species in (None, "human")
            symbols = cells.vocabulary.symbols[np.flatnonzero(measured) - C.N_SPECIAL]
            raise ValueError(
                f"{len(missing)} of {len(genes)} {what} are not among the genes of adata that the model knows (first: "
                f"{missing[0]!r}{or_nearest(missing[0], symbols if human else ())}). Name them "
                f"{'by symbol or Ensembl id' if human else 'as the data have them'}."
            )
        if rare := [name for name, token in zip(genes, tokens, strict=True) if not frequent[token]]:
            percent = largest[tokens[genes.index(rare[0])]]
            raise ValueError(
                f"{len(rare)} of {len(genes)} {what} are expressed in fewer than {min_fraction:.2%} of the cells "
                f"(first: {rare[0]!r}, {percent:.2%}). Leave them out, or lower min_fraction."
            )
        return np.unique(tokens)

    factors_only = isinstance(sources, str) and sources == "tf"
    if factors_only:
        from scdiva.datasets import transcription_factors

        factors = cells.vocabulary.match(transcription_factors()).tokens
        chosen_sources = np.intersect1d(factors, np.flatnonzero(frequent))
    else:
        chosen_sources = tokens_of(sources, "sources")
    chosen_targets = tokens_of(targets, "targets")
    for name, tokens in (("sources", chosen_sources), ("targets", chosen_targets)):
        if not len(tokens):
            what = "transcription factor" if name == "sources" and factors_only else "gene known to the model"
            raise ValueError(
                f"there are no {name}: no {what} is expressed in at least {min_fraction:.2%} of the cells. Lower "
                "min_fraction."
            )
    tokens = np.union1d(chosen_sources, chosen_targets)
    return tokens, np.searchsorted(tokens, chosen_sources), np.searchsorted(tokens, chosen_targets)


def _check_memory(shape: tuple[int, int, int], bytes_each: int, min_fraction: float) -> None:
    if (needed := int(np.prod(shape, dtype=np.float64)) * bytes_each) > MAX_BYTES:
        groups, sources, targets = shape
        and_groups = f" and {groups} groups" if groups > 1 else ""
        raise ValueError(
            f"{sources} sources × {targets} targets{and_groups} would take {needed / 2**30:.0f} GiB, more than the "
            f"{MAX_BYTES // 2**30} that are allowed. Take fewer: sources='tf', a higher min_fraction (now "
            f"{min_fraction}), targets=[...], or some groups at a time."
        )


def _matrix(
    weights: NDArray[np.floating],
    strength: NDArray[np.floating],
    sources: NDArray[np.int64],
    targets: NDArray[np.int64],
    n_targets: int | None,
    n_vars: int,
) -> sp.csr_matrix:
    """The strongest edges of each source, as a matrix over all genes."""
    rows, columns, values = [], [], []
    for of_source, strong, source in zip(weights, strength, sources, strict=True):
        edges = np.flatnonzero(np.isfinite(of_source) & (of_source != 0) & (targets != source))
        if n_targets is not None and len(edges) > n_targets:
            edges = edges[strong[edges] >= np.partition(strong[edges], -n_targets)[-n_targets]]
            # of equal weights, the first columns are kept
            edges = edges[np.argsort(-strong[edges], kind="stable")[:n_targets]]
        rows.append(np.full(len(edges), source))
        columns.append(targets[edges])
        values.append(of_source[edges].astype(np.float32))
    where = np.concatenate(rows), np.concatenate(columns)
    graph = sp.csr_matrix((np.concatenate(values), where), shape=(n_vars, n_vars))
    graph.sort_indices()
    return graph
