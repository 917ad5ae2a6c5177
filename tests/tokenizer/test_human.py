"""The bundled vocabulary against facts about human genes."""

import numpy as np
import pytest

from scdiva._constants import N_SPECIAL, UNKNOWN
from scdiva.tokenizer import Vocabulary


@pytest.fixture(scope="module")
def human():
    return Vocabulary.human()


def test_each_gene_is_found_by_id_and_symbol(human):
    np.testing.assert_array_equal(human.match(human.ensembl_ids).tokens, human.tokens)
    np.testing.assert_array_equal(human.match(human.symbols).tokens, human.tokens)


def test_mitochondrial_genes(human):
    coding = "ND1 ND2 CO1 CO2 ATP8 ATP6 CO3 ND3 ND4L ND4 ND5 ND6 CYB RNR1 RNR2"
    assert (human.match([f"MT-{name}" for name in coding.split()]).tokens != UNKNOWN).all()
    assert sum(symbol.startswith("MT-T") for symbol in human.symbols) == 22
    assert human.match(["MT-COX1"]).tokens == human.match(["MT-CO1"]).tokens


def test_names_of_known_genes(human):
    expected = {
        ("ensembl", "TP53"): "ENSG00000141510.18", ("symbol", "CD3E"): "CD3E", ("symbol", "HLA-DRA"): "HLA.DRA",
        ("previous", "RACK1"): "GNB2L1", ("previous", "SEPTIN7"): "Sep-07", ("symbol", "C12orf57"): "C12ORF57",
        ("previous", "MARCHF1"): "MARCH1", ("previous", "MS4A1"): "CD20", ("alias", "NCAM1"): "CD56",
        ("alias", "TAZ"): "TAFAZZIN",  # GENCODE's symbol, newer than HGNC's table
        ("alias", "SOD2"): "ENSG00000112096",  # its retired id
    }  # fmt: skip
    for (how, symbol), name in expected.items():
        match = human.match([name])
        assert (match.how.tolist(), human.symbols[match.tokens[0] - N_SPECIAL]) == ([how], symbol)


@pytest.mark.parametrize("name", ["Mar-01", "QARS", "STRA13", "MUM1", "Gapdh", "ERCC-00074", "GENE123", "RNU6-82P"])
def test_names_that_mean_no_or_two_genes(human, name):
    assert human.match([name]).tokens.tolist() == [UNKNOWN]


def test_entropies_tell_rare_genes_from_common_ones(human):
    has_entropy = human.table["entropy"].notna()
    assert has_entropy.sum() > 30_000
    assert has_entropy[human.table["biotype"] == "protein_coding"].mean() > 0.95
    by_symbol = dict(zip(human.symbols, human.table["entropy"], strict=True))
    assert all(by_symbol[gene] > 1 for gene in ("ACTB", "MALAT1", "RPLP0", "MT-CO1"))
    assert all(by_symbol[gene] < 0.5 for gene in ("INS", "FOXP3", "PAX6", "IL17A"))
