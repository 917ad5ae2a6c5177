"""`pp.match_genes` sets how genes are read by the calls after it, on the object and its copies, subsets and files."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest

import scdiva as sd
from scdiva.data.genes import InputOptions, input_options

pytestmark = pytest.mark.filterwarnings("ignore:(these are genes|the data have)")

N_GENES = 80


@pytest.fixture(scope="module")
def human():
    """Embedded cells with symbols as names; expression is the same in all tests."""
    adata = sd.datasets.toy(40, N_GENES)
    sd.tl.embed(adata)
    return adata


@pytest.fixture
def renamed():
    """The same cells with names of their own, and the symbols in a column."""
    adata = sd.datasets.toy(40, N_GENES)
    adata.var["symbol"] = adata.var_names.to_numpy()
    adata.var_names = [f"own/{i}" for i in range(N_GENES)]
    return adata


def embedding(adata):
    sd.tl.embed(adata)
    return adata.obsm["X_scdiva"]


def table_of(adata):
    """A table of the genes of `adata`, and of one that was not measured."""
    return dict(zip(adata.var_names, adata.var["symbol"], strict=True)) | {"elsewhere": "KLF1", "lost": ""}


SETTINGS = {
    "column": lambda adata: {"gene_ids": "symbol"},
    "column and species": lambda adata: {"gene_ids": "symbol", "species": "human", "duplicates": "error"},
    "dict": lambda adata: {"species": table_of(adata)},
    "Series": lambda adata: {"species": pd.Series(table_of(adata))},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_later_calls_read_the_genes_so(human, renamed, name, tmp_path):
    settings = SETTINGS[name](renamed)
    with pytest.raises(ValueError, match=r"sd\.pp\.match_genes\(adata"):
        sd.tl.embed(renamed)
    sd.pp.match_genes(renamed, **settings)
    expected = InputOptions("counts", True, "lognorm", **settings, empty="nan")
    renamed.write_h5ad(tmp_path / "cells.h5ad")
    from_file = ad.read_h5ad(tmp_path / "cells.h5ad")
    for adata in (renamed, renamed.copy(), renamed[::-1], from_file):
        assert input_options(adata, "counts", True, "lognorm", "nan") == expected
    np.testing.assert_array_equal(embedding(from_file), human.obsm["X_scdiva"])
    np.testing.assert_array_equal(embedding(renamed[:, ::-1].copy()), human.obsm["X_scdiva"])
    subset, same = renamed[:, :70].copy(), human[:, :70].copy()
    np.testing.assert_array_equal(embedding(subset), embedding(same))
    again = sd.pp.match_genes(human, copy=True)
    assert input_options(again, None, False, "auto") == InputOptions()


@pytest.mark.parametrize("name", ["column", "dict"])
def test_genes_of_raw_are_read_so(human, renamed, name):
    full = renamed.copy()
    renamed = renamed[:, :30].copy()
    renamed.raw = full
    sd.pp.match_genes(renamed, use_raw=True, **SETTINGS[name](full))
    sd.tl.embed(renamed, use_raw=True)
    np.testing.assert_array_equal(renamed.obsm["X_scdiva"], human.obsm["X_scdiva"])
    assert renamed.uns["scdiva"]["X_scdiva"]["use_raw"]


def test_mouse_is_read_so():
    mouse = sd.datasets.toy(40, N_GENES)
    mouse.var_names = mouse.var_names.str.capitalize()
    inferred = mouse.copy()
    with pytest.warns(UserWarning, match="mouse genes"):
        sd.pp.match_genes(mouse, species="mouse")
    with pytest.warns(UserWarning, match="mouse genes"):
        np.testing.assert_array_equal(embedding(mouse), embedding(inferred))
    noted = [adata.uns["scdiva"]["X_scdiva"]["species"] for adata in (mouse, inferred)]
    assert noted == ["mouse", ""]


def test_a_second_column_of_a_gene_is_an_error_if_set(human):
    """Also if it is there only after `match_genes`."""
    adata = human.copy()
    sd.pp.match_genes(adata, duplicates="error")
    sd.tl.embed(adata)
    names = adata.var_names.to_list()
    adata.var_names = [adata.var["ensembl_id"].iloc[1], *names[1:]]
    for call, model in ((sd.tl.embed, sd.models.load()), (sd.pp.gene_entropy, "human")):
        with pytest.raises(ValueError, match=r"already.*sd\.pp\.match_genes\(adata, duplicates=\"sum\"\)"):
            call(adata, model)
    sd.pp.match_genes(adata)
    sd.tl.embed(adata)


def test_a_reference_is_read_by_its_own_settings(human, renamed):
    expected, query, key = human.copy(), human.copy(), "scdiva_label_probability"
    sd.tl.annotate(expected, "cell_type", human, rng=0)
    sd.pp.match_genes(renamed, gene_ids="symbol")
    for cells, reference in ((query, renamed), (renamed, human)):
        sd.tl.annotate(cells, "cell_type", reference, rng=0)
        np.testing.assert_array_equal(cells.obsm[key], expected.obsm[key])
    renamed.var["symbols"] = renamed.var.pop("symbol")
    with pytest.raises(KeyError, match=r"reference\.var has no column 'symbol'.*match_genes\(reference, gene_ids"):
        sd.tl.annotate(query, "cell_type", renamed)
    with pytest.raises(KeyError, match=r"no column 'symbol' \(did you mean 'symbols'\?\).*sd\.pp\.match_genes\(adata"):
        sd.tl.embed(renamed)


GOOD = {"gene_ids": "", "species": "", "duplicates": "sum"}


@pytest.mark.parametrize(
    "match",
    [
        3,
        {},
        {"params": "x"},
        *({"params": params} for params in ({"gene_ids": "", "species": ""}, GOOD | {"species": "dog"})),
        *({"params": GOOD | {name: value}} for name, value in (("duplicates", np.array(["a"])), ("gene_ids", ["a"]))),
        {"params": GOOD | {"species": "table"}},
        {"params": GOOD | {"species": "table"}, "orthologs": {"gene": ["a"], "human_gene": []}},
    ],
)
def test_a_damaged_record_is_refused_and_replaced(human, match):
    adata = human.copy()
    adata.uns["scdiva"] = {"match": match}
    with pytest.raises(ValueError, match=r"'match'\] is damaged .*sd\.pp\.match_genes\(adata"):
        sd.tl.embed(adata)
    sd.pp.match_genes(adata)
    assert input_options(adata, None, False, "auto") == InputOptions()


@pytest.mark.parametrize("name", ["gene_ids", "species", "duplicates"])
def test_calls_name_the_function_that_has_the_argument(human, name):
    for call in (sd.tl.embed, sd.tl.annotate, sd.tl.predict_perturbation, sd.pp.gene_entropy):
        with pytest.raises(TypeError, match=rf"{name}.*sd\.pp\.match_genes\(adata, {name}=\.\.\.\)"):
            call(human, **{name: "x"})
