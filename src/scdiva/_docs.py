"""Descriptions of parameters that several public functions share, written once: these, and `reading`, the last six.

ax
    The matplotlib axes to draw on; None makes a figure.
return_fig
    Whether to return the figure.
save
    A file to write the figure to; its ending names the format. None writes none.
rng
    Seed of the random numbers; None takes `scdiva.settings.seed`. Global random state is never touched.
finetune, epochs, lr, freeze, lora, context, checkpoint_dir
    With `finetune=True` all weights of the model are trained (a copy; the given model is not changed): for so many
    passes over the cells (None: as many as show 8,000 cells, at least one), with this maximum learning rate (None:
    3e-4; layers that are new learn at ten times that), on the `context` top-ranked genes of a cell (None: 128), which
    is what a model whose state comes from the transformer reads afterwards, too. `freeze` keeps the embeddings and so
    many of the first transformer blocks fixed; `lora` trains only low-rank updates of that rank of the blocks (Hu et
    al. 2022), merged into the weights at the end. In `checkpoint_dir` a checkpoint is written after every epoch; the
    same call continues from it after an interruption, with identical results.
layer
    Layer to read instead of `X`.
use_raw
    Read `adata.raw`, its matrix and its genes.
input
    Unit of the matrix: `"counts"`, `"lognorm"` (log1p of counts scaled per cell, to any total), or `"auto"` to find
    out by one pass over the data.
gene_ids
    Column of `var` that holds gene symbols or Ensembl ids; None takes `var_names`. Where its entry is an Ensembl id
    that is unknown, the gene's name in `var_names` is tried.
species
    Whose genes these are. None finds out by their names whether they are a mouse's, which are read as their human
    orthologs, with a note. `"human"` takes the names as they are; `"mouse"` looks up each by its human ortholog
    (:func:`scdiva.tokenizer.human_orthologs`) and by nothing else. Of any other species: a table, as dict or pandas
    Series, from your genes (as `var_names`, or the column `gene_ids`, have them) to human symbols or Ensembl ids; genes
    that it does not hold, or has `""` or NaN for, are unknown. `var` keeps your names.
duplicates
    Several columns that mean one gene: `"sum"` adds their counts, `"error"` refuses them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import TypeVar

from scdiva._settings import one_bar

F = TypeVar("F", bound=Callable[..., object])

# python -OO leaves no docstring, and nothing to fill in
_SHARED = {text.partition("\n")[0]: text for text in re.split(r"\n+(?=\S)", (__doc__ or "").rstrip())[1:]}
_SHARED["reading"] = "\n".join(list(_SHARED.values())[-6:])
_SHARED["finetuning"] = _SHARED["finetune, epochs, lr, freeze, lora, context, checkpoint_dir"]


def with_shared_docs(function: F) -> F:
    """Replace each line ``%(name)s`` of a docstring by the shared description of that parameter.

    What these calls share beside is that they take their time, and show it in one bar
    (:func:`scdiva._settings.one_bar`).

    Parameters
    ----------
    function
        The function.

    Returns
    -------
    Callable
        The same function, with one bar.

    Raises
    ------
    KeyError
        If the docstring names a description that does not exist.
    """
    text = inspect.getdoc(function)
    if text is not None:
        for line in text.splitlines():
            if line.startswith("%("):
                text = text.replace(line, _SHARED[line.removeprefix("%(").removesuffix(")s")])
        function.__doc__ = text
    return one_bar()(function)
