"""Run the examples in the docstrings of everything public.

Each runs by itself, in an empty folder, as a reader would copy it. `make docs` calls this before it builds the pages.

    python scripts/examples.py [PART ...]
"""

from __future__ import annotations

import argparse
import contextlib
import doctest
import importlib
import inspect
import io
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

PARTS = (
    *("datasets", "pp", "tl", "pl", "get", "metrics", "models"),
    *("tokenizer", "data", "train", "diffusion", "kernels", "_about"),
)
OPTIONS = doctest.NORMALIZE_WHITESPACE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; without any, all")
    parts = parser.parse_args().parts or PARTS
    failed = 0
    for part in parts:
        begun, n = time.perf_counter(), 0
        for name, thing in public_things(part):
            for example in examples_of(name, thing):
                wrong = faults(example)
                n, failed = n + 1, failed + bool(wrong)
                if wrong:
                    print(f"{name}:\n{wrong}")
        print(f"{part}: {n} examples, {time.perf_counter() - begun:.0f} s", flush=True)
    if failed:
        sys.exit(f"{failed} examples do not run, or give something else")


def public_things(part: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and the thing of every public function and class of a part."""
    module = importlib.import_module(f"scdiva.{part}")
    for name in getattr(module, "__all__", dir(module)):
        thing = getattr(module, name)
        ours = (inspect.isfunction(thing) or inspect.isclass(thing)) and thing.__module__.startswith(module.__name__)
        if ours and not name.startswith("_"):
            yield f"{part}.{name}", thing


def examples_of(name: str, thing: Any) -> list[doctest.DocTest]:
    """Give what the docstring of a thing lets run: nothing, or one test."""
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(thing) or "", {"__name__": "example"}, name, None, None)
    return [test] if test.examples else []


def faults(test: doctest.DocTest) -> str:
    """Run an example; return what is wrong with it, or "" if nothing is."""
    import matplotlib

    import scdiva as sd

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    said: list[str] = []
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), sd.settings.override(progress=False):
        warnings.simplefilter("ignore")  # toy data are small and say so
        os.chdir(folder)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                doctest.DocTestRunner(optionflags=OPTIONS, verbose=False).run(test, out=said.append)
        finally:
            os.chdir(here)
            plt.close("all")
    return "".join(said)


if __name__ == "__main__":
    main()
