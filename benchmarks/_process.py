"""A fit in a process of its own: what starts it, what it does first and last, and what it cost."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from _memory import _status as status

import scdiva as sd

PACKAGES = {
    "harmony": "harmonypy", "scvi": "scvi-tools", "scanvi": "scvi-tools", "scarches": "scvi-tools", "pca": "scanpy",
    "combat": "scanpy", "logistic": "scikit-learn", "logistic_balanced": "scikit-learn", "svm": "scikit-learn",
    "knn": "scikit-learn", "centroid": "numpy", "gears": "cell-gears", "spearman": "scipy", "forest": "scikit-learn",
    "mutual_information": "numpy", "expression": "numpy", "random": "numpy",
}  # fmt: skip
"""The package that an arm comes from; others are scdiva's."""
MODULES = {"harmonypy": "harmonypy", "scvi-tools": "scvi", "cell-gears": "gears"}
INSTALL = {"cell-gears": "cell-gears==0.1.2 torch_geometric 'scipy<1.14' 'pandas<3', in an environment of its own"}
"""What pip is to install where it is not the package alone at the version of constraints.txt."""


def missing(arm: str) -> str | None:
    """Why an arm can't run here; None where it can."""
    package = PACKAGES.get(arm)
    if package not in MODULES or find_spec(MODULES[package]) is not None:
        return None
    return f"{package} is not installed: pip install {INSTALL.get(package, f'-c constraints.txt {package}')}"


def version_of(arm: str) -> str:
    """The package that an arm comes from, with its version."""
    package = PACKAGES.get(arm, "scdiva")
    return f"{package} {sd.__version__ if package == 'scdiva' else version(package)}"


def fit(job: dict, folder: Path, script: Path, what: str) -> tuple[dict[str, np.ndarray], dict]:
    """Do a job in a process of its own, which `script` is; gives the arrays that it found, and its costs.

    Raises
    ------
    RuntimeError
        If the process fails: `what` did, and why.
    """
    order, out = folder / "job.json", folder / "found.npz"
    order.write_text(json.dumps({**job, "out": str(out)}))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), str(job["threads"]))
    answer = subprocess.run(
        [sys.executable, str(script), str(order)], capture_output=True, text=True, check=False,
        env={**os.environ, **threads},
    )  # fmt: skip
    if answer.returncode:
        raise RuntimeError(f"{what} failed:\n{answer.stderr[-4000:]}")
    with np.load(out) as found:
        return dict(found), json.loads(answer.stdout.splitlines()[-1])


class Watch:
    """Seconds since it was made, and the most resident memory of the process so far."""

    def __init__(self) -> None:
        self.cpu, self.wall = time.process_time(), time.perf_counter()

    def cost(self) -> dict[str, float]:
        seconds = {"cpu_seconds": time.process_time() - self.cpu, "wall_seconds": time.perf_counter() - self.wall}
        # not ru_maxrss, which a process inherits from the one that started it
        return {**seconds, "peak_mib": status("VmHWM") / 2**20}


def do(run: Callable[[dict], tuple[dict[str, np.ndarray], dict]]) -> None:
    """What such a process does: read its job, run it, write what was found and print the costs.

    Raises
    ------
    ValueError
        If an array of numbers holds a value that is not finite.
    """
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    sd.settings.progress, sd.settings.threads = False, job["threads"]
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "harmonypy", "scvi"):
        logging.getLogger(name).setLevel(logging.ERROR)
    found, cost = run(job)
    for name, values in found.items():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            bad = (~np.isfinite(values)).reshape(len(values), -1).any(axis=1).sum()
            raise ValueError(f"{job['arm']}: {bad} rows of {name} are not finite.")
    np.savez(job["out"], **found)
    print(json.dumps(cost))
