"""Cells, genes and edges from the literature as grn.py takes them."""

from __future__ import annotations

from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp

from scdiva._constants import UNKNOWN
from scdiva.tokenizer import load_vocabulary

HELD_OUT = "sc_mixology_cell_lines"
"""Nothing was settled on it; known edges alone."""
SETS = ("pbmc3k_raw", "kang_pbmc_12k_1287g", HELD_OUT)
REFERENCES = {"trrust": "trrust_hs.csv", "dorothea": "dorothea_hs_ABC.csv"}
"""Tables with the columns `tf`, `target` and `mor` (1 activates, -1 represses, 0 unknown)."""
COLLECTIONS = {"hallmark": "human_hallmark_v2025.gmt", "reactome": "human_reactome_v2025.gmt"}
MIN_FRACTION = 0.01
"""A gene takes part if more of the cells express it."""
TOKEN, TAKES_PART, MEAN, TYPE = "token", "takes_part", "mean", "cell_type"


def prepared(adata: ad.AnnData, model: str) -> ad.AnnData:
    """Counts and types; of each gene its token, whether it takes part, and its mean log-normalised expression.

    Of several columns that mean one gene none takes part, as who sums them and who does not would see other genes.
    """
    counts = sp.csr_matrix(adata.X, dtype=np.float32)
    tokens = load_vocabulary(model).match(adata.var_names).tokens
    once = ~pd.Series(tokens).duplicated(keep=False).to_numpy()
    expressed = counts.getnnz(axis=0) > MIN_FRACTION * adata.n_obs
    found = ad.AnnData(
        counts,
        obs=pd.DataFrame({TYPE: adata.obs[TYPE].astype(str).to_numpy()}, index=adata.obs_names),
        var=pd.DataFrame(
            {TOKEN: tokens, TAKES_PART: (tokens != UNKNOWN) & once & expressed}, index=adata.var_names.astype(str)
        ),
    )
    found.var[MEAN] = np.asarray(log_normalised(found).mean(axis=0)).ravel()
    return found


def log_normalised(adata: ad.AnnData) -> sp.csr_matrix:
    """Counts of each cell scaled to 10,000, ln(1 + x); a cell without counts stays empty."""
    totals = np.asarray(adata.X.sum(axis=1)).ravel()
    scaled = sp.csr_matrix(sp.diags(np.divide(1e4, totals, out=np.zeros_like(totals), where=totals > 0)) @ adata.X)
    scaled.data = np.log1p(scaled.data)
    return scaled


def genes_of(adata: ad.AnnData) -> pd.Series:
    """Names of the genes that take part, by token."""
    some = adata.var[adata.var[TAKES_PART]]
    return pd.Series(some.index.to_numpy(), index=some[TOKEN].to_numpy())


def in_data(names: pd.Series, genes: pd.Series, model: str) -> pd.Series:
    """What the data call these genes, whichever symbol or alias each has; NaN for those that do not take part."""
    unique = names.dropna().unique()
    tokens = load_vocabulary(model).match(unique).tokens
    return names.map(dict(zip(unique, genes.reindex(tokens), strict=True)))


def edges(file: Path, adata: ad.AnnData, model: str) -> pd.DataFrame:
    """Edges of a table whose genes both take part: `source`, `target`, `mor`; each pair once, no gene with itself.

    Raises
    ------
    ValueError
        If the table lacks a column, or no edge is left.
    """
    table = pd.read_csv(file)
    if lost := {"tf", "target", "mor"} - set(table.columns):
        raise ValueError(f"{file.name} has no column {', '.join(sorted(lost))}: tf, target and mor are needed.")
    genes = genes_of(adata)
    found = pd.DataFrame(
        {"source": in_data(table["tf"], genes, model), "target": in_data(table["target"], genes, model),
         "mor": table["mor"]}
    ).dropna()  # fmt: skip
    found = found[found["source"] != found["target"]].drop_duplicates(["source", "target"], ignore_index=True)
    if found.empty:
        raise ValueError(f"{file.name}: no edge lies between genes that are expressed here.")
    return found


def gene_sets(file: Path, adata: ad.AnnData, model: str) -> dict[str, list[str]]:
    """Sets of a GMT file, as the data call their genes; those that do not take part are left out."""
    rows = [line.split("\t") for line in file.read_text().splitlines() if line]
    long = pd.Series([gene for row in rows for gene in row[2:]], index=[row[0] for row in rows for _ in row[2:]])
    of = in_data(long, genes_of(adata), model).dropna()
    return {name: some.tolist() for name, some in of.groupby(level=0)}


def resampled(adata: ad.AnnData, n_cells: int, n_genes: int, seed: int) -> ad.AnnData:
    """As many cells as asked for of the genes most often detected: cells drawn anew, half of their counts kept."""
    rng = np.random.default_rng(seed)
    often = np.sort(np.argsort(-adata.X.getnnz(axis=0), kind="stable")[:n_genes])
    drawn = sp.csr_matrix(adata.X[rng.integers(adata.n_obs, size=n_cells)][:, often])
    drawn.data = rng.binomial(drawn.data.astype(np.int64), 0.5).astype(np.float32)
    drawn.eliminate_zeros()
    obs = pd.DataFrame({TYPE: "cell"}, index=[f"cell {number}" for number in range(n_cells)])
    return ad.AnnData(drawn, obs=obs, var=adata.var.iloc[often].copy())
