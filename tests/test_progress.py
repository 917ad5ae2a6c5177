"""Bars are drawn in a terminal and in a notebook, and are few plain lines in a log file."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import scdiva as sd
from scdiva import _settings
from scdiva._settings import one_bar, progress_bar, progress_clock


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when told to, for tqdm too."""
    import tqdm.std

    now = [1000.0]
    monkeypatch.setattr(_settings.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(tqdm.std, "time", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


def test_a_log_file_gets_one_line_in_half_a_minute_and_a_last_one(clock, capsys):
    with progress_bar(desc="reading", unit="cell", total=600) as bar:
        for _ in range(600):
            clock(1)
            bar.update()
            bar.set_postfix(loss=1)  # which tqdm draws at once
    said = capsys.readouterr().err
    assert "\r" not in said
    lines = said.splitlines()
    assert 20 <= len(lines) <= 21
    assert all(line.startswith("reading:") and "cell" in line for line in lines)
    assert "30/600" in lines[0]
    assert "600/600" in lines[-1]


def test_a_short_call_leaves_a_log_file_as_it_is(clock, capsys):
    for _ in progress_bar(range(4), desc="reading", unit="cell"):
        clock(1)
    assert capsys.readouterr().err == ""
    for _ in progress_bar(range(6), desc="reading", unit="cell"):
        clock(1)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_bars_within_bars_are_lines_of_their_own(clock, capsys):
    for _ in progress_bar(range(2), desc="outer", unit="step"):
        for _ in progress_bar(range(40), desc="inner", unit="cell"):
            clock(1)
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert [line.split(":")[0] for line in said.splitlines()] == ["inner", "inner", "outer", "inner", "inner", "outer"]


def test_a_clock_ticks_while_its_block_runs(clock, monkeypatch, capsys):
    monkeypatch.setattr(_settings, "TICK", 0.001)

    def ticking():
        return any(thread.name.startswith("scdiva-clock") for thread in threading.enumerate())

    def said(upto):
        """What stands there once so many lines are written."""
        text, end = "", time.perf_counter() + 20
        while text.count("\n") < upto and time.perf_counter() < end:
            clock(1)
            time.sleep(0.002)
            text += capsys.readouterr().err
        return text.splitlines()

    with progress_clock("fitting"):
        lines = said(upto=2)
        assert ticking()
    assert all(re.fullmatch(r"fitting: 0\d:\d\d", line) for line in lines), lines
    assert lines == sorted(set(lines))
    assert len(lines) == 2
    with pytest.raises(RuntimeError, match="failed"), progress_clock("fitting"):
        raise RuntimeError("failed")
    with progress_clock("fitting", shown=False):
        assert not ticking()
    assert not ticking()


@pytest.mark.parametrize("shown", [False, None])
def test_off_is_silent(clock, capsys, shown):
    with sd.settings.override(progress=shown is False):  # what is said in the call goes first
        for _ in progress_bar(range(100), desc="reading", unit="cell", shown=shown):
            clock(10)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_that_is_drawn_over(clock, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    for _ in progress_bar(range(5), desc="reading", unit="cell"):
        clock(1)
    said = terminal.getvalue()
    assert said.count("\r") > 3
    assert said.count("\n") == 1


def test_a_notebook_counts_as_a_place_to_draw_in(monkeypatch):
    assert not _settings._can_draw()
    for config, drawn in (({"IPKernelApp": {}}, True), ({}, False)):
        shell = SimpleNamespace(config=config)
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        assert _settings._can_draw() is drawn


def cells():
    adata = sd.datasets.toy(60, 80, rng=3)
    adata.obs["batch"] = ["a", "b"] * 30
    adata.obs["perturbation"] = ["control", "A", "B", "A+B", "C", "B+C"] * 10
    adata.obs["state"] = ["now", "wanted"] * 30
    return adata


def rank(adata):
    fitted = sd.tl.fit_perturbation(adata, "perturbation")
    return sd.tl.rank_perturbations(adata, "state", "now", target="wanted", model=fitted, candidates=["A+C"])


def expressed(adata):
    known = sd.models.load().vocabulary.match(list(adata.var_names)).tokens >= 0
    return str(adata.var_names[int((np.asarray(adata.X.sum(axis=0)).ravel() * known).argmax())])


CALLS = {
    "pp.gene_entropy": (sd.pp.gene_entropy, {"checking", "counting"}),
    "pp.entropy_serialize": (lambda a: sd.pp.entropy_serialize(a, entropy_key=None), {"checking", "ranking genes"}),
    "tl.embed": (sd.tl.embed, {"checking", "running the model"}),
    "tl.annotate": (
        lambda a: sd.tl.annotate(a, "cell_type", a.copy()),
        {"reading", "running the model", "fitting", "calibrating"},
    ),
    "tl.adapt": (sd.tl.adapt, {"checking", "reading"}),
    "tl.grn": (sd.tl.grn, {"reading", "running the model", "choosing edges"}),
    "tl.grn, correlation": (lambda a: sd.tl.grn(a, "correlation"), {"checking", "reading"}),
    "tl.log_likelihood": (lambda a: sd.tl.log_likelihood(a[:2].copy(), n_samples=2), {"running the model"}),
    "tl.integrate": (
        lambda a: sd.tl.integrate(a, "batch", steps=2),
        {"reading", "running the model", "finding batch effects", "integrating"},
    ),
    "tl.generate": (lambda a: sd.tl.generate(a, 3), {"drawing cells"}),
    "tl.impute": (lambda a: sd.tl.impute(a, [expressed(a)]), {"imputing"}),
    "tl.fit_perturbation": (
        lambda a: sd.tl.fit_perturbation(a, "perturbation"),
        {"running the model", "validating"},
    ),
    "tl.predict_perturbation": (
        lambda a: sd.tl.predict_perturbation(a, "perturbation"),
        {"predicting", "running the model"},
    ),
    "tl.rank_perturbations": (rank, {"running the model"}),
    "tl.reconstruct": (lambda a: sd.tl.reconstruct(a[:2].copy()), {"running the model"}),
}
"""Calls that take more than a few seconds on many cells, and the bars that they show; others run as `tl.embed` does."""


@pytest.fixture
def stages(monkeypatch):
    """What calls show, in order."""
    shown = []
    stage = _settings._stage

    def noted(items=None, **how):
        shown.append(how["desc"])
        return stage(items, **how)

    monkeypatch.setattr(_settings, "_stage", noted)
    return shown


@pytest.mark.parametrize("name", CALLS)
def test_long_calls_show_what_they_do_and_leave_a_line(name, stages, monkeypatch, capsys):
    call, bars = CALLS[name]
    monkeypatch.setattr(_settings, "SHORT", 0.0)
    with warnings.catch_warnings(), sd.settings.override(device="cpu"):
        warnings.simplefilter("ignore")  # toy data are small and say so
        call(cells())
    said = capsys.readouterr().err
    assert bars <= set(stages)
    assert "\r" not in said
    assert len(said.splitlines()) == (2 if name == "tl.rank_perturbations" else 1)  # it takes a fit
    assert "100%" in said


def left_on(terminal):
    """Lines that stand on a terminal after all was drawn over that was to be."""
    lines = []
    for text in terminal.getvalue().split("\n"):
        line = ""
        for part in text.split("\r"):
            line = part + line[len(part) :]
        lines.append(line.rstrip())
    return [line for line in lines if line]


@pytest.mark.parametrize(
    "name", ["tl.integrate", "tl.grn", "tl.grn, correlation", "tl.fit_perturbation", "tl.annotate", "tl.embed"]
)
def test_a_call_leaves_one_bar_on_a_terminal(name, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(_settings, "DELAY", 0.0)
    with warnings.catch_warnings(), sd.settings.override(device="cpu"):
        warnings.simplefilter("ignore")
        CALLS[name][0](cells())
    assert terminal.getvalue().count("\n") == 1
    assert "\x1b" not in terminal.getvalue()  # nothing was drawn elsewhere
    (line,) = left_on(terminal)
    assert "100%" in line


def in_a_call(*stages):
    with one_bar():
        for stage in stages:
            stage()


@pytest.mark.parametrize("draws", [True, False])
def test_of_stages_the_last_is_left_however_short(clock, monkeypatch, draws):
    terminal = io.StringIO()
    terminal.isatty = lambda: draws
    monkeypatch.setattr(sys, "stderr", terminal)

    def stage(desc, seconds, n=3):
        def run():
            for _ in progress_bar(range(n), desc=desc, unit="cell"):
                clock(seconds)

        return run

    def outer():
        for _ in progress_bar(range(2), desc="outer", unit="fold"):
            stage("inner", 40)()

    in_a_call(stage("short", 0.1))
    assert left_on(terminal) == []
    in_a_call(stage("one", 0.1), stage("two", 2), outer, stage("last", 0))
    lines = left_on(terminal)
    assert "inner" not in terminal.getvalue()
    assert lines[-1].startswith("last: 100%")
    assert len(lines) == 1 or not draws  # in a log file, one in half a minute before
    in_a_call(stage("one", 2), lambda: in_a_call(stage("two", 2)), stage("three", 2))
    assert [line.partition(":")[0] for line in left_on(terminal)][len(lines) :] == [
        "three"
    ]  # also if one calls another
    in_a_call(stage("one", 2))  # as before: nothing is kept from call to call
    assert "one: 100%" in left_on(terminal)[-1]


def test_what_is_said_between_stages_has_its_own_line(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(_settings, "DELAY", 0.0)
    with one_bar():
        for desc in ("one", "two"):
            list(progress_bar(range(3), desc=desc, unit="cell"))
            sys.stderr.write(f"said after {desc}\n")
    lines = left_on(terminal)
    assert [line[:14] for line in lines[:2]] == ["said after one", "said after two"]
    assert lines[2].startswith("two: 100%")
    assert len(lines) == 3


def test_a_call_that_fails_leaves_the_bar_and_the_next_begins_anew(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(_settings, "DELAY", 0.0)

    def fails():
        for _ in progress_bar(range(3), desc="one", unit="cell"):
            raise RuntimeError("failed")

    with pytest.raises(RuntimeError, match="failed"):
        in_a_call(fails)
    in_a_call(lambda: list(progress_bar(range(3), desc="two", unit="cell")))
    assert [line.partition(":")[0] for line in left_on(terminal)] == ["one", "two"]


@pytest.mark.parametrize("name", ["tl.annotate", "tl.integrate"])
def test_without_progress_they_say_nothing(name, monkeypatch, capsys):
    monkeypatch.setattr(_settings, "SHORT", 0.0)
    with warnings.catch_warnings(), sd.settings.override(device="cpu", progress=False):
        warnings.simplefilter("ignore")
        CALLS[name][0](cells())
    assert capsys.readouterr() == ("", "")


def test_there_is_one_way_to_make_a_bar():
    """What is silent and bounded here is so everywhere."""
    source = Path(sd.__file__).parent
    users = {path.name for path in source.rglob("*.py") if re.search(r"(from|import) tqdm\b", path.read_text("utf-8"))}
    assert users == {"_settings.py", "callbacks.py"}  # the latter for its type alone
