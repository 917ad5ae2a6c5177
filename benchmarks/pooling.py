"""The read-outs of `tl.embed`: state of `[LAT]`, mean of the genes' final hidden states, both side by side.

    python benchmarks/pooling.py --data FOLDER [--sets ...] [--seeds 0 1 2]

Each seed draws up to 1,000 cells of a set anew, folds and clusters with them; scores as in `zero_shot.py`. `"lat"`
stays the default unless another read-out is clearly ahead, as it alone needs no transformer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from _judge import over_seeds
from _record import record
from _sets import BLOOD, load_set
from zero_shot import scores

import scdiva as sd
from scdiva.models.inference import POOLINGS

MAX_CELLS = 1000
MEASURES = ("accuracy", "average_bio")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the benchmark h5ad files")
    parser.add_argument("--sets", nargs="+", default=BLOOD)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--model", default="scdiva-mini")
    arguments = parser.parse_args()

    sd.settings.progress = False
    model, rows = sd.models.load_model(arguments.model), []
    for name in arguments.sets:
        adata, labels = load_set(arguments.data, name)
        found: dict[str, list[dict]] = {pooling: [] for pooling in POOLINGS}
        for seed in arguments.seeds:
            chosen = np.sort(np.random.default_rng(seed).permutation(adata.n_obs)[:MAX_CELLS])
            cells = adata[chosen].copy()
            for pooling in POOLINGS:
                state = sd.tl.embed(cells, model, pooling=pooling, copy=True).obsm["X_scdiva"]
                found[pooling].append(scores(state, labels[chosen], seed))
        for pooling, runs in found.items():
            row: dict = {"set": name, "pooling": pooling, "n_cells": int(runs[0]["n_cells"])}
            for key in MEASURES:
                row |= over_seeds(key, [run[key] for run in runs])
            rows.append(row)
            print(row, flush=True)
        record("pooling", rows, model=arguments.model, seeds=list(arguments.seeds), max_cells=MAX_CELLS)


if __name__ == "__main__":
    main()
