"""What every call reads of the cells: which matrix, in which unit, and whose genes by which names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pandas as pd

from scdiva.tokenizer.orthologs import checked_species

if TYPE_CHECKING:
    from anndata import AnnData

    from scdiva._validate import Input

Duplicates = Literal["sum", "error"]
Species: TypeAlias = str | Mapping[str, str] | pd.Series | None
"""`"human"`, `"mouse"`, or a table from genes to human genes; None finds out."""


@dataclass(frozen=True)
class Reading:
    """What to read; `**vars(reading)` are the arguments of the public calls that say it.

    Attributes
    ----------
    layer, use_raw, input, gene_ids, species, duplicates
        As in :func:`scdiva.tl.embed`. A table of species becomes a dict of names, `""` for none.

    Raises
    ------
    ValueError
        If `species` or `duplicates` is none that there is.
    """

    layer: str | None = None
    use_raw: bool = False
    input: Input = "auto"
    gene_ids: str | None = None
    species: Species = None
    duplicates: Duplicates = "sum"

    def __post_init__(self) -> None:
        if self.duplicates not in ("sum", "error"):
            raise ValueError(f'duplicates must be "sum" or "error", got {self.duplicates!r}')
        object.__setattr__(self, "species", checked_species(self.species))

    def parameters(self) -> dict[str, Any]:
        """Give what `uns` holds of it: plain values that h5ad and zarr take, `"table"` for a table of species."""
        species = "table" if isinstance(self.species, dict) else self.species
        return {name: "" if value is None else value for name, value in (vars(self) | {"species": species}).items()}

    def matrix(self) -> dict[str, Any]:
        """Give the arguments that say which matrix is read, and in which unit."""
        return {"layer": self.layer, "use_raw": self.use_raw, "input": self.input}

    def var(self, adata: AnnData) -> pd.DataFrame:
        """Give the annotation of the genes that are read: of `adata`, or of `adata.raw`, if there is one."""
        return adata.raw.var if self.use_raw and adata.raw is not None else adata.var


AS_IT_IS = Reading()
"""`X`, its unit found out, and genes by `var_names`."""
