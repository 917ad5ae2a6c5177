"""Start the gene embeddings of a network from vectors that are known already."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from scdiva._constants import N_SPECIAL
from scdiva.models.scdiva import ScDiVa
from scdiva.nn.layers import INIT_STD


@torch.no_grad()
def init_gene_embedding(
    model: ScDiVa, matrix: Tensor | np.ndarray, *, generator: torch.Generator | None = None
) -> None:
    """Start the gene embeddings from gene vectors, such as those of a truncated SVD of the corpus.

    The first `k` columns of a gene's embedding become its vector, all scaled by one number so that an average row is
    as long as a freshly drawn one; the others are drawn at a tenth of the usual size, so that the vectors rule at
    first. A gene whose vector is all 0 (the corpus never saw it) and the special tokens keep what they have.

    Parameters
    ----------
    model
        Changed in place.
    matrix
        `(n_genes, k)`, row `j` for token `j + N_SPECIAL`, leading directions first; `k <= dim`.
    generator
        Source of the small random numbers; `None`: torch's global stream.

    Raises
    ------
    ValueError
        If the matrix has another number of genes, too many columns, numbers that aren't finite, or only zeros. The
        model is then left as it was.

    Examples
    --------
    >>> import torch
    >>> from scdiva.models import ScDiVa, ScDiVaConfig, init_gene_embedding
    >>> model = ScDiVa(ScDiVaConfig(n_genes=30, dim=16, n_layers=1, n_heads=2, ffn_dim=24))
    >>> vectors = torch.randn(30, 8, generator=torch.Generator().manual_seed(0))
    >>> init_gene_embedding(model, vectors)
    """
    vectors = torch.as_tensor(matrix)
    c = model.config
    if vectors.dim() != 2 or vectors.shape[0] != c.n_genes or not 1 <= vectors.shape[1] <= c.dim:
        raise ValueError(
            f"The gene matrix must be ({c.n_genes}, k) with 1 <= k <= dim = {c.dim}; got {tuple(vectors.shape)}."
        )
    if not torch.isfinite(vectors).all():
        row = int((~torch.isfinite(vectors)).any(dim=1).nonzero()[0])
        raise ValueError(f"The gene matrix holds NaN or infinite numbers, first in row {row}.")
    if not vectors.any():
        raise ValueError("The gene matrix holds only zeros.")
    rows = model.embedding.gene.weight[N_SPECIAL:]
    vectors = vectors.to(torch.float64)
    known = vectors.any(dim=1)
    rms = vectors[known].square().sum(dim=1).mean().sqrt()
    scale = INIT_STD * rows.shape[1] ** 0.5 / rms
    fresh = torch.randn(rows.shape, generator=generator) * (INIT_STD / 10)
    fresh[:, : vectors.shape[1]] = (vectors * scale).to(fresh.dtype)
    rows[known.to(rows.device)] = fresh[known].to(device=rows.device, dtype=rows.dtype)
