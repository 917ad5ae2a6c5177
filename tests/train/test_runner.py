from __future__ import annotations

import csv
from importlib.util import find_spec

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import CSVLogger, Logger

from scdiva.models import ScDiVa
from scdiva.train import TaskModule, pretrain
from scdiva.train.runner import find_checkpoint, read_checkpoint


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def column(folder, name):
    rows = []
    for file in sorted(folder.glob("log/version_*/metrics.csv")):
        with file.open() as lines:
            rows += [(int(row["step"]), float(row[name])) for row in csv.DictReader(lines) if row.get(name)]
    return rows


@pytest.mark.parametrize(
    ("settings", "stop", "late"),
    [
        ({}, 10, False),  # at a multiple of checkpoint_every
        # between two of them, and between two lines of the log
        ({"checkpoint_every": 4, "log_every": 4, "accumulate": 2, "anchor_objective": "genes"}, 7, False),
        ({"checkpoint_every": 4, "log_every": 4, "accumulate": 2}, 7, True),
    ],
)
def test_a_resumed_run_is_the_run(run, tmp_path, settings, stop, late, monkeypatch):
    straight, _ = run(tmp_path / "straight", settings=settings)
    monkeypatch.setattr(TaskModule, "reads_late", late)
    half, _ = run(tmp_path / "halves", settings=settings, max_steps=stop)
    torch.rand(3)  # global state must not matter
    resumed, trainer = run(tmp_path / "halves", settings=settings, resume_from=tmp_path / "halves")
    assert trainer.global_step == 20
    assert resumed.batches_seen == straight.batches_seen == 20 * settings.get("accumulate", 1)
    assert half.batches_seen == stop * settings.get("accumulate", 1)
    assert (weights(resumed) - weights(straight)).abs().max() <= 1e-6
    assert (weights(half) - weights(straight)).abs().max() > 1e-4
    # validation is counted in optimiser steps, whatever the accumulation
    assert [step for step, _ in column(tmp_path / "straight", "val/loss")] == [4, 9, 14, 19]
    # the logs join without gap or overlap, and say the same
    for name in ("train/loss", "val/loss", "train/learning_rate"):
        one, two = column(tmp_path / "straight", name), column(tmp_path / "halves", name)
        assert [step for step, _ in one] == [step for step, _ in two]
        assert [v for _, v in two] == pytest.approx([v for _, v in one], rel=1e-5)


def test_the_last_line_has_the_steps_that_are_left(run, tmp_path):
    run(tmp_path / "each", settings={"steps": 7, "log_every": 1})
    run(tmp_path / "threes", settings={"steps": 7, "log_every": 3})
    losses = [loss for _, loss in column(tmp_path / "each", "train/loss")]
    assert column(tmp_path / "threes", "train/loss") == [
        (step, pytest.approx(sum(losses[first : step + 1]) / (step + 1 - first), rel=1e-5))
        for first, step in ((0, 2), (3, 5), (6, 6))
    ]


class Lines(Logger):
    """A logger of the caller, which keeps its lines."""

    name, version, save_dir = "lines", 0, None

    def __init__(self):
        super().__init__()
        self.lines = []

    def log_metrics(self, metrics, step=None):
        self.lines.append((step, metrics))

    def log_hyperparams(self, *_, **__):
        pass


def test_losses_are_logged_where_the_caller_says(run, tmp_path):
    settings = {"steps": 6, "log_every": 3}
    run(tmp_path / "csv", settings=settings)
    names = "train/loss", "val/perplexity"
    csv = [column(tmp_path / "csv", name) for name in names]
    lines = Lines()
    run(tmp_path / "lines", settings=settings, logger=lines)
    assert [[(step, values[name]) for step, values in lines.lines if name in values] for name in names] == csv
    run(tmp_path / "elsewhere", settings=settings, logger=CSVLogger(tmp_path / "mine", name="log"))
    assert column(tmp_path / "mine", "train/loss") == csv[0]
    assert (tmp_path / "mine" / "log" / "version_0" / "validation.csv").exists()
    for wrong in (None, True, ["csv"]):
        with pytest.raises(TypeError, match="logger"):
            run(tmp_path / "wrong", settings=settings, logger=wrong)
    run(tmp_path / "none", settings=settings, logger=False)
    for folder in ("lines", "none"):
        assert [file.name for file in (tmp_path / folder).iterdir()] == ["last.ckpt"]
    if find_spec("tensorboard") is None:
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path / "run", settings=settings, logger="tensorboard")
    events = EventAccumulator(str(tmp_path / "run" / "log" / "version_0")).Reload()
    assert [[(event.step, event.value) for event in events.Scalars(name)] for name in names] == csv


def test_a_logger_without_its_package_is_an_error_with_the_command(run, tmp_path, monkeypatch):
    monkeypatch.setattr("scdiva.train.config.find_spec", lambda name: None)
    for name in ("tensorboard", "wandb"):
        with pytest.raises(ImportError, match=f"pip install {name}"):
            run(tmp_path / "run", logger=name)
        with pytest.raises(ImportError, match=f"pip install {name}"):
            pretrain("no file.h5ad", str(tmp_path / "run"), logger=name)
    with pytest.raises(ValueError, match=r"logger must be one of 'csv', .*did you mean 'tensorboard'"):
        run(tmp_path / "run", logger="tensorbord")
    assert not (tmp_path / "run").exists()


class Norms(Callback):
    """Norms of the gradient that the optimiser saw."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        self.seen.append(float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_clipping_and_accumulation(run, tmp_path, precision):
    norms, free = Norms(), Norms()
    settings = {"steps": 1, "precision": precision}
    _, trainer = run(tmp_path / "a", settings={**settings, "clip": 0.01}, callbacks=[norms])
    assert norms.seen[-1] == pytest.approx(0.01, rel=1e-3)
    assert trainer.precision == {"fp32": "32-true", "bf16": "bf16-mixed"}[precision]
    run(tmp_path / "b", settings={**settings, "clip": 0}, callbacks=[free])
    assert free.seen[-1] > 0.02
    _, trainer = run(tmp_path / "c", settings={**settings, "accumulate": 3})
    assert trainer.accumulate_grad_batches == 3


def test_resuming_needs_a_checkpoint_that_fits(run, tmp_path, tiny, config):
    for number, (content, message) in enumerate(
        [
            ({"state_dict": {}}, "not a checkpoint of a scdiva training task"),
            ({"scdiva": {"batches_seen": 2}}, "is damaged: it lacks"),
        ]
    ):
        torch.save(content, tmp_path / f"{number}.ckpt")
        with pytest.raises(ValueError, match=message):
            run(tmp_path / "new", resume_from=tmp_path / f"{number}.ckpt")
    with pytest.raises(FileNotFoundError, match="No checkpoint at"):
        run(tmp_path / "new", resume_from=tmp_path / "nowhere")
    assert not (tmp_path / "new").exists()
    run(tmp_path / "first", settings={"steps": 2})
    assert read_checkpoint(find_checkpoint(tmp_path / "first"))["scdiva"]["batches_seen"] == 2
    with pytest.raises(ValueError, match="steps: 2 then, 20 now"):
        run(tmp_path / "new", resume_from=tmp_path / "first")
    with pytest.raises(ValueError, match="LightningDataModule has no start_step"):
        run(tmp_path, data=pl.LightningDataModule(), resume_from=tmp_path / "first")


def test_attention_is_tuned_once_a_run_even_a_resumed_one(run, tmp_path, monkeypatch):
    """Tuning the launch plan requires a GPU; this tests only when it is called and when its plan is used."""
    from scdiva.train import pretraining

    tuned, stored_plans = [], []
    plan = {"forward": [64, 64, 4, 2], "dkdv": [32, 64, 8, 2], "dq": [64, 64, 8, 2], "rotate_once": True}
    monkeypatch.setattr(pretraining, "resolve_backend", lambda *args, **kind: "triton")
    monkeypatch.setattr(pretraining, "autotune_attention", lambda **kind: tuned.append(kind) or plan)
    monkeypatch.setattr(
        pretraining, "keep_attention_plan", lambda plan, **kind: stored_plans.append((plan, kind["dtype"]))
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    # where there is a GPU the run asks for this itself
    monkeypatch.setattr(pretraining.PretrainingModule, "on_train_start", lambda module: module._tune_attention())
    run(tmp_path / "run", max_steps=5)
    assert len(tuned) == 1
    assert tuned[0]["length"] == 17
    run(tmp_path / "run", max_steps=7, resume_from=tmp_path / "run")
    assert len(tuned) == 1, "the plan came with the checkpoint"
    assert stored_plans == [(plan, torch.float32)] * 2
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another GPU")
    run(tmp_path / "run", max_steps=9, resume_from=tmp_path / "run")
    assert len(tuned) == 2, "a plan of one device is none of another"


def test_blocks_are_compiled_for_the_run_only(run, tmp_path, monkeypatch):
    compile_blocks, all_compiled = ScDiVa.compile_blocks, []

    def noted(model):
        compile_blocks(model)
        all_compiled.append(all(block._compiled_call_impl is not None for block in model.blocks))

    monkeypatch.setattr(ScDiVa, "compile_blocks", noted)
    plain, _ = run(tmp_path / "plain", settings={"compile_blocks": "auto"}, max_steps=3)
    assert all_compiled == [], "without a CUDA device, auto compiles nothing"
    with torch.compiler.set_stance("force_eager"):  # blocks are marked as compiled, and nothing is
        compiled, _ = run(tmp_path / "compiled", settings={"compile_blocks": "yes"}, max_steps=3)
    assert all_compiled == [True]
    assert all(block._compiled_call_impl is None for block in compiled.model.blocks)
    torch.testing.assert_close(weights(compiled), weights(plain))
