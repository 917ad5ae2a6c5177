"""What annotation.py is held to."""

from __future__ import annotations

from statistics import mean

from _timing import goal

DEFAULT = "ours"
LEAD, LEAST_SETS, FEW = 0.02, 2, (0.01, 0.05)
AUROC, ECE = 0.85, 0.05
LOGISTIC = {"logistic": "logistic regression", "logistic_balanced": "balanced logistic regression"}


def is_ours(arm: str) -> bool:
    """Whether an arm is one of our methods."""
    return arm.startswith(DEFAULT)


def goals(rows: list[dict]) -> list[dict]:
    """What has not been run on both sides is not judged.

    All labels: on each set the best of our methods at or above the best rival in macro-F1, the default method at or
    above logistic regression, and the default's calibration error over all of the set's queried cells. Few labels: on
    how many sets our best method, and the default alone, are above every rival by 0.02. A type unknown: the mean AUROC
    over all types of all sets, and its lead over logistic regression's.
    """
    return [*_full(rows), *_few(rows), *_unknown(rows)]


def _by_set(rows: list[dict], part: str, share: float | None = None) -> dict[str, dict[str, dict]]:
    """Arms of each set on which ours and rivals have been run."""
    found: dict[str, dict[str, dict]] = {}
    for row in rows:
        if row["part"] == part and row.get("share") == share:
            found.setdefault(row["set"], {})[row["arm"]] = row
    return {name: arms for name, arms in found.items() if any(map(is_ours, arms)) and not all(map(is_ours, arms))}


def _best(arms: dict[str, dict], own: bool) -> float:
    return max(row["macro_f1"] for arm, row in arms.items() if is_ours(arm) == own)


def _full(rows: list[dict]) -> list[dict]:
    found = []
    for name, arms in _by_set(rows, "full").items():
        lead = round(_best(arms, True) - _best(arms, False), 4)
        found.append(goal(f"{name}: macro-F1, best of ours above the best rival", lead, at_least=0.0))
        if DEFAULT not in arms:
            continue
        for arm, words in LOGISTIC.items():
            if arm in arms:
                lead = round(arms[DEFAULT]["macro_f1"] - arms[arm]["macro_f1"], 4)
                found.append(goal(f"{name}: macro-F1, default above {words}", lead, at_least=0.0))
        found.append(goal(f"{name}: calibration error of the default", arms[DEFAULT]["ece_pooled"], at_most=ECE))
    return found


def _few(rows: list[dict]) -> list[dict]:
    found = []
    for share in FEW:
        sets = _by_set(rows, "few", share)
        if not sets:
            continue
        leads = [_best(arms, True) - _best(arms, False) for arms in sets.values()]
        alone = [arms[DEFAULT]["macro_f1"] - _best(arms, False) for arms in sets.values() if DEFAULT in arms]
        for who, some in (("best of ours", leads), ("default", alone)):
            what = f"{share:.0%} of the labels: sets where the {who} is above every rival by {LEAD} in macro-F1"
            n_sets = sum(round(lead, 4) >= LEAD for lead in some)
            found.append(goal(what, n_sets, at_least=LEAST_SETS, n_sets=len(some)))
    return found


def _unknown(rows: list[dict]) -> list[dict]:
    sets = _by_set(rows, "unknown")
    types = {
        arm: [value for arms in sets.values() for value in arms[arm]["rejection"].values()]
        for arm in (DEFAULT, "logistic")
        if sets and all(arm in arms for arms in sets.values())
    }
    if DEFAULT not in types:
        return []
    ours = mean(types[DEFAULT])
    what = f"a type taken out: mean rejection AUROC of the default over {len(types[DEFAULT])} types"
    found = [goal(what, round(ours, 4), at_least=AUROC)]
    if "logistic" in types:
        lead = round(ours - mean(types["logistic"]), 4)
        found.append(goal(f"{what}, above logistic regression's", lead, at_least=0.0))
    return found
