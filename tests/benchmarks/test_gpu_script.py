"""benchmarks/gpu.py without a GPU: every section at toy sizes, the work by hand, what happens when something fails."""

from __future__ import annotations

import json
import time

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(script, monkeypatch, capsys):
    gpu = script("gpu")
    monkeypatch.setattr("sys.argv", ["gpu.py"])
    assert gpu.main() == 2
    said = capsys.readouterr().out
    assert "No CUDA device" in said.splitlines()[-1]
    assert "93432321" in said


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
