"""Which cells a training batch holds: asked when one of them breaks a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from scdiva.data.pool import CellPool, Held
from scdiva.data.stream import TrainingStream

if TYPE_CHECKING:
    from scdiva.data.datamodule import CellDataModule


class BatchCell(NamedTuple):
    """One cell of a batch: its study, the file (empty for an AnnData object), its row there, and its name if known."""

    study: str
    file: str
    row: int
    cell: str


class _Places:
    """Stands for a pool whose cells hold one token, their own row, and whose studies are the numbers of the sources."""

    def __init__(self, pool: CellPool) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def read_blocks(self, blocks: Sequence[int] | np.ndarray) -> Held:
        own = [self._pool.blocks[block] for block in np.asarray(blocks).tolist()]
        rows = np.concatenate([rows for _, rows in own]).astype(np.int64)
        source = np.repeat([number for number, _ in own], [len(rows) for _, rows in own])
        ones = np.ones(len(rows), np.int64)
        return Held([(rows, ones.astype(np.float32))], 0 * ones, np.arange(len(rows)), ones, source)


def cells_of_batch(data: CellDataModule, number: int) -> list[BatchCell]:
    """Find the cells of a batch of the training stream, without reading any of their values.

    The stream itself says it, over cells that hold their own place instead of genes.

    Parameters
    ----------
    data
        The run's data.
    number
        Number of the batch in the stream, from 0, counted over all processes.

    Returns
    -------
    A cell each, in the order of the batch. Rows of a packed corpus are counted in the packed file.
    """
    stream = data.training_stream()
    pool = stream.pool
    batch = TrainingStream(
        _Places(pool),  # type: ignore[arg-type]
        stream.order,
        stream.batch_size,
        batch_tokens=stream.batch_tokens,
        prefetch=False,
    ).batch(number)
    assert batch.study is not None
    names = data.study_names
    found = []
    for source_number, row in zip(batch.study.tolist(), batch.tokens.tolist(), strict=True):
        source: Any = pool.sources[source_number]
        cells = getattr(source, "obs_names", None)
        study = names[int(pool.studies[source_number][row])]
        file = "" if source.path is None else str(source.path)
        found.append(BatchCell(study, file, row, "" if cells is None else str(cells[row])))
    return found
