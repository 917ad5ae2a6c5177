"""The rules that chose the bundled genes, on tables small enough to read."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "build_vocabulary.py"

HGNC = """symbol\tensembl_gene_id\tlocus_group\tlocus_type\tprev_symbol\talias_symbol
COD1\tENSG00000000001\tprotein-coding gene\tgene with protein product\t"OLD1|OLD2"\tnick
COD2\tENSG00000000002\tprotein-coding gene\tgene with protein product\t\t
MOVED\tENSG00000000666\tprotein-coding gene\tgene with protein product\t\t
NOID\t\tprotein-coding gene\tgene with protein product\t\tCOD9
LNC1\tENSG00000000003\tnon-coding RNA\tRNA, long non-coding\t\tNOID
MIR1\tENSG00000000004\tnon-coding RNA\tRNA, micro\t\t
COD1P1\tENSG00000000005\tpseudogene\tpseudogene\t\t
RNU6-2P\tENSG00000000006\tpseudogene\tpseudogene\t\t
MT-CO1\tENSG00000000007\tprotein-coding gene\tgene with protein product\t\tCOI
MT-TF\tENSG00000000008\tnon-coding RNA\tRNA, transfer\t\t
TWIN1\tENSG00000000009\tprotein-coding gene\tgene with protein product\t\t
TWIN2\tENSG00000000009\tprotein-coding gene\tgene with protein product\t\t
GONE\tENSG00000000777\tprotein-coding gene\tgene with protein product\t\t
"""
GENCODE = """ENSG00000000001,COD1,5,2000,protein_coding
ENSG00000000002,NEW2,5,2000,protein_coding
ENSG00000000010,MOVED,3,900,protein_coding
ENSG00000000003,LNC1,2,700,lncRNA
ENSG00000000004,MIR1,1,80,miRNA
ENSG00000000005,COD1P1,1,900,processed_pseudogene
ENSG00000000006,RNU6-2P,1,100,snRNA
ENSG00000000007,MT-CO1,2,1542,protein_coding
ENSG00000000008,MT-TF,1,71,Mt_tRNA
ENSG00000000009,TWIN2,2,1000,protein_coding
ENSG00000000011,U6,1,100,snRNA
ENSG00000000012,LNC2,1,500,lncRNA
ENSG00000000013,LNC2,4,500,lncRNA
ENSG00000000014,ENSG00000000014,2,500,lncRNA
ENSG00000000015,ENSG00000000015,7,500,lncRNA
ENSG00000300000,ENSG00000300000,9,500,lncRNA
ENSG00000000016,ENSG00000000016,1,500,processed_pseudogene
"""


@pytest.fixture
def build():
    spec = importlib.util.spec_from_file_location("build_vocabulary", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def genes(build, tmp_path):
    (tmp_path / "hgnc.tsv").write_text(HGNC)
    (tmp_path / "gencode.csv").write_text(GENCODE)
    return build.join(build.read_hgnc(tmp_path / "hgnc.tsv"), build.read_gencode(tmp_path / "gencode.csv"))


def test_join(genes):
    table = genes.set_index("symbol")
    assert table.index.is_unique
    assert table.loc["COD1", ["previous", "alias"]].tolist() == ["OLD1|OLD2", "nick"]
    assert table.loc["COD2", "alias"] == "NEW2"  # GENCODE's symbol
    assert table.loc["MOVED", ["ensembl_id", "alias"]].tolist() == ["ENSG00000000010", "ENSG00000000666"]
    assert table.loc["MT-CO1", "alias"] == "COI|MT-COX1"
    assert table.loc["LNC2", "ensembl_id"] == "ENSG00000000013"  # more transcripts
    assert table.loc[["TWIN1", "TWIN2"], "ensembl_id"].tolist() == ["", "ENSG00000000009"]
    assert table.loc["GONE", ["ensembl_id", "biotype"]].tolist() == ["ENSG00000000777", "protein_coding"]


def test_groups(build, genes):
    groups = dict(zip(genes["symbol"], build.group_of(genes), strict=True))
    assert groups == {
        "COD1": 1, "COD2": 1, "MOVED": 1, "NOID": 0, "LNC1": 3, "MIR1": 4, "COD1P1": 5, "RNU6-2P": 0, "MT-CO1": 1,
        "MT-TF": 2, "TWIN1": 0, "TWIN2": 1, "GONE": 1, "U6": 0, "LNC2": 3, "ENSG00000000014": 6, "ENSG00000000015": 6,
        "ENSG00000300000": 0, "ENSG00000000016": 0,
    }  # fmt: skip
