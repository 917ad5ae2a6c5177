"""Data of a training run, for Lightning."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, IterableDataset

from scdiva._constants import MAX_LENGTH
from scdiva.data.batch import CellBatch
from scdiva.data.files import check_manifest, data_files, manifest_of
from scdiva.data.order import BlockShuffle
from scdiva.data.packed import PackedCells, is_packed, study_names, warn_left_out
from scdiva.data.pool import CellPool, Source
from scdiva.data.stream import TrainingStream, ValidationBatches
from scdiva.tokenizer.serialize import ENTROPY_FLOOR
from scdiva.tokenizer.vocabulary import Vocabulary, load_vocabulary

if TYPE_CHECKING:
    from anndata import AnnData

    from scdiva._validate import Input

    Data: TypeAlias = AnnData | str | Path

UNSEEN_STUDY = -1
"""Study number of validation cells whose study is not trained on."""


class CellDataModule(pl.LightningDataModule):
    """Training and validation batches from files, AnnData objects or a packed corpus; files are never loaded whole.

    Parameters
    ----------
    train
        List of ``.h5ad`` or ``.zarr`` files or AnnData objects, each a study of its own, or one corpus that
        :func:`scdiva.data.pack_files` wrote (or one file or object). A folder stands for the files in it, by name.
        Files may have different genes: each is matched by itself.
    validation
        The same for validation; None = no validation. Split by study, not by cell: cells of one study are too alike.
    vocabulary
        Genes and entropies.
    batch_size
        Cells of a batch; without effect if `batch_tokens` is given.
    batch_tokens
        Most tokens (genes, and `[LAT]` of each cell) of a batch, in place of a number of cells: batches then take the
        same memory and time whatever the length of their cells. See :class:`~scdiva.data.stream.TrainingStream`.
    context
        Genes of a cell seen in training: the first of its ranking.
    seed
        Of the order of the cells.
    start_step
        First batch of the training stream: a resumed run passes the number of batches already seen, and sees exactly
        what it would have seen. May be set until the data loader is made.
    max_steps
        Batch before which the stream ends; None never ends.
    block_rows, n_blocks
        Neighbouring cells read together, and such blocks in the buffer that is permuted.
    min_genes
        Cells with fewer known genes are left out, with a warning that says how many.
    validation_cells
        Number of validation cells, taken evenly; None takes all.
    num_workers
        Processes that read ahead; 0 reads in the training process.
    prefetch
        Whether a thread reads the next buffer while the present one is used, so that there are two in memory.
    layer, use_raw, input, duplicates, gene_ids, entropy_floor
        As in :func:`scdiva.data.cells.open_cells`; a packed corpus has them settled.

    Raises
    ------
    ValueError
        When the data are opened (:meth:`setup`): see :func:`scdiva.data.cells.open_cells`; if a packed corpus has
        another vocabulary or shorter cells than `context`; if no cell is left. When a run is resumed
        (:meth:`load_state_dict`): if a file is not what it was when the run began.
    """

    def __init__(
        self,
        train: Data | Sequence[Data],
        *,
        vocabulary: Vocabulary | str | Path,
        batch_size: int = 32,
        batch_tokens: int | None = None,
        context: int = MAX_LENGTH,
        seed: int = 0,
        validation: Data | Sequence[Data] | None = None,
        start_step: int = 0,
        max_steps: int | None = None,
        block_rows: int = 64,
        n_blocks: int = 64,
        min_genes: int = 1,
        validation_cells: int | None = None,
        num_workers: int = 0,
        prefetch: bool = True,
        layer: str | None = None,
        use_raw: bool = False,
        input: Input = "auto",
        duplicates: Literal["sum", "error"] = "sum",
        gene_ids: str | None = None,
        entropy_floor: float = ENTROPY_FLOOR,
    ) -> None:
        super().__init__()
        at_least_one = {
            "batch_size": batch_size,
            "context": context,
            "block_rows": block_rows,
            "n_blocks": n_blocks,
            "min_genes": min_genes,
        }
        for name, value in at_least_one.items():
            if operator.index(value) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if batch_tokens is not None and operator.index(batch_tokens) <= context:
            raise ValueError(
                f"batch_tokens={batch_tokens} must exceed context={context}, so that the longest cell and its [LAT] "
                "fit into a batch."
            )
        if start_step < 0 or seed < 0 or num_workers < 0:
            raise ValueError("start_step, seed and num_workers must not be negative.")
        self.vocabulary = load_vocabulary(vocabulary)
        self.batch_size, self.batch_tokens, self.context, self.seed = batch_size, batch_tokens, context, seed
        self.start_step, self.max_steps, self.num_workers = start_step, max_steps, num_workers
        self.block_rows, self.n_blocks, self.min_genes = block_rows, n_blocks, min_genes
        self.validation_cells, self.prefetch = validation_cells, prefetch
        self._train, self._validation = _as_list(train), [] if validation is None else _as_list(validation)
        self._reading: dict[str, Any] = {
            "layer": layer,
            "use_raw": use_raw,
            "input": input,
            "duplicates": duplicates,
            "gene_ids": gene_ids,
            "entropy_floor": entropy_floor,
        }
        self._pool: CellPool | None = None
        self._validation_pool: CellPool | None = None
        self._study_names: list[str] = []
        self._manifest: dict[str, dict[str, str]] = {}

    def setup(self, stage: str | None = None) -> None:
        """Open and check all data, once.

        Parameters
        ----------
        stage
            Ignored; Lightning passes it.
        """
        if self._pool is not None:
            return
        sources, names, studies = self._open(self._train, "train")
        pool = CellPool(sources, studies, self.min_genes, self.context, self.block_rows)
        if not pool.n_cells:
            raise ValueError(f"no training cell has {self.min_genes} known genes or more.")
        if self._validation:
            sources, other, studies = self._open(self._validation, "validation")
            number = np.array([names.index(name) if name in names else UNSEEN_STUDY for name in other])
            studies = [number[study] for study in studies]
            self._validation_pool = CellPool(sources, studies, self.min_genes, self.context, self.block_rows)
            if not self._validation_pool.n_cells:
                raise ValueError(f"no validation cell has {self.min_genes} known genes or more.")
        self._pool, self._study_names = pool, names

    def _open(self, data: list[Data], part: str) -> tuple[list[Source], list[str], list[np.ndarray]]:
        data = data_files(data)
        packed = [isinstance(one, str | Path) and is_packed(one) for one in data]
        if any(packed):
            if len(data) > 1:
                raise ValueError("a packed corpus stands alone: pack all files into one with scdiva.data.pack_files.")
            corpus = PackedCells(data[0], self.vocabulary)  # type: ignore[arg-type]
            self._manifest[part] = manifest_of(data)
            if corpus.max_length < self.context:
                raise ValueError(
                    f"{str(data[0])!r} holds {corpus.max_length} genes per cell, fewer than context={self.context}; "
                    "lower the context or pack it anew with a larger max_length."
                )
            for number, name in enumerate(corpus.study_names):
                lengths = corpus.lengths[corpus.study == number]
                warn_left_out(name, int((lengths < self.min_genes).sum()), len(lengths), self.min_genes)
            return [corpus], corpus.study_names, [corpus.study.astype(np.int64)]

        from scdiva.data.cells import open_cells

        names = study_names(
            [Path(one) if isinstance(one, str | Path) else Path(f"adata{i}") for i, one in enumerate(data)]
        )
        self._manifest[part] = manifest_of(data)
        sources: list[Source] = []
        for name, one in zip(names, data, strict=True):
            try:
                source = open_cells(one, self.vocabulary, max_length=self.context, empty="nan", **self._reading)
            except (KeyError, ValueError) as error:
                raise ValueError(f"{name}: {error.args[0]}") from error
            warn_left_out(name, int((source.lengths < self.min_genes).sum()), source.n_obs, self.min_genes)
            sources.append(source)
        return sources, names, [np.full(source.n_obs, i, np.int64) for i, source in enumerate(sources)]

    @property
    def n_cells(self) -> int:
        """Training cells of an epoch."""
        return self._ready().n_cells

    @property
    def study_names(self) -> list[str]:
        """Names of the training studies; `CellBatch.study` counts them."""
        self._ready()
        return list(self._study_names)

    @property
    def n_studies(self) -> int:
        """Number of training studies."""
        return len(self.study_names)

    def _ready(self) -> CellPool:
        self.setup()
        assert self._pool is not None
        return self._pool

    def training_stream(self) -> TrainingStream:
        """Make the stream of training batches, from `start_step` on."""
        pool = self._ready()
        order = BlockShuffle(pool.block_sizes, self.seed, self.n_blocks)
        return TrainingStream(
            pool,
            order,
            self.batch_size,
            self.start_step,
            self.max_steps,
            batch_tokens=self.batch_tokens,
            prefetch=self.prefetch,
        )

    def train_dataloader(self) -> DataLoader:
        """Load the training stream."""
        return self._loader(self.training_stream())

    def val_dataloader(self) -> DataLoader | list[Any]:
        """Load the validation batches; an empty list if there are none."""
        self._ready()
        if self._validation_pool is None:
            return []
        batches = ValidationBatches(
            self._validation_pool, self.batch_size, self.validation_cells, batch_tokens=self.batch_tokens
        )
        return self._loader(batches)

    def _loader(self, batches: IterableDataset) -> DataLoader:
        return DataLoader(
            batches,
            batch_size=None,  # they are batches already
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=False,
        )

    def transfer_batch_to_device(self, batch: CellBatch, device: torch.device, dataloader_idx: int) -> CellBatch:
        """Move a batch (Lightning calls this).

        Parameters
        ----------
        batch, device, dataloader_idx
            As Lightning passes them.
        """
        return batch.to(device, non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        """Note what every file holds (SHA-256), for the checkpoint; Lightning calls this."""
        self.setup()
        return {"files": self._manifest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that every file is what it was when the run began; Lightning calls this when a run is resumed.

        Parameters
        ----------
        state_dict
            What :meth:`state_dict` gave then.

        Raises
        ------
        ValueError
            If a file has changed, is missing or is new; the message names it.
        """
        self.setup()
        noted = state_dict.get("files", {})
        check_manifest(noted.get("train", self._manifest["train"]), self._manifest["train"])
        # Other validation files change no weight; those of the same name must be the same.
        then, now = noted.get("validation", {}), self._manifest.get("validation", {})
        common = [name for name in then if name in now]
        check_manifest({name: then[name] for name in common}, {name: now[name] for name in common})

    def close(self) -> None:
        """Close all files. They are opened anew when read."""
        for pool in (self._pool, self._validation_pool):
            for source in pool.sources if pool is not None else ():
                source.close()


def _as_list(data: Data | Sequence[Data]) -> list[Data]:
    return list(data) if isinstance(data, list | tuple) else [data]  # type: ignore[list-item]
