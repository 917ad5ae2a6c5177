"""The commands that read a file and write another, and `scdiva info`."""

from __future__ import annotations

import contextlib
import itertools
import textwrap
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scdiva._checks import refuse_unwritable
from scdiva._constants import DEFAULT_MODEL, INTEGRATE, OBS_LABEL, UNS
from scdiva._files import output_path, parse_json, read_bytes
from scdiva.data.backed import names_of, open_root
from scdiva.data.genes import judge_genes, match_columns
from scdiva.data.matrix import BLOCK_ROWS, open_matrix, row_blocks
from scdiva.data.output import refuse_target, write_cells
from scdiva.data.paths import as_path
from scdiva.models._folder import VOCABULARY, WEIGHTS, in_words, kind_of, read_config, read_sums, refuse_foreign
from scdiva.models.hub import find_model
from scdiva.tokenizer.names import read_species
from scdiva.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from anndata import AnnData

CELLS_READ = 4096
"""Cells at the beginning of a file by which its expression is judged."""
_LONG = 300
"""Characters of a value in the text; JSON holds all."""


FITTED = {"integrate": "model", "annotate": "annotator"}
"""Kind of folder that `--save` writes, by command."""


def run_call(command: str, options: dict[str, Any]) -> str:
    """Run `embed`, `integrate` or `annotate` on a file.

    Parameters
    ----------
    command
        Its name.
    options
        The options that were given, without settings.

    Returns
    -------
    Path of each output, one per line.

    Raises
    ------
    FileExistsError
        If `out` or `save` exists and `overwrite` is False, `out` is an input file, or `save` is a folder of another
        kind.
    FileNotFoundError, ValueError
        If an input file is missing, damaged or of an unknown format; and the errors of the call.
    KeyboardInterrupt
        After Ctrl-C; nothing is written.
    """
    from scdiva import tl

    file, out = as_path(options.pop("file")).expanduser(), output_path(options.pop("out"))
    overwrite, save = options.pop("overwrite", False), options.pop("save", None)
    save = None if save is None else output_path(save, "save")
    options["species"] = read_species(options.get("species"))
    if out.suffix not in (".h5ad", ".zarr"):
        raise ValueError(f"{str(out)!r} must end in .h5ad or .zarr.")
    if command == "embed":
        return str(tl.embed_file(file, out, overwrite=overwrite, **options))
    # before anything is read and torch is imported
    files = {"adata": file}
    if options.get("reference") is not None:
        files["reference"] = as_path(options["reference"]).expanduser()
    for one in files.values():
        if isinstance(one, Path) and not one.exists():
            raise FileNotFoundError(f"no file {str(one)!r}.")
    refuse_target(out, overwrite, *files.values())
    if save is not None:
        _refuse_folder(save, overwrite, out, FITTED[command])
    if "model" in options:
        find_model(options["model"])
    options |= {name: _read(one) for name, one in files.items()}
    adata = options["adata"]
    fitted = getattr(tl, command)(**options)
    key = INTEGRATE if command == "integrate" else options.get("key_added", OBS_LABEL)
    if adata.uns.get(UNS, {}).get(key, {}).get("stopped") == "interrupted":
        raise KeyboardInterrupt  # a session keeps what was fitted by then; a file would not show that it is unfinished
    write_cells(adata, out)
    # after the result, which is kept if the folder can't be written
    return str(out) if save is None else f"{out}\n{fitted.save(save, overwrite=overwrite)}"


def _refuse_folder(folder: Path, overwrite: bool, out: Path, kind: str) -> None:
    """Refuse a folder for `--save` before hours are spent on what it would hold."""
    refuse_unwritable(folder)
    if folder.resolve() == out.resolve():
        raise FileExistsError(f"{str(folder)!r} is the --out. Pass another folder to --save.")
    if folder.exists() and not overwrite:
        raise FileExistsError(f"{str(folder)!r} exists. Pass another folder to --save, or --overwrite.")
    if folder.exists() and kind_of(folder) != kind:
        raise FileExistsError(
            f"{str(folder)!r} exists and is no {in_words(kind)} folder: choose another path for --save."
        )
    refuse_foreign(folder, kind)


def _read(file: Path) -> AnnData:
    """Read a file of cells whole; errors name it."""
    import anndata

    root, opened = open_root(file)
    if opened is not None:
        opened.close()
    try:
        return anndata.read_zarr(root) if opened is None else anndata.read_h5ad(file)
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{str(file)!r} can't be read: {error}") from error


def info(what: str, *, model: str = DEFAULT_MODEL, json: bool = False) -> str:
    """Describe a model, or a file of cells.

    Parameters
    ----------
    what
        An .h5ad or .zarr file; or a model: a bundled name, a folder, also of what was fitted, or hf://owner/name,
        which is fetched into the Hub's cache.
    model
        Of a file: the model whose genes its own are held against.
    json
        Say it as JSON, for machines.

    Returns
    -------
    Text of several lines.

    Raises
    ------
    FileNotFoundError
        If there is no such file or model.
    ValueError
        If it is damaged.
    """
    path = Path(what).expanduser() if what.startswith("hf://") else as_path(what).expanduser()
    found = about_cells(path, model) if path.suffix in (".h5ad", ".zarr") or path.is_file() else about_model(what)
    # plain values; what is no number is null
    text = dumps(found, indent=2, ensure_ascii=False, default=lambda value: getattr(value, "tolist", value.__str__)())
    found = loads(text, parse_constant=lambda name: None)
    return dumps(found, indent=2, ensure_ascii=False) if json else "\n".join(_lines(found))


def about_model(model: str) -> dict[str, Any]:
    """Describe a model by its folder; its weights are not read.

    Parameters
    ----------
    model
        As for :func:`scdiva.models.load_model`, or the folder of an annotator or of a perturbation model.

    Returns
    -------
    Plain values by name.
    """
    folder = find_model(model)
    for kind in ("annotator", "perturbation_model"):
        if (settings := folder / f"{kind}.json").is_file():
            try:
                found = {
                    "kind": kind.replace("_", " "),
                    "folder": str(folder),
                    **parse_json(settings, read_bytes(settings)),
                }
            except (ValueError, TypeError) as error:
                raise ValueError(f"{settings} is damaged: {error}") from error
            return found | {"model": about_model(str(folder / "model"))}
    found = read_config(folder, sums := read_sums(folder))
    found["config"] = found.pop("model")
    return {"kind": "model", "name": str(model), "folder": str(folder), **found, "sha256": sums[WEIGHTS]}


def about_cells(path: Path, model: str) -> dict[str, Any]:
    """Describe a file of cells: its shape, its names, the first rows of its matrix, and what scdiva wrote into it.

    Parameters
    ----------
    path
        The file.
    model
        As for :func:`info`.

    Returns
    -------
    Plain values by name.
    """
    from anndata.io import read_elem

    root, opened = open_root(path)
    with opened or contextlib.nullcontext():
        if missing := [part for part in ("obs", "var") if part not in root]:
            raise ValueError(f"{str(path)!r} lacks {missing[0]}: expected an .h5ad or .zarr that AnnData wrote.")
        names = [names_of(root, axis, path) for axis in ("obs", "var")]
        n_cells, n_genes = (int((of if hasattr(of, "shape") else of["codes"]).shape[0]) for of in names)
        parts = {part: root[part] for part in ("obs", "var", "obsm", "varm", "varp", "layers") if part in root}
        keys = {part: list(map(str, of.attrs.get("column-order", list(of)))) for part, of in parts.items()}
        ours = read_elem(root[f"uns/{UNS}"]) if UNS in root.get("uns", ()) else {}
        has_x = "X" in root and n_cells > 0
    ours = ours if isinstance(ours, dict) else {}  # something of the user's own under that name
    written = {part: [name for name in of if name in ours or "scdiva" in name] for part, of in keys.items()}
    found = {"kind": "cells", "file": str(path), "n_cells": n_cells, "n_genes": n_genes}
    return {
        **found,
        **(_expression(path, model) if has_x else {"expression": {"holds": "nothing"}}),
        "keys": keys,
        "written_by_scdiva": {part: of for part, of in written.items() if of},
        "parameters": ours,
    }


def _expression(path: Path, model: str) -> dict[str, Any]:
    """Check the first cells of a matrix, and match its genes to the model's."""
    folder = find_model(model)
    fitted = folder / "model"
    genes = Vocabulary.read((fitted if fitted.is_dir() else folder) / VOCABULARY)
    with open_matrix(path) as opened:
        matched = match_columns(opened.var, genes)
        known = {"name": model, "n_genes": genes.n_genes, "n_known": int((matched.tokens >= 0).sum())}
        holds: dict[str, Any] = {"cells_read": min(opened.shape[0], CELLS_READ)}
        try:
            blocks = itertools.islice(row_blocks(opened.matrix, BLOCK_ROWS), CELLS_READ // BLOCK_ROWS)
            found = opened.scan(blocks)
            holds |= {"holds": found.kind, "integer": found.integer, "max": float(found.max)}
            report = judge_genes(matched, genes, found.counts_per_gene, obs_names=opened.obs_names, n_obs=found.n_obs)
            known["share_of_counts"] = report["share_counts"]
        except ValueError as error:
            holds["refused"] = str(error)
    return {"expression": holds, "model": known}


def _lines(found: dict[str, Any], indent: str = "") -> list[str]:
    """Write names and values below each other, what is nested further in."""
    lines = []
    for name, value in found.items():
        if isinstance(value, dict) and value and not indent:
            lines += [f"{indent}{name}:", *_lines(value, indent + "  ")]
        else:
            text = f"{value:,}" if type(value) is int else str(value)
            lines.append(f"{indent}{name}: {textwrap.shorten(text, _LONG, placeholder=' ... (--json holds all)')}")
    return lines
