"""Session-wide defaults (`scdiva.settings`) and the package's one logger."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

logger = logging.getLogger("scdiva")
"""The one logger. Warnings about a user's data go through `warnings`, news of the work in progress through this."""

_VERBOSITY = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}


@dataclass
class Settings:
    """What scdiva's functions fall back on when an argument is left at None.

    A misspelt name or a value that makes no sense is refused when it is set, not when it is used.

    Parameters
    ----------
    seed
        Seed of every random generator that is not given a `rng`; numpy's and torch's global state is never reseeded.
    device
        Where models run: ``"auto"`` (CUDA where there is one, else CPU), ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or
        ``"mps"``.
    batch_size
        Cells per forward pass.
    progress
        Whether long calls show a progress bar.
    threads
        CPU threads that torch may use within scdiva's calls; None leaves torch as it is.
    verbosity
        What the logger passes on: ``"error"``, ``"warning"``, ``"info"`` or ``"debug"``.

    Examples
    --------
    >>> import scdiva as sd
    >>> sd.settings.batch_size = 128
    >>> with sd.settings.override(progress=False, device="cpu"):
    ...     pass
    """

    seed: int = 0
    device: str = "auto"
    batch_size: int = 64
    progress: bool = True
    threads: int | None = None
    verbosity: str = "warning"

    def __setattr__(self, name: str, value: Any) -> None:
        """Check a value before it is kept."""
        if name not in (known := [field.name for field in fields(self)]):
            raise AttributeError(f"scdiva.settings has no {name!r}; it has {', '.join(known)}")
        _check(name, value)
        object.__setattr__(self, name, value)
        if name == "verbosity":
            logger.setLevel(_VERBOSITY[value])

    @contextlib.contextmanager
    def override(self, **values: Any) -> Iterator[Settings]:
        """Set values for the length of a ``with`` block.

        Parameters
        ----------
        **values
            Settings by name.

        Yields
        ------
        Settings
            These settings, with the values in force.
        """
        before = {field.name: getattr(self, field.name) for field in fields(self)}
        try:
            for name, value in values.items():
                setattr(self, name, value)
            yield self
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def resolve_device(self, device: str | None = None) -> str:
        """Name the device that a call runs on.

        Parameters
        ----------
        device
            A torch device string, ``"auto"``, or None for `settings.device`.

        Returns
        -------
        str
            A device string that torch takes, never ``"auto"``.

        Raises
        ------
        ValueError
            If a CUDA or MPS device is asked for and torch finds none. Nothing falls back in silence.
        """
        import torch

        asked = self.device if device is None else str(device)
        _check("device", asked)
        if asked == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        if asked.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"device={asked!r} was asked for, but torch {torch.__version__} finds no CUDA device here")
        if asked.startswith("mps") and not torch.backends.mps.is_available():
            raise ValueError(f"device={asked!r} was asked for, but torch {torch.__version__} finds no MPS device here")
        return asked

    @contextlib.contextmanager
    def limit_threads(self) -> Iterator[None]:
        """Hold torch to `settings.threads` for the length of a ``with`` block, then give it back its own number."""
        import torch

        before = torch.get_num_threads()
        try:
            if self.threads is not None:
                torch.set_num_threads(self.threads)
            yield
        finally:
            if self.threads is not None:
                torch.set_num_threads(before)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(name: str, value: Any) -> None:
    """Raise ValueError for a value that the setting `name` can't take."""
    valid, what = {
        "seed": (_is_int(value) and value >= 0, "an integer from 0 up"),
        "device": (
            isinstance(value, str) and value.split(":")[0] in ("auto", "cpu", "cuda", "mps"),
            '"auto", "cpu", "cuda", "cuda:N" or "mps"',
        ),
        "batch_size": (_is_int(value) and value > 0, "an integer from 1 up"),
        "progress": (isinstance(value, bool), "True or False"),
        "threads": (value is None or (_is_int(value) and value > 0), "None or an integer from 1 up"),
        "verbosity": (value in _VERBOSITY, f"one of {', '.join(_VERBOSITY)}"),
    }[name]
    if not valid:
        raise ValueError(f"settings.{name} must be {what}, not {value!r}")


def _handler() -> logging.Handler:
    """Make a handler to stderr that stays silent where the user's own logging handles the record already."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("scdiva: %(message)s"))
    handler.addFilter(lambda record: not logging.getLogger().handlers)
    return handler


if not logger.handlers:
    logger.addHandler(_handler())

settings = Settings()
"""The settings of this session."""
