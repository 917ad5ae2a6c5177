"""What every call has in common: the order of arguments, their types, `copy=`, and a docstring that says everything."""

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
NOT_ON_ADATA = {
    # These start from files or from a model, since there is no adata yet.
    "pp.corpus_entropy": "data",
    "tl.embed_file": "path",
    # These read what a prediction holds, or scores of it.
    "tl.score_perturbation": "predicted",
    "get.perturbation_df": "predicted",
    "pl.delta_scatter": "predicted",
    "pl.discrimination": "predicted",
    "pl.hit_rate": "predicted",
    "pl.perturbation": "predicted",
    "pl.perturbation_scores": "scores",
    "pl.regulon": "regulon",
    # These compare several data sets.
    "pl.gene_overlap": "gene_sets",
    "pl.generated": "real",
}
"""Functions whose first argument is something else, and what it is called."""
TO_SCANPY = {"pl.annotation", "pl.generated", "pl.integration", "pl.umap"}
"""Functions with keywords for `scanpy.pl.embedding`, which they check."""


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


def signature_faults(name: str, function: Callable) -> list[str]:
    """List what breaks the order of arguments."""
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD or p.kind is p.POSITIONAL_ONLY]
    faults = []
    first = NOT_ON_ADATA.get(name, "adata")
    if not positional or positional[0] != first:
        faults.append(f"{name}: the first argument is not {first!r}")
    if len(positional) > 3:
        faults.append(f"{name}: {', '.join(positional[3:])} must be keyword-only")
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters) and name not in TO_SCANPY:
        faults.append(f"{name}: *args and **kwargs hide what it takes")
    faults += [f"{name}: {p.name} has no type" for p in parameters if p.annotation is p.empty]
    returns = str(inspect.signature(function).return_annotation)
    copy = inspect.signature(function).parameters.get("copy")
    writes = returns == "None" and name.startswith(("pp", "tl"))
    if writes or (copy is not None) != ("AnnData" in returns and returns.endswith("| None")):
        faults.append(f"{name}: what changes adata takes copy=False and returns AnnData | None, nothing else does")
    if copy is not None and (copy.default is not False or copy.kind is not copy.KEYWORD_ONLY):
        faults.append(f"{name}: copy must be keyword-only and False")
    return faults


def docstring_faults(name: str, function: Callable, *, sections: tuple[str, ...]) -> list[str]:
    """List what the numpydoc docstring leaves unsaid."""
    text = inspect.getdoc(function)
    if not text:
        return [f"{name}: no docstring"]
    doc = NumpyDocString(text)
    documented = [n.strip().lstrip("*") for entry in doc["Parameters"] for n in entry.name.split(",")]
    taken = list(inspect.signature(function).parameters)
    faults = [f"{name}: parameters {taken} but documented {documented}"] if documented != taken else []
    faults += [f"{name}: {entry.name} has no description" for entry in doc["Parameters"] if not "".join(entry.desc)]
    faults += [f"{name}: no section {section}" for section in sections if not doc[section]]
    if "%(" in text:
        faults.append(f"{name}: a shared description was not put in")
    return faults


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_stand_in_the_common_order(name):
    assert signature_faults(name, FUNCTIONS[name]) == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_say_everything(name):
    assert docstring_faults(name, FUNCTIONS[name], sections=("Returns", "Raises")) == []


@pytest.mark.parametrize("name", OTHERS)
def test_other_public_functions_document_their_arguments(name):
    assert docstring_faults(name, OTHERS[name], sections=()) == []


def test_every_part_of_the_face_has_functions():
    assert {name.split(".")[0] for name in FUNCTIONS} == set(FACE)


def test_faults_are_seen():
    def bad(cells: int, a: int, b: int, c: int, d, *, copy: bool = True) -> None:
        """Do it.

        Parameters
        ----------
        cells
            Cells.
        a
        """

    assert len(signature_faults("tl.bad", bad)) == 5
    assert len(docstring_faults("tl.bad", bad, sections=("Returns", "Raises"))) == 4
    assert docstring_faults("tl.none", lambda adata: None, sections=()) == ["tl.none: no docstring"]


def test_shared_descriptions_are_put_in_and_unknown_ones_refused():
    from scdiva._docs import with_shared_docs

    def good(ax: object) -> None:
        """Draw.

        Parameters
        ----------
        %(ax)s
        """

    def wrong(axe: object) -> None:
        """Draw.

        %(axe)s
        """

    assert docstring_faults("pl.good", with_shared_docs(good), sections=()) == []
    with pytest.raises(KeyError, match="axe"):
        with_shared_docs(wrong)


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
    given = {each.name: RIGHT.get(min(kinds_of(each), default="")) for each in needed}
    for parameter in parameters:
        kinds = kinds_of(parameter)
        if parameter.name.endswith("_key") or parameter.name in ("groupby", "gene_ids", "gene_symbols", "key", "basis"):
            assert kinds, f"{parameter.name} names a column or key and has no type that is checked"
        strictest = "str" if kinds == {"bool", "str"} else max(kinds, key=list(WRONG).index, default="")
        for wrong in WRONG.get(strictest, ()):
            with pytest.raises(TypeError, match=f"^{parameter.name} must be "):
                FUNCTIONS[name](**given | {parameter.name: wrong})


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
