"""Run a model over many batches of cells: which device, how many workers, which arithmetic.

On a CPU each worker is a thread that shares the weights and computes on one core (torch lets go of Python's lock while
it computes). Cells that go through the transformer come one at a time, so nothing is padded and no core waits for
another; two threads inside one small matrix product gain little, and much less than nothing on a busy machine. On CUDA
one worker is enough: batches are checked on the CPU, go over and come back through page-locked memory, and a result is
waited for where it is taken. A function that reads out may ask the device for more; for those there are two.

What runs in lower precision are the matrix products of the transformer's blocks, 99% of the work. The residual stream
and the norms, the set encoder and what goes in and out stay in float32, as when the model was trained.
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

from scdiva._device import to_device
from scdiva._settings import logger
from scdiva.models.scdiva import ScDiVa, check_input

if TYPE_CHECKING:
    from scdiva.data.memory import InMemoryCells

BLOCK_CELLS = 1024
"""Cells that are encoded at once."""

Packed = tuple[Tensor, Tensor, Tensor]
"""tokens int64 (T,), values float (T,), cu_seqlens int32 (B + 1,), as :meth:`ScDiVa.encode` takes them."""
Batch = tuple[Tensor, ...]
"""The same three, and whatever else a function that reads out asks for."""
Coming = tuple[Tensor, torch.cuda.Event | None]
"""A result on the CPU, and what has to be waited for until it has come there from CUDA."""
Item = TypeVar("Item")
Result = TypeVar("Result")
Encode = Callable[[Callable[[Item], Batch], Iterable[Item]], Iterator[np.ndarray]]
ReadOut = Literal["embedding", "state"] | Callable[..., Tensor]
"""What is read out of a batch: its cells' embeddings; their states, before any last step of the embedding; or what a
function makes of the model and the batch's tensors."""


def runs_transformer(model: ScDiVa, what: ReadOut = "embedding") -> bool:
    """Whether what is read out depends on the transformer: not the state of a set encoder without residual."""
    return callable(what) or model.config.anchor != "encoder" or model.config.anchor_residual


def width_of(model: ScDiVa, what: ReadOut = "embedding") -> int:
    """Width of what :func:`read_out` makes of a cell."""
    if callable(what):
        raise TypeError("what a function makes of a batch has a width of its own.")
    last = None if what == "state" else model.integration or model.dataset_components
    return model.state_dim if last is None else last.dim


def read_out(model: ScDiVa, batch: Batch, what: ReadOut) -> Tensor:
    """Run a model over uncorrupted cells and read out what is asked for.

    Parameters
    ----------
    model
        The model.
    batch
        B cells of at most `config.input_length` genes; `cu_seqlens` as :meth:`ScDiVa.forward` takes it.
    what
        `"embedding"`, the cell state, integrated or combined with components of a dataset where the model does so;
        `"state"`, the cell state itself; a function, what that returns.

    Returns
    -------
    `(B, n)` with n from :func:`width_of`, or what the function returns.
    """
    if callable(what):
        return what(model, *batch)
    tokens, values, cu_seqlens = batch
    state = model.encode(tokens, values, cu_seqlens)
    last = model.integration or model.dataset_components
    if what == "state" or last is None:
        return state
    found: Tensor = last(state.float(), tokens, values, to_device(cu_seqlens, tokens.device))
    return found


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
    """Get a model ready to encode batch after batch; leave it as it was when the ``with`` block ends, however it ends.

    Parameters
    ----------
    model
        The model. Its weights are moved to the device and back; a lower precision is given to a copy of the blocks'
        weights, made once.
    device
        A torch device.
    precision
        `"fp32"` or `"bf16"`, see :meth:`scdiva._settings.Settings.resolve_precision`. Without effect for a
        read-out that needs no transformer.
    threads
        Workers on a CPU; `None`: as many as torch has threads. Their number changes no bit of a result.
    what
        What to read out, see :func:`read_out`.
    compiled
        Whether the transformer's blocks are compiled for it, where they are a copy, of lower precision.

    Yields
    ------
    A function of two arguments: one that makes a batch of an item (called in a worker), and the items. It returns an
    iterator over what :func:`read_out` gives, float32, in the order of the items. An error or interrupt in a worker
    is raised by that iterator, and what was not yet begun is not done any more. If memory is out, an item that is an
    array of cells is run in parts, which is logged.

    Raises
    ------
    MemoryError
        By that iterator, if memory is out with a single cell.
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
                    found = read_out(network, on_device, what).float().to("cpu", non_blocking=kind == "cuda")
                return found, torch.cuda.current_stream(device).record_event() if kind == "cuda" else None

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
                    if errors:  # of another worker: nothing new is begun
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
                    yield np.concatenate([found.numpy() for found, _ in parts])

            yield encode
        finally:
            pool.shutdown(cancel_futures=True)
            model.to(home).train(training)


def run_in_parts(
    run: Callable[[int], Result], n_cells: int, *, n_parts: int = 1, device: str | torch.device, advice: str
) -> Result:
    """Run cells all at once, and whenever memory is out again, in twice as many parts, with a warning.

    Parameters
    ----------
    run
        Runs the cells in so many parts, one after the other, from the start.
    n_cells
        Their number; in more parts nothing gets smaller.
    n_parts
        Parts to begin with.
    device, advice
        For the warning: where memory is out, and what avoids it.

    Returns
    -------
    What `run` returns.

    Raises
    ------
    torch.OutOfMemoryError, MemoryError, RuntimeError
        What `run` raised of parts that can't be made smaller; and at once what is no shortage of memory.
    """
    while True:
        try:
            return run(n_parts)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error) or n_parts >= n_cells:
                raise
        # here nothing holds on to the tensors of the try any more
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()
        n_parts *= 2
        logger.warning(
            "%s is out of memory with %d cells at once: running them in %d parts; %s", device, n_cells, n_parts, advice
        )


def out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the CPU's allocator, which has no error of its own, ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


_lock = threading.Lock()
_open = 0
_threads_before = 1


@contextlib.contextmanager
def _one_thread_each() -> Iterator[int]:
    """Let workers set torch's number of threads to one; the last of several such blocks to end puts back what was.

    The number is the process's, not a thread's, and calls may run side by side. Yields the number that was.
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
    """Copy a model so that its blocks multiply in another precision; all else is shared with the original.

    Parameters
    ----------
    model
        A float32 model; not changed.
    precision
        `"fp32"` or `"bf16"`; the first, and any for a read-out that needs no transformer, returns `model` itself.
    what
        What will be read out.
    """
    if precision == "fp32" or not runs_transformer(model, what):
        return model
    network = copy.copy(model)
    network._modules = {**model._modules, "blocks": _in_bf16(model.blocks)}
    if getattr(model.blocks[0], "_compiled_call_impl", None) is not None:
        network.compile_blocks()
    return network


def _in_bf16(module: nn.Module) -> nn.Module:
    """Copy a module with its linear layers in bfloat16; what is not replaced is shared."""
    if isinstance(module, nn.Linear):
        return _Bf16Linear(module)
    copied = copy.copy(module)
    copied._modules = {name: child if child is None else _in_bf16(child) for name, child in module._modules.items()}
    return copied


class _Bf16Linear(nn.Module):
    """A linear layer in bfloat16; products are summed in float32 before they are rounded."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Buffer(layer.weight.detach().to(torch.bfloat16))
        self.bias = None if layer.bias is None else nn.Buffer(layer.bias.detach().to(torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(torch.bfloat16), self.weight, self.bias)


@torch.no_grad()
def encoded(model: ScDiVa, cells: InMemoryCells, what: ReadOut = "state") -> Tensor:
    """Cell states, or what else :func:`read_out` returns, `(n_cells, width)`, on the CPU."""
    device, parts = next(model.parameters()).device, []
    size = 1 if runs_transformer(model) and device.type == "cpu" else BLOCK_CELLS
    for start in range(0, cells.n_cells, size):
        packed = cells.take(np.arange(start, min(start + size, cells.n_cells))).to(device).packed
        parts.append(read_out(model, packed, what).float().cpu())
    return torch.cat(parts)
