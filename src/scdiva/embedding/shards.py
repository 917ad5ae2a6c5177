"""Shards of an embedding: ranges of rows, the parts that they leave on disk, and a cluster whose workers make them."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from scdiva._checks import from_extra, warn
from scdiva._files import put_whole
from scdiva._settings import logger, progress_bar
from scdiva.data.shards import DAMAGED
from scdiva.models.hub import SCHEME, available, find_model

if TYPE_CHECKING:
    from dask.distributed import Client

Result = TypeVar("Result")
SHARDS_PER_THREAD, LEAST_SHARDS = 4, 64
"""Shards for each thread of the workers, and at least: few enough that opening the file is a small part of the work,
enough that all workers end together and that those which come late find some left."""


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
        put_whole(self._path(first), lambda file: np.savez(file, states=part))

    def load(self, first: int) -> np.ndarray | None:
        """Read a part, float32; None if it is not there, or damaged, and then it is deleted."""
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


def map_shards(client: Client | str, embed: Callable[[tuple[int, int]], Result], most: int) -> list[Result]:
    """Call a function of a shard on the workers of a cluster, for all shards.

    What dask does with them is left to it: a shard of a worker that is lost is given to another one.

    Parameters
    ----------
    client
        A client, or what dask makes one of: the address of a scheduler, a cluster.
    embed
        The function of `(i, n)`; dask pickles it.
    most
        Shards, at most.

    Returns
    -------
    What it returned, in the order in which the shards were finished.

    Raises
    ------
    ImportError
        If dask's distributed is not installed.
    RuntimeError
        If dask gives a shard up, because so many workers died of it.

    Warns
    -----
    UserWarning
        What workers have warned of.
    """
    distributed = from_extra("distributed", "dist", "client needs dask's distributed")
    with contextlib.ExitStack() as opened:
        is_client = isinstance(client, distributed.Client)
        workers: Any = client if is_client else opened.enter_context(distributed.Client(client))
        n = max(1, min(most, max(LEAST_SHARDS, SHARDS_PER_THREAD * sum(workers.nthreads().values()))))
        jobs = workers.map(partial(_with_warnings, embed), [(number, n) for number in range(n)], pure=False)
        # not even an error or an interrupt leaves shards behind that would still be begun
        opened.callback(workers.cancel, jobs)
        done = distributed.as_completed(jobs, with_results=True)
        try:
            found = [made for _, made in progress_bar(done, desc="embedding", unit="shard", total=n)]
        except distributed.KilledWorker as error:
            raise RuntimeError(
                f"workers died, one after another, as they embedded the same rows: {error} What is finished is kept: "
                "give workers more memory and call again."
            ) from error
    for said in dict.fromkeys(text for _, texts in found for text in texts):
        warn(said)
    return [made for made, _ in found]


def _with_warnings(embed: Callable[[tuple[int, int]], Result], shard: tuple[int, int]) -> tuple[Result, list[str]]:
    """Call the function on a worker, and give what it warned of: nobody reads a worker's stderr."""
    with warnings.catch_warnings(record=True) as given:
        made = embed(shard)
    return made, [str(one.message) for one in given if issubclass(one.category, UserWarning)]


def named_everywhere(model: Any) -> str:
    """Name a model so that workers find it, whatever folder they run in.

    Parameters
    ----------
    model
        A bundled name, a folder, or an address on the Hub.

    Raises
    ------
    TypeError
        If it is a loaded model.
    FileNotFoundError
        If there is no such folder.
    """
    if not isinstance(model, str | os.PathLike):
        raise TypeError(
            "with client, model must be a name or a folder that all workers see, got a loaded model. Save it: "
            "scdiva.models.save_model(model, model.vocabulary, folder)."
        )
    name = os.fspath(model)
    return name if name.startswith(SCHEME) or name in available() else str(find_model(model).absolute())
