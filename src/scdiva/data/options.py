"""Options of every call that reads cells: matrix, unit, gene names, species, duplicates, empty cells."""

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
"""`"human"`, `"mouse"`, or a table from genes to human genes; None infers human or mouse."""


@dataclass(frozen=True)
class InputOptions:
    """How cells are read. The fields are arguments of the public calls.

    Attributes
    ----------
    layer, use_raw, input, gene_ids, species, duplicates
        As in :func:`scdiva.tl.embed`. A table of species becomes a dict of names, with `""` for no human gene.
    empty
        Cells without a known gene: `"error"` raises an error, `"nan"` skips them.

    Raises
    ------
    ValueError
        If `species`, `duplicates` or `empty` is not one of the choices.
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
        """Keyword arguments for calls without `empty`."""
        return {name: value for name, value in vars(self).items() if name != "empty"}

    def parameters(self) -> dict[str, Any]:
        """Parameters for `uns`: scalars that h5ad and zarr can store, `""` for None, `"table"` for a species table."""
        species = "table" if isinstance(self.species, dict) else self.species
        return {
            name: "" if value is None else value for name, value in (self.arguments() | {"species": species}).items()
        }

    def var(self, adata: AnnData) -> pd.DataFrame:
        """Annotation of the genes: `adata.raw.var` with `use_raw`, otherwise `adata.var`."""
        return adata.raw.var if self.use_raw and adata.raw is not None else adata.var


DEFAULT_INPUT = InputOptions()
