"""Packing, and random batches of packed cells: our parts beside zarr shards (annbatch), litdata and MosaicML Streaming.

    python benchmarks/packing.py [--cells 60000] [--genes 20000] [--studies 20] [--read 16384] [--repeats 5]

Made-up counts as in `loading.py`, in files of one study each, are packed by one process and by two. The packed cells
are then written in each library's own format, uncompressed but for annbatch's, and read in random batches of 64, as the
tokens (int64), values (float32) and bounds that training takes, until `--read` cells came. Each arm opens its folder
anew:

- `ours`: the training stream of `CellDataModule`, 64 blocks of 64 cells in a buffer.
- `annbatch, 64 x 64`: `Loader(chunk_size=64, preload_nchunks=64)` on what `write_sharded` wrote, the ranked tokens as
  column indices; `annbatch`: its own chunks of 512, 32 of them.
- `litdata`: `StreamingDataset(shuffle=True)` on chunks of 64 MB, which permutes within 256 neighbours; `litdata, whole
  chunks`: within a chunk. `mosaic`: `StreamingDataset(shuffle=True)`, likewise on chunks of 64 MB.

Rows say cells per CPU second (`process_time`, all threads), by the best round of arms that take turns; how well batches
are mixed: of 64 cells, how many different runs of 1,000 neighbouring cells they come from, where a true permutation of
60 such runs has 39.5; and whether a new reader goes on from what the old one noted after 20 batches with the very same
cells.
A library that is not installed is left out, and said to be.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import scipy.sparse as sp
import torch
from _judge import judge_times
from _record import PACKAGES, record, versions
from _timing import report
from loading import synthetic, timed

from scdiva.data import CellDataModule, PackedCells
from scdiva.tokenizer import Vocabulary

BATCH = 64
NEIGHBOURS = 1000
SEEN = 20
"""Batches after which a reader stops and another goes on."""
PACK = """
import os, sys, time
from scdiva.data import pack_files
start, before = time.perf_counter(), os.times()
n = pack_files(*sys.argv[1:4], workers=int(sys.argv[4])).n_obs
print(n, time.perf_counter() - start, sum(os.times()[:4]) - sum(before[:4]))
"""
Batch = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Bounds, tokens, values, and the number of each cell in the corpus."""


def make_studies(folder: Path, n_cells: int, n_genes: int, n_studies: int) -> Vocabulary:
    """Files of as many cells each, and a vocabulary of their genes."""
    human = Vocabulary.human()
    genes = human.subset(np.arange(3, 3 + n_genes))
    genes = genes.with_entropy(np.random.default_rng(0).uniform(0.2, 3, n_genes).astype(np.float32))
    counts = synthetic(n_cells, n_genes)
    folder.mkdir()
    for number, rows in enumerate(np.array_split(np.arange(n_cells), n_studies)):
        cells = ad.AnnData(counts[rows[0] : rows[-1] + 1])
        cells.var_names = genes.symbols
        cells.write_h5ad(folder / f"study{number:02d}.h5ad")
    return genes


def packing(folder: Path, genes: Vocabulary, workers: int) -> dict[str, Any]:
    """Pack all files anew: cells per wall and per CPU second, of all processes, the start of each with them.

    In a process of its own, as this file is what each of the others would import first.
    """
    shutil.rmtree(folder / "corpus", ignore_errors=True)
    genes.write(folder / "genes.safetensors")
    names = [str(folder / name) for name in ("studies", "genes.safetensors", "corpus")]
    call = [sys.executable, "-c", PACK, *names, str(workers)]
    n, wall, cpu = map(float, subprocess.run(call, check=True, capture_output=True, text=True).stdout.split())
    return {
        "what": f"packing, {workers} processes",
        "cells_per_wall_second": round(n / wall),
        "cells_per_cpu_second": round(n / cpu),
        "wall_seconds": round(wall, 1),
    }


def joined(samples: list[dict[str, Any]]) -> Batch:
    """A batch of samples that a library gave one by one."""
    tokens, values = ([one[name] for one in samples] for name in ("tokens", "values"))
    bounds = np.concatenate([[0], np.cumsum([len(one) for one in tokens])])
    numbers = np.array([int(one["cell"]) for one in samples])
    return bounds, np.concatenate(tokens, dtype=np.int64), np.concatenate(values, dtype=np.float32), numbers


def batched(samples: Iterator[dict[str, Any]]) -> Iterator[Batch]:
    while some := list(itertools.islice(samples, BATCH)):
        yield joined(some)


class Ours:
    """The training stream."""

    def __init__(self, folder: Path, genes: Vocabulary) -> None:
        self.where, self.genes = folder / "corpus", genes

    def data(self, start: int) -> CellDataModule:
        return CellDataModule(self.where, vocabulary=self.genes, batch_size=BATCH, start_step=start)

    def read(self, noted: int | None = None) -> Iterator[Batch]:
        number = noted or 0
        for batch in (data := self.data(number)).training_stream():
            numbers = np.zeros(batch.n_cells, np.int64)
            yield batch.cu_seqlens.numpy(), batch.tokens.numpy(), batch.values.numpy(), numbers
        data.close()

    def cells(self, n: int, noted: int | None = None) -> list[np.ndarray]:
        """Numbers of the cells of the next batches."""
        data, first = self.data(0), noted or 0
        return [np.array([row for _, _, row, _ in data.cells_of_batch(first + i)]) for i in range(n)]

    def note(self) -> int:
        return SEEN


class Annbatch:
    """Ranked tokens as the column indices of a CSR matrix in zarr shards."""

    def __init__(self, folder: Path, corpus: PackedCells, chunk: int = 512, chunks: int = 32) -> None:
        self.where, self.how = folder / "annbatch.zarr", {"chunk_size": chunk, "preload_nchunks": chunks}
        if not self.where.exists():
            import annbatch
            import zarr

            indptr, tokens, values = corpus.read(0, corpus.n_obs)
            cells = ad.AnnData(sp.csr_matrix((values, tokens, indptr), shape=(corpus.n_obs, corpus.n_tokens)))
            annbatch.write_sharded(zarr.open_group(self.where, mode="w", zarr_format=3), cells)

    def read(self, noted: None = None) -> Iterator[Batch]:
        import annbatch
        import zarr

        if find_spec("zarrs"):
            zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
        rng = np.random.default_rng(0)
        loader = annbatch.Loader(
            batch_size=BATCH, shuffle=True, rng=rng, return_index=True, preload_to_gpu=False, **self.how
        )
        loader.add_dataset(ad.io.sparse_dataset(zarr.open_group(self.where, mode="r")["X"]))
        for batch in loader:
            x = batch["X"]
            yield x.indptr, x.indices.astype(np.int64), x.data, np.asarray(batch["index"])


class Litdata:
    def __init__(self, folder: Path, corpus: PackedCells, window: int = 256) -> None:
        from litdata.streaming.writer import BinaryWriter

        self.where, self.window, self._loader = folder / "litdata", window, None
        if self.where.exists():
            return
        self.where.mkdir()
        writer = BinaryWriter(str(self.where), chunk_bytes="64MB")
        for number, sample in enumerate(samples_of(corpus)):
            writer[number] = sample
        writer.done()
        writer.merge()

    def read(self, noted: dict | None = None) -> Iterator[Batch]:
        from litdata import StreamingDataLoader, StreamingDataset

        how = {"item_shuffle_window": self.window, "batch_decode": "auto" if self.window else "all"}
        data = StreamingDataset(str(self.where), shuffle=True, seed=0, **how)
        self._loader = StreamingDataLoader(data, batch_size=BATCH, num_workers=0, collate_fn=joined)
        if noted is not None:
            self._loader.load_state_dict(noted)
        yield from self._loader

    def note(self) -> dict:
        return self._loader.state_dict()


class Mosaic:
    def __init__(self, folder: Path, corpus: PackedCells) -> None:
        from streaming import MDSWriter

        self.where, self._data = folder / "mosaic", None
        columns = {"tokens": "ndarray:uint16", "values": "ndarray:float32", "cell": "int"}
        with MDSWriter(out=str(self.where), columns=columns, size_limit=1 << 26) as writer:
            for sample in samples_of(corpus):
                writer.write(sample)

    def read(self, noted: dict | None = None) -> Iterator[Batch]:
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        self._data = None
        clean_stale_shared_memory()
        self._data = StreamingDataset(local=str(self.where), shuffle=True, shuffle_seed=0, batch_size=BATCH)
        if noted is not None:
            self._data.load_state_dict(noted)
        yield from batched(iter(self._data))

    def note(self) -> dict:
        return self._data.state_dict(SEEN * BATCH, from_beginning=True)


def samples_of(corpus: PackedCells) -> Iterator[dict[str, Any]]:
    """Cells one by one, as the libraries take them."""
    for start in range(0, corpus.n_obs, 4096):
        indptr, tokens, values = corpus.read(start, min(start + 4096, corpus.n_obs))
        for i, (a, b) in enumerate(itertools.pairwise(indptr.tolist())):
            yield {"tokens": tokens[a:b].astype(np.uint16), "values": values[a:b], "cell": start + i}


def given(reader: Any, n_cells: int) -> int:
    """Read so many cells; how many came."""
    n, batches = 0, reader.read()
    for bounds, *_ in batches:
        n += len(bounds) - 1
        if n >= n_cells:
            break
    batches.close()
    return n


def numbers_of(reader: Any, n: int, noted: Any = None) -> list[np.ndarray]:
    """Numbers of the cells of the first batches, or of those that follow what was noted."""
    if isinstance(reader, Ours):
        return reader.cells(n, noted)
    batches = reader.read(noted)
    found = [numbers for *_, numbers in itertools.islice(batches, n)]
    return found


def qualities(name: str, reader: Any) -> dict[str, Any]:
    """How well batches are mixed, and whether reading is resumed exactly."""
    straight = numbers_of(reader, 3 * SEEN)
    row: dict[str, Any] = {
        "neighbourhoods_in_a_batch": round(float(np.mean([len(np.unique(one // NEIGHBOURS)) for one in straight])), 1)
    }
    if not hasattr(reader, "note"):
        return row | {"resumes": "keeps no state"}
    batches = reader.read()
    for _ in range(SEEN):
        next(batches)
    noted = reader.note()
    batches.close()
    try:
        rest = numbers_of(reader, 2 * SEEN, noted)
        exact = len(rest) == 2 * SEEN and all(map(np.array_equal, rest, straight[SEEN:]))
        row["resumes"] = "exactly" if exact else "with other cells"
    except Exception as error:  # noqa: BLE001, whatever a library raises is its answer
        row["resumes"] = f"{type(error).__name__}: {str(error)[:120]}"
    return row


def readers_of(folder: Path, genes: Vocabulary) -> tuple[dict[str, Any], list[dict]]:
    """The readers of every library that is installed, and rows of those that are not."""
    corpus = PackedCells(folder / "corpus", genes)
    make: dict[str, tuple[str, Callable[[], Any]]] = {
        "ours": ("scdiva", lambda: Ours(folder, genes)),
        "annbatch, 64 x 64": ("annbatch", lambda: Annbatch(folder, corpus, 64, 64)),
        "annbatch": ("annbatch", lambda: Annbatch(folder, corpus)),
        "litdata": ("litdata", lambda: Litdata(folder, corpus)),
        "litdata, whole chunks": ("litdata", lambda: Litdata(folder, corpus, 0)),
        "mosaic": ("streaming", lambda: Mosaic(folder, corpus)),
    }
    left = [
        {"what": name, "left_out": f"{package} is not installed"}
        for name, (package, _) in make.items()
        if not find_spec(package)
    ]
    return {name: reader() for name, (package, reader) in make.items() if find_spec(package)}, left


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("cells", 60_000), ("genes", 20_000), ("studies", 20), ("read", 16_384), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        genes = make_studies(folder / "studies", options.cells, options.genes, options.studies)
        rows = [packing(folder, genes, workers) for workers in (1, 2)]
        readers, left = readers_of(folder, genes)
        cpu, wall = timed(
            {name: lambda one=one: given(one, options.read) for name, one in readers.items()}, options.repeats
        )
        best = {name: min(rounds) for name, rounds in cpu.items()}
        rows += [
            judge_times(f"CPU time per cell, {name} / ours", cpu[name], cpu["ours"], at_least=0.5)
            for name in readers
            if name != "ours"
        ]
        rows += [
            {
                "what": name,
                "cells_per_cpu_second": round(1e6 / best[name]),
                "cells_per_wall_second": round(1e6 / min(wall[name])),
                **qualities(name, reader),
            }
            for name, reader in readers.items()
        ]
    runs = options.cells / NEIGHBOURS
    rows += [
        {"what": "a true permutation", "neighbourhoods_in_a_batch": round(runs * (1 - (1 - 1 / runs) ** BATCH), 1)},
        *left,
    ]
    installed = versions((*PACKAGES, "h5py", "zarr", "zarrs", "annbatch", "litdata", "mosaicml-streaming"))
    record("packing", rows, **vars(options), versions=installed)
    return report(rows)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
