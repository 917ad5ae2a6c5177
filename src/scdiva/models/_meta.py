"""A network of which only names, shapes and types are there: to hold a file against it before memory is taken."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from scdiva.models.config import ScDiVaConfig
from scdiva.models.scdiva import ScDiVa


class _Undrawn(TorchFunctionMode):
    """Leaves out what fills tensors: on the meta device there is nothing to fill, and torch would load its compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__") and name != "requires_grad_":
            return args[0] if args else next(iter(kwargs.values()))
        return func(*args, **(kwargs or {}))


def without_memory(config: ScDiVaConfig) -> ScDiVa:
    """Build a network on the meta device.

    Parameters
    ----------
    config
        Its sizes, however large; the time grows with `n_layers`.

    Raises
    ------
    ValueError
        If a size is larger than any tensor can be.
    """
    try:
        with torch.device("meta"), _Undrawn():
            return ScDiVa(config, generator=torch.Generator(device="cpu"))
    except (RuntimeError, OverflowError, TypeError, MemoryError) as error:
        said = next(iter(str(error).splitlines()), type(error).__name__)  # torch adds a trace of its own
        raise ValueError(f"no network has these sizes: {said:.200}") from error
