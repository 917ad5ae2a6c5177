"""Run the examples in the docstrings of everything public (`make docs`), or the recipes of docs/recipes.md.

Each runs by itself, in an empty folder, as a reader would copy it. A recipe is skipped, with a message, if a package
that it imports is not installed; `make recipes` installs all of them.

    python scripts/examples.py [recipes]
"""

from __future__ import annotations

import argparse
import contextlib
import doctest
import importlib
import inspect
import io
import re
import shutil
import subprocess
import sys
import tempfile
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
RECIPES = Path(__file__).parents[1] / "docs" / "recipes.md"
QUICKER = {
    'sd.tl.integrate(adata, "donor")': 'sd.tl.integrate(adata, "donor", steps=5)',
    'unlabeled_category="unknown")': 'unlabeled_category="unknown", steps=5)',
    'preset="mini", logger': "training=QUICK, model=SMALL, min_genes=1, progress=False, logger",
}
"""Arguments of recipes that are replaced to run in seconds."""
SEURAT = r"""
library(Seurat)
library(Matrix)
counts <- as(readMM("counts.mtx"), "CsparseMatrix")
cells <- read.csv("cells.csv", row.names = 1)
dimnames(counts) <- list(readLines("genes.txt"), rownames(cells))
object <- CreateSeuratObject(counts, meta.data = cells)
unlink(c("counts.mtx", "genes.txt", "cells.csv"))
if (!exists("LayerData")) LayerData <- function(object, assay, layer) GetAssayData(object, layer, assay)
"""
"""Object for the blocks of R; in Seurat 4, `LayerData` has another name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("examples", "recipes"), default="examples")
    if parser.parse_args().what == "recipes":
        sys.exit(run_recipes())
    failed = []
    for part in PARTS:
        tests = [test for name, thing in public_things(part) for test in examples_of(name, thing)]
        wrong = {test.name: failure for test in tests if (failure := faults(test))}
        if not tests:
            wrong = {part: "no docstring has an example"}
        failed += wrong
        print(f"{part}: {len(tests)} examples", *(f"{name}:\n{failure}" for name, failure in wrong.items()), flush=True)
    if failed:
        sys.exit(f"examples fail: {', '.join(failed)}")


def public_things(part: str) -> Iterator[tuple[str, Any]]:
    """Yield name and object of every public function and class of a subpackage."""
    module = importlib.import_module(f"scdiva.{part}")
    for name in getattr(module, "__all__", dir(module)):
        thing = getattr(module, name)
        of_scdiva = (inspect.isfunction(thing) or inspect.isclass(thing)) and thing.__module__.startswith("scdiva.")
        if of_scdiva and not name.startswith("_"):
            yield f"{part}.{name}", thing


def examples_of(name: str, thing: Any) -> list[doctest.DocTest]:
    """Return the doctest of a docstring, if it has an example."""
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(thing) or "", {"__name__": "example"}, name, None, None)
    return [test] if test.examples else []


@contextlib.contextmanager
def quiet(folder: str | Path) -> Iterator[None]:
    """Run in a folder, without progress bars and warnings (toy data are small)."""
    import scdiva as sd

    with contextlib.chdir(folder), warnings.catch_warnings(action="ignore"), sd.settings.override(progress=False):
        yield


def faults(test: doctest.DocTest) -> str:
    """Run an example in an empty folder; return what is wrong with it, or ""."""
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    messages: list[str] = []
    with tempfile.TemporaryDirectory() as folder, quiet(folder), contextlib.redirect_stderr(io.StringIO()):
        doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE, verbose=False).run(test, out=messages.append)
    plt.close("all")
    return "".join(messages)


def recipes() -> dict[str, str]:
    """Python of each recipe by the title of its section; all begin with the imports at the top of the page.

    A block of R is a call of :func:`in_r`.
    """
    runs = re.sub(r"^% not run\n```\w+\n.*?^```", "", RECIPES.read_text(encoding="utf-8"), flags=re.M | re.S)
    first, *sections = re.split(r"^## ", runs, flags=re.M)
    (imports,) = python_of(first)
    return {one.partition("\n")[0]: "\n".join([imports, *python]) for one in sections if (python := python_of(one))}


def python_of(text: str) -> list[str]:
    """Blocks of Python and R of a page, as Python."""
    blocks = re.findall(r"^```(python|r)\n(.*?)^```", text, flags=re.M | re.S)
    return [f"in_r({code!r})\n" if language == "r" else code for language, code in blocks]


def has_seurat() -> bool:
    """Whether there is an R with Seurat."""
    command = ["Rscript", "-e", 'find.package("Seurat")']
    return bool(shutil.which("Rscript")) and not subprocess.run(command, capture_output=True, check=False).returncode


def in_r(code: str) -> None:
    """Run R in the working folder, with the variables of the call before, by default those of `SEURAT`."""
    if not has_seurat():
        print("R is not run: it requires Rscript and Seurat (on Debian: apt-get install r-cran-seurat)")
        return
    before = 'library(Seurat)\nload("r")\n' if Path("r").exists() else SEURAT
    command = ["Rscript", "-e", f'{before}{code}save.image("r")']
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"R failed:\n{code}\n{done.stderr}")


def absent(code: str) -> list[str]:
    """Packages that some code imports and that are not installed."""
    packages = dict.fromkeys(re.findall(r"^ *(?:import|from) (\w+)", code, flags=re.M))
    packages |= {"tensorboard": None} if 'logger="tensorboard"' in code else {}
    packages |= {"igraph": None} if "leiden" in code else {}
    return [name for name in packages if find_spec(name) is None]


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
    names = {"__name__": "recipe", "in_r": in_r, "adata": adata, "screen": screen, "SMALL": small, "QUICK": quick}
    for slow, fast in QUICKER.items():
        code = code.replace(slow, fast)
    with quiet(folder):
        exec(compile(code, "recipes.md", "exec"), names)
    return names


def run_recipes() -> int:
    """Run recipes whose packages are installed; return how many fail."""
    failed = 0
    for title, code in recipes().items():
        missing = absent(code)
        print(f"recipe {title}{': skipped, needs ' if missing else ''}{', '.join(missing)}", flush=True)
        try:
            with tempfile.TemporaryDirectory() as folder:
                if not missing:
                    run_recipe(code, Path(folder))
        except Exception:  # noqa: BLE001, the other recipes run
            failed += 1
            traceback.print_exc()
    return failed


if __name__ == "__main__":
    main()
