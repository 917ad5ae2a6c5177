"""Each arm is trained on a model and cells of its form, and says how fast."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

import scdiva as sd
from scdiva.data.batch import from_ragged
from scdiva.data.packing import pack_files
from scdiva.models.hub import find_model


def test_padding_is_what_the_longest_cell_makes_of_the_others(script):
    bounds = np.array([0, 2, 12, 15])
    batch = from_ragged(bounds, np.arange(15) + 3, np.ones(15, dtype=np.float32), np.zeros(3, dtype=np.int64))
    assert script("denoiser_speed").padding(batch) == pytest.approx(30 / 15)


@pytest.mark.filterwarnings("ignore:the data have")
def test_every_arm_has_its_figures(script, tmp_path, monkeypatch):
    speed, recorded = script("denoiser_speed"), []
    monkeypatch.setattr(speed, "record", lambda name, rows, **more: recorded.extend(rows))
    monkeypatch.setattr(speed, "fast_here", list)
    shutil.copytree(find_model("scdiva-mini"), tmp_path / "model")
    files = [tmp_path / "one.h5ad", tmp_path / "two.h5ad"]
    for number, file in enumerate(files):
        sd.datasets.toy(60, 120, rng=number).write_h5ad(file)
    (tmp_path / "prepared").mkdir()
    vocabulary = sd.models.load_model().vocabulary
    pack_files(files, vocabulary, tmp_path / "prepared" / "train.h5", max_length=512, min_genes=5).close()
    threads = torch.get_num_threads()
    try:
        speed.main(["--base", str(tmp_path), "--steps", "1"])
    finally:
        torch.set_num_threads(threads)
    assert len(recorded) == 5
    assert all(row["value"] > 0 and row["tokens_if_padded"] >= 1 for row in recorded)
