r"""What was tried to tell combinations better, where both parts were perturbed alone above all: one change each.

    python benchmarks/perturbation_attempts.py --data FOLDER [--seeds 0 1 2]

The folds and scores of `perturbation.py`'s norman_doubles and norman_singles, by the expected response alone (no
network, which is dropped there), with one number or one step of `scdiva.perturbation` changed. The row
"base" is the code as it stands.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import anndata as ad
import numpy as np
from _perturbation_arms import task_of
from _perturbation_scores import AMONG_PART, DISCRIMINATION, NETWORK, conditions, summary, with_discrimination
from _record import RESULTS, record
from _screens import CONDITION, SCREENS, prepared

import scdiva as sd
from scdiva.perturbation import model, response, screen
from scdiva.perturbation.response import baselines

SHOWN = ("pearson_delta", "pearson_delta_top20", DISCRIMINATION)
BOTH = "2 parts, 2 seen"
FOLDS = 5


def always(share: float) -> Callable:
    """Take what all perturbations share for known."""
    return lambda _: response.Shared(share, 0.5)


def expected_alone(_: model.Scores) -> dict:
    """Take no baseline for better, whatever conditions that are left out say."""
    return dict.fromkeys((*model.KINDS, "measured"), model.EXPECTED)


def less_noise(share: float) -> Callable:
    """Take genes for less noisy than they are: predictions are drawn less towards others."""
    was = response._noise

    def noise(*arguments: object) -> tuple[np.ndarray, np.ndarray]:
        ratio, scale = was(*arguments)
        return share * ratio, scale

    return noise


def with_additive(share: float) -> Callable:
    """Mix in the sum of the parts' changes where all of them were measured alone."""
    was = response.expected_response

    def mixed(measured: screen.Screen, targets: screen.Conditions, alike: response.Similarities) -> tuple:
        mean, sd_ = was(measured, targets, alike)
        alone = {parts[0] for parts in measured.conditions.parts if len(parts) == 1}
        added = baselines(measured, targets)["additive"]
        for row, parts in enumerate(targets.parts):
            if len(parts) > 1 and alone.issuperset(parts):
                mean[row] = (1 - share) * mean[row] + share * added[row]
        return mean, sd_

    return mixed


def constants(**values: float) -> dict:
    """Numbers of the expected response to change."""
    return {(response, name): value for name, value in values.items()}


# `expected_response` is patched where it is called, as it is imported there by name
ATTEMPTS: dict[str, tuple[str, dict]] = {
    "base": ("as it stands", {}),
    "no_pair": ("nothing that a combination has of its own", constants(PAIR=0.0)),
    "pair_0.3": ("six times as much of that", constants(PAIR=0.3)),
    "pair_3": ("sixty times as much", constants(PAIR=3.0)),
    "shared_0": ("nothing that all share", {(response, "shared_changes"): always(0.0)}),
    "shared_1": ("as much that all share as an effect has of its own", {(response, "shared_changes"): always(1.0)}),
    "one_noise": ("one noise for all genes", constants(OWN=0.0, LEAST=1.0)),
    "own_noise": ("a gene's noise from its own changes alone", constants(OWN=1.0, LEAST=0.1)),
    "noise_0.3": ("noise taken for three tenths of what it is", {(response, "_noise"): less_noise(0.3)}),
    "additive_0.3": (
        "three tenths of the sum of the parts mixed in",
        {(model, "expected_response"): with_additive(0.3)},
    ),
    "additive_0.5": ("half of it", {(model, "expected_response"): with_additive(0.5)}),
    "related_0": ("nothing carried over between similar genes", constants(RELATED=0.0)),
    "related_0.6": ("twice as much carried over", constants(RELATED=0.6)),
}


def scored(adata: ad.AnnData, by: str, seeds: list[int]) -> dict:
    """Scores of all folds, as `perturbation.py` makes them."""
    job = {"by": by, "control": "control", "separator": "+", "folds": FOLDS}
    rows = []
    for seed in seeds:
        of_seed = []
        for fold in range(FOLDS):
            task = task_of(adata, job, seed, fold)
            predicted = sd.tl.predict_perturbation(task.train, CONDITION, predict=task.asked, rng=seed)
            found = conditions(predicted, task.observed)
            of_seed += [{"fold": fold, **row} for row in found if row["method"] == NETWORK]
        rows += [{"seed": seed, **row} for row in with_discrimination(of_seed, by)]
    return summary(rows, by)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the benchmark h5ad files")
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--attempts", nargs="+", default=tuple(ATTEMPTS), choices=ATTEMPTS)
    arguments = parser.parse_args()

    sd.settings.progress = False
    sets = {name: SCREENS[name] for name in ("norman_doubles", "norman_singles")}
    rows: list[dict] = []
    for name in arguments.attempts:
        what, changes = ATTEMPTS[name]
        row: dict = {"attempt": name, "what": what}
        for key, one in sets.items():
            adata = prepared(ad.read_h5ad(arguments.data / f"{one.file}.h5ad"), one)
            with ExitStack() as stack:
                for (module, attribute), value in {(model, "best_base"): expected_alone, **changes}.items():
                    stack.enter_context(patch.object(module, attribute, value))
                found = scored(adata, one.by, list(arguments.seeds))
            row[key] = {metric: found[metric] for metric in SHOWN}
            if BOTH in found["each"]:
                row["both_seen"] = {metric: found["each"][BOTH][metric] for metric in (*SHOWN[:2], AMONG_PART)}
        rows.append(row)
        print(row, flush=True)
        record("perturbation_attempts", rows, seeds=list(arguments.seeds))
    print(f"written: {RESULTS.name}/perturbation_attempts.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
