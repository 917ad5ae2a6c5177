from __future__ import annotations

import numpy as np
import pytest

from scdiva.data.batch_cells import cells_of_batch
from scdiva.data.datamodule import CellDataModule
from scdiva.data.packed import pack_files


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
        batch, found = stream.batch(number), cells_of_batch(data, number)
        assert len(found) == batch.n_cells > 1
        for i, (study, file, row, cell) in enumerate(found):
            assert study == data.study_names[int(batch.study[i])]
            (source,) = [source for source in data._pool.sources if str(source.path) == file]
            assert cell == ("" if packed else str(source.obs_names[row]))
            tokens = source.read(row, row + 1)[1][:16]
            own = batch.tokens[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]]
            np.testing.assert_array_equal(tokens, own.numpy())
    data.close()


def test_cells_of_an_object_have_no_file(cells, vocabulary):
    data = CellDataModule([cells], vocabulary=vocabulary, batch_size=4)
    found = cells_of_batch(data, 1)
    assert {cell.file for cell in found} == {""}
    assert [cell.cell for cell in found] == [str(cells.obs_names[cell.row]) for cell in found]
