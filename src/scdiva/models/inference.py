"""Run a model on many batches of cells: device, workers and precision.

On a CPU each worker is a thread that computes on one core and shares the weights (torch releases the GIL). The
transformer processes one cell at a time, so that no padding is needed and no core waits for another; several threads in
one small matrix product gain little, and lose time on a busy machine. On CUDA one worker suffices: batches are checked
on the CPU and copied through page-locked memory without waiting; two workers are used for functions that may wait for
the device.

Only the matrix products of the transformer blocks and of the value embedding, 99% of the work, run in lower precision.
Residual stream, norms, set encoder, inputs and outputs stay in float32, as in training.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scdiva._settings import logger, to_device
from scdiva.models.scdiva import ScDiVa, check_input

if TYPE_CHECKING:
    from scdiva.data.memory import InMemoryCells

BLOCK_CELLS = 1024
"""Cells per batch of :func:`encoded`."""

Packed = tuple[Tensor, Tensor, Tensor]
"""tokens int64 (T,), values float (T,), cu_seqlens int32 (B + 1,), as :meth:`ScDiVa.encode` takes them."""
Batch = tuple[Tensor, ...]
"""The same three tensors, and further ones for a read-out function."""
Coming = tuple[Tensor, torch.cuda.Event | None]
"""A result on the CPU, and the CUDA event after which it is complete."""
Item = TypeVar("Item")
Result = TypeVar("Result")
Encode = Callable[[Callable[[Item], Batch], Iterable[Item]], Iterator[np.ndarray]]
ReadOut = Literal["embedding", "state"] | Callable[..., Tensor]
"""Requested result: embeddings of the cells; their states, before integration or adaptation; or the return value of a
function of the model and the tensors of the batch."""


def runs_transformer(model: ScDiVa, what: ReadOut = "embedding") -> bool:
    """Whether the result depends on the transformer; the state of a set encoder without residual does not."""
    return callable(what) or model.config.anchor != "encoder" or model.config.anchor_residual


def width_of(model: ScDiVa, what: ReadOut = "embedding") -> int:
    """Width of the result of :func:`read_out`."""
    last = None if what == "state" else model.integration or model.dataset_components
    return model.state_dim if last is None else last.dim


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
    last = model.integration or model.dataset_components
    if what == "state" or last is None:
        return state
    embedding: Tensor = last(state.float(), tokens, values, to_device(cu_seqlens, tokens.device))
    return embedding


@contextlib.contextmanager
def open_encoder(
    model: ScDiVa,
    *,
    device: str = "cpu",
    precision: str = "fp32",
    threads: int | None = None,
    what: ReadOut = "embedding",
    compiled: bool = False,
) -> Iterator[Encode[Any]]:
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
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


_lock = threading.Lock()
_open = 0
_threads_before = 1


@contextlib.contextmanager
def _one_thread_each() -> Iterator[int]:
    """Allow workers to set torch's number of threads to one; restore it at the end of the last concurrent block.

    The number belongs to the process, and calls may run concurrently. Yields the former number.
    """
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
    if precision == "fp32" or not runs_transformer(model, what):
        return model
    network = copy.copy(model)
    embedding = copy.copy(model.embedding)
    embedding._modules = {**embedding._modules, "value_out": _in_bf16(embedding.value_out)}
    network._modules = {**model._modules, "blocks": _in_bf16(model.blocks), "embedding": embedding}
    if getattr(model.blocks[0], "_compiled_call_impl", None) is not None:
        network.compile_blocks()
    return network


def _in_bf16(module: nn.Module) -> nn.Module:
    """Copy a module with its linear layers in bfloat16; all other modules are shared."""
    if isinstance(module, nn.Linear):
        return _Bf16Linear(module)
    copied = copy.copy(module)
    copied._modules = {name: child if child is None else _in_bf16(child) for name, child in module._modules.items()}
    return copied


class _Bf16Linear(nn.Linear):
    """Linear layer in bfloat16; sums are in float32 before rounding."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight = _fixed_bf16(layer.weight)
        self.bias = None if layer.bias is None else _fixed_bf16(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(torch.bfloat16), self.weight, self.bias)


def _fixed_bf16(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().to(torch.bfloat16), requires_grad=False)


@torch.no_grad()
def encoded(model: ScDiVa, cells: InMemoryCells, what: ReadOut = "state") -> Tensor:
    """Cell states, or another result of :func:`read_out`, `(n_cells, width)`, on the CPU."""
    device, parts = next(model.parameters()).device, []
    size = 1 if runs_transformer(model) and device.type == "cpu" else BLOCK_CELLS
    for start in range(0, cells.n_cells, size):
        packed = cells.take(np.arange(start, min(start + size, cells.n_cells))).to(device).packed
        parts.append(read_out(model, packed, what).float().cpu())
    return torch.cat(parts)
