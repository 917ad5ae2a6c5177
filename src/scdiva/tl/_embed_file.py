"""Embed a file of any size into another file, in a memory that does not grow with it."""

from __future__ import annotations

import hashlib
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from scdiva import _constants as C
from scdiva._version import __version__
from scdiva.data.output import copy_frame, new_rows, open_store, refuse_full, refuse_target, whole_or_not
from scdiva.tl._embed import Running, embed_cells, how_to_run, named, open_for
from scdiva.tl._embed_parts import Parts, fingerprint, open_parts, stamp

if TYPE_CHECKING:
    from scdiva.data.cells import CellSource
    from scdiva.models import ScDiVa


def embed_file(
    path: str | PathLike[str],
    out: str | PathLike[str],
    *,
    model: ScDiVa | str | PathLike[str] = C.DEFAULT_MODEL,
    pooling: Literal["lat", "mean", "lat+mean"] = "lat",
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    gene_ids: str | None = None,
    duplicates: Literal["sum", "error"] = "sum",
    empty: Literal["error", "nan"] = "error",
    batch_size: int | None = None,
    device: str | None = None,
    precision: Literal["auto", "fp32", "bf16", "int8"] | None = None,
    key_added: str = C.OBSM_EMBEDDING,
    overwrite: bool = False,
) -> Path:
    """Embed the cells of an ``.h5ad`` or ``.zarr`` file into a new one, block by block.

    As :func:`embed`, for files that do not fit into memory: neither the matrix nor the embedding is ever held whole.
    The new file holds the embedding and the annotation of the cells, no matrix.

    A run that is cut off, by a kill, an interrupt or an error, leaves its finished parts beside `out`, in a hidden file
    that ends in ``.part``. The same call goes on after them, once it has checked the matrix anew, and gives the same to
    the bit. If file, model, versions or arguments have changed, it starts anew; at ``scdiva.settings.verbosity =
    "info"`` the log says which.

    Parameters
    ----------
    path
        The ``.h5ad`` file or ``.zarr`` folder to read; it is not changed.
    out
        The file to write: a ``.zarr`` folder if its name ends so, else an ``.h5ad`` file. It is written beside `out`
        and renamed, so it is there whole or not at all.
    model, pooling, layer, use_raw, input, gene_ids, duplicates, empty, batch_size, device, precision
        As in :func:`embed`.
    key_added
        Key of `obsm` in the new file.
    overwrite
        Replace `out` if it exists.

    Returns
    -------
    The path of the new file. It holds `obs` of the old one, and

    `obsm[key_added]`
        float32, as wide as :func:`embed` writes it.
    `uns["scdiva"][key_added]`
        As :func:`embed` writes it.

    Raises
    ------
    FileExistsError
        If `out` exists and `overwrite` is False, or is the file that is read, or a folder that is no ``.zarr``.
    FileNotFoundError
        If there is no file at `path`.
    RuntimeError
        If another call is writing the same `out`.
    KeyError, ValueError
        If `path` is no file that AnnData wrote, is damaged, or was changed while it was read; or for what
        :func:`embed` refuses. The message names the file.

    Examples
    --------
    >>> sd.tl.embed_file("atlas.h5ad", "atlas_scdiva.h5ad")  # doctest: +SKIP
    """
    from scdiva.data.packing import WINDOW
    from scdiva.models import load_model

    path, out = Path(path), Path(out)
    if not path.exists():
        raise FileNotFoundError(f"no file {str(path)!r}.")
    refuse_target(out, overwrite, path)
    running = how_to_run(batch_size, device, precision, pooling)
    loaded = load_model(model)
    reading = {
        "layer": layer,
        "use_raw": use_raw,
        "input": input,
        "gene_ids": gene_ids,
        "duplicates": duplicates,
        "empty": empty,
    }
    at_first = stamp(path)
    source, parameters = _opened(loaded, path, running, reading)
    parameters["model"] = named(model)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_name(f".{out.name}.part")
        # parts end where windows do: which cells share a batch must not depend on where a run was cut off
        window = -(-WINDOW // source.block_rows) * source.block_rows
        key = _key(loaded, source, running, reading, parameters["precision"])
        key |= {"file": at_first, "window": window}
        with open_parts(part, key, running.width(loaded)) as parts:
            refuse_target(out, overwrite, path)  # another call may have finished it
            for rows, states in embed_cells(loaded, source, running, start=parts.n_rows):
                end = min(-(-(int(rows[-1]) + 1) // window) * window, source.n_obs)
                parts.append(_between(parts.n_rows, end, rows, states))
            refuse_full(out, 4 * source.n_obs * parts.width)
            with whole_or_not(out) as new:
                _write(new, path, parts, (source.n_obs, parts.width), key_added, parameters)
                if stamp(path) != at_first:
                    parts.remove()
                    raise ValueError(f"{str(path)!r} was changed while it was embedded. Call again once it is whole.")
            parts.remove()
    finally:
        source.close()
    return out


def _opened(model: ScDiVa, path: Path, running: Running, reading: dict[str, Any]) -> tuple[CellSource, dict[str, Any]]:
    """Open and check the file; whatever is wrong with it, the message names it."""
    try:
        return open_for(model, path, running, **reading)[1:]
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        said = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        if path.name in said:
            raise
        kind = KeyError if isinstance(error, KeyError) else ValueError
        raise kind(f"{str(path)!r} can't be embedded: {said}") from error


def _key(
    model: ScDiVa, source: CellSource, running: Running, reading: dict[str, Any], precision: str
) -> dict[str, Any]:
    """Gather what every bit of the embedding depends on, as JSON values; the precision is that of what is run."""
    import torch

    found = source.scan
    content = hashlib.sha256()
    for part in (found.counts_per_gene, found.genes_per_cell, found.known_per_cell, source.tokens):
        content.update(np.ascontiguousarray(part).tobytes())
    return {
        "scdiva": __version__,
        "torch": torch.__version__,
        "content": content.hexdigest(),
        "model": fingerprint(model),
        **reading,
        "input": source.kind,
        "batch_size": running.batch_size,
        "device": running.device,
        "precision": precision,
        "pooling": str(running.what),
    }


def _between(first: int, end: int, rows: np.ndarray, states: np.ndarray) -> np.ndarray:
    """Put states at their rows of `first` to `end`; other rows, left out for lack of a known gene, are NaN."""
    if len(rows) == end - first:
        return states
    spread = np.full((end - first, states.shape[1]), np.nan, dtype=np.float32)
    spread[rows - first] = states
    return spread


def _write(new: Path, path: Path, parts: Parts, shape: tuple[int, int], key: str, parameters: dict[str, Any]) -> None:
    """Write the new file: obs copied, no genes, the embedding part by part; rows after the last part are NaN."""
    import anndata.io
    import pandas as pd

    with open_store(new, "w") as file, open_store(path) as old:
        copy_frame(old["obs"], file, "obs")
        anndata.io.write_elem(file, "var", pd.DataFrame(index=pd.Index([], dtype=str)))
        anndata.io.write_elem(file, "obsm", {})
        embedding = new_rows(file["obsm"], key, shape)
        for first, states in parts.read():
            embedding[first : first + len(states)] = states
        anndata.io.write_elem(file, "uns", {C.UNS: {key: parameters}})
