"""Sphinx configuration. The notebooks are copied from `tutorials/` when the build starts."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import scdiva

HERE = Path(__file__).parent

project = "scdiva"
author = "scdiva developers"
copyright = "2026, scdiva developers"
version = release = scdiva.__version__

extensions = [
    *("sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.intersphinx"),
    *("numpydoc", "myst_nb", "sphinx_autodoc_typehints", "sphinx_copybutton", "sphinx_design", "sphinxext.opengraph"),
    "sphinxcontrib.bibtex",
]
bibtex_bibfiles = ["references.bib"]
bibtex_reference_style = "author_year"
templates_path = ["_templates"]
exclude_patterns = ["_build", "_templates", "**.ipynb_checkpoints", "jupyter_execute"]
html_theme = "sphinx_book_theme"
html_title = "scdiva"
ogp_site_url = "https://scdiva.readthedocs.io/en/latest/"
ogp_social_cards = {"enable": False}  # the build needs no fonts
html_static_path = ["_static"]
html_css_files = ["site.css"]
copybutton_prompt_text, copybutton_prompt_is_regexp = r">>> |\.\.\. ", True  # an example is copied without its prompts
# Read the Docs knows the address of the repository and the version that it builds
REPOSITORY = os.environ.get("READTHEDOCS_GIT_CLONE_URL", "").removesuffix(".git")
SITE = "https://scdiva.readthedocs.io/en"
html_theme_options = {
    "repository_url": REPOSITORY,
    "use_repository_button": bool(REPOSITORY),
    "use_issues_button": bool(REPOSITORY),
    "switcher": {
        "json_url": f"{SITE}/latest/_static/versions.json"
        if os.environ.get("READTHEDOCS")
        else "_static/versions.json",
        "version_match": os.environ.get("READTHEDOCS_VERSION", "latest"),
    },
    "check_switcher": False,  # the build needs no network
    "show_toc_level": 2,
    "navbar_persistent": [],  # one search field, at the side
    "secondary_sidebar_items": {  # wide tables need the space
        "**": ["page-toc"],
        **{page: [] for page in ("datasets", "benchmarks")},
    },
}

html_sidebars = {"**": ["navbar-logo", "version-switcher", "search-button-field", "sbt-sidebar-nav"]}

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist", "dollarmath", "tasklist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # `make docs` runs the tutorials apart; the site shows the outputs that they keep

default_role = "literal"  # docstrings write names in single backticks
autosummary_generate = True
typehints_use_signature = typehints_use_signature_return = True
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
python_maximum_signature_line_length = 88  # longer ones take a line for each parameter

# Every reference to an object of scdiva must exist (see `missing_reference`). Types of other packages are linked by the
# addresses in `_inventories`, so that no build needs the network; where the build may ask their sites (Read the Docs),
# it asks those first. All other names are plain text.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!scdiva\.).*")]
SITES = {
    "anndata": "https://anndata.readthedocs.io/en/stable/",
    "matplotlib": "https://matplotlib.org/stable/",
    "numpy": "https://numpy.org/doc/stable/",
    "pandas": "https://pandas.pydata.org/docs/",
    "python": "https://docs.python.org/3/",
    "scipy": "https://docs.scipy.org/doc/scipy/",
    "torch": "https://docs.pytorch.org/docs/stable/",
}
SHORT = {
    "AnnData": "anndata.AnnData",
    "ArrayLike": "numpy.typing.ArrayLike",
    "Axes": "matplotlib.axes.Axes",
    "Figure": "matplotlib.figure.Figure",
    "Path": "pathlib.Path",
    "PathLike": "os.PathLike",
    "Tensor": "torch.Tensor",
    "pandas.core.arrays.categorical.Categorical": "pandas.Categorical",
    "pandas.core.frame.DataFrame": "pandas.DataFrame",
    "pandas.core.series.Series": "pandas.Series",
    "scipy.sparse._csr.csr_matrix": "scipy.sparse.csr_matrix",
    "torch._C.Generator": "torch.Generator",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch.optim.optimizer.Optimizer": "torch.optim.Optimizer",
    "torch.utils.data.dataloader.DataLoader": "torch.utils.data.DataLoader",
}
"""Names in annotations and docstrings, and their names on the sites of their packages."""

PARTS = ("pp", "tl", "pl", "get", "datasets", "metrics", "models", "tokenizer", "data", "train", "diffusion", "kernels")


def imported(target: str) -> Any:
    """Import the object with a dotted name; raise an error if it does not exist."""
    names = target.split(".")
    for cut in range(len(names), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(names[:cut]))
        except ModuleNotFoundError:
            continue
        for name in names[cut:]:
            thing = getattr(thing, name)
        return thing
    raise ModuleNotFoundError(target)


def missing_reference(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Link the internal name of an object to the page of its public name.

    Objects without a page are plain text. Names that do not exist remain a warning.
    """
    target = node.get("reftarget", "")
    module, _, rest = target.partition(".")
    package = {"np": "numpy", "pd": "pandas"}.get(module)
    node["reftarget"] = f"{package}.{rest}" if package else SHORT.get(target, target)  # resolved by intersphinx
    if not target.startswith("scdiva."):
        return None
    try:
        thing = imported(target)
    except (ImportError, AttributeError):
        return None
    for part in PARTS:
        name = target.rpartition(".")[2]
        public = f"scdiva.{part}.{name}"
        if getattr(importlib.import_module(f"scdiva.{part}"), name, None) is thing and public != target:
            return env.get_domain("py").resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, contnode)
    return contnode


def tasks() -> dict[str, list[str]]:
    """Functions of each task: those of one section of the API page, by their public names."""
    sections = re.split(r"^## ", (HERE / "api.md").read_text(encoding="utf-8"), flags=re.M)
    listed = [
        re.findall(r"^   (scdiva\.(?:pp|tl|pl|get|metrics|models|datasets)\.[a-z]\w*)$", one, re.M) for one in sections
    ]
    return {name: names for names in listed for name in names}


TASKS = tasks()


def add_see_also(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Add the other functions of the same task to the docstring of a function."""
    if others := [other for other in TASKS.get(name, ()) if other != name]:
        lines += ["", "See Also", "--------", ", ".join(others)]


def setup(app: Any) -> None:
    """Connect to the build."""
    app.connect("missing-reference", missing_reference, priority=400)  # before intersphinx's
    app.connect("autodoc-process-docstring", add_see_also, priority=400)  # before numpydoc's


def write_inventory(source: Path, target: Path) -> str:
    """Write the inventory of another site in the format of Sphinx, and return its path."""
    lines = (line.split() for line in source.read_text(encoding="utf-8").splitlines())
    text = "".join(f"{name} py:{role} 1 {address} -\n" for name, role, address in lines)
    head = f"# Sphinx inventory version 2\n# Project: {source.stem}\n# Version: \n# Compressed by zlib.\n"
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(head.encode() + zlib.compress(text.encode()))
    return str(target)


intersphinx_mapping = {}
for site, address in SITES.items():
    kept = write_inventory(HERE / "_inventories" / f"{site}.txt", HERE / "generated" / f"{site}.inv")
    intersphinx_mapping[site] = (address, (None, kept) if os.environ.get("READTHEDOCS") else kept)
(HERE / "generated" / "cite.bib").write_text(scdiva.cite(), encoding="utf-8")
shutil.rmtree(HERE / "notebooks", ignore_errors=True)  # of deleted tutorials
shutil.copytree(HERE.parent / "tutorials", HERE / "notebooks")
