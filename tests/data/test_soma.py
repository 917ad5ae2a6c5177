"""Cells of a SOMA experiment are read as those of the file that it was made of, by its own query."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import scdiva as sd
from scdiva.data.cells import open_cells
from scdiva.data.packed import PackedCells
from scdiva.data.packing import pack_files

tiledbsoma = pytest.importorskip("tiledbsoma.io", reason="tiledbsoma, of the extra census, is not installed")

DenseNDArray = pytest.importorskip("tiledbsoma").DenseNDArray
MINI = "scdiva-mini"
PRIMARY = "is_primary_data == True"


@pytest.fixture(scope="module")
def cells() -> ad.AnnData:
    """700 blood cells that scanpy brings, log-normalised; of three donors, one of which lacks genes."""
    path = Path(find_spec("scanpy").origin).parent / "datasets" / "10x_pbmc68k_reduced.h5ad"
    adata = ad.read_h5ad(path).raw.to_adata()
    adata = ad.AnnData(sp.csr_matrix(adata.X), obs=adata.obs[["bulk_labels"]].copy(), var=adata.var[[]].copy())
    adata.obs["dataset_id"] = pd.Categorical(np.array(["b", "a", "c", "a"])[np.arange(adata.n_obs) % 4])
    adata.obs["is_primary_data"] = np.arange(adata.n_obs) % 5 != 0
    adata.obs["depth"] = np.asarray(adata.X.sum(axis=1), np.float64).ravel()
    absent = np.ix_(adata.obs["dataset_id"] == "c", np.arange(100))
    x = adata.X.toarray()
    x[absent] = 0
    adata.X = sp.csr_matrix(x)
    return adata


@pytest.fixture(scope="module")
def uri(cells, tmp_path_factory) -> str:
    """The same as an experiment, named as the Census is."""
    where = str(tmp_path_factory.mktemp("soma") / "blood.soma")
    names = {"var_id_name": "feature_id", "obs_id_name": "observation_joinid", "X_layer_name": "raw"}
    return tiledbsoma.from_anndata(where, cells, "RNA", **names)


@pytest.fixture(scope="module")
def of_anndata(cells, tmp_path_factory) -> str:
    """The same, named as tiledbsoma does by itself."""
    return tiledbsoma.from_anndata(str(tmp_path_factory.mktemp("soma") / "blood.soma"), cells, "RNA")


def same(one, two) -> None:
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", ["uri", "of_anndata"])
def test_cells_are_those_of_the_file(kind, cells, request):
    chosen = sd.data.open_soma(request.getfixturevalue(kind))
    far, near = (open_cells(one, MINI, keep=False) for one in (chosen, cells))
    expected = cells.obs_names if kind == "of_anndata" else [str(row) for row in range(700)]
    assert list(chosen.obs().index) == list(expected)
    assert far.kind == near.kind == "lognorm"
    assert list(far.var.index) == list(cells.var_names)
    assert len(far.obs_names) == 700
    same(far.read(0, 700), near.read(0, 700))
    for ranges in ([(600, 650), (10, 30)], [(5, 6), (5, 6)], [(699, 700), (0, 1), (1, 64)]):
        same(far.read_ranges(ranges), near.read_ranges(ranges))
    far.close()
    same(far.read(3, 40), near.read(3, 40))


def test_the_filter_chooses_and_a_column_divides(uri, cells):
    chosen = sd.data.open_soma(uri, obs_filter=f"{PRIMARY} and depth > 430")
    filtered = cells[cells.obs["is_primary_data"] & (cells.obs["depth"] > 430)].copy()
    assert 0 < filtered.n_obs < 560
    same(open_cells(chosen, MINI).read(0, filtered.n_obs), open_cells(filtered, MINI).read(0, filtered.n_obs))
    studies = chosen.by("dataset_id")
    assert [one.stem for one in studies] == ["a", "b", "c"]
    for one in studies:
        part = filtered[filtered.obs["dataset_id"] == one.stem].copy()
        source = open_cells(one, MINI)
        same(source.read(0, part.n_obs), open_cells(part, MINI).read(0, part.n_obs))
        expressed = np.asarray(part.X.sum(axis=0)).ravel() > 0
        assert len(source.measured_tokens) == (open_cells(part, MINI).tokens[expressed] >= 0).sum()
        assert list(one.obs()["observation_joinid"]) == list(part.obs_names)


def test_it_is_packed_and_counted_as_files_are(uri, cells, tmp_path):
    studies = sd.data.open_soma(uri, obs_filter=PRIMARY).by("dataset_id")
    files = [tmp_path / f"{name}.h5ad" for name in "abc"]
    for file in files:
        cells[cells.obs["is_primary_data"] & (cells.obs["dataset_id"] == file.stem)].copy().write_h5ad(file)
    far, near = (pack_files(source, MINI, tmp_path / out) for source, out in ((studies, "far"), (files, "near")))
    assert far.study_names == near.study_names == ["a", "b", "c"]
    same(far.read(0, far.n_obs), near.read(0, near.n_obs))
    same([far.study], [near.study])
    counted = sd.pp.corpus_entropy(studies, MINI, min_genes=1)
    assert counted.n_cells == sum(len(one.rows) for one in studies)


def test_the_page_leads_from_an_experiment_to_a_corpus(uri, cells, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "large_data.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(# census\.py\n.*?)```", page, flags=re.DOTALL)
    for pattern, replacement in (
        (r'uri = "s3:.*"', f"uri = {uri!r}"),
        (r" and suspension_type == 'cell'", ""),
        ("=200", "=1"),
    ):
        script, n = re.subn(pattern, replacement, script)
        assert n
    monkeypatch.chdir(tmp_path)
    exec(compile(script, "census.py", "exec"), {})
    packed = PackedCells("census")
    assert packed.study_names == ["a", "b", "c"]
    assert packed.n_obs == cells.obs["is_primary_data"].sum()


def test_an_embedding_is_that_of_the_file(uri, cells, tmp_path):
    primary = cells[cells.obs["is_primary_data"]].copy()
    primary.write_h5ad(tmp_path / "cells.h5ad")
    chosen = sd.data.open_soma(uri, obs_filter=PRIMARY)
    far = ad.read_h5ad(sd.tl.embed_file(chosen, tmp_path / "far.h5ad"))
    near = ad.read_h5ad(sd.tl.embed_file(tmp_path / "cells.h5ad", tmp_path / "near.h5ad"))
    np.testing.assert_array_equal(far.obsm["X_scdiva"], near.obsm["X_scdiva"])
    columns = ["bulk_labels", "dataset_id", "is_primary_data", "depth"]
    pd.testing.assert_frame_equal(
        far.obs[columns].reset_index(drop=True), near.obs[columns].reset_index(drop=True), check_categorical=False
    )


def test_what_is_wrong_is_named(uri, cells, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no SOMA experiment at '.*absent'"):
        sd.data.open_soma(str(tmp_path / "absent"))
    dense = tiledbsoma.from_anndata(str(tmp_path / "dense.soma"), cells[:20].copy(), "RNA", X_kind=DenseNDArray)
    chosen, wrong = sd.data.open_soma(uri), "is_primary == True"
    for call, message in (
        (lambda: sd.data.open_soma(f"{uri}/ms"), r"ms' can't be read: .*not a SOMAExperiment"),
        (lambda: sd.data.open_soma(uri, obs_filter=wrong), f"can't be read: .*is_primary.*obs_filter='{wrong}'"),
        (lambda: sd.data.open_soma(uri, obs_filter="depth < 0"), r"no cell .*obs_filter='depth < 0'"),
        (lambda: open_cells(sd.data.open_soma(uri, measurement="ATAC"), MINI), "no item 'ATAC'"),
        (lambda: open_cells(sd.data.open_soma(dense), MINI), "is dense"),
        (lambda: chosen.by("dataset"), "No column named dataset"),
        (lambda: open_cells(chosen, MINI, layer="counts"), "no item 'counts'"),
        (lambda: open_cells(chosen, MINI, use_raw=True), "has no raw"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
