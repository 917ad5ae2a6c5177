"""Run the examples in the docstrings of everything public (`make docs`), or the recipes of docs/recipes.md.

Each runs by itself, in an empty folder, as a reader would copy it. A recipe is skipped, with a message, if a package
that it imports is not installed; `make recipes` installs all of them.

    python scripts/examples.py [PART ...]
    python scripts/examples.py recipes
"""

from __future__ import annotations

import argparse
import contextlib
import doctest
import importlib
import inspect
import io
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PARTS = (
    *("datasets", "pp", "tl", "pl", "get", "metrics", "models"),
    *("tokenizer", "data", "train", "diffusion", "kernels", "_about"),
)
OPTIONS = doctest.NORMALIZE_WHITESPACE
RECIPES = Path(__file__).parents[1] / "docs" / "recipes.md"
QUICKER = {
    'sd.tl.integrate(adata, "donor")': 'sd.tl.integrate(adata, "donor", steps=5)',
    'unlabeled_category="unknown")': 'unlabeled_category="unknown", steps=5)',
    'preset="mini", logger': "training=QUICK, model=SMALL, min_genes=1, progress=False, logger",
}
"""Arguments of recipes that are replaced to run in seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all), or recipes")
    parser.add_argument("--recipe", metavar="TITLE", choices=recipes(), help="run only the recipe of this section")
    arguments = parser.parse_args()
    if arguments.recipe:
        sys.exit(run_recipes({arguments.recipe: recipes()[arguments.recipe]}))
    parts = arguments.parts or PARTS
    failed = 0
    for part in parts:
        begun, n = time.perf_counter(), 0
        if part == "recipes":
            failed += run_recipes(recipes())
            continue
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


def recipes() -> dict[str, str]:
    """Python of each recipe by the title of its section; all begin with the imports at the top of the page."""
    runs = re.sub(r"^% not run\n```python\n.*?^```", "", RECIPES.read_text(encoding="utf-8"), flags=re.M | re.S)
    first, *sections = re.split(r"^## ", runs, flags=re.M)
    (imports,) = python_of(first)
    return {one.partition("\n")[0]: "\n".join([imports, *python]) for one in sections if (python := python_of(one))}


def python_of(text: str) -> list[str]:
    """Blocks of Python of a page."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)


def absent(code: str) -> list[str]:
    """Packages that some code imports and that are not installed."""
    named = dict.fromkeys(re.findall(r"^ *(?:import|from) (\w+)", code, flags=re.M))
    named |= {"tensorboard": None} if 'logger="tensorboard"' in code else {}
    named |= {"igraph": None} if "leiden" in code else {}
    return [name for name in named if find_spec(name) is None]


def run_recipe(code: str, folder: Path) -> dict[str, Any]:
    """Run a recipe in a folder that has its files; return its variables."""
    import numpy as np
    from scipy.io import mmwrite
    from scipy.sparse import csr_matrix

    import scdiva as sd
    from scdiva.train import PretrainingConfig

    adata = sd.datasets.toy(240, 400, n_types=2, rng=0)
    adata.obs["donor"] = [f"d{i % 6}" for i in range(adata.n_obs)]
    adata.obs["condition"] = np.where(adata.obs["donor"].isin(["d0", "d1", "d2"]), "control", "stimulated")
    adata.obsm["spatial"] = np.random.default_rng(0).random((adata.n_obs, 2))
    counts = adata.X.toarray()
    counts[adata.obs["condition"] == "stimulated", 0] += 30  # the gene that responds
    adata.X = counts
    mmwrite(folder / "counts.mtx", csr_matrix(counts.T))
    (folder / "genes.txt").write_text("\n".join(adata.var_names) + "\n")
    adata.obs.to_csv(folder / "cells.csv")
    (folder / "studies").mkdir()
    adata.write_h5ad(folder / "studies" / "one.h5ad")
    portal = adata.copy()
    portal.var_names, portal.obs["assay"] = portal.var["ensembl_id"].to_numpy(), "10x 3' v3"
    portal.obs["donor_id"] = portal.obs["donor"]
    portal.raw = portal.copy()
    portal.X = np.log1p(portal.X)
    portal.write_h5ad(folder / "portal.h5ad")
    screen = sd.datasets.toy(160, 400, n_types=2, rng=1)
    genes = ["KLF1", "SET", "GATA1", "TGFBR2"]
    new = [gene for gene in genes if gene not in screen.var_names]
    old = [gene for gene in screen.var_names if gene not in genes][: len(new)]
    screen.var_names = screen.var_names.to_series().replace(dict(zip(old, new, strict=True))).to_numpy()
    pairs = ["KLF1+SET", "GATA1+SET", "GATA1+KLF1", "SET+TGFBR2"]
    screen.obs["perturbation"] = np.resize(["control", *genes, *pairs], screen.n_obs)
    small = {"dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 24, "anchor_linear_dim": 8, "anchor_hidden": 12}
    quick = PretrainingConfig(steps=2, batch_size=8, context=40, precision="fp32", warmup_steps=0, log_every=1)
    names = {"__name__": "recipe", "adata": adata, "screen": screen, "SMALL": small, "QUICK": quick}
    for slow, fast in QUICKER.items():
        code = code.replace(slow, fast)
    here = os.getcwd()
    with warnings.catch_warnings(), sd.settings.override(progress=False):
        warnings.simplefilter("ignore")  # toy data are small and say so
        os.chdir(folder)
        try:
            exec(compile(code, "recipes.md", "exec"), names)
        finally:
            os.chdir(here)
    return names


def run_recipes(codes: dict[str, str]) -> int:
    """Run recipes whose packages are installed; return how many fail."""
    failed = 0
    for title, code in codes.items():
        if missing := absent(code):
            print(f"recipe {title}: skipped, needs {', '.join(missing)}", flush=True)
            continue
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                run_recipe(code, Path(folder))
            except Exception:  # noqa: BLE001 - reported, and the others run
                failed += 1
                traceback.print_exc()
        print(f"recipe {title}: {time.perf_counter() - begun:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    main()
