"""Pack the training studies of denoising.py anew, each split by batch, donor and technology: more contexts.

    python benchmarks/split_studies.py --corpus FOLDER --base runs/held_out --out runs/split/prepared

OUT/train.h5 takes the place of BASE/prepared/train.h5 in `train_denoiser.py --prepared OUT`. It holds the same cells.
A part has 32 cells or more; what is left of a study is a part of its own, or goes to the first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd

from scdiva.data.packed import PackedCells
from scdiva.data.packing import pack_files
from scdiva.models import load_model

COLUMNS, LEAST = ("batch", "donor", "assay"), 32


def parts_of(obs: pd.DataFrame) -> list[np.ndarray]:
    """Rows of each part of a study."""
    there = [column for column in COLUMNS if column in obs]
    named = obs[there].astype(str).agg("|".join, axis=1) if there else np.zeros(len(obs))
    of = np.unique(named, return_inverse=True)[1]
    large = [number for number, n in enumerate(np.bincount(of)) if n >= LEAST]
    parts = [np.flatnonzero(of == number) for number in large]
    rest = np.flatnonzero(~np.isin(of, large))
    if len(rest) >= LEAST or not parts:
        return [*parts, rest]
    return [np.sort(np.concatenate([parts[0], rest])), *parts[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    model = load_model(arguments.base / "model")
    before = PackedCells(arguments.base / "prepared" / "train.h5", model.vocabulary)
    (arguments.out / "parts").mkdir(parents=True, exist_ok=True)
    files = []
    for name in before.study_names:
        cleaned = arguments.base / "prepared" / "clean" / f"{name}.h5ad"
        adata = ad.read_h5ad(cleaned if cleaned.exists() else arguments.corpus / f"{name}.h5ad")
        for number, rows in enumerate(parts := parts_of(adata.obs)):
            files.append(arguments.out / "parts" / f"{name}{f'__{number}' * (len(parts) > 1)}.h5ad")
            adata[rows].copy().write_h5ad(files[-1])
    packed = pack_files(
        files, model.vocabulary, arguments.out / "train.h5", max_length=model.config.input_length, min_genes=200,
        entropy_floor=model.config.entropy_floor,
    )  # fmt: skip
    assert sorted(packed.lengths) == sorted(before.lengths)
    print(f"{packed.n_obs:,} cells: {len(before.study_names)} studies, {len(packed.study_names)} parts")


if __name__ == "__main__":
    main()
