"""Scores of embeddings and predictions: arrays in, floats out, no AnnData."""

from .annotation import calibration, classification, knn_cross_validation, rejection_auroc
from .batch import avg_batch, bras, pcr_comparison, shuffle_control, silhouette_batch
from .integration import avg_bio, isolated_labels, leiden_agreement, silhouette_label
from .mixing import clisi, graph_connectivity, ilisi, kbet
from .neighbors import Neighbors, nearest_neighbors
from .perturbation import de_scores, discrimination, discrimination_matrix, hit_rate, perturbation_response

__all__ = [
    "Neighbors",
    "avg_batch",
    "avg_bio",
    "bras",
    "calibration",
    "classification",
    "clisi",
    "de_scores",
    "discrimination",
    "discrimination_matrix",
    "graph_connectivity",
    "hit_rate",
    "ilisi",
    "isolated_labels",
    "kbet",
    "knn_cross_validation",
    "leiden_agreement",
    "nearest_neighbors",
    "pcr_comparison",
    "perturbation_response",
    "rejection_auroc",
    "shuffle_control",
    "silhouette_batch",
    "silhouette_label",
]
