"""The processes of test_distributed.py, started as torchrun would; and the runs that it compares them with.

python distributed_process.py FOLDER     (FOLDER holds corpus.h5 and vocabulary.safetensors)

Packages are imported once: the processes are forks of this one.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytorch_lightning as pl
import torch

from scdiva.data.datamodule import CellDataModule
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.tokenizer.vocabulary import Vocabulary
from scdiva.train import PretrainingConfig, PretrainingModule, fit


class Watched(PretrainingModule):
    """Keeps loss, number and cells of each batch, and draws dropout from torch's global stream."""

    def drawn_loss(self, batch, number, stream):
        ends = batch.cu_seqlens.tolist()
        cells = [(*batch.tokens[a:b].tolist(), *batch.values[a:b].tolist()) for a, b in itertools.pairwise(ends)]
        self.seen = [*getattr(self, "seen", []), (number, cells)]
        return super().drawn_loss(batch, number, stream)

    def compute_loss(self, batch, generator):
        loss, parts = super().compute_loss(batch, generator)
        loss = loss * torch.nn.functional.dropout(torch.ones(50), 0.2, self.training).mean()
        if self.training:
            self.losses = [*getattr(self, "losses", []), float(loss.detach())]
        return loss, parts


def run(folder: Path, out: str, *, kind=Watched, callbacks=(), resume=False, stop=None, **settings):
    """Train and return the module, the trainer and whatever ended the run."""
    vocabulary = Vocabulary.read(folder / "vocabulary.safetensors")
    training = {
        "steps": 6, "batch_size": 5, "warmup_steps": 2, "precision": "fp32", "context": 16, "log_every": 1,
        "validate_every": 3, "checkpoint_every": 2, "learning_rate": 3e-3, "anchor_objective": "genes",
    }  # fmt: skip
    config = PretrainingConfig(**training | settings)
    sizes = {
        "n_genes": 40, "dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 24, "max_length": 16, "anchor_linear_dim": 8,
        "anchor_learned_dim": 6, "anchor_hidden": 12,
    }  # fmt: skip
    model = ScDiVa(ScDiVaConfig(**sizes), generator=torch.Generator().manual_seed(1))
    module, corpus, out_dir = kind(model, config, n_studies=3), folder / "corpus.h5", folder / out
    how = {"batch_size": config.batch_size, "context": 16, "n_blocks": 2, "validation_cells": 10}
    data = CellDataModule(corpus, validation=corpus, vocabulary=vocabulary, **how)
    trainer = error = None
    where = {"out_dir": out_dir, "resume_from": out_dir if resume else None, "accelerator": "cpu", "progress": False}
    try:
        trainer = fit(module, data, callbacks=callbacks, max_steps=stop, **where)
    except BaseException as stopped:  # noqa: BLE001, handed over
        error = stopped
    data.close()
    metrics = {} if trainer is None else {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "weights": torch.cat([p.detach().flatten() for p in module.parameters()]),
        "losses": getattr(module, "losses", []),
        "seen": getattr(module, "seen", []),
        "logged": metrics,
        "validation": metrics.get("val/loss"),
        "world_size": None if trainer is None else trainer.world_size,
        "error": repr(error),
        "code": getattr(error, "code", None),
    }


class Terminate(pl.Callback):
    """SIGTERM to one process only, after step 3."""

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 3 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


class Late(Watched):
    """Reads flags a step late, as on a GPU."""

    reads_late = True


class Broken(Watched):
    """A loss that is no number in the second process, in its third batch."""

    def compute_loss(self, batch, generator):
        loss, parts = super().compute_loss(batch, generator)
        return (loss * torch.nan if self.batches_seen == 4 and self.global_rank == 1 else loss), parts


RESIZED = {"steps": 22, "validate_every": 5}


def of_two(folder: Path, rank: int) -> None:
    """Do all runs of two processes."""
    results = {
        # each block run again; one process holds it all
        "plain": run(folder, "plain", accumulate=2, micro_batches=2, log_every=3),
        "stopped": run(folder, "halves", callbacks=[Terminate()]),
    }
    results["resumed"] = run(folder, "halves", resume=True)
    results["late"] = run(folder, "late", kind=Late, callbacks=[Terminate()], log_every=100)
    results["late, resumed"] = run(folder, "late", kind=Late, resume=True, log_every=100)
    results["broken"] = run(folder, "broken", kind=Broken)
    results["resized"] = run(folder, "resized", stop=6, **RESIZED)
    torch.save(results, folder / f"rank{rank}.pt")


def of_one(folder: Path, rank: int) -> None:
    """Go on with what two began, and leave the rest to four."""
    torch.save(run(folder, "resized", stop=10, resume=True, **RESIZED), folder / "resized by one.pt")


def of_four(folder: Path, rank: int) -> None:
    """Finish it."""
    torch.save(run(folder, "resized", resume=True, **RESIZED), folder / f"resized by four, {rank}.pt")


def start(n: int, work: Callable[[Path, int], None], folder: Path) -> None:
    """Do work in n processes; stop all if one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    children = []
    for rank in range(n):
        child = os.fork()
        if child == 0:
            os.environ.update({
                "TORCHELASTIC_RUN_ID": "test", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n),
                "LOCAL_WORLD_SIZE": str(n), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            })  # fmt: skip
            code = 1
            try:
                work(folder, rank)
                code = 0
            except BaseException:  # noqa: BLE001, told by the log
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    left = set(children)
    while left:
        child, status = os.wait()
        left.discard(child)
        if status:
            for sibling in left:
                os.kill(sibling, signal.SIGKILL)
            raise SystemExit(f"process {children.index(child)} of {n} failed: {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for n, work in ((2, of_two), (1, of_one), (4, of_four)):
        start(n, work, Path(sys.argv[1]))
