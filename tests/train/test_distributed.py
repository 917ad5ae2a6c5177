"""Two processes equal one with twice the batch size, and other numbers of processes can resume their run."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from pytorch_lightning.plugins.environments import SLURMEnvironment
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from scdiva.train import PretrainingModule, fit
from scdiva.train.callbacks import RATE
from scdiva.train.runner import launched

PROCESS = Path(__file__).with_name("distributed_process.py")
FOUR = [f"four, {rank}" for rank in range(4)]


@pytest.fixture(scope="module")
def one():
    """Import the runs, to do them in one process."""
    spec = importlib.util.spec_from_file_location("distributed_process", PROCESS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def two(corpus, vocabulary, tmp_path_factory):
    """All runs in two processes, started as torchrun starts them; what each found, and their folder."""
    folder = tmp_path_factory.mktemp("distributed")
    shutil.copytree(corpus.path, folder / "corpus.h5")
    vocabulary.write(folder / "vocabulary.safetensors")
    order = [sys.executable, str(PROCESS), str(folder)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            order, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, (folder / "log").read_text()[-5000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)], folder


def test_two_processes_are_one_with_twice_the_batches(two, one):
    """Masks, times and dropout drawn as always: batch s of process r is batch 2 s + r of one process."""
    (first, second), folder = two
    alone = one.run(folder, "alone", accumulate=4, log_every=3)
    assert first["plain"]["error"] == alone["error"] == "None"
    assert first["plain"]["world_size"] == 2
    torch.testing.assert_close(first["plain"]["weights"], alone["weights"], rtol=0, atol=1e-5)
    assert torch.equal(first["plain"]["weights"], second["plain"]["weights"])
    turns = [loss for pair in zip(first["plain"]["losses"], second["plain"]["losses"], strict=True) for loss in pair]
    assert turns == pytest.approx(alone["losses"], rel=1e-6)
    assert len(turns) == 24
    # what is validated and logged is the same too
    assert first["plain"]["validation"] == second["plain"]["validation"] == pytest.approx(alone["validation"], rel=1e-6)
    lines = [pd.read_csv(folder / out / "log" / "version_0" / "metrics.csv") for out in ("plain", "alone")]
    logged = [table.filter(like="train/").drop(columns=RATE).dropna() for table in lines]
    np.testing.assert_allclose(*(table.to_numpy() for table in logged), rtol=1e-5)
    # each line is the mean of three steps of four batches
    np.testing.assert_allclose(logged[0]["train/loss"], np.reshape(turns, (2, 12)).mean(axis=1), rtol=1e-5)
    assert logged[0].columns.isin(first["plain"]["logged"].keys() & second["plain"]["logged"].keys()).all()


def test_a_signal_to_one_process_stops_both_and_they_go_on(two, one):
    (first, second), folder = two
    assert first["stopped"]["code"] == second["stopped"]["code"] == 143
    alone = one.run(folder, "straight", accumulate=2)
    torch.testing.assert_close(first["resumed"]["weights"], alone["weights"], rtol=0, atol=1e-5)
    assert len(first["resumed"]["losses"]) == 2, "both stop at the step after; nothing that was done is done again"
    assert first["late"]["code"] == second["late"]["code"] == 143
    assert len(first["late, resumed"]["losses"]) == len(second["late, resumed"]["losses"]) == 1, "another step later"
    assert torch.equal(first["late, resumed"]["weights"], first["resumed"]["weights"])


def test_one_process_without_a_finite_loss_stops_both(two):
    (first, second), _ = two
    assert "another process" in first["broken"]["error"]
    assert "nan at batch 5, optimiser step 2" in second["broken"]["error"]


def test_a_run_goes_on_with_any_number_of_processes_and_loses_no_cell(two, corpus):
    """Two, then one, then four: two epochs, in the end, in which each cell was seen once."""
    runs, folder = two
    later = [torch.load(folder / f"resized by {name}.pt", weights_only=True) for name in ("one", *FOUR)]
    results = [*(one["resized"] for one in runs), *later]
    assert [one["error"] for one in results] == ["None"] * 7
    assert [one["world_size"] for one in results] == [2, 2, 1, 4, 4, 4, 4]
    assert [len(one["seen"]) for one in results] == [6, 6, 4, 12, 12, 12, 12]
    batches = sorted(batch for one in results for batch in one["seen"])
    # every number once, and so every draw of masks
    assert [number for number, _ in batches] == list(range(64))
    indptr, tokens, values = corpus.read(0, corpus.n_obs)
    everything = Counter(
        (*tokens[a : min(b, a + 16)].tolist(), *values[a : min(b, a + 16)].tolist())
        for a, b in itertools.pairwise(indptr.tolist())
    )
    cells = [cell for _, of_batch in batches for cell in of_batch]
    assert Counter(cells[:145]) == Counter(cells[145:]) == everything
    assert all(torch.equal(one["weights"], results[3]["weights"]) for one in results[3:])


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TORCHELASTIC_RUN_ID": "a", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", "SLURM_NTASKS": "2"}, (4, 2)),
        ({"SLURM_NTASKS": "16", "SLURM_NNODES": "2", "SLURM_PROCID": "3", "SLURM_JOB_NAME": "pretrain"}, (8, 2)),
        ({"SLURM_NTASKS": "16", "SLURM_PROCID": "3", "SLURM_JOB_NAME": "interactive"}, None),
        ({"SLURM_NTASKS": "16"}, None),  # a batch script is not started by srun
        ({}, None),
    ],
)
def test_what_a_launcher_started(environment, expected, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launched() == expected


SLURM = {"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "2", "SLURM_PROCID": "0"}
SLURM |= {"SLURM_JOB_NAME": "pretrain"}


@pytest.mark.parametrize(
    ("environment", "options", "expected"),
    [
        ({}, {}, (1, 1, "auto")),
        ({}, {"devices": 2, "num_nodes": 3}, (2, 3, "auto")),
        (SLURM, {}, (4, 2, "auto")),
        (SLURM, {"strategy": "fsdp"}, (4, 2, "fsdp")),
    ],
)
def test_what_reaches_the_trainer(environment, options, expected, tiny, config, stream, tmp_path, monkeypatch):
    calls = []

    def fake_trainer(**arguments):
        calls.append(arguments)
        raise MisconfigurationException

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("scdiva.train.runner.pl.Trainer", fake_trainer)
    user_plugin = SLURMEnvironment(auto_requeue=True)
    for more in ({}, {"plugins": user_plugin}):
        with pytest.raises(ValueError, match=r"^$"):
            fit(PretrainingModule(tiny(), config()), stream(), out_dir=tmp_path, **options, **more)
        assert (calls[-1]["devices"], calls[-1]["num_nodes"], calls[-1]["strategy"]) == expected
    slurm = [[plugin for plugin in one["plugins"] if isinstance(plugin, SLURMEnvironment)] for one in calls]
    # jobs of Slurm are not put back in the queue unless asked
    assert [plugin.auto_requeue for plugin in slurm[0]] == [False] * bool(environment)
    assert slurm[1] == [user_plugin]
