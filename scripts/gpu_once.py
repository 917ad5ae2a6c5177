"""Measure kernels, training and embedding on a GPU, then train a model, within ten minutes.

    PYTHONPATH=src python scripts/gpu_once.py [--corpus CARRIED] [--init FOLDER] [--seconds 540] [--skip SECTION ...]
                                              [--commit SHA]
    PYTHONPATH=src python scripts/gpu_once.py --dry-run      # on a CPU, at toy sizes

The sections of `benchmarks/gpu.py` run first; those for which no time is left are skipped. Training takes the rest: it
continues scdiva-paper-mini, or the model `--init`, on the whole corpus by `scripts/train_paper.py`, for as many steps
as the measured rate allows. The returned folder is the `--init` of the next call.

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
LEAST_TRAINING = 60.0
"""Minimum number of seconds for training."""
CLOSING = 15.0
"""Seconds reserved for copying results."""
PIECE = 15 * 2**20
"""Maximum size of a returned file, in bytes."""


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
    files += sorted(model.iterdir()) if model is not None else (run / "gpu").glob("last.ckpt")
    for file in files:
        cut(file, out)


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
    parser.add_argument("--seconds", type=float, default=gpu.LIMIT)
    parser.add_argument("--skip", nargs="+", default=[], choices=[*gpu.SECTIONS, "training"])
    parser.add_argument("--commit", help="commit of the code, where there is no git")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on a CPU")
    arguments = parser.parse_args()
    out = Path(os.environ.get("OUT", ROOT / "runs" / "gpu"))
    work = Path(tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    setting = gpu.dry_setting() if arguments.dry_run else gpu.Setting(torch.device("cuda"))
    names, of = [name for name in gpu.SECTIONS if name not in arguments.skip], arguments.commit or commit()
    wanted = arguments.corpus is not None and "training" not in arguments.skip
    left = arguments.seconds - CLOSING - (LEAST_TRAINING + CLOSING) * wanted
    rows, failed = gpu.run_all(setting, names, lambda rows, about: gpu.keep(rows, about, of, out), left)
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
