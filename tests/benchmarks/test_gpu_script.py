"""benchmarks/gpu.py without a GPU: every section at toy sizes on a machine that has little, and sections that fail."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch

from scdiva.models import ScDiVaConfig

ROOT = Path(__file__).parents[2]
MISSING = (
    "adbc", "anndata", "annbatch", "datashader", "igraph", "leidenalg", "legacy_api_wrap", "marsilea", "matplotlib",
    "mpl_toolkits", "mudata", "numba", "numcodecs", "pertpy", "pyarrow", "pylab", "pynndescent", "pytest", "_pytest",
    "scanpy", "scdataset", "scib_metrics", "scikit_learn", "sklearn", "seaborn", "session_info", "umap", "umap_learn",
    "zarr",
)  # fmt: skip
"""What a machine with a GPU need not have: packages by the beginning of their names in site-packages."""


def bare_site(folder: Path) -> Path:
    """The packages of this environment, less those that are MISSING: their modules and their metadata."""
    folder.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        name = re.split(r"[-.]", entry.name)[0].lower()
        if name not in MISSING and "scdiva" not in name and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


def bare(site: Path, out: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these packages only; its results go to `out`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV", "SCDIVA"))}
    env |= {"PYTHONPATH": f"{ROOT / 'src'}:{site}", "OUT": str(out), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = (sys.executable, "-S", *command)
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_a_dry_run_goes_through_every_section_without_what_a_gpu_machine_lacks(script, tmp_path):
    site, before = bare_site(tmp_path / "site"), sorted((ROOT / "benchmarks" / "results").iterdir())
    packages = "('anndata', 'scanpy', 'pyarrow', 'pytest')"
    absent = f"from importlib.util import find_spec; print([name for name in {packages} if find_spec(name)])"
    assert bare(site, tmp_path, "-c", absent).stdout == "[]\n"
    answer = bare(site, tmp_path, "benchmarks/gpu.py", "--dry-run")
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    assert sorted((ROOT / "benchmarks" / "results").iterdir()) == before
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    gpu = script("gpu")
    assert list(dict.fromkeys(row["section"] for row in rows)) == ["checks", *gpu.SECTIONS]
    assert not [row for row in rows if row.keys() & {"error", "failed"}]
    goals = [f"{row['section']}: {row['what']}" for row in rows if "met" in row]
    promised = [line[59:] for line in gpu.__doc__.splitlines() if re.match(r"\S.{56}  \w+: ", line)]
    assert len(promised) == 19
    assert [row for row in promised if not any(goal.startswith(row) for goal in goals)] == []
    missed = [row for row in rows if row.get("met") is False and row["section"] in ("embed", "sdpa")]
    assert missed, "a CPU does not meet goals of a GPU"
    profiles = [row["profile"] for row in missed if "profile" in row]
    assert profiles, "how many goals are missed depends on what else the machine does"
    assert all(re.match(r"[\d.e-]+ ms in \d+ of \S+", profile) for profile in profiles)


def test_its_seconds_fit_into_nine_minutes(script):
    gpu = script("gpu")
    assert sum(seconds for _, seconds in gpu.SECTIONS.values()) <= 520
    assert gpu.LIMIT <= 540


def crashes(setting):
    yield {"what": "before the crash", "value": 1.0}
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(setting):
    yield {"what": "before it hangs", "value": 1.0}
    time.sleep(60)


def raises(setting):
    yield {"what": "counted", "value": 1.0}
    yield {"what": "counted", "value": 2.0}
    raise ValueError("no such thing")


def works(setting):
    yield {"what": "ceiling", "matmul": 5.0}
    yield {"what": "plan", "plan": {"forward": [1]}}


def sees(setting):
    yield {"what": "found before", "value": setting.matmul, "launch": setting.plan}


def test_a_section_that_fails_loses_only_itself(script, monkeypatch):
    gpu = script("gpu")
    sections = {"crashes": (crashes, 20), "hangs": (hangs, 0.7), "raises": (raises, 20), "works": (works, 20)}
    monkeypatch.setattr(gpu, "SECTIONS", {**sections, "sees": (sees, 20)})
    written = []
    setting = gpu.dry_setting()
    rows, failed = gpu.run_all(setting, gpu.SECTIONS, lambda rows, about: written.append((list(rows), about)))
    assert failed == 3
    by_name = {(row["section"], row["what"]): row for row in rows}
    assert len(by_name) == len(rows)
    assert by_name["crashes", "before the crash"]["value"] == by_name["hangs", "before it hangs"]["value"] == 1
    assert by_name["crashes", "section crashes"]["error"] == f"its process ended with {-signal.SIGKILL}"
    assert by_name["hangs", "section hangs"]["error"] == "cut off after its 1 s"
    assert by_name["raises", "section raises"]["error"] == "ValueError: no such thing"
    assert by_name["raises", "counted"]["value"] == 2, "a later row of one name takes the place of the earlier"
    assert by_name["sees", "found before"]["value"] == 5
    assert by_name["sees", "found before"]["launch"] == {"forward": [1]}
    sizes = [len(rows) for rows, _ in written]
    assert sizes == sorted(sizes)
    assert len(sizes) > len(rows), "written after each row"
    assert written[0][1]["cores"] == os.cpu_count()


def test_without_a_device_it_says_so(script, monkeypatch, tmp_path, capsys):
    gpu = script("gpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["gpu.py"])
    assert gpu.main() == 2
    assert "No CUDA device" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_work_by_hand(script):
    """performance.md, "The work": linear layers 121, attention 35, gene head 26, training 548 GFLOP."""
    shared, config = script("_gpu"), ScDiVaConfig.paper()
    length, d, f = 1201, 512, 2048
    linear = 12 * length * (4 * d * d + 3 * d * f) * 2
    attention = 12 * 2 * (2 * length * length * d)
    values = 1200 * 2 * d * d
    assert (round(linear / 1e9), round(attention / 1e9)) == (121, 35)
    assert shared.embed_flops(config, [length]) == linear + attention + values
    assert round(shared.embed_flops(config, [length]) / 1e9) == 157
    head = 600 * 2 * d * 41_818
    assert round(head / 1e9) == 26
    assert shared.train_flops(config, [length], 600) == 3 * (linear + attention + values + head)
    assert round(shared.train_flops(config, [length], 600) / 1e9) == 548
    assert shared.embed_flops(config, [length, length]) == 2 * shared.embed_flops(config, [length])
    assert shared.attention_flops([length], 8, 64) * 12 == attention


def test_waits_of_the_host_are_counted_by_place(script):
    """torch warns of each on CUDA; here the warning is raised by hand."""
    import warnings

    shared = script("_gpu")
    with shared.host_waits(shared.dry_setting()) as waits:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert list(waits.values()) == [3]
    assert next(iter(waits)).startswith("test_gpu_script.py:")
    assert torch.is_tensor(shared.bounds_of([1, 2], torch.device("cpu")))
