"""Measure kernels, training and embedding on a GPU, then train a model, within ten minutes.

    PYTHONPATH=src python scripts/gpu_once.py [--corpus CARRIED] [--init FOLDER] [--seconds 540] [--skip STEP ...]
                                              [--commit SHA]
    PYTHONPATH=src python scripts/gpu_once.py --dry-run      # on a CPU, at toy sizes

The steps run in the order of STEPS, each in processes of its own and within its own seconds. A step that fails or is
cut off loses only itself; steps for which no time is left are skipped. Training takes the rest: it continues
scdiva-paper-mini, or the model `--init`, on the whole corpus by `scripts/train_paper.py`, for as many steps as the
measured rate allows. The returned folder is the `--init` of the next call.

Needs torch, triton, numpy, scipy, pandas, pyyaml, h5py, safetensors and pytorch-lightning; no AnnData. CARRIED is a
folder of `scripts/carry_corpus.py pack`; without it nothing is trained. Results are written to the folder $OUT, or to
runs/gpu: `gpu.json`, the log of the training, and the model in half precision, or without one the last checkpoint in
pieces of at most 15 MiB (`cat last.ckpt.* > last.ckpt`). There are at most eight files.
"""

from __future__ import annotations

import argparse
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
from _record import commit

ROOT = Path(__file__).parents[1]
STEPS = {
    "parity": 60, "ceilings": 10, "tuning": 40, "train": 70, "fit": 45, "sdpa": 37, "embed": 80, "head": 12,
    "finetune": 42,
}  # fmt: skip
"""Sections of benchmarks/gpu.py in the order of their priority, and the most seconds of each."""
LIMIT = 540.0
"""Maximum number of seconds of the call."""
LEAST_TRAINING = 60.0
"""Minimum number of seconds for training."""
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


def train(prepared: Path, run: Path, seconds: float, *options: str) -> Path | None:
    """Train for `seconds` at most; return the model folder, or None if the training did not reach its end.

    The process is stopped by SIGTERM at the end of its time and then writes a checkpoint.
    """
    command = [sys.executable, str(ROOT / "scripts" / "train_paper.py"), "--prepared", str(prepared), "--out", str(run)]
    command += ["--seconds", str(round(seconds - CLOSING)), *options]
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
    model = run / "gpu" / "model"
    return model if model.exists() else None


def give(run: Path, model: Path | None, out: Path) -> None:
    """Copy results of the training to `out`: the model, or else the checkpoint, and the log."""
    files = sorted((run / "gpu" / "log").rglob("*.csv"))[-2:]
    if model is not None:
        files += sorted(model.iterdir())
    for file in files:
        cut(file, out)
    if model is None and (checkpoint := run / "gpu" / "last.ckpt").exists():
        cut(checkpoint, out)
    n_files = len(list(out.iterdir()))
    if n_files > MOST_FILES:
        print(f"{n_files} files in {out}, of which only {MOST_FILES} may come back")


def cut(file: Path, out: Path) -> None:
    """Copy a file to `out`, in pieces if it is larger than PIECE."""
    if file.stat().st_size <= PIECE:
        shutil.copy(file, out / file.name)
        return
    with file.open("rb") as source:
        for number in range(-(-file.stat().st_size // PIECE)):
            (out / f"{file.name}.{number:02d}").write_bytes(source.read(PIECE))


def main() -> int:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="folder of carry_corpus.py pack; default: no training")
    parser.add_argument("--init", type=Path, help="model folder to continue; default: the bundled scdiva-paper-mini")
    parser.add_argument("--seconds", type=float, default=LIMIT)
    parser.add_argument("--skip", nargs="+", default=[], choices=[*STEPS, "training"])
    parser.add_argument("--commit", help="commit of the code, where there is no git")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on a CPU")
    arguments = parser.parse_args()
    out = Path(os.environ.get("OUT", ROOT / "runs" / "gpu"))
    work = Path(tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    setting = gpu.dry_setting() if arguments.dry_run else gpu.Setting(torch.device("cuda"))
    names = [name for name in STEPS if name not in arguments.skip]
    wanted = arguments.corpus is not None and "training" not in arguments.skip
    left = arguments.seconds - CLOSING - (LEAST_TRAINING + CLOSING) * wanted
    rows, failed = measure(setting, names, out, left, arguments.commit or commit())
    if not rows:
        print("There is no CUDA device. Pass --dry-run to try every step on a CPU.")
        return gpu.NO_DEVICE
    left = arguments.seconds - CLOSING - (time.monotonic() - begun)
    if wanted:
        carry_corpus.unpack(arguments.corpus, work / "prepared")
        options = ["--accelerator", "cpu", "--toy"] if arguments.dry_run else ["--accelerator", "gpu"]
        options += ["--init", str(arguments.init)] if arguments.init else []
        model = train(work / "prepared", work / "run", min(left, 40.0) if arguments.dry_run else left, *options)
        give(work / "run", model, out)
        failed += model is None
    print(f"{failed} steps failed, {time.monotonic() - begun:.0f} s; results: {out}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())
