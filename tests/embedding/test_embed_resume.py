"""A run that is cut off is taken up again, gives the same to the bit, and never shows half a result."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import anndata as ad
import numpy as np
import pytest

import scdiva as sd
from scdiva._files import open_alone
from scdiva.embedding import embed_file as _embed_file
from scdiva.embedding.embed_file import Parts

N = 4096 * 3 + 100
"""Four windows."""


@pytest.fixture(scope="module")
def file(write_many):
    """Cells of four windows; the last ones of the first window and the last of all have no genes."""
    return write_many(N, [*range(4000, 4096), *range(N - 3, N)])


@pytest.fixture(scope="module")
def whole(plain, file, tmp_path_factory):
    """The file that a run gives which nothing disturbs."""
    with sd.settings.override(progress=False, device="cpu"):
        return sd.tl.embed_file(file, tmp_path_factory.mktemp("whole") / "z.h5ad", model=plain, empty="nan")


@pytest.fixture
def starts(monkeypatch):
    """Rows from which cells were embedded, call by call."""
    seen, embed_cells = [], _embed_file.embed_cells

    def watched(*args, start=0, **options):
        seen.append(start)
        return embed_cells(*args, start=start, **options)

    monkeypatch.setattr(_embed_file, "embed_cells", watched)
    return seen


@contextlib.contextmanager
def cut_off(parts, error=KeyboardInterrupt):
    """Let a run end after some parts."""
    save = Parts.save

    def failing(self, first, *given):
        if first >= parts * 4096:
            raise error
        save(self, first, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parts, "save", failing)
        yield


def same(one: Path, other: Path) -> bool:
    a, b = (ad.read_h5ad(path) for path in (one, other))
    assert a.obs.equals(b.obs)
    return a.obsm["X_scdiva"].tobytes() == b.obsm["X_scdiva"].tobytes()


@pytest.mark.fault("SIGKILL in embed_file")
def test_a_killed_run_goes_on_and_gives_the_same_bits(plain, file, whole, tmp_path, starts, monkeypatch, killed, kill):
    model, out = str(sd.models.save_model(plain, plain.vocabulary, tmp_path / "model")), tmp_path / "z.h5ad"
    save = Parts.save

    def killed_in_it(self, first, *given):
        if first == 8192:  # while the part is written, before it has a name
            monkeypatch.setattr("os.fsync", kill)
        save(self, first, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Parts, "save", killed_in_it)
        killed(lambda: sd.tl.embed_file(file, out, model=model, empty="nan"))
    starts.clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".z.h5ad.parts", "model"]
    sd.tl.embed_file(file, out, model=model, empty="nan")
    assert starts == [8192]
    assert same(out, whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "z.h5ad"]
    assert np.flatnonzero(np.isnan(ad.read_h5ad(out).obsm["X_scdiva"][:, 0])).tolist() == [
        *range(4000, 4096), *range(N - 3, N),
    ]  # fmt: skip


def test_a_result_that_stands_is_replaced_only_by_a_whole_one(plain, file, whole, tmp_path, monkeypatch):
    out = tmp_path / "z.h5ad"
    out.write_bytes(whole.read_bytes())
    with cut_off(2), pytest.raises(KeyboardInterrupt):
        sd.tl.embed_file(file, out, model=plain, empty="nan", batch_size=100, overwrite=True)
    assert same(out, whole)

    def failing(*args):
        raise OSError("no space left")

    monkeypatch.setattr(_embed_file, "new_rows", failing)
    with pytest.raises(OSError, match="no space"):
        sd.tl.embed_file(file, out, model=plain, empty="nan", overwrite=True)
    assert same(out, whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".z.h5ad.parts", "z.h5ad"]


def other_model(plain, file):
    import copy

    import torch

    model = copy.deepcopy(plain)
    with torch.no_grad():
        next(iter(model.parameters())).view(-1)[0] += 1e-3
    return {"model": model}


def other_entropies(plain, file):
    import copy

    model = copy.copy(plain)
    model.vocabulary = plain.vocabulary.with_entropy(plain.vocabulary.entropy[3:] + np.float32(0.25))
    return {"model": model}


def other_time(plain, file):
    os.utime(file, ns=(1, 1))
    return {}


OTHER = {
    "a weight": other_model,
    "entropies": other_entropies,
    "the file": other_time,
    "batch_size": lambda plain, file: {"batch_size": 100},
    "an argument": lambda plain, file: {"duplicates": "error"},
}


@pytest.mark.parametrize("what", OTHER)
def test_another_run_starts_anew_and_says_so(plain, file, tmp_path, starts, caplog, what):
    copied, out = tmp_path / "cells.h5ad", tmp_path / "z.h5ad"
    copied.write_bytes(file.read_bytes())
    with cut_off(1), pytest.raises(KeyboardInterrupt):
        sd.tl.embed_file(copied, out, model=plain, empty="nan")
    changed = {"model": plain, "empty": "nan", **OTHER[what](plain, copied)}
    info = sd.settings.override(verbosity="info"), caplog.at_level(logging.INFO, "scdiva")
    with info[0], info[1], cut_off(0), pytest.raises(KeyboardInterrupt):
        sd.tl.embed_file(copied, out, **changed)
    assert starts == [0, 0]
    assert "of another run: starting anew" in caplog.text


def test_a_file_that_changes_meanwhile_is_an_error(plain, file, tmp_path, monkeypatch):
    copied, embed_cells = tmp_path / "cells.h5ad", _embed_file.embed_cells
    copied.write_bytes(file.read_bytes())

    def touched(*args, **kwargs):
        yield from embed_cells(*args, **kwargs)
        os.utime(copied, ns=(1, 1))

    monkeypatch.setattr(_embed_file, "embed_cells", touched)
    with pytest.raises(ValueError, match=r"cells\.h5ad' was changed"):
        sd.tl.embed_file(copied, tmp_path / "z.h5ad", model=plain, empty="nan")
    assert [path.name for path in tmp_path.iterdir()] == ["cells.h5ad"]


@pytest.mark.fault("two processes on one cache")
def test_two_at_once_do_not_mix(plain, file, whole, tmp_path, monkeypatch):
    """The second is refused while the first runs, and the first gives what it gives alone."""
    out, save, refused = tmp_path / "z.h5ad", Parts.save, []

    def beside(self, *given):
        if not refused:
            with pytest.raises(RuntimeError, match="another call is writing"):
                sd.tl.embed_file(file, out, model=plain, empty="nan", overwrite=True)
            refused.append(True)
        save(self, *given)

    monkeypatch.setattr(Parts, "save", beside)
    sd.tl.embed_file(file, out, model=plain, empty="nan")
    assert refused
    assert same(out, whole)


def test_a_lock_on_a_deleted_file_is_no_lock(tmp_path, monkeypatch):
    """Its owner finishes, and deletes it, between our opening and our lock."""
    import fcntl

    path, flock, gone = tmp_path / "parts", fcntl.flock, []

    def late(file, how):
        if not gone:
            path.unlink()
            gone.append(True)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with open_alone(path):
        assert path.exists()
