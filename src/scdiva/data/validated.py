"""Which study each validation cell is of, by name: batches say only whether it is trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scdiva.data.packed import PackedCells
from scdiva.data.stream import ValidationBatches


def validation_studies(batches: ValidationBatches) -> tuple[list[str], np.ndarray]:
    """Find the studies of validation cells, without reading any of them.

    Parameters
    ----------
    batches
        The cells.

    Returns
    -------
    Names of the studies, and for each cell, in the order in which the batches give them, the number of its study among
    these, int `(n_cells,)`.
    """
    pool = batches.pool
    paths = [getattr(source, "path", None) for source in pool.sources]
    # a pool may hold some of the studies only, so that its own count is not that of the names
    stems = [
        getattr(source, "name", "") or (f"adata{i}" if path is None else Path(path).stem)
        for i, (source, path) in enumerate(zip(pool.sources, paths, strict=True))
    ]
    names: list[str] = []
    of_source: list[np.ndarray] = []
    for source, path, stem in zip(pool.sources, paths, stems, strict=True):
        if isinstance(source, PackedCells):
            of_source.append(len(names) + source.study.astype(np.int64))
            names += source.study_names
        else:
            of_source.append(np.full(source.n_obs, len(names)))
            names.append(stem if stems.count(stem) == 1 or path is None else str(path))
    study = np.concatenate([of_source[number][rows] for number, rows in pool.blocks])[batches.chosen]
    present, numbers = np.unique(study, return_inverse=True)
    return [names[i] for i in present], numbers
