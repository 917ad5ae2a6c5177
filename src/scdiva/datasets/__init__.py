"""Small data sets, one with known truth and one of real cells, and sets of genes."""

from scdiva.datasets._cells import pbmc68k_reduced, toy
from scdiva.datasets._gene_sets import gene_family, transcription_factors

__all__ = ["gene_family", "pbmc68k_reduced", "toy", "transcription_factors"]
