"""Measure kernels, training and embedding on a GPU, then train a model, within ten minutes.

    PYTHONPATH=src python scripts/gpu_once.py [--corpus CARRIED] [--init FOLDER] [--seconds 540] [--skip STEP ...]
                                              [--train paper reader] [--commit SHA]
    PYTHONPATH=src python scripts/gpu_once.py --dry-run      # on a CPU, at toy sizes

The steps run in the order of STEPS, each in separate processes with its own time limit. A step that fails or exceeds
its limit does not affect the others; steps for which no time is left are skipped. Training uses the remaining time, for
as many steps as the measured rate allows, in the order of `--train`:

- paper: `scripts/train_paper.py` continues scdiva-paper-mini, or the model `--init`, on the whole corpus.
- reader: `scripts/train_reader.py` trains the reader of scdiva-mini, and readers of about 4 and 16 times its weights,
  on the same corpus. It continues those in the folder `--init`, else the bundled one. Its rows in `gpu.json` are the
  score of each on the validation studies before and after, its weights, steps, cells and seconds.

Both share the time equally, but where each would have less than LEAST_TRAINING, only the first is trained. Pass the
returned folder as `--init` to the next call.

Needs torch, triton, numpy, scipy, pandas, pyyaml, h5py, safetensors and pytorch-lightning; no AnnData. CARRIED is a
folder of `scripts/carry_corpus.py pack`; without it nothing is trained. Results are written to the folder $OUT, or to
runs/gpu: `gpu.json`, `readers.safetensors`, the log of scdiva-paper-mini, and the model in half precision, or without
one the last checkpoint. Files above 15 MiB come in pieces (`cat last.ckpt.* > last.ckpt`). There are at most eight.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import carry_corpus
import gpu
from _record import commit, report
from train_reader import FILE as READERS
from train_reader import SIZES, Runs, read_readers

from scdiva.models.storage import CONFIG

ROOT = Path(__file__).parents[1]
STEPS = {
    "parity": 60, "ceilings": 10, "tuning": 40, "train": 70, "fit": 45, "sdpa": 50, "embed": 80, "head": 12,
    "finetune": 42, "products": 38,
}  # fmt: skip
"""Sections of benchmarks/gpu.py in the order of their priority, and the most seconds of each."""
LIMIT = 540.0
"""Maximum number of seconds of the call."""
LEAST_TRAINING = {"paper": 60.0, "reader": 120.0}
"""Minimum number of seconds of each training."""
CLOSING = 15.0
"""Seconds reserved for copying results."""
PIECE = 15 * 2**20
"""Maximum size of a returned file, in bytes."""
MOST_FILES = 8
"""Maximum number of returned files."""


def measure(setting: gpu.Setting, names: list[str], out: Path, seconds: float, of: str) -> tuple[list[dict], int]:
    """Run sections of the GPU benchmarks within `seconds`; return their rows and the number of failed ones."""
    sections = {name: (gpu.SECTIONS[name][0], float(STEPS[name])) for name in names}
    gpu.SECTIONS.update(sections)

    def write(rows: list[dict], about: dict) -> None:
        gpu.keep(rows, about, of, out)

    return gpu.run_all(setting, names, write, seconds)


def train(name: str, prepared: Path, run: Path, seconds: float, *options: str, max_seconds: float = LIMIT) -> bool:
    """Run `train_<name>.py` for `seconds`, and train for `max_seconds` at most; return whether it reached its end.

    The process is stopped by SIGTERM at the end of its time and then writes a checkpoint.
    """
    script = ROOT / "scripts" / f"train_{name}.py"
    command = [sys.executable, str(script), "--prepared", str(prepared), "--out", str(run)]
    command += ["--seconds", str(round(min(seconds - CLOSING, max_seconds))), *options]
    process = subprocess.Popen(command, env=os.environ, start_new_session=True)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(CLOSING)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode == 0


def train_all(arguments: argparse.Namespace, work: Path, end: float) -> int:
    """Train the models one after the other for equal shares of the time; return how many did not reach their end."""
    models, dry, failed = arguments.train, arguments.dry_run, 0
    shared = ["--accelerator", "cpu", "--toy"] if dry else ["--accelerator", "gpu"]
    options = {"paper": shared, "reader": [*shared, "--sizes", *SIZES, "--batch-size", "8" if dry else "64"]}
    if arguments.init and (arguments.init / CONFIG).exists():
        options["paper"] = [*shared, "--init", str(arguments.init)]
    if arguments.init and (arguments.init / READERS).exists():
        options["reader"] += ["--init", str(arguments.init / READERS)]
    while len(models) > 1 and not dry and (end - time.monotonic()) / len(models) < max(map(LEAST_TRAINING.get, models)):
        print(f"No time is left to train {models[-1]}.")
        models = models[:-1]
    for number, name in enumerate(models):
        seconds, max_seconds = (end - time.monotonic()) / (len(models) - number), 15.0 if dry else LIMIT
        failed += not train(name, work / "prepared", work / "run", seconds, *options[name], max_seconds=max_seconds)
    return failed


def reader_rows(file: Path, earlier: Runs) -> list[dict]:
    """Size, last training and scores of each reader that was trained since `earlier`."""
    rows = []
    for size, runs in read_readers(file)[1].items():
        if runs == earlier.get(size):
            continue
        run = {name: runs[-1][name] for name in ("parameters", "steps", "cells", "seconds", "before", "after")}
        scores = {f"{name} {when}": value for when in ("before", "after") for name, value in run.pop(when).items()}
        of_before = {
            "section": "reader",
            "what": f"reader, {size}",
            "earlier_steps": sum(r["steps"] for r in runs[:-1]),
        }
        rows.append({**of_before, **run, **scores})
    return rows


def copy_results(run: Path, out: Path) -> None:
    """Copy results of the trainings to `out`: readers, the log, and the model or else its checkpoint."""
    log, model = sorted((run / "gpu" / "log").rglob("*.csv"))[-1:], sorted((run / "gpu" / "model").glob("*"))
    for file in [*log, run / READERS, *(model or [run / "gpu" / "last.ckpt"])]:
        if file.exists():
            copy_in_pieces(file, out)
    n_files = len(list(out.iterdir()))
    if n_files > MOST_FILES:
        print(f"{n_files} files in {out}, but at most {MOST_FILES} can be returned")


def copy_in_pieces(file: Path, out: Path) -> None:
    """Copy a file to `out`, in pieces if it is larger than PIECE."""
    if file.stat().st_size <= PIECE:
        shutil.copy(file, out / file.name)
        return
    with file.open("rb") as source:
        for number in range(-(-file.stat().st_size // PIECE)):
            (out / f"{file.name}.{number:02d}").write_bytes(source.read(PIECE))


def main() -> int:
    start_time = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="folder of carry_corpus.py pack; default: no training")
    parser.add_argument("--init", type=Path, help="returned folder to continue; default: the bundled models")
    parser.add_argument("--seconds", type=float, default=LIMIT)
    parser.add_argument("--skip", nargs="+", default=[], choices=list(STEPS))
    parser.add_argument(
        "--train", nargs="*", default=list(LEAST_TRAINING), choices=list(LEAST_TRAINING), help="models, in this order"
    )
    parser.add_argument("--commit", help="commit of the code, if git is not available")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on a CPU")
    arguments = parser.parse_args()
    if arguments.init and not any((arguments.init / name).exists() for name in (CONFIG, READERS)):
        parser.error(f"--init {arguments.init} contains neither {CONFIG} nor {READERS}")
    out = Path(os.environ.get("OUT", ROOT / "runs" / "gpu"))
    work = Path(tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    setting = gpu.dry_setting() if arguments.dry_run else gpu.Setting(torch.device("cuda"))
    names = [name for name in STEPS if name not in arguments.skip]
    trains, of, left = (
        bool(arguments.corpus and arguments.train),
        arguments.commit or commit(),
        arguments.seconds - CLOSING,
    )
    reserved = LEAST_TRAINING[arguments.train[0]] + CLOSING if trains else 0.0
    rows, failed = measure(setting, names, out, left - reserved, of)
    if not rows:
        print("There is no CUDA device. Pass --dry-run to try every step on a CPU.")
        return gpu.NO_DEVICE
    if trains:
        carry_corpus.unpack(arguments.corpus, work / "prepared")
        failed += train_all(arguments, work, start_time + left)
        readers, earlier = work / "run" / READERS, arguments.init and arguments.init / READERS
        if readers.exists():
            rows = reader_rows(readers, read_readers(earlier)[1] if earlier and earlier.exists() else {})
            report(rows)
            gpu.keep(rows, json.loads((out / "gpu.json").read_text())["machine"], of, out)
        copy_results(work / "run", out)
    print(f"{failed} steps failed, {time.monotonic() - start_time:.0f} s; results: {out}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())
