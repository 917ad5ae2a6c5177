"""The rules that chose the bundled genes, on tables small enough to read."""

from __future__ import annotations

# symbol, digits of the Ensembl id, locus group, locus type, previous symbols, aliases
HGNC = """COD1|1|protein-coding gene||OLD1,OLD2|nick
COD2|2|protein-coding gene|||
MOVED|666|protein-coding gene|||
LNC1|3|non-coding RNA|RNA, long non-coding|||
COD1P1|5|pseudogene|||
TWIN1|9|protein-coding gene|||
TWIN2|9|protein-coding gene|||
GONE|777|protein-coding gene|||"""
# digits of the Ensembl id, symbol, transcripts, length, biotype
GENCODE = """1|COD1,5,2000,protein_coding
2|NEW2,5,2000,protein_coding
10|MOVED,3,900,protein_coding
3|LNC1,2,700,lncRNA
5|COD1P1,1,900,processed_pseudogene
9|TWIN2,2,1000,protein_coding
12|LNC2,1,500,lncRNA
13|LNC2,4,500,lncRNA
300000|ENSG00000300000,9,500,lncRNA"""


def test_genes_are_joined_and_chosen_by_group(script, tmp_path):
    build, header = script("build_vocabulary"), "symbol ensembl_gene_id locus_group locus_type prev_symbol alias_symbol"
    rows = [header.split()]
    for symbol, number, *rest, before, alias in (line.split("|")[:6] for line in HGNC.splitlines()):
        rows.append([symbol, f"ENSG{number:0>11}", *rest, before.replace(",", "|"), alias])
    (tmp_path / "hgnc.tsv").write_text("\n".join("\t".join(row) for row in rows))
    lines = (f"ENSG{line.split('|')[0]:0>11},{line.split('|')[1]}" for line in GENCODE.splitlines())
    (tmp_path / "gencode.csv").write_text("\n".join(lines))
    genes = build.join(build.read_hgnc(tmp_path / "hgnc.tsv"), build.read_gencode(tmp_path / "gencode.csv"))
    table = genes.set_index("symbol")
    assert table.index.is_unique
    assert table.loc["COD1", ["previous", "alias"]].tolist() == ["OLD1|OLD2", "nick"]
    assert table.loc["COD2", "alias"] == "NEW2"  # GENCODE's symbol
    assert table.loc["MOVED", ["ensembl_id", "alias"]].tolist() == ["ENSG00000000010", "ENSG00000000666"]
    assert table.loc["LNC2", "ensembl_id"] == "ENSG00000000013"  # more transcripts
    assert table.loc[["TWIN1", "TWIN2"], "ensembl_id"].tolist() == ["", "ENSG00000000009"]
    assert dict(zip(genes["symbol"], build.group_of(genes), strict=True)) == {
        "COD1": 1, "COD2": 1, "MOVED": 1, "LNC1": 3, "COD1P1": 5, "TWIN1": 0, "TWIN2": 1, "GONE": 1, "LNC2": 3,
        "ENSG00000300000": 0,
    }  # fmt: skip
