"""Faults of gene names: what is not known is refused or left out, and what means the same gives the same."""

from __future__ import annotations

from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

import scdiva as sd

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


# --- several columns of one gene --------------------------------------------------------------------------------------
def halves(drawn):
    """Cells with each count in one of two columns of its gene."""
    x = drawn.X.toarray()
    first = np.floor(x / 3)
    return ad.AnnData(sp.csr_matrix(np.hstack([first, x - first])), obs=drawn.obs.copy())


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
    embeddings = []
    for label in (name, "no gene at all"):
        names = np.array(drawn.var_names, dtype=object)
        names[[4, 9]] = label
        blank = drawn.copy()
        blank.var_names = names
        embeddings.append(CALLS["tl.embed"](blank, model))
    assert np.array_equal(*embeddings)
    assert not np.array_equal(embeddings[0], CALLS["tl.embed"](drawn, model))


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
    names, *patterns = FOREIGN[kind]
    cells.var_names = names
    refused(enter, cells, ValueError, "unknown|mouse|share 0 genes", *(patterns if "share" not in patterns else ()))


@pytest.mark.fault("reordered columns")
def test_the_order_of_columns_changes_no_bit(drawn, result):
    order = np.random.default_rng(0).permutation(drawn.n_vars)
    actual, expected = result(drawn[:, order].copy()), result(drawn)
    assert np.array_equal(actual, expected[:, order] if expected.shape[1:] == (drawn.n_vars,) else expected)


# --- few genes -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def bundled():
    """The model that a call without one loads, half a second each time."""
    return sd.models.load_model(device="cpu")


@pytest.fixture(scope="module")
def panel(bundled):
    """Cells with 500 of the genes that the bundled model knows, and with all of them in raw."""
    vocabulary = bundled.vocabulary
    rng = np.random.default_rng(0)
    rows = np.sort(rng.permutation(vocabulary.n_genes)[:15_000])
    x = sp.random(30, 15_000, density=0.1, format="csr", random_state=0, data_rvs=lambda n: rng.poisson(1, n) + 1.0)
    all_genes = ad.AnnData(x.astype(np.float32))
    all_genes.var_names, all_genes.obs_names = vocabulary.symbols[rows], [f"cell{i}" for i in range(30)]
    all_genes.obs["batch"] = ["one", "two"] * 15
    subset = all_genes[:, :500].copy()
    subset.raw = all_genes
    return subset


FEW = {
    "tl.embed": lambda a, m: sd.tl.embed(a, m, empty="nan"),
    "tl.gene_embedding": lambda a, m: sd.tl.gene_embedding(a, m),
    "tl.integrate": lambda a, m: sd.tl.integrate(a, "batch", model=m, steps=1, rng=0, device="cpu"),
    "tl.impute": lambda a, m: sd.tl.impute(a, model=m, rng=0),
    "tl.generate": lambda a, m: sd.tl.generate(a, 2, m, rng=0),
}


@pytest.mark.fault("few genes")
@pytest.mark.parametrize("name", FEW)
def test_few_genes_are_warned_of(panel, bundled, name):
    message = r"the data have 500 of the 19,623 genes that the model knows, \d% of them by entropy: .* about 0\.\d"
    with pytest.warns(UserWarning, match=message) as caught:
        FEW[name](panel.copy(), bundled)
    matching = [one for one in caught if "genes that the model knows" in str(one.message)]
    # the line that called: shown there once
    assert {Path(one.filename).name for one in matching} == {Path(__file__).name}
    assert len({str(one.message) for one in matching}) == 1
