"""The learning curve's fit is the line that it says, and its training is of the cells it was given."""

from __future__ import annotations

import numpy as np
import pytest

import scdiva as sd
from scdiva.data.packing import pack_files


def test_a_line_in_the_logarithm_is_found_and_extrapolated(script):
    numbers = [100, 1000, 10000] * 2
    line = script("learning_curve").extrapolated(numbers, [0.5 + 0.1 * np.log10(n) for n in numbers])
    found = line["per_tenfold"], line["per_tenfold_se"], line["at_ten_times"]
    assert found == pytest.approx((0.1, 0, 1), abs=1e-6)


def test_cells_of_mice_join_the_corpus_by_their_orthologs(script, tmp_path):
    curve, vocabulary = script("learning_curve"), sd.models.load_model().vocabulary
    human, mouse = sd.datasets.toy(60, 300), sd.datasets.toy(50, 300)
    mouse.var_names = [name.capitalize() for name in mouse.var_names]
    for name, cells in (("human", human), ("mouse", mouse)):
        cells.write_h5ad(tmp_path / f"{name}.h5ad")
    pack_files([tmp_path / "human.h5ad"], vocabulary, tmp_path / "train.h5", max_length=512).close()
    corpus = curve.load_cells(tmp_path / "train.h5", vocabulary)
    curve.MIN_GENES = 1
    with pytest.warns(UserWarning, match="ouse"):
        more = curve.packed_alike(tmp_path / "train.h5", [tmp_path / "mouse.h5ad"], vocabulary)
    both = curve.joined(corpus, more)
    assert both.study_names == ["human", "mouse"]
    assert np.bincount(both.study).tolist() == [60, 50]
    for start, of in ((0, corpus), (60, more)):
        for one, other in zip(both.read(start, start + of.n_obs), of.read(0, of.n_obs), strict=True):
            np.testing.assert_array_equal(one, other)
