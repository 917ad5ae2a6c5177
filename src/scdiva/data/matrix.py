"""Expression matrices of any storage, read as canonical CSR blocks of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd
import scipy.sparse as sp

from scdiva._checks import check_least, is_second_argument, or_nearest
from scdiva._files import as_path, is_path, reaching
from scdiva._validate import Input, Names, Scan, scan, with_matrix
from scdiva.data.backed import StoredNames, StoredRows, checked_array, file_of, names_of, naming, open_root
from scdiva.data.results import check_anndata
from scdiva.data.soma import SomaCells, SomaRows

if TYPE_CHECKING:
    from anndata import AnnData

BLOCK_ROWS = 1024
"""Rows per block. A block takes up to 40 bytes of memory per stored value: 80 MB for 1,024 cells of 2,000 genes."""
CSC_LIMIT = 1 << 32
"""Maximum bytes of values and indices of a column-compressed matrix in a file, which has to be loaded whole."""


@dataclass
class OpenMatrix:
    """An expression matrix with the names of its rows and columns.

    Attributes
    ----------
    matrix
        Matrix for :func:`row_blocks`, (n_obs, n_vars).
    obs_names, var
        Names of the cells; annotation of the genes, with their names as index.
    where
        Name of the matrix in error messages, for instance ``adata.layers['counts']``.
    """

    matrix: Any
    obs_names: pd.Index | StoredNames
    var: pd.DataFrame
    where: str
    _file: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.matrix, pd.DataFrame):
            self.matrix = self.matrix.to_numpy()
        try:
            _check_numbers(self.matrix, self.where, self.obs_names, self.var.index)
        except TypeError:
            self.close()
            raise

    @property
    def shape(self) -> tuple[int, int]:
        """Number of cells and genes."""
        return int(self.matrix.shape[0]), int(self.matrix.shape[1])

    def scan(
        self,
        blocks: Iterable[tuple[int, sp.csr_matrix]],
        input: Input = "auto",
        is_known_gene: np.ndarray | None = None,
    ) -> Scan:
        """Check the values of blocks; errors name cells and genes.

        Parameters
        ----------
        blocks, input, is_known_gene
            As for :func:`scdiva._validate.scan`.
        """
        return scan(
            blocks,
            self.shape[1],
            input=input,
            is_known_gene=is_known_gene,
            obs_names=self.obs_names,
            var_names=self.var.index,
            where=self.where,
        )

    def close(self) -> None:
        """Close the file, if any."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> OpenMatrix:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_matrix(data: AnnData | SomaCells | str | Path, layer: str | None = None, use_raw: bool = False) -> OpenMatrix:
    """Open the expression matrix of an AnnData object, an ``.h5ad`` or ``.zarr`` file, or a SOMA experiment.

    Only the gene table and, if they are not stored as an array of text, the cell names are loaded.

    Parameters
    ----------
    data
        AnnData object (in memory, a view, backed, or with dask arrays); path or URL of a file that AnnData wrote; or
        cells from :func:`open_soma`. AnnData loads the whole matrix for a view of a backed object: open the file
        instead.
    layer
        Key of `adata.layers`. None: `adata.X`. For a SOMA experiment a layer of `X`, see :func:`open_soma`.
    use_raw
        Whether to read `adata.raw.X`, with its own genes.

    Returns
    -------
    The opened matrix; :meth:`OpenMatrix.close` (or a ``with`` block) closes the file.

    Raises
    ------
    FileNotFoundError
        If the path does not exist.
    KeyError
        If the layer does not exist.
    ValueError
        If `layer` and `use_raw` are combined, `adata.raw` or `adata.X` is absent, or the file was not written by
        AnnData.
    """
    if layer is not None and use_raw:
        raise ValueError(f"layer={layer!r} and use_raw=True exclude each other: adata.raw has no layers; pass one.")
    if isinstance(data, SomaCells):
        if use_raw:
            raise ValueError(f"{str(data)!r} has no raw: pass the layer of X that holds counts, as layer.")
        rows = SomaRows(data, layer)
        return OpenMatrix(rows, rows.obs_names, rows.var, rows.where, rows)
    if is_path(data):
        with reaching(path := as_path(data)):
            return _open_file(path, layer, use_raw)
    check_anndata(data)
    adata = cast("AnnData", data)
    _refuse_absent("adata", adata.layers, adata.raw is not None, adata.X is not None, layer, use_raw)
    if use_raw:
        return OpenMatrix(adata.raw.X, adata.obs_names, adata.raw.var, "adata.raw.X")
    if layer is not None:
        return OpenMatrix(adata.layers[layer], adata.obs_names, adata.var, f"adata.layers[{layer!r}]")
    return OpenMatrix(adata.X, adata.obs_names, adata.var, "adata.X")


def _refuse_absent(where: str, layers: Any, has_raw: bool, has_x: bool, layer: str | None, use_raw: bool) -> None:
    """Raise an error if the matrix does not exist, and list those that do."""
    names = [str(name) for name in layers if name is not None]  # anndata 0.13 lists adata.X among them, as None
    held = " or ".join([*(f"layer={name!r}" for name in names), *(["use_raw=True"] if has_raw and not use_raw else [])])
    mend = f"Pass {held}." if held else "It has no layers either."
    no_raw = "Pass use_raw=False." if has_x else mend
    if is_second_argument() and has_x:  # the first argument is read in the same way, and has the matrix
        no_raw = "If its X holds the counts: adata.raw = adata.copy()."
        mend = f"If its X holds the same values: adata.layers[{layer!r}] = adata.X.copy()."
    if use_raw and not has_raw:
        raise ValueError(f"use_raw=True, but {where} has no raw. {no_raw}")
    if layer is not None and layer not in names:
        raise KeyError(f"{where} has no layer {layer!r}{or_nearest(layer, names)}. {mend}")
    if not use_raw and layer is None and not has_x:
        raise ValueError(f"{where} has no X. {mend}")


def _open_file(path: Path, layer: str | None, use_raw: bool) -> OpenMatrix:
    import anndata.io

    root, file = open_root(path)
    try:
        for within in ("mod", "tables"):
            if within in root and "X" not in root:
                raise ValueError(
                    f"{str(path)!r} holds several AnnData objects: {', '.join(sorted(root[within]))}. Pass the one of "
                    f"RNA: of .zarr its own path, such as {str(path / within / 'rna')!r}; of .h5mu write it to a file "
                    f"first, mudata.read({path.name!r})['rna'].write_h5ad(new)."
                )
        if "obs" not in root or "var" not in root:
            raise ValueError(f"{str(path)!r} has no obs and var: expected an .h5ad or .zarr that AnnData wrote.")
        has_x = "X" in root and dict(root["X"].attrs).get("encoding-type") != "null"
        _refuse_absent(repr(str(path)), root.get("layers", {}), "raw" in root, has_x, layer, use_raw)
        of = root["raw"] if use_raw else root
        what = "raw.X" if use_raw else f"layers[{layer!r}]" if layer is not None else "X"
        names = names_of(root, "obs", path)
        names_of(of, "var", path)
        var = anndata.io.read_elem(of["var"])
        # only the index of obs, as the annotation of an atlas may not fit into memory
        obs_names = StoredNames(names) if hasattr(names, "shape") else pd.Index(anndata.io.read_elem(names)).astype(str)
        element = of["X"] if layer is None else root["layers"][layer]
        matrix = (
            checked_array(element, f"{what} of {str(path)!r}") if hasattr(element, "shape") else _stored_sparse(element)
        )
        if len(matrix.shape) == 2 and tuple(matrix.shape) != (len(obs_names), len(var)):
            raise ValueError(
                f"{what} of {str(path)!r} is {matrix.shape[0]} × {matrix.shape[1]}, but there are names of "
                f"{len(obs_names)} cells and {len(var)} genes. The file is damaged; write it again from its source."
            )
    except BaseException:
        if file is not None:
            file.close()
        raise
    return OpenMatrix(matrix, obs_names, var, f"{what} of {path.name}", file)


def _stored_sparse(group: Any) -> Any:
    import anndata.io

    kind = str(group.attrs.get("encoding-type", group.attrs.get("h5sparse_format", "")))
    if kind.startswith("csr"):
        return StoredRows(group)
    if kind.startswith("csc"):
        return anndata.io.sparse_dataset(group)
    raise ValueError(
        f"{group.name.strip('/')} of {file_of(group)!r} is not a matrix (encoding-type {kind!r}): expected a dense, "
        "CSR or CSC matrix that AnnData wrote."
    )


def row_blocks(matrix: Any, block_rows: int = BLOCK_ROWS) -> Iterator[tuple[int, sp.csr_matrix]]:
    """Read a matrix of any storage as canonical CSR blocks of rows, in order.

    A block is a new float32 CSR matrix with sorted, unique indices and no explicit zeros; the matrix itself is never
    changed. NaN and Inf pass (:func:`scdiva._validate.scan` reports them).

    Parameters
    ----------
    matrix
        (n_obs, n_vars): scipy sparse matrix of any format, numpy array or matrix, AnnData view, backed sparse or dense
        matrix (HDF5 or zarr), or dask array with dense or sparse chunks. A column-compressed matrix is loaded whole; in
        a file it may have at most 4 GiB.
    block_rows
        Rows per block; the last block may be shorter.

    Yields
    ------
    First row of the block, and the block, (rows, n_vars).

    Raises
    ------
    TypeError
        If the matrix does not have real numbers, or is masked.
    ValueError
        If `block_rows` is not positive, sparse indices are out of range, a file is damaged, or has a large
        column-compressed matrix.

    Examples
    --------
    >>> from scdiva.data import open_matrix, row_blocks
    >>> from scdiva.datasets import toy
    >>> [block.shape for _, block in row_blocks(open_matrix(toy(60, 100)).matrix, 40)]
    [(40, 100), (20, 100)]
    """
    check_least(block_rows=(block_rows, 1))
    matrix = row_readable(matrix)
    n_obs = int(matrix.shape[0])
    for start in range(0, n_obs, block_rows):
        yield start, read_ranges(matrix, [(start, min(start + block_rows, n_obs))])


def row_readable(matrix: Any) -> Any:
    """Return the matrix, or a CSR copy if its storage can't be read by rows; arguments as for :func:`row_blocks`."""
    if len(matrix.shape) != 2:
        raise ValueError(f"expected a matrix of cells × genes, got shape {tuple(matrix.shape)}.")
    _check_numbers(matrix)
    stored = not sp.issparse(matrix) and hasattr(matrix, "group")  # anndata's backed sparse matrices
    if stored and matrix.format == "csr":
        return StoredRows(matrix.group)
    if stored and matrix.format == "csc":
        return _csc_to_memory(matrix)
    if sp.issparse(matrix) and matrix.format == "csc":
        return _csc_to_csr(matrix, "the matrix")
    if sp.issparse(matrix) and matrix.format != "csr":
        return matrix.tocsr()
    return matrix


def _csc_to_memory(matrix: Any) -> sp.csr_matrix:
    group = matrix.group
    n_bytes = sum(int(np.prod(group[k].shape)) * group[k].dtype.itemsize for k in ("data", "indices"))
    if n_bytes > CSC_LIMIT:
        raise ValueError(
            f"{group.name.strip('/')} of {file_of(group)!r} is compressed by columns (CSC) and cannot be read by rows; "
            f"converting it would take about {2 * n_bytes / 2**30:.1f} GiB of memory. Write it again by rows: "
            "adata = anndata.read_h5ad(path); adata.X = adata.X.tocsr(); adata.write_h5ad(new)."
        )
    return _csc_to_csr(matrix.to_memory(), f"{group.name.strip('/')} of {file_of(group)!r}")


def _csc_to_csr(matrix: Any, where: str) -> sp.csr_matrix:
    """Convert to CSR after checking the arrays, since scipy would read and write outside them."""
    _check_pointers(matrix.indptr, matrix.indices, int(matrix.shape[1]), where)
    _check_indices(matrix.indices, int(matrix.shape[0]), where, "row")
    return matrix.tocsr()


def _check_pointers(indptr: np.ndarray, indices: np.ndarray, n: int, where: str) -> None:
    """Raise ValueError unless the pointers of `n` rows or columns ascend from 0 to the number of stored values."""
    if len(indptr) != n + 1 or indptr[0] != 0 or indptr[-1] != len(indices) or bool((indptr[1:] < indptr[:-1]).any()):
        raise ValueError(
            f"{where}: indptr does not ascend from 0 to the {len(indices)} stored values. The file or matrix is "
            "damaged; write it again from its source."
        )


def _check_indices(indices: np.ndarray, n: int, where: str, what: str) -> None:
    """Raise ValueError if an index is negative or not below `n`."""
    # negative indices are the largest unsigned numbers: one pass is enough
    if len(indices) and int(indices.view(f"u{indices.dtype.itemsize}").max()) >= n:
        raise ValueError(
            f"{where}: sparse {what} indices run from {int(indices.min())} to {int(indices.max())}, but "
            f"the matrix has {n} {what}s. The file or matrix is damaged; write it again from its source."
        )


def read_ranges(matrix: Any, ranges: Sequence[tuple[int, int]]) -> sp.csr_matrix:
    """Read ranges of rows, joined in order, as one canonical float32 CSR block (see :func:`row_blocks`).

    Parameters
    ----------
    matrix
        Result of :func:`row_readable`.
    ranges
        First row and last row (exclusive) of each range.

    Returns
    -------
    The rows, which share no memory with the matrix.

    Raises
    ------
    TypeError, ValueError
        As :func:`row_blocks`.
    """
    if isinstance(matrix, StoredRows | SomaRows):
        return _canonical(*matrix.read(ranges), int(matrix.shape[1]), matrix.where)
    if len(ranges) != 1:
        parts = [read_ranges(matrix, [one]) for one in ranges]
        return sp.vstack(parts, format="csr") if parts else sp.csr_matrix((0, int(matrix.shape[1])), dtype=np.float32)
    start, stop = ranges[0]
    if sp.issparse(matrix):
        # not by scipy, which trusts flags about sorted indices that may be wrong
        lo, hi = int(matrix.indptr[start]), int(matrix.indptr[stop])
        data, indices = matrix.data[lo:hi], matrix.indices[lo:hi]
        indptr = np.asarray(matrix.indptr[start : stop + 1]) - lo
    else:
        in_file = hasattr(matrix, "file") or hasattr(matrix, "store")  # dense array in HDF5 or zarr
        with naming(f"{matrix.name.strip('/')} of {file_of(matrix)!r}") if in_file else nullcontext():
            part = matrix[start:stop]
        if hasattr(part, "compute"):
            part = part.compute()
        if not sp.issparse(part):
            part = np.asarray(part)
            _check_numbers(part)
            if part.dtype.itemsize < 4 or not part.dtype.isnative:  # unsupported by scipy
                part = part.astype(np.float32 if part.dtype.itemsize < 4 else part.dtype.newbyteorder("="))
            part = sp.csr_matrix(part)
        part = part.tocsr()
        data, indices, indptr = part.data, part.indices, part.indptr
    return _canonical(data.copy(), indices.copy(), indptr.copy(), int(matrix.shape[1]), f"rows {start} to {stop}")


def _canonical(data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, n_vars: int, where: str) -> sp.csr_matrix:
    """Canonical CSR block from three arrays, which it may keep and change."""
    _check_numbers(data)
    if not (data.dtype.isnative and indices.dtype.isnative and indptr.dtype.isnative):  # a file from another machine
        data, indices, indptr = (part.astype(part.dtype.newbyteorder("=")) for part in (data, indices, indptr))
    _check_pointers(indptr, indices, len(indptr) - 1, where)
    _check_indices(indices, n_vars, where, "column")
    index_dtype = np.int32 if n_vars <= np.iinfo(np.int32).max and len(indices) <= np.iinfo(np.int32).max else np.int64
    # small dtypes may overflow when duplicate entries are summed, and scipy does not support float16
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
        with np.errstate(over="ignore"):  # the scan reports Inf
            block = block.astype(np.float32)
    if (block.data == 0).any():  # several times faster than eliminating none
        block.eliminate_zeros()
    return block


def _check_numbers(
    matrix: Any, where: str = "the matrix", obs_names: Names | None = None, var_names: Names | None = None
) -> None:
    """Raise an error if a matrix does not have real numbers; the message names the first other value."""
    if isinstance(matrix, np.ma.MaskedArray):  # the hidden values would be counted
        raise TypeError(
            f"{where} has a mask, which hides {int(np.ma.getmaskarray(matrix).sum())} values. Say what they stand for; "
            f"if they are zeros: {with_matrix(where, '{0} = {0}.filled(0)')}."
        )
    dtype = getattr(matrix, "dtype", None)
    if dtype is not None and np.dtype(dtype).kind == "b":
        raise ValueError(f"{where} is binary. Pass the counts: a layer (layer=), or use_raw=True.")
    if dtype is None or np.dtype(dtype).kind in "iuf":
        return
    numbers = "{0} = {0}.astype(np.float32)"
    what = f"{where} has dtype {dtype}, which is not a dtype of real numbers"
    if np.dtype(dtype).kind not in "OSU":
        raise TypeError(f"{what}. Pass the counts with layer=... or use_raw=True.")
    if (first_text := _first_text(matrix)) is None:
        raise TypeError(f"{what}. All of its values are numbers: {with_matrix(where, numbers)}.")
    value, row, column = first_text
    cell = f"row {row}" if obs_names is None else f"cell {str(obs_names[row])!r}"
    gene = f"column {column}" if var_names is None else f"gene {str(var_names[column])!r}"
    if pd.isna(value):
        fill = with_matrix(where, "{0} = pd.DataFrame({0}).astype('Float64').to_numpy(np.float32, na_value=0)")
        raise TypeError(f"{what}: the first missing value is at {cell}, {gene}. If these are missing counts: {fill}.")
    drop = f"adata = adata[:, adata.var_names != {'...' if var_names is None else str(var_names[column])!r}].copy()"
    mend = with_matrix(where, f"{drop.replace('{', '{{').replace('}', '}}')}; {numbers}")
    raise TypeError(f"{what}: {value!r:.40} at {cell}, {gene}. If this column is not a gene, leave it out: {mend}.")


def _first_text(matrix: Any) -> tuple[Any, int, int] | None:
    """First value that is not a number, with its row and column; None if all are."""
    for start in range(0, int(matrix.shape[0]), BLOCK_ROWS):
        part = matrix[start : start + BLOCK_ROWS]
        part = part.toarray() if sp.issparse(part) else np.asarray(part)
        try:
            part.astype(np.float64)
        except (TypeError, ValueError):
            for row, column in np.ndindex(part.shape):
                try:
                    float(part[row, column])
                except (TypeError, ValueError):
                    return part[row, column], start + row, column
    return None
