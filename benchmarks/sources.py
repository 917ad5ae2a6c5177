"""Cells read for a CPU second by where they lie: h5ad, zarr and SOMA on a disk, zarr and SOMA on an S3 server.

    python benchmarks/sources.py [--cells 40000] [--genes 20000] [--read 16384] [--repeats 5]

The same counts, made up as those of loading.py, as h5ad, as zarr of formats 2 and 3 as AnnData writes them, and as a
SOMA experiment that tiledbsoma writes with its own settings. All through `open_matrix` and `read_ranges`, as every call
reads: `rows` in their order, 1,024 at a time, as packing and embedding read; `blocks`, 64 blocks of 64 rows at random,
as training on files reads. The S3 server is moto's, in another process on the same machine, whose time is not counted:
wall times are what such a server takes, not what S3 does. CPU time (`process_time`) is of all threads of the reading
process. Arms in turn, best of the rounds. Figures are given without a goal.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import torch
from _record import PACKAGES, record, versions
from _timing import interleaved, report
from loading import BLOCK, BLOCKS, synthetic

from scdiva.data import open_matrix, open_soma
from scdiva.data.blocks import BLOCK_ROWS, read_ranges

SERVER = """
import time
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0)
server.start()
print(*server.get_host_and_port(), flush=True)
time.sleep(1e6)
"""
NEEDED = {"S3": ("moto", "flask", "s3fs", "upath"), "SOMA": ("tiledbsoma",)}


@contextmanager
def s3_server() -> Iterator[None]:
    """Run moto's S3 server in another process, and point fsspec and TileDB to it."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        host, port = next(line for line in server.stdout if line[0].isdigit()).split()
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "me",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "TILEDB_VFS_S3_ENDPOINT_OVERRIDE": f"{host}:{port}",
            "TILEDB_VFS_S3_SCHEME": "http",
            "TILEDB_VFS_S3_USE_VIRTUAL_ADDRESSING": "false",
            "TILEDB_VFS_S3_REGION": "us-east-1",
        }
        try:
            yield
        finally:
            server.kill()


def read(source: Any, n_cells: int, shuffled: bool) -> int:
    """Open a source and read cells of it: in order, or as buffers of training."""
    with open_matrix(source) as opened:
        given = 0
        if shuffled:
            starts = np.random.default_rng(0).permutation(opened.shape[0] // BLOCK) * BLOCK
            for at in range(0, n_cells // BLOCK, BLOCKS):
                ranges = [(int(start), int(start) + BLOCK) for start in starts[at : at + BLOCKS]]
                given += read_ranges(opened.matrix, ranges).shape[0]
        else:
            for start in range(0, n_cells, BLOCK_ROWS):
                given += read_ranges(opened.matrix, [(start, min(start + BLOCK_ROWS, n_cells))]).shape[0]
    return given


def write(folder: Path, adata: ad.AnnData, kinds: list[str]) -> dict[str, Callable[[], Any]]:
    """Write the cells in every way; give by name what opens them."""
    adata.write_h5ad(folder / "cells.h5ad")
    where: dict[str, Callable[[], Any]] = {"h5ad": lambda: folder / "cells.h5ad"}
    for version in (2, 3):
        with ad.settings.override(zarr_write_format=version):
            adata.write_zarr(folder / f"cells{version}.zarr")
        where[f"zarr {version}"] = lambda version=version: folder / f"cells{version}.zarr"
    if "SOMA" in kinds:
        import tiledbsoma.io

        tiledbsoma.io.from_anndata(str(folder / "cells.soma"), adata, "RNA", X_layer_name="raw")
        where["SOMA"] = lambda: open_soma(str(folder / "cells.soma"))
    if "S3" in kinds:
        import s3fs

        files = s3fs.S3FileSystem()
        files.mkdir("cells")
        for name in ("cells2.zarr", "cells3.zarr", "cells.soma"):
            if (folder / name).exists():
                files.put(str(folder / name), f"cells/{name}", recursive=True)
        where["zarr 3, S3"] = lambda: "s3://cells/cells3.zarr"
        if "SOMA" in kinds:
            where["SOMA, S3"] = lambda: open_soma("s3://cells/cells.soma")
    return where


def rows_of(where: dict[str, Callable[[], Any]], n_cells: int, repeats: int) -> list[dict]:
    """Time every source in both ways."""
    wall: dict[str, list[float]] = {}
    given: dict[str, int] = {}

    def run(name: str, shuffled: bool) -> None:
        start = time.perf_counter()
        given[name] = read(where[name.split(": ")[0]](), n_cells, shuffled)
        wall.setdefault(name, []).append(time.perf_counter() - start)

    arms = {
        f"{name}: {way}": lambda name=name, way=way: run(f"{name}: {way}", way == "blocks")
        for name in where
        for way in ("rows", "blocks")
    }
    cpu = interleaved(arms, repeats=repeats)
    return [
        {
            "what": name,
            "cpu_microseconds_per_cell": round(min(seconds) / given[name] * 1e6, 1),
            "wall_microseconds_per_cell": round(min(wall[name]) / given[name] * 1e6, 1),
            "cells_per_cpu_second": round(given[name] / min(seconds)),
        }
        for name, seconds in cpu.items()
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=40_000)
    parser.add_argument("--genes", type=int, default=20_000)
    parser.add_argument("--read", type=int, default=16_384)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    missing = {kind: [one for one in needed if find_spec(one) is None] for kind, needed in NEEDED.items()}
    kinds = [kind for kind, names in missing.items() if not names]
    adata = ad.AnnData(synthetic(options.cells, options.genes))
    adata.obs_names = [f"cell{i}" for i in range(adata.n_obs)]
    adata.var_names = [f"gene{i}" for i in range(adata.n_vars)]
    with tempfile.TemporaryDirectory() as folder, s3_server() if "S3" in kinds else tempfile.TemporaryDirectory():
        rows = rows_of(write(Path(folder), adata, kinds), options.read, options.repeats)
    rows += [
        {"what": kind, "left_out": f"not installed: {', '.join(names)}"} for kind, names in missing.items() if names
    ]
    record(
        "sources",
        rows,
        cells=options.cells,
        genes=options.genes,
        median_genes=int(np.median(np.diff(adata.X.indptr))),
        read=options.read,
        versions=versions((*PACKAGES, "h5py", "zarr", "s3fs", "moto", "tiledbsoma")),
    )
    return report(rows)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
