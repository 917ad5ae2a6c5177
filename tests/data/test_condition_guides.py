"""Labels that name guides: which gene each is of, and what is said of those that nobody spoke of."""

from __future__ import annotations

import warnings

import pytest

from scdiva.data.conditions import Naming, genes_among, genes_of_guides, match_perturbed, read_guides, species_of
from scdiva.tokenizer.vocabulary import load_vocabulary


@pytest.fixture(scope="module")
def human():
    return load_vocabulary("human")


def read(labels, guides, human, control="ctrl", separator="+"):
    return read_guides([*labels, control], guides, genes_among(human), Naming((control,), separator), key="guide")


@pytest.mark.parametrize(
    ("label", "gene"),
    [
        ("KLF1g1", "KLF1"),
        ("KLF1_2", "KLF1"),
        ("KLF1-1", "KLF1"),
        ("KLF1.1", "KLF1"),
        ("sgKLF1-1", "KLF1"),
        ("sgKLF1", "KLF1"),
        ("KLF1_g2", "KLF1"),
        ("KLF1_sgRNA_3", "KLF1"),
        ("g1-KLF1", "KLF1"),
        ("guide1_KLF1", "KLF1"),
        ("shKLF1#2", "KLF1"),
        ("1_KLF1", "KLF1"),
        ("KLF1_KO", "KLF1"),
        ("KLF1_GGCGAGGTCGCCGCCGCACG", "KLF1"),
        ("KLF1_+_12997982.23-P1P2", "KLF1"),
        ("KLF1_pDS258", "KLF1"),
        ("klf1", "KLF1"),
        ("Klf1", "KLF1"),
        ("klf1_2", "KLF1"),
        ("tp53", "TP53"),
        ("h2ax", "H2AX"),
        ("NKX2-1g1", "NKX2-1"),
        ("NKX2-1-2", "NKX2-1"),
        ("HLA-A_1", "HLA-A"),
        ("ENSG00000105610_1", "ENSG00000105610"),
        ("KLF1g1+GATA1g2", "KLF1+GATA1"),
        ("KLF1+GATA1_2", "KLF1+GATA1"),
        ("KLF1g1+ctrl", "KLF1+ctrl"),
        ("ctrl_3", "ctrl"),
    ],
)
def test_the_gene_of_a_guide(human, label, gene):
    """Whichever other labels stand beside it."""
    for beside in ([], ["KLF1"], ["KLF1", "NKX2-1", "KLF1-1", "GATA1"]):
        assert genes_of_guides([label, *beside], genes_among(human), Naming(("ctrl",)))[label] == gene


@pytest.mark.parametrize(
    "label",
    [
        "KLF1",
        "NKX2-1",
        "HLA-A",
        "TRAV1-2",
        "MT-ND1",
        "IL-2",
        "KLF1+GATA1",
        "ctrl",
        "drug",
        "drug_1",
        "IFN-beta",
        "B_1",
        "IFNb",
        "TNFa",
        "AMG-900",
    ],
)
def test_genes_and_labels_of_something_else_are_no_guides(human, label):
    assert genes_of_guides([label, "KLF1", "NKX2"], genes_among(human), Naming(("ctrl",))) == {}


MOUSE = ["Klf1", "Gata1", "Cd8b1", "Ccl3", "H2-K1", "Gapdh", "mt-Co1", "Lyz2", "Actb"]


def test_genes_of_a_mouse_are_known_where_the_data_have_a_mouses(human):
    assert (species_of(MOUSE, human, None), species_of(["KLF1", "GATA1"], human, None)) == ("mouse", None)
    assert species_of(["KLF1"], human, "mouse") == "mouse"
    known = genes_among(human, "mouse")
    assert known(["Klf1", "Cd8b1", "KLF1", "drug"]) == {"Klf1", "Cd8b1", "KLF1"}
    found = genes_of_guides(["Klf1_2", "sgCd8b1-1", "Klf1", "drug_1"], known, Naming(("ctrl",)))
    assert found == {"Klf1_2": "Klf1", "sgCd8b1-1": "Cd8b1"}
    table = {"own1": "KLF1", "own2": "GATA1"}
    assert genes_among(human, table)(["own1", "GATA1", "own3"]) == {"own1", "GATA1"}
    tokens, how = match_perturbed(["Klf1", "KLF1", "drug"], human, "mouse")
    assert tokens[0] == tokens[1] > 0 > tokens[2]
    assert how.tolist() == ["ortholog", "symbol", "unknown"]


def test_where_the_separator_stands_before_numbers_too(human):
    labels = ["KLF1_2", "GATA1_1", "KLF1_GATA1", "KLF1_1_GATA1_2"]
    found = genes_of_guides(labels, genes_among(human), Naming(("ctrl",), "_"))
    assert found == {"KLF1_2": "KLF1", "GATA1_1": "GATA1", "KLF1_1_GATA1_2": "KLF1_GATA1"}


def test_a_mapping_is_followed_and_may_name_parts_combinations_and_the_control(human):
    given = {"a": "KLF1", "pair": "KLF1+GATA1", "NTC_1": "ctrl"}
    found = read(["a", "pair", "NTC_1", "a+GATA1", "TAL1"], given, human)
    assert found == {"a": "KLF1", "pair": "KLF1+GATA1", "NTC_1": "ctrl", "a+GATA1": "KLF1+GATA1"}


def test_what_most_labels_are_has_to_be_said(human):
    labels = ["KLF1g1", "KLF1g2", "GATA1g1", "TAL1g1", "drug"]
    said = r"4 of 5 .*adata.obs\['guide'\] .*guides='auto'"
    with pytest.raises(ValueError, match=said) as caught:
        read(labels, None, human)
    assert "guides={'GATA1g1': 'GATA1', 'KLF1g1': 'KLF1', 'KLF1g2': 'KLF1', ...}" in str(caught.value)
    assert read(labels, "auto", human) == {"KLF1g1": "KLF1", "KLF1g2": "KLF1", "GATA1g1": "GATA1", "TAL1g1": "TAL1"}
    assert read(labels, {}, human) == {}
    with pytest.raises(ValueError, match=r"3 of 4 .*guides=\{\*\*guides, 'GATA1g1'"):
        read(labels, {"KLF1g1": "KLF1"}, human)


def test_a_few_are_told(human):
    with pytest.warns(UserWarning, match=r"1 of 3 .*Pass guides='auto'.*'TAL1g1': 'TAL1'") as caught:
        assert read(["KLF1", "GATA1", "TAL1g1"], None, human) == {}
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(["KLF1", "GATA1", "drug", "TAL1+KLF1"], None, human)


def test_one_label_alone_is_told_and_not_refused(human):
    with pytest.warns(UserWarning, match="1 of 1 perturbations .*'rest': 'REST'"):
        assert read(["rest"], None, human) == {}


def test_guides_of_the_control_have_to_be_said_where_there_is_no_other(human):
    with pytest.raises(ValueError, match=r"2 of 5 .*'NTC_1': 'NTC'"):
        read_guides(
            ["KLF1", "GATA1", "TAL1", "NTC_1", "NTC_2"], None, genes_among(human), Naming(("NTC",)), key="guide"
        )


@pytest.mark.parametrize("joint", ["_", "|", ",", "/", "-", ":"])
def test_another_separator_is_noticed(human, joint):
    pairs = [f"KLF1{joint}GATA1", f"KLF1{joint}ctrl", f"sgTAL1{joint}sgKLF1"]
    with pytest.raises(ValueError, match=f"3 of 3 .*'KLF1[{joint}]GATA1'.* pass separator='[{joint}]'"):
        read(pairs, None, human)
    with pytest.warns(UserWarning, match="1 of 4 perturbations .* are several genes"):
        read([pairs[0], "KLF1", "GATA1", "TAL1"], None, human)
    assert read(pairs, {}, human) == {}
    assert read(pairs[:2], None, human, separator=joint) == {}
    assert read(["HLA-A", "NKX2-1", "IFN-beta"], None, human) == {}


@pytest.mark.parametrize("guides", ["all", 3, ["KLF1g1"]])
def test_what_is_no_mapping_is_refused(human, guides):
    with pytest.raises(ValueError, match="guides must be 'auto'"):
        read(["KLF1g1"], guides, human)


def test_a_mapping_of_other_labels_is_refused(human):
    with pytest.raises(ValueError, match=r"none of 1 guides .*'x'.*adata.obs\['guide'\]"):
        read(["KLF1g1"], {"x": "KLF1"}, human)
    with pytest.raises(ValueError, match="empty part"):
        read(["KLF1g1"], {"KLF1g1": ""}, human)
