"""rejection.py: shares are those of the cells that they are said to be of."""

from __future__ import annotations

import numpy as np
import pytest

import scdiva as sd


def test_shares_of_known_and_removed_types(script, monkeypatch):
    rejection = script("rejection")
    cells = sd.datasets.toy(120, 60, n_batches=2, rng=1)
    cells.obs["type"] = cells.obs["cell_type"].astype(str)
    query, reference = cells[:40].copy(), cells[40:].copy()
    reference = reference[reference.obs["type"] != "type D"].copy()
    best = query.obs["type"].replace("type D", "type A").to_numpy()
    calls = []

    def annotated(query, reference, batch_key):
        """Cells of types that the reference lacks and the first five are unknown at 0.05, nothing at 0.01."""
        calls.append((sorted(set(reference.obs["type"])), batch_key))
        lost = ~query.obs["type"].isin(reference.obs["type"]).to_numpy() | (np.arange(40) < 5)
        return {0.05: lost, 0.01: np.zeros(40, dtype=bool)}, best, {0.05: True, 0.01: False}

    monkeypatch.setattr(rejection, "annotated", annotated)
    monkeypatch.setattr(rejection, "LEAST", 1)
    high, low = rejection.rows_of("a → b", reference, query, "batch")
    truth = cells.obs["type"][:40].to_numpy()
    known = truth != "type D"
    assert high["n_known"] == known.sum()
    assert high["known"] == pytest.approx(known[:5].sum() / known.sum(), abs=1e-4)
    assert high["known_interval"][0] < high["known"] < high["known_interval"][1]
    assert (high["right"], low["right"], high["accuracy"]) == (1, None, 1)
    assert high["removed_types"] == {"type A": 1, "type B": 1, "type C": 1}
    assert (high["removed"], low["removed"], high["warned"], low["warned"]) == (1, 0, True, False)
    assert calls[1:] == [(two, "batch") for two in (["type B", "type C"], ["type A", "type C"], ["type A", "type B"])]
