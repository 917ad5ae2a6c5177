"""Put the pictures of the README and the documentation's front page where those find them.

Each is what a tutorial shows, taken out of the notebook as `scripts/tutorials.py` left it. So a picture can't show what
the tutorial does not.

    python scripts/pictures.py [--out docs/_static]
"""

from __future__ import annotations

import argparse
import base64
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "tutorials"
PICTURES = {
    "umap.png": ("quickstart", "sd.pl.umap("),
    "integration.png": ("integration", "sd.pl.integration("),
    "annotation.png": ("annotation", "sd.pl.confusion_matrix("),
    "perturbation.png": ("perturbation", "sd.pl.perturbation("),
    "networks.png": ("networks", "sd.pl.grn("),
    "adapt.png": ("adapt", "sd.pl.umap("),
    "mouse.png": ("mouse", "sd.pl.umap("),
    "reconstruction.png": ("imputation", "sd.pl.reconstruction("),
    "generation.png": ("imputation", "sd.pl.generated("),
    "paper_tasks.png": ("paper_tasks", "sd.pl.hit_rate("),
    "pretraining.png": ("pretraining", "right.legend("),
}
"""Of each picture the tutorial, and how the last line of the cell begins that draws it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "_static")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name in PICTURES:
        (out / name).write_bytes(shown(*PICTURES[name]))
        print(f"{name}: {(out / name).stat().st_size / 1024:.0f} KB")


def shown(tutorial: str, call: str) -> bytes:
    """Give the picture below the first cell whose last line begins with a call; raise LookupError without one."""
    notebook = json.loads((TUTORIALS / f"{tutorial}.ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and "".join(cell["source"]).splitlines()[-1].startswith(call):
            for output in cell["outputs"]:
                if "image/png" in output.get("data", {}):
                    return base64.b64decode(output["data"]["image/png"])
    raise LookupError(f"no cell of {tutorial} ends in {call!r} and shows a picture: python scripts/tutorials.py")


if __name__ == "__main__":
    main()
