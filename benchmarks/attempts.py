"""What was tried to lift zero-shot embedding above its rivals: one change of the set encoder each, on the whole corpus.

    python benchmarks/attempts.py --prepared FOLDER --data FOLDER [--arms NAME ...] [--steps 400] [--seeds 0]

As `learning_curve.py`, whose row of so many steps is the base here: trained on all of the corpus and scored on the sets
of that folder, where `ablation.py` scores on studies that it holds out. What helps there and not here helped by
similarity of the studies. The arms are those of the family "set encoder" in `_ablation_arms.py`, and the weight of the
linear part in the state (`anchor_balance`, 2 by default) and what of the bias a cell gets (`full_total`, the sum of its
values from which on it gets all), for which nothing is trained anew. Each is also asked what `thinning.py` asks: how
well neighbours at full depth tell the types of cells at a tenth of their depth.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import thinning
import torch
from _ablation_arms import ARMS, SET, Arm, load_cells
from _record import RESULTS, record
from _rivals import scdiva_arm
from _sets import SETS, load_set
from learning_curve import BATCH, LINEAR_DIM, MAX_CELLS, judged, trained

import scdiva as sd
from scdiva.models import ScDiVa
from scdiva.tokenizer import Vocabulary
from scdiva.train import fit_linear_map
from scdiva.train.linear_map import FULL_SHARE

BASE = "set"
TRIED = (BASE, "thinning", "learned_128", "contrast_only")
BALANCES = (0.25, 1.0, 4.0)
FULL_SHARES = {"whole_bias": 1e-3, "bias_half": 0.5, "bias_mean": 1.0}
"""Share of the corpus' mean total from which on a cell gets all of the bias; 0.7 by default."""


def scored(model: ScDiVa, folder: Path, seed: int, sets: tuple[str, ...]) -> dict:
    """Scores as for the learning curves, and `thinned`, those at a tenth of the depth by set."""
    found = judged(model, folder, seed, sets)
    found["thinned"] = {}
    for name in thinning.SETS:
        rows = thinning.survive({"model": scdiva_arm(model)}, *load_set(folder, name), seed, (thinning.JUDGED_DEPTH,))
        found["thinned"][name] = {key: round(rows[0][key], 4) for key in thinning.JUDGED}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepared", type=Path, required=True, help="the packed corpus")
    parser.add_argument("--data", type=Path, required=True, help="folder of the benchmark h5ad files")
    parser.add_argument("--arms", nargs="+", default=TRIED, choices=[name for name in ARMS if ARMS[name].family == SET])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0,))
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--name", default="attempts", help="of the results file")
    arguments = parser.parse_args()

    sd.settings.progress = False
    torch.set_num_threads(1)
    vocabulary = Vocabulary.read(arguments.prepared / "vocabulary.safetensors")
    cells = load_cells(arguments.prepared / "train.h5", vocabulary)
    start = fit_linear_map(cells, LINEAR_DIM)
    rows: list[dict] = []

    def add(name: str, arm: Arm, seed: int, found: dict) -> None:
        rows.append({"arm": name, "what": arm.what, "seed": seed, "steps": arguments.steps, **found})
        print({key: value for key, value in rows[-1].items() if key != "sets"}, flush=True)
        record(arguments.name, rows, batch_size=BATCH, max_cells=MAX_CELLS, sets=arguments.sets)

    for seed in arguments.seeds:
        for name in arguments.arms:
            begun = time.process_time()
            model = trained(cells, vocabulary, start, arguments.steps, seed, ARMS[name])
            seconds = round(time.process_time() - begun, 1)
            add(name, ARMS[name], seed, {"cpu_seconds": seconds, **scored(model, arguments.data, seed, arguments.sets)})
            if name == BASE:
                for balance in BALANCES:
                    model.anchor.balance = balance
                    arm = Arm(SET, f"linear part weighs {balance:g}, not 2")
                    add(f"balance_{balance:g}", arm, seed, scored(model, arguments.data, seed, arguments.sets))
                model.anchor.balance = model.config.anchor_balance
                for share_name, share in FULL_SHARES.items():
                    model.anchor.full_total.fill_(start.full_total * share / FULL_SHARE)
                    arm = Arm(SET, f"all of the bias from {share:g} of the mean total on, not {FULL_SHARE:g}")
                    add(share_name, arm, seed, scored(model, arguments.data, seed, arguments.sets))
    print(f"written: {RESULTS.name}/{arguments.name}.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
