"""`CellDataModule`: the training and validation batches of a run, for Lightning."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, IterableDataset

from scdiva._checks import check_least
from scdiva._constants import MAX_LENGTH
from scdiva._files import as_path, is_path
from scdiva._settings import logger
from scdiva.data.batch import CellBatch
from scdiva.data.cells import open_cells, warn_left_out
from scdiva.data.corpus import data_files, file_note, held_out_studies, study_names
from scdiva.data.genes import InputOptions
from scdiva.data.packed import PackedCells, is_packed
from scdiva.data.sampler import LEFT_OUT, CellPool, Order, Source, TrainingStream, ValidationBatches
from scdiva.data.soma import SomaCells
from scdiva.tokenizer.serialize import ENTROPY_FLOOR
from scdiva.tokenizer.vocabulary import Vocabulary, load_vocabulary

if TYPE_CHECKING:
    from anndata import AnnData

    Data: TypeAlias = AnnData | SomaCells | str | Path

UNSEEN_STUDY = -1
"""Study number of validation cells whose study is not in the training data."""


class CellDataModule(pl.LightningDataModule):
    """Training and validation batches from files, AnnData objects or a packed corpus; no file is loaded whole.

    Parameters
    ----------
    train
        ``.h5ad`` or ``.zarr`` files, URLs, AnnData objects or cells of SOMA experiments, each a study; or one corpus
        from :func:`scdiva.data.pack_files`. A folder stands for every such file below it, ordered by path. Files may
        have different genes.
    validation
        Validation data, as for `train`. None: no other files. Split by study, not by cell, because cells of one study
        are too similar.
    validation_studies
        Studies of `train` that are held out for validation: names, or a share of the studies, drawn from `seed`. See
        :func:`scdiva.data.corpus.held_out_studies`.
    vocabulary
        Genes and entropies.
    batch_size
        Maximum number of cells per batch; the batches of an epoch differ by at most one cell. Ignored with
        `batch_tokens`.
    batch_tokens
        Maximum number of tokens (genes, and `[LAT]` of each cell) per batch, so that batches take the same memory and
        time whatever the length of their cells. See :class:`~scdiva.data.sampler.Order`.
    context
        Maximum number of genes per cell, the first of its ranking.
    seed
        Seed of the order of the cells.
    start_step
        First batch of the training stream. A resumed run passes the number of batches that all processes have seen, and
        sees the same cells as an uninterrupted one. May be set until the data loader is made.
    max_steps
        Batch before which the stream ends. None: it never ends.
    lanes
        Parts of an epoch that are read in parallel: batch n belongs to part n mod `lanes`. :func:`scdiva.train.fit`
        sets the number of batches per optimiser step, `accumulate` times the number of processes, so that each process
        reads its own parts. It changes the order of the cells. May be set until the data loader is made.
    block_rows, n_blocks
        Neighbouring cells per block, and blocks per shuffled buffer.
    min_genes
        Minimum number of known genes per cell; other cells are excluded with a warning.
    validation_cells
        Number of validation cells, evenly spaced. None: all.
    entropy_floor
        As in :func:`scdiva.data.cells.open_cells`. Ignored for a packed corpus, as is `reading`.
    **reading
        `layer`, `use_raw`, `input`, `gene_ids`, `species` and `duplicates`, as in :func:`scdiva.tl.embed_file`.

    Raises
    ------
    ValueError
        When the data are opened (:meth:`setup`): as :func:`scdiva.data.cells.open_cells`; if a packed corpus has
        another vocabulary, or shorter cells than `context` or `min_genes`; if a named study does not exist; if no cell
        is left. When a run is resumed (:meth:`load_state_dict`): if a file or the order of the cells has changed since
        the run began.
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
        validation_studies: float | Sequence[str] | None = None,
        start_step: int = 0,
        max_steps: int | None = None,
        lanes: int = 1,
        block_rows: int = 64,
        n_blocks: int = 64,
        min_genes: int = 1,
        validation_cells: int | None = None,
        entropy_floor: float = ENTROPY_FLOOR,
        **reading: Any,
    ) -> None:
        super().__init__()
        check_least(
            batch_size=(batch_size, 1),
            context=(context, 1),
            block_rows=(block_rows, 1),
            n_blocks=(n_blocks, 1),
            min_genes=(min_genes, 1),
            validation_cells=(1 if validation_cells is None else validation_cells, 1),
            start_step=(start_step, 0),
            lanes=(lanes, 1),
            seed=(seed, 0),
        )
        if batch_tokens is not None and operator.index(batch_tokens) < 2 * (context + 1):
            raise ValueError(
                f"batch_tokens={batch_tokens} must be at least {2 * (context + 1)}, so that two of the longest cells "
                f"(context={context}, and their [LAT]) fit into a batch."
            )
        self.vocabulary = load_vocabulary(vocabulary)
        self.batch_size, self.batch_tokens, self.context, self.seed = batch_size, batch_tokens, context, seed
        self.start_step, self.max_steps, self.lanes = start_step, max_steps, lanes
        self.block_rows, self.n_blocks, self.min_genes = block_rows, n_blocks, min_genes
        self.validation_cells, self.validation_studies = validation_cells, validation_studies
        self._train, self._validation = _as_list(train), [] if validation is None else _as_list(validation)
        self._reading, self._entropy_floor = replace(InputOptions(**reading), empty="nan"), entropy_floor
        self._stretches: list[tuple[int, int]] = []
        self._pool: CellPool | None = None
        self._validation_pool: CellPool | None = None
        self._study_names: list[str] = []
        self._files: dict[str, list[Data]] = {}
        self._notes: dict[str, dict[str, dict[str, Any]]] | None = None
        self._report: list[dict[str, Any]] = []

    def setup(self, stage: str | None = None) -> None:
        """Open and check all data, once; Lightning passes `stage`."""
        if self._pool is not None:
            return
        self._noted()
        sources, names, studies, opened = self._open("train")
        held = held_out_studies(names, self.validation_studies, self.seed)
        trained = [name for name in names if name not in held]
        number = np.array([LEFT_OUT if name in held else trained.index(name) for name in names])
        pool = self._pool_of([(source, study, number) for source, study in zip(sources, studies, strict=True)])
        if not pool.n_cells:
            raise ValueError(f"no training cell has {self.min_genes} known genes or more.")
        report = [{"part": "validation" if one["study"] in held else "train"} | one for one in opened]
        number = np.where(number == LEFT_OUT, UNSEEN_STUDY, LEFT_OUT)
        looked_at = [(source, study, number) for source, study in zip(sources, studies, strict=True) if held]
        if self._validation:
            sources, names, studies, opened = self._open("validation")
            number = np.array([trained.index(name) if name in trained else UNSEEN_STUDY for name in names])
            looked_at += [(source, study, number) for source, study in zip(sources, studies, strict=True)]
            report += [{"part": "validation"} | one for one in opened]
        if looked_at:
            self._validation_pool = self._pool_of(looked_at)
            if not self._validation_pool.n_cells:
                raise ValueError(f"no validation cell has {self.min_genes} known genes or more.")
        self._pool, self._study_names, self._report = pool, trained, report
        n_validation = 0 if self._validation_pool is None else self._validation_pool.n_cells
        logger.info(
            "%d cells of %d studies to train on, %d to validate on; %d with fewer than %d known genes are left out",
            *(pool.n_cells, len(trained), n_validation, sum(one["cells_dropped"] for one in report), self.min_genes),
        )

    def _noted(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Checksums of the files, by part and name, computed once."""
        if self._notes is None:
            parts = {"train": self._train} | ({"validation": self._validation} if self._validation else {})
            self._files = {part: corpus_files(data) for part, data in parts.items()}
            self._notes = {part: manifest_of(data) for part, data in self._files.items()}
        return self._notes

    def _open(self, part: str) -> tuple[list[Source], list[str], list[np.ndarray], list[dict[str, Any]]]:
        """Open and check the studies of a part, with warnings about excluded cells.

        Returns
        -------
        The sources (one per file, or the packed corpus); names of the studies; for each source, int (n_obs,), the study
        of each cell; and for each study its name (`study`), `cells`, `cells_dropped`, `columns` of its file (None for a
        packed corpus) and `genes_matched`.
        """
        files, report = self._files[part], []

        def count(name: str, lengths: Sequence[np.ndarray], columns: int | None, matched: int) -> None:
            n, dropped = sum(map(len, lengths)), sum(int((n_genes < self.min_genes).sum()) for n_genes in lengths)
            warn_left_out(name, dropped, n, self.min_genes)
            counts = {"study": name, "cells": n - dropped, "cells_dropped": dropped}
            report.append(counts | {"columns": columns, "genes_matched": matched})

        if is_path(files[0]) and is_packed(files[0]):
            corpus = PackedCells(files[0], self.vocabulary)
            for option, required in (("context", self.context), ("min_genes", self.min_genes)):
                if corpus.max_length < required:
                    raise ValueError(
                        f"{str(files[0])!r} holds {corpus.max_length} genes per cell, fewer than {option}={required}; "
                        f"lower the {option} or pack it again with a larger max_length."
                    )
            # by parts, as a mask of all cells of an atlas is large
            of = [(corpus.study[a], corpus.lengths[a:b]) for a, b in itertools.pairwise(corpus.bounds) if b > a]
            for number, name in enumerate(corpus.study_names):
                lengths = [n_genes for study, n_genes in of if study == number]
                count(name, lengths, None, int(corpus.measured[number].sum()))
            return [corpus], corpus.study_names, [corpus.study], report

        # objects have no names, which must differ between training and validation
        names = _names(files, "adata" if part == "train" else part)
        how: dict[str, Any] = {"max_length": self.context, "entropy_floor": self._entropy_floor, "keep": False}
        sources: list[Source] = []
        for name, one in zip(names, files, strict=True):
            try:
                source = open_cells(one, self.vocabulary, self._reading, **how)
            except (KeyError, ValueError) as error:
                raise ValueError(f"{name}: {error.args[0]}") from error
            count(name, [source.lengths], len(source.tokens), len(source.measured_tokens))
            sources.append(replace(source, name=name))
        return sources, names, [np.broadcast_to(i, s.n_obs) for i, s in enumerate(sources)], report

    def _pool_of(self, studied: Sequence[tuple[Source, np.ndarray, np.ndarray]]) -> CellPool:
        sources, studies, numbers = zip(*studied, strict=True)
        return CellPool(sources, studies, self.min_genes, self.context, self.block_rows, numbers)

    def manifest(self) -> dict[str, Any]:
        """Files and studies of the run, as JSON values.

        Returns
        -------
        `vocabulary` (fingerprint), `min_genes`, `files` (by part and name: path, and size and checksum as
        :func:`scdiva.data.corpus.file_note`) and `studies` (name, part, cells kept and dropped, columns of the file,
        genes matched).
        """
        self.setup()
        files: dict[str, dict[str, Any]] = {}
        for part, notes in self._noted().items():
            paths = {as_path(one).name: str(one) for one in self._files[part] if is_path(one)}
            files[part] = {name: {"path": paths[name]} | note for name, note in notes.items()}
        about = {"vocabulary": self.vocabulary.fingerprint, "min_genes": self.min_genes}
        return about | {"files": files, "studies": [dict(one) for one in self._report]}

    @property
    def n_cells(self) -> int:
        """Number of training cells."""
        return self._ready().n_cells

    @property
    def study_names(self) -> list[str]:
        """Names of the training studies; `CellBatch.study` has their index."""
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
        """Stream of training batches from `start_step` on.

        If a run is resumed with other `lanes`, the cells of the current epoch that were not yet seen are dealt again.
        """
        before = [(first, lanes) for first, lanes in self._stretches if first < self.start_step]
        if before and before[-1][1] != self.lanes:
            before.append((self.start_step, self.lanes))
            logger.warning(
                "Until batch %d an optimiser step had %d batches; from there on it has %d.",
                *(self.start_step, before[-2][1], self.lanes),
            )
        self._stretches = before or [(0, self.lanes)]
        return self._stream()

    def _stream(self) -> TrainingStream:
        how = self.batch_size, self.batch_tokens, self.n_blocks, self._run_lanes()
        return TrainingStream(Order(self._ready(), self.seed, *how), self.start_step, self.max_steps)

    def _run_lanes(self) -> list[tuple[int, int]]:
        """First batch and number of lanes of each stretch of the run."""
        return self._stretches or [(0, self.lanes)]

    def cells_of_batch(self, number: int) -> list[tuple[str, str, int, str]]:
        """Cells of a batch of the training stream; no values are read.

        Parameters
        ----------
        number
            Number of the batch, from 0, counted over all processes. For a run of another process, first set `lanes`, or
            :meth:`load_state_dict` the entry `"CellDataModule"` of its checkpoint.

        Returns
        -------
        For each cell, in the order of the batch: study, file (empty for an AnnData object), row in the file or packed
        corpus, and name if known.
        """
        cells = []
        for source, row, study in self._stream().rows_of(number):
            name = "" if isinstance(source, PackedCells) else str(source.obs_names[row])
            cells.append((self._study_names[study], str(source.path or ""), row, name))
        return cells

    def train_dataloader(self) -> DataLoader[CellBatch]:
        """Data loader of the training stream."""
        return self._loader(self.training_stream())

    def val_dataloader(self) -> DataLoader[CellBatch] | list[Any]:
        """Data loader of the validation batches; an empty list if there are none."""
        self._ready()
        if (pool := self._validation_pool) is None:
            return []
        batches = ValidationBatches(pool, self.batch_size, self.validation_cells, batch_tokens=self.batch_tokens)
        return self._loader(batches)

    def _loader(self, batches: IterableDataset[CellBatch]) -> DataLoader[CellBatch]:
        # the dataset yields batches
        return DataLoader(batches, batch_size=None, pin_memory=torch.cuda.is_available())

    def transfer_batch_to_device(self, batch: CellBatch, device: torch.device, dataloader_idx: int) -> CellBatch:
        """Move a batch to a device; called by Lightning."""
        return batch.to(device, non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        """Checksums of all files and parameters of the order, for the checkpoint; called by Lightning."""
        return {"files": self._noted(), "order": self._order(), "lanes": [list(one) for one in self._run_lanes()]}

    def _order(self) -> dict[str, Any]:
        names = "min_genes", "block_rows", "n_blocks", "seed", "context", "batch_size", "batch_tokens"
        held = self.validation_studies
        studies = held if held is None or isinstance(held, int | float | str) else list(held)
        return {name: getattr(self, name) for name in names} | {"validation_studies": studies}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that files and order have not changed since the run began; called by Lightning when a run is resumed.

        Raises
        ------
        ValueError
            If a file has changed, is missing or is new, or the order differs; the message names it.
        """
        current, noted = self._noted(), state_dict.get("files", {})
        check_manifest(noted.get("train", current["train"]), current["train"])
        # validation files may be added or removed, but not changed
        then, now = noted.get("validation", {}), current.get("validation", {})
        common = [name for name in then if name in now]
        check_manifest({name: then[name] for name in common}, {name: now[name] for name in common})
        order, before = self._order(), state_dict.get("order", {})
        changed = [name for name in order if before.get(name, order[name]) != order[name]]
        if changed:
            changes = ", ".join(f"{name}: {before[name]} then, {order[name]} now" for name in changed)
            raise ValueError(f"A resumed run must see the cells in the order that it began with ({changes}).")
        self._stretches = [(first, lanes) for first, lanes in state_dict.get("lanes", [])]

    def close(self) -> None:
        """Close all files; reading opens them again."""
        for pool in (self._pool, self._validation_pool):
            for source in pool.sources if pool is not None else ():
                source.close()


def _as_list(data: Data | Sequence[Data]) -> list[Data]:
    return list(data) if isinstance(data, list | tuple) else [data]


def corpus_files(data: Sequence[Any]) -> list[Any]:
    """Files of a list of AnnData objects, files and folders.

    Raises
    ------
    FileNotFoundError, ValueError
        If a file does not exist, a packed corpus is combined with others, or two files have the same name.
    """
    files = data_files(data)
    packed = [is_path(one) and is_packed(one) for one in files]
    if any(packed) and len(files) > 1:
        raise ValueError("a packed corpus stands alone: add the files to it, scdiva.data.pack_files(..., append=True).")
    if not any(packed):
        _names(files, "adata")
    return files


def _names(files: Sequence[Any], unnamed: str) -> list[str]:
    return study_names([as_path(one if is_path(one) else f"{unnamed}{i}") for i, one in enumerate(files)])


def manifest_of(data: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Size and checksum (:func:`scdiva.data.corpus.file_note`) by file name; AnnData objects are skipped."""
    return {as_path(one).name: file_note(one) for one in data if is_path(one)}


def check_manifest(noted: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise ValueError if a file has changed, is missing or is new, or the order differs from that in a manifest.

    Parameters
    ----------
    noted, current
        Results of :func:`manifest_of`, then and now.
    """
    changed = [name for name in noted if name in current and noted[name] != current[name]]
    missing, new = [name for name in noted if name not in current], [name for name in current if name not in noted]
    for names, what in (
        (changed, "have changed"),
        (missing, "are no longer given"),
        (new, "are new"),
        ([] if list(noted) == list(current) else list(current), "stand in another order"),
    ):
        if names:
            raise ValueError(
                f"{len(names)} of {len(noted)} files {what} since the run began (first: {names[0]!r}): resumed, it "
                "would not see the cells that it would have seen. Give the same files as then, or begin a new run."
            )
