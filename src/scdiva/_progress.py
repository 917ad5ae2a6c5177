"""The one progress bar: drawn in a terminal or a notebook, plain lines from time to time in a log file."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from scdiva._settings import settings

if TYPE_CHECKING:
    from tqdm import tqdm

EVERY = 30.0
"""Seconds from line to line of a log file."""
DELAY = 1.0
"""Seconds after which a bar is drawn."""
SHORT = 5.0
"""Seconds that a call may take without a line at its end."""
TICK = 1.0
"""Seconds from look to look of a clock."""


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
    from tqdm.auto import tqdm

    return tqdm(items, desc=desc, unit=unit, total=total, initial=initial, **tqdm_keywords(shown))


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
    from tqdm.auto import tqdm

    ended = threading.Event()
    with tqdm(desc=desc, bar_format="{desc}: {elapsed}", **tqdm_keywords(shown)) as clock:

        def tick() -> None:
            while not ended.wait(TICK):
                clock.update()

        ticking = threading.Thread(target=tick, name="scdiva-clock", daemon=True)
        if not clock.disable:
            ticking.start()
        try:
            yield
        finally:
            ended.set()
            if ticking.ident is not None:
                ticking.join()


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
        self._begun = time.monotonic()
        self._next = self._begun + EVERY
        self._state = self._written = ""

    def write(self, text: str) -> None:
        self._state = text.strip() or self._state
        now = time.monotonic()
        at_end = text == "\n" and now - self._begun >= SHORT  # what tqdm writes when a bar is closed
        done = self._state.partition("[")[0]  # before times and rates
        if done != self._written and (at_end or now >= self._next):
            self._stream.write(f"{self._state}\n")
            self._written, self._next = done, now + EVERY

    def flush(self) -> None:
        self._stream.flush()
