"""Plots. They read adata, never a model, and take `ax`, `return_fig` and `save`."""

from __future__ import annotations

from scdiva.pl._annotation import annotation, reliability
from scdiva.pl._confusion import confusion_matrix
from scdiva.pl._integration import integration
from scdiva.pl._markers import marker_heatmap
from scdiva.pl._umap import umap

__all__ = ["annotation", "confusion_matrix", "integration", "marker_heatmap", "reliability", "umap"]
