"""Embed a file of any size into another file, in a memory that does not grow with it."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from scdiva import _constants as C
from scdiva.tl._embed import embed_cells, how_to_run, open_for

if TYPE_CHECKING:
    import h5py

    from scdiva.models import ScDiVa

ROWS_PER_CHUNK = 4096


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
    """Embed the cells of an ``.h5ad`` file into a new one, block by block.

    As :func:`embed`, for files that do not fit into memory: neither the matrix nor the embedding is ever held whole.
    The new file holds the embedding and the annotation of the cells, no matrix.

    Parameters
    ----------
    path
        The ``.h5ad`` file to read; it is not changed.
    out
        The ``.h5ad`` file to write. It is written beside `out` and renamed, so it is there whole or not at all.
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
        If `out` exists and `overwrite` is False, or is the file that is read.
    FileNotFoundError
        If there is no file at `path`.
    ValueError
        If `path` is no ``.h5ad`` file, or for what :func:`embed` refuses.

    Examples
    --------
    >>> sd.tl.embed_file("atlas.h5ad", "atlas_scdiva.h5ad")  # doctest: +SKIP
    """
    import anndata.io
    import h5py

    path, out = Path(path), Path(out)
    if not path.exists():
        raise FileNotFoundError(f"no file {str(path)!r}.")
    if not path.is_file() or not h5py.is_hdf5(path):
        raise ValueError(f"{str(path)!r} is no .h5ad file. Read other formats with anndata and call scdiva.tl.embed.")
    if out.exists() and (not overwrite or out.samefile(path)):
        raise FileExistsError(f"{str(out)!r} exists. Pass another out, or overwrite=True if it is not the input.")
    running = how_to_run(batch_size, device, precision, pooling)
    loaded, source, parameters = open_for(
        model,
        path,
        running,
        layer=layer,
        use_raw=use_raw,
        input=input,
        gene_ids=gene_ids,
        duplicates=duplicates,
        empty=empty,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with h5py.File(part, "w") as file:
            embedding = _start(file, path, key_added, (source.n_obs, running.width(loaded)))
            for rows, states in embed_cells(loaded, source, running):
                embedding[int(rows[0]) : int(rows[-1]) + 1] = _spread(rows, states)
            anndata.io.write_elem(file, "uns", {C.UNS: {key_added: parameters}})
        part.replace(out)
    finally:
        source.close()
        part.unlink(missing_ok=True)
    return out


def _start(file: h5py.File, path: Path, key: str, shape: tuple[int, int]) -> h5py.Dataset:
    """Lay out the new file: obs copied as it is stored, no genes, an embedding of NaN."""
    import anndata.io
    import h5py
    import pandas as pd

    file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
    with h5py.File(path, "r") as old:
        if "__categories" in old["obs"]:  # categories of anndata before 0.8 are references into their own file
            anndata.io.write_elem(file, "obs", anndata.io.read_elem(old["obs"]))
        else:
            _copy(old["obs"], file, "obs")
    anndata.io.write_elem(file, "var", pd.DataFrame(index=pd.Index([], dtype=str)))
    anndata.io.write_elem(file, "obsm", {})
    dataset = file["obsm"].create_dataset(
        key, shape, np.float32, chunks=(min(ROWS_PER_CHUNK, max(shape[0], 1)), shape[1]), fillvalue=np.nan
    )
    dataset.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    return dataset


def _copy(old: h5py.Group | h5py.Dataset, parent: h5py.Group, name: str) -> None:
    """Copy annotation as it is stored, by blocks: HDF5's own copy holds all strings of a column at once."""
    import h5py

    if isinstance(old, h5py.Group):
        new = parent.create_group(name)
        for key, child in old.items():
            _copy(child, new, key)
    elif old.shape == () or old.shape is None:
        old.file.copy(old, parent, name)
        return
    else:
        new = parent.create_dataset(name, old.shape, old.dtype)
        for start in range(0, old.shape[0], ROWS_PER_CHUNK):
            new[start : start + ROWS_PER_CHUNK] = old[start : start + ROWS_PER_CHUNK]
    new.attrs.update(old.attrs)


def _spread(rows: np.ndarray, states: np.ndarray) -> np.ndarray:
    """Put states at their rows; rows between them, left out for lack of a known gene, are NaN."""
    if len(rows) == rows[-1] - rows[0] + 1:
        return states
    spread = np.full((rows[-1] - rows[0] + 1, states.shape[1]), np.nan, dtype=np.float32)
    spread[rows - rows[0]] = states
    return spread
