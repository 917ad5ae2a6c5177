from __future__ import annotations

import numpy as np

from scdiva.data.cells import open_cells
from scdiva.data.datamodule import CellDataModule
from scdiva.data.packed import PackedCells
from scdiva.data.packing import pack_files
from scdiva.data.sampler import CellPool, ValidationBatches
from scdiva.datasets import toy
from scdiva.tokenizer.vocabulary import Vocabulary


def batches(sources, n_cells=None, min_genes=1):
    pool = CellPool(sources, [np.full(s.n_obs, -1) for s in sources], min_genes, 16, 8)
    return ValidationBatches(pool, 16, n_cells)


def test_each_cell_has_the_name_of_its_file(tmp_path):
    human = Vocabulary.human()
    adata = toy(60, 40)
    genes = human.subset(human.match(adata.var_names).tokens)
    genes = genes.with_entropy(np.ones(genes.n_genes))
    parts = {"b": range(10), "a": range(10, 45), "c": range(45, 60)}
    (tmp_path / "deeper").mkdir()
    files = [tmp_path / f"{name}.h5ad" for name in parts] + [tmp_path / "deeper" / "a.h5ad"]
    for file, cells in zip(files, [*parts.values(), range(5)], strict=True):
        adata[list(cells)].copy().write_h5ad(file)
    sources = [open_cells(file, genes, max_length=16, empty="nan") for file in files[:3]]
    names, study = batches(sources).studies()
    assert names == ["b", "a", "c"]
    assert np.bincount(study).tolist() == [10, 35, 15]
    assert (np.diff(study) >= 0).all()

    names, study = batches(sources, n_cells=12).studies()
    assert np.bincount(study).tolist() == [2, 7, 3]

    # too few genes: cells, and whole studies, are left out
    least = int(np.median(sources[1].lengths))
    names, study = batches(sources, min_genes=least).studies()
    kept = [int((source.lengths >= least).sum()) for source in sources]
    assert [kept[["b", "a", "c"].index(name)] for name in names] == np.bincount(study).tolist()

    twice = [sources[1], open_cells(files[3], genes, max_length=16, empty="nan"), open_cells(adata, genes)]
    names, _ = batches(twice).studies()
    assert names == ["a", "a", ""]

    packed = pack_files(files[:3], genes, tmp_path / "corpus.h5", max_length=16)
    assert isinstance(packed, PackedCells)
    names, study = batches([packed]).studies()
    assert dict(zip(names, np.bincount(study).tolist(), strict=True)) == {"a": 35, "b": 10, "c": 15}


def genes_of(studies) -> Vocabulary:
    human = Vocabulary.human()
    genes = human.subset(human.match(studies[0].var_names).tokens)
    return genes.with_entropy(np.ones(genes.n_genes))


def three_studies() -> list:
    studies = [toy(30, 40, rng=seed) for seed in range(3)]
    for adata in studies:
        adata.var_names = studies[0].var_names
    return studies


def test_an_object_keeps_its_name_where_others_are_trained_on():
    studies = three_studies()
    data = CellDataModule(studies, vocabulary=genes_of(studies), validation_studies=["adata1"], batch_size=8)
    names, study = data.val_dataloader().dataset.studies()
    assert names == ["adata1"]
    assert study.tolist() == [0] * 30
    assert data.study_names == ["adata0", "adata2"]


def test_an_object_given_to_validate_on_is_none_that_is_trained_on():
    studies = three_studies()
    data = CellDataModule(studies[:2], validation=studies[2:], vocabulary=genes_of(studies), batch_size=8)
    names, study = data.val_dataloader().dataset.studies()
    assert (names, study.tolist()) == (["validation0"], [0] * 30)
    assert all((batch.study == -1).all() for batch in data.val_dataloader())
