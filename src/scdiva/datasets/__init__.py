"""Small data sets, one with known truth and one of real cells, and sets of genes."""

from scdiva.datasets._gene_sets import gene_family, transcription_factors
from scdiva.datasets._pbmc68k import pbmc68k_reduced
from scdiva.datasets._toy import toy

__all__ = ["gene_family", "pbmc68k_reduced", "toy", "transcription_factors"]
