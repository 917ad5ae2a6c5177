"""Preparing AnnData: matching genes, counting entropy, ranking the genes of each cell, holding out perturbations."""

from scdiva.data.gene_entropy import corpus_entropy, entropy_serialize, gene_entropy, match_genes
from scdiva.perturbation.calls import split_perturbations

__all__ = ["corpus_entropy", "entropy_serialize", "gene_entropy", "match_genes", "split_perturbations"]


def __dir__() -> list[str]:
    return __all__
