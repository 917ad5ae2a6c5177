"""Published data sets: a folder, a mirror that is a real server, and what is no published file."""

from __future__ import annotations

import functools
import hashlib
import http.server
import re
import threading
from importlib import resources

import numpy as np
import pytest

import scdiva as sd
from scdiva import datasets

pytest.importorskip("pooch", reason="needs pooch, which a full install brings")

NAMES = ("pbmc3k", "kang", "pancreas", "norman", "mouse_brain", "mouse_pancreas")
TABLE = [line.split("\t") for line in resources.files(datasets).joinpath("published.tsv").read_text().splitlines()]


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A mirror that is served over HTTP, an empty folder, and a table of the one file that it holds."""
    mirror, folder = tmp_path / "mirror", tmp_path / "cache"
    mirror.mkdir()
    cells = datasets.toy(20, 40)
    cells.write_h5ad(mirror / "cells.h5ad")
    sha256 = hashlib.sha256((mirror / "cells.h5ad").read_bytes()).hexdigest()
    (tmp_path / "published.tsv").write_text(f"name\tfile\tsha256\tsource\npbmc3k\tcells.h5ad\t{sha256}\thttps://x\n")
    monkeypatch.setattr(datasets._published.resources, "files", lambda _: tmp_path)
    monkeypatch.setattr(sd.settings, "data_dir", folder)
    monkeypatch.setattr(sd.settings, "progress", False)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=mirror)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield cells, mirror / "cells.h5ad", folder / "cells.h5ad", f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_the_table_names_every_set_and_no_other():
    assert TABLE[0] == ["name", "file", "sha256", "source", "git_blob"]
    assert tuple(row[0] for row in TABLE[1:]) == NAMES
    assert all(re.fullmatch("[0-9a-f]{64}", row[2]) and re.fullmatch("([0-9a-f]{40})?", row[4]) for row in TABLE[1:])
    assert all(re.match(r"https://raw\.githubusercontent\.com/[\w-]+/[\w-]+/[0-9a-f]{10,40}/", r[3]) for r in TABLE[1:])


def test_downloaded_once_then_read_without_a_mirror(published):
    cells, there, here, address = published
    with pytest.raises(FileNotFoundError, match=r"cells\.h5ad is not there.*settings\.data_url.*path=.*https://x"):
        datasets.pbmc3k()
    sd.settings.data_url = f"{address}/"
    assert (datasets.pbmc3k().X != cells.X).nnz == 0
    assert here.read_bytes() == there.read_bytes()
    there.unlink()
    sd.settings.data_url = None
    assert (datasets.pbmc3k().X != cells.X).nnz == 0


def test_another_file_is_neither_read_nor_written_over(published):
    cells, there, here, sd.settings.data_url = published
    there.write_bytes(there.read_bytes()[:-1])
    with pytest.raises(ValueError, match="hash"):  # pooch's, of a mirror that holds something else
        datasets.pbmc3k()
    assert not list(here.parent.glob("*.h5ad"))
    cells.write_h5ad(here, compression="gzip")
    before = here.read_bytes()
    with pytest.raises(ValueError, match=r"is not the published file.*path="):
        datasets.pbmc3k()
    assert here.read_bytes() == before
    assert (datasets.pbmc3k(here).X != cells.X).nnz == 0  # the user's own says so


def test_the_environment_names_folder_and_mirror(published, monkeypatch, tmp_path):
    cells, _, _, address = published
    sd.settings.data_dir = None
    monkeypatch.setenv("SCDIVA_DATA_DIR", str(tmp_path / "other"))
    monkeypatch.setenv("SCDIVA_DATA_URL", address)
    np.testing.assert_array_equal(datasets.pbmc3k().obs_names, cells.obs_names)
    assert (tmp_path / "other" / "cells.h5ad").is_file()
