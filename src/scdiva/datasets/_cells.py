"""Simulated cells with known truth."""

from __future__ import annotations

import numpy as np
import pandas as pd
from anndata import AnnData
from scipy.sparse import csr_matrix

from scdiva._checks import check_arguments, check_least
from scdiva.tokenizer.vocabulary import Vocabulary

_MODULE_SIZE = 0.08
_MODULE_LOG_FOLD = 2.0
_BASE_LOG_SD = 1.0
_BATCH_LOG_SD = 0.3
_DEPTH_LOG_SD = 0.3
_COUNTS_PER_GENE = 5.0
_DISPERSION = 4.0


@check_arguments
def toy(
    n_cells: int = 300,
    n_genes: int = 200,
    n_types: int = 4,
    n_batches: int = 2,
    *,
    rng: int | np.random.Generator | None = 0,
) -> AnnData:
    """Simulate counts of cell types and batches with known gene programs and human gene symbols.

    The count of gene g in cell c is negative binomial with mean m = d_c · p_cg and variance m + m²/4, where d_c is
    log-normal around 5 counts per gene (sd 0.3 of its logarithm), and p_c is proportional to
    exp(baseline_g + program[type of c, g] + batch_effect[batch of c, g]). Each type has a module of 8% of the genes,
    increased by 2 on the natural log scale; baselines have sd 1, batch effects sd 0.3.

    Parameters
    ----------
    n_cells, n_genes
        Numbers of cells and genes. Genes are sampled from the protein-coding genes of the human vocabulary.
    n_types, n_batches
        Numbers of cell types and batches, of equal size and independent of each other.
    rng
        Seed or generator.

    Returns
    -------
    AnnData
        `X` raw counts (CSR, float32); `obs["cell_type"]`, `obs["batch"]` (categorical); `var["ensembl_id"]`. The
        parameters of the simulation are in `uns["truth"]`: `markers` (symbols of the module of each type), `module`
        (int32 per gene: number of the type, -1 = none), and on the natural log scale `baseline` (float64 per gene),
        `program` (float64, types × genes) and `batch_effect` (float64, batches × genes).

    Raises
    ------
    ValueError
        If a number is below 1, if there are fewer cells than types or batches, or if there are too few genes for a
        module of at least 2 for each type, or too many.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> adata.shape
    (60, 100)
    >>> list(adata.obs["cell_type"].cat.categories)
    ['type A', 'type B', 'type C', 'type D']
    """
    check_least(n_cells=(n_cells, 1), n_genes=(n_genes, 1), n_types=(n_types, 1), n_batches=(n_batches, 1))
    if n_cells < max(n_types, n_batches):
        raise ValueError(f"{n_cells} cells can't show {n_types} types and {n_batches} batches")
    size = max(2, round(_MODULE_SIZE * n_genes))
    if n_types * size > n_genes:
        raise ValueError(f"{n_types} types with modules of {size} genes need {n_types * size} genes, got {n_genes}")
    table = Vocabulary.human().table
    table = table[(table["biotype"] == "protein_coding") & (table["symbol"] != table["ensembl_id"])]
    if n_genes > len(table):
        raise ValueError(f"n_genes must be at most {len(table)}, got {n_genes}")

    rng = np.random.default_rng(rng)
    genes = table.iloc[np.sort(rng.choice(len(table), n_genes, replace=False))]
    module = np.full(n_genes, -1, dtype=np.int32)
    module[rng.permutation(n_genes)[: n_types * size]] = np.repeat(np.arange(n_types), size)
    baseline = rng.normal(0.0, _BASE_LOG_SD, n_genes)
    program = _MODULE_LOG_FOLD * (module == np.arange(n_types)[:, None]).astype(np.float64)
    batch_effect = rng.normal(0.0, _BATCH_LOG_SD, (n_batches, n_genes))
    # equal numbers of cells, in random order
    cell_type = rng.permutation(np.arange(n_cells) % n_types)
    batch = rng.permutation(np.arange(n_cells) % n_batches)

    weights = np.exp(baseline + program[cell_type] + batch_effect[batch])
    depth = _COUNTS_PER_GENE * n_genes * rng.lognormal(0.0, _DEPTH_LOG_SD, n_cells)
    mean = depth[:, None] * weights / weights.sum(axis=1, keepdims=True)
    counts = rng.poisson(mean * rng.gamma(_DISPERSION, 1 / _DISPERSION, mean.shape))

    types = [f"type {chr(ord('A') + i)}" if n_types <= 26 else f"type {i}" for i in range(n_types)]
    batches = [f"batch {i + 1}" for i in range(n_batches)]
    obs = pd.DataFrame(
        {
            "cell_type": pd.Categorical.from_codes(cell_type, categories=types),
            "batch": pd.Categorical.from_codes(batch, categories=batches),
        },
        index=[f"cell{i}" for i in range(n_cells)],
    )
    var = pd.DataFrame({"ensembl_id": genes["ensembl_id"].to_numpy()}, index=genes["symbol"].to_numpy())
    adata = AnnData(csr_matrix(counts.astype(np.float32)), obs=obs, var=var)
    adata.uns["truth"] = {
        "markers": {name: np.asarray(var.index[module == i], dtype=object) for i, name in enumerate(types)},
        "module": module,
        "program": program,
        "batch_effect": batch_effect,
        "baseline": baseline,
    }
    return adata


def pbmc68k_reduced() -> AnnData:
    """700 peripheral blood cells with 765 genes and published labels, from scanpy.

    A subset of the 68,579 cells of Zheng et al. 2017 (Nature Communications 8, 14049), as in
    :func:`scanpy.datasets.pbmc68k_reduced`. `adata.X` is scaled; pass `use_raw=True` to read the log-normalised values
    in `adata.raw`. :func:`pbmc3k_small` has counts of all genes.

    Returns
    -------
    AnnData
        `obs["bulk_labels"]` holds ten cell types (correlation with sorted populations), `obs["louvain"]` clusters.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.pbmc68k_reduced()
    >>> adata.shape
    (700, 765)
    """
    import scanpy as sc

    return sc.datasets.pbmc68k_reduced()
