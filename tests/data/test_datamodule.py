from __future__ import annotations

import itertools
import warnings
from collections import Counter

import anndata as ad
import numpy as np
import pytest

from scdiva.data.cells import open_cells
from scdiva.data.datamodule import UNSEEN_STUDY, CellDataModule
from scdiva.data.packing import pack_files


def as_cells(batch) -> list[tuple]:
    """Every cell of a batch as something that can be compared and counted."""
    ends = batch.cu_seqlens.tolist()
    tokens, values, study = batch.tokens.tolist(), batch.values.tolist(), batch.study.tolist()
    return [(study[i], *tokens[a:b], *values[a:b]) for i, (a, b) in enumerate(itertools.pairwise(ends))]


def module_of(train, vocabulary, **options) -> CellDataModule:
    options = {"batch_size": 8, "context": 20, "block_rows": 5, "n_blocks": 4, "seed": 3} | options
    return CellDataModule(train, vocabulary=vocabulary, **options)


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


@pytest.fixture(params=["files", "packed", "adata"])
def train(request, study_files, vocabulary, tmp_path):
    if request.param == "files":
        return study_files
    if request.param == "adata":
        return [ad.read_h5ad(path) for path in study_files]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pack_files(study_files, vocabulary, tmp_path / "corpus.h5", max_length=25).close()
    return tmp_path / "corpus.h5"


@pytest.mark.filterwarnings("ignore:study2|adata2")
def test_an_epoch_holds_every_cell_once(train, vocabulary, expected):
    data = module_of(train, vocabulary, max_steps=2 * 27)
    assert (data.n_cells, data.n_studies) == (214, 3)
    batches = [as_cells(batch) for batch in data.train_dataloader()]
    assert {len(batch) for batch in batches} == {7, 8}
    seen = list(itertools.chain.from_iterable(batches))
    assert Counter(seen[:214]) == Counter(seen[214:]) == expected
    assert seen[:214] != seen[214:]
    data.close()


@pytest.mark.filterwarnings("ignore:study2")
def test_files_and_packed_give_the_same_stream(study_files, vocabulary, tmp_path):
    pack_files(study_files, vocabulary, tmp_path / "corpus.h5", max_length=25).close()
    of_files = module_of(study_files, vocabulary, block_rows=7).training_stream()
    of_pack = module_of(tmp_path / "corpus.h5", vocabulary, block_rows=7).training_stream()
    for step in range(54):
        assert as_cells(of_files.batch(step)) == as_cells(of_pack.batch(step))


@pytest.mark.filterwarnings("ignore:study2")
@pytest.mark.parametrize("start_step", [1, 26, 40])
def test_a_resumed_stream_goes_on_where_it_stopped(study_files, vocabulary, start_step):
    whole = [as_cells(batch) for batch in module_of(study_files, vocabulary, max_steps=45).train_dataloader()]
    resumed = module_of(study_files, vocabulary, max_steps=45, start_step=start_step).train_dataloader()
    assert [as_cells(batch) for batch in resumed] == whole[start_step:]
    data = module_of(study_files, vocabulary, max_steps=45)
    data.setup()
    data.start_step = start_step
    assert [as_cells(batch) for batch in data.train_dataloader()] == whole[start_step:]


def test_validation_keeps_to_the_token_budget(study_files, vocabulary):
    options = {"validation": study_files[1], "batch_tokens": 50}
    batches = [as_cells(b) for b in module_of(study_files[:1], vocabulary, **options).val_dataloader()]
    of_cells = module_of(study_files[:1], vocabulary, validation=study_files[1]).val_dataloader()
    assert list(itertools.chain.from_iterable(batches)) == [cell for b in of_cells for cell in as_cells(b)]
    tokens = [[(len(cell) - 1) // 2 + 1 for cell in batch] for batch in batches]
    assert max(map(sum, tokens)) <= 50
    assert all(sum(a) + b[0] > 50 for a, b in itertools.pairwise(tokens))  # the next cell would not have fitted


@pytest.mark.filterwarnings("ignore:study2")
def test_validation_is_fixed_and_in_order(study_files, vocabulary):
    data = module_of(study_files[:1], vocabulary, validation=study_files[1:], batch_size=10)
    data.setup("fit")
    assert data.study_names == ["study0"]
    first, second = ([as_cells(b) for b in data.val_dataloader()] for _ in range(2))
    assert first == second
    assert [len(batch) for batch in first] == [10] * 15 + [4]
    cells = [cell for batch in first for cell in batch]
    assert {cell[0] for cell in cells} == {UNSEEN_STUDY}
    source = open_cells(study_files[1], vocabulary, max_length=20)
    indptr, tokens, values = source.read(0, 25)
    plain = [(-1, *tokens[a:b].tolist(), *values[a:b].tolist()) for a, b in itertools.pairwise(indptr)]
    assert cells[:25] == plain

    few = module_of(
        study_files[:1], vocabulary, validation=study_files[1:], batch_size=10, validation_cells=13
    ).val_dataloader()
    assert [cell for b in few for cell in as_cells(b)] == [cells[i * 154 // 13] for i in range(13)]


def test_cells_left_out_are_told_of(study_files, vocabulary, expected):
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


@pytest.mark.filterwarnings("ignore:study2")
def test_wrong_calls_say_what_to_do(study_files, vocabulary, tmp_path):
    with pytest.raises(ValueError, match=r"validation_cells .*got -3"):
        module_of(study_files, vocabulary, validation_cells=-3)
    with pytest.raises(ValueError, match=r"batch_size .*got 0"):
        module_of(study_files, vocabulary, batch_size=0)
    with pytest.raises(ValueError, match="batch_tokens=41 must be at least 42"):
        module_of(study_files, vocabulary, batch_tokens=41)
    with pytest.raises(ValueError, match="lanes must be at least 1"):
        module_of(study_files, vocabulary, lanes=0)
    with pytest.raises(ValueError, match="start_step must be at least 0"):
        module_of(study_files, vocabulary, start_step=-1)
    with pytest.raises(FileNotFoundError, match=r"absent\.h5ad"):
        module_of([tmp_path / "absent.h5ad"], vocabulary).setup()
    with pytest.raises(ValueError, match="no files were given"):
        module_of([], vocabulary).setup()
    with pytest.raises(ValueError, match=r"study1: .*no layer 'counts'"):
        module_of(study_files[1:], vocabulary, layer="counts").setup()
    pack_files(study_files, vocabulary, tmp_path / "corpus.h5", max_length=12).close()
    with pytest.raises(ValueError, match=r"12 genes .*context=20"):
        module_of(tmp_path / "corpus.h5", vocabulary).setup()
    with pytest.raises(ValueError, match="stands alone"):
        module_of([tmp_path / "corpus.h5", study_files[0]], vocabulary).setup()


@pytest.mark.parametrize("batches", [{"batch_size": 7}, {"batch_tokens": 120}])
@pytest.mark.parametrize("packed", [False, True])
def test_the_cells_of_a_batch_are_found(study_files, vocabulary, tmp_path, batches, packed):
    files = [str(file) for file in study_files]
    if packed:
        files = [str(tmp_path / "corpus.h5")]
        pack_files(study_files, vocabulary, files[0], max_length=16)
    data = CellDataModule(files, vocabulary=vocabulary, context=16, block_rows=5, n_blocks=2, **batches)
    stream = data.training_stream()
    for number in (0, 3, 17):
        batch, found = stream.batch(number), data.cells_of_batch(number)
        assert len(found) == batch.n_cells > 1
        for i, (study, file, row, cell) in enumerate(found):
            assert study == data.study_names[int(batch.study[i])]
            (source,) = [source for source in data._pool.sources if str(source.path) == file]
            assert cell == ("" if packed else str(source.obs_names[row]))
            tokens = source.read(row, row + 1)[1][:16]
            own = batch.tokens[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]]
            np.testing.assert_array_equal(tokens, own.numpy())
    data.close()


@pytest.mark.filterwarnings("ignore:study2")
@pytest.mark.parametrize("batches", [{}, {"batch_tokens": 100}])
def test_a_run_goes_on_with_another_number_of_lanes(study_files, vocabulary, expected, batches, caplog):
    """As a checkpoint carries it over: from 2 to 1 to 4 batches a step, in the middle of an epoch."""
    state, seen, start = None, [], 0
    for lanes, stop in ((2, 10), (1, 17), (4, 17 + 4 * 30)):
        data = module_of(study_files, vocabulary, lanes=lanes, start_step=start, max_steps=stop, **batches)
        if state is not None:
            data.load_state_dict(state)
        seen += [as_cells(batch) for batch in data.train_dataloader()]
        state, start = data.state_dict(), stop
    assert state["lanes"] == [[0, 2], [10, 1], [17, 4]]
    assert "Until batch 17 an optimiser step had 1 batches; from there on it has 4." in caplog.text
    cells = list(itertools.chain.from_iterable(seen))
    assert len(cells) > 2 * 214
    assert Counter(cells[:214]) == Counter(cells[214 : 2 * 214]) == expected
    # of another Python, with the checkpoint alone
    later = module_of(study_files, vocabulary, **batches)
    later.load_state_dict(state)
    stream = data.training_stream()
    for number in (3, 12, 40):
        assert later.cells_of_batch(number) == data.cells_of_batch(number)
        assert as_cells(stream.batch(number)) == seen[number]
        assert len(later.cells_of_batch(number)) == len(seen[number])
