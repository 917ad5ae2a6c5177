from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scdiva as sd
from scdiva.pp import split_perturbations

LABELS = ["control", "A", "B", "C", "D", "A+B", "B+A", "A+C", "C+D", "A+X", "X+Y", "control+B"]
LINES = ["k562", "u87", "a172"]


def screen(labels=LABELS, lines=LINES, n=2):
    """Cells of every label in every line."""
    obs = pd.DataFrame([(p, g) for p in labels for g in lines] * n, columns=["p", "g"], dtype="category")
    obs.index = [f"c{i}" for i in range(len(obs))]
    return ad.AnnData(np.ones((len(obs), 3), dtype=np.float32), obs=obs)


def parts(label):
    return set(label.split("+")) - {"control"}


def slow_seen(p, test):
    """Parts of each test cell's perturbation that a training cell shows alone."""
    alone = {next(iter(parts(q))) for q, held in zip(p, test, strict=True) if not held and len(parts(q)) == 1}
    return [len(parts(q) & alone) if held else -1 for q, held in zip(p, test, strict=True)]


def folds(by, rng, n_splits=None, **options):
    for fold in range(n_splits or len(LINES)):
        more = {"n_splits": n_splits} if n_splits else {"groupby": "g"}
        split = split_perturbations(screen(), "p", by=by, fold=fold, rng=rng, copy=True, **more, **options)
        yield split, (split.obs["scdiva_split"] == "test").to_numpy()


@given(st.sampled_from(["single", "combination"]), st.integers(0, 99), st.integers(2, 4))
@settings(deadline=None, max_examples=25)
def test_folds_are_disjoint_hold_all_and_say_what_was_seen(by, rng, n_splits):
    held_out = []
    for split, test in folds(by, rng, n_splits):
        p = split.obs["p"].astype(str).tolist()
        test_side = {frozenset(parts(q)) for q, held in zip(p, test, strict=True) if held}
        train_side = {frozenset(parts(q)) for q, held in zip(p, test, strict=True) if not held}
        assert not test_side & train_side  # a condition is on one side, whatever the order of its parts
        assert frozenset() in train_side
        assert split.obs["scdiva_split_seen"].tolist() == slow_seen(p, test)
        assert split.obs["scdiva_split_seen"].dtype == np.int8
        size = 1 if by == "single" else 2
        held_out += [c for c in test_side if len(c) == size]
        if by == "single":
            singles = set().union(*(c for c in test_side if len(c) == 1))
            assert all(c & singles for c in test_side)
            assert not any(c & singles for c in train_side)
        else:
            assert {len(c) for c in test_side} == {2}
    all_of_size = {frozenset(parts(q)) for q in LABELS if len(parts(q)) == (1 if by == "single" else 2)}
    assert len(held_out) == len(set(held_out))
    assert set(held_out) == all_of_size


def test_groups_are_held_out_in_order_of_their_names():
    for (split, test), line in zip(folds("group", 0), sorted(LINES), strict=True):
        of_line = (split.obs["g"] == line).to_numpy()
        control = (split.obs["p"] == "control").to_numpy()
        np.testing.assert_array_equal(test, of_line & ~control)
        assert split.uns["scdiva"]["scdiva_split"]["held_out"].tolist() == [line]
        # singles are seen in the other lines; X and Y only stand in combinations
        n_seen = split.obs.loc[test].groupby("p", observed=True)["scdiva_split_seen"].first()
        assert n_seen[["A", "control+B", "B+A", "A+X", "X+Y"]].tolist() == [1, 1, 2, 1, 0]
    adata = screen()  # groups without perturbed cells are not counted
    adata = adata[(adata.obs["g"] != "a172") | (adata.obs["p"] == "control")].copy()
    split_perturbations(adata, "p", by="group", groupby="g")
    assert set(adata.obs.loc[adata.obs["scdiva_split"] == "test", "g"]) == {"k562"}


def test_the_seed_decides_and_the_settings_give_it():
    def held(rng):
        return [split.uns["scdiva"]["scdiva_split"]["held_out"].tolist() for split, _ in folds("single", rng, 2)]

    assert held(0) == held(0)
    assert len({str(held(rng)) for rng in (0, 1, 2, 3)}) > 1
    with sd.settings.override(seed=3):
        assert held(None) == held(3)


def test_it_does_not_depend_on_the_order_of_cells():
    adata = screen()
    shuffled = adata[np.random.default_rng(0).permutation(adata.n_obs)].copy()
    for one in (adata, shuffled):
        split_perturbations(one, "p", by="combination", n_splits=3, fold=1)
    pd.testing.assert_frame_equal(shuffled.obs.loc[adata.obs_names], adata.obs)


def test_what_is_written_can_be_stored(tmp_path):
    adata = screen(labels=[label.replace("+", "_") for label in LABELS])
    assert split_perturbations(adata, "p", by="combination", separator="_", key_added="mine", rng=7) is None
    adata.write_h5ad(tmp_path / "cells.h5ad")
    back = ad.read_h5ad(tmp_path / "cells.h5ad")
    assert list(back.obs["mine"].cat.categories) == ["train", "test"]
    record = dict(back.uns["scdiva"]["mine"])
    assert set(record.pop("held_out")) <= {"A_B", "A_C", "C_D", "A_X", "X_Y"}
    assert record == {
        "perturbation_key": "p", "control": "control", "by": "combination", "groupby": "", "n_splits": 5, "fold": 0,
        "separator": "_", "seed": 7,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"by": "group"}, ValueError, "requires groupby"),
        ({"by": "single", "groupby": "g"}, ValueError, "groupby requires by='group'"),
        ({"by": "single", "fold": 5}, ValueError, "no fold 5: folds go from 0 to 4"),
        ({"by": "single", "fold": -1}, ValueError, "fold must be at least 0, got -1"),
        ({"by": "single", "rng": 1.5}, TypeError, "rng must be a whole number"),
        ({"by": "single", "key_added": "p"}, ValueError, "would overwrite"),
        ({"by": "single", "n_splits": 6}, ValueError, r"'A'.* 6 folds. Pass a smaller n_splits"),
        ({"by": "combination", "separator": "_"}, ValueError, "0 combinations with '_'.*5 folds"),
        ({"by": "group", "groupby": "g", "fold": 3}, ValueError, "3 groups have perturbed cells.* 0 to 2"),
    ],
)
def test_what_cannot_be_split_is_refused(options, error, message):
    adata = screen()
    before = adata.obs.copy()
    with pytest.raises(error, match=message):
        split_perturbations(adata, "p", **options)
    pd.testing.assert_frame_equal(adata.obs, before)
    assert "scdiva" not in adata.uns


def test_cells_that_cannot_be_split_are_refused():
    with pytest.raises(ValueError, match=r"1 groups with perturbed cells \('k562'\)"):
        split_perturbations(screen(lines=["k562"]), "p", by="group", groupby="g")
    adata = screen()
    bare = adata[(adata.obs["g"] != "k562") | (adata.obs["p"] != "control")].copy()
    with pytest.raises(ValueError, match=r"group 'k562' .* 22 cells and no control"):
        split_perturbations(bare, "p", by="group", groupby="g", fold=1)
    split_perturbations(bare, "p", by="group", groupby="g", fold=0)
