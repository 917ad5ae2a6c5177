import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

from scdiva import datasets
from scdiva.pp import match_genes
from scdiva.tokenizer import Vocabulary


@pytest.fixture
def adata():
    return datasets.toy(n_cells=30, n_genes=60)


@pytest.fixture
def human():
    return Vocabulary.human()


def everything(adata):
    """All that a failed call must leave alone."""
    return {
        "X": adata.X.toarray().copy(),
        "var": adata.var.copy(),
        "obs": adata.obs.copy(),
        "uns": sorted(adata.uns),
    }


def test_writes_tokens_and_report(adata, human):
    assert match_genes(adata) is None
    token = adata.var["scdiva_token"]
    assert token.dtype == np.int32
    assert human.symbols[token - 3].tolist() == adata.var_names.tolist()
    report = adata.uns["scdiva"]["match"]
    assert report["share_counts"] == 1.0
    assert report["vocabulary"] == human.fingerprint
    assert report["params"] == {
        "vocabulary": "human",
        "gene_ids": "",
        "species": "",
        "duplicates": "sum",
        "layer": "",
        "use_raw": False,
    }


def test_ids_give_the_same_tokens(adata):
    match_genes(adata)
    by_symbol = adata.var["scdiva_token"].to_numpy(copy=True)
    adata.var["id"] = [f"{gene}.7" for gene in adata.var["ensembl_id"]]
    adata.var_names = [f"gene{i}" for i in range(adata.n_vars)]
    match_genes(adata, gene_ids="id")
    np.testing.assert_array_equal(adata.var["scdiva_token"], by_symbol)
    assert adata.uns["scdiva"]["match"]["how"]["ensembl"] == adata.n_vars


def test_survives_h5ad(adata, tmp_path):
    match_genes(adata)
    adata.write_h5ad(tmp_path / "a.h5ad")
    again = ad.read_h5ad(tmp_path / "a.h5ad")
    assert again.uns["scdiva"]["match"] == adata.uns["scdiva"]["match"]
    np.testing.assert_array_equal(again.var["scdiva_token"], adata.var["scdiva_token"])


def test_copy_leaves_the_original_alone(adata):
    adata.uns["scdiva"] = {"other": 1}
    before = everything(adata)
    copy = match_genes(adata, copy=True)
    assert sorted(copy.uns["scdiva"]) == ["match", "other", "written"]
    assert sorted(adata.uns["scdiva"]) == ["other"]
    assert "scdiva_token" not in adata.var
    assert everything(adata)["uns"] == before["uns"]


def test_shares_are_of_counts_also_for_logarithms(adata):
    adata.var_names = [name if i < 50 else f"xyz{i}" for i, name in enumerate(adata.var_names)]
    counts = adata.X.copy()
    expected = counts[:, :50].sum() / counts.sum()
    match_genes(adata)
    assert adata.uns["scdiva"]["match"]["share_counts"] == pytest.approx(expected)
    scaled = sp.csr_matrix(counts.multiply(100 / counts.sum(axis=1)))
    adata.layers["lognorm"] = scaled.log1p()
    match_genes(adata, layer="lognorm")
    expected = scaled[:, :50].sum() / scaled.sum()
    assert adata.uns["scdiva"]["match"]["share_counts"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["csc", "dense", "view", "backed"])
def test_storage_does_not_matter(adata, tmp_path, kind):
    expected = match_genes(adata, copy=True).uns["scdiva"]["match"]
    if kind == "backed":
        adata.write_h5ad(tmp_path / "a.h5ad")
        adata = ad.read_h5ad(tmp_path / "a.h5ad", backed="r")
    elif kind == "view":
        wide = ad.concat([adata, adata])
        adata = wide[: adata.n_obs]
    else:
        adata.X = adata.X.tocsc() if kind == "csc" else adata.X.toarray()
    match_genes(adata)
    assert adata.uns["scdiva"]["match"] == expected


def test_raw_has_genes_of_its_own(adata, human):
    match_genes(adata)
    expected = adata.var["scdiva_token"].copy()
    full = adata.copy()
    part = adata[:, [5, 3, 8]].copy()
    part.raw = full
    part.X = part.X.toarray() - 3.0  # scaled: can't be read
    match_genes(part, use_raw=True)
    assert part.uns["scdiva"]["match"]["n_genes"] == 60
    assert part.var["scdiva_token"].tolist() == expected.iloc[[5, 3, 8]].tolist()


@pytest.mark.parametrize(
    ("spoil", "arguments", "error", "message"),
    [
        (lambda a: [f"Gm{i}" for i in range(a.n_vars)], {}, ValueError, "mouse"),
        (lambda a: [f"GENE{i}" for i in range(a.n_vars)], {}, ValueError, "'GENE"),
        (lambda a: [a.var_names[0]] * 2 + list(a.var_names[2:]), {"duplicates": "error"}, ValueError, "1 names mean"),
        (lambda a: a.var_names, {"gene_ids": "nothing"}, KeyError, "no column 'nothing'"),
        (lambda a: a.var_names, {"layer": "nothing"}, KeyError, "nothing"),
        (lambda a: a.var_names, {"use_raw": True}, ValueError, "adata has no raw"),
        (lambda a: a.var_names, {"vocabulary": "no model"}, FileNotFoundError, "no vocabulary 'no model'"),
    ],
)
def test_a_failed_call_leaves_adata_as_it_was(adata, spoil, arguments, error, message):
    adata.var.index = spoil(adata)
    before = everything(adata)
    with pytest.raises(error, match=message):
        match_genes(adata, **arguments)
    after = everything(adata)
    np.testing.assert_array_equal(after["X"], before["X"])
    assert after["var"].equals(before["var"])
    assert after["obs"].equals(before["obs"])
    assert after["uns"] == before["uns"]


def test_scaled_matrices_are_refused(adata):
    adata.X = adata.X.toarray() - 1.0
    with pytest.raises(ValueError, match="negative"):
        match_genes(adata)
