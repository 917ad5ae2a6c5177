from __future__ import annotations

import csv
import importlib.util
import sys
import time

import pytest
from pytorch_lightning.callbacks import Callback

from scdiva.train import PretrainingModule, fit
from scdiva.train.callbacks import RATE, StepBar, Watch, run_logs


@pytest.fixture
def run(tiny, config, stream):
    def start(out, *, settings=None, **options):
        module = PretrainingModule(tiny(), config(**(settings or {})), n_studies=2)
        return fit(module, stream(), out_dir=out, accelerator="cpu", **{"progress": False} | options)

    return start


def logged(folder, name):
    with (folder / "metrics.csv").open() as lines:
        return [(int(row["step"]), float(row[name])) for row in csv.DictReader(lines) if row.get(name)]


def test_the_rate_is_cells_by_time_without_validation(run, tmp_path, monkeypatch):
    """On a clock that goes on by one second a look, and by a hundred in validation."""
    now = iter(range(10**6))
    monkeypatch.setattr("scdiva.train.callbacks.time.perf_counter", lambda: float(next(now)))

    class Slow(Callback):
        def on_validation_batch_end(self, *args):
            for _ in range(100):
                time.perf_counter()

    run(tmp_path, settings={"steps": 12, "validate_every": 4, "log_every": 2}, callbacks=[Slow()])
    rates = logged(tmp_path / "log" / "version_0", RATE)
    assert [step for step, _ in rates] == [1, 3, 5, 7, 9, 11]
    # six cells a step, and a look at its end; the clock is looked at once more where validation ends
    assert all(4.0 <= rate <= 6.0 for _, rate in rates)


def test_accumulated_batches_count(run, tmp_path, monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr("scdiva.train.callbacks.time.perf_counter", lambda: float(next(now)))
    run(tmp_path, settings={"steps": 4, "accumulate": 3, "validate_every": 100})
    assert [rate for _, rate in logged(tmp_path / "log" / "version_0", RATE)] == [6.0] * 4


def test_the_bar_shows_steps_loss_rate_and_time_left(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("scdiva._progress._can_draw", lambda: True)
    monkeypatch.setattr("scdiva._progress.DELAY", 0.0)
    run(tmp_path, settings={"steps": 10}, max_steps=6, progress=True)
    said = capsys.readouterr().err
    last = said.replace("\r", "\n").strip().splitlines()[-1]
    assert "6/6" in last
    assert "cells/s, loss" in last
    assert "<00:00" in last
    assert "validating" in said
    run(tmp_path, settings={"steps": 10}, resume_from=tmp_path, progress=True)
    said = capsys.readouterr().err.replace("\r", "\n").strip().splitlines()
    assert "6/10" in said[0]
    assert "10/10" in said[-1]


def test_a_bar_that_is_off_shows_nothing(run, tmp_path, capsys):
    class Off(StepBar):
        def enable(self):
            pass

    bar = Off(Watch(1))
    bar.disable()
    run(tmp_path, callbacks=[bar], enable_progress_bar=True)
    assert "step" not in capsys.readouterr().err


def test_logs_are_on_the_disk_when_a_checkpoint_is(run, tmp_path):
    class Look(Callback):
        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == 5:
                self.seen = logged(tmp_path / "log" / "version_0", "train/loss")

    look = Look()
    run(tmp_path, callbacks=[look], settings={"checkpoint_every": 5, "validate_every": 3})
    # the step of the checkpoint itself may be logged after it
    assert [step for step, _ in look.seen][:4] == [0, 1, 2, 3]


def test_tensorboard_that_is_missing_is_named_with_what_brings_it(tmp_path, monkeypatch):
    for name in ("tensorboard", "tensorboardX"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'scdiva\[watch\]'"):
        run_logs(tmp_path, 10, tensorboard=True)
    assert len(run_logs(tmp_path, 10)) == 1


@pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("tensorboard", "tensorboardX")), reason="needs the watch extra"
)
def test_tensorboard_stands_beside_the_table(run, tmp_path):
    run(tmp_path, settings={"steps": 5}, tensorboard=True)
    found = {path.name.split(".")[0] for path in (tmp_path / "log" / "version_0").iterdir()}
    assert {"metrics", "validation", "events"} <= found
    assert [path.name for path in (tmp_path / "log").iterdir()] == ["version_0"]
