"""Preparing AnnData: matching genes, counting entropy, ranking the genes of each cell."""

from scdiva.pp._match_genes import match_genes

__all__ = ["match_genes"]
