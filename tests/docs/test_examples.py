"""Every public function is shown in an example. Those that take no time are run here, all of them by `make docs`."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "examples.py"
GPU_ONLY = {"kernels.autotune_attention", "kernels.keep_attention_plan"}
"""Functions that do nothing without a CUDA device."""
QUICK = ("datasets", "pp", "tokenizer", "diffusion", "kernels", "_about")
MINUTES = re.compile(r"\.(annotate|adapt)\(")


def load():
    spec = importlib.util.spec_from_file_location("examples", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


examples = load()
THINGS = {name: thing for part in examples.PARTS for name, thing in examples.public_things(part)}
TESTS = {name: test for name, thing in THINGS.items() for test in examples.examples_of(name, thing)}


def test_every_public_function_is_called_in_an_example():
    sources = "\n".join(line.source for test in TESTS.values() for line in test.examples)
    functions = {name for name, thing in THINGS.items() if inspect.isfunction(thing)}
    missing = {name for name in functions - GPU_ONLY if not re.search(rf"\b{name.split('.')[1]}\(", sources)}
    assert missing == set()
    assert functions >= GPU_ONLY


@pytest.mark.parametrize("name", [name for name in TESTS if name.split(".")[0] in QUICK])
def test_an_example_runs(name):
    if any(MINUTES.search(line.source) for line in TESTS[name].examples):
        pytest.skip("run by make docs")
    assert examples.faults(TESTS[name]) == ""


def test_examples_need_nothing_but_what_they_import():
    """`sd.tokenizer` and its like are there only once something else has imported them."""
    pages = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
    docstrings = {name: "".join(line.source for line in test.examples) for name, test in TESTS.items()}
    hidden = re.compile(r"\bsd\.(tokenizer|data|diffusion|nn|kernels)\.")
    assert [name for name, text in (pages | docstrings).items() if hidden.search(text)] == []


def test_a_wrong_example_is_seen():
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n>>> nothing\n", {}, "wrong", None, None)
    report = examples.faults(test)
    assert "Expected:" in report
    assert "NameError" in report


def test_the_api_page_lists_every_public_object():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert [name for name in THINGS if f" scdiva.{name.removeprefix('_about.')}\n" not in page] == []
