"""Cells of files, packed corpora and objects as batches, studies that validate, and what a run notes of its corpus."""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter

import anndata as ad
import numpy as np
import pytest

from scdiva.data.cells import open_cells
from scdiva.data.corpus import file_note
from scdiva.data.datamodule import UNSEEN_STUDY, CellDataModule
from scdiva.data.packing import pack_files

pytestmark = pytest.mark.filterwarnings("ignore:(study|adata)2", "ignore:Writing zarr v2")
SIZES = {"study0": 60, "study1": 25, "study2": 129}


def module_of(train, vocabulary, **options) -> CellDataModule:
    options = {"batch_size": 8, "context": 20, "block_rows": 5, "n_blocks": 4, "seed": 3} | options
    return CellDataModule(train, vocabulary=vocabulary, **options)


def as_cells(*batches) -> list[tuple]:
    """Study, tokens and values of each cell."""
    cells = []
    for batch in batches:
        tokens, values, study = batch.tokens.tolist(), batch.values.tolist(), batch.study.tolist()
        ends = itertools.pairwise(batch.cu_seqlens.tolist())
        cells += [(study[i], *tokens[a:b], *values[a:b]) for i, (a, b) in enumerate(ends)]
    return cells


@pytest.fixture(scope="module")
def expected(study_files, vocabulary) -> Counter:
    """All usable cells, read plainly."""
    cells: Counter = Counter()
    for number, path in enumerate(study_files):
        source = open_cells(path, vocabulary, max_length=20, empty="nan")
        indptr, tokens, values = source.read(0, source.n_obs)
        for a, b in itertools.pairwise(indptr):
            if b > a:
                cells[(number, *tokens[a:b].tolist(), *values[a:b].tolist())] += 1
        source.close()
    return cells


@pytest.fixture(params=["files", "mixed", "packed"])
def train(request, study_files, vocabulary, tmp_path):
    if request.param == "packed":
        pack_files(study_files, vocabulary, tmp_path / "corpus.h5", max_length=25).close()
        return [tmp_path / "corpus.h5"]
    if request.param == "mixed":  # a file, a folder with a zarr, and a file in it
        (tmp_path / "folder" / "below").mkdir(parents=True)
        ad.read_h5ad(study_files[1]).write_zarr(tmp_path / "folder" / "below" / "study1.zarr")
        return [study_files[0], tmp_path / "folder", study_files[2]]
    return study_files


def test_an_epoch_holds_every_cell_once(train, study_files, vocabulary, expected):
    data = module_of(train, vocabulary, max_steps=2 * 27)
    assert (data.n_cells, data.n_studies) == (214, 3)
    batches = [as_cells(batch) for batch in data.train_dataloader()]
    assert {len(batch) for batch in batches} == {7, 8}
    cells = list(itertools.chain.from_iterable(batches))
    assert Counter(cells[:214]) == Counter(cells[214:]) == expected
    assert cells[:214] != cells[214:]
    data.close()
    # of any mixture, and of objects, the same stream
    for files in (study_files, [ad.read_h5ad(path) for path in study_files]):
        assert [as_cells(batch) for batch in module_of(files, vocabulary, max_steps=54).train_dataloader()] == batches


@pytest.mark.parametrize("start_step", [1, 26, 40])
def test_a_resumed_stream_goes_on_where_it_stopped(study_files, vocabulary, start_step):
    batches = [as_cells(batch) for batch in module_of(study_files, vocabulary, max_steps=45).train_dataloader()]
    resumed = module_of(study_files, vocabulary, max_steps=45)
    resumed.setup()
    resumed.start_step = start_step
    for data in (module_of(study_files, vocabulary, max_steps=45, start_step=start_step), resumed):
        assert [as_cells(batch) for batch in data.train_dataloader()] == batches[start_step:]


def test_validation_is_fixed_and_in_order(study_files, vocabulary):
    def batches(**options):
        data = module_of(study_files[:1], vocabulary, validation=study_files[1:], **{"batch_size": 10} | options)
        assert data.study_names == ["study0"]
        first, second = ([as_cells(b) for b in data.val_dataloader()] for _ in range(2))
        assert first == second
        return first

    batches_of_ten = batches()
    assert [len(batch) for batch in batches_of_ten] == [10] * 15 + [4]
    cells = list(itertools.chain.from_iterable(batches_of_ten))
    assert {cell[0] for cell in cells} == {UNSEEN_STUDY}
    indptr, tokens, values = open_cells(study_files[1], vocabulary, max_length=20).read(0, 25)
    plain = [(-1, *tokens[a:b].tolist(), *values[a:b].tolist()) for a, b in itertools.pairwise(indptr)]
    assert cells[:25] == plain
    assert [cell for b in batches(validation_cells=13) for cell in b] == [cells[i * 154 // 13] for i in range(13)]
    by_tokens = batches(batch_tokens=50)
    assert list(itertools.chain.from_iterable(by_tokens)) == cells
    tokens = [[(len(cell) - 1) // 2 + 1 for cell in batch] for batch in by_tokens]
    assert max(map(sum, tokens)) <= 50
    assert all(sum(a) + b[0] > 50 for a, b in itertools.pairwise(tokens))  # the next cell would not have fitted


def test_cells_left_out_are_told_of(study_files, vocabulary):
    with pytest.warns(UserWarning, match="study2: 2 of 131 cells are left out"):
        module_of(study_files, vocabulary).setup()
    data = module_of(study_files[:1], vocabulary, min_genes=55, context=200)
    with pytest.warns(UserWarning, match="lack 55 genes"):
        assert 0 < data.n_cells < 60
    with (
        pytest.raises(ValueError, match="no training cell has 1000 known genes"),
        pytest.warns(UserWarning, match="60 of 60"),
    ):
        module_of(study_files[:1], vocabulary, min_genes=1000).setup()


@pytest.mark.parametrize(
    ("train", "options", "message"),
    [
        (slice(3), {"validation_cells": -3}, r"validation_cells .*got -3"),
        (slice(3), {"batch_size": 0}, r"batch_size .*got 0"),
        (slice(3), {"batch_tokens": 41}, "batch_tokens=41 must be at least 42"),
        (slice(3), {"lanes": 0}, "lanes must be at least 1"),
        (slice(3), {"start_step": -1}, "start_step must be at least 0"),
        (slice(0), {}, "no files were given"),
        (slice(1, 3), {"layer": "counts"}, r"study1: .*no layer 'counts'"),
        ("packed", {"context": 30}, r"25 genes .*context=30"),
        ("packed", {"min_genes": 30}, r"25 genes .*min_genes=30"),
        ("both", {}, "stands alone"),
        ("absent", {}, r"absent\.h5ad"),
    ],
)
def test_wrong_calls_say_what_to_do(study_files, vocabulary, tmp_path, train, options, message):
    if isinstance(train, slice):
        train = study_files[train]
    elif train == "absent":
        train = tmp_path / "absent.h5ad"
    else:
        pack_files(study_files, vocabulary, tmp_path / "corpus.h5", max_length=25).close()
        train = [tmp_path / "corpus.h5"] + study_files[:1] * (train == "both")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        module_of(train, vocabulary, **options).setup()


@pytest.mark.parametrize("batches", [{"batch_size": 7}, {"batch_tokens": 120}])
@pytest.mark.parametrize("packed", [False, True])
def test_the_cells_of_a_batch_are_found(study_files, vocabulary, tmp_path, batches, packed):
    files = [str(file) for file in study_files]
    if packed:
        files = [str(tmp_path / "corpus.h5")]
        pack_files(study_files, vocabulary, files[0], max_length=16)
    data = module_of(files, vocabulary, context=16, **batches)
    stream = data.training_stream()
    for number in (0, 3, 17):
        batch, cells = stream.batch(number), data.cells_of_batch(number)
        assert len(cells) == batch.n_cells > 1
        for i, (study, file, row, cell) in enumerate(cells):
            assert study == data.study_names[int(batch.study[i])]
            (source,) = [source for source in data._pool.sources if str(source.path) == file]
            assert cell == ("" if packed else str(source.obs_names[row]))
            tokens = batch.tokens[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]]
            np.testing.assert_array_equal(source.read(row, row + 1)[1][:16], tokens.numpy())
    data.close()


@pytest.mark.parametrize("batches", [{}, {"batch_tokens": 100}])
def test_a_run_goes_on_with_another_number_of_lanes(study_files, vocabulary, expected, batches, caplog):
    """As a checkpoint carries it over: from 2 to 1 to 4 batches a step, in the middle of an epoch."""
    state, steps, start = None, [], 0
    for lanes, stop in ((2, 10), (1, 17), (4, 17 + 4 * 30)):
        data = module_of(study_files, vocabulary, lanes=lanes, start_step=start, max_steps=stop, **batches)
        if state is not None:
            data.load_state_dict(state)
        steps += [as_cells(batch) for batch in data.train_dataloader()]
        state, start = data.state_dict(), stop
    assert state["lanes"] == [[0, 2], [10, 1], [17, 4]]
    assert "Until batch 17 an optimiser step had 1 batches; from there on it has 4." in caplog.text
    cells = list(itertools.chain.from_iterable(steps))
    assert len(cells) > 2 * 214
    assert Counter(cells[:214]) == Counter(cells[214 : 2 * 214]) == expected
    # of another Python, with the checkpoint alone
    later = module_of(study_files, vocabulary, **batches)
    later.load_state_dict(state)
    stream = data.training_stream()
    for number in (3, 12, 40):
        assert later.cells_of_batch(number) == data.cells_of_batch(number)
        assert as_cells(stream.batch(number)) == steps[number]
        assert len(later.cells_of_batch(number)) == len(steps[number])


def test_held_out_studies_validate_and_are_not_trained_on(train, vocabulary):
    held = 0.4 if len(train) == 3 and train[1].is_file() else ["study1"]
    data = module_of(train, vocabulary, validation_studies=held)
    (kept_out,) = SIZES.keys() - set(data.study_names)
    assert held == 0.4 or kept_out == "study1"
    assert data.n_cells == 214 - SIZES[kept_out]
    trained = as_cells(*map(data.training_stream().batch, range(-(-data.n_cells // 8))))
    assert Counter(cell[0] for cell in trained[: data.n_cells]) == {
        i: SIZES[name] for i, name in enumerate(data.study_names)
    }
    looked_at = as_cells(*data.val_dataloader())
    assert {cell[0] for cell in looked_at} == {UNSEEN_STUDY}
    assert len(looked_at) == SIZES[kept_out]
    assert data.val_dataloader().dataset.studies()[0] == [kept_out]
    assert not {cell[1:] for cell in looked_at} & {cell[1:] for cell in trained}
    parts = {one["study"]: one["part"] for one in data.manifest()["studies"]}
    assert parts == dict.fromkeys(SIZES, "train") | {kept_out: "validation"}
    data.close()


def test_names_of_studies_that_validate(study_files, vocabulary):
    """In their order, by file name or number; cells of fewer are taken evenly."""
    objects = [ad.read_h5ad(path) for path in study_files]
    for train, options, trained, sizes in (
        (
            study_files[:2],
            {"validation_studies": ["study1"], "validation": study_files[2]},
            ["study0"],
            {"study1": 25, "study2": 129},
        ),
        (objects, {"validation_studies": ["adata1"]}, ["adata0", "adata2"], {"adata1": 25}),
        (objects[:2], {"validation": objects[2:]}, ["adata0", "adata1"], {"validation0": 129}),
        (
            study_files[:1],
            {"validation": study_files[1:], "validation_cells": 22},
            ["study0"],
            {"study1": 4, "study2": 18},
        ),
        (study_files[:1], {"validation": study_files[1:], "min_genes": 40, "context": 40}, ["study0"], {"study1": 25}),
    ):
        data = module_of(train, vocabulary, **options)
        assert data.study_names == trained
        loader = data.val_dataloader()
        names, study = loader.dataset.studies()
        assert (np.diff(study) >= 0).all()
        assert dict(zip(names, np.bincount(study).tolist(), strict=True)) == sizes
        assert all((batch.study == UNSEEN_STUDY).all() for batch in loader)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_genes": 2}, "min_genes: 1 then, 2 now"),
        ({"validation_studies": ["study1"]}, r"validation_studies: None then, \['study1'\] now"),
        ({"block_rows": 6}, "block_rows: 5 then, 6 now"),
    ],
)
def test_a_resumed_run_must_keep_its_order(study_files, vocabulary, options, message):
    noted = module_of(study_files, vocabulary).state_dict()
    module_of(study_files, vocabulary).load_state_dict(noted)
    with pytest.raises(ValueError, match=message):
        module_of(study_files, vocabulary, **options).load_state_dict(noted)


def test_the_manifest_says_what_is_trained_on(train, study_files, vocabulary, caplog):
    with caplog.at_level(logging.INFO, logger="scdiva"):
        data = module_of(train, vocabulary, validation_studies=["study1"], context=12, min_genes=12)
        manifest = json.loads(json.dumps(data.manifest()))
    assert (manifest["vocabulary"], manifest["min_genes"]) == (vocabulary.fingerprint, 12)
    files = manifest["files"]["train"]
    assert len(files) == len(train)
    assert files[train[0].name] == {"path": str(train[0])} | file_note(train[0])
    assert [one["part"] for one in manifest["studies"]] == ["train", "validation", "train"]
    sizes = (60, 25, 131 if len(train) > 1 else 129)
    for study, name, n, file in zip(manifest["studies"], SIZES, sizes, study_files, strict=True):
        assert (study["study"], study["cells"] + study["cells_dropped"]) == (name, n)
        tokens = vocabulary.match(ad.read_h5ad(file).var_names).tokens
        assert study["genes_matched"] == len(np.unique(tokens[tokens >= 0]))
        assert (study["columns"] is None) == (len(train) == 1)
    dropped = sum(one["cells_dropped"] for one in manifest["studies"])
    assert f"{data.n_cells} cells of 2 studies to train on" in caplog.text
    assert f"{dropped} with fewer than 12 known genes are left out" in caplog.text
