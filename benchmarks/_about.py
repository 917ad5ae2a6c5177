"""Titles of the benchmarks page, and what to know of each."""

from __future__ import annotations

from _annotation_table import WORDS as ANNOTATION_WORDS
from _denoising_table import ABOUT as ABOUT_DENOISING
from _embedding_table import WORDS as EMBEDDING_WORDS
from _face_table import WORDS as FACE_WORDS
from _finetuning_table import WORDS as FINETUNING_WORDS
from _grn_table import WORDS as GRN_WORDS
from _integration_table import WORDS as INTEGRATION_WORDS
from _perturbation_table import ATTEMPT_WORDS
from _perturbation_table import WORDS as PERTURBATION_WORDS
from _reconstruction_table import WORDS as RECONSTRUCTION_WORDS
from _rejection_table import WORDS as REJECTION_WORDS
from _scaling_table import WORDS as SCALING_WORDS

ABOUT = {
    "finetuning": ("Fine-tuned and frozen models", FINETUNING_WORDS),
    "embedding": ("Embedding cells", EMBEDDING_WORDS),
    "pooling": (
        "Read-outs",
        "`pooling` of `tl.embed`: the cell state, the mean of the genes' final hidden states, both side by side. Each "
        "seed draws the cells anew. The transformer of the bundled model was trained for masked genes, not for this. "
        "`pooling` and its script were removed after this.",
    ),
    "state_arms": (
        "Tried beside the cell state",
        "What `tl.embed` would gain from reading 200 other cells of the study, nothing fitted, on labelled studies "
        "that model and query head were not trained on. `state`: `tl.embed`, alone and less the mean of the study. "
        "`predicted`: 50 principal components of what the heads expect of the 2,000 genes that most cells show, by "
        "the state head, and in context by the query head; or 20 of them beside the state. `residual`: what a "
        "transformer adds to the state, trained for two CPU hours as the set encoder was. PCA and `tl.adapt` "
        "(`adapted`, designed on these three studies) are fitted to all cells. Seeds draw the context.",
    ),
    "sister_studies": (
        "Without the sister study",
        "kang_pbmc_stim_2000, which the corpus holds, is of the experiment of kang_pbmc_12k and kang_ifnb; no cell is "
        "shared. The rows of these sets again, made side by side by the bundled model and by a set encoder that was "
        "trained as the bundled one's on all other studies, its corpus SVD, entropies and vocabulary made without it, "
        "too.",
    ),
    "integration": ("Integrating batches", INTEGRATION_WORDS),
    "transform_batch": (
        "Expression in a chosen batch",
        "`tl.corrected_expression`. Half of the cells of each batch and type are integrated without labels; cells "
        "of one batch are predicted in another, and the mean of each gene over those of a type is compared with its"
        " mean over the other half of that batch's cells: RMSE over the 2,000 most variable genes, log1p of counts "
        "per ten thousand, means over all pairs of batches and types of 15 cells or more. Seen: the batch has cells"
        " of the type; unseen: they are left out of the regression (not of the integration). Ahead: by how much the"
        " error is below that of the shift, with a bootstrap over batches and types; nearer: in how many "
        "comparisons. The last column has the share of values of held-out cells, of genes that the type shows, "
        "within 1.96 standard deviations of what is predicted for a cell: below 95%, for types differ more than a "
        "regression says. Slopes, ridge and deviation were chosen on one seed of three of these sets, not on "
        "kang_pbmc_12k_1287g.",
    ),
    "annotation": ("Annotating cell types", ANNOTATION_WORDS),
    "rejection": ("Rejecting unknown types across studies", REJECTION_WORDS),
    "perturbation": ("Responses to perturbations", PERTURBATION_WORDS),
    "perturbation_attempts": ("Attempts at combinations", ATTEMPT_WORDS),
    "grn": ("Gene networks", GRN_WORDS),
    "reconstruction": ("Reconstruction and generation", RECONSTRUCTION_WORDS),
    **ABOUT_DENOISING,
    "thinning": (
        "Sequenced less deep",
        "Of every count c, Binomial(c, depth) are kept, in half of the labelled cells of a set. Cosine of their "
        "embeddings to those at full depth, mean over cells, as they stand and with the mean of all full-depth "
        "embeddings taken off both (only these compare: a common offset makes any two cells similar); accuracy of a "
        "15-NN fitted at full depth on the other half. scdiva-mini and the corpus SVD see nothing of the set; PCA and "
        "scVI are fitted on all of its cells at full depth. Rows of rivals may be of an earlier commit, which the "
        "results file names. Seeds part and thin the cells.",
    ),
    "few_genes": (
        "Few genes",
        "Cells of eight sets with all genes are embedded with scdiva-mini whole, and cut to some genes: the most "
        "variable, those with most counts, or any (two seeds). Cosine of both embeddings of a cell, mean over cells, "
        "then over cuts, with the least and the largest. The share of entropy is that of the genes which are left, of "
        "the entropies that the model's folder stores. Calls that embed warn below a share of 65%. Last, how well "
        "measures separate a mean cosine of 0.95 or more from a lower one, over all cuts. Two of the sets trained the "
        "model.",
    ),
    "ablation": (
        "Ablation",
        "One change each, at equal compute on one thread: the base of a family trains for some CPU seconds, the "
        "others for the steps that cost the same. To learn anything in that time the network is small (2 layers of "
        "64) and knows 6,000 genes; even so it sees few cells, and this says what helps first, not what helps in "
        "the end. Denoisers have hardly begun to learn. Transformer arms start from the set encoder `set` of the "
        "same seed, frozen. Accuracy and the mean of NMI, ARI and ASW are of the cell state (`tl.embed`) over "
        "labelled cells of studies that were not trained on, mean over the sets; identity (nats per masked gene) "
        "and value (squared error of masked values; of values that alone are hidden) are of the denoiser on the "
        "validation studies: same cells, genes and masks for all arms, each in its own order, the first 256 genes "
        "in the order of the base, which favours it over other orders, or 256 drawn from the whole cell, which "
        "favours none. Guessing all genes equally costs ln 6,000 = 8.70 nats: among figures above it, a lower one "
        "only means that less was learned of something else. A value error near 1 is that of the mean. Mean ± "
        "standard deviation over seeds, in brackets the difference to the base (first line), bold where it is more "
        "than two standard errors of the differences within seeds, an arm's own error taken as no smaller than the "
        "family's median. With so many comparisons a few are bold by chance. Diffusion arms leave the cell state "
        "to the set encoder: all have that of the base. Thinned counts are drawn from log-normalised values, a "
        "cell's smallest taken as one count. Budget, network, learning rate and batch size were settled after two "
        "earlier runs and probes on the same judges, whose rows are not here. A denoiser that guesses every gene "
        "of the vocabulary equally has 8.70 nats: at this budget it has hardly begun, and above that figure a better "
        "one has learned less, not more.",
    ),
    "learning_curve": (
        "Learning curves",
        "The set encoder trained as the bundled one's, on some of the cells of the corpus, or for some of the "
        "steps, and scored on five benchmark datasets (up to 2,000 cells each, mean over the sets; mean ± "
        "standard deviation over seeds where there are several). **These rows are of an earlier form of the set "
        "encoder**, before its bias was scaled by how much of a cell is seen, and were not made again: what they say "
        "of more cells or more steps is said of that form, and of the encoder that is shipped only by analogy. Lines "
        "are fitted in the logarithm of the number; "
        "what they say beyond the largest is an extrapolation.",
    ),
    "learning_curve_mouse": (
        "Cells of mice in training",
        "The set encoder trained as the bundled one's, for 400 steps, on the human studies of a corpus without "
        "brain, and on these and three mouse sets (marrow progenitors, cortex and hippocampus, embryonic pancreas), "
        "read by their human orthologs. The corpus SVD is of the cells of each arm; steps, cells a batch, entropies "
        "and seeds are the same, so that cells of mice take the place of human ones. Scored on human sets that "
        "neither arm has, nor another of their publication: brain twice, pancreas, lung cancer lines, and blood, of "
        "which the corpus has most. Goals ask whether cells of mice help at all: of each set, of the mean over these "
        "sets by seeds, and of the mean by sets, for tissues like these.",
    ),
    "attempts": (
        "What was tried on top",
        "One change of the set encoder each, trained on the whole corpus, scored as the learning curves are. What "
        "helps on held-out studies of the corpus (the ablation above) need not help here.",
    ),
    "face": ("Seconds of each call", FACE_WORDS),
    "scaling": ("Scaling", SCALING_WORDS),
    "embedding_speed": (
        "Embedding on a CPU",
        "One thread, arms in turn, best CPU time of several rounds; only ratios within the run count.",
    ),
    "training": (
        "Training on a CPU",
        "The whole step of the paper's network on random cells: masks, forward, both losses, backward, AdamW. Two "
        "cells of 1,200 genes a batch, or four of typical lengths (median 900, none above 1,200). The share is of the "
        "rate at which the same core multiplies square matrices of the same precision, in the same run. One thread, "
        "arms in turn, best CPU time. AdamW is done for every two cells here, on a GPU for a hundred.",
    ),
    "serialisation": (
        "Ranking and counting genes",
        "`serialize` ranks the genes of cells in token space, `EntropyHistogram` counts their values by gene and bin. "
        "Cells are made up: lengths log-normal (their median, how many of a cell's scores equal another's, and how "
        "many cells are cut stand in the results file), genes drawn by the detection rate that follows from their "
        "entropy in the bundled vocabulary, small integer counts. All of them are ranked in one call, and counted in "
        "blocks as they are read. The lexsort loop and the numpy code (removed after this) give the same ranking to "
        "the bit, and bincount the same counts, which the script asserts. A copy of the cells' three arrays is the "
        "floor of whatever reads "
        "and writes as much. The Geneformer-style tokenizer is written out three ways: with a dense vector for each "
        "cell, as it was first published, which the goal is about; with rows of a scipy matrix, as in its later "
        "versions; and from slices of the arrays, the least that numpy can do. It starts at counts and normalises "
        "them; so does `to_token_space` + `serialize`, in blocks. The scGPT-style one bins values into 51 bins. "
        "Random numbers stand in for medians. One thread, arms in turn, best CPU time.",
    ),
    "loss": (
        "Loss",
        "Forward and backward of the gene head. `full` computes the logits of all positions, half of them masked; "
        "`masked` those of the masked positions alone; `chunked` is `scdiva.diffusion.masked_cross_entropy`. One "
        "thread, arms in turn, best CPU time. Peak MiB are tensors above the start; resident MiB are a process of its "
        "own for each arm, a check by other means.",
    ),
    "packing": (
        "Packing, and formats of packed cells",
        "Made-up counts in files of one study each are packed by one process and by two, whose start counts. The "
        "packed cells are written in each library's own format and read in random batches of 64, as the tokens, values "
        "and bounds that training takes: `ours` is the training stream with 64 blocks of 64 cells in its buffer; "
        "annbatch reads zarr shards with the ranked tokens as column indices, in chunks of 64 or in its own of 512; "
        "litdata and MosaicML Streaming read chunks of 64 MB, shuffled as they do it by themselves. CPU time of all "
        "threads, arms in turn, best of the rounds. Mixing: of how many runs of 1,000 neighbours the 64 cells of "
        "a batch come. Resuming: whether a new reader goes on from what the old one noted with the same cells.",
    ),
    "loading": (
        "Loading random mini-batches",
        "Batches of 64 cells as raw CSR rows of one uncompressed h5ad file, opened anew by each arm, from the page "
        "cache. `ours` is the stream that training reads, with a source that does not rank; `backed` takes 64 random "
        "rows of a backed AnnData object; scDataset (64 × 64) is given the backed object or, as `matrix`, its matrix "
        "alone, and the goal is against the faster; AnnLoader is anndata's and has no goal. Arms in turn, best of the "
        "rounds. "
        "Goals are on CPU time per cell, which counts the thread that reads ahead; with other work on the machine that "
        "thread can cost more wall time than it saves, and from run to run the ratio to `backed` moved by a quarter, "
        "once to just below its goal. Rows of one block of 64 neighbours come in nearby batches in "
        "ours and scDataset; `backed` and AnnLoader draw from the whole file. TileDB-SOMA-ML reads the same cells "
        "from an experiment. `packed, 64 processes` reads them packed, as ranked tokens and values, one epoch of the "
        "lanes of every eighth of 64 processes. Rows read per cell used are counted over an epoch of all of them; pool "
        "and order of 59 M cells are those of a simulated index in a process of its own, 237 of the MB mapped from its "
        "files.",
    ),
    "sources": (
        "Reading by where cells lie",
        "The same counts as h5ad, zarr (formats 2 and 3) and a SOMA experiment, on a disk and on an S3 server of "
        "another process. `rows`: in their order, 1,024 at a time, as packing and embedding read; `blocks`: 64 random "
        "blocks of 64 rows at a time, as training on files reads. CPU time is of all threads of the reading process. "
        "The server is moto's, on the same machine: wall times are its own, and say nothing of S3. Arms in turn, best "
        "of the rounds.",
    ),
    "activations": (
        "Activation memory",
        "What a training step of the paper's network keeps for backward, half of the genes masked: bytes per token by "
        "the part of the network during which a tensor was first saved, in eager mode on a CPU.",
    ),
    "faults": (
        "Faults",
        "`make faults`: small runs with accumulation, validation, dropout and a running mean of the weights, killed at "
        "random moments, sent a signal to stop, or without room on the disk. Tried: faults. Bit-exact: after how many "
        "of them the checkpoint on the disk was that of a run without faults at its step, and the exit code the one "
        "announced. Lost: after how many more steps were gone than `checkpoint_every`, or the end was another one.",
    ),
    "faults_long": (
        "Faults of a longer run",
        "`scripts/faults.py --long`: `scdiva pretrain --preset mini` on a folder of real files, once without kills and "
        "once killed at two random moments and resumed. SHA-256 of the weights at both ends.",
    ),
    "fuzz": (
        "Fuzzing of the model folder",
        "`make fuzz`: what reads a model folder, under atheris (coverage of our Python; safetensors is "
        "compiled without). `sums` reads SHA256SUMS; `config` goes from config.json to the network that it describes; "
        "`weights` from model.safetensors to a filled network; `vocabulary` reads its file and matches names; "
        "`folder` is the whole of `load_model`, one file changed and the sums written anew. About half of the changes "
        "are of bytes, the others of a JSON tree, a tensor or a column. A crash is any error that is no ValueError or "
        "OSError with the file's name, a message of over 2,000 characters, more than 10 seconds or 256 MiB, or the end "
        "of the process. Executed: an audit event of compiling, importing, unpickling, starting a process, writing, or "
        "opening a file outside the folder; what compiled libraries do by themselves raises none. Ways: different "
        "places and causes at which an input was refused, and acceptance; a test runs one input of up to 100 ways of "
        "each target again. The judge keeps the last 64 networks without memory that it built, for speed. Targets may "
        "be of different calls, each with its commit; the first finding ends a target, and is mended before it counts.",
    ),
    "aot": (
        "Kernels compiled for GPUs that are not here",
        "The attention kernels in bfloat16 by Triton's compiler for A100 (sm_80), H100 and H200 (sm_90) and B200 "
        "(sm_100): each default launch, and each that tuning may choose for heads of 64, by time, so that some may "
        "spill. Spilled registers lie on the thread's stack. Matrix instructions are those of the machine code.",
    ),
    "gpu": (
        "GPU",
        "One call of `benchmarks/gpu.py`: arms in turn, device events, best of several samples; `tl.embed` and `fit` "
        "by the clock, from ranked cells to states and from a packed corpus to weights. Where a goal was missed, the "
        "kernels that took the time stand beside it.",
    ),
    "gpu_fit": (
        "GPU, training through `fit`",
        "Above, `fit` failed: Lightning refuses to clip for a fused optimiser in mixed precision. Repaired here. "
        "Of its waits, 376 are of the checkpoint at its end, which the benchmark no longer counts.",
    ),
    "gpu_partial": (
        "GPU, attention again",
        "What ran untuned in the call above had eight warps; tuned it took half of the time. These figures are of the "
        "launch that is taken by default since then, of four warps.",
    ),
}
"""Title and what to know, by result; a result that is not named here gets its own name and no words."""

CHOSEN = {
    "embedding": "the design of the set encoder and of `tl.adapt`, in part, so that small leads say little.",
    "thinning": "the design of the set encoder, with the accuracy on few counts in view.",
    "integration": (
        "weight, temperature and bound of the contrast among mutual neighbours, without labels; the figures of "
        "`tl.integrate` flatter it."
    ),
    "annotation": (
        "which of some forty measures of novelty to take; the figures of an unknown type flatter `tl.annotate`."
    ),
    "perturbation": (
        "the fixed weights in the covariance of the expected response (what a combination has of its own, what is "
        "carried over between similar genes, whose noise); the figures of `tl.predict_perturbation` flatter it."
    ),
    "grn": (
        "how embedding, attention and knockout read the model, on pbmc3k_raw and kang_pbmc_12k_1287g, after more than "
        "a hundred ways had been scored; sc_mixology was looked at afterwards."
    ),
    "reconstruction": (
        "the ridge by which imputation and generation correct the model by the cells given, and that "
        "`tl.log_likelihood` reads the state head alone by default; the figures of scdiva-mini in imputation, "
        "generation and likelihood flatter it."
    ),
}
"""What of our methods was chosen with the scores of a result's own sets in view."""
JUDGED = (
    "A goal is met where all of its 95% interval is on the good side, missed where none of it is, and otherwise within "
    "noise. Intervals are over seeds (paired where a row kept the figure of each seed, else of two means apart, by "
    "Student's t: of three seeds they are wide), over types, groups or batches, or over cells, as if both arms had "
    "seen cells of their own, which is too wide; the wider of two counts. Over cells macro-F1 is taken as a share of "
    "them, which is too narrow where types are rare. The best arm of several, on either side, is picked by the same "
    "figures that it is judged by. Figures of one run have no interval: they can miss a goal, and are not said to meet "
    "it. What is counted exactly needs none."
)
"""How goals are judged, for the head of the page."""
