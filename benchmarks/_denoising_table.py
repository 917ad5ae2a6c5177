"""The tables of what half of a cell's counts says of the other half."""

from __future__ import annotations

from statistics import mean

from _markdown import table
from _timing import verdict

WORDS = (
    "Cells of studies that nothing here was trained on, held out with all of their publications, are thinned to half "
    "of their counts. Each arm sees that half, less 15% of its genes. Presence: whether a gene not detected there is "
    "in the other half, as many genes that are as measured genes that neither half shows; log-loss in nats a query "
    "(ln 2 = 0.693 knows nothing) and average precision. Values: of the genes taken away, known to be expressed; "
    "Spearman over cells within genes, mean over genes asked of in twelve cells or more, and RMSE. No arm knows a "
    "rank. Every arm's log-odds are shifted in each cell so that its queries balance. `means`: gene means of 200 "
    "other cells of the study; `neighbors`: the 30 nearest of all other cells, with ten cells of their mean; "
    "`population`: the model's own state head, corrected gene by gene on all other cells, as in `tl.impute` but for "
    "its slopes in depth; `head_linear`, `head_mlp`: from the cell state to genes, trained on the same queries of the "
    "training studies; `head_offsets`: the latter, with an offset for each gene fitted to the queries of the 200 "
    "other cells; query heads alone, and with the 200 other cells as their context, nothing fitted; `with "
    "transformer`: a transformer without positions over the first 256 visible genes of the cell, which each query "
    "attends to; `errors of random size`: where there is no context, the errors that training adds to the state head "
    "are of one random size a batch, and 30% of the batches have none, not 20%; `set encoder's rows`: trained "
    "likewise, with two blocks in place of four, gates a third as wide, and genes known by their rows in the set "
    "encoder, for 6,000 steps and for 12,000, as many as the head without transformer. The model without these "
    "studies was made anew before these last arms, with the arms from `neighbors` to `head_offsets`: over all studies "
    "these differ from before by 0.001 nats and 0.005 in Spearman at most. `query head, errors of random size`: the "
    "head without transformer, trained anew with these errors. `values by transformer`: presence of that head, values "
    "of the transformer with the set encoder's rows, trained for both until step 28,000 and then for values alone; "
    "`values added by transformer`: a transformer that adds to the values of that head as it is, and also reads what "
    "the head knows of visible genes. `studies split`: the head with errors of random size, trained on 47 contexts, "
    "the 21 studies split by batch, donor and technology where a part has 32 cells. `scvi`: its defaults, fitted to "
    "what these cells show and all other cells. Goals, by a bootstrap over studies, and scores of each study stand "
    "here for the heads without transformer and for the longest run; the file of results has those of all arms."
)
ABOUT = {
    "denoising": ("Denoising in studies not seen", WORDS),
    "denoising_seen": (
        "Denoising in the studies that were trained on",
        "The same queries of studies that state head, query heads and transformer were trained on, of 250 cells and "
        "more: where a lead were larger here, more studies would help.",
    ),
    "denoising_controls": (
        "Denoising: what ranks of masked genes do to a transformer",
        "The same queries of the same studies, and a model without these studies made anew. Three transformers of "
        "masked diffusion of the bundled size, trained from random weights on its frozen set encoder and state head "
        "(`denoising_controls.py`): `true ranks`, masked genes keep their rank and a prior states what that says, as "
        "the bundled one was trained; `no ranks`, no positions; `masked genes last`, masked genes stand behind the "
        "visible ones in random order. Steps of each are as many as two CPU hours were to hold, by a trial before it; "
        "beside other processes they took longer. Presence: mean probability of the gene at masked positions, spread "
        "evenly among the visible genes or behind them; values: where the state head's value would rank the gene. "
        "`state_head`: the model's own, to which they add, as it is. `query head, errors of random size`: trained anew "
        "on this model, 12,000 steps. Arms were scored in several calls, on the same queries; the command is the last.",
    ),
    "denoising_hours": (
        "Denoising: a transformer over its CPU hours",
        "The same queries of the same studies, on the model of the section before. The transformer of `with "
        "transformer, set encoder's rows`, trained for values alone from random weights with its own head; presence is "
        "that of the head beside it, trained anew on this model. From 62,028 steps on batches hold 64 cells in "
        "place of 24. `H100`: six blocks of width 256 that read 512 genes, 748 steps "
        "of up to 384 cells in two minutes on a GPU; its CPU hours are of the process that drove it. "
        "Arms were scored in several calls, on the same queries; the command is the last.",
    ),
    "head_tasks": (
        "What tasks gain from the heads",
        "The twelve studies that nothing here was trained on, at most 200 cells of each and the genes that ten cells "
        "express, the same cells for all arms. `state head`: model without a query head; `query head`: with it, in "
        "context; `values by transformer`: values of the transformer with the set encoder's rows, "
        "44,000 steps. Imputation: a tenth of the entries above zero set to zero, and predicted by "
        "`tl.impute(expressed=True)`; Spearman over cells within genes asked of in twelve cells or more, and within "
        "cells. Generation: AUROC of a classifier that separates drawn cells from as many that were held out; lower is "
        "better, and a lead is a lower one. All arms are corrected by the cells learned from, so few that they are "
        "separated well. Doublets: two cells of different clusters summed, thinned to half; AUROC of what may mark "
        "them. Goals: bootstrap over studies.",
    ),
    "value_limits": (
        "How much of values can be known",
        "The same values of masked genes in the same studies. `one count`: the smallest value that the cell shows, "
        "which follows from its depth; `the other half`: counts of the gene in the half of the counts that no arm "
        "sees, an independent measurement. Where one or both are given, a value less one count is predicted by "
        "gradient boosting that rises with the prediction less one count, and with these counts; fitted to the other "
        "eleven studies. Spearman over cells within genes. Goals: bootstrap over studies.",
    ),
    "denoiser_speed": (
        "How fast transformers are trained",
        "Cells a CPU second of one thread, whole steps with AdamW, in turn. Masked diffusion: 16 cells of up to 512 "
        "genes. Queries: 24 cells, of which a transformer reads 256 genes for up to 320 values each, with up to 256 "
        "other cells as context. `tokens if padded`: tokens of a batch in which all cells are as long as its longest, "
        "over those that it holds; cells are packed, so these are not computed.",
    ),
}
HEAD, PRESENCE, SPLIT = "query head", "query head, errors of random size", "query head, studies split"
"""The bundled model's design, the head that a transformer's values are added to, and the same of studies split."""
SIMPLE = (
    "unigram", "means", "neighbors", "state_head", "population", "head_linear", "head_mlp", "head_offsets", "scvi",
)  # fmt: skip
"""Arms that no query head has part in."""
SCORES = {
    "log_loss": ("log-loss", 4),
    "average_precision": ("average precision", 3),
    "spearman": ("Spearman of values", 3),
    "rmse": ("RMSE of values", 3),
}
CPU_SECONDS = 0.38
"""Of a step of runs that did not count them, from 15,850 steps beside another process on the same core."""
TASK_SCORES = {
    "imputation": {
        "spearman_gene": ("Spearman within genes", 3),
        "spearman_cell": ("Spearman within cells", 3),
        "rmse": ("RMSE", 3),
    },
    "generation": {"forest": ("AUROC, forest", 3), "logistic": ("AUROC, logistic", 3)},
    "doublets": {"auroc": ("AUROC", 3)},
}


def denoising(result: dict) -> str:
    """Mean of each arm over the studies; goals, and the scores of each study, of the arms that matter."""
    arms, sets, at = _by_arm(result)
    longest = max(result["heads"], key=lambda name: result["heads"][name].get("steps_in_all", 0), default="")
    heads = [name for name in (HEAD, PRESENCE, SPLIT, longest) if name in arms]
    first = [arm for arm in SIMPLE if arm in arms] + [name + about for name in heads for about in ("", ", context")]
    ordered = [*first, *(arm for arm in arms if arm not in first)]
    rows = [row for arm in ordered for row in result["rows"] if row.get("arm") == arm]
    rows += [row for row in result["rows"] if "met" in row and _subject(row["what"]) in heads]
    parts = [of_arms({**result, "rows": rows}), curve(result)]
    for key in ("log_loss", "spearman"):
        for start in range(0, len(first), 8):  # side by side they would run off the page
            some = first[start : start + 8]
            each = [
                [f"{name} ({at[arms[0], name]['n_cells']})", *(_of(at.get((arm, name)), key) for arm in some)]
                for name in sets
            ]
            parts.append(table([f"{SCORES[key][0]}; study (cells)", *(f"`{arm}`" for arm in some)], each))
    return "\n".join(parts)


def _subject(what: str) -> str:
    """The head that a goal is about."""
    return what.partition(":")[0].removesuffix(", context")


def curve(result: dict) -> str:
    """What the transformer predicts of values after so many CPU hours, and its lead over the head without it."""
    _, sets, at = _by_arm(result)
    lead = {row["what"]: row for row in result["rows"] if "met" in row}
    rows = []
    for name, note in sorted(result["heads"].items(), key=lambda item: item[1].get("steps_in_all", 0)):
        if "steps_in_all" not in note or f"{name}: spearman ahead of {PRESENCE}" not in lead:  # a head alone
            continue
        steps = note["steps_in_all"]
        seconds = note.get("cpu_seconds_in_all", steps * CPU_SECONDS)
        cells = note.get("cells_in_all", steps * note["batch_size"])
        row = [f"{steps:,}", f"{cells:,}", f"{seconds / 3600:.1f}"]
        for about in ("", ", context"):
            row.append(f"{mean(at[name + about, one]['spearman'] for one in sets):.3f}")
            ahead = lead[f"{name}{about}: spearman ahead of {PRESENCE}{about}"]
            row.append(f"{ahead['value']:.4f}, {_interval(ahead)}")
        rows.append(row)
    ahead_of = "ahead of the head"
    header = ["steps", "cells seen", "CPU hours", "Spearman alone", ahead_of, "in context", ahead_of]
    return table(header, rows) if rows else ""


def of_hours(result: dict) -> str:
    """What a transformer predicts after so many CPU hours; mean of each arm over the studies, and goals."""
    return f"{curve(result)}\n{of_arms(result)}"


def _by_arm(result: dict) -> tuple[list[str], list[str], dict[tuple[str, str], dict]]:
    rows = [row for row in result["rows"] if "arm" in row]
    arms, sets = (list(dict.fromkeys(row[key] for row in rows)) for key in ("arm", "set"))
    return arms, sets, {(row["arm"], row["set"]): row for row in rows}


def of_arms(result: dict, scores: dict[str, tuple[str, int]] = SCORES) -> str:
    """Mean of each arm over the studies, and goals."""
    arms, sets, at = _by_arm(result)

    def figure(arm: str, key: str, digits: int) -> str:
        found = [at[arm, name][key] for name in sets if key in at.get((arm, name), {})]
        return f"{mean(found):.{digits}f}" + (f" ({len(found)})" if len(found) < len(sets) else "") if found else ""

    means = [[f"`{arm}`", *(figure(arm, key, digits) for key, (_, digits) in scores.items())] for arm in arms]
    judged = [row for row in result["rows"] if "met" in row]
    goals = [
        [
            row["what"],
            *(f"{row[key]:.4f}" for key in ("value", "at_least")),
            _interval(row),
            str(row["n_ahead"]),
            verdict(row),
        ]
        for row in judged
    ]
    parts = [table(["arm", *(name for name, _ in scores.values())], means)]
    if goals:
        header = ["goal", "lead", "at least", "95% interval", "studies by more than that", ""]
        parts.append(table(header, goals))
    return "\n".join(parts)


def of_controls(result: dict) -> str:
    """What each transformer was trained for; mean of each arm over the studies, the transformers last, and goals."""
    arms, _, _ = _by_arm(result)
    ordered = [arm for arm in SIMPLE if arm in arms] + [arm for arm in arms if arm not in SIMPLE]
    rows = [row for arm in ordered for row in result["rows"] if row.get("arm") == arm]
    rows += [row for row in result["rows"] if "met" in row]
    trained = [
        [f"`{name}`", f"{note['steps']:,}", f"{note['cells_seen']:,}", f"{note['cpu_seconds'] / 3600:.1f}"]
        for name, note in result["heads"].items()
        if "control" in note
    ]
    parts = table(["trained", "steps", "cells seen", "CPU hours"], trained), of_arms({**result, "rows": rows})
    return "\n".join(parts)


def of_values(result: dict) -> str:
    """Of values alone, the mean of each arm over the studies, and goals."""
    return of_arms(result, {key: SCORES[key] for key in ("spearman", "rmse")})


def of_tasks(result: dict) -> str:
    """Of each task the mean of each arm over the studies, and goals."""
    parts = []
    for task in dict.fromkeys(row["section"] for row in result["rows"]):
        of_task = {**result, "rows": [row for row in result["rows"] if row["section"] == task]}
        parts += [f"### {task.capitalize()}\n", of_arms(of_task, TASK_SCORES[task])]
    return "\n".join(parts)


def _of(row: dict | None, key: str) -> str:
    return "" if row is None or key not in row else f"{row[key]:.3f}"


def _interval(row: dict) -> str:
    low, high = row["interval"]
    return f"{low:.4f} to {high:.4f}"


WRITERS = {
    "denoising": denoising,
    "denoising_seen": of_arms,
    "denoising_controls": of_controls,
    "denoising_hours": of_hours,
    "head_tasks": of_tasks,
    "value_limits": of_values,
}
