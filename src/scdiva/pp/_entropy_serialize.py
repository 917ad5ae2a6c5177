"""Rank the genes of each cell, as the model sees them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import scipy.sparse as sp

from scdiva._constants import LAYER_RANK, MAX_LENGTH, N_SPECIAL
from scdiva._validate import Input
from scdiva.data.cells import CellSource, open_expression, refuse_empty
from scdiva.data.writing import check_writable
from scdiva.tokenizer.serialize import ENTROPY_FLOOR, score_denominator, serialize
from scdiva.tokenizer.vocabulary import Vocabulary, load_vocabulary

if TYPE_CHECKING:
    from anndata import AnnData


def entropy_serialize(
    adata: AnnData,
    vocabulary: Vocabulary | str | Path = "human",
    *,
    max_length: int = MAX_LENGTH,
    entropy_key: str | None = None,
    entropy_floor: float = ENTROPY_FLOOR,
    gene_ids: str | None = None,
    layer: str | None = None,
    use_raw: bool = False,
    input: Input = "auto",
    duplicates: Literal["sum", "error"] = "sum",
    empty: Literal["error", "nan"] = "error",
    key_added: str = LAYER_RANK,
    copy: bool = False,
) -> AnnData | None:
    r"""Rank the genes of each cell by entropy-normalised expression.

    The score is :math:`S_g = v_g / (\max(H_g, \mathrm{floor}) + 10^{-6})` with v the log-normalised expression (target
    1e4) and H the gene's entropy (paper, appendix, eq. entropy_score; the floor is ours and keeps rare genes from the
    top). Rank 1 is the highest score; equal scores are ranked by token. The models' own calls do the same themselves:
    this one is for looking.

    Parameters
    ----------
    adata
        Cells by genes, counts or log-normalised values.
    vocabulary
        A vocabulary, "human", the name of a bundled model, the folder of a saved model, or a parquet file.
    max_length
        Genes ranked per cell.
    entropy_key
        Column of `adata.var` with entropies in nats, as :func:`scdiva.pp.gene_entropy` writes. None takes those of the
        vocabulary, which "human" does not have.
    entropy_floor
        Least entropy that is divided by, in nats; 0 is the paper to the letter.
    gene_ids
        Column of `adata.var` with Ensembl ids or symbols; None takes `var_names`.
    layer, use_raw
        Where the counts are, if not in `adata.X`. `adata.raw` must not hold genes that `adata` lacks: their ranks would
        have no place.
    input
        What they are: "auto" finds out, "counts", or "lognorm" for log(1 + x) values.
    duplicates
        Several columns that mean one gene: "sum" (the rank stands at the first of them) or "error".
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
        lower.
    `adata.uns[key_added]`
        `n_truncated` (cells with more known genes than `max_length`), what the input was found to be, the
        vocabulary's fingerprint, and the arguments.

    Raises
    ------
    KeyError, ValueError
        As :func:`scdiva.pp.match_genes`; if the entropies are absent or incomplete; if cells have no known gene.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy()
    >>> sd.pp.gene_entropy(adata)
    >>> sd.pp.entropy_serialize(adata, entropy_key="scdiva_entropy")
    >>> adata.layers["scdiva_rank"].dtype
    dtype('int32')
    """
    if empty not in ("error", "nan"):
        raise ValueError(f"empty must be 'error' or 'nan', got {empty!r}.")
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}.")
    check_writable(adata, copy=copy)
    genes = load_vocabulary(vocabulary)
    if entropy_key is None:
        denominator = score_denominator(genes.entropy, entropy_floor)
    elif entropy_key not in adata.var:
        raise KeyError(
            f"adata.var has no column {entropy_key!r}; scdiva.pp.gene_entropy(adata) writes 'scdiva_entropy'."
        )
    source = open_expression(
        adata, genes, layer=layer, use_raw=use_raw, input=input, duplicates=duplicates, gene_ids=gene_ids
    )
    if empty == "error":
        refuse_empty(source)
    column = _columns_of_tokens(adata, source, use_raw)
    if entropy_key is not None:
        denominator = score_denominator(_entropy_of_tokens(adata, column, entropy_key), entropy_floor)

    indices, lengths, n_truncated = [], [], 0
    for _, cells in source.expression_blocks():
        n_truncated += int((np.diff(cells.indptr) > max_length).sum())
        indptr, tokens, _ = serialize(cells, denominator, max_length)
        indices.append(column[tokens])
        lengths.append(np.diff(indptr))
    length = np.concatenate(lengths)
    indptr = np.concatenate([[0], np.cumsum(length)])
    rank = np.arange(1, indptr[-1] + 1) - np.repeat(indptr[:-1], length)
    ranks = sp.csr_matrix((rank.astype(np.int32), np.concatenate(indices), indptr), shape=adata.shape)
    ranks.sort_indices()

    found = {
        "n_truncated": n_truncated,
        "kind": source.kind,
        "vocabulary": genes.fingerprint,
        "max_length": max_length,
        "entropy_key": entropy_key or "",
        "entropy_floor": entropy_floor,
        "gene_ids": gene_ids or "",
        "layer": layer or "",
        "use_raw": use_raw,
        "input": input,
        "duplicates": duplicates,
        "empty": empty,
    }
    target = adata.copy() if copy else adata
    target.layers[key_added] = ranks
    target.uns[key_added] = found
    return target if copy else None


def _columns_of_tokens(adata: AnnData, source: CellSource, use_raw: bool) -> np.ndarray:
    """First column of `adata` that holds each token, int32 (n_tokens,), -1 where there is none."""
    tokens = source.tokens
    place = np.arange(len(tokens))
    if use_raw:
        place = (
            adata.var_names.get_indexer(adata.raw.var_names) if adata.var_names.is_unique else np.full(len(tokens), -1)
        )
        lost = (tokens >= 0) & (place < 0)
        if lost.any():
            raise ValueError(
                f"adata.raw holds {int(lost.sum())} known genes that adata lacks (first: "
                f"{str(adata.raw.var_names[np.flatnonzero(lost)[0]])!r}); their ranks would have no place. "
                "Work on adata.raw.to_adata()."
            )
    column = np.full(source.n_tokens, -1, dtype=np.int32)
    known = np.flatnonzero(tokens >= 0)
    known = known[np.argsort(-place[known])]
    column[tokens[known]] = place[known]  # the last one written, the first column, stays
    return column


def _entropy_of_tokens(adata: AnnData, column: np.ndarray, key: str) -> np.ndarray:
    """Entropies of `adata.var[key]` by token, float32 (n_tokens,); 0 for tokens without a column."""
    given = adata.var[key].to_numpy(dtype=np.float32)
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
