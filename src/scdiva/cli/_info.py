"""`scdiva info`: what a model is, or what a file of cells holds, without loading either."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scdiva import _constants as C
from scdiva.tokenizer.names import read_species

if TYPE_CHECKING:
    from scdiva.data.reading import Reading

CELLS_READ = 4096
"""Cells at the beginning of a file by which its expression is judged."""
_LONG = 300
"""Characters from which on a value is left out of the text, not of JSON."""
_DEEP = 2
"""Depth from which on what is nested is left out likewise."""
_PARTS = ("obs", "var", "obsm", "varm", "varp", "layers")


def info(
    what: str,
    *,
    model: str = C.DEFAULT_MODEL,
    layer: str | None = None,
    use_raw: bool = False,
    gene_ids: str | None = None,
    species: str | None = None,
    json: bool = False,
) -> str:
    """Describe a model, or a file of cells.

    Parameters
    ----------
    what
        An .h5ad or .zarr file; or a model: a bundled name, a folder, also of what was fitted, or hf://owner/name,
        which is fetched into the Hub's cache.
    model
        Of a file: the model whose genes its own are held against.
    layer, use_raw
        Of a file: the matrix to read, in place of X.
    gene_ids
        Of a file: the column of var with symbols or Ensembl ids; null takes the names of var.
    species
        Of a file: whose genes these are; null finds out whether they are a mouse's.
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
    path = Path(what).expanduser()
    if path.suffix in (".h5ad", ".zarr") or path.is_file():
        from scdiva.data.reading import Reading

        found = about_cells(path, model, Reading(layer, use_raw, gene_ids=gene_ids, species=read_species(species)))
    else:
        found = about_model(what)
    return _json(found) if json else "\n".join(_lines(found))


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
    from scdiva.models._folder import CONFIG, WEIGHTS, read_config, read_sums
    from scdiva.models.hub import find_model

    folder = find_model(model)
    for kind in ("annotator", "perturbation_model"):
        if (folder / f"{kind}.json").is_file():
            return _about_fitted(folder, kind)
    sums = read_sums(folder)
    config = read_config(folder, sums)
    return {
        "kind": "model",
        "name": str(model),
        "folder": str(folder),
        "written_by": f"scdiva {config['scdiva_version']}, format {config['format_version']}",
        "n_parameters": config["n_parameters"],
        "dtype": config["dtype"],
        "weights": {"bytes": (folder / WEIGHTS).stat().st_size, "sha256": sums[WEIGHTS]},
        "vocabulary": config["vocabulary"],
        CONFIG.removesuffix(".json"): config["model"],
        "metadata": config["metadata"],
    }


def _about_fitted(folder: Path, kind: str) -> dict[str, Any]:
    try:
        settings = json.loads((folder / f"{kind}.json").read_text(encoding="utf-8"))
        found = {"kind": kind.replace("_", " "), "folder": str(folder), **dict(settings)}
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / kind}.json is damaged: {error}") from error
    return found | {"model": about_model(str(folder / "model"))}


def about_cells(path: Path, model: str, reading: Reading) -> dict[str, Any]:
    """Describe a file of cells: its shape, its names, the first rows of its matrix, and what scdiva wrote into it.

    Parameters
    ----------
    path
        The file.
    model
        As for :func:`info`.
    reading
        What to read.

    Returns
    -------
    Plain values by name.
    """
    from anndata.io import read_elem

    from scdiva.data.stored import names_of, open_root

    root, opened = open_root(path)
    try:
        missing = [part for part in ("obs", "var") if part not in root]
        if missing:
            raise ValueError(f"{str(path)!r} lacks {missing[0]}: expected an .h5ad or .zarr that AnnData wrote.")
        names = [names_of(root, axis, path) for axis in ("obs", "var")]
        n_cells, n_genes = (int((of if hasattr(of, "shape") else of["codes"]).shape[0]) for of in names)
        keys = {part: _keys(root[part]) for part in _PARTS if part in root}
        ours = read_elem(root[f"uns/{C.UNS}"]) if C.UNS in root.get("uns", ()) else {}
        ours = ours if isinstance(ours, dict) else {}  # something of the user's own under that name
        layer = reading.layer
        where = "raw.X" if reading.use_raw else "X" if layer is None else f"layers[{layer!r}]"
        empty = not (reading.use_raw or layer) and "X" not in root
    finally:
        if opened is not None:
            opened.close()
    found = {"kind": "cells", "file": str(path), "n_cells": n_cells, "n_genes": n_genes}
    if empty or not n_cells:
        found["expression"] = {"where": where, "holds": "nothing"}
    else:
        found |= _expression(path, where, model, reading)
    written = {
        part: [name for name in names if name in ours or name.startswith(("scdiva_", "X_scdiva"))]
        for part, names in keys.items()
    }
    return found | {
        "keys": keys,
        "written_by_scdiva": {part: names for part, names in written.items() if names},
        "parameters": _plain(ours),
    }


def _keys(group: Any) -> list[str]:
    return [str(name) for name in group.attrs.get("column-order", list(group.keys()))]


def _expression(path: Path, where: str, model: str, reading: Reading) -> dict[str, Any]:
    """Check the first cells of a matrix, and match its genes to the model's."""
    from scdiva._validate import scan
    from scdiva.data.blocks import BLOCK_ROWS, open_path, row_blocks
    from scdiva.data.genes import judge_genes, match_columns

    name, genes = _vocabulary(model)
    with open_path(path, reading.layer, reading.use_raw) as opened:
        matched = match_columns(opened.var, genes, reading)
        known: dict[str, Any] = {"name": name, "n_genes": genes.n_genes, "n_known": int((matched.tokens >= 0).sum())}
        noted: dict[str, Any] = {}
        holds: dict[str, Any] = {"where": where, "dtype": str(opened.matrix.dtype)}
        holds["cells_read"] = min(opened.shape[0], CELLS_READ)
        blocks = itertools.islice(row_blocks(opened.matrix, BLOCK_ROWS), CELLS_READ // BLOCK_ROWS)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                found = scan(blocks, opened.shape[1], where=where)
                holds |= {"holds": found.kind, "integer": found.integer, "max": float(found.max)}
                report = judge_genes(matched, genes, found.counts_per_gene, reading)
                known["share_of_counts"] = report["share_counts"]
            except ValueError as error:
                noted["refused"] = str(error)
        if warned:
            noted["warnings"] = [str(one.message) for one in warned]
    return {"expression": holds, "model": known, **noted}


def _vocabulary(model: str) -> tuple[str, Any]:
    from scdiva.models._folder import VOCABULARY
    from scdiva.models.hub import find_model
    from scdiva.tokenizer.vocabulary import Vocabulary

    folder = find_model(model)
    fitted = folder / "model"
    return model, Vocabulary.read((fitted if fitted.is_dir() else folder) / VOCABULARY)


def _plain(value: Any) -> Any:
    """Turn what `uns` holds into plain values; an array of more than ten is named by its shape."""
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if hasattr(value, "shape") and value.shape != ():
        return _plain(value.tolist()) if value.size <= 10 else f"array of shape {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value.item() if hasattr(value, "item") else value


def _json(found: dict[str, Any]) -> str:
    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: finite(part) for name, part in value.items()}
        if isinstance(value, list):
            return [finite(part) for part in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(found), indent=2, ensure_ascii=False, default=str)


def _lines(found: dict[str, Any], depth: int = 0) -> list[str]:
    """Write names and values below each other, what is nested further in."""
    lines = []
    for name, value in found.items():
        if isinstance(value, dict) and value and depth < _DEEP:
            lines += [f"{'  ' * depth}{name}:", *_lines(value, depth + 1)]
        else:
            lines.append(f"{'  ' * depth}{name}: {_text(value, depth)}")
    return lines


def _text(value: Any, depth: int) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, dict) and value:
        return f"({len(value)} values; see --json)"
    text = " ".join((", ".join(map(str, value)) if isinstance(value, list) else str(value)).split())
    return text if len(text) <= _LONG or not depth else f"({len(text):,} characters; see --json)"
