"""Faults of gene names: what is not known is refused or left out, and what means the same gives the same."""

from __future__ import annotations

import numpy as np
import pytest

import scdiva as sd
from scdiva.tokenizer.vocabulary import load_vocabulary

CALLS = {
    "tl.embed": lambda a, m: sd.tl.embed(a, m, copy=True).obsm["X_scdiva"],
    "pp.entropy_serialize": lambda a, m: (
        sd.pp.entropy_serialize(a, vocabulary=m.vocabulary, copy=True).layers["scdiva_rank"].toarray()
    ),
}
"""Calls that give something of each cell."""


@pytest.fixture(params=list(CALLS))
def result(request, model):
    return lambda adata: CALLS[request.param](adata, model)


def ensembl(adata):
    return adata.var["ensembl_id"].astype(str).to_numpy()


def mixed(adata):
    return np.where(np.arange(adata.n_vars) % 2, ensembl(adata), adata.var_names)


def versioned(adata):
    return [f"{name}.{i % 17 + 1}" for i, name in enumerate(ensembl(adata))]


def versioned_in_part(adata):
    return np.where(np.arange(adata.n_vars) % 3, versioned(adata), adata.var_names)


def spaced(adata):
    return [f" {name} " for name in adata.var_names]


NAMES = [
    *(pytest.param(rename, marks=pytest.mark.fault("mixed names")) for rename in (ensembl, mixed, spaced)),
    *(pytest.param(rename, marks=pytest.mark.fault("versioned genes")) for rename in (versioned, versioned_in_part)),
]


@pytest.mark.parametrize("rename", NAMES)
def test_other_names_of_the_same_genes_change_no_bit(cells, drawn, result, rename):
    cells.var_names = rename(cells)
    assert np.array_equal(result(cells), result(drawn))


@pytest.mark.fault("renamed genes")
@pytest.mark.parametrize("column", ["previous", "alias"])
def test_a_former_name_means_its_gene(column):
    """Every tenth gene that has one, by that name."""
    table = load_vocabulary("human").table
    rows = table[(table[column] != "") & (table["biotype"] == "protein_coding")].iloc[::10]
    former = [names.split("|")[0] for names in rows[column]]
    found = load_vocabulary("human").match(former)
    how = np.asarray(found.how, dtype=object)
    assert (how == column).sum() > 100
    assert np.array_equal(found.tokens[how == column], rows.index.to_numpy()[how == column])
    # what is not found so is another gene's current name, or the former name of several
    assert set(how) <= {"symbol", "previous", "alias", "unknown", "ensembl"}


# --- several columns of one gene --------------------------------------------------------------------------------------
def halves(drawn):
    """Cells with each count in one of two columns of its gene."""
    import anndata as ad
    import scipy.sparse as sp

    x = drawn.X.toarray()
    first = np.floor(x / 3)
    twice = ad.AnnData(sp.csr_matrix(np.hstack([first, x - first])), obs=drawn.obs.copy())
    return twice


@pytest.mark.fault("duplicate genes")
@pytest.mark.parametrize("second", ["the same", "Ensembl", "numbered"])
def test_columns_of_one_gene_are_summed(drawn, model, second):
    twice = halves(drawn)
    again = {"the same": drawn.var_names, "Ensembl": ensembl(drawn), "numbered": [f"{n}.1" for n in drawn.var_names]}
    twice.var_names = [*drawn.var_names, *again[second]]
    sd.tl.embed(twice, model)
    assert np.array_equal(twice.obsm["X_scdiva"], CALLS["tl.embed"](drawn, model))


# --- genes without a name, or a foreign one ---------------------------------------------------------------------------
@pytest.mark.fault("blank genes")
@pytest.mark.parametrize("name", ["", "nan"])
def test_a_gene_without_a_name_is_an_unknown_gene(drawn, model, name):
    found = []
    for label in (name, "no gene at all"):
        names = np.array(drawn.var_names, dtype=object)
        names[[4, 9]] = label
        blank = drawn.copy()
        blank.var_names = names
        found.append(CALLS["tl.embed"](blank, model))
    assert np.array_equal(*found)
    assert not np.array_equal(found[0], CALLS["tl.embed"](drawn, model))


MOUSE = ["Actb", "Gapdh", "Cd3e", "Cd4", "Cd8a", "Ms4a1", "Lyz2", "Nkg7", "Ptprc", "Malat1", "Xist", "Gm12345"]
FOREIGN = {
    "mouse": ([*MOUSE, *(f"Gm{i}" for i in range(100, 148))], "mouse", "orthologs", "gene_ids="),
    "mouse ids": ([f"ENSMUSG{i:011d}" for i in range(60)], "another species|mouse", "orthologs"),
    "made up": ([f"gene_{i}" for i in range(60)], "0 of 60 names|share 0 genes", "'gene_", "gene_ids="),
    "numbers": ([str(i) for i in range(60)], "names are numbers", "gene_ids="),
    "transcripts": ([f"ENST{i:011d}" for i in range(60)], "transcripts", "Sum|sum"),
    "peaks": (
        [f"chr1:{i}00-{i}50" for i in range(1, 61)],
        "0 of 60 names|share 0 genes",
        "intervals of the genome",
        "RNA counts",
    ),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(k, marks=pytest.mark.fault("mouse genes" if k.startswith("mouse") else "no overlap"))
        for k in FOREIGN
    ],
)
def test_foreign_genes_are_refused_everywhere(cells, enter, refused, kind):
    names, *said = FOREIGN[kind]
    cells.var_names = names
    refused(enter, cells, ValueError, "unknown|mouse|share 0 genes", *(said if "share" not in said else ()))


@pytest.mark.fault("reordered columns")
def test_the_order_of_columns_changes_no_bit(drawn, result):
    order = np.random.default_rng(0).permutation(drawn.n_vars)
    found, expected = result(drawn[:, order].copy()), result(drawn)
    assert np.array_equal(found, expected[:, order] if expected.shape[1:] == (drawn.n_vars,) else expected)
