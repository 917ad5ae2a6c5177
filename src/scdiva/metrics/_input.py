"""What every score checks before it is taken, and the one way to scib-metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scdiva._checks import from_extra
from scdiva._labels import MISSING, UNKNOWN, check_labels, is_missing, is_unknown, refuse_continuous

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import ArrayLike


MISSING_LABELS = tuple(sorted(MISSING | UNKNOWN))
"""Label texts that name no cell type, so that no score is taken over them; words in small or capital letters."""


def labelled(labels: ArrayLike) -> np.ndarray:
    """Mark the cells whose label names a cell type.

    Parameters
    ----------
    labels
        Label of each cell, shape `(n_cells,)`; missing ones may be NaN, None or one of `MISSING_LABELS`.

    Returns
    -------
    Boolean array of shape `(n_cells,)`.
    """
    texts = np.asarray(labels).astype(str)
    return ~(is_missing(texts) | is_unknown(texts))


def refuse_where(bad: NDArray[np.bool_], what: str, mend: str = "Leave them out before scoring.") -> None:
    """Refuse values, one or more of which are bad: say how many, which is the first, and how to fix it."""
    if bad.any():
        raise ValueError(f"{bad.sum()} of {len(bad)} {what} (the first is number {int(bad.argmax())}). {mend}")


def check_coordinates(embedding: ArrayLike, scored: NDArray[np.bool_] | None = None) -> NDArray[np.floating]:
    """Give the coordinates as an array; refuse another number of axes and values that are not finite where scored."""
    coordinates = np.asarray(embedding)
    if coordinates.ndim != 2:
        raise ValueError(f"embedding has shape {coordinates.shape}; it must be (n_cells, n_dims).")
    scored = np.ones(len(coordinates), dtype=bool) if scored is None else scored
    refuse_where(scored & ~np.isfinite(coordinates).all(axis=1), "cells have coordinates that are not finite")
    if len(coordinates) > 1 and not np.ptp(coordinates[scored], axis=0).any():
        # Neighbours would follow the order of the cells, in which types often stand, and score well.
        raise ValueError("All cells are at one point of the embedding: there is nothing to score.")
    return coordinates


def scored_cells(embedding: ArrayLike, labels: ArrayLike) -> tuple[NDArray[np.floating], NDArray[np.str_]]:
    """Drop the cells without a label; refuse coordinates that are not finite."""
    names, keep = np.asarray(labels).astype(str), labelled(labels)
    if len(np.asarray(embedding)) != len(names):
        raise ValueError(f"embedding has shape {np.shape(embedding)}, but there are {len(names)} labels.")
    refuse_unlabelled(labels, keep)
    return check_coordinates(embedding, keep)[keep], names[keep]


def refuse_unlabelled(labels: ArrayLike, keep: NDArray[np.bool_]) -> None:
    """Refuse labels of which none is a cell type, or which are continuous numbers."""
    import pandas as pd

    if not keep.any():
        raise ValueError(f"None of {len(keep)} cells has a label: there is nothing to score.")
    refuse_continuous(pd.Series(np.asarray(labels)[keep]), "labels", "label")


def batch_codes(batch: ArrayLike, n_cells: int) -> NDArray[np.intp]:
    """Give batches numbers from 0; refuse missing ones, fewer than two, and another number of cells."""
    import pandas as pd

    given = np.asarray(batch, dtype=object)  # as text, a list's NaN would become a batch called "nan"
    if given.shape != (n_cells,):
        raise ValueError(f"batch has shape {given.shape}, but there are {n_cells} cells.")
    refuse_where(np.asarray(pd.isna(given)), "cells have no batch", "Leave them out, or name their batch.")
    check_labels(pd.Series(np.asarray(batch)), "batch", "batch")
    names, codes = np.unique(given.astype(str), return_inverse=True)
    if len(names) < 2:
        raise ValueError(f"All {n_cells} cells are of the batch {str(names[0])!r}; how batches mix needs two.")
    if len(names) == n_cells > 2:
        raise ValueError(f"Each of the {n_cells} cells is a batch of its own: pass the samples or runs as batch.")
    return codes


def refuse_trivial(names: NDArray[Any], score: str) -> None:
    """Refuse labels of labelled cells that part nothing: one for all of them, or one for each."""
    found = np.unique(names)
    if len(found) < 2:
        what = f"all {len(names)} labelled cells are {str(found[0])!r}" if len(found) else "no cell has a label"
        raise ValueError(f"{score} needs cells of at least two labels; {what}.")
    if len(found) == len(names):
        raise ValueError(f"{score} needs labels that cells share; each of the {len(names)} cells has its own.")


def truth_values(given: ArrayLike, what: str) -> NDArray[np.bool_]:
    """Give truth values as such; refuse other numbers than 0 and 1."""
    values = np.asarray(given)
    other = np.zeros(values.shape, dtype=bool) if values.dtype == np.bool_ else ~np.isin(values, (0, 1))
    if other.any():
        raise ValueError(f"{what} must hold truth values, not {values.dtype} such as {values[other][0]!r}.")
    return values.astype(np.bool_)


def check_graph(graph: Any, name: str, *, missing: bool = True) -> Any:
    """Give a graph as float64, CSR without duplicates or dense; refuse values that are not finite."""
    from scipy.sparse import csr_array, issparse

    sparse = issparse(graph)
    matrix: Any = csr_array(graph, dtype=np.float64, copy=True) if sparse else np.asarray(graph, dtype=np.float64)
    if matrix.ndim != 2 or not min(matrix.shape):
        raise ValueError(f"{name} has shape {matrix.shape}; it must be (n_sources, n_targets).")
    if sparse:
        matrix.sum_duplicates()
    values = matrix.data if sparse else matrix
    bad = np.isinf(values) if missing and not sparse else ~np.isfinite(values)
    if bad.any():
        raise ValueError(
            f"{bad.sum()} of {bad.size} weights of {name} are not finite. Store no pair that was not measured"
            f"{', or give it as NaN in a dense array' if missing else ''}."
        )
    return matrix


def scib_metrics(what: str) -> ModuleType:
    """Import scib-metrics, which brings jax and takes seconds, where it is needed."""
    return from_extra("scib_metrics", "metrics", f"{what} needs scib-metrics")


def leiden_package() -> ModuleType:
    """Import igraph, which is GPL and so no part of a plain install."""
    return from_extra("igraph", "metrics", "Leiden clusters need igraph")
