import warnings

import numpy as np
import pandas as pd
import pytest

from scdiva._constants import UNKNOWN
from scdiva.data.genes import gene_names, resolve_genes
from scdiva.tokenizer import Vocabulary


@pytest.fixture(scope="module")
def human():
    return Vocabulary.human()


def token(human, symbol):
    return int(human.tokens[list(human.symbols).index(symbol)])


def test_a_mixture_of_names(human):
    names = ["CD3E", "ENSG00000141510.4", "GNB2L1", "no such gene", "RACK1"]
    tokens, report = resolve_genes(names, human, [10, 5, 2, 1, 2])
    rack1 = token(human, "RACK1")
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [token(human, "CD3E"), token(human, "TP53"), rack1, UNKNOWN, rack1]
    assert report == {
        "n_genes": 5,
        "n_mapped": 4,
        "share_genes": 0.8,
        "share_counts": 0.95,
        "n_duplicates": 1,
        "vocabulary": human.fingerprint,
        "how": {"ensembl": 1, "symbol": 2, "previous": 1, "alias": 0, "unknown": 1},
    }


def test_duplicates_are_refused_by_name(human):
    names = ["RACK1", "CD3E", "GNB2L1", "SEPT7", "SEPTIN7"]
    with pytest.raises(
        ValueError, match=r"2 names .*'RACK1' and 'GNB2L1' \(RACK1\), 'SEPT7' and 'SEPTIN7' \(SEPTIN7\)"
    ):
        resolve_genes(names, human, np.ones(5), "error")
    resolve_genes(names[:2], human, np.ones(2), "error")
    with pytest.raises(ValueError, match="duplicates must be"):
        resolve_genes(names, human, np.ones(5), "first")


@pytest.mark.parametrize(("unknown", "outcome"), [(51, "error"), (50, "warning"), (21, "warning"), (20, "pass")])
def test_share_of_counts_decides(human, unknown, outcome):
    # Two of three names are unknown: only counts matter.
    names, counts = ["CD3E", "xyz1", "xyz2"], [100 - unknown, unknown - 1, 1]
    if outcome == "error":
        with pytest.raises(ValueError, match=r"only 49.0% of the counts .*\(1 of 3 names; .* 'xyz1', 'xyz2'\)"):
            resolve_genes(names, human, counts)
    elif outcome == "warning":
        with pytest.warns(UserWarning, match=rf"only {100 - unknown}.0% of the counts"):
            resolve_genes(names, human, counts)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resolve_genes(names, human, counts)


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        ([str(i) for i in range(20)], "The names are numbers: pass as gene_ids="),
        ([f"GENE{i}" for i in range(20)], "another column of adata.var"),
        ([f"ENSDARG{i:011d}" for i in range(20)], "another species"),
        ([f"ENST{i:011d}.2" for i in range(20)], "sum them to genes"),
        (["Gapdh", "Actb", "Cd3e", "mt-Co1"], "mouse .*'Cd3e'.* orthologs .* gene_ids="),
        ([f"ENSMUSG{i:011d}" for i in range(20)], "mouse"),
    ],
)
def test_wrong_names_are_told_what_to_do(human, names, advice):
    with pytest.raises(ValueError, match=advice):
        resolve_genes(names, human, np.ones(len(names)))


def test_unknown_names_stand_by_counts(human):
    with pytest.raises(ValueError, match=r"most counts: 'GENE7', 'GENE6', 'GENE5', 'GENE4', 'GENE3'\)"):
        resolve_genes([f"GENE{i}" for i in range(8)], human, np.arange(8))


def test_retired_ids_fall_back_on_the_symbol(human):
    names = ["ENSG00000141510", "ENSG00000161570", "", "ENSG00000161570"]
    tokens, report = resolve_genes(names, human, [9, 1, 1, 0], fallback=["CD3E", "CCL5", "ACTB", "nothing"])
    # a known id stands; a gene without an id was left out on purpose
    assert tokens.tolist() == [token(human, "TP53"), token(human, "CCL5"), UNKNOWN, UNKNOWN]
    assert report["how"] == {"ensembl": 1, "symbol": 1, "previous": 0, "alias": 0, "unknown": 2}


@pytest.mark.parametrize(
    ("names", "counts", "message"),
    [
        ([], [], "no genes to match"),
        (["CD3E"], [1, 2], r"1 gene names need counts_per_gene of shape \(1,\), got \(2,\)"),
        (["CD3E", "CD8A"], [0, 0], "holds no counts"),
        (["CD3E", "CD8A"], [1, np.nan], "non-finite"),
        (["CD3E", "CD8A"], [3, -1], "negative"),
    ],
)
def test_bad_arguments(human, names, counts, message):
    with pytest.raises(ValueError, match=message):
        resolve_genes(names, human, counts)


def test_gene_names():
    var = pd.DataFrame({"id": ["ENSG1", None], "mean": [1.0, 2.0]}, index=["A", "B"])
    assert gene_names(var) == (["A", "B"], None)
    assert gene_names(var, "id") == (["ENSG1", "None"], ["A", "B"])
    with pytest.raises(KeyError, match=r"no column 'ids'; columns that hold text: \['id'\]"):
        gene_names(var, "ids")
