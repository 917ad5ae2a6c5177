"""Interrupt training and packing as clusters do, and check that nothing is lost.

    python scripts/faults.py [--kills 50] [--saves 50] [--signals 10] [--record]

An undisturbed run records a digest of its checkpoint after each step: weights, their running mean, optimiser, schedule.
Other runs with the same configuration are killed (SIGKILL at a random moment, or while a checkpoint is written),
stopped (SIGTERM, Ctrl-C) or run out of disk space, and are resumed until they are complete. After each fault the
checkpoint on the disk must equal that of the undisturbed run at its step bit for bit, and so must the last one. It is
at most `checkpoint_every` steps old, or twice as many while the next one is written. Packing is killed too, with one
process and with three: all complete parts must equal those of an undisturbed call, no earlier part may be missing, and
at the end the folders are equal. The exit code is 1 if anything was lost.

Runs are forked from this process, which has done no arithmetic yet: imports take longer than these runs.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytorch_lightning as pl
import torch

from scdiva._rng import step_generator
from scdiva.data.datamodule import CellDataModule
from scdiva.data.packing import pack_files
from scdiva.datasets import toy
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.tokenizer import Vocabulary
from scdiva.train import PretrainingConfig, PretrainingModule, fit
from scdiva.train.callbacks import CHECKPOINT, AtomicIO

EVERY = 4
"""Steps between two checkpoints of a run that is killed at any moment."""
Board = Any
"""Memory shared with the process of a run: steps that are complete, and whether a checkpoint is being written."""


def new_board() -> Board:
    return multiprocessing.RawArray("q", 2)


class Reporting(AtomicIO):
    """Report when a checkpoint is written; with `noted`, record its digest instead of writing it."""

    def __init__(self, board: Board, noted: dict[int, str] | None = None) -> None:
        self.board, self.noted = board, noted

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if self.noted is None:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            self.noted[checkpoint["global_step"]] = digest(checkpoint)

    def write(self, content: io.BytesIO, path: Path, step: int | None) -> None:
        self.board[1] = 1
        super().write(content, path, step)
        self.board[1] = 0


class Counting(pl.Callback):
    """Report the number of completed steps. After step `full_at`, limit files to 20 kB to simulate a full disk."""

    def __init__(self, board: Board, full_at: int | None) -> None:
        self.board, self.full_at = board, full_at

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        self.board[0] = trainer.global_step
        if trainer.global_step == self.full_at:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


class Dropping(PretrainingModule):
    """Pretraining with dropout, which draws from torch's global generator."""

    def compute_loss(self, batch: Any, generator: torch.Generator) -> Any:
        loss, parts = super().compute_loss(batch, generator)
        return loss * torch.nn.functional.dropout(torch.ones(50), 0.2).mean(), parts


def digest(checkpoint: dict[str, Any]) -> str:
    """SHA-256 of everything that a run continues from."""
    sha256 = hashlib.sha256()

    def add(part: Any, name: str) -> None:
        if isinstance(part, dict):
            for key in sorted(part, key=str):
                add(part[key], f"{name}/{key}")
        elif isinstance(part, (list, tuple)):
            for number, one in enumerate(part):
                add(one, f"{name}/{number}")
        elif isinstance(part, torch.Tensor):
            sha256.update(name.encode() + part.detach().cpu().contiguous().numpy().tobytes())
        else:
            sha256.update(f"{name}={part!r}".encode())

    keys = ("global_step", "state_dict", "current_model_state", "averaging_state", "optimizer_states", "lr_schedulers")
    add({key: checkpoint.get(key) for key in keys}, "")
    add(checkpoint["scdiva"]["batches_seen"], "batches")
    return sha256.hexdigest()


def saved(folder: Path) -> tuple[int, str] | None:
    """Step and digest of the checkpoint on the disk; a broken file raises."""
    if not (folder / CHECKPOINT).exists():
        return None
    checkpoint = torch.load(folder / CHECKPOINT, weights_only=True)
    return checkpoint["global_step"], digest(checkpoint)


def write_studies(cells: ad.AnnData, folder: Path, cuts: tuple[int, ...]) -> Vocabulary:
    """Write cells as files a, b and c; return their genes with equal entropies."""
    folder.mkdir(parents=True)
    for name, start, stop in zip("abc", (0, *cuts), (*cuts, cells.n_obs), strict=True):
        cells[start:stop].copy().write_h5ad(folder / f"{name}.h5ad")
    human = Vocabulary.human()
    genes = human.subset(human.match(cells.var_names).tokens)
    return genes.with_entropy(np.ones(genes.n_genes))


class Toy:
    """A small run on packed parts. `wide`: a network whose checkpoint takes a while to write, after each step."""

    def __init__(self, wide: bool, folder: Path) -> None:
        self.wide, self.steps, self.every, self.folder = wide, 12 if wide else 40, 1 if wide else EVERY, folder
        self.vocabulary = write_studies(toy(180, 60), folder, (80, 140))
        pack_files([folder / "a.h5ad", folder / "b.h5ad"], self.vocabulary, folder / "train", part_cells=25)
        pack_files(folder / "c.h5ad", self.vocabulary, folder / "validation")

    def run(self, folder: Path, board: Board, noted: dict[int, str] | None = None, full_at: int | None = None) -> None:
        """Train, from the checkpoint if there is one; with `noted`, only record the digests of checkpoints."""
        wide = 256 if self.wide else 16
        config = ScDiVaConfig(
            n_genes=60, dim=wide, n_layers=4 if self.wide else 1, n_heads=4, ffn_dim=2 * wide, max_length=32,
            anchor_linear_dim=8, anchor_learned_dim=6, anchor_hidden=12,
        )  # fmt: skip
        training = PretrainingConfig(
            steps=self.steps, batch_size=6, accumulate=1 if self.wide else 2, warmup_steps=3, precision="fp32",
            context=32, log_every=5, validate_every=7, checkpoint_every=1 if noted is not None else self.every,
            anchor_objective="genes",
        )  # fmt: skip
        data = CellDataModule(
            self.folder / "train", validation=self.folder / "validation", vocabulary=self.vocabulary, batch_size=6,
            context=32, block_rows=8, n_blocks=2,
        )  # fmt: skip
        fit(
            Dropping(ScDiVa(config, generator=step_generator(0, 0, "weights")), training, n_studies=2), data,
            out_dir=folder, accelerator="cpu", progress=False,
            resume_from=folder if noted is None and (folder / CHECKPOINT).exists() else None,
            callbacks=[Counting(board, full_at)], plugins=[Reporting(board, noted)],
        )  # fmt: skip


# interruptions


def forked(work: Callable[[], object]) -> int:
    """Do something in a forked process; returns its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        work()
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except KeyboardInterrupt:
        code = 130
    except OSError as error:
        code = 28
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))  # for a long log
        print(f"  {error}", flush=True)
    except BaseException:  # noqa: BLE001, printed and turned into an exit code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait(child: int, until: Callable[[], bool] = lambda: False) -> int | None:
    """Wait until a condition holds (None) or the child ends (its exit code, or minus the signal that killed it)."""
    while not (status := os.waitpid(child, os.WNOHANG))[0]:
        if until():
            return None
        time.sleep(0.0005)
    return os.waitstatus_to_exitcode(status[1])


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


class Trial:
    """Runs with one kind of fault, compared with the undisturbed one."""

    def __init__(self, name: str, job: Toy, straight: dict[int, str], folder: Path) -> None:
        print(f"{name} ...", flush=True)
        self.name, self.job, self.straight, self.folder = name, job, straight, folder
        self.tried = self.exact = self.lost = 0

    def judge(self, done: int, may_lose: int, ok: bool = True) -> None:
        """Check the disk after a fault."""
        self.tried += 1
        try:
            at = saved(self.folder)
        except Exception as error:  # noqa: BLE001, whatever a broken file raises
            print(f"  {self.name}: the checkpoint cannot be read: {error}", flush=True)
            self.lost += 1
            return
        step = 0 if at is None else at[0]
        same = at is None or at[1] == self.straight[step]
        if not same or not ok or done - step > may_lose:
            print(f"  {self.name}: {done} steps, {step} on the disk, same: {same}, ended well: {ok}", flush=True)
        self.exact += same and ok
        self.lost += done - step > may_lose

    def finish(self) -> None:
        """Resume to the end; the final checkpoint must equal that of the undisturbed run."""
        code, at = wait(self.start(new_board())), saved(self.folder)
        if code or at is None or at[1] != self.straight[self.job.steps]:
            print(f"  {self.name}: the end differs (exit code {code}, {at})", flush=True)
            self.lost += 1
        shutil.rmtree(self.folder)

    def start(self, board: Board, full_at: int | None = None) -> int:
        return forked(lambda: self.job.run(self.folder, board, full_at=full_at))

    def row(self) -> dict[str, Any]:
        return {"fault": self.name, "tried": self.tried, "bit_exact": self.exact, "lost": self.lost}


def kills(trial: Trial, number: int, seconds: float, rng: random.Random, in_save: bool) -> dict[str, Any]:
    """SIGKILL at random moments, or only while a checkpoint is written."""
    while trial.tried < number:
        board = new_board()
        child, first, end = trial.start(board), rng.randrange(1, 4), time.monotonic() + rng.random() * seconds
        if in_save:
            code = wait(child, lambda board=board, first=first: board[0] >= first and board[1])
            time.sleep(rng.random() * seconds / trial.job.steps / 2)  # about what one checkpoint takes
        else:
            code = wait(child, lambda end=end: time.monotonic() > end)
        if code is None:
            saving = bool(board[1])
            kill(child)
            if saving or not in_save:  # otherwise the kill came after the save, which is not counted
                # training continues while a checkpoint is written, until the next one is due
                trial.judge(board[0], trial.job.every * (1 + saving))
        elif code:
            raise SystemExit(f"{trial.name}: a run ended with exit code {code}.")
        else:
            trial.finish()
    if trial.folder.exists():
        trial.finish()
    return trial.row()


def signals(trial: Trial, number: int, sent: signal.Signals, code: int, rng: random.Random) -> dict[str, Any]:
    """A signal after which a run saves and ends: no step is lost."""
    for _ in range(number):
        board, first = new_board(), rng.randrange(1, trial.job.steps - 2)
        child = trial.start(board)
        wait(child, lambda board=board, first=first: board[0] >= first)
        time.sleep(rng.random() * 0.02)
        os.kill(child, sent)
        trial.judge(board[0], 0, ok=wait(child) == code)
        trial.finish()
    return trial.row()


def full_disk(trial: Trial, number: int, rng: random.Random) -> dict[str, Any]:
    """Simulate a full disk from a random step on by limiting the file size."""
    for _ in range(number):
        board, full_at = new_board(), rng.randrange(EVERY + 1, trial.job.steps - EVERY)
        code = wait(trial.start(board, full_at))
        trial.judge(board[0], 2 * trial.job.every, ok=code == 28)  # the error is raised a step later
        trial.finish()
    return trial.row()


def killed_packing(root: Path, number: int, workers: int, rng: random.Random) -> dict[str, Any]:
    """SIGKILL at random moments while files are packed; each call continues the one before until all is packed."""
    what = "SIGKILL in packing" if workers == 1 else f"SIGKILL in packing, {workers} processes"
    print(f"{what} ...", flush=True)
    root = root / f"packing{workers}"
    vocabulary = write_studies(toy(1080, 300), root / "studies", (700, 710))

    def start(out: str) -> int:
        return forked(lambda: pack_files(root / "studies", vocabulary, root / out, workers=workers, part_cells=50))

    def files(out: str) -> dict[str, str]:
        paths = sorted(path for path in (root / out).glob("**/*") if path.is_file())
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}

    start_time = time.monotonic()
    if wait(start("straight")):
        raise SystemExit("Packing without faults failed.")
    seconds, straight = time.monotonic() - start_time, files("straight")
    tried = exact = lost = 0
    complete: set[str] = set()
    while tried < number or complete:  # to the end
        end = time.monotonic() + (rng.random() * seconds if tried < number else np.inf)
        child = start("killed")
        code = wait(child, lambda end=end: time.monotonic() > end)
        if code is None:
            kill(child)
            parts = {name: digest for name, digest in files("killed").items() if name.startswith("part-")}
            same = parts.items() <= straight.items()
            tried, exact, lost = tried + 1, exact + same, lost + bool(complete - parts.keys())
            complete = set(parts)
        else:
            lost += bool(code) or files("killed") != straight
            shutil.rmtree(root / "killed")
            complete = set()
    return {"fault": what, "tried": tried, "bit_exact": exact, "lost": lost}


def straight_run(job: Toy) -> tuple[dict[int, str], float]:
    """Digests after each step of a run without faults, and the seconds of one that writes its checkpoints."""

    def note() -> None:
        noted: dict[int, str] = {}
        job.run(job.folder / "noted", new_board(), noted)
        (job.folder / "noted.json").write_text(json.dumps(noted))

    if wait(forked(note)):
        raise SystemExit("The run without faults failed.")
    start_time = time.monotonic()
    wait(forked(lambda: job.run(job.folder / "timed", new_board())))
    seconds = time.monotonic() - start_time
    digests = {int(step): digest for step, digest in json.loads((job.folder / "noted.json").read_text()).items()}
    if saved(job.folder / "timed") != (job.steps, digests[job.steps]):
        raise SystemExit("Two runs without faults differ.")
    return digests, seconds


def trials(arguments: argparse.Namespace, root: Path) -> list[dict[str, Any]]:
    rng, number = random.Random(arguments.seed), arguments.signals
    job = Toy(wide=False, folder=root / "small_run")
    straight, seconds = straight_run(job)
    run = root / "run"
    rows = [
        kills(Trial("SIGKILL in fit", job, straight, run), arguments.kills, seconds, rng, in_save=False),
        signals(Trial("SIGTERM", job, straight, run), number, signal.SIGTERM, 143, rng),
        signals(Trial("Ctrl-C", job, straight, run), number, signal.SIGINT, 130, rng),
        full_disk(Trial("disk full", job, straight, run), number, rng),
    ]
    job = Toy(wide=True, folder=root / "wide_run")
    straight, seconds = straight_run(job)
    rows.append(kills(Trial("SIGKILL in save", job, straight, run), arguments.saves, seconds, rng, in_save=True))
    return [*rows, killed_packing(root, arguments.kills, 1, rng), killed_packing(root, max(1, number // 2), 3, rng)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="SIGKILLs at random moments")
    parser.add_argument("--saves", type=int, default=50, help="SIGKILLs while a checkpoint is written")
    parser.add_argument("--signals", type=int, default=10, help="number of SIGTERMs, of Ctrl-Cs and of full disks")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/faults.json")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    start_time = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = trials(arguments, Path(folder))
    if arguments.record:
        sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
        from _record import record

        record("faults", rows, seconds=round(time.monotonic() - start_time))
    for row in rows:
        print(row)
    return int(any(row["lost"] or row["bit_exact"] < row["tried"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
