"""Cells opened for a model and run through it: window by window, batch by batch, the next window read meanwhile."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from scdiva._checks import check_least
from scdiva._constants import OBSM_EMBEDDING, OBSM_INTEGRATED
from scdiva._settings import progress_bar, settings
from scdiva.data.cells import CellSource, Ragged, open_cells, take_cells
from scdiva.data.options import DEFAULT_INPUT, InputOptions

if TYPE_CHECKING:
    from anndata import AnnData
    from torch import Tensor

    from scdiva.models import ScDiVa
    from scdiva.models.inference import ReadOut

Item = TypeVar("Item")

CUDA_TOKENS = 131_072
"""Tokens of a batch on CUDA: launching its kernels takes the host far less time than running them takes the device."""
COMPILED_CELLS = 20_000
"""Cells from which on the transformer's blocks are compiled on CUDA: fewer take less time than the compiler."""


class Cells(Protocol):
    """Cells that are read in windows: a :class:`scdiva.data.cells.CellSource`, or cells in memory."""

    @property
    def n_obs(self) -> int:
        """Number of cells."""

    def windows(self, n_cells: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[np.ndarray, Ragged]]:
        """Give cells in order, see :meth:`scdiva.data.cells.CellSource.windows`."""


class RunConfig(NamedTuple):
    """How cells are run through a model; all settled.

    Attributes
    ----------
    batch_size
        Most cells of a batch; None: no bound.
    device, precision
        As torch and :func:`scdiva.models.inference.open_encoder` take them.
    what
        What is read out, see :func:`scdiva.models.inference.read_out`.
    """

    batch_size: int | None
    device: str
    precision: str
    what: ReadOut

    def width(self, model: ScDiVa) -> int:
        """Width of a row of the result."""
        from scdiva.models.inference import width_of

        return width_of(model, self.what)


def resolve_run_config(batch_size: int | None, device: str | None, precision: str | None) -> RunConfig:
    """Settle how cells are run, before anything is read.

    Parameters
    ----------
    batch_size, device, precision
        As for :func:`scdiva.tl.embed`; None takes the setting.

    Raises
    ------
    ValueError
        As :func:`scdiva.tl.embed` does.
    """
    batch_size = settings.batch_size if batch_size is None else operator.index(batch_size)
    check_least(batch_size=(1 if batch_size is None else batch_size, 1))
    device = settings.resolve_device(device)
    return RunConfig(batch_size, device, settings.resolve_precision(precision, device), "embedding")


def open_cells_for_model(
    model: ScDiVa | str | PathLike[str],
    data: AnnData | Path,
    run_config: RunConfig,
    reading: InputOptions = DEFAULT_INPUT,
    **options: Any,
) -> tuple[ScDiVa, CellSource, dict[str, Any]]:
    """Load a model and open cells as it reads them.

    Parameters
    ----------
    model
        As for :func:`scdiva.tl.embed`.
    data
        The cells, or the path of a file of cells.
    run_config
        How they will be run.
    reading, **options
        As for :func:`scdiva.data.open_cells`.

    Returns
    -------
    The loaded model, the checked cells, and what the call was given and found, as scalars that h5ad can hold.
    """
    from scdiva.models.inference import runs_transformer
    from scdiva.models.pretrained import load_for

    loaded = load_for(model, run_config.device)
    cells = open_cells(data, loaded, reading, **options)
    parameters = {
        "model": model_name(model),
        "vocabulary": loaded.vocabulary.fingerprint,
        **cells.reading.parameters(),
        "empty": cells.reading.empty,
        "input": cells.kind,
        "precision": run_config.precision if runs_transformer(loaded, run_config.what) else "fp32",
        **{key: cells.report[key] for key in ("share_genes", "share_counts")},
    }
    return loaded, cells, parameters


def embedding_key(model: ScDiVa) -> str:
    """Name the key of `obsm` that embeddings of a model have if no other is asked for.

    Those of a model that has integrated batches stand where `tl.integrate` put those of the cells it was fitted on.
    """
    integrated = model.integration is not None or model.finetuned_for == "integrate"
    return OBSM_INTEGRATED if integrated else OBSM_EMBEDDING


def model_name(model: object) -> str:
    """Say what a call notes of the model that it was given: a name or path, or the class of a loaded one."""
    return str(model) if isinstance(model, str | PathLike) else type(model).__name__


def embed_cells(
    model: ScDiVa, source: Cells, run_config: RunConfig, *, start: int = 0, stop: int | None = None, only: Any = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Run the model over all cells of a source, window by window; the next one is read meanwhile.

    Parameters
    ----------
    model
        The model; left on the device and in the mode in which it was.
    source
        Cells to embed, read in row order.
    run_config
        How, from :func:`resolve_run_config`.
    start, stop
        First row, and that to end before: 0 and None, or where windows end, so that they hold the same cells.

    Yields
    ------
    Row numbers `(n,)`, ascending, and float32 states `(n, width)`. Rows that the source leaves out never come.
    """
    width = run_config.width(model)
    for rows, _, results in run_cells(model, source, run_config, start=start, stop=stop, only=only):
        states = np.empty((len(rows), width), dtype=np.float32)
        for cells, found in results:
            states[cells] = found
        yield rows, states


def embed_all(model: ScDiVa, source: Cells, run_config: RunConfig) -> np.ndarray:
    """Run the model over all cells of a source, held in memory.

    Parameters
    ----------
    model, run_config
        As for :func:`embed_cells`.
    source
        Opened cells, or cells in memory.

    Returns
    -------
    float32 `(n_obs, width)`, rows of NaN for cells that the source leaves out.
    """
    embedding = np.full((source.n_obs, run_config.width(model)), np.nan, dtype=np.float32)
    for rows, states in embed_cells(model, source, run_config):
        embedding[rows] = states
    return embedding


def run_cells(
    model: ScDiVa,
    source: Cells,
    run_config: RunConfig,
    *,
    start: int = 0,
    stop: int | None = None,
    held_tokens: int | None = None,
    only: np.ndarray | None = None,
    beside: Callable[[np.ndarray], tuple[Tensor, ...]] | None = None,
) -> Iterator[tuple[np.ndarray, Ragged, Iterator[tuple[np.ndarray, np.ndarray]]]]:
    """Run the model over all cells of a source, and give what it makes of them batch by batch.

    Parameters
    ----------
    model, source, run_config, start, stop
        As for :func:`embed_cells`.
    held_tokens
        Tokens of the batches whose results may wait to be taken, where these are large; None: those of a window.
    only
        bool `(n_obs,)`, the cells to run; None: all.
    beside
        Gives more tensors of the cells of a batch, by their rows, for a function that reads out.

    Yields
    ------
    For each window the row numbers of its cells `(n,)`, the cells, and an iterator over its batches: the place of each
    batch's cells within the window, and what was read out of them. It must be used up before the next window is asked
    for.
    """
    from scdiva.data.batch import BATCH_TOKENS, WINDOW, fill_batches, from_ragged, portions
    from scdiva.models.inference import open_encoder, runs_transformer

    through_blocks = runs_transformer(model, run_config.what)
    on_cuda = run_config.device.startswith("cuda")
    budget = CUDA_TOKENS if on_cuda else BATCH_TOKENS
    # on a CPU, cells share a call only where they are as good as free
    most = 1 if through_blocks and run_config.device.startswith("cpu") else run_config.batch_size
    total = (source.n_obs if stop is None else stop) if only is None else int(only.sum())
    compiled = on_cuda and through_blocks and total - start >= COMPILED_CELLS
    how: dict[str, Any] = {"device": run_config.device, "precision": run_config.precision, "what": run_config.what}
    with (
        open_encoder(model, threads=settings.threads, compiled=compiled, **how) as encode,
        progress_bar(desc="running the model", unit="cell", total=total, initial=start) as bar,
    ):

        def results(rows: np.ndarray, ragged: Ragged) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            lengths = np.diff(ragged[0])
            if through_blocks:
                lengths = np.minimum(lengths, model.config.max_length) + 1

            def packed(cells: np.ndarray) -> tuple[Tensor, ...]:
                batch = from_ragged(*take_cells(ragged, cells)).packed
                return batch if beside is None else (*batch, *beside(rows[cells]))

            for batches in portions(fill_batches(lengths, budget, most), lengths, held_tokens):
                for cells, found in zip(batches, encode(packed, batches), strict=True):
                    yield cells, found
                    bar.update(len(cells))

        for rows, ragged in _read_ahead(source.windows(WINDOW, start, stop)):
            if only is not None:
                wanted = np.flatnonzero(only[rows])
                rows, ragged = rows[wanted], take_cells(ragged, wanted)
            if len(rows):
                yield rows, ragged, results(rows, ragged)
        bar.update(total - bar.n)  # cells that are left out


def row_numbers(rows: np.ndarray) -> tuple[Tensor]:
    """Give the rows of a batch's cells as a tensor: `beside` of a read-out whose draws depend on them."""
    import torch

    return (torch.from_numpy(rows.astype(np.int64)),)


def _read_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Iterate with the next item made in a thread of its own."""
    with ThreadPoolExecutor(1, "scdiva-read") as reader:
        coming = reader.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = reader.submit(next, items, None)
            yield item
