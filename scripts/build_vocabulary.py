r"""Build the human vocabulary of the package from the HGNC and GENCODE tables.

    python scripts/build_vocabulary.py --hgnc hgnc_compact.tsv --gencode gencode_genes_homo_sapiens.csv.gz \
        --corpus FOLDER/*.h5ad

With `--corpus`, the entropy of each gene is counted over these files (one stream, see `scdiva.pp.corpus_entropy`) and
stored with it; a gene that no file has measured keeps NaN.

`--hgnc`: tab-separated, with a header: symbol, ensembl_gene_id, locus_group, locus_type, prev_symbol, alias_symbol
(names joined by "|", quoted). `--gencode`: comma-separated, without a header: Ensembl id, symbol (the id again where
there is none), number of transcripts, length, biotype.

Selection of genes
------------------
Candidates are (a) HGNC genes with an Ensembl id, (b) HGNC genes without one, or with one that GENCODE retired, whose
symbol GENCODE has: they get GENCODE's id and keep the retired one as an alias, and (c) GENCODE genes that HGNC does
not have. If several GENCODE genes have one symbol (U6, Y_RNA), the one with the most transcripts is used.
They are taken in this order until 41,818 (the paper's number) are reached:

1. protein-coding genes (HGNC's group or GENCODE's biotype),
2. mitochondrial genes, and immunoglobulin and T-cell receptor genes that are not pseudogenes,
3. long non-coding RNA with a symbol,
4. all other HGNC genes that are not pseudogenes (micro, small nucleolar, small nuclear, ... RNA; retired ids),
5. HGNC pseudogenes of GENCODE's processed, unprocessed, unitary and transcribed kinds: reads fall on them in
   full-length and in whole-transcriptome data,
6. long non-coding RNA without a symbol whose id is older than ENSG00000286000 (Ensembl 98, so that references in use
   have it), by number of transcripts, then length.

The rest of group 6, immunoglobulin and receptor pseudogenes, copies of small nuclear, 7SL, Y and ribosomal RNA, and
unnamed pseudogenes are excluded: polyadenylated libraries rarely contain them, and 10x references exclude them. Within
a group, genes are sorted by symbol (group 6: by id).

Names
-----
Previous symbols and aliases are those of HGNC. Further aliases are symbols of GENCODE that differ from HGNC's,
retired Ensembl ids, and RefSeq's names of the mitochondrial genes. A name is kept only if it identifies one gene among
all candidates, including the excluded ones, in the order current symbol, previous symbol, alias: a name of two genes,
or of a gene that is not in the vocabulary, must not be matched to another gene.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from scdiva._constants import N_SPECIAL
from scdiva.pp import corpus_entropy
from scdiva.tokenizer import Vocabulary

N_GENES = 41_818
NEWEST_UNNAMED_ID = "ENSG00000286000"
OUT = Path(__file__).parent.parent / "src" / "scdiva" / "tokenizer" / "human.safetensors"

PSEUDOGENES = [
    f"{transcribed}{kind}_pseudogene"
    for transcribed in ("", "transcribed_", "translated_")
    for kind in ("processed", "unprocessed", "unitary")
]
REFSEQ_MITOCHONDRIAL = {
    "MT-CO1": "MT-COX1", "MT-CO2": "MT-COX2", "MT-CO3": "MT-COX3", "MT-CYB": "MT-CYTB",
}  # fmt: skip


def read_hgnc(path: str) -> pd.DataFrame:
    hgnc = pd.read_csv(path, sep="\t", dtype=str, keep_default_na=False, na_filter=False)
    hgnc = hgnc.rename(columns={"ensembl_gene_id": "ensembl_id", "prev_symbol": "previous", "alias_symbol": "alias"})
    for column in ("previous", "alias"):
        hgnc[column] = hgnc[column].str.strip('"')
    return hgnc[["symbol", "ensembl_id", "locus_group", "locus_type", "previous", "alias"]]


def read_gencode(path: str) -> pd.DataFrame:
    names = ["ensembl_id", "symbol", "n_transcripts", "length", "biotype"]
    return pd.read_csv(path, header=None, names=names, keep_default_na=False, dtype={"symbol": str})


def join(hgnc: pd.DataFrame, gencode: pd.DataFrame) -> pd.DataFrame:
    """All candidates, one row each, with resolved ids, HGNC's names and GENCODE's annotation."""
    by_id = gencode.set_index("ensembl_id")
    free = gencode[~gencode["ensembl_id"].isin(hgnc["ensembl_id"])]
    free = free.sort_values(["n_transcripts", "length", "ensembl_id"], ascending=[False, False, True])
    free = free.drop_duplicates("symbol")
    free_by_symbol = free.set_index("symbol")["ensembl_id"]

    retired = ~hgnc["ensembl_id"].isin(by_id.index)
    replaced = retired & hgnc["symbol"].isin(free_by_symbol.index)
    old_ids = hgnc["ensembl_id"].where(replaced, "")
    hgnc = hgnc.assign(ensembl_id=hgnc["ensembl_id"].mask(replaced, hgnc["symbol"].map(free_by_symbol)))
    refseq = hgnc["symbol"].map(REFSEQ_MITOCHONDRIAL).fillna("")
    hgnc["alias"] = [join_names(*names) for names in zip(hgnc["alias"], old_ids, refseq, strict=True)]

    # if two HGNC genes share an id, it is assigned to the one whose symbol GENCODE has for this id
    is_named = hgnc["ensembl_id"].map(by_id["symbol"]) == hgnc["symbol"]
    shared = hgnc["ensembl_id"].ne("") & hgnc["ensembl_id"].duplicated(keep=False) & ~is_named
    shared &= hgnc["ensembl_id"].isin(hgnc["ensembl_id"][is_named]) | hgnc["ensembl_id"].duplicated()
    hgnc["ensembl_id"] = hgnc["ensembl_id"].mask(shared, "")

    gencode_symbol = hgnc["ensembl_id"].map(by_id["symbol"]).fillna("")
    differs = gencode_symbol.ne("") & gencode_symbol.ne(hgnc["symbol"]) & ~gencode_symbol.str.startswith("ENSG")
    hgnc["alias"] = [join_names(*names) for names in zip(hgnc["alias"], gencode_symbol.where(differs, ""), strict=True)]
    for column in ("n_transcripts", "length", "biotype"):
        hgnc[column] = hgnc["ensembl_id"].map(by_id[column])
    gencode_only = free[~free["ensembl_id"].isin(hgnc["ensembl_id"]) & ~free["symbol"].isin(hgnc["symbol"])]
    genes = pd.concat([hgnc, gencode_only.assign(previous="", alias="")], ignore_index=True)
    for column in ("locus_group", "locus_type"):
        genes[column] = genes[column].fillna("")
    genes["biotype"] = genes["biotype"].fillna("")
    no_biotype = genes["biotype"] == ""
    genes.loc[no_biotype, "biotype"] = (
        genes.loc[no_biotype, "locus_group"]
        .map({"protein-coding gene": "protein_coding", "pseudogene": "pseudogene", "non-coding RNA": "ncRNA"})
        .fillna("unknown")
    )
    return genes


def join_names(names: str, *more: str) -> str:
    every = [name for name in [*names.split("|"), *more] if name]
    return "|".join(dict.fromkeys(every))


def group_of(genes: pd.DataFrame) -> np.ndarray:
    """Number of the group (see the module's docstring) of each candidate, 0 = not taken."""
    from_hgnc = genes["locus_group"].ne("")
    has_id = genes["ensembl_id"].ne("")
    has_symbol = ~genes["symbol"].str.startswith("ENSG")
    pseudogene = genes["locus_group"].eq("pseudogene") | genes["biotype"].str.contains("pseudogene")
    receptor = genes["biotype"].str.fullmatch(r"(?:IG|TR)_[CDJV]_gene")
    lnc = genes["biotype"].eq("lncRNA")
    old = genes["ensembl_id"] < NEWEST_UNNAMED_ID
    coding = genes["locus_group"].eq("protein-coding gene") | genes["biotype"].eq("protein_coding")
    conditions = [
        ~has_id,
        coding,
        genes["symbol"].str.startswith("MT-") | receptor,
        lnc & has_symbol,
        from_hgnc & ~pseudogene,
        from_hgnc & genes["biotype"].isin(PSEUDOGENES),
        lnc & old,
    ]
    return np.select(conditions, [0, 1, 2, 3, 4, 5, 6], default=0)


def choose(genes: pd.DataFrame) -> pd.DataFrame:
    """The chosen genes, in token order."""
    genes = genes.assign(group=group_of(genes))
    named = genes[genes["group"].between(1, 5)].sort_values(["group", "symbol"])
    unnamed = genes[genes["group"] == 6]
    unnamed = unnamed.sort_values(["n_transcripts", "length", "ensembl_id"], ascending=[False, False, True])
    room = N_GENES - len(named)
    if not 0 <= room <= len(unnamed):
        raise SystemExit(f"the rules give {len(named)} named and {len(unnamed)} unnamed genes: not {N_GENES}")
    print(genes["group"].value_counts().sort_index().to_string(), f"\nof group 6 taken: {room}")
    return pd.concat([named, unnamed.head(room).sort_values("ensembl_id")])


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the human vocabulary from HGNC and GENCODE tables.")
    parser.add_argument("--hgnc", required=True)
    parser.add_argument("--gencode", required=True)
    parser.add_argument("--corpus", nargs="*", default=[], type=Path)
    parser.add_argument("--out", default=OUT, type=Path)
    args = parser.parse_args()

    genes = join(read_hgnc(args.hgnc), read_gencode(args.gencode))
    chosen = choose(genes)
    # Names are resolved in a vocabulary of all candidates, of which the chosen genes are a subset.
    everything = pd.concat([chosen, genes.drop(chosen.index)]).assign(entropy=np.float32(np.nan))
    everything = everything[["ensembl_id", "symbol", "previous", "alias", "biotype", "entropy"]]
    full = Vocabulary(everything)
    vocabulary = full.subset(full.tokens[:N_GENES])
    if args.corpus:
        vocabulary = vocabulary.with_entropy(corpus_entropy(args.corpus, vocabulary).entropy()[N_SPECIAL:])
    vocabulary.write(args.out)
    print(vocabulary, f"{args.out} {args.out.stat().st_size / 1e6:.2f} MB", sep="\n")


if __name__ == "__main__":
    main()
