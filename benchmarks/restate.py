"""Say anew what follows from the rows of the results, without making any: weights by commit, and goals.

    python benchmarks/restate.py

- Rows that were made before rows named their weights get the fingerprint of the checkpoint that stood in the commit
  that they name, and `weights_from`: "commit". It needs the history of the repository.
- Rows of the same time get what their result says of them: the number of seeds, and the epochs of scVI in imputation.
- Goals are judged again by the functions of the scripts. What a script measured and did not keep as a row is judged
  by the value that stands there, as one run; what is counted as counted.

Rows keep their figures and their commits. Run it after a change of how goals are judged, and `tables.py` after it.
"""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from _record import RESULTS
from _timing import goal, verdict
from _weights import FILE, fingerprints, own_weights, parts_read

from scdiva._constants import DEFAULT_MODEL

CHECKPOINT = f"src/scdiva/checkpoints/{DEFAULT_MODEL}/{FILE}"
SEEDED = ("thinning",)
"""Results whose seeds stood beside the rows alone."""
GOALS = {
    "embedding": "embedding",
    "thinning": "thinning",
    "learning_curve_mouse": "learning_curve",
    "integration": "_integration_goals",
    "annotation": "_annotation_goals",
    "perturbation": "_perturbation_goals",
    "grn": "_grn_goals",
    "reconstruction": "_reconstruction_table",
    "scaling": "scaling",
}
"""Where the goals of a result follow from its rows."""
COUNTED = ("executions", "crashes", "parity", "graph breaks")
"""How goals begin, or what they name, whose value is a count and not a measurement."""
STILL_PLACED = "their positions still seen by the transformer"
"""What a call without ranks left in, up to the commit named here."""
PLACED_AT = ("56656e8c02", "3219c930c1")
SCVI_EPOCHS = {"bd2a496626": 100}
"""Epochs of scVI in imputation by commit, where rows did not say."""


@functools.cache
def at_commit(commit: str) -> dict[str, str]:
    """Fingerprints of the bundled weights as they stood in a commit."""
    command = ["git", "show", f"{commit.removesuffix('+changes')}:{CHECKPOINT}"]
    root = Path(__file__).parents[1]
    return fingerprints(subprocess.run(command, capture_output=True, cwd=root, check=True).stdout)


def with_weights(name: str, row: dict, commit: str) -> dict:
    """The row with the weights of its commit, or with why it has others; as it is where it says so, or read none."""
    parts = parts_read(name, row)
    if not parts or row.keys() & {"weights", "weights_note"}:
        return row
    if why := own_weights(name, row):
        return {**row, "weights_note": why}
    weights = at_commit(row.get("commit", commit))
    return {**row, "weights": {part: weights[part] for part in parts if part in weights}, "weights_from": "commit"}


def with_what_it_was(name: str, row: dict, result: dict) -> dict:
    """The row with what was known of it, and stood elsewhere."""
    more: dict = {}
    commit = row.get("commit", result["commit"])[:10]
    if name in SEEDED and "n_seeds" not in row:
        more["n_seeds"] = len(result["seeds"])
    if name == "reconstruction" and row["arm"] == "scvi" and "epochs" not in row and commit in SCVI_EPOCHS:
        more["epochs"] = SCVI_EPOCHS[commit]
    if name == "reconstruction" and row["arm"] == "ours_no_places" and commit in PLACED_AT:
        more["note"] = STILL_PLACED
    return {**row, **more}


def judged_alone(row: dict) -> dict:
    """A goal whose rows were not kept, judged by its value alone, if it does not say how it was judged."""
    if "over" in row or "interval" in row:
        return row
    rest = {key: value for key, value in row.items() if key not in ("value", "what", "met")}
    return goal(row["what"], row["value"], **rest, counted=any(word in row["what"] for word in COUNTED))


def restated(name: str, result: dict) -> dict:
    """A result with its rows and goals said anew."""
    rows = [row for row in result["rows"] if "met" not in row]
    rows = [with_weights(name, row, result["commit"]) for row in rows]
    if name in GOALS:
        rows = [with_what_it_was(name, row, result) for row in rows]
        judge: Callable[[list[dict]], list[dict]] = importlib.import_module(GOALS[name]).goals
        return {**result, "rows": [*rows, *judge(rows)]}
    # goals keep their places among the rows
    plain = iter(rows)
    return {**result, "rows": [judged_alone(row) if "met" in row else next(plain) for row in result["rows"]]}


def main() -> None:
    for path in sorted(RESULTS.glob("*.json")):
        text = path.read_text()
        result = restated(path.stem, json.loads(text))
        path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
        found = [verdict(row) for row in result["rows"] if "met" in row]
        kinds = {kind: found.count(kind) for kind in dict.fromkeys(found)}
        print(f"{path.stem}: {', '.join(f'{n} {kind}' for kind, n in kinds.items()) or 'no goals'}")


if __name__ == "__main__":
    main()
