"""Session-wide defaults (`scdiva.settings`), the package's one logger, and its progress bar."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger("scdiva")
"""The one logger. Warnings about a user's data go through `warnings`, news of the work in progress through this."""

_VERBOSITY = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}
_NUMBERED = {0: "error", 1: "warning", 2: "info", 3: "info", 4: "debug"} | {n: name for name, n in _VERBOSITY.items()}
"""Numbers that other packages use for these: scanpy's 0 to 4, in which 3 is for hints, and `logging`'s."""
DELAY = 1.0
"""Seconds after which a bar appears."""
LOG_INTERVAL = 30.0
"""Seconds between updates of a bar in a log file."""
_SHOWN = threading.local()
"""`bar`: a weak reference to the progress bar that this thread last showed."""
_DEVICE = re.compile(r"auto|(cpu|cuda|mps)(:\d+)?")


@dataclass
class Settings:
    """What scdiva's functions fall back on when an argument is left at None.

    A misspelt name or a value that makes no sense is refused when it is set, not when it is used.

    Parameters
    ----------
    seed
        Seed of every random generator that is not given a `rng`; numpy's and torch's global state is neither read nor
        set. The same number twice gives the same result twice.
    device
        Where models run: ``"auto"`` (CUDA where there is one, else CPU), ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or
        ``"mps"``.
    precision
        Arithmetic of the transformer when cells are embedded: ``"fp32"``, ``"bf16"`` or ``"auto"``, see
        :meth:`resolve_precision`.
    batch_size
        Most cells per forward pass when cells are embedded; None: as many as hold 32,768 genes, on CUDA 131,072. It
        changes speed and memory, and results by no more than rounding: lower it where a GPU's memory runs short.
    progress
        Whether calls show a tqdm progress bar. In a terminal and in Jupyter it appears after one second and disappears
        at the end. In a log file it is written every 30 s.
    threads
        Cells that a CPU works on at once wherever a trained model is run over them, each on one core; None: as many as
        torch has threads. No result depends on it. Training uses torch's threads (`torch.set_num_threads`).
    keep_model
        Whether the model last named in a call stays in memory (four bytes a parameter, 39 MB for the bundled one), so
        that the next call of that name does not read it again unless its files have changed. False lets it go with the
        next call.
    verbosity
        What the logger passes on to stderr: ``"error"``, ``"warning"``, ``"info"`` or ``"debug"``. Scanpy's numbers
        from 0 to 4 and those of `logging` may be given instead. Where logging is configured, the records go to its
        handlers; which ones is still for this to say. Warnings about data are Python's, see :mod:`warnings`.
    data_dir
        Folder where published datasets are looked up and downloaded to, see :mod:`scdiva.datasets`. None: the
        environment variable ``SCDIVA_DATA_DIR``, or else the user's cache folder.
    data_url
        Address of a mirror of the published datasets, a folder at some ``https://``. None: the environment variable
        ``SCDIVA_DATA_URL``, or else their public addresses.

    Examples
    --------
    >>> import scdiva as sd
    >>> sd.settings.threads = 4
    >>> with sd.settings.override(progress=False, device="cpu"):
    ...     pass
    """

    seed: int = 0
    device: str = "auto"
    precision: str = "auto"
    batch_size: int | None = None
    progress: bool = True
    threads: int | None = None
    keep_model: bool = True
    verbosity: str = "warning"
    data_dir: str | os.PathLike[str] | None = None
    data_url: str | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Check a value before it is kept."""
        if name not in (known := [field.name for field in fields(self)]):
            raise AttributeError(f"scdiva.settings has no {name!r}; it has {', '.join(known)}")
        if name == "verbosity" and _is_int(value):
            value = _NUMBERED.get(value, value)
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
                if getattr(self, name) != value:  # the logger's level, set again, would take a user's own away
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

    def resolve_precision(self, precision: str | None, device: str) -> str:
        """Name the arithmetic that a call uses.

        Parameters
        ----------
        precision
            ``"fp32"``; ``"bf16"``: matrix products in bfloat16, sums in float32 (on a CPU without bfloat16 arithmetic
            this is slow); ``"auto"``: bf16 where the device multiplies it in hardware, else fp32. None takes
            `settings.precision`.
        device
            A device string, as :meth:`resolve_device` returns it.

        Returns
        -------
        str
            ``"fp32"`` or ``"bf16"``.

        Raises
        ------
        ValueError
            If the device cannot do what is asked for. Nothing falls back in silence.
        """
        asked = self.precision if precision is None else precision
        _check("precision", asked)
        if asked == "auto":
            return "bf16" if multiplies_bf16(device) else "fp32"
        if asked == "bf16" and not device.startswith("cpu") and not multiplies_bf16(device):
            raise ValueError(
                f"precision='bf16' was asked for, but {device} has no bfloat16 arithmetic; pass precision='fp32'"
            )
        return asked


def multiplies_bf16(device: str) -> bool:
    """Tell whether a device multiplies bfloat16 matrices in hardware.

    Parameters
    ----------
    device
        A torch device string.

    Returns
    -------
    bool
        True for CUDA from compute capability 8 on, and CPUs with AVX512-BF16 or AMX that torch makes use of. On others
        bfloat16 products take up to 120 times as long as those of float32.
    """
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_capability(device)[0] >= 8
    # what torch's kernels were chosen for: ATEN_CPU_CAPABILITY=avx2 makes a CPU one of those without
    if not device.startswith("cpu") or torch.backends.cpu.get_cpu_capability() in ("AVX2", "DEFAULT"):
        return False
    # torch has no public question for this; absent in some versions, then no
    asks = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return any(ask() for ask in asks if ask is not None)


@contextlib.contextmanager
def torch_threads_kept(within: int | None = None) -> Iterator[None]:
    """Put torch's number of threads back after the block.

    When numba, on which umap-learn and pynndescent run, starts its OpenMP threads it sets their number for torch too.
    With fewer free cores than that (a share of a cluster's node), small models then train dozens of times slower.

    Parameters
    ----------
    within
        Number in the block; None: what it is. Threads that share small products wait for each other, and on a busy
        machine longer than they compute: one is faster.
    """
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch is not None else 0
    try:
        if torch is not None and within is not None:
            torch.set_num_threads(within)
        yield
    finally:
        if torch is not None and torch.get_num_threads() != before:
            torch.set_num_threads(before)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(name: str, value: Any) -> None:
    """Raise ValueError for a value that the setting `name` can't take."""
    switch = isinstance(value, bool), "True or False"
    number = value is None or (_is_int(value) and value > 0), "None or an integer from 1 up"
    valid, what = {
        "seed": (_is_int(value) and 0 <= value < 2**63, "an integer from 0 to 2**63 - 1"),
        "device": (isinstance(value, str) and _DEVICE.fullmatch(value), '"auto", "cpu", "cuda", "cuda:N" or "mps"'),
        "precision": (value in ("auto", "fp32", "bf16"), '"auto", "fp32" or "bf16"'),
        **dict.fromkeys(("batch_size", "threads"), number),
        **dict.fromkeys(("progress", "keep_model"), switch),
        "data_dir": (isinstance(value, str | os.PathLike | None), "None or a path"),
        "data_url": (value is None or re.match("https?://.", str(value)), 'None or an address, "https://..."'),
        "verbosity": (isinstance(value, str) and value in _VERBOSITY, f"one of {', '.join(_VERBOSITY)}"),
    }[name]
    if not valid:
        raise ValueError(f"settings.{name} must be {what}, not {value!r}")


if not logger.handlers:
    _handler = logging.StreamHandler(sys.stderr)
    _handler.setFormatter(logging.Formatter("scdiva: %(message)s"))
    # silent where the user's own logging handles the record already
    _handler.addFilter(lambda record: not logging.getLogger().handlers)
    logger.addHandler(_handler)

settings = Settings()
"""The settings of this session."""


def progress_bar(
    items: Iterable[Any] | None = None,
    *,
    desc: str,
    unit: str,
    total: int | None = None,
    initial: int = 0,
    shown: bool | None = None,
) -> tqdm[Any]:
    """Progress bar of one stage of a call; it disappears when the stage ends.

    Within the loop of another bar it is not shown, so a call shows one bar at a time.

    Parameters
    ----------
    items
        Iterable to loop over. None: a ``with`` block that calls `update`.
    desc
        What the stage does, in one or two words.
    unit
        What is counted, in the singular.
    total
        Number of units. None: the length of `items`, if it has one.
    initial
        Number of units that were done before.
    shown
        Whether to show the bar. None: `scdiva.settings.progress`.

    Returns
    -------
    A bar of tqdm.
    """
    from tqdm.auto import tqdm

    outer = getattr(_SHOWN, "bar", lambda: None)()
    how = tqdm_keywords(False if outer is not None and not outer.disable else shown)
    bar = tqdm(items, desc=desc, unit=unit, total=total, initial=initial, **how)
    if not bar.disable:
        _SHOWN.bar = weakref.ref(bar)
    return bar


def tqdm_keywords(shown: bool | None = None) -> dict[str, Any]:
    """Keyword arguments of ``tqdm.auto.tqdm`` for a bar, also for packages that make their own.

    Parameters
    ----------
    shown
        Whether to show the bar. None: `scdiva.settings.progress`.
    """
    if not (settings.progress if shown is None else shown):
        return {"disable": True}
    if getattr(sys.stderr, "isatty", lambda: False)() or "ipykernel" in sys.modules:
        return {"disable": False, "dynamic_ncols": True, "delay": DELAY, "leave": False}
    return {"disable": False, "delay": DELAY, "mininterval": LOG_INTERVAL}
