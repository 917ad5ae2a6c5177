"""Run the tutorials and save their outputs in place, and the figures that README and front page show.

    python scripts/tutorials.py [NAME ...]     # run and save, by default all
    python scripts/tutorials.py --figures       # only copy figures from the saved notebooks to docs/_static

`make docs` runs the tutorials too, but saves nothing. Run times and stderr (progress bars) are not saved, so that
unchanged results give unchanged files.
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "tutorials"
PICTURES = {
    "umap.png": ("quickstart", "sd.pl.umap("),
    "integration.png": ("integration", "sd.pl.integration("),
    "annotation.png": ("annotation", "sd.pl.confusion_matrix("),
    "perturbation.png": ("perturbation", "sd.pl.perturbation("),
    "networks.png": ("networks", "sd.pl.grn("),
    "adapt.png": ("adapt", "sd.pl.umap("),
    "reconstruction.png": ("imputation", "sd.pl.reconstruction("),
    "generation.png": ("imputation", "sd.pl.generated("),
    "paper_tasks.png": ("paper_tasks", "sd.pl.hit_rate("),
    "pretraining.png": ("pretraining", "right.legend("),
}
"""Tutorial of each figure, and the beginning of the last line of the cell that draws it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="tutorials to run, without .ipynb")
    parser.add_argument("--figures", action="store_true", help="run nothing, only copy the figures")
    arguments, code = parser.parse_args(), 0
    files = [TUTORIALS / f"{name}.ipynb" for name in arguments.names] or sorted(TUTORIALS.glob("*.ipynb"))
    if not arguments.figures:
        command = [sys.executable, "-m", "pytest", "-q", "--nbmake", "--overwrite", *map(str, files)]
        code = subprocess.run(command, check=False).returncode
        for file in files:
            notebook = nbformat.read(file, as_version=4)
            tidy(notebook)
            nbformat.write(notebook, file)
    for name, (tutorial, call) in PICTURES.items():
        (ROOT / "docs" / "_static" / name).write_bytes(figure_of(tutorial, call))
    return code


def figure_of(tutorial: str, call: str) -> bytes:
    """The figure below the first cell whose last line begins with a call."""
    notebook = json.loads((TUTORIALS / f"{tutorial}.ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and "".join(cell["source"]).splitlines()[-1].startswith(call):
            for output in cell["outputs"]:
                if "image/png" in output.get("data", {}):
                    return base64.b64decode(output["data"]["image/png"])
    raise LookupError(f"no cell of {tutorial} ends in {call!r} and shows a figure: python scripts/tutorials.py")


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Remove what differs between two equal runs."""
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]


if __name__ == "__main__":
    sys.exit(main())
