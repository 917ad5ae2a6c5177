from __future__ import annotations

import itertools

import pytest
import torch
from query_training import LEAST_CONTEXT, StudyBatches, StudyDataModule, n_query_cells

import scdiva as sd
from scdiva.data.corpus import PackedCells, pack_files
from scdiva.tokenizer import load_vocabulary


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Studies of 90, 40 and 20 cells: the last is too small for a context."""
    folder, files = tmp_path_factory.mktemp("studies"), []
    for seed, n in enumerate((90, 40, 20)):
        files.append(folder / f"study{n}.h5ad")
        sd.datasets.toy(n, 60, rng=seed).write_h5ad(files[-1])
    pack_files(files, "human", folder / "cells.h5").close()
    return folder / "cells.h5"


def test_a_batch_is_of_one_study_and_leaves_cells_around(packed):
    batches, seen = StudyBatches(PackedCells(packed), 24, 64, seed=0), set()
    for number in range(40):
        batch = batches.batch(number)
        (study,) = batch.study.unique().tolist()
        seen.add(study)
        asked = n_query_cells(batch.n_cells, 24)
        assert 1 <= asked <= 24
        assert LEAST_CONTEXT <= batch.n_cells - asked <= 64
        ends = batch.cu_seqlens.tolist()
        cells = {tuple(batch.values[a:b].tolist()) for a, b in itertools.pairwise(ends)}
        assert len(cells) == batch.n_cells, "a cell that is asked about would be its own context"
    assert seen == {0, 1}


def test_a_batch_depends_on_seed_and_number_alone(packed):
    module = StudyDataModule(packed, vocabulary=load_vocabulary("human"), batch_size=8, context_cells=32, seed=3)
    first = [batch for batch, _ in zip(module.train_dataloader(), range(5), strict=False)]
    module.start_step = 3
    resumed = next(iter(module.train_dataloader()))
    for part in ("tokens", "values", "cu_seqlens", "study"):
        assert torch.equal(getattr(resumed, part), getattr(first[3], part))
