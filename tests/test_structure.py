"""The floors of docs/architecture.md: a file imports only from below, or from its own part of the package."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "scdiva"
FLOORS = {
    1: {
        "_constants",
        "_settings",
        "_version",
        "_about",
        "_rng",
        "_scale",
        "_labels",
        "_checks",
        "_device",
        "_files",
        "_lazy",
        "kernels",
        "diffusion",
        "metrics",
    },
    2: {"_docs", "_validate", "nn", "tokenizer", "datasets"},
    3: {"models", "data", "pp", "get"},
    4: {"train", "pl", "_running"},
    5: {"perturbation", "networks", "populations"},
    6: {"tl", "_loading"},
    7: {"cli", "__init__", "__main__"},
}
TOP = max(FLOORS)
FLOOR = {part: floor for floor, parts in FLOORS.items() for part in parts}
SIDEWAYS = {
    # Settings stand on the ground floor of the ground floor: they import only spelled-out constants.
    **{part: {"_constants", "_version"} for part in ("_settings", "_scale", "kernels")},
    # What was drawn on the CPU goes to the network by the one way; so are arguments refused, and warned of old names.
    "diffusion": {"_checks", "_constants", "_device", "_lazy"},
    # The seed of a call that names none is a setting.
    "_rng": {"_constants", "_version", "_settings"},
    "_about": {"_version"},
    # A lock that a file system lacks is logged.
    "_files": {"_settings"},
    # Texts of a file are escaped in warnings.
    "_checks": {"_files"},
    # What is no label, and which extra is missing, is one matter, whoever asks.
    "metrics": {"_checks", "_labels"},
    # What is wrong with a column is said as every check says it.
    "_labels": {"_checks"},
    # Toy cells carry real gene names.
    "datasets": {"tokenizer"},
    # How a matrix is read is one matter, whoever asks.
    "pp": {"data"},
    "get": {"data"},
    # The same command line, started by `python -m`.
    "__main__": {"cli"},
}
"""Imports within a floor that are allowed, by part."""
REEXPORTED = {"models.__init__": {"perturbation", "_loading"}}
"""Public names that now stand higher up; found lazily, where they always were."""


def sources(folder: Path) -> dict[str, str]:
    """Every module of a package by dotted name, without the package's own."""
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*.py"))
    }


def imported_parts(module: str, text: str) -> Iterator[str]:
    """Yield the part of scdiva (`nn`, `_constants`, ...) behind each import of a module, those inside functions too."""
    package = ["scdiva", *module.split(".")][:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            targets = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            names = target.split(".")
            if names[0] == "scdiva":
                yield names[1] if len(names) > 1 else "__init__"


def floor_breaks(modules: Mapping[str, str]) -> list[str]:
    """List imports that go up or sideways, and modules that stand on no floor."""
    breaks = []
    for module, text in modules.items():
        part = module.split(".")[0]
        if part not in FLOOR:
            breaks.append(f"{module} stands on no floor: give it one here and in docs/architecture.md")
            continue
        for target in sorted(set(imported_parts(module, text))):
            if target == part or target in SIDEWAYS.get(part, ()) or target in REEXPORTED.get(module, ()):
                continue
            if FLOOR.get(target, TOP) >= FLOOR[part]:
                breaks.append(f"{module} (floor {FLOOR[part]}) imports {target} (floor {FLOOR.get(target, TOP)})")
    return breaks


def test_every_file_imports_only_from_below():
    modules = sources(SRC)
    # The root names every part, lazily; it is the top floor.
    assert floor_breaks(modules) == []
    assert len(modules) > 10


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("nn.layers", "from scdiva.models import ScDiVa"),
        ("nn.layers", "def f():\n    import scdiva.tl.embed"),
        ("kernels._sdpa", "from ..nn import layers"),
        ("data.cells", "from scdiva import pp"),
        ("models.scdiva", "from scdiva.data.batch import CellBatch"),
        ("_constants", "from . import _settings"),
        ("tl.embed", "import scdiva"),
        ("helpers", ""),
    ],
)
def test_a_break_is_seen(module, text):
    assert len(floor_breaks({module: text})) == 1


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("nn.layers", "from scdiva.kernels import rope_attention"),
        ("nn.layers", "from .embedding import GeneValueEmbedding\nimport torch"),
        ("pp._genes", "from scdiva.data.genes import tokens_of_var"),
        ("tl.__init__", "from . import _embed"),
        ("__init__", "from . import tl"),
    ],
)
def test_what_goes_down_passes(module, text):
    assert floor_breaks({module: text}) == []


KNOWN_CIRCLES: set[frozenset[str]] = set()
"""Modules that import each other in a circle. Nothing is ever added here."""


def imported_modules(module: str, text: str, modules: Mapping[str, str]) -> set[str]:
    """Modules of the package that one imports, also within functions and for its types alone.

    A package stands for its `__init__`, of which only what it imports at once counts: the rest is lazy.
    """
    tree = ast.parse(text)
    at_once = module.endswith("__init__")
    package = module.split(".")[:-1]
    found = set()
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ["scdiva", *package][: len(package) + 2 - node.level] if node.level else []
            base = [*above, *(node.module.split(".") if node.module else [])]
            names = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for _, *inner in (name for name in names if name[0] == "scdiva"):
            tried = [inner, [*inner, "__init__"], inner[:-1], [*inner[:-1], "__init__"]]
            found |= {next((name for parts in tried if (name := ".".join(parts)) in modules), module)}
    return found - {module}


def circles(modules: Mapping[str, str]) -> set[frozenset[str]]:
    """Groups of modules each of which imports, by way of others, all modules of its group."""
    graph = {module: imported_modules(module, text, modules) for module, text in modules.items()}
    reached: dict[str, set[str]] = {}
    for module in graph:
        seen: set[str] = set()
        ahead = list(graph[module])
        while ahead:
            if (one := ahead.pop()) not in seen:
                seen.add(one)
                ahead += graph[one]
        reached[module] = seen
    return {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in graph
        if module in reached[module]
    }


def test_no_module_imports_itself_by_way_of_others():
    assert {tuple(sorted(one)) for one in circles(sources(SRC)) - KNOWN_CIRCLES} == set()


def test_circles_are_seen_where_they_are():
    modules = {
        "a.__init__": "from scdiva.a import one",
        "a.one": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from scdiva.a.two import Two",
        "a.two": "def f():\n    from .three import Three",
        "a.three": "from scdiva.a import one",
        "b": "from scdiva.a.two import Two",
        "c.__init__": "def f():\n    from scdiva.d import D",
        "d": "from scdiva.c import C",
    }
    assert circles(modules) == {frozenset({"a.one", "a.two", "a.three"})}


def test_no_file_is_called_utils():
    vague = {"utils", "util", "helpers", "common", "misc"}
    assert [path for path in SRC.rglob("*") if path.stem.strip("_") in vague] == []


def prints(text: str) -> list[int]:
    """Lines of a module that call print."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def test_the_package_prints_nothing():
    assert {module: lines for module, text in sources(SRC).items() if (lines := prints(text))} == {}
    assert prints("x = 1\nif x:\n    print(x)") == [3]


def test_nothing_is_pickled():
    """Neither the module nor torch.save of whole objects: what is stored is safetensors, json, npz, h5."""
    modules = sources(SRC)
    found = {
        module
        for module, text in modules.items()
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.Import) and {a.name for a in node.names} & {"pickle", "dill", "cloudpickle", "joblib"})
        or (isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) == "True")
        or (isinstance(node, ast.keyword) and node.arg == "weights_only" and ast.unparse(node.value) == "False")
    }
    assert found == set()


def test_the_root_is_typed_and_ships_its_tables():
    assert (SRC / "py.typed").is_file()
    assert (SRC / "tokenizer" / "human.safetensors").stat().st_size < 3_000_000


def test_the_parser_sees_relative_imports_from_a_package():
    text = textwrap.dedent("""
        from .. import _constants
        from ..tokenizer.vocabulary import Vocabulary
        from . import batch
    """)
    assert set(imported_parts("data.cells", text)) == {"_constants", "tokenizer", "data"}
