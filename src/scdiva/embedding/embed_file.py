"""`tl.embed_file`: embed a file of any size into another file, with constant memory.

Finished parts are kept on disk next to the result, so that an interrupted run continues. A part is a window of rows in
a file of its own, written atomically by numpy with a checksum. The folder of the parts is named by a hash of everything
that determines their bits: another model, file or argument uses another folder. The jobs of an array fill one folder
together, and the job that completes it writes the result; with a dask cluster, the client writes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from scdiva import _constants as C
from scdiva._checks import check_arguments, from_extra, warn
from scdiva._docs import with_shared_docs
from scdiva._files import (
    FULL,
    as_path,
    digest,
    is_path,
    naming_output,
    open_alone,
    output_path,
    put_whole,
    read_bytes,
    refuse_full,
    stamp,
    tidy,
    whole_or_not,
)
from scdiva._settings import logger, progress_bar, settings
from scdiva._validate import Scan
from scdiva._version import __version__
from scdiva.data.cells import CellSource, open_cells
from scdiva.data.genes import InputOptions, Species
from scdiva.data.matrix import BLOCK_ROWS, open_matrix
from scdiva.data.output import DAMAGED, as_shard, copy_frame, folder_of, new_rows, open_store, refuse_target, scan_once
from scdiva.data.results import check_key
from scdiva.data.soma import SomaCells
from scdiva.models.inference import (
    RunConfig,
    embed_cells,
    embedding_key,
    model_name,
    open_cells_for_model,
    resolve_run_config,
)
from scdiva.models.storage import SCHEME, available, find_model

if TYPE_CHECKING:
    from dask.distributed import Client

    from scdiva.models import ScDiVa


@check_arguments
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
    client: Client | str | None = None,
) -> Path:
    """Embed the cells of an ``.h5ad`` or ``.zarr`` file into a new one, block by block.

    As :func:`embed`, for files that do not fit into memory: neither the matrix nor the embedding is ever held whole.
    The new file holds the embedding and the annotation of the cells, no matrix.

    A run that is interrupted, killed or fails leaves its finished parts next to `out`, in a hidden folder that ends in
    ``.parts``. The same call checks the matrix again and continues after them, with bit-identical results. If the file,
    model, versions or arguments have changed, it starts again from the first row (logged at
    ``scdiva.settings.verbosity = "info"``).

    Parameters
    ----------
    path
        The ``.h5ad`` file or ``.zarr`` folder to read, or its URL; or cells from :func:`scdiva.data.open_soma`.
    out
        The file to write: a ``.zarr`` folder if its name ends in ``.zarr``, otherwise an ``.h5ad`` file. It is written
        atomically.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`.
    %(reading)s
    %(gene_ids)s
    %(species)s
    %(duplicates)s
    empty
        What to do with a cell without any gene of the vocabulary: raise an error, or write a row of NaN (`"nan"`).
    batch_size
        Maximum number of cells per forward pass. None: `scdiva.settings.batch_size`. It changes speed and memory;
        results change by rounding at most.
    device
        Torch device such as `"cpu"` or `"cuda:0"`. None: `scdiva.settings.device`.
    precision
        Arithmetic of the transformer: `"fp32"`, `"bf16"` or `"auto"` (bf16 if the device supports it in hardware).
        None: `scdiva.settings.precision`.
    key_added
        Key of `obsm` in the new file. None: `"X_scdiva"`, or of a model of `tl.integrate` `"X_scdiva_integrated"`.
    overwrite
        Replace `out` if it exists.
    shard
        `(i, n)`: embed only the i-th of n ranges of rows, i from 0. Call it n times with otherwise the same arguments,
        in any order, on any number of machines that share the disk; the call that completes the parts joins them, with
        the same bits as one call without shards. Call again for ranges that failed.
    client
        A client of dask's distributed (extra ``dist``), or the address of its scheduler, such as
        ``"tcp://scheduler:8786"``: the workers embed ranges of rows, and this call joins them, with the same bits as
        without a cluster. Workers must share the disk and have the same versions and kind of device. If a worker is
        lost, another one continues after its last finished part. None: no cluster.

    Returns
    -------
    The path of the new file; with `shard` it is written once all ranges are finished. It contains `obs` of the input,
    and

    `obsm[key_added]`
        float32, as from :func:`embed`.
    `uns["scdiva"][key_added]`
        As from :func:`embed`.

    Raises
    ------
    FileExistsError
        If `out` exists and `overwrite` is False, or is the file that is read, or a folder that is no ``.zarr`` or
        contains files that are no part of it.
    FileNotFoundError
        If there is no file at `path`.
    RuntimeError
        If another call is writing the same `out`; if workers of `client` die repeatedly, do not share the disk, or
        differ in versions or kind of device.
    ImportError, TypeError
        With `client`, if distributed is not installed or `model` is a loaded model.
    KeyError, ValueError
        If `out` is a URL or does not end in .h5ad or .zarr; if `shard` is not a pair `(i, n)` or has more shards than
        windows of 4,096 cells; if `client` is combined with `shard` or with cells of SOMA; if `path` is not a file that
        AnnData wrote, is damaged or changes while it is read; and as :func:`embed`. The message names the file.

    Examples
    --------
    >>> import scdiva as sd
    >>> sd.datasets.toy(60, 100).write_h5ad("cells.h5ad")
    >>> out = sd.tl.embed_file("cells.h5ad", "embedded.h5ad")
    >>> import anndata
    >>> anndata.read_h5ad("embedded.h5ad").obsm["X_scdiva"].shape
    (60, 192)
    >>> sd.tl.embed_file("atlas.h5ad", "atlas_scdiva.h5ad", shard=(3, 64))  # job 3 of an array  # doctest: +SKIP
    >>> sd.tl.embed_file("atlas.h5ad", "atlas_scdiva.h5ad", client=client)  # of dask.distributed  # doctest: +SKIP
    """
    if not is_path(path):
        remedy = "scdiva.tl.embed(adata) takes cells in memory"
        if isinstance(path, list | tuple | set):
            remedy = "call embed_file once for each file, with an out of its own"
        raise TypeError(f"path must be the path of one file, got {type(path).__name__}: {remedy}.")
    path, out = as_path(path), output_path(out)
    if key_added is not None:
        check_key(key_added, "key_added")
    if isinstance(path, Path) and not path.exists():
        raise FileNotFoundError(f"no file {str(path)!r}.")
    refuse_target(out, overwrite or bool(_joined(out)), path)
    if client is not None and (shard is not None or isinstance(path, SomaCells)):
        raise ValueError("client runs all shards of a file or its URL: pass one of the two, and for SOMA cells shard.")
    shard = None if shard is None else as_shard(shard)
    with _naming(path), open_matrix(path, layer, use_raw) as opened:  # fails before the slow hashing of the content
        n_obs = opened.shape[0]
    embed = partial(
        _embed_shard,
        reading=InputOptions(layer, use_raw, input, gene_ids, species, duplicates, empty),
        # workers use the settings of this process
        how=(
            settings.batch_size if batch_size is None else batch_size,
            settings.device if device is None else device,
            settings.precision if precision is None else precision,
        ),
        key_added=key_added,
        overwrite=overwrite,
    )
    if client is None:
        with naming_output(out):
            embed(shard, path, out, model)
        return out
    everywhere = partial(embed, path=path.absolute(), out=out.absolute(), model=named_everywhere(model), joins=False)
    result, *others = map_shards(client, everywhere, -(-n_obs // _window()))
    if any(result.parts != other.parts for other in others) or result.parts.missing():
        raise RuntimeError(
            f"the workers left no whole result in {result.parts.folder}: they don't share the disk, or differ in "
            "versions of scdiva and torch, or in their kind of device. device='cuda' refuses workers without a GPU."
        )
    result.parameters["model"] = model_name(model)
    _join(out, path, result)
    return out


JOINED = "joined"
"""File next to the parts that identifies the result made from them."""


class _ShardResult(NamedTuple):
    """Common to all shards of an embedding: parts, key, parameters for `uns`, and the stamp of the input file."""

    parts: Parts
    key: str
    parameters: dict[str, Any]
    input_stamp: str


def _embed_shard(
    shard: tuple[int, int] | None,
    path: Path,
    out: Path,
    model: ScDiVa | str | PathLike[str],
    *,
    reading: InputOptions,
    how: tuple[int | None, str, str],
    key_added: str | None,
    overwrite: bool,
    joins: bool = True,
) -> _ShardResult:
    """Compute the parts of a shard (None: all), and join all parts if they are complete and `joins`.

    On a cluster (`joins=False`), a worker that dask gave up may still be running: wait for its lock.
    """
    from scdiva.models.pretrained import load_for

    (number, n_shards), window = shard or (0, 1), _window()
    run_config = resolve_run_config(*how)
    loaded = load_for(model, run_config.device)
    key = embedding_key(loaded) if key_added is None else key_added
    input_stamp = stamp(path)
    input_record = {**vars(reading), "file": input_stamp}

    def scan() -> Scan:
        opened = open_cells(path, loaded, reading)
        opened.close()
        return opened.scan

    with _naming(path):
        of_scan = input_record | {"vocabulary": loaded.vocabulary.fingerprint, "scdiva": __version__}
        scanned = None if shard is None else scan_once(out, of_scan, scan)
        _, source, parameters = open_cells_for_model(loaded, path, run_config, reading, scanned=scanned)
    parameters["model"] = model_name(model)
    run = _run(loaded, source, run_config, input_record, parameters["precision"]) | {"window": window}
    try:
        parts = Parts(folder_of(out) / digest(run), source.n_obs, window, run_config.width(loaded))
        result, is_joined = _ShardResult(parts, key, parameters, input_stamp), _joined(out) == parts.folder.name
        first, stop = parts.range_of(number, n_shards)
        with _alone(parts.folder.parent, f"{number}-of-{n_shards}", waits=not joins):
            if is_joined and joins:  # killed before it deleted the parts
                tidy(out)
                shutil.rmtree(parts.folder.parent, ignore_errors=True)
                return result
            refuse_target(out, overwrite or is_joined, path)  # another call may have finished in the meantime
            for other in set(parts.folder.parent.glob("*/")) - {parts.folder} if shard is None else ():
                logger.info("%s is of another run: starting again", other)
                shutil.rmtree(other, ignore_errors=True)
            parts.folder.mkdir(parents=True, exist_ok=True)
            try:
                for start, end in parts.gaps(first, stop):
                    if start > first:
                        logger.info("going on at row %d, after those that %s holds", start, parts.folder)
                    for rows, states in embed_cells(loaded, source, run_config, start=start, stop=end):
                        parts.save(int(rows[0]) // window * window, rows, states)
                    for left_out in parts.missing(start, end):  # windows without any known gene
                        parts.save(left_out)
            finally:
                if shard is None and len(parts.missing()) == parts.n_parts:  # nothing to continue from
                    shutil.rmtree(parts.folder, ignore_errors=True)
            if left := len(parts.missing()):
                logger.info("shard %d of %d is finished; %d parts of others are not", number, n_shards, left)
            elif joins:
                _join(out, path, result)
    finally:
        source.close()
    return result


def _join(out: Path, path: Path, result: _ShardResult) -> None:
    """Write the result and delete the parts, unless another call does so or has done so."""
    parts = result.parts
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
            _write(new, path, result)
            if stamp(path) != result.input_stamp:
                shutil.rmtree(parts.folder.parent, ignore_errors=True)
                raise ValueError(f"{str(path)!r} was changed while it was embedded. Call again once it is whole.")
            note = f"{parts.folder.name} {_identity(new)}"
            put_whole(parts.folder.parent / JOINED, lambda file: file.write(note.encode()))
        shutil.rmtree(parts.folder, ignore_errors=True)
        shutil.rmtree(parts.folder.parent, ignore_errors=True)


def _joined(out: Path) -> str:
    """Name of the run whose result is at `out`, if its call was killed before it deleted the parts; else empty."""
    with contextlib.suppress(OSError, ValueError):
        run, _, identity = read_bytes(folder_of(out) / JOINED, limit=4096).decode().partition(" ")
        if identity == _identity(out):
            return run
    return ""


def _identity(path: Path) -> str:
    """Identify a file or folder independent of its name: device, inode and modification time."""
    stat = path.stat()
    return f"{stat.st_dev} {stat.st_ino} {stat.st_mtime_ns}"


def _write(new: Path, path: Path, result: _ShardResult) -> None:
    """Write the new file: a copy of obs, no genes, and the embedding part by part."""
    import anndata.io

    parts = result.parts
    with open_store(new, "w") as file:
        if isinstance(path, SomaCells):
            anndata.io.write_elem(file, "obs", path.obs())
        else:
            with open_store(path) as old:
                copy_frame(old["obs"], file, "obs")
        anndata.io.write_elem(file, "var", pd.DataFrame(index=pd.Index([], dtype=str)))
        anndata.io.write_elem(file, "obsm", {})
        embedding = new_rows(file["obsm"], result.key, (parts.n_obs, parts.width))
        for first in range(0, parts.n_obs, parts.window):
            if (states := parts.load(first)) is None:
                raise ValueError(f"the part from row {first} on is damaged: run the shard of that row again.")
            embedding[first : first + len(states)] = states
        anndata.io.write_elem(file, "uns", {C.UNS: {result.key: result.parameters}})


@contextlib.contextmanager
def _alone(folder: Path, what: str, *, waits: bool = False) -> Iterator[None]:
    """Hold a lock in the folder of the parts; if another call holds it, wait or raise RuntimeError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{what}.lock"
    with open_alone(path, waits=waits):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # unless it is not empty
                folder.rmdir()


def _window() -> int:
    """Rows of a part: whole windows, so that batches do not depend on where a run was interrupted."""
    from scdiva.data.batch import WINDOW  # imports torch, after the checks

    return -(-WINDOW // BLOCK_ROWS) * BLOCK_ROWS


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file name to errors about its content."""
    try:
        yield
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        if path.name in message or getattr(error, "errno", None) in FULL:
            raise
        kind = KeyError if isinstance(error, KeyError) else ValueError
        raise kind(f"{str(path)!r} can't be embedded: {message}") from error


def _run(
    model: ScDiVa, source: CellSource, run_config: RunConfig, input_record: dict[str, Any], precision: str
) -> dict[str, Any]:
    """Everything that determines the bits of the embedding, as JSON values."""
    import torch

    from scdiva.models.pretrained import fingerprint

    scan, content = source.scan, hashlib.sha256()
    for part in (scan.counts_per_gene, scan.genes_per_cell, scan.known_per_cell, source.tokens):
        content.update(np.ascontiguousarray(part).tobytes())
    return {
        "scdiva": __version__,
        "torch": torch.__version__,
        "content": content.hexdigest(),
        "model": fingerprint(model),
        **input_record,
        "input": source.kind,
        "batch_size": run_config.batch_size,
        "device": run_config.device,
        "precision": precision,
    }


Result = TypeVar("Result")
SHARDS_PER_THREAD, LEAST_SHARDS = 4, 64
"""Shards per thread of the workers, and minimum number: few, since each shard opens the file; enough to balance the
load over workers, including workers that join late."""


@dataclass(frozen=True)
class Parts:
    """The finished parts of one embedding.

    Attributes
    ----------
    folder
        Folder of the parts.
    n_obs, window, width
        Number of all rows, rows per part, and columns.
    """

    folder: Path
    n_obs: int
    window: int
    width: int

    @property
    def n_parts(self) -> int:
        """Number of parts of the embedding."""
        return -(-self.n_obs // self.window)

    def range_of(self, number: int, n_shards: int) -> tuple[int, int]:
        """First and last row (exclusive) of a shard: whole windows, so that batches are the same as in one run.

        Raises
        ------
        ValueError
            If there are more shards than windows.
        """
        if n_shards > max(self.n_parts, 1):
            raise ValueError(
                f"{self.n_obs:,} cells are {self.n_parts} blocks of up to {self.window:,}, which are not divided. "
                f"Pass at most {self.n_parts} shards, not {n_shards}."
            )
        first, stop = (self.n_parts * at // n_shards * self.window for at in (number, number + 1))
        return first, min(stop, self.n_obs)

    def save(self, first: int, rows: np.ndarray | None = None, states: np.ndarray | None = None) -> None:
        """Save states `(n, width)` of `rows` as the part that begins at row `first`; other rows of it are NaN."""
        part = np.full((min(self.window, self.n_obs - first), self.width), np.nan, dtype=np.float32)
        if rows is not None:
            part[rows - first] = states
        put_whole(self._path(first), lambda file: np.savez(file, states=part))

    def load(self, first: int) -> np.ndarray | None:
        """Load a part, float32; None if it does not exist or is damaged (it is then deleted)."""
        try:
            with np.load(self._path(first)) as stored:
                states: np.ndarray = stored["states"]
            if states.shape == (min(self.window, self.n_obs - first), self.width):
                return states
        except FileNotFoundError:
            return None
        except DAMAGED as error:
            logger.warning("%s is damaged (%s) and is made again", self._path(first), error)
        self._path(first).unlink(missing_ok=True)
        return None

    def missing(self, first: int = 0, stop: int | None = None) -> list[int]:
        """First rows of the missing parts."""
        stop = self.n_obs if stop is None else stop
        return [at for at in range(first, stop, self.window) if not self._path(at).exists()]

    def gaps(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Ranges of rows without a complete part."""
        gaps: list[tuple[int, int]] = []
        for at in range(first, stop, self.window):
            if self.load(at) is None:
                begin = gaps.pop()[0] if gaps and gaps[-1][1] == at else at
                gaps.append((begin, min(at + self.window, stop)))
        return gaps

    def _path(self, first: int) -> Path:
        return self.folder / f"{first:012d}.npz"


def map_shards(client: Client | str, embed: Callable[[tuple[int, int]], Result], most: int) -> list[Result]:
    """Run a function of a shard on the workers of a cluster, for all shards; dask reassigns shards of lost workers.

    Parameters
    ----------
    client
        A client, or an argument for one: the address of a scheduler, a cluster.
    embed
        Function of `(i, n)`, pickled by dask.
    most
        Maximum number of shards.

    Returns
    -------
    The results, in the order in which the shards finished.

    Raises
    ------
    ImportError
        If dask's distributed is not installed.
    RuntimeError
        If dask gives up a shard because too many workers died.

    Warns
    -----
    UserWarning
        The warnings of the workers.
    """
    distributed = from_extra("distributed", "dist", "client needs dask's distributed")
    with contextlib.ExitStack() as opened:
        is_client = isinstance(client, distributed.Client)
        workers: Any = client if is_client else opened.enter_context(distributed.Client(client))
        n = max(1, min(most, max(LEAST_SHARDS, SHARDS_PER_THREAD * sum(workers.nthreads().values()))))
        jobs = workers.map(partial(_with_warnings, embed), [(number, n) for number in range(n)], pure=False)
        # errors and interrupts cancel the shards that have not started
        opened.callback(workers.cancel, jobs)
        done = distributed.as_completed(jobs, with_results=True)
        try:
            outcomes = [outcome for _, outcome in progress_bar(done, desc="embedding", unit="shard", total=n)]
        except distributed.KilledWorker as error:
            raise RuntimeError(
                f"workers died, one after another, as they embedded the same rows: {error} What is finished is kept: "
                "give workers more memory and call again."
            ) from error
    for message in dict.fromkeys(text for _, texts in outcomes for text in texts):
        warn(message)
    return [result for result, _ in outcomes]


def _with_warnings(embed: Callable[[tuple[int, int]], Result], shard: tuple[int, int]) -> tuple[Result, list[str]]:
    """Run the function on a worker and return its warnings, since the stderr of a worker is not shown to the user."""
    with warnings.catch_warnings(record=True) as caught:
        result = embed(shard)
    return result, [str(one.message) for one in caught if issubclass(one.category, UserWarning)]


def named_everywhere(model: Any) -> str:
    """Name of a model that is valid in any working directory: bundled name, absolute folder, or Hub address.

    Raises
    ------
    TypeError
        If it is a loaded model.
    FileNotFoundError
        If the folder does not exist.
    """
    if not isinstance(model, str | os.PathLike):
        raise TypeError(
            "with client, model must be a name or a folder that all workers see, got a loaded model. Save it: "
            "scdiva.models.save_model(model, model.vocabulary, folder)."
        )
    name = os.fspath(model)
    return name if name.startswith(SCHEME) or name in available() else str(find_model(model).absolute())
