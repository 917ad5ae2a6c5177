"""`tl.adapt` on studies that neither the model nor the design of adapting was made with.

    python benchmarks/adapt_held_out.py --prepared FOLDER --corpus FOLDER [--seeds 0 1 2]

The model is the base set encoder of `ablation.py`, trained without the labelled studies of the corpus and without any
other study of their publications; it is adapted to each of them in turn. Beside it the model as it is, and PCA fitted
on the study, as in `zero_shot.py`.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import numpy as np
import torch
from _ablation_arms import ARMS
from _record import record
from _rivals import fit_pca, scdiva_arm
from ablation import SECONDS, base_set_encoder, open_work, plan_of
from zero_shot import scores

import scdiva as sd

MEASURES = ("accuracy", "average_bio")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepared", type=Path, required=True, help="the packed corpus")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of the corpus, for labels of held-out cells")
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="CPU seconds that the set encoder is trained")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    sd.settings.progress, sd.settings.threads = False, 1
    warnings.filterwarnings("ignore", category=UserWarning)
    work = open_work(arguments.prepared, arguments.corpus, arguments.seconds)
    rows: list[dict] = []
    for seed in arguments.seeds:
        model = plan_of(ARMS["set"], seed, work).model.eval()
        model.anchor.load_state_dict(base_set_encoder(seed, work)[0])
        model.vocabulary = work.vocabulary
        for name, (adata, labels) in work.sets.items():
            own = sd.tl.adapt(adata, model, rng=seed)
            arms = {"scdiva": scdiva_arm(model), "adapted": scdiva_arm(own), "pca": fit_pca(adata)}
            for arm, embed in arms.items():
                found = scores(embed(adata), labels, seed)
                row = {"set": name, "arm": arm, "seed": seed, "n_cells": int(found["n_cells"])}
                row |= {key: round(float(found[key]), 4) for key in MEASURES}
                rows.append(row | ({"kept": own.adaptation["kept"]} if arm == "adapted" else {}))
        so_far = {
            arm: [round(float(np.mean([r[key] for r in rows if r["arm"] == arm])), 4) for key in MEASURES]
            for arm in ("scdiva", "adapted", "pca")
        }
        print(f"seed {seed}: {so_far}", flush=True)
        record("adapt_held_out", rows, seconds=arguments.seconds)


if __name__ == "__main__":
    main()
