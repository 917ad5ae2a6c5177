"""Faults of the machine: no room, no memory, a kill, an interrupt. Nothing is lost and adata is kept."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import re
import resource
import signal
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import torch

import scdiva as sd
from scdiva._files import put_whole
from scdiva.data import pack_files
from scdiva.data.output import write_cells
from scdiva.models import inference, load_model, save_model
from scdiva.train import PretrainingConfig, pretrain

from .conftest import CALLS


@contextlib.contextmanager
def room(n_bytes):
    """No file may grow beyond so many bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def without_room(work, n_bytes, report, again=None):
    """Run a function in a child process without disk space and return the name of the error that it raises.

    The process then writes with free space: it would crash if HDF5 had failed to close a file.
    """
    gc.freeze()  # else the child's collection copies all of the parent's memory
    process = os.fork()
    if not process:
        error = "none"
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # HDF5 says at length what it could not close
        try:
            with room(n_bytes):
                work()
        except BaseException as caught:  # noqa: BLE001 - whatever it is, it is looked at
            error = type(caught).__name__ if str(caught).count("\n") < 3 else f"a long {type(caught).__name__}"
        report.write_text(error)
        gc.collect()
        if again is not None:
            again()
        os._exit(0)
    gc.unfreeze()
    _, status = os.waitpid(process, 0)
    return report.read_text() if status == 0 else f"crash ({status})"


@pytest.fixture
def light(build):
    """A model without a transformer: a CPU, too, takes many cells at once."""
    return build(anchor="encoder", anchor_residual=False, n_layers=1)


# --- full disk --------------------------------------------------------------------------------------------------------
SMALL = {"dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 24}
EVERY_WRITER = {
    "write_cells, h5ad": lambda out, a, m, _: write_cells(a, out.with_suffix(".h5ad")),
    "write_cells, zarr": lambda out, a, m, _: write_cells(a, out.with_suffix(".zarr")),
    "embed_file, h5ad": lambda out, a, m, file: sd.tl.embed_file(file, out.with_suffix(".h5ad"), model=m),
    "embed_file, zarr": lambda out, a, m, file: sd.tl.embed_file(file, out.with_suffix(".zarr"), model=m),
    "pack_files": lambda out, a, m, file: pack_files([file], m.vocabulary, out),
    "save_model": lambda out, a, m, _: save_model(m, m.vocabulary, out),
    "Vocabulary.write": lambda out, a, m, _: m.vocabulary.write(out.with_suffix(".safetensors")),
    "put_whole": lambda out, a, m, _: put_whole(out, lambda file: np.savez(file, x=np.arange(9000))),
    "pl": lambda out, a, m, _: sd.pl.umap(a, "cell_type", basis="X_own", save=out.with_suffix(".png")),
    "pretrain": lambda out, a, m, file: pretrain(
        str(file), str(out), PretrainingConfig(steps=1, batch_size=8, context=40, precision="fp32"), model=SMALL,
        vocabulary=str(file.with_name("genes.safetensors")), min_genes=1, accelerator="cpu", progress=False,
        resume=(out / "last.ckpt").exists(),
    ),
}  # fmt: skip


@pytest.mark.fault("full disk in every writer")
@pytest.mark.parametrize(
    ("name", "n_bytes"),
    [*((name, 20_000 if name == "pretrain" else 500) for name in EVERY_WRITER), ("write_cells, h5ad", 5000)],
)
def test_a_disk_that_fills_up_in_the_middle(model, drawn, tmp_path, monkeypatch, name, n_bytes):
    """Another process fills the disk: the error names the path, no partial file remains, and the process continues."""
    file, out, report = tmp_path / "cells.h5ad", tmp_path / "results" / "result", tmp_path / "said"
    drawn.copy().write_h5ad(file)
    model.vocabulary.write(file.with_name("genes.safetensors"))
    out.parent.mkdir()
    monkeypatch.setattr("scdiva._files.refuse_full", lambda *_: None)
    monkeypatch.setattr("scdiva.data.output.refuse_full", lambda *_: None)

    def work():
        with pytest.raises(OSError, match=f"(?s)File too large.*{out}"):
            EVERY_WRITER[name](out, drawn.copy(), model, file)
        left = [path.name for path in out.parent.iterdir() if not path.name.endswith(".parts")]
        assert left in ([], ["result"])  # an empty folder of a corpus, one of a run
        raise InterruptedError

    def again():
        EVERY_WRITER[name](out, drawn.copy(), model, file)

    if "zarr" in name:  # its threads do not come into another process
        with room(n_bytes), pytest.raises(InterruptedError):
            work()
        again()
    else:
        assert without_room(work, n_bytes, report, again) == "InterruptedError"
    assert [path.stem for path in out.parent.iterdir()] == ["result"]
    if name == "write_cells, h5ad":
        assert (ad.read_h5ad(out.with_suffix(".h5ad")).X != drawn.X).nnz == 0


@pytest.mark.fault("disk full")
@pytest.mark.parametrize("form", ["h5ad", "zarr"])
def test_a_full_disk_is_seen_before_a_file_is_begun(model, drawn, tmp_path, monkeypatch, form):
    drawn.copy().write_h5ad(tmp_path / "cells.h5ad")
    out = tmp_path / f"out.{form}"
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 100}))
        with pytest.raises(OSError, match=r"No space left .* 0\.0 MiB and .* has 0\.0 MiB free\. Make room"):
            sd.tl.embed_file(tmp_path / "cells.h5ad", out, model=model)
        assert not out.exists()
    sd.tl.embed_file(tmp_path / "cells.h5ad", out, model=model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cells.h5ad", out.name]


# --- killed -----------------------------------------------------------------------------------------------------------
def killed_at(step, work):
    """Run a function in a child process that is killed at its n-th step of writing; return whether it was reached."""
    process = os.fork()
    if not process:
        left = [step]

        def counted(real):
            def call(*args, **kwargs):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        for name in ("write_bytes", "write_text", "rename", "replace"):
            setattr(Path, name, counted(getattr(Path, name)))
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(process, 0)
    return os.WIFSIGNALED(status)


def renamed_back(path):
    """Apply the remedy of the error message if the process was killed between two renames."""
    if not path.exists():
        with pytest.raises(FileNotFoundError, match=r"a save was cut off.*Rename it") as caught:
            load_model(path)
        Path(re.search(r"but '([^']+)'", str(caught.value)).group(1)).rename(path)


@pytest.mark.fault("SIGKILL in save")
@pytest.mark.parametrize("step", range(8))
def test_a_kill_in_a_save_leaves_the_old_model_or_the_new_one(model, tmp_path, step):
    path = save_model(model, model.vocabulary, tmp_path / "model", card="old\n")
    killed = killed_at(step, lambda: save_model(model, model.vocabulary, path, card="new\n", overwrite=True))
    assert killed == (step < 7)  # five files, and two renames
    renamed_back(path)
    assert load_model(path, device="cpu").config == model.config
    assert (path / "README.md").read_text() == ("old\n" if killed else "new\n")
    save_model(model, model.vocabulary, path, card="newer\n", overwrite=True)
    assert (path / "README.md").read_text() == "newer\n"


@pytest.mark.fault("two processes on one cache")
def test_two_processes_save_to_one_place(model, tmp_path):
    """Each process writes to a temporary folder; the result is the complete model of one of them."""
    path = save_model(model, model.vocabulary, tmp_path / "model", card="old\n")
    processes = []
    for card in ("one\n", "two\n"):
        process = os.fork()
        if not process:
            with contextlib.suppress(BaseException):
                save_model(model, model.vocabulary, path, card=card, overwrite=True)
            os._exit(0)
        processes.append(process)
    for process in processes:
        os.waitpid(process, 0)
    renamed_back(path)
    load_model(path, device="cpu")
    assert (path / "README.md").read_text() in ("one\n", "two\n")


# --- interrupted ------------------------------------------------------------------------------------------------------
@pytest.mark.fault("Ctrl-C in a notebook")
def test_an_interrupt_while_data_are_read(cells, enter, refused, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("scdiva._validate._Totals.add", interrupt)
        refused(enter, cells, KeyboardInterrupt)


RUNS = {
    "tl.embed": {},
    "tl.integrate": {},
    "tl.reconstruct": {},
    "tl.log_likelihood": {},
    "tl.grn": {"method": "attention"},
}


@pytest.mark.fault("Ctrl-C in a notebook")
@pytest.mark.parametrize("name", RUNS)
def test_an_interrupt_while_the_model_runs(cells, drawn, model, refused, monkeypatch, name):
    """Cells are as before and so is the model: it embeds as it did."""
    before, calls = sd.tl.embed(drawn, model, copy=True).obsm["X_scdiva"], []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return read_out(*args)

    read_out = inference.read_out
    with monkeypatch.context() as patch:
        patch.setattr(inference, "read_out", interrupted)
        refused(lambda a: CALLS[name](a, model, **RUNS[name]), cells, KeyboardInterrupt)
    assert not model.training
    assert np.array_equal(sd.tl.embed(drawn, model, copy=True).obsm["X_scdiva"], before)


# --- out of memory ----------------------------------------------------------------------------------------------------
ERRORS = {
    "torch": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    "Python": MemoryError(),
    "the CPU's allocator": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
}


def out_of_memory(monkeypatch, max_cells, error):
    """Raise an error for batches of more than `max_cells` cells."""
    read_out = inference.read_out

    def limited(network, batch, what):
        if len(batch[2]) - 1 > max_cells:
            raise error
        return read_out(network, batch, what)

    monkeypatch.setattr(inference, "read_out", limited)


@pytest.mark.fault("out of memory")
@pytest.mark.parametrize(("max_cells", "kind"), zip([40, 7, 1], ERRORS, strict=True))
def test_a_batch_too_large_is_run_in_parts_and_that_is_said(cells, drawn, light, monkeypatch, caplog, max_cells, kind):
    expected = sd.tl.embed(drawn, light, copy=True).obsm["X_scdiva"]
    with monkeypatch.context() as patch, caplog.at_level("WARNING", "scdiva"):
        out_of_memory(patch, max_cells, ERRORS[kind])
        sd.tl.embed(cells, light)
    np.testing.assert_allclose(cells.obsm["X_scdiva"], expected, rtol=1e-5, atol=1e-6)
    assert "cpu is out of memory with 80 cells at once: running them in 2 parts" in caplog.text


@pytest.mark.fault("out of memory")
@pytest.mark.parametrize("name", RUNS)
def test_memory_that_does_not_hold_one_cell(cells, model, refused, monkeypatch, name):
    out_of_memory(monkeypatch, 0, ERRORS["torch"])
    patterns = "one cell alone does not fit into the memory of 'cpu'", "another device"
    refused(lambda a: CALLS[name](a, model, **RUNS[name]), cells, MemoryError, *patterns)
