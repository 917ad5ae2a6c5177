"""Batches of a study, and the queries that are drawn of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mini_objectives import StudyBatches, draw_queries

import scdiva as sd
from scdiva.data.packed import PackedCells
from scdiva.data.packing import pack_files
from scdiva.diffusion.masking import cell_of_token, counts_of, log_normalised
from scdiva.tokenizer import load_vocabulary

SMALL = {
    "dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 24, "max_length": 60, "anchor_linear_dim": 8,
    "anchor_learned_dim": 4, "anchor_hidden": 16, "state_head": True, "state_rank": 4, "anchor_residual": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Studies of 90, 80 and 20 cells: the last is too small for a context."""
    folder, files = tmp_path_factory.mktemp("studies"), []
    cells = sd.datasets.toy(190, 60)
    for name, rows in {"a": slice(90), "b": slice(90, 170), "small": slice(170, 190)}.items():
        files.append(folder / f"{name}.h5ad")
        cells[rows].copy().write_h5ad(files[-1])
    vocabulary = load_vocabulary("human")
    known = vocabulary.match(list(cells.var_names)).tokens
    vocabulary = vocabulary.subset(np.sort(known[known >= 0]))
    pack_files(files, vocabulary, folder / "cells.h5").close()
    return folder / "cells.h5", vocabulary


@pytest.fixture
def batch(packed):
    return StudyBatches(PackedCells(packed[0]), 16, 48, seed=0).batch(0)


@pytest.mark.parametrize("thinned", [True, False])
def test_queries_are_balanced_and_their_answers_true(batch, packed, thinned):
    measured = torch.from_numpy(np.flatnonzero(PackedCells(packed[0]).measured[int(batch.study[0])]))
    counts = counts_of(batch.values, batch.cu_seqlens)
    generator = torch.Generator().manual_seed(0)
    asked = draw_queries(batch.tokens, counts, batch.cu_seqlens, measured, generator, thinned=thinned, most=12)
    cells = cell_of_token(batch.cu_seqlens, len(batch.tokens)).tolist()
    whole = dict(zip(zip(cells, batch.tokens.tolist(), strict=True), counts.of_token.tolist(), strict=True))
    tokens, values, bounds = asked.seen
    of = cell_of_token(bounds, len(tokens)).tolist()
    seen = dict(zip(zip(of, tokens.tolist(), strict=True), values.tolist(), strict=True))
    queries = list(zip(asked.cell.tolist(), asked.token.tolist(), strict=True))
    assert len(set(queries)) == len(queries) > 50
    assert not set(queries) & set(seen)
    for query, present in zip(queries, asked.present.tolist(), strict=True):
        assert (query in whole) == bool(present)
        assert query[1] in set(measured.tolist())
    assert (asked.cell.diff() >= 0).all()
    for n in (asked.present[asked.cell == number] for number in range(batch.n_cells)):
        assert len(n) - n.sum() <= n.sum() <= 6  # of a cell that expresses most genes fewer are absent
    held = list(zip(asked.value_cell.tolist(), asked.value_token.tolist(), strict=True))
    assert held
    assert not set(held) & (set(seen) | (set(queries) if thinned else set()))
    if thinned:
        assert set(seen) | set(held) < set(whole)
        assert len(seen) < len(whole)
    else:
        expected = dict(zip(whole, log_normalised(counts, batch.cu_seqlens).tolist(), strict=True))
        assert [expected[query] for query in held] == asked.value.tolist()
        assert all(seen[one] == expected[one] for one in seen)
        assert set(queries) & set(held)
