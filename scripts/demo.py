"""Embed real cells with the bundled model, draw them, and score the embedding beside PCA.

Without arguments: the 700 blood cells that come with scanpy (68k PBMCs, Zheng et al. 2017, reduced). With ``--data``:
the cells of an h5ad file. Writes demo/embedding.h5ad and demo/umap.png.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import anndata as ad
import numpy as np
import scanpy as sc

import scdiva as sd

OUT = Path("demo")
LABELS = (
    "cell_type",
    "celltype",
    "CellType",
    "cell_types",
    "cell_ontology_class",
    "bulk_labels",
    "annotation",
    "labels",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="an h5ad file; without it, scanpy's pbmc68k_reduced")
    file = parser.parse_args().data
    sd.settings.progress = sys.stderr.isatty()
    try:
        name, adata = ("pbmc68k_reduced", sd.datasets.pbmc68k_reduced()) if file is None else (file.stem, read(file))
        use_raw = adata.raw is not None and holds(adata.X, lambda x: x < 0)  # X is scaled: the expression is in raw
        start = time.perf_counter()
        sd.tl.embed(adata, use_raw=use_raw)
        took = time.perf_counter() - start
    except (OSError, KeyError, ValueError) as error:
        sys.exit(f"demo: {error}")

    labels = next((column for column in LABELS if column in adata.obs), None)
    OUT.mkdir(exist_ok=True)
    sd.pl.umap(adata, color=labels, title=f"{name}: {adata.n_obs:,} cells", save=OUT / "umap.png")
    write(adata, OUT / "embedding.h5ad")
    said = f"demo: {name}, {adata.n_obs:,} cells embedded in {took:.1f} s"
    if labels is None:
        print(f"no column of labels ({', '.join(LABELS)}) in obs: nothing to score")
    else:
        known = adata.obs[labels].notna().to_numpy() & np.isfinite(adata.obsm["X_scdiva"]).all(axis=1)
        y = adata.obs[labels].astype(str).to_numpy()[known]
        spaces = {"scdiva": adata.obsm["X_scdiva"], "PCA": pca(adata, use_raw)}
        scores = {space: sd.metrics.knn_cross_validation(z[known], y) for space, z in spaces.items()}
        print(f"15 nearest neighbours, 5-fold, against obs[{labels!r}] ({len(np.unique(y))} labels)")
        print(f"{'':8}{'accuracy':>10}{'macro-F1':>10}")
        for space, score in scores.items():
            print(f"{space:8}{score['accuracy']:10.3f}{score['macro_f1']:10.3f}")
        said += f"; 15-NN accuracy {scores['scdiva']['accuracy']:.3f}, PCA {scores['PCA']['accuracy']:.3f}"
    print(f"{said}; see {OUT / 'umap.png'}, {OUT / 'embedding.h5ad'}")


def read(file: Path) -> ad.AnnData:
    """Read an h5ad file whole."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    return ad.read_h5ad(file)


def holds(matrix, test) -> bool:
    """Say whether any stored value of a dense or sparse matrix passes a test."""
    return bool(np.any(test(matrix.data if hasattr(matrix, "indptr") else np.asarray(matrix))))


def pca(adata: ad.AnnData, use_raw: bool) -> np.ndarray:
    """Scanpy's usual way: normalise, log1p, 2,000 highly variable genes, scale, 50 components."""
    cells = adata.raw.to_adata() if use_raw else ad.AnnData(adata.X.copy(), adata.obs[[]], adata.var[[]])
    lognorm = holds(cells.X, lambda x: x != np.round(x)) and not holds(cells.X, lambda x: x > 15)
    if not lognorm:
        sc.pp.normalize_total(cells, target_sum=1e4)
        sc.pp.log1p(cells)
    if cells.n_vars > 2000:
        sc.pp.highly_variable_genes(cells, n_top_genes=2000)
        cells = cells[:, cells.var["highly_variable"]].copy()
    if hasattr(cells.X, "toarray"):
        cells.X = cells.X.toarray()  # scaling centres: nothing stays sparse
    sc.pp.scale(cells, max_value=10)
    sc.pp.pca(cells, n_comps=min(50, cells.n_obs - 1, cells.n_vars - 1), random_state=sd.settings.seed)
    return cells.obsm["X_pca"]


def write(adata: ad.AnnData, file: Path) -> None:
    """Write beside the file and rename: a broken-off run leaves the old file."""
    part = file.with_name(f".{file.name}.part")
    try:
        adata.write_h5ad(part)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
