"""What ends a run before its time, and that it goes on from there as if nothing had been."""

from __future__ import annotations

import csv
import errno
import os
import signal

import pytest
import pytorch_lightning as pl
import torch

from scdiva.data.datamodule import CellDataModule
from scdiva.datasets import toy
from scdiva.train import PretrainingModule, fit
from scdiva.train.callbacks import TERMINATED, AtomicIO

TRYING = {
    "accumulate": 2,
    "validate_every": 4,
    "checkpoint_every": 3,
    "steps": 12,
    "anchor_objective": "genes+contrast",
}


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
def run(tiny, config, stream):
    """Train from new objects; everything that a new process would have."""

    def start(out, kind=Dropping, data=None, model=None, **options):
        settings = TRYING | options.pop("settings", {})
        module = kind(tiny(**(model or {})), config(**settings), n_studies=2)
        start.module = module
        data = stream() if data is None else data
        return module, fit(module, data, out_dir=out, accelerator="cpu", progress=False, **options)

    return start


@pytest.mark.fault("SIGKILL in fit")
@pytest.mark.parametrize("decay", [0.0, 0.8])
def test_a_run_goes_on_bit_for_bit_from_any_step(run, tmp_path, decay):
    settings = {"ema_decay": decay}
    straight, _ = run(tmp_path / "straight", settings=settings)
    for stop in (1, 4, 6, 11):  # before, at and after a validation; at a checkpoint's time and between two
        out = tmp_path / str(stop)
        run(out, settings=settings, max_steps=stop)
        torch.rand(3)  # global state must not matter
        resumed, trainer = run(out, settings=settings, resume_from=out)
        assert trainer.global_step == 12
        assert torch.equal(weights(resumed), weights(straight)), stop
        assert not (out / "last.ckpt.part").exists()


def test_the_running_mean_is_what_training_leaves(run, tmp_path):
    seen = []

    class Seen(pl.Callback):
        def on_train_batch_end(self, trainer, module, *args):
            if trainer.global_step > len(seen):
                seen.append(weights(module).clone())

    averaged, _ = run(tmp_path / "ema", settings={"ema_decay": 0.8}, callbacks=[Seen()])
    mean = seen[0]
    for one in seen[1:]:
        mean = 0.8 * mean + 0.2 * one
    torch.testing.assert_close(weights(averaged), mean)
    plain, _ = run(tmp_path / "plain")
    assert torch.equal(weights(plain), seen[-1]), "the mean does not disturb the weights that it is of"
    saved = torch.load(tmp_path / "ema" / "last.ckpt", weights_only=True)
    assert torch.equal(torch.cat([saved["state_dict"][n].flatten() for n, _ in averaged.named_parameters()]), mean)


@pytest.mark.fault("SIGTERM and Ctrl-C in training")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", [3, 5])  # with a checkpoint of its own, and without
def test_a_signal_ends_the_run_with_a_checkpoint_of_its_step(run, tmp_path, sent, step, caplog):
    before = signal.getsignal(sent)
    out = tmp_path / "run"
    with pytest.raises(SystemExit if sent == signal.SIGTERM else KeyboardInterrupt) as stopped:
        run(out, callbacks=[At(step, lambda: os.kill(os.getpid(), sent))])
    if sent == signal.SIGTERM:
        assert stopped.value.code == TERMINATED == 143
    assert signal.getsignal(sent) == before
    saved = torch.load(out / "last.ckpt", weights_only=True)
    assert saved["global_step"] == step
    kept = torch.cat([saved["state_dict"][n].flatten() for n, _ in run.module.named_parameters()])
    assert torch.equal(weights(run.module), kept), "what stays in memory is what was saved"
    resumed, _ = run(out, resume_from=out)
    straight, _ = run(tmp_path / "straight")
    assert torch.equal(weights(resumed), weights(straight))


def test_a_signal_in_the_last_step_has_nothing_to_stop(run, tmp_path):
    _, trainer = run(tmp_path, callbacks=[At(12, lambda: os.kill(os.getpid(), signal.SIGTERM))])
    assert trainer.global_step == 12


@pytest.mark.fault("disk full")
def test_a_full_disk_leaves_the_checkpoint_before(run, tmp_path, monkeypatch):
    straight, _ = run(tmp_path / "straight")
    fsync, calls = os.fsync, []

    def full(file):
        calls.append(file)
        if len(calls) > 4:  # file and folder of two checkpoints
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(file)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("scdiva.train.callbacks.os.fsync", full)
        with pytest.raises(OSError, match=r"step 9 could not be written.*No space left.*before is intact"):
            run(out)
    assert sorted(file.name for file in out.iterdir()) == ["last.ckpt", "log"]
    assert torch.load(out / "last.ckpt", weights_only=True)["global_step"] == 6
    resumed, _ = run(out, resume_from=out)
    assert torch.equal(weights(resumed), weights(straight))


def test_a_first_checkpoint_that_fails_is_said_to_be_the_first(tmp_path, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("scdiva.train.callbacks.os.fsync", full)
    with pytest.raises(OSError, match="there is none before it"):
        AtomicIO().save_checkpoint({"global_step": 3}, tmp_path / "last.ckpt")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def cells(vocabulary, tmp_path):
    """Make a datamodule of two files, of a fixed order."""
    adata = toy(90, 40)
    for name, rows in (("a", slice(60)), ("b", slice(60, 90))):
        adata[rows].copy().write_h5ad(tmp_path / f"{name}.h5ad")

    def make(**options):
        files = [tmp_path / "a.h5ad", tmp_path / "b.h5ad"]
        return CellDataModule(files, vocabulary=vocabulary, **{"batch_size": 6, "context": 16, "n_blocks": 2} | options)

    return make


@pytest.mark.fault("NaN")
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_loss_or_gradient_that_is_no_number_stops_before_the_weights(run, cells, tmp_path, where):
    class Broken(Dropping):
        def compute_loss(self, batch, generator):
            loss, parts = super().compute_loss(batch, generator)
            if self.batches_seen == 9:  # the second of step 4
                good = loss.detach()
                loss = loss * torch.nan if where == "loss" else good + (loss - good).abs().sqrt() * 0 + 0 * loss
            return loss, parts

    good, _ = run(tmp_path / "good", data=cells(), model={"n_genes": 40}, max_steps=4)
    with pytest.raises(FloatingPointError, match="optimiser step 4") as error:
        run(tmp_path / "bad", Broken, data=cells(), model={"n_genes": 40})
    first = 9 if where == "loss" else 8
    file = tmp_path / "bad" / f"not_finite_batch_{first}.csv"
    assert str(file) in str(error.value)
    assert "last.ckpt is from before" in str(error.value)
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    wanted = [cell for number in range(first, 10) for cell in cells().cells_of_batch(number)]
    assert [(row["study"], row["file"], int(row["row"]), row["cell"]) for row in rows] == wanted
    assert torch.equal(weights(run.module), weights(good))
    assert torch.load(tmp_path / "bad" / "last.ckpt", weights_only=True)["global_step"] == 3


@pytest.mark.fault("out of memory")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_halves_what_runs_at_a_time(run, tmp_path, where, monkeypatch, caplog):
    """Memory for three cells at a time: batches of six run in two parts, and the steps are those of whole batches."""
    from scdiva.nn.layers import Block

    settings = {"anchor_objective": "genes+contrast", "steps": 5}
    plain, _ = run(tmp_path / "plain", PretrainingModule, settings=settings)
    forward, sizes = Block.forward, []

    class Scarce(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def scarce(block, x, cu_seqlens, *args):
        sizes.append(len(cu_seqlens) - 1)
        much = sizes[-1] > 4 and run.module.batches_seen >= 3 and torch.is_grad_enabled()
        if much and where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(block, Scarce.apply(x) if much else x, cu_seqlens, *args)

    monkeypatch.setattr(Block, "forward", scarce)
    monkeypatch.setattr("scdiva._settings.logger.propagate", True)
    tight, _ = run(tmp_path / "tight", PretrainingModule, settings=settings)
    assert (weights(tight) - weights(plain)).abs().max() < 1e-5
    said = [record.message for record in caplog.records if "out of memory" in record.message]
    assert len(said) == 1
    assert "in 2 parts" in said[0]
    assert tight.micro_batches == 2
    assert tight.model.blocks.micro_batches == 1, "the network is left as it came"
    saved = torch.load(tmp_path / "tight" / "last.ckpt", weights_only=True)
    assert saved["scdiva"]["micro_batches"] == 2, "a resumed run adds in the same order"


@pytest.mark.fault("out of memory")
def test_out_of_memory_for_one_cell_is_an_error(run, tmp_path):
    class Full(PretrainingModule):
        def compute_loss(self, batch, generator):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        run(tmp_path, Full)
    assert run.module.micro_batches == 8, "beyond the six cells of a batch there is nothing to halve"
