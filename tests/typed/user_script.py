"""A user's script with types, as mypy sees the package from outside: checked in `make lint`, and never run."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import anndata as ad
import pandas as pd

import scdiva as sd
from scdiva.models import Annotator, PerturbationModel, ScDiVa


def embedded(path: Path) -> ad.AnnData:
    sd.settings.seed = 1
    sd.settings.device = "cpu"
    with sd.settings.override(progress=False, verbosity="info") as settings:
        assert_type(settings.threads, int | None)
    adata = sd.datasets.toy(60, 80)
    sd.pp.match_genes(adata)
    model = sd.models.load()
    assert_type(model, ScDiVa)
    assert_type(model.n_parameters, int)
    assert_type(sd.tl.embed(adata, model, copy=True), ad.AnnData | None)
    assert_type(sd.tl.embed_file(path, "out.h5ad", species={"Rt1": "CD3D"}), Path)
    sd.pp.match_genes(adata, species=pd.Series({"Rt1": "CD3D"}))
    return adata


def fitted(adata: ad.AnnData, reference: ad.AnnData) -> tuple[Annotator, PerturbationModel]:
    annotator = sd.tl.annotate(adata, "cell_type", reference)
    perturbations = sd.tl.fit_perturbation(adata, "perturbation")
    assert_type(sd.tl.predict_perturbation(adata, model=perturbations, predict=["A+C"]), ad.AnnData)
    assert_type(sd.tl.integrate(adata, "batch"), ScDiVa)
    assert_type(sd.tl.generate(adata, 10, groupby="cell_type"), ad.AnnData)
    return annotator, perturbations


def network_table(adata: ad.AnnData) -> pd.DataFrame:
    sd.tl.grn(adata, method="correlation")
    sd.pl.umap(adata, color="cell_type", save="map.png")
    assert_type(sd.cite(), str)
    sd.print_versions()
    sd.tl.embed(adata, precision="median")  # type: ignore[arg-type]  # what a reader's editor marks
    sd.tl.embed(adata, laier="counts")  # type: ignore[call-arg]
    frame = sd.get.grn_df(adata)
    assert_type(frame, pd.DataFrame)
    return frame
