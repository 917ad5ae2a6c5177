"""The study writes what it says, calls what a user calls, and judges by the slope."""

from __future__ import annotations

import json
import sys

import anndata as ad
import numpy as np
import pytest

import scdiva as sd


@pytest.fixture
def scaling(script, monkeypatch):
    module = script("scaling")
    monkeypatch.setattr(module, "N_BLOCKS", 2)
    return module


def test_the_file_is_one_of_anndata_with_the_lengths_of_real_cells(scaling, tmp_path):
    path = tmp_path / "cells.h5ad"
    n_stored = scaling.write_counts(path, 700, 4000)  # the third block is the first again, and cut
    cells = ad.read_h5ad(path)
    lengths = np.diff(cells.X.indptr)
    assert cells.shape == (700, 4000)
    assert cells.X.nnz == n_stored
    assert cells.X.has_canonical_format
    assert cells.obs_names.is_unique
    assert 770 < np.median(lengths[:512]) < 870
    assert (cells.X[:188] != cells.X[512:]).nnz == 0
    assert 0.5 < (cells.X.data == 1).mean() < 0.7
    assert (cells.X.data == np.round(cells.X.data)).all()
    scaling.write_counts(path, 300, 1000, 50)
    assert set(np.diff(ad.read_h5ad(path).X.indptr)) == {50}


def test_each_call_does_its_work(scaling, tmp_path):
    path, out = tmp_path / "cells.h5ad", tmp_path / "out.h5ad"
    scaling.write_counts(path, 30, 4000)
    with sd.settings.override(progress=False, device="cpu"):
        scaling.call("entropy", path, out)
        assert not out.exists()
        scaling.call("ranks", path, out)
        ranks = ad.read_h5ad(out).layers["scdiva_rank"]
        assert np.diff(ranks.indptr).min() > 200
        scaling.call("embedding", path, out)
    assert np.isfinite(ad.read_h5ad(out).obsm["X_scdiva"]).all()


def test_a_power_law_gives_its_exponent(scaling):
    sizes = [10, 100, 1000]
    found = scaling.slope(sizes, [3 * size**1.3 for size in sizes])
    assert (found.value, found.error) == (pytest.approx(1.3), pytest.approx(0, abs=1e-6))
    assert scaling.slope(sizes, [10, 300, 900]).error > 0.1


def test_goals_leave_small_sizes_out(scaling):
    def row(part, size, seconds, call="entropy"):
        n_cells, n_genes = (size, 5) if part != "genes" else (5, size)
        measured = {"cpu_seconds": seconds, "peak_mib": 500.0 + size / 1000}
        return {"part": part, "call": call, "n_cells": n_cells, "n_genes": n_genes, **measured}

    rows = [
        *(row("cells", size, size**1.2) for size in (10_000, 100_000)), row("cells", 10, 1e9),
        *(row("genes", size, seconds) for size, seconds in ((1_000, 2.0), (9_000, 2.1), (40_000, 2.0))),
        row("memory", 10_000, 1.0, "embedding"), row("memory", 100_000, 1.0, "embedding"),
    ]  # fmt: skip
    cells, genes, memory = scaling.goals(rows)
    assert (cells["value"], cells["met"]) == (pytest.approx(1.2), False)
    assert "10,000 to 100,000 cells" in cells["what"]
    assert (genes["value"], genes["met"]) == (pytest.approx(0, abs=0.02), True)
    assert (memory["value"], memory["met"]) == (pytest.approx(600 / 510), False)


def test_the_script_runs_on_small_sizes(scaling, tmp_path, monkeypatch, capsys):
    def beside(name, path, small, repeats):
        """In this process: one that loads torch for each point is for the benchmark."""
        assert path.exists()
        n_cells = ad.read_h5ad(path, backed="r").n_obs
        assert ad.read_h5ad(small, backed="r").n_obs == 200
        return {"cpu_seconds": n_cells / 1000, "peak_mib": 500.0, "peak_mib_of_200_cells": 400.0}

    monkeypatch.setattr(sys.modules["_record"], "RESULTS", tmp_path / "results")
    monkeypatch.setattr(scaling, "apart", beside)
    monkeypatch.setattr(scaling, "N_CELLS", 300)
    monkeypatch.chdir(tmp_path)
    arguments = ["--cells", "300", "400", "--genes", "600", "1000", "--memory", "300", "500"]
    monkeypatch.setattr("sys.argv", ["benchmarks/scaling.py", *arguments])
    assert scaling.main(arguments) == 0
    rows = json.loads((tmp_path / "results" / "scaling.json").read_text())["rows"]
    assert len([row for row in rows if "part" in row]) == 2 + 2 * 3 + 2 * 3
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
    assert "peak memory" in capsys.readouterr().out
