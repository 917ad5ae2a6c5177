"""Conditions of a screen, and similarities of genes and groups by the model, beside plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scdiva._constants import N_SPECIAL
from scdiva.perturbation.response import group_similarity, kinds, part_similarity
from scdiva.perturbation.screen import Conditions

PARTS = st.sets(st.sampled_from("ABCDE"), min_size=1, max_size=3).map(lambda s: tuple(sorted(s)))
CONDITIONS = st.lists(st.tuples(PARTS, st.integers(0, 2), st.sampled_from([0.5, 1.0, 4.0])), max_size=8)


def made(rows) -> Conditions:
    return Conditions(
        tuple(parts for parts, _, _ in rows),
        np.array([group for _, group, _ in rows], dtype=np.int64),
        np.array([dose for _, _, dose in rows], dtype=np.float64),
    )


@given(CONDITIONS, CONDITIONS)
def test_conditions_beside_loops(one, other):
    a, b = made(one), made(other)
    assert len(a) == len(one)
    assert a.n_parts.tolist() == [len(parts) for parts, _, _ in one]
    same = a.same(b)
    assert same.shape == (len(one), len(other))
    assert same.tolist() == [[(p, d) == (q, e) for q, _, e in other] for p, _, d in one]
    holding = a.holding("CAX")
    assert holding.shape == (len(one), 3)
    assert holding.tolist() == [[name in parts for name in "CAX"] for parts, _, _ in one]
    rows = np.arange(len(one))[::-2]
    some = a.only(rows)
    assert (some.parts, some.group.tolist(), some.dose.tolist()) == (
        tuple(one[i][0] for i in rows), [one[i][1] for i in rows], [one[i][2] for i in rows],
    )  # fmt: skip


@given(CONDITIONS, CONDITIONS)
def test_what_is_new_about_a_condition(targets, measured):
    found = kinds(made(targets), made(measured))
    for (parts, group, _), kind in zip(targets, found, strict=True):
        groups = {g for p, g, _ in measured if p == parts}
        if groups:
            assert kind == ("measured" if group in groups else "group")
        else:
            assert kind == ("single" if len(parts) == 1 else "combination")


@pytest.mark.parametrize("anchor", ["encoder", "learned"])
def test_similarity_of_genes_beside_loops(network, anchor):
    model = network(anchor=anchor)
    genes = list(model.vocabulary.symbols[[4, 0, 17, 9]])
    names = [genes[0], "aspirin", *genes[1:], "ethanol"]
    tables = [model.embedding.gene.weight, model.anchor.table.weight if anchor == "encoder" else None]
    expected = np.eye(len(names))
    for i, one in enumerate(names):
        for j, other in enumerate(names):
            if i == j or not {one, other} <= set(genes):
                continue
            product = 1.0
            for table in tables:
                rows = (tables[0] if table is None else table).detach().double().numpy()[N_SPECIAL:]
                a, b = (rows[list(model.vocabulary.symbols).index(name)] - rows.mean(axis=0) for name in (one, other))
                product *= a @ b / np.sqrt((a @ a) * (b @ b))
            expected[i, j] = product
    found = part_similarity(model, names)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert np.abs(found - np.eye(len(names))).max() > 0.01
    # of two genes it is the same whoever else is asked for
    np.testing.assert_allclose(part_similarity(model, names[::-1]), expected[::-1, ::-1], atol=1e-12)
    np.testing.assert_allclose(part_similarity(model, names[2:4]), expected[2:4, 2:4], atol=1e-12)


@pytest.mark.parametrize(("n", "n_measured"), [(3, 3), (5, 5), (6, 4)])
def test_similarity_of_groups_beside_loops(n, n_measured):
    states = np.random.default_rng(n).normal(size=(n, 7)).astype(np.float32)
    centred = states.astype(np.float64) - states[:n_measured].astype(np.float64).mean(axis=0)
    expected = [[a @ b / np.sqrt((a @ a) * (b @ b)) for b in centred] for a in centred]
    found = group_similarity(states, n_measured)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    known = group_similarity(states[:n_measured], n_measured)  # what is new says nothing of what is known
    np.testing.assert_array_equal(found[:n_measured, :n_measured], known)
    assert np.linalg.eigvalsh(found).min() > -1e-9
    assert (np.diag(found) == 1).all()


def test_groups_of_which_nothing_is_known():
    assert group_similarity(np.ones((1, 4), dtype=np.float32), 1).tolist() == [[1]]
    assert group_similarity(np.eye(2, 4, dtype=np.float32), 2).tolist() == [[1, 0], [0, 1]]
    np.testing.assert_array_equal(group_similarity(np.eye(3, 4, dtype=np.float32), 2), np.eye(3))
    np.testing.assert_array_equal(group_similarity(np.ones((3, 4), dtype=np.float32), 3), np.eye(3))  # all the same
