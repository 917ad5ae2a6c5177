import contextlib
import re
from dataclasses import replace

import anndata as ad
import numpy as np
import pandas as pd
import pytest

import scdiva
from scdiva._constants import UNKNOWN
from scdiva.data.genes import DEFAULT_INPUT, InputOptions, gene_names, judge_genes, match_columns
from scdiva.tokenizer import Vocabulary

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module")
def human():
    return Vocabulary.human()


def resolve_genes(names, human, counts, reading=DEFAULT_INPUT, fallback=None):
    """Tokens and report of genes with these names; with `fallback` they are a column, and those the index."""
    var = pd.DataFrame({"id": names}, index=names if fallback is None else fallback)
    reading = reading if fallback is None else replace(reading, gene_ids="id")
    matched = match_columns(var, human, reading)
    return matched.tokens, judge_genes(matched, human, counts, reading)


def token(human, symbol):
    return int(human.tokens[list(human.symbols).index(symbol)])


def test_a_mixture_of_names(human):
    names, counts = ["CD3E", "ENSG00000141510.4", "GNB2L1", "no such gene", "RACK1"], [10, 5, 2, 1, 2]
    tokens, report = resolve_genes(names, human, counts)
    rack1 = token(human, "RACK1")
    assert tokens.tolist() == [token(human, "CD3E"), token(human, "TP53"), rack1, UNKNOWN, rack1]
    how = {"ensembl": 1, "symbol": 2, "previous": 1, "alias": 0, "ortholog": 0, "unknown": 1}
    numbers = {"n_genes": 5, "n_mapped": 4, "share_genes": 0.8, "share_counts": 0.95, "n_duplicates": 1}
    assert report == {**numbers, "vocabulary": human.fingerprint, "how": how}
    with pytest.raises(ValueError, match=r"1 names .*'GNB2L1' and 'RACK1'"):
        resolve_genes(names, human, counts, InputOptions(duplicates="error"))


@pytest.mark.parametrize(("unknown", "outcome"), [(51, "error"), (50, "warning"), (21, "warning"), (20, "pass")])
def test_share_of_counts_decides(human, unknown, outcome):
    # Two of three names are unknown: only counts matter.
    names, counts = ["CD3E", "xyz1", "xyz2"], [100 - unknown, unknown - 1, 1]
    expectation = {
        "error": pytest.raises(ValueError, match=r"49.0% of .*1 of 3 names.*'xyz1', 'xyz2'"),
        "warning": pytest.warns(UserWarning, match=rf"only {100 - unknown}.0% of the counts"),
        "pass": contextlib.nullcontext(),
    }[outcome]
    with expectation:
        resolve_genes(names, human, counts)


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        ([str(i) for i in range(20)], "numbers.*gene_ids="),
        ([f"GENE{i}" for i in range(20)], "another column of adata.var"),
        ([f"ENSDARG{i:011d}" for i in range(20)], "another species"),
        ([f"ENST{i:011d}.2" for i in range(20)], "sum them to genes"),
        ([f"Gene{i:03d}" for i in range(20)], "numbers behind 'Gene', not gene names.*gene_ids="),
        ([f"Peak{i}" for i in range(20)], "numbers behind 'Peak'"),
        ([f"chr{i}:{i}00-{i}50" for i in range(1, 20)], "intervals of the genome"),
        ([*(f"Gm{i}" for i in range(9)), "Cd3e"], "mouse .*'Gm0'.*human_orthologs.* gene_ids="),
        ([f"ENSMUSG{i:011d}" for i in range(20)], "mouse"),
    ],
)
def test_wrong_names_are_told_what_to_do(human, names, advice):
    with pytest.raises(ValueError, match=advice):
        resolve_genes(names, human, np.ones(len(names)))


def test_retired_ids_fall_back_on_the_symbol(human):
    names = ["ENSG00000141510", "ENSG00000161570", "", "ENSG00000161570"]
    tokens, report = resolve_genes(names, human, [9, 1, 1, 0], fallback=["CD3E", "CCL5", "ACTB", "nothing"])
    # a known id stands; a gene without an id was left out on purpose
    assert tokens.tolist() == [token(human, "TP53"), token(human, "CCL5"), UNKNOWN, UNKNOWN]
    assert report["how"] == {"ensembl": 1, "symbol": 1, "previous": 0, "alias": 0, "ortholog": 0, "unknown": 2}


@pytest.mark.parametrize(
    ("names", "counts", "message"),
    [
        ([], [], "no genes to match"),
        (["CD3E"], [1, 2], "counts_per_gene .* 1 genes"),
        (["CD3E", "CD8A"], [0, 0], "holds no counts"),
        (["CD3E", "CD8A"], [1, np.nan], "counts_per_gene"),
        (["CD3E", "CD8A"], [3, -1], "counts_per_gene"),
    ],
)
def test_bad_arguments(human, names, counts, message):
    with pytest.raises(ValueError, match=message):
        resolve_genes(names, human, counts)
    with pytest.raises(ValueError, match="duplicates must be"):
        InputOptions(duplicates="first")


def test_gene_names():
    var = pd.DataFrame({"id": ["ENSG1", None], "mean": [1.0, 2.0]}, index=["A", "B"])
    assert gene_names(var) == (["A", "B"], None)
    for dtype in ("object", "category", "string"):
        assert gene_names(var.astype({"id": dtype}), InputOptions(gene_ids="id")) == (["ENSG1", ""], ["A", "B"])
    in_bytes = pd.DataFrame({"id": [b"ENSG1", None]}, index=[b"A", b"B"])
    assert gene_names(in_bytes, InputOptions(gene_ids="id")) == (["ENSG1", ""], ["A", "B"])
    with pytest.raises(KeyError, match=r"column 'ids' .*'id'.*text.*\['id'\]"):
        gene_names(var, InputOptions(gene_ids="ids"))


@pytest.mark.parametrize("column", ["feature_types", "feature_type", "Type", "modality"])
@pytest.mark.parametrize("kind", ["Antibody Capture", "Peaks", "CRISPR Guide Capture", "ADT", b"Peaks"])
def test_columns_that_are_no_genes_are_refused(column, kind):
    """An antibody against CD4 is called CD4, or CD4-1 once names are made unique, and would be added to its RNA."""
    var = pd.DataFrame({column: ["Gene Expression", "Gene Expression", kind]}, index=["CD4", "CD3E", "CD4-1"])
    kind_text = kind if isinstance(kind, str) else kind.decode()
    with pytest.raises(ValueError, match=rf"1 of 3 columns are not genes, but {kind_text} .first: 'CD4-1'") as error:
        gene_names(var)
    mended = {"adata": ad.AnnData(np.ones((2, 3), np.float32), var=var)}
    exec(str(error.value).split("Leave them out: ")[1], mended)
    assert gene_names(mended["adata"].var)[0] == ["CD4", "CD3E"]
    with pytest.raises(ValueError, match=r"adata\.raw\.to_adata\(\); adata = adata\["):
        gene_names(var, InputOptions(use_raw=True))
    with pytest.raises(ValueError, match=f"all 1 are {kind_text}"):
        gene_names(var.iloc[2:])
    assert gene_names(var.assign(**{column: "protein_coding"}))[0] == ["CD4", "CD3E", "CD4-1"]


@pytest.mark.parametrize("mouse_prefix", ["", "mm10___"])
@pytest.mark.parametrize("prefix", ["GRCh38_", "hg19_", "GRCh38______"])
def test_names_with_a_genome_are_told_how_to_take_it_off(human, prefix, mouse_prefix):
    symbols = list(human.symbols[:40])
    names = [prefix + name for name in symbols] + [mouse_prefix + name.capitalize() for name in symbols if mouse_prefix]
    with pytest.raises(ValueError, match="begin with a genome") as error:
        resolve_genes(names, human, np.ones(len(names)))
    mended = {"adata": ad.AnnData(np.ones((2, len(names)), np.float32), var=pd.DataFrame(index=names)), "np": np}
    exec(str(error.value).split("with its genes: ")[1], mended)
    assert list(mended["adata"].var_names) == symbols


def test_ids_with_more_in_the_name_are_told_how_to_get_them_out(human):
    table = human.table.iloc[:30]
    names = [f"{row.ensembl_id}.3|{row.symbol}" for row in table.itertuples()]
    with pytest.raises(ValueError, match="gene_ids='id'") as error:
        resolve_genes(names, human, np.ones(30))
    adata = ad.AnnData(np.ones((2, 30), np.float32), var=pd.DataFrame(index=names))
    exec(re.split("and more: |; sd.pp", str(error.value))[1], {"adata": adata})
    tokens, _ = resolve_genes(gene_names(adata.var, InputOptions(gene_ids="id"))[0], human, np.ones(30))
    assert (tokens == table.index).all()


def test_spikes_and_mouse_genes_among_human_ones_are_named(human):
    symbols = list(human.symbols[:30])
    with pytest.warns(UserWarning, match="spike-ins; leave them out"):
        resolve_genes([*symbols, "ERCC-00002"], human, np.r_[np.ones(30), 10])
    with pytest.raises(ValueError, match="spike-ins; leave them out"):
        resolve_genes([*symbols, "ERCC-00002"], human, np.r_[np.ones(30), 100])
    mouse = ["Gapdh", "Actb", "mt-Co1", "Cd8a", "Eef1a1"]
    names = [*symbols, *mouse]
    with pytest.warns(UserWarning, match="those of a mouse") as caught:
        resolve_genes(names, human, np.r_[np.ones(30), np.full(5, 2.0)])
    mended = {"adata": ad.AnnData(np.ones((2, 35), np.float32), var=pd.DataFrame(index=names)), "scdiva": scdiva}
    exec(str(caught[0].message).split("Keep the human ones: ")[1].rstrip("."), mended)
    assert list(mended["adata"].var_names) == symbols
