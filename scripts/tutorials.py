"""Run the tutorials and keep what they show, in place: what the site and a reader of the repository see.

    python scripts/tutorials.py [NAME ...]

`make docs` runs them too and fails where one does, but keeps nothing; this is for a tutorial, or a result, that has
changed. Times and what went to stderr (progress bars) are not kept, so that a second run changes what has changed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import nbformat

TUTORIALS = Path(__file__).parents[1] / "tutorials"


def main() -> int:
    names = sorted(path.stem for path in TUTORIALS.glob("*.ipynb"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; default all")
    chosen = parser.parse_args().names or names
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"there is no tutorial {unknown[0]!r}")
    files = [TUTORIALS / f"{name}.ipynb" for name in chosen]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--nbmake", "--overwrite", *map(str, files)], check=False
    )
    for file in files:
        notebook = nbformat.read(file, as_version=4)
        tidy(notebook)
        nbformat.write(notebook, file)
    return ran.returncode


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Take out what differs between two runs that show the same."""
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]


if __name__ == "__main__":
    sys.exit(main())
