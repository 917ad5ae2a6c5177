"""Real cells that are part of the package."""

from __future__ import annotations

from importlib import resources

import numpy as np
import pandas as pd
from anndata import AnnData
from scipy.sparse import csc_matrix


def pbmc3k_small() -> AnnData:
    """713 peripheral blood mononuclear cells with all genes and published cell types, included in the package.

    A subset of the dataset *3k PBMCs from a Healthy Donor* by 10x Genomics [1]_, licensed under CC BY 4.0 [2]_. It
    contains a random quarter of each cell type, and at least 50 cells of it; of the rare types, all 32 dendritic cells
    and all 14 platelets. The cell types are those of Seurat's tutorial [3]_. :func:`pbmc3k` has all 2,700 cells.

    Returns
    -------
    AnnData
        713 cells × 32,738 genes. `X`: raw counts (CSR, float32). `obs["cell_type"]`: nine cell types (categorical).
        `var_names`: gene symbols. `uns["source"]` and `uns["license"]`: the attribution, which copies must keep.

    References
    ----------
    .. [1] 10x Genomics, 3k PBMCs from a Healthy Donor, Cell Ranger 1.1.0, 2016. Published by Zheng et al., Massively
       parallel digital transcriptional profiling of single cells, Nature Communications 8, 14049, 2017.
    .. [2] https://creativecommons.org/licenses/by/4.0/
    .. [3] Satija et al., Spatial reconstruction of single-cell gene expression data, Nature Biotechnology 33, 495,
       2015.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.pbmc3k_small()
    >>> adata.shape
    (713, 32738)
    >>> adata.obs["cell_type"].value_counts().tail(2)
    cell_type
    DC          32
    Platelet    14
    Name: count, dtype: int64
    """
    with resources.files("scdiva.datasets").joinpath("pbmc3k_small.npz").open("rb") as file, np.load(file) as arrays:
        cells, genes = arrays["cells"], arrays["genes"]
        counts = csc_matrix((arrays["counts"], arrays["rows"], arrays["indptr"]), shape=(len(cells), len(genes)))
        obs = pd.DataFrame({"cell_type": pd.Categorical(arrays["cell_type"])}, index=cells)
        return AnnData(
            counts.tocsr().astype(np.float32),
            obs=obs,
            var=pd.DataFrame(index=genes),
            uns={"source": str(arrays["source"]), "license": str(arrays["license"])},
        )
