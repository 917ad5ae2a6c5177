"""How much of an embedding is left where only some genes were measured, and what tells it from the genes alone.

    python benchmarks/few_genes.py --data FOLDER --corpus FOLDER [--cells 600] [--seeds 0 1]

Cells of sets with all genes are embedded whole, and cut to some of them: the most variable ones (`hvg`, seurat's way),
those with most counts (`expressed`), any (`random`). The cosine of both embeddings of a cell, mean over cells, is what
is left. Three numbers are asked whether they tell a mean cosine of 0.95 or more from a lower one: how many genes of the
vocabulary were measured, their share of the entropy that the model's folder stores of each gene, and their share of the
encoder's squared weights. `scdiva.data.cells` warns below a share of the entropy, and says about what is left:
both are taken from here, and a test holds them to it.

Of the sets, three are of the benchmark, three were held out as the model was trained (`citefuse`, `breast`, `vision`),
and two trained it (a cut of known cells is a cut as well): tissues are blood, cancer lines, skin, breast, melanoma.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path

import anndata as ad
import numpy as np
import scanpy as sc
import scipy.sparse as sp
from _record import record
from sklearn.metrics import roc_auc_score
from thinning import cosine

import scdiva as sd
from scdiva.data import open_cells
from scdiva.models import ScDiVa

SETS = ("pbmc3k_raw", "kang_ifnb_2800", "sc_mixology_cell_lines")
CORPUS = (
    *("citefuse_eccite_pbmc_500", "breast_scdeconr_ref", "vision_metastasis_cp007_604"),
    *("pisces_pbmc_1000", "scillus_GSE128531_skin"),
)
N_GENES = (100, 300, 500, 1000, 2000, 3000, 5000, 8000, 12000)
EDGES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)
"""Bounds of the shares of entropy over which cuts are summed up."""
ENOUGH = 0.95
SIGNS = {
    "share_entropy": "share of the entropy",
    "n_known": "number of known genes",
    "share_weight": "share of weights",
}


def cuts(adata: ad.AnnData, known: np.ndarray, seeds: tuple[int, ...]) -> Iterator[tuple[str, int, np.ndarray]]:
    """Kind, number asked for, and columns of each cut; `known` are the columns of known genes."""
    total = np.asarray(sp.csr_matrix(adata.X).sum(axis=0)).ravel()
    logs = adata.copy()
    sc.pp.normalize_total(logs, target_sum=1e4)
    sc.pp.log1p(logs)
    for n in N_GENES:
        if n >= len(known):
            continue
        sc.pp.highly_variable_genes(logs, n_top_genes=n, flavor="seurat")
        yield "hvg", n, np.flatnonzero(logs.var["highly_variable"])
        yield "expressed", n, np.sort(np.argsort(-total, kind="stable")[:n])
        for seed in seeds:
            yield "random", n, np.sort(np.random.default_rng(seed).permutation(known)[:n])


def left(adata: ad.AnnData, model: ScDiVa, seeds: tuple[int, ...]) -> list[dict]:
    """What is left of the embeddings of a set after each cut."""

    def embedded(cells: ad.AnnData) -> np.ndarray:
        return sd.tl.embed(cells, model, copy=True, empty="nan").obsm["X_scdiva"]

    entropy = model.vocabulary.entropy.astype(np.float64)
    weight = model.anchor.table.weight.detach().double().square().sum(dim=1).numpy()
    tokens = open_cells(adata, model.vocabulary, empty="nan").tokens
    whole, rows = embedded(adata), []
    for kind, n, columns in cuts(adata, np.flatnonzero(tokens >= 0), seeds):
        found = embedded(adata[:, columns].copy())
        kept = ~np.isnan(found).any(axis=1)
        genes = np.unique(tokens[columns][tokens[columns] >= 0])
        rows.append({
            "kind": kind, "n_genes": n, "n_known": len(genes), "cosine": cosine(found[kept], whole[kept]),
            "share_entropy": entropy[genes].sum() / entropy.sum(), "share_weight": weight[genes].sum() / weight.sum(),
        })  # fmt: skip
    return rows


def summed_up(rows: list[dict]) -> list[dict]:
    """Rows of the results: by kind and number of genes, by share of entropy, and what tells enough from too few."""
    found: list[dict] = []
    for kind, n in dict.fromkeys((row["kind"], row["n_genes"]) for row in rows):
        some = [row for row in rows if (row["kind"], row["n_genes"]) == (kind, n)]
        found.append({"kind": kind, "n_genes": n, **_spread(some)})
    for low, high in itertools.pairwise(EDGES):
        if some := [row for row in rows if low < row["share_entropy"] <= high]:
            found.append({"above": low, "up_to": high, **_spread(some)})
    enough = np.array([row["cosine"] >= ENOUGH for row in rows])
    for sign in SIGNS:
        values = np.array([row[sign] for row in rows])
        right = [float(((values >= least) == enough).mean()) for least in values]
        best = int(np.argmax(right))
        found.append({
            "sign": sign, "auc": round(float(roc_auc_score(enough, values)), 4), "least": round(float(values[best]), 4),
            "right": round(right[best], 4), "n_cuts": len(rows),
        })  # fmt: skip
    return found


def _spread(rows: list[dict]) -> dict:
    cosines = [row["cosine"] for row in rows]
    return {
        "n_cuts": len(rows),
        "share_entropy": round(float(np.mean([row["share_entropy"] for row in rows])), 4),
        "n_known": round(float(np.mean([row["n_known"] for row in rows]))),
        "cosine": round(float(np.mean(cosines)), 4),
        "cosine_least": round(min(cosines), 4),
        "cosine_most": round(max(cosines), 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the benchmark h5ad files")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of the corpus h5ad files")
    parser.add_argument("--cells", type=int, default=600, help="most cells of a set")
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1), help="of the random cuts")
    parser.add_argument("--model", default="scdiva-mini")
    arguments = parser.parse_args()

    sd.settings.progress = False
    model, rows = sd.models.load_model(arguments.model), []
    warnings.filterwarnings("ignore", message=".*(of the counts fall on known genes|genes that the model knows)")
    for file in [
        *(arguments.data / f"{name}.h5ad" for name in SETS),
        *(arguments.corpus / f"{n}.h5ad" for n in CORPUS),
    ]:
        adata = ad.read_h5ad(file)
        adata.var_names_make_unique()
        adata = adata[np.sort(np.random.default_rng(0).permutation(adata.n_obs)[: arguments.cells])].copy()
        rows += left(adata, model, tuple(arguments.seeds))
        print(f"{file.stem}: {len(rows)} cuts so far", flush=True)
    found = summed_up(rows)
    for row in found:
        print(", ".join(f"{key} {value}" for key, value in row.items()))
    path = record("few_genes", found, model=arguments.model, sets=[*SETS, *CORPUS], cells=arguments.cells)
    print(f"written: {path.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
