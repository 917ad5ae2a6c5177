"""What integration.py is held to."""

from __future__ import annotations

from statistics import mean

from _judge import Score, across, judge, of_row, share_of_cells

RIVALS = ("harmony", "scvi")
SHARE_OF_ILISI = 0.95
"""The set on which time is compared."""
ILISI = {"ilisi": "iLISI", "ilisi_even": "iLISI, unweighted"}
NAMES = {"harmony": "Harmony", "scvi": "scVI"}


def goals(rows: list[dict]) -> list[dict]:
    """Ours at or above the better rival of each part; what has not been run on both sides is not judged.

    Without labels the better of Harmony and scVI in the mean of NMI, ARI and ASW, with no less than 0.95 of the better
    one's iLISI; with half of the labels, scANVI; for a batch that comes later, scArches, mean over the batches left
    out; of all three counts the better of the 15 neighbours and the classifier that comes with them. On the timed set
    no more CPU seconds than scVI.
    """
    found = []
    for name in dict.fromkeys(row["set"] for row in rows):
        own = [row for row in rows if row["set"] == name]
        found += [*_unlabelled(name, own), *_labelled(name, own), *_query(name, own)]
    return found


def _arms(rows: list[dict], part: str) -> dict[str, dict]:
    return {row["arm"]: row for row in rows if row["part"] == part}


def _unlabelled(name: str, rows: list[dict]) -> list[dict]:
    arms = _arms(rows, "unlabelled")
    rivals = [arm for arm in RIVALS if arm in arms]
    if "ours" not in arms or not rivals:
        return []
    ours = arms["ours"]
    who = "the better of Harmony and scVI" if len(rivals) == 2 else NAMES[rivals[0]]

    def pair(key: str) -> list[Score]:
        return [of_row(row, key) for row in (ours, max((arms[arm] for arm in rivals), key=lambda row: row[key]))]

    found = [judge(f"{name}: mean of NMI, ARI, ASW above {who}", *pair("average_bio"), at_least=0.0)]
    for key, measure in ILISI.items():
        if pair(key)[1].value > 0:
            what = f"{name}: {measure} as a share of {who}'s"
            found.append(judge(what, *pair(key), at_least=SHARE_OF_ILISI, share=True))
    return found


def _labelled(name: str, rows: list[dict]) -> list[dict]:
    arms = _arms(rows, "labelled")
    if not {"ours", "scanvi"} <= set(arms):
        return []
    both = arms["ours"], arms["scanvi"]
    accuracy, bio = [_best(row) for row in both], [of_row(row, "average_bio") for row in both]
    return [
        judge(f"{name}, half of the labels: accuracy above scANVI", *accuracy, at_least=0.0),
        judge(f"{name}, half of the labels: mean of NMI, ARI, ASW above scANVI", *bio, at_least=0.0),
    ]


def _query(name: str, rows: list[dict]) -> list[dict]:
    by_arm = {
        arm: {row["left_out"]: row for row in rows if row["part"] == "query" and row["arm"] == arm}
        for arm in ("ours", "scarches")
    }
    both = [batch for batch in by_arm["ours"] if batch in by_arm["scarches"]]
    if not both:
        return []
    # one way of naming for all batches, not the better one of each
    ours, rival = (
        max(([by_arm[arm][batch].get(key, 0.0) for batch in both] for key in ("accuracy", "own_accuracy")), key=mean)
        for arm in ("ours", "scarches")
    )
    leads = [one - other for one, other in zip(ours, rival, strict=True)]
    what = f"{name}, a batch left out: accuracy above scArches, mean of {len(both)}"
    return [judge(what, across(leads, "batches"), at_least=0.0)]


def _best(row: dict) -> Score:
    return share_of_cells(row, max(("accuracy", "own_accuracy"), key=lambda key: row.get(key, 0.0)))
