"""Published data sets by name, small ones of real cells and with known truth, and sets of genes."""

from scdiva.datasets._cells import pbmc68k_reduced, toy
from scdiva.datasets._gene_sets import gene_family, transcription_factors
from scdiva.datasets._published import kang, mouse_brain, mouse_pancreas, norman, pancreas, pbmc3k

__all__ = [
    "gene_family",
    "kang",
    "mouse_brain",
    "mouse_pancreas",
    "norman",
    "pancreas",
    "pbmc3k",
    "pbmc68k_reduced",
    "toy",
    "transcription_factors",
]
