"""Write the cells of ``sd.datasets.pbmc3k_small()``: a stratified subset of PBMC 3k (10x Genomics, CC BY 4.0).

    python scripts/build_pbmc3k_small.py pbmc3k_raw.h5ad

The source is PBMC 3k as an h5ad file with all genes and the published types in ``obs["cell_type"]``. Cells without a
published type are excluded. A quarter of each type is drawn without replacement (``numpy.random.default_rng(0)``, types
in alphabetical order), at least 50 cells; types with fewer cells are kept whole. Cells keep the order of the source,
and all genes are kept. The same source gives the same file (1.05 MB). Counts are stored by column as uint16, which
compresses best.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import anndata as ad
import numpy as np

OUT = Path(__file__).resolve().parents[1] / "src" / "scdiva" / "datasets" / "pbmc3k_small.npz"
SOURCE = (
    "10x Genomics, 3k PBMCs from a Healthy Donor (Cell Ranger 1.1.0); 713 of 2,700 cells, selected by scdiva. "
    "Cell types: Seurat's guided clustering tutorial, from rnabioco/clustifyr."
)
LICENSE = "CC BY 4.0, https://creativecommons.org/licenses/by/4.0/"
UNLABELLED = "unlabelled"


def selected(cell_type: np.ndarray, share: float = 0.25, minimum: int = 50, seed: int = 0) -> np.ndarray:
    """Row numbers of the subset, in ascending order."""
    rng = np.random.default_rng(seed)
    rows = []
    for name in sorted(set(cell_type) - {UNLABELLED}):
        of_type = np.flatnonzero(cell_type == name)
        size = min(len(of_type), max(minimum, int(share * len(of_type))))
        rows.append(rng.choice(of_type, size, replace=False))
    return np.sort(np.concatenate(rows))


def write(adata: ad.AnnData, out: Path) -> None:
    """Write counts, names and types; a loader needs no pickle."""
    counts = adata.X.tocsc()
    counts.sort_indices()
    if (counts.data != counts.data.astype(np.uint16)).any():
        raise SystemExit("X holds values that are no counts below 65,536")
    np.savez_compressed(
        out,
        counts=counts.data.astype(np.uint16),
        rows=counts.indices.astype(np.uint16),
        indptr=counts.indptr.astype(np.int32),
        cells=adata.obs_names.to_numpy(dtype=str),
        genes=adata.var_names.to_numpy(dtype=str),
        cell_type=adata.obs["cell_type"].to_numpy(dtype=str),
        source=SOURCE,
        license=LICENSE,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="pbmc3k_raw.h5ad")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    adata = ad.read_h5ad(arguments.source)
    subset = adata[selected(adata.obs["cell_type"].to_numpy(dtype=str))]
    write(subset, arguments.out)
    print(f"{arguments.out}: {subset.n_obs} cells × {subset.n_vars} genes, {arguments.out.stat().st_size / 1e6:.2f} MB")
    print(subset.obs["cell_type"].value_counts().to_string())


if __name__ == "__main__":
    main()
