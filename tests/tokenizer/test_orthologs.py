"""Mouse genes as their human orthologs: the table, lists of names, and every column kept as the user named it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pandas as pd
import pytest

from scdiva.tokenizer import Vocabulary, human_orthologs, load_vocabulary

BUILD = Path(__file__).parents[2] / "scripts" / "build_orthologs.py"


@pytest.fixture(scope="module")
def human():
    return load_vocabulary("human")


def symbols(vocabulary, names):
    return [vocabulary.symbols[t - 3] if t >= 0 else None for t in vocabulary.match(names).tokens]


def test_genes_that_are_not_found_by_capitals(human):
    names = ["Cd8b1", "Fcgr4", "Ccl3", "Trp53", "H2-K1", "Gm42418", "Cd3d", "Actb"]
    matches = symbols(human, names)
    assert matches == ["CD8B", "FCGR3A", "CCL3", "TP53", None, None, "CD3D", "ACTB"]
    how = human.match(names).how
    assert list(how[:6]) == ["ortholog"] * 4 + ["unknown"] * 2


def test_ids_with_versions_and_repeats_are_found(human):
    assert human_orthologs(["ENSMUSG00000032094.8", "Cd3d.1", "Cd3d"]) == ["ENSG00000167286"] * 3
    assert human_orthologs(["Cd3d.1"]) == ["mouse Cd3d.1"], "what repeats nothing is a name of its own"
    assert human.match(["ENSMUSG00000032094"] * 3).tokens.tolist() == human.match(["CD3D"]).tokens.tolist() * 3


def test_a_list_of_human_genes_is_left_as_it_is(human):
    names = [*human.symbols[:200], "Cd3d", "no gene"]
    matches = human.match(names)
    assert not (matches.how == "ortholog").any()
    assert matches.tokens[-2] == -1
    # cells of both species: human genes are human, and mouse genes are no human ones
    mixed = [*human.symbols[:100], *["Cd3d", "Gapdh", "Actb", "Cd4"] * 20]
    assert (human.match(mixed).tokens[100:] == -1).all()


def test_a_vocabulary_of_mice_needs_no_orthologs(human):
    table = human.table.iloc[:50].assign(ensembl_id=[f"ENSMUSG{i:011d}" for i in range(50)])
    table["symbol"] = [f"Gene{i}a" for i in range(50)]
    mouse = Vocabulary(table.assign(previous="", alias=""))
    for species in (None, "mouse"):
        assert mouse.match(["Gene3a", "Cd3d"], species).tokens.tolist() == [6, -1]
    assert mouse.match(["Rt1"], {"Rt1": "Gene3a"}).tokens.tolist() == [6]
    with pytest.raises(ValueError, match=r'species="human".*mouse'):
        mouse.match(["Gene3a"], "human")


def test_the_species_given_decides(human):
    names = ["Cd8b1", "Fcgr4", "Ccl3", *human.symbols[:200]]  # a list that nobody would take for a mouse's
    assert (human.match(names).tokens[:3] == -1).all()
    assert symbols(human, names[:3]) == ["CD8B", "FCGR3A", "CCL3"]
    assert (human.match(names[:3], "human").tokens == -1).all()
    tokens = human.match(names, "mouse").tokens
    assert (tokens[:3] >= 0).all()
    assert (tokens[3:] == -1).all(), "no name is found by its capitals"


def test_one_pair_of_each_gene_is_chosen():
    spec = importlib.util.spec_from_file_location("build_orthologs", BUILD)
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    columns = ["mouse_ensembl_id", "mouse_symbol", "human_ensembl_id", "human_symbol", "homology", "confidence",
               "gene_order_conservation"]  # fmt: skip
    pairs = pd.DataFrame(
        [
            ("ENSMUSG00000000001", "A", "ENSG00000000009", "X", "one2many", "1", "100"),
            ("ENSMUSG00000000001", "A", "ENSG00000000008", "Y", "one2one", "0", ""),
            ("ENSMUSG00000000002", "B", "ENSG00000000007", "Q", "one2many", "1", "25"),
            ("ENSMUSG00000000002", "B", "ENSG00000000006", "P", "one2many", "1", "75"),
            ("ENSMUSG00000000003", "C", "ENSG00000000005", "S", "one2many", "1", "100"),
            ("ENSMUSG00000000003", "C", "ENSG00000000004", "R", "one2many", "1", "100"),
        ],
        columns=columns,
    )
    assert build.chosen(pairs).to_numpy().tolist() == [[1, "A", 8], [2, "B", 6], [3, "C", 4]]
