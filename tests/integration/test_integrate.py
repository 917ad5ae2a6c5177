"""`tl.integrate`: what it writes, what it refuses, and that a failed call leaves everything as it was."""

from __future__ import annotations

import warnings

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import scdiva as sd
from scdiva.data import batch
from scdiva.integration import integrate as _integrate
from scdiva.integration.integrate import cramers_v

QUICK = {"steps": 6, "rng": 3}
HISTORY = ["loss", "denoising", "reversal", "contrast"]


@pytest.fixture(scope="module")
def cells(adata):
    """240 cells of three batches and four types; never written to."""
    data = sd.datasets.toy(240, 60, n_batches=3, rng=1)
    assert list(data.var_names) == list(adata.var_names)
    data.obs["donor"] = pd.Categorical(np.resize(["d1", "d2"], 240))
    data.obs["partly"] = data.obs["cell_type"].astype(str).where(np.arange(240) % 3 != 0, "unknown")
    return data


def test_what_is_documented_is_written(plain, cells):
    data = cells.copy()
    new = sd.tl.integrate(data, "batch", model=plain, **QUICK)
    assert plain.integration is None
    assert set(data.uns["scdiva"]) == {"X_scdiva_integrated", "integrate", "written"}
    embedding = data.obsm["X_scdiva_integrated"]
    assert embedding.dtype == np.float32
    assert embedding.shape == (240, new.integration.dim)
    np.testing.assert_allclose(np.linalg.norm(embedding, axis=1), 1, rtol=1e-5)
    notes = data.uns["scdiva"]["integrate"]
    assert set(notes) == {
        "batch_key", "labels_key", "cramers_v", "fit_cells", "n_components", "steps", "seconds", "stopped",
        "history", "finetuned", "model", "seed",
    }  # fmt: skip
    assert (list(notes["batch_key"]), notes["labels_key"]) == (["batch"], "")
    assert np.isnan(notes["cramers_v"])
    assert (notes["fit_cells"], notes["steps"], notes["stopped"]) == (240, 6, "steps")
    assert notes["n_components"] == new.integration.dim == 20
    assert list(notes["history"]) == HISTORY
    assert not notes["history"]["contrast"].any()
    assert all(column.shape == (6,) for column in notes["history"].values())
    assert new.vocabulary.fingerprint == plain.vocabulary.fingerprint


def test_batches_mix_and_types_stay(plain, cells):
    """On cells whose types and batch effects are known: more batches among the neighbours, no worse types."""
    data = sd.datasets.toy(400, 60, n_batches=2, rng=1)
    counts = data.X.toarray()
    counts[np.ix_(data.obs["batch"] == "batch 1", np.arange(0, 60, 2))] *= 8  # an effect that is seen at once
    data.X = sp.csr_matrix(counts)
    sd.tl.integrate(data, "batch", model=plain, rng=0, steps=1, key_added="before")  # at a twentieth of the rate
    sd.tl.integrate(data, "batch", model=plain, steps=120, rng=0)
    batch, kind = data.obs["batch"].to_numpy(), data.obs["cell_type"].to_numpy()
    share = []
    for key in ("before", "X_scdiva_integrated"):
        near = np.argsort(-data.obsm[key] @ data.obsm[key].T, axis=1)[:, 1:16]
        share.append([(group[near] == group[:, None]).mean() for group in (batch, kind)])
    (batch_before, kind_before), (batch_after, kind_after) = share
    assert batch_before > 0.65
    assert batch_after < 0.6  # of two batches of one size chance gives half
    assert kind_after > kind_before - 0.02
    assert kind_after > 0.85


def test_types_of_one_batch_and_of_small_batches_are_kept():
    """Real cells: NK cells in one of two batches with a strong batch effect, and ten batches of 20 cells."""
    data, draw = sd.datasets.pbmc3k_small(), np.random.default_rng(0)
    kind, batch = data.obs["cell_type"].astype(str).to_numpy(), np.resize(["b", "a"], data.n_obs).astype("<U9")
    small = draw.permutation(data.n_obs)[:200]
    batch[small] = [f"small {number}" for number in np.arange(200) // 20]
    batch[kind == "NK"] = "a"
    effect = np.where((batch == "b")[:, None], draw.choice([1, 2], data.n_vars, p=[0.8, 0.2]), 1)
    data.X = sp.csr_matrix(data.X.multiply(effect))
    data.obs["batch"] = batch
    sd.tl.integrate(data, "batch", rng=0)
    embedding = data.obsm["X_scdiva_integrated"]
    near = np.argsort(-embedding @ embedding.T, axis=1)[:, 1:16]
    same = (kind[near] == kind[:, None]).mean(axis=1)
    assert same[kind == "NK"].mean() > 0.7  # 0.53 with a correction that does not depend on numbers of cells
    assert same[small].mean() > 0.78
    assert (batch[near] != batch[:, None]).mean() > 0.65


def test_each_of_several_covariates_is_told_of(plain, cells):
    data, one = cells.copy(), cells.copy()
    sd.tl.integrate(data, ["batch", "donor"], model=plain, **QUICK)
    sd.tl.integrate(one, "batch", model=plain, **QUICK)
    assert list(data.uns["scdiva"]["integrate"]["batch_key"]) == ["batch", "donor"]
    assert not np.array_equal(data.obsm["X_scdiva_integrated"], one.obsm["X_scdiva_integrated"])
    reversal = [part.uns["scdiva"]["integrate"]["history"]["reversal"][0] for part in (one, data)]
    assert reversal == pytest.approx([np.log(3), np.log(3) + np.log(2)], abs=0.2)


def test_missing_labels_and_the_unlabelled_category_are_the_same(plain, cells):
    data, missing = cells.copy(), cells.copy()
    missing.obs["partly"] = pd.Categorical(missing.obs["partly"].replace("unknown", np.nan))
    sd.tl.integrate(data, "batch", "partly", model=plain, unlabeled_category="unknown", **QUICK)
    sd.tl.integrate(missing, "batch", "partly", model=plain, **QUICK)
    np.testing.assert_array_equal(missing.obsm["X_scdiva_integrated"], data.obsm["X_scdiva_integrated"])
    assert data.uns["scdiva"]["integrate"]["labels_key"] == "partly"
    assert data.uns["scdiva"]["integrate"]["history"]["contrast"].all()


def test_cramers_v_by_its_definition():
    draw = np.random.default_rng(0)
    first, second = draw.integers(3, size=200), draw.integers(4, size=200)
    second[:80] = first[:80]
    chi2 = 0.0
    for a in range(3):
        for b in range(4):
            expected = (first == a).sum() * (second == b).sum() / 200
            chi2 += (((first == a) & (second == b)).sum() - expected) ** 2 / expected
    assert cramers_v(first, second) == pytest.approx(np.sqrt(chi2 / (200 * 2)))
    assert cramers_v(second, first) == pytest.approx(cramers_v(first, second))
    assert cramers_v(first, 5 * first) == pytest.approx(1)  # numbers without gaps or with them
    assert cramers_v(first, np.zeros(200, dtype=int)) == 0
    assert cramers_v(np.repeat([0, 1], 50), np.tile([0, 1], 50)) == 0


def test_confounded_batches_are_warned_of(plain, cells):
    data = cells.copy()
    kind = data.obs["cell_type"].cat.codes.to_numpy()
    data.obs["mixed_up"] = np.where(np.arange(240) % 10 == 0, "x", kind.astype(str))
    with pytest.warns(UserWarning, match=r"confounded \(Cramér's V 0\.\d\d\)"):
        sd.tl.integrate(data, ["batch", "mixed_up"], "cell_type", model=plain, **QUICK)
    assert data.uns["scdiva"]["integrate"]["cramers_v"] > 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sd.tl.integrate(data, "batch", "cell_type", model=plain, **QUICK)
    assert data.uns["scdiva"]["integrate"]["cramers_v"] < 0.3


def test_one_batch_is_refused_and_the_call_in_the_message_embeds_it(plain, cells, hashed):
    adata = cells.copy()
    adata.obs["batch"] = "only"
    before = hashed(adata)
    with pytest.raises(ValueError, match=r"240 cells .* of one batch of adata\.obs\['batch'\]") as refused:
        sd.tl.integrate(adata, "batch", model=plain, **QUICK)
    assert hashed(adata) == before
    eval(str(refused.value).rpartition(": ")[2].rstrip("."), {"sd": sd, "adata": adata})
    assert np.isfinite(adata.obsm["X_scdiva"]).all()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"batch_key": []}, "batch_key must name a column"),
        ({"batch_key": ["batch", "batch"]}, "each once"),
        ({"labels_key": "one"}, "240 cells with 1 type"),
        ({"batch_key": ["one", "two"]}, r"one batch of adata\.obs\['one'\] and adata\.obs\['two'\]"),
        ({"unlabeled_category": "unknown"}, "labels_key"),
        ({"fit_cells": 19}, "fit_cells must be at least 20"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_changed(plain, cells, arguments, match, hashed, weights, same):
    data = cells.copy()
    data.obs["one"], data.obs["two"], data.uns["scdiva"] = "a", "b", {"kept": 1}
    before, weights_before = hashed(data), weights(plain)
    with pytest.raises(ValueError, match=match):
        sd.tl.integrate(data, **{"batch_key": "batch", "model": plain, **QUICK, **arguments})
    assert hashed(data) == before
    assert same(weights(plain), weights_before)


def test_what_fails_late_changes_nothing(plain, cells, monkeypatch, hashed):
    def fails(*_, **__):
        raise MemoryError

    data = cells.copy()
    before = hashed(data)
    monkeypatch.setattr(_integrate, "write", fails)
    with pytest.raises(MemoryError):
        sd.tl.integrate(data, "batch", model=plain, **QUICK)
    assert hashed(data) == before


def test_an_interrupt_ends_with_what_was_learned(plain, cells, monkeypatch):
    from scdiva.integration.objective import IntegrationLoss

    compute, calls = IntegrationLoss.losses, []

    def interrupted(self, *args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return compute(self, *args)

    monkeypatch.setattr(IntegrationLoss, "losses", interrupted)
    data = cells.copy()
    with pytest.warns(UserWarning, match=r"interrupted after 3 of \d+ steps"):
        new = sd.tl.integrate(data, "batch", model=plain, **QUICK)
    assert data.uns["scdiva"]["integrate"]["stopped"] == "interrupted"
    monkeypatch.undo()
    embedded = sd.tl.embed(cells, new, copy=True, key_added="mine")
    np.testing.assert_array_equal(embedded.obsm["mine"], data.obsm["X_scdiva_integrated"])


@pytest.mark.parametrize(("labels_key", "of_a", "of_b"), [("few", 12 + 17, 17), (None, 23, 23)])
def test_a_sample_is_fitted_to_and_all_cells_are_embedded(plain, cells, labels_key, of_a, of_b, tmp_path, monkeypatch):
    """The result is that of a fit to the sampled cells alone; a file gives the same as the matrix in memory."""
    data = cells.copy()
    data.obs["batch"] = np.repeat(["a", "b", "c"], [200, 25, 15])
    data.obs["few"] = data.obs["cell_type"].where((np.arange(240) > 0) & (np.arange(240) < 13))
    matrix = data.X.toarray()
    matrix[[0, 230]] = 0
    data.X = sp.csr_matrix(matrix)
    samples, real = [], batch.read_cells
    monkeypatch.setattr(batch, "read_cells", lambda *a, **k: samples.append(real(*a, **k)) or samples[-1])
    with pytest.warns(UserWarning, match="2 of 240 cells are left out"):
        new = sd.tl.integrate(data, "batch", labels_key, model=plain, fit_cells=60, **QUICK)
    fitted, rows = samples[0]
    assert data.uns["scdiva"]["integrate"]["fit_cells"] == fitted.n_cells == 60
    assert data.obs["batch"].iloc[rows].value_counts().to_dict() == {"a": of_a, "b": of_b, "c": 14}
    assert labels_key is None or set(range(1, 13)) <= set(rows)  # all labelled cells
    embedding = data.obsm["X_scdiva_integrated"]
    assert np.flatnonzero(np.isnan(embedding).any(axis=1)).tolist() == [0, 230]
    alone = data[np.sort(rows)].copy()
    sd.tl.integrate(alone, "batch", labels_key, model=plain, **QUICK)
    np.testing.assert_allclose(alone.obsm["X_scdiva_integrated"], embedding[np.sort(rows)], atol=1e-6)
    embedded = sd.tl.embed(data, new, copy=True, key_added="mine", empty="nan")
    np.testing.assert_array_equal(embedded.obsm["mine"], embedding)
    del data.obsm["X_scdiva_integrated"], data.uns["scdiva"]
    data.write_h5ad(tmp_path / "cells.h5ad")
    backed = ad.read_h5ad(tmp_path / "cells.h5ad", backed="r")
    with pytest.warns(UserWarning, match="left out"):
        sd.tl.integrate(backed, "batch", labels_key, model=plain, fit_cells=60, **QUICK)
    np.testing.assert_array_equal(backed.obsm["X_scdiva_integrated"], embedding)


def test_a_sample_without_two_labels_is_refused_and_one_without_batches_named(plain, cells):
    data = cells.copy()
    data.obs["label"] = ["rare", *["common"] * (data.n_obs - 1)]
    with pytest.raises(ValueError, match=r"have fewer than two labels: pass a larger fit_cells than 20"):
        sd.tl.integrate(data, "batch", "label", model=plain, fit_cells=20, **QUICK)
    data.obs["well"] = [f"w{number % 60}" for number in range(data.n_obs)]
    cells_and_wells = "20 cells, in which 40 of the batches have none"
    with pytest.warns(UserWarning, match=cells_and_wells), pytest.raises(ValueError, match="20 batches has one cell"):
        sd.tl.integrate(data, "well", model=plain, fit_cells=20, **QUICK)
