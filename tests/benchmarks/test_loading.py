"""Every arm gives the cells it is timed for, and ours gives the rows of the file."""

from __future__ import annotations

import json

import anndata as ad
import numpy as np
import pytest


@pytest.fixture
def loading(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script("_record"), "RESULTS", tmp_path)
    return script("loading")


def test_made_up_cells_are_canonical_and_of_typical_length(loading):
    matrix = loading.synthetic(500, 4000)
    assert matrix.shape == (500, 4000)
    assert matrix.has_canonical_format
    assert (matrix.data >= 1).all()
    lengths = np.diff(matrix.indptr)
    assert 850 < np.median(lengths) < 950
    assert lengths.std() > 200
    detected = np.bincount(matrix.indices, minlength=4000)
    assert detected[:100].mean() > 3 * detected[-1000:].mean()


def test_ours_gives_each_row_of_the_file_once(loading, tmp_path):
    matrix = loading.synthetic(300, 150)
    matrix.data[:] = np.arange(1, matrix.nnz + 1)  # every value tells where it stood
    ad.AnnData(matrix).write_h5ad(tmp_path / "cells.h5ad")
    source = loading.RawRows(tmp_path / "cells.h5ad")
    indptr, indices, data = source.read_ranges([(200, 300), (0, 50)])
    source.close()
    for got, rows in ((indices, matrix.indices), (data, matrix.data)):
        start, end = matrix.indptr[200], matrix.indptr[50]
        np.testing.assert_array_equal(got, np.concatenate([rows[start:], rows[:end]]))
    np.testing.assert_array_equal(np.diff(indptr), np.roll(np.diff(matrix.indptr), -200)[:150])


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_the_script_on_few_cells(loading, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    missed = loading.main(["--cells", "300", "--genes", "150", "--read", "256", "--repeats", "1"])
    result = json.loads((tmp_path / "loading.json").read_text())
    assert result["rows"][-1]["left_out"].startswith("scDataset is not installed: pip install")
    assert (result["cells"], result["read"]) == (300, 256)
    goals = [row for row in result["rows"] if "met" in row]
    assert [row["what"] for row in goals] == ["CPU time per cell, backed / ours"]
    assert missed == sum(row["met"] is False for row in goals)
    arms = {row["what"] for row in result["rows"] if "cpu_microseconds_per_cell" in row}
    assert arms == {"ours", "ours, thread", "ours, gzip", "backed", "AnnLoader"}
    assert "backed / ours" in capsys.readouterr().out


def test_the_goal_is_against_the_faster_way_of_the_rival(loading):
    cpu = {
        "ours": 2.0,
        "ours, thread": 2.5,
        "ours, gzip": 9.0,
        "backed": 30.0,
        "scDataset": 5.0,
        "scDataset, matrix": 3.0,
    }
    rounds = {name: [spent, spent + 0.1, spent + 0.2] for name, spent in cpu.items()}
    rows = loading.rows_of(rounds, {name: [2 * spent] for name, spent in cpu.items()})
    goals = {row["what"]: (row["value"], row["met"]) for row in rows if "met" in row}
    assert goals == {
        "CPU time per cell, backed / ours": (15.0, True),
        "CPU time per cell, scDataset, matrix / ours": (1.5, False),
    }
    assert next(row["value"] for row in rows if "gzip" in row["what"]) == 4.5
    with_thread = [row["value"] for row in rows if row["what"].endswith("with the thread")]
    assert with_thread == [12.0, 1.2]


def test_scdataset_gives_the_cells_asked_for(loading, tmp_path):
    pytest.importorskip("scdataset")
    ad.AnnData(loading.synthetic(300, 150)).write_h5ad(tmp_path / "cells.h5ad")
    assert loading.sc_dataset(tmp_path / "cells.h5ad", 256) == 256
    assert loading.sc_dataset(tmp_path / "cells.h5ad", 256, whole=False) == 256
