"""Build the table of mouse genes and their human orthologs that comes with the package.

    python scripts/build_orthologs.py mouse_human_orthologs.tsv.gz

Input: pairs of Ensembl BioMart, with homology type, confidence and gene-order conservation. Output: for each mouse gene
one human gene, that of the one-to-one pair where there is one, else that of the pair of higher confidence, then of
higher conservation, then the first by its symbol. Several mouse genes may have one human gene.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import pandas as pd

OUT = Path(__file__).parents[1] / "src" / "scdiva" / "tokenizer" / "mouse_orthologs.tsv.gz"


def chosen(pairs: pd.DataFrame) -> pd.DataFrame:
    """The pair of each mouse gene, as `mouse_id`, `mouse_symbol`, `human_id`; ids without their prefix and zeros."""
    numbers = pairs[["confidence", "gene_order_conservation"]].apply(pd.to_numeric, errors="coerce")
    pairs = pairs.assign(first=pairs["homology"] != "one2one", **numbers).sort_values(
        ["mouse_ensembl_id", "first", "confidence", "gene_order_conservation", "human_symbol"],
        ascending=[True, True, False, False, True],
        kind="stable",
        na_position="last",
    )
    pairs = pairs.drop_duplicates("mouse_ensembl_id")
    return pd.DataFrame(
        {
            "mouse_id": pairs["mouse_ensembl_id"].str.removeprefix("ENSMUSG").astype(int),
            "mouse_symbol": pairs["mouse_symbol"],
            "human_id": pairs["human_ensembl_id"].str.removeprefix("ENSG").astype(int),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    pairs = chosen(pd.read_csv(arguments.table, sep="\t", dtype=str, keep_default_na=False))
    with arguments.out.open("wb") as file, gzip.GzipFile(fileobj=file, mode="wb", mtime=0, filename="") as packed:
        packed.write(pairs.to_csv(sep="\t", index=False, lineterminator="\n").encode())
    size = arguments.out.stat().st_size
    print(f"{len(pairs):,} mouse genes, {pairs['human_id'].nunique():,} human genes, {size:,} bytes")


if __name__ == "__main__":
    main()
