"""Expected expression of genes in each cell (`tl.impute`)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from scdiva import _constants as C
from scdiva._checks import check_arguments, refuse_absent
from scdiva._docs import with_shared_docs
from scdiva._rng import seed_of
from scdiva.data.genes import InputOptions, column_tokens, columns_of, input_options, or_in_raw
from scdiva.data.results import check_writable, write
from scdiva.models.inference import model_name, open_cells_for_model, resolve_run_config

if TYPE_CHECKING:
    import torch
    from anndata import AnnData

    from scdiva.data.cells import CellSource
    from scdiva.models import ScDiVa

MAX_VALUES = 250_000_000
"""Maximum number of values (cells × genes) of a result: two float32 arrays of this size take 2 GB."""


@check_arguments
@with_shared_docs
def impute(
    adata: AnnData,
    genes: Sequence[str] | None = None,
    model: ScDiVa | str | PathLike[str] = C.DEFAULT_MODEL,
    *,
    keep_observed: bool = True,
    expressed: bool = False,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    rng: int | np.random.Generator | torch.Generator | None = None,
    device: str | None = None,
    precision: Literal["auto", "fp32", "bf16"] | None = None,
    key_added: str = C.IMPUTED,
    copy: bool = False,
) -> AnnData | None:
    r"""Impute genes: the expected expression in each cell of genes that were not detected, or of all genes.

    Genes are masked a tenth at a time, and each is predicted from the others, so that a gene's dropout does not
    influence its own prediction. With p the probability that a cell with this state and this number of genes expresses
    a gene, and :math:`\mu, \sigma` the mean and standard deviation of its value if so, the result is the logarithm of
    the expected counts, :math:`m = \log(1 + p (e^{\mu + \sigma^2 / 2} - 1))`, the mean of a zero-inflated log-normal
    variable. Its spread, the expected deviation of an observed value from it, is
    :math:`\sqrt{p (\sigma^2 + (\mu - m)^2) + (1 - p) m^2}`. Observed values are kept. Each gene's :math:`\mu` depends
    on the depth of the cell as its observed values do, and its expected counts add up to about the observed ones.

    :math:`p` and :math:`\mu` are predicted by the model's state head. A query head (:class:`scdiva.models.QueryHead`),
    if the model has one, reads the expression of the gene in up to 256 other cells of `adata`: it predicts :math:`p`,
    and :math:`\mu` is the mean of both predictions. Both are then corrected to all cells, gene by gene. For counts, a
    reader (:class:`scdiva.models.reader.Reader`), if the model has one, predicts the expected counts as well, from the
    visible genes and up to 512 other cells: the result is the mean of both logarithms, scaled to the same expected
    counts of each gene. The spread is then that around this result. On twelve held-out studies, the reader increases
    the rank correlation within genes of removed values by 0.027 (95% CI 0.020 to 0.037) and lowers their error by 1.5%,
    at up to three times the runtime. The transformer of masked diffusion is not run.

    **A model that predicts through its transformer alone** (no state head, as in the paper, or a cell state from the
    transformer) imputes by in-painting. A quarter of each cell's positions is masked at a time at their ranks. With
    :math:`p_i(g)` the probability of gene g at masked position i, :math:`v_i` the value predicted there, and s the
    masked share, :math:`m_g = \sum_i p_i(g)` is the probability that g is masked given that it is not visible, and

    .. math::

        p = \frac{m_g}{s + (1 - s)\, m_g}, \qquad \mu = \frac{\sum_i p_i(g)\, v_i}{\sum_i p_i(g)}

    by Bayes' theorem: the mean over the four parts for a gene that was not detected, and from its own part for one that
    was. Expected counts are then corrected gene by gene as above. Of a cell longer than the model's `max_length`, only
    the first `max_length` genes are read.

    An expectation averages over zeros, so it is lower than nearly every observed value. `expressed=True` returns the
    value of a gene given that it is expressed, for genes that are known to have dropped out: the mean of a
    zero-truncated Poisson variable, :math:`\lambda / (1 - e^{-\lambda})`, with :math:`\lambda` the expected counts in
    units of one count: the cell's smallest value, or, if the values are integers but not multiples of it, one by the
    cell's total. For other values, such as TPM, it is :math:`\mu`. The spread is then
    :math:`\sqrt{\sigma^2 + (\mu - m)^2}`.

    Parameters
    ----------
    %(cells)s
    genes
        Names of genes, as in `adata.var_names`, or with `use_raw=True` as in `adata.raw.var_names`, which may contain
        more genes: a table of their values is written. None: all genes of `adata` that the model knows, as two dense
        layers, which take 8 bytes per cell and gene of `adata` (1.6 GB for 10,000 cells × 20,000 genes). The values are
        the same either way; a few genes take less time and memory.
    %(model)s
    keep_observed
        Whether values above zero are kept, with a spread of 0. False: they are replaced by expected values, too.
    expressed
        Whether to return a gene's value given that the cell expresses it, instead of its expectation. This does not
        distinguish dropouts from genes that are not expressed.
    %(reading)s
    rng
        Seed, or a generator. None: `scdiva.settings.seed`. It sets the parts of genes that are masked, the other cells
        that are read and, in large datasets, the cells to which corrections are fitted. With more than 256 cells,
        values therefore depend on the order of the cells about as much as on the seed.
    %(device)s
    key_added
        Name of the result.
    %(copy)s

    Returns
    -------
    None, or the copy. With `genes`, `obsm[key_added]` is a table of float32 `(n_obs, len(genes))` with gene names as
    columns; otherwise `layers[key_added]` is float32 `(n_obs, n_vars)`, NaN for genes that the model does not know.
    Both contain log1p of expected counts per 10,000, and `..._sd` the spread around them; :func:`scdiva.get.imputed_df`
    reads both. An earlier result of the same name is replaced. `uns["scdiva"][key_added]` contains the parameters, and
    in `expressed_as` the result of `expressed=True`: `"Poisson"`, or `"mean"` if values are not multiples of a count;
    `reader`, whether a reader was used.
    Values are normalised over the genes that are read: for a panel that was cut out of log-normalised data they are
    higher than the input, also the observed ones. If several columns belong to one gene, only the column with most
    counts is written.

    Raises
    ------
    ValueError
        If a gene does not exist, is not known to the model, or has a name that is not valid in a file; names repeat,
        there are fewer than 20 cells or a cell without a known gene, the result would be too large, or the matrix is
        not valid for :func:`embed`.
    TypeError
        If `adata` is not an AnnData object, or `genes` are not names.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> gene = adata.var_names[0]
    >>> sd.tl.impute(adata, [gene])
    >>> adata.obsm["scdiva_imputed"].shape
    (60, 1)
    >>> bool((sd.get.imputed_df(adata)[gene] >= 0).all())
    True
    """
    keys = [key_added, f"{key_added}_{C.SD}"]
    # an earlier result in the other form is removed, so both places must be free or written by this call
    check_writable(adata, copy=copy, call="tl.impute", entry=key_added, layers=keys, obsm=keys)
    if not adata.var_names.is_unique:
        raise ValueError("adata.var_names repeat names: call adata.var_names_make_unique() first.")
    reading = input_options(adata, layer, use_raw, input)
    if genes is not None:
        genes = _checked_names(adata, genes, reading)
    n_columns = adata.n_vars if genes is None else len(genes)
    if adata.n_obs * n_columns > MAX_VALUES:
        raise ValueError(
            f"The result would hold {adata.n_obs:,} x {n_columns:,} values, twice. Name "
            f"{'the' if genes is None else 'fewer'} genes that you need: sd.tl.impute(adata, [...])."
        )
    if device is not None or precision is not None:
        resolve_run_config(None, device, precision)  # invalid arguments raise before anything is read

    from scdiva._settings import one_blas_thread, torch_threads_kept
    from scdiva.data.batch import read_cells
    from scdiva.generation.imputation import expected_values, predict_by_state_head, predict_by_transformer
    from scdiva.generation.state_head import on_cpu
    from scdiva.models.pretrained import load_for

    seed = seed_of(rng)
    loaded = load_for(model, "cpu")
    by_transformer = loaded.config.by_transformer
    run_config = resolve_run_config(None, *((device, precision) if by_transformer else ("cpu", "fp32")))
    _, source, parameters = open_cells_for_model(loaded, adata, run_config, reading)
    names, columns = source.var.index.to_numpy(), columns_of(source.tokens, source.scan.counts_per_gene)
    if genes is not None:
        _check_read(genes, names, source, columns)
    mean, deviation = np.full((2, adata.n_obs, n_columns), np.nan, dtype=np.float32)
    with contextlib.ExitStack() as stack:
        if not by_transformer:
            stack.enter_context(on_cpu(loaded))
            stack.enter_context(torch_threads_kept(1))
            stack.enter_context(one_blas_thread())
        cells, rows = read_cells(source, np.zeros(adata.n_obs, dtype=np.int64), all_genes=True, trains=False)
        # column of the result of each measured gene, -1: none
        target = (adata.var_names if genes is None else pd.Index(genes)).get_indexer(names[columns[cells.measured]])
        requested = np.flatnonzero(target >= 0)
        unit = (
            source.value_of_one_count(cells.values, cells.indptr, rows)
            if expressed or loaded.reader is not None
            else None
        )
        for predicted in (
            predict_by_transformer(loaded, cells, rows, requested, seed, run_config)
            if by_transformer
            else predict_by_state_head(loaded, cells, requested, seed, unit)
        ):
            values, spread = expected_values(predicted, expressed, unit)
            is_kept = (predicted.observed > 0) & keep_observed
            index = np.ix_(rows, target[predicted.genes])
            mean[index] = np.where(is_kept, predicted.observed, values)
            deviation[index] = np.where(is_kept, 0, spread)
    parameters |= {
        "model": model_name(model),
        "n_genes": len(requested),
        "keep_observed": bool(keep_observed),
        "expressed": bool(expressed),
        "reader": loaded.reader is not None and unit is not None,
        "expressed_as": "" if not expressed else "mean" if unit is None else "Poisson",
        "seed": str(seed),
    }
    tables: dict[str, Any] = dict(zip(keys, (mean, deviation), strict=True))
    if genes is not None:
        tables = {key: pd.DataFrame(values, index=adata.obs_names, columns=genes) for key, values in tables.items()}
    result = adata.copy() if copy else adata
    for key in keys:
        result.layers.pop(key, None)
        result.obsm.pop(key, None)
    layers, obsm = (tables, {}) if genes is None else ({}, tables)
    write(result, "tl.impute", key_added, parameters, layers=layers, obsm=obsm)
    return result if copy else None


def _checked_names(adata: AnnData, genes: Sequence[str] | str, reading: InputOptions) -> list[str]:
    """Genes without duplicates, if all are names of genes that a file takes as names of columns."""
    genes = [genes] if isinstance(genes, str) else list(genes)
    if not genes:
        raise ValueError("genes is empty; omit it to impute all genes that the model knows.")
    names = reading.var(adata).index
    where = "adata.raw.var_names" if names is not adata.var_names else "adata.var_names"
    if no_text := [name for name in genes if not isinstance(name, str)]:
        raise TypeError(
            f"genes must be names, such as {names[0]!r}, but {len(no_text)} of {len(genes)} are not text (first: "
            f"{type(no_text[0]).__name__}). For a mask or positions pass {where}[genes]."
        )
    genes = list(dict.fromkeys(genes))
    hint = next((or_in_raw(adata, name, reading.use_raw) for name in genes if name not in names), "")
    refuse_absent(genes, names, f"genes are not in {where}", hint, ValueError)
    if unfit := [name for name in genes if "/" in name or name == "_index"]:
        raise ValueError(
            f"{len(unfit)} of {len(genes)} genes have names that h5ad and zarr do not take for a column, the first is "
            f"{unfit[0]!r}: keep ids in a column, adata.var['id'] = adata.var_names, give the genes other names, "
            "adata.var_names = adata.var_names.str.replace('/', '_'), and call sd.pp.match_genes(adata, gene_ids='id')."
        )
    return genes


def _check_read(genes: list[str], names: np.ndarray, source: CellSource, columns: np.ndarray) -> None:
    """Raise ValueError for genes that the model does not know, or whose column is not the one that is read."""
    tokens = column_tokens(source.var, source.vocabulary, source.reading)
    if unknown := [name for name in genes if (tokens[names == name] == C.UNKNOWN).all()]:
        raise ValueError(
            f"the model lacks {len(unknown)} of {len(genes)} genes, the first is {unknown[0]!r}: leave "
            f"{'it' if len(unknown) == 1 else 'them'} out. Genes with a token in adata.var['scdiva_token'] after "
            "sd.pp.match_genes(adata) can be imputed."
        )
    read_names = set(names[columns[columns >= 0]])
    if others := [name for name in genes if name not in read_names]:
        token = int(source.tokens[names == others[0]].max())
        if token == C.UNKNOWN:
            raise ValueError(
                f"{others[0]!r} is read as no gene's RNA: by its name and counts the column holds those of an antibody."
            )
        main_column = names[columns[token]]
        raise ValueError(
            f"{others[0]!r} is one of several columns of a gene, of which {main_column!r} has most counts."
        )
