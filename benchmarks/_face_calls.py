"""The calls that face.py measures, and the cells that each is measured on.

Cells: 700 of pbmc3k_raw, all 2,700, and 30,000 made of it: half of the counts of a cell drawn with replacement, and
half of those of another of its type and batch. (Copies of cells were each other's neighbours, and UMAP did not end on
their thousands of components.) Batches are donors of kang_pbmc_12k_1287g (more than its 12,261 cells are made likewise)
and plates and technologies of the 1,408 cells of sc_mixology_cell_lines; screens are perturbench's 5,961 cells and 500
genes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import anndata as ad
import numpy as np

BLOOD, DONORS, LINES, SCREEN = (
    "pbmc3k_raw", "kang_pbmc_12k_1287g", "sc_mixology_cell_lines", "perturbench_devel_norman_mcfaline_5961_500g",
)  # fmt: skip
PREDICTED = ["FOXO4", "KLF1", "SGK1"]
MADE: dict[str, Any] = {}
"""What a step before the measured one made, beside the cells."""


class Call(NamedTuple):
    """Set that a call is measured on, the call, and what is done before, which is not measured and gives the cells."""

    on: str
    measured: Callable[[ad.AnnData], object]
    first: Callable[[ad.AnnData], ad.AnnData] | None = None


def drawn(folder: Path, name: str, n_cells: int, seed: int) -> ad.AnnData:
    """So many cells of a set; where it has fewer, each of two halves of cells of one type and batch."""
    from _sets import thinned

    adata = ad.read_h5ad(folder / f"{name}.h5ad")
    rng = np.random.default_rng(seed)
    if n_cells <= adata.n_obs:
        return adata[np.sort(rng.permutation(adata.n_obs)[:n_cells])].copy()
    if n_cells <= 1.2 * adata.n_obs:
        return adata
    rows = np.sort(rng.integers(adata.n_obs, size=n_cells))
    alike = [column for column in ("cell_type", "batch", "perturbation") if column in adata.obs]
    group = adata.obs.groupby(alike, observed=True, dropna=False).ngroup().to_numpy()
    by_group, number = np.argsort(group), np.bincount(group)
    within = (rng.random(n_cells) * number[group[rows]]).astype(int)
    others = by_group[(np.cumsum(number) - number)[group[rows]] + within]
    cells, second = (thinned(adata[which].copy(), 0.5, seed + part) for part, which in enumerate((rows, others)))
    cells.X = cells.X + second.X
    cells.obs_names_make_unique()
    return cells


def batch_of(adata: ad.AnnData) -> str:
    return "donor" if "donor" in adata.obs else "batch"


# What a user would call instead.


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
    """Default architecture and epochs, on 2,000 highly variable genes as its tutorials choose them."""
    import scanpy as sc
    import scvi

    chosen = adata.copy()
    normalised(chosen)
    sc.pp.highly_variable_genes(chosen, n_top_genes=min(2000, adata.n_vars))
    counts = adata[:, chosen.var["highly_variable"]].copy()
    scvi.model.SCVI.setup_anndata(counts, batch_key=batch_of(adata))
    model = scvi.model.SCVI(counts)
    model.train(accelerator="cpu", enable_progress_bar=False)
    model.get_latent_representation()


def ulm_of_network(adata: ad.AnnData) -> None:
    import decoupler as dc
    import pandas as pd

    normalised(adata)
    rng = np.random.default_rng(0)
    genes = adata.var_names[np.argsort(-np.asarray(adata.X.sum(axis=0)).ravel())[:2000]]
    net = pd.DataFrame({"source": np.repeat([f"tf{i}" for i in range(50)], 40), "target": rng.choice(genes, 2000)})
    dc.mt.ulm(adata, net.drop_duplicates())


# Ours.


def ours(name: str, *others: str, **arguments: object) -> Callable[[ad.AnnData], object]:
    """A call of scdiva by its dotted name: on the cells, on what `others` name in `MADE`, with these arguments.

    `batch_key="batch"` stands for the column of batches of the set.
    """

    def call(adata: ad.AnnData) -> object:
        import scdiva as sd

        part, function = name.split(".")
        given = {key: batch_of(adata) if key == "batch_key" else value for key, value in arguments.items()}
        positional = [MADE[other] for other in others] or [adata]
        return getattr(getattr(sd, part), function)(*positional, **given)

    return call


def after(*calls: Callable[[ad.AnnData], object]) -> Callable[[ad.AnnData], ad.AnnData]:
    """Calls in their order, on the cells; what the last returns is in `MADE`, the cells in `MADE["cells"]`."""

    def run(adata: ad.AnnData) -> ad.AnnData:
        for call in calls:
            MADE["made"] = call(adata)
        MADE["cells"] = adata
        return adata

    return run


def drawn_cells(adata: ad.AnnData) -> ad.AnnData:
    """Cells that the model drew; the real ones with their genes are what is measured with."""
    import scdiva as sd

    MADE["made"] = sd.tl.generate(adata, 100)
    MADE["cells"] = adata[:, MADE["made"].var_names]
    return adata


def reconstructed(adata: ad.AnnData) -> ad.AnnData:
    """A hundred reconstructed cells, again and again: all of them would take .1 s each."""
    import scdiva as sd

    some = adata[:100].copy()
    sd.tl.reconstruct(some)
    found = some[np.arange(adata.n_obs) % some.n_obs].copy()
    found.obs_names_make_unique()
    return found


def gene_sets(adata: ad.AnnData) -> ad.AnnData:
    names = list(adata.var_names)
    MADE["sets"] = {f"set {i}": names[i * 100 : i * 100 + 300] for i in range(4)}
    return adata


def annotate(adata: ad.AnnData) -> None:
    """One half by the other."""
    import scdiva as sd

    adata = adata[~adata.obs["cell_type"].isin(["unlabelled"])].copy()
    half = np.arange(adata.n_obs) % 2 == 0
    sd.tl.annotate(adata[~half].copy(), "cell_type", adata[half].copy())


def annotated(adata: ad.AnnData) -> object:
    import scdiva as sd

    return sd.tl.annotate(adata, "cell_type", adata[::2].copy(), unlabeled_category="unlabelled")


def scored(adata: ad.AnnData) -> object:
    import scdiva as sd

    return sd.tl.score_perturbation(adata, adata)


def ranked(adata: ad.AnnData) -> object:
    import scdiva as sd

    return sd.tl.rank_perturbations(adata, "perturbation", "control", target="FOXO4", model=MADE["made"])


def delta_scatter(adata: ad.AnnData) -> None:
    import scdiva as sd

    sd.pl.delta_scatter(MADE["made"], "FOXO4", adata)


def refused(adata: ad.AnnData) -> None:
    """A column that is not there: an error, before anything is read."""
    import scdiva as sd

    try:
        sd.tl.integrate(adata, "no such column")
    except KeyError:
        return
    raise AssertionError("a batch_key that is not there was taken")


def in_files(adata: ad.AnnData) -> ad.AnnData:
    """The cells, and one half of them as a reference, beside each other; of an earlier run nothing."""
    for made in ("corpus", "run"):
        shutil.rmtree(made, ignore_errors=True)
    adata.write_h5ad("cells.h5ad")
    adata[::2].write_h5ad("reference.h5ad")
    return adata


def embedded_file(adata: ad.AnnData) -> None:
    import scdiva as sd

    del adata
    sd.tl.embed_file("cells.h5ad", "embedded.h5ad", overwrite=True)


def command_line(*arguments: str, fails: bool = False) -> Callable[[ad.AnnData], None]:
    """A command, which succeeds, or is refused."""

    def call(adata: ad.AnnData) -> None:
        del adata
        found = subprocess.run(
            [sys.executable, "-m", "scdiva", *arguments], capture_output=True, text=True, check=False
        )
        if bool(found.returncode) != fails:
            raise RuntimeError(found.stderr[-2000:])

    return call


def of_files(on: str, *arguments: str) -> Call:
    """A command that reads `cells.h5ad` and replaces what it wrote."""
    return Call(on, command_line(arguments[0], "cells.h5ad", "-o", "out.h5ad", "--overwrite", *arguments[1:]), in_files)


EMBED, GRN, PREDICT = ours("tl.embed"), ours("tl.grn"), ours(
    "tl.predict_perturbation", perturbation_key="perturbation", predict=PREDICTED
)  # fmt: skip
REGULON = ours("tl.regulon", source="CD3D")
INTEGRATE = ours("tl.integrate", batch_key="batch")
FIT = ours("tl.fit_perturbation", perturbation_key="perturbation")
NEW = "tl.embed, a new installation"
"""Measured with nothing that numba kept of earlier processes."""
CALLS: dict[str, Call] = {
    "pp.match_genes": Call(BLOOD, ours("pp.match_genes")),
    "pp.gene_entropy": Call(BLOOD, ours("pp.gene_entropy")),
    "pp.corpus_entropy": Call(BLOOD, ours("pp.corpus_entropy")),
    "pp.entropy_serialize": Call(BLOOD, ours("pp.entropy_serialize")),
    "pp.split_perturbations": Call(
        SCREEN, ours("pp.split_perturbations", perturbation_key="perturbation", by="combination")
    ),
    "tl.embed": Call(BLOOD, EMBED),
    NEW: Call(BLOOD, EMBED),
    "scanpy: normalise, genes, PCA": Call(BLOOD, pca),
    "tl.embed_file": Call(BLOOD, embedded_file, in_files),
    "tl.gene_embedding": Call(BLOOD, ours("tl.gene_embedding")),
    "tl.adapt": Call(BLOOD, ours("tl.adapt")),
    "tl.integrate": Call(DONORS, INTEGRATE),
    "Harmony on PCA": Call(DONORS, harmony),
    "scVI": Call(DONORS, scvi_fitted),
    "tl.integrate, cell lines": Call(LINES, INTEGRATE),
    "Harmony on PCA, cell lines": Call(LINES, harmony),
    "scVI, cell lines": Call(LINES, scvi_fitted),
    "tl.corrected_expression, cell lines": Call(
        LINES,
        ours("tl.corrected_expression", batch_key="batch", genes=["ACTB", "GAPDH"]),
        after(EMBED, INTEGRATE),
    ),
    "tl.annotate": Call(BLOOD, annotate),
    "logistic regression on PCA": Call(BLOOD, logistic_regression),
    "CellTypist, trained on the same": Call(BLOOD, celltypist_fitted),
    "tl.impute, two genes": Call(BLOOD, ours("tl.impute", genes=["CD3D", "LYZ"])),
    "tl.generate, 100 cells": Call(BLOOD, ours("tl.generate", n_cells=100)),
    "tl.reconstruct": Call(BLOOD, ours("tl.reconstruct")),
    "tl.log_likelihood": Call(BLOOD, ours("tl.log_likelihood")),
    "tl.grn": Call(BLOOD, GRN),
    "tl.regulon": Call(BLOOD, REGULON, after(GRN)),
    "tl.grn_modules": Call(BLOOD, ours("tl.grn_modules"), after(GRN)),
    "decoupler: ulm": Call(BLOOD, ulm_of_network),
    "tl.fit_perturbation": Call(SCREEN, FIT),
    "tl.predict_perturbation": Call(SCREEN, PREDICT),
    "tl.score_perturbation": Call(SCREEN, scored, after(PREDICT)),
    "tl.rank_perturbations": Call(SCREEN, ranked, after(FIT)),
    "tl.integrate, a wrong key": Call(BLOOD, refused),
    "tl.umap": Call(BLOOD, ours("tl.umap"), after(EMBED)),
    "pl.umap": Call(BLOOD, ours("pl.umap", color="cell_type"), after(EMBED)),
    "pl.umap, of a map that is there": Call(
        BLOOD, ours("pl.umap", color="cell_type"), after(EMBED, ours("tl.umap"))
    ),
    "scanpy: PCA to a drawn UMAP": Call(BLOOD, scanpy_umap),
    "pl.annotation": Call(BLOOD, ours("pl.annotation"), after(EMBED, annotated)),
    "pl.confusion_matrix": Call(BLOOD, ours("pl.confusion_matrix", labels_key="cell_type"), after(annotated)),
    "pl.reliability": Call(BLOOD, ours("pl.reliability"), after(annotated)),
    "pl.marker_heatmap": Call(BLOOD, ours("pl.marker_heatmap"), after(annotated)),
    "pl.feature_heatmap": Call(BLOOD, ours("pl.feature_heatmap"), after(EMBED, annotated)),
    "pl.integration, cell lines": Call(
        LINES, ours("pl.integration", batch_key="batch"), after(EMBED, INTEGRATE)
    ),
    "pl.grn": Call(BLOOD, ours("pl.grn"), after(GRN)),
    "pl.attention": Call(BLOOD, ours("pl.attention"), after(GRN)),
    "pl.regulon": Call(BLOOD, ours("pl.regulon", "made"), after(GRN, REGULON)),
    "pl.generated": Call(BLOOD, ours("pl.generated", "cells", "made"), drawn_cells),
    "pl.reconstruction": Call(BLOOD, ours("pl.reconstruction"), reconstructed),
    "pl.gene_overlap": Call(BLOOD, ours("pl.gene_overlap", "sets"), gene_sets),
    "pl.perturbation": Call(SCREEN, ours("pl.perturbation", condition="FOXO4"), after(PREDICT)),
    "pl.perturbation_scores": Call(SCREEN, ours("pl.perturbation_scores", "made"), after(PREDICT, scored)),
    "pl.delta_scatter": Call(
        SCREEN, delta_scatter, after(PREDICT)
    ),
    "pl.discrimination": Call(SCREEN, ours("pl.discrimination", "made", "cells"), after(PREDICT)),
    "pl.hit_rate": Call(SCREEN, ours("pl.hit_rate", "made", "cells"), after(PREDICT)),
    "get.annotation_df": Call(BLOOD, ours("get.annotation_df"), after(annotated)),
    "get.gene_embedding_df": Call(BLOOD, ours("get.gene_embedding_df"), after(ours("tl.gene_embedding"))),
    "get.grn_df": Call(BLOOD, ours("get.grn_df"), after(GRN)),
    "get.imputed_df": Call(BLOOD, ours("get.imputed_df"), after(ours("tl.impute", genes=["CD3D", "LYZ"]))),
    "get.perturbation_df": Call(SCREEN, ours("get.perturbation_df", "made"), after(PREDICT)),
    "get.reconstructed_genes": Call(BLOOD, ours("get.reconstructed_genes"), reconstructed),
    "get.reconstruction_df": Call(BLOOD, ours("get.reconstruction_df"), reconstructed),
    "get.serialized_df": Call(BLOOD, ours("get.serialized_df"), after(ours("pp.entropy_serialize"))),
    "command line: embed": of_files(BLOOD, "embed"),
    "command line: integrate": of_files(DONORS, "integrate", "--batch_key", "donor"),
    "command line: annotate": of_files(
        BLOOD, "annotate", "--labels_key", "cell_type", "--reference", "reference.h5ad", "--unlabeled_category",
        "unlabelled",
    ),
    "command line: generate": of_files(BLOOD, "generate", "--n_cells", "100"),
    "command line: perturb": of_files(
        SCREEN, "perturb", "--perturbation_key", "perturbation", "--predict", json.dumps(PREDICTED)
    ),
    "command line: grn": of_files(BLOOD, "grn"),
    "command line: pack": Call(
        BLOOD, command_line("pack", "--paths", "cells.h5ad", "--vocabulary", "human", "-o", "corpus"), in_files
    ),
    "command line: pretrain, ten steps": Call(
        BLOOD,
        command_line("pretrain", "--train", "cells.h5ad", "--preset", "mini", "--training.steps", "10", "-o", "run"),
        in_files,
    ),
    "command line: info": Call(BLOOD, command_line("info", "cells.h5ad"), in_files),
    "command line: --help": Call(BLOOD, command_line("--help")),
    "command line: a wrong option": Call(BLOOD, command_line("embed", "--nothing", "x", fails=True)),
    "command line: a wrong file": Call(
        BLOOD, command_line("embed", "nowhere.h5ad", "--out", "out.h5ad", fails=True)
    ),
}  # fmt: skip
"""Each call. What begins with another package's name stands beside the call above it."""
