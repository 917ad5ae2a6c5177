"""Expression matrices of every kind, read as the same canonical row blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from scdiva._checks import or_nearest, warn
from scdiva.data.stored import StoredNames, StoredRows, file_of, names_of, naming, open_root, warn_if_slow, whole
from scdiva.data.writing import check_anndata

if TYPE_CHECKING:
    from anndata import AnnData

BLOCK_ROWS = 1024
"""Rows read at once. Checking a block takes about 80 bytes a stored value for a moment: 160 MB for 1,024 cells of 2,000
detected genes."""
CSC_WARNING, CSC_LIMIT = 1 << 28, 1 << 32
"""Bytes of values and indices from which a column-compressed matrix of a file is converted with a warning, and from
which it is refused: it cannot be read by rows, and is held whole."""


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
    element
        Of a file, the stored array or group; else None.
    """

    matrix: Any
    obs_names: pd.Index | StoredNames
    var: pd.DataFrame
    where: str
    _file: Any = field(default=None, repr=False)
    element: Any = field(default=None, repr=False)

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


def open_matrix(data: AnnData | str | Path, layer: str | None = None, use_raw: bool = False) -> OpenMatrix:
    """Open the expression matrix of an AnnData object, or of an ``.h5ad`` or ``.zarr`` file, without loading it.

    Of a file only the chosen matrix, the gene table and the cell names are touched.

    Parameters
    ----------
    data
        Annotated data, in memory, a view, backed, or dask-backed, or the path of a file that AnnData wrote. AnnData
        reads the matrix of a view of a backed object whole; open the file itself to read it by rows.
    layer
        Key of `adata.layers`; `None` takes `adata.X`.
    use_raw
        Take `adata.raw.X`, which has genes of its own.

    Returns
    -------
    The opened matrix; :meth:`OpenMatrix.close` (or a ``with`` block) releases the file.

    Raises
    ------
    FileNotFoundError
        If the path does not exist.
    KeyError
        If there is no such layer.
    ValueError
        If `layer` and `use_raw` are both given, `adata.raw` or `adata.X` is absent, or the file is no AnnData file.
    """
    if layer is not None and use_raw:
        raise ValueError(
            f"layer={layer!r} and use_raw=True exclude each other: adata.raw has no layers; pass one of them."
        )
    if isinstance(data, str | Path):
        opened = open_path(Path(data), layer, use_raw)
        warn_if_slow(opened.element, opened.where.split(" of ")[0])
        return opened
    check_anndata(data)
    if use_raw:
        if data.raw is None:
            raise ValueError(
                "use_raw=True, but adata.raw is None. Pass use_raw=False, or layer=" + _layers(data.layers) + "."
            )
        return OpenMatrix(data.raw.X, data.obs_names, data.raw.var, "adata.raw.X")
    if layer is not None:
        if layer not in data.layers:
            raise KeyError(
                f"adata has no layer {layer!r}{or_nearest(layer, data.layers)}; its layers: {_layers(data.layers)}."
            )
        return OpenMatrix(data.layers[layer], data.obs_names, data.var, f"adata.layers[{layer!r}]")
    if data.X is None:
        raw = " or use_raw=True" if data.raw is not None else ""
        raise ValueError(f"adata.X is None. Pass layer={_layers(data.layers)}{raw}.")
    return OpenMatrix(data.X, data.obs_names, data.var, "adata.X")


def _layers(layers: Any) -> str:
    # anndata 0.13 lists adata.X among the layers, by the name None
    return " | ".join(repr(str(k)) for k in layers if k is not None) or "(adata has no layers)"


def open_path(path: Path, layer: str | None = None, use_raw: bool = False) -> OpenMatrix:
    """Do what :func:`open_matrix` does with a path, without a warning of slow compression: for a file opened again.

    Parameters
    ----------
    path, layer, use_raw
        As there.
    """
    import anndata.io

    root, file = open_root(path)
    try:
        for within, writer, part in (("mod", "mudata", "modalities"), ("tables", "spatialdata", "tables")):
            if within in root and "X" not in root:
                names = sorted(root[within])
                raise ValueError(_of_several(path, writer, part, names, within))
        if "obs" not in root or "var" not in root:
            raise ValueError(f"{str(path)!r} has no obs and var: expected an .h5ad or .zarr that AnnData wrote.")
        if use_raw:
            if "raw" not in root:
                raise ValueError(f"use_raw=True, but {str(path)!r} has no raw. Pass use_raw=False.")
            group, key = root["raw"], "X"
        elif layer is not None:
            layers = root.get("layers", {})
            if layer not in layers:
                raise KeyError(
                    f"{str(path)!r} has no layer {layer!r}{or_nearest(layer, layers)}; its layers: {_layers(layers)}."
                )
            group, key = root["layers"], layer
        else:
            group, key = root, "X"
        if key not in group or dict(group[key].attrs).get("encoding-type") == "null":
            layers = root.get("layers", {})
            raise ValueError(f"{str(path)!r} has no {key}. Pass layer={_layers(layers)}.")
        what = "raw.X" if use_raw else f"layers[{layer!r}]" if layer is not None else "X"
        names = names_of(root, "obs", path)
        names_of(root["raw"] if use_raw else root, "var", path)
        var = anndata.io.read_elem((root["raw"] if use_raw else root)["var"])
        # Only the index of obs: annotation of an atlas can be larger than memory allows.
        obs_names = StoredNames(names) if hasattr(names, "shape") else pd.Index(anndata.io.read_elem(names)).astype(str)
        element = group[key]
        matrix = whole(element, f"{what} of {str(path)!r}") if hasattr(element, "shape") else _stored_sparse(element)
        if len(matrix.shape) == 2 and tuple(matrix.shape) != (len(obs_names), len(var)):
            raise ValueError(
                f"{what} of {str(path)!r} is {matrix.shape[0]} × {matrix.shape[1]}, but there are names of "
                f"{len(obs_names)} cells and {len(var)} genes. The file is damaged; write it anew from its source."
            )
    except BaseException:
        if file is not None:
            file.close()
        raise
    return OpenMatrix(matrix, obs_names, var, f"{what} of {path.name}", file, element)


def _of_several(path: Path, writer: str, what: str, names: Sequence[str], within: str) -> str:
    """Say how the one AnnData object of a file of several is read."""
    said = f"{str(path)!r} was written by {writer} and holds {len(names)} {what} ({', '.join(names)}). "
    rna = next((name for name in names if name.lower() == "rna"), names[0] if names else "rna")
    if path.is_dir():  # each is a .zarr of its own
        return f"{said}Pass the path of the one of RNA, such as {str(path / within / rna)!r}."
    return f"{said}Write the one of RNA to a file of its own: mudata.read({path.name!r})[{rna!r}].write_h5ad(new)."


def _stored_sparse(group: Any) -> Any:
    import anndata.io

    kind = str(group.attrs.get("encoding-type", group.attrs.get("h5sparse_format", "")))
    if kind.startswith("csr"):
        return StoredRows(group)
    if kind.startswith("csc"):
        return anndata.io.sparse_dataset(group)
    raise ValueError(
        f"{group.name.strip('/')} of {file_of(group)!r} is no matrix (encoding-type {kind!r}): expected a dense, "
        "CSR or CSC matrix that AnnData wrote."
    )


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
        is converted once, whole, in memory; of a file with a warning from 256 MiB on, and not at all above 4 GiB.
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
        If the matrix holds no real numbers, or has a mask.
    ValueError
        If `block_rows` is not positive, the range leaves the matrix, or sparse indices point outside of it; if a file
        is damaged, or holds a large matrix by columns.

    Examples
    --------
    >>> from scdiva.data import open_matrix, row_blocks
    >>> from scdiva.datasets import toy
    >>> [block.shape for _, block in row_blocks(open_matrix(toy(60, 100)).matrix, 40)]
    [(40, 100), (20, 100)]
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


class KeptRows:
    """A matrix as the blocks that :func:`row_blocks` gave of it, kept in memory: no row is made canonical twice.

    Parameters
    ----------
    blocks
        All blocks in order; as many rows each, but for the last.
    """

    def __init__(self, blocks: Sequence[sp.csr_matrix]) -> None:
        self._blocks, self._step = blocks, blocks[0].shape[0]
        self.shape = sum(block.shape[0] for block in blocks), blocks[0].shape[1]

    def read(self, ranges: Sequence[tuple[int, int]]) -> sp.csr_matrix:
        """Give ranges of rows, one after another; what is one block is that block itself, which must not be changed."""
        parts = []
        for start, stop in ranges:
            for number in range(start // self._step, -(-stop // self._step)):
                block, first = self._blocks[number], number * self._step
                inside = start <= first and first + block.shape[0] <= stop
                parts.append(block if inside else block[max(start - first, 0) : stop - first])
        if len(parts) == 1:
            return parts[0]
        return sp.vstack(parts, format="csr") if parts else self._blocks[0][:0]


def row_readable(matrix: Any) -> Any:
    """Return the matrix itself, or a CSR copy of it where its storage can't be read by rows.

    Parameters
    ----------
    matrix
        As in :func:`row_blocks`.
    """
    if len(matrix.shape) != 2:
        raise ValueError(f"expected a matrix of cells × genes, got shape {tuple(matrix.shape)}.")
    if isinstance(matrix, np.ma.MaskedArray):  # read as it is, what the mask hides would count
        raise TypeError("expected a matrix without a mask: say what masked values stand for, as matrix.filled(0) does.")
    stored = not sp.issparse(matrix) and hasattr(matrix, "group")  # anndata's backed sparse matrices
    if stored and matrix.format == "csr":
        return StoredRows(matrix.group)
    if stored and matrix.format == "csc":
        return _csc_to_memory(matrix)
    if sp.issparse(matrix) and matrix.format != "csr":
        return matrix.tocsr()
    return matrix


def _csc_to_memory(matrix: Any) -> sp.csr_matrix:
    group = matrix.group
    n_bytes = sum(int(np.prod(group[k].shape)) * group[k].dtype.itemsize for k in ("data", "indices"))
    where = f"{group.name.strip('/')} of {file_of(group)!r}"
    said = (
        f"{where} is compressed by columns (CSC) and cannot be read by rows; converting it takes about "
        f"{2 * n_bytes / 2**30:.1f} GiB of memory"
    )
    mend = "Write it anew by rows: adata = anndata.read_h5ad(path); adata.X = adata.X.tocsr(); adata.write_h5ad(new)."
    if n_bytes > CSC_LIMIT:
        raise ValueError(f"{said}, which is refused. {mend}")
    if n_bytes > CSC_WARNING:
        warn(f"{said}. {mend}")
    return matrix.to_memory().tocsr()


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
    return read_ranges(matrix, [(start, stop)])


def read_ranges(matrix: Any, ranges: Sequence[tuple[int, int]]) -> sp.csr_matrix:
    """Read several ranges of rows, one after another, as one block: faster than one by one and joined.

    Parameters
    ----------
    matrix
        What :func:`row_readable` returned.
    ranges
        First row and the row to end before, of each.

    Returns
    -------
    A block as :func:`read_rows` returns, with the rows in the order of the ranges.

    Raises
    ------
    TypeError, ValueError
        As :func:`row_blocks` does.
    """
    if isinstance(matrix, KeptRows):
        return matrix.read(ranges)
    if isinstance(matrix, StoredRows):
        return _canonical(*matrix.read(ranges), int(matrix.shape[1]), matrix.where)
    if len(ranges) != 1:
        parts = [read_rows(matrix, start, stop) for start, stop in ranges]
        return sp.vstack(parts, format="csr") if parts else sp.csr_matrix((0, int(matrix.shape[1])), dtype=np.float32)
    start, stop = ranges[0]
    if sp.issparse(matrix):
        # Slice the three arrays ourselves: scipy trusts cached flags about sorted indices that a user may have broken.
        lo, hi = int(matrix.indptr[start]), int(matrix.indptr[stop])
        data, indices = matrix.data[lo:hi], matrix.indices[lo:hi]
        indptr = np.asarray(matrix.indptr[start : stop + 1]) - lo
    else:
        in_file = hasattr(matrix, "file") or hasattr(matrix, "store")  # a dense array of HDF5 or zarr
        with naming(f"{matrix.name.strip('/')} of {file_of(matrix)!r}") if in_file else nullcontext():
            part = matrix[start:stop]
        if hasattr(part, "compute"):
            part = part.compute()
        if not sp.issparse(part):
            part = np.asarray(part)
            _check_numbers(part.dtype)
            if part.dtype.itemsize < 4 or not part.dtype.isnative:  # scipy has neither float16 nor foreign byte order
                part = part.astype(np.float32 if part.dtype.itemsize < 4 else part.dtype.newbyteorder("="))
            part = sp.csr_matrix(part)
        part = part.tocsr()
        data, indices, indptr = part.data, part.indices, part.indptr
    return _canonical(data.copy(), indices.copy(), indptr.copy(), int(matrix.shape[1]), f"rows {start} to {stop}")


def _canonical(data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, n_vars: int, where: str) -> sp.csr_matrix:
    """Make a block of three arrays that it may keep."""
    _check_numbers(data.dtype)
    if not (data.dtype.isnative and indices.dtype.isnative and indptr.dtype.isnative):  # of a file from elsewhere
        data, indices, indptr = (part.astype(part.dtype.newbyteorder("=")) for part in (data, indices, indptr))
    # as unsigned numbers the negative ones are the largest: one look is enough
    if len(indices) and int(indices.view(f"u{indices.dtype.itemsize}").max()) >= n_vars:
        raise ValueError(
            f"{where}: sparse column indices run from {int(indices.min())} to {int(indices.max())}, but "
            f"the matrix has {n_vars} columns. The file or matrix is damaged; write it anew from its source."
        )
    index_dtype = np.int32 if n_vars <= np.iinfo(np.int32).max and len(indices) <= np.iinfo(np.int32).max else np.int64
    # Small types can't hold the sum of entries that stand twice, and scipy knows no float16.
    block = sp.csr_matrix(
        (
            data.astype(np.float32 if data.dtype.itemsize < 4 else data.dtype, copy=False),
            indices.astype(index_dtype, copy=False),
            indptr.astype(index_dtype, copy=False),
        ),
        shape=(len(indptr) - 1, n_vars),
    )
    block.sum_duplicates()
    if block.dtype != np.float32:
        with np.errstate(over="ignore"):  # becomes Inf, which the scan reports
            block = block.astype(np.float32)
    if (block.data == 0).any():  # several times as fast as to eliminate none
        block.eliminate_zeros()
    return block


def _check_numbers(dtype: np.dtype) -> None:
    if dtype.kind not in "biuf":
        raise TypeError(f"expected a matrix of real numbers, got dtype {dtype}.")
