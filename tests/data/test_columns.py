"""Columns that are not genes of the species that is read: found by name and counts, and split off by the advice."""

from __future__ import annotations

import warnings

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import scdiva
from scdiva.data.cells import open_cells
from scdiva.tokenizer import Vocabulary

N = 60


@pytest.fixture(scope="module")
def symbols():
    """Human genes with a mouse ortholog of the same name."""
    mouse = scdiva.tokenizer.names._table()
    by_name = dict(zip(Vocabulary.human().symbols, Vocabulary.human().ensembl_ids, strict=True))
    proteins = ["CD4", "CD8A", "CD27", "NCAM1"]
    names = [name for name, gene in by_name.items() if mouse.get(name.capitalize()) == gene and name.isalnum()]
    return [*[name for name in names if name not in proteins][:90], *proteins]


def counts(n_genes, seed=0):
    rng = np.random.default_rng(seed)
    return rng.poisson(rng.gamma(1, 3, n_genes), (N, n_genes)).astype(np.float32)


def opened(adata, **reading):
    """The opened cells, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cells = open_cells(adata, "human", ranked=False, empty="nan", **reading)
    return cells, [str(one.message) for one in caught]


# --- proteins ---------------------------------------------------------------------------------------------------------
PANELS = {
    "made unique": ["CD4-1", "CD8A-1", "CD27-1"],
    "as R": ["CD4.1", "CD8A.1", "CD27.1"],
    "the same name": ["CD4", "CD8A", "CD27"],
    "an alias": ["CD56", "CD16", "HLA-DR"],
    "tagged": ["ADT_CD4", "ADT_CD45RA"],
    "no gene": ["CD45RA", "CD3", "IgG1"],
    "TotalSeq": ["CD4_TotalSeqC", "CD45RA_TotalSeqC"],
    "anti": ["anti-CD4", "anti-human-CD8"],
}


@pytest.mark.parametrize("read_as", ["human, counts", "human, log1p", "mouse", "mouse, names in capitals"])
@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.filterwarnings("ignore:Variable names are not unique")
def test_proteins_change_no_value_of_the_rna(symbols, panel, read_as):
    rna, names = counts(len(symbols)), PANELS[panel]
    if read_as.startswith("mouse"):
        if panel == "an alias" or ("capitals" in read_as and panel in ("made unique", "as R")):
            pytest.skip("no such names: mouse genes are found by ortholog alone")
        symbols = [name.capitalize() for name in symbols]
        if panel != "no gene" and "capitals" not in read_as:
            names = [name.replace("CD", "Cd").replace("8A", "8a") for name in names]
    rna[:, -4:] = np.random.default_rng(3).poisson(2, (N, 4))
    protein = np.random.default_rng(1).poisson(400, (N, len(names)))
    protein[:, 1:] //= 6  # weaker ones of the same panel
    x = np.hstack([rna, protein])
    if "log1p" in read_as:
        x = np.log1p(1e4 * x / x.sum(axis=1, keepdims=True))
    alone, _ = opened(ad.AnnData(rna, var=pd.DataFrame(index=symbols)))
    adata = ad.AnnData(x, var=pd.DataFrame(index=symbols + names))
    combined, messages = opened(adata)
    (message,) = [one for one in messages if "human orthologs" not in one]
    assert f"{len(names)} columns hold the counts of antibodies" in message
    assert all(repr(name) in message for name in names)
    np.testing.assert_allclose(combined.expression(0, N).toarray(), alone.expression(0, N).toarray(), rtol=2e-6)
    np.testing.assert_array_equal(combined.lengths, alone.lengths)
    log = combined.log_normalised().toarray()
    assert not log[:, len(symbols) :].any()
    if "log1p" not in read_as:
        np.testing.assert_allclose(log[:, : len(symbols)], alone.log_normalised().toarray(), rtol=2e-6)
    assert combined.report["share_counts"] == pytest.approx(alone.report["share_counts"])
    if panel == "made unique":
        mended = {"adata": adata}
        exec(message.split("Leave them out: ")[1].split(". If")[0], mended)
        assert list(mended["adata"].var_names) == symbols


@pytest.mark.parametrize(
    ("name", "gene", "mean"),
    [("CD4-1", "CD4", 8), ("MATR3-1", "MATR3", 8), ("ALDOA.1", "ALDOA", 8), ("AB015752.4", None, 400)],
)
def test_a_second_column_of_rna_is_summed(symbols, name, gene, mean):
    """Annotations hold some genes twice, and the second may have most of the counts."""
    rna = counts(len(symbols) + 400)
    names = [*symbols, *(f"LINC{i:05d}" for i in range(399)), gene or "no gene"]
    rna[:, -1] = 0
    second = np.random.default_rng(2).poisson(mean, (N, 1)) * (np.arange(N)[:, None] % 9 == 0)
    cells, messages = opened(ad.AnnData(np.hstack([rna, second]), var=pd.DataFrame(index=[*names, name])))
    assert not [one for one in messages if "antibodies" in one]
    assert cells.dropped is None


def with_columns(symbols, names, mean, first=False):
    """RNA, of which the last four genes have few counts (proteins bear their names), and columns of so many counts."""
    rna, of_names = counts(len(symbols)), np.random.default_rng(4).poisson(mean, (N, len(names)))
    rna[:, -4:] = np.arange(N)[:, None] % 12 == 0
    parts = [(rna, symbols), (of_names, names)][:: -1 if first else 1]
    x, names = np.hstack([x for x, _ in parts]), [*parts[0][1], *parts[1][1]]
    adata = ad.AnnData(sp.csr_matrix(x.astype(np.float32)), var=pd.DataFrame(index=names))
    adata.var_names_make_unique()
    return adata


def proteins(adata):
    dropped = opened(adata)[0].dropped
    return [] if dropped is None else adata.var_names[dropped].tolist()


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.filterwarnings("ignore:Variable names are not unique")
def test_an_antibody_makes_none_of_a_gene(symbols, first):
    """CD5L and CD207 are genes, also if a model lacks them; a duplicate gene column outside a panel is RNA."""
    genes = [*symbols, "CD5L", "UQCR11", "UQCR11"]
    adata = with_columns(genes, ["ADT_CD3", "ADT_CD4", "ADT_CD8"], 40, first)
    adata.X = adata.X.multiply(adata.var_names != "UQCR11").tocsr()
    table = Vocabulary.human().table
    lacks = Vocabulary(table[table["symbol"] != "CD5L"])
    with pytest.warns(UserWarning, match="3 columns hold the counts of antibodies"):
        dropped = open_cells(adata, lacks, ranked=False).dropped
    assert adata.var_names[dropped].tolist() == ["ADT_CD3", "ADT_CD4", "ADT_CD8"]


@pytest.mark.parametrize("at", [None, 0, 3, 5])
@pytest.mark.parametrize("mean", [1, 8, 40])
def test_a_panel_is_found_by_few_counts_and_around_what_is_not_measured(symbols, at, mean):
    panel = ["CD3", "CD4-1", "CD8A-1", "CD27-1", "CD56"]
    if at is not None:
        panel.insert(at, "CD24")
        assert "CD24" not in symbols
        mean = 40
    else:
        panel = ["CD4-1", "CD8A-1", "CD27-1", "NCAM1-1"]
    assert proteins(with_columns(symbols, panel, mean)) == panel


def test_heavy_genes_beside_proteins_are_rna(symbols):
    """In the order of the alphabet proteins stand one by one among genes."""
    names = ["CD4", "CD4-1", "CD74", "CD8A", "CD8A-1"]
    rna_genes = [name for name in symbols if name not in names]
    x = np.hstack([counts(len(rna_genes)), np.random.default_rng(4).poisson([1, 40, 90, 1, 40], (N, 5))])
    assert proteins(ad.AnnData(x, var=pd.DataFrame(index=rna_genes + names))) == ["CD4-1", "CD8A-1"]
    names = ["CD44", "CD45RA", "CD45RO", "CD47", "CD48", "CD49F"]
    x = np.hstack(
        [np.random.default_rng(4).poisson([20, 40, 30, 20, 20, 40], (N, 6)), counts(4), counts(len(rna_genes))]
    )
    among = ["CD40", "CD40LG", "CD41", "CD43", *names, "CD5", "CD52", "CD53", "CD58"]
    x = np.hstack([counts(4, 1), x])
    assert proteins(ad.AnnData(x, var=pd.DataFrame(index=among + rna_genes))) == ["CD45RA", "CD45RO", "CD49F"]


@pytest.mark.parametrize("mean", [0.1, 1])
def test_second_columns_of_as_many_counts_are_rna(symbols, mean):
    """30 genes once more, under names made unique."""
    rna = counts(len(symbols)) + 1
    again = np.random.default_rng(6).poisson(mean, (N, 30))
    names = [*symbols, *(f"{name}-1" for name in symbols[-30:])]
    assert proteins(ad.AnnData(np.hstack([rna, again]), var=pd.DataFrame(index=names))) == []


@pytest.mark.parametrize("mean", [3, 40])
@pytest.mark.parametrize(
    "form", ["Hu.{}", "HuMs.{}", "{0}|{0}|AHS0231|pAbO", "CITE_{}", "{}_p", "ab{}", "{}-UCHT1", "{} (RPA-T4)"]
)
def test_names_of_antibodies_as_makers_give_them(symbols, form, mean):
    panel = [form.format(name) for name in ("CD3", "CD4", "CD8", "CD45RA", "CD56", "CD11b")]
    _, messages = opened(with_columns(symbols, panel, mean))
    assert len(messages) == 1
    assert "6 columns hold the counts of antibodies" in messages[0]


@pytest.mark.parametrize("form", ["{}-201", "{}-AS1"])
def test_genes_named_by_more_than_their_symbol_are_no_antibodies(symbols, form):
    """A transcript's number, or antisense genes; and mouse genes without an ortholog of their name."""
    assert proteins(with_columns(symbols, [form.format(name) for name in ("CD74", "CD52", "CD99")], 40)) == []
    x = np.hstack([np.full((N, 1), 200.0), counts(len(symbols))])
    assert proteins(ad.AnnData(x, var=pd.DataFrame(index=["Cd247", *symbols]))) == []
    names = [f"{name}__chr12" for name in symbols]
    with pytest.raises(ValueError, match="Human genes are expected"):
        opened(ad.AnnData(counts(len(names)), var=pd.DataFrame(index=names)))


# --- two species ------------------------------------------------------------------------------------------------------
def barnyard(symbols, n_mouse, human="{}", mouse="{}"):
    """Human cells, then mouse cells, each with a few reads of the other."""
    x = counts(len(symbols))
    ambient = np.random.default_rng(5).poisson(x * 0.05)
    of_mouse = np.arange(N)[:, None] >= N - n_mouse
    x = np.hstack([np.where(of_mouse, ambient, x), np.where(of_mouse, x, ambient)]).astype(np.float32)
    names = [*map(human.format, symbols), *(mouse.format(name.capitalize()) for name in symbols)]
    return ad.AnnData(sp.csr_matrix(x), var=pd.DataFrame(index=names))


@pytest.mark.parametrize("n_mouse", [1, 20, 55])
@pytest.mark.parametrize(
    ("reading", "human", "mouse"),
    [
        ({}, "{}", "{}"),
        ({}, "GRCh38_{}", "mm10___{}"),
        ({}, "{}", "mm10___{}"),
        ({"species": "human"}, "{}", "{}"),
        ({"species": "mouse"}, "{}", "{}"),
        ({"layer": "counts"}, "{}", "{}"),
        ({"use_raw": True}, "{}", "{}"),
        ({"gene_ids": "id"}, "GRCh38_{}", "mm10___{}"),
    ],
)
def test_cells_of_two_species_are_counted_and_split(symbols, n_mouse, reading, human, mouse):
    adata = barnyard(symbols, n_mouse, human, mouse)
    if "layer" in reading:
        adata.layers["counts"], adata.X = adata.X, None
    elif "use_raw" in reading:
        adata.raw = adata.copy()
    elif "gene_ids" in reading:
        adata.var = pd.DataFrame({"id": adata.var_names}, index=[f"g{i}" for i in range(adata.n_vars)])
    try:
        message = " ".join(one for one in opened(adata, **reading)[1] if "human orthologs" not in one)
    except ValueError as error:
        message = str(error)
    assert "antibodies" not in message
    assert f"{N - n_mouse} of {N} cells are human and {n_mouse} mouse" in message
    names = {"adata": adata, "np": np, "scdiva": scdiva}
    exec(message.split("be read alike: ")[1], names)
    parts = (names["adata"], adata.obs_names[: N - n_mouse]), (names["mouse"], adata.obs_names[N - n_mouse :])
    reading = {key: value for key, value in reading.items() if key in ("layer", "gene_ids")}
    for cells, expected in parts:
        assert cells.obs_names.equals(expected)
        part, messages = opened(cells, **reading)
        assert ("read as their human orthologs" in " ".join(messages)) == (cells is names["mouse"])
        assert part.report["share_counts"] > 0.95


def test_other_species_are_no_mixture(symbols):
    assert not opened(barnyard(symbols, 0))[1], "a few reads of mouse in human cells"
    fly = ["Act5C", "Gapdh1", "Rpl5", "dpp", "wg", "hh", "en", "ftz", "Hml", "Pxn"]
    with pytest.raises(ValueError, match=r"Human genes are expected: .* of other species, pass a dict"):
        opened(ad.AnnData(counts(len(fly)), var=pd.DataFrame(index=fly)))


def test_mouse_genes_that_bear_a_genome_are_no_mixture(symbols):
    mice = barnyard(symbols, N, mouse="mm10_{}")[:, len(symbols) :].copy()
    with pytest.raises(ValueError, match="begin with a genome") as error:
        opened(mice)
    names = {"adata": mice}
    exec(str(error.value).split("with its genes: ")[1], names)
    assert opened(names["adata"])[0].report["share_counts"] > 0.95


# --- genes in rows ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("spell", [str, str.capitalize])
def test_genes_in_rows_are_seen(symbols, spell, tmp_path):
    names = [spell(name) for name in symbols]
    adata = ad.AnnData(sp.csr_matrix(counts(len(names))), var=pd.DataFrame(index=names)).T.copy()
    with pytest.raises(ValueError, match=rf"9[34] of {len(names)} adata.obs_names are genes") as error:
        opened(adata)
    mended = {"adata": adata}
    exec(str(error.value).split("columns: ")[1], mended)
    assert list(mended["adata"].var_names) == names
    adata.write_h5ad(tmp_path / "rows.h5ad")
    with pytest.raises(ValueError, match="the genes are in the rows"):
        opened(tmp_path / "rows.h5ad")
