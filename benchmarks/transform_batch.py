"""`tl.corrected_expression` in a chosen batch, against cells of that batch which nothing was fitted to.

    python benchmarks/transform_batch.py --data FOLDER

Half of the cells of each batch and type are integrated without labels. For each two batches A and B and each type of
15 cells or more there, A's cells are predicted in B, and the mean of each gene over them is compared with its mean over
the other half of B's cells of the type: root mean squared error over the 2,000 most variable genes, log1p of counts per
ten thousand. Arms: `ours`; `uncorrected`, A's cells as they are; `mean_shift`, each gene shifted by the difference of
the batches' means; `no_batch`, `tl.corrected_expression` without a batch; `own_half`, B's cells of the type in the half
that was integrated: what the noise of the cells leaves. Once with all cells (`seen`), and once with B's cells of the
type left out of regression and means (`unseen`; the states were integrated with them).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import scanpy as sc
import scipy.sparse as sp
import torch
from _record import record

import scdiva as sd
from scdiva._constants import N_SPECIAL

SETS = {
    "sc_mixology_cell_lines": "batch",
    "panc8_small_500": "assay",
    "kang_ifnb_2800": "condition",
    "kang_pbmc_12k_1287g": "donor",
}
"""Sets, and what their batches are; of kang_ifnb_2800 it is the stimulus, which is an effect of the same kind."""
LEAST, N_GENES = 15, 2000
ARMS = ("ours", "mean_shift", "no_batch", "uncorrected", "own_half")


def halves(adata: ad.AnnData, seed: int) -> np.ndarray:
    """A half of the cells of each batch and type, as a mask."""
    rng, pairs = np.random.default_rng(seed), adata.obs["batch"] + "|" + adata.obs["type"]
    chosen = np.zeros(adata.n_obs, dtype=bool)
    for pair in sorted(pairs.unique()):
        rows = rng.permutation(np.flatnonzero(pairs == pair))
        chosen[rows[: (len(rows) + 1) // 2]] = True
    return chosen


def values(adata: ad.AnnData) -> ad.AnnData:
    """The cells, log1p of counts per ten thousand."""
    adata = adata.copy()
    sc.pp.normalize_total(adata, target_sum=1e4)
    sc.pp.log1p(adata)
    return adata


def compared(adata: ad.AnnData, seed: int) -> list[dict]:
    """Errors of each arm for each two batches and type, and how observed values lie around the predicted ones."""
    chosen = halves(adata, seed)
    fitted, held = adata[chosen].copy(), values(adata[~chosen])
    sd.tl.integrate(fitted, "batch", rng=seed)
    shown = values(fitted)
    sc.pp.highly_variable_genes(shown, n_top_genes=min(N_GENES, adata.n_vars), batch_key="batch")
    tokens = sd.models.load("scdiva-mini").vocabulary.match(list(adata.var_names)).tokens
    genes = list(adata.var_names[shown.var["highly_variable"].to_numpy() & (tokens >= N_SPECIAL)])
    x, y = (np.asarray(sp.csr_matrix(cells[:, genes].X).todense()) for cells in (shown, held))
    batch, kind = (fitted.obs[key].to_numpy() for key in ("batch", "type"))
    there, its = (held.obs[key].to_numpy() for key in ("batch", "type"))

    def predicted(cells: ad.AnnData, to: str | None) -> list[np.ndarray]:
        sd.tl.corrected_expression(cells, "batch", genes, transform_batch=to)
        found = (cells.obsm[key] for key in ("scdiva_corrected", "scdiva_corrected_sd"))
        return [frame.reindex(fitted.obs_names).to_numpy() for frame in found]

    rows, average = [], predicted(fitted, None)[0]
    for to in sorted(set(batch)):
        whole = predicted(fitted, to)
        for name in sorted(set(kind[batch == to])):
            own, target = (batch == to) & (kind == name), y[(there == to) & (its == name)]
            sources = [a for a in set(batch) - {to} if ((batch == a) & (kind == name)).sum() >= LEAST]
            if min(own.sum(), len(target)) < LEAST or not sources:
                continue
            rest = (batch == to) & ~own
            for setting, left in (("seen", np.ones(len(x), dtype=bool)), ("unseen", ~own)):
                if setting == "unseen" and rest.sum() < 2 * LEAST:
                    continue
                mean, spread = whole if setting == "seen" else predicted(fitted[left].copy(), to)
                for source in sorted(sources):
                    cells = (batch == source) & (kind == name)
                    shift = x[left & (batch == to)].mean(axis=0) - x[left & (batch == source)].mean(axis=0)
                    arms = {
                        "ours": mean[cells],
                        "mean_shift": np.maximum(x[cells] + shift, 0),
                        "no_batch": average[cells],
                        "uncorrected": x[cells],
                        "own_half": x[own],
                    }
                    found = {
                        arm: float(np.sqrt(np.mean((a.mean(axis=0) - target.mean(axis=0)) ** 2)))
                        for arm, a in arms.items()
                    }
                    off = np.abs(target[:, None] - mean[cells][None, :LEAST])
                    shows = target.any(axis=0)
                    within = float((off <= 1.96 * spread[cells][None, :LEAST])[..., shows].mean())
                    rows.append({"setting": setting, "target": f"{to}|{name}", "within": within, **found})
    return rows


def summarised(name: str, rows: list[dict], seeds: list[int]) -> list[dict]:
    """A row an arm: mean error, share of comparisons that are nearer than `mean_shift`, and by how much on average.

    The interval is a bootstrap over batches and types that are predicted.
    """
    made = []
    for setting in ("seen", "unseen"):
        some = [row for row in rows if row["setting"] == setting]
        by_target = defaultdict(list)
        for row in some:
            by_target[row["target"]].append(row)
        for arm in ARMS if some else ():
            ahead = np.array([np.mean([r["mean_shift"] - r[arm] for r in each]) for each in by_target.values()])
            drawn = np.random.default_rng(0).choice(ahead, (2000, len(ahead))).mean(axis=1)
            low, high = np.quantile(drawn, [0.025, 0.975])
            row = {"set": name, "setting": setting, "arm": arm, "seeds": seeds, "n": len(some)}
            row |= {"rmse": float(np.mean([r[arm] for r in some])), "ahead": float(ahead.mean())}
            row |= {"ahead_low": float(low), "ahead_high": float(high)}
            row["nearer"] = float(np.mean([r[arm] < r["mean_shift"] for r in some]))
            if arm == "ours":
                row["within"] = float(np.mean([r["within"] for r in some]))
            made.append(row)
            print(row, flush=True)
    return made


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the benchmark h5ad files")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args(argv)
    sd.settings.progress = False
    torch.set_num_threads(1)
    rows = []
    for name in arguments.sets:
        adata = ad.read_h5ad(arguments.data / f"{name}.h5ad")
        adata.obs = pd.DataFrame(
            {"batch": adata.obs[SETS[name]].astype(str), "type": adata.obs["cell_type"].astype(str)},
            index=adata.obs_names,
        )
        found = [row for seed in arguments.seeds for row in compared(adata, seed)]
        rows += summarised(name, found, arguments.seeds)
    print(f"written: {record('transform_batch', rows).name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
