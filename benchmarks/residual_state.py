"""Train the residual that a transformer may add to the cell state of a frozen set encoder.

    python benchmarks/residual_state.py --base runs/held_out --out runs/residual [--seconds 7200]

The state of a cell is the set encoder's plus R h, h the final hidden state of `[LAT]` and R from zero
(`anchor_residual=True`). Transformer and R are trained from random weights by the objectives that the set encoder was
trained by (`AnchorModule`), read from the whole state: a linear decoder with the study as covariate predicts all genes
of the cell, and two views of a cell have to be nearer than other cells of the study. A batch is of one study, so that
there are such cells; a view shows the transformer its first 256 genes in order of rank. OUT/model is for
`state_arms.py --residual`. A call that was stopped goes on from OUT/residual.pt, bit for bit.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from _scripts import AnchorConfig, AnchorModule, StudyBatches
from ablation import train
from denoising_controls import train_on
from torch import Tensor

from scdiva._rng import step_generator
from scdiva.data.batch import CellBatch
from scdiva.data.packed import PackedCells
from scdiva.models import ScDiVa, load_model, save_model
from scdiva.train import LinearMap
from scdiva.train.objectives import GeneDecoder

CONTEXT, BATCH_SIZE, AROUND, TRIAL_STEPS = 256, 32, 16, 12


def with_residual(base: ScDiVa, seed: int) -> ScDiVa:
    """A model with all that the base has but its transformer, drawn anew, and with R, which is zero."""
    config = replace(base.config, anchor_residual=True, max_length=CONTEXT)
    model = ScDiVa(config, generator=step_generator(seed, 0, "residual"))
    drawn = ("blocks.", "norm.", "heads.", "anchor_in.", "anchor_out.")
    kept = {name: value for name, value in base.state_dict().items() if not name.startswith(drawn)}
    missing, unexpected = model.load_state_dict(kept, strict=False)
    assert not unexpected
    assert all(name.startswith(drawn) for name in missing), missing
    return model


class ResidualModule(AnchorModule):
    """Objectives of the set encoder, read from the state with its residual; of the model the transformer is trained."""

    def __init__(self, model: ScDiVa, config: AnchorConfig, frequency: np.ndarray, study_sizes: np.ndarray) -> None:
        anchor = model.anchor
        table, bias = (part.numpy(force=True) for part in (anchor.table.weight, anchor.bias))
        own = LinearMap(table, bias, np.zeros(len(bias)), frequency, float(anchor.full_total))  # as it is
        super().__init__(model, config, own, study_sizes)
        self.decoder = GeneDecoder(model.state_dim, model.config.n_genes, len(study_sizes), frequency)
        model.requires_grad_(False)
        for part in (model.blocks, model.norm, model.anchor_in, model.anchor_out):
            part.requires_grad_(True)

    def _learned(self, view: CellBatch) -> Tensor:
        return self.model.read(view.tokens, view.values, view.cu_seqlens).cell_state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=7200, help="CPU seconds of training")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    base, seed, out = load_model(arguments.base / "model"), arguments.seed, arguments.out
    cells = PackedCells(arguments.base / "prepared" / "train.h5", base.vocabulary)
    sizes = np.bincount(cells.study, minlength=len(cells.study_names))
    _, tokens, values = cells.read(0, cells.n_obs)
    frequency = np.bincount(tokens, np.expm1(values), minlength=base.config.n_tokens)
    batches = StudyBatches(cells, BATCH_SIZE - AROUND, AROUND, seed).batch

    def make(steps: int) -> ResidualModule:
        config = AnchorConfig(
            steps=steps, batch_size=BATCH_SIZE, learning_rate=1e-3, warmup_steps=max(1, steps // 20), seed=seed
        )
        return ResidualModule(with_residual(base, seed), config, frequency / frequency.sum(), sizes)

    out.mkdir(parents=True, exist_ok=True)
    file = out / "residual.pt"
    if file.exists():
        saved = torch.load(file, weights_only=True)
    else:
        trial = list(itertools.islice(train(make(10**6), batches), TRIAL_STEPS))[TRIAL_STEPS // 4 :]
        saved = {"steps": round(arguments.seconds / median(trial)), "step": 0, "cpu_seconds": 0.0}
    module = make(saved["steps"])
    saved = train_on(module, batches, saved, file)
    taken = {"steps": saved["steps"], "cells_seen": saved["steps"] * BATCH_SIZE, "cpu_seconds": saved["cpu_seconds"]}
    save_model(module.model.eval(), base.vocabulary, out / "model", metadata=taken, dtype="float16", overwrite=True)
    print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    main()
