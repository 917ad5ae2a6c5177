"""Data of a training run, for Lightning."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, IterableDataset

from scdiva._checks import check_least
from scdiva._constants import MAX_LENGTH
from scdiva._docs import with_shared_docs
from scdiva._settings import logger
from scdiva.data.batch import CellBatch
from scdiva.data.corpus import OpenStudies, corpus_files, held_out_studies, open_studies, study_times
from scdiva.data.files import check_manifest, manifest_of
from scdiva.data.order import BlockShuffle
from scdiva.data.reading import Reading, Species
from scdiva.data.stream import LEFT_OUT, CellPool, Source, TrainingStream, ValidationBatches
from scdiva.tokenizer.serialize import ENTROPY_FLOOR
from scdiva.tokenizer.vocabulary import Vocabulary, load_vocabulary

if TYPE_CHECKING:
    from anndata import AnnData

    from scdiva._validate import Input

    Data: TypeAlias = AnnData | str | Path

UNSEEN_STUDY = -1
"""Study number of validation cells whose study is not trained on."""


class BatchCell(NamedTuple):
    """One cell of a batch: its study, the file (empty for an AnnData object), its row there, and its name if known."""

    study: str
    file: str
    row: int
    cell: str


@with_shared_docs
class CellDataModule(pl.LightningDataModule):
    """Training and validation batches from files, AnnData objects or a packed corpus; files are never loaded whole.

    Parameters
    ----------
    train
        List of ``.h5ad`` or ``.zarr`` files or AnnData objects in any mixture, each a study of its own, or one corpus
        that :func:`scdiva.data.pack_files` wrote (or one file or object). A folder stands for every such file below
        it, by path. Files may have different genes: each is matched by itself.
    validation
        The same for validation; None = no other files. Split by study, not by cell: cells of one study are too similar.
    validation_studies
        Studies of `train` that are not trained on but validate: names, or a share of the studies, drawn from `seed`.
        See :func:`scdiva.data.corpus.held_out_studies`.
    study_weights
        How often an epoch holds the cells of each training study: numbers by name (1 for the others), or a power p of
        its size (1: as it is; 0: all studies equally). Blocks of neighbouring cells are drawn that often, a fraction in
        as many epochs as it tells; see :class:`~scdiva.data.order.BlockShuffle`.
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
    %(reading)s
    entropy_floor
        As in :func:`scdiva.data.cells.open_cells`. A packed corpus has it settled, and all from `layer` on.

    Raises
    ------
    ValueError
        When the data are opened (:meth:`setup`): see :func:`scdiva.data.cells.open_cells`; if a packed corpus has
        another vocabulary or shorter cells than `context` or `min_genes`; if a study that is named does not exist; if
        no cell is left. When a run is resumed (:meth:`load_state_dict`): if a file, or what settles the order of the
        cells, is not what it was when the run began.
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
        study_weights: Mapping[str, float] | float | None = None,
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
        gene_ids: str | None = None,
        species: Species = None,
        duplicates: Literal["sum", "error"] = "sum",
        entropy_floor: float = ENTROPY_FLOOR,
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
            seed=(seed, 0),
            num_workers=(num_workers, 0),
        )
        if batch_tokens is not None and operator.index(batch_tokens) <= context:
            raise ValueError(
                f"batch_tokens={batch_tokens} must exceed context={context}, so that the longest cell and its [LAT] "
                "fit into a batch."
            )
        self.vocabulary = load_vocabulary(vocabulary)
        self.batch_size, self.batch_tokens, self.context, self.seed = batch_size, batch_tokens, context, seed
        self.start_step, self.max_steps, self.num_workers = start_step, max_steps, num_workers
        self.block_rows, self.n_blocks, self.min_genes = block_rows, n_blocks, min_genes
        self.validation_cells, self.prefetch = validation_cells, prefetch
        self.validation_studies, self.study_weights = validation_studies, study_weights
        self._train, self._validation = _as_list(train), [] if validation is None else _as_list(validation)
        self._reading = Reading(layer, use_raw, input, gene_ids, species, duplicates)
        self._entropy_floor = entropy_floor
        self._pool: CellPool | None = None
        self._validation_pool: CellPool | None = None
        self._study_names: list[str] = []
        self._files: dict[str, list[Data]] = {}
        self._notes: dict[str, dict[str, dict[str, Any]]] | None = None
        self._report: list[dict[str, Any]] = []
        self._times: tuple[float, ...] | None = None

    def setup(self, stage: str | None = None) -> None:
        """Open and check all data, once.

        Parameters
        ----------
        stage
            Ignored; Lightning passes it.
        """
        if self._pool is not None:
            return
        self._noted()
        found = self._open("train")
        held = held_out_studies(found.names, self.validation_studies, self.seed)
        trained = [name for name in found.names if name not in held]
        number = np.array([LEFT_OUT if name in held else trained.index(name) for name in found.names])
        pool = self._pool_of(found.sources, [number[study] for study in found.studies])
        if not pool.n_cells:
            raise ValueError(f"no training cell has {self.min_genes} known genes or more.")
        number = np.where(number == LEFT_OUT, UNSEEN_STUDY, LEFT_OUT)
        looked_at = [(source, number[study]) for source, study in zip(found.sources, found.studies, strict=True)]
        looked_at = [(source, study) for source, study in looked_at if (study != LEFT_OUT).any()]
        report = [{"part": "validation" if one["study"] in held else "train"} | one for one in found.report]
        if self._validation:
            found = self._open("validation")
            number = np.array([trained.index(name) if name in trained else UNSEEN_STUDY for name in found.names])
            looked_at += [(source, number[study]) for source, study in zip(found.sources, found.studies, strict=True)]
            report += [{"part": "validation"} | one for one in found.report]
        if looked_at:
            self._validation_pool = self._pool_of(*zip(*looked_at, strict=True))
            if not self._validation_pool.n_cells:
                raise ValueError(f"no validation cell has {self.min_genes} known genes or more.")
        sizes = np.bincount(np.repeat(pool.block_studies, pool.block_sizes), minlength=len(trained))
        times = study_times(self.study_weights, trained, sizes)[pool.block_studies]
        self._times = None if np.allclose(times, 1) else tuple(times.tolist())
        self._pool, self._study_names, self._report = pool, trained, report
        n_validation = 0 if self._validation_pool is None else self._validation_pool.n_cells
        logger.info(
            "%d cells of %d studies to train on, %d to validate on; %d with fewer than %d known genes are left out",
            *(pool.n_cells, len(trained), n_validation, sum(one["cells_dropped"] for one in report), self.min_genes),
        )

    def _noted(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Find the files and note what they hold, once."""
        if self._notes is None:
            given = {"train": self._train} | ({"validation": self._validation} if self._validation else {})
            self._files = {part: corpus_files(data) for part, data in given.items()}
            self._notes = {part: manifest_of(data) for part, data in self._files.items()}
        return self._notes

    def _open(self, part: str) -> OpenStudies:
        # objects have no names: the first of validation is not the first that is trained on
        unnamed = "adata" if part == "train" else part
        how = self.min_genes, self.context, self._reading, self._entropy_floor
        return open_studies(self._files[part], self.vocabulary, *how, unnamed)

    def _pool_of(self, sources: Sequence[Source], studies: Sequence[np.ndarray]) -> CellPool:
        return CellPool(sources, studies, self.min_genes, self.context, self.block_rows)

    def manifest(self) -> dict[str, Any]:
        """Say what the run is trained on, in plain values.

        Returns
        -------
        `vocabulary` (its fingerprint), `min_genes`, `files` (by part and name: path, size, and what
        :func:`scdiva.data.files.file_note` says of the content) and `studies` (name, part, cells kept and dropped,
        columns of the file, genes matched).
        """
        self.setup()
        paths = {
            part: {Path(one).name: str(one) for one in data if isinstance(one, str | Path)}
            for part, data in self._files.items()
        }
        files = {
            part: {name: {"path": paths[part][name]} | note for name, note in notes.items()}
            for part, notes in self._noted().items()
        }
        studies = [dict(one) for one in self._report]
        return {
            "vocabulary": self.vocabulary.fingerprint, "min_genes": self.min_genes, "files": files, "studies": studies,
        }  # fmt: skip

    @property
    def n_cells(self) -> int:
        """Training cells, each counted once."""
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
        order = BlockShuffle(pool.block_sizes, self.seed, self.n_blocks, self._times)
        return TrainingStream(
            pool,
            order,
            self.batch_size,
            self.start_step,
            self.max_steps,
            batch_tokens=self.batch_tokens,
            prefetch=self.prefetch,
        )

    def cells_of_batch(self, number: int) -> list[BatchCell]:
        """Find the cells of a batch of the training stream, without reading any of their values.

        Parameters
        ----------
        number
            Number of the batch in the stream, from 0, counted over all processes.

        Returns
        -------
        A cell each, in the order of the batch. Rows of a packed corpus are counted in the packed file.
        """
        pool, found = self._ready(), []
        for at, row in zip(*(part.tolist() for part in self.training_stream().rows_of(number)), strict=True):
            source: Any = pool.sources[at]
            names = getattr(source, "obs_names", None)
            study = self._study_names[int(pool.studies[at][row])]
            file = "" if source.path is None else str(source.path)
            found.append(BatchCell(study, file, row, "" if names is None else str(names[row])))
        return found

    def train_dataloader(self) -> DataLoader[CellBatch]:
        """Load the training stream."""
        return self._loader(self.training_stream())

    def val_dataloader(self) -> DataLoader[CellBatch] | list[Any]:
        """Load the validation batches; an empty list if there are none."""
        self._ready()
        if self._validation_pool is None:
            return []
        batches = ValidationBatches(
            self._validation_pool, self.batch_size, self.validation_cells, batch_tokens=self.batch_tokens
        )
        return self._loader(batches)

    def _loader(self, batches: IterableDataset[CellBatch]) -> DataLoader[CellBatch]:
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
        """Note what every file holds and what settles the order, for the checkpoint; Lightning calls this."""
        return {"files": self._noted(), "order": self._order()}

    def _order(self) -> dict[str, Any]:
        weights, held = self.study_weights, self.validation_studies
        return {
            "min_genes": self.min_genes,
            "block_rows": self.block_rows,
            "n_blocks": self.n_blocks,
            "study_weights": dict(weights) if isinstance(weights, Mapping) else weights,
            "validation_studies": held if held is None or isinstance(held, int | float | str) else list(held),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that files and order are what they were when the run began; Lightning calls this for a resumed run.

        Parameters
        ----------
        state_dict
            What :meth:`state_dict` gave then.

        Raises
        ------
        ValueError
            If a file has changed, is missing or is new, or the order would be another one; the message names it.
        """
        found, noted = self._noted(), state_dict.get("files", {})
        check_manifest(noted.get("train", found["train"]), found["train"])
        # Other validation files change no weight; those of the same name must be the same.
        then, now = noted.get("validation", {}), found.get("validation", {})
        common = [name for name in then if name in now]
        check_manifest({name: then[name] for name in common}, {name: now[name] for name in common})
        order, before = self._order(), state_dict.get("order", {})
        changed = [name for name in order if before.get(name, order[name]) != order[name]]
        if changed:
            said = ", ".join(f"{name}: {before[name]} then, {order[name]} now" for name in changed)
            raise ValueError(f"A resumed run must see the cells in the order that it began with ({said}).")

    def close(self) -> None:
        """Close all files. They are opened anew when read."""
        for pool in (self._pool, self._validation_pool):
            for source in pool.sources if pool is not None else ():
                source.close()


def _as_list(data: Data | Sequence[Data]) -> list[Data]:
    return list(data) if isinstance(data, list | tuple) else [data]
