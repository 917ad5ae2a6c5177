"""`--species`: a species, or the file with a table of orthologs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scdiva._nearest import or_nearest

MEANING = (
    " On the command line: human, mouse, or a FILE of two columns, gene and human gene, separated by commas if its "
    "name ends in .csv, else by tabs."
)
"""What the help of a command says beside the docstring."""


def read_species(species: Any) -> Any:
    """Read the file that `--species` names.

    Parameters
    ----------
    species
        A species, which is given back as it is, as is what is no text; or a file.

    Returns
    -------
    What :func:`scdiva.tl.embed` takes.

    Raises
    ------
    FileNotFoundError
        If it is no species, and there is no such file.
    ValueError
        If the file has not two columns.
    """
    import pandas as pd

    from scdiva.tokenizer.orthologs import SPECIES

    if not isinstance(species, str) or species in SPECIES:
        return species
    file = Path(species).expanduser()
    if not file.is_file():
        raise FileNotFoundError(
            f"species is human, mouse, or a file with a table of orthologs, and there is no file {species!r}"
            f"{or_nearest(species, SPECIES)}."
        )
    try:
        table = pd.read_csv(
            file, sep="," if ".csv" in file.suffixes else "\t", header=None, dtype=str, keep_default_na=False
        )
    except ValueError as error:
        raise ValueError(f"{species!r} can't be read as a table of orthologs: {error}") from error
    if table.shape[1] != 2:
        raise ValueError(f"{species!r} has {table.shape[1]} columns, not two, gene and human gene.")
    return table.set_index(0)[1]  # with a gene named twice, whoever takes it says which
