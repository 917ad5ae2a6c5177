"""Tools: what the model makes of cells and genes."""

from scdiva.tl._adapt import adapt
from scdiva.tl._annotate import annotate
from scdiva.tl._corrected import corrected_expression
from scdiva.tl._embed import embed
from scdiva.tl._embed_file import embed_file
from scdiva.tl._gene_embedding import gene_embedding
from scdiva.tl._generate import generate
from scdiva.tl._grn import grn
from scdiva.tl._grn_modules import grn_modules
from scdiva.tl._impute import impute
from scdiva.tl._integrate import integrate
from scdiva.tl._log_likelihood import log_likelihood
from scdiva.tl._perturbation import fit_perturbation, predict_perturbation, rank_perturbations, score_perturbation
from scdiva.tl._reconstruct import reconstruct
from scdiva.tl._regulon import regulon
from scdiva.tl._umap import umap

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
