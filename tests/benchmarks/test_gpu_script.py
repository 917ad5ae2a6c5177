"""benchmarks/gpu.py without a GPU: every section at toy sizes, the work by hand, what happens when something fails."""

from __future__ import annotations

import inspect
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from scdiva.models import ScDiVaConfig

ROOT = Path(__file__).parents[2]
NO_ANNDATA = """
import runpy, sys
sys.modules["anndata"] = sys.modules["scanpy"] = None
sys.argv = ["gpu.py"]
sys.path.insert(0, "benchmarks")
runpy.run_path("benchmarks/gpu.py", run_name="__main__")
"""


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_parity_reads_what_pytest_found(script, monkeypatch, tmp_path):
    gpu = script("gpu")
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 1 == 2\n@pytest.mark.skip\ndef test_c(): pass\n"
    )
    monkeypatch.setattr(gpu, "PARITY", tests)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds to import
    failed, counted = list(gpu.parity(gpu.tiny_setting("cpu")))
    assert failed["what"] == "parity: test_b"
    assert "1 == 2" in failed["failed"]
    assert (counted["met"], counted["value"]) == (False, 1.0)
    assert (counted["tests"], counted["skipped"], counted["passed"]) == (3, 1, 1)
    tests.write_text("raise ImportError")
    *_, counted = gpu.parity(gpu.tiny_setting("cpu"))
    assert not counted["met"]


def test_every_section_runs(script, monkeypatch, capfd, tmp_path, one_thread):
    gpu = script("gpu")
    sections = {name: entry for name, entry in gpu.SECTIONS.items() if name != "parity"}  # it has a test of its own
    monkeypatch.setattr(gpu, "SECTIONS", sections)
    monkeypatch.setattr(script("_record"), "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["gpu.py", "--tiny", "--device", "cpu"])
    seen = []
    real = gpu.run_section

    def watched(name, setting, limit, rows):
        seen.append((name, real(name, setting, limit, rows), rows))
        return seen[-1][1]

    monkeypatch.setattr(gpu, "run_section", watched)
    assert gpu.main() == 0
    assert {name: done for name, done, _ in seen} == dict.fromkeys(gpu.SECTIONS, True)
    rows = seen[-1][2]
    goals = {row["what"]: row for row in rows if "met" in row}
    assert len(goals) >= 18, list(goals)
    missed = [
        row for row in goals.values() if row["met"] is False and row["section"] in ("sdpa", "embed", "train", "flex")
    ]
    assert missed, "an SDPA call on a CPU does not meet goals of a GPU"
    assert all(row["profile"][0]["ms"] >= 0 for row in missed)
    json.dumps(rows, allow_nan=False)
    assert not list(tmp_path.iterdir()), "a dry run records nothing"
    assert "nothing was recorded" in capfd.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    environment = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT / "src")), "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        [sys.executable, "-c", NO_ANNDATA], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert answer.returncode == 2, answer.stderr
    assert "No CUDA device" in answer.stdout.splitlines()[-1]
    assert "93432321" in answer.stdout


def test_work_by_hand(script):
    """performance.md, "The work": linear layers 121, attention 35, gene head 26, training 548 GFLOP."""
    device, config = script("_gpu_device"), ScDiVaConfig.paper()
    length, d, f = 1201, 512, 2048
    linear = 12 * length * (4 * d * d + 3 * d * f) * 2
    attention = 12 * 2 * (2 * length * length * d)
    values = 1200 * 2 * d * d
    assert (round(linear / 1e9), round(attention / 1e9)) == (121, 35)
    assert device.embed_flops(config, [length]) == linear + attention + values
    assert round(device.embed_flops(config, [length]) / 1e9) == 157
    head = 600 * 2 * d * 41_818
    assert round(head / 1e9) == 26
    assert device.train_flops(config, [length], 600) == 3 * (linear + attention + values + head)
    assert round(device.train_flops(config, [length], 600) / 1e9) == 548
    assert device.embed_flops(config, [length, length]) == 2 * device.embed_flops(config, [length])
    assert device.attention_flops([length], 8, 64) * 12 == attention


def test_typical_cells(script):
    lengths = script("_gpu_device").spread_lengths(1000, 1200)
    assert abs(float(lengths.double().median()) - 900) < 2
    assert lengths.max() == 1200
    assert lengths.min() >= 1
    assert 1.38 < 1200 / float(lengths.double().mean()) < 1.44  # 1.41 × the tokens when padded
    assert not torch.equal(lengths, lengths.sort().values)


@pytest.mark.parametrize("lengths", [[300, 5, 128, 256, 90, 1], [128, 128], [40], [127, 130, 600]])
def test_document_mask_is_the_dense_mask(script, lengths):
    rivals, block = script("_gpu_rivals"), 128
    bounds = script("_gpu_device").bounds_of(lengths, torch.device("cpu"))
    n = sum(lengths)
    mask = rivals.document_mask(bounds, n)
    cell = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    size = -(-n // block) * block
    dense = torch.zeros(size, size, dtype=torch.bool)
    dense[:n, :n] = cell[:, None] == cell[None, :]
    tiles = dense.view(size // block, block, size // block, block)
    assert torch.equal(mask.to_dense()[0, 0].bool(), tiles.any(3).any(1))
    full = torch.zeros_like(tiles.any(3).any(1))
    for row, count in enumerate(mask.full_kv_num_blocks[0, 0].tolist()):
        full[row, mask.full_kv_indices[0, 0, row, :count].long()] = True
    assert torch.equal(full, tiles.all(3).all(1))


def test_flex_attention_takes_the_mask(script):
    """The real FlexAttention, forward, on what the dry run gives to its stand-in."""
    from torch.nn.attention.flex_attention import flex_attention

    rivals = script("_gpu_rivals")
    bounds = script("_gpu_device").bounds_of([100, 30, 7], torch.device("cpu"))
    mask = rivals.document_mask(bounds, 137)
    q, k, v = torch.randn(3, 1, 2, 137, 16).unbind(0)
    torch.testing.assert_close(
        flex_attention(q, k, v, block_mask=mask), rivals.dense_attention(q, k, v, block_mask=mask), rtol=1e-4, atol=1e-5
    )


def test_what_is_timed_is_one_function(script):
    kernels = script("_gpu_kernels")
    x = torch.randn(50)
    assert kernels.agree({"a": lambda: x, "b": lambda: x * 1.001}, "a", "b") == pytest.approx(0.001, rel=1e-3)
    for wrong in (x * 1.1, torch.full_like(x, math.nan)):
        with pytest.raises(AssertionError, match="do not compute the same"):
            kernels.agree({"a": lambda: x, "b": lambda wrong=wrong: wrong}, "a", "b")


def test_a_section_that_fails_or_hangs_leaves_a_row(script, monkeypatch, capfd):
    gpu = script("gpu")
    setting, rows = gpu.tiny_setting("cpu"), []

    def fails(setting):
        yield {"what": "first"}
        raise RuntimeError("no such kernel")

    def hangs(setting):
        yield {"what": "second"}
        time.sleep(600)

    def arm_fails(setting):
        yield from script("_gpu_device").time_rows("third", script("_gpu_device").timed(setting, {"a": lambda: 1 / 0}))

    monkeypatch.setattr(gpu, "SECTIONS", {"a": (fails, 9), "b": (hangs, 1), "c": (arm_fails, 9)})
    begun = time.monotonic()
    assert [gpu.run_section(name, setting, 60, rows) for name in "abc"] == [False] * 3
    assert time.monotonic() - begun < 300
    assert [row["what"] for row in rows] == ["first", "section a", "second", "section b", "third: a"]
    assert "no such kernel" in rows[1]["error"]
    assert "OutOfTime" in rows[3]["error"]
    assert "ZeroDivisionError" in rows[4]["error"]


def test_results_are_kept_and_handed_over(script, monkeypatch, tmp_path):
    gpu = script("gpu")
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(script("_record"), "RESULTS", tmp_path / "results")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    arguments = type("Arguments", (), {"commit": "abc", "only": None})()
    setting = gpu.tiny_setting("cpu")
    setting.ceilings = {"matmul": 1.0}
    gpu.keep([{"what": "x"}], setting, arguments)
    kept = json.loads((tmp_path / "results" / "gpu.json").read_text())
    assert kept == json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert kept["commit"] == "abc"
    assert kept["ceilings"] == {"matmul": 1.0}
    arguments.only = ["sdpa"]
    gpu.keep([], setting, arguments)
    assert (tmp_path / "out" / "gpu_partial.json").exists()


def test_tuning_calls_what_the_kernels_offer():
    pytest.importorskip("triton")
    from scdiva.kernels import _triton

    assert list(inspect.signature(_triton.tune).parameters) == [
        "time", "q", "k", "v", "cos", "sin", "cu_seqlens", "max_seqlen"
    ]  # fmt: skip
    assert list(inspect.signature(_triton.forward).parameters)[-2:] == ["max_seqlen", "plan"]
    assert list(inspect.signature(_triton.backward).parameters)[:6] == ["grad", "q", "k", "v", "out", "lse"]
    assert list(inspect.signature(_triton.device_plan).parameters) == ["device", "head_dim", "dtype"]
