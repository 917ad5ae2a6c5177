"""`tl.enrich_modules`: the same sets from a file, a mapping and a frame; counts by hand."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from scipy.stats import false_discovery_control, hypergeom

import scdiva as sd

SETS = {
    "first half": [f"G{i}" for i in range(10)],
    "mixed": ["G0", "G1", "G2", "G20", "G21", "elsewhere", "G39"],
    "without module": ["G36", "G37", "G38", "G39", "G40", "G41"],
    "small": ["G0", "G1"],
    "first": [f"G{i}" for i in range(5)],
}


@pytest.fixture
def adata():
    """Modules of 20, 10 and 6 genes; four genes have none."""
    code = np.repeat([0, 1, 2, -1], [20, 10, 6, 4])
    var = pd.DataFrame(
        {"m": pd.Categorical.from_codes(code, ["0", "1", "2", "unused"])}, index=[f"G{i}" for i in range(40)]
    )
    var["symbol"], var["scdiva_grn_module"] = [f"S{i}" for i in range(40)], var["m"]
    return ad.AnnData(sp.csr_matrix((3, 40), dtype=np.float32), var=var)


def slowly(adata, sets, least, most) -> dict:
    """Module and set to overlap and p."""
    module = adata.var["m"]
    background = set(adata.var_names[module.notna()])
    found = {}
    for name, genes in sets.items():
        genes = set(genes) & background
        if least <= len(genes) <= most:
            for number in ("0", "1", "2"):
                own = set(adata.var_names[module == number])
                k = len(own & genes)
                p = sum(hypergeom.pmf(i, len(background), len(genes), len(own)) for i in range(k, len(own) + 1))
                found[number, name] = (len(own), len(genes), k, k / (len(own) * len(genes) / len(background)), p)
    return found


def test_counts_and_tests(adata, contents):
    before = contents(adata)
    found = sd.tl.enrich_modules(adata, SETS)
    assert list(found) == ["module", "gene_set", "n_module", "n_set", "n_overlap", "fold", "p", "padj", "genes"]
    expected = slowly(adata, SETS, 5, 500)
    assert {(row.module, row.gene_set) for row in found.itertuples()} == set(expected)
    assert len(found) == len(expected) == 9
    for row in found.itertuples():
        np.testing.assert_allclose(
            (row.n_module, row.n_set, row.n_overlap, row.fold, row.p), expected[row.module, row.gene_set]
        )
        assert len([gene for gene in row.genes.split(",") if gene]) == row.n_overlap
    np.testing.assert_allclose(found["padj"], false_discovery_control(found["p"]))
    assert found["padj"].is_monotonic_increasing
    assert found.loc[0, ["module", "gene_set"]].tolist() == ["0", "first half"]
    assert set(found.loc[0, "genes"].split(",")) == set(SETS["first half"])
    assert contents(adata) == before


def test_sizes_of_sets(adata):
    for least, most in ((2, 500), (5, 5), (6, 10)):
        found = sd.tl.enrich_modules(adata, SETS, min_genes=least, max_genes=most)
        assert {(row.module, row.gene_set) for row in found.itertuples()} == set(slowly(adata, SETS, least, most))


def test_files_frames_and_mappings_say_the_same(adata, tmp_path):
    expected = sd.tl.enrich_modules(adata, SETS)
    lines = ["\t".join([name, "https://nowhere", *genes]) for name, genes in SETS.items()]
    (tmp_path / "sets.gmt").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    (tmp_path / "windows.gmt").write_bytes("\r\n".join(line + "\t" for line in lines).encode())
    frame = pd.DataFrame([(name, gene) for name, genes in SETS.items() for gene in genes], columns=["source", "target"])
    for sets in (
        tmp_path / "sets.gmt",
        str(tmp_path / "windows.gmt"),
        frame,
        frame.astype("category").assign(weight=1.0),
    ):
        pd.testing.assert_frame_equal(sd.tl.enrich_modules(adata, sets), expected)


def test_columns_of_modules_and_of_symbols(adata):
    expected = sd.tl.enrich_modules(adata, SETS)
    by_symbol = {name: [gene.replace("G", "S") for gene in genes] for name, genes in SETS.items()}
    found = sd.tl.enrich_modules(adata, by_symbol, gene_symbols="symbol", key="m")
    pd.testing.assert_frame_equal(found.drop(columns="genes"), expected.drop(columns="genes"))
    assert found.loc[0, "genes"] == expected.loc[0, "genes"].replace("G", "S")
    adata.var["m"] = adata.var["m"].astype(object)
    adata.var["n"] = adata.var["m"].map({"0": 0.0, "1": 1.0, "2": 2.0})
    for key in ("m", "n"):
        found = sd.tl.enrich_modules(adata, SETS, key=key)
        assert found["p"].tolist() == expected["p"].tolist()


@pytest.mark.parametrize(
    ("sets", "options", "kind", "said"),
    [
        (SETS, {"key": "gone"}, KeyError, r"'gone'.* call scdiva.tl.grn_modules\(.*key_added='gone'\)"),
        (SETS, {"gene_symbols": "gone"}, KeyError, "no column 'gone'; it has 'm', 'symbol'"),
        (pd.DataFrame({"source": ["a"], "gene": ["b"]}), {}, ValueError, "no column 'target'; it needs source"),
        (
            {"a": ["ENSG1"]},
            {},
            ValueError,
            "1 gene sets .*'a'.*5 to 500 .*36.*'G0'.*gene_symbols",
        ),
        ({}, {}, ValueError, "None of 0 gene sets"),
        ("gone.gmt", {}, FileNotFoundError, "gone.gmt"),
        (b"set,description,gene\n", {}, ValueError, "no GMT file: line 1"),
        (b"a\tb\tG1\nb\tG1\n", {}, ValueError, "line 2"),
        (b"\n\n", {}, ValueError, "holds no gene sets"),
    ],
)
def test_what_is_no_gene_set_is_refused(adata, contents, tmp_path, sets, options, kind, said):
    if isinstance(sets, bytes):
        (tmp_path / "sets.gmt").write_bytes(sets)
        sets = tmp_path / "sets.gmt"
    elif isinstance(sets, str):
        sets = tmp_path / sets
    before = contents(adata)
    with pytest.raises(kind, match=said):
        sd.tl.enrich_modules(adata, sets, **options)
    assert contents(adata) == before


def test_modules_of_no_gene(adata):
    adata.var["m"] = pd.Categorical([None] * 40, ["0"])
    with pytest.raises(ValueError, match="no gene of adata has a module"):
        sd.tl.enrich_modules(adata, SETS, key="m")
    with pytest.raises(TypeError, match="expected an AnnData"):
        sd.tl.enrich_modules("cells.h5ad", SETS)


def test_toy_types_are_their_modules():
    """From cells to gene sets."""
    toy = sd.datasets.toy(300, 200, rng=0)
    sd.tl.grn(toy, "correlation")
    sd.tl.grn_modules(toy)
    markers = {name: list(genes) for name, genes in toy.uns["truth"]["markers"].items()}
    found = sd.tl.enrich_modules(toy, markers)
    hits = found[found["padj"] < 1e-6]
    assert sorted(hits["gene_set"]) == sorted(markers)
    assert hits["module"].nunique() == 4
    assert (hits["n_overlap"] >= 0.9 * hits["n_set"]).all()
