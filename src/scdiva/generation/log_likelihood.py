"""How likely cells are under a model."""

from __future__ import annotations

import operator
from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from scdiva import _constants as C
from scdiva._checks import check_arguments
from scdiva._docs import with_shared_docs
from scdiva._rng import seed_of, step_generator
from scdiva._running import open_cells_for_model, resolve_run_config, row_numbers, run_cells
from scdiva.data.options import InputOptions, Species
from scdiva.data.results import check_writable, write

if TYPE_CHECKING:
    import torch
    from anndata import AnnData
    from torch import Tensor

    from scdiva.models import ScDiVa

OUTLIER_MADS = 4.0
"""Median absolute deviations, scaled to standard deviations, below the usual from which a cell is an outlier."""
_NORMAL = 1.4826
"""Standard deviations in a median absolute deviation of a normal distribution."""
LEAST_CELLS = 20
"""Of fewer cells nothing is called unusual."""
_HELD_TOKENS = 65_536


@check_arguments
@with_shared_docs
def log_likelihood(
    adata: AnnData,
    model: ScDiVa | str | PathLike[str] = C.DEFAULT_MODEL,
    *,
    n_samples: int = 8,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    rng: int | np.random.Generator | torch.Generator | None = None,
    device: str | None = None,
    precision: Literal["auto", "fp32", "bf16"] | None = None,
    key_added: str = C.OBS_LIKELIHOOD,
    copy: bool = False,
) -> AnnData | None:
    r"""Estimate a lower bound on each cell's log-likelihood: that it expresses these genes and no others.

    Monte-Carlo estimate of the any-order bound (:func:`scdiva.diffusion.log_likelihood`; paper, appendix "ELBO
    Derivation"): a share of a cell's genes is masked, and how surely the model names them is scored, over all shares.
    It is of the set of a cell's genes given how many they are, not of their values, and over the genes that `adata`
    measures. A long cell has a lower likelihood, so cells are compared by gene.

    The model's state head names the genes. Its transformer is run where there is no such head, as in the paper: it
    takes two to five times as long, and separated doublets from cells no better (the benchmarks in the docs). It reads
    masked genes at their true ranks, so that the bound is then of the genes in their order.

    Parameters
    ----------
    adata
        Cells × genes, raw counts or log-normalised expression.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`.
    n_samples
        Samples per cell; even. The standard error falls with its root.
    %(reading)s
    rng
        Seed, or a generator; None takes `scdiva.settings.seed`. A cell's result depends on the seed and its row, not on
        the other cells.
    device, precision
        As for :func:`embed`.
    key_added
        Name of what is written.
    copy
        Whether to return a copy with the result instead of writing it to `adata`.

    Returns
    -------
    None, or the copy. Written to `obs` are float64 columns: `key_added`, the bound in nats; `..._se`, its standard
    error; `..._per_gene`, the bound by the cell's number of genes; and bool `..._outlier`: cells whose bound by gene is
    far below that of cells with as many genes (4 median absolute deviations below a line through the logarithm of the
    number; never of fewer than 20 cells). Of a cell longer than the model's `max_length` the first so many genes count.
    `uns["scdiva"][key_added]` holds the arguments.

    Raises
    ------
    ValueError
        If `n_samples` is odd or below 2, a cell has no known gene, or the matrix is refused as by :func:`embed`.
    TypeError
        If `adata` is no AnnData object.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> sd.tl.log_likelihood(adata)
    >>> bool((adata.obs["scdiva_log_likelihood"] < 0).all())
    True
    """
    written = [key_added, *(f"{key_added}_{ending}" for ending in (C.SE, C.PER_GENE, C.OUTLIER))]
    check_writable(adata, copy=copy, call="tl.log_likelihood", entry=key_added, obs=written)
    n_samples = operator.index(n_samples)
    if n_samples < 2 or n_samples % 2:
        raise ValueError(f"n_samples must be even and at least 2 (pairs give the standard error), got {n_samples}.")
    run_config = resolve_run_config(None, device, precision)
    reading = InputOptions(layer, use_raw, input, gene_ids, species, duplicates)

    import torch

    seed = seed_of(rng)
    loaded, source, parameters = open_cells_for_model(model, adata, run_config, reading, empty="error")
    stream = loaded.state_head is None or loaded.config.anchor == "learned"
    measured = torch.from_numpy(source.measured_tokens.astype(np.int64))
    run_config = run_config._replace(what=_scored_by(measured, n_samples, stream, seed), batch_size=1)

    found = np.empty((adata.n_obs, 2))
    for rows, _, results in run_cells(loaded, source, run_config, held_tokens=_HELD_TOKENS, beside=row_numbers):
        for cells, bounds in results:
            found[rows[cells]] = bounds
    lengths = np.minimum(source.lengths, loaded.config.max_length)
    by_gene = found[:, 0] / lengths
    columns = dict(zip(written, (*found.T, by_gene, unusually_low(by_gene, lengths)), strict=True))
    parameters |= {"n_samples": n_samples, "seed": str(seed)}
    return write(adata, "tl.log_likelihood", key_added, parameters, copy=copy, obs=columns)


def unusually_low(by_gene: NDArray[np.float64], lengths: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Tell which cells lie far below a line through the logarithms of their numbers of genes (Theil and Sen's)."""
    from scipy.stats import theilslopes

    if len(by_gene) < LEAST_CELLS:
        return np.zeros(len(by_gene), dtype=bool)
    size = np.log(lengths)
    some = np.linspace(0, len(size) - 1, min(len(size), 1000)).astype(int)  # it takes all pairs
    slope = theilslopes(by_gene[some], size[some]).slope if np.ptp(size[some]) else 0.0
    left = by_gene - slope * size
    left = left - np.median(left)
    spread = _NORMAL * np.median(np.abs(left))
    return np.asarray(left < -OUTLIER_MADS * spread)


def _scored_by(genes: Tensor, n_samples: int, stream: bool, seed: int) -> Callable[..., Any]:
    """Make a read-out of one cell: its bound and the standard error, `(1, 2)`."""
    import torch

    from scdiva.diffusion import log_likelihood as bound_of
    from scdiva.models.denoiser import denoiser_of

    def score(network: ScDiVa, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, row: Tensor) -> Tensor:
        most = network.config.max_length
        found = bound_of(
            denoiser_of(network, genes=genes, stream=stream),
            torch.searchsorted(genes.to(tokens.device), tokens[:most]) + C.N_SPECIAL,
            values[:most],
            cu_seqlens.clamp_max(most),
            n_samples,
            by_cell=not stream,
            generator=step_generator(seed, int(row), "likelihood"),
        )
        return torch.stack([found.bound, found.standard_error], dim=1)

    return score
