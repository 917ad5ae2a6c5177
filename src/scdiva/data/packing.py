"""Pack files into a corpus: serialise them once, part by part, in several processes and jobs.

A part is a range of rows of one file, written atomically into a file of its own. Its name is a hash of everything that
determines its bits, so finished parts of an interrupted call are reused. The call that finds all parts writes the
index.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing.connection
import os
import re
import shutil
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import h5py
import numpy as np

from scdiva._checks import check_arguments, check_least, refuse_unwritable, warn
from scdiva._constants import MAX_LENGTH, N_SPECIAL
from scdiva._docs import with_shared_docs
from scdiva._files import (
    as_path,
    digest,
    open_alone,
    output_path,
    parse_json,
    put_whole,
    refuse_full,
    stamp,
    whole_or_not,
)
from scdiva._settings import logger, progress_bar, settings
from scdiva._validate import Input
from scdiva._version import __version__
from scdiva.data.backed import open_hdf5
from scdiva.data.cells import open_cells, take_cells, warn_left_out
from scdiva.data.corpus import data_files, file_note, study_names
from scdiva.data.genes import InputOptions, Species
from scdiva.data.matrix import BLOCK_ROWS, open_matrix
from scdiva.data.output import as_shard, new_hdf5, scan_once
from scdiva.data.packed import ARRAYS, FORMAT, INDEX, PART_CELLS, PackedCells, read_index, token_type
from scdiva.tokenizer.serialize import ENTROPY_FLOOR, score_denominator
from scdiva.tokenizer.vocabulary import Vocabulary, load_vocabulary

_OURS = re.compile(r"(\.\w{32}\.)?(index.json|(lengths|study|measured|denominator)-\w{12}.npy)|part-.+-\d{9}-\w{12}.h5")
"""Names of the files of a corpus, and of temporary files of :func:`put_whole`."""


@check_arguments
@with_shared_docs
def pack_files(
    paths: Sequence[str | Path] | str | Path,
    vocabulary: Vocabulary | str | Path,
    out: str | Path | None = None,
    *,
    workers: int = 1,
    shard: tuple[int, int] | None = None,
    append: bool = False,
    max_length: int = MAX_LENGTH,
    entropy_floor: float = ENTROPY_FLOOR,
    min_genes: int = 1,
    part_cells: int = PART_CELLS,
    check: bool = False,
    skip_unusable: bool = False,
    layer: str | None = None,
    use_raw: bool = False,
    input: Input = "auto",
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
) -> PackedCells | None:
    """Serialise files into a training corpus: a folder of parts, each with cells of one study, and an index.

    A call that is interrupted, killed or fails leaves its finished parts, and the same call continues after them. Parts
    whose file or arguments have changed are packed again. The bits of the corpus depend neither on `workers` nor on
    `shard`.

    Parameters
    ----------
    paths
        ``.h5ad`` or ``.zarr`` files, one study each, or folders of them; the file's name without suffix is the study's
        name. They may have different genes; human or mouse is inferred for each file, unless `species` is given.
    vocabulary
        Genes and their entropies: a vocabulary, or the name, model folder or file of one.
    out
        Local folder of the corpus, created if it does not exist. Its `index.json` is written last. Not required
        with `check=True`.
    workers
        Number of processes, each packing one part at a time in up to 6 × `max_length` × `part_cells` bytes of memory.
        With more than one, call it under ``if __name__ == "__main__":``.
    shard
        `(i, n)`: pack only the i-th of n ranges of the parts, i from 0. Call it n times with otherwise the same
        arguments, in any order, on any number of machines that share the disk; the call that finds all parts finished
        writes the index.
    append
        Whether to add the studies to the corpus at `out`.
    max_length
        Maximum number of genes per cell.
    entropy_floor
        Minimum entropy in the ranking score (:func:`scdiva.tokenizer.serialize.score_denominator`).
    min_genes
        Minimum number of known genes per cell; other cells are excluded with a warning.
    part_cells
        Rows per part.
    check
        Whether to only read and check all files. Nothing is written; if files can't be packed, the error lists them.
    skip_unusable
        Whether to leave out files that can't be packed, with a warning that lists them, instead of raising an error.
        All files are checked before the first is packed.
    %(reading)s
    %(gene_ids)s
    %(species)s
    %(duplicates)s

    Returns
    -------
    The opened corpus; None with `check=True`, or if `shard` is given and parts of other shards are missing.

    Raises
    ------
    FileExistsError
        If `out` is not a corpus, or has studies that `paths` does not name and `append` is False.
    OSError
        If `out` is a file or not writable.
    RuntimeError
        If another call is writing the same parts, or a process was killed, possibly for lack of memory: use fewer
        `workers` or smaller parts.
    ValueError
        If `out` is a URL or missing; if there are no files, two have the same name, one does not pass
        :func:`scdiva.data.cells.open_cells` (the message names it) or changes while it is packed; if the corpus to
        append to was packed with other arguments, or already has a study of that name.

    Examples
    --------
    >>> import scdiva as sd
    >>> from scdiva.data import pack_files
    >>> sd.datasets.toy(60, 100).write_h5ad("study.h5ad")
    >>> packed = pack_files(["study.h5ad"], "scdiva-mini", "corpus")
    >>> packed.n_obs
    60
    >>> packed.close()
    """
    check_least(min_genes=(min_genes, 1), max_length=(max_length, 1), part_cells=(part_cells, 1), workers=(workers, 1))
    number, n_shards = (0, 1) if shard is None else as_shard(shard)
    files = [as_path(path) for path in data_files(paths if isinstance(paths, list | tuple) else [paths])]
    if out is None and not check:
        raise ValueError("out is missing: pass the folder of the corpus, or check=True to only check the files.")
    out = output_path("." if out is None else out)
    names, genes = study_names(files), load_vocabulary(vocabulary)
    denominator = score_denominator(genes.entropy, entropy_floor)
    about = {"fingerprint": genes.fingerprint, "n_tokens": genes.n_genes + N_SPECIAL, "max_length": max_length}
    about |= {"entropy_floor": entropy_floor, "min_genes": min_genes, "ranked_by": digest(denominator.tolist())}
    reading = InputOptions(layer, use_raw, input, gene_ids, species, duplicates, "nan")
    job = _Job(out, genes, denominator, reading, about)
    if not check:
        refuse_unwritable(out / INDEX)
    before = {} if check else _before(job, names, append)
    if check or skip_unusable:
        unusable = _unusable(job, dict(zip(names, files, strict=True)), workers, quiet=not check)
        listed = "; ".join(f"{file}: {reason.rstrip('.')}" for file, reason in unusable.values())
        if unusable and (check or len(unusable) == len(names)):
            raise ValueError(f"{len(unusable)} of {len(names)} files can't be packed. {listed}.")
        if check:
            logger.info("all %d files can be packed", len(names))
            return None
        if unpackable := [] if append else sorted(set(unusable).intersection(before.values())):
            raise ValueError(
                f"{str(out)!r} holds {unpackable[0]!r}, whose file can't be packed any more, and leaving it out would "
                f"delete its cells: {unusable[unpackable[0]][1]} Repair the file, or pass another out."
            )
        if unusable:
            warn(f"{len(unusable)} of {len(names)} files can't be packed and are left out. {listed}.")
        files = [file for name, file in zip(names, files, strict=True) if name not in unusable]
        names = [name for name in names if name not in unusable]
    tasks = [task for path, name in zip(files, names, strict=True) for task in _tasks(job, path, name, part_cells)]
    part_names = [task.name for task in tasks]
    if append and (twice := {study for part, study in before.items() if part not in part_names}.intersection(names)):
        raise ValueError(f"{str(out)!r} holds {min(twice)!r}, of another file or arguments, already: rename the file.")
    shard_tasks = tasks[len(tasks) * number // n_shards : len(tasks) * (number + 1) // n_shards]
    # first parts of all files first, since one process scans a file while others wait
    shard_tasks = sorted((task for task in shard_tasks if not (out / task.name).exists()), key=lambda task: task.first)
    bar = progress_bar(desc="packing", unit="cell", total=sum(task.stop - task.first for task in shard_tasks))
    with bar, ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin, (job,)) as pool:
        for done in pool.map(_pack, shard_tasks) if workers > 1 else map(partial(_pack, job=job), shard_tasks):
            bar.update(done.stop - done.first)
    if left := sum(not (out / name).exists() for name in part_names):
        logger.info("shard %d of %d is finished; %d parts of others are not", number, n_shards, left)
        return None
    parts = _write_index(job, list(dict.fromkeys([*(before if append else ()), *part_names])))
    for name in names:
        of_study = [part for part in parts if part["study"] == name]
        dropped = sum(part["cells_dropped"] for part in of_study)
        warn_left_out(name, dropped, dropped + sum(part["cells"] for part in of_study), min_genes)
    return PackedCells(out)


class _Job(NamedTuple):
    """Common to all parts; `about` are the parameters in the index."""

    out: Path
    vocabulary: Vocabulary
    denominator: np.ndarray
    reading: InputOptions
    about: dict[str, Any]


_JOBS = list[_Job]()
"""The job of a worker process, sent once, as pickling a vocabulary takes 0.15 s."""


class _Task(NamedTuple):
    """A part to pack: file, study, rows, number of rows of the file, stamp of the file, and name of the part."""

    path: Path
    study: str
    first: int
    stop: int
    n_obs: int
    stamp: str
    name: str


def _before(job: _Job, names: Sequence[str], append: bool) -> dict[str, str]:
    """Parts of an existing corpus with their studies; raise an error if it must not be changed."""
    out = job.out
    if strange := sorted(path.name for path in out.glob("[!.]*") if not _OURS.fullmatch(path.name)):
        raise FileExistsError(f"{str(out)!r} is a folder with {strange[0]!r} and is not a corpus. Pass another out.")
    if not (out / INDEX).exists():
        return {}
    old = read_index(out)
    before = {part["file"]: part["study"] for part in old["parts"]}
    if append:
        for key, now in job.about.items():
            if old[key] != now:
                raise ValueError(f"{str(out)!r} was packed with {key} {old[key]}, not {now}. Append with the same.")
    elif others := sorted(set(before.values()).difference(names)):
        raise FileExistsError(
            f"{str(out)!r} holds {len(others)} studies that are not to be packed (first: {others[0]!r}). Pass "
            "append=True to add to it, or another out."
        )
    return before


def _tasks(job: _Job, path: Path, study: str, part_cells: int) -> list[_Task]:
    """Split a file into parts, at least one."""
    with open_matrix(path, job.reading.layer, job.reading.use_raw) as opened:
        n_obs = opened.shape[0]
    tasks, inputs = [], [job.about, vars(job.reading), __version__, study, at_first := stamp(path)]
    for first in range(0, max(n_obs, 1), part_cells):
        stop = min(first + part_cells, n_obs)
        name = f"part-{study[:99]}-{first:09d}-{digest([*inputs, first, stop])[:12]}.h5"
        tasks.append(_Task(path, study, first, stop, n_obs, at_first, name))
    return tasks


def _unusable(job: _Job, files: Mapping[str, Path], workers: int, *, quiet: bool) -> dict[str, tuple[str, str]]:
    """File name and reason of each study whose file can't be packed. Every file is read whole; `quiet`: no warnings."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin, (job,)) as pool:
        mapped = pool.map if workers > 1 else map
        reasons = list(mapped(partial(_reason, job=None if workers > 1 else job, quiet=quiet), files.values()))
    return {name: (path.name, why) for (name, path), why in zip(files.items(), reasons, strict=True) if why}


def _reason(path: Path, job: _Job | None, quiet: bool) -> str:
    """Reason why a file can't be packed; empty if it can be packed."""
    job = job or _JOBS[0]
    how = {name: job.about[name] for name in ("max_length", "entropy_floor")}
    try:
        with warnings.catch_warnings():
            if quiet:
                warnings.simplefilter("ignore")
            open_cells(path, job.vocabulary, job.reading, keep=False, **how).close()
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the file can't be packed
        reason = " ".join(str(error.args[0] if isinstance(error, KeyError) else error).split())
        return f"{reason[:500]} ..." if len(reason) > 500 else reason or type(error).__name__
    return ""


def _begin(job: _Job) -> None:
    """Initialise a worker process: no progress bars, and exit if the parent process is killed."""
    settings.progress = False
    _JOBS.append(job)
    started_by = [multiprocessing.parent_process().sentinel]  # type: ignore[union-attr]
    threading.Thread(target=lambda: multiprocessing.connection.wait(started_by) and os._exit(1), daemon=True).start()


def _pack(task: _Task, job: _Job | None = None) -> _Task:
    """Write a part of `job` (None: the job of this worker process)."""
    job = job or _JOBS[0]
    how = {name: job.about[name] for name in ("max_length", "entropy_floor")}
    opened, scan = partial(open_cells, task.path, job.vocabulary, job.reading, **how), None
    try:
        if (task.first, task.stop) != (0, task.n_obs):
            of_scan = {"file": task.stamp, "vocabulary": job.about["fingerprint"], **vars(job.reading)}
            scan = scan_once(job.out / f"part-{task.study}", of_scan, lambda: opened(keep=False).scan)
        source = opened(scanned=scan)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{task.path.name}: {error.args[0]}") from error
    types = {"tokens": token_type(source.n_tokens), "values": np.dtype(np.float32)}
    lengths, pieces = [np.zeros(1, np.int64)], []
    for start in range(task.first, task.stop, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, task.stop)
        usable = np.flatnonzero(source.lengths[start:stop] >= job.about["min_genes"])
        bounds, *columns = take_cells(source.read(start, stop), usable)
        lengths.append(np.diff(bounds))
        pieces.append([column.astype(dtype, copy=False) for column, dtype in zip(columns, types.values(), strict=True)])
    source.close()
    indptr = np.cumsum(np.concatenate(lengths))
    measured = np.isin(np.arange(source.n_tokens), source.tokens)[None]
    n_cells, n = len(indptr) - 1, int(indptr[-1])
    content = hashlib.sha256(indptr.tobytes())
    job.out.mkdir(parents=True, exist_ok=True)
    refuse_full(job.out / task.name, n * sum(dtype.itemsize for dtype in types.values()))
    with whole_or_not(job.out / task.name) as new, new_hdf5(new) as file:
        for number, (name, dtype) in enumerate(types.items()):
            stored, at = (
                file.create_dataset(name, (n,), dtype),
                0,
            )  # contiguous
            for piece in pieces:
                stored[at : at + len(piece[number])] = piece[number]
                content.update(piece[number].tobytes())
                at += len(piece[number])
        file["indptr"], file["study"], file["denominator"] = indptr, np.zeros(n_cells, np.int32), job.denominator
        file["study_names"] = np.array([task.study], dtype=h5py.string_dtype())
        file.create_dataset("measured", data=measured, compression="gzip")
        about = {"study": task.study, "cells": n_cells, "cells_dropped": task.stop - task.first - n_cells}
        origin = {"file": task.path.name, "first": task.first} | ({} if task.first else file_note(task.path))
        about |= {"sha256": content.hexdigest(), "source": origin}
        file.attrs.update(job.about, scdiva_packed=1, about=json.dumps(about))
        if stamp(task.path) != task.stamp:
            raise ValueError(f"{str(task.path)!r} was changed while it was packed. Call again once it is whole.")
    return task


def _write_index(job: _Job, names: Sequence[str]) -> list[dict[str, Any]]:
    """Write the index and delete files that no longer belong to the corpus; return the entries of the parts."""
    parts, lengths = list[dict[str, Any]](), list[np.ndarray]()
    measured = dict[str, np.ndarray]()
    narrow = np.promote_types(np.uint16, np.min_scalar_type(job.about["max_length"]))
    with open_alone(job.out / ".part-index.writing"):
        for name in names:
            with open_hdf5(job.out / name) as part:
                at = {column: part[column].id.get_offset() or 0 for column in ("tokens", "values")}
                about = {"file": name, "bytes": (job.out / name).stat().st_size, "at": at}
                parts.append(about | parse_json(job.out / name, str(part.attrs["about"]).encode()))
                lengths.append(np.diff(part["indptr"][:]).astype(narrow))
                measured.setdefault(parts[-1]["study"], part["measured"][0])
        total, studies = digest([part["sha256"] for part in parts]), list(measured)
        wide = np.promote_types(np.int16, np.min_scalar_type(-len(studies)))
        numbers = np.array([studies.index(part["study"]) for part in parts], wide)
        study = np.repeat(numbers, [len(length) for length in lengths])
        arrays = np.concatenate(lengths), study, np.stack(list(measured.values())), job.denominator
        files = {name: f"{name}-{total[:12]}.npy" for name in ARRAYS}
        for file, array in zip(files.values(), arrays, strict=True):
            put_whole(job.out / file, partial(np.save, arr=array))
        head = {"scdiva_packed": FORMAT, "sha256": total, "bytes": sum(part["bytes"] for part in parts), **job.about}
        text = json.dumps({**head, "reading": job.reading.parameters(), "arrays": files, "parts": parts}, indent=1)
        put_whole(job.out / INDEX, lambda file: file.write(text.encode()))
        for path in job.out.iterdir():
            if path.name.startswith(".part-"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            elif _OURS.fullmatch(path.name) and path.name not in {INDEX, *files.values(), *names}:
                path.unlink()
    return parts
