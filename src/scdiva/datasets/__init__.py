"""Published data sets by name, small ones of real cells and with known truth, and sets of genes."""

from scdiva.datasets._cells import pbmc68k_reduced, toy
from scdiva.datasets._gene_sets import gene_family, transcription_factors
from scdiva.datasets._published import kang, mouse_brain, mouse_pancreas, norman, pancreas, pbmc3k
from scdiva.datasets._scverse import adamson_2016, kang_2018, norman_2019

__all__ = [
    "adamson_2016",
    "gene_family",
    "kang",
    "kang_2018",
    "mouse_brain",
    "mouse_pancreas",
    "norman",
    "norman_2019",
    "pancreas",
    "pbmc3k",
    "pbmc68k_reduced",
    "toy",
    "transcription_factors",
]
