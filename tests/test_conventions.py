"""What all public calls have in common: documented parameters, and errors for arguments of another type or name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd
import pytest
from numpydoc.docscrape import NumpyDocString

import scdiva as sd

FACE = ("pp", "tl", "pl", "get")


def public_functions(parts: tuple[str, ...]) -> Iterator[tuple[str, Callable]]:
    """Yield (name, function) of every public function that a part of the package shows."""
    for part in parts:
        module = importlib.import_module(f"scdiva.{part}")
        for name in dir(module):
            thing = getattr(module, name)
            if inspect.isfunction(thing) and not name.startswith("_") and thing.__module__.startswith("scdiva."):
                yield f"{part}.{name}", thing


FUNCTIONS = dict(public_functions(FACE))
OTHERS = dict(public_functions(("data", "datasets", "diffusion", "kernels", "metrics", "models", "tokenizer", "train")))


def test_documented_parameters_are_those_that_a_function_takes():
    for name, function in (FUNCTIONS | OTHERS).items():
        text = inspect.getdoc(function)
        entries = NumpyDocString(text)["Parameters"]
        documented = [each.strip().lstrip("*") for entry in entries for each in entry.name.split(",")]
        assert documented == list(inspect.signature(function).parameters), name
        assert all("".join(entry.desc) for entry in entries), name
        assert "%(" not in text, f"{name}: a shared description was not inserted"


def test_what_changes_adata_takes_copy():
    for name, function in FUNCTIONS.items():
        signature = inspect.signature(function)
        returns, copy = str(signature.return_annotation), signature.parameters.get("copy")
        assert returns != "None" or not name.startswith(("pp", "tl")), name
        assert (copy is not None) == ("AnnData" in returns and returns.endswith("| None")), name
        assert copy is None or (copy.default is False and copy.kind is copy.KEYWORD_ONLY), name


# --- arguments of another type ----------------------------------------------------------------------------------------
WRONG = {
    "str": (["cell_type"], pd.Series(["T", "B"], name="cell_type"), ("a", "b"), {"a": 1}),
    "int": (5.0, "5", True, [5]),
    "float": ("0.5", [0.5], True),
    "bool": ("no", 1.5, [True]),
    "PathLike[str]": (True, 5, ["a.png"]),
    "Sequence[str]": (5, [["cell_type"]]),
}
"""Values that are not of an annotated type."""
RIGHT = {"str": "x", "int": 3, "float": 0.5, "bool": True, "PathLike[str]": "x", "Sequence[str]": ["x"]}


def kinds_of(parameter):
    """The plain types that a parameter is annotated with; none if it takes anything else."""
    parts = str(parameter.annotation).replace("os.PathLike", "PathLike").split(" | ")
    return set(parts) - {"None"} if {*RIGHT, "None"} >= set(parts) else set()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_of_another_type_are_refused_by_the_name_of_their_argument(name):
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    needed = [each for each in parameters if each.default is each.empty]
    arguments = {each.name: RIGHT.get(min(kinds_of(each), default="")) for each in needed}
    for parameter in parameters:
        kinds = kinds_of(parameter)
        if parameter.name.endswith("_key") or parameter.name in ("groupby", "gene_ids", "gene_symbols", "key", "basis"):
            assert kinds, f"{parameter.name} names a column or key and has no type that is checked"
        strictest = "str" if kinds == {"bool", "str"} else max(kinds, key=list(WRONG).index, default="")
        for wrong in WRONG.get(strictest, ()):
            with pytest.raises(TypeError, match=f"^{parameter.name} must be "):
                FUNCTIONS[name](**arguments | {parameter.name: wrong})


def test_the_message_gives_the_call_that_works():
    adata = sd.datasets.toy(20, 60)
    with pytest.raises(TypeError, match=r"Pass groupby='batch'"):
        sd.tl.grn(adata, groupby=["batch"])
    with pytest.raises(TypeError, match=r"got Series of 20. Pass labels_key='cell_type'"):
        sd.tl.annotate(adata, adata.obs["cell_type"])
    with pytest.raises(TypeError, match=r"Pass n_cells=5\."):
        sd.tl.generate(adata, 5.0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_unknown_argument_is_refused_by_the_name_of_the_function(name):
    with pytest.raises(TypeError, match=rf"^scdiva\.{name}\(\) "):
        FUNCTIONS[name](None, no_such_argument=1)


def test_numbers_of_numpy_are_as_good_as_python_s():
    adata = sd.datasets.toy(20, 60)
    adata.obsm["X_map"] = np.zeros((20, 2)) + np.arange(20)[:, None]
    fig = sd.pl.umap(adata, basis=np.str_("X_map"), size=np.float32(3), rng=np.int64(1), return_fig=np.bool_(True))
    assert fig is not None
