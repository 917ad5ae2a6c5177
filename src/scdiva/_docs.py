"""Descriptions of parameters that several public functions share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])

SHARED = {
    "ax": """
ax
    Matplotlib axes to draw on. None: a new figure.
""",
    "show": """
show
    Whether to call ``matplotlib.pyplot.show``. False: return the axes instead. None: do neither, since a notebook
    shows the figure at the end of its cell.
""",
    "of_scanpy": """
**kwargs
    Passed to ``scanpy.pl.embedding``: ``palette``, ``cmap``, ``vmin``, ``vmax`` (numbers or percentiles such as
    ``"p99"``, one or a list with one for each panel), ``vcenter``, ``norm``, ``groups``, ``size``, ``title``,
    ``ncols``, ``frameon``, ``legend_loc``, ``legend_fontsize``, ``na_color``, ``alpha`` and others. By default,
    ``legend_loc`` is ``"on data"`` for up to 14 groups, ``"right margin"`` for up to 100, else None.
""",
    "return_fig": """
return_fig
    Whether to return the figure.
""",
    "save": """
save
    File to write the figure to; its suffix sets the format. None: no file.
""",
    "cells": """
adata
    Cells × genes, raw counts or log-normalised expression.
""",
    "model": """
model
    A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`.
""",
    "device": """
device, precision
    Torch device, and `"fp32"`, `"bf16"` or `"auto"`, of the transformer. None: those of `scdiva.settings`. The other
    heads run in float32 on the CPU.
""",
    "copy": """
copy
    Whether to return a copy of `adata` with the result instead of writing into `adata`.
""",
    "rng": """
rng
    Seed of the random numbers. None: `scdiva.settings.seed`. The global random state is neither read nor changed.
""",
    "layer": """
layer
    Layer to read instead of `X`.
""",
    "use_raw": """
use_raw
    Whether to read the matrix and genes of `adata.raw`.
""",
    "input": """
input
    Unit of the matrix: `"counts"`, `"lognorm"` (log1p of counts scaled per cell, to any total), or `"auto"` to
    infer it in one pass over the data.
""",
    "gene_ids": """
gene_ids
    Column of `var` with gene symbols or Ensembl ids. None: `var_names`. If an Ensembl id is unknown, the name in
    `var_names` is used.
""",
    "species": """
species
    Species of the gene names. None: infer human or mouse from the names; mouse genes are mapped to their human
    orthologs, with a note. `"human"`: use the names as they are. `"mouse"`: map each gene to its human ortholog
    (:func:`scdiva.tokenizer.human_orthologs`). For any other species: a dict or pandas Series from your genes (as in
    `var_names` or the column `gene_ids`) to human symbols or Ensembl ids; genes that are missing from it, or map to
    `""` or NaN, are unknown. `var` keeps your names.
""",
    "duplicates": """
duplicates
    What to do with several columns of one gene: `"sum"` adds their counts, `"error"` raises an error. Antibody counts
    named like a gene ("CD4-1") are not added: they are excluded, also from the totals of cells, with a warning.
""",
    "finetuning": """
finetune
    Whether to train all weights of a copy of the model; the given model is not changed. The copy does not keep what
    `tl.adapt` or `tl.integrate` fitted on the previous cell state, nor the reader of `tl.impute`.
epochs
    With `finetune=True`: passes over the training examples. None: as many as show 8,000 of them, between 1 and 250.
lr
    With `finetune=True`: maximum learning rate; new layers learn at ten times this rate. None: 1e-3, and 0.192 / width
    for transformer blocks wider than 192.
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
""",
    "perturbed_cells": """
adata
    Cells × genes, perturbed and control cells, raw counts or log-normalised expression. Each cell is normalised to ten
    thousand counts over all genes, also if it was log-normalised to another total.
""",
    "perturbation_key": """
perturbation_key
    Column of `adata.obs` with the perturbation of each cell: a gene, a label such as a drug, or a combination.
""",
    "control": """
control
    Label of the control cells, or several labels: `["control", "NT1", "NT2"]`. In combinations (`"A+control"`) it is
    ignored. Other labels of negative controls (`NT2`, `NTC_3`, `non-targeting_00013`, `safe-targeting`, `neg_ctrl`,
    `scramble`, `INTERGENIC12`, `unperturbed`) raise an error unless they are listed here or kept by `guides`; the gene
    symbol `CTRL` gives a warning. Other kinds of controls (`AAVS1`, `GFP`, `DMSO`) are not recognised.
""",
    "groupby": """
groupby
    Column of `adata.obs` with groups of cells, such as cell types or cell lines. Changes are measured from the control
    cells of the same group.
""",
    "dose_key": """
dose_key
    Column of `adata.obs` with the dose of each perturbed cell, in any unit.
""",
    "separator": """
separator
    Text between the parts of a combination; `""`: there are no combinations. The order of parts does not matter. A gene
    whose name contains the separator (`HLA-DRA` with `"-"`) is one part.
""",
    "guides": """
guides
    Mapping of guides to genes, or to combinations of genes, if the column contains guides: `{"KLF1g1": "KLF1"}`. A
    guide that is not mapped is a perturbation of its own, with a warning if labels look like several guides of one
    gene. `{"NTC_1": "control"}` maps a guide to the control, and `{"NT1": "NT1"}` keeps a label that looks like a
    control as a perturbation. An empty mapping keeps all labels, without a warning.
""",
    "predicted": """
predicted
    Cells that `scdiva.tl.predict_perturbation` returned, or the adata that it was called on.
""",
    "prediction_key": """
key
    Entry of `uns` with the prediction (`key_added` of the call), if `predicted` is the adata that it was called on.
""",
    "condition": """
condition
    Name of a predicted condition; or its perturbation, by any name of the genes, if it is predicted in one group only.
""",
    "observed": """
observed
    Perturbed cells of the conditions, and control cells, raw counts or log-normalised expression, with the columns of
    `obs` that the prediction was made with. Genes are matched by var names.
""",
    "observed_matrix": """
layer, use_raw
    Matrix of `observed`: a layer, or the matrix and genes of `observed.raw`. By default `X`.
input
    Unit of this matrix: `"counts"`, `"lognorm"` (log1p of counts scaled per cell, to any total), or `"auto"` to infer
    it in one pass over the data.
""",
    "gene_symbols": """
gene_symbols
    Column of `predicted.var` with gene names to show. None: var names.
""",
}
"""Text that replaces the line ``%(name)s`` of a docstring, by name."""
SHARED["reading"] = "".join(SHARED[name] for name in ("layer", "use_raw", "input"))


def with_shared_docs(function: F) -> F:
    """Replace each line ``%(name)s`` of a function's docstring by the shared description of that name.

    KeyError if there is no such description. The function is returned.
    """
    lines = (inspect.getdoc(function) or "").splitlines()  # python -OO removes docstrings
    shared = [SHARED[line[2:-2]].strip() if line.startswith("%(") else line for line in lines]
    function.__doc__ = "\n".join(shared) or None
    return function
