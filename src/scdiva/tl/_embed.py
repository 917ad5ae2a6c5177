"""Embed cells with a trained model, nothing fitted."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np

from scdiva import _constants as C
from scdiva._docs import with_shared_docs
from scdiva._progress import progress_bar
from scdiva._settings import logger, settings
from scdiva.data.reading import AS_IT_IS, Reading, Species
from scdiva.data.writing import check_key, check_writable, noted
from scdiva.tl._notes import embedding_key, model_name

if TYPE_CHECKING:
    from pathlib import Path

    from anndata import AnnData
    from torch import Tensor

    from scdiva.data.source import CellSource, Ragged
    from scdiva.models import ScDiVa
    from scdiva.models.inference import Pooling, ReadOut

Item = TypeVar("Item")


@with_shared_docs
def embed(
    adata: AnnData,
    model: ScDiVa | str | PathLike[str] = C.DEFAULT_MODEL,
    *,
    pooling: Literal["lat", "mean", "lat+mean"] = "lat",
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    empty: Literal["error", "nan"] = "error",
    batch_size: int | None = None,
    device: str | None = None,
    precision: Literal["auto", "fp32", "bf16"] | None = None,
    key_added: str | None = None,
    copy: bool = False,
) -> AnnData | None:
    """Embed cells zero-shot: what a trained model makes of each, by default the state of its latent anchor.

    Genes are matched to the model's vocabulary by name, cells are serialised with the entropies of the model's own
    corpus (paper, section 3.2) and read by row blocks, so backed, zarr and dask data are never loaded whole. Nothing
    is fitted: the embedding of a cell depends neither on the other cells nor on the order of rows or columns.

    Parameters
    ----------
    adata
        Cells × genes, raw counts or log-normalised expression.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`.
    pooling
        What is read out of a cell: `"lat"`, the state of the latent anchor; `"mean"`, the mean over the cell's genes of
        the transformer's final hidden states, nothing masked; `"lat+mean"`, both, each brought to length one, side by
        side. Of a cell longer than the model's `max_length` the transformer sees the first so many genes. `"lat"` of a
        model whose state comes from the set encoder alone, as `"scdiva-mini"`'s does, needs no transformer and is
        faster by far; `"lat+mean"` tells cell types apart no better, `"mean"` much worse (measured on three sets of
        blood, see the benchmarks in the docs).
    %(reading)s
    empty
        A cell without any gene of the vocabulary is an error, or gets a row of NaN (`"nan"`).
    batch_size
        Most cells per forward pass; `None` takes `scdiva.settings.batch_size`. It changes speed and memory, and
        results by rounding at most. A CPU takes cells through a transformer one by one,
        `scdiva.settings.threads` at once.
    device
        Torch device such as `"cpu"` or `"cuda:0"`; `None` takes `scdiva.settings.device`.
    precision
        Arithmetic of the transformer: `"fp32"`, `"bf16"` or `"auto"`, bf16 where the device has it in hardware;
        `None` takes `scdiva.settings.precision`.
    key_added
        Key of `adata.obsm` to write. None: `"X_scdiva"`, or of a model of `tl.integrate` `"X_scdiva_integrated"`.
    copy
        Return a copy of `adata` with the embedding instead of writing into it.

    Returns
    -------
    `None`, or the copy if `copy=True`. Written are

    `adata.obsm[key_added]`
        float32 array of shape `(n_cells, state_dim)`, wider for a model of :func:`integrate`; `(n_cells, dim)` for
        `"mean"`, and their sum for `"lat+mean"`.
    `adata.uns["scdiva"][key_added]`
        The parameters of the call, and the share of genes and counts that the model's vocabulary holds.

    Raises
    ------
    ValueError
        If the matrix is not counts or log-normalised expression (NaN, negative, scaled), if less than half of the
        counts belong to genes that the model knows, or a cell has none of them and `empty="error"`; if `adata` is
        backed and would have to be copied, or its `uns["scdiva"]` is not ours; if `key_added` is none for a file, or
        something that scdiva did not write stands there; if the device is not there or cannot do
        the precision asked for, or there is no such `pooling`.
    KeyError
        If `layer` or `gene_ids` does not exist.
    TypeError
        If `adata` is no AnnData object.

    Warns
    -----
    UserWarning
        If the data have so few of the model's genes (less than 65% by entropy) that the mean cosine of embeddings to
        those of whole cells is below 0.95; if values are taken as counts or logarithms although they look unlike.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> sd.tl.embed(adata)
    >>> adata.obsm["X_scdiva"].shape
    (60, 192)
    """
    check_writable(adata, copy=copy)
    check_key(C.OBSM_EMBEDDING if key_added is None else key_added, "key_added")
    running = how_to_run(batch_size, device, precision, pooling)
    reading = Reading(layer, use_raw, input, gene_ids, species, duplicates)

    from scdiva.models.pretrained import load_for

    loaded = load_for(model, running.device)
    key = embedding_key(loaded) if key_added is None else key_added
    check_writable(adata, copy=copy, call="tl.embed", entry=key, obsm=[key])
    embedding, parameters = embedded(loaded, adata, running, reading, empty=empty)
    # written last, once nothing can fail any more
    written = adata.copy() if copy else adata
    written.obsm[key] = embedding
    written.uns[C.UNS] = noted(written, "tl.embed", key, {**parameters, "model": model_name(model)}, obsm=[key])
    return written if copy else None


def embedded(
    model: ScDiVa | str | PathLike[str], adata: AnnData, running: Running, reading: Reading, **options: Any
) -> tuple[np.ndarray, dict[str, Any]]:
    """Embed the cells of an AnnData object and write nothing.

    Parameters
    ----------
    model, adata, running, reading, **options
        As for :func:`open_for`.

    Returns
    -------
    float32 `(n_obs, width)`, rows of NaN for cells that the source leaves out, and what :func:`open_for` found.
    """
    loaded, source, parameters = open_for(model, adata, running, reading, **options)
    embedding = np.full((source.n_obs, running.width(loaded)), np.nan, dtype=np.float32)
    for rows, states in embed_cells(loaded, source, running):
        embedding[rows] = states
    if left_out := int(np.isnan(embedding[:, 0]).sum()):
        logger.info("%d cells have no known gene; their rows are NaN", left_out)
    return embedding, parameters


def open_for(
    model: ScDiVa | str | PathLike[str],
    data: AnnData | Path,
    running: Running,
    reading: Reading = AS_IT_IS,
    *,
    empty: Literal["error", "nan"] = "error",
    scan: Any = None,
    embeds: bool = True,
) -> tuple[ScDiVa, CellSource, dict[str, Any]]:
    """Load a model and open cells as it reads them.

    Parameters
    ----------
    model
        As for :func:`embed`.
    data
        The cells, or the path of a file of cells.
    running
        How they will be run.
    reading
        What to read.
    empty
        As for :func:`embed`.
    scan
        The :class:`~scdiva._validate.Scan` of these very cells, if they were checked, and warned of, before.
    embeds
        Whether results rest on what the model makes of the cells, so that few genes are warned of.

    Returns
    -------
    The loaded model, the checked cells, and what the call was given and found, as scalars that h5ad can hold.
    """
    from scdiva.data.cells import open_cells
    from scdiva.models.inference import runs_transformer
    from scdiva.models.pretrained import load_for

    loaded = load_for(model, running.device)
    source = open_cells(data, loaded, reading, scanned=scan, embeds=embeds, empty=empty)
    parameters = {
        "model": model_name(model),
        "vocabulary": loaded.vocabulary.fingerprint,
        **reading.parameters(),
        "empty": empty,
        "input": source.kind,
        "pooling": running.what,
        "precision": running.precision if runs_transformer(loaded, running.what) else "fp32",
        **{key: source.report[key] for key in ("share_genes", "share_counts")},
    }
    return loaded, source, parameters


class Running(NamedTuple):
    """How cells are run through a model; all settled.

    Attributes
    ----------
    batch_size
        Most cells of a batch; None: no bound.
    device, precision
        As torch and :func:`scdiva.models.inference.open_encoder` take them.
    what
        What is read out, see :func:`scdiva.models.inference.read_out`.
    """

    batch_size: int | None
    device: str
    precision: str
    what: ReadOut

    def width(self, model: ScDiVa) -> int:
        """Width of a row of the result."""
        from scdiva.models.inference import pooled_dim

        if callable(self.what):
            raise TypeError("what a function makes of a batch has a width of its own.")
        return model.config.dim if self.what == "genes" else pooled_dim(model, self.what)


def how_to_run(batch_size: int | None, device: str | None, precision: str | None, pooling: Pooling = "lat") -> Running:
    """Settle how cells are run, before anything is read.

    Parameters
    ----------
    batch_size, device, precision, pooling
        As for :func:`embed`; None takes the setting.

    Raises
    ------
    ValueError
        As :func:`embed` does.
    """
    if pooling not in ("lat", "mean", "lat+mean"):
        raise ValueError(f"pooling must be 'lat', 'mean' or 'lat+mean', got {pooling!r}.")
    batch_size = settings.batch_size if batch_size is None else operator.index(batch_size)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    device = settings.resolve_device(device)
    return Running(batch_size, device, settings.resolve_precision(precision, device), pooling)


def embed_cells(
    model: ScDiVa, source: CellSource, running: Running, *, start: int = 0, stop: int | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Run the model over all cells of a source, window by window; the next one is read meanwhile.

    Parameters
    ----------
    model
        The model; left on the device and in the mode in which it was.
    source
        Cells to embed, read in row order.
    running
        How, from :func:`how_to_run`.
    start, stop
        First row, and that to end before: 0 and None, or where windows end, so that they hold the same cells.

    Yields
    ------
    Row numbers `(n,)`, ascending, and float32 states `(n, width)`. Rows that the source leaves out never come.
    """
    width = running.width(model)
    for rows, _, results in run_cells(model, source, running, start=start, stop=stop):
        states = np.empty((len(rows), width), dtype=np.float32)
        for cells, found in results:
            states[cells] = found
        yield rows, states


def run_cells(
    model: ScDiVa,
    source: CellSource,
    running: Running,
    *,
    start: int = 0,
    stop: int | None = None,
    held_tokens: int | None = None,
    only: np.ndarray | None = None,
    beside: Callable[[np.ndarray], tuple[Tensor, ...]] | None = None,
) -> Iterator[tuple[np.ndarray, Ragged, Iterator[tuple[np.ndarray, np.ndarray]]]]:
    """Run the model over all cells of a source, and give what it makes of them batch by batch.

    Parameters
    ----------
    model, source, running, start, stop
        As for :func:`embed_cells`.
    held_tokens
        Tokens of the batches whose results may wait to be taken, where these are large; None: those of a window.
    only
        bool `(n_obs,)`, the cells to run; None: all.
    beside
        Gives more tensors of the cells of a batch, by their rows, for a function that reads out.

    Yields
    ------
    For each window the row numbers of its cells `(n,)`, the cells, and an iterator over its batches: the place of each
    batch's cells within the window, and what was read out of them. It must be used up before the next window is asked
    for.
    """
    from scdiva.data.batch import from_ragged
    from scdiva.data.packed import take_cells
    from scdiva.data.packing import WINDOW, fill_batches, portions
    from scdiva.models.inference import open_encoder, runs_transformer

    through_blocks = runs_transformer(model, running.what)
    # on a CPU, cells share a call only where they are as good as free
    most = 1 if through_blocks and running.device.startswith("cpu") else running.batch_size
    with (
        open_encoder(
            model,
            device=running.device,
            precision=running.precision,
            threads=settings.threads,
            what=running.what,
        ) as encode,
        progress_bar(
            desc="running the model",
            unit="cell",
            total=(source.n_obs if stop is None else stop) if only is None else int(only.sum()),
            initial=start,
        ) as bar,
    ):

        def results(rows: np.ndarray, ragged: Ragged) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            lengths = np.diff(ragged[0])
            if through_blocks:
                lengths = np.minimum(lengths, model.config.max_length) + 1

            def packed(cells: np.ndarray) -> tuple[Tensor, ...]:
                batch = from_ragged(*take_cells(ragged, cells)).packed
                return batch if beside is None else (*batch, *beside(rows[cells]))

            for batches in portions(fill_batches(lengths, max_cells=most), lengths, held_tokens):
                for cells, found in zip(batches, encode(packed, batches), strict=True):
                    yield cells, found
                    bar.update(len(cells))

        for rows, ragged in _read_ahead(source.windows(WINDOW, start, stop)):
            if only is not None:
                wanted = np.flatnonzero(only[rows])
                rows, ragged = rows[wanted], take_cells(ragged, wanted)
            if len(rows):
                yield rows, ragged, results(rows, ragged)


def _read_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Iterate with the next item made in a thread of its own."""
    with ThreadPoolExecutor(1, "scdiva-read") as reader:
        coming = reader.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = reader.submit(next, items, None)
            yield item
