"""Options of every call that reads cells: matrix, unit, gene names, species, duplicates, empty cells."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import pandas as pd

from scdiva._checks import check_choices
from scdiva._constants import MATCH, UNS
from scdiva.data.results import our_uns
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
    """How cells are read.

    Attributes
    ----------
    layer, use_raw, input, gene_ids, species, duplicates
        As in :func:`scdiva.tl.embed_file`. A species table is stored as a dict; `""` means that there is no human gene.
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
ORTHOLOGS = "orthologs"
"""Entry of `uns["scdiva"]["match"]` with the table of species: arrays `gene` and `human_gene`."""


def input_options(
    adata: AnnData, layer: str | None, use_raw: bool, input: Input, empty: Empty = "error"
) -> InputOptions:
    """Options of a call on `adata`: genes as :func:`scdiva.pp.match_genes` recorded, otherwise the defaults.

    Raises
    ------
    ValueError
        If the record is damaged, or another argument is not one of its choices.
    """
    options = InputOptions(layer, use_raw, input, empty=empty)
    match = our_uns(adata).get(MATCH)
    if match is None:
        return options
    try:
        params: dict[str, Any] = {name: match["params"][name] for name in ("gene_ids", "species", "duplicates")}
        for name, value in params.items():
            if not isinstance(value, Hashable):
                raise TypeError(f"{name}={value!r:.80}")
            params[name] = None if value == "" else value
        if params["species"] == "table":
            genes, human = (map(str, np.asarray(match[ORTHOLOGS][name])) for name in ("gene", "human_gene"))
            params["species"] = dict(zip(genes, human, strict=True))
        return replace(options, **params)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"adata.uns[{UNS!r}][{MATCH!r}] is damaged ({error}). Call sd.pp.match_genes(adata, ...) again."
        ) from error
