"""Peaks are counted in bytes that are known beforehand; activations once a storage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
MIB = 2**18  # float32 numbers in a MiB


def test_peak_counts_what_lives_at_once(script):
    kept = torch.ones(4 * MIB)

    def work():
        first = torch.ones(6 * MIB)
        del first  # given back before the next: not in the peak
        return kept + torch.ones(4 * MIB)  # 4 + 4 MiB at once: kept was there before

    peak = script("_memory").peak_bytes(work)
    assert 8 * 2**20 <= peak < 8.01 * 2**20


def test_resident_peak_of_a_process():
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); import torch; from _memory import resident_peak\n"
        f"print(resident_peak(lambda: [torch.ones(32 * {MIB}) for _ in range(2)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 60 * 2**20 < int(done.stdout) < 80 * 2**20


def test_saved_tensors_are_counted_once_and_parameters_are_not(script):
    saved_bytes = script("activations").saved_bytes
    x = torch.randn(100, 8, requires_grad=True)
    model = nn.Linear(8, 4, bias=False)
    with_model = saved_bytes(lambda: model(x).sum(), model)
    assert with_model == {"rest": 100 * 8 * 4}
    # the product saves both of its factors, which share a storage; exp saves its result
    assert saved_bytes(lambda: (x[:50] * x[50:]).exp().sum(), model) == {"rest": 100 * 8 * 4 + 50 * 8 * 4}


def test_bytes_belong_to_the_innermost_part(script):
    activations = script("activations")
    from scdiva.nn import RMSNorm, SwiGLU

    model = nn.Sequential(RMSNorm(16), SwiGLU(16, 32))
    x = torch.randn(10, 16, requires_grad=True)
    saved = activations.saved_bytes(lambda: model(x).sum(), model)
    assert set(saved) == {"norms", "SwiGLU"}
    # input, and gate and up at least
    assert saved["SwiGLU"] >= 10 * (16 + 2 * 32) * 4
    assert saved["norms"] >= 10 * 16 * 4


def test_lengths_have_the_stated_median_and_bound(script):
    lengths = script("activations").cell_lengths(1000, median=900, longest=1200)
    assert abs(sorted(lengths)[500] - 900) <= 1
    assert max(lengths) == 1200
    assert min(lengths) > 200


@pytest.mark.parametrize("in_hardware", [True, False])
@pytest.mark.parametrize("name", ["loss", "activations"])
def test_the_script_runs_on_small_sizes(script, tmp_path, monkeypatch, capsys, name, in_hardware):
    small = {"loss": ["--positions", "64", "--genes", "50", "--repeats", "1"], "activations": ["--small"]}
    module = script(name)
    monkeypatch.setattr(sys.modules["_record"], "RESULTS", tmp_path)
    monkeypatch.setattr(sys.modules["_timing"], "multiplies_bf16", lambda device: in_hardware)
    monkeypatch.setattr("sys.argv", [f"benchmarks/{name}.py", *small[name]])
    threads = torch.get_num_threads()
    if name == "loss":  # six processes that each import torch are for the benchmark
        monkeypatch.setattr(module, "resident_apart", lambda *_: 2.0**20)
    module.main(small[name])
    torch.set_num_threads(threads)
    rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
    assert any("float32" in row["what"] for row in rows)
    assert any("bfloat16" in row["what"] for row in rows) == in_hardware
    assert ("left out: bfloat16 autocast" in capsys.readouterr().out) != in_hardware
