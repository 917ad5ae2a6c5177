"""Expression matrices of every kind, read as the same canonical row blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

if TYPE_CHECKING:
    from anndata import AnnData

BLOCK_ROWS = 1024
"""Rows read at once. Checking a block takes about 80 bytes a stored value for a moment: 160 MB for 1,024 cells of 2,000
detected genes."""


class StoredNames:
    """Names of the cells of a file, read when one is asked for: held whole, they take more memory than a block.

    Parameters
    ----------
    stored
        Array of strings of an HDF5 or zarr file.
    """

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def __len__(self) -> int:
        return int(self._stored.shape[0])

    def __getitem__(self, row: int) -> str:
        name = self._stored[int(row)]
        return name.decode() if isinstance(name, bytes) else str(name)


@dataclass
class OpenMatrix:
    """An expression matrix with the names of its rows and columns.

    Attributes
    ----------
    matrix
        Anything that :func:`row_blocks` reads, (n_obs, n_vars).
    obs_names, var
        Names of the cells; annotation of the genes (its index are the gene names).
    where
        What errors call the matrix, for instance ``adata.layers['counts']``.
    """

    matrix: Any
    obs_names: pd.Index | StoredNames
    var: pd.DataFrame
    where: str
    _file: Any = field(default=None, repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of cells and genes."""
        return int(self.matrix.shape[0]), int(self.matrix.shape[1])

    def close(self) -> None:
        """Close the file behind the matrix, if there is one."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> OpenMatrix:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def matrix_of(adata: AnnData, layer: str | None = None, use_raw: bool = False) -> tuple[Any, pd.Index]:
    """Choose the expression matrix of an AnnData object.

    Parameters
    ----------
    adata
        Annotated data, in memory, a view, backed, or dask-backed. AnnData reads the matrix of a view of a backed object
        whole; open the file itself to read it by rows.
    layer
        Key of `adata.layers`; `None` takes `adata.X`.
    use_raw
        Take `adata.raw.X`, which has genes of its own.

    Returns
    -------
    The matrix as it is stored, (n_obs, n_vars), and the names of its columns.

    Raises
    ------
    KeyError
        If there is no such layer.
    ValueError
        If `layer` and `use_raw` are both given, or `adata.raw` or `adata.X` is absent.
    """
    opened = open_matrix(adata, layer=layer, use_raw=use_raw)
    return opened.matrix, opened.var.index


def open_matrix(data: AnnData | str | Path, layer: str | None = None, use_raw: bool = False) -> OpenMatrix:
    """Open the expression matrix of an AnnData object, or of an ``.h5ad`` or ``.zarr`` file, without loading it.

    Of a file only the chosen matrix, the gene table and the cell names are touched.

    Parameters
    ----------
    data
        Annotated data or the path of a file that AnnData wrote.
    layer, use_raw
        As in :func:`matrix_of`.

    Returns
    -------
    The opened matrix; :meth:`OpenMatrix.close` (or a ``with`` block) releases the file.

    Raises
    ------
    FileNotFoundError
        If the path does not exist.
    KeyError, ValueError
        As in :func:`matrix_of`, or if the file is no AnnData file.
    """
    if layer is not None and use_raw:
        raise ValueError(
            f"layer={layer!r} and use_raw=True exclude each other: adata.raw has no layers; pass one of them."
        )
    if isinstance(data, str | Path):
        return _open_path(Path(data), layer, use_raw)
    if not hasattr(data, "obs_names") or not hasattr(data, "layers"):
        raise TypeError(f"expected an AnnData object or a path, got {type(data).__name__}.")
    if use_raw:
        if data.raw is None:
            raise ValueError(
                "use_raw=True, but adata.raw is None. Pass use_raw=False, or layer=" + _layers(data.layers) + "."
            )
        return OpenMatrix(data.raw.X, data.obs_names, data.raw.var, "adata.raw.X")
    if layer is not None:
        if layer not in data.layers:
            raise KeyError(f"adata has no layer {layer!r}; its layers: {_layers(data.layers)}.")
        return OpenMatrix(data.layers[layer], data.obs_names, data.var, f"adata.layers[{layer!r}]")
    if data.X is None:
        raw = " or use_raw=True" if data.raw is not None else ""
        raise ValueError(f"adata.X is None. Pass layer={_layers(data.layers)}{raw}.")
    return OpenMatrix(data.X, data.obs_names, data.var, "adata.X")


def _layers(layers: Any) -> str:
    return " | ".join(repr(str(k)) for k in layers) or "(adata has no layers)"


def _open_path(path: Path, layer: str | None, use_raw: bool) -> OpenMatrix:
    import anndata.io
    import h5py

    if not path.exists():
        raise FileNotFoundError(f"no file {str(path)!r}.")
    root: Any
    if path.is_dir():
        import zarr

        try:
            root, file = zarr.open_group(str(path), mode="r"), None
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(f"{str(path)!r} is a folder, but no .zarr that AnnData wrote.") from error
    else:
        if not h5py.is_hdf5(path):
            raise ValueError(f"{str(path)!r} is no HDF5 file: expected an .h5ad or .zarr that AnnData wrote.")
        root = file = h5py.File(path, "r")
    try:
        if "obs" not in root or "var" not in root:
            raise ValueError(f"{str(path)!r} has no obs and var: expected an .h5ad or .zarr that AnnData wrote.")
        if use_raw:
            if "raw" not in root:
                raise ValueError(f"use_raw=True, but {str(path)!r} has no raw. Pass use_raw=False.")
            group, key = root["raw"], "X"
        elif layer is not None:
            layers = root.get("layers", {})
            if layer not in layers:
                raise KeyError(f"{str(path)!r} has no layer {layer!r}; its layers: {_layers(layers)}.")
            group, key = root["layers"], layer
        else:
            group, key = root, "X"
        if key not in group or dict(group[key].attrs).get("encoding-type") == "null":
            layers = root.get("layers", {})
            raise ValueError(f"{str(path)!r} has no {key}. Pass layer={_layers(layers)}.")
        element = group[key]
        is_array = hasattr(element, "shape")
        matrix = element if is_array else anndata.io.sparse_dataset(element)
        if not hasattr(root["obs"], "keys"):
            raise ValueError(
                f"{str(path)!r} was written by anndata before 0.7. Write it anew: "
                "anndata.read_h5ad(path).write_h5ad(new_path)."
            )
        var = anndata.io.read_elem((root["raw"] if use_raw else root)["var"])
        # Only the index of obs: annotation of an atlas can be larger than memory allows.
        obs = root["obs"]
        names = obs[obs.attrs["_index"]]
        obs_names = StoredNames(names) if hasattr(names, "shape") else pd.Index(anndata.io.read_elem(names)).astype(str)
    except BaseException:
        if file is not None:
            file.close()
        raise
    what = "raw.X" if use_raw else f"layers[{layer!r}]" if layer is not None else "X"
    return OpenMatrix(matrix, obs_names, var, f"{what} of {path.name}", file)


def row_blocks(
    matrix: Any, block_rows: int = BLOCK_ROWS, start: int = 0, stop: int | None = None
) -> Iterator[tuple[int, sp.csr_matrix]]:
    """Read a matrix as canonical CSR blocks of rows, whatever its storage.

    Rows come in order. A block is a fresh float32 CSR matrix with sorted, unique indices and no explicit zeros; what
    the user holds is never touched. NaN and Inf pass through (:func:`scdiva._validate.scan` reports them).

    Parameters
    ----------
    matrix
        (n_obs, n_vars): scipy sparse of any format, numpy array or matrix, AnnData view, backed sparse or dense matrix
        (HDF5 or zarr), or dask array with dense or sparse chunks. Column-compressed storage cannot be read by rows and
        is converted once, whole, in memory.
    block_rows
        Rows of a block; the last one may be shorter.
    start, stop
        Range of rows; `None` is the last row.

    Yields
    ------
    The row number of the block's first row, and the block, (rows, n_vars).

    Raises
    ------
    TypeError
        If the matrix holds no real numbers.
    ValueError
        If `block_rows` is not positive, the range leaves the matrix, or sparse indices point outside of it.
    """
    if block_rows < 1:
        raise ValueError(f"block_rows must be at least 1, got {block_rows}.")
    matrix = row_readable(matrix)
    n_obs = int(matrix.shape[0])
    stop = n_obs if stop is None else stop
    if not 0 <= start <= stop <= n_obs:
        raise ValueError(f"rows {start} to {stop} are not within the matrix of {n_obs} rows.")
    for lo in range(start, stop, block_rows):
        yield lo, read_rows(matrix, lo, min(lo + block_rows, stop))


def row_readable(matrix: Any) -> Any:
    """Return the matrix itself, or a CSR copy of it where its storage can't be read by rows.

    Parameters
    ----------
    matrix
        As in :func:`row_blocks`.
    """
    if len(matrix.shape) != 2:
        raise ValueError(f"expected a matrix of cells × genes, got shape {tuple(matrix.shape)}.")
    if getattr(matrix, "format", None) == "csc" and not sp.issparse(matrix):  # anndata's backed CSCDataset
        matrix = matrix.to_memory()
    if sp.issparse(matrix) and matrix.format != "csr":
        return matrix.tocsr()
    return matrix


def read_rows(matrix: Any, start: int, stop: int) -> sp.csr_matrix:
    """Read rows `start` to `stop` as one canonical float32 CSR block (see :func:`row_blocks`).

    Parameters
    ----------
    matrix
        What :func:`row_readable` returned.
    start, stop
        Range of rows within the matrix.

    Returns
    -------
    (stop - start, n_vars), owned by the caller.
    """
    n_vars = int(matrix.shape[1])
    if sp.issparse(matrix):
        # Slice the three arrays ourselves: scipy trusts cached flags about sorted indices that a user may have broken.
        lo, hi = int(matrix.indptr[start]), int(matrix.indptr[stop])
        data, indices = matrix.data[lo:hi], matrix.indices[lo:hi]
        indptr = np.asarray(matrix.indptr[start : stop + 1]) - lo
    else:
        part = matrix[start:stop]
        if hasattr(part, "compute"):
            part = part.compute()
        if not sp.issparse(part):
            part = np.asarray(part)
            _check_numbers(part.dtype)
            if part.dtype.itemsize < 4:  # scipy has no float16
                part = part.astype(np.float32)
            part = sp.csr_matrix(part)
        part = part.tocsr()
        data, indices, indptr = part.data, part.indices, part.indptr
    _check_numbers(data.dtype)
    if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= n_vars):
        raise ValueError(
            f"rows {start} to {stop}: sparse column indices run from {int(indices.min())} to {int(indices.max())}, but "
            f"the matrix has {n_vars} columns. The file or matrix is damaged; write it anew from its source."
        )
    index_dtype = np.int32 if n_vars <= np.iinfo(np.int32).max and len(indices) <= np.iinfo(np.int32).max else np.int64
    # Small types can't hold the sum of entries that stand twice, and scipy knows no float16.
    block = sp.csr_matrix(
        (
            np.array(data, dtype=np.float32 if data.dtype.itemsize < 4 else data.dtype),
            np.array(indices, dtype=index_dtype),
            np.array(indptr, dtype=index_dtype),
        ),
        shape=(stop - start, n_vars),
    )
    block.sum_duplicates()
    if block.dtype != np.float32:
        with np.errstate(over="ignore"):  # becomes Inf, which the scan reports
            block = block.astype(np.float32)
    block.eliminate_zeros()
    return block


def _check_numbers(dtype: np.dtype) -> None:
    if dtype.kind not in "biuf":
        raise TypeError(f"expected a matrix of real numbers, got dtype {dtype}.")
