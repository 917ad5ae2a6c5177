"""Session-wide defaults (`scdiva.settings`), the logger, and the progress bar."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from tqdm import tqdm


logger = logging.getLogger("scdiva")
"""The package's logger, for progress; warnings about data are issued by `warnings`."""

HINT = (logging.INFO + logging.DEBUG) // 2
"""Level of messages that list the keys a call wrote, as in scanpy."""
_VERBOSITY = {
    "error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO, "hint": HINT, "debug": logging.DEBUG
}  # fmt: skip
_NUMBERED = dict(enumerate(_VERBOSITY)) | {n: name for name, n in _VERBOSITY.items()}
"""Verbosity levels of scanpy (0 to 4) and `logging`."""
DELAY = 1.0
"""Delay in seconds before a bar is shown."""
LOG_INTERVAL = 30.0
"""Seconds between updates of a bar in a log file."""
_SHOWN = threading.local()
"""`bar`: a weak reference to the progress bar that this thread last showed."""
_DEVICE = re.compile(r"auto|(cpu|cuda|mps)(:\d+)?")


@dataclass
class Settings:
    """Defaults of arguments that are None. Unknown names and invalid values raise an error when they are set.

    Parameters
    ----------
    seed
        Default seed of random numbers, for `rng=None`. The global state of numpy and torch is neither read nor changed.
    device
        Device on which models run: ``"auto"`` (CUDA if available, else CPU), ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or
        ``"mps"``.
    precision
        Precision of the transformer in inference: ``"fp32"``, ``"bf16"`` or ``"auto"``, see
        :meth:`resolve_precision`.
    batch_size
        Maximum number of cells per forward pass in inference. None: as many as have 32,768 genes in total, on CUDA
        131,072. Lower it if GPU memory runs out; results change by no more than rounding.
    progress
        Whether calls show a tqdm progress bar. In a terminal and in Jupyter it appears after one second and disappears
        at the end. In a log file it is written every 30 s.
    threads
        Number of cells that a CPU processes in parallel in inference, each on one core. None: the number of torch's
        threads. Results do not depend on it. Training uses torch's threads (`torch.set_num_threads`).
    keep_model
        Whether the last model that was loaded by name stays in memory (4 bytes per parameter, 39 MB for the bundled
        model) for the next call with that name. It is read again if its files have changed.
    verbosity
        Level of the logger, as in scanpy: ``"error"`` (0), ``"warning"`` (1), ``"info"`` (2: the data that a call
        reads and the steps of long calls), ``"hint"`` (3: also the keys that a call wrote) or ``"debug"`` (4: also
        device, precision and batches); the numbers of `logging` are accepted too. Messages go to stderr, or to the
        handlers of `logging` if it is configured. Warnings about data are issued by :mod:`warnings`.
    data_dir
        Folder of published datasets, see :mod:`scdiva.datasets`. None: the environment variable
        ``SCDIVA_DATA_DIR``, or the user's cache folder.
    data_url
        URL of a mirror of the published datasets, ``https://...``. None: the environment variable
        ``SCDIVA_DATA_URL``, or their public addresses.

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
        """Set a value after checking it."""
        if name not in self.__dataclass_fields__:
            raise AttributeError(f"scdiva.settings has no {name!r}; it has {', '.join(self.__dataclass_fields__)}")
        if name == "verbosity" and _is_int(value):
            value = _NUMBERED.get(value, value)
        _check(name, value)
        object.__setattr__(self, name, value)
        if name == "verbosity":
            logger.setLevel(_VERBOSITY[value])

    @contextlib.contextmanager
    def override(self, **values: Any) -> Iterator[Settings]:
        """Change settings within a ``with`` block.

        Parameters
        ----------
        **values
            Settings by name.

        Yields
        ------
        Settings
            These settings.
        """
        before = dict(vars(self))
        try:
            for name, value in values.items():
                setattr(self, name, value)
            yield self
        finally:
            for name, value in before.items():
                if getattr(self, name) != value:  # do not reset a logger level that the user has set
                    setattr(self, name, value)

    def resolve_device(self, device: str | None = None) -> str:
        """Device of a call.

        Parameters
        ----------
        device
            A torch device string, ``"auto"``, or None for `settings.device`.

        Returns
        -------
        str
            A torch device string, never ``"auto"``.

        Raises
        ------
        ValueError
            If CUDA or MPS is requested and not available.
        """
        import torch

        device = self.device if device is None else str(device)
        _check("device", device)
        if device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        for kind, backend in (("cuda", torch.cuda), ("mps", torch.backends.mps)):
            if device.startswith(kind) and not backend.is_available():
                raise ValueError(
                    f"device={device!r} was asked for, but torch {torch.__version__} finds no {kind.upper()} device "
                    "here. Pass device='cpu' or 'auto'."
                )
        return device

    def resolve_precision(self, precision: str | None, device: str) -> str:
        """Precision of a call.

        Parameters
        ----------
        precision
            ``"fp32"``; ``"bf16"``: matrix products in bfloat16, sums in float32 (slow on CPUs without bfloat16
            support); ``"auto"``: bf16 if the device supports it in hardware, else fp32. None: `settings.precision`.
        device
            A device string, as :meth:`resolve_device` returns it.

        Returns
        -------
        str
            ``"fp32"`` or ``"bf16"``.

        Raises
        ------
        ValueError
            If the device does not support the precision.
        """
        precision = self.precision if precision is None else precision
        _check("precision", precision)
        if precision == "auto":
            return "bf16" if multiplies_bf16(device) else "fp32"
        if precision == "bf16" and not device.startswith("cpu") and not multiplies_bf16(device):
            raise ValueError(
                f"precision='bf16' was asked for, but {device} has no bfloat16 arithmetic; pass precision='fp32'"
            )
        return precision


def multiplies_bf16(device: str) -> bool:
    """Whether a device multiplies bfloat16 matrices in hardware.

    True for CUDA of compute capability 8 or higher, and CPUs with AVX512-BF16 or AMX. On other CPUs, bfloat16 products
    take up to 120 times as long as float32.
    """
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_capability(device)[0] >= 8
    # the capability that torch uses, which ATEN_CPU_CAPABILITY=avx2 lowers
    if not device.startswith("cpu") or torch.backends.cpu.get_cpu_capability() in ("AVX2", "DEFAULT"):
        return False
    # private functions of torch, absent in some versions
    names = "_is_avx512_bf16_supported", "_is_amx_tile_supported"
    return any(getattr(torch.cpu, name, lambda: False)() for name in names)


@contextlib.contextmanager
def torch_threads_kept(within: int | None = None) -> Iterator[None]:
    """Restore torch's number of threads after the block; `within` sets it in the block.

    numba (umap-learn, pynndescent) changes torch's number of threads when it starts its own. With fewer free cores,
    small models then train dozens of times slower.
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


@contextlib.contextmanager
def one_blas_thread(when: bool = True) -> Iterator[None]:
    """Use one thread for the products of numpy, scipy and scikit-learn in the block, if `when` is true.

    Between many small products, the threads of OpenBLAS wait for each other. On cores that also run other programs,
    several threads took 8 to 40 times as long as one (logistic regressions of 1,000 cells); on idle cores they are not
    faster.
    """
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1, user_api="blas") if when else contextlib.nullcontext():
        yield


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(name: str, value: Any) -> None:
    """Raise ValueError for an invalid value of the setting `name`."""
    switch = isinstance(value, bool), "True or False"
    number = value is None or (_is_int(value) and value > 0), "None or an integer from 1 up"
    valid, expected = {
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
        raise ValueError(f"settings.{name} must be {expected}, not {value!r}")


if not logger.handlers:
    _handler = logging.StreamHandler(sys.stderr)
    _handler.setFormatter(logging.Formatter("scdiva: %(message)s"))
    # no output if the user has configured logging
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


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device; from CPU to CUDA asynchronously, through page-locked memory."""
    if x.device.type != "cpu" or not str(device).startswith("cuda"):
        return x.to(device)
    return (x if x.is_pinned() else x.pin_memory()).to(device, non_blocking=True)
