"""Studies that validate, and what a run notes of its corpus."""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter

import anndata as ad
import numpy as np
import pytest
import torch

from scdiva.data.corpus import file_note
from scdiva.data.datamodule import UNSEEN_STUDY, CellDataModule
from scdiva.data.packing import pack_files

pytestmark = pytest.mark.filterwarnings("ignore:(study|adata)", "ignore:Writing zarr v2")


def module_of(train, vocabulary, **options) -> CellDataModule:
    options = {"batch_size": 8, "context": 20, "block_rows": 5, "n_blocks": 4, "seed": 3} | options
    return CellDataModule(train, vocabulary=vocabulary, **options)


def cells_of(batches) -> list[tuple]:
    """Study, tokens and values of each cell."""
    cells = []
    for batch in batches:
        tokens, values, study = batch.tokens.tolist(), batch.values.tolist(), batch.study.tolist()
        ends = itertools.pairwise(batch.cu_seqlens.tolist())
        cells += [(study[i], *tokens[a:b], *values[a:b]) for i, (a, b) in enumerate(ends)]
    return cells


@pytest.fixture(params=["files", "mixed", "packed"])
def train(request, study_files, vocabulary, tmp_path):
    if request.param == "packed":
        pack_files(study_files, vocabulary, tmp_path / "corpus.h5", max_length=25).close()
        return [tmp_path / "corpus.h5"]
    if request.param == "mixed":  # a file, a folder with a zarr, an object
        (tmp_path / "folder" / "below").mkdir(parents=True)
        ad.read_h5ad(study_files[1]).write_zarr(tmp_path / "folder" / "below" / "study1.zarr")
        return [study_files[0], tmp_path / "folder", study_files[2]]
    return study_files


def test_a_mixture_is_the_same_corpus(study_files, train, vocabulary):
    one, two = module_of(study_files, vocabulary).training_stream(), module_of(train, vocabulary).training_stream()
    for number in (0, 30):
        assert torch.equal(one.batch(number).values, two.batch(number).values)


def test_held_out_studies_validate_and_are_not_trained_on(train, vocabulary):
    held = 0.4 if len(train) == 3 and train[1].is_file() else ["study1"]
    data = module_of(train, vocabulary, validation_studies=held)
    names = ["study0", "study1", "study2"]
    (kept_out,) = set(names) - set(data.study_names)
    assert held == 0.4 or kept_out == "study1"
    sizes = {"study0": 60, "study1": 25, "study2": 129}
    assert data.n_cells == 214 - sizes[kept_out]
    n_batches = -(-data.n_cells // 8)
    trained = cells_of(data.training_stream().batch(i) for i in range(n_batches))
    assert Counter(cell[0] for cell in trained[: data.n_cells]) == Counter(
        {i: sizes[name] for i, name in enumerate(data.study_names)}
    )
    looked_at = cells_of(data.val_dataloader())
    assert {cell[0] for cell in looked_at} == {UNSEEN_STUDY}
    assert len(looked_at) == sizes[kept_out]
    assert not {cell[1:] for cell in looked_at} & {cell[1:] for cell in trained}
    # training alone on the others is the same stream
    others = [name for name in names if name != kept_out]
    report = {one["study"]: one["part"] for one in data.manifest()["studies"]}
    assert report == dict.fromkeys(others, "train") | {kept_out: "validation"}
    data.close()


def test_other_files_may_validate_too(study_files, vocabulary):
    data = module_of(study_files[:2], vocabulary, validation_studies=["study1"], validation=study_files[2])
    assert data.study_names == ["study0"]
    assert len(cells_of(data.val_dataloader())) == 25 + 129


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_genes": 2}, "min_genes: 1 then, 2 now"),
        ({"validation_studies": ["study1"]}, r"validation_studies: None then, \['study1'\] now"),
        ({"block_rows": 6}, "block_rows: 5 then, 6 now"),
    ],
)
def test_a_resumed_run_must_keep_its_order(study_files, vocabulary, options, said):
    noted = module_of(study_files, vocabulary).state_dict()
    module_of(study_files, vocabulary).load_state_dict(noted)
    with pytest.raises(ValueError, match=said):
        module_of(study_files, vocabulary, **options).load_state_dict(noted)


def test_the_manifest_says_what_is_trained_on(train, study_files, vocabulary, caplog):
    with caplog.at_level(logging.INFO, logger="scdiva"):
        data = module_of(train, vocabulary, validation_studies=["study1"], context=12, min_genes=12)
        manifest = json.loads(json.dumps(data.manifest()))
    assert manifest["vocabulary"] == vocabulary.fingerprint
    assert manifest["min_genes"] == 12
    files = manifest["files"]["train"]
    path = train[0]
    assert files[path.name] == {"path": str(path)} | file_note(path)
    assert len(files) == len(train)
    studies = {one["study"]: one for one in manifest["studies"]}
    assert list(studies) == ["study0", "study1", "study2"]
    assert studies["study1"]["part"] == "validation"
    for name, n, file in zip(studies, (60, 25, 131 if len(train) > 1 else 129), study_files, strict=True):
        assert studies[name]["cells"] + studies[name]["cells_dropped"] == n
        known = vocabulary.match(ad.read_h5ad(file).var_names).tokens
        assert studies[name]["genes_matched"] == len(np.unique(known[known >= 0]))
        assert (studies[name]["columns"] is None) == (len(train) == 1)
    dropped = sum(one["cells_dropped"] for one in studies.values())
    assert f"{data.n_cells} cells of 2 studies to train on" in caplog.text
    assert f"{dropped} with fewer than 12 known genes are left out" in caplog.text


def test_a_packed_corpus_must_hold_as_many_genes_as_are_asked_for(study_files, vocabulary, tmp_path):
    pack_files(study_files, vocabulary, tmp_path / "corpus.h5", max_length=25).close()
    with pytest.raises(ValueError, match=r"25 genes .*min_genes=30"):
        module_of(tmp_path / "corpus.h5", vocabulary, min_genes=30).setup()
