"""Calls show one tqdm bar at a time, few updates in a log file, and nothing where progress is off."""

from __future__ import annotations

import io
import sys
import warnings
from contextlib import redirect_stderr

import pytest

import scdiva as sd
from scdiva import _settings
from scdiva._settings import progress_bar


@pytest.fixture(autouse=True)
def _quiet():
    """Progress bars are shown here, unlike in other tests."""


@pytest.fixture(params=[True, False], ids=["terminal", "log"])
def stderr(request, monkeypatch):
    """A stream in place of stderr, a terminal or a file, on which bars are shown at once."""
    stream = io.StringIO()
    stream.isatty = lambda: request.param
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    for name in ("DELAY", "LOG_INTERVAL"):
        monkeypatch.setattr(_settings, name, 0.0)
    return stream


def loop(desc, n=3):
    for _ in progress_bar(range(n), desc=desc, unit="cell"):
        yield


def left_on(stream):
    """Text of the lines that remain after bars were overwritten."""
    lines = []
    for text in stream.getvalue().split("\n"):
        line = ""
        for part in text.split("\r"):
            line = part + line[len(part) :]
        lines.append(line.strip())
    return [line for line in lines if line]


def test_stages_follow_each_other_and_an_inner_one_is_not_shown(stderr):
    with redirect_stderr(stderr):
        list(loop("first"))
        for _ in loop("outer"):
            list(loop("inner"))
        list(loop("last"))
    output = stderr.getvalue()
    assert "inner" not in output
    assert "\x1b" not in output  # no second row
    assert output.index("first:") < output.index("outer:") < output.index("last:")
    assert [line.split(":")[0] for line in left_on(stderr)] == ([] if stderr.isatty() else ["first", "outer", "last"])


def test_after_an_error_the_next_bar_is_shown(stderr):
    def fails():
        for _ in loop("one"):
            raise RuntimeError("failed")

    with redirect_stderr(stderr):
        with pytest.raises(RuntimeError, match="failed"):
            fails()
        list(loop("two"))
    assert "two:" in stderr.getvalue()


@pytest.mark.parametrize(("delay", "progress", "shown"), [(0.0, True, False), (0.0, False, None), (60.0, True, None)])
def test_off_and_short_stages_are_silent(stderr, monkeypatch, delay, progress, shown):
    monkeypatch.setattr(_settings, "DELAY", delay)
    with sd.settings.override(progress=progress), redirect_stderr(stderr):  # the argument takes precedence
        list(progress_bar(range(9), desc="reading", unit="cell", shown=shown))
    assert stderr.getvalue() == ""


def test_a_log_file_gets_few_updates(stderr, monkeypatch):
    import tqdm.std

    now = [1000.0]
    monkeypatch.setattr(tqdm.std, "time", lambda: now[0])
    monkeypatch.setattr(_settings, "DELAY", 1.0)
    monkeypatch.setattr(_settings, "LOG_INTERVAL", 30.0)
    with redirect_stderr(stderr):
        for _ in loop("reading", 600):
            now[0] += 1
    updates = stderr.getvalue().count("reading")
    assert updates > 500 if stderr.isatty() else 20 <= updates <= 22


CALLS = {
    "tl.embed": sd.tl.embed,
    "tl.integrate": lambda adata: sd.tl.integrate(adata, "batch", steps=2),
    "tl.annotate": lambda adata: sd.tl.annotate(adata, "cell_type", adata.copy()),
    "tl.grn": sd.tl.grn,
}


@pytest.mark.parametrize(("name", "progress"), [*((name, True) for name in CALLS), ("tl.annotate", False)])
def test_calls_show_one_bar_at_a_time_or_nothing(name, progress, stderr):
    adata = sd.datasets.toy(60, 80, rng=3)
    adata.obs["batch"] = ["a", "b"] * 30
    with warnings.catch_warnings(), sd.settings.override(device="cpu", progress=progress), redirect_stderr(stderr):
        warnings.simplefilter("ignore")  # toy data are small
        CALLS[name](adata)
    assert ("%|" in stderr.getvalue()) is progress
    assert "\x1b" not in stderr.getvalue()
    assert left_on(stderr) == [] or not stderr.isatty()
