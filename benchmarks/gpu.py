"""Everything that only a GPU can show, in one call of nine minutes; goals first, each row written as it is found.

    PYTHONPATH=src python benchmarks/gpu.py [--only SECTION ...] [--commit SHA]
    PYTHONPATH=src python benchmarks/gpu.py --dry-run      # on a CPU: every line at toy sizes, nothing is measured

One NVIDIA GPU with bfloat16 (written for an H100 or H200). Needs torch, triton, numpy, scipy, pandas, h5py, safetensors
and pytorch-lightning; no anndata, no scanpy, no pytest. Give `--commit` where there is no git to ask.

Sections run one after another in processes of their own, each within its own seconds: one that crashes, hangs or is
cut off loses what it had not found yet, and no other. After each row results/gpu.json is written anew (with `--only`
results/gpu_partial.json), and a copy into the folder $OUT where that is set. A goal that is missed has a profile.

Which row answers which goal, as `section: beginning of the row`:

=========================================================  ==========================================================
the kernel agrees with the float64 reference               parity: parity: cases beyond their limit
fused forward vs eager rotation + SDPA >= 1.5              sdpa: forward: eager rotation + flash over fused
fused vs compiled rotation + flash, forward >= 1.15        sdpa: forward: compiled rotation + flash over fused
the same, forward + backward >= 1.05                       sdpa: forward + backward: compiled rotation + flash over
fused vs cuDNN without RoPE, forward >= 0.9                sdpa: forward: cuDNN, no rotation over fused
the same, backward >= 0.7                                  sdpa: backward: cuDNN, no rotation over fused
rotation on vs off in the kernel <= 1.10                   sdpa: forward: fused over fused, no rotation
embedding >= 3,000 cells/s at L=1200                       embed: tl.embed, full cells: cells/s
embedding >= 60% of the bf16 matrix product rate           embed: tl.embed, full cells: share
packed vs padded, median-900 cells >= 1.3 of 1.41          embed: tl.embed: packed over padded
training >= 50% of the bf16 matrix product rate            train: training step, full cells: share
the same through `fit` and its loader                      fit: fit, packed cells: share
fused vs FlexAttention with a document mask >= 1.1         flex: forward, packed typical cells: rotation + Flex
nothing is compiled again by the number of tokens, embed   embed: tl.embed: graphs and kernels compiled again
the same in training                                       fit: fit: graphs and kernels compiled again
the host waits for the device once a step at most          fit: fit: waits of the host for the device, a step
tuning takes 60 s at most                                  tuning: tuning attention: seconds
rows of the gene head are aligned, within 1.05             head: gene head: its loss over that of aligned rows
=========================================================  ==========================================================

Several GPUs (DDP, FSDP) are not looked at. Exit code: 0, no goal is missed and every section came to its end; 1,
otherwise; 2, there is no CUDA device.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from _gpu import Setting, ceilings, dry_setting, embed_flops, spread_lengths, train_flops
from _gpu_attention import against_flex, against_sdpa, parity, tuning
from _gpu_fit import fitting
from _gpu_model import embedding, gene_head, padded_encoder, training
from _record import RESULTS, commit, machine, record
from _timing import report

from scdiva.models import ScDiVa, ScDiVaConfig

Section = Callable[[Setting], Iterable[dict]]
SECTIONS: dict[str, tuple[Section, float]] = {
    "parity": (parity, 80),
    "ceilings": (ceilings, 15),
    "sdpa": (against_sdpa, 50),
    "embed": (embedding, 115),
    "tuning": (tuning, 65),
    "train": (training, 60),
    "fit": (fitting, 55),
    "flex": (against_flex, 50),
    "head": (gene_head, 15),
    "encoder": (padded_encoder, 15),
}
"""Name, function that yields its rows, and the most seconds it may take: 520 in all."""
LIMIT = 540
"""Most seconds of the whole call."""
NO_DEVICE = 2
"""Exit code without a CUDA device."""
FORK = multiprocessing.get_context("fork")
"""A section has all imports at once, and a device of its own: this process never touches one."""


def checks(setting: Setting) -> Iterator[dict]:
    """The machine, and the work by the formulas, which needs no device."""
    yield {"machine": machine()}
    config = ScDiVaConfig.paper()
    with torch.device("meta"):
        yield {"what": "paper's model", "parameters": ScDiVa(config).n_parameters}
    full, typical = config.max_length + 1, spread_lengths(1024, config.max_length)
    train = train_flops(config, [full], config.max_length / 2)
    yield {"what": "work to embed a full cell", "gflop": round(embed_flops(config, [full]) / 1e9, 1)}
    yield {"what": "work to train on one", "gflop": round(train / 1e9, 1)}
    yield {"what": "typical cells", "median": int(typical.median()), "mean": round(float(typical.double().mean()), 1)}


def run(section: Section, setting: Setting, rows: Connection) -> None:
    """What the process of a section does: send each row as it is found, None at the end."""
    os.setsid()  # so that all that it starts ends with it
    if not setting.cuda:
        torch.set_num_threads(1)
    try:
        for row in section(setting):
            rows.send(row)
    except Exception as error:  # noqa: BLE001 the other sections go on
        traceback.print_exc()
        rows.send({"error": f"{type(error).__name__}: {error}"[:2000]})
    rows.send(None)
    sys.stdout.flush()
    os._exit(0)  # compilers' worker processes are not waited for


def rows_of(section: Section, setting: Setting, seconds: float) -> Iterator[dict]:
    """Run a section in a process of its own for so long at most; yield its rows, and what kept it from its end."""
    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=run, args=(section, setting, send))
    process.start()
    send.close()
    end = time.monotonic() + seconds
    try:
        while (left := end - time.monotonic()) > 0:
            alive = process.is_alive()  # asked first: what it sent before its end is still read
            if receive.poll(min(left, 0.5) if alive else 0):
                try:
                    row = receive.recv()
                except EOFError:
                    process.join()
                    alive = False
                else:
                    if row is None:
                        return
                    yield row
                    continue
            if not alive:
                yield {"error": f"its process ended with {process.exitcode}"}
                return
        yield {"error": f"cut off after its {seconds:.0f} s"}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.join()


def replaced(rows: list[dict], row: dict) -> list[dict]:
    """The rows with a new one, in the place of an earlier one of the same section and name: a count that goes up."""
    same = [row["section"], row.get("what")]
    return [*(other for other in rows if [other["section"], other.get("what")] != same), row]


def run_all(
    setting: Setting, names: Iterable[str], write: Callable[[list[dict], dict], object]
) -> tuple[list[dict], int]:
    """Run sections; return their rows, and how many did not come to their end."""
    started, rows, failed = time.monotonic(), [], 0
    about: dict = {"processor": "unknown"}  # to ask for it here would touch the device
    sections = {"checks": (checks, 30.0)} | {name: SECTIONS[name] for name in names}
    for name, (section, seconds) in sections.items():
        begun, whole = time.monotonic(), True
        for row in rows_of(section, setting, min(seconds, LIMIT - (begun - started))):
            if "machine" in row:
                about = row["machine"]
                if setting.cuda and "gpu" not in about:
                    return [], 1
                continue
            row = {"section": name, "what": f"section {name}", **row}
            whole = whole and not row.keys() & {"error", "failed"}
            setting.matmul, setting.plan = row.pop("matmul", setting.matmul), row.get("plan", setting.plan)
            rows = replaced(rows, row)
            report([{key: value for key, value in row.items() if key not in ("profile", "section")}])
            write(rows, about)
        failed += not whole
        print(f"[{name}: {time.monotonic() - begun:.0f} s{'' if whole else ', NOT WHOLE'}]", flush=True)
    return rows, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), help="sections to run, after the ceilings")
    parser.add_argument("--commit", help="commit of the code, where there is no git to ask")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on a CPU; results go to $OUT, or nowhere")
    arguments = parser.parse_args()
    setting = dry_setting() if arguments.dry_run else Setting(torch.device("cuda"))
    chosen = [name for name in SECTIONS if not arguments.only or name in (*arguments.only, "ceilings")]
    of, out, begun = arguments.commit or commit(), os.environ.get("OUT"), time.monotonic()
    with tempfile.TemporaryDirectory() as nowhere:
        folder = Path(nowhere) if arguments.dry_run else RESULTS

        def write(rows: list[dict], about: dict) -> None:
            path = record("gpu_partial" if arguments.only else "gpu", rows, folder, commit=of, machine=about)
            if out:
                shutil.copy(path, out)

        rows, failed = run_all(setting, chosen, write)
    if not rows:
        print("No CUDA device here: run this on a machine with an NVIDIA GPU, or try its every line with --dry-run.")
        return NO_DEVICE
    print("\nGoals:")
    missed = report({k: v for k, v in row.items() if k not in ("profile", "section")} for row in rows if "met" in row)
    print(f"{missed} goals missed, {failed} sections not whole, {time.monotonic() - begun:.0f} s.")
    if arguments.dry_run:
        print("A dry run: its figures mean nothing.")
    return int(failed > 0 or (missed > 0 and not arguments.dry_run))


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # so that a call that is cut off has said it
    sys.exit(main())
