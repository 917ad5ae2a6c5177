"""What perturbation.py is held to."""

from __future__ import annotations

from _judge import Score, across, judge, judge_number, of_row
from _perturbation_scores import AMONG_PART, DISCRIMINATION

from scdiva._constants import BASELINES

OURS, ELSEWHERE = "ours", "elsewhere"
HELD = ("pearson_delta", "pearson_delta_top20", DISCRIMINATION)
RESPONSE = HELD[:2]


def goals(rows: list[dict]) -> list[dict]:
    """What has not been run on both sides is not judged.

    Singles and combinations: our prediction at or above the best simple baseline that has all of the conditions, metric
    by metric; of combinations also where all parts were seen. A group left out: at or above the same perturbation in
    the other groups, mean over groups, and in each.
    """
    found = []
    for name in dict.fromkeys(row["set"] for row in rows):
        arms = {row["arm"]: row for row in rows if row["set"] == name}
        if OURS not in arms:
            continue
        if arms[OURS]["split"] == "group":
            found += _groups(name, arms)
        else:
            found += _conditions(name, arms)
    return found


def _conditions(name: str, arms: dict[str, dict]) -> list[dict]:
    found = _above_best(name, arms, HELD)
    if arms[OURS]["split"] == "combination":
        for part in arms[OURS]["each"]:
            n_parts, n_seen = (text.split()[0] for text in part.split(", "))
            if n_parts == n_seen:
                of_part = {
                    arm: {"seeds": row.get("seeds", ()), **row["each"][part]}
                    for arm, row in arms.items()
                    if part in row["each"]
                }
                found += _above_best(f"{name}, all parts seen", of_part, (*RESPONSE, AMONG_PART))
    return found


def _above_best(scope: str, arms: dict[str, dict], metrics: tuple[str, ...]) -> list[dict]:
    found = []
    for metric in metrics:
        n = arms[OURS]["n_conditions"]
        rivals = {
            arm: of_row(row, metric)
            for arm, row in arms.items()
            if arm in BASELINES and metric in row and row["n_conditions"] == n
        }
        if not rivals or metric not in arms[OURS]:
            continue
        best = max(rivals, key=lambda arm: rivals[arm].value)
        what = f"{scope}: {metric}, above the best baseline"
        pair = of_row(arms[OURS], metric), rivals[best]
        found.append(judge(what, *pair, at_least=0.0, best_baseline=best, conditions=n))
    return found


def _groups(name: str, arms: dict[str, dict]) -> list[dict]:
    if ELSEWHERE not in arms:
        return []
    ours, theirs = arms[OURS]["each"], arms[ELSEWHERE]["each"]
    shared = [group for group in ours if group in theirs]
    found = []
    for metric in RESPONSE:
        leads = [ours[group][metric] - theirs[group][metric] for group in shared]
        what = f"{name}: {metric}, above the same perturbation elsewhere"
        found.append(judge(f"{what}, mean over groups", across(leads, "groups"), at_least=0.0))
        each = [judge(what, Score(lead, over="a group has no spread"), at_least=0.0) for lead in leads]
        found.append(judge_number(f"{what}, groups where it is", each, len(leads), "groups"))
    return found
