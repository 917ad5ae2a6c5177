"""What a run logs, and what ends it: signals, full disks, cells without a finite loss, memory."""

from __future__ import annotations

import csv
import errno
import os
import resource
import signal
import sys
import threading
import time

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback

from scdiva.data.datamodule import CellDataModule
from scdiva.datasets import toy
from scdiva.models.layers import Block
from scdiva.train import PretrainingModule, fit
from scdiva.train.callbacks import RATE, TERMINATED, AtomicIO, release_memory


def logged(folder, name):
    with (folder / "metrics.csv").open() as lines:
        return [(int(row["step"]), float(row[name])) for row in csv.DictReader(lines) if row.get(name)]


def test_the_rate_is_cells_by_time_without_validation(run, tmp_path, monkeypatch):
    """The clock advances one second per reading, and a hundred during validation."""
    now = iter(range(10**6))
    monkeypatch.setattr("scdiva.train.callbacks.time.perf_counter", lambda: float(next(now)))

    class Slow(Callback):
        def on_validation_batch_end(self, *args):
            for _ in range(100):
                time.perf_counter()

    run(tmp_path, settings={"steps": 12, "validate_every": 4, "log_every": 2}, callbacks=[Slow()])
    rates = logged(tmp_path / "log" / "version_0", RATE)
    assert [step for step, _ in rates] == [1, 3, 5, 7, 9, 11]
    # six cells a step, and a look at its end; the clock starts anew where validation ends
    assert all(rate == 6.0 for _, rate in rates)


def test_the_bar_shows_steps_loss_rate_and_time_left(run, tmp_path, capsys, monkeypatch):
    for name in ("DELAY", "LOG_INTERVAL"):
        monkeypatch.setattr(f"scdiva._settings.{name}", 0.0)
    run(tmp_path, settings={"steps": 10, "log_every": 3}, max_steps=6, progress=True)
    output = capsys.readouterr().err
    last = output.replace("\r", "\n").strip().splitlines()[-1]
    assert "6/6" in last
    (*_, (step, loss)) = logged(tmp_path / "log" / "version_0", "train/loss")
    assert step == 5
    assert f"cells/s, loss {loss:.3f}" in last
    assert "<00:00" in last
    run(tmp_path, settings={"steps": 10}, resume_from=tmp_path, progress=True)
    lines = capsys.readouterr().err.replace("\r", "\n").strip().splitlines()
    assert "6/10" in lines[0]
    assert "10/10" in lines[-1]


TRYING = {"accumulate": 2, "validate_every": 4, "checkpoint_every": 3, "steps": 12, "anchor_objective": "genes"}


class Dropping(PretrainingModule):
    """With dropout, which draws from torch's global stream; the network itself has none."""

    def compute_loss(self, batch, generator):
        loss, parts = super().compute_loss(batch, generator)
        return loss * torch.nn.functional.dropout(torch.ones(50), 0.2).mean(), parts


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


class At(pl.Callback):
    """Do something after an optimiser step."""

    def __init__(self, step, do):
        self.step, self.do, self.done = step, do, 0

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step and not self.done:
            self.done = 1
            self.do()


@pytest.fixture
def small_run(run):
    """Train with the settings above and dropout."""

    def start(out, kind=Dropping, settings=None, **options):
        return run(out, kind=kind, settings=TRYING | (settings or {}), **options)

    return start


@pytest.fixture(scope="module")
def straight(tiny, config, stream, tmp_path_factory):
    """Weights of a run that nothing interrupts."""
    module = Dropping(tiny(), config(**TRYING), n_studies=2)
    fit(module, stream(), out_dir=tmp_path_factory.mktemp("straight"), accelerator="cpu", progress=False)
    return weights(module)


@pytest.mark.fault("SIGKILL in fit")
@pytest.mark.parametrize(
    "stop", [1, 4, 6, 11]
)  # before, at and after a validation; at a checkpoint's time, between two
def test_a_run_goes_on_bit_for_bit_from_any_step(small_run, straight, tmp_path, stop):
    out = tmp_path / "run"
    small_run(out, max_steps=stop)
    torch.rand(3)  # global state must not matter
    resumed, trainer = small_run(out, resume_from=out)
    assert trainer.global_step == 12
    assert torch.equal(weights(resumed), straight)
    assert sorted(file.name for file in out.iterdir()) == ["last.ckpt", "log"]


@pytest.mark.fault("SIGTERM and Ctrl-C in training")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", [3, 5])  # with a checkpoint of its own, and without
def test_a_signal_ends_the_run_with_a_checkpoint_of_its_step(run, small_run, straight, tmp_path, sent, step):
    before = signal.getsignal(sent)
    out = tmp_path / "run"
    with pytest.raises(SystemExit if sent == signal.SIGTERM else KeyboardInterrupt) as stopped:
        small_run(out, callbacks=[At(step, lambda: os.kill(os.getpid(), sent))])
    if sent == signal.SIGTERM:
        assert stopped.value.code == TERMINATED == 143
    assert signal.getsignal(sent) == before
    saved = torch.load(out / "last.ckpt", weights_only=True)
    assert saved["global_step"] == step
    saved_weights = torch.cat([saved["state_dict"][n].flatten() for n, _ in run.module.named_parameters()])
    assert torch.equal(weights(run.module), saved_weights), "what stays in memory is what was saved"
    resumed, _ = small_run(out, resume_from=out)
    assert torch.equal(weights(resumed), straight)


@pytest.mark.fault("disk full")
def test_a_full_disk_leaves_the_checkpoint_before(small_run, straight, tmp_path, monkeypatch):
    fsync, calls = os.fsync, []

    def full(file):
        calls.append(file)
        if len(calls) > 2:  # two checkpoints
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(file)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("scdiva._files.os.fsync", full)
        with pytest.raises(OSError, match=r"step 9 .*No space.*intact"):
            small_run(out)
    assert sorted(file.name for file in out.iterdir()) == ["last.ckpt", "log"]
    assert torch.load(out / "last.ckpt", weights_only=True)["global_step"] == 6
    resumed, _ = small_run(out, resume_from=out)
    assert torch.equal(weights(resumed), straight)


@pytest.mark.fault("disk full")
@pytest.mark.parametrize("fails", [False, True])
def test_training_continues_while_a_checkpoint_is_written(run, small_run, tmp_path, fails, monkeypatch):
    """A write that lasts until step 5: the checkpoint of step 3 holds that step, and its error is raised after 5."""
    released, contents, plain = threading.Event(), {}, AtomicIO.write

    def slow(self, content, path, step):
        assert released.wait(60)
        if fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(self, content, path, step)
        contents[step] = torch.load(path, weights_only=True)["state_dict"]

    def release():
        assert not contents
        released.set()
        run.module.trainer.strategy.checkpoint_io._writing.exception()  # wait

    monkeypatch.setattr(AtomicIO, "write", slow)
    if fails:
        with pytest.raises(OSError, match="No space left"):
            small_run(tmp_path, callbacks=[At(5, release)])
        assert run.module.trainer.global_step == 5
        return
    small_run(tmp_path, callbacks=[At(5, release)])
    assert list(contents) == [3, 6, 9, 12], "the last one is written when fit returns"
    first = contents[3]
    straight, trainer = small_run(tmp_path / "straight", max_steps=3)
    trainer.save_checkpoint(tmp_path / "by hand.ckpt")  # written when the call returns
    by_hand = torch.load(tmp_path / "by hand.ckpt", weights_only=True)["state_dict"]
    for name, weight in straight.named_parameters():
        assert torch.equal(weight, by_hand[name])
        assert torch.equal(weight, first[name])


@pytest.mark.parametrize("minutes", [1.0, None])
def test_checkpoints_are_due_by_minutes_or_by_steps(run, tmp_path, minutes, monkeypatch):
    """On a clock that advances 40 s per step."""
    steps, plain = [], AtomicIO.write
    monkeypatch.setattr(AtomicIO, "write", lambda *call: steps.append(call[-1]) or plain(*call))

    class Clock(Callback):
        def setup(self, trainer, *_, **__):
            monkeypatch.setattr("scdiva.train.callbacks.time.monotonic", lambda: 40.0 * trainer.global_step)

    settings = {"steps": 11, "accumulate": 2, "checkpoint_every": 4, "checkpoint_minutes": minutes}
    run(tmp_path, settings=settings, callbacks=[Clock()])
    assert steps == ([4, 8, 11] if minutes is None else [3, 6, 9, 11])


@pytest.fixture
def cells(vocabulary, tmp_path):
    """Make a datamodule of a file, of a fixed order."""
    toy(90, 40).write_h5ad(tmp_path / "a.h5ad")
    how = {"vocabulary": vocabulary, "batch_size": 6, "context": 16, "n_blocks": 2}
    return lambda: CellDataModule(tmp_path / "a.h5ad", **how)


@pytest.mark.fault("NaN")
@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize(("late", "step"), [(False, 4), (True, 4), (True, 5)])  # a checkpoint is due after step 5
def test_a_loss_or_gradient_that_is_no_number_stops_before_the_weights(
    run, small_run, cells, tmp_path, where, late, step
):
    class Broken(Dropping):
        reads_late = late

        def compute_loss(self, batch, generator):
            loss, parts = super().compute_loss(batch, generator)
            if self.batches_seen == 2 * step + 1:  # the second of the step
                good = loss.detach()
                loss = loss * torch.nan if where == "loss" else good + (loss - good).abs().sqrt() * 0 + 0 * loss
            return loss, parts

    good, _ = small_run(tmp_path / "good", data=cells(), model={"n_genes": 40}, max_steps=step)
    settings = {"log_every": 100 if late else 1}
    with pytest.raises(FloatingPointError, match=f"optimiser step {step}") as error:
        small_run(tmp_path / "bad", Broken, data=cells(), model={"n_genes": 40}, settings=settings)
    at = f"at batch {2 * step + 1}," if where == "loss" else f"at batch {2 * step}, {2 * step + 1},"
    assert at in str(error.value)
    assert "cells_of_batch" in str(error.value)
    assert "last.ckpt is from before" in str(error.value)
    assert torch.equal(weights(run.module), weights(good))
    assert torch.load(tmp_path / "bad" / "last.ckpt", weights_only=True)["global_step"] == 3


@pytest.mark.fault("out of memory")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_halves_what_runs_at_a_time(run, small_run, tmp_path, where, monkeypatch, caplog):
    """Memory for three cells at a time: batches of six run in two parts, and the steps are those of whole batches."""
    plain, _ = small_run(tmp_path / "plain", PretrainingModule, settings={"steps": 5})
    forward = Block.forward

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def scarce(block, x, cu_seqlens, *args):
        if len(cu_seqlens) > 5 and run.module.batches_seen >= 3 and torch.is_grad_enabled():
            if where == "forward":
                full()
            x = x.clone().requires_grad_()
            x.register_hook(full)
        return forward(block, x, cu_seqlens, *args)

    monkeypatch.setattr(Block, "forward", scarce)
    monkeypatch.setattr("scdiva._settings.logger.propagate", True)
    tight, _ = small_run(tmp_path / "tight", PretrainingModule, settings={"steps": 5})
    assert (weights(tight) - weights(plain)).abs().max() < 1e-5
    (message,) = [record.message for record in caplog.records if "out of memory" in record.message]
    assert "in 2 parts" in message
    assert tight.micro_batches == 2
    assert tight.model.blocks.micro_batches == 1, "the network is left as it came"
    saved = torch.load(tmp_path / "tight" / "last.ckpt", weights_only=True)
    assert saved["scdiva"]["micro_batches"] == 2, "a resumed run adds in the same order"


@pytest.mark.fault("out of memory")
def test_out_of_memory_for_one_cell_is_an_error(run, small_run, tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(PretrainingModule, "compute_loss", full)
    with pytest.raises(torch.OutOfMemoryError):
        small_run(tmp_path, PretrainingModule)
    assert run.module.micro_batches == 8, "beyond the six cells of a batch there is nothing to halve"


@pytest.mark.skipif(sys.platform != "linux", reason="of the allocator of Linux")
def test_memory_between_tensors_that_are_kept_is_released():
    tensors = [torch.ones(12_000) for _ in range(6_000)][::50]  # the others are freed, below the size that is mapped
    before = resident()
    release_memory()
    assert before - resident() > 100e6
    assert sum(int(x.sum()) for x in tensors) == 120 * 12_000


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
