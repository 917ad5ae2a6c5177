"""Plots. They read adata, never a model, and take `ax`, `return_fig` and `save`."""

from __future__ import annotations

from scdiva.pl._integration import integration
from scdiva.pl._umap import umap

__all__ = ["integration", "umap"]
