"""Labels of perturbations: combinations, controls, guides, names of one gene, and names that contain the separator."""

from __future__ import annotations

import re

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scdiva.perturbation.conditions import (
    ScreenDesign,
    gene_filter,
    genes_of_guides,
    is_control_like,
    match_perturbed,
    perturbations,
    read_perturbations,
    species_of,
)
from scdiva.tokenizer.vocabulary import load_vocabulary

GENES = ["KLF1", "GATA1", "TAL1", "HLA-DRA", "RP11-34P13.7", "KLF1_GATA1", "A_B"]


@pytest.fixture(scope="module")
def human():
    return load_vocabulary("human")


def cells(labels):
    obs = pd.DataFrame({"p": list(labels)}, index=[f"c{i}" for i in range(len(labels))])
    return ad.AnnData(np.zeros((len(labels), len(GENES)), np.float32), obs=obs, var=pd.DataFrame(index=GENES))


@pytest.fixture(scope="module")
def conditions_of(human):
    def read_labels(labels, control="control", separator="+", guides=None):
        return read_perturbations(cells(labels), ScreenDesign.of("p", control, separator=separator), guides, human)

    return read_labels


@pytest.mark.parametrize(
    ("label", "parts"),
    [("ctrl", ()), ("ctrl+ctrl", ()), ("A", ("A",)), ("A+ctrl", ("A",)), ("ctrl+A", ("A",)), ("B+A", ("A", "B")),
     ("A + B", ("A", "B")), ("A+A", ("A",)), ("IFN-beta", ("IFN-beta",))],
)  # fmt: skip
def test_labels_are_split(label, parts):
    assert ScreenDesign("", ("ctrl",)).parts(label) == parts


@given(st.lists(st.sampled_from(["A", "B", "KLF1", "ctrl"]), min_size=1, max_size=4))
def test_the_order_of_parts_means_nothing(parts):
    components = ScreenDesign("", ("ctrl",)).parts("+".join(parts))
    assert components == ScreenDesign("", ("ctrl",)).parts("+".join(reversed(parts)))
    assert set(components) == set(parts) - {"ctrl"}
    assert ScreenDesign("", ("ctrl",), "_").parts("_".join(parts)) == components


def test_a_separator_may_be_none_and_the_control_is_never_split():
    assert ScreenDesign("", ("ctrl",), "").parts("A+B") == ("A+B",)
    assert ScreenDesign("", ("+",)).parts("+") == ()


def test_cells_are_numbered_by_what_was_done_to_them():
    conditions = perturbations(cells(["B+A", "B", "ctrl", "A+B", "A+ctrl", "A"]), ScreenDesign.of("p", "ctrl"))
    assert conditions.parts == ((), ("A",), ("B",), ("A", "B"))
    assert conditions.code.tolist() == [3, 2, 0, 3, 1, 1]
    assert conditions.is_control.tolist() == [False, False, True, False, False, False]
    with pytest.raises(ValueError, match=r"'control'.*'A', 'ctrl'.*adata\.obs\['p'\] = .*replace\('ctrl', 'control'\)"):
        perturbations(cells(["A", "ctrl"]), ScreenDesign("p"))


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


def test_genes_and_other_labels_are_not_controls(human, conditions_of):
    assert [name for name in human.symbols if is_control_like(name)] == ["CTRL"]
    with pytest.warns(UserWarning, match="1 of .* look like negative controls .*'CTRL'"):
        assert len(conditions_of(["control", *human.symbols], separator="").parts) == 1 + len(human.symbols)
    labels = (
        "NC_000001 NTN1 SCRIB CTLA4 stim IFN-beta chr3.5275_top_two none_of_subset target neg Control_6h control+KLF1"
    )
    assert [name for name in labels.split() if is_control_like(name)] == []


@pytest.mark.parametrize("guides", [None, {"x": "TAL1"}])
def test_controls_that_are_not_named_are_refused_with_the_call_that_names_them(conditions_of, guides):
    labels = ["control", "NT1", "KLF1", "safe-targeting", "NT1+GATA1", "x"]
    message = r"2 of \d .*\(first: 'NT1'\).*control=\['control', 'NT1', 'safe-targeting'\]"
    with pytest.raises(ValueError, match=message):
        conditions_of(labels, guides=guides)
    conditions = conditions_of(labels, ["control", "NT1", "safe-targeting"], guides=guides)
    assert sorted(conditions.parts) == sorted([(), ("GATA1",), ("KLF1",), ("TAL1",) if guides else ("x",)])
    assert conditions.is_control.tolist() == [True, True, False, True, False, False]


@pytest.mark.parametrize(
    ("labels", "control", "error", "match"),
    [
        (["NT1", "NT2", "KLF1"], "control", ValueError, r"never is 'control'.* perhaps control=\['NT1', 'NT2'\]"),
        (["KLF1", "Control"], "control", ValueError, r"with control=, perhaps control='Control'\."),
        (["NT1", "NT2", "KLF1"], ["NT1", "NT2", "NT3"], ValueError, r"control holds 'NT3', which .* never is"),
        (["NT1"], [], ValueError, "control is empty"),
        (["NT1", "KLF1"], np.array([["NT1", "NT2"]]), TypeError, r"a list of labels.*control=\['control'\]"),
        (["control", "CD4+"], "control", ValueError, r"'CD4\+' has an empty part"),
        *((["NTC_A", label, "KLF1"], "NTC_A", ValueError, re.escape(f"control=['NTC_A', {label!r}]"))
          for label in ("NT/NT", "NegCtrl0_NegCtrl0", "NTC_B")),
    ],
)  # fmt: skip
def test_labels_that_name_no_control_are_refused(conditions_of, labels, control, error, match):
    with pytest.raises(error, match=match):
        conditions_of(labels, control)


def test_a_letter_behind_the_control_is_a_gene_where_the_separator_says_so(conditions_of):
    assert conditions_of(["control", "control_B", "KLF1"], separator="_").parts == ((), ("B",), ("KLF1",))


@pytest.mark.parametrize(
    "control", [["NT1", "NT2"], {"NT2", "NT1"}, pd.Series(["NT1", "NT2"]), np.array([b"NT1", b"NT2"]),
                pd.Categorical(["NT1", "NT2"]), dict.fromkeys(["NT1", "NT2"])],
)  # fmt: skip
def test_controls_in_any_collection(conditions_of, control):
    conditions = conditions_of(["NT1", "NT2", "KLF1"], control)
    assert conditions.design.control == ("NT1", "NT2")
    assert conditions.is_control.tolist() == [True, True, False]


def test_one_control_of_any_type():
    assert [ScreenDesign.of("", one).control for one in (b"NT1", 0)] == [("NT1",), ("0",)]


def test_a_label_can_be_kept_as_a_perturbation(conditions_of):
    labels = ["control", "NT1", "NT2", "KLF1"]
    with pytest.raises(ValueError, match=r"1 of 2 .*'NT2'"):
        conditions_of(labels, guides={"NT1": "NT1"})
    for guides in ({}, {"NT1": "NT1", "NT2": "NT2"}):
        assert conditions_of(labels, guides=guides).parts == ((), ("KLF1",), ("NT1",), ("NT2",))


def test_many_controls_are_named_by_a_pattern_that_can_be_pasted(conditions_of):
    labels = ["control", "KLF1", "NTN1", *(f"non-targeting_{i:05}" for i in range(30)), *(f"NT{i}" for i in range(9))]
    with pytest.raises(ValueError, match="look like negative controls") as caught:
        conditions_of(labels)
    call = str(caught.value).partition("pass control=")[2].partition("; guides=")[0]
    assert set(eval(call, {"adata": cells(labels)})) == set(labels) - {"KLF1", "NTN1"}


def test_a_gene_is_one_part_whatever_separator_its_name_contains(conditions_of):
    labels = ["control", "HLA-DRA", "KLF1", "KLF1-HLA-DRA", "GATA1-KLF1", "RP11-34P13.7", "control-TAL1"]
    conditions = conditions_of(labels, separator="-")
    expected = [("GATA1", "KLF1"), ("HLA-DRA",), ("HLA-DRA", "KLF1"), ("KLF1",), ("RP11-34P13.7",), ("TAL1",)]
    assert sorted(conditions.parts[1:]) == expected
    assert conditions.notes["whole"].tolist() == ["HLA-DRA", "RP11-34P13.7"]
    conditions = conditions_of(
        ["non-targeting", "NTC_1", "KLF1_NTC_1", "KLF1"], ["non-targeting", "NTC_1"], separator="_"
    )
    assert conditions.parts == ((), ("KLF1",))
    # columns of the dataset are one part unless all pieces are genes
    assert conditions_of(["control", "KLF1_GATA1", "A_B"], separator="_").parts == ((), ("A_B",), ("GATA1", "KLF1"))


def test_genes_of_a_mouse_are_known_where_the_data_have_a_mouses(human):
    mouse = ["Klf1", "Gata1", "Cd8b1", "Ccl3", "H2-K1", "Gapdh", "mt-Co1", "Lyz2", "Actb"]
    assert (species_of(mouse, human, None), species_of(["KLF1", "GATA1"], human, None)) == ("mouse", None)
    assert species_of(["KLF1"], human, "mouse") == "mouse"
    assert gene_filter(human, "mouse")(["Klf1", "Cd8b1", "KLF1", "drug"]) == {"Klf1", "Cd8b1", "KLF1"}
    table = {"own1": "KLF1", "own2": "GATA1"}
    assert gene_filter(human, table)(["own1", "GATA1", "own3"]) == {"own1", "GATA1"}
    tokens, how = match_perturbed(["Klf1", "KLF1", "drug"], human, "mouse")
    assert tokens[0] == tokens[1] > 0 > tokens[2]
    assert how.tolist() == ["ortholog", "symbol", "unknown"]


def test_a_mapping_names_parts_combinations_and_the_control(conditions_of):
    guides = {"a": "KLF1", "pair": "KLF1+GATA1", "NTC_1": "control"}
    conditions = conditions_of(["a", "pair", "NTC_1", "a+GATA1", "TAL1", "control"], guides=guides)
    assert conditions.design.guides == guides | {"a+GATA1": "KLF1+GATA1"}
    assert conditions.parts == ((), ("KLF1",), ("TAL1",), ("GATA1", "KLF1"))
    assert genes_of_guides(["a+TAL1"], conditions.design.guides, ScreenDesign("")) == {"a+TAL1": "KLF1+TAL1"}


@pytest.mark.parametrize(
    ("labels", "guides", "error", "match"),
    [
        (["KLF1g1"], "auto", TypeError, "guides must map guides to genes"),
        (["KLF1g1"], ["KLF1g1"], TypeError, "guides must map guides to genes"),
        (["KLF1g1"], {"x": "KLF1"}, ValueError, r"none of 1 guides .*'x'.*adata.obs\['p'\]"),
        (["KLF1g1+KLF1"], {"KLF1g1": ""}, ValueError, "empty part"),
    ],
)
def test_guides_that_map_nothing_are_refused(conditions_of, labels, guides, error, match):
    with pytest.raises(error, match=match):
        conditions_of([*labels, "control"], guides=guides)


def test_two_labels_of_one_gene_are_refused_with_what_joins_them(conditions_of):
    labels = ["control", "KLF1", "EKLF", "EKLF+GATA1", "GATA1"]
    with pytest.raises(ValueError, match=r"both 'KLF1' and 'EKLF'.* guides=\{'EKLF': 'KLF1'\}"):
        conditions_of(labels)
    joined = ((), ("GATA1",), ("KLF1",), ("GATA1", "KLF1"))
    assert conditions_of(labels, guides={"EKLF": "KLF1"}).parts == joined
    for guides in ({}, {"EKLF": "EKLF"}):
        assert conditions_of(labels, guides=guides).parts == ((), ("EKLF",), ("GATA1",), ("KLF1",), ("EKLF", "GATA1"))
    labels[2] = "x"
    with pytest.raises(ValueError, match="both 'KLF1' and 'EKLF'") as caught:
        conditions_of(labels, guides={"x": "EKLF"})
    names = {"guides": {"x": "EKLF"}}
    exec(str(caught.value).partition("Pass ")[2].partition(" to make")[0], names)
    assert conditions_of(labels, guides=names["guides"]).parts == joined
