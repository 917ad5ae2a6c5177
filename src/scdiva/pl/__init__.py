"""Plots of results in AnnData."""

from __future__ import annotations

from scdiva.pl._annotation import confusion_matrix, feature_heatmap, marker_heatmap, reliability
from scdiva.pl._network import attention, grn, regulon
from scdiva.pl._perturbation import delta_scatter, discrimination, hit_rate, perturbation, perturbation_scores
from scdiva.pl._reconstruction import gene_overlap, reconstruction
from scdiva.pl._umap import annotation, generated, integration, umap

__all__ = [
    "annotation",
    "attention",
    "confusion_matrix",
    "delta_scatter",
    "discrimination",
    "feature_heatmap",
    "gene_overlap",
    "generated",
    "grn",
    "hit_rate",
    "integration",
    "marker_heatmap",
    "perturbation",
    "perturbation_scores",
    "reconstruction",
    "regulon",
    "reliability",
    "umap",
]


def __dir__() -> list[str]:
    return __all__
