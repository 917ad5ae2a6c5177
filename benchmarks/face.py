"""What a user waits for: seconds and memory of each public call, in a new process and again in the same.

    python benchmarks/face.py --data FOLDER [--cells 700 3000 30000] [--calls NAME ...] [--limit 600] [--before FILE]

Every row is a process of its own with one thread. `cold`: the call with the import of the package, of what it loads and
compiles; `warm`: the same call again on other cells of the same set. Beside ours stands what a user would call instead,
on the same cells. Reading the file is left out. Cells: 700 of pbmc3k_raw, all 2,700, and 30,000 drawn from it with
replacement, each count kept with probability .9; batches are donors of kang_pbmc_12k_1287g (more than its 12,261 cells
are drawn likewise) and plates and technologies of the 1,408 cells of sc_mixology_cell_lines; screens are perturbench's
5,961 cells and 500 genes. Without `--cells` a call is measured at the sizes that its goals name, at 3,000 and, where a
notebook has as many, at 30,000. A call that takes longer than `--limit` is ended and said to have been. Rows are
written as they are made, each with its commit, in the place of those of the same call and size: so CellTypist and scVI
may be run, by `--calls`, in an environment of their own. `--before` names the results of an earlier commit, whose
seconds then stand beside.

CPU seconds are the figure to read: on a machine that runs something else at the same time, as the one of the results
did, wall seconds are up to twice as many as on an idle one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
from _memory import _status
from _record import commit, record, replaced, rows_so_far
from _timing import goal, report

KEPT = 0.9


def drawn(folder: Path, name: str, n_cells: int, seed: int) -> ad.AnnData:
    """So many cells of a set; more than it has are drawn with replacement and sequenced a little less deep."""
    from _sets import thinned

    adata = ad.read_h5ad(folder / f"{name}.h5ad")
    rng = np.random.default_rng(seed)
    if n_cells <= adata.n_obs:
        return adata[np.sort(rng.permutation(adata.n_obs)[:n_cells])].copy()
    if n_cells <= 1.2 * adata.n_obs:
        return adata
    cells = adata[np.sort(rng.integers(adata.n_obs, size=n_cells))].copy()
    cells.obs_names_make_unique()
    return thinned(cells, KEPT, seed)


def normalised(adata: ad.AnnData) -> None:
    import scanpy as sc

    sc.pp.normalize_total(adata, target_sum=1e4)
    sc.pp.log1p(adata)


def pca(adata: ad.AnnData) -> None:
    import scanpy as sc

    normalised(adata)
    sc.pp.highly_variable_genes(adata, n_top_genes=2000)
    sc.pp.pca(adata, n_comps=50)


def scanpy_umap(adata: ad.AnnData) -> None:
    import scanpy as sc

    pca(adata)
    sc.pp.neighbors(adata)
    sc.tl.umap(adata)
    sc.pl.umap(adata, color="cell_type", show=False)


def harmony(adata: ad.AnnData) -> None:
    import harmonypy

    pca(adata)
    harmonypy.run_harmony(adata.obsm["X_pca"], adata.obs, batch_of(adata), verbose=False)


def logistic_regression(adata: ad.AnnData) -> None:
    from sklearn.linear_model import LogisticRegression

    pca(adata)
    half = np.arange(adata.n_obs) % 2 == 0
    fitted = LogisticRegression(max_iter=1000).fit(adata.obsm["X_pca"][half], adata.obs["cell_type"][half])
    fitted.predict(adata.obsm["X_pca"][~half])


def celltypist_fitted(adata: ad.AnnData) -> None:
    import celltypist

    normalised(adata)
    half = np.arange(adata.n_obs) % 2 == 0
    fitted = celltypist.train(adata[half].copy(), "cell_type", n_jobs=1)
    celltypist.annotate(adata[~half].copy(), fitted)


def scvi_fitted(adata: ad.AnnData) -> None:
    import scvi

    scvi.model.SCVI.setup_anndata(adata, batch_key=batch_of(adata))
    model = scvi.model.SCVI(adata)
    model.train(accelerator="cpu", enable_progress_bar=False)
    model.get_latent_representation()


def dorothea_like(adata: ad.AnnData) -> None:
    import decoupler as dc
    import pandas as pd

    normalised(adata)
    rng = np.random.default_rng(0)
    genes = adata.var_names[np.argsort(-np.asarray(adata.X.sum(axis=0)).ravel())[:2000]]
    net = pd.DataFrame({"source": np.repeat([f"tf{i}" for i in range(50)], 40), "target": rng.choice(genes, 2000)})
    dc.mt.ulm(adata, net.drop_duplicates())


def batch_of(adata: ad.AnnData) -> str:
    return "donor" if "donor" in adata.obs else "batch"


def annotate(adata: ad.AnnData) -> None:
    import scdiva as sd

    adata = adata[~adata.obs["cell_type"].isin(["unlabelled"])].copy()
    half = np.arange(adata.n_obs) % 2 == 0
    sd.tl.annotate(adata[~half].copy(), "cell_type", adata[half].copy())


def ours(name: str, **arguments: object) -> Callable[[ad.AnnData], object]:
    """A call of scdiva on the cells, by its dotted name."""

    def call(adata: ad.AnnData) -> object:
        import scdiva as sd

        part, function = name.split(".")
        given = {key: batch_of(adata) if value == "batch" else value for key, value in arguments.items()}
        return getattr(getattr(sd, part), function)(adata, **given)

    return call


def after(first: str, then: str, **arguments: object) -> tuple[Callable, Callable]:
    """A call that reads what another wrote, which is not measured."""
    return ours(first), ours(then, **arguments)


def drawn_cells(adata: ad.AnnData) -> None:
    """Put cells that the model drew beside the real ones, for the plot of both."""
    import scdiva as sd

    MADE.append(sd.tl.generate(adata, 100))


def generated_plot(adata: ad.AnnData) -> None:
    import scdiva as sd

    sd.pl.generated(adata[:, MADE[-1].var_names], MADE[-1])


def mapped(adata: ad.AnnData) -> None:
    """A map that is there already, as `pl.umap` leaves it."""
    import scdiva as sd

    sd.tl.embed(adata)
    sd.pl.umap(adata)


def integrated(adata: ad.AnnData) -> None:
    import scdiva as sd

    sd.tl.embed(adata)
    sd.tl.integrate(adata, batch_of(adata))


def annotated(adata: ad.AnnData) -> None:
    import scdiva as sd

    sd.tl.embed(adata)
    sd.tl.annotate(adata, "cell_type", adata[::2].copy(), unlabeled_category="unlabelled")


def predicted(adata: ad.AnnData) -> None:
    import scdiva as sd

    sd.tl.predict_perturbation(adata, "perturbation", predict=["FOXO4"])


def scored(adata: ad.AnnData) -> None:
    import scdiva as sd

    sd.tl.score_perturbation(adata, adata)


def refused(adata: ad.AnnData) -> None:
    """A column that is not there: an error, before anything is read."""
    import scdiva as sd

    try:
        sd.tl.integrate(adata, "no such column")
    except KeyError:
        return
    raise AssertionError("a batch_key that is not there was taken")


def in_a_file(adata: ad.AnnData) -> None:
    adata.write_h5ad("cells.h5ad")


def command_line(*arguments: str) -> Callable[[ad.AnnData], None]:
    def call(adata: ad.AnnData) -> None:
        del adata
        subprocess.run([sys.executable, "-m", "scdiva", *arguments], capture_output=True, check=False)

    return call


MADE: list[ad.AnnData] = []
BLOOD, DONORS, LINES, SCREEN = (
    "pbmc3k_raw", "kang_pbmc_12k_1287g", "sc_mixology_cell_lines", "perturbench_devel_norman_mcfaline_5961_500g",
)  # fmt: skip
Calls = Callable[[ad.AnnData], object] | tuple[Callable, Callable]
CALLS: dict[str, tuple[str, Calls]] = {
    "pp.match_genes": (BLOOD, ours("pp.match_genes")),
    "pp.gene_entropy": (BLOOD, ours("pp.gene_entropy")),
    "pp.entropy_serialize": (BLOOD, ours("pp.entropy_serialize")),
    "tl.embed": (BLOOD, ours("tl.embed")),
    "scanpy: normalise, genes, PCA": (BLOOD, pca),
    "tl.adapt": (BLOOD, ours("tl.adapt")),
    "tl.integrate": (DONORS, ours("tl.integrate", batch_key="batch")),
    "Harmony on PCA": (DONORS, harmony),
    "tl.integrate, cell lines": (LINES, ours("tl.integrate", batch_key="batch")),
    "Harmony on PCA, cell lines": (LINES, harmony),
    "scVI, cell lines": (LINES, scvi_fitted),
    "tl.corrected_expression, cell lines": (
        LINES,
        (integrated, ours("tl.corrected_expression", batch_key="batch", genes=["ACTB", "GAPDH"])),
    ),
    "tl.annotate": (BLOOD, annotate),
    "logistic regression on PCA": (BLOOD, logistic_regression),
    "CellTypist, trained on the same": (BLOOD, celltypist_fitted),
    "tl.impute, two genes": (BLOOD, ours("tl.impute", genes=["CD3D", "LYZ"])),
    "tl.generate, 100 cells": (BLOOD, ours("tl.generate", n_cells=100)),
    "tl.grn": (BLOOD, ours("tl.grn")),
    "tl.regulon": (BLOOD, after("tl.grn", "tl.regulon", source="CD3D")),
    "tl.grn_modules": (BLOOD, after("tl.grn", "tl.grn_modules")),
    "decoupler: ulm": (BLOOD, dorothea_like),
    "tl.reconstruct": (BLOOD, ours("tl.reconstruct")),
    "tl.log_likelihood": (BLOOD, ours("tl.log_likelihood")),
    "tl.gene_embedding": (BLOOD, ours("tl.gene_embedding")),
    "tl.fit_perturbation": (SCREEN, ours("tl.fit_perturbation", perturbation_key="perturbation")),
    "tl.predict_perturbation": (
        SCREEN,
        ours("tl.predict_perturbation", perturbation_key="perturbation", predict=["KLF1+MAPK1", "SGK1+PLK4"]),
    ),
    "tl.score_perturbation": (SCREEN, (predicted, scored)),
    "tl.integrate, a wrong key": (BLOOD, refused),
    "pl.umap": (BLOOD, after("tl.embed", "pl.umap", color="cell_type")),
    "pl.umap, of a map that is there": (BLOOD, (mapped, ours("pl.umap", color="cell_type"))),
    "scanpy: PCA to a drawn UMAP": (BLOOD, scanpy_umap),
    "pl.annotation": (BLOOD, (annotated, ours("pl.annotation"))),
    "pl.confusion_matrix": (BLOOD, (annotated, ours("pl.confusion_matrix", labels_key="cell_type"))),
    "pl.marker_heatmap": (BLOOD, (annotated, ours("pl.marker_heatmap"))),
    "pl.integration, cell lines": (LINES, (integrated, ours("pl.integration", batch_key="batch"))),
    "pl.perturbation": (SCREEN, (predicted, ours("pl.perturbation", condition="FOXO4"))),
    "pl.grn": (BLOOD, after("tl.grn", "pl.grn")),
    "pl.generated": (BLOOD, (drawn_cells, generated_plot)),
    "get.annotation_df": (BLOOD, (annotated, ours("get.annotation_df"))),
    "get.grn_df": (BLOOD, after("tl.grn", "get.grn_df")),
    "command line: embed": (BLOOD, (in_a_file, command_line("embed", "cells.h5ad", "--out", "embedded.h5ad"))),
    "command line: --help": (BLOOD, command_line("--help")),
    "command line: a wrong option": (BLOOD, command_line("embed", "--nothing", "x")),
    "command line: a file that is not there": (BLOOD, command_line("embed", "nowhere.h5ad", "--out", "out.h5ad")),
}
"""Each call, and the set it is measured on. What begins with another package's name stands beside the call above it."""
SIZES = {
    "tl.embed": (700, 3_000, 30_000), "scanpy: normalise, genes, PCA": (700, 3_000, 30_000),
    "tl.integrate": (12_000, 100_000), "Harmony on PCA": (12_000, 100_000), "tl.integrate, cell lines": (1_400,),
    "Harmony on PCA, cell lines": (1_400,), "scVI, cell lines": (1_400,),
    "tl.corrected_expression, cell lines": (1_400,), "pl.integration, cell lines": (1_400,),
    **dict.fromkeys(("tl.annotate", "tl.impute, two genes", "tl.generate, 100 cells", "tl.grn"), (3_000, 30_000)),
}  # fmt: skip
"""Cells that a call is measured with; 3,000 where nothing stands here. A set that has hardly fewer is taken whole."""
ONE_SIZE = ("cell lines", "command line", "perturbation", "match_genes", "wrong key")
"""Calls that are measured at one size, whatever `--cells` says."""
WITHIN = {
    ("tl.embed", 700, "cold", "cpu"): 5.0, ("tl.embed", 3000, "warm", "cpu"): 0.7,
    ("tl.integrate, cell lines", 1400, "warm", "cpu"): 10.0, ("tl.integrate", 12_000, "warm", "cpu"): 25.0,
    ("tl.integrate", 100_000, "warm", "cpu"): 300.0,
    **{(call, 3000, "warm", "cpu"): 10.0 for call in (
        "tl.impute, two genes", "tl.generate, 100 cells", "tl.grn", "tl.regulon", "tl.annotate", "tl.fit_perturbation",
        "tl.predict_perturbation", "tl.adapt",
    )},
    ("pl.umap", 3000, "cold", "cpu"): 12.0, ("pl.umap, of a map that is there", 3000, "warm", "cpu"): 5.0,
    ("pl.grn", 3000, "warm", "cpu"): 5.0, ("pl.generated", 3000, "warm", "cpu"): 5.0,
    **{(call, 3000, "cold", "cpu"): 2.0 for call in (
        "tl.integrate, a wrong key", "command line: a wrong option", "command line: a file that is not there",
    )},
}  # fmt: skip
"""Goals: call, cells, of which run, of which clock; seconds. One thread waits for little but the disk: what the clock
of an idle machine shows is close to its CPU seconds, so these are judged where a goal is about waiting, too."""


MEASURED = ("cold_wall", "cold_cpu", "warm_wall", "warm_cpu", "peak_mib")


def spent() -> tuple[float, float]:
    """Wall and CPU seconds of this process and those that it waited for."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(one.ru_utime + one.ru_stime for one in usage)


def measured(name: str, n_cells: int, folder: Path) -> dict:
    """Seconds of a call cold and warm, and the peak of memory; for a process of its own."""
    warnings.filterwarnings("ignore")
    on, call = CALLS[name]
    found: dict = {}
    for run in ("cold", "warm"):
        adata = drawn(folder, on, n_cells, int(run == "warm"))
        found["n_cells"] = adata.n_obs
        first, main_call = call if isinstance(call, tuple) else (None, call)
        if first is not None:
            first(adata)
        begun = spent()
        main_call(adata)
        found |= {
            f"{run}_{clock}": round(now - then, 3)
            for clock, now, then in zip(("wall", "cpu"), spent(), begun, strict=True)
        }
    return {**found, "peak_mib": round(_status("VmHWM") / 2**20)}


def apart(name: str, n_cells: int, folder: Path, limit: float) -> dict:
    """Measure a call in a process of its own, in an empty folder."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    job = json.dumps([name, n_cells, str(folder.resolve())])
    with tempfile.TemporaryDirectory() as empty:
        try:
            answer = subprocess.run(
                [sys.executable, __file__, "--job", job], capture_output=True, text=True, check=False, cwd=empty,
                env={**os.environ, "MPLBACKEND": "agg", "SCDIVA_PROGRESS": "0", **threads}, timeout=limit,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"n_cells": n_cells, "ended_after": limit}
    if answer.returncode:
        raise RuntimeError(f"{name} of {n_cells:,} cells failed:\n{answer.stderr[-4000:]}")
    return json.loads(answer.stdout.splitlines()[-1])


def goals(rows: list[dict]) -> list[dict]:
    """Rows of the goals that were measured."""
    judged = []
    for (call, size, run, clock), most in WITHIN.items():
        for row in rows:
            if (row["call"], row["size"]) == (call, size) and f"{run}_{clock}" in row:
                what = f"{call}, {row['n_cells']:,} cells, {run}: {'CPU' if clock == 'cpu' else 'wall'} seconds"
                judged.append(goal(what, row[f"{run}_{clock}"], at_most=most))
    return judged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the benchmark h5ad files")
    parser.add_argument("--cells", nargs="+", type=int, help="cells, instead of those that each call is measured with")
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS), metavar="NAME")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a call is ended")
    parser.add_argument("--before", type=Path, help="results of an earlier commit")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        name, n_cells, folder = json.loads(options.job)
        sys.stdout.write(f"\n{json.dumps(measured(name, n_cells, Path(folder)))}\n")
        return 0
    before = json.loads(options.before.read_text()) if options.before else {"rows": []}
    earlier = {(row["call"], row["size"]): row for row in before["rows"] if "call" in row}
    judged: list[dict] = []
    for call in options.calls:
        fixed = options.cells is None or any(part in call for part in ONE_SIZE)
        for size in SIZES.get(call, (3_000,)) if fixed else options.cells:
            row = {"call": call, "size": size, "commit": commit(), **apart(call, size, options.data, options.limit)}
            if found := earlier.get((call, size)):
                row |= {"before": {key: found[key] for key in MEASURED if key in found} | {"commit": before["commit"]}}
            rows = replaced(rows_so_far("face"), row, ("call", "size"))
            rows.sort(key=lambda row: (list(CALLS).index(row["call"]), row["size"]))
            judged = goals(rows)
            record("face", judged + rows)
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return report(judged)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
