"""Cells that an annbatch loader reads, as batches of tokens. annbatch needs Python 3.12; it is an extra."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from scdiva._constants import MAX_LENGTH, N_SPECIAL
from scdiva._docs import with_shared_docs
from scdiva._extras import from_extra
from scdiva._validate import scan
from scdiva.data.batch import CellBatch, from_ragged
from scdiva.data.blocks import read_rows, row_readable
from scdiva.data.genes import gene_names, resolve_genes
from scdiva.data.reading import Reading, Species
from scdiva.tokenizer.serialize import ENTROPY_FLOOR, score_denominator, serialize, to_token_space
from scdiva.tokenizer.vocabulary import Vocabulary, load_vocabulary


def open_annbatch(path: str | Path, **options: Any) -> Any:
    """Open a collection that annbatch wrote, as a loader that :func:`annbatch_batches` reads.

    Parameters
    ----------
    path
        Folder of an ``annbatch.DatasetCollection``.
    options
        Of ``annbatch.Loader``, for instance `batch_size`, `chunk_size`, `preload_nchunks`, `shuffle` and `rng`.

    Returns
    -------
    The loader; matrices stay on the CPU as scipy's, and the whole `obs` is read with them, as is annbatch's default.

    Raises
    ------
    ImportError
        If annbatch is not installed, with the line that installs it.
    """
    needs = ""
    if sys.version_info < (3, 12):
        needs = f" It needs Python 3.12 or newer, and this is {sys.version_info.major}.{sys.version_info.minor}."
    annbatch = from_extra("annbatch", "annbatch", f"annbatch is not installed.{needs} Install it")

    collection = annbatch.DatasetCollection(str(path), mode="r")  # its default would make one where there is none
    return annbatch.Loader(to_torch=False, preload_to_gpu=False, **options).use_collection(collection)


@with_shared_docs
def annbatch_batches(
    loader: Any,
    vocabulary: Vocabulary | str | Path,
    *,
    kind: Literal["counts", "lognorm"] = "counts",
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    context: int = MAX_LENGTH,
    entropy_floor: float = ENTROPY_FLOOR,
) -> Iterator[CellBatch]:
    """Rank the cells of an annbatch loader, batch by batch as it yields them, as those of files are ranked.

    The order of the cells is the loader's. A loader reads forwards only, so values are checked as they come and not
    before, and `kind` must be known. Genes are matched on the first batch.

    Parameters
    ----------
    loader
        ``annbatch.Loader``: yields mappings with `X` (cells × genes: scipy CSR, numpy, or torch tensor), and has `var`,
        the table of the genes.
    vocabulary
        Genes and entropies.
    kind
        What the matrix holds.
    %(gene_ids)s
    %(species)s
    %(duplicates)s
    entropy_floor
        As in :func:`scdiva.data.open_cells`.
    context
        Genes kept per cell.

    Yields
    ------
    The cells of each batch that have a known gene; a batch without any is passed over.

    Raises
    ------
    ValueError
        If the loader has no gene names, a batch another number of genes, or values are not of that kind.
    """
    reading = Reading(gene_ids=gene_ids, species=species, duplicates=duplicates)
    vocabulary = load_vocabulary(vocabulary)
    denominator = score_denominator(vocabulary.entropy, entropy_floor)
    if context < 1:
        raise ValueError(f"context must be at least 1, got {context}.")
    if kind not in ("counts", "lognorm"):
        raise ValueError(f"kind must be 'counts' or 'lognorm', got {kind!r}.")
    tokens: np.ndarray | None = None
    for number, batch in enumerate(loader):
        var = getattr(loader, "var", None)
        if var is None:
            raise ValueError("the loader has no var, hence no gene names; let load_adata of use_collection read var.")
        matrix = row_readable(_on_cpu(batch["X"] if isinstance(batch, Mapping) else batch))
        where = f"batch {number} of the loader"
        if matrix.shape[1] != len(var):
            raise ValueError(f"{where} has {matrix.shape[1]} genes, but the loader's var names {len(var)}.")
        block = read_rows(matrix, 0, int(matrix.shape[0]))
        found = scan([(0, block)], len(var), input=kind, var_names=var.index, where=where)
        if tokens is None:
            names, fallback = gene_names(var, reading)
            tokens, _ = resolve_genes(names, vocabulary, found.counts_per_gene, reading, fallback=fallback)
        cells = to_token_space(block, tokens, vocabulary.n_genes + N_SPECIAL, kind)
        cells = cells[np.diff(cells.indptr) > 0]
        if cells.shape[0]:
            yield from_ragged(*serialize(cells, denominator, context))


def _on_cpu(matrix: Any) -> Any:
    """Turn a torch tensor, which annbatch yields by default, into scipy's or numpy's."""
    if not hasattr(matrix, "cpu"):
        return matrix
    matrix = matrix.cpu()
    if str(matrix.layout) != "torch.sparse_csr":
        return matrix.numpy()
    import scipy.sparse as sp

    parts = (matrix.values(), matrix.col_indices(), matrix.crow_indices())
    return sp.csr_matrix(tuple(part.numpy() for part in parts), shape=tuple(matrix.shape))
