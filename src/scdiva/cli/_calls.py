"""Commands that are calls of `scdiva.tl`: a file in, the same arguments, a new file out, whole or not at all."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scdiva._checks import refuse_unwritable
from scdiva._constants import INTEGRATE, UNS
from scdiva.tokenizer.names import read_species

if TYPE_CHECKING:
    from anndata import AnnData

TABLE = ".csv"
SETTINGS = ("progress", "threads", "verbosity")
"""Settings that are options of every such command."""


class Call(NamedTuple):
    """A command.

    Attributes
    ----------
    name
        The function of `scdiva.tl`.
    line
        What it does, in a line.
    fits
        The kind of what it fits that can be kept; empty for none.
    makes
        Whether it makes new cells, which are written, and not those that were read.
    endings
        Of the files that it can write.
    """

    name: str
    line: str
    fits: str = ""
    makes: bool = False
    endings: tuple[str, ...] = (".h5ad", ".zarr")

    @property
    def function(self) -> Callable[..., Any]:
        """The function; `scdiva.tl` is imported here and not before."""
        from scdiva import tl

        function: Callable[..., Any] = getattr(tl, self.name)
        return function


CALLS = {
    "embed": Call("embed_file", 'Embed cells, zero-shot and in flat memory: obsm["X_scdiva"], without the matrix.'),
    "integrate": Call("integrate", 'Correct batch effects: obsm["X_scdiva_integrated"].', "model"),
    "annotate": Call("annotate", 'Name cell types by labelled cells: obs["scdiva_label"].', "annotator"),
    "generate": Call("generate", "Draw new cells like those of a file.", makes=True),
    "perturb": Call(
        "predict_perturbation", "Predict cells under perturbations that were not measured.", "perturbation_model", True
    ),
    "grn": Call(
        "grn", 'Infer a network of genes: varp["scdiva_grn"], or a table of edges.', endings=(".h5ad", ".zarr", TABLE)
    ),
}


def run_call(call: Call, options: dict[str, Any]) -> str:
    """Run a command.

    Parameters
    ----------
    call
        The command.
    options
        As its parser gives them, without settings.

    Returns
    -------
    What was written, each in a line.

    Raises
    ------
    FileExistsError
        If `out` or `save` exists and `overwrite` is False, `out` is a file that is read, or `save` holds anything
        else than what is to be saved.
    FileNotFoundError, ValueError
        If a file is missing, damaged, or of no kind that can be read or written, or as the call raises them.
    KeyboardInterrupt
        On Ctrl-C, also where the call itself would end with what it has; nothing is written.
    """
    from scdiva.data.output import refuse_target, write_cells
    from scdiva.models.hub import find_model

    file, out = Path(options.pop("file")).expanduser(), Path(options.pop("out")).expanduser()
    overwrite, save = options.pop("overwrite"), options.pop("save", None)
    options["species"] = read_species(options["species"])
    if out.suffix not in call.endings:
        raise ValueError(f"{str(out)!r} must end in {', '.join(call.endings)}.")
    if call.name == "embed_file":
        return str(call.function(file, out, overwrite=overwrite, **options))
    # all of this before anything is read, and before torch is loaded
    files = {"adata": file}
    if options.get("reference") is not None:
        files["reference"] = Path(options["reference"]).expanduser()
    for one in files.values():
        if not one.exists():
            raise FileNotFoundError(f"no file {str(one)!r}.")
    refuse_target(out, overwrite, *files.values())
    if save is not None:
        _refuse_folder(Path(save).expanduser(), overwrite, out, call.fits)
    if isinstance(options.get("model"), str):
        find_model(options["model"])
    options |= {name: _read(one) for name, one in files.items()}
    adata = options["adata"]
    if call.makes and save is not None:  # what it returns is the cells
        options["model"] = _fitted_screen(options)
    made = call.function(**options)
    noted = INTEGRATE if call.name == "integrate" else options.get("key_added")
    if adata.uns.get(UNS, {}).get(noted, {}).get("stopped") == "interrupted":
        raise KeyboardInterrupt  # a session keeps what was fitted by then; a file would not show that it is unfinished
    if out.suffix == TABLE:
        _write_edges(adata, options["key_added"], out)
    else:
        write_cells(made if call.makes else adata, out)
    if save is None:
        return str(out)
    # after the result, which stands even if the folder can't be written
    return f"{out}\n{(options['model'] if call.makes else made).save(save, overwrite=overwrite)}"


def _refuse_folder(folder: Path, overwrite: bool, out: Path, kind: str) -> None:
    """Refuse a folder for `--save` before hours are spent on what it would hold."""
    from scdiva.models._folder import in_words, kind_of

    refuse_unwritable(folder)
    if folder.resolve() == out.resolve():
        raise FileExistsError(f"{str(folder)!r} is the --out. Pass another folder to --save.")
    if folder.exists() and not overwrite:
        raise FileExistsError(f"{str(folder)!r} exists. Pass another folder to --save, or --overwrite.")
    if folder.exists() and kind_of(folder) != kind:
        raise FileExistsError(
            f"{str(folder)!r} exists and is no {in_words(kind)} folder: choose another path for --save."
        )


def _read(file: Path) -> AnnData:
    """Read a file of cells whole; errors name it."""
    import anndata

    from scdiva.data.stored import open_root

    _, opened = open_root(file)
    if opened is not None:
        opened.close()
    try:
        return anndata.read_zarr(file) if file.is_dir() else anndata.read_h5ad(file)
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{str(file)!r} can't be read: {error}") from error


def _fitted_screen(options: dict[str, Any]) -> Any:
    """Fit what `perturb` would fit, apart, so that it can be kept."""
    from scdiva.models._folder import kind_of
    from scdiva.tl import fit_perturbation

    if kind_of(Path(options["model"]).expanduser()) == "perturbation_model":
        raise ValueError(f"--model {options['model']} is fitted already: there is nothing to --save.")
    if options["perturbation_key"] is None:
        raise ValueError("name the column with the perturbations, --perturbation_key.")
    taken = inspect.signature(fit_perturbation).parameters
    return fit_perturbation(**{name: value for name, value in options.items() if name in taken})


def _write_edges(adata: AnnData, key: str, out: Path) -> None:
    """Write the edges of a network, or of the networks of all groups, as a table."""
    import pandas as pd

    from scdiva.data.output import whole_or_not
    from scdiva.get import grn_df

    groups = [str(group) for group in adata.uns[UNS][key].get("groups", [])]
    tables = [grn_df(adata, key=key, group=group).assign(group=group) for group in groups]
    out.parent.mkdir(parents=True, exist_ok=True)
    with whole_or_not(out) as new:
        (pd.concat(tables) if tables else grn_df(adata, key=key)).to_csv(new, index=False)
