"""Rank the genes of each cell, as the model sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import scipy.sparse as sp
from anndata import AnnData

from scdiva._checks import check_arguments, check_least, no_entry
from scdiva._constants import LAYER_RANK, MAX_LENGTH, N_SPECIAL
from scdiva._docs import with_shared_docs
from scdiva._validate import Input
from scdiva.data.cells import CellSource, open_cells
from scdiva.data.genes import check_unique, tokens_of_var
from scdiva.data.options import Empty, InputOptions, Species
from scdiva.data.results import check_writable, write
from scdiva.tokenizer.serialize import ENTROPY_FLOOR, score_denominator, serialize
from scdiva.tokenizer.vocabulary import Vocabulary, load_vocabulary


@check_arguments
@with_shared_docs
def entropy_serialize(
    adata: AnnData,
    vocabulary: Vocabulary | str | Path = "human",
    *,
    max_length: int = MAX_LENGTH,
    entropy_key: str | None = None,
    entropy_floor: float = ENTROPY_FLOOR,
    layer: str | None = None,
    use_raw: bool = False,
    input: Input = "auto",
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    empty: Empty = "error",
    key_added: str = LAYER_RANK,
    copy: bool = False,
) -> AnnData | None:
    r"""Rank the genes of each cell by entropy-normalised expression.

    The score is :math:`S_g = v_g / (\max(H_g, \mathrm{floor}) + 10^{-6})` with v the log-normalised expression (target
    1e4) and H the gene's entropy (paper, appendix, eq. entropy_score; the floor is ours and keeps rare genes from the
    top). Rank 1 is the highest score; equal scores are ranked by token. The models' own calls do the same themselves:
    this one is for looking.

    The matrix is read by row blocks, so backed, zarr and dask data are never loaded whole. The ranks are held, 8 bytes
    each: AnnData keeps layers in memory even where X is backed by a file.

    Parameters
    ----------
    adata
        Cells by genes, counts or log-normalised values.
    vocabulary
        A vocabulary, "human", the name of a bundled model, the folder of a saved model, or the file of a vocabulary.
    max_length
        Genes ranked per cell.
    entropy_key
        Column of `adata.var` with entropies in nats, as :func:`scdiva.pp.gene_entropy` writes. None takes those of the
        vocabulary, which "human" does not have.
    entropy_floor
        Least entropy that is divided by, in nats; 0 is the paper to the letter.
    %(reading)s
    empty
        Cells without a known gene: "error", or "nan" to give them no ranks.
    key_added
        Layer, and entry of `uns`, to write.
    copy
        Write into a copy and return it.

    Returns
    -------
    None, or the copy. Written are

    `adata.layers[key_added]`
        int32 CSR (n_obs, n_vars): ranks 1 to `max_length`, nothing where a gene is not expressed, not known, or ranked
        lower. Of several columns of one gene the first has its rank.
    `adata.uns[key_added]`
        `n_truncated` (cells with more known genes than `max_length`), what the input was found to be, the
        vocabulary's fingerprint, and the arguments.

    Raises
    ------
    KeyError, ValueError
        As :func:`scdiva.pp.match_genes`; if `adata.raw` is read and holds known genes that `adata` does not, whose
        ranks would have no place; if the entropies are absent or incomplete; if cells have no known gene.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy()
    >>> sd.pp.gene_entropy(adata)
    >>> sd.pp.entropy_serialize(adata, entropy_key="scdiva_entropy")
    >>> adata.layers["scdiva_rank"].dtype
    dtype('int32')
    """
    check_least(max_length=(max_length, 1))
    reading = InputOptions(layer, use_raw, input, gene_ids, species, duplicates, empty)
    check_writable(adata, copy=copy, call="pp.entropy_serialize", layers=[key_added], uns=[key_added])
    genes = load_vocabulary(vocabulary)
    if entropy_key is None:
        denominator = score_denominator(genes.entropy, entropy_floor)
    elif entropy_key not in adata.var:
        raise no_entry("adata.var", entropy_key, adata.var.columns, "scdiva.pp.gene_entropy(adata)")
    source = open_cells(adata, genes, reading, ranked=False)
    column = _columns_of_tokens(adata, source, use_raw)
    if entropy_key is not None:
        denominator = score_denominator(_entropy_of_tokens(adata, column, entropy_key), entropy_floor)
    found = {
        "n_truncated": 0,
        "kind": source.kind,
        "vocabulary": genes.fingerprint,
        "max_length": max_length,
        "entropy_key": entropy_key or "",
        "entropy_floor": entropy_floor,
        **reading.parameters(),
        "empty": empty,
    }
    # One allocation, of the size that is known: parts put together at the end would be held twice.
    bound = int(np.minimum(source.lengths, max_length).sum(dtype=np.int64))
    data, indices, indptr = np.empty(bound, np.int32), np.empty(bound, np.int32), np.zeros(adata.n_obs + 1, np.int64)
    for start, cells in source.expression_blocks("ranking genes"):
        found["n_truncated"] += int((np.diff(cells.indptr) > max_length).sum())
        bounds, tokens, _ = serialize(cells, denominator, max_length)
        first, n_rows = int(indptr[start]), len(bounds) - 1
        indptr[start + 1 : start + n_rows + 1] = first + bounds[1:]
        data[first : first + len(tokens)] = np.arange(1, len(tokens) + 1) - np.repeat(bounds[:-1], np.diff(bounds))
        indices[first : first + len(tokens)] = column[tokens]
    ranks = sp.csr_matrix((data[: indptr[-1]], indices[: indptr[-1]], indptr), shape=adata.shape)
    ranks.sort_indices()
    parts = {"layers": {key_added: ranks}, "uns": {key_added: found}}
    return write(adata, "pp.entropy_serialize", None, None, copy=copy, **parts)


def _columns_of_tokens(adata: AnnData, source: CellSource, use_raw: bool) -> np.ndarray:
    """First column of `adata` that holds each token, int32 (n_tokens,), -1 where there is none."""
    tokens = tokens_of_var(adata, source.tokens, use_raw)
    if use_raw:
        check_unique(adata.var_names)
    known = np.flatnonzero(tokens >= 0)[::-1]
    column = np.full(source.n_tokens, -1, dtype=np.int32)
    column[tokens[known]] = known  # the last one written, the first column, stays
    lost = (source.tokens >= 0) & (column[source.tokens] < 0)
    if lost.any():
        raise ValueError(
            f"adata.raw holds {int(lost.sum())} known genes that adata lacks (first: "
            f"{str(adata.raw.var_names[np.flatnonzero(lost)[0]])!r}); their ranks would have no place. "
            "Work on adata.raw.to_adata()."
        )
    return column


def _entropy_of_tokens(adata: AnnData, column: np.ndarray, key: str) -> np.ndarray:
    """Entropies of `adata.var[key]` by token, float32 (n_tokens,); 0 for tokens without a column."""
    given = np.asarray(adata.var[key], dtype=np.float32)  # of pandas, or of xarray where adata is lazy
    entropy = np.zeros(len(column), dtype=np.float32)
    there = np.flatnonzero(column[N_SPECIAL:] >= 0) + N_SPECIAL
    entropy[there] = given[column[there]]
    bad = column[there][~np.isfinite(entropy[there]) | (entropy[there] < 0)]
    if len(bad):
        raise ValueError(
            f"adata.var[{key!r}] is missing, infinite or negative for {len(bad)} of {len(there)} known genes (first: "
            f"{str(adata.var_names[bad.min()])!r}). Compute it anew with scdiva.pp.gene_entropy(adata)."
        )
    return entropy
