"""benchmarks/gpu.py without a GPU: every section at toy sizes, the work by hand, what happens when something fails."""

from __future__ import annotations

import json

import pytest
import torch

from scdiva.models import ScDiVaConfig


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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
