"""The rules that chose the bundled genes, on tables small enough to read."""

from __future__ import annotations

# symbol, locus group, previous symbols, aliases; the last digits of the Ensembl ID, none where there is none
HGNC = """COD1|1|protein-coding gene|OLD1,OLD2|nick
COD2|2|protein-coding gene||
MOVED|666|protein-coding gene||
NOID||protein-coding gene||COD9
LNC1|3|non-coding RNA/RNA, long non-coding||NOID
COD1P1|5|pseudogene||
MT-TF|8|non-coding RNA/RNA, transfer||
TWIN1|9|protein-coding gene||
TWIN2|9|protein-coding gene||
GONE|777|protein-coding gene||"""
# symbol, digits, transcripts, length, biotype
GENCODE = """COD1,1,5,2000,protein_coding
NEW2,2,5,2000,protein_coding
MOVED,10,3,900,protein_coding
LNC1,3,2,700,lncRNA
COD1P1,5,1,900,processed_pseudogene
MT-TF,8,1,71,Mt_tRNA
TWIN2,9,2,1000,protein_coding
LNC2,12,1,500,lncRNA
LNC2,13,4,500,lncRNA
ENSG00000000015,15,7,500,lncRNA
ENSG00000300000,300000,9,500,lncRNA"""


def test_genes_are_joined_and_chosen_by_group(script, tmp_path):
    build = script("build_vocabulary")
    hgnc = ["symbol\tensembl_gene_id\tlocus_group\tlocus_type\tprev_symbol\talias_symbol"]
    for symbol, number, locus, *names in (line.split("|") for line in HGNC.splitlines()):
        group, _, kind = locus.partition("/")
        before, alias = (name.replace(",", "|") for name in names)
        hgnc.append("\t".join([symbol, number and f"ENSG{number:0>11}", group, kind, before, alias]))
    gencode = [line.split(",", 2) for line in GENCODE.splitlines()]
    (tmp_path / "hgnc.tsv").write_text("\n".join(hgnc))
    (tmp_path / "gencode.csv").write_text("\n".join(f"ENSG{n:0>11},{symbol},{rest}" for symbol, n, rest in gencode))
    genes = build.join(build.read_hgnc(tmp_path / "hgnc.tsv"), build.read_gencode(tmp_path / "gencode.csv"))
    table = genes.set_index("symbol")
    assert table.index.is_unique
    assert table.loc["COD1", ["previous", "alias"]].tolist() == ["OLD1|OLD2", "nick"]
    assert table.loc["COD2", "alias"] == "NEW2"  # GENCODE's symbol
    assert table.loc["MOVED", ["ensembl_id", "alias"]].tolist() == ["ENSG00000000010", "ENSG00000000666"]
    assert table.loc["LNC2", "ensembl_id"] == "ENSG00000000013"  # more transcripts
    assert table.loc[["TWIN1", "TWIN2"], "ensembl_id"].tolist() == ["", "ENSG00000000009"]
    assert dict(zip(genes["symbol"], build.group_of(genes), strict=True)) == {
        "COD1": 1, "COD2": 1, "MOVED": 1, "NOID": 0, "LNC1": 3, "COD1P1": 5, "MT-TF": 2, "TWIN1": 0, "TWIN2": 1,
        "GONE": 1, "LNC2": 3, "ENSG00000000015": 6, "ENSG00000300000": 0,
    }  # fmt: skip
