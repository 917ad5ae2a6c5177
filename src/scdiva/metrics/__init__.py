"""Scores of embeddings and predictions: arrays in, floats out, no AnnData."""

from .annotation import calibration, classification, knn_cross_validation, rejection_auroc
from .batch import avg_batch, bras, pcr_comparison, shuffle_control, silhouette_batch
from .graph import density_test, edge_stability, enrichment, hub_scores
from .grn import auprc_ratio, early_precision, matched_null, score_edges
from .integration import avg_bio, isolated_labels, leiden_agreement, silhouette_label
from .neighbors import Neighbors, clisi, graph_connectivity, ilisi, kbet, nearest_neighbors
from .perturbation import de_scores, discrimination, discrimination_matrix, hit_rate, perturbation_response
from .population import copies, correlation_agreement, discriminator_auroc, gene_statistics, mmd
from .reconstruction import bleu, l_dist, marginal_recall, recall_at_k, reconstruction_scores, value_spearman

__all__ = [
    "Neighbors",
    "auprc_ratio",
    "avg_batch",
    "avg_bio",
    "bleu",
    "bras",
    "calibration",
    "classification",
    "clisi",
    "copies",
    "correlation_agreement",
    "de_scores",
    "density_test",
    "discrimination",
    "discrimination_matrix",
    "discriminator_auroc",
    "early_precision",
    "edge_stability",
    "enrichment",
    "gene_statistics",
    "graph_connectivity",
    "hit_rate",
    "hub_scores",
    "ilisi",
    "isolated_labels",
    "kbet",
    "knn_cross_validation",
    "l_dist",
    "leiden_agreement",
    "marginal_recall",
    "matched_null",
    "mmd",
    "nearest_neighbors",
    "pcr_comparison",
    "perturbation_response",
    "recall_at_k",
    "reconstruction_scores",
    "rejection_auroc",
    "score_edges",
    "shuffle_control",
    "silhouette_batch",
    "silhouette_label",
    "value_spearman",
]
