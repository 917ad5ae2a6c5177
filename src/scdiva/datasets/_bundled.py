"""Cells that are part of the package or simulated, and lists of genes."""

from __future__ import annotations

import re
from importlib import resources
from typing import Literal, get_args

import numpy as np
import pandas as pd
from anndata import AnnData
from scipy.sparse import csc_matrix, csr_matrix

from scdiva._checks import check_arguments, check_choices, check_least
from scdiva.tokenizer.vocabulary import Vocabulary


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


Family = Literal["HLA", "HLA class I", "HLA class II", "TNF", "interleukin", "CD"]

_TNF = "TNF|TNFSF.*|TNFRSF.*|LT[AB]|LTBR|CD40|CD40LG|FAS|FASLG|CD27|CD70|NGFR|EDA|EDAR|EDA2R|RELT"
"""Ligands and receptors of the superfamily, including those with other names."""
_PATTERNS: dict[str, str] = {
    "HLA": r"HLA-[A-Z]+\d*",
    "HLA class I": r"HLA-[ABCEFG]",
    "HLA class II": r"HLA-D[MOPQR][AB]\d*",
    "TNF": _TNF,
    # not IL4I1 ("induced")
    "interleukin": r"IL\d+(?!I)[A-Z]*\d?[A-Z]*",
    "CD": r"CD\d+(?!L)[A-Z]?\d?",  # not CD5L ("like")
}


def transcription_factors() -> list[str]:
    """Human transcription factors (Lambert et al. 2018).

    Returns
    -------
    1,633 current symbols, sorted, of the 1,639 genes in the census; six have no current symbol.

    References
    ----------
    .. [1] Lambert et al., The Human Transcription Factors, Cell 2018.

    Examples
    --------
    >>> import scdiva as sd
    >>> factors = sd.datasets.transcription_factors()
    >>> len(factors)
    1633
    >>> "SPI1" in factors
    True
    """
    text = resources.files("scdiva.datasets").joinpath("transcription_factors.txt").read_text(encoding="utf-8")
    return text.split()


def gene_family(name: Family) -> list[str]:
    """Protein-coding human genes of a family, as in the paper's figure of gene networks.

    Parameters
    ----------
    name
        `"HLA"`, `"HLA class I"`, `"HLA class II"`; `"TNF"`, ligands and receptors of its superfamily;
        `"interleukin"`, with their receptors; `"CD"`, surface markers named CD and a number.

    Returns
    -------
    Symbols, sorted.

    Raises
    ------
    ValueError
        If `name` is another family.

    Examples
    --------
    >>> import scdiva as sd
    >>> sd.datasets.gene_family("HLA class I")
    ['HLA-A', 'HLA-B', 'HLA-C', 'HLA-E', 'HLA-F', 'HLA-G']
    """
    check_choices(name=(name, get_args(Family)))
    table = Vocabulary.human().table
    coding = table.loc[table["biotype"] == "protein_coding", "symbol"]
    pattern = re.compile(_PATTERNS[name])
    return sorted(s for s in coding if pattern.fullmatch(s))


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
