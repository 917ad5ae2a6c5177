"""`tl.adapt`: joint principal components of a dataset and of a model's cell state, without labels."""

from __future__ import annotations

import re
import time
from os import PathLike
from typing import TYPE_CHECKING, Literal

import numpy as np

from scdiva._checks import check_arguments, warn
from scdiva._constants import DEFAULT_MODEL
from scdiva._docs import with_shared_docs
from scdiva._labels import batch_numbers
from scdiva._rng import seed_of
from scdiva._settings import logger, settings, torch_threads_kept
from scdiva.data.cells import open_cells
from scdiva.data.genes import input_options
from scdiva.data.results import check_anndata

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from anndata import AnnData
    from torch import Tensor

    from scdiva.data.batch import InMemoryCells
    from scdiva.models import ScDiVa

MOST_CELLS = 50_000
"""Maximum number of cells to fit to; larger datasets are subsampled."""
LIKELY = re.compile(
    r"(^|[._ ])(batch|donor|patient|subject|individual|sample|library|assay|chemistry|technology|tech|platform|"
    r"protocol|method|plate|lane|run|replicate|study|dataset|site)s?([._ ]?(id|name|key|\d+))?$",
    re.IGNORECASE,
)
"""Names of columns of `obs` that are likely to be batches."""
MOST_BATCHES = 100
N_TESTED = 1000
"""Number of cells whose neighbours are compared."""
SEPARATION = 0.5
"""Separation of batches, from chance (0) to complete (1), above which there is a warning."""


@check_arguments
@with_shared_docs
def adapt(
    adata: AnnData,
    model: ScDiVa | str | PathLike[str] = DEFAULT_MODEL,
    *,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    batch_key: str | None = None,
    rng: int | np.random.Generator | torch.Generator | None = None,
    device: str | None = None,
) -> ScDiVa:
    r"""Adapt the embedding of a model to a dataset, without labels.

    The new model embeds a cell in 20 dimensions, which are computed in these steps:

    1. 50 principal components of the dataset: of the log-normalised expression of the 2,000 highly variable genes
       (:func:`scanpy.pp.highly_variable_genes`) that the model has a token for, centred, each cell scaled to length 1.
    2. 50 principal components of the model's cell state.
    3. The 50 joint principal components of both, each block scaled to unit total variance, the second with weight 0.7.
    4. The 20 directions with the largest ratio of the variance over all cells to the variance within neighbourhoods of
       15 cells, scaled to the latter (linear discriminant analysis with neighbourhoods in the place of classes).

    The first block describes the variation in these cells, the second what the model learned from its corpus. Nothing
    is trained. A cell's embedding does not depend on other cells.

    All cells are read by blocks of rows; twice if the matrix is larger than 128 MiB, first to check it. At most 50,000
    cells are sampled and held in memory, 8 bytes per nonzero value; cell states are computed for 5,000 of them. No
    dense matrix of cells × genes is made. Cell states, the state head and the transformer do not change: :func:`impute`
    or :func:`generate` give the same results with both models.

    There are at most as many components as cells minus batches. All known genes are used if there are fewer than
    2,000.

    Parameters
    ----------
    adata
        Cells × genes, raw counts or log-normalised expression; not changed. Cells without a known gene are ignored,
        with a warning.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`; not changed. Components of
        an earlier adaptation are replaced.
    %(reading)s
    batch_key
        Column of `adata.obs` with the batch of each cell. All covariances are then computed within batches, so that
        differences between batches give no component. Highly variable genes are selected within batches if each batch
        has at least 20 cells. Embedding later cells requires no batch.
    rng
        Seed for sampling 50,000 of more cells. None: `scdiva.settings.seed`. The global random state is neither read
        nor changed. On a CPU the same seed gives the same model.
    device
        Torch device. None: `scdiva.settings.device`. The returned model stays on it.

    Returns
    -------
    A new model for `model=` of every tool, which embeds these cells and later cells of the same tissue;
    :meth:`new.save(folder) <scdiva.models.ScDiVa.save>` saves it. Its `adaptation`, which is saved with it, is a dict
    of `n_components` (width of the embedding), `n_genes` (number of genes of the components), `ratio` (variance of each
    dimension relative to the variance within neighbourhoods), `n_cells`, `n_batches`, `seconds` and `seed`.

    Raises
    ------
    ValueError
        If the batch of a cell is missing, fewer than 20 cells have a known gene, the cells are identical within
        batches, the model has integrated batches, or the matrix is invalid as for :func:`embed`.
    KeyError
        If `layer`, `batch_key` or the column of gene names does not exist.
    TypeError
        If `adata` is not an AnnData object.

    Warns
    -----
    UserWarning
        If no `batch_key` is given and the cells separate by a column of `adata.obs` that is likely to be a batch.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> adapted = sd.tl.adapt(adata)
    >>> sd.tl.embed(adata, adapted)
    >>> adata.obsm["X_scdiva"].shape
    (60, 20)
    """
    start_time = time.monotonic()
    check_anndata(adata)
    reading = input_options(adata, layer, use_raw, input)
    target = settings.resolve_device(device)
    batch = batch_numbers(adata, batch_key)

    from scdiva.data.batch import read_cells
    from scdiva.embedding.dataset_pcs import sampled_states, with_dataset_components
    from scdiva.models.inference import runs_transformer
    from scdiva.models.pretrained import load_for

    seed = seed_of(rng)
    pretrained = load_for(model, target)
    if pretrained.integration is not None:
        raise ValueError(
            "This model has integrated batches, and adapting would change their states. Adapt the model that it came "
            "from: tl.adapt(adata), and integrate with the result, tl.integrate(adata, batch_key, model=adapted)."
        )
    cells, rows = read_cells(
        open_cells(adata, pretrained, reading, empty="nan"), batch, max_cells=MOST_CELLS, seed=seed
    )
    pretrained = pretrained.to(target)
    with torch_threads_kept(None if runs_transformer(pretrained) else 1):  # the set encoder is too small for threads
        sample = sampled_states(pretrained, cells)
        new, notes = with_dataset_components(pretrained, cells, sample)
        if batch_key is None:
            _warn_of_batches(new, cells, sample, adata.obs.iloc[rows], seed)
    notes |= {
        "n_cells": cells.n_cells,
        "n_batches": cells.n_batches,
        "seconds": time.monotonic() - start_time,
        "seed": str(seed),
    }
    metadata = getattr(pretrained, "metadata", None) or {}
    object.__setattr__(new, "metadata", {**metadata, "adaptation": notes})
    logger.info("adapted: %s components of %s genes", notes["n_components"], notes["n_genes"])
    return new


def _warn_of_batches(
    model: ScDiVa, cells: InMemoryCells, sample: tuple[np.ndarray, Tensor], obs: pd.DataFrame, seed: int
) -> None:
    """Warn if neighbouring cells share the values of a column that is likely to be a batch."""
    likely = {name: obs[name] for name in obs if isinstance(name, str) and LIKELY.search(name)}
    likely = {name: column for name, column in likely.items() if 1 < column.nunique() <= MOST_BATCHES}
    if not likely:
        return
    from sklearn.neighbors import NearestNeighbors

    rows, states = sample
    chosen = np.sort(np.random.default_rng([seed, 2]).permutation(len(rows))[:N_TESTED])
    tested, device = rows[chosen], next(model.parameters()).device
    assert model.dataset_components is not None
    embedding = model.dataset_components(states[chosen].to(device), *cells.take(tested).to(device).packed)
    finder = NearestNeighbors(n_neighbors=min(15, len(tested) - 1)).fit(embedding.numpy(force=True))
    near = finder.kneighbors(return_distance=False)
    scores = []
    for name, values in likely.items():
        _, number = np.unique(values.astype(str).to_numpy()[tested], return_inverse=True)
        chance = float(np.square(np.bincount(number) / len(number)).sum())
        same = float((number[near] == number[:, None]).mean())
        scores.append(((same - chance) / max(1 - chance, 1e-12), same, chance, name))
    separation, shared, expected, name = max(scores, key=lambda score: score[0])
    if separation > SEPARATION:
        warn(
            f"{shared:.0%} of a cell's nearest neighbours share its adata.obs[{name!r}], {expected:.0%} would by "
            f"chance: if that is technical, adapt within it, tl.adapt(adata, batch_key={name!r})."
        )
