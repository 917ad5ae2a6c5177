"""Generated cells on a map with real ones."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray

from scdiva._constants import TARGET_SUM
from scdiva._docs import with_shared_docs
from scdiva._nearest import or_nearest
from scdiva._settings import settings
from scdiva.data.cells import log_normalised
from scdiva.data.writing import check_anndata
from scdiva.pl._coordinates import umap_of
from scdiva.pl._dots import MAX_ON_DATA, draw_groups, draw_legend, legend_columns, name_groups, palette
from scdiva.pl._figure import check_file, finish
from scdiva.pl._groups import groups_of

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.figure import Figure

_ORIGIN = {"real": "0.6", "generated": "#d1495b"}
_MIN_CELLS = 5


@with_shared_docs
def generated(
    real: AnnData,
    generated: AnnData,
    *,
    color: str | None = None,
    n_comps: int = 50,
    n_neighbors: int = 15,
    min_dist: float = 0.5,
    size: float | None = None,
    rng: int | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw generated cells on one map with real cells, coloured by where they come from and by group.

    The map is a UMAP [1]_ of all cells together, in the first principal components of the real cells' log-normalised
    expression, onto which the generated ones are projected; both are normalised to ten thousand counts a cell over the
    genes that they have here. What generated cells have beside those components is not seen: cells that mix on the map
    may differ still. Neither object is written to; the map is computed at each call.

    Parameters
    ----------
    real
        Real cells; `X` holds counts or log-normalised values.
    generated
        Generated cells; `X` holds log-normalised values, as the model writes them, of the same genes as `real` in any
        order.
    color
        A column of obs of both, such as a cell type, for the second panel; colours are those in
        ``real.uns[color + "_colors"]`` where scanpy has put them. Cells without a value are grey. None draws the first
        panel only.
    n_comps
        Principal components; at most one fewer than there are real cells, or genes, are used.
    n_neighbors
        Neighbours of each cell in UMAP's graph; at most one fewer than there are cells are used.
    min_dist
        How close UMAP may put two cells.
    size
        Area of a dot in points squared; None fits it to the number of cells.
    %(rng)s
    %(return_fig)s
    %(save)s

    Returns
    -------
    Figure or None
        The figure if `return_fig`, else None.

    Raises
    ------
    KeyError
        If `color` is not in obs of both.
    ValueError
        If the genes are not the same, repeat or are fewer than three, there are fewer than five real cells or no
        generated one, `n_comps` is below 2, a matrix holds something else, `color` has no or more than 100 groups, or
        `save` ends in no picture format.

    References
    ----------
    .. [1] McInnes, Healy, Melville. UMAP: Uniform Manifold Approximation and Projection for dimension reduction.
       arXiv:1802.03426, 2018.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> made = sd.tl.generate(adata, 5, groupby="cell_type")
    >>> real = adata[:, made.var_names].copy()
    >>> sd.pl.generated(real, made, color="cell_type", save="generated.png")
    """
    check_file(save)
    for cells in (real, generated):
        check_anndata(cells)
    if n_comps < 2 or real.n_vars < 3:
        raise ValueError(f"a map needs n_comps of at least 2 and 3 genes, got {n_comps} and {real.n_vars}.")
    if real.n_obs < _MIN_CELLS or not generated.n_obs:
        raise ValueError(
            f"there are {real.n_obs} real and {generated.n_obs} generated cells: the map needs at least {_MIN_CELLS} "
            "real cells and 1 generated."
        )
    order = _gene_order(real, generated)
    groups = None if color is None else _groups(real, generated, color)
    seed = settings.seed if rng is None else int(rng)
    z = _projected(_values(real, "real", "auto"), _values(generated, "generated", "lognorm")[:, order], n_comps, seed)
    xy = umap_of(z, n_neighbors=n_neighbors, min_dist=min_dist, seed=seed)

    import matplotlib.pyplot as plt

    origin = pd.Series(pd.Categorical.from_codes(np.repeat([0, 1], [real.n_obs, generated.n_obs]), list(_ORIGIN)))
    origin = origin.cat.rename_categories(
        {"real": f"real ({real.n_obs:,})", "generated": f"generated ({generated.n_obs:,})"}
    )
    aside = groups is not None and len(groups.cat.categories) > MAX_ON_DATA
    columns = legend_columns(groups) if groups is not None and aside else 0
    n = 1 if groups is None else 2
    fig, axes = plt.subplots(1, n, figsize=(4.4 * n + 1.5 * columns, 4.4), layout="constrained", squeeze=False)
    for ax in axes[0]:
        ax.set(xticks=[], yticks=[])
    inks = dict(zip(origin.cat.categories, _ORIGIN.values(), strict=True))
    draw_groups(axes[0, 0], xy, origin, inks, "none", size)
    axes[0, 0].set_title("real and generated cells")
    for name, ink in inks.items():
        axes[0, 0].scatter([], [], color=ink, s=20, linewidths=0, label=name)
    axes[0, 0].legend(
        fontsize=8, frameon=False, handletextpad=0.1, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=2
    )
    if groups is not None:
        colours = palette(real, str(color), groups)
        draw_groups(axes[0, 1], xy, groups, colours, "none", size)
        axes[0, 1].set_title(str(color))
        if aside:
            draw_legend(axes[0, 1], groups, colours)
        else:
            name_groups(axes[0, 1], xy, groups, colours)
    return finish(fig, own=True, return_fig=return_fig, save=save)


def _gene_order(real: AnnData, generated: AnnData) -> NDArray[np.intp]:
    """Say where in the generated cells each gene of the real ones stands."""
    for names, what in ((real.var_names, "real"), (generated.var_names, "generated")):
        if not names.is_unique:
            raise ValueError(f"{what}.var_names repeat names: call {what}.var_names_make_unique() first.")
    for names, others, have, lack in (
        (real.var_names, generated.var_names, "real", "generated"),
        (generated.var_names, real.var_names, "generated", "real"),
    ):
        alone = names[~names.isin(others)]
        if len(alone):
            raise ValueError(
                f"{len(alone):,} of {len(names):,} genes of the {have} cells are not in the {lack} ones (first: "
                f"{alone[0]!r}). Both must have the same genes: shared = real.var_names.intersection("
                "generated.var_names), then real[:, shared] and generated[:, shared], log-normalised before."
            )
    found: NDArray[np.intp] = generated.var_names.get_indexer(real.var_names)
    return found


def _groups(real: AnnData, generated: AnnData, color: str) -> pd.Series:
    """Give the groups of all cells, real ones first, in the order of the real ones' categories."""
    both = []
    for cells, what in ((real, "real"), (generated, "generated")):
        if color not in cells.obs:
            columns = ", ".join(map(str, cells.obs.columns)) or "none"
            raise KeyError(
                f"{color!r} is no column of obs of the {what} cells{or_nearest(color, cells.obs.columns)}, which has "
                f"{columns}."
            )
        values = groups_of(cells, color)
        both.append(values.cat.rename_categories([str(name) for name in values.cat.categories]))
    names = list(dict.fromkeys(name for values in both for name in values.cat.categories))
    return pd.concat([values.cat.set_categories(names) for values in both], ignore_index=True)


def _values(cells: AnnData, what: str, input: Literal["auto", "lognorm"]) -> sp.csr_matrix:
    """Read `X`, to one total of counts, and say whose it is where it is refused."""
    try:
        values = log_normalised(cells, input=input)[0]
    except ValueError as error:
        raise ValueError(f"the {what} cells: {error}") from error
    # what was normalised over more genes than are here has another scale, which would set the two apart
    values.data = np.expm1(values.data)
    total = np.asarray(values.sum(axis=1)).ravel()
    values = sp.csr_matrix(sp.diags_array(TARGET_SUM / np.where(total > 0, total, 1.0)) @ values)
    values.data = np.log1p(values.data)
    return values


def _projected(real: sp.csr_matrix, generated: sp.csr_matrix, n_comps: int, seed: int) -> NDArray[np.float32]:
    """Give all cells, real ones first, in the first principal components of the real ones, (n, n_comps)."""
    from sklearn.decomposition import PCA

    # arpack reads sparse matrices as they are, and wants fewer components than rows and columns
    pca = PCA(min(n_comps, min(real.shape) - 1), svd_solver="arpack", random_state=seed).fit(real)
    parts = [pca.transform(real), pca.transform(generated)]
    return np.concatenate([np.asarray(part) for part in parts]).astype(np.float32)
