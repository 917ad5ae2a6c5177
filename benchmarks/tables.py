"""Turn `results/*.json` into the tables of the docs and of the model card, so that no figure is typed by hand.

    python benchmarks/tables.py

writes `docs/benchmarks.md` and the figure that it shows; a test holds the committed ones to the committed results.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from _ablation_table import ablation
from _annotation_table import WORDS as ANNOTATION_WORDS
from _annotation_table import annotation_tables, literature
from _curves import adapt_held_out, attempts, learning_curve
from _integration_table import WORDS as INTEGRATION_WORDS
from _integration_table import integration_tables, paper
from _markdown import table
from _perturbation_table import WORDS as PERTURBATION_WORDS
from _perturbation_table import perturbation_tables, reported

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
FIGURE = PAGE.parent / "_static" / "thinning.png"
SCORES = {"accuracy": "15-NN accuracy", "macro_f1": "macro-F1", "nmi": "NMI", "ari": "ARI", "asw": "ASW"}
ARMS = {
    "scdiva": "scdiva-mini, zero-shot",
    "linear": "its linear part alone",
    "svd": "corpus SVD, zero-shot",
    "pca": "PCA fitted on the set",
    "adapted": "scdiva-mini, adapted to the set",
    "scvi": "scVI fitted on the set",
}
THINNED = {"cosine": "cosine", "cosine_centred": "cosine, centred", "accuracy": "15-NN accuracy"}


def load(name: str) -> dict | None:
    """Read a result; None where it was not run yet."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def spread(row: dict, key: str) -> str:
    """A mean over seeds, with its standard deviation where it shows."""
    deviation = row[f"{key}_sd"]
    return f"{row[key]:.3f}" + (f" ± {deviation:.3f}" if deviation >= 0.0005 else "")


def without(result: dict) -> str:
    """Which arms are missing in a result, and why."""
    return "".join(f"\nLeft out: {ARMS[arm]}; {why}.\n" for arm, why in result.get("left_out", {}).items())


def zero_shot(result: dict) -> str:
    """Scores of each set and arm, then the goals."""
    rows = [
        [
            f"{row['set']} ({row['n_cells']:,})",
            ARMS[row["arm"]],
            *(spread(row, key) for key in [*SCORES, "average_bio"]),
            f"{row['cpu_seconds']:.1f}",
        ]
        for row in result["rows"]
        if "arm" in row
    ]
    header = ["set (cells scored)", "embedding", *SCORES.values(), "mean of NMI, ARI, ASW", "CPU seconds"]
    judged = [row for row in result["rows"] if "met" in row]
    return table(header, rows) + without(result) + (f"\n{goals(judged)}" if judged else "")


def thinning(result: dict) -> str:
    """The figure, the goals, and the figures that it is drawn from."""
    rows = [
        [f"{row['set']} ({row['n_cells']:,})", ARMS[row["arm"]], f"{row['depth']:.0%}",
         *(spread(row, key) for key in THINNED)]
        for row in result["rows"]
        if "arm" in row
    ]  # fmt: skip
    figure = f"![Thinned cells: centred cosine and accuracy by depth]({FIGURE.parent.name}/{FIGURE.name})\n"
    header = ["set (cells asked about)", "embedding", "depth", *THINNED.values()]
    judged = [row for row in result["rows"] if "met" in row]
    return "\n".join([figure, *([goals(judged)] if judged else []), table(header, rows) + without(result)])


def pooling(result: dict) -> str:
    """Scores of each set and read-out."""
    measures = {"accuracy": "15-NN accuracy", "average_bio": "mean of NMI, ARI, ASW"}
    rows = [
        [f"{row['set']} ({row['n_cells']:,})", f"`{row['pooling']}`", *(spread(row, key) for key in measures)]
        for row in result["rows"]
    ]
    return table(["set (cells scored)", "read-out", *measures.values()], rows)


def fingerprint(result: dict) -> str:
    """What a figure was drawn from, to be kept in it."""
    return hashlib.sha256(json.dumps(result["rows"], sort_keys=True).encode()).hexdigest()


def draw_thinning(result: dict, file: Path) -> None:
    """Draw centred cosine and accuracy against depth, a column for each set. The same rows give the same file."""
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if "arm" in row]
    sets, measures = list(dict.fromkeys(row["set"] for row in rows)), ("cosine_centred", "accuracy")
    figure = Figure(figsize=(3.6 * len(sets), 5.6), layout="constrained")
    axes = figure.subplots(len(measures), len(sets), sharex=True, sharey="row", squeeze=False)
    for column, name in enumerate(sets):
        axes[0, column].set_title(name)
        axes[-1, column].set_xlabel("share of the counts kept")
        for arm in dict.fromkeys(row["arm"] for row in rows):
            some = [row for row in rows if (row["set"], row["arm"]) == (name, arm)]
            color = f"C{list(ARMS).index(arm)}"
            for axis, key in zip(axes[:, column], measures, strict=True):
                depths, values = [row["depth"] for row in some], [row[key] for row in some]
                axis.errorbar(
                    depths, values, [row[f"{key}_sd"] for row in some], color=color, marker="o", ms=4, label=ARMS[arm]
                )
    for axis, key in zip(axes[:, 0], measures, strict=True):
        axis.set_ylabel(THINNED[key])
    axes[0, 0].set_xscale("log")
    depths = sorted({row["depth"] for row in rows})
    axes[0, 0].set_xticks(depths, [f"{depth:.0%}" for depth in depths], minor=False)
    axes[0, 0].minorticks_off()
    axes[0, -1].legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=110, metadata={"Software": None, "Description": fingerprint(result)})


def with_goals(result: dict, parts: list[str], title: str, others: str) -> str:
    """The tables of a result, its goals under a title, and the figures of others."""
    judged = [row for row in result["rows"] if "met" in row]
    held = f"### {title}\n\n{goals(judged)}" if judged else ""
    return "\n".join(part for part in (*parts, held, others) if part)


def integration(result: dict) -> str:
    """Scores of each part, the goals, and what the paper reports."""
    return with_goals(result, integration_tables(result), "Goals", paper())


def annotation(result: dict) -> str:
    """Scores of each part, the goals, and what the paper and the literature report."""
    return with_goals(result, annotation_tables(result), "Goals of annotation", literature())


def perturbation(result: dict) -> str:
    """Scores of held-out responses, the goals, and what the paper and the literature report."""
    return with_goals(result, perturbation_tables(result), "Goals of perturbations", reported())


def memory(result: dict) -> str:
    """Peak memory of each size, and the goal that it stays flat."""
    rows = [
        [f"{row['n_cells']:,}" if row["n_cells"] else "0 (libraries and model)", f"{row['peak_mib']:,}",
         f"{row['cells_per_second']:,}" if "cells_per_second" in row else "-"]
        for row in result["rows"]
        if "n_cells" in row
    ]  # fmt: skip
    judged = [row for row in result["rows"] if "met" in row]
    flat = goals(judged) if judged else f"Largest to smallest: {result['ratio']:.3f}.\n"
    return f"{flat}\n{table(['cells', 'peak memory, MiB', 'cells per second'], rows)}"


def said(value: object) -> str:
    """A figure or a note as it stands in a table; numbers to four digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    text = value if isinstance(value, str) else f"`{json.dumps(value)}`"
    return text.replace("|", "\\|").replace("\n", " ")


def goals(rows: list[dict]) -> str:
    """Rows of `_timing.goal`: the figure, its goal, whether it was met. What was noted beside stands in `details`."""
    lines = []
    for row in rows:
        sign, bound = ("≥", row["at_least"]) if "at_least" in row else ("≤", row["at_most"])
        verdict = "met" if row["met"] else "**missed**"
        lines.append([said(row["what"]), said(row["value"]), f"{sign} {said(float(bound))}", verdict, details(row)])
    header = ["what", "measured", "goal", "", ""]
    if not any(line[-1] for line in lines):
        header, lines = header[:-1], [line[:-1] for line in lines]
    return table(header, lines)


def label(key: str) -> str:
    """A field of a row as a heading: `peak_mib` is "peak MiB"."""
    words = {"mib": "MiB", "gib": "GiB", "tflops": "TFLOP/s", "value": "measured"}
    return " ".join(words.get(word, word) for word in key.split("_"))


def details(row: dict) -> str:
    """Everything of a row that has no column of its own."""
    known = ("what", "value", "at_least", "at_most", "met", "section")
    return ", ".join(f"{label(key)} {said(value)}" for key, value in row.items() if key not in known)


def figures(rows: list[dict]) -> str:
    """Rows without a goal, those with the same kinds of figures in one table; many kinds are written as words."""
    alike: dict[tuple[str, ...], list[dict]] = {}
    for row in rows:
        alike.setdefault(tuple(key for key in row if key not in ("what", "section")), []).append(row)
    tables = []
    for keys, some in alike.items():
        if len(keys) > 6:
            tables.append(table(["what", ""], [[said(row["what"]), _all(row)] for row in some]))
        else:
            header = ["what", *(label(key) for key in keys)]
            tables.append(table(header, [[said(row["what"]), *(said(row[key]) for key in keys)] for row in some]))
    return "\n".join(tables)


def _all(row: dict) -> str:
    first = [said(row["value"])] if "value" in row else []
    return ", ".join([*first, *([rest] if (rest := details(row)) else [])])


def rows_of(result: dict) -> str:
    """The tables of a result: for each of its sections, the goals, then the other figures."""
    parts = []
    for section in dict.fromkeys(row.get("section") for row in result["rows"]):
        rows = [row for row in result["rows"] if row.get("section") == section]
        if section:
            parts.append(f"### {str(section).capitalize()}\n")
        if judged := [row for row in rows if "met" in row]:
            parts.append(goals(judged))
        if others := [row for row in rows if "met" not in row]:
            parts.append(figures(others))
    return "\n".join(parts)


def origin(result: dict) -> str:
    """Where a result comes from, in one line."""
    machine = result["machine"]
    return (
        f"`{result['command']}`, commit `{result['commit'][:12]}`, {result['date']}, {machine['processor']} "
        f"({machine['cores']} cores)."
    )


def surroundings(result: dict) -> str:
    """The line below a table: command, commit, machine, versions. A commit with changes says so."""
    machine, line = result["machine"], origin(result)
    if result["commit"].endswith("+changes"):
        line += " The code had changes that are not in this commit."
    if "gpu" in machine:
        line += f" GPU: {machine['gpu']} ({machine['gpu_gib']} GiB), CUDA {machine['cuda']}."
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    return f"{line} Python {machine['python']}, {versions}.\n"


ABOUT = {
    "zero_shot": (
        "Zero-shot embedding",
        "The bundled model was trained on none of these cells and fits nothing; its linear part is the projection "
        "from which its set encoder starts. Adapted, `tl.adapt` has fitted it to the set, anew for each seed and "
        "told of no labels or batches. The corpus SVD is the plain one, study-centred, 4,000 genes and 64 "
        "directions, no network. PCA (2,000 highly variable genes, scaled, 50 components) and scVI (the same "
        "genes, raw counts, default architecture, epochs and early stopping) are fitted on each set, neither told "
        "of batches. Seeds shuffle the folds, the clusters and the sample of large sets; scVI is fitted anew for "
        "each only where that takes less than a minute. CPU seconds are of one fit and embedding, on a machine "
        "that had other work to do, which slows the fits of scVI most: read times as rough. Goals are on the sets "
        "of blood, the tissue of the corpus; where the tissue was not in it (pancreas, lung cancer lines), the "
        "set's own PCA separates the types better. Rows of rivals may be of an earlier commit, which the results "
        "file names. A mean that is no better for the model than for its linear part "
        "says that training added nothing there.",
    ),
    "pooling": (
        "Read-outs",
        "`pooling` of `tl.embed`: the cell state, the mean of the genes' final hidden states, both side by side. Each "
        "seed draws the cells anew. The transformer of the bundled model was trained for masked genes, not for this.",
    ),
    "adapt_held_out": (
        "Adapting to held-out studies",
        "How `tl.adapt` goes about it was chosen while looking at the sets above, so this is the fairer test: the "
        "labelled studies of the corpus, none of which, nor another of its publication, trained the model (the "
        "base set encoder of the ablation), and on which nothing of it was chosen.",
    ),
    "integration": ("Integrating batches", INTEGRATION_WORDS),
    "annotation": ("Annotating cell types", ANNOTATION_WORDS),
    "perturbation": ("Responses to perturbations", PERTURBATION_WORDS),
    "thinning": (
        "Sequenced less deep",
        "Of every count c, Binomial(c, depth) are kept, in half of the labelled cells of a set. Cosine of their "
        "embeddings to those at full depth, mean over cells, as they stand and with the mean of all full-depth "
        "embeddings taken off both (only these compare: a common offset makes any two cells look alike); accuracy of a "
        "15-NN fitted at full depth on the other half. scdiva-mini and the corpus SVD see nothing of the set; PCA and "
        "scVI are fitted on all of its cells at full depth. Rows of rivals may be of an earlier commit, which the "
        "results file names. Seeds part and thin the cells.",
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
        "favours none. Guessing all genes alike costs ln 6,000 = 8.70 nats: among figures above it, a lower one "
        "only means that less was learned of something else. A value error near 1 is that of the mean. Mean ± "
        "standard deviation over seeds, in brackets the difference to the base (first line), bold where it is more "
        "than two standard errors of the differences within seeds, an arm's own error taken as no smaller than the "
        "family's median. With so many comparisons a few are bold by chance. Diffusion arms leave the cell state "
        "to the set encoder: all have that of the base. Thinned counts are drawn from log-normalised values, a "
        "cell's smallest taken as one count. Budget, network, learning rate and batch size were settled after two "
        "earlier runs and probes on the same judges, whose rows are not here. A denoiser that guesses every gene "
        "of the vocabulary alike has 8.70 nats: at this budget it has hardly begun, and above that figure a better "
        "one has learned less, not more.",
    ),
    "learning_curve": (
        "Learning curves",
        "The set encoder trained as the bundled one's, on some of the cells of the corpus, or for some of the "
        "steps, and scored on the sets of the zero-shot table (up to 2,000 cells each, mean over the sets; mean ± "
        "standard deviation over seeds where there are several). Lines are fitted in the logarithm of the number; "
        "what they say beyond the largest is an extrapolation.",
    ),
    "attempts": (
        "What was tried on top",
        "One change of the set encoder each, trained on the whole corpus, scored as the learning curves are. What "
        "helps on held-out studies of the corpus (the ablation above) need not help here.",
    ),
    "memory": ("Memory", "Peak resident memory of `tl.embed_file` on the same cells, repeated on disk."),
    "embedding": (
        "Embedding on a CPU",
        "One thread, arms in turn, best CPU time of several rounds; only ratios within the run count.",
    ),
    "loss": (
        "Loss",
        "Forward and backward of the gene head. `full` computes the logits of all positions, half of them masked; "
        "`masked` those of the masked positions alone; `chunked` is `scdiva.diffusion.masked_cross_entropy`. One "
        "thread, arms in turn, best CPU time. Peak MiB are tensors above the start; resident MiB are a process of its "
        "own for each arm, a check by other means.",
    ),
    "activations": (
        "Activation memory",
        "What a training step of the paper's network keeps for backward, half of the genes masked: bytes per token by "
        "the part of the network during which a tensor was first saved, in eager mode on a CPU.",
    ),
    "gpu": (
        "GPU",
        "One call of `benchmarks/gpu.py`: arms in turn, device events, best of several samples. Where a goal was "
        "missed, the kernels that took the time stand beside it.",
    ),
}
"""Title and what to know, by result; a result that is not named here gets its own name and no words."""
NO_GPU = (
    "No GPU was at hand when this page was made; `python benchmarks/gpu.py` fills this section on a machine with one."
)


WRITERS = {
    "zero_shot": zero_shot,
    "integration": integration,
    "annotation": annotation,
    "perturbation": perturbation,
    "thinning": thinning,
    "pooling": pooling,
    "adapt_held_out": adapt_held_out,
    "ablation": ablation,
    "learning_curve": learning_curve,
    "attempts": attempts,
    "memory": memory,
}
"""Results that are more than rows of figures."""


def page() -> str:
    """The benchmarks page of the docs, from the results that there are."""
    parts = [
        "# Benchmarks\n",
        "Every figure here is generated by `python benchmarks/tables.py` from `benchmarks/results`, which the scripts "
        "named below write. `make bench` runs those that need no GPU and fails where a goal is missed; the goals of "
        "`zero_shot.py`, `integration.py`, `annotation.py`, `perturbation.py` and `thinning.py` fail a call only "
        "with `--strict`.\n",
    ]
    written = sorted(path.stem for path in RESULTS.glob("*.json"))
    for name in [*ABOUT, *(name for name in written if name not in ABOUT)]:
        title, words = ABOUT.get(name, (name.replace("_", " ").capitalize(), ""))
        result = load(name)
        if result is None:
            if name == "gpu":
                parts.append(f"## {title}\n\n{NO_GPU}\n")
            continue
        body = WRITERS.get(name, rows_of)(result)
        parts.append("\n\n".join(text for text in (f"## {title}", words, body.strip(), surroundings(result)) if text))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    if (result := load("thinning")) is not None:
        draw_thinning(result, FIGURE)
