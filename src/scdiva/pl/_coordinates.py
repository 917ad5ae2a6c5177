"""Where cells stand on a map: the UMAP of an embedding, made once and kept, or a map that is there already."""

from __future__ import annotations

import hashlib
import warnings
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from scdiva._constants import UNS
from scdiva._nearest import or_nearest
from scdiva._progress import tqdm_keywords
from scdiva._settings import logger
from scdiva._threads import torch_threads_kept
from scdiva.data.writing import check_writable, our_uns

if TYPE_CHECKING:
    from anndata import AnnData

_MIN_CELLS = 5


def embedding_of(adata: AnnData, basis: str, *, made_by: str = "scdiva.tl.embed(adata)") -> NDArray[np.floating]:
    """Give the embedding, (n_obs, dim), once it is clear that it has enough cells for a map."""
    if basis not in adata.obsm:
        raise KeyError(
            f"adata.obsm has no {basis!r}{or_nearest(basis, adata.obsm)}, it has "
            f"{', '.join(adata.obsm) or 'nothing'}: call {made_by} first"
        )
    z = adata.obsm[basis]
    z = np.asarray(z.toarray() if hasattr(z, "toarray") else z)
    z = z if z.ndim > 1 else z[:, None]
    n = int(np.isfinite(z).all(axis=1).sum())
    if is_map(adata, basis):
        if not n:
            raise ValueError(f"obsm[{basis!r}] has no finite row of {len(z)}: there is nothing to draw")
    elif n < _MIN_CELLS:
        raise ValueError(f"obsm[{basis!r}] has {n} finite rows of {len(z)}: a UMAP needs at least {_MIN_CELLS} cells")
    return z


def is_map(adata: AnnData, basis: str) -> bool:
    """Whether an embedding is a map already, and drawn as it is: of two columns, or a UMAP or t-SNE of more."""
    n = 1 if len(shape := adata.obsm[basis].shape) < 2 else shape[1]
    return n == 2 or (n > 2 and basis.lower().endswith(("umap", "tsne")))


def axis_name(adata: AnnData, basis: str) -> str:
    """Name the axes of the map that is drawn of `basis`, without their number."""
    if not is_map(adata, basis) or basis.lower().endswith("umap"):
        return "UMAP"
    name = basis.removeprefix("X_")
    return {"tsne": "t-SNE", "pca": "PC"}.get(name.lower(), name)


def coordinates(adata: AnnData, basis: str, *, n_neighbors: int, min_dist: float, seed: int) -> NDArray[np.floating]:
    """Give the map of `basis`, (n_obs, 2): itself if it is one, the one in obsm if it still fits, else a new one.

    A new one is kept in obsm.
    """
    z = embedding_of(adata, basis)
    if is_map(adata, basis):
        _say_left_out(z[:, :2], stacklevel=4)
        return z[:, :2].astype(np.float64)
    z = np.ascontiguousarray(z, dtype=np.float32)
    key = f"{basis}_umap"
    record = {
        "n_neighbors": int(n_neighbors),
        "min_dist": float(min_dist),
        "seed": int(seed),
        "embedding_sha256": hashlib.sha256(z.tobytes()).hexdigest(),
    }
    made_here = our_uns(adata).get("umap", {}).get(key)
    if key in adata.obsm and (made_here is None or dict(made_here) == record):
        return np.asarray(adata.obsm[key])[:, :2]
    if key in adata.obsm:
        logger.info("the embedding or the parameters have changed since %r was made: it is made anew", key)

    check_writable(adata)
    xy = umap_of(z, n_neighbors=n_neighbors, min_dist=min_dist, seed=seed)
    adata.obsm[key] = xy
    ours = our_uns(adata)
    ours["umap"] = {**ours.get("umap", {}), key: record}
    adata.uns[UNS] = ours
    return xy


def umap_of(z: NDArray[np.float32], *, n_neighbors: int, min_dist: float, seed: int) -> NDArray[np.float32]:
    """Run umap-learn on the rows that are finite; the others (cells left without a gene) stay NaN."""
    finite = np.isfinite(z).all(axis=1)
    n = int(finite.sum())
    _say_left_out(z, stacklevel=5)
    from umap import UMAP

    # The spectral start needs more points than it has dimensions to solve for; few cells start at random.
    reducer = UMAP(
        n_neighbors=min(n_neighbors, n - 1),
        min_dist=min_dist,
        init="spectral" if n > 50 else "random",
        random_state=seed,
        n_jobs=1,  # what a fixed seed asks for
        tqdm_kwds={"desc": "laying out cells", "unit": "epoch", "bar_format": None, **tqdm_keywords()},
    )
    xy = np.full((len(z), 2), np.nan, dtype=np.float32)
    with torch_threads_kept():
        xy[finite] = reducer.fit_transform(z[finite])
    return xy


def _say_left_out(z: NDArray[np.floating], stacklevel: int) -> None:
    """Warn of cells that stand nowhere."""
    n = int((~np.isfinite(z).all(axis=1)).sum())
    if n:
        warnings.warn(f"{n:,} of {len(z):,} cells have no finite embedding and are not drawn", UserWarning, stacklevel)
