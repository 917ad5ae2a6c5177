"""Interrupt training and packing in the ways that a cluster does, and check that nothing is lost.

    python scripts/faults.py [--kills 50] [--saves 50] [--record]

Runs train on packed parts, 16 cells at a time. A straight run records a digest of its checkpoint after each step:
weights, their running mean, optimiser, schedule. Others with the same configuration are killed (SIGKILL at a random
moment, or while a checkpoint is written), stopped (SIGTERM, Ctrl-C) or find the disk full; each is resumed until it is
complete. After each fault the checkpoint on the disk must equal that of the straight run at its step bit for bit, and
so must the last one. It is at most `checkpoint_every` steps old, or twice as many while the next one is written.
Packing is killed at random moments too, by one process and by three: after each kill all complete parts must equal
those of an undisturbed call, no earlier part may be missing, and at the end the folders are equal. The exit code is 1
if anything was lost.

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
import subprocess
import sys
import tempfile
import time
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


class Board:
    """Memory shared with the process that kills a run: steps done, and whether a checkpoint is being written."""

    def __init__(self) -> None:
        self.shared = multiprocessing.RawArray("q", 2)

    @property
    def done(self) -> int:
        return self.shared[0]

    @property
    def saving(self) -> bool:
        return bool(self.shared[1])


class Reporting(AtomicIO):
    """Report when a checkpoint is written; with `noted`, record its digest instead of writing it."""

    def __init__(self, board: Board, noted: dict[int, str] | None = None) -> None:
        self.board, self.noted = board, noted

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if self.noted is not None:
            self.noted[checkpoint["global_step"]] = digest(checkpoint)
            return
        super().save_checkpoint(checkpoint, path, storage_options)

    def write(self, content: io.BytesIO, path: Path, step: int | None) -> None:
        self.board.shared[1] = 1
        super().write(content, path, step)
        self.board.shared[1] = 0


class Counting(pl.Callback):
    """Report how many steps are complete; call `do` after step `at`."""

    def __init__(self, board: Board, at: int | None = None, do: Callable[[], object] = print) -> None:
        self.board, self.at, self.do = board, at, do

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        self.board.shared[0] = trainer.global_step
        if trainer.global_step == self.at:
            self.do()


class Dropping(PretrainingModule):
    """Pretraining with dropout, which draws from torch's global stream: the network itself has none."""

    def compute_loss(self, batch: Any, generator: torch.Generator) -> Any:
        loss, parts = super().compute_loss(batch, generator)
        return loss * torch.nn.functional.dropout(torch.ones(50), 0.2).mean(), parts


def digest(checkpoint: dict[str, Any]) -> str:
    """SHA-256 of all that a run goes on from."""
    found = hashlib.sha256()

    def add(part: Any, name: str) -> None:
        if isinstance(part, dict):
            for key in sorted(part, key=str):
                add(part[key], f"{name}/{key}")
        elif isinstance(part, (list, tuple)):
            for number, one in enumerate(part):
                add(one, f"{name}/{number}")
        elif isinstance(part, torch.Tensor):
            found.update(name.encode() + part.detach().cpu().contiguous().numpy().tobytes())
        else:
            found.update(f"{name}={part!r}".encode())

    kept = ("global_step", "state_dict", "current_model_state", "averaging_state", "optimizer_states", "lr_schedulers")
    add({key: checkpoint.get(key) for key in kept}, "")
    add(checkpoint["scdiva"]["batches_seen"], "batches")
    return found.hexdigest()


def saved(folder: Path) -> tuple[int, str] | None:
    """Step and digest of the checkpoint on the disk; a broken file raises."""
    file = folder / CHECKPOINT
    if not file.exists():
        return None
    checkpoint = torch.load(file, weights_only=True)
    return checkpoint["global_step"], digest(checkpoint)


def vocabulary_of(cells: ad.AnnData) -> Vocabulary:
    """The genes of toy cells, with equal entropies."""
    human = Vocabulary.human()
    genes = human.subset(human.match(cells.var_names).tokens)
    return genes.with_entropy(np.ones(genes.n_genes))


class Toy:
    """A small run on packed parts. `wide`: a network whose checkpoint takes a while to write, after each step."""

    def __init__(self, wide: bool, folder: Path) -> None:
        self.wide, self.steps, self.every = wide, 12 if wide else 40, 1 if wide else EVERY
        cells = toy(180, 60)
        self.vocabulary = vocabulary_of(cells)
        self.folder = folder
        folder.mkdir()
        for name, rows in (("a", slice(80)), ("b", slice(80, 140)), ("c", slice(140, None))):
            cells[rows].copy().write_h5ad(folder / f"{name}.h5ad")
        pack_files([folder / "a.h5ad", folder / "b.h5ad"], self.vocabulary, folder / "train", part_cells=25)
        pack_files(folder / "c.h5ad", self.vocabulary, folder / "validation")

    def run(
        self, folder: Path, board: Board, noted: dict[int, str] | None = None, *, at: int | None = None,
        do: Callable[[], object] = print,
    ) -> None:  # fmt: skip
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
        model = ScDiVa(config, generator=step_generator(0, 0, "weights"))
        module = Dropping(model, training, n_studies=2)
        fit(
            module, data, out_dir=folder, accelerator="cpu", progress=False,
            resume_from=folder if noted is None and (folder / CHECKPOINT).exists() else None,
            callbacks=[Counting(board, at, do)], plugins=[Reporting(board, noted)],
        )  # fmt: skip


class Packing:
    """Packing of three files into 23 parts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        cells = toy(1080, 300)
        self.vocabulary = vocabulary_of(cells)
        (folder / "studies").mkdir(parents=True)
        for name, rows in (("a", slice(0, 700)), ("b", slice(700, 710)), ("c", slice(710, 1080))):
            cells[rows].copy().write_h5ad(folder / "studies" / f"{name}.h5ad")

    def run(self, out: str, workers: int) -> None:
        pack_files(self.folder / "studies", self.vocabulary, self.folder / out, workers=workers, part_cells=50)

    def files(self, out: str) -> dict[str, str]:
        """SHA-256 of every file by its name; hidden ones are no part of a corpus, and none is left at the end."""
        there = sorted((self.folder / out).glob("**/*"))
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in there if path.is_file()}


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
    except BaseException:  # noqa: BLE001, said and turned into an exit code
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def ended(child: int) -> int | None:
    """Exit code of a child, negative the signal that killed it; None while it runs."""
    pid, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def wait(child: int, until: Callable[[], bool]) -> int | None:
    """Wait until something is so, or the child ends: then its exit code."""
    while (code := ended(child)) is None and not until():
        time.sleep(0.0005)
    return code


class Trial:
    """Runs with one kind of fault, against the straight one."""

    def __init__(self, name: str, job: Toy, straight: dict[int, str], folder: Path) -> None:
        self.name, self.job, self.straight, self.folder = name, job, straight, folder
        self.tried = self.exact = self.lost = 0

    def judge(self, done: int, may_lose: int, ok: bool = True) -> None:
        """Look at what is on the disk after a fault."""
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
            print(
                f"  {self.name}: {done} steps done, {step} on the disk, the same: {same}, ended well: {ok}", flush=True
            )
        self.exact += same and ok
        self.lost += done - step > may_lose

    def finish(self) -> None:
        """Resume to the end, which must be that of the straight run."""
        board = Board()
        code = wait(forked(lambda: self.job.run(self.folder, board)), lambda: False)
        at = saved(self.folder)
        if code or at is None or at[1] != self.straight[self.job.steps]:
            print(f"  {self.name}: the end is another one (exit code {code}, {at})", flush=True)
            self.lost += 1
        shutil.rmtree(self.folder)

    def row(self) -> dict[str, Any]:
        return {"fault": self.name, "tried": self.tried, "bit_exact": self.exact, "lost": self.lost}


def kills(trial: Trial, number: int, seconds: float, rng: random.Random, in_save: bool) -> None:
    """SIGKILL at random moments, or only while a checkpoint is written."""
    written = seconds / trial.job.steps / 2  # about what one checkpoint takes
    while trial.tried < number:
        board = Board()
        child = forked(lambda board=board: trial.job.run(trial.folder, board))
        if in_save:
            first = board.done + rng.randrange(1, 4)
            code = wait(child, lambda board=board, first=first: board.done >= first and board.saving)
            time.sleep(rng.random() * written)
        else:
            end = time.monotonic() + rng.random() * seconds
            code = wait(child, lambda end=end: time.monotonic() > end)
        if code is None:
            saving = board.saving
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            if saving or not in_save:  # else it was too late for this moment, and is no try
                # training continues while a checkpoint is written, until the next one is due
                trial.judge(board.done, trial.job.every * (1 + saving))
        elif code:
            raise SystemExit(f"{trial.name}: a run ended with exit code {code}.")
        if code == 0:
            trial.finish()
    if trial.folder.exists():
        trial.finish()


def signals(trial: Trial, number: int, sent: signal.Signals, code: int, rng: random.Random) -> None:
    """A signal after which a run saves and ends by itself: nothing at all is lost."""
    for _ in range(number):
        board = Board()
        child = forked(lambda board=board: trial.job.run(trial.folder, board))
        first = rng.randrange(1, trial.job.steps - 2)
        wait(child, lambda board=board, first=first: board.done >= first)
        time.sleep(rng.random() * 0.02)
        os.kill(child, sent)
        found = wait(child, lambda: False)
        trial.judge(board.done, 0, ok=found == code)
        trial.finish()


def full_disk(trial: Trial, number: int, rng: random.Random, root: Path) -> None:
    """No room from some step on: by a limit to the size of files, and in a small file system if one can be mounted."""
    small = root / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(small)]
    mounted = not subprocess.run(mount, capture_output=True, check=False).returncode
    if not mounted:
        print("  no file system of 64 MB can be made here: only the limit to the size of files is tried", flush=True)
    try:
        for turn in range(number):
            board, by_size = Board(), bool(turn % 2) or not mounted
            trial.folder = root / "full" if by_size else small / "full"

            def fill() -> None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

            def fill_all() -> None:
                try:
                    with (small / "filler").open("wb") as file:
                        while True:
                            file.write(bytes(1 << 16))
                except OSError:
                    pass

            do, at = (fill if by_size else fill_all), rng.randrange(EVERY + 1, trial.job.steps - EVERY)
            child = forked(lambda board=board, at=at, do=do: trial.job.run(trial.folder, board, at=at, do=do))
            code = wait(child, lambda: False)
            trial.judge(board.done, 2 * trial.job.every, ok=code == 28)  # the error is raised a step later
            (small / "filler").unlink(missing_ok=True)
            trial.finish()
    finally:
        if mounted:
            subprocess.run(["umount", str(small)], check=False)


def killed_packing(root: Path, number: int, workers: int, rng: random.Random) -> dict[str, Any]:
    """SIGKILL at random moments while files are packed; each call goes on after the one before until all is done."""
    what = "SIGKILL in packing" if workers == 1 else f"SIGKILL in packing, {workers} processes"
    print(f"{what} ...", flush=True)
    job, begun = Packing(root / f"packing{workers}"), time.monotonic()
    if wait(forked(lambda: job.run("straight", workers)), lambda: False):
        raise SystemExit("Packing without faults failed.")
    seconds, straight = time.monotonic() - begun, job.files("straight")
    tried = exact = lost = 0
    known: set[str] = set()
    while tried < number or known:  # to the end
        kills = tried < number
        end = time.monotonic() + rng.random() * seconds
        child = forked(lambda: job.run("killed", workers))
        code = wait(child, lambda end=end, kills=kills: kills and time.monotonic() > end)
        if code is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            found = job.files("killed")
            parts = {name: digest for name, digest in found.items() if name.startswith("part-")}
            same = parts.items() <= straight.items()
            tried, exact, lost = tried + 1, exact + same, lost + bool(known - parts.keys())
            if not same or known - parts.keys():
                print(f"  {what}: parts alike: {same}, gone: {sorted(known - parts.keys())}", flush=True)
            known = set(parts)
        else:
            if code or (found := job.files("killed")) != straight:
                print(f"  {what}: the end is another one (exit code {code})", flush=True)
                lost += 1
            shutil.rmtree(job.folder / "killed")
            known = set()
    return {"fault": what, "tried": tried, "bit_exact": exact, "lost": lost}


def straight_run(job: Toy, folder: Path) -> tuple[dict[int, str], float]:
    """Digests after each step of a run without faults, and the seconds of one that writes its checkpoints."""

    def note() -> None:
        noted: dict[int, str] = {}
        job.run(folder / "noted", Board(), noted)
        (folder / "noted.json").write_text(json.dumps(noted))

    if wait(forked(note), lambda: False):
        raise SystemExit("The run without faults failed.")
    begun = time.monotonic()
    wait(forked(lambda: job.run(folder / "timed", Board())), lambda: False)
    seconds = time.monotonic() - begun
    digests = {int(step): found for step, found in json.loads((folder / "noted.json").read_text()).items()}
    if saved(folder / "timed") != (job.steps, digests[job.steps]):
        raise SystemExit("Two runs without faults differ.")
    return digests, seconds


def trials(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rng = random.Random(arguments.seed)
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        root = Path(name)

        def begin(what: str, job: Toy, straight: dict[int, str]) -> Trial:
            print(f"{what} ...", flush=True)
            return Trial(what, job, straight, root / "run")

        job = Toy(wide=False, folder=root / "small_run")
        straight, seconds = straight_run(job, root / "small_run")
        trial = begin("SIGKILL in fit", job, straight)
        kills(trial, arguments.kills, seconds, rng, in_save=False)
        rows.append(trial.row())
        for what, sent, code in (("SIGTERM", signal.SIGTERM, 143), ("Ctrl-C", signal.SIGINT, 130)):
            trial = begin(what, job, straight)
            signals(trial, arguments.signals, sent, code, rng)
            rows.append(trial.row())
        trial = begin("disk full", job, straight)
        full_disk(trial, arguments.signals, rng, root)
        rows.append(trial.row())
        job = Toy(wide=True, folder=root / "wide_run")
        straight, seconds = straight_run(job, root / "wide_run")
        trial = begin("SIGKILL in save", job, straight)
        kills(trial, arguments.saves, seconds, rng, in_save=True)
        rows.append(trial.row())
        rows.append(killed_packing(root, arguments.kills, 1, rng))
        rows.append(killed_packing(root, max(1, arguments.signals // 2), 3, rng))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="SIGKILLs at random moments")
    parser.add_argument("--saves", type=int, default=50, help="SIGKILLs while a checkpoint is written")
    parser.add_argument("--signals", type=int, default=10, help="SIGTERMs, Ctrl-Cs and full disks, of each so many")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--folder", type=Path, help="where the runs are written; default the system's temporary folder")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/faults.json")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    begun = time.monotonic()
    rows = trials(arguments)
    if arguments.record:
        sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
        from _record import record

        record("faults", rows, seconds=round(time.monotonic() - begun))
    print(f"{'fault':32}{'tried':>8}{'bit-exact':>12}{'lost':>8}")
    for row in rows:
        print(f"{row['fault']:32}{row['tried']:8}{row['bit_exact']:12}{row['lost']:8}")
    print(f"{time.monotonic() - begun:.0f} s")
    return int(any(row["lost"] or row["bit_exact"] < row["tried"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
