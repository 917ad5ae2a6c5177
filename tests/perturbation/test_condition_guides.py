"""Labels that name guides, mapped to genes; and the genes that are known."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scdiva.perturbation.conditions import (
    ScreenDesign,
    gene_filter,
    genes_of_guides,
    match_perturbed,
    read_perturbations,
    species_of,
)
from scdiva.tokenizer.vocabulary import load_vocabulary


@pytest.fixture(scope="module")
def human():
    return load_vocabulary("human")


def read(labels, guides, human):
    labels = [*labels, "ctrl"]
    obs = pd.DataFrame({"p": labels}, index=[f"c{i}" for i in range(len(labels))])
    adata = ad.AnnData(np.zeros((len(labels), 1), np.float32), obs=obs, var=pd.DataFrame(index=["KLF1"]))
    return read_perturbations(adata, ScreenDesign.of("p", "ctrl"), guides, human)


MOUSE = ["Klf1", "Gata1", "Cd8b1", "Ccl3", "H2-K1", "Gapdh", "mt-Co1", "Lyz2", "Actb"]


def test_genes_of_a_mouse_are_known_where_the_data_have_a_mouses(human):
    assert (species_of(MOUSE, human, None), species_of(["KLF1", "GATA1"], human, None)) == ("mouse", None)
    assert species_of(["KLF1"], human, "mouse") == "mouse"
    known = gene_filter(human, "mouse")
    assert known(["Klf1", "Cd8b1", "KLF1", "drug"]) == {"Klf1", "Cd8b1", "KLF1"}
    table = {"own1": "KLF1", "own2": "GATA1"}
    assert gene_filter(human, table)(["own1", "GATA1", "own3"]) == {"own1", "GATA1"}
    tokens, how = match_perturbed(["Klf1", "KLF1", "drug"], human, "mouse")
    assert tokens[0] == tokens[1] > 0 > tokens[2]
    assert how.tolist() == ["ortholog", "symbol", "unknown"]


def test_a_mapping_names_parts_combinations_and_the_control(human):
    given = {"a": "KLF1", "pair": "KLF1+GATA1", "NTC_1": "ctrl"}
    found = read(["a", "pair", "NTC_1", "a+GATA1", "TAL1"], given, human)
    assert found.design.guides == {"a": "KLF1", "pair": "KLF1+GATA1", "NTC_1": "ctrl", "a+GATA1": "KLF1+GATA1"}
    assert found.parts == ((), ("KLF1",), ("TAL1",), ("GATA1", "KLF1"))
    assert genes_of_guides(["a+TAL1"], found.design.guides, ScreenDesign("", ("ctrl",))) == {"a+TAL1": "KLF1+TAL1"}


@pytest.mark.parametrize("guides", ["auto", 3, ["KLF1g1"]])
def test_guides_must_be_a_mapping(human, guides):
    with pytest.raises(TypeError, match="guides must map guides to genes"):
        read(["KLF1g1"], guides, human)


def test_a_mapping_of_other_labels_is_refused(human):
    with pytest.raises(ValueError, match=r"none of 1 guides .*'x'.*adata.obs\['p'\]"):
        read(["KLF1g1"], {"x": "KLF1"}, human)
    with pytest.raises(ValueError, match="empty part"):
        read(["KLF1g1+KLF1"], {"KLF1g1": ""}, human)
