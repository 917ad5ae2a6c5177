"""Parts of a study: every cell is in one, and none is small."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((40, 50), [40, 50]), ((40, 10), [50]), ((40, 20, 15), [40, 35]), ((10, 12), [22]), ((31,), [31])],
)
def test_parts_have_all_cells_and_small_ones_are_joined(script, sizes, expected):
    donor = np.repeat([f"d{number}" for number in range(len(sizes))], sizes)
    obs = pd.DataFrame({"donor": donor, "assay": "10x"}).sample(frac=1, random_state=0)
    parts = script("split_studies").parts_of(obs)
    assert [len(part) for part in parts] == expected or sorted(map(len, parts)) == sorted(expected)
    assert sorted(np.concatenate(parts)) == list(range(len(obs)))
    assert len(script("split_studies").parts_of(obs[[]])) == 1
