"""Every GPU row in one call: parity, ceilings, the kernels and their tuning, the paper's model, the rivals.

    PYTHONPATH=src python benchmarks/gpu.py [--time-limit 560] [--only SECTION ...] [--commit SHA]
    PYTHONPATH=src python benchmarks/gpu.py --tiny --device cpu      # dry run: every line, toy sizes, nothing recorded

One NVIDIA GPU with bfloat16 (written for an H100 or H200), under ten minutes. Needs torch, triton, numpy, h5py,
safetensors, pytorch-lightning and pytest; with pytest-xdist the parity tests run side by side, with liger-kernel its
rows are there too.

On a machine that runs one command over a copy of the repository and gives back what the command leaves in $OUT:

    PYTHONPATH=src python benchmarks/gpu.py --commit SHA      # of the copied code: there is no git to ask there

with liger-kernel as a wheel carried along in .whl/:

    python -m pip install -q --no-index --no-deps --target .site .whl/*.whl; \
        PYTHONPATH=src:.site python benchmarks/gpu.py --commit SHA

and the bundled model's training (`scripts/train_mini.py`), with the corpus packed beforehand, here, and carried along:

    PYTHONPATH=src python scripts/carry_corpus.py pack runs/mini/prepared .carry/corpus
    PYTHONPATH=src python scripts/train_mini.py --prepared .carry/corpus --out runs/mini --time-limit 500 \
        --accelerator gpu

Sections run in the order of `SECTIONS`, each within its own seconds; results are written to results/gpu.json (with
`--only` to results/gpu_partial.json), and to $OUT where it is set, after each of them. One that fails leaves a row
with its error, and the next one runs. A row whose goal is missed holds a profile of what it ran.

Exit code: 0, all goals met; 1, a goal missed or a section failed or left out; 2, there is no CUDA device (everything
that can be checked without one was).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import torch
from _gpu_device import (
    Setting,
    embed_flops,
    free_memory,
    full_setting,
    measure_ceilings,
    spread_lengths,
    tiny_setting,
    train_flops,
)
from _gpu_kernels import against_flex, against_math, against_sdpa, packed_against_padded
from _gpu_models import embedding, one_graph, padded_encoder, training
from _gpu_rivals import liger_rows
from _gpu_tuning import start_warm_up, tuning
from _record import record
from _timing import goal, report

from scdiva.models import ScDiVa, ScDiVaConfig

ROOT = Path(__file__).parents[1]
PARITY = ROOT / "tests" / "kernels" / "test_triton_gpu.py"
NO_DEVICE = 2
"""Exit code without a CUDA device."""


class OutOfTime(BaseException):
    """A section has used up its seconds; no Exception, so that no arm takes it for its own failure."""


@contextmanager
def seconds_left(limit: float) -> Iterator[None]:
    """Raise :class:`OutOfTime` inside the block after so many seconds.

    And again a little later: an exception that is raised where Python happens to clean up is swallowed there.
    """

    def ring(*_: object) -> None:
        raise OutOfTime(f"stopped after its {limit:.0f} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(limit, 0.001), 3.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def parity(setting: Setting) -> Iterator[dict]:
    """The kernel's tests in processes of their own; meanwhile the candidates for tuning are compiled."""
    workers = min(8, max(1, (os.cpu_count() or 1) // 2))
    warming = start_warm_up(workers) if setting.cuda else []
    side_by_side = ["-n", str(workers)] if setting.cuda and importlib.util.find_spec("xdist") else []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "parity.xml"
        command = [sys.executable, "-m", "pytest", str(PARITY), "--noconftest", "-p", "no:cacheprovider", "-q"]
        try:
            answer = subprocess.run(
                [*command, f"--junitxml={log}", *side_by_side], capture_output=True, text=True, cwd=ROOT, check=False
            )
            for process in warming:
                _, said = process.communicate()
                if process.returncode:
                    yield {"what": "tuning: a process that compiles", "failed": said[-1000:]}
        finally:
            for process in warming:
                process.kill()
        if not log.exists():
            raise RuntimeError(f"pytest gave no result: {answer.stdout[-1500:]}{answer.stderr[-1500:]}")
        cases = list(ElementTree.parse(log).iter("testcase"))
    wrong = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    counted = {"tests": len(cases), "skipped": len(skipped), "passed": len(cases) - len(wrong) - len(skipped)}
    for case in wrong:
        said = case.find("failure") if case.find("failure") is not None else case.find("error")
        yield {"what": f"parity: {case.get('name')}", "failed": (said.get("message") or "")[:500]}
    failed = max(len(wrong), int(answer.returncode != 0))
    yield goal("parity: tests failed", float(failed), at_most=0.0, counted=True, **counted)
    if setting.cuda:
        yield goal("parity: tests passed", float(counted["passed"]), at_least=float(max(1, len(cases))), counted=True)


SECTIONS: dict[str, tuple[Callable[[Setting], object], float]] = {
    "parity": (parity, 170),
    "ceilings": (measure_ceilings, 30),
    "tuning": (tuning, 90),
    "sdpa": (against_sdpa, 100),
    "embed": (embedding, 90),
    "train": (training, 120),
    "compile": (one_graph, 60),
    "padded": (packed_against_padded, 40),
    "math": (against_math, 30),
    "flex": (against_flex, 130),
    "encoder": (padded_encoder, 40),
    "liger": (liger_rows, 80),
}
"""Name, function that yields its rows, and the most seconds it may take."""


def check_without_device() -> list[dict]:
    """What needs no GPU: the model on the meta device, the work by the formulas, the lengths of typical cells."""
    config = ScDiVaConfig.paper()
    with torch.device("meta"):
        model = ScDiVa(config)
    full = config.max_length + 1
    typical = spread_lengths(1024, config.max_length)
    return [
        {"what": "paper's model", "parameters": model.n_parameters},
        {"what": "work to embed a full cell", "gflop": round(embed_flops(config, [full]) / 1e9, 1)},
        {"what": "work to train on one", "gflop": round(train_flops(config, [full], config.max_length / 2) / 1e9, 1)},
        {"what": "typical cells", "median": int(typical.median()), "mean": round(float(typical.double().mean()), 1)},
    ]


def run_section(name: str, setting: Setting, limit: float, rows: list[dict]) -> bool:
    """Append a section's rows, each as soon as it is there; False and a row with the error if it did not finish."""
    function, budget = SECTIONS[name]
    try:
        with seconds_left(min(budget, limit)):
            free_memory(setting)
            torch._dynamo.reset()  # what a section compiles is its own
            for row in function(setting):
                rows.append({"section": name, **row})
    except (Exception, OutOfTime) as error:  # noqa: BLE001 the other sections go on
        if not isinstance(error, OutOfTime):
            traceback.print_exc()
        rows.append({"section": name, "what": f"section {name}", "error": f"{type(error).__name__}: {error}"[:2000]})
        return False
    return not any("error" in row or "failed" in row for row in rows if row["section"] == name)


def keep(rows: list[dict], setting: Setting, arguments: argparse.Namespace) -> None:
    """Write what there is so far."""
    notes = {"commit": arguments.commit} if arguments.commit else {}
    path = record("gpu_partial" if arguments.only else "gpu", rows, ceilings=setting.ceilings, **notes)
    if os.environ.get("OUT"):
        shutil.copy(path, os.environ["OUT"])


def run(setting: Setting, arguments: argparse.Namespace) -> int:
    """All sections; return the number of goals missed and sections that failed."""
    started, rows, failed = time.monotonic(), check_without_device(), 0
    for row in rows:
        row["section"] = "checks"
    chosen = arguments.only or list(SECTIONS)
    if "ceilings" not in chosen:
        chosen = ["ceilings", *chosen]  # shares of the matrix product rate are of this run
    for name in (name for name in SECTIONS if name in chosen):
        left = arguments.time_limit - (time.monotonic() - started)
        begun = time.monotonic()
        if left < 5:
            rows.append({"section": name, "what": f"section {name}", "error": "left out: no time left"})
            failed += 1
            continue
        done = run_section(name, setting, left, rows)
        failed += not done
        print(f"[{name}: {time.monotonic() - begun:.0f} s{'' if done else ', NOT DONE'}]", flush=True)
        if setting.cuda and not setting.tiny:
            keep(rows, setting, arguments)
    shown = [{key: value for key, value in row.items() if key not in ("profile", "section")} for row in rows]
    report(row for row in shown if "met" not in row)
    print("\nGoals:")
    missed = report(row for row in shown if "met" in row)
    print(f"{missed} goals missed, {failed} sections failed, {time.monotonic() - started:.0f} s.")
    return missed + failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-limit", type=float, default=560, help="seconds for everything")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), help="sections to run, with the ceilings")
    parser.add_argument("--commit", help="commit of the code, where there is no git to ask")
    parser.add_argument("--tiny", action="store_true", help="dry run at toy sizes; nothing is recorded")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: with --tiny only")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("--device cpu is for the dry run: add --tiny")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        for row in check_without_device():
            print(row)
        print(
            "No CUDA device here: imports, the model and the work were checked, nothing was timed. Run this on a "
            "machine with an NVIDIA GPU, or try its every line with --tiny --device cpu."
        )
        return NO_DEVICE
    setting = tiny_setting(arguments.device) if arguments.tiny else full_setting()
    if not setting.cuda:
        torch.set_num_threads(1)
    problems = run(setting, arguments)
    if arguments.tiny:
        print("A dry run: its times mean nothing and nothing was recorded.")
        return 0
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
