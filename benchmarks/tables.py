"""Turn `results/*.json` into the tables of the docs and of the model card, so that no figure is typed by hand.

    python benchmarks/tables.py

writes `docs/benchmarks.md`, one page with a figure and a short table a task, `docs/which_model.md`, all methods side by
side, `docs/results/`, a page of all tables a topic, the plan in `docs/scaling.md`, and the figures that they show; a
test holds the committed ones to the committed results.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path

from _ablation_table import ablation
from _about import ABOUT, CHOSEN, JUDGED
from _annotation_table import annotation_tables, literature
from _curves import attempts, learning_curve, learning_curve_mouse, sister_studies
from _denoising_table import ABOUT as ABOUT_DENOISING
from _denoising_table import WRITERS as DENOISING_WRITERS
from _embedding_table import embedding_tables
from _face_table import face as face_table
from _few_genes_table import few_genes
from _finetuning_table import finetuning
from _grn_table import grn_tables
from _grn_table import reported as named_by_the_paper
from _integration_table import integration_tables, paper, transform_batch_table
from _markdown import arm_name, table
from _perturbation_table import perturbation_attempts, perturbation_tables, reported
from _plan import filled
from _reconstruction_table import reconstruction_tables
from _rejection_table import rejection_table
from _scaling_table import FIGURE as SCALING_FIGURE
from _scaling_table import draw_scaling, scaling_tables
from _summary import draw_summaries, summary
from _thinning_figure import FIGURE, THINNED, draw_thinning
from _timing import KNOWN, verdict
from _weights import notes, of_model, refused
from _which_model import which_model

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"
TOPICS = {
    "embedding": (
        "Embedding and adapting",
        ("embedding", "pooling", "state_arms", "sister_studies", "thinning", "few_genes"),
    ),
    "integration": ("Integration", ("integration", "transform_batch")),
    "annotation": ("Annotation", ("annotation", "rejection")),
    "perturbation": ("Perturbation", ("perturbation", "perturbation_attempts")),
    "networks": ("Gene networks", ("grn",)),
    "generation": ("Reconstruction, imputation, generation", ("reconstruction", *ABOUT_DENOISING)),
    "finetuning": ("Fine-tuning", ("finetuning",)),
    "training": ("Training", ("ablation", "learning_curve", "learning_curve_mouse", "attempts")),
    "waiting": ("What a user waits for", ("face",)),
    "speed": (
        "Speed and memory",
        (
            *("scaling", "embedding_speed", "training", "billion", "serialisation", "loss"),
            *("packing", "loading", "sources", "activations", "gpu", "gpu_fit", "gpu_partial", "aot"),
        ),
    ),
    "reliability": ("Faults and fuzzing", ("faults", "faults_long", "fuzz")),
}
"""Pages of tables: title, and the results that stand there. A result of no topic goes to the last."""
ARMS = {
    "scdiva": "scdiva-mini, zero-shot",
    "linear": "its linear part alone",
    "svd": "corpus SVD, zero-shot",
    "pca": "PCA fitted on the set",
    "scvi": "scVI fitted on the set",
}


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
    return "".join(f"\nLeft out: {ARMS.get(arm, arm)}; {why}.\n" for arm, why in result.get("left_out", {}).items())


def embedding(result: dict) -> str:
    """Means and differences of each group, scores of each dataset, and the goals."""
    return with_goals(result, embedding_tables(result), "Goals of embedding")


def mouse(result: dict) -> str:
    """Scores with cells of mice in training and without, then whether they help."""
    return with_goals(result, [learning_curve_mouse(result)])


def thinning(result: dict) -> str:
    """The figure, the goals, and the figures that it is drawn from."""
    rows = [
        [f"{row['set']} ({row['n_cells']:,})", arm_name(row, ARMS), f"{row['depth']:.0%}",
         *(spread(row, key) for key in THINNED)]
        for row in result["rows"]
        if "arm" in row
    ]  # fmt: skip
    figure = f"![Thinned cells: centred cosine and accuracy by depth](../{FIGURE.parent.name}/{FIGURE.name})\n"
    header = ["set (cells asked about)", "embedding", "depth", *THINNED.values()]
    judged = [row for row in result["rows"] if "met" in row]
    return "\n".join([figure, *([goals(judged)] if judged else []), table(header, rows) + without(result)])


def read_outs(result: dict) -> str:
    """Scores of each set and read-out, and the goals if there are any."""
    measures = {"accuracy": "15-NN accuracy", "average_bio": "mean of NMI, ARI, ASW"}
    rows = [
        [
            f"{row['set']} ({row['n_cells']:,})",
            f"`{row.get('pooling') or row['arm']}`",
            *(spread(row, key) for key in measures),
        ]
        for row in result["rows"]
        if "set" in row
    ]
    return with_goals(result, [table(["set (cells scored)", "read-out", *measures.values()], rows)])


def fingerprint(result: dict) -> str:
    """What a figure was drawn from, to be kept in it."""
    return hashlib.sha256(json.dumps(result["rows"], sort_keys=True).encode()).hexdigest()


def with_goals(result: dict, parts: list[str], title: str = "", others: str = "") -> str:
    """The tables of a result, its goals under a title if there is one, and the figures of others."""
    judged = [row for row in result["rows"] if "met" in row]
    held = (f"### {title}\n\n" if title else "") + goals(judged) if judged else ""
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


def grn(result: dict) -> str:
    """Scores of each part, the goals, and what the paper says."""
    return with_goals(result, grn_tables(result), "Goals of networks", named_by_the_paper(result))


def reconstruction(result: dict) -> str:
    """Scores of each part, and the goals."""
    return with_goals(result, reconstruction_tables(result), "Goals of reconstruction")


def scaling(result: dict) -> str:
    """The figure and its figures, and the goals."""
    return with_goals(result, scaling_tables(result), "Goals of scaling")


def face(result: dict) -> str:
    """Seconds of each call, and the goals."""
    return with_goals(result, [face_table(result)], "Goals of waiting")


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
    """Rows of `_timing.goal`: the figure, its interval, its goal, whether it was met; `details` are beside."""
    lines = []
    for row in rows:
        sign, bound = ("≥", row["at_least"]) if "at_least" in row else ("≤", row["at_most"])
        words = "**missed**" if (words := verdict(row)) == "missed" else words
        measured = [said(row["what"]), said(row["value"]), interval(row), f"{sign} {said(float(bound))}"]
        lines.append([*measured, words, details(row)])
    header = ["what", "measured", "95% interval", "goal", "", ""]
    if not any(line[-1] for line in lines):
        header, lines = header[:-1], [line[:-1] for line in lines]
    return table(header, lines)


def label(key: str) -> str:
    """A field of a row as a heading: `peak_mib` is "peak MiB"."""
    words = {"mib": "MiB", "gib": "GiB", "tflops": "TFLOP/s"}
    return "measured" if key == "value" else " ".join(words.get(word, word) for word in key.split("_"))


def details(row: dict) -> str:
    """Everything of a row that has no column of its own."""
    known = (*KNOWN, "section")
    return ", ".join(f"{label(key)} {said(value)}" for key, value in row.items() if key not in known)


def interval(row: dict) -> str:
    """The interval that a goal was judged by, and what was repeated."""
    if "interval" not in row:
        return "counted" if row.get("over") == "counted" else "-"
    low, high = (said(float(end)) for end in row["interval"])
    return f"{low} to {high} ({row['over']})"


def tally(rows: list[dict]) -> str:
    """How many goals are met, missed and within noise, in a sentence."""
    kinds = {"met": "met", "missed": "missed", "within noise": "within noise"}
    found = Counter(kinds.get(verdict(row), "of one run or a spread that was not kept") for row in rows)
    parts = [f"{found[kind]} {kind}" for kind in (*kinds.values(), "of one run or a spread that was not kept")]
    return f"Of the {len(rows)} goals {', '.join(parts[:-1])}, and {parts[-1]}."


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


def faults(result: dict) -> str:
    """What was tried and lost, and the hashes of runs that are compared."""
    keys = ("fault", "tried", "bit_exact", "lost")
    text = table(["fault", "tried", "bit-exact", "lost"], [[str(row[key]) for key in keys] for row in result["rows"]])
    for row in result["rows"]:
        if "sha256" in row:
            one, other = row["sha256"]
            text += f"\n\n{row['steps']} steps, {row['minutes']} minutes: `{one}` without kills, `{other}` with two."
    return text + f"\n\n{result['seconds']} seconds in all."


def fuzz(result: dict) -> str:
    """The goals, then what became of each target's executions."""
    rows = [row for row in result["rows"] if "met" not in row]
    keys = ("executions", "accepted", "refused", "ways", "crashes", "executed", "slowest_s", "seconds")
    header = ["target", *keys[:6], "slowest, s", "seconds", "commit"]
    text = table(header, [[row["what"], *(said(row[key]) for key in keys), f"`{row['commit'][:12]}`"] for row in rows])
    return goals([row for row in result["rows"] if "met" in row]) + "\n" + text


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


NO_GPU = (
    "No GPU was at hand when this page was made; `python benchmarks/gpu.py` fills this section on a machine with one."
)


WRITERS = {
    **DENOISING_WRITERS,
    "few_genes": few_genes,
    "finetuning": finetuning,
    "embedding": embedding,
    "integration": integration,
    "transform_batch": transform_batch_table,
    "annotation": annotation,
    "rejection": rejection_table,
    "perturbation": perturbation,
    "perturbation_attempts": perturbation_attempts,
    "grn": grn,
    "reconstruction": reconstruction,
    "thinning": thinning,
    "pooling": read_outs,
    "state_arms": read_outs,
    "sister_studies": sister_studies,
    "ablation": ablation,
    "learning_curve": learning_curve,
    "learning_curve_mouse": mouse,
    "attempts": attempts,
    "scaling": scaling,
    "face": face,
    "faults": faults,
    "faults_long": faults,
    "fuzz": fuzz,
}
"""Results that are more than rows of figures."""


def section(name: str) -> str:
    """What stands on a page of one result; nothing where it was not run yet."""
    title, words = ABOUT.get(name, (name.replace("_", " ").capitalize(), ""))
    result = load(name)
    if result is None:
        return f"## {title}\n\n{NO_GPU}\n" if name == "gpu" else ""
    body = WRITERS.get(name, rows_of)(result)
    chosen = f"**Chosen on these sets:** {CHOSEN[name]}" if name in CHOSEN else ""
    texts = (f"## {title}", words, chosen, body.strip(), notes(result["rows"]).strip(), surroundings(result))
    return "\n\n".join(text for text in texts if text)


def pages() -> dict[str, str]:
    """The benchmarks page, those of all tables, and the plan of scaling.md, by their paths in the docs."""
    results = {path.stem: load(path.stem) for path in sorted(RESULTS.glob("*.json"))}
    judged = [row for result in results.values() for row in result["rows"] if "met" in row]  # type: ignore[index]
    links = "".join(f"- [{title}](results/{topic}.md)\n" for topic, (title, _) in TOPICS.items())
    front = [
        "# Benchmarks\n",
        "The lead of scdiva over what a user would pick instead, on the same cells, splits and seeds. Green: the goal "
        "is met; grey: within noise; orange: missed.\n",
        summary(results),  # type: ignore[arg-type]
        f"## All tables\n\n{links}",
        f"## How goals are judged\n\n{JUDGED} {tally(judged)}\n",
        "Every figure is generated by `python benchmarks/tables.py` from `benchmarks/results`, which the scripts named "
        "on the pages write. `make bench` runs those of speed and memory at small sizes, records nothing, and fails "
        "where a goal is missed, not where it is within noise.\n",
    ]
    found = {"benchmarks.md": "\n".join(front), "which_model.md": which_model(results)}  # type: ignore[arg-type]
    rest = [name for name in results if all(name not in names for _, names in TOPICS.values())]
    for topic, (title, names) in TOPICS.items():
        some = [*names, *(rest if topic == list(TOPICS)[-1] else [])]
        found[f"results/{topic}.md"] = "\n".join([f"# {title}\n", *(text for name in some if (text := section(name)))])
    if results.keys() >= {"training", "scaling"}:
        found["scaling.md"] = filled((DOCS / "scaling.md").read_text(encoding="utf-8"), results)  # type: ignore[arg-type]
    return found


def of_other_weights() -> list[str]:
    """Rows of all results whose weights are not those shipped and that don't say why."""
    names = sorted(path.stem for path in RESULTS.glob("*.json"))
    return [row for name in names for row in refused(name, load(name)["rows"], of_model())]  # type: ignore[index]


def main() -> int:
    """Write the pages and the figures, if every row is of the weights that are shipped or says why it is not."""
    if rows := of_other_weights():
        print(f"{len(rows)} rows are not of the weights that are shipped; nothing was written:", file=sys.stderr)
        print("\n".join(f"  {row}" for row in rows), file=sys.stderr)
        print("Make them anew, or give each a weights_note that says why it stays.", file=sys.stderr)
        return 1
    (DOCS / "results").mkdir(exist_ok=True)
    for path, text in pages().items():
        (DOCS / path).write_text(text, encoding="utf-8")
    results = {path.stem: load(path.stem) for path in RESULTS.glob("*.json")}
    draw_summaries(results, DOCS / "_static", {name: fingerprint(result) for name, result in results.items()})
    if (result := load("thinning")) is not None:
        draw_thinning(result, FIGURE, ARMS, fingerprint(result))
    if (result := load("scaling")) is not None:
        draw_scaling(result, SCALING_FIGURE, fingerprint(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
