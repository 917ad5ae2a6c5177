"""The response head, the input of the transformer, and the weighted squared error, compared with plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scdiva._constants import N_SPECIAL
from scdiva._rng import step_generator
from scdiva.data.batch import InMemoryCells
from scdiva.metrics import perturbation_response
from scdiva.perturbation.response_head import (
    CELLS_OF_CONDITION,
    MeasuredChanges,
    ResponseHead,
    ResponseObjective,
    perturbed_input,
    predicted_change,
)

N_GENES, N_OUT = 30, 11
TOKENS = np.array([5, -1, 20, 9, -1])
"""Of five parts; two are labels."""
PARTS = np.array([[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0, 1, 0, 1, 1], [0, 0, 0, 1, 0]], dtype=bool)
CONTEXT = 6


def cells_of(lengths, groups, seed=0) -> InMemoryCells:
    draw = np.random.default_rng(seed)
    tokens = [draw.permutation(N_GENES)[:n] + N_SPECIAL for n in lengths]
    values = draw.random(sum(lengths)).astype(np.float32) + 0.1
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    measured = np.arange(N_GENES) + N_SPECIAL
    return InMemoryCells(indptr, np.concatenate(tokens), values, np.array(groups), measured, max(groups) + 1)


@pytest.fixture
def measured() -> MeasuredChanges:
    draw = np.random.default_rng(1)
    return MeasuredChanges(
        cells=cells_of([3, 12, 7, 1, 20, 9, 4], [0, 0, 0, 1, 1, 1, 1]),
        parts=PARTS,
        part_tokens=TOKENS,
        group=np.array([0, 1, 1, 0, 0]),
        strength=np.array([1.0, 0.5, 2.0, 1.0, 1.5]),
        delta=draw.normal(size=(5, N_OUT)).astype(np.float32),
        control=draw.gamma(1.0, size=(2, N_OUT)).astype(np.float32),
    )


def head_of(measured, dim=16, seed=0) -> ResponseHead:
    return ResponseHead.for_changes(
        dim, measured.part_tokens, measured.delta, measured.parts.sum(axis=1), measured.strength, seed
    )


def test_untrained_every_part_adds_the_mean_change_of_single_perturbations(measured, network):
    head, alone = head_of(measured), measured.parts.sum(axis=1) == 1
    assert alone.tolist() == [True, True, False, False, True]
    s, y = measured.strength[alone].astype(float), measured.delta[alone].astype(float)
    base = (s[:, None] * y).sum(axis=0) / (s**2).sum()  # least squares of y = s b
    rows = np.array([0, 3, 4, 1, 2])
    with torch.no_grad():
        actual = predicted_change(
            network(anchor="learned"), head, measured.cells, rows, PARTS, TOKENS, measured.strength, CONTEXT
        )
    expected = (PARTS.sum(axis=1) * measured.strength)[:, None] * base
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_the_directions_of_the_head_span_the_measured_changes(measured):
    head = head_of(measured)
    basis = head.basis.detach().double().numpy() * float(head.scale)
    assert basis.shape == (5, N_OUT)
    np.testing.assert_allclose(basis.T @ basis, measured.delta.T.astype(float) @ measured.delta / 5, atol=1e-5)
    assert (np.diff(np.linalg.norm(basis, axis=1)) <= 1e-9).all()
    assert float(head.scale) == pytest.approx(np.sqrt((measured.delta**2).mean()), rel=1e-5)
    many = np.random.default_rng(0).normal(size=(100, 90)).astype(np.float32)
    wide = ResponseHead.for_changes(4, np.array([3]), many, np.ones(100, dtype=int), np.ones(100), 0)
    assert wide.basis.shape == (64, 90)
    none = ResponseHead.for_changes(4, np.array([3]), np.zeros((2, 5), "f4"), np.ones(2, dtype=int), np.ones(2), 0)
    assert all(bool(value.isfinite().all()) for value in none.state_dict().values())


@given(
    st.lists(st.integers(1, 15), min_size=1, max_size=5),
    st.lists(st.sets(st.integers(N_SPECIAL, N_GENES + N_SPECIAL - 1), max_size=3), min_size=1, max_size=6),
    st.integers(4, 12),
    st.integers(0, 99),
)
def test_perturbed_genes_come_first_and_are_never_cut(lengths, perturbed, context, seed):
    cells = cells_of(lengths, [0] * len(lengths), seed)
    rows = np.random.default_rng(seed).integers(len(lengths), size=len(perturbed))
    first = [np.array(sorted(part), dtype=np.int64) for part in perturbed]
    batch, positions = perturbed_input(cells, rows, first, context)
    tokens, values, bounds = (part.numpy() for part in batch.packed)
    expected_positions = []
    for i, row in enumerate(rows):
        start, stop = cells.indptr[row], cells.indptr[row + 1]
        pairs = zip(cells.tokens[start:stop], cells.values[start:stop], strict=True)
        unperturbed = [(token, value) for token, value in pairs if token not in perturbed[i]][: context - len(first[i])]
        here = slice(bounds[i], bounds[i + 1])
        assert tokens[here].tolist() == [*first[i].tolist(), *(token for token, _ in unperturbed)]
        assert values[here][len(first[i]) :].tolist() == [value for _, value in unperturbed]
        expected_positions += [bounds[i] + j for j in range(len(first[i]))]
    assert positions.tolist() == expected_positions


def test_the_loss_is_the_weighted_squared_error_of_the_paper(measured, network):
    model, head = network(anchor="learned"), head_of(measured)
    with torch.no_grad():
        head.mlp[-1].weight.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    objective = ResponseObjective(measured, head, CONTEXT)
    assert objective.n_items == 5 * CELLS_OF_CONDITION
    rows = np.array([7, 0, 319, 13])  # conditions 2, 0, 4, 3
    loss, parts = objective(model, rows, 0.5, step_generator(3, 0, "x"))
    assert not parts
    # the same cells: those of the condition's group, by the draws of the generator
    draws = torch.rand(4, generator=step_generator(3, 0, "x"), dtype=torch.float64).numpy()
    expected = []
    for row, draw in zip(rows, draws, strict=True):
        c = row % 5
        group_cells = np.flatnonzero(measured.cells.batch == measured.group[c])
        cell = group_cells[int(draw * len(group_cells))]
        with torch.no_grad():
            change = predicted_change(
                model, head, measured.cells, np.array([cell]), PARTS[c : c + 1], TOKENS, measured.strength[c : c + 1],
                CONTEXT,
            )[0].numpy()  # fmt: skip
        control = measured.control[measured.group[c]].astype(float)
        scores = perturbation_response(control + change, control + measured.delta[c], control)
        expected.append(scores["wmse"])
    assert float(loss.detach()) == pytest.approx(np.mean(expected), rel=1e-4)


@pytest.mark.parametrize("fields", [{"anchor": "learned"}, {"anchor": "encoder", "state_head": True, "state_rank": 3}])
def test_a_gradient_reaches_all_that_the_task_reads(measured, network, fields):
    model, head = network(n_layers=2, **fields), head_of(measured)
    with torch.no_grad():
        head.mlp[-1].weight.normal_(generator=torch.Generator().manual_seed(0))
    objective = ResponseObjective(measured, head, CONTEXT)
    loss, _ = objective(model, np.arange(10), 0.0, step_generator(0, 0, "x"))
    loss.backward()
    without = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert {name.split(".")[0] for name in without} <= {"heads", "state_head"}  # outputs that the task does not use
    assert all(p.grad is not None and p.grad.any() for p in head.parameters())
