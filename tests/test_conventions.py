"""What the user can rely on in every call: the order of arguments, `copy=`, and a docstring that says everything."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator

import pytest
from numpydoc.docscrape import NumpyDocString

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


def public_functions(parts: tuple[str, ...]) -> Iterator[tuple[str, Callable]]:
    """Yield (name, function) of every public function that a part of the package shows."""
    for part in parts:
        module = importlib.import_module(f"scdiva.{part}")
        for name in dir(module):
            thing = getattr(module, name)
            if inspect.isfunction(thing) and not name.startswith("_") and thing.__module__.startswith(module.__name__):
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
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        faults.append(f"{name}: *args and **kwargs hide what it takes")
    faults += [f"{name}: {p.name} has no type" for p in parameters if p.annotation is p.empty]
    returns = str(inspect.signature(function).return_annotation)
    copy = inspect.signature(function).parameters.get("copy")
    if (copy is not None) != ("AnnData" in returns and returns.endswith("| None")):
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
