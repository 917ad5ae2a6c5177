"""What the pages' examples are run on: small data under the names that the pages use."""

from __future__ import annotations

from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest

import scdiva as sd

GENES = ["CD3D", "LYZ", "SPI1", "KLF1", "SET", "TGFBR2", "GATA1", "IRF1"]
DONE = ["control", "KLF1", "SET", "TGFBR2", "GATA1", "KLF1+SET", "KLF1+TGFBR2", "SET+TGFBR2", "GATA1+SET", "GATA1+KLF1"]


def cells_like_a_users(n_cells=60, n_genes=70, rng=0) -> ad.AnnData:
    """Toy counts of genes that the pages name, with the columns that they name."""
    cells = sd.datasets.toy(n_cells, n_genes, n_types=3, rng=rng)
    # GENES take the places of genes that no page asks for
    absent = [gene for gene in GENES if gene not in cells.var_names]
    free = [gene for gene in cells.var_names if gene not in GENES][: len(absent)]
    cells.var_names = cells.var_names.to_series().replace(dict(zip(free, absent, strict=True))).to_numpy()
    cells.obs["donor"] = cells.obs["batch"]
    del cells.var["ensembl_id"]
    cells.raw = cells
    return cells


@pytest.fixture(scope="session")
def page_names():
    """Give the names that a page finds there, anew for each page."""
    many = cells_like_a_users(96)
    screen = cells_like_a_users(160, rng=1)
    screen.obs["perturbation"] = pd.Categorical(np.resize(DONE, screen.n_obs))
    screen.obs["cell_type"] = pd.Categorical(np.repeat(["a", "b"], screen.n_obs // 2))
    screen.raw = None

    def make() -> dict[str, object]:
        names = {name: many[:48].copy() for name in ("adata", "cells", "reference")}
        names |= {"query": many[48:80].copy(), "later": many[80:].copy(), "screen": screen.copy()}
        return {"__name__": "page", "sd": sd, **names}

    return make


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Change to a folder with the files that the pages name."""
    import matplotlib
    from scipy.io import mmwrite

    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    cells = cells_like_a_users(60)
    cells.raw = None
    for name in ("atlas.h5ad", "cells.h5ad"):
        cells.write_h5ad(name)
    for name in ("train", "validation", "atlas"):
        Path(name).mkdir()
        cells.write_h5ad(f"{name}/one.h5ad")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    Path("run").mkdir()
    Path("run/model").symlink_to(Path(sd.__file__).parent / "checkpoints" / "scdiva-mini")
    mmwrite("counts.mtx", cells.X.T)
    Path("genes.txt").write_text("\n".join(cells.var_names) + "\n")
    cells.obs.to_csv("cells.csv")
    Path("h.all.v2025.1.Hs.symbols.gmt").write_text("SET\tfrom nowhere\t" + "\t".join(cells.var_names[:30]) + "\n")
    # a UMAP and scanpy's neighbours would take longer; tests/pl and tests/embedding have them
    monkeypatch.setattr("scanpy.pp.neighbors", lambda adata, use_rep: adata.obsm[use_rep])
    monkeypatch.setattr("scanpy.tl.leiden", lambda adata, *, flavor, n_iterations: None)  # wants those neighbours
    for module in ("embedding.umap", "pl._umap"):
        monkeypatch.setattr(f"scdiva.{module}.umap_of", lambda z, seed: np.ascontiguousarray(z[:, :2]))
    with sd.settings.override(progress=False), matplotlib.rc_context():  # decoupler, imported, changes legends
        yield tmp_path
