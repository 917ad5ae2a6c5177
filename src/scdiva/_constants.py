"""Every AnnData key and every special token id, spelled once."""

PRESETS = ("paper", "base", "base-lat", "mini")
"""Names of the configurations of model and pretraining that go together."""

# --- keys in AnnData -------------------------------------------------------------------------------------------------
UNS = "scdiva"
"""`adata.uns` entry that holds what each scdiva call was given and what it found."""
WRITTEN = "written"
"""Its entry that records which keys of AnnData each call wrote, by call and name of the result: only these are ours to
replace, each by the same result."""
MATCH, UMAP = "match", "umap"
"""Its entries of what `pp.match_genes` found, and of the maps that plots made."""
VAR_TOKEN = "scdiva_token"
VAR_ENTROPY = "scdiva_entropy"
LAYER_RANK = "scdiva_rank"
OBSM_EMBEDDING = "X_scdiva"
OBSM_INTEGRATED = "X_scdiva_integrated"
CORRECTED = "scdiva_corrected"
INTEGRATE = "integrate"
"""`uns` entry of what `tl.integrate` did."""
FINETUNED = "finetuned"
"""Entry of a model's metadata with the task and the settings that its weights were fine-tuned by."""
OBS_LABEL = "scdiva_label"
CONFIDENCE, NOVELTY, PROBABILITY = "confidence", "novelty", "probability"
"""Endings, after an underscore, of the keys beside it: two of `obs`, one of `obsm`."""
REJECTED = "unknown"
"""Label of a cell of no known type."""
PERTURBATION = "perturbation"
"""`uns` entry of what `tl.predict_perturbation` did, in the cells that it returns."""
PREDICTED = "scdiva_perturbation"
"""Key of `adata.uns` of what it predicts, in the adata that it is given: conditions × genes."""
RANKED = "scdiva_ranked_perturbations"
"""Key of `adata.uns` of what `tl.rank_perturbations` finds."""
VARM_MEAN, VARM_SD, VARM_CONTROL = "scdiva_mean", "scdiva_sd", "scdiva_control"
"""Genes × predicted conditions: predicted mean, its standard deviation, mean of the control cells."""
VARM_BASELINE = "scdiva_baseline_"
"""Beginning of the keys of what each simple baseline predicts, genes × conditions."""
BASELINES = ("no_change", "train_mean", "matching_mean", "additive", "linear", "elsewhere")
EXPECTED = "expected"
"""Name of the expected response: what predicts if no baseline does, and one more baseline of a fine-tuned model."""
OBS_CONDITION, OBS_CONTROL_CELL = "scdiva_condition", "scdiva_control_cell"
OBS_SPLIT, SEEN = "scdiva_split", "seen"
"""Column of what is held out, and the ending, after an underscore, of how much of it was seen."""
VARP_GRN = "scdiva_grn"
"""Genes × genes, source × target; of a group of cells with its name, after an underscore."""
VAR_MODULE, HUB = "scdiva_grn_module", "hub"
"""Module of a gene in such a network, and the ending, after an underscore, of its hub score."""
RECONSTRUCTED = "scdiva_reconstructed"
"""Layer of what `tl.reconstruct` predicts, and `uns` entry of how; the keys of the layers beside it begin so."""
RANK, TRUE, TRUE_RANK, MASKED = "rank", "true", "true_rank", "masked"
"""Endings, after an underscore, of those: the places of genes, and the cell as it was."""
GENERATE = "generate"
"""`uns` entry of what `tl.generate` was asked for."""
OBS_SOURCE, OBS_FRACTION = "scdiva_source", "scdiva_fraction"
"""Of a generated cell, the cell it is like, and how far it lies between two groups."""
IMPUTED, SD = "scdiva_imputed", "sd"
"""Layer or table of what `tl.impute` expects, and the ending, after an underscore, of its standard deviation."""
OBS_LIKELIHOOD, SE, PER_GENE, OUTLIER = "scdiva_log_likelihood", "se", "per_gene", "outlier"
"""Column of the bound on a cell's log-likelihood, and the endings of those beside it."""
VARM_EMBEDDING = "X_scdiva"
GENES = "genes"
"""Ending of the `uns` entry of gene embeddings; `obsm` and `varm` may hold the same key."""

# --- tokens ----------------------------------------------------------------------------------------------------------
PAD = 0
MASK = 1
LAT = 2
N_SPECIAL = 3
"""Gene tokens are `N_SPECIAL ... N_SPECIAL + n_genes - 1`: row `i` of a vocabulary has token `i + N_SPECIAL`."""
UNKNOWN = -1
"""Token of a gene that the vocabulary does not hold."""

# --- units -----------------------------------------------------------------------------------------------------------
TARGET_SUM = 1e4
"""Counts per cell to which expression is normalised before log1p (paper, section 3.4)."""
MAX_LENGTH = 1200
"""Genes kept per cell (paper, table of the model configuration)."""
DEFAULT_MODEL = "scdiva-mini"
