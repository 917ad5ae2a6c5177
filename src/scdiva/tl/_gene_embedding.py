"""Embed genes with a trained model: once and for all, or as groups of cells use them."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from scdiva import _constants as C
from scdiva._docs import with_shared_docs
from scdiva._running import how_to_run, open_for, run_cells
from scdiva._settings import logger
from scdiva.data.conditions import column
from scdiva.data.genes import tokens_of_var
from scdiva.data.reading import Reading, Species
from scdiva.data.writing import check_key, check_writable, write

if TYPE_CHECKING:
    from anndata import AnnData

    from scdiva._running import Running
    from scdiva.data.source import CellSource
    from scdiva.models import ScDiVa

MAX_GROUPS = 100
"""Each takes a table of the genes, 10 MB for 20,000 genes × 128 numbers; hardly any column of groups has more."""
_HELD_TOKENS = 65_536
"""Hidden states that wait to be summed: 128 MB at 512 numbers each."""


@with_shared_docs
def gene_embedding(
    adata: AnnData,
    model: ScDiVa | str | PathLike[str] = C.DEFAULT_MODEL,
    *,
    groupby: str | None = None,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    empty: Literal["error", "nan"] = "error",
    batch_size: int | None = None,
    device: str | None = None,
    precision: Literal["auto", "fp32", "bf16"] | None = None,
    key_added: str = C.VARM_EMBEDDING,
    copy: bool = False,
) -> AnnData | None:
    r"""Embed genes: the model's own vectors of them, or what they become in groups of cells.

    Without `groupby` a gene's embedding is its row of the model's embedding table, the same for all data. With
    `groupby` it is contextual: :math:`\frac{1}{|C_{g}|} \sum_{c \in C_{g}} h_{c,\,g}`, the mean of the gene's final
    hidden states, nothing masked, over the cells of the group in which it is expressed. Of a cell longer than the
    model's `max_length` the transformer sees the first so many genes of the ranking, and for the others the cell does
    not count. Genes are matched to the model's vocabulary by name; columns of the same gene get the same embedding.

    Parameters
    ----------
    adata
        Cells × genes, raw counts or log-normalised expression. It is read once even without `groupby`, since genes are
        weighed by their counts to recognise a wrong list of names.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`.
    groupby
        Column of `adata.obs` that holds the group of each cell; `None` gives static embeddings.
    %(reading)s
    empty, batch_size, device, precision
        As in :func:`embed`. Cells without a known gene have
        no part in any group under `empty="nan"`. Without `groupby` no cell is run.
    key_added
        Key of `adata.varm` to write, or the beginning of the keys.
    copy
        Return a copy of `adata` with the embedding instead of writing into it.

    Returns
    -------
    `None`, or the copy if `copy=True`. Written are, without `groupby`,

    `adata.varm[key_added]`
        float32 `(n_genes, dim)`. NaN for a gene that the vocabulary doesn't hold, or that the model's corpus never saw.
    `adata.uns["scdiva"][f"{key_added}_genes"]`
        The parameters of the call, and the share of genes and counts that the model's vocabulary holds.

    and with it

    `adata.varm[f"{key_added}_groups"]`
        float32 `(n_genes, n_groups, dim)`, NaN where no cell of the group shows the gene. One array, so that the name
        of a group may be any text.
    `adata.varm[f"{key_added}_groups_n_cells"]`
        int32 `(n_genes, n_groups)`, the cells averaged.
    `adata.uns["scdiva"][f"{key_added}_groups"]`
        The same parameters, and the names of the `groups` in the order of the arrays: that of the categories, unused
        ones left out, or of the sorted values.

    :func:`scdiva.get.gene_embedding_df` gives them as data frames.

    Raises
    ------
    KeyError
        If `groupby`, `layer` or `gene_ids` does not exist.
    ValueError
        If a cell has no group, if there are more than 100 groups, or if two have the same name as text; if
        `adata.raw.var_names` repeat names under `use_raw`; or for what :func:`embed` refuses.
    TypeError
        If `adata` is no AnnData object.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> sd.tl.gene_embedding(adata)
    >>> adata.varm["X_scdiva"].shape
    (100, 128)
    """
    check_key(key_added, "key_added")
    entry = f"{key_added}_{C.GENES if groupby is None else C.GROUPS}"
    keys = [key_added] if groupby is None else [entry, f"{entry}_{C.N_CELLS}"]
    check_writable(adata, copy=copy, call="tl.gene_embedding", entry=entry, varm=keys)
    reading = Reading(layer, use_raw, input, gene_ids, species, duplicates)
    running = how_to_run(batch_size, device, precision)._replace(what="genes")
    groups = None if groupby is None else _groups(adata, groupby)
    loaded, source, parameters = open_for(model, adata, running, reading, empty=empty)
    del parameters["pooling"]
    tokens = tokens_of_var(adata, source.tokens, use_raw)
    if groups is None:
        del parameters["precision"]  # nothing is computed
        written = {key_added: _static(loaded, tokens)}
    else:
        codes, names = groups
        parameters |= {"groupby": groupby, "groups": np.array(names, dtype=str)}
        mean, n_cells = _contextual(loaded, source, running, tokens, codes, len(names))
        written = {entry: mean, f"{entry}_{C.N_CELLS}": n_cells}
    if left_out := int((source.lengths == 0).sum()):
        logger.info("%d cells have no known gene and no part in the embedding", left_out)
    return write(adata, "tl.gene_embedding", entry, parameters, copy=copy, varm=written)


def _groups(adata: AnnData, key: str) -> tuple[np.ndarray, list[str]]:
    """Give the number of each cell's group, int (n_obs,), and the names of the groups."""
    import pandas as pd

    of_cell = column(adata, key)
    found = pd.Categorical(adata.obs[key]).remove_unused_categories()
    names = [str(name) for name in found.categories]
    if len(names) > MAX_GROUPS:
        first = ", ".join(map(repr, names[:3]))
        raise ValueError(
            f"adata.obs[{key!r}] has {len(names)} values (such as {first}), more than the {MAX_GROUPS} groups "
            "for which tables of genes are made. Pass a column of clusters or cell types, or some groups at a time: "
            f"adata[adata.obs[{key!r}].isin([...])].copy()"
        )
    if len(names) > len(set(of_cell)):
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"adata.obs[{key!r}] has different values with one spelling, {repeated!r}: make them one with "
            f"adata.obs[{key!r}] = adata.obs[{key!r}].astype(str)"
        )
    return np.asarray(found.codes, dtype=np.int64), names


def _static(model: ScDiVa, tokens: np.ndarray) -> np.ndarray:
    """Take genes' rows of the embedding table; a row that no corpus has touched is still the noise it started from."""
    from scdiva.networks.embedding import seen_tokens

    table = model.embedding.gene.weight.detach().float().cpu().numpy()
    known = (tokens != C.UNKNOWN) & seen_tokens(model)[tokens]
    result = np.full((len(tokens), table.shape[1]), np.nan, dtype=np.float32)
    result[known] = table[tokens[known]]
    return result


def _contextual(
    model: ScDiVa, source: CellSource, running: Running, tokens: np.ndarray, codes: np.ndarray, n_groups: int
) -> tuple[np.ndarray, np.ndarray]:
    """Average final hidden states by gene and group: float32 (n_vars, n_groups, dim), int32 (n_vars, n_groups).

    A running mean: nothing grows with the number of cells, and float32 is enough, since no sum grows either. Cells are
    taken in one order, however many workers there are.
    """
    measured = source.measured_tokens
    row = np.full(source.n_tokens, -1)
    row[measured] = np.arange(len(measured))
    mean = np.zeros((len(measured), n_groups, running.width(model)), dtype=np.float32)
    n_cells = np.zeros((len(measured), n_groups), dtype=np.int32)
    for rows, (indptr, genes, _), results in run_cells(model, source, running, held_tokens=_HELD_TOKENS):
        for cells, hidden in results:
            end = 0
            for cell in cells:
                start = end
                seen = row[genes[indptr[cell] : indptr[cell + 1]][: model.config.max_length]]
                end += len(seen)
                group = codes[rows[cell]]
                n_cells[seen, group] += 1  # a cell holds a gene once
                before = mean[seen, group]
                mean[seen, group] = before + (hidden[start:end] - before) / n_cells[seen, group, None]
    mean[n_cells == 0] = np.nan
    known = tokens != C.UNKNOWN
    return _spread(mean, known, row[tokens[known]], np.nan), _spread(n_cells, known, row[tokens[known]], 0)


def _spread(values: np.ndarray, known: np.ndarray, row: np.ndarray, fill: Any) -> np.ndarray:
    """Give each known column of the data its gene's values."""
    result = np.full((len(known), *values.shape[1:]), fill, dtype=values.dtype)
    result[known] = values[row]
    return result
