"""The part of the benchmarks page on reconstruction and generation, what it is held to, and what the paper prints."""

from __future__ import annotations

from _judge import Score, auroc_error, judge, of_row, share_error, share_of_cells
from _markdown import in_two, table
from _timing import goal

PAPER_MODELS = ("GeneMamba_U", "Geneformer", "GeneMamba", "scDiVa")
PAPER_TABLE_1 = {
    "PBMC12k": ((430, 0.532, 0.469), (23, 0.968, 0.703), (6, 0.987, 0.711), (5, 0.987, 0.812)),
    "Pancreas": ((370, 0.524, 0.461), (25, 0.956, 0.763), (12, 0.991, 0.792), (13, 0.965, 0.812)),
    "Zheng68k": ((432, 0.581, 0.503), (25, 0.937, 0.901), (11, 0.996, 0.980), (9, 0.992, 0.994)),
    "Immune": ((468, 0.659, 0.442), (17, 0.962, 0.823), (12, 0.998, 0.844), (4, 0.997, 0.970)),
}
"""L-Dist, BLEU and Spearman of each model: the paper's table "Rank-Value Joint Reconstruction across datasets"."""

NAMES = {
    "ours": "scdiva-mini",
    "ours_no_places": "scdiva-mini, without the masked genes' ranks",
    "marginals": "training cells",
    "type_means": "training cells of the true type",
    "ours_1_step": "1 step",
    **{f"ours_{n}_steps": f"{n} steps" for n in (2, 4, 8, 16, 32)},
    "ours_8_random": "8 steps, random",
    "ours_8_remdm": "8 steps, remdm",
    "mask_free": "scdiva-mini, mask-free: all predicted, a tenth at a time",
    "masked_30": "scdiva-mini, 30% masked, one step",
    "knn": "mean of 30 neighbours",
    "diffused": "the same, diffused three times",
    "gene_means": "gene means",
    "scvi": "scVI",
    "other_real": "other real cells",
    "independent": "genes resampled one by one",
    "ours_few": "scdiva-mini, as few cells",
    "transformer_1": "with the transformer, 1 step",
    "transformer_32": "with the transformer, 32 steps",
    "no_state_32": "no state given, 32 steps",
    "no_state_transformer_32": "no state given, transformer, 32 steps",
    "ours_no_transformer": "scdiva-mini, without the transformer",
}
MASKED = {"masked_recall": "recall of masked genes", "known_spearman": "Spearman of their values",
          "known_rmse": "RMSE", "l_dist": "L-Dist", "coverage": "coverage", "bleu": "BLEU",
          "seconds_per_cell": "seconds a cell"}  # fmt: skip
STEPS = {"masked_recall": "recall of masked genes", "masked_match": "at their ranks", "l_dist": "L-Dist",
         "coverage": "coverage", "bleu": "BLEU", "value_spearman": "Spearman",
         "seconds_per_cell": "seconds a cell"}  # fmt: skip
IMPUTED = {
    "spearman_cell": "Spearman per cell",
    "spearman_gene": "per gene",
    "rmse_shown": "RMSE, expressed",
    "rmse": "RMSE, as predicted",
    "excess": "predicted by counted",
    "seconds": "seconds",
}
DRAWN = {"forest": "AUROC, forest", "logistic": "logistic", "mmd": "MMD²", "mmd_floor": "its floor",
         "mean_pearson": "r of means", "variance_pearson": "of variances", "zeros_pearson": "of zeros",
         "correlations": "of correlations", "exact_copies": "copies", "share_closer": "nearer than real",
         "seconds": "seconds"}  # fmt: skip
LIKELY = {"bound_real": "nats a gene, real", "bound_shuffled": "other genes", "bound_doublets": "doublets",
          "genes_real": "genes, real", "genes_doublets": "doublets", "auroc_shuffled": "AUROC, other genes",
          "auroc_doublets": "doublets", "seconds_per_cell": "seconds a cell"}  # fmt: skip
UNRANKED, RANKED = "ours_no_places", "masked genes' ranks given"
"""The arm that masked genes and values are judged by, and what every other of ours there is."""
ONE_STEP = ("ours", UNRANKED, "marginals", "type_means")
WORDS = (
    "Cells with a type (of Kang's set 4,000 random ones) and the genes that the model knows. scdiva-mini is zero-shot: "
    "`tl.generate` and `tl.impute` correct its state head by the cells they are given, without labels; the others "
    "learn from the same cells. Slow arms are given few cells, the number in brackets, and fewer seeds; a figure "
    "without ± is of one seed, or the same for all. Everything ran on one thread of a shared machine: read seconds as "
    "rough, of generation with the time of fitting."
)
WORDS_OF = {
    "masked": (
        "A share of 30% of each test cell's genes is masked, identity and value. Recall: share of the k masked genes "
        "among the k predicted, or among the k genes most frequent in training cells (four fifths of the cells) that "
        "were not visible. Spearman and RMSE: of the masked genes' values, given which genes they are; training cells "
        "give their mean value where they express the gene. The last row knows the true type of the cell. The rank "
        "at which a masked gene stood says much of its name and of its value, and no baseline is given it: the row "
        "without ranks (the default) compares like with like, and the goals are held to it. The row with the "
        "masked genes' ranks given answers another question: what a training step asks. Our values also know how deep "
        "the cell is, which shows in RMSE and not in a rank correlation within it. L-Dist is a mean over the genes "
        "that were found (coverage)."
    ),
    "steps": (
        "The same, fewer cells, masked genes' ranks given, masked genes revealed the surest first if nothing else is "
        "said. With more steps more genes stand at their ranks and fewer are found. `remdm`, which hid a tenth of what "
        "it had revealed again in each step (Wang et al. 2025), and `random`, any gene and not the surest first, were "
        "removed after this."
    ),
    "paper": (
        "The upper rows are the paper's own figures, of models and datasets that are not available. The paper does not "
        "define its mask-free setting. Here (`mask_ratio=0`) every gene and value is predicted: the positions are "
        "divided into ten parts, and each part is masked at its ranks and predicted from the other nine in one step. A "
        "copy of the input would score 0, 1 and 1 by construction. In the rows with 30% masked, 70% of the cell is "
        "copied, so L-Dist, BLEU and Spearman of whole cells mostly measure copying."
    ),
    "impute": (
        "A tenth of the entries above zero is set to zero, of genes that 10 cells express; the value that is asked "
        "for is log-normalised by the counts that are left. All arms tell the logarithm of the counts they expect, "
        "zeros as often as they occur. What is asked for is no zero, so an error of predictions rewards whoever "
        "expects too much: the last column but one is the mean expectation of the median gene, by the mean that "
        "was counted. The RMSE of what is expressed is that of a value known to be above zero, as all of these are: "
        "ours is what `tl.impute(expressed=True)` writes (scored here twice: that values are the mean of two heads "
        "was chosen on other studies, after the query head's alone had been seen here); "
        "the others say nothing of the kind, and their expectation "
        "is read as that of a Poisson variable, without its zeros. Ranks within a cell are the same by both. The "
        "goals are held to it. scVI: default architecture, all genes, default epochs (400 at these sizes) if "
        "its row names no others. 30 neighbours, the cell among them, on 50 components; diffusion is MAGIC's idea, not "
        "its code. Type means are "
        "given the true types."
    ),
    "population": (
        "Cells drawn from half of the cells, beside the other half, genes that 10 cells express. AUROC: how well a "
        "classifier separates drawn from real cells, 0.5 not at all. MMD² is unbiased, its floor is one draw of what "
        "chance gives. Few cells train the classifiers less, so their figures are comparable only with the same number "
        "of cells, and rough. Copies are looked for among the cells learned from. Genes resampled one by one are the "
        "training cells with each gene shuffled. Drawing with the transformer was removed after this."
    ),
    "types": (
        "60 cells drawn of each type with 30 training cells, named by a logistic regression of the real training half "
        "(2,000 most variable genes)."
    ),
    "likelihood": (
        "`tl.log_likelihood` with 8 samples, genes that 10 cells express. Other genes: a cell's counts given to random "
        "genes. Doublets: two cells of different types summed and thinned to the mean of their totals; they show more "
        "genes than either, which by itself changes the bound of a gene. The transformer is left out wherever a state "
        "head says what cells express; to ask for it was removed after this."
    ),
}
TITLES = {"masked": "Masked genes", "steps": "In more steps", "paper": "Beside the paper's table 1",
          "impute": "Counts taken away", "population": "Cells drawn", "types": "Cells drawn of a type",
          "likelihood": "Likelihood"}  # fmt: skip
MOST_FOREST, LEAST_INDEPENDENT = 0.75, 0.9
LEAST_OWN, MOST_CLOSER, LEAST_AUROC = 0.8, 0.02, 0.99


def figure(row: dict, key: str) -> str:
    """A figure of a row, with its deviation over seeds where it shows."""
    if key not in row:
        return "-"
    value = row[key]
    if isinstance(value, int):
        return f"{value:,}"
    digits = 1 if abs(value) >= 10 else 2 if abs(value) >= 1.5 else 4 if key.startswith("mmd") else 3
    spread = row.get(f"{key}_sd", 0.0)
    return f"{value:.{digits}f}" + (f" ± {spread:.{digits}f}" if spread >= 0.5 * 10**-digits else "")


def named(row: dict) -> str:
    """An arm in words, with what its row has to say; of ours with masked genes, that their ranks are given."""
    words = [NAMES.get(row["arm"], row["arm"])]
    ours = row["arm"].startswith("ours") or row["arm"] == "masked_30"
    if row["part"] in ("masked", "paper") and ours and row["arm"] != UNRANKED:
        words.append(RANKED)
    if "epochs" in row:
        words.append(f"{row['epochs']} epochs")
    return "; ".join([*words, *([row["note"]] if "note" in row else [])])


def lines(rows: list[dict], columns: dict[str, str]) -> str:
    """A table of these rows."""
    body = [
        [
            f"{row['set']} ({row['n_cells']:,})",
            named(row),
            *(figure(row, key) for key in columns),
        ]
        for row in rows
    ]
    header = ["set (cells)", "", *columns.values()]
    return in_two(header, body, 2, 8) if len(columns) > 9 else table(header, body)


def reconstruction_tables(result: dict) -> list[str]:
    """A table for each part that was run."""
    rows = [row for row in result["rows"] if "part" in row]
    masked, drawn = (
        [row for row in rows if row["part"] == "masked"], [row for row in rows if row["part"] == "population"]
    )  # fmt: skip
    of = {
        "masked": lines([row for row in masked if row["arm"] in ONE_STEP], MASKED),
        "steps": lines([row for row in masked if row["arm"] not in ONE_STEP], STEPS),
        "paper": paper([row for row in rows if row["part"] == "paper"]),
        "impute": lines([row for row in rows if row["part"] == "impute"], IMPUTED),
        "population": lines([row for row in drawn if row["arm"] != "by_type"], DRAWN),
        "types": types([row for row in drawn if row["arm"] == "by_type"]),
        "likelihood": lines([row for row in rows if row["part"] == "likelihood"], LIKELY),
    }
    # a header and its rule are no rows
    return [f"### {TITLES[key]}\n\n{WORDS_OF[key]}\n\n{text}" for key, text in of.items() if text.count("\n") > 2]


def paper(rows: list[dict]) -> str:
    """The paper's figures, then ours; nothing where ours were not made."""
    if not rows:
        return ""
    theirs = [
        [name, model, f"{l_dist}", f"{bleu:.3f}", f"{spearman:.3f}"]
        for name, figures in PAPER_TABLE_1.items()
        for model, (l_dist, bleu, spearman) in zip(PAPER_MODELS, figures, strict=True)
    ]
    ours = [
        [row["set"], named(row), *(figure(row, key) for key in ("l_dist", "bleu", "value_spearman"))] for row in rows
    ]
    theirs = [[name, f"{model} (paper)", *figures] for name, model, *figures in theirs]
    return table(["set", "", "L-Dist", "BLEU", "Spearman"], theirs + ours)


def types(rows: list[dict]) -> str:
    """Share of drawn cells that are named as their type, beside that of real cells."""
    body = [
        [row["set"], kind, f"{share:.2f}", f"{row['real_each'][kind]:.2f}"]
        for row in rows
        for kind, share in {**row["each"]}.items()
    ]
    return table(["set", "type", "drawn", "held-out real cells"], body)


def goals(rows: list[dict]) -> list[dict]:
    """What has not been run on both sides is not judged."""
    found: list[dict] = []
    for name in dict.fromkeys(row["set"] for row in rows):
        of = {
            part: {row["arm"]: row for row in rows if (row["set"], row["part"]) == (name, part)}
            for part in ("masked", "impute", "population", "likelihood")
        }
        for rival in ("marginals", "type_means"):
            for key, what in (("masked_recall", "recall at one step"), ("known_spearman", "Spearman of masked values")):
                found += _lead(f"{name}: {what}, above {NAMES[rival]}", of["masked"], rival, key)
        for rival in ("knn", "diffused", "scvi"):
            found += _lead(f"{name}: imputation, Spearman per cell above {NAMES[rival]}", of["impute"], rival,
                           "spearman_cell", own="ours")  # fmt: skip
            found += _lead(f"{name}: imputation, RMSE of what is expressed below {NAMES[rival]}", of["impute"], rival,
                           "rmse_shown", -1, own="ours")  # fmt: skip
        found += _drawn(name, of["population"]) + _likely(name, of["likelihood"])
    return found


def _lead(what: str, arms: dict[str, dict], rival: str, key: str, sign: int = 1, own: str = UNRANKED) -> list[dict]:
    """Ours less the rival's, or the other way round for an error; what others of ours have stands beside.

    Masked genes and values are judged where nothing says at which rank they stood.
    """
    if not all(key in arms.get(arm, {}) for arm in (own, rival)):
        return []
    ours, theirs = (of_row(arms[arm], key, ddof=1) for arm in (own, rival))
    others = {"ranks_given": arms["ours"][key]} if own == UNRANKED and "ours" in arms else {}
    pair = (ours, theirs) if sign > 0 else (theirs, ours)
    return [judge(what, *pair, at_least=0.0, ours=ours.value, theirs=theirs.value, **others)]


def _forest(row: dict) -> Score:
    """The forest's AUROC, over seeds or as one of as many drawn and real cells."""
    return of_row(row, "forest", 1, auroc_error(row["forest"], row["n_cells"]))


def _drawn(name: str, arms: dict[str, dict]) -> list[dict]:
    found = []
    if "ours" in arms:
        ours = arms["ours"]
        found.append(judge(f"{name}: AUROC of the forest, drawn cells", _forest(ours), at_most=MOST_FOREST))
        found.append(goal(f"{name}: exact copies", ours["exact_copies"], at_most=0, counted=True))
        found.append(judge(f"{name}: share nearer to a real cell than real ones",
                           share_of_cells(ours, "share_closer", 1), at_most=MOST_CLOSER))  # fmt: skip
    if "independent" in arms:
        found.append(judge(f"{name}: AUROC of the forest, genes resampled one by one", _forest(arms["independent"]),
                           at_least=LEAST_INDEPENDENT))  # fmt: skip
    if {"transformer_1", "transformer_32"} <= set(arms):
        one, many = arms["transformer_1"], arms["transformer_32"]
        noise = max(abs(one["mmd_floor"]), arms.get("ours_few", {}).get("mmd_sd", 0.0))
        what = f"{name}: MMD² of 32 steps less that of one (at most the larger of floor and spread)"
        pair = of_row(many, "mmd", 1), of_row(one, "mmd", 1)
        found.append(judge(what, *pair, at_most=noise, one=one["mmd"], many=many["mmd"]))
    if "by_type" in arms:
        own = arms["by_type"]
        what = f"{name}: drawn cells named as their type, mean over types"
        of_all = share_of_cells(own, "own_type", 1)
        found.append(judge(what, of_all, at_least=LEAST_OWN, real=own["real_own_type"]))
        of_type = round(own["n_cells"] / len(own["each"]))
        for kind, share in own["each"].items():
            score = Score(share, over="one run", of_cells=share_error(share, of_type), n_cells=of_type)
            found.append(judge(f"{name}: drawn cells named as their type, {kind}", score, at_least=LEAST_OWN,
                               real=own["real_each"][kind]))  # fmt: skip
    return found


def _likely(name: str, arms: dict[str, dict]) -> list[dict]:
    found = []
    for arm, row in arms.items():
        what = f"{name}: likelihood, {NAMES[arm]}"
        auroc = of_row(row, "auroc_shuffled", 1, auroc_error(row["auroc_shuffled"], row["n_cells"]))
        found.append(judge(f"{what}: AUROC of real cells, same counts in other genes", auroc, at_least=LEAST_AUROC))
        pair = (of_row(row, f"bound_{kind}", 1, row.get(f"bound_{kind}_error")) for kind in ("real", "doublets"))
        found.append(judge(f"{what}: nats a gene of real cells above doublets", *pair, at_least=0.0,
                           auroc=row["auroc_doublets"]))  # fmt: skip
    return found
