"""Keys in AnnData, special tokens, and units."""

PRESETS = ("paper", "base", "base-lat", "mini")
"""Names of the configurations of models and their pretraining."""

# --- keys in AnnData -------------------------------------------------------------------------------------------------
UNS = "scdiva"
"""`adata.uns` entry with the parameters and reports of each call."""
WRITTEN = "written"
"""Its entry with the keys of AnnData that each call wrote: only these may be replaced, each by the same result."""
MATCH, UMAP = "match", "umap"
"""Its entries of `pp.match_genes` and of UMAPs."""
VAR_TOKEN = "scdiva_token"
VAR_ENTROPY = "scdiva_entropy"
LAYER_RANK = "scdiva_rank"
OBSM_EMBEDDING = "X_scdiva"
OBSM_INTEGRATED = "X_scdiva_integrated"
CORRECTED = "scdiva_corrected"
INTEGRATE = "integrate"
"""`uns` entry of `tl.integrate`."""
FINETUNED = "finetuned"
"""Entry of a model's metadata with the task and settings of its fine-tuning."""
OBS_LABEL = "scdiva_label"
CONFIDENCE, NOVELTY, PROBABILITY = "confidence", "novelty", "probability"
"""Suffixes, after an underscore: two keys of `obs`, one of `obsm`."""
MAJORITY, CLUSTER = "majority", "cluster"
"""Suffixes of the keys of `obs` that majority voting writes."""
REJECTED = "unknown"
"""Label of cells that match no cell type of the reference."""
PERTURBATION = "perturbation"
"""`uns` entry of `tl.predict_perturbation` in the cells that it returns."""
PREDICTED = "scdiva_perturbation"
"""`uns` entry of the prediction in the input: conditions × genes."""
RANKED = "scdiva_ranked_perturbations"
"""`uns` entry of `tl.rank_perturbations`."""
VARM_MEAN, VARM_SD, VARM_CONTROL = "scdiva_mean", "scdiva_sd", "scdiva_control"
"""Genes × predicted conditions: predicted mean, its standard deviation, mean of the control cells."""
VARM_BASELINE = "scdiva_baseline_"
"""Prefix of the predictions of simple baselines, genes × conditions."""
BASELINES = ("no_change", "train_mean", "matching_mean", "additive", "linear", "elsewhere")
EXPECTED = "expected"
"""Name of the expected response: the prediction without a baseline, and a baseline of fine-tuned models."""
OBS_CONDITION, OBS_CONTROL_CELL = "scdiva_condition", "scdiva_control_cell"
OBS_SPLIT, SEEN = "scdiva_split", "seen"
"""Column of held-out conditions, and the suffix, after an underscore, of the number of parts that were seen."""
VARP_GRN = "scdiva_grn"
"""Genes × genes, source × target; for a group of cells with its name as suffix, after an underscore."""
VAR_MODULE, HUB = "scdiva_grn_module", "hub"
"""Module of a gene in a network, and the suffix, after an underscore, of its hub score."""
RECONSTRUCTED = "scdiva_reconstructed"
"""Layer and `uns` entry of `tl.reconstruct`, and prefix of its other layers."""
RANK, TRUE, TRUE_RANK, MASKED = "rank", "true", "true_rank", "masked"
"""Suffixes, after an underscore: predicted ranks, the true values and ranks, and the masked genes."""
GENERATE = "generate"
"""`uns` entry of `tl.generate`."""
OBS_SOURCE, OBS_FRACTION = "scdiva_source", "scdiva_fraction"
"""Source cell of a generated cell, and its position between two groups."""
IMPUTED, SD = "scdiva_imputed", "sd"
"""Layer or table of `tl.impute`, and the suffix, after an underscore, of its standard deviation."""
OBS_LIKELIHOOD, SE, PER_GENE, OUTLIER = "scdiva_log_likelihood", "se", "per_gene", "outlier"
"""Column of the bound on a cell's log-likelihood, and the suffixes of further columns."""
VARM_EMBEDDING = "X_scdiva"
GENES = "genes"
"""Suffix of the `uns` entry of gene embeddings; `obsm` and `varm` may have the same key."""

# --- tokens ----------------------------------------------------------------------------------------------------------
PAD = 0
MASK = 1
LAT = 2
N_SPECIAL = 3
"""Gene tokens are `N_SPECIAL ... N_SPECIAL + n_genes - 1`: row `i` of a vocabulary has token `i + N_SPECIAL`."""
UNKNOWN = -1
"""Token of a gene that is not in the vocabulary."""

# --- units -----------------------------------------------------------------------------------------------------------
TARGET_SUM = 1e4
"""Counts per cell to which expression is normalised before log1p (paper, section 3.4)."""
MAX_LENGTH = 1200
"""Genes kept per cell (paper, table of the model configuration)."""
DEFAULT_MODEL = "scdiva-mini"
