"""`tl.enrich_modules`: which gene sets the modules of a network hold."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scdiva import _constants as C
from scdiva._nearest import no_column
from scdiva.data.writing import check_anndata
from scdiva.metrics import enrichment

if TYPE_CHECKING:
    from anndata import AnnData


def enrich_modules(
    adata: AnnData,
    gene_sets: str | os.PathLike[str] | Mapping[str, Iterable[str]] | pd.DataFrame,
    *,
    key: str = C.VAR_MODULE,
    gene_symbols: str | None = None,
    min_genes: int = 5,
    max_genes: int = 500,
) -> pd.DataFrame:
    """Test modules of genes for gene sets, such as MSigDB's Hallmark or Reactome, against the genes of the network.

    Parameters
    ----------
    adata
        Data that :func:`grn_modules` wrote to.
    gene_sets
        A GMT file, as MSigDB offers them for download; a mapping from the name of a set to its genes; or a data frame
        with columns `source` (the set) and `target` (a gene), as decoupler's resources are.
    key
        Column of `adata.var` with the modules.
    gene_symbols
        Column of `adata.var` with the names by which the sets know genes; None takes `adata.var_names`.
    min_genes, max_genes
        Sets with fewer or more genes in the network are not tested.

    Returns
    -------
    One row for each module and set: `module`, `gene_set`, `n_module`, `n_set`, `n_overlap`, `fold` (over what chance
    gives), `p` (hypergeometric, one-sided), `padj` (Benjamini and Hochberg, over all rows) and `genes`, those in both,
    joined by commas. The background is the genes that have a module. The smallest padj first.

    Raises
    ------
    KeyError
        If there is no such column.
    ValueError
        If the file is no GMT file, the frame lacks a column, no gene has a module, or no set has genes enough in the
        network.
    FileNotFoundError
        If there is no such file.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> sd.tl.grn(adata, "correlation")
    >>> sd.tl.grn_modules(adata)
    >>> sets = {"first half": list(adata.var_names[:50])}
    >>> found = sd.tl.enrich_modules(adata, sets)
    >>> "padj" in found
    True
    """
    check_anndata(adata)
    if key not in adata.var:
        raise KeyError(f"adata.var has no column {key!r}: call scdiva.tl.grn_modules(adata, key_added={key!r}) first.")
    if gene_symbols is not None and gene_symbols not in adata.var:
        raise no_column("adata.var", gene_symbols, adata.var.columns)
    names = adata.var_names if gene_symbols is None else adata.var[gene_symbols]
    module = adata.var[key]
    known = module.notna().to_numpy()
    if not known.any():
        raise ValueError(f"no gene of adata has a module in adata.var[{key!r}].")
    of_gene = pd.DataFrame(
        {"name": np.asarray(names.astype(str))[known], "module": module[known].astype(str).to_numpy()}
    )
    order = [str(name) for name in module.astype("category").cat.categories]
    modules = {name: of_gene.loc[of_gene["module"] == name, "name"].tolist() for name in order}
    modules = {name: genes for name, genes in modules.items() if genes}
    sets = _read(gene_sets)
    background = set(of_gene["name"])
    if not any(min_genes <= len(background.intersection(genes)) <= max_genes for genes in sets.values()):
        raise ValueError(
            f"none of {len(sets)} gene sets (first: {next(iter(sets), None)!r}) has {min_genes} to {max_genes} of the "
            f"{len(background)} genes of the network (first: {of_gene['name'].iloc[0]!r}): do both use the same names? "
            "gene_symbols= names the column of adata.var with the symbols."
        )
    return enrichment(modules, sets, list(background), min_genes=min_genes, max_genes=max_genes)


def _read(gene_sets: str | os.PathLike[str] | Mapping[str, Iterable[str]] | pd.DataFrame) -> dict[str, list[str]]:
    """Give the genes of each set."""
    if isinstance(gene_sets, pd.DataFrame):
        if missing := {"source", "target"} - set(gene_sets.columns):
            raise ValueError(
                f"gene_sets has no column {sorted(missing)[0]!r}; it needs source (the set) and target (a gene), and "
                f"has {', '.join(map(repr, gene_sets.columns))}."
            )
        by_set = gene_sets.groupby("source", observed=True, sort=False)["target"]
        return {str(name): [str(gene) for gene in genes] for name, genes in by_set}
    if isinstance(gene_sets, Mapping):
        return {str(name): [str(gene) for gene in genes] for name, genes in gene_sets.items()}
    path = Path(gene_sets)
    sets = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        name, *rest = line.rstrip("\r").split("\t")
        if len(rest) < 2:
            raise ValueError(
                f"{path} is no GMT file: line {number} is not name, description and genes, with tabs between them."
            )
        sets[name] = [gene for gene in rest[1:] if gene]
    if not sets:
        raise ValueError(f"{path} holds no gene sets.")
    return sets
