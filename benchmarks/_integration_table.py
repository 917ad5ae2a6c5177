"""The part of the benchmarks page on integration, and what the paper prints of it."""

from __future__ import annotations

from _markdown import arm_name, in_two, table

INTEGRATED = {
    "ours": "`tl.integrate`",
    "ours_hvg": "`tl.integrate` on the rivals' 2,000 genes",
    "own_components": "`tl.integrate` without the model: own components alone",
    "teacher": "its teacher alone: cluster-wise correction, nothing trained",
    "scdiva": "scdiva-mini, zero-shot",
    "pca": "PCA",
    "combat": "ComBat, PCA",
    "harmony": "Harmony",
    "scvi": "scVI",
    "scanvi": "scANVI",
    "scarches": "scArches (scANVI surgery)",
    "apart": "no method: types kept apart, batches mixed",
}
MIXED = {
    "accuracy": "15-NN accuracy", "nmi": "NMI", "ari": "ARI", "asw": "ASW", "average_bio": "mean of NMI, ARI, ASW",
    "ilisi": "iLISI (batches shuffled)", "ilisi_even": "iLISI, unweighted (shuffled)", "batch_asw": "batch ASW",
    "avg_batch": "Avg-batch (paper)",
}  # fmt: skip
CARRIED = {
    "accuracy": "15-NN accuracy", "macro_f1": "macro-F1", "own_accuracy": "own classifier: accuracy",
    "own_macro_f1": "macro-F1", "average_bio": "mean of NMI, ARI, ASW",
}  # fmt: skip
COSTS = {"cpu_seconds": "CPU seconds", "wall_seconds": "seconds", "peak_mib": "peak MiB"}
PARTS = {
    "unlabelled": ("Without labels", "cells scored"),
    "labelled": ("Half of the labels hidden", "cells hidden"),
    "query": ("A batch that comes later", "its cells"),
}

PAPER_METHODS = ("Harmony", "Geneformer", "scGPT", "scFoundation", "GeneMamba", "scDiVa")
PAPER_TABLE_2 = {
    "Avg-batch": {
        "Immune": (0.9514, 0.8153, 0.9194, 0.8904, 0.9536, 0.9555),
        "PBMC12k": (0.9341, 0.9545, 0.9755, 0.9628, 0.9604, 0.9960),
        "BMMC": (0.8999, 0.7720, 0.8431, 0.7598, 0.9157, 0.9734),
        "Perirhinal Cortex": (0.9442, 0.9127, 0.9600, 0.9560, 0.9673, 0.9542),
        "COVID-19": (0.8781, 0.8240, 0.8625, 0.8346, 0.8742, 0.9538),
    },
    "Avg-bio": {
        "Immune": (0.6945, 0.6983, 0.7879, 0.7337, 0.8131, 0.7785),
        "PBMC12k": (0.7990, 0.7891, 0.9018, 0.8662, 0.8344, 0.9566),
        "BMMC": (0.6316, 0.6324, 0.6576, 0.5250, 0.7628, 0.8712),
        "Perirhinal Cortex": (0.8595, 0.8547, 0.9552, 0.9606, 0.9062, 0.9895),
        "COVID-19": (0.4468, 0.5567, 0.6476, 0.5468, 0.5537, 0.6689),
    },
}
"""Table 2 of the scDiVa paper ("Benchmark results of the models on multi-batch experiments with BATCH and Cell
metrics"), as printed, a column for each of `PAPER_METHODS`; none of it was measured here."""
PAPER_WORDS = (
    "From Table 2 of the scDiVa paper, as printed there; nothing of it was measured here, and neither its weights nor "
    "these sets come with this package. The paper fine-tuned scDiVa with labels (SupCon), and Avg-bio scores labels; "
    "Harmony is given none. `benchmarks/integration.py --h5ad FILE --batch-key B --labels-key L` runs all arms "
    "above on a file of one's own."
)
WORDS = (
    "The same cells for all, at most 6,000 of a set. Rivals take the same 2,000 highly variable genes: PCA, ComBat "
    "and Harmony log-normalised and scaled, 50 components, Harmony with the defaults of harmonypy; scVI raw "
    "counts, default architecture and epochs, early stopping. `tl.integrate` is given all genes. "
    "iLISI is the median over cells of the inverse Simpson index of the 90 nearest neighbours' batches, "
    "scaled to 0..1; weighted to a perplexity of 30, or unweighted; in brackets what batches dealt out at random "
    "would score. Batch ASW (within types) is scib's. Seeds draw the fits, folds and "
    "clusters, and which labels are hidden; a rival's fit of more than a minute is made once, as is a query's. "
    "scANVI starts from that scVI, its seconds included. scArches fits scVI and scANVI on the other batches as "
    "the tutorial of scvi-tools does it, then the query by surgery, default epochs. Types are carried over by the "
    "15 nearest neighbours; scANVI's and scArches' own classifier stands beside. Each fit ran on one thread in a "
    "process of its own, peak MiB is all that it held, libraries included; the machine had other work to do."
)


def value(row: dict, key: str) -> str:
    """A mean over seeds with its deviation where it shows; of iLISI also what shuffled batches would score."""
    if key not in row:
        return "-"
    deviation = row[f"{key}_sd"]
    text = f"{row[key]:.3f}" + (f" ± {deviation:.3f}" if deviation >= 0.0005 else "")
    if (ceiling := row.get(f"{key}_shuffled")) is not None:
        text += f" ({ceiling:.3f})"
    return text


def part_table(rows: list[dict], part: str) -> str:
    """Scores and costs of a part's rows; measures that none of them has get no column."""
    title, counted = PARTS[part]
    measures = MIXED if part == "unlabelled" else CARRIED
    keys = [key for key in measures if any(key in row for row in rows)]
    lines = [
        [
            f"{row['set']}{', ' + row['left_out'] if 'left_out' in row else ''} ({row['n_cells']:,})",
            arm_name(row, INTEGRATED),
            *(value(row, key) for key in keys),
            *(f"{row[key]:,.1f}" if key != "peak_mib" else f"{row[key]:,.0f}" for key in COSTS),
        ]
        for row in rows
    ]
    header = [f"set ({counted})", "method", *(measures[key] for key in keys), *COSTS.values()]
    wide = part == "unlabelled"
    return f"### {title}\n\n{in_two(header, lines, 2, 7) if wide else table(header, lines)}"


def made_at(rows: list[dict]) -> str:
    """With which packages, at which commits and on what the rows were made: not all need be of one call."""
    packages = ", ".join(sorted({row["package"] for row in rows}))
    commits = ", ".join(
        f"`{commit[:12]}`{' with changes' if commit.endswith('+changes') else ''}"
        for commit in dict.fromkeys(row["commit"] for row in rows)
    )
    return (
        f"Rows were made at commits {commits}, on {', '.join(sorted({row['processor'] for row in rows}))}: {packages}."
    )


def origins(rows: list[dict]) -> str:
    """Where the rows come from, and which arms were fitted once."""
    once = sorted(
        {
            arm_name(row, INTEGRATED)
            for row in rows
            if row["fits"] < len(row["seeds"]) and row.keys() & {"epochs", "strategy"}
        }
    )
    return made_at(rows) + (f" Fitted once for all seeds on some sets: {', '.join(once)}." if once else "") + "\n"


def paper() -> str:
    """The paper's table, marked as such."""
    lines = [
        [f"{measure}, {name}", *(f"{value:.4f}" for value in values)]
        for measure, sets in PAPER_TABLE_2.items()
        for name, values in sets.items()
    ]
    header = ["the paper's figures", *PAPER_METHODS]
    return f"### What the paper reports\n\n{PAPER_WORDS}\n\n{table(header, lines)}"


APART_WORDS = (
    "The last row of each set is no method: it is given the types, puts each in a place of its own, its cells there in "
    "no order. Its iLISI is what perfect mixing within types gives; more takes cells of other types for neighbours.\n"
)


def integration_tables(result: dict) -> list[str]:
    """The tables of each part that was run, what they were made with, and arms left out."""
    rows = [row for row in result["rows"] if "arm" in row]
    parts = {part: [row for row in rows if row["part"] == part] for part in PARTS}
    found = [part_table(some, part) for part, some in parts.items() if some]
    if any(row["arm"] == "apart" for row in parts["unlabelled"]):
        found.insert(1, APART_WORDS)
    missing = [f"Left out: {INTEGRATED.get(arm, arm)}; {why}.\n" for arm, why in result.get("left_out", {}).items()]
    return [*found, *([origins(rows)] if rows else []), *missing]


def transform_batch_table(result: dict) -> str:
    """Errors of predicting one batch's cells in another, by set and arm."""
    names = {
        "ours": "`tl.corrected_expression` in the batch",
        "mean_shift": "shift of each gene's mean",
        "no_batch": "`tl.corrected_expression`, no batch",
        "uncorrected": "uncorrected",
        "own_half": "the batch's own other half",
    }
    rows = []
    for row in result["rows"]:
        ahead = f"{row['ahead']:.3f} ({row['ahead_low']:.3f} to {row['ahead_high']:.3f})"
        shift = row["arm"] == "mean_shift"
        figures = [f"{row['rmse']:.3f}", "" if shift else ahead, "" if shift else f"{row['nearer']:.0%}"]
        within = f"{row['within']:.0%}" if "within" in row else ""
        rows.append([row["set"], row["setting"], names[row["arm"]], *figures, within])
    return table(["set", "type", "arm", "RMSE", "ahead of the shift", "nearer", "in 1.96 sd"], rows)
