"""Fine-tuning on labels: what is held out, what is trained, and what is left when it ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from scdiva._constants import N_SPECIAL
from scdiva._rng import step_seed
from scdiva.train import annotation as A
from scdiva.train.adaptation import AdaptationCells, encoded

N_LABELS = 3


def make_reference(n: int = 90) -> A.Reference:
    """Cells of three labels, a few without one; a label has genes of its own, the model makes the states."""
    draw = np.random.default_rng(0)
    labels = draw.permutation(np.arange(n) % N_LABELS)
    liked = np.arange(30) // 10 == labels[:, None]
    dense = draw.gamma(2, np.where(liked, 0.8, 0.4)) * (draw.random((n, 30)) < np.where(liked, 0.8, 0.3))
    dense[:, 0] += 0.1
    rows, columns = np.nonzero(dense)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=n))])
    values = dense[rows, columns].astype(np.float32)
    measured = np.arange(30) + N_SPECIAL
    cells = AdaptationCells(indptr, columns + N_SPECIAL, values, np.arange(n) * 2 // n, measured, 2)
    labels[:6] = -1
    return A.Reference(cells, torch.zeros(n, 1), labels)


def held_out_batches(labels, batch, seed) -> np.ndarray:
    return A._held_out_batches(labels, batch, np.random.default_rng(step_seed(seed, 0, "split")))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 4)), min_size=2, max_size=80), st.integers(0, 9))
def test_what_fine_tuning_holds_out(cells, seed):
    labels, batch = np.array(cells).T
    known = labels >= 0
    if not known.any():
        return
    held = held_out_batches(labels, batch, seed)
    assert not held[~known].any()
    training, asked = set(labels[known & ~held]), set(labels[held])
    assert training == set(labels[known])  # so the one cell of a label is never held out
    assert asked or len(training) == known.sum()  # something is, unless all labels have one cell
    np.testing.assert_array_equal(held, held_out_batches(labels, batch, seed))


def test_a_tenth_is_held_out_and_whole_batches_where_there_are_some():
    labels = np.arange(200) % 3
    assert held_out_batches(labels, np.zeros(200, dtype=int), 0).sum() == 20
    batch = np.repeat([0, 1, 2, 3], [8, 8, 8, 176])
    for seed in range(8):
        held = held_out_batches(labels, batch, seed)
        of = set(batch[held])
        assert held.sum() == np.isin(batch, list(of)).sum()
        assert held.mean() >= 0.1 or of == {0, 1, 2}
        assert len(of) < 4
    assert len({held_out_batches(labels, batch, seed).tobytes() for seed in range(8)}) > 1
    assert held_out_batches(labels, np.repeat([0, 1], 100), 0).sum() == 100


def test_labels_that_stand_in_one_batch_each_are_held_out_cell_by_cell():
    labels = np.repeat([0, 1], [30, 10])
    assert held_out_batches(labels, labels, 0).sum() == 4
    assert not held_out_batches(np.arange(5), np.zeros(5, dtype=int), 0).any()


@pytest.fixture
def tuned(tiny, monkeypatch):
    """Fine-tune a tiny model at a rate that shows; the model before, and what came of it."""
    monkeypatch.setattr(A, "TUNING_RATE", 1e-2)
    monkeypatch.setattr(A, "TUNING_CELLS", 32)

    def run(seed=0, **fields):
        model, reference = tiny(**fields).eval(), make_reference()
        reference = reference._replace(states=encoded(model, reference.cells))
        batch = np.arange(90) % 4
        reference = reference._replace(cells=replace(reference.cells, batch=batch, n_batches=4))
        return model, reference, batch, A.finetune(model, reference, N_LABELS, seed, "cpu")

    return run


def test_fine_tuning_trains_what_the_state_comes_from_and_no_more(tuned):
    model, reference, batch, (found, notes) = tuned(anchor_residual=False)
    assert notes["improved"]
    assert notes["end_loss"] < notes["start_loss"]
    new, head, predicted = found
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, new.state_dict()[name])}
    assert changed == {name for name, _ in model.named_parameters() if name.startswith("anchor.")}
    assert not new.training
    assert all(p.requires_grad for p in new.parameters())
    assert not any(p.requires_grad for p in head.parameters())
    # what is predicted is what the new model and head say of held-out cells
    held = held_out_batches(reference.labels, batch, 0)
    np.testing.assert_array_equal(predicted.labels, reference.labels[held])
    again = reference._replace(states=encoded(new, reference.cells))
    u, genes = A.read_cells(head, again, np.flatnonzero(held))
    np.testing.assert_allclose(predicted.logits, head.classifier(head.inputs(u, genes)), atol=1e-5)
    states = nn.functional.normalize(again.states, dim=1)
    np.testing.assert_allclose(predicted.cosines, states[torch.from_numpy(held)] @ head.centroids.T, atol=1e-5)
    first = states[torch.from_numpy(~held & (reference.labels == 0))].sum(dim=0)
    torch.testing.assert_close(head.centroids[0], nn.functional.normalize(first, dim=0))


def test_fine_tuning_through_a_transformer(tuned):
    model, _, _, (found, notes) = tuned(anchor="learned", max_length=40)
    assert notes["steps"] > 0
    if found is not None:
        after = found[0].state_dict()
        changed = {name for name, value in model.state_dict().items() if not torch.equal(value, after[name])}
        assert "blocks.0.attention.qkv.weight" in changed


def test_an_interrupt_of_fine_tuning_leaves_a_usable_result(tuned, monkeypatch):
    thin, steps = A.thinned_at_random, []

    def interrupted(*args):
        steps.append(1)
        if len(steps) == 8:
            raise KeyboardInterrupt
        return thin(*args)

    monkeypatch.setattr(A, "thinned_at_random", interrupted)
    _, _, _, (found, notes) = tuned(anchor_residual=False)
    assert (notes["stopped"], notes["steps"]) == ("interrupted", 7)
    assert found is None or np.isfinite(found[2].logits).all()


def test_the_seed_determines_fine_tuning_and_the_users_stream_goes_on(tuned):
    stream = torch.random.get_rng_state()
    one, again, other = (tuned(seed, anchor_residual=False)[3][1] for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), stream)
    assert one == again
    assert one != other


def test_a_loss_that_is_no_number_is_an_error(tuned, monkeypatch):
    monkeypatch.setattr(A, "TUNING_RATE", 1e30)
    with pytest.raises(FloatingPointError, match="The loss is"):
        tuned(anchor_residual=False)
