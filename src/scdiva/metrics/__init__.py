"""Scores of embeddings and predictions: arrays in, floats out, no AnnData."""

from .annotation import knn_cross_validation
from .integration import average_bio, leiden_agreement, silhouette_label

__all__ = ["average_bio", "knn_cross_validation", "leiden_agreement", "silhouette_label"]
