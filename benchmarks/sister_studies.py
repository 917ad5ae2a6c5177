"""The rows of Kang's sets, with the experiment that they share with the corpus in training and left out of it.

    python scripts/train_mini.py --exclude kang_pbmc_stim_2000 --encoder-only --out runs/without_kang
    python benchmarks/sister_studies.py --data FOLDER --without runs/without_kang/model

No cell of a benchmark set is in the corpus, but `kang_pbmc_stim_2000` is of the same experiment as
`kang_pbmc_12k_1287g` and `kang_ifnb_2800`. Both models are scored in one run, on the same cells and seeds, by the
functions of `_sets.py`, `integration.py` and `annotation.py`: the embedding as it is, `tl.integrate` without
labels, `tl.annotate` with all labels of the reference. Entropies, vocabulary and corpus SVD of the second model were
made without the study, too; its transformer is untrained, and none of the three calls runs it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import anndata as ad
import annotation
import integration
import torch
from _prepared import fingerprint, prepared
from _record import record
from _rivals import scdiva_arm
from _sets import load_set, row_of, scores

import scdiva as sd

KANG = ("kang_pbmc_12k_1287g", "kang_ifnb_2800")
LEFT_OUT = "kang_pbmc_stim_2000"
KEPT = ("accuracy", "macro_f1", "nmi", "ari", "asw", "average_bio", "ilisi", "batch_asw", "ece")
"""Scores of a row, and their deviations over seeds."""


def embedded(folder: Path, name: str, model: str, seeds: list[int]) -> dict:
    """`tl.embed`, nothing fitted."""
    adata, labels = load_set(folder, name)
    found = scdiva_arm(sd.models.load_model(model))(adata)
    return row_of(name, "scdiva", [scores(found, labels, seed) for seed in seeds], {})


def integrated(folder: Path, name: str, model: str, seeds: list[int]) -> dict:
    """`tl.integrate` without labels, as in integration.py."""
    adata = prepared(ad.read_h5ad(folder / f"{name}.h5ad"), integration.SETS[name], "cell_type")
    with tempfile.TemporaryDirectory() as temporary:
        adata.write_h5ad(file := Path(temporary) / "cells.h5ad")
        job = {"part": "unlabelled", "set": name, "arm": "ours", "left_out": None, "model": model, "file": str(file),
               "keep": temporary, "threads": 1}  # fmt: skip
        return integration.made(adata, job, seeds, Path(temporary), fingerprint(adata))


def annotated(folder: Path, name: str, model: str, seeds: list[int]) -> dict:
    """`tl.annotate` with its default method and all labels, as in annotation.py."""
    split, queries = annotation.SETS[name]
    read = ad.read_h5ad(folder / f"{name}.h5ad")
    adata = annotation.with_split(read, prepared(read, "batch", "cell_type"), split)
    same = {"cells": fingerprint(adata), "queries": list(queries), "seeds": seeds}
    with tempfile.TemporaryDirectory() as temporary:
        adata.write_h5ad(file := Path(temporary) / "cells.h5ad")
        job = {"part": "full", "set": name, "share": None, "arm": "ours", "queries": queries, "file": str(file),
               "model": model, "keep": temporary, "threads": 1}  # fmt: skip
        return annotation.made(adata, job, same, Path(temporary))


TASKS = {"tl.embed": embedded, "tl.integrate": integrated, "tl.annotate": annotated}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the benchmark h5ad files")
    parser.add_argument("--without", type=Path, required=True, help="model trained without the study")
    parser.add_argument("--sets", nargs="+", default=list(KANG), choices=KANG)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args(argv)
    sd.settings.progress = False
    torch.set_num_threads(1)
    models = {"shipped": "scdiva-mini", "left_out": str(arguments.without)}
    rows = []
    for name in arguments.sets:
        for task, run in TASKS.items():
            for trained, model in models.items():
                found = run(arguments.data, name, model, arguments.seeds)
                row = {"set": name, "task": task, "trained": trained, "seeds": arguments.seeds}
                row |= {key: value for key, value in found.items() if key.removesuffix("_sd") in KEPT}
                rows.append(row)
                print(row, flush=True)
    path = record("sister_studies", rows, left_out=LEFT_OUT)
    print(f"written: {path.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
