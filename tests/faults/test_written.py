"""Faults of what is written: keys that files can't hold, entries of the user's own, results that a file changes."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import scdiva as sd

from .conftest import CALLS as ENTRIES


def grn(a, m, **how):
    ENTRIES["tl.grn"](a, m, sources=list(a.var_names[:8]), **how)


def annotate(a, m, **how):
    reference = a[np.arange(a.n_obs) % 2 == 0].copy()
    ENTRIES["tl.annotate"](a, m, reference=reference, unlabeled_category=None, **how)


KEYED = (
    "pp.gene_entropy", "pp.entropy_serialize", "pp.split_perturbations", "tl.embed", "tl.gene_embedding",
    "tl.integrate", "tl.reconstruct", "tl.impute", "tl.log_likelihood", "tl.annotate", "tl.grn", "tl.grn, groups",
)  # fmt: skip
CALLS = {name: ENTRIES[name] for name in ("pp.match_genes", *KEYED[:-3])} | {
    "tl.annotate": annotate,
    "tl.grn": grn,
    "tl.grn, groups": lambda a, m, **how: grn(a, m, groupby="odd", **how),
}
"""Calls that write into adata. `pl.umap`, which compiles for long, is in tests/pl."""
MAKERS = {
    "tl.generate": lambda a, m: ENTRIES["tl.generate"](a, m, groupby="odd", fixed={a.var_names[0]: 1.0}),
    "tl.predict_perturbation": lambda a, m: ENTRIES["tl.predict_perturbation"](a, m, groupby="batch"),
}
"""Calls that make cells of their own."""
TOGETHER = {
    "pp": ["pp.match_genes", "pp.gene_entropy", "pp.entropy_serialize", "pp.split_perturbations"],
    "cells": ["tl.embed", "tl.integrate", "tl.annotate", "tl.log_likelihood"],
    "genes": ["tl.gene_embedding", "tl.grn", "tl.reconstruct", "tl.impute"],
    "groups": ["tl.grn, groups"],
}
"""Calls whose results stand in one adata, which goes through the files once for all of them."""
PARTS = ("obs", "var", "obsm", "varm", "obsp", "varp", "layers", "uns")


def same(actual, expected, at=""):
    """Assert that the read content equals the written one; string types of numpy and pandas are equivalent."""
    if isinstance(expected, ad.AnnData):
        for part in PARTS:
            same(getattr(actual, part), getattr(expected, part), part)
    elif isinstance(expected, pd.DataFrame):
        pd.testing.assert_frame_equal(actual, expected, check_categorical=True)
    elif hasattr(expected, "keys"):
        assert set(actual.keys()) == set(expected.keys()), at
        for key in expected.keys():  # noqa: SIM118  (AxisArrays)
            same(actual[key], expected[key], f"{at}/{key}")
    elif sp.issparse(expected):
        assert actual.dtype == expected.dtype, at
        assert (abs(actual.astype(float) - expected.astype(float))).sum() == 0, at
        assert np.array_equal(actual.indptr, expected.indptr), at
    elif isinstance(expected, np.ndarray) and expected.dtype.kind not in "OUT":
        assert np.asarray(actual).dtype == expected.dtype, at
        np.testing.assert_array_equal(actual, expected, err_msg=at)
    elif isinstance(expected, np.ndarray | list | tuple):
        assert [str(one) for one in actual] == [str(one) for one in expected], at
    else:
        assert actual == expected or (actual != actual and expected != expected), (at, actual, expected)


@pytest.fixture
def odd_cells(cells):
    """Cells with groups whose names are paths, and nothing that AnnData itself changes as it writes."""
    names = np.array(["a/b", "a\\c", "..", "x y"], dtype=object)
    cells.obs["odd"] = pd.Categorical(names[np.arange(cells.n_obs) % 4])
    cells.obs["perturbation"] = pd.Categorical(cells.obs["perturbation"])
    return cells


@pytest.mark.fault("results through a file")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*TOGETHER, *MAKERS])
def test_what_is_written_is_read_back(odd_cells, model, tmp_path, name):
    calls = [CALLS[call] for call in TOGETHER.get(name, ())]
    for call in calls:
        call(odd_cells, model)
    adata = odd_cells if calls else MAKERS[name](odd_cells, model)
    adata.write_zarr(tmp_path / "cells.zarr")
    adata.write_h5ad(tmp_path / "cells.h5ad")
    for back in (ad.read_zarr(tmp_path / "cells.zarr"), ad.read_h5ad(tmp_path / "cells.h5ad")):
        same(back, adata)
    for call in calls:  # results that were read from a file may be replaced
        call(back, model)


BAD = {
    "": "it is empty",
    "a/b": "it holds a slash",
    "a\\b": "it holds a slash, a backslash",
    "..": "keep something of their own",
    "_index": "keep something of their own",
    "x" * 300: "300 bytes",
    "\ud800": "not valid Unicode",
    3: "must be text",
}


@pytest.mark.fault("a key that no file holds")
@pytest.mark.parametrize(
    ("call", "key"),
    # what a key may be is decided in one place, so that one call is asked about all of them
    [*(("tl.embed", key) for key in BAD), *((call, key) for call in KEYED if call != "tl.embed" for key in ("a/b", 3))],
)
def test_a_key_that_no_file_holds_is_refused(odd_cells, refused, call, key):
    model = "no model is loaded before the key is checked"
    refused(lambda a: CALLS[call](a, model, key_added=key), odd_cells, (ValueError, TypeError), BAD[key])


@pytest.mark.fault("a key of the user's own")
@pytest.mark.parametrize("call", CALLS)
def test_what_the_user_has_is_never_overwritten(odd_cells, model, refused, call):
    result = odd_cells.copy()
    CALLS[call](result, model)
    written = [
        (part, key) for part in PARTS for key in set(getattr(result, part)) - set(getattr(odd_cells, part)) - {"scdiva"}
    ]
    assert written
    for part, key in written:
        user_cells = odd_cells.copy()
        getattr(user_cells, part)[key] = getattr(result, part)[key]
        which = model if call == "tl.embed" else "no model is loaded before the key is checked"
        refused(
            lambda a, which=which: CALLS[call](a, which),
            user_cells,
            ValueError,
            "would be overwritten",
            f"del adata.{part}",
        )
    CALLS[call](result, model)  # its own it replaces


@pytest.mark.fault("one key for two calls")
def test_the_entry_of_another_call_stays(cells, model, refused):
    annotate(cells, model, key_added="mine")
    refused(lambda a: sd.tl.embed(a, model, key_added="mine"), cells, ValueError, "scdiva.tl.annotate", "another key")
    assert len(sd.get.annotation_df(cells, key="mine"))
    annotate(cells, model, key_added="mine")


SIDE = {
    "tl.annotate": ("obs", "mine_confidence"),
    "tl.grn, groups": ("varp", "mine_x y"),
    "tl.reconstruct": ("layers", "mine_rank"),
    "tl.impute": ("layers", "mine_sd"),
}
"""A key that a call writes beside that of its result."""


@pytest.mark.fault("one key for two calls")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SIDE)
def test_a_key_that_belongs_to_another_result_stays(odd_cells, model, refused, name):
    part, side = SIDE[name]
    call = CALLS[name]
    after, before = odd_cells.copy(), odd_cells.copy()
    call(after, model, key_added="mine")
    assert side in getattr(after, part)
    single = grn if name == "tl.grn, groups" else call  # of all cells, its key is that of a group
    patterns = rf"adata\.{part}\['{side}'\] belongs to the result 'mine'", "choose another key"
    refused(lambda a: single(a, model, key_added=side), after, ValueError, *patterns)
    call(after, model, key_added="mine")  # its own it replaces
    single(before, model, key_added=side)
    refused(lambda a: call(a, model, key_added="mine"), before, ValueError, f"belongs to the result '{side}'")
    single(before, model, key_added=side)


# --- concatenated datasets --------------------------------------------------------------------------------------------
@pytest.fixture
def parts(cells, model):
    reference = cells[:40].copy()
    queries = [cells[40:60].copy(), cells[60:].copy()]
    annotator = sd.tl.annotate(queries[0], "cell_type", reference, model=model, method="knn", rng=0)
    sd.tl.annotate(queries[1], model=annotator)
    return queries, pd.concat([sd.get.annotation_df(part) for part in queries], ignore_index=True)


@pytest.mark.fault("annotated cells put together")
@pytest.mark.parametrize("reader", ["get.annotation_df", "pl.reliability"])
def test_names_of_labels_lost_in_concat_are_said(parts, reader):
    together = ad.concat(parts[0])
    with pytest.raises(KeyError, match=r"anndata\.concat.*uns_merge='same'"):
        {"get.annotation_df": sd.get.annotation_df, "pl.reliability": sd.pl.reliability}[reader](together)


@pytest.mark.fault("annotated cells put together")
def test_names_of_labels_kept_in_concat(parts):
    together = ad.concat(parts[0], uns_merge="same")
    pd.testing.assert_frame_equal(sd.get.annotation_df(together), parts[1])


@pytest.mark.fault("a query of an integrated model")
@pytest.mark.parametrize("store", ["memory", "file", "folder"])
def test_a_query_stands_where_the_cells_do(cells, model, tmp_path, store):
    query = cells[60:].copy()
    fitted = sd.tl.integrate(cells, "batch", model=model, steps=2, rng=0)
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
