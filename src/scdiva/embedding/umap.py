"""`tl.umap`: the UMAP of an embedding, which `pl.umap` draws."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from scdiva._checks import check_arguments, no_entry, warn
from scdiva._constants import OBSM_EMBEDDING, UMAP
from scdiva._docs import with_shared_docs
from scdiva._settings import settings, torch_threads_kept, tqdm_keywords
from scdiva.data.results import check_writable, our_uns, write

if TYPE_CHECKING:
    from anndata import AnnData

MIN_CELLS = 5
UMAP_KEY = "X_umap"
"""Key of the UMAP that scanpy draws."""
_N_NEIGHBORS, _MIN_DIST = 15, 0.5
"""The defaults of scanpy."""


@check_arguments
@with_shared_docs
def umap(adata: AnnData, basis: str = OBSM_EMBEDDING, *, rng: int | None = None, copy: bool = False) -> AnnData | None:
    """Compute the UMAP of an embedding, for `scdiva.pl.umap` and `scanpy.pl.umap`.

    15 neighbours, minimum distance 0.5 [1]_. Nothing is computed if `obsm` has the map of this embedding and seed, if
    `basis` is a map itself, or if a map of that name was not written by scdiva.

    Parameters
    ----------
    adata
        Cells with an embedding, see :func:`embed`.
    basis
        Key of the embedding in `adata.obsm`, (n_obs, dim), with or without ``X_``.
    %(rng)s
    %(copy)s

    Returns
    -------
    `None`, or the copy if `copy=True`. Written are ``adata.obsm[basis + "_umap"]``, float32 `(n_obs, 2)`, NaN for a
    cell without an embedding, its parameters in ``adata.uns["scdiva"]["umap"]``, and a copy of the map in
    ``adata.obsm["X_umap"]``, where scanpy looks for it. An ``X_umap`` that scdiva did not write is kept.

    Raises
    ------
    KeyError
        If `basis` is not in obsm.
    ValueError
        If fewer than five cells have a finite embedding.
    TypeError
        If `adata` is not an AnnData object.

    Warns
    -----
    UserWarning
        If ``adata.obsm["X_umap"]`` was not written by scdiva: ``scanpy.pl.embedding(adata, "X_scdiva_umap")`` draws the
        new map.

    References
    ----------
    .. [1] McInnes, Healy, Melville. UMAP: Uniform Manifold Approximation and Projection for dimension reduction.
       arXiv:1802.03426, 2018.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> sd.tl.embed(adata)
    >>> sd.tl.umap(adata)
    >>> adata.obsm["X_umap"].shape
    (60, 2)
    """
    check_writable(adata, copy=copy)
    target = adata.copy() if copy else adata
    coordinates(target, basis_of(adata, basis), rng, for_scanpy=True)
    return target if copy else None


def basis_of(adata: AnnData, basis: str) -> str:
    """Key of obsm for a basis with or without ``X_``, as in scanpy."""
    return f"X_{basis}" if basis not in adata.obsm and f"X_{basis}" in adata.obsm else basis


def embedding_of(adata: AnnData, basis: str, *, made_by: str | None = None) -> NDArray[np.floating]:
    """The embedding, (n_obs, dim); raise an error if too few cells have one."""
    if basis not in adata.obsm:
        by_umap = "scdiva.tl.umap(adata)" if basis in ("umap", UMAP_KEY) else "scdiva.tl.embed(adata)"
        raise no_entry("adata.obsm", basis, adata.obsm, made_by or by_umap)
    z = adata.obsm[basis]
    z = np.asarray(z.toarray() if hasattr(z, "toarray") else z)
    z = z if z.ndim > 1 else z[:, None]
    n = int(np.isfinite(z).all(axis=1).sum())
    least = 1 if is_map(adata, basis) else MIN_CELLS
    if n < least:
        raise ValueError(f"obsm[{basis!r}] has {n} finite rows of {len(z)}: a map of them needs at least {least}")
    return z


def is_map(adata: AnnData, basis: str) -> bool:
    """Whether an embedding is a map itself: two columns, or a UMAP or t-SNE with more."""
    n = 1 if len(shape := adata.obsm[basis].shape) < 2 else shape[1]
    return n == 2 or (n > 2 and basis.lower().endswith(("umap", "tsne")))


def coordinates(adata: AnnData, basis: str, rng: int | None, *, for_scanpy: bool = False) -> NDArray[np.floating]:
    """Map of `basis`, (n_obs, 2): the basis itself, the stored map of this embedding and seed, or a new one.

    A new map is written to obsm; with `for_scanpy` also to ``X_umap``, unless the user has a map there. An earlier map
    by scdiva in ``X_umap`` is always replaced.
    """
    z = embedding_of(adata, basis)
    if is_map(adata, basis):
        _warn_of_missing(z[:, :2])
        return z[:, :2].astype(np.float64)
    z = np.ascontiguousarray(z, dtype=np.float32)
    key, seed = f"{basis}_umap", settings.seed if rng is None else int(rng)
    digest = hashlib.sha256(z.tobytes()).hexdigest()
    record = {"n_neighbors": _N_NEIGHBORS, "min_dist": _MIN_DIST, "seed": seed, "embedding_sha256": digest}
    maps = our_uns(adata).get(UMAP, {})
    here = key in adata.obsm and adata.obsm[key].shape[1:] in ((2,), (3,))
    fits = here and (key not in maps or dict(maps[key]) == record)
    written_by_scdiva = UMAP_KEY in adata.obsm and any(
        np.array_equal(adata.obsm[UMAP_KEY], adata.obsm[one], equal_nan=True) for one in {*maps, key} & set(adata.obsm)
    )
    free = for_scanpy and UMAP_KEY not in adata.obsm
    if not fits or free:
        check_writable(adata, call="pl.umap", entry=UMAP, obsm=[] if fits else [key])
    xy = np.asarray(adata.obsm[key])[:, :2] if fits else umap_of(z, seed)
    new = {} if fits else {key: xy}
    if free or (written_by_scdiva and (for_scanpy or not fits)):
        new[UMAP_KEY] = xy.copy()
    if new:
        write(adata, "pl.umap", UMAP, maps if fits else {**maps, key: record}, obsm=new)
    if for_scanpy and not free and not written_by_scdiva:
        warn(
            f"adata.obsm[{UMAP_KEY!r}] was not written by scdiva and is kept: sc.pl.umap(adata) draws it. Draw the map "
            f"of {basis!r} with sc.pl.embedding(adata, {key!r}) or scdiva.pl.umap(adata, basis={basis!r})."
        )
    return xy


def umap_of(z: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    """UMAP of the finite rows; other rows (cells without a known gene) are NaN."""
    finite = np.isfinite(z).all(axis=1)
    n = int(finite.sum())
    _warn_of_missing(z)
    from sklearn.neighbors import NearestNeighbors
    from umap import UMAP, umap_

    for function in (umap_.smooth_knn_dist, umap_.compute_membership_strengths):
        with contextlib.suppress(AttributeError, RuntimeError):  # no writable folder for numba's cache
            function.enable_caching()  # otherwise each process compiles for seconds
    # spectral initialisation fails for few cells
    init = "spectral" if n > 50 else "random"
    bar = {"desc": "laying out cells", "unit": "epoch", "bar_format": None, **tqdm_keywords()}
    z, k, near = z[finite], min(_N_NEIGHBORS, n - 1), {}
    if n < 4096:  # umap-learn is slow here: it calls Python for each pair of cells
        near = {"precomputed_knn": NearestNeighbors(n_neighbors=k).fit(z).kneighbors(z)[::-1]}
    # a fixed seed requires one job
    reducer = UMAP(k, min_dist=_MIN_DIST, init=init, random_state=seed, n_jobs=1, tqdm_kwds=bar, **near)
    xy = np.full((*finite.shape, 2), np.nan, dtype=np.float32)
    with torch_threads_kept(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "precomputed_knn")  # the map is never used to transform other cells
        xy[finite] = reducer.fit_transform(z)
    return xy


def _warn_of_missing(z: NDArray[np.floating]) -> None:
    """Warn of cells without an embedding."""
    n = int((~np.isfinite(z).all(axis=1)).sum())
    if n:
        warn(f"{n:,} of {len(z):,} cells have no finite embedding and are not drawn")
