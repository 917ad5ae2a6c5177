"""Whose genes are read: `species`, in every call that takes it, and what is noted of it."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest

import scdiva as sd
from scdiva.data import CellDataModule, open_cells, pack_files
from scdiva.data.genes import InputOptions, column_tokens, judge_genes, match_columns
from scdiva.tokenizer import Vocabulary, load_vocabulary
from scdiva.tokenizer.names import _table

MOUSE = ["Cd8b1", "Fcgr4", "Ccl3", "H2-K1"]


@pytest.fixture(scope="module")
def human():
    return load_vocabulary("human")


@pytest.fixture(scope="module")
def vocabulary():
    return load_vocabulary("scdiva-mini")


@pytest.fixture(scope="module")
def rat():
    """Toy cells under names of their own, and with their human names in `var["human"]`; one gene is unknown."""
    adata = sd.datasets.toy(60, 200)
    adata.var["human"] = ["", *adata.var_names[1:]]
    adata.var_names = [f"Rt{i}-ps" for i in range(adata.n_vars)]
    return adata


@pytest.fixture(scope="module")
def table(rat):
    return dict(rat.var["human"].iloc[1:])


@pytest.fixture(scope="module")
def mouse(human):
    """Toy cells under names of mice, where there are such; others have their human names."""
    adata = sd.datasets.toy(60, 200)
    symbols = {gene: name for name, gene in _table().items() if not name.startswith("ENSMUSG")}
    ids = human.ensembl_ids[human.match(adata.var_names).tokens - 3]
    adata.var["human"] = adata.var_names.to_numpy()
    names = [symbols.get(gene, "") for gene in ids]
    adata = adata[:, [bool(name) for name in names]].copy()
    adata.var_names = [name for name in names if name]
    return adata


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def symbols_of(vocabulary, match):
    return [vocabulary.symbols[token - 3] if token >= 0 else None for token in match.tokens]


def test_a_mouse_is_looked_up_by_orthologs_and_by_nothing_else(human):
    among = [*MOUSE, "CD3D", *human.symbols[:200]]  # a list that nobody would take for a mouse's
    assert human.match(among).tokens[0] == -1
    found = human.match(among, "mouse")
    assert symbols_of(human, found)[:5] == ["CD8B", "FCGR3A", "CCL3", None, None], "H2-K1 has no counterpart"
    assert list(found.how[:5]) == ["ortholog"] * 3 + ["unknown"] * 2
    assert (found.tokens[5:] == -1).all(), "no name is found by its capitals"


def test_human_names_are_taken_as_they_are(human):
    assert (human.match(MOUSE).tokens >= 0).any()
    assert (human.match(MOUSE, "human").tokens == -1).all()
    names = human.symbols[:50]
    np.testing.assert_array_equal(human.match(names, "human").tokens, human.match(names).tokens)


def test_vocabularies_of_other_species(human):
    table = human.table.iloc[:50].assign(ensembl_id=[f"ENSMUSG{i:011d}" for i in range(50)])
    table["symbol"] = [f"Gene{i}a" for i in range(50)]
    mouse = Vocabulary(table.assign(previous="", alias=""))
    names = ["Gene3a", "Cd3d"]
    assert mouse.match(names, "mouse").tokens.tolist() == mouse.match(names).tokens.tolist() == [6, -1]
    assert mouse.match(["Rt1"], {"Rt1": "Gene3a"}).tokens.tolist() == [6]
    with pytest.raises(ValueError, match=r'species="human".*mouse'):
        mouse.match(names, "human")
    unsaid = Vocabulary(table.assign(ensembl_id="", previous="", alias=""))
    for species in ("human", "mouse"):
        assert unsaid.match(names, species).tokens.tolist() == [6, -1]


def test_a_table_decides_alone(human):
    table = {
        "Rt1": "CD3D",
        "Rt2": "ENSG00000167286",
        "ENSRNOG00000000007": "CCL3",
        "Rt3": "",
        "Rt4": np.nan,
        "CD4": None,
    }
    names = ["Rt1", " Rt2 ", "ENSRNOG00000000007.2", "Rt3", "Rt4", "CD4", "CD8A", "Cd3d", "Rt1.1"]
    for species in (table, pd.Series(table), pd.Series(table, dtype="object").astype("string")):
        match = human.match(names, species)
        assert symbols_of(human, match) == ["CD3D", "CD3D", "CCL3", *[None] * 6]
        assert list(match.how) == ["ortholog"] * 3 + ["unknown"] * 6
    matched = match_columns(pd.DataFrame(index=names[:3]), human, InputOptions(species=table))
    report = judge_genes(matched, human, np.ones(3), InputOptions(species=table))
    assert report["n_duplicates"] == 1
    assert report["how"]["ortholog"] == report["n_mapped"] == 3
    with pytest.raises(ValueError, match=r"'Rt1' and ' Rt2 ' \(CD3D\)"):
        judge_genes(matched, human, np.ones(3), InputOptions(species=table, duplicates="error"))


@pytest.mark.parametrize(
    ("species", "said"),
    [
        ("mause", "species .*got .mause. .*.mouse."),
        (3, "got int"),
        (pd.DataFrame({"a": ["b"]}), "got DataFrame"),
        ({}, "a table of 0 genes without a human one"),
        ({"Rt1": np.nan}, "a table of 1 genes without a human one"),
        ({"Rt1": 7}, "'Rt1' the human gene 7"),
        (pd.Series(["CD3D", "CD4"], ["Rt1", "Rt1"]), "'Rt1' two.*'CD3D' and 'CD4'"),
    ],
)
def test_what_is_no_species_is_refused_before_anything_is_read(species, said, rat):
    cells = rat.copy()
    for call in (sd.pp.match_genes, sd.pp.corpus_entropy, open_cells):
        with pytest.raises(ValueError, match=said):
            call(cells, species=species)
    assert "scdiva" not in cells.uns
    assert cells.var.equals(rat.var)


def test_species_that_the_names_are_not(human, rat, mouse, table):
    with pytest.raises(ValueError, match=r"none of the 200 .*'a'.*'Rt0-ps', 'Rt1-ps'"):
        sd.pp.match_genes(rat, species={"a": "CD3D"})
    with pytest.raises(ValueError, match="table given as species"):
        sd.pp.match_genes(rat, species=dict(list(table.items())[:1]))
    with pytest.raises(ValueError, match=r"species='human'.*names"):
        sd.pp.match_genes(mouse, species="human")
    with pytest.raises(ValueError, match=r"species='mouse'.*names"):
        sd.pp.match_genes(sd.datasets.toy(), species="mouse")
    assert "scdiva" not in {*rat.uns, *mouse.uns}


def test_notes_say_how_much_is_read(rat, mouse, table):
    with pytest.warns(UserWarning, match="mouse genes.*human orthologs.* 100%"):
        sd.pp.match_genes(mouse, species="mouse", copy=True)
    with pytest.warns(UserWarning, match="another species.*'Rt1-ps'.*199 of 200"):
        found = sd.pp.match_genes(rat, species=table, copy=True)
    report = found.uns["scdiva"]["match"]
    assert report["how"]["ortholog"] == report["n_mapped"] == 199
    assert report["params"]["species"] == "table"
    assert found.var_names.equals(rat.var_names)


@pytest.mark.usefixtures("quiet")
def test_species_are_noted(mouse, rat, table):
    for species, noted in ((None, ""), ("mouse", "mouse")):
        matched = sd.pp.match_genes(mouse, species=species, copy=True)
        sd.pp.gene_entropy(matched)
        assert matched.uns["scdiva"]["scdiva_entropy"]["species"] == noted
    assert InputOptions("counts", species=pd.Series(table)).parameters() == {
        "layer": "counts", "use_raw": False, "input": "auto", "gene_ids": "", "species": "table", "duplicates": "sum",
    }  # fmt: skip


@pytest.mark.usefixtures("quiet")
def test_what_is_written_bears_the_names_of_the_user(rat, table):
    cells, gene = rat.copy(), "Rt5-ps"
    sd.pp.match_genes(cells, species=table)
    sd.tl.impute(cells, [gene])
    assert list(cells.obsm["scdiva_imputed"].columns) == [gene]
    with pytest.raises(ValueError, match="Rt0-ps"):
        sd.tl.impute(cells, ["Rt0-ps"])
    sd.tl.grn(cells, "correlation", sources=[gene], n_targets=3)
    edges = sd.get.grn_df(cells)
    assert set(edges["source"]) == {gene}
    assert set(edges["target"]) <= set(cells.var_names)
    new = sd.tl.generate(cells, 5, rng=0)
    assert set(new.var_names) <= set(cells.var_names)
    assert new.uns["scdiva"]["generate"]["species"] == "table"
    assert cells.var_names.equals(rat.var_names)


@pytest.mark.usefixtures("quiet")
def test_files_of_both_species_in_one_folder(mouse, vocabulary, tmp_path):
    human = mouse.copy()
    human.var_names = human.var["human"].astype(str)
    human.var.index.name = None
    human.write_h5ad(tmp_path / "a_human.h5ad")
    mouse.write_h5ad(tmp_path / "b_mouse.h5ad")
    both = [tmp_path / "a_human.h5ad", tmp_path / "b_mouse.h5ad"]
    tokens = column_tokens(human.var, vocabulary)
    np.testing.assert_array_equal(column_tokens(mouse.var, vocabulary), tokens)
    counted = sd.pp.corpus_entropy(both, vocabulary)
    assert counted == sd.pp.corpus_entropy([human, human], vocabulary)
    packed = pack_files([tmp_path], vocabulary, tmp_path / "corpus.h5")
    assert packed.study_names == ["a_human", "b_mouse"]
    np.testing.assert_array_equal(*packed.measured)
    np.testing.assert_array_equal(np.flatnonzero(packed.measured[0]), np.unique(tokens[tokens >= 0]))
    for one, other in zip(packed.read(0, 60), packed.read(60, 120), strict=True):
        np.testing.assert_array_equal(one, other)
    packed.close()
    data = CellDataModule([tmp_path / "a_human.h5ad", tmp_path / "b_mouse.h5ad"], vocabulary=vocabulary)
    matched = {one["study"]: one["genes_matched"] for one in data.manifest()["studies"]}
    assert matched["a_human"] == matched["b_mouse"] > 100
    data.close()
    forced = CellDataModule(both, vocabulary=vocabulary, species="mouse")
    with pytest.raises(ValueError, match=r"a_human: .*species='mouse'"):
        forced.setup()


@pytest.mark.usefixtures("quiet")
def test_whatever_asks_for_genes_by_name_goes_by_the_table(rat, table, vocabulary):
    from scdiva.annotation.annotate import shared_tokens

    expected = column_tokens(rat.var, vocabulary, InputOptions(gene_ids="human"))
    rat.obsm["state"] = np.random.default_rng(0).normal(size=(rat.n_obs, 3))
    found = []
    for how in ({"species": table}, {"gene_ids": "human"}):
        cells = sd.pp.match_genes(rat, **how, copy=True)
        sd.tl.corrected_expression(cells, "batch", ["Rt5-ps", "Rt7-ps"], use_rep="state")
        found.append(cells.obsm["scdiva_corrected"])
    np.testing.assert_array_equal(*found)
    opened = open_cells(rat, sd.models.load(), InputOptions(species=table, empty="nan"))
    shared = shared_tokens(opened, opened)
    np.testing.assert_array_equal(shared, np.unique(expected[expected >= 0]))
    of_table = sd.pp.match_genes(rat, species=table, copy=True)
    for human_name in (table["Rt5-ps"], "Rt0-ps"):
        with pytest.raises(ValueError, match=f"first: '{human_name}'"):
            sd.tl.grn(of_table, "correlation", sources=[human_name])
