"""Two processes do what one does with twice the batch."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pytorch_lightning.plugins.environments import SLURMEnvironment

from scdiva.train import PretrainingModule, fit, pretraining
from scdiva.train.runner import is_first_process, launched

PROCESS = Path(__file__).with_name("distributed_process.py")


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
    (folder / "corpus.h5").write_bytes(corpus.path.read_bytes())
    vocabulary.write(folder / "vocabulary.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in ("0", "1"):
        told = {
            "TORCHELASTIC_RUN_ID": "test", "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        order = [sys.executable, str(PROCESS), str(folder)]
        log = (folder / f"log{rank}").open("w")
        processes.append(subprocess.Popen(order, env={**os.environ, **told}, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "\n".join((folder / f"log{rank}").read_text()[-3000:] for rank in (0, 1))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)], folder


def test_two_processes_are_one_with_twice_the_batches(two, one):
    """Masks, times and dropout drawn as always: batch s of process r is batch 2 s + r of one process."""
    (first, second), folder = two
    alone = one.run(folder, "alone", accumulate=4)
    assert first["plain"]["error"] == alone["error"] == "None"
    assert first["plain"]["world_size"] == 2
    torch.testing.assert_close(first["plain"]["weights"], alone["weights"], rtol=0, atol=1e-5)
    assert torch.equal(first["plain"]["weights"], second["plain"]["weights"])
    turns = [loss for both in zip(first["plain"]["losses"], second["plain"]["losses"], strict=True) for loss in both]
    assert turns == pytest.approx(alone["losses"], abs=1e-5)
    assert len(turns) == 24
    # what is validated and logged is the same too
    assert first["plain"]["validation"] == second["plain"]["validation"] == pytest.approx(alone["validation"], rel=1e-6)


def test_two_processes_are_one_with_a_batch_twice_as_large(two, one, monkeypatch):
    """The same where masks are a function of the cell: the gradient of the mean is the mean of the gradients."""
    (first, _), folder = two
    monkeypatch.setattr(pretraining, "mask_tokens", one.every_other)
    monkeypatch.setattr(pretraining, "stratified_times", lambda n, generator: torch.full((n,), 0.5))
    alone = one.run(folder, "twice", batch_size=10, **one.CELLWISE)
    assert first["cellwise"]["error"] == alone["error"] == "None"
    torch.testing.assert_close(first["cellwise"]["weights"], alone["weights"], rtol=0, atol=1e-5)
    assert first["cellwise"]["validation"] == pytest.approx(alone["validation"], rel=1e-6)


def test_a_signal_to_one_process_stops_both_and_they_go_on(two, one):
    (first, second), folder = two
    assert first["stopped"]["code"] == second["stopped"]["code"] == 143
    alone = one.run(folder, "straight", accumulate=2)
    torch.testing.assert_close(first["resumed"]["weights"], alone["weights"], rtol=0, atol=1e-5)
    assert len(first["resumed"]["losses"]) == 3, "nothing that was done is done again"


def test_one_process_without_a_finite_loss_stops_both(two):
    (first, second), _ = two
    assert "another process" in first["broken"]["error"]
    assert "nan at batch 5, optimiser step 2" in second["broken"]["error"]


def test_a_run_is_resumed_by_as_many_processes(two, one):
    _, folder = two
    found = one.run(folder, "halves", resume=True)
    assert "began with 2 processes and cannot be resumed with 1" in found["error"]


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


def test_tasks_that_are_not_spread_evenly_are_refused(monkeypatch):
    for name, value in {"SLURM_NTASKS": "7", "SLURM_NNODES": "2", "SLURM_PROCID": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="7 tasks on 2 nodes"):
        launched()


SLURM = {
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "0",
    "SLURM_JOB_NAME": "pretrain",
}


@pytest.mark.parametrize(
    ("environment", "options", "expected"),
    [
        ({}, {}, (1, 1, "auto")),
        ({}, {"devices": 2, "num_nodes": 3}, (2, 3, "ddp_find_unused_parameters_true")),
        (SLURM, {}, (4, 2, "ddp_find_unused_parameters_true")),
        (SLURM, {"strategy": "fsdp"}, (4, 2, "fsdp")),
    ],
)
def test_what_reaches_the_trainer(environment, options, expected, tiny, config, stream, tmp_path, monkeypatch):
    class Asked(Exception):
        pass

    def asked(**told):
        raise Asked(told)

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("scdiva.train.runner.pl.Trainer", asked)
    with pytest.raises(Asked) as caught:
        fit(PretrainingModule(tiny(), config()), stream(), out_dir=tmp_path, **options)
    (told,) = caught.value.args
    assert (told["devices"], told["num_nodes"], told["strategy"]) == expected
    # jobs of Slurm are not put back in the queue unless asked
    slurm = [plugin for plugin in told["plugins"] if isinstance(plugin, SLURMEnvironment)]
    assert [plugin.auto_requeue for plugin in slurm] == [False] * bool(environment)
    own = SLURMEnvironment(auto_requeue=True)
    with pytest.raises(Asked) as caught:
        fit(PretrainingModule(tiny(), config()), stream(), out_dir=tmp_path, plugins=own, **options)
    assert [plugin for plugin in caught.value.args[0]["plugins"] if isinstance(plugin, SLURMEnvironment)] == [own]


def test_the_first_process_writes(monkeypatch):
    assert is_first_process()
    for name, value in {"TORCHELASTIC_RUN_ID": "a", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert not is_first_process()
    monkeypatch.setenv("RANK", "0")
    assert is_first_process()
