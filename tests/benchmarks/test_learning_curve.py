"""The learning curve holds out what it says, draws equal tissues, and its line is that of least squares."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.sparse as sp

import scdiva as sd
from scdiva.train import LinearMap


@pytest.fixture
def curve(script, monkeypatch):
    return script("learning_curve")


def test_studies_are_held_out_with_publication_and_tissue(curve):
    brain = curve.held_out("pollen2014_c1_299")
    assert {"pollen2015_fetal_cortex_367", "darmanis_brain_sc2p_100", "trem2_ko_microglia_GSE130626"} <= brain
    assert curve.held_out("pollen2014_c1_299", with_tissue=False) == {
        "pollen2014_c1_299",
        "pollen2015_fetal_cortex_367",
    }
    blood = curve.held_out("garnett_zheng_pbmc_800")
    assert "zheng_aml027_pre_bmmc" in blood
    assert "speck_pbmc_1000" not in blood
    assert "accordion_bone_marrow_1482" in curve.held_out("weinreb2020_lsk_culture_450")


def test_tissues_have_equal_shares_and_blood_comes_first(curve):
    assert curve.shares(np.array([500, 20, 90]), 300).tolist() == [190, 20, 90]
    assert curve.shares(np.array([500, 20, 90]), 60).tolist() == [20, 20, 20]
    tissue = np.repeat(["blood", "bone marrow", "gut", "skin"], [500, 300, 20, 90])
    rows = [curve.of_tissues(tissue, n, 300, np.random.default_rng(0)) for n in (1, 2, 4)]
    counts = [dict(zip(*np.unique(tissue[some], return_counts=True), strict=True)) for some in rows]
    assert counts == [
        {"blood": 300}, {"blood": 150, "bone marrow": 150}, {"blood": 95, "bone marrow": 95, "gut": 20, "skin": 90}
    ]  # fmt: skip
    assert all(len(np.unique(some)) == 300 for some in rows)
    few = curve.draws(tissue, "cells", 50, 1)
    assert len(np.unique(few)) == 50
    assert not np.array_equal(few, curve.draws(tissue, "cells", 50, 2))


def test_the_state_is_that_of_the_set_encoder(curve):
    rng = np.random.default_rng(0)
    matrix = sp.random_array((9, 6), density=0.6, rng=rng, format="csr", dtype=np.float32)
    linear = LinearMap(rng.normal(size=(6, 3)), rng.normal(size=3), np.ones(3), np.ones(6), 2.0)
    for row, state in zip(matrix.toarray(), curve.embedded(linear, sp.csr_matrix(matrix)), strict=True):
        expected = row @ linear.weight + min(1, row.sum() / 2) * linear.bias
        assert state == pytest.approx(expected / np.linalg.norm(expected))


def test_a_line_has_its_zero_and_none_if_it_does_not_rise(curve):
    rows = [{"curve": "pca20", "group": "other", "set": name, "at": 0, "accuracy": 0.9} for name in "abcd"]
    for number, name in enumerate("abcd"):
        for at in (1000, 10_000, 100_000):
            value = 0.5 + 0.1 * np.log10(at / 1000) + 0.01 * number * np.log10(at)
            rows.append({"curve": "cells", "group": "other", "set": name, "at": at, "accuracy": value})
            rows.append({"curve": "tissues", "group": "other", "set": name, "at": at / 1000, "accuracy": 0.7})
    line = curve.trend(rows, "cells", "other", "accuracy")
    slope = 0.1 + 0.01 * 1.5
    assert line["slope"] == pytest.approx(slope)
    assert line["at_zero"] == pytest.approx(3 + (0.9 - 0.5 - 0.01 * 1.5 * 3) / slope)
    assert line["slope_interval"][0] < slope < line["slope_interval"][1]
    assert line["at_zero_interval"][0] < line["at_zero"] < line["at_zero_interval"][1]
    flat = curve.trend(rows, "tissues", "other", "accuracy")
    assert flat["slope"] == pytest.approx(0, abs=1e-9)
    assert flat["at_zero"] is None


def test_equality_is_a_number_only_with_an_upper_limit(script):
    row = {"curve": "cells", "at_zero": 5.69, "at_zero_interval": [5.1, 6.6], "last_at": 4.6}
    zero_of = script("tables").zero_of
    assert zero_of(row) == "490,000 (130,000 to 4,000,000)"
    assert zero_of({**row, "at_zero_interval": [5.1, 12.0]}) == "not known, at least 130,000"
    assert zero_of({**row, "at_zero_interval": [4.1, 12.0]}) == "not known"
    assert zero_of({**row, "at_zero": None}) == "not known"


def test_a_curve_is_recorded(script, curve, tmp_path, monkeypatch):
    """On toys with the names of studies of the table."""
    monkeypatch.setattr(script("_record"), "RESULTS", tmp_path / "results")
    monkeypatch.setattr(curve, "clean", lambda corpus, folder: sorted(corpus.glob("*.h5ad")))
    monkeypatch.setattr(curve, "MIN_GENES_PER_CELL", 1)
    monkeypatch.setattr(curve, "CELLS", (100,))
    monkeypatch.setattr(curve, "CELLS_OF_TISSUES", 90)
    monkeypatch.setattr(curve, "TISSUES", (1,))
    names = ("pollen2014_c1_299", "speck_pbmc_1000", "celltypist_sample", "scillus_GSE128531_skin")
    for number, name in enumerate(names):
        adata = sd.datasets.toy(120, 150, n_types=2, rng=number)
        if number:
            del adata.obs["cell_type"]
        (tmp_path / "corpus").mkdir(exist_ok=True)
        adata.write_h5ad(tmp_path / "corpus" / f"{name}.h5ad")
    call = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--sets", names[0], "--seeds", "0", "1"]
    assert curve.main(call) == 0
    rows = json.loads((tmp_path / "results" / "learning_curve.json").read_text())["rows"]
    points = {(row["curve"], row["at"]): row["n_draws"] for row in rows if "curve" in row and "part" not in row}
    assert points == {
        ("pca20", 0): 1, ("cells", 100): 2, ("cells", 360): 1, ("tissues", 1): 2, ("tissues", 2): 2,
        ("same_tissue", 360): 1,
    }  # fmt: skip
    assert sum(row.get("part") == "trend" for row in rows) == 4
    assert all(row["n_cells"] == 120 for row in rows if "part" not in row)
