"""Faults of what is written: keys that files can't hold, entries of the user's own, results that a file changes."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import scdiva as sd

FIT = {"rng": 0, "device": "cpu"}


def grn(a, m, key="scdiva_grn", **more):
    sd.tl.grn(a, model=m, sources=list(a.var_names[:8]), key_added=key, device="cpu", **more)


def modules(a, m, key="scdiva_grn_module"):
    grn(a, m)
    sd.tl.grn_modules(a, key_added=key, rng=0)


def annotate(a, m, key="scdiva_label", **more):
    labels = a.obs["cell_type"].astype(str).where(np.arange(a.n_obs) % 2 == 0)
    reference = a[labels.notna().to_numpy()].copy()
    sd.tl.annotate(a, "cell_type", reference, model=m, key_added=key, **{"method": "knn"} | FIT | more)


CALLS = {
    "pp.match_genes": lambda a, m: sd.pp.match_genes(a),
    "pp.gene_entropy": lambda a, m, key="scdiva_entropy": sd.pp.gene_entropy(a, key_added=key),
    "pp.entropy_serialize": lambda a, m, key="scdiva_rank": sd.pp.entropy_serialize(a, key_added=key),
    "pp.split_perturbations": lambda a, m, key="scdiva_split": sd.pp.split_perturbations(
        a, "perturbation", by="single", n_splits=2, key_added=key
    ),
    "tl.embed": lambda a, m, key=None: sd.tl.embed(a, m, key_added=key),
    "tl.gene_embedding": lambda a, m, key="X_scdiva": sd.tl.gene_embedding(a, m, key_added=key),
    "tl.integrate": lambda a, m, key="X_scdiva_integrated": sd.tl.integrate(
        a, "batch", model=m, steps=2, key_added=key, **FIT
    ),
    "tl.annotate": annotate,
    "tl.annotate, parents": lambda a, m, key="scdiva_label": annotate(
        a, m, key, method="linear", reject=0.2, parents={"type A": "a/b", "type B": "a/b"}
    ),
    "tl.grn": grn,
    "tl.grn, groups": lambda a, m, key="scdiva_grn": grn(a, m, key, groupby="odd"),
    "tl.grn_modules": modules,
    "tl.reconstruct": lambda a, m, key="scdiva_reconstructed": sd.tl.reconstruct(a, m, rng=0, key_added=key),
    "tl.impute": lambda a, m, key="scdiva_imputed": sd.tl.impute(a, model=m, rng=0, key_added=key),
    "tl.log_likelihood": lambda a, m, key="scdiva_log_likelihood": sd.tl.log_likelihood(
        a, m, n_samples=2, rng=0, key_added=key
    ),
}
"""Calls that write into adata; those with a key take it third. `pl.umap`, which compiles for long, is in tests/pl."""
MAKERS = {
    "tl.generate": lambda a, m: sd.tl.generate(a, 3, groupby="odd", fixed={a.var_names[0]: 1.0}, model=m, rng=0),
    "tl.predict_perturbation": lambda a, m: sd.tl.predict_perturbation(
        a, "perturbation", groupby="batch", model=m, n_cells=5, **FIT
    ),
}
"""Calls that make cells of their own."""
TOGETHER = {
    "pp": ["pp.match_genes", "pp.gene_entropy", "pp.entropy_serialize", "pp.split_perturbations"],
    "cells": ["tl.embed", "tl.integrate", "tl.annotate", "tl.log_likelihood"],
    "genes": ["tl.gene_embedding", "tl.grn", "tl.grn_modules", "tl.reconstruct", "tl.impute"],
    "groups": ["tl.grn, groups", "tl.annotate, parents"],
}
"""Calls whose results stand in one adata, which goes through the files once for all of them."""
KEYED = [name for name in CALLS if name != "pp.match_genes"]
PARTS = ("obs", "var", "obsm", "varm", "obsp", "varp", "layers", "uns")


def same(found, given, at=""):
    """Hold what was read against what was written; numpy's and pandas's types for text count alike."""
    if isinstance(given, ad.AnnData):
        for part in PARTS:
            same(getattr(found, part), getattr(given, part), part)
    elif isinstance(given, pd.DataFrame):
        pd.testing.assert_frame_equal(found, given, check_categorical=True)
    elif hasattr(given, "keys"):
        assert set(found.keys()) == set(given.keys()), at
        for key in given.keys():  # noqa: SIM118  (AxisArrays)
            same(found[key], given[key], f"{at}/{key}")
    elif sp.issparse(given):
        assert found.dtype == given.dtype, at
        assert (abs(found.astype(float) - given.astype(float))).sum() == 0, at
        assert np.array_equal(found.indptr, given.indptr), at
    elif isinstance(given, np.ndarray) and given.dtype.kind not in "OUT":
        assert np.asarray(found).dtype == given.dtype, at
        np.testing.assert_array_equal(found, given, err_msg=at)
    elif isinstance(given, np.ndarray | list | tuple):
        assert [str(one) for one in found] == [str(one) for one in given], at
    else:
        assert found == given or (found != found and given != given), (at, found, given)


def through(adata, store, folder):
    """Write and read."""
    path = folder / f"cells.{store[:4]}"
    if store == "h5ad":
        adata.write_h5ad(path)
        return ad.read_h5ad(path)
    before = ad.settings.zarr_write_format
    ad.settings.zarr_write_format = int(store[-1])
    try:
        adata.write_zarr(path)
    finally:
        ad.settings.zarr_write_format = before
    return ad.read_zarr(path)


@pytest.fixture
def given(cells):
    """Cells with groups whose names are paths, and nothing that AnnData itself changes as it writes."""
    names = np.array(["a/b", "a\\c", "..", "x y"], dtype=object)
    cells.obs["odd"] = pd.Categorical(names[np.arange(cells.n_obs) % 4])
    cells.obs["perturbation"] = pd.Categorical(cells.obs["perturbation"])
    return cells


@pytest.mark.fault("results through a file")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*TOGETHER, *MAKERS])
def test_what_is_written_is_read_back(given, model, tmp_path, name):
    if name == "genes":
        pytest.importorskip("igraph")
    calls = [CALLS[call] for call in TOGETHER.get(name, ())]
    for call in calls:
        call(given, model)
    adata = given if calls else MAKERS[name](given, model)
    for store in ("zarr 2", "zarr 3", "h5ad"):
        folder = tmp_path / store
        folder.mkdir()
        back = through(adata, store, folder)
        same(back, adata)
    for call in calls:  # what was read is ours, and may be replaced
        call(back, model)


def test_every_call_goes_through_a_file():
    assert sorted(call for calls in TOGETHER.values() for call in calls) == sorted(CALLS)


BAD = {
    "": "it is empty",
    "  ": "it is empty",
    "a/b": "it holds a slash",
    "/a": "it holds a slash",
    "a\\b": "it holds a slash, a backslash",
    "a\0b": "or a null character",
    ".": "keep something of their own",
    "..": "keep something of their own",
    "_index": "keep something of their own",
    "zarr.json": "keep something of their own",
    ".zarray": "keep something of their own",
    "x" * 300: "300 bytes",
    "\ud800": "no valid Unicode",
    3: "must be text",
    True: "must be text",
}


@pytest.mark.fault("a key that no file holds")
@pytest.mark.parametrize(
    ("call", "key"),
    # what a key may be is decided in one place, so that one call is asked about all of them
    [*(("tl.embed", key) for key in BAD), *((call, key) for call in KEYED if call != "tl.embed" for key in ("a/b", 3))],
)
def test_a_key_that_no_file_holds_is_refused(given, refused, call, key):
    if call == "tl.grn_modules":
        refused(lambda a: sd.tl.grn_modules(a, key_added=key), given, (ValueError, TypeError), BAD[key])
        return
    model = "no model is loaded before the key is checked"
    refused(lambda a: CALLS[call](a, model, key), given, (ValueError, TypeError), BAD[key])


@pytest.mark.fault("a key that no file holds")
@pytest.mark.parametrize("key", [key for key in BAD if key != 3])
def test_a_key_of_the_command_line_or_a_file_is_refused(cells, model, tmp_path, key):
    cells.write_h5ad(tmp_path / "cells.h5ad")
    with pytest.raises((ValueError, TypeError), match=BAD[key]):
        sd.tl.embed_file(tmp_path / "cells.h5ad", tmp_path / "out.h5ad", model=model, key_added=key)
    assert [path.name for path in tmp_path.iterdir()] == ["cells.h5ad"]
    with pytest.raises((ValueError, TypeError), match=BAD[key]):
        sd.tl.corrected_expression(cells, "batch", cells.var_names[0], model=model, key_added=key)


@pytest.mark.fault("a key that no file holds")
@pytest.mark.parametrize("call", [*MAKERS][:2])
@pytest.mark.parametrize("key", ["a/b", "", "a\\b"])
def test_a_column_that_would_be_written_is_checked(given, model, refused, call, key):
    given.obs[key] = given.obs["perturbation"]
    calls = {
        "tl.generate": lambda a: sd.tl.generate(a, 3, groupby=key, model=model),
        "tl.predict_perturbation": lambda a: sd.tl.predict_perturbation(a, key, model=model, **FIT),
    }
    refused(calls[call], given, ValueError, BAD[key], "Rename")


@pytest.mark.fault("a key of the user's own")
@pytest.mark.parametrize("call", CALLS)
def test_what_the_user_has_is_never_overwritten(given, model, refused, call):
    made = given.copy()
    if call == "tl.grn_modules":
        pytest.importorskip("igraph")
        grn(given, model)
    CALLS[call](made, model)
    written = [
        (part, key) for part in PARTS for key in set(getattr(made, part)) - set(getattr(given, part)) - {"scdiva"}
    ]
    if call == "tl.grn_modules":
        written = [(part, key) for part, key in written if part == "var"]
    assert written
    for part, key in written:
        theirs = given.copy()
        getattr(theirs, part)[key] = getattr(made, part)[key]
        again = (lambda a, _: sd.tl.grn_modules(a, rng=0)) if call == "tl.grn_modules" else CALLS[call]
        which = model if call == "tl.embed" else "no model is loaded before the key is checked"
        refused(
            lambda a, again=again, which=which: again(a, which),
            theirs,
            ValueError,
            "would be overwritten",
            f"del adata.{part}",
        )
    CALLS[call](made, model)  # its own it replaces


@pytest.mark.fault("a key of the user's own")
def test_a_column_of_labels_is_not_overwritten(cells, model, refused):
    said = r"adata\.obs\['cell_type'\] would be overwritten", "choose another key"
    refused(lambda a: annotate(a, model, "cell_type"), cells, ValueError, *said)
    sd.tl.embed(cells, model, key_added="cell_type")  # an entry of ours of that name is no licence
    refused(lambda a: annotate(a, model, "cell_type"), cells, ValueError, "cell_type")


@pytest.mark.fault("one key for two calls")
@pytest.mark.parametrize("key", ["written", "umap", "match", "integrate", "generate", "perturbation"])
def test_an_entry_of_a_fixed_name_stays(cells, model, refused, key):
    said = rf"uns\['scdiva'\]\['{key}'\] is where", "choose another key"
    refused(lambda a: sd.tl.embed(a, model, key_added=key), cells, ValueError, *said)
    refused(lambda a: annotate(a, model, key), cells, ValueError, *said)


@pytest.mark.fault("one key for two calls")
def test_the_entry_of_another_call_stays(cells, model, refused):
    annotate(cells, model, "mine")
    refused(lambda a: sd.tl.embed(a, model, key_added="mine"), cells, ValueError, "scdiva.tl.annotate", "another key")
    assert len(sd.get.annotation_df(cells, key="mine"))
    annotate(cells, model, "mine")


@pytest.mark.fault("one key for two calls")
def test_an_embedding_and_an_integrated_one_do_not_share_a_key(cells, model, refused):
    """The model that integrated the cells may embed them again."""
    sd.tl.embed(cells, model, key_added="mine")
    refused(lambda a: CALLS["tl.integrate"](a, model, "mine"), cells, ValueError, "tl.embed", "another key")
    integrated = CALLS["tl.integrate"](cells, model)
    said = "tl.integrate", "another key"
    refused(lambda a: sd.tl.embed(a, model, key_added="X_scdiva_integrated"), cells, ValueError, *said)
    before = cells.obsm["X_scdiva_integrated"].copy()
    sd.tl.embed(cells, integrated)
    np.testing.assert_allclose(cells.obsm["X_scdiva_integrated"], before, rtol=1e-4, atol=1e-5)


SIDE = {
    "tl.annotate": ("obs", "mine_confidence"),
    "tl.log_likelihood": ("obs", "mine_se"),
    "tl.grn, groups": ("varp", "mine_x y"),
    "tl.grn_modules": ("var", "mine_hub"),
    "tl.reconstruct": ("layers", "mine_rank"),
    "tl.impute": ("layers", "mine_sd"),
    "pp.split_perturbations": ("obs", "mine_seen"),
}
"""A key that a call writes beside that of its result."""


@pytest.mark.fault("one key for two calls")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SIDE)
def test_a_key_that_belongs_to_another_result_stays(given, model, refused, name):
    if name == "tl.grn_modules":
        pytest.importorskip("igraph")
    part, side = SIDE[name]
    call = (lambda a, m, key: sd.tl.grn_modules(a, key_added=key, rng=0)) if name == "tl.grn_modules" else CALLS[name]
    grn(given, model)
    after, before = given.copy(), given.copy()
    call(after, model, "mine")
    assert side in getattr(after, part)
    single = grn if name == "tl.grn, groups" else call  # of all cells, its key is that of a group
    said = rf"adata\.{part}\['{side}'\] belongs to the result 'mine'", "choose another key"
    refused(lambda a: single(a, model, side), after, ValueError, *said)
    call(after, model, "mine")  # its own it replaces
    single(before, model, side)
    refused(lambda a: call(a, model, "mine"), before, ValueError, f"belongs to the result '{side}'")
    single(before, model, side)


# --- put together -----------------------------------------------------------------------------------------------------
@pytest.fixture
def parts(cells, model):
    reference = cells[:40].copy()
    both = [cells[40:60].copy(), cells[60:].copy()]
    annotator = sd.tl.annotate(both[0], "cell_type", reference, model=model, method="knn", **FIT)
    sd.tl.annotate(both[1], model=annotator)
    return both, pd.concat([sd.get.annotation_df(part) for part in both], ignore_index=True)


@pytest.mark.fault("annotated cells put together")
@pytest.mark.parametrize("read", ["get.annotation_df", "pl.reliability"])
def test_names_of_labels_lost_in_concat_are_said(parts, read):
    together = ad.concat(parts[0])
    with pytest.raises(KeyError, match=r"anndata\.concat.*uns_merge='same'"):
        {"get.annotation_df": sd.get.annotation_df, "pl.reliability": sd.pl.reliability}[read](together)


@pytest.mark.fault("annotated cells put together")
def test_names_of_labels_kept_in_concat(parts):
    together = ad.concat(parts[0], uns_merge="same")
    pd.testing.assert_frame_equal(sd.get.annotation_df(together), parts[1])


@pytest.mark.fault("annotated cells put together")
def test_annotations_of_other_labels_put_together_are_refused(cells, parts, model):
    both, _ = parts
    reference = cells[:40].copy()
    reference.obs["cell_type"] = reference.obs["cell_type"].cat.rename_categories(lambda name: f"{name}!")
    with pytest.warns(UserWarning, match="no label in common"):
        sd.tl.annotate(both[1], "cell_type", reference, model=model, method="knn", **FIT)
    with pytest.raises(KeyError, match="names no labels"):
        sd.get.annotation_df(ad.concat(both, uns_merge="same"))


@pytest.mark.fault("annotated cells put together")
@pytest.mark.filterwarnings("ignore")
def test_the_first_record_is_not_read_for_cells_of_another_annotation(cells, parts, model):
    both, table = parts
    one = ad.concat(both, uns_merge="first")  # of one annotator
    pd.testing.assert_frame_equal(sd.get.annotation_df(one), table)
    one.obs["scdiva_label"] = "corrected by hand"
    both[0].obs["scdiva_label"] = "corrected by hand"
    assert len(sd.get.annotation_df(both[0])) == 20
    reference = cells[:40].copy()
    reference.obs["cell_type"] = reference.obs["cell_type"].cat.rename_categories(lambda name: f"{name}!")
    other = cells[60:].copy()
    sd.tl.annotate(other, "cell_type", reference, model=model, method="knn", **FIT)
    sd.tl.annotate(both[1], "cell_type", cells[:40].copy(), model=model, method="knn", **FIT)
    for read in (sd.get.annotation_df, sd.pl.reliability):
        with pytest.raises(ValueError, match=r"describes 20 of 40 cells.*do not fit 20 others"):
            read(ad.concat([both[1], other], uns_merge="first"))


@pytest.mark.fault("a query of an integrated model")
@pytest.mark.parametrize("store", ["memory", "file", "folder"])
def test_a_query_stands_where_the_cells_do(cells, model, tmp_path, store):
    query = cells[60:].copy()
    fitted = sd.tl.integrate(cells, "batch", model=model, steps=2, **FIT)
    if store == "file":
        query.write_h5ad(tmp_path / "query.h5ad")
        query = ad.read_h5ad(sd.tl.embed_file(tmp_path / "query.h5ad", tmp_path / "out.h5ad", model=fitted))
    else:
        if store == "folder":
            sd.models.save_model(fitted, fitted.vocabulary, tmp_path / "saved")
        sd.tl.embed(query, tmp_path / "saved" if store == "folder" else fitted)
    assert set(query.obsm) - {"X_own"} == {"X_scdiva_integrated"}
    np.testing.assert_allclose(
        query.obsm["X_scdiva_integrated"], cells.obsm["X_scdiva_integrated"][60:], rtol=1e-5, atol=1e-6
    )
