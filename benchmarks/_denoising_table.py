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
    "`population`: the model's own state head, corrected gene by gene on all other cells, as in `tl.impute`; "
    "`head_linear`, `head_mlp`: from the cell state to genes, trained on the same queries of the training studies; "
    "`head_offsets`: the latter, with an offset for each gene fitted to the queries of the 200 other cells; query "
    "heads alone, and with the 200 other cells as their context, nothing fitted; `with transformer`: a transformer "
    "without positions over the first 256 visible genes of the cell, which each query attends to; `errors of random "
    "size`: where there is no context, the errors that training adds to the state head are of one random size a batch, "
    "and 30% of the batches have none, not 20%; `set encoder's rows`: trained likewise, with two blocks in place of "
    "four, gates a third as wide, and genes known by their rows in the set encoder, for 6,000 steps and for 12,000, as "
    "many as the head without transformer. The model without these studies was made anew before these last arms, with "
    "the arms from `neighbors` to `head_offsets`: over all studies these differ from before by 0.001 nats and 0.005 in "
    "Spearman at most. `query head, errors of random size`: the head without transformer, trained anew with these "
    "errors. `values by transformer`: presence of that head, values of the transformer with the set encoder's rows, "
    "trained for both until step 28,000 and then for values alone; `values added by transformer`: a transformer that "
    "adds to the values of that head as it is, and also reads what the head knows of visible genes. `studies split`: "
    "the head with errors of random size, trained on 47 contexts, the 21 studies split by batch, donor and technology "
    "where a part has 32 cells. `scvi`: its defaults, fitted to what these cells show and all other cells. Goals: "
    "bootstrap over studies."
)
PRESENCE = "query head, errors of random size"
"""The head that a transformer's values are added to."""
SCORES = {
    "log_loss": ("log-loss", 4),
    "average_precision": ("average precision", 3),
    "spearman": ("Spearman of values", 3),
    "rmse": ("RMSE of values", 3),
}


def denoising(result: dict) -> str:
    """Mean of each arm over the studies, goals, and the log-loss of each study."""
    arms, sets, at = _by_arm(result)
    parts = [summary(result), curve(result)]
    for start in range(0, len(arms), 6):  # side by side they would run off the page
        some = arms[start : start + 6]
        each = [
            [f"{name} ({at[arms[0], name]['n_cells']})", *(_of(at.get((arm, name)), "log_loss") for arm in some)]
            for name in sets
        ]
        parts.append(table(["log-loss; study (cells)", *(f"`{arm}`" for arm in some)], each))
    return "\n".join(parts)


def curve(result: dict) -> str:
    """What the transformer says of values after so many hours, and its lead over the head without it."""
    _, sets, at = _by_arm(result)
    lead = {row["what"]: row for row in result["rows"] if "met" in row}
    rows = []
    for name, note in sorted(result["heads"].items(), key=lambda item: item[1].get("seconds_in_all", 0)):
        if "seconds_in_all" not in note or f"{name}: spearman ahead of {PRESENCE}" not in lead:  # a head alone
            continue
        row = [f"{note['steps_in_all']:,}", f"{note['seconds_in_all'] / 3600:.1f}"]
        for about in ("", ", context"):
            row.append(f"{mean(at[name + about, one]['spearman'] for one in sets):.3f}")
            ahead = lead[f"{name}{about}: spearman ahead of {PRESENCE}{about}"]
            row.append(f"{ahead['value']:.4f}, {_interval(ahead)}")
        rows.append(row)
    header = ["steps", "hours of one thread", "Spearman alone", "ahead of the head", "in context", "ahead of the head"]
    return table(header, rows) if rows else ""


def _by_arm(result: dict) -> tuple[list[str], list[str], dict[tuple[str, str], dict]]:
    rows = [row for row in result["rows"] if "arm" in row]
    arms, sets = (list(dict.fromkeys(row[key] for row in rows)) for key in ("arm", "set"))
    return arms, sets, {(row["arm"], row["set"]): row for row in rows}


def summary(result: dict) -> str:
    """Mean of each arm over the studies, and goals."""
    arms, sets, at = _by_arm(result)

    def figure(arm: str, key: str, digits: int) -> str:
        found = [at[arm, name][key] for name in sets if key in at.get((arm, name), {})]
        return f"{mean(found):.{digits}f}" + (f" ({len(found)})" if len(found) < len(sets) else "") if found else ""

    means = [[f"`{arm}`", *(figure(arm, key, digits) for key, (_, digits) in SCORES.items())] for arm in arms]
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
    parts = [table(["arm", *(name for name, _ in SCORES.values())], means)]
    if goals:
        header = ["goal", "lead", "at least", "95% interval", "studies by more than that", ""]
        parts.append(table(header, goals))
    return "\n".join(parts)


def _of(row: dict | None, key: str) -> str:
    return "" if row is None else f"{row[key]:.3f}"


def _interval(row: dict) -> str:
    low, high = row["interval"]
    return f"{low:.4f} to {high:.4f}"
