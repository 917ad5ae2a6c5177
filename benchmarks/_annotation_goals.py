"""What annotation.py is held to."""

from __future__ import annotations

from _judge import Score, across, judge, judge_number, of_row, share_of_cells

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


def _best(arms: dict[str, dict], own: bool) -> dict:
    return max((row for arm, row in arms.items() if is_ours(arm) == own), key=lambda row: row["macro_f1"])


def _f1(row: dict) -> Score:
    """Macro-F1, over cells as a share of them, which is too narrow where types are rare."""
    return share_of_cells(row, "macro_f1")


def _calibration(row: dict) -> Score:
    """A calibration error, which is known no better than the accuracy of as many cells."""
    of_cells = share_of_cells(row, "accuracy").of_cells if "accuracy" in row else None
    return of_row(row, "ece_pooled", of_cells=of_cells)


def _full(rows: list[dict]) -> list[dict]:
    found = []
    for name, arms in _by_set(rows, "full").items():
        what = f"{name}: macro-F1, best of ours above the best rival"
        found.append(judge(what, _f1(_best(arms, True)), _f1(_best(arms, False)), at_least=0.0))
        if DEFAULT not in arms:
            continue
        for arm, words in LOGISTIC.items():
            if arm in arms:
                what = f"{name}: macro-F1, default above {words}"
                found.append(judge(what, _f1(arms[DEFAULT]), _f1(arms[arm]), at_least=0.0))
        found.append(judge(f"{name}: calibration error of the default", _calibration(arms[DEFAULT]), at_most=ECE))
    return found


def _few(rows: list[dict]) -> list[dict]:
    found = []
    for share in FEW:
        sets = _by_set(rows, "few", share)
        if not sets:
            continue
        for who in ("best of ours", "default"):
            leads = [
                judge(name, _f1(ours), _f1(_best(arms, False)), at_least=LEAD)
                for name, arms in sets.items()
                if (ours := arms.get(DEFAULT) if who == "default" else _best(arms, True)) is not None
            ]
            what = f"{share:.0%} of the labels: sets where the {who} is above every rival by {LEAD} in macro-F1"
            found.append(judge_number(what, leads, LEAST_SETS, "sets"))
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
    what = f"a type taken out: mean rejection AUROC of the default over {len(types[DEFAULT])} types"
    found = [judge(what, across(types[DEFAULT], "types"), at_least=AUROC)]
    if "logistic" in types:
        leads = [
            ours - arms["logistic"]["rejection"][one]
            for arms in sets.values()
            for one, ours in arms[DEFAULT]["rejection"].items()
            if one in arms["logistic"]["rejection"]
        ]
        found.append(judge(f"{what}, above logistic regression's", across(leads, "types"), at_least=0.0))
    return found
