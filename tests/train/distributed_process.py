"""One of the processes that test_distributed.py starts as torchrun would; and the runs that it compares them with.

python distributed_process.py FOLDER     (FOLDER holds corpus.h5 and vocabulary.safetensors)
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytorch_lightning as pl
import torch

from scdiva.data.datamodule import CellDataModule
from scdiva.diffusion.masking import Corrupted
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.tokenizer.vocabulary import Vocabulary
from scdiva.train import PretrainingConfig, PretrainingModule, fit, pretraining


class Watched(PretrainingModule):
    """Keeps the loss of each batch, and draws dropout from torch's global stream."""

    def compute_loss(self, batch, generator):
        loss, parts = super().compute_loss(batch, generator)
        loss = loss * torch.nn.functional.dropout(torch.ones(50), 0.2, self.training).mean()
        if self.training:
            self.losses = [*getattr(self, "losses", []), float(loss.detach())]
        return loss, parts


def every_other(tokens, values, cu_seqlens, times, generator, *, value_mask_rate=0.0):
    """Hide what the cell alone decides, whatever batch it is in."""
    masked = tokens % 2 == 0
    masked[cu_seqlens[:-1].long()] = True  # a gene of every cell: the loss then is the plain mean over cells
    return Corrupted(torch.where(masked, 1, tokens), torch.where(masked, 0.0, values), masked, masked)


def run(folder: Path, out: str, *, kind=Watched, callbacks=(), resume=False, **settings):
    """Train and return the module, the trainer and whatever ended the run."""
    vocabulary = Vocabulary.read(folder / "vocabulary.safetensors")
    training = {
        "steps": 6, "batch_size": 5, "warmup_steps": 2, "precision": "fp32", "context": 16, "log_every": 1,
        "validate_every": 3, "checkpoint_every": 2, "learning_rate": 3e-3, "anchor_objective": "genes",
    } | settings  # fmt: skip
    config = PretrainingConfig(**training)
    model = ScDiVa(
        ScDiVaConfig(
            n_genes=40, dim=16, n_layers=1, n_heads=2, ffn_dim=24, max_length=16, anchor_linear_dim=8,
            anchor_learned_dim=6, anchor_hidden=12,
        ),
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    module = kind(model, config, n_studies=3)
    data = CellDataModule(
        folder / "corpus.h5", validation=folder / "corpus.h5", vocabulary=vocabulary, batch_size=config.batch_size,
        context=16, n_blocks=2, validation_cells=10,
    )  # fmt: skip
    place = folder / out
    trainer = error = None
    try:
        trainer = fit(
            module, data, out_dir=place, accelerator="cpu", progress=False, callbacks=callbacks,
            resume_from=place if resume else None,
        )  # fmt: skip
    except BaseException as stopped:  # noqa: BLE001, handed over
        error = stopped
    found = {
        "weights": torch.cat([p.detach().flatten() for p in module.parameters()]),
        "losses": getattr(module, "losses", []),
        "validation": None if trainer is None else float(trainer.callback_metrics["val/loss"]),
        "world_size": None if trainer is None else trainer.world_size,
        "error": repr(error),
        "code": getattr(error, "code", None),
    }
    data.close()
    return found


class Terminate(pl.Callback):
    """SIGTERM to one process only, after step 3."""

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 3 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


class Broken(Watched):
    """A loss that is no number in the second process, in its batch 2."""

    def compute_loss(self, batch, generator):
        loss, parts = super().compute_loss(batch, generator)
        return (loss * torch.nan if self.batches_seen == 2 and self.global_rank == 1 else loss), parts


def patched():
    """Make masks and times a function of the cell alone, to compare batches of unlike size."""
    pretraining.mask_tokens = every_other
    pretraining.stratified_times = lambda n, generator: torch.full((n,), 0.5)


CELLWISE = {"kind": PretrainingModule}


def main(folder: Path) -> None:
    """Do all runs in this process and its sisters."""
    rank = os.environ["RANK"]
    torch.set_num_threads(1)
    found = {
        "plain": run(folder, "plain", accumulate=2),
        "stopped": run(folder, "halves", callbacks=[Terminate()]),
        "resumed": run(folder, "halves", resume=True),
        "broken": run(folder, "broken", kind=Broken),
    }
    patched()
    found["cellwise"] = run(folder, "cellwise", **CELLWISE)
    torch.save(found, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
