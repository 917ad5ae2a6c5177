"""Make the pictures of the README and the documentation's front page.

Each is a figure of a tutorial: its cells are run, on bundled or generated data with set seeds, up to the one that
draws it. So a picture can't show what the tutorial does not.

    python scripts/pictures.py [--out docs/_static] [--only integration.png ...]
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "tutorials"
PICTURES = {
    "umap.png": ("quickstart", "sd.pl.umap("),
    "integration.png": ("integration", "sd.pl.integration("),
    "annotation.png": ("annotation", "sd.pl.confusion_matrix("),
    "perturbation.png": ("perturbation", "sd.pl.perturbation("),
    "networks.png": ("networks", "sd.pl.grn("),
    "reconstruction.png": ("generation", "sd.pl.reconstruction("),
    "generation.png": ("generation", "sd.pl.generated("),
    "pretraining.png": ("pretraining", "ratios.plot("),
}
"""Of each picture the tutorial, and how the call that draws it begins."""
DPI = 80


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "_static")
    parser.add_argument("--only", nargs="+", choices=list(PICTURES), default=list(PICTURES), metavar="PICTURE")
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    out = args.out.resolve()  # a tutorial may work in a folder of its own
    out.mkdir(parents=True, exist_ok=True)
    for tutorial in dict.fromkeys(PICTURES[name][0] for name in args.only):
        start = time.perf_counter()
        wanted = {name: PICTURES[name][1] for name in args.only if PICTURES[name][0] == tutorial}
        for name, figure in drawn(cells_of(tutorial), wanted).items():
            figure.savefig(out / name, dpi=DPI, bbox_inches="tight", metadata={"Software": None})
            print(f"{name}: {(out / name).stat().st_size / 1024:.0f} KB, {time.perf_counter() - start:.0f} s")


def cells_of(tutorial: str) -> list[str]:
    """Give the code cells of a tutorial."""
    notebook = json.loads((TUTORIALS / f"{tutorial}.ipynb").read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def drawn(cells: list[str], wanted: dict[str, str]) -> dict[str, Any]:
    """Run cells until all the figures that are wanted are drawn; raise LookupError if one never is."""
    import matplotlib.pyplot as plt

    names: dict[str, Any] = {"__name__": "__main__"}
    found: dict[str, Any] = {}
    for cell in cells:
        plt.close("all")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(cell, f"<{cell.splitlines()[0]}>", "exec"), names)
        figure = plt.gcf() if plt.get_fignums() else None
        last = cell.splitlines()[-1]
        found |= {name: figure for name, call in wanted.items() if name not in found and last.startswith(call)}
        if len(found) == len(wanted):
            return found
    raise LookupError(f"no cell ends in {', '.join(repr(wanted[name]) for name in wanted if name not in found)}...")


if __name__ == "__main__":
    main()
