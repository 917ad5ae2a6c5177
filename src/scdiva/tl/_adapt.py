"""`tl.adapt`: components of the user's cells beside a model's state, weighed without labels."""

from __future__ import annotations

import re
import time
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from scdiva._checks import warn
from scdiva._constants import DEFAULT_MODEL
from scdiva._docs import with_shared_docs
from scdiva._labels import batch_numbers
from scdiva._rng import seed_of
from scdiva._settings import logger, settings, torch_threads_kept
from scdiva.data.cells import open_cells
from scdiva.data.reading import Reading, Species
from scdiva.data.writing import check_anndata

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from anndata import AnnData
    from torch import Tensor

    from scdiva.models import ScDiVa
    from scdiva.train.adaptation import AdaptationCells

MOST_CELLS = 50_000
"""Most cells that are fitted to; of more, so many are drawn."""
LIKELY = re.compile(
    r"(^|[._ ])(batch|donor|patient|subject|individual|sample|library|assay|chemistry|technology|tech|platform|"
    r"protocol|method|plate|lane|run|replicate|study|dataset|site)s?([._ ]?(id|name|key|\d+))?$",
    re.IGNORECASE,
)
"""Columns of `obs` that are likely to name batches."""
MOST_BATCHES = 100
LOOKED_AT = 1000
"""Cells whose neighbours are looked at."""
APART = 0.5
"""Share of the way from chance (0) to batches entirely apart (1) from which on it is said."""


@with_shared_docs
def adapt(
    adata: AnnData,
    model: ScDiVa | str | PathLike[str] = DEFAULT_MODEL,
    *,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    batch_key: str | None = None,
    rng: int | np.random.Generator | torch.Generator | None = None,
    device: str | None = None,
) -> ScDiVa:
    r"""Fit a model's embedding to your own cells, without labels.

    Up to 20 principal components of these cells (within batches, shrunk by the noise in them) are joined to the
    model's cell state, :math:`[z,\; a\,x / \sqrt{\lVert x \rVert}]`: what the corpus did not teach of a tissue
    comes in with x, what these cells alone are too few to show stays with z. They are made of the 2,000 genes of
    the highest dispersion and of scanpy's 2,000 highly variable ones; those that fewer than 20 cells make, such as
    outliers, are left out, so that z alone distinguishes a rarer type. Each cell's are divided by the root of their
    length: neighbours then share what they express more than how deep they were sequenced. How much x counts is
    chosen by count splitting [1]_: each cell's counts are split by chance, and weights are compared by how well a
    cell's 10 nearest neighbours by four fifths of the counts, within the batch, predict the expression in the last
    fifth. The components that judge a cell are fitted to others. Compared are the model's state alone, the
    components alone, and seven weights between; of those within two standard errors of the best, the one nearest to
    1.5 is taken. Nothing is trained.

    All cells are read, by blocks of rows, backed or not; twice where the matrix is beyond 128 MiB, first to check it.
    Of more than 50,000 cells so many are drawn, and only these are held in memory, 8 bytes per value above zero:
    components are fitted to them, and 5,000 of them judge. Cell states, the state head and the transformer stay those
    of the model: what :func:`impute` or :func:`generate` find with the new model is what they find with the given one.

    Parameters
    ----------
    adata
        Cells × genes, raw counts or log-normalised expression; not changed. Cells without a known gene are left out,
        with a warning.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`; not changed. Own components
        that it has already are replaced.
    %(reading)s
    batch_key
        Column of `adata.obs` with the batch of each cell. Components and neighbours are then taken within batches, so
        that what only tells batches apart does not count.
    rng
        Seed of the splits and of the draw of cells; None takes `scdiva.settings.seed`. Global random state is never
        touched. On a CPU the same seed gives the same model.
    device
        Torch device to compute on; None takes `scdiva.settings.device`. The model returned stays there.

    Returns
    -------
    A new model for `model=` of every tool, to be kept by `new.save(folder)`. It embeds these cells and later ones of
    the same tissue. Its `adaptation`, which is saved with it, is a plain dict: `chosen` (`"model"`, `"joined"` or
    `"own"`), `weight` (of the components, in units of the state's spread within batches; None: they stand alone),
    `n_components`, `agreement` (mean correlation of predicted and observed expression: of `"model"`, `"own"` and
    `"chosen"`), `weights` and `agreements` (all that were compared), `n_cells`, `n_judged`, `n_batches`, `seconds` and
    `seed`.

    Raises
    ------
    ValueError
        If the batch of a cell is missing, fewer than 20 cells have a known gene, the model has integrated batches, or
        the matrix is refused as by :func:`embed`.
    KeyError
        If `layer`, `gene_ids` or `batch_key` does not exist.
    TypeError
        If `adata` is no AnnData object.

    Warns
    -----
    UserWarning
        If no `batch_key` is given and the cells fall apart along a column of `adata.obs` that is likely to name
        batches.

    References
    ----------
    .. [1] Batson, Royer and Webber, Molecular cross-validation for single-cell RNA-seq, bioRxiv 2019.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> own = sd.tl.adapt(adata)
    >>> sd.tl.embed(adata, own)
    >>> own.adaptation["chosen"] in ("model", "joined", "own")
    True
    """
    begun = time.monotonic()
    check_anndata(adata)
    reading = Reading(layer, use_raw, input, gene_ids, species, duplicates)
    target = settings.resolve_device(device)
    batch = batch_numbers(adata, batch_key)

    from scdiva.models.inference import runs_transformer
    from scdiva.models.pretrained import load_for
    from scdiva.train.adaptation import read_cells
    from scdiva.train.own_components import MOST_JUDGED, WEIGHTS, compare_weights, sampled, with_own_components

    seed = seed_of(rng)
    given = load_for(model, target)
    if given.integration is not None:
        raise ValueError("This model has integrated batches, and adapting would change their states. Adapt first.")
    cells, rows = read_cells(open_cells(adata, given, reading, empty="nan"), batch, most=MOST_CELLS, seed=seed)
    given = given.to(target)
    with torch_threads_kept(None if runs_transformer(given) else 1):  # products of the set encoder are too small
        agreement = compare_weights(given, cells, seed)
        weight = WEIGHTS[agreement.chosen]
        sample = sampled(given, cells)
        new = with_own_components(given, cells, weight, sample)
        if batch_key is None:
            _warn_of_batches(new, *sample, adata.obs.iloc[rows[:: -(-len(rows) // MOST_JUDGED)]], seed)
    chosen = "model" if new.own is None else new.config.adapted
    agreements = agreement.found.tolist()
    found: dict[str, Any] = {
        "chosen": chosen,
        "weight": None if chosen == "own" else weight,
        "n_components": 0 if new.own is None else new.config.adapted_dim,
        "agreement": {"model": agreements[0], "own": agreements[-1], "chosen": agreements[agreement.chosen]},
        "weights": [None if np.isinf(one) else one for one in WEIGHTS],
        "agreements": agreements,
        "n_cells": cells.n_cells,
        "n_judged": agreement.n_cells,
        "n_batches": cells.n_batches,
        "seconds": time.monotonic() - begun,
        "seed": str(seed),
    }
    metadata = getattr(given, "metadata", None) or {}
    object.__setattr__(new, "metadata", {**metadata, "adaptation": found})
    logger.info("adapted: %s, weight %s", chosen, found["weight"])
    return new


def _warn_of_batches(model: ScDiVa, cells: AdaptationCells, states: Tensor, obs: pd.DataFrame, seed: int) -> None:
    """Say so if cells that lie together share a column that is likely to name batches."""
    likely = {name: obs[name] for name in obs if isinstance(name, str) and LIKELY.search(name)}
    likely = {name: column for name, column in likely.items() if 1 < column.nunique() <= MOST_BATCHES}
    if not likely:
        return
    from sklearn.neighbors import NearestNeighbors

    some = np.sort(np.random.default_rng([seed, 2]).permutation(cells.n_cells)[:LOOKED_AT])
    embedding, device = states[some], next(model.parameters()).device
    if model.own is not None:
        embedding = model.own(embedding.to(device), *cells.take(some).to(device).packed)
    finder = NearestNeighbors(n_neighbors=min(15, len(some) - 1)).fit(embedding.numpy(force=True))
    near = finder.kneighbors(return_distance=False)
    found = []
    for name, values in likely.items():
        _, number = np.unique(values.astype(str).to_numpy()[some], return_inverse=True)
        chance = float(np.square(np.bincount(number) / len(number)).sum())
        same = float((number[near] == number[:, None]).mean())
        found.append(((same - chance) / max(1 - chance, 1e-12), same, chance, name))
    apart, shared, expected, name = max(found, key=lambda one: one[0])
    if apart > APART:
        warn(
            f"{shared:.0%} of a cell's nearest neighbours share its adata.obs[{name!r}], {expected:.0%} would by "
            f"chance: if that is technical, adapt within it, tl.adapt(adata, batch_key={name!r})."
        )
