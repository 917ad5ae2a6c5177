"""Commands that read a file and write another, and `scdiva info`."""

from __future__ import annotations

import contextlib
import itertools
import textwrap
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scdiva._constants import DEFAULT_MODEL, INTEGRATE, OBS_LABEL, UNS
from scdiva._files import as_path, output_path, parse_json, read_bytes
from scdiva.data.backed import names_of, open_root
from scdiva.data.genes import judge_genes, match_columns
from scdiva.data.matrix import BLOCK_ROWS, open_matrix, row_blocks
from scdiva.data.output import refuse_target, write_cells
from scdiva.models.storage import (
    VOCABULARY,
    WEIGHTS,
    check_folder,
    find_model,
    read_config,
    read_sums,
)
from scdiva.tokenizer.names import read_species
from scdiva.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anndata import AnnData

CELLS_READ = 4096
"""Number of cells, from the first, whose expression `info` checks."""
_LONG = 300
"""Maximum number of characters of a value in the text; JSON is complete."""
FITTED = {"integrate": "model", "annotate": "annotator"}
"""Kind of folder that `--save` writes."""


def run_call(command: str, options: dict[str, Any]) -> str:
    """Run `embed`, `integrate` or `annotate` on a file.

    Parameters
    ----------
    command
        Its name.
    options
        Its options, without settings.

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
    from anndata import AnnData

    from scdiva import tl

    file, out = as_path(options.pop("file")).expanduser(), output_path(options.pop("out"))
    overwrite, save = options.pop("overwrite", False), options.pop("save", None)
    save = None if save is None else output_path(save, "save")
    if command == "embed":
        options["species"] = read_species(options.get("species"))
        return str(tl.embed_file(file, out, overwrite=overwrite, **options))
    # checks before anything is read and torch is imported
    files = {"adata": file}
    if options.get("reference") is not None:
        files["reference"] = as_path(options["reference"]).expanduser()
    for path in files.values():
        if isinstance(path, Path) and not path.exists():
            raise FileNotFoundError(f"no file {str(path)!r}.")
    refuse_target(out, overwrite, *files.values())
    if save is not None:
        if save.resolve() == out.resolve():
            raise FileExistsError(f"{str(save)!r} is the --out. Pass another folder to --save.")
        check_folder(save, overwrite, FITTED[command])
    if "model" in options:
        find_model(options["model"])
    with contextlib.ExitStack() as stack:
        options |= {name: stack.enter_context(_opened(path, options)) for name, path in files.items()}
        adata = options["adata"]
        fitted = getattr(tl, command)(**options)
        key = INTEGRATE if command == "integrate" else options.get("key_added", OBS_LABEL)
        if adata.uns.get(UNS, {}).get(key, {}).get("stopped") == "interrupted":
            raise KeyboardInterrupt  # a file would not show that the fit is incomplete
        result = AnnData(obs=adata.obs, obsm=dict(adata.obsm), uns=dict(adata.uns))
    write_cells(result, out)
    # the model is saved last, so that the result is kept if this fails
    return str(out) if save is None else f"{out}\n{fitted.save(save, overwrite=overwrite)}"


@contextlib.contextmanager
def _opened(file: Path, options: dict[str, Any]) -> Iterator[AnnData]:
    """Open a file as AnnData with matrices on disk, which are read by blocks; errors name the file."""
    import anndata
    from anndata.io import read_elem, sparse_dataset

    def on_disk(matrix: Any) -> Any:
        return sparse_dataset(matrix) if hasattr(matrix, "keys") else matrix

    open_matrix(file, options.get("layer"), options.get("use_raw", False)).close()  # checks the structure of the file
    root, opened = open_root(file)
    with opened or contextlib.nullcontext():
        try:
            parts = {name: read_elem(root[name]) for name in ("obs", "var", "obsm", "uns") if name in root}
            parts["layers"] = {name: on_disk(layer) for name, layer in dict(root.get("layers", {})).items()}
            if "raw/X" in root:
                parts["raw"] = {"X": on_disk(root["raw/X"]), "var": read_elem(root["raw/var"])}
            adata = anndata.AnnData(on_disk(root["X"]) if "X" in root else None, **parts)
        except Exception as error:
            raise ValueError(f"{str(file)!r} can't be read: {error}") from error
        yield adata


def info(what: str, *, model: str = DEFAULT_MODEL, json: bool = False) -> str:
    """Describe a model, or a file of cells.

    Parameters
    ----------
    what
        An .h5ad or .zarr file; or a model: a bundled name, a folder of a model, annotator or perturbation model, or
        hf://owner/name, which is downloaded into the cache of the Hugging Face Hub.
    model
        For a file: the model whose vocabulary its genes are matched to.
    json
        Whether to print JSON.

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
    content = about_cells(path, model) if path.suffix in (".h5ad", ".zarr") or path.is_file() else about_model(what)
    # numpy values become plain values, and NaN null
    text = dumps(content, ensure_ascii=False, default=lambda value: getattr(value, "tolist", value.__str__)())
    content = loads(text, parse_constant=lambda name: None)
    return dumps(content, indent=2, ensure_ascii=False) if json else "\n".join(_lines(content))


def about_model(model: str) -> dict[str, Any]:
    """Describe a model, annotator or perturbation model by its folder, without reading weights."""
    folder = find_model(model)
    for kind in ("annotator", "perturbation_model"):
        if (settings := folder / f"{kind}.json").is_file():
            header = {"kind": kind.replace("_", " "), "folder": str(folder)}
            try:
                header |= parse_json(settings, read_bytes(settings))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{settings} is damaged: {error}") from error
            return header | {"model": about_model(str(folder / "model"))}
    entries = read_config(folder, sums := read_sums(folder))
    entries["config"] = entries.pop("model")
    return {"kind": "model", "name": str(model), "folder": str(folder), **entries, "sha256": sums[WEIGHTS]}


def about_cells(path: Path, model: str) -> dict[str, Any]:
    """Describe a file of cells: shape, keys, the expression of its first cells, and results of scdiva."""
    from anndata.io import read_elem

    root, opened = open_root(path)
    with opened or contextlib.nullcontext():
        if missing := [part for part in ("obs", "var") if part not in root]:
            raise ValueError(f"{str(path)!r} lacks {missing[0]}: expected an .h5ad or .zarr that AnnData wrote.")
        names = [names_of(root, axis, path) for axis in ("obs", "var")]
        n_cells, n_genes = (int((of if hasattr(of, "shape") else of["codes"]).shape[0]) for of in names)
        parts = {part: root[part] for part in ("obs", "var", "obsm", "varm", "varp", "layers") if part in root}
        keys = {part: list(map(str, of.attrs.get("column-order", list(of)))) for part, of in parts.items()}
        results = read_elem(root[f"uns/{UNS}"]) if UNS in root.get("uns", ()) else {}
        has_x = "X" in root and n_cells > 0
    results = results if isinstance(results, dict) else {}  # an entry of the user with this name
    written = {part: [name for name in of if name in results or "scdiva" in name] for part, of in keys.items()}
    return {
        "kind": "cells",
        "file": str(path),
        "n_cells": n_cells,
        "n_genes": n_genes,
        **(_expression(path, model) if has_x else {"expression": {"holds": "nothing"}}),
        "keys": keys,
        "written_by_scdiva": {part: of for part, of in written.items() if of},
        "parameters": results,
    }


def _expression(path: Path, model: str) -> dict[str, Any]:
    """Check the first cells of a matrix, and match its genes to the model's."""
    folder = find_model(model)
    inner = folder / "model"  # of an annotator or perturbation model
    vocabulary = Vocabulary.read((inner if inner.is_dir() else folder) / VOCABULARY)
    with open_matrix(path) as opened:
        matched = match_columns(opened.var, vocabulary)
        genes = {"name": model, "n_genes": vocabulary.n_genes, "n_known": int((matched.tokens >= 0).sum())}
        expression: dict[str, Any] = {"cells_read": min(opened.shape[0], CELLS_READ)}
        try:
            scan = opened.scan(itertools.islice(row_blocks(opened.matrix, BLOCK_ROWS), CELLS_READ // BLOCK_ROWS))
            expression |= {"holds": scan.kind, "integer": scan.integer, "max": float(scan.max)}
            genes["share_of_counts"] = judge_genes(
                matched, vocabulary, scan.counts_per_gene, obs_names=opened.obs_names, n_obs=scan.n_obs
            )["share_counts"]
        except ValueError as error:
            expression["refused"] = str(error)
    return {"expression": expression, "model": genes}


def _lines(content: dict[str, Any], indent: str = "") -> list[str]:
    """One line per name and value; nested values are indented."""
    lines = []
    for name, value in content.items():
        if isinstance(value, dict) and value and not indent:
            lines += [f"{indent}{name}:", *_lines(value, indent + "  ")]
        else:
            text = f"{value:,}" if type(value) is int else str(value)
            lines.append(f"{indent}{name}: {textwrap.shorten(text, _LONG, placeholder=' ... (--json holds all)')}")
    return lines
