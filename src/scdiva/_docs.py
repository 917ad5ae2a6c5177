"""Descriptions of parameters that several public functions share, written once: these, and `reading`, the last six.

ax
    The matplotlib axes to draw on; None makes a figure.
return_fig
    Whether to return the figure.
save
    A file to write the figure to; its ending names the format. None writes none.
rng
    Seed of the random numbers; None takes `scdiva.settings.seed`. Global random state is never touched.
finetune
    Whether to train all weights of a copy of the model; the given model is not changed. The copy does not keep what
    `tl.adapt` or `tl.integrate` fitted on the previous cell state.
epochs
    With `finetune=True`: passes over the training examples. None: as many as show 8,000 of them, between 1 and 250.
lr
    With `finetune=True`: maximum learning rate; new layers learn at ten times this rate. None: 3e-4.
freeze
    With `finetune=True`: number of transformer blocks, from the first, that are not trained; neither are the
    embeddings then. None: 0, everything is trained.
lora
    With `finetune=True`: rank of low-rank updates of the transformer blocks (Hu et al. 2022), which are trained instead
    of the weights and merged into them at the end. None: no low-rank updates.
context
    With `finetune=True`: number of top-ranked genes per cell that are read. None: 128. A model whose cell state comes
    from the transformer reads this many genes afterwards, too.
checkpoint_dir
    With `finetune=True`: folder for a checkpoint after every epoch. The same call continues from it after an
    interruption, with identical results. None: no checkpoints.
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
    Several columns that mean one gene: `"sum"` adds their counts, `"error"` refuses them. Antibody counts that bear the
    name of a gene ("CD4-1") are not added: with a warning they are left out, of the totals of cells too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import TypeVar

from scdiva._checks import check_arguments
from scdiva._settings import one_bar

F = TypeVar("F", bound=Callable[..., object])

# python -OO leaves no docstring, and nothing to fill in
_SHARED = {text.partition("\n")[0]: text for text in re.split(r"\n+(?=\S)", (__doc__ or "").rstrip())[1:]}
_SHARED["reading"] = "\n".join(list(_SHARED.values())[-6:])
_SHARED["finetuning"] = "\n".join(
    _SHARED[name] for name in ("finetune", "epochs", "lr", "freeze", "lora", "context", "checkpoint_dir") if _SHARED
)


def with_shared_docs(function: F) -> F:
    """Replace each line ``%(name)s`` of a docstring by the shared description of that parameter.

    These calls also check the types of their arguments (:func:`scdiva._checks.check_arguments`) and show one progress
    bar (:func:`scdiva._settings.one_bar`).

    Parameters
    ----------
    function
        The function.

    Returns
    -------
    Callable
        The same function, with checks and one bar.

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
    return one_bar()(check_arguments(function))
