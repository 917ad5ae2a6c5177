"""Tidy tables of what scdiva wrote into AnnData."""

from __future__ import annotations

from scdiva.get._frames import (
    annotation_df,
    gene_embedding_df,
    grn_df,
    imputed_df,
    perturbation_df,
    reconstructed_genes,
    reconstruction_df,
    serialized_df,
)

__all__ = [
    "annotation_df",
    "gene_embedding_df",
    "grn_df",
    "imputed_df",
    "perturbation_df",
    "reconstructed_genes",
    "reconstruction_df",
    "serialized_df",
]


def __dir__() -> list[str]:
    return __all__
