"""What genes would be expected to show in a cell, and what those that dropped out would have shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from scdiva import _constants as C
from scdiva._docs import with_shared_docs
from scdiva._nearest import or_nearest
from scdiva._progress import progress_bar
from scdiva.data.reading import Reading, Species
from scdiva.data.writing import check_writable, noted
from scdiva.tl._notes import model_name, seed_of

if TYPE_CHECKING:
    import torch
    from anndata import AnnData

    from scdiva.models import ScDiVa
    from scdiva.train.adaptation import AdaptationCells

BATCH = 256
"""Cells that are read at once, then genes."""
N_FOLDS = 10
"""Parts of the genes that are hidden in turn."""
RIDGE = 100.0
"""Penalty on corrections to what the model expects, in cells. The error of held-out counts falls up to 300 on PBMC and
on Kang's cells, and up to 30 on toy cells, unlike any it saw. To generate, where variance counts, 3 is better."""
KNOWN = 2000
"""Genes, those found in most cells, by which the depth of a cell is estimated."""
FEW = 10
"""Cells that show a gene, at which half of what they say of its mean, and of its values in shallow cells, is taken."""
LEAST_COUNT = 1e-6
"""Expected counts below this are taken for it: what is expected of one that is there no longer depends on it."""
MOST_VALUES = 250_000_000
"""Values of a result (cells × genes): two such take 2 GB."""


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
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    rng: int | np.random.Generator | torch.Generator | None = None,
    key_added: str = C.IMPUTED,
    copy: bool = False,
) -> AnnData | None:
    r"""Expect the values of genes in each cell, given the cell: those that dropped out, and those observed.

    Genes are hidden a tenth at a time, and each is expected by what the others say of the cell: its state is read from
    them, so that a gene which dropped out does not speak for its own absence. With p the probability that a cell of
    this state, and of this many genes, shows a gene, and :math:`\mu, \sigma` mean and standard deviation of its value
    where it does, what is written is the logarithm of the expected counts,
    :math:`m = \log(1 + p (e^{\mu + \sigma^2 / 2} - 1))`, a log-normal variable with a zero beside it, and by how much
    an observed value would differ from it, :math:`\sqrt{p (\sigma^2 + (\mu - m)^2) + (1 - p) m^2}`. Values that were
    observed are kept. Each gene's :math:`\mu` follows the depth of the cells as its observed values do, and its
    expected counts add up to those observed.

    :math:`p` and :math:`\mu` are predicted by the model's state head; where the model has a query head
    (:class:`scdiva.nn.QueryHead`), which reads what up to 256 other cells of `adata` show of the gene, it predicts
    :math:`p`, and :math:`\mu` is the mean of what the two predict. Both are then corrected by all cells
    (:func:`scdiva.populations.corrections.fit_population`). The transformer is not run: where it is not given the ranks
    of hidden genes, its error in their values is larger than that of gene means.

    An expectation counts zeros as often as they occur, so it lies below nearly every value that is seen. With
    `expressed=True` it is asked instead what a gene shows where it does show, one that is known to be there and dropped
    out: the counts expected of a Poisson variable that is not zero, :math:`\lambda / (1 - e^{-\lambda})`, with
    :math:`\lambda` the expected counts, of which one is the cell's smallest value. Of values that are no multiples of
    that, such as TPM, it is :math:`\mu`. The spread is then :math:`\sqrt{\sigma^2 + (\mu - m)^2}`.

    Parameters
    ----------
    adata
        Cells × genes, raw counts or log-normalised expression.
    genes
        Names of genes, as in `adata.var_names`: a table of their values is written. None: all that the model knows, as
        dense layers. The values are the same either way; a few genes take less time and memory.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`; with a state head.
    keep_observed
        Whether values above zero stay what they are, with a spread of 0; False: they too are expected ones.
    expressed
        Whether to give a gene's value if the cell expresses it, in the place of its expectation: for genes that are
        known to have dropped out. It does not tell missed genes from absent ones, so leave it where that is asked.
    %(reading)s
    rng
        Seed, or a generator; None takes `scdiva.settings.seed`. It draws the cells fitted to, where there are many.
    key_added
        Name of what is written.
    copy
        Whether to return a copy with the result instead of writing it to `adata`.

    Returns
    -------
    None, or the copy. Where `genes` are named, `obsm[key_added]`, a table of float32 `(n_obs, len(genes))` with their
    names as columns; else `layers[key_added]`, float32 `(n_obs, n_vars)`, NaN for genes that are not known to the
    model. Either holds log1p of expected counts (with `expressed=True` of those expected where there is one), and
    `..._sd` beside it the spread around them: :func:`scdiva.get.imputed_df` reads both. An earlier result of that name
    is replaced. `uns["scdiva"][key_added]`, the arguments, and as `expressed_as` what `expressed=True` gave:
    `"Poisson"`, or `"mean"` where values are no multiples of a count. Values are to 10,000 a cell over the genes that
    are read, log1p: those of a panel that was cut out of log-normalised data come out higher than they went in,
    observed ones too. Of several columns of one gene only that with most counts is written.

    Raises
    ------
    ValueError
        If a gene is not there or not known to the model, or is named as no column of a file can be; names repeat, the
        model has no state head, fewer than 20 cells or a cell without a known gene are given, the result would be too
        large, or the matrix is refused as by :func:`embed`.
    TypeError
        If `adata` is no AnnData object.

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
    # an earlier result of the other form is taken away, so both have to be free or ours
    check_writable(adata, copy=copy, call="tl.impute", entry=key_added, layers=keys, obsm=keys)
    if genes is not None:
        genes = [genes] if isinstance(genes, str) else list(dict.fromkeys(genes))
        if not genes:
            raise ValueError("genes names no gene; leave it out to impute all that the model knows.")
    if not adata.var_names.is_unique:
        raise ValueError("adata.var_names repeat names: call adata.var_names_make_unique() first.")
    reading = Reading(layer, use_raw, input, gene_ids, species, duplicates)
    if genes is not None:
        _check_named(adata, genes)
    n_columns = adata.n_vars if genes is None else len(genes)
    if adata.n_obs * n_columns > MOST_VALUES:
        raise ValueError(
            f"The result would hold {adata.n_obs:,} x {n_columns:,} values, twice. Name "
            f"{'the' if genes is None else 'fewer'} genes that you need: sd.tl.impute(adata, [...])."
        )

    from scdiva._scale import one_count
    from scdiva._threads import torch_threads_kept
    from scdiva.data.cells import open_cells
    from scdiva.data.genes import columns_of
    from scdiva.models.pretrained import load_for
    from scdiva.populations.states import check_head, dense, on_cpu
    from scdiva.tl._training_cells import training_cells

    seed = seed_of(rng)
    loaded = load_for(model, "cpu")
    check_head(loaded)
    source = open_cells(adata, loaded, reading)
    columns = columns_of(source.tokens, source.scan.counts_per_gene)
    names = reading.var(adata).index.to_numpy()
    if genes is not None:
        _check_known(genes, names, source.tokens, columns)
    with on_cpu(loaded), torch_threads_kept(1):
        cells, rows = training_cells(source, loaded, np.zeros(adata.n_obs, dtype=np.int64), whole=True)
        measured = cells.measured.astype(np.int64)
        # where each measured gene goes in the result; -1: nowhere
        target = (adata.var_names if genes is None else pd.Index(genes)).get_indexer(names[columns[measured]])
        own = np.flatnonzero(target >= 0)
        chance, value = np.empty((2, cells.n_cells, len(own)), dtype=np.float32)
        width = np.empty(len(own), dtype=np.float32)
        depth = np.empty(cells.n_cells, dtype=np.float32)
        for some, found in _parts(loaded, cells, measured, own, seed):
            chance[:, some], value[:, some], width[some], depth = found
    one = one_count(cells.values, cells.indptr) if expressed else None
    shown = _if_expressed(one) if expressed else None
    mean, deviation = np.full((2, adata.n_obs, n_columns), np.nan, dtype=np.float32)
    for start in range(0, len(own), BATCH):
        part = slice(start, start + BATCH)
        observed = dense(cells, measured[own[part]])
        expected, spread = _expected(chance[:, part], value[:, part], width[part], depth, observed, shown)
        kept = (observed > 0) & keep_observed
        place = np.ix_(rows, target[own[part]])
        mean[place], deviation[place] = np.where(kept, observed, expected), np.where(kept, 0, spread)
    result = adata.copy() if copy else adata
    for key, values in zip(keys, (mean, deviation), strict=True):
        result.layers.pop(key, None)
        result.obsm.pop(key, None)
        if genes is None:
            result.layers[key] = values
        else:
            result.obsm[key] = pd.DataFrame(values, index=result.obs_names, columns=genes)
    parameters = {
        "model": model_name(model),
        "vocabulary": loaded.vocabulary.fingerprint,
        **reading.parameters(),
        "input": source.kind,
        "n_genes": len(own),
        "keep_observed": bool(keep_observed),
        "expressed": bool(expressed),
        "expressed_as": "" if not expressed else "mean" if one is None else "Poisson",
        "seed": str(seed),
    }
    result.uns[C.UNS] = noted(
        result, "tl.impute", key_added, parameters, **{"layers" if genes is None else "obsm": keys}
    )
    return result if copy else None


def _check_named(adata: AnnData, genes: list[str]) -> None:
    """Raise ValueError for genes that are not there, or can't be columns of a table."""
    if absent := [name for name in genes if name not in adata.var_names]:
        raise ValueError(
            f"{len(absent)} of {len(genes)} genes are not in adata.var_names, the first is {absent[0]!r}"
            f"{or_nearest(str(absent[0]), adata.var_names)}."
        )
    if unfit := [name for name in genes if "/" in name or name == "_index"]:
        raise ValueError(
            f"{len(unfit)} of {len(genes)} genes have names that h5ad and zarr do not take for a column, the first is "
            f"{unfit[0]!r}: keep ids in a column, adata.var['id'] = adata.var_names, give the genes other names, "
            "adata.var_names = adata.var_names.str.replace('/', '_'), and pass gene_ids='id'."
        )


def _check_known(genes: list[str], names: np.ndarray, tokens: np.ndarray, columns: np.ndarray) -> None:
    """Raise ValueError for genes that the model does not know, or that another column stands for."""
    known = set(names[columns[columns >= 0]])
    if not (unknown := [name for name in genes if name not in known]):
        return
    first = unknown[0]
    token = int(tokens[names == first].max(initial=-1))
    if token >= 0:
        raise ValueError(
            f"{first!r} is one of several columns of one gene, of which {names[columns[token]]!r} has most counts: "
            "name that one."
        )
    raise ValueError(f"the model does not know {len(unknown)} of {len(genes)} genes, the first is {first!r}.")


def _parts(
    model: ScDiVa, cells: AdaptationCells, measured: np.ndarray, own: np.ndarray, seed: int
) -> Iterator[tuple[np.ndarray, tuple[np.ndarray, ...]]]:
    """Hide a tenth of the genes at a time, and predict those of them that are asked for, int64 `own` of `measured`.

    Gives which of them, and the probability that a cell expresses each, its value there, `(n, k)`, the spread of the
    value, `(k,)`, and the depth of the cells, `(n,)`.
    """
    from scipy.special import expit

    from scdiva.populations.corrections import fit_population
    from scdiva.populations.states import (
        CONTEXT,
        context_of,
        corrected,
        dense,
        depth_of,
        drawn,
        fit_to,
        predicted,
        states_of,
        without,
    )  # fmt: skip

    n, draw = cells.n_cells, np.random.default_rng(seed)
    fold = draw.permutation(np.arange(len(measured)) % N_FOLDS)
    around = np.sort(draw.permutation(n)[:CONTEXT])
    cells_around, among = cells.subset(around), np.full(n, -1)
    among[around] = np.arange(len(around))

    whole = states_of(model, cells)
    often = np.bincount(cells.tokens, minlength=int(measured.max()) + 1)[measured]
    known = np.sort(measured[np.argsort(-often, kind="stable")[:KNOWN]])
    depth = depth_of(fit_to(model, cells, whole, draw, known, RIDGE), cells, whole)

    fitted_rows = drawn(n, len(measured) // N_FOLDS, draw)
    asked = [number for number in range(N_FOLDS) if (fold[own] == number).any()]
    for number in progress_bar(asked, desc="imputing", unit="part of the genes"):
        part = np.flatnonzero(fold[own] == number)
        genes = measured[own[part]]
        states = states_of(model, without(cells, measured[fold == number]))._replace(own=among)
        context = None if model.query_head is None else context_of(model, cells_around, whole.take(around), genes)
        log_odds, value = predicted(model, genes, states, context)
        if context is not None:
            # Of values the mean of both heads: of three studies held out the query head's were far better in one, of
            # cells beside nuclei, and worse in two.
            value = np.float32(0.5) * (value + predicted(model, genes, states)[1])
        population = fit_population(
            states.state[fitted_rows],
            (log_odds + depth.odds[:, None])[fitted_rows],
            (value + depth.value[:, None])[fitted_rows],
            dense(cells.subset(fitted_rows), genes),
            draw,
            RIDGE,
            depth_known=True,
        )
        log_odds, value = corrected(population, states, log_odds, value)
        yield part, (expit(log_odds + depth.odds[:, None]), value, population.spread, depth.value)


def _expected(
    chance: np.ndarray,
    value: np.ndarray,
    width: np.ndarray,
    depth: np.ndarray,
    observed: np.ndarray,
    shown: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Give expected values, or those `shown` where a gene is expressed, and how far observed ones would be from them.

    Values of the genes that a shallow cell shows are high, for one count is a large share of it: so it is of genes of
    few counts, not of abundant ones, and each gene has a slope of its own. And the expected counts of a gene add up to
    those observed.
    """
    there = observed > 0
    often = there.sum(axis=0)
    mean_depth = depth.mean()
    beyond = (depth - mean_depth)[:, None].astype(np.float32)
    value = value + np.float32(mean_depth)
    least = FEW * np.square(beyond).mean() + 1e-9
    slope = (np.where(there, observed - value, 0) * beyond).sum(axis=0) + least
    slope /= (there * np.square(beyond)).sum(axis=0) + least
    value = np.maximum(value + slope * beyond, 0)

    # the mean of a log-normal variable, of which the logarithm is what a head tells
    more = np.square(width) / 2
    counted = np.expm1(observed).sum(axis=0) + chance.sum(axis=0)
    raised = np.log(counted / (chance * np.exp(value + more)).sum(axis=0))
    # of a gene that few cells show, its counts say little
    value = np.maximum(value + often / (often + FEW) * raised, 0)
    mean = np.log1p(chance * np.expm1(value + more))
    if shown is not None:
        mean = shown(mean, value)
        return mean, np.sqrt(np.square(width) + np.square(value - mean))
    spread = np.sqrt(chance * (np.square(width) + np.square(value - mean)) + (1 - chance) * np.square(mean))
    return mean, spread


def _if_expressed(one: np.ndarray | None) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Make what turns expectations, and values where genes are expressed, into what is shown where a count is."""

    def shown(mean: np.ndarray, value: np.ndarray) -> np.ndarray:
        if one is None:
            return value
        unit = one[:, None]
        rate = np.maximum(np.expm1(mean) / unit, LEAST_COUNT)
        expected: np.ndarray = np.log1p(unit * rate / -np.expm1(-rate)).astype(np.float32)
        return expected

    return shown
