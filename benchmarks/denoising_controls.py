"""Train the controls of denoising.py: transformers that do and don't know the rank of masked genes.

    python benchmarks/denoising_controls.py --base runs/held_out --out runs/controls [--arms ...] [--seconds 7200]

All start from the frozen set encoder and state head of `--base` (denoising.py says how it is made) and train a
transformer of the bundled model's size from random weights, for the same CPU seconds on one thread; learning-rate
schedules end with them. OUT/ARM is a model folder for `denoising.py --transformers ARM=OUT/ARM`. A call that was
stopped goes on from OUT/ARM.pt, bit for bit.

- `true`: masked genes keep their place among the ranks, as in the paper, with the prior that states what a place says.
- `none`: no positions.
- `behind`: masked genes stand behind the visible ones, in random order.
- `random`: masked genes stand at random places among the visible ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from ablation import Batches, autocast, train
from torch import Tensor

from scdiva._rng import step_generator
from scdiva.data.batch import CellBatch
from scdiva.data.order import Order
from scdiva.data.packed import PackedCells
from scdiva.data.pool import CellPool
from scdiva.data.stream import TrainingStream
from scdiva.diffusion import cell_of_token, mask_tokens
from scdiva.diffusion.masking import Corrupted
from scdiva.models import ScDiVa, load_model, save_model
from scdiva.tokenizer import Vocabulary
from scdiva.tokenizer.serialize import score_denominator
from scdiva.train import PretrainingConfig, PretrainingModule

STREAM_SCALE = 0.3
ARMS = ("true", "none", "behind", "random")
CONTEXT, BATCH_SIZE, TRIAL_STEPS, BLOCK_ROWS = 512, 16, 12, 16


class PlacesModule(PretrainingModule):
    """Pretraining with the masked genes behind the visible ones, or at random places among them."""

    def __init__(self, model: ScDiVa, config: PretrainingConfig, *, behind: bool) -> None:
        super().__init__(model, config)
        self.behind = behind

    def _corrupted(
        self, batch: CellBatch, times: Tensor, generator: torch.Generator, value_mask_rate: float = 0.0
    ) -> Corrupted:
        bounds = batch.cu_seqlens
        masked = mask_tokens(batch.tokens, batch.values, bounds, times, generator, value_mask_rate=value_mask_rate)
        order = moved(masked.masked, bounds, generator, behind=self.behind)
        batch.tokens.copy_(batch.tokens[order])  # the loss reads the batch after this, in the new order too
        batch.values.copy_(batch.values[order])
        return Corrupted(*(part[order] for part in masked))


def moved(masked: Tensor, cu_seqlens: Tensor, generator: torch.Generator, *, behind: bool) -> Tensor:
    """An order of packed positions: visible genes as they stood, masked ones behind them or at random places."""
    cells = cell_of_token(cu_seqlens, masked.numel())
    lengths = cu_seqlens.diff()[cells]
    place = torch.arange(masked.numel()) - cu_seqlens[:-1].long()[cells] + 0.5
    drawn = torch.rand(masked.numel(), generator=generator, dtype=torch.float64) * lengths
    place = torch.where(masked, drawn + (lengths if behind else 0), place)
    by_place = place.argsort(stable=True)
    return by_place[cells[by_place].argsort(stable=True)]


def control(arm: str, base: ScDiVa, seed: int) -> ScDiVa:
    """A model with the set encoder, gene table and state head of the base and a transformer drawn anew."""
    config = replace(base.config, position="none" if arm == "none" else "rope", query_head=False)
    model = ScDiVa(config, generator=step_generator(seed, 0, "controls"))
    kept = {name: value for name, value in base.state_dict().items() if name.startswith(("anchor.", "state_head."))} | {
        "embedding.gene.weight": base.embedding.gene.weight
    }
    missing, unexpected = model.load_state_dict(kept, strict=False)
    assert not unexpected
    assert all(name.startswith(("blocks.", "norm.", "heads.", "embedding.", "anchor_")) for name in missing), missing
    with torch.no_grad():  # starts as a correction to what state and place predict
        model.norm.weight.mul_(STREAM_SCALE)
        model.heads.value.weight.zero_()
        model.heads.value.bias.zero_()
    for part in (model.embedding.gene, model.anchor, model.state_head):
        part.requires_grad_(False)
    return model


def module_of(arm: str, model: ScDiVa, vocabulary: Vocabulary, steps: int, seed: int) -> PretrainingModule:
    config = PretrainingConfig(
        steps=steps, batch_size=BATCH_SIZE, context=CONTEXT, learning_rate=1e-3, warmup_steps=max(1, steps // 20),
        anchor_objective="none", scored_genes=64, place_prior=arm == "true", value_weight=1.0, precision="auto",
        autotune=False, seed=seed,
    )  # fmt: skip
    if arm in ("behind", "random"):
        return PlacesModule(model, config, behind=arm == "behind")
    denominator = score_denominator(vocabulary.entropy, model.config.entropy_floor) if arm == "true" else None
    return PretrainingModule(model, config, denominator=denominator)


def train_on(module: PretrainingModule, batches: Batches, saved: dict, file: Path) -> dict:
    """Train from the step that `saved` holds to the last; every hundred steps, write what a later call goes on from."""
    made = module.configure_optimizers()
    parts = {"optimizer": made["optimizer"], "schedule": made["lr_scheduler"]["scheduler"], "module": module}
    for name, part in parts.items():
        if name in saved:
            part.load_state_dict(saved[name])
    while saved["step"] < saved["steps"]:
        begun = time.process_time()
        with autocast(module.config):
            loss, _ = module.compute_loss(
                batches(saved["step"]), step_generator(module.config.seed, saved["step"], "train/0")
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), module.config.clip)
        for part in (parts["optimizer"], parts["schedule"]):
            part.step()
        parts["optimizer"].zero_grad()
        saved = saved | {"step": saved["step"] + 1, "cpu_seconds": saved["cpu_seconds"] + time.process_time() - begun}
        if saved["step"] % 100 == 0 or saved["step"] == saved["steps"]:
            saved |= {name: part.state_dict() for name, part in parts.items()}
            torch.save(saved, file.with_suffix(".new"))
            file.with_suffix(".new").rename(file)
            print(
                f"{file.stem}: step {saved['step']} of {saved['steps']}, {saved['cpu_seconds']:.0f} CPU s", flush=True
            )
    return saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--seconds", type=float, default=7200, help="CPU seconds of each arm")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    base, seed = load_model(arguments.base / "model"), arguments.seed
    cells = PackedCells(arguments.base / "prepared" / "train.h5", base.vocabulary)
    pool = CellPool([cells], [cells.study], 1, CONTEXT, BLOCK_ROWS)
    batches = TrainingStream(Order(pool, seed, BATCH_SIZE)).batch
    arguments.out.mkdir(parents=True, exist_ok=True)
    for arm in arguments.arms:
        model, file = control(arm, base, seed), arguments.out / f"{arm}.pt"
        if (arguments.out / arm).exists():
            continue
        if file.exists():
            saved = torch.load(file, weights_only=True)
        else:
            trial = train(module_of(arm, control(arm, base, seed), base.vocabulary, 10**6, seed), batches)
            steps = round(arguments.seconds / median(list(itertools.islice(trial, TRIAL_STEPS))[TRIAL_STEPS // 4 :]))
            saved = {"steps": steps, "step": 0, "cpu_seconds": 0.0}
        saved = train_on(module_of(arm, model, base.vocabulary, saved["steps"], seed), batches, saved, file)
        taken = {
            "control": arm, "steps": saved["steps"], "cells_seen": saved["steps"] * BATCH_SIZE, "context": CONTEXT,
            "cpu_seconds": round(saved["cpu_seconds"]),
        }  # fmt: skip
        save_model(model.eval(), base.vocabulary, arguments.out / arm, metadata=taken, dtype="float16", overwrite=True)
        print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    main()
