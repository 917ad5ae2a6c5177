"""Faults of annotation: keys that are not there, labels that are missing, alone, unused or unheard of."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest

import scdiva as sd

FIT = {"rng": 0, "device": "cpu"}


def integrate(a, m, key="batch", **more):
    return sd.tl.integrate(a, key, model=m, steps=2, **FIT, **more)


def annotate(a, m, key="cell_type", **more):
    return sd.tl.annotate(a, key, model=m, **{"method": "knn", "unlabeled_category": "unknown"} | FIT | more)


def perturb(a, m, key="perturbation", **more):
    return sd.tl.predict_perturbation(a, key, model=m, n_cells=5, **FIT, **more)


def missing(how, cells, column):
    """Take the labels of two cells away."""
    values = cells.obs[column].astype(object)
    values.iloc[[3, 40]] = {"NaN": np.nan, "None": None, "NA": pd.NA, "NaT": pd.NaT}[how]
    cells.obs[column] = values.astype("category") if how != "None" else values
    return cells


LABELLED = {
    "tl.integrate": (integrate, "batch"),
    "tl.annotate": (lambda a, m: annotate(a, m, batch_key="batch"), "batch"),
    "tl.adapt": (lambda a, m: sd.tl.adapt(a, m, batch_key="batch", **FIT), "batch"),
    "tl.predict_perturbation": (perturb, "perturbation"),
    "tl.predict_perturbation, groups": (lambda a, m: perturb(a, m, groupby="batch"), "batch"),
    "tl.grn": (lambda a, m: sd.tl.grn(a, model=m, groupby="batch", device="cpu"), "batch"),
    "tl.generate": (lambda a, m: sd.tl.generate(a, 4, model=m, groupby="batch", rng=0), "batch"),
    "pp.split_perturbations": (
        lambda a, _: sd.pp.split_perturbations(a, "perturbation", by="single", n_splits=2, rng=0),
        "perturbation",
    ),
}


@pytest.mark.fault("NaN batch labels")
@pytest.mark.parametrize("how", ["NaN", "None", "NA", "NaT"])
@pytest.mark.parametrize("name", LABELLED)
def test_missing_labels_are_counted_and_named(cells, model, refused, name, how):
    call, column = LABELLED[name]
    said = "(missing for 2 of 80|2 of 80 cells have no)", "first.*'cell3'", "notna"
    refused(lambda a: call(a, model), missing(how, cells, column), ValueError, *said)


# --- keys that are not there ------------------------------------------------------------------------------------------
def with_label(a):
    a.obs["scdiva_label"] = a.obs["cell_type"]
    return a


KEYS = {
    "tl.integrate, labels": (lambda a, m: integrate(a, m, labels_key="cell_typ"), "cell_type"),
    "tl.annotate": (lambda a, m: annotate(a, m, "celltype"), "cell_type"),
    "tl.predict_perturbation": (lambda a, m: perturb(a, m, "pertubation"), "perturbation"),
    "tl.grn": (lambda a, m: sd.tl.grn(a, model=m, groupby="cell type", device="cpu"), "cell_type"),
    "tl.generate": (lambda a, m: sd.tl.generate(a, 4, model=m, groupby="cell.type", rng=0), "cell_type"),
    "tl.embed, layer": (lambda a, m: sd.tl.embed(a, m, layer="count"), "counts"),
    "pp.match_genes, gene_ids": (lambda a, m: sd.pp.match_genes(a, gene_ids="ensembl"), "ensembl_id"),
    "pp.split_perturbations": (
        lambda a, _: sd.pp.split_perturbations(a, "perturbations", by="single", rng=0),
        "perturbation",
    ),
    "pl.umap, color": (lambda a, _: sd.pl.umap(a, color="cell_types", basis="X_own"), "cell_type"),
    "pl.confusion_matrix": (lambda a, _: sd.pl.confusion_matrix(with_label(a.copy()), "cell_typ"), "cell_type"),
    "pl.integration": (lambda a, _: sd.pl.integration(a, "batch", before="X_ow", after="X_own"), "X_own"),
    "get.gene_embedding_df": (lambda a, _: sd.get.gene_embedding_df(a, key="X_scdivas"), "gene_embedding"),
    "get.annotation_df": (lambda a, _: sd.get.annotation_df(a), "tl.annotate"),
    "tl.grn_modules": (lambda a, _: sd.tl.grn_modules(a), "tl.grn"),
    "pl.grn": (lambda a, _: sd.pl.grn(a), "tl.grn"),
    "pl.reliability": (lambda a, _: sd.pl.reliability(a), "tl.annotate"),
    "pl.reconstruction": (lambda a, _: sd.pl.reconstruction(a), "tl.reconstruct"),
}


@pytest.mark.fault("missing keys")
@pytest.mark.parametrize("name", KEYS)
def test_a_key_that_is_not_there(cells, model, refused, name):
    """A misspelt key brings the one that was meant; a result that is not there yet brings the call that makes it."""
    call, meant = KEYS[name]
    made = meant.startswith("tl.") or ("_" in meant and name == "get.gene_embedding_df")
    refused(lambda a: call(a, model), cells, (KeyError, ValueError), meant if made else f"did you mean '{meant}'")


# --- few labels -------------------------------------------------------------------------------------------------------
@pytest.mark.fault("one batch")
@pytest.mark.parametrize("labels", [None, "cell_type"])
def test_one_batch_is_left_as_it_is(cells, model, labels):
    cells.obs["all"] = "the same"
    with pytest.warns(UserWarning, match="names one batch only: there is nothing to integrate"):
        integrate(cells, model, "all", labels_key=labels)
    sd.tl.embed(cells, model)
    assert np.array_equal(cells.obsm["X_scdiva_integrated"], cells.obsm["X_scdiva"])


def alone(cells):
    """One cell with a type of its own."""
    labels = cells.obs["cell_type"].astype(str)
    labels.iloc[7] = "alone"
    cells.obs["cell_type"] = labels.astype("category")
    return cells


@pytest.mark.fault("singleton classes")
@pytest.mark.parametrize("method", ["knn", "linear"])
def test_a_type_of_one_cell_is_a_type(cells, model, method):
    annotate(alone(cells), model, method=method, unlabeled_category=None)
    assert "alone" in list(cells.uns["scdiva"]["scdiva_label"]["labels"])
    assert np.allclose(cells.obsm["scdiva_label_probability"].sum(1), 1, atol=1e-5)


@pytest.mark.fault("unused categories")
@pytest.mark.parametrize("call", ["tl.integrate", "tl.annotate", "tl.grn"])
def test_categories_without_cells_change_nothing(drawn, model, call):
    def run(unused):
        adata = drawn.copy()
        for column in ("batch", "cell_type"):
            names = adata.obs[column].cat.categories
            if unused:
                adata.obs[column] = adata.obs[column].cat.set_categories(["AAA", *names, "zzz"])
        if call == "tl.integrate":
            integrate(adata, model, labels_key="cell_type")
            return adata.obsm["X_scdiva_integrated"], ()
        if call == "tl.annotate":
            annotate(adata, model)
            ours = adata.uns["scdiva"]["scdiva_label"]
            return adata.obsm["scdiva_label_probability"], tuple(ours["labels"])
        sd.tl.grn(adata, "correlation", model=model, groupby="batch", device="cpu")
        keys = [key for key in adata.varp if key.startswith("scdiva_grn")]
        return adata.varp[keys[0]].toarray(), tuple(keys)

    (with_unused, names), (without, same) = run(True), run(False)
    assert np.array_equal(with_unused, without)
    assert names == same


@pytest.mark.fault("unicode keys")
@pytest.mark.parametrize("text", ["Zelltyp β⁺ 細胞型 🧬", "a b\tc %s {0}"])
def test_keys_and_labels_in_any_script(cells, model, tmp_path, text):
    """Written under a key of any letters, and still there in a file."""
    cells.obs[text] = cells.obs["cell_type"].cat.rename_categories(lambda name: f"{text} {name}")
    cells.obs_names = [f"{text} {i}" for i in range(cells.n_obs)]
    sd.tl.embed(cells, model, key_added=text)
    annotate(cells, model, text, key_added=f"{text} found")
    integrate(cells, model, "batch", labels_key=text)
    cells.write_h5ad(tmp_path / "cells.h5ad")
    back = ad.read_h5ad(tmp_path / "cells.h5ad")
    assert np.array_equal(back.obsm[text], cells.obsm[text])
    assert sd.get.annotation_df(back, key=f"{text} found")["label"].str.startswith(text).all()
    with pytest.raises(KeyError, match="did you mean"):
        integrate(cells, model, "batch", labels_key=text + "x")


# --- cells of a batch that nobody has seen ----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def integrated(drawn, model):
    adata = drawn[:60].copy()
    with sd.settings.override(precision="fp32", progress=False):
        return sd.tl.integrate(adata, "batch", model=model, steps=2, **FIT), adata.obsm["X_scdiva_integrated"]


@pytest.mark.fault("unseen batch at mapping")
@pytest.mark.parametrize("batch", ["a new one", np.nan, None])
def test_an_integrated_model_maps_cells_of_any_batch(integrated, drawn, batch):
    """The model asks for no batch: a cell's state is its own, whatever batch it is said to be of."""
    fitted, before = integrated
    known, new = drawn.copy(), drawn.copy()
    new.obs["batch"] = batch
    for cells in (known, new):
        sd.tl.embed(cells, fitted)
    assert np.array_equal(new.obsm["X_scdiva_integrated"], known.obsm["X_scdiva_integrated"])
    # tl.integrate encodes with other batches than tl.embed: the last bits may differ where blocks are run
    np.testing.assert_allclose(new.obsm["X_scdiva_integrated"][:60], before, atol=1e-6)
    assert np.isfinite(new.obsm["X_scdiva_integrated"]).all()
