"""What every call reads of the cells: which matrix, in which unit, and whose genes by which names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pandas as pd

from scdiva._checks import check_choices
from scdiva.tokenizer.names import checked_species

if TYPE_CHECKING:
    from anndata import AnnData

    from scdiva._validate import Input

Duplicates = Literal["sum", "error"]
Empty = Literal["error", "nan"]
Species: TypeAlias = str | Mapping[str, str] | pd.Series | None
"""`"human"`, `"mouse"`, or a table from genes to human genes; None finds out."""


@dataclass(frozen=True)
class InputOptions:
    """What to read of cells; its fields are the arguments by which public calls say it.

    Attributes
    ----------
    layer, use_raw, input, gene_ids, species, duplicates
        As in :func:`scdiva.tl.embed`. A table of species becomes a dict of names, `""` for none.
    empty
        Cells without a known gene: `"error"` refuses them, `"nan"` leaves them out of what is read; the caller has no
        result for them.

    Raises
    ------
    ValueError
        If `species`, `duplicates` or `empty` is none that there is.
    """

    layer: str | None = None
    use_raw: bool = False
    input: Input = "auto"
    gene_ids: str | None = None
    species: Species = None
    duplicates: Duplicates = "sum"
    empty: Empty = "error"

    def __post_init__(self) -> None:
        check_choices(duplicates=(self.duplicates, ("sum", "error")), empty=(self.empty, ("error", "nan")))
        object.__setattr__(self, "species", checked_species(self.species))

    def arguments(self) -> dict[str, Any]:
        """Give the arguments, by name, of calls that take no `empty`."""
        return {name: value for name, value in vars(self).items() if name != "empty"}

    def parameters(self) -> dict[str, Any]:
        """Give what `uns` holds of matrix and genes: plain values that h5ad and zarr take, `"table"` for a table."""
        species = "table" if isinstance(self.species, dict) else self.species
        plain = self.arguments() | {"species": species}
        return {name: "" if value is None else value for name, value in plain.items()}

    def var(self, adata: AnnData) -> pd.DataFrame:
        """Give the annotation of the genes that are read: of `adata`, or of `adata.raw`, if there is one."""
        return adata.raw.var if self.use_raw and adata.raw is not None else adata.var


DEFAULT_INPUT = InputOptions()
"""`X`, its unit found out, and genes by `var_names`."""
