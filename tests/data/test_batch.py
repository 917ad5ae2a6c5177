from __future__ import annotations

import numpy as np
import pytest
import torch

from scdiva.data.batch import CellBatch, from_ragged


def test_ragged_cells_become_a_batch():
    tokens, values = np.int32([5, 3, 9]), np.float32([2, 1, 4])
    batch = from_ragged(np.int64([10, 12, 12, 13]), tokens, values, study=[0, 1, 1])
    assert isinstance(batch, CellBatch)
    assert batch.n_cells == 3
    assert (batch.tokens.dtype, batch.values.dtype, batch.cu_seqlens.dtype, batch.study.dtype) == (
        torch.int64,
        torch.float32,
        torch.int32,
        torch.int64,
    )
    assert batch.tokens.tolist() == [5, 3, 9]
    assert batch.values.tolist() == [2, 1, 4]
    assert batch.cu_seqlens.tolist() == [0, 2, 2, 3]
    assert batch.study.tolist() == [0, 1, 1]
    values[:] = 0
    assert batch.values.tolist() == [2, 1, 4]


def test_to_moves_every_part():
    batch = from_ragged(np.int64([0, 1]), np.int32([5]), np.float32([2]), study=[0]).to("meta")
    assert {part.device.type for part in (batch.tokens, batch.values, batch.cu_seqlens, batch.study)} == {"meta"}
    assert from_ragged(np.int64([0, 1]), np.int32([5]), np.float32([2])).to("cpu").study is None


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"indptr.*2 positions.*1 tokens.*1 values"):
        from_ragged(np.int64([0, 2]), np.int32([5]), np.float32([2]))
    with pytest.raises(ValueError, match="indptr spans"):
        from_ragged(np.int64([0, 2, 1]), np.int32([5]), np.float32([2]))
