"""`scdiva info`: what a model is, or what a file of cells holds, without loading either."""

from __future__ import annotations

import itertools
import textwrap
from json import dumps, loads
from pathlib import Path
from typing import Any

from scdiva import _constants as C

CELLS_READ = 4096
"""Cells at the beginning of a file by which its expression is judged."""
_LONG = 300
"""Characters of a value in the text; JSON holds all."""


def info(what: str, *, model: str = C.DEFAULT_MODEL, json: bool = False) -> str:
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
    path = Path(what).expanduser()
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
    from scdiva.models._folder import WEIGHTS, read_config, read_sums
    from scdiva.models.hub import find_model

    folder = find_model(model)
    for kind in ("annotator", "perturbation_model"):
        if (settings := folder / f"{kind}.json").is_file():
            try:
                found = {"kind": kind.replace("_", " "), "folder": str(folder), **loads(settings.read_text("utf-8"))}
            except (ValueError, TypeError, RecursionError) as error:
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

    from scdiva.data.stored import names_of, open_root

    root, opened = open_root(path)
    try:
        if missing := [part for part in ("obs", "var") if part not in root]:
            raise ValueError(f"{str(path)!r} lacks {missing[0]}: expected an .h5ad or .zarr that AnnData wrote.")
        names = [names_of(root, axis, path) for axis in ("obs", "var")]
        n_cells, n_genes = (int((of if hasattr(of, "shape") else of["codes"]).shape[0]) for of in names)
        parts = {part: root[part] for part in ("obs", "var", "obsm", "varm", "varp", "layers") if part in root}
        keys = {part: list(map(str, of.attrs.get("column-order", list(of)))) for part, of in parts.items()}
        ours = read_elem(root[f"uns/{C.UNS}"]) if C.UNS in root.get("uns", ()) else {}
        has_x = "X" in root and n_cells > 0
    finally:
        if opened is not None:
            opened.close()
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
    from scdiva._validate import scan
    from scdiva.data.blocks import BLOCK_ROWS, open_matrix, row_blocks
    from scdiva.data.genes import judge_genes, match_columns
    from scdiva.models._folder import VOCABULARY
    from scdiva.models.hub import find_model
    from scdiva.tokenizer.vocabulary import Vocabulary

    folder = find_model(model)
    fitted = folder / "model"
    genes = Vocabulary.read((fitted if fitted.is_dir() else folder) / VOCABULARY)
    with open_matrix(path) as opened:
        matched = match_columns(opened.var, genes)
        known = {"name": model, "n_genes": genes.n_genes, "n_known": int((matched.tokens >= 0).sum())}
        holds: dict[str, Any] = {"cells_read": min(opened.shape[0], CELLS_READ)}
        try:
            blocks = itertools.islice(row_blocks(opened.matrix, BLOCK_ROWS), CELLS_READ // BLOCK_ROWS)
            found = scan(blocks, opened.shape[1], where="X")
            holds |= {"holds": found.kind, "integer": found.integer, "max": float(found.max)}
            known["share_of_counts"] = judge_genes(matched, genes, found.counts_per_gene)["share_counts"]
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
