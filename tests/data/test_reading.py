"""Whose genes are read: `species`, in every call that takes it, and what is noted of it."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest

import scdiva as sd
from scdiva.data import CellDataModule, open_cells, pack_files
from scdiva.data.genes import InputOptions, column_tokens, judge_genes, match_columns
from scdiva.tokenizer import load_vocabulary
from scdiva.tokenizer.names import _table


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
        symbols = [human.symbols[token - 3] if token >= 0 else None for token in match.tokens]
        assert symbols == ["CD3D", "CD3D", "CCL3", *[None] * 6]
        assert list(match.how) == ["ortholog"] * 3 + ["unknown"] * 6
    matched = match_columns(pd.DataFrame(index=names[:3]), human, InputOptions(species=table))
    assert judge_genes(matched, human, np.ones(3), InputOptions(species=table))["n_duplicates"] == 1
    with pytest.raises(ValueError, match=r"'Rt1' and ' Rt2 ' \(CD3D\)"):
        judge_genes(matched, human, np.ones(3), InputOptions(species=table, duplicates="error"))


@pytest.mark.parametrize(
    ("species", "message"),
    [
        ("mause", "species .*got .mause. .*.mouse."),
        (3, "got int"),
        (pd.DataFrame({"a": ["b"]}), "got DataFrame"),
        ({}, "a table of 0 genes without a human one"),
        ({"Rt1": np.nan}, "a table of 1 genes without a human one"),
        ({"Rt1": 7}, "'Rt1' to 7, which is not a gene symbol"),
        (pd.Series(["CD3D", "CD4"], ["Rt1", "Rt1"]), "'Rt1' two.*'CD3D' and 'CD4'"),
    ],
)
def test_what_is_no_species_is_refused_before_anything_is_read(species, message, rat):
    cells = rat.copy()
    for call in (sd.pp.match_genes, sd.pp.corpus_entropy, open_cells):
        with pytest.raises(ValueError, match=message):
            call(cells, species=species)
    assert "scdiva" not in cells.uns
    assert cells.var.equals(rat.var)


def test_species_that_the_names_are_not(rat, mouse, table):
    for cells, species, message in (
        (rat, {"a": "CD3D"}, r"none of the 200 .*'a'.*'Rt0-ps', 'Rt1-ps'"),
        (rat, dict(list(table.items())[:1]), "table given as species"),
        (mouse, "human", r"species='human'.*names"),
        (sd.datasets.toy(), "mouse", r"species='mouse'.*names"),
    ):
        with pytest.raises(ValueError, match=message):
            sd.pp.match_genes(cells, species=species)
        assert "scdiva" not in cells.uns


def test_notes_say_how_much_is_read(rat, mouse, table):
    for cells, species, message, n in (
        (mouse, "mouse", "mouse genes.*human orthologs.* 100%", mouse.n_vars),
        (rat, table, "another species.*'Rt1-ps'.*199 of 200", 199),
        (rat, pd.Series(table), "another species", 199),
    ):
        with pytest.warns(UserWarning, match=message):
            matched = sd.pp.match_genes(cells, species=species, copy=True)
        report = matched.uns["scdiva"]["match"]
        assert report["how"]["ortholog"] == report["n_mapped"] == n
        assert report["params"]["species"] == ("mouse" if isinstance(species, str) else "table")
        assert matched.var_names.equals(cells.var_names)


@pytest.mark.usefixtures("quiet")
def test_what_is_written_bears_the_names_of_the_user(rat, table, vocabulary):
    cells, gene = sd.pp.match_genes(rat, species=table, copy=True), "Rt5-ps"
    sd.tl.impute(cells, [gene])
    assert list(cells.obsm["scdiva_imputed"].columns) == [gene]
    sd.tl.grn(cells, "correlation", sources=[gene], n_targets=3)
    edges = sd.get.grn_df(cells)
    assert set(edges["source"]) == {gene}
    assert set(edges["target"]) <= set(cells.var_names)
    for unknown in ("Rt0-ps", table[gene]):
        with pytest.raises(ValueError, match=f"'{unknown}'"):
            sd.tl.impute(cells, [unknown])
        with pytest.raises(ValueError, match=f"first: '{unknown}'"):
            sd.tl.grn(cells, "correlation", sources=[unknown])
    new = sd.tl.generate(cells, 5, rng=0)
    assert set(new.var_names) <= set(cells.var_names)
    assert new.uns["scdiva"]["generate"]["species"] == "table"
    assert cells.var_names.equals(rat.var_names)
    tokens = column_tokens(rat.var, vocabulary, InputOptions(species=table))
    np.testing.assert_array_equal(tokens, column_tokens(rat.var, vocabulary, InputOptions(gene_ids="human")))


@pytest.mark.usefixtures("quiet")
def test_files_of_both_species_in_one_folder(mouse, vocabulary, tmp_path):
    human = mouse.copy()
    human.var_names = human.var["human"].astype(str)
    human.var.index.name = None
    files = [tmp_path / "a_human.h5ad", tmp_path / "b_mouse.h5ad"]
    for cells, file in zip((human, mouse), files, strict=True):
        cells.write_h5ad(file)
    np.testing.assert_array_equal(*(column_tokens(cells.var, vocabulary) for cells in (human, mouse)))
    assert sd.pp.corpus_entropy(files, vocabulary) == sd.pp.corpus_entropy([human, human], vocabulary)
    packed = pack_files([tmp_path], vocabulary, tmp_path / "corpus.h5")
    assert packed.study_names == ["a_human", "b_mouse"]
    np.testing.assert_array_equal(*packed.measured)
    for human_part, mouse_part in zip(packed.read(0, 60), packed.read(60, 120), strict=True):
        np.testing.assert_array_equal(human_part, mouse_part)
    with pytest.raises(ValueError, match=r"a_human: .*species='mouse'"):
        CellDataModule(files, vocabulary=vocabulary, species="mouse").setup()
