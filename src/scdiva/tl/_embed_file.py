"""Embed a file of any size into another file, in a memory that does not grow with it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from scdiva import _constants as C
from scdiva._docs import with_shared_docs
from scdiva._running import Running, embed_cells, embedding_key, how_to_run, model_name, open_for
from scdiva._settings import logger
from scdiva._version import __version__
from scdiva.data.blocks import open_path
from scdiva.data.cells import open_cells
from scdiva.data.output import copy_frame, new_rows, open_alone, open_store, refuse_full, refuse_target, whole_or_not
from scdiva.data.reading import Reading, Species
from scdiva.data.writing import check_key
from scdiva.tl._embed_parts import Parts, Shards, as_shard, open_parts, scan_once, stamp

if TYPE_CHECKING:
    from scdiva._validate import Scan
    from scdiva.data.source import CellSource
    from scdiva.models import ScDiVa


@with_shared_docs
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
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    empty: Literal["error", "nan"] = "error",
    batch_size: int | None = None,
    device: str | None = None,
    precision: Literal["auto", "fp32", "bf16"] | None = None,
    key_added: str | None = None,
    overwrite: bool = False,
    shard: tuple[int, int] | None = None,
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
    model, pooling
        As in :func:`embed`.
    %(reading)s
    empty, batch_size, device, precision
        As in :func:`embed`.
    key_added
        Key of `obsm` in the new file. None: `"X_scdiva"`, or of a model of `tl.integrate` `"X_scdiva_integrated"`.
    overwrite
        Replace `out` if it exists.
    shard
        `(i, n)`: do only the i-th of n ranges of rows, i from 0. Call it n times, in any order, on any number of
        machines that share the disk, otherwise with the same arguments; the call that finds all ranges finished joins
        them, to the same bits as one call without shards. Unfinished ranges are taken up by calling again. Ranges and
        notes of which are finished stand in a hidden folder beside `out` that ends in ``.shards``.

    Returns
    -------
    The path of the new file; with `shard` it is there once all ranges are finished. It holds `obs` of the old one, and

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
        If `shard` is no such pair, or there are more shards than windows of 4,096 cells; if `path` is no file that
        AnnData wrote, is damaged, or was changed while it was read; or for what
        :func:`embed` refuses. The message names the file.

    Examples
    --------
    >>> import scdiva as sd
    >>> sd.datasets.toy(60, 100).write_h5ad("cells.h5ad")
    >>> out = sd.tl.embed_file("cells.h5ad", "embedded.h5ad")
    >>> import anndata
    >>> anndata.read_h5ad("embedded.h5ad").obsm["X_scdiva"].shape
    (60, 192)
    >>> sd.tl.embed_file("atlas.h5ad", "atlas_scdiva.h5ad", shard=(3, 64))  # job 3 of an array  # doctest: +SKIP
    """
    path, out = _one_path(path, "path"), _one_path(out, "out")
    if key_added is not None:
        check_key(key_added, "key_added")
    if not path.exists():
        raise FileNotFoundError(f"no file {str(path)!r}.")
    refuse_target(out, overwrite, path)
    reading = Reading(layer, use_raw, input, gene_ids, species, duplicates, empty)
    from scdiva.data.batch import WINDOW  # torch comes after what can be refused without it
    from scdiva.models.pretrained import load_for

    with _naming(path):  # before its content is hashed, which of a large file or a folder takes long
        open_path(path, layer, use_raw).close()
    only = None if shard is None else as_shard(shard)
    running = how_to_run(batch_size, device, precision, pooling)
    loaded = load_for(model, running.device)
    key = embedding_key(loaded) if key_added is None else key_added
    at_first = stamp(path)
    given = {**vars(reading), "file": at_first}
    with _naming(path):
        scanned = None if only is None else _scanned(loaded, path, reading, out, given)
        _, source, parameters = open_for(loaded, path, running, reading, scanned=scanned)
    parameters["model"] = model_name(model)
    # parts end where windows do: which cells share a batch must not depend on where a run was cut off
    window = -(-WINDOW // source.block_rows) * source.block_rows
    of_rows = _key(loaded, source, running, given, parameters["precision"]) | {"window": window}
    shards = Shards(out, 1 if only is None else only[1], of_rows, source.n_obs, window, running.width(loaded))

    def embed_rows(parts: Parts, first: int, stop: int) -> None:
        """Embed the rows of a range that are not yet among its parts."""
        if parts.n_rows:
            logger.info("going on after %d rows, which %s holds", parts.n_rows, parts.path)
        for rows, states in embed_cells(loaded, source, running, start=first + parts.n_rows, stop=stop):
            end = min(-(-(int(rows[-1]) + 1) // window) * window, stop)
            parts.append(_between(first + parts.n_rows, end, rows, states))

    def write(parts: Parts | Shards) -> None:
        """Write the result, unless the file has changed, and remove what it was made of."""
        refuse_full(out, 4 * source.n_obs * parts.width)
        with whole_or_not(out) as new:
            _write(new, path, parts, (source.n_obs, parts.width), key, parameters)
            if stamp(path) != at_first:
                parts.remove()
                raise ValueError(f"{str(path)!r} was changed while it was embedded. Call again once it is whole.")
        parts.remove()

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if only is None:
            with open_parts(out.with_name(f".{out.name}.part"), of_rows, shards.width) as parts:
                refuse_target(out, overwrite, path)  # another call may have finished it
                embed_rows(parts, 0, source.n_obs)
                write(parts)
            return out
        number = only[0]
        first, stop = shards.rows(number)
        if number in shards.missing():
            with shards.open(number) as parts:
                embed_rows(parts, first, stop)
                if missing := stop - first - parts.n_rows:  # a joined file has all rows of each shard
                    parts.append(np.full((missing, shards.width), np.nan, dtype=np.float32))
                shards.finish(number, parts)
        _join(shards, number, write)
    finally:
        source.close()
    return out


def _scanned(model: ScDiVa, path: Path, reading: Reading, out: Path, given: dict[str, Any]) -> Scan:
    """Check the matrix for all jobs, unless one has."""

    def scan() -> Scan:
        source = open_cells(path, model, reading)
        source.close()
        return source.scan

    return scan_once(out, given | {"vocabulary": model.vocabulary.fingerprint, "scdiva": __version__}, scan)


def _join(shards: Shards, number: int, write: Callable[[Shards], None]) -> None:
    """Write the result if all shards are finished, and no other call is at it."""
    if left := shards.missing():
        some = ", ".join(str(one) for one in left[:10]) + (", ..." if len(left) > 10 else "")
        logger.info("shard %d of %d is finished; %d are not: %s", number, shards.n, len(left), some)
        return
    lock = shards.out.with_name(f".{shards.out.name}.joining")
    try:
        held = open_alone(lock)
    except RuntimeError:
        logger.info("all %d shards are finished; another call joins them", shards.n)
        return
    with held:
        try:
            if not shards.missing():  # else the other call has done it
                write(shards)
        finally:
            lock.unlink(missing_ok=True)


def _one_path(given: Any, name: str) -> Path:
    """Give the path; refuse what is none."""
    if isinstance(given, str | PathLike):
        return Path(given)
    mend = "scdiva.tl.embed(adata) takes cells in memory"
    if isinstance(given, list | tuple | set):
        mend = "call embed_file once for each file, with an out of its own"
    raise TypeError(f"{name} must be the path of one file, got {type(given).__name__}: {mend}.")


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let every error about a file name it."""
    try:
        yield
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        said = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        if path.name in said:
            raise
        kind = KeyError if isinstance(error, KeyError) else ValueError
        raise kind(f"{str(path)!r} can't be embedded: {said}") from error


def _key(model: ScDiVa, source: CellSource, running: Running, given: dict[str, Any], precision: str) -> dict[str, Any]:
    """Gather what every bit of the embedding depends on, as JSON values; the precision is that of what is run."""
    import torch

    from scdiva.models.network import fingerprint

    found = source.scan
    content = hashlib.sha256()
    for part in (found.counts_per_gene, found.genes_per_cell, found.known_per_cell, source.tokens):
        content.update(np.ascontiguousarray(part).tobytes())
    return {
        "scdiva": __version__,
        "torch": torch.__version__,
        "content": content.hexdigest(),
        "model": fingerprint(model),
        **given,
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


def _write(
    new: Path, path: Path, parts: Parts | Shards, shape: tuple[int, int], key: str, parameters: dict[str, Any]
) -> None:
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
