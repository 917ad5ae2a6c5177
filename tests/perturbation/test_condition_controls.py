"""Several control labels, and gene names that contain the separator."""

from __future__ import annotations

import re

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scdiva.perturbation.conditions import ScreenDesign, is_control_like, read_perturbations
from scdiva.tokenizer.vocabulary import load_vocabulary

GENES = ["KLF1", "GATA1", "TAL1", "HLA-DRA", "RP11-34P13.7"]


@pytest.fixture(scope="module")
def human():
    return load_vocabulary("human")


@pytest.fixture
def read(human):
    def read_labels(labels, control="control", separator="+", guides=None):
        obs = pd.DataFrame({"p": list(labels)}, index=[f"c{i}" for i in range(len(labels))])
        adata = ad.AnnData(np.zeros((len(labels), len(GENES)), np.float32), obs=obs, var=pd.DataFrame(index=GENES))
        return read_perturbations(adata, ScreenDesign.of("p", control, separator=separator), guides, human)

    return read_labels


@pytest.mark.parametrize(
    "label",
    ["NT1", "NT", "ntc_3", "sgNTC-1", "NT-gRNA-2", "non-targeting", "non-targeting_00013", "nontargeting", "no-target",
     "NonTargetingControlGuideForHuman_0001", "safe-targeting", "safe_harbor_2", "neg_ctrl", "NegCtrl0", "scramble",
     "negative_control_3", "INTERGENIC216151", "ONE_INTERGENIC_SITE_9", "unperturbed", "ctrl", "Control", "CTRL0001",
     "3x_neg_ctrl", "control_guide_3", "shSCR", "non_targeting_GGCGAGGTCGCCGCCGCACG", "NTC_B", "NT-A",
     "ctrl_A", "Neg_1", "NegCon", "SCR_1", "scr", "scram", "siNC", "NC_1", "no-guide", "No_gRNA", "non-cutting",
     "nonspecific_1", "inert", "CHR1_INTERGENIC_2", "non-targeting_rna-2", "Scrambled_siRNA", "Control (DMSO)"],
)  # fmt: skip
def test_labels_of_negative_controls(label):
    assert is_control_like(label)


def test_genes_and_other_labels_are_not_controls(human):
    assert [name for name in human.symbols if is_control_like(name)] == ["CTRL"]
    others = (
        "NC_000001 NTN1 SCRIB CTLA4 stim IFN-beta chr3.5275_top_two none_of_subset target neg Control_6h control+KLF1"
    )
    assert [name for name in others.split() if is_control_like(name)] == []


@pytest.mark.parametrize("guides", [None, {"x": "TAL1"}])
def test_controls_that_are_not_named_are_refused_with_the_call_that_names_them(read, guides):
    labels = ["control", "NT1", "KLF1", "safe-targeting", "NT1+GATA1", "x"]
    named = r"2 of \d .*\(first: 'NT1'\).*control=\['control', 'NT1', 'safe-targeting'\]"
    with pytest.raises(ValueError, match=named):
        read(labels, guides=guides)
    found = read(labels, ["control", "NT1", "safe-targeting"], guides=guides)
    last = ("TAL1",) if isinstance(guides, dict) else ("x",)
    assert sorted(found.parts) == sorted([(), ("GATA1",), ("KLF1",), last])
    assert found.is_control.tolist() == [True, True, False, True, False, False]


def test_no_gene_symbol_is_refused_as_a_control(read, human):
    with pytest.warns(UserWarning, match="1 of .* look like negative controls .*'CTRL'"):
        assert len(read(["control", *human.symbols], separator="").parts) == 1 + len(human.symbols)


@pytest.mark.parametrize("label", ["NT/NT", "NegCtrl0_NegCtrl0", "NTC_B"])
def test_one_control_twice_or_of_another_letter_is_refused(read, label):
    with pytest.raises(ValueError, match=re.escape(f"control=['NTC_A', {label!r}]")):
        read(["NTC_A", label, "KLF1"], "NTC_A")
    assert read(["NTC_A", label, "KLF1"], ["NTC_A", label]).parts == ((), ("KLF1",))


def test_a_letter_behind_the_control_is_a_gene_where_the_separator_says_so(read):
    assert read(["control", "control_B", "KLF1"], separator="_").parts == ((), ("B",), ("KLF1",))


@pytest.mark.parametrize(
    "control", [["NT1", "NT2"], ("NT1", "NT2"), {"NT2", "NT1"}, pd.Index(["NT1", "NT2"]), pd.Series(["NT1", "NT2"]),
                np.array([b"NT1", b"NT2"]), pd.Categorical(["NT1", "NT2"]), dict.fromkeys(["NT1", "NT2"])],
)  # fmt: skip
def test_controls_in_any_collection(read, control):
    found = read(["NT1", "NT2", "KLF1"], control)
    assert found.design.control == ("NT1", "NT2")
    assert found.is_control.tolist() == [True, True, False]
    assert ScreenDesign.of("", b"NT1").control == ("NT1",)
    assert ScreenDesign.of("", 0).control == ("0",)


@pytest.mark.parametrize("control", [np.array("NT1"), np.array([["NT1", "NT2"]])])
def test_an_array_of_controls_has_one_dimension(read, control):
    with pytest.raises(TypeError, match=r"control must be a label or a list .*control=\['control'\]"):
        read(["NT1", "NT2", "KLF1"], control)


def test_a_label_can_be_kept_as_a_perturbation(read):
    labels = ["control", "NT1", "NT2", "KLF1"]
    with pytest.raises(ValueError, match=r"1 of 2 .*'NT2'"):
        read(labels, guides={"NT1": "NT1"})
    for guides in ({}, {"NT1": "NT1", "NT2": "NT2"}):
        assert read(labels, guides=guides).parts == ((), ("KLF1",), ("NT1",), ("NT2",))


def test_many_controls_are_named_by_a_pattern_that_can_be_pasted(read):
    labels = ["control", "KLF1", "NTN1", *(f"non-targeting_{i:05}" for i in range(30)), *(f"NT{i}" for i in range(9))]
    with pytest.raises(ValueError, match="look like negative controls") as caught:
        read(labels)
    call = str(caught.value).partition("pass control=")[2].partition("; guides=")[0]
    adata = ad.AnnData(obs=pd.DataFrame({"p": labels}, index=labels))
    assert set(eval(call, {"adata": adata})) == set(labels) - {"KLF1", "NTN1"}


def test_the_control_is_asked_for_by_all_labels_that_look_like_it(read):
    with pytest.raises(ValueError, match=r"never is 'control'.* perhaps control=\['NT1', 'NT2'\]"):
        read(["NT1", "NT2", "KLF1"])
    with pytest.raises(ValueError, match=r"with control=, perhaps control='Control'\."):
        read(["KLF1", "Control"])
    with pytest.raises(ValueError, match=r"control holds 'NT3', which .* never is"):
        read(["NT1", "NT2", "KLF1"], ["NT1", "NT2", "NT3"])
    with pytest.raises(ValueError, match="control names no label"):
        read(["NT1"], [])


def test_a_gene_is_one_part_whatever_separator_its_name_contains(read):
    labels = ["control", "HLA-DRA", "KLF1", "KLF1-HLA-DRA", "GATA1-KLF1", "RP11-34P13.7", "control-TAL1"]
    found = read(labels, separator="-")
    expected = [("GATA1", "KLF1"), ("HLA-DRA",), ("HLA-DRA", "KLF1"), ("KLF1",), ("RP11-34P13.7",), ("TAL1",)]
    assert sorted(found.parts[1:]) == expected
    assert found.notes["whole"].tolist() == ["HLA-DRA", "RP11-34P13.7"]
    found = read(["non-targeting", "NTC_1", "KLF1_NTC_1", "KLF1"], ["non-targeting", "NTC_1"], separator="_")
    assert found.parts == ((), ("KLF1",))


def test_columns_of_pairs_are_not_genes():
    labels = ["KLF1_GATA1", "KLF1_1", "A_B"]
    naming = ScreenDesign("", separator="_").with_whole_names(
        labels, lambda names: {*names} & {"KLF1", "GATA1"}, labels
    )
    assert naming.whole == {"KLF1_1", "A_B"}
