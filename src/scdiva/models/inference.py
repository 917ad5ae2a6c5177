"""Inference: open cells for a model, and run it on them in batches, with a device, a precision and workers.

The next window of cells is read while the model runs. On a CPU each worker is a thread that computes on one core and
shares the weights (torch releases the GIL). The transformer processes one cell at a time, so that no padding is needed
and no core waits for another; several threads in one small matrix product gain little, and lose time on a busy machine.
On CUDA one worker suffices: batches are checked on the CPU and copied through page-locked memory without waiting; two
workers are used for functions that may wait for the device.

Only the matrix products of the transformer blocks and of the value embedding, 99% of the work, run in lower precision.
Residual stream, norms, set encoder, inputs and outputs stay in float32, as in training. torch is imported on use, so
that the command line starts at once.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from scdiva._checks import check_least
from scdiva._constants import OBSM_EMBEDDING, OBSM_INTEGRATED
from scdiva._settings import logger, progress_bar, settings, to_device
from scdiva.data.cells import CellSource, Ragged, open_cells, take_cells
from scdiva.data.genes import DEFAULT_INPUT, InputOptions

if TYPE_CHECKING:
    import torch
    from anndata import AnnData
    from torch import Tensor

    from scdiva.models import ScDiVa

    Packed: TypeAlias = tuple[Tensor, Tensor, Tensor]
    """tokens int64 (T,), values float (T,), cu_seqlens int32 (B + 1,), as :meth:`ScDiVa.encode` takes them."""
    Batch: TypeAlias = tuple[Tensor, ...]
    """The same three tensors, and further ones for a read-out function."""
    Coming: TypeAlias = tuple[Tensor, torch.cuda.Event | None]
    """A result on the CPU, and the CUDA event after which it is complete."""
    Encode: TypeAlias = Callable[[Callable[[Any], Batch], Iterable[Any]], Iterator[np.ndarray]]
    ReadOut: TypeAlias = Literal["embedding", "state"] | Callable[..., Tensor]
    """Requested result: embeddings of the cells; their states, before integration or adaptation; or the return value of
    a function of the model and the tensors of the batch."""

Item = TypeVar("Item")
Result = TypeVar("Result")

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
        Torch device, and precision as for :func:`open_encoder`.
    what
        Output of the model, see :func:`read_out`.
    """

    batch_size: int | None
    device: str
    precision: str
    what: ReadOut

    def width(self, model: ScDiVa) -> int:
        """Number of columns of the output."""
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
        Function that returns additional tensors for the rows of a batch, which are passed to the read-out.

    Yields
    ------
    For each window the row numbers of its cells `(n,)`, the cells, and an iterator over its batches: positions of the
    batch's cells in the window, and their output. The iterator must be exhausted before the next window is requested.
    """
    from scdiva.data.batch import BATCH_TOKENS, WINDOW, fill_batches, from_ragged, portions

    through_blocks = runs_transformer(model, run_config.what)
    on_cuda = run_config.device.startswith("cuda")
    budget = CUDA_TOKENS if on_cuda else BATCH_TOKENS
    # on a CPU, batches of the transformer are no faster than single cells
    max_cells = 1 if through_blocks and run_config.device.startswith("cpu") else run_config.batch_size
    total = (source.n_obs if stop is None else stop) if only is None else int(only.sum())
    compiled = on_cuda and through_blocks and total - start >= COMPILED_CELLS
    logger.debug(
        "running the model on %s in %s, %d cells in batches of up to %s, %s",
        run_config.device, run_config.precision, total - start, max_cells or f"{budget:,} genes",
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
                batch = from_ragged(*_read_by(model, take_cells(ragged, cells))).packed
                return batch if beside is None else (*batch, *beside(rows[cells]))

            for batches in portions(fill_batches(lengths, budget, max_cells), lengths, held_tokens):
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


def _read_by(model: ScDiVa, ragged: Ragged) -> Ragged:
    """Restrict cells to the genes in the vocabulary of a model, and to its maximum number of genes per cell."""
    (indptr, tokens, values), config = ragged, model.config
    if not (valid := tokens < config.n_tokens).all():
        indptr, tokens, values = np.concatenate([[0], np.cumsum(valid)])[indptr], tokens[valid], values[valid]
    if np.diff(indptr).max(initial=0) <= config.input_length:
        return indptr, tokens, values
    return take_cells((indptr, tokens, values), np.arange(len(indptr) - 1), config.input_length)


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


# --- one batch after another ------------------------------------------------------------------------------------------
def runs_transformer(model: ScDiVa, what: ReadOut = "embedding") -> bool:
    """Whether the result depends on the transformer; the state of a set encoder without residual does not."""
    return callable(what) or model.config.anchor != "encoder" or model.config.anchor_residual


def width_of(model: ScDiVa, what: ReadOut = "embedding") -> int:
    """Width of the result of :func:`read_out`."""
    components = None if what == "state" else model.dataset_components
    return model.state_dim if components is None else components.dim


def read_out(model: ScDiVa, batch: Batch, what: ReadOut) -> Tensor:
    """Run a model on uncorrupted cells and return the requested result.

    Parameters
    ----------
    model
        The model.
    batch
        B cells of at most `config.input_length` genes; `cu_seqlens` as :meth:`ScDiVa.forward` takes it.
    what
        `"embedding"`: the cell state, after integration or adaptation if the model has it; `"state"`: the cell state;
        or a function.

    Returns
    -------
    `(B, n)` with n from :func:`width_of`, or the result of the function.
    """
    if callable(what):
        return what(model, *batch)
    tokens, values, cu_seqlens = batch
    state = model.encode(tokens, values, cu_seqlens)
    if what == "state" or model.dataset_components is None:
        return state
    embedding: Tensor = model.dataset_components(state.float(), tokens, values, to_device(cu_seqlens, tokens.device))
    return embedding if model.integration is None else model.integration(embedding)


@contextlib.contextmanager
def open_encoder(
    model: ScDiVa,
    *,
    device: str = "cpu",
    precision: str = "fp32",
    threads: int | None = None,
    what: ReadOut = "embedding",
    compiled: bool = False,
) -> Iterator[Encode]:
    """Prepare a model for many batches; its state is restored at the end of the ``with`` block.

    Parameters
    ----------
    model
        The model. Its weights are moved to the device and back; lower precision uses a copy of the weights of the
        blocks.
    device
        A torch device.
    precision
        `"fp32"` or `"bf16"`, see :meth:`scdiva._settings.Settings.resolve_precision`. Ignored for
        results that do not depend on the transformer.
    threads
        Workers on a CPU; `None`: the number of torch's threads. Results do not depend on it.
    what
        Requested result, see :func:`read_out`.
    compiled
        Whether to compile the transformer blocks if they are a copy in lower precision.

    Yields
    ------
    A function of two arguments: a function that converts an item to a batch (called in a worker), and the items. It
    returns an iterator over the results of :func:`read_out`, float32, in the order of the items. An error or interrupt
    in a worker is raised by that iterator, and remaining items are skipped. If memory runs out, an item that is an
    array of cells is processed in parts, with a warning.

    Raises
    ------
    MemoryError
        By that iterator, if a single cell does not fit into memory.
    """
    import torch

    from scdiva.models.scdiva import check_input

    home, training = next(model.parameters()).device, model.training
    with _one_thread_each() as n_torch:
        kind = torch.device(device).type
        n_workers = (threads or n_torch) if kind == "cpu" else 2 if kind == "cuda" and callable(what) else 1
        pool = ThreadPoolExecutor(n_workers, "scdiva", initializer=torch.set_num_threads, initargs=(1,))
        try:
            model.to(device).eval()
            network = at_precision(model, precision, what)
            if compiled and network is not model:
                network.compile_blocks()

            def state_of(batch: Batch) -> Coming:
                on_device = tuple(to_device(part, device) for part in batch)
                if kind != "cpu" and not callable(what):
                    c, (tokens, values, bounds) = model.config, batch
                    check_input(c, tokens, values, bounds, max_length=c.input_length)
                    on_device = *on_device[:2], bounds
                with torch.inference_mode():
                    result = read_out(network, on_device, what).float().to("cpu", non_blocking=kind == "cuda")
                return result, torch.cuda.current_stream(device).record_event() if kind == "cuda" else None

            def in_parts(make: Callable[[Any], Batch], item: Any) -> list[Coming]:
                n_cells = len(item) if isinstance(item, np.ndarray) else 1

                def run(n: int) -> list[Coming]:
                    parts = [item] if n == 1 else np.array_split(item, min(n, n_cells))
                    return [state_of(make(part)) for part in parts]

                try:
                    return run_in_parts(run, n_cells, device=device, advice="a smaller batch_size avoids this")
                except (MemoryError, RuntimeError) as error:
                    if not out_of_memory(error):
                        raise
                    raise MemoryError(
                        f"one cell alone does not fit into the memory of {device!r}: close what else runs there, "
                        "lower scdiva.settings.threads, or pass another device."
                    ) from error

            def encode(make: Callable[[Item], Batch], items: Iterable[Item]) -> Iterator[np.ndarray]:
                errors: list[BaseException] = []

                def attempt(item: Item) -> list[Coming]:
                    if errors:  # of another worker: no further item is begun
                        raise errors[0]
                    try:
                        return in_parts(make, item)
                    except BaseException as error:
                        errors.append(error)
                        raise

                for parts in pool.map(attempt, items):
                    for _, arrived in parts:
                        if arrived is not None:
                            arrived.synchronize()
                    yield np.concatenate([result.numpy() for result, _ in parts])

            yield encode
        finally:
            pool.shutdown(cancel_futures=True)
            model.to(home).train(training)


def run_in_parts(
    run: Callable[[int], Result], n_cells: int, *, n_parts: int = 1, device: str | torch.device, advice: str
) -> Result:
    """Process cells in one batch, and in twice as many parts whenever memory runs out, with a warning.

    Parameters
    ----------
    run
        Function that processes all cells in a number of parts.
    n_cells
        Number of cells, the maximum number of parts.
    n_parts
        Initial number of parts.
    device, advice
        Device and remedy in the warning.

    Returns
    -------
    The result of `run`.

    Raises
    ------
    torch.OutOfMemoryError, MemoryError, RuntimeError
        Errors of `run` other than a lack of memory, and a lack of memory with the maximum number of parts.
    """
    import torch

    while True:
        try:
            return run(n_parts)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error) or n_parts >= n_cells:
                raise
        # outside of the try block no reference to its tensors is left
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()
        n_parts *= 2
        logger.warning(
            "%s is out of memory with %d cells at once: running them in %d parts; %s", device, n_cells, n_parts, advice
        )


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; the CPU allocator raises a RuntimeError."""
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


_lock = threading.Lock()
_open = 0
_threads_before = 1


@contextlib.contextmanager
def _one_thread_each() -> Iterator[int]:
    """Allow workers to set torch's number of threads to one; restore it at the end of the last concurrent block.

    The number belongs to the process, and calls may run concurrently. Yields the former number.
    """
    import torch

    global _open, _threads_before
    with _lock:
        if _open == 0:
            _threads_before = torch.get_num_threads()
        _open += 1
    try:
        yield _threads_before
    finally:
        with _lock:
            _open -= 1
            if _open == 0:
                torch.set_num_threads(_threads_before)


def at_precision(model: ScDiVa, precision: str, what: ReadOut = "embedding") -> ScDiVa:
    """Copy a model with blocks in another precision; everything else is shared with the original.

    Parameters
    ----------
    model
        A float32 model; not changed.
    precision
        `"fp32"` or `"bf16"`. With `"fp32"`, or if the result does not depend on the transformer, `model` is returned.
    what
        Requested result, see :func:`read_out`.
    """
    from scdiva.models.layers import in_bf16

    if precision == "fp32" or not runs_transformer(model, what):
        return model
    network = copy.copy(model)
    embedding = copy.copy(model.embedding)
    embedding._modules = {**embedding._modules, "value_out": in_bf16(embedding.value_out)}
    network._modules = {**model._modules, "blocks": in_bf16(model.blocks), "embedding": embedding}
    if getattr(model.blocks[0], "_compiled_call_impl", None) is not None:
        network.compile_blocks()
    return network
