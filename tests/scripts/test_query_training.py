from __future__ import annotations

import numpy as np
import pytest
import torch
from query_training import QueryConfig, QueryModule, StudyBatches, StudyDataModule, draw_queries

import scdiva as sd
from scdiva._constants import N_SPECIAL
from scdiva._rng import step_generator
from scdiva.data.corpus import PackedCells, pack_files
from scdiva.diffusion.masking import cell_of_token
from scdiva.diffusion.thinning import counts_of, log_normalised
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.tokenizer import load_vocabulary
from scdiva.train import fit

SMALL = {
    "dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 24, "max_length": 60, "anchor_linear_dim": 8,
    "anchor_learned_dim": 4, "anchor_hidden": 16, "state_head": True, "state_rank": 4, "anchor_residual": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder, files = tmp_path_factory.mktemp("studies"), []
    cells = sd.datasets.toy(240, 60)
    for number in range(3):
        files.append(folder / f"study{number}.h5ad")
        cells[80 * number : 80 * number + 80].copy().write_h5ad(files[-1])
    vocabulary = load_vocabulary("human")
    known = vocabulary.match(list(cells.var_names)).tokens
    vocabulary = vocabulary.subset(np.sort(known[known >= 0]))
    pack_files(files, vocabulary, folder / "cells.h5").close()
    return folder / "cells.h5", vocabulary


@pytest.fixture
def module_of(packed):
    def make(**settings):
        file, vocabulary = packed
        position = "none" if settings.get("stream") else "rope"
        config = ScDiVaConfig(n_genes=vocabulary.n_genes, position=position, **SMALL)
        model = ScDiVa(config, generator=torch.Generator().manual_seed(0))
        settings = {"steps": 40, "batch_size": 16, "context_cells": 48, "warmup_steps": 2, **settings}
        torch.manual_seed(0)
        return QueryModule(model, QueryConfig(**settings), torch.from_numpy(PackedCells(file).measured))

    return make


@pytest.fixture
def batch(packed):
    return StudyBatches(PackedCells(packed[0]), 16, 48, seed=0).batch(0)


@pytest.mark.parametrize("thinned", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_queries_are_balanced_and_their_answers_true(batch, packed, thinned, seed):
    measured = torch.from_numpy(np.flatnonzero(PackedCells(packed[0]).measured[int(batch.study[0])]))
    counts = counts_of(batch.values, batch.cu_seqlens)
    generator = torch.Generator().manual_seed(seed)
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
    cell = asked.cell
    assert (cell.diff() >= 0).all()
    for number in range(batch.n_cells):
        n = asked.present[cell == number]
        assert n.sum() <= 6
        assert len(n) <= 2 * n.sum()  # of a cell that expresses most genes fewer are absent
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


def test_training_lowers_the_loss_and_leaves_state_and_head(module_of, packed):
    module = module_of(learning_rate=1e-2)
    before = {name: value.clone() for name, value in module.model.state_dict().items()}
    batches = StudyBatches(PackedCells(packed[0]), 16, 48, seed=0)
    optimizer = module.configure_optimizers()["optimizer"]
    losses = []
    for step in range(30):
        loss, parts = module.compute_loss(batches.batch(step), step_generator(0, step, "train"))
        assert set(parts) == {"presence", "value"}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    assert all(value.equal(before[name]) for name, value in module.model.state_dict().items())


def test_a_stopped_run_goes_on_bit_for_bit(module_of, packed, tmp_path):
    file, vocabulary = packed

    def run(out, steps, resume=None):
        module = module_of()
        data = StudyDataModule(file, vocabulary=vocabulary, batch_size=16, context_cells=48)
        fit(module, data, out_dir=out, max_steps=steps, accelerator="cpu", progress=False, resume_from=resume)
        return module.head.state_dict()

    straight = run(tmp_path / "straight", 6)
    run(tmp_path / "stopped", 3)
    resumed = run(tmp_path / "stopped", 6, tmp_path / "stopped")
    assert all(value.equal(resumed[name]) for name, value in straight.items())


def test_an_answer_depends_on_the_context_and_on_no_other_query(module_of, batch, packed):
    module = module_of().eval()
    torch.nn.init.normal_(module.head.out.weight)
    measured = module.measured[int(batch.study[0])].nonzero().squeeze(1)
    counts = counts_of(batch.values, batch.cu_seqlens)
    cut = int(batch.cu_seqlens[16])
    asked = draw_queries(
        batch.tokens[:cut], type(counts)(counts.of_token[:cut], counts.of_cell[:16]), batch.cu_seqlens[:17], measured,
        torch.Generator().manual_seed(0), thinned=True, most=20,
    )  # fmt: skip
    around = (
        batch.tokens[cut:], type(counts)(counts.of_token[cut:], counts.of_cell[16:]), batch.cu_seqlens[16:] - cut
    )  # fmt: skip
    with torch.inference_mode():
        odds, values = module.answer(asked, around)
        alone, _ = module.answer(asked, None)
        some = asked._replace(cell=asked.cell[::3], token=asked.token[::3], present=asked.present[::3])
        fewer, same = module.answer(some, around)
        off = module.train().answer(asked, around)[0]
    assert not torch.allclose(odds, alone)
    assert (off - odds).std() > 0.5, "in training the state head errs gene by gene"
    torch.testing.assert_close(fewer, odds[::3])
    torch.testing.assert_close(same, values)
    context = module.context_of(*around, torch.arange(5))
    for gene in range(5):
        here = around[0] == gene + N_SPECIAL
        assert int((context.values[:, gene] > 0).sum()) == int(here.sum())


def test_a_model_without_a_state_head_is_refused(packed):
    config = ScDiVaConfig(n_genes=packed[1].n_genes, **{**SMALL, "state_head": False})
    with pytest.raises(ValueError, match="state_head=True"):
        QueryModule(ScDiVa(config), QueryConfig(), torch.zeros(1, config.n_tokens, dtype=torch.bool))
