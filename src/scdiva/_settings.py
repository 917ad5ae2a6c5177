"""Session-wide defaults (`scdiva.settings`), the package's one logger, and its one progress bar."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger("scdiva")
"""The one logger. Warnings about a user's data go through `warnings`, news of the work in progress through this."""

_VERBOSITY = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}
_NUMBERED = {0: "error", 1: "warning", 2: "info", 3: "info", 4: "debug"} | {n: name for name, n in _VERBOSITY.items()}
"""Numbers that other packages use for these: scanpy's 0 to 4, in which 3 is for hints, and `logging`'s."""
EVERY = 30.0
"""Seconds from line to line of a log file."""
DELAY = 1.0
"""Seconds after which a bar is drawn."""
SHORT = 5.0
"""Seconds that a call may take without a line at its end."""
TICK = 1.0
"""Seconds from look to look of a clock."""
_CALL = threading.local()
"""What the call that runs in a thread has to show, see :func:`one_bar`: its bar, and the lines instead."""
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
        Whether calls of more than a second show a progress bar, one each: drawn in a terminal and in Jupyter, and where
        stderr is a file or a pipe as plain lines, one in half a minute.
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
    """Make the progress bar of a call that may take more than a few seconds.

    In a terminal and in Jupyter it is tqdm's, shown after a second. Where stderr is a file or a pipe nothing can be
    drawn over: there it writes whole lines, one in half a minute and a last one when the work ends, none if that took
    less than five seconds.

    Parameters
    ----------
    items
        What to iterate over; None: a ``with`` block that calls `update`.
    desc
        What is done, in a word or two.
    unit
        What is counted, in the singular.
    total
        How many there are; None: as many as `items` has, or not known.
    initial
        How many were done before.
    shown
        Whether to show anything; None takes `scdiva.settings.progress`.

    Returns
    -------
    A bar of tqdm.
    """
    return _stage(items, desc=desc, unit=unit, total=total, initial=initial, **tqdm_keywords(shown))


@contextlib.contextmanager
def one_bar() -> Iterator[None]:
    """Show what a call does, one stage after another, in one bar; the last is left when the ``with`` block ends.

    Of a stage within a stage the outer one is shown. From the call's second on all stages are, however short: so the
    last one is among them.
    """
    from tqdm.auto import tqdm

    with contextlib.ExitStack() as end:
        if not hasattr(_CALL, "bar"):  # else a call within a call
            _CALL.lines, _CALL.bar = _Lines(sys.stderr), tqdm(disable=True)
            end.callback(lambda: tqdm.close(vars(_CALL).pop("bar")))
        yield


def _stage(items: Iterable[Any] | None = None, **how: Any) -> tqdm[Any]:
    """Make a bar; within a call, in place of the one before, and so that its end takes it off the screen at most."""
    from tqdm.auto import tqdm

    before = getattr(_CALL, "bar", None)
    if before is None or how["disable"] or "close" in vars(before):  # the last: one that has not ended
        return tqdm(items, **how | {"disable": before is not None or how["disable"]})
    before.leave = False
    before.close()
    how |= {"file": _CALL.lines} if "file" in how else {"delay": _CALL.lines.begun + DELAY - time.monotonic()}
    _CALL.bar = bar = tqdm(items, **how)
    # once: it leaves a free line for what is said until the next stage
    vars(bar)["close"] = lambda: (vars(bar).pop("close"), type(bar).clear(bar))
    return bar


@contextlib.contextmanager
def progress_clock(desc: str, *, shown: bool | None = None) -> Iterator[None]:
    """Show for how long a ``with`` block has run that can't say how far it is, as a fit of another package.

    Parameters
    ----------
    desc
        What is done, in a word or two.
    shown
        As for :func:`progress_bar`.
    """
    ended = threading.Event()
    bar = _stage(desc=desc, bar_format="{desc}: {elapsed}", **tqdm_keywords(shown))

    def tick() -> None:
        while not ended.wait(TICK):
            bar.update()

    with bar, ThreadPoolExecutor(1, "scdiva-clock") as beside, contextlib.ExitStack() as end:
        end.callback(ended.set)
        if not bar.disable:
            beside.submit(tick)
        yield


def tqdm_keywords(shown: bool | None = None) -> dict[str, Any]:
    """Say how a bar is drawn, as keyword arguments of ``tqdm.auto.tqdm``: also for packages that make their own.

    Parameters
    ----------
    shown
        As for :func:`progress_bar`.
    """
    if not (settings.progress if shown is None else shown):
        return {"disable": True}
    if _can_draw():
        return {"disable": False, "dynamic_ncols": True, "delay": DELAY}
    # position: a bar within another begins no new line
    lines = _Lines(sys.stderr)
    return {"disable": False, "ncols": 0, "mininterval": 1, "miniters": 1, "leave": True, "position": 0, "file": lines}


def _can_draw() -> bool:
    """Whether stderr is a terminal, or what runs is the kernel of a notebook."""
    if getattr(sys.stderr, "isatty", lambda: False)():
        return True
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and "IPKernelApp" in shell.config


class _Lines:
    """A stream that keeps of a bar's states one in half a minute, and the last, each as a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.begun = time.monotonic()
        self._next = self.begun + EVERY
        self._state = self._written = ""

    def write(self, text: str) -> None:
        self._state = text.strip() or self._state
        now = time.monotonic()
        at_end = text == "\n" and now - self.begun >= SHORT  # what tqdm writes when a bar is closed
        done = self._state.partition("[")[0]  # before times and rates
        if done != self._written and (at_end or now >= self._next):
            self._stream.write(f"{self._state}\n")
            self._written, self._next = done, now + EVERY

    def flush(self) -> None:
        self._stream.flush()
