"""What grn.py is held to."""

from __future__ import annotations

from _grn_scores import N_RANDOM, REMOVED
from _judge import Score, across, judge, judge_number, share_error

NETWORK = ("embedding", "attention", *REMOVED)
"""Our graphs; the correlation is the baseline beside them."""
BASELINE = "correlation"
N_DRAWS = N_RANDOM
"""Exchanged targets, or sets matched by degree, that a p-value is a share of."""
CLASS_II, OTHERS, NEEDED = "HLA class II", ("HLA", "TNF", "interleukin", "CD"), 2
SURE, BEYOND_CHANCE = 0.01, 0.05
MOST_SECONDS, MOST_MIB = 600, 4096


def goals(rows: list[dict]) -> list[dict]:
    """What has not been run is not judged: edges of ours, families in ours, the cost of attention."""
    return [*_edges(rows), *_families(rows), *_speed(rows)]


def _edges(rows: list[dict]) -> list[dict]:
    """The AUPRC ratio of each of ours is above what targets matched by expression give."""
    rows = [row for row in rows if row["part"] == "edges"]
    beside = {(row["set"], row["reference"]): row["auprc_ratio"] for row in rows if row["arm"] == BASELINE}
    found = []
    for row in rows:
        if row["arm"] in NETWORK:
            place = row["set"], row["reference"]
            more = {"auprc_ratio": row["auprc_ratio"], "null": row["auprc_ratio_null_mean"]}
            if place in beside:
                more[BASELINE] = beside[place]
            what = f"{', '.join(place)}: p of the AUPRC ratio of {row['arm']}"
            found.append(judge(what, _chance(row["auprc_ratio_p"]), at_most=BEYOND_CHANCE, **more))
    return found


def _families(rows: list[dict]) -> list[dict]:
    """HLA class II and two of the others have more edges within than sets matched by degree; judged where expressed."""
    tested: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row["part"] == "families" and row["arm"] in NETWORK:
            tested.setdefault((row["set"], row["arm"]), {})[row["family"]] = row["edges_p"]
    found = []
    for (name, arm), p in tested.items():
        if CLASS_II in p:
            what = f"{name}: p of the density of {CLASS_II}, {arm}"
            found.append(judge(what, _chance(p[CLASS_II]), at_most=SURE))
        others = [family for family in OTHERS if family in p]
        if len(others) >= NEEDED:
            judged = {family: judge(family, _chance(p[family]), at_most=SURE) for family in others}
            dense = ", ".join(family for family in others if p[family] <= SURE) or "none"
            what = f"{name}: families denser than sets matched by degree, {arm}"
            found.append(judge_number(what, list(judged.values()), NEEDED, "families", which=dense))
    return found


def _chance(p: float) -> Score:
    """A p-value, known as well as the share of so many draws is."""
    return Score(p, share_error(p, N_DRAWS), N_DRAWS, f"{N_DRAWS:,} draws")


def _speed(rows: list[dict]) -> list[dict]:
    found = []
    for row in rows:
        if row["part"] == "speed":
            what = f"attention graph of {row['n_cells']:,} cells, {row['n_genes']:,} genes"
            for key, name, most in (("wall_seconds", "seconds", MOST_SECONDS), ("peak_mib", "peak MiB", MOST_MIB)):
                each = row.get(f"{key}_each", [])
                score = across(each, "runs") if len(each) > 1 else Score(row[key], over="one run")
                found.append(judge(f"{what}: {name}", score, at_most=most))
    return found
