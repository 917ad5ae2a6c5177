"""Published, bundled and simulated datasets, and gene families."""

from scdiva.datasets._bundled import gene_family, pbmc3k_small, pbmc68k_reduced, toy, transcription_factors
from scdiva.datasets._published import adamson, kang, mouse_brain, mouse_pancreas, norman, pancreas, pbmc3k

__all__ = [
    "adamson",
    "gene_family",
    "kang",
    "mouse_brain",
    "mouse_pancreas",
    "norman",
    "pancreas",
    "pbmc3k",
    "pbmc3k_small",
    "pbmc68k_reduced",
    "toy",
    "transcription_factors",
]


def __dir__() -> list[str]:
    return __all__
