"""Kill training in every way that a cluster knows, and see that nothing is lost.

    python scripts/faults.py [--kills 50] [--saves 50] [--record]
    python scripts/faults.py --long --corpus FOLDER [--exclude NAME ...] [--steps 400] [--record]

Runs train on packed parts, which a thread reads ahead, 16 cells at a time. A straight run notes what its checkpoint is
after each step: weights, their running mean, optimiser, schedule. Others of the same configuration are killed (SIGKILL
at a random moment, or while a checkpoint is being written), told to stop (SIGTERM, Ctrl-C) or find the disk full; each
is resumed until it is done. After each fault the checkpoint on the disk must be that of the straight run at its step,
bit for bit, at most `checkpoint_every` steps old, and so must be the end.
Packing is killed at random moments too, by one process and by three: after each kill all parts that have their name
must be those of a call that was never killed, none that was there may be gone, and at the end the folders are alike.
The last lines are a table of what was tried, bit-exact and lost; the exit code is 1 if anything was lost.

`--long` is `scdiva pretrain --preset mini` on a folder of files, as a user calls it: once without kills, once killed at
two random moments and resumed, and compares the weights of the two models.

Runs are forked from this process, which has done no arithmetic yet: imports take longer than these runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
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

import torch
from faults_runs import EVERY, Board, Packing, Toy, saved

from scdiva.data.corpus import data_files
from scdiva.train.callbacks import CHECKPOINT


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
                trial.judge(board.done, trial.job.every)
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
            trial.judge(board.done, trial.job.every, ok=code == 28)
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


def short(arguments: argparse.Namespace) -> list[dict[str, Any]]:
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


def long(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The command of a user on real files, without kills and with two."""
    rng = random.Random(arguments.seed)
    files = [file for file in data_files([arguments.corpus]) if file.stem not in arguments.exclude]
    command = [
        sys.executable, "-m", "scdiva", "pretrain", "--preset", "mini", "--progress", "false",
        "--train", f"[{', '.join(map(str, files))}]",
        "--validation_studies", "0.1", "--training.checkpoint_every", "50", "--training.steps", str(arguments.steps),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        one, two = Path(name, "straight"), Path(name, "killed")
        begun = time.monotonic()
        subprocess.run([*command, "--out", str(one)], check=True)
        seconds = time.monotonic() - begun
        straight = sha256(one)
        print(f"without kills: {seconds:.0f} s, {straight}", flush=True)
        kept = 0
        for number in (1, 2):
            resumed = ["--resume", "true"] if (two / CHECKPOINT).exists() else []
            run = subprocess.Popen([*command, "--out", str(two), *resumed])
            time.sleep((0.2 + 0.25 * rng.random()) * seconds)
            if run.poll() is not None:
                raise SystemExit(f"The run ended with exit code {run.returncode} before kill {number}.")
            run.kill()
            run.wait()
            before, kept = kept, (saved(two) or (0, ""))[0]
            print(f"kill {number}: {kept} steps on the disk, {before} when that run began", flush=True)
        again = ""
        if not subprocess.run([*command, "--out", str(two), "--resume", "true"], check=False).returncode:
            again = sha256(two)
            print(f"with two kills: {again}", flush=True)
    row = {"fault": "SIGKILL, preset mini", "tried": 2, "bit_exact": 2 * (again == straight), "lost": 2 * (not again)}
    return [{**row, "steps": arguments.steps, "minutes": round(seconds / 60, 1), "sha256": [straight, again]}]


def sha256(run: Path) -> str:
    """Of the weights that a run has left."""
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="SIGKILLs at random moments")
    parser.add_argument("--saves", type=int, default=50, help="SIGKILLs while a checkpoint is written")
    parser.add_argument("--signals", type=int, default=10, help="SIGTERMs, Ctrl-Cs and full disks, of each so many")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--folder", type=Path, help="where the runs are written; default the system's temporary folder")
    parser.add_argument("--long", action="store_true", help="preset mini on real files, killed twice")
    parser.add_argument("--corpus", type=Path, help="folder of files, for --long")
    parser.add_argument("--exclude", nargs="*", default=[], help="files of it that are left out, by name")
    parser.add_argument("--steps", type=int, default=400, help="of --long")
    parser.add_argument(
        "--record", action="store_true", help="write benchmarks/results/faults.json, or faults_long.json"
    )
    arguments = parser.parse_args()
    if arguments.long and arguments.corpus is None:
        parser.error("--long needs --corpus FOLDER")
    warnings.filterwarnings("ignore")
    begun = time.monotonic()
    rows = long(arguments) if arguments.long else short(arguments)
    if arguments.record:
        sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
        from _record import record

        record("faults_long" if arguments.long else "faults", rows, seconds=round(time.monotonic() - begun))
    print(f"{'fault':32}{'tried':>8}{'bit-exact':>12}{'lost':>8}")
    for row in rows:
        print(f"{row['fault']:32}{row['tried']:8}{row['bit_exact']:12}{row['lost']:8}")
    print(f"{time.monotonic() - begun:.0f} s")
    return int(any(row["lost"] or row["bit_exact"] < row["tried"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
