"""Tools: embedding, integration, annotation, perturbation, networks and generation."""

from scdiva.annotation.annotate import annotate
from scdiva.embedding.adapt import adapt
from scdiva.embedding.embed import embed, gene_embedding
from scdiva.embedding.embed_file import embed_file
from scdiva.embedding.umap import umap
from scdiva.generation.generate import generate
from scdiva.generation.impute import impute
from scdiva.generation.log_likelihood import log_likelihood
from scdiva.generation.reconstruct import reconstruct
from scdiva.integration.corrected_expression import corrected_expression
from scdiva.integration.integrate import integrate
from scdiva.networks.grn import grn
from scdiva.networks.network import grn_modules, regulon
from scdiva.perturbation.calls import fit_perturbation, predict_perturbation, rank_perturbations
from scdiva.perturbation.scores import score_perturbation

__all__ = [
    "adapt",
    "annotate",
    "corrected_expression",
    "embed",
    "embed_file",
    "fit_perturbation",
    "gene_embedding",
    "generate",
    "grn",
    "grn_modules",
    "impute",
    "integrate",
    "log_likelihood",
    "predict_perturbation",
    "rank_perturbations",
    "reconstruct",
    "regulon",
    "score_perturbation",
    "umap",
]


def __dir__() -> list[str]:
    return __all__
