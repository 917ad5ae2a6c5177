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
        (None, {"gene_ids": "nothing"}, KeyError, "no column 'nothing'"),
        (None, {"layer": "nothing"}, KeyError, "nothing"),
        (None, {"use_raw": True}, ValueError, "adata has no raw"),
        (None, {"vocabulary": "no model"}, FileNotFoundError, "no vocabulary 'no model'"),
    ],
)
def test_a_failed_call_leaves_adata_as_it_was(adata, hashed, spoil, arguments, error, message):
    if spoil:
        adata.var.index = spoil(adata)
    before = hashed(adata)
    with pytest.raises(error, match=message):
        match_genes(adata, **arguments)
    assert hashed(adata) == before
