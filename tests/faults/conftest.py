"""Cells, a small model, all calls that read a matrix, and a hash of the whole content of an AnnData object."""

from __future__ import annotations

import inspect
import re
import warnings

import numpy as np
import pytest

import scdiva as sd

QUICK = {"rng": 0, "device": "cpu"}


def quick(function, **options):
    """Give a call of a function with cells, a model, and options that make it quick unless others are named."""
    of_model = "model" in inspect.signature(function).parameters
    return lambda a, m, **how: function(a, **({"model": m} if of_model else {}) | options | how)


ENTRIES = {
    "pp.match_genes": quick(sd.pp.match_genes),
    "pp.gene_entropy": quick(sd.pp.gene_entropy),
    "pp.entropy_serialize": quick(sd.pp.entropy_serialize),
    "tl.embed": quick(sd.tl.embed),
    "tl.gene_embedding": quick(sd.tl.gene_embedding),
    "tl.integrate": quick(sd.tl.integrate, batch_key="batch", steps=2, **QUICK),
    "tl.annotate": quick(sd.tl.annotate, labels_key="cell_type", method="knn", unlabeled_category="unknown", **QUICK),
    "tl.grn": quick(sd.tl.grn, device="cpu"),
    "tl.reconstruct": quick(sd.tl.reconstruct, rng=0),
    "tl.impute": quick(sd.tl.impute, rng=0),
    "tl.generate": quick(sd.tl.generate, n_cells=4, rng=0),
    "tl.log_likelihood": quick(sd.tl.log_likelihood, n_samples=2, rng=0),
    "tl.predict_perturbation": quick(sd.tl.predict_perturbation, perturbation_key="perturbation", n_cells=5, **QUICK),
    "get.matrix": lambda a, m: sd.data.open_cells(a, m.vocabulary),
}
"""Calls that read a matrix. `enter` calls each, and tl.embed_file beside them."""
CALLS = ENTRIES | {
    "tl.adapt": quick(sd.tl.adapt, **QUICK),
    "pp.split_perturbations": quick(
        sd.pp.split_perturbations, perturbation_key="perturbation", by="single", n_splits=2, rng=0
    ),
}


@pytest.fixture(autouse=True)
def _quiet():
    with sd.settings.override(progress=False, device="cpu", precision="fp32", threads=1):
        yield


@pytest.fixture(scope="session")
def drawn():
    """Cells that no test writes into: counts of 60 genes in 80 cells, with all the columns that calls ask for."""
    adata = sd.datasets.toy(80, 60, rng=1)
    genes = list(adata.var_names)
    adata.obs["perturbation"] = [("control", genes[0], genes[1], genes[2])[i % 4] for i in range(80)]
    adata.uns["gene"] = genes[0]
    adata.obsm["X_own"] = np.arange(160.0).reshape(80, 2)
    adata.layers["counts"] = adata.X.copy()
    adata.raw = adata.copy()
    return adata


@pytest.fixture
def cells(drawn):
    """A copy of the cells, to be spoilt."""
    return drawn.copy()


@pytest.fixture(scope="session")
def model(build):
    """A small model of random weights that knows 55 of the 60 genes, and whose state needs its transformer."""
    return build(anchor="encoder", anchor_residual=True, n_layers=1, state_head=True, state_rank=6)


@pytest.fixture(params=[*ENTRIES, "tl.embed_file"])
def enter(request, model, tmp_path):
    """Call one of the functions that read cells. For tl.embed_file they are in a file, which must not change."""

    def through_a_file(adata):
        folder = tmp_path / "files"
        folder.mkdir()
        file = folder / "cells.h5ad"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adata.copy().write_h5ad(file)  # AnnData makes text categorical as it writes
        before = file.read_bytes()
        try:
            sd.tl.embed_file(file, folder / "out.h5ad", model=model)
        except BaseException:
            assert [path.name for path in folder.iterdir()] == ["cells.h5ad"]
            raise
        finally:
            assert file.read_bytes() == before

    if request.param == "tl.embed_file":
        return through_a_file
    return lambda adata: ENTRIES[request.param](adata, model)


@pytest.fixture
def refused(hashed):
    """Check that a call raises an error whose message matches all patterns, and that adata is unchanged."""

    def check(call, adata, error, *patterns):
        before = hashed(adata)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(error) as caught:
                call(adata)
        message = str(caught.value)
        for pattern in patterns:
            assert re.search(pattern, message), f"{pattern!r} is not in: {message}"
        assert hashed(adata) == before
        return message

    return check
