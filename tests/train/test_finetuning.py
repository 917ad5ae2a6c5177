"""Fine-tuning on labels: what is held out, what is trained, and what is left when it ends."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from scdiva._constants import N_SPECIAL
from scdiva._rng import step_seed
from scdiva.nn.annotation import Read
from scdiva.train import annotation as A
from scdiva.train import finetuning
from scdiva.train.adaptation import AdaptationCells, Split
from scdiva.train.config import AnnotationConfig
from scdiva.train.finetuning import AnnotationModule, _whole_batches, encoded, finetune, split_by_batch
from scdiva.train.loop import Limits

N_GENES, N_LABELS = 30, 2  # genes of the tiny model
PLAIN = {"anchor_residual": False}
LEARNED = {"anchor": "learned"}
FEW = Limits(3, 5, np.inf)


def make_cells(n: int = 80) -> AdaptationCells:
    """Cells of two types, ascending by type, which stands as their batch."""
    draw = np.random.default_rng(0)
    label = np.arange(n) * 2 // n
    tokens = [draw.permutation(22)[: draw.integers(6, 13)] + 8 * kind + N_SPECIAL for kind in label]
    indptr = np.concatenate([[0], np.cumsum([len(one) for one in tokens])])
    values = draw.uniform(0.5, 2, indptr[-1]).astype(np.float32)
    return AdaptationCells(indptr, np.concatenate(tokens), values, label, np.arange(N_GENES) + N_SPECIAL, N_LABELS)


def config(**fields) -> AnnotationConfig:
    return AnnotationConfig(**{"batch_size": 32, "warmup_steps": 1, "learning_rate": 1e-2} | fields)


def prepared(tiny, fields, **more):
    """A model, a head on it fitted on the training cells, all cells and the split."""
    model, cells = tiny(**fields).eval(), make_cells()
    reference = A.Reference(cells, encoded(model, cells), cells.batch)
    split = Split(np.flatnonzero(np.arange(80) % 4 != 1), np.flatnonzero(np.arange(80) % 4 == 1))
    part = A.Reference(cells.subset(split.training), reference.states[split.training], cells.batch[split.training])
    head = A.fit_head(part, "finetune", N_LABELS, model.config.n_tokens, config(**more))
    return model, head, reference, split


def run(model, head, reference, split, how="full", limits=FEW, **fields):
    return finetune(model, head, reference, split, how, config(**fields), limits, progress=False)


def changed(old, new) -> set[str]:
    assert old.keys() == new.keys()
    return {name for name, value in old.items() if not torch.equal(value, new[name])}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=2, max_size=80), st.integers(0, 9))
def test_what_is_held_out(cells, seed):
    labels, batch = np.array(cells).T
    split = split_by_batch(labels, batch, seed)
    np.testing.assert_array_equal(np.sort(np.concatenate(split)), np.arange(len(labels)))
    assert all((np.diff(part) > 0).all() for part in split)
    training, held = (set(labels[part]) for part in split)
    assert training == set(labels)
    assert held <= training  # so the one cell of a label is never held out
    assert len(held) or len(training) == len(labels)  # something is, unless all labels have one cell
    if _whole_batches(labels, batch, np.random.default_rng(step_seed(seed, 0, "split"))).any():
        of = {name: set(labels[batch == name]) for name in np.unique(batch)}
        for name in np.unique(batch[split.held_out]):  # whole batches, but for labels that nobody else has
            kept = set(labels[np.setdiff1d(np.flatnonzero(batch == name), split.held_out)])
            others = [of[other] for other in of if other not in batch[split.held_out]]
            # a batch that was chosen too, and gave no cell, has such labels only
            assert not any(kept & there and held & there for there in others)
    again = split_by_batch(labels, batch, seed)
    assert all(np.array_equal(one, other) for one, other in zip(split, again, strict=True))


def test_a_tenth_is_held_out():
    labels = np.arange(200) % 3
    whole = split_by_batch(labels, np.zeros(200, dtype=int), 0)
    assert len(whole.held_out) == 20
    batch = np.repeat([0, 1, 2, 3], [8, 8, 8, 176])
    for seed in range(8):
        held = set(batch[split_by_batch(labels, batch, seed).held_out])
        share = np.isin(batch, list(held)).mean()
        assert (share >= 0.1) or held == {0, 1, 2}
        assert len(held) < 4
    seeds = {tuple(split_by_batch(labels, batch, seed).held_out) for seed in range(8)}
    assert len(seeds) > 1
    two = split_by_batch(labels, np.repeat([0, 1], 100), 0)
    assert len(two.held_out) == 100


def test_labels_that_stand_in_one_batch_each_are_held_out_cell_by_cell():
    labels = np.repeat([0, 1], [30, 10])
    split = split_by_batch(labels, labels, 0)
    assert len(split.held_out) == 4
    assert not len(split_by_batch(np.arange(5), np.zeros(5, dtype=int), 0).held_out)


def test_the_loss_by_hand(tiny):
    model, head, reference, _ = prepared(tiny, PLAIN)
    module = AnnotationModule(model, head, config(max_time=0.0), np.array([0.5, 2.0]))
    batch = reference.cells.take(np.arange(30, 50))
    with torch.no_grad():
        packed = batch.tokens, batch.values, batch.cu_seqlens
        cells = Read(model.encode(*packed), *packed)
        logits = head.classifier(head.inputs(head.features(cells), head.genes(cells)))
    y = batch.study.numpy()
    losses = -F.log_softmax(logits, dim=1).numpy()[np.arange(20), y]
    weight = np.array([0.5, 2.0])[y]
    for training in (True, False):
        module.train(training)
        loss, parts = module.compute_loss(batch, torch.Generator().manual_seed(0))
        assert float(loss.detach()) == pytest.approx((weight * losses).sum() / weight.sum(), rel=1e-5)
        assert float(parts["accuracy"]) == pytest.approx((logits.argmax(dim=1).numpy() == y).mean())


def test_cells_are_thinned_while_training_only(tiny, monkeypatch):
    model, head, reference, _ = prepared(tiny, PLAIN)
    module = AnnotationModule(model, head, config(max_time=0.5), np.ones(2))
    batch, seen = reference.cells.take(np.arange(80)), []
    logits = module.logits
    monkeypatch.setattr(module, "logits", lambda given: (seen.append(given.tokens.numel()), logits(given))[1])
    module.eval().compute_loss(batch, torch.Generator().manual_seed(0))
    module.train().compute_loss(batch, torch.Generator().manual_seed(0))
    assert seen[0] == batch.tokens.numel()
    assert 0.15 < 1 - seen[1] / seen[0] < 0.35  # the mean of U(0, 0.5) is a quarter


LAYERS = {f"anchor.mlp.{number}.weight" for number in (0, 2, 4)}
REST = {"anchor.table.weight", "anchor.bias", *(f"anchor.mlp.{number}.bias" for number in (0, 2, 4))}


@pytest.mark.parametrize(("how", "expected"), [("lora", LAYERS), ("full", LAYERS | REST)])
def test_what_the_state_comes_from_is_trained_and_no_more(tiny, how, expected):
    model, head, reference, split = prepared(tiny, PLAIN)
    before, old = copy.deepcopy(model.state_dict()), copy.deepcopy(head.state_dict())
    few = Limits(15, 20, np.inf)
    found, heard = run(model, head, reference, split, how, few, learning_rate=1e-3, max_time=0.0)
    assert found["improved"]
    assert found["best_loss"] < found["start_loss"]
    assert changed(before, model.state_dict()) == expected  # the names are the stock ones: updates are merged
    assert changed(old, head.state_dict()) == {"classifier.weight", "classifier.bias", "centroids"}
    assert not model.training
    assert all(p.requires_grad for p in model.parameters())
    assert not any(p.requires_grad for p in head.parameters())
    if how == "lora":
        for name in LAYERS:
            assert np.linalg.matrix_rank((model.state_dict()[name] - before[name]).numpy(), tol=1e-5) <= 8
    # what is heard is what the new model and head say of held-out cells
    np.testing.assert_array_equal(heard.labels, reference.labels[split.held_out])
    new = A.Reference(reference.cells, encoded(model, reference.cells), reference.labels)
    u, genes = A.read_cells(head, new, split.held_out)
    np.testing.assert_allclose(heard.logits, head.classifier(head.inputs(u, genes)), atol=1e-5)
    states = F.normalize(new.states, dim=1)
    np.testing.assert_allclose(heard.cosines, states[split.held_out] @ head.centroids.T, atol=1e-5)
    first = states[split.training][torch.from_numpy(reference.labels[split.training] == 0)]
    torch.testing.assert_close(head.centroids[0], F.normalize(first.sum(dim=0), dim=0))


@pytest.mark.parametrize("how", ["lora", "full"])
def test_a_transformer_is_trained_where_the_state_comes_through_it(tiny, how):
    model, head, reference, split = prepared(tiny, LEARNED)
    before = copy.deepcopy(model.state_dict())
    found, heard = run(model, head, reference, split, how, limits=Limits(1, 5, np.inf))
    after = changed(before, model.state_dict())
    if found["improved"]:
        assert "blocks.0.attention.qkv.weight" in after
        assert how == "full" or all(name.startswith("blocks.") and "norm" not in name for name in after)
    else:  # the best is the start: merging an update of zero changes nothing
        assert not after
    assert len(heard.labels) == len(split.held_out)


def test_an_interrupt_leaves_a_usable_result(tiny, monkeypatch):
    compute, steps = AnnotationModule.compute_loss, []

    def interrupted(self, batch, generator):
        steps.append(self.training)
        if sum(steps) == 25:
            raise KeyboardInterrupt
        return compute(self, batch, generator)

    monkeypatch.setattr(AnnotationModule, "compute_loss", interrupted)
    model, head, reference, split = prepared(tiny, PLAIN)
    names = set(model.state_dict())
    found, heard = run(model, head, reference, split, "lora", limits=Limits(50, 50, np.inf))
    assert found["stopped"] == "interrupted"
    assert set(model.state_dict()) == names
    assert np.isfinite(heard.logits).all()
    assert len(heard.labels) == len(split.held_out)


def test_limits_and_a_loss_that_is_no_number(tiny):
    model, head, reference, split = prepared(tiny, PLAIN)
    found, _ = run(model, head, reference, split, limits=Limits(50, 5, 1e-9))
    assert found["stopped"] == "minutes"
    model, head, reference, split = prepared(tiny, PLAIN)
    with pytest.raises(FloatingPointError, match="Lower learning_rate"):
        run(model, head, reference, split, learning_rate=1e30)


def test_the_seed_determines_every_bit_and_the_users_stream_goes_on(tiny):
    stream = torch.random.get_rng_state()
    results = []
    for seed in (0, 0, 1):
        model, head, reference, split = prepared(tiny, PLAIN)
        torch.random.set_rng_state(stream)
        _, heard = run(model, head, reference, split, "lora", seed=seed)
        assert torch.equal(torch.random.get_rng_state(), stream)
        results.append(heard.logits)
    np.testing.assert_array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])


@pytest.mark.parametrize("fields", [PLAIN, LEARNED])
def test_states_in_blocks_are_those_of_single_cells(tiny, fields):
    model, cells = tiny(**fields).eval(), make_cells(20)
    found = finetuning.encoded(model, cells, block=7)
    for i in range(20):
        batch = cells.take(np.array([i]))
        with torch.no_grad():
            expected = model.encode(batch.tokens, batch.values, batch.cu_seqlens)
        torch.testing.assert_close(found[i], expected[0], atol=1e-6, rtol=0)
    assert not found.requires_grad
