"""`tl.rank_perturbations`: the perturbation that made a group comes first, and the numbers are those of plain numpy."""

from __future__ import annotations

from dataclasses import replace

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch

import scdiva as sd
from scdiva.data.cells import log_normalised
from scdiva.perturbation.conditions import ScreenDesign
from scdiva.perturbation.response import KINDS
from scdiva.perturbation.screen import Conditions

COLUMNS = {
    "perturbation": "O", "n_parts": "i", "n_seen": "i", "trained": "b", "cosine": "f", "reached": "f", "distance": "f",
}  # fmt: skip
MEASURED = ("control", "0", "1", "2", "3", "4", "0+1", "1+2", "drug")


@pytest.fixture(scope="module")
def data(perturbed_cells):
    return perturbed_cells(MEASURED, n=20)


@pytest.fixture(scope="module")
def fitted(data, one):
    return sd.tl.fit_perturbation(data, "perturbation", model=one, rng=0)


@pytest.fixture(scope="module")
def states(perturbed_cells):
    """New cells: control cells, "from", and cells that a perturbation made, "to"."""

    def make(label, n=20, **arguments):
        cells = perturbed_cells(("control", label), n=n, **arguments)
        cells.obs_names = [f"new{i}" for i in range(cells.n_obs)]
        control = (cells.obs["perturbation"] == "control").to_numpy()
        cells.obs["state"] = np.where(control, "from", "to")
        del cells.obs["perturbation"]
        return cells

    return make


def rank(data, model, **arguments) -> pd.DataFrame:
    options = {"target": "to"} | arguments
    return sd.tl.rank_perturbations(
        data, options.pop("state_key", "state"), options.pop("start", "from"), model=model, **options
    )


def pair(genes, a, b) -> str:
    return "+".join(sorted((genes[a], genes[b])))


def means(data) -> tuple[np.ndarray, np.ndarray]:
    values = log_normalised(data)[0].toarray()
    state = data.obs["state"].to_numpy()
    return values[state == "from"].mean(axis=0), values[state == "to"].mean(axis=0)


def plainly(change, needed) -> list[float]:
    """Cosine, share of the way, and distance left, of one perturbation."""
    length = np.sqrt((needed**2).sum())
    along = (change * needed).sum() / length
    return [along / np.sqrt((change**2).sum()), along / length, np.sqrt(((needed - change) ** 2).sum()) / length]


def of_frame(frame, name) -> list[float]:
    return frame.set_index("perturbation").loc[name, ["cosine", "reached", "distance"]].tolist()


@pytest.mark.parametrize(("label", "base"), [("0", "expected"), ("3", "no_change"), ("drug", "train_mean")])
def test_the_measured_perturbation_that_made_a_group_comes_first(fitted, states, genes, label, base):
    """For any baseline of unseen perturbations, such as the training mean, which is the same for all."""
    fitted = replace(fitted, base=fitted.base | dict.fromkeys(KINDS, base))
    ranking = rank(states(label), fitted)
    assert ranking["perturbation"][0] == (genes[int(label)] if label.isdigit() else label)
    assert ranking["trained"].all()
    assert set(ranking["perturbation"]) == {"+".join(p) for p in fitted.screen.conditions.parts}
    assert ranking["cosine"][0] > 0.9
    assert ranking["cosine"][0] > ranking["cosine"][1] + 0.1
    assert ranking["reached"][0] == pytest.approx(1, abs=0.25)
    assert ranking["distance"].idxmin() == 0


def test_a_pair_that_was_not_measured_comes_first(fitted, states, genes):
    ranking = rank(states("0+3"), fitted, combinations=True)
    assert ranking["perturbation"][0] == pair(genes, 0, 3)
    assert ranking.loc[0, ["n_parts", "n_seen", "trained"]].tolist() == [2, 2, False]


def test_what_is_documented_is_there_and_nothing_else(fitted, states, hashed, weights, same, tmp_path):
    cells = states("2")
    before, weights_before, state = hashed(cells), weights(fitted.model), torch.random.get_rng_state()
    ranking = rank(cells, fitted, combinations=True)
    record = cells.uns.pop("scdiva_ranked_perturbations")
    assert set(cells.uns.pop("scdiva")) == {"written"}
    assert hashed(cells) == before  # and nothing else was written
    assert same(weights(fitted.model), weights_before)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {name: np.asarray(ranking[name]).dtype.kind for name in ranking} == COLUMNS
    assert ranking["cosine"].is_monotonic_decreasing
    assert np.isfinite(ranking[["cosine", "reached", "distance"]].to_numpy()).all()
    folder = fitted.save(tmp_path / "fitted")
    for source in (folder, str(folder)):
        pd.testing.assert_frame_equal(rank(cells, source, combinations=True), ranking)
    # zarr holds what is kept; a later ranking replaces it
    cells.write_zarr(tmp_path / "cells.zarr")
    for stored in (record, ad.read_zarr(tmp_path / "cells.zarr").uns["scdiva_ranked_perturbations"]):
        assert (stored["state_key"], stored["start"], stored["target"]) == ("state", "from", "to")
        assert [str(name) for name in stored["perturbation"]] == ranking["perturbation"].tolist()
        for name in set(COLUMNS) - {"perturbation"}:
            np.testing.assert_array_equal(stored[name], ranking[name])
    shorter = rank(cells, fitted)
    assert len(cells.uns["scdiva_ranked_perturbations"]["cosine"]) == len(shorter) < len(ranking)


@pytest.mark.parametrize("base", ["expected", "additive"])
def test_beside_plain_numpy(fitted, states, genes, base):
    model = replace(fitted, base=fitted.base | dict.fromkeys(KINDS, base))
    assert set(fitted.base.values()) == {"expected"}
    cells, names = states("1"), [genes[1], pair(genes, 0, 1), pair(genes, 2, 3), f"{genes[4]}+drug", genes[20]]
    ranking = rank(cells, model, candidates=names)
    targets = Conditions.of((tuple(sorted(name.split("+"))), 0, 1.0) for name in names)
    new = np.zeros((0, model.model.state_dim), dtype=np.float32)
    change = model.mean_change(targets, new).change
    change[:2] = fitted.mean_change(targets, new).change[:2]  # these were measured
    at_start, at_end = means(cells)
    for name, row in zip(names, change, strict=True):
        assert of_frame(ranking, name) == pytest.approx(plainly(row, at_end - at_start), abs=1e-6)
    rows = ranking.set_index("perturbation").loc[names]
    assert rows["n_parts"].tolist() == [1, 2, 2, 2, 1]
    assert rows["n_seen"].tolist() == [1, 2, 2, 2, 0]
    assert rows["trained"].tolist() == [True, True, False, False, False]


def test_combinations_are_all_pairs_that_are_missing(fitted, states, genes):
    cells = states("2")
    alone = [*genes[:5], "drug"]
    pairs = {tuple(sorted((a, b))) for a in alone for b in alone if a < b}
    ranking = rank(cells, fitted, combinations=True)
    assert len(ranking) == 6 + 15
    assert {tuple(sorted(name.split("+"))) for name in ranking["perturbation"]} == {(a,) for a in alone} | pairs
    # a pair that is named is ranked as it is named, and once
    candidates = [f"{genes[1]} + {genes[0]}", genes[30], f"{genes[3]}+control+{genes[2]}"]
    ranking = rank(cells, fitted, candidates=candidates, combinations=True)
    assert len(ranking) == 3 + 13
    assert set(candidates) <= set(ranking["perturbation"])
    assert pair(genes, 0, 1) not in set(ranking["perturbation"])
    assert len(rank(cells, fitted, candidates=[], combinations=True)) == 15


def test_groups(fitted_groups, states, genes):
    cells = states("1", groups=("b", "a"), doses=(5.5,))
    of_line = cells[cells.obs["line"] == "a"].copy()
    # the group is that of the start cells, whatever the others are of
    mixed = cells[(cells.obs["line"] == "a") | (cells.obs["state"] == "to")].copy()
    for of in (of_line, mixed):
        ranking = rank(of, fitted_groups)
        assert len(ranking) == 3
        assert ranking["perturbation"][0] == genes[1]
    with pytest.raises(ValueError, match=r"start .*2 groups of adata.obs\['line'\].*'a', 'b'"):
        rank(cells, fitted_groups)
    of_line.obs["line"] = "new"  # a group that the screen does not hold
    assert np.isfinite(rank(of_line, fitted_groups)["cosine"]).all()
    with pytest.raises(ValueError, match="dose must be a number above 0"):
        rank(of_line, fitted_groups, dose=0.0)
    del of_line.obs["line"]
    with pytest.raises(KeyError, match="line"):
        rank(of_line, fitted_groups)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"start": "zz"}, r"adata.obs\['state'\] .*'zz'; .*'from', 'to'"),
        ({"target": "from"}, "start and target are both 'from'"),
        ({"candidates": ["ALB", "drugg", "zz+ALB"]}, "2 of 3 perturbed .*'drugg'"),
        ({"candidates": ["drug", "drug"]}, "candidates holds 'drug' more than once"),
        ({"candidates": []}, "candidates is empty"),
        ({"dose": 3.0}, "dose requires"),
        ({"key_added": "mine"}, r"adata.uns\['mine'\] would be overwritten"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_changed(fitted, states, arguments, match, hashed):
    cells = states("1", n=4)
    cells.uns["mine"] = {"cosine": 1}
    before = hashed(cells)
    with pytest.raises(ValueError, match=match):
        rank(cells, fitted, **arguments)
    assert hashed(cells) == before


def test_data_and_models_that_make_no_sense_are_refused(fitted, one, states):
    cells = states("1", n=4)
    with pytest.raises(TypeError, match="fit_perturbation returns, got ScDiVa"):
        rank(cells, one)
    equal = ad.concat([cells[:4], cells[:4]], index_unique="-", merge="same")
    equal.obs["state"] = ["from"] * 4 + ["to"] * 4
    with pytest.raises(ValueError, match=r"'from' and 'to' .*same"):
        rank(equal, fitted)
    missing = cells.copy()
    missing.obs.loc[missing.obs_names[2], "state"] = None
    with pytest.raises(ValueError, match=r"missing for 1 of 8 .*'new2'"):
        rank(missing, fitted)
    with pytest.raises(ValueError, match="combinations require"):
        rank(cells, replace(fitted, design=ScreenDesign.of("perturbation", separator="")), combinations=True)
