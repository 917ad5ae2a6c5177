"""The benchmark scripts are no package: they are loaded from their files."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch) -> Iterator[Callable[[str], ModuleType]]:
    """Load `benchmarks/<name>.py` anew, with what it imports from beside it; forgotten after the test."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = {path.stem for path in BENCHMARKS.glob("*.py")}
    for name in names & set(sys.modules):
        monkeypatch.delitem(sys.modules, name)
    yield importlib.import_module
    for name in names & set(sys.modules):
        del sys.modules[name]
