"""What leaves the network: logits over genes and a value (paper, eq. `dual_heads`)."""

from __future__ import annotations

from torch import Tensor, nn

from scdiva._constants import N_SPECIAL
from scdiva.nn.layers import linear


class DualHeads(nn.Module):
    r"""Linear gene head and linear value head.

    :math:`\mathrm{Linear}_{gene}(h) \in \mathbb{R}^{|V|}` without bias and :math:`\mathrm{Linear}_{val}(h) \in
    \mathbb{R}`. The gene head has no row for special tokens: they are never predicted.

    Parameters
    ----------
    dim
        Width of the stream.
    n_genes
        Genes of the vocabulary.
    tied
        Whether the gene head is the gene rows of the embedding table; then no weight of its own exists.
    """

    def __init__(self, dim: int, n_genes: int, *, tied: bool = False) -> None:
        super().__init__()
        self.gene = None if tied else linear(dim, n_genes)
        self.value = linear(dim, 1, bias=True)

    def gene_weight(self, table: Tensor) -> Tensor:
        """Weight of the gene head `(n_genes, dim)`, given the embedding table `(n_genes + N_SPECIAL, dim)`."""
        return table[N_SPECIAL:] if self.gene is None else self.gene.weight
