"""Inference: open cells for a model and run it over them in batches, while the next window of cells is read."""

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
from scdiva._settings import logger, progress_bar, settings
from scdiva.data.cells import CellSource, Ragged, open_cells, take_cells
from scdiva.data.genes import DEFAULT_INPUT, InputOptions

if TYPE_CHECKING:
    from anndata import AnnData
    from torch import Tensor

    from scdiva.models import ScDiVa
    from scdiva.models.inference import ReadOut

Item = TypeVar("Item")

CUDA_TOKENS = 131_072
"""Tokens per batch on CUDA, enough that kernels take longer than their launch."""
COMPILED_CELLS = 20_000
"""Number of cells from which on the transformer blocks are compiled on CUDA; fewer take less time than compiling."""


class Cells(Protocol):
    """Cells that are read in windows: a :class:`scdiva.data.cells.CellSource`, or cells in memory."""

    @property
    def n_obs(self) -> int:
        """Number of cells."""

    def windows(self, n_cells: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[np.ndarray, Ragged]]:
        """Row numbers and cells of each window, see :meth:`scdiva.data.cells.CellSource.windows`."""


class RunConfig(NamedTuple):
    """Device, precision, batch size and output of inference, with all settings resolved.

    Attributes
    ----------
    batch_size
        Maximum number of cells per batch; None: no limit.
    device, precision
        As for torch and :func:`scdiva.models.inference.open_encoder`.
    what
        Output of the model, see :func:`scdiva.models.inference.read_out`.
    """

    batch_size: int | None
    device: str
    precision: str
    what: ReadOut

    def width(self, model: ScDiVa) -> int:
        """Number of columns of the output."""
        from scdiva.models.inference import width_of

        return width_of(model, self.what)


def resolve_run_config(batch_size: int | None, device: str | None, precision: str | None) -> RunConfig:
    """Check the arguments of :func:`scdiva.tl.embed` of these names; None takes the setting."""
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
    """Load a model and open cells for it.

    Parameters
    ----------
    model
        As for :func:`scdiva.tl.embed`.
    data
        The cells, or the path of a file of cells.
    run_config
        Device and precision of the model.
    reading, **options
        As for :func:`scdiva.data.open_cells`.

    Returns
    -------
    The loaded model, the checked cells, and the parameters of the call, as scalars that h5ad can hold.
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
    """Default key of `obsm` for embeddings of a model; integrated models embed under the key of `tl.integrate`."""
    integrated = model.integration is not None or model.finetuned_for == "integrate"
    return OBSM_INTEGRATED if integrated else OBSM_EMBEDDING


def model_name(model: object) -> str:
    """Name of a model in the parameters of a call: its name or path, or the class of a loaded model."""
    return str(model) if isinstance(model, str | PathLike) else type(model).__name__


def embed_cells(
    model: ScDiVa, source: Cells, run_config: RunConfig, *, start: int = 0, stop: int | None = None, only: Any = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Embed all cells of a source, window by window.

    Parameters
    ----------
    model
        The model; its device and mode are restored.
    source
        Cells to embed, in row order.
    run_config
        From :func:`resolve_run_config`.
    start, stop
        First row, and the row after the last one: 0 and None, or boundaries of windows.
    only
        As for :func:`run_cells`.

    Yields
    ------
    Row numbers `(n,)`, ascending, and float32 states `(n, width)`. Rows that the source excludes are missing.
    """
    width = run_config.width(model)
    for rows, _, results in run_cells(model, source, run_config, start=start, stop=stop, only=only):
        states = np.empty((len(rows), width), dtype=np.float32)
        for cells, output in results:
            states[cells] = output
        yield rows, states


def embed_all(model: ScDiVa, source: Cells, run_config: RunConfig) -> np.ndarray:
    """Embed all cells of a source, float32 `(n_obs, width)`; rows that the source excludes are NaN."""
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
    """Run the model over all cells of a source in batches.

    Parameters
    ----------
    model, source, run_config, start, stop
        As for :func:`embed_cells`.
    held_tokens
        Maximum number of tokens of batches whose outputs are held at once, if these are large; None: a window.
    only
        bool `(n_obs,)`, the cells to run; None: all.
    beside
        Returns additional tensors for the rows of a batch, which are passed to the read-out.

    Yields
    ------
    For each window the row numbers of its cells `(n,)`, the cells, and an iterator over its batches: positions of the
    batch's cells in the window, and their output. The iterator must be exhausted before the next window is requested.
    """
    from scdiva.data.batch import BATCH_TOKENS, WINDOW, fill_batches, from_ragged, portions
    from scdiva.models.inference import open_encoder, runs_transformer

    through_blocks = runs_transformer(model, run_config.what)
    on_cuda = run_config.device.startswith("cuda")
    budget = CUDA_TOKENS if on_cuda else BATCH_TOKENS
    # on a CPU, batches of the transformer are no faster than single cells
    most = 1 if through_blocks and run_config.device.startswith("cpu") else run_config.batch_size
    total = (source.n_obs if stop is None else stop) if only is None else int(only.sum())
    compiled = on_cuda and through_blocks and total - start >= COMPILED_CELLS
    logger.debug(
        "running the model on %s in %s, %d cells in batches of up to %s, %s",
        run_config.device, run_config.precision, total - start, most or f"{budget:,} genes",
        "with the transformer" if through_blocks else "without the transformer",
    )  # fmt: skip
    with (
        open_encoder(
            model,
            device=run_config.device,
            precision=run_config.precision,
            what=run_config.what,
            threads=settings.threads,
            compiled=compiled,
        ) as encode,
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
                for cells, output in zip(batches, encode(packed, batches), strict=True):
                    yield cells, output
                    bar.update(len(cells))

        for rows, ragged in _read_ahead(source.windows(WINDOW, start, stop)):
            if only is not None:
                selected = np.flatnonzero(only[rows])
                rows, ragged = rows[selected], take_cells(ragged, selected)
            if len(rows):
                yield rows, ragged, results(rows, ragged)
        bar.update(total - bar.n)  # excluded cells


def row_numbers(rows: np.ndarray) -> tuple[Tensor]:
    """Row numbers as a tensor: `beside` of a read-out whose random numbers depend on the cell."""
    import torch

    return (torch.from_numpy(rows.astype(np.int64)),)


def _read_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Iterate while the next item is computed in another thread."""
    with ThreadPoolExecutor(1, "scdiva-read") as reader:
        coming = reader.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = reader.submit(next, items, None)
            yield item
