"""A file embedded by the workers of a dask cluster, one of which is lost, is the file that one call makes."""

from __future__ import annotations

import collections
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import anndata as ad
import pytest
import scipy.sparse as sp

import scdiva as sd
from scdiva import cli
from scdiva.embedding import embed_file as _embed_file
from scdiva.embedding import embed_file as _shards

distributed = pytest.importorskip("distributed")

N = 4096 * 5 + 100
"""Six windows."""
WATCHED = """
import os, time
from pathlib import Path

def dask_setup(worker):
    from scdiva.embedding.embed_file import Parts
    save, folder = Parts.save, Path({folder!r})
    def watched(self, first, *given):
        save(self, first, *given)
        (folder / f"{{first}} {{os.getpid()}} {{time.monotonic_ns()}}").touch()
        try:  # whoever has made the first part of all goes no further
            (folder / "stuck").open("x").write(str(os.getpid()))
        except FileExistsError:
            return
        time.sleep(600)
    Parts.save = watched
"""
"""What each worker begins with: it notes the parts that it has made."""


@pytest.fixture(scope="module")
def file(write_many):
    return write_many(N)


@pytest.fixture(scope="module")
def model(plain, tmp_path_factory):
    return sd.models.save_model(plain, plain.vocabulary, tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def expected_digest(file, model, tmp_path_factory):
    with sd.settings.override(progress=False, device="cpu"):
        return digest(sd.tl.embed_file(file, tmp_path_factory.mktemp("whole") / "z.h5ad", model=model))


@pytest.fixture
def cluster(tmp_path):
    """A scheduler, its two workers, processes of their own, and the folder in which they note parts."""
    folder = tmp_path / "parts"
    folder.mkdir()
    command = [sys.executable, "-m", "distributed.cli.dask_worker", "--no-nanny", "--nthreads", "1", "--no-dashboard"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command += ["--local-directory", str(tmp_path / "dask"), "--preload", WATCHED.format(folder=str(folder))]
    with distributed.LocalCluster(n_workers=0, dashboard_address=None, silence_logs=50) as scheduler:
        command.append(scheduler.scheduler_address)
        workers = [subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) for _ in "ab"]
        try:
            yield scheduler, workers, folder
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_worker_is_killed_and_nothing_is_lost_or_made_twice(
    cluster, file, model, expected_digest, tmp_path, monkeypatch
):
    scheduler, workers, folder = cluster
    address = scheduler.scheduler_address
    monkeypatch.setattr(_shards, "SHARDS_PER_THREAD", 1)
    monkeypatch.setattr(_shards, "LEAST_SHARDS", 2)  # three windows each, of which one is made when a worker is killed
    monkeypatch.chdir(tmp_path)  # where no worker runs
    killed = threading.Thread(target=kill_the_one_that_is_stuck, args=[folder])
    killed.start()
    words = ["--model", os.path.relpath(model), "--device", "cpu", "--client", address, "--progress", "false"]
    assert cli.main(["embed", os.path.relpath(file), "-o", "z.h5ad", *words]) == 0
    killed.join()
    assert sorted(worker.poll() is None for worker in workers) == [False, True]
    assert -signal.SIGKILL in [worker.poll() for worker in workers]
    counts = collections.Counter(int(path.name.split()[0]) for path in folder.glob("* * *"))
    assert counts == dict.fromkeys(range(0, N, 4096), 1)
    result = ad.read_h5ad("z.h5ad")
    assert result.uns["scdiva"]["X_scdiva"].pop("model") == os.path.relpath(model)
    assert [path.name for path in tmp_path.glob(".z*")] == []
    with distributed.Client(address) as client, sd.settings.override(progress=False, device="cpu"):
        assert digest(sd.tl.embed_file(file, "again.h5ad", model=model, client=client)) == expected_digest
        with pytest.raises(FileExistsError, match="overwrite=True"):
            sd.tl.embed_file(file, "again.h5ad", model=model, client=client)
        scheduler.scheduler.allowed_failures = 0
        (folder / "stuck").unlink()
        threading.Thread(target=kill_the_one_that_is_stuck, args=[folder]).start()
        with pytest.raises(RuntimeError, match=r"workers died.*finished is kept"):
            sd.tl.embed_file(file, "never.h5ad", model=model, client=client)
        assert len(list(tmp_path.glob(".never.h5ad.parts/*/*.npz"))) == 1


def kill_the_one_that_is_stuck(folder: Path) -> None:
    for _ in range(600):
        if (folder / "stuck").is_file() and (pid := (folder / "stuck").read_text()):
            os.kill(int(pid), signal.SIGKILL)
            return
        time.sleep(0.1)


@pytest.fixture(scope="module")
def client():
    """A worker in a thread of this process."""
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    with distributed.LocalCluster(**options, silence_logs=50) as cluster, distributed.Client(cluster) as client:
        yield client


def test_what_a_worker_warns_of_or_raises_reaches_the_caller(client, model, adata, tmp_path):
    panel = ad.AnnData(adata.X[:, :20].copy(), var=adata.var[[]].iloc[:20])
    panel.write_h5ad(tmp_path / "few.h5ad")
    with pytest.warns(UserWarning, match="data have .* model knows"):
        out = sd.tl.embed_file(tmp_path / "few.h5ad", tmp_path / "out.h5ad", model=model, client=client, empty="nan")
    assert ad.read_h5ad(out).n_obs == adata.n_obs
    panel.X = sp.csr_matrix(-panel.X.toarray())
    panel.write_h5ad(tmp_path / "negative.h5ad")
    with pytest.raises(ValueError, match=r"negative.h5ad.* negative values"):
        sd.tl.embed_file(tmp_path / "negative.h5ad", tmp_path / "no.h5ad", model=model, client=client)
    assert not (tmp_path / "no.h5ad").exists()


def test_parts_that_differ_are_not_joined(client, file, model, tmp_path, monkeypatch):
    digests = iter("abcdefghijklmnop")
    monkeypatch.setattr(_embed_file, "digest", lambda value: next(digests))
    with pytest.raises(RuntimeError, match=r"no whole result .*versions"):
        sd.tl.embed_file(file, tmp_path / "z.h5ad", model=model, client=client)
    assert not (tmp_path / "z.h5ad").exists()


def test_what_a_cluster_does_not_take_is_refused_before_it_is_asked(plain, file, model, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="pass one of the two"):
        sd.tl.embed_file(file, tmp_path / "z.h5ad", model=model, shard=(0, 2), client="tcp://nowhere:1")
    with pytest.raises(TypeError, match=r"got a loaded model. Save it"):
        sd.tl.embed_file(file, tmp_path / "z.h5ad", model=plain, client="tcp://nowhere:1")
    with pytest.raises(FileNotFoundError, match="no model"):
        sd.tl.embed_file(file, tmp_path / "z.h5ad", model="nowhere", client="tcp://nowhere:1")
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ImportError, match=r"pip install 'scdiva\[dist\]'"):
        sd.tl.embed_file(file, tmp_path / "z.h5ad", model=model, client="tcp://nowhere:1")
    assert not list(tmp_path.iterdir())
