"""Scores of embeddings and predictions: arrays in, floats out, no AnnData."""

from .annotation import calibration, classification, knn_cross_validation
from .integration import avg_batch, avg_bio, shuffle_control
from .networks import hub_scores
from .perturbation import de_scores, discrimination, discrimination_matrix, hit_rate, perturbation_response
from .reconstruction import bleu, l_dist, marginal_recall, reconstruction_scores, value_spearman

__all__ = [
    "avg_batch",
    "avg_bio",
    "bleu",
    "calibration",
    "classification",
    "de_scores",
    "discrimination",
    "discrimination_matrix",
    "hit_rate",
    "hub_scores",
    "knn_cross_validation",
    "l_dist",
    "marginal_recall",
    "perturbation_response",
    "reconstruction_scores",
    "shuffle_control",
    "value_spearman",
]


def __dir__() -> list[str]:
    return __all__
