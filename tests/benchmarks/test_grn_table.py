"""The part of the page on gene networks and the goals say what the rows say."""

from __future__ import annotations


def rows_for_goals() -> list[dict]:
    made = {"package": "some 1.0", "commit": "0123456789abcdef", "processor": "Some CPU", "cpu_seconds": 10.0,
            "wall_seconds": 20.0, "peak_mib": 900.0}  # fmt: skip

    def edge(arm, ratio, p):
        both = {f"{key}{end}": ratio for key in ("auprc_ratio", "early_precision")
                for end in ("", "_low", "_high", "_null_mean", "_null_high")}  # fmt: skip
        return {**made, "part": "edges", "set": "pbmc", "arm": arm, "reference": "trrust", "n_known": 9, "n_sources": 3,
                "n_targets": 8, **both, "auprc_ratio_p": p, "early_precision_p": p}  # fmt: skip

    def family(arm, name, p, **more):
        # by weight the other way round, so that taking the one for the other shows
        return {**made, "part": "families", "set": "pbmc", "arm": arm, "family": name, "n": 5, "z": 1.23, "p": 1 - p,
                "edges_z": 3.21, "edges_p": p, **more}  # fmt: skip

    def regulon(arm, **paper):
        found = {**made, "part": "regulon", "set": "pbmc", "arm": arm, "gene": "SPI1", "n_cells": 50, "n_targets": 99}
        best = [{"target": "LYZ", "weight": 1.0, "trrust": -1}, {"target": "FTL", "weight": 0.5}]
        said = {f"{name}_{key}": 1 for name in ("trrust", "dorothea") for key in ("hits", "known", "p")}
        return {**found, "targets": best, **said, "paper": paper}

    module = {"n_modules": 4, "n_genes": 2000, "n_pairs": 30, "n_pairs_random": 1.25, "n_pairs_random_most": 3,
              "n_enriched": 3, "n_enriched_random": 0.5, "n_enriched_random_most": 1}  # fmt: skip
    return [
        edge("attention", 1.3, 0.001), edge("embedding", 1.1, 0.2), edge("correlation", 1.2, 0.01),
        family("attention", "HLA class II", 0.001), family("attention", "HLA", 0.002), family("attention", "CD", 0.04),
        family("attention", "TNF", 0.5, pair={"rank": 7, "of": 1999}), family("embedding", "HLA", 0.001),
        family("spearman", "HLA class II", 0.5),
        {**made, "part": "modules", "set": "pbmc", "arm": "embedding", "collection": "hallmark", **module},
        {**made, "part": "stability", "set": "pbmc", "arm": "attention", "what": "seeds", "spearman": 0.9,
         "jaccard": 0.8, "jaccard_by_source": 0.7},
        regulon("attention", HBG1=None, HBG2=None, MS4A3=None, FTH1=12), regulon("spearman", FTH1=1),
        regulon("correlation", FTH1=31),
        {**made, "part": "speed", "set": "pbmc", "arm": "attention", "n_cells": 10000, "n_genes": 2000,
         "genes_per_cell": 300, "wall_seconds": 700.0},
    ]  # fmt: skip


def test_goals(script):
    goals = script("_grn_goals").goals
    found = {row["what"]: row for row in goals(rows_for_goals())}
    assert {what: (row["value"], row["met"]) for what, row in found.items()} == {
        "pbmc, trrust: p of the AUPRC ratio of attention": (0.001, True),
        "pbmc, trrust: p of the AUPRC ratio of embedding": (0.2, False),
        "pbmc: p of the density of HLA class II, attention": (0.001, True),
        "pbmc: families denser than sets matched by degree, attention": (1, False),
        "attention graph of 10,000 cells, 2,000 genes: seconds": (700, False),
        "attention graph of 10,000 cells, 2,000 genes: peak MiB": (900, None),
    }
    assert found["pbmc, trrust: p of the AUPRC ratio of attention"]["correlation"] == 1.2
    # a p-value is a share of 1,000 draws
    near = [{**row, "auprc_ratio_p": 0.045} for row in rows_for_goals() if row["part"] == "edges"]
    assert [(row["met"], row["over"]) for row in goals(near)] == [(None, "1,000 draws")] * 2
    assert found["pbmc: families denser than sets matched by degree, attention"]["which"] == "HLA"
    assert goals([row for row in rows_for_goals() if row["arm"] in ("spearman", "correlation")]) == []
