"""Cells of a TileDB-SOMA experiment, such as the CELLxGENE Census, selected by a query and read by blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from scdiva._checks import from_extra
from scdiva.data.backed import StoredNames

if TYPE_CHECKING:
    import pandas as pd

_ID = "soma_joinid"


def open_soma(uri: str, *, obs_filter: str | None = None, measurement: str = "RNA") -> SomaCells:
    """Select cells of a TileDB-SOMA experiment.

    The result can be passed in place of a path to :func:`open_cells`, :func:`pack_files`, :class:`CellDataModule`,
    :func:`scdiva.tl.embed_file`, :func:`scdiva.pp.corpus_entropy` and :func:`scdiva.train.pretrain`. Their `layer` is a
    layer of the measurement's `X`; None: `"raw"`, or the only layer. Requires the extra ``census``.

    Parameters
    ----------
    uri
        Experiment: a folder, ``s3://``, ``gs://`` or ``tiledb://``. TileDB reads region, endpoint and credentials from
        the environment, such as `TILEDB_VFS_S3_REGION` and `TILEDB_VFS_S3_NO_SIGN_REQUEST=true`.
    obs_filter
        Value filter of `obs`, such as ``"is_primary_data == True and tissue_general == 'lung'"``.
        None: all cells.
    measurement
        Name of the measurement.

    Returns
    -------
    The selected cells. :meth:`SomaCells.by` splits them into studies.

    Raises
    ------
    FileNotFoundError
        If the experiment does not exist or can't be reached.
    ImportError
        If tiledbsoma is not installed.
    ValueError
        If `uri` is not an experiment, the filter is invalid, or no cell passes it.

    Examples
    --------
    >>> from scdiva.data import open_soma, pack_files
    >>> cells = open_soma("atlas.soma", obs_filter="is_primary_data == True")  # doctest: +SKIP
    >>> pack_files(cells.by("dataset_id"), "scdiva-mini", "corpus")  # doctest: +SKIP
    """
    cells = SomaCells(str(uri), np.zeros(0, np.int64), measurement, obs_filter)
    rows = np.sort(cells.column(_ID)[_ID].to_numpy())
    if not len(rows):
        raise ValueError(f"no cell of {uri!r} passes obs_filter={obs_filter!r}.")
    return replace(cells, rows=rows)


@dataclass(frozen=True, eq=False)
class SomaCells:
    """Cells of a TileDB-SOMA experiment, from :func:`open_soma`; only their numbers are in memory.

    Attributes
    ----------
    uri
        The experiment.
    rows
        int64 (n_obs,), `soma_joinid` of each cell, ascending.
    measurement, obs_filter
        As for :func:`open_soma`.
    study
        Name of the study; empty for cells that were not split into studies.
    """

    uri: str
    rows: np.ndarray = field(repr=False)
    measurement: str
    obs_filter: str | None = None
    study: str = ""

    def __str__(self) -> str:
        return f"{self.uri}#{self.study}" if self.study else self.uri

    @property
    def stem(self) -> str:
        """Name of the study."""
        return self.study or PurePosixPath(self.uri).stem

    name = stem

    def by(self, key: str) -> list[SomaCells]:
        """Split the cells into studies by a column of `obs`, such as ``"dataset_id"``.

        The genes measured in a study are those expressed in at least one of its cells, since an experiment has one gene
        table for all studies.

        Returns
        -------
        The cells of each value, ordered by value.

        Raises
        ------
        ValueError
            If the column does not exist, or a cell has no value in it.
        """
        column = self.column(key).to_pandas().sort_values(_ID)
        if n := int(column[key].isna().sum()):
            raise ValueError(f"{n} cells of {self.uri!r} have no {key}: leave them out by obs_filter.")
        parts = column.groupby(key, observed=True)[_ID]
        return [replace(self, rows=rows.to_numpy(), study=str(name)) for name, rows in parts]

    def column(self, name: str) -> Any:
        """A column of `obs` and `soma_joinid` of all cells that pass the filter, as Arrow table."""
        with self.opened() as experiment:
            return experiment.obs.read(column_names=list({_ID, name}), value_filter=self.obs_filter).concat()

    def note(self) -> dict[str, Any]:
        """Identify the cells, not their content, for manifests."""
        return {"cells": len(self.rows), "soma_joinids_sha256": hashlib.sha256(self.rows.tobytes()).hexdigest()}

    def obs(self) -> pd.DataFrame:
        """Annotation of the cells, indexed by `obs_id`, or by `soma_joinid` if there is no such column."""
        with self.opened() as experiment:
            return _named(experiment.obs.read(coords=(self.rows,)), "obs_id").loc[:, lambda obs: obs.columns != _ID]

    @contextmanager
    def opened(self) -> Iterator[Any]:
        """Open the experiment; errors of SOMA name its URI.

        Raises
        ------
        FileNotFoundError, ImportError, ValueError
            As for :func:`open_soma`.
        """
        soma = from_extra("tiledbsoma", "census", f"{self.uri!r} needs tiledbsoma")
        try:
            with soma.Experiment.open(self.uri) as experiment:
                yield experiment
        except soma.DoesNotExistError as error:
            raise FileNotFoundError(
                f"no SOMA experiment at {self.uri!r}, or it can't be reached ({error}). On S3 set "
                "TILEDB_VFS_S3_REGION, and TILEDB_VFS_S3_NO_SIGN_REQUEST=true if it is public."
            ) from error
        except (soma.SOMAError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{self.uri!r} can't be read: {reason} (obs_filter={self.obs_filter!r}).") from error


class SomaRows:
    """A sparse matrix of a SOMA experiment, read by ranges of rows.

    Parameters
    ----------
    cells
        The rows.
    layer
        Layer of `X`. None: `"raw"`, or the only layer.

    Attributes
    ----------
    shape
        Cells and genes.
    var
        The genes, indexed by `var_id` (experiments that tiledbsoma wrote from AnnData) or `feature_id` (the Census).
    obs_names
        Number of each cell.
    where
        Name of the matrix in error messages.

    Raises
    ------
    ValueError
        If the layer does not exist or is dense.
    """

    def __init__(self, cells: SomaCells, layer: str | None) -> None:
        with cells.opened() as experiment:
            of = experiment.ms[cells.measurement]
            names = list(of.X)
            layer = layer or (names[0] if len(names) == 1 else "raw")
            self._array = type(of.X[layer]).open(of.X[layer].uri)
            if self._array.soma_type != "SOMASparseNDArray":
                raise ValueError(f"X[{layer!r}] of {str(cells)!r} is dense: write it as a SparseNDArray.")
            self.var = _named(of.var.read(), "var_id", "feature_id").sort_values(_ID)
        self._rows, self._columns = cells.rows, self.var[_ID].to_numpy()
        self.obs_names, self.where = StoredNames(self._rows), f"X[{layer!r}] of {str(cells)!r}"
        self.shape = len(self._rows), len(self._columns)

    def read(self, ranges: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read ranges of rows (first, exclusive last), joined in order, by one query.

        Returns
        -------
        data, indices and indptr of a CSR matrix.
        """
        requested = np.concatenate([self._rows[start:stop] for start, stop in ranges])
        ids, back = np.unique(requested, return_inverse=True)
        # a query of a range is faster than a query of points
        chosen = slice(int(ids[0]), int(ids[-1])) if ids[-1] - ids[0] == len(ids) - 1 else ids
        table = self._array.read((chosen, slice(None))).tables().concat()
        data, row, column = (table[name].to_numpy() for name in ("soma_data", "soma_dim_0", "soma_dim_1"))
        at = np.searchsorted(ids, row), np.searchsorted(self._columns, column)
        block = sp.coo_matrix((data, at), shape=(len(ids), self.shape[1])).tocsr()[back]
        return block.data, block.indices, block.indptr

    def close(self) -> None:
        """Close the array."""
        self._array.close()


def _named(reader: Any, *columns: str) -> pd.DataFrame:
    """Load a SOMA data frame, indexed by the first existing column of some, or by numbers."""
    frame = reader.concat().to_pandas()
    name = next((name for name in columns if name in frame), _ID)
    return frame.set_index(frame[name].astype(str)).drop(columns=[name] if name != _ID else [])
