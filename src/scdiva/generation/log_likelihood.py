"""Likelihood of cells under a model (`tl.log_likelihood`)."""

from __future__ import annotations

import operator
from os import PathLike
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from scdiva import _constants as C
from scdiva._checks import check_arguments
from scdiva._docs import with_shared_docs
from scdiva._rng import seed_of, step_generator
from scdiva.data.genes import input_options
from scdiva.data.results import check_writable, write
from scdiva.models.inference import open_cells_for_model, resolve_run_config, row_numbers, run_cells

if TYPE_CHECKING:
    import torch
    from anndata import AnnData
    from torch import Tensor

    from scdiva.models import ScDiVa

OUTLIER_SD = 4.0
"""Standard deviations, estimated from the median absolute deviation, below the regression line of an outlier."""
SD_PER_MAD = 1.4826
"""Standard deviation of a normal distribution in median absolute deviations."""
MIN_CELLS = 20
"""Minimum number of cells for calling outliers."""
HELD_TOKENS = 65_536
"""Maximum number of tokens whose results wait to be written."""


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
    rng: int | np.random.Generator | torch.Generator | None = None,
    device: str | None = None,
    precision: Literal["auto", "fp32", "bf16"] | None = None,
    key_added: str = C.OBS_LIKELIHOOD,
    copy: bool = False,
) -> AnnData | None:
    r"""Estimate a lower bound on the log-likelihood of each cell's genes.

    Monte-Carlo estimate of the any-order bound (:func:`scdiva.diffusion.log_likelihood`; paper, appendix "ELBO
    Derivation"): random shares of a cell's genes are masked, and the model's log-probability of the masked genes is
    computed. The likelihood is that of the set of expressed genes given its size, not of their values, over the genes
    that `adata` measures. Longer cells have a lower likelihood, so compare cells by the bound per gene.

    The probabilities are those of the model's state head. The transformer is run if there is no state head, as in the
    paper: this takes two to five times as long, and it separated doublets from cells no better (see the page on
    decisions). It reads masked genes at their true ranks, so the bound is then that of the ordered genes.

    Parameters
    ----------
    %(cells)s
    %(model)s
    n_samples
        Samples per cell; even. The standard error decreases with the square root.
    %(reading)s
    rng
        Seed, or a generator. None: `scdiva.settings.seed`. A cell's result depends on the seed and its row, not on the
        other cells.
    %(device)s
    key_added
        Name of the result.
    %(copy)s

    Returns
    -------
    None, or the copy. Written to `obs` are, as float64, `key_added`, the bound in nats; `..._se`, its standard error;
    `..._per_gene`, the bound divided by the cell's number of genes; and, as bool, `..._outlier`: cells whose bound per
    gene is more than 4 standard deviations (estimated from the median absolute deviation) below a robust regression
    line on the logarithm of the number of genes; all False for fewer than 20 cells. Of a cell longer than the model's
    `max_length`, only the first `max_length` genes are scored. `uns["scdiva"][key_added]` contains the parameters.

    Raises
    ------
    ValueError
        If `n_samples` is odd or below 2, a cell has no known gene, or the matrix is not valid for :func:`embed`.
    TypeError
        If `adata` is not an AnnData object.

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
    reading = input_options(adata, layer, use_raw, input)

    import torch

    from scdiva.diffusion import log_likelihood as estimate_bound
    from scdiva.generation.sampling import denoiser_of

    seed = seed_of(rng)
    loaded, source, parameters = open_cells_for_model(model, adata, run_config, reading, empty="error")
    max_length = loaded.config.max_length
    stream = loaded.state_head is None or loaded.config.anchor == "learned"
    genes = torch.from_numpy(source.measured_tokens.astype(np.int64))

    def score(network: ScDiVa, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, row: Tensor) -> Tensor:
        """Bound and standard error of one cell, `(1, 2)`."""
        estimate = estimate_bound(
            denoiser_of(network, genes=genes, stream=stream),
            torch.searchsorted(genes.to(tokens.device), tokens[:max_length]) + C.N_SPECIAL,
            values[:max_length],
            cu_seqlens.clamp_max(max_length),
            n_samples,
            by_cell=not stream,
            generator=step_generator(seed, int(row), "likelihood"),
        )
        return torch.stack([estimate.bound, estimate.standard_error], dim=1)

    estimates = np.empty((adata.n_obs, 2))
    run_config = run_config._replace(what=score, batch_size=1)
    for rows, _, results in run_cells(loaded, source, run_config, held_tokens=HELD_TOKENS, beside=row_numbers):
        for cells, of_cells in results:
            estimates[rows[cells]] = of_cells
    lengths = np.minimum(source.lengths, max_length)
    per_gene = estimates[:, 0] / lengths
    columns = dict(zip(written, (*estimates.T, per_gene, is_outlier(per_gene, lengths)), strict=True))
    parameters |= {"n_samples": n_samples, "seed": str(seed)}
    return write(adata, "tl.log_likelihood", key_added, parameters, copy=copy, obs=columns)


def is_outlier(per_gene: NDArray[np.float64], lengths: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Cells far below the Theil-Sen regression line of the bound per gene on the logarithm of the number of genes."""
    from scipy.stats import theilslopes

    if len(per_gene) < MIN_CELLS:
        return np.zeros(len(per_gene), dtype=bool)
    size = np.log(lengths)
    subset = np.linspace(0, len(size) - 1, min(len(size), 1000)).astype(int)  # the regression takes all pairs
    slope = theilslopes(per_gene[subset], size[subset]).slope if np.ptp(size[subset]) else 0.0
    residual = per_gene - slope * size
    residual = residual - np.median(residual)
    return np.asarray(residual < -OUTLIER_SD * (SD_PER_MAD * np.median(np.abs(residual))))
