"""Embed a file of any size into another file, in a memory that does not grow with it.

Finished parts stand on disk beside the result, so that what a killed run had done is not done again. A part is a window
of rows in a file of its own, which numpy writes with a checksum and which gets its name once it is whole. Parts lie in
a folder that is named by all that their bits depend on: another model, file or argument is another folder. Jobs of an
array fill one folder together, and whoever finds it complete writes the result.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import operator
import os
import shutil
import uuid
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np

from scdiva import _constants as C
from scdiva._docs import with_shared_docs
from scdiva._running import Running, embed_cells, embedding_key, how_to_run, model_name, open_for
from scdiva._settings import logger
from scdiva._validate import Scan
from scdiva._version import __version__
from scdiva.data.blocks import open_matrix
from scdiva.data.cells import open_cells
from scdiva.data.output import copy_frame, new_rows, open_alone, open_store, refuse_full, refuse_target, whole_or_not
from scdiva.data.paths import as_path, is_path, listing
from scdiva.data.reading import Reading, Species
from scdiva.data.soma import SomaCells
from scdiva.data.writing import check_key

if TYPE_CHECKING:
    from scdiva.data.cells import CellSource
    from scdiva.models import ScDiVa

_DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
"""What numpy raises of a file that is not there, or not whole."""


@with_shared_docs
def embed_file(
    path: str | PathLike[str] | SomaCells,
    out: str | PathLike[str],
    *,
    model: ScDiVa | str | PathLike[str] = C.DEFAULT_MODEL,
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

    A run that is cut off, by a kill, an interrupt or an error, leaves its finished parts beside `out`, in a hidden
    folder that ends in ``.parts``. The same call goes on after them, once it has checked the matrix anew, and gives the
    same to the bit. If file, model, versions or arguments have changed, it starts anew, and says so at
    ``scdiva.settings.verbosity = "info"``.

    Parameters
    ----------
    path
        The ``.h5ad`` file or ``.zarr`` folder to read, or its URL; or cells that :func:`scdiva.data.open_soma` chose.
        It is not changed.
    out
        The file to write: a ``.zarr`` folder if its name ends so, else an ``.h5ad`` file. It is written beside `out`
        and renamed, so it is there whole or not at all.
    model
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
        machines that share the disk, otherwise with the same arguments; the call that finds all parts finished joins
        them, to the same bits as one call without shards. Unfinished ranges are taken up by calling again.

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
    if not isinstance(out, Path):
        raise ValueError(f"out={str(out)!r} is no path of this machine: embed into a file here, and copy that.")
    if key_added is not None:
        check_key(key_added, "key_added")
    if isinstance(path, Path) and not path.exists():
        raise FileNotFoundError(f"no file {str(path)!r}.")
    refuse_target(out, overwrite, path)
    reading = Reading(layer, use_raw, input, gene_ids, species, duplicates, empty)
    number, n_shards = (0, 1) if shard is None else as_shard(shard)
    from scdiva.data.batch import WINDOW  # torch comes after what can be refused without it
    from scdiva.models.pretrained import load_for

    with _naming(path):  # before its content is hashed, which of a large file or a folder takes long
        open_matrix(path, layer, use_raw).close()
    running = how_to_run(batch_size, device, precision)
    loaded = load_for(model, running.device)
    key = embedding_key(loaded) if key_added is None else key_added
    at_first = stamp(path)
    given = {**vars(reading), "file": at_first}

    def scan() -> Scan:
        opened = open_cells(path, loaded, reading)
        opened.close()
        return opened.scan

    with _naming(path):
        of_scan = given | {"vocabulary": loaded.vocabulary.fingerprint, "scdiva": __version__}
        scanned = None if shard is None else scan_once(out, of_scan, scan)
        _, source, parameters = open_for(loaded, path, running, reading, scanned=scanned)
    parameters["model"] = model_name(model)
    # parts are windows: which cells share a batch must not depend on where a run was cut off
    window = -(-WINDOW // source.block_rows) * source.block_rows
    run = _run(loaded, source, running, given, parameters["precision"]) | {"window": window}
    try:
        parts = Parts(_folder_of(out) / _digest(run), source.n_obs, window, running.width(loaded))
        first, stop = parts.range_of(number, n_shards)
        with _alone(parts.folder.parent, f"{number}-of-{n_shards}"):
            refuse_target(out, overwrite, path)  # another call may have finished it
            for other in set(parts.folder.parent.glob("*/")) - {parts.folder} if shard is None else ():
                logger.info("%s is of another run: starting anew", other)
                shutil.rmtree(other, ignore_errors=True)
            parts.folder.mkdir(parents=True, exist_ok=True)
            try:
                for start, end in parts.gaps(first, stop):
                    if start > first:
                        logger.info("going on at row %d, after those that %s holds", start, parts.folder)
                    for rows, states in embed_cells(loaded, source, running, start=start, stop=end):
                        parts.save(int(rows[0]) // window * window, rows, states)
                    for left_out in parts.missing(start, end):  # no cell of these has a known gene
                        parts.save(left_out)
            finally:
                if shard is None and len(parts.missing()) == parts.n_parts:  # nothing to go on from
                    shutil.rmtree(parts.folder, ignore_errors=True)
            if left := len(parts.missing()):
                logger.info("shard %d of %d is finished; %d parts of others are not", number, n_shards, left)
            else:
                _join(out, path, parts, key, parameters, at_first)
    finally:
        source.close()
    return out


@dataclass(frozen=True)
class Parts:
    """The finished parts of one embedding.

    Attributes
    ----------
    folder
        Where they are.
    n_obs, window, width
        Rows of all, rows of a part, numbers in a row.
    """

    folder: Path
    n_obs: int
    window: int
    width: int

    @property
    def n_parts(self) -> int:
        """Number of parts of the whole."""
        return -(-self.n_obs // self.window)

    def range_of(self, number: int, n_shards: int) -> tuple[int, int]:
        """Give a shard's first row and that after its last: whole windows, so that cells share batches as in one run.

        Raises
        ------
        ValueError
            If there are more shards than windows.
        """
        if n_shards > max(self.n_parts, 1):
            raise ValueError(
                f"{self.n_obs:,} cells are {self.n_parts} windows of {self.window:,}, which are not divided: ask for "
                f"at most {self.n_parts} shards, not {n_shards}."
            )
        first, stop = (self.n_parts * at // n_shards * self.window for at in (number, number + 1))
        return first, min(stop, self.n_obs)

    def save(self, first: int, rows: np.ndarray | None = None, states: np.ndarray | None = None) -> None:
        """Put states `(n, width)` of some rows down as the part that begins at a row; its other rows are NaN."""
        part = np.full((min(self.window, self.n_obs - first), self.width), np.nan, dtype=np.float32)
        if rows is not None:
            part[rows - first] = states
        _put(self._path(first), lambda file: np.savez(file, states=part))

    def load(self, first: int) -> np.ndarray | None:
        """Read a part, float32; None if it is not there, or damaged, and then it is deleted."""
        try:
            with np.load(self._path(first)) as stored:
                states: np.ndarray = stored["states"]
            if states.shape == (min(self.window, self.n_obs - first), self.width):
                return states
        except FileNotFoundError:
            return None
        except _DAMAGED as error:
            logger.warning("%s is damaged (%s) and is made again", self._path(first), error)
        self._path(first).unlink(missing_ok=True)
        return None

    def missing(self, first: int = 0, stop: int | None = None) -> list[int]:
        """List the rows at which parts begin that are not there."""
        stop = self.n_obs if stop is None else stop
        return [at for at in range(first, stop, self.window) if not self._path(at).exists()]

    def gaps(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Give the ranges of rows of which no whole part is there."""
        found: list[tuple[int, int]] = []
        for at in range(first, stop, self.window):
            if self.load(at) is None:
                begin = found.pop()[0] if found and found[-1][1] == at else at
                found.append((begin, min(at + self.window, stop)))
        return found

    def _path(self, first: int) -> Path:
        return self.folder / f"{first:012d}.npz"


def _join(out: Path, path: Path, parts: Parts, key: str, parameters: dict[str, Any], at_first: str) -> None:
    """Write the result and delete what it was made of, unless another call is at it or has done it."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(_alone(parts.folder.parent, "joining"))
        except RuntimeError:
            logger.info("all parts are finished; another call joins them")
            return
        if parts.missing():
            return
        refuse_full(out, 4 * parts.n_obs * parts.width)
        with whole_or_not(out) as new:
            _write(new, path, parts, key, parameters)
            if stamp(path) != at_first:
                shutil.rmtree(parts.folder.parent, ignore_errors=True)
                raise ValueError(f"{str(path)!r} was changed while it was embedded. Call again once it is whole.")
        shutil.rmtree(parts.folder.parent, ignore_errors=True)


def _write(new: Path, path: Path, parts: Parts, key: str, parameters: dict[str, Any]) -> None:
    """Write the new file: obs copied, no genes, the embedding part by part."""
    import anndata.io
    import pandas as pd

    with open_store(new, "w") as file:
        if isinstance(path, SomaCells):
            anndata.io.write_elem(file, "obs", path.obs())
        else:
            with open_store(path) as old:
                copy_frame(old["obs"], file, "obs")
        anndata.io.write_elem(file, "var", pd.DataFrame(index=pd.Index([], dtype=str)))
        anndata.io.write_elem(file, "obsm", {})
        embedding = new_rows(file["obsm"], key, (parts.n_obs, parts.width))
        for first in range(0, parts.n_obs, parts.window):
            if (states := parts.load(first)) is None:
                raise ValueError(f"the part from row {first} on is damaged: run the shard of that row again.")
            embedding[first : first + len(states)] = states
        anndata.io.write_elem(file, "uns", {C.UNS: {key: parameters}})


def scan_once(out: Path, key: dict[str, Any], make: Callable[[], Scan]) -> Scan:
    """Scan a matrix, unless another job has; of several that come at once, one does it and the others wait.

    Parameters
    ----------
    out
        The result, beside which it is kept.
    key
        What it depends on, as plain JSON values.
    make
        Scans the matrix.
    """
    text, kept = json.dumps(key, sort_keys=True), _folder_of(out) / "scan.npz"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems have no locks: then each job scans
            logger.warning("%s can't be locked (%s); jobs that start at once all check the whole matrix", kept, error)
        with contextlib.suppress(*_DAMAGED), np.load(kept) as found:
            if str(found["key"]) == text:
                stored = {field.name: found[field.name] for field in fields(Scan)}
                return Scan(**{name: value if value.ndim else value.item() for name, value in stored.items()})
        scan = make()
        _put(kept, lambda file: np.savez(file, key=text, **asdict(scan)))
        return scan


def _put(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file that is there whole or not at all, on the disk before it has its name."""
    beside = path.with_name(f".{uuid.uuid4().hex}.{path.name}")
    with beside.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


@contextlib.contextmanager
def _alone(folder: Path, what: str) -> Iterator[None]:
    """Hold a lock in the folder of a result's parts for the block; RuntimeError if another call holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{what}.lock"
    with open_alone(path):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # unless it holds anything
                folder.rmdir()


def _folder_of(out: Path) -> Path:
    return out.with_name(f".{out.name}.parts")


def stamp(path: Path) -> str:
    """Sizes and times of change, or versions, of a file or all files of a folder: another stamp, another content."""
    return _digest(path.note() if isinstance(path, SomaCells) else listing(path))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def as_shard(given: tuple[int, int]) -> tuple[int, int]:
    """Check what a caller gave as one of several ranges of rows: which, from 0, of how many; else ValueError."""
    try:
        number, n = (operator.index(one) for one in given)
        if 0 <= number < n:
            return number, n
    except (TypeError, ValueError):
        pass
    raise ValueError(f"shard must be (number from 0, how many), such as (0, 64) to (63, 64); got {given!r}.")


def _one_path(given: Any, name: str) -> Path:
    """Give the path; refuse what is none."""
    if is_path(given):
        return as_path(given)
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


def _run(model: ScDiVa, source: CellSource, running: Running, given: dict[str, Any], precision: str) -> dict[str, Any]:
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
    }
