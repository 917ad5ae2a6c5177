"""`tl.integrate`: an embedding corrected for batch effects, and a model that embeds later cells likewise."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from scdiva import _constants as C
from scdiva._checks import check_least, refuse_absent, warn
from scdiva._docs import with_shared_docs
from scdiva._labels import batch_numbers, label_numbers
from scdiva._rng import seed_of
from scdiva._running import embed_all, how_to_run, model_name, open_for
from scdiva._settings import logger, torch_threads_kept
from scdiva.data.genes import column_tokens
from scdiva.data.reading import Reading, Species
from scdiva.data.writing import check_writable, write
from scdiva.tl._corrected import LACK, predict_within

if TYPE_CHECKING:
    import torch
    from anndata import AnnData

    from scdiva.models import ScDiVa

CONFOUNDED = 0.5
"""Cramér's V of batch and label above which a warning is given."""


@with_shared_docs
def integrate(
    adata: AnnData,
    batch_key: str | Sequence[str],
    labels_key: str | None = None,
    *,
    model: ScDiVa | str | PathLike[str] = C.DEFAULT_MODEL,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    unlabeled_category: str | None = None,
    steps: int = 1000,
    corrected: bool | Sequence[str] = False,
    layer_added: str = C.CORRECTED,
    key_added: str = C.OBSM_INTEGRATED,
    rng: int | np.random.Generator | torch.Generator | None = None,
    device: str | None = None,
) -> ScDiVa:
    r"""Integrate batches, with or without labels, and return a model that embeds later cells in the same space.

    A head is put on the model, which stays as it is. It maps the state of a cell, and a projection of its genes fitted
    on these cells (principal components within batches), to an integrated state. It learns by

    - denoising: of the whole cell, and of the cell with each gene left out with probability t ~ U(0, 0.3), it is to
      give the state of the whole cell, corrected for batch effects cluster by cluster [1]_;
    - gradient reversal: a discriminator predicts the batch from the integrated state, and its gradient, reversed,
      removes what predicts it beyond how often each batch is met among similar cells (paper, section on batch
      integration; schedule of [2]_);
    - with labels, supervised contrast of the labelled cells [3]_; clusters then never join two labels;
    - without, contrast of pairs: each cell against the others, beside the same cell with genes left out and a partner
      in another batch, one of its mutual nearest neighbours [4]_ among the corrected states. Similar cells (such
      neighbours, and cosines of those states above 0.85) are not pushed apart.

    The head is given no batch. A cell gets the same state in whatever company it comes, and cells of a batch never
    seen are mapped without refitting: `tl.embed(query, model)`.

    Parameters
    ----------
    adata
        Cells × genes, raw counts or log-normalised expression.
    batch_key
        Column of `adata.obs` with the batch of each cell, or several, all of which are corrected for.
    labels_key
        Column of `adata.obs` with cell types, of all cells or of some.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`; not changed.
    %(reading)s
    unlabeled_category
        Value of `labels_key` that means "no label", as a missing value always does.
    steps
        Most steps of training, of 256 cells. The reversal rises in the first quarter. Once the other losses no longer
        fall, the learning rate does, in half of the steps, and training ends; weights are averaged over the last steps.
        Products are in bfloat16 where the device multiplies it in hardware and `scdiva.settings.precision` allows it,
        weights and losses in float32.
    corrected, layer_added
        Deprecated: call :func:`corrected_expression` after this. Also write corrected expression to
        `adata.layers[layer_added]`: True, of all genes that the model knows, or the names of some; NaN elsewhere.
    key_added
        Key of `adata.obsm` to write.
    rng
        Seed of clusters, order, thinning and initial weights; None takes `scdiva.settings.seed`. Global random state is
        never touched. On a CPU the same seed gives the same result.
    device
        Torch device to train on; None takes `scdiva.settings.device`. The model returned stays there.

    Returns
    -------
    A model for `tl.embed(query, model)`, to be kept by `new.save(folder)`; :func:`corrected_expression` predicts genes
    from what is written. Written are

    `adata.obsm[key_added]`
        float32 array of shape `(n_cells, dim)`, rows of length 1; NaN for a cell without a known gene.
    `adata.uns["scdiva"]["integrate"]`
        `batch_key`, `labels_key`, `cramers_v` (NaN without labels), `own_directions`, `steps`, `seconds`, `stopped`
        (`"converged"`, `"steps"`, `"interrupted"`, or `"one batch"`), `history` (arrays `loss`, `denoising`,
        `reversal`, `contrast` (0 without labels), `pairs` (0 with), a value for each step), `model` and `seed`.

    Raises
    ------
    KeyError
        If a column, layer or gene does not exist.
    ValueError
        If an argument is out of range, the batch of a cell is missing, no cell or only one type is labelled, the
        model has integrated batches before, or the matrix is refused as by :func:`embed`.
    TypeError
        If `adata` is no AnnData object.
    FloatingPointError
        If the loss becomes NaN or infinite.

    Warns
    -----
    UserWarning
        If there is one batch only: nothing is fitted, and the embedding of the model as it is is written. If no cell
        has the `unlabeled_category`. If batch and label are confounded (Cramér's V above 0.5): types that one batch
        alone has cannot be separated from its effect.

    References
    ----------
    .. [1] Korsunsky et al., Fast, sensitive and accurate integration of single-cell data with Harmony, Nature Methods
       2019.
    .. [2] Ganin & Lempitsky, Unsupervised domain adaptation by backpropagation, ICML 2015.
    .. [3] Khosla et al., Supervised contrastive learning, NeurIPS 2020.
    .. [4] Haghverdi et al., Batch effects in single-cell RNA-sequencing data are corrected by matching mutual nearest
       neighbors, Nature Biotechnology 2018.

    Examples
    --------
    >>> import scdiva as sd
    >>> cells = sd.datasets.toy(120, 100)
    >>> adata, query = cells[:80].copy(), cells[80:].copy()
    >>> model = sd.tl.integrate(adata, "batch", steps=20)
    >>> sd.tl.embed(query, model)
    >>> query.obsm["X_scdiva_integrated"].shape[0]
    40
    """
    begun = time.monotonic()
    check_writable(adata, call="tl.embed", entry=key_added, obsm=[key_added])
    check_writable(adata, call="tl.integrate", entry=C.INTEGRATE, layers=[] if corrected is False else [layer_added])
    keys = [batch_key] if isinstance(batch_key, str) else list(batch_key)
    if not keys or len(set(keys)) < len(keys):
        raise ValueError(f"batch_key must name a column of adata.obs, or several, each once; got {keys}.")
    check_least(steps=(steps, 1))
    if labels_key is None and unlabeled_category is not None:
        raise ValueError(f"unlabeled_category={unlabeled_category!r} is a value of labels_key: name that column too.")
    running = how_to_run(None, device, None)
    batches = [batch_numbers(adata, key) for key in keys]
    labels = None if labels_key is None else label_numbers(adata, labels_key, unlabeled_category)[0]
    associated = np.nan if labels is None else max(cramers_v(b[labels >= 0], labels[labels >= 0]) for b in batches)
    reading = Reading(layer, use_raw, input, gene_ids, species, duplicates, "nan")

    import torch

    from scdiva.models.pretrained import load_for
    from scdiva.train.adaptation import read_cells
    from scdiva.train.integration import HISTORY, integrate_model, of_cells, with_head

    given = load_for(model, running.device)
    if given.integration is not None:
        raise ValueError(
            "This model has integrated batches before. Embed new cells with it: tl.embed(adata, model); or integrate "
            f"with the model it came from, such as {C.DEFAULT_MODEL!r}."
        )
    columns, tokens = (None, None) if corrected is False else _of_genes(adata, corrected, given, reading)
    seed = seed_of(rng)

    _, source, parameters = open_for(given, adata, running, reading)
    _, together = np.unique(np.stack(batches), axis=1, return_inverse=True)
    whole, rows = read_cells(source, together.ravel(), whole=columns is not None)
    cells = whole if columns is None else whole.subset(np.arange(whole.n_cells), given.config.input_length)
    if cells.n_batches == 1:
        warn(
            f"adata.obs[{keys[0]!r}] names one batch only: there is nothing to integrate, and the embedding of the "
            "model as it is is written."
        )
        new, integrated = given, embed_all(given, cells, running)
        found: dict[str, Any] = {"own_directions": 0, "steps": 0, "stopped": "one batch"}
        found["history"] = {name: [] for name in HISTORY}
    else:
        if associated > CONFOUNDED:
            warn(
                f"batch and label are confounded (Cramér's V {associated:.2f}): what differs between types that come "
                "from one batch each may be taken for an effect of the batch, or the other way round."
            )
        logger.info("integrating %d cells on %s", adata.n_obs, running.device)
        states = torch.from_numpy(embed_all(given, cells, running._replace(what="state"))).to(running.device)
        new = with_head(given, seed).to(running.device)
        known = None if labels is None else labels[rows]
        with torch_threads_kept(1):  # products too small to share
            numbers = [np.unique(batch[rows], return_inverse=True)[1].astype(np.int64) for batch in batches]
            found = integrate_model(
                new, cells, states, numbers, known, steps=steps, seed=seed, precision=running.precision
            )
        assert new.integration is not None
        integrated = of_cells(new.integration, cells, states).numpy(force=True)
    embedding = np.full((adata.n_obs, integrated.shape[1]), np.nan, dtype=np.float32)
    embedding[rows] = integrated

    layers = {}
    if columns is not None:
        layers[layer_added] = values = np.full(adata.shape, np.nan, dtype=np.float32)
        measured = whole.matrix(given.config.n_genes + C.N_SPECIAL)[:, tokens]
        made, _ = predict_within(embedding[rows], measured, whole.batch, np.ones(len(rows), dtype=bool))
        values[np.ix_(rows, columns)] = made

    notes: dict[str, Any] = {
        "batch_key": keys,
        "labels_key": labels_key or "",
        "cramers_v": float(associated),
        "model": model_name(model),
        "seed": str(seed),
        **found,
        "seconds": time.monotonic() - begun,
        "history": {name: np.asarray(column, dtype=np.float64) for name, column in found["history"].items()},
    }
    write(adata, "tl.embed", key_added, parameters, obsm={key_added: embedding})
    write(adata, "tl.integrate", C.INTEGRATE, notes, layers=layers)
    return new


def _of_genes(adata: AnnData, corrected: bool | Sequence[str], model: ScDiVa, reading: Reading) -> tuple[Any, Any]:
    """Find the columns of adata that corrected expression is asked of, as version 0.1 did, and their tokens."""
    # the user's line is beyond the public call and what gives it one bar
    warnings.warn("corrected= will go: call sd.tl.corrected_expression after this.", DeprecationWarning, stacklevel=4)
    tokens = column_tokens(adata.var, model.vocabulary, reading)
    wanted = tokens != C.UNKNOWN
    if corrected is not True:
        asked = [corrected] if isinstance(corrected, str) else list(corrected or [])
        if not asked:
            raise ValueError("corrected names no gene: leave it out, or call sd.tl.corrected_expression after this.")
        refuse_absent(asked, adata.var_names[wanted], LACK)
        wanted &= adata.var_names.isin(asked)
    return np.flatnonzero(wanted), tokens[wanted]


def cramers_v(one: np.ndarray, other: np.ndarray) -> float:
    """Association of two groupings, 0 (none) to 1 (one follows from the other): Cramér's V, from chi squared.

    Parameters
    ----------
    one, other
        Group numbers, `(n,)`.
    """
    from scipy.stats.contingency import association, crosstab

    table = crosstab(one, other).count
    return float(association(table, "cramer")) if min(table.shape) > 1 else 0.0
