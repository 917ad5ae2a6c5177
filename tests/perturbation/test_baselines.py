"""Each simple baseline by hand, and the linear one beside a least-squares solve over all pairs at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scdiva._constants import BASELINES
from scdiva.perturbation.response import COMPONENTS, PENALTY, baselines
from scdiva.perturbation.screen import Conditions

LABELS = ("A", "B", "A+B", "B+C")


def asked(*labels, doses=None) -> Conditions:
    conditions = [(label.split("@")[0], int(label.partition("@")[2] or 0)) for label in labels]
    return Conditions(
        tuple(tuple(sorted(label.split("+"))) for label, _ in conditions),
        np.array([group for _, group in conditions], dtype=np.int64),
        np.ones(len(conditions)) if doses is None else np.array(doses, dtype=float),
    )


def held(found, name, expected):
    np.testing.assert_allclose(found[name][0], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_all_are_there_under_their_names(measured):
    found = baselines(measured(), asked("A+C", "D"))
    assert tuple(found) == BASELINES
    assert {(value.shape, value.dtype.name) for value in found.values()} == {((2, 12), "float64")}
    assert not found["no_change"].any()
    assert np.isnan(found["elsewhere"]).all()
    assert all(np.isfinite(value).all() for name, value in found.items() if name != "elsewhere")


def test_one_group(measured):
    a, b, ab, bc = measured(LABELS).delta.astype(float)
    screen, mean, alone = measured(LABELS), (a + b + ab + bc) / 4, (a + b) / 2
    for label, matching, additive in [
        ("A+B", ((a + ab) / 2 + (b + ab + bc) / 3) / 2, a + b),
        ("A+C", ((a + ab) / 2 + bc) / 2, a + alone),  # C was never alone
        ("A", (a + ab) / 2, a),
        ("D", mean, alone),
        ("A+D", ((a + ab) / 2 + mean) / 2, a + alone),
        ("A+B+C", ((a + ab) / 2 + (b + ab + bc) / 3 + bc) / 3, a + b + alone),
    ]:
        found = baselines(screen, asked(label))
        held(found, "train_mean", mean)
        held(found, "matching_mean", matching)
        held(found, "additive", additive)


def test_nothing_was_measured_alone(measured):
    screen = measured(("A+B", "B+C"))
    found = baselines(screen, asked("A+C"))
    held(found, "additive", 2 * screen.delta.mean(axis=0))
    held(found, "matching_mean", screen.delta.mean(axis=0))


def test_conditions_of_the_same_group_count_where_there_are_any(measured):
    screen = measured(("A", "B", "A+B", "A@1", "C@1", "C@2"))
    a, b, ab, a1, c1, c2 = screen.delta.astype(float)
    found = baselines(screen, asked("A+C"))
    held(found, "train_mean", (a + b + ab) / 3)
    held(found, "matching_mean", ((a + ab) / 2 + (a + b + ab) / 3) / 2)
    held(found, "additive", a + (c1 + c2) / 2)  # C was alone elsewhere
    found = baselines(screen, asked("A@3"))  # a group in which nothing was done
    held(found, "train_mean", (a + b + ab + a1 + c1 + c2) / 6)
    held(found, "matching_mean", (a + ab + a1) / 3)
    held(found, "additive", (a + a1) / 2)
    held(found, "elsewhere", (a + a1) / 2)
    held(baselines(screen, asked("A")), "elsewhere", a1)
    held(baselines(screen, asked("C@1")), "elsewhere", c2)
    held(baselines(screen, asked("A+B@1")), "elsewhere", ab)
    assert np.isnan(baselines(screen, asked("B"))["elsewhere"]).all()


def test_the_same_dose_counts_where_there_is_one(measured):
    screen = measured(("A", "A", "B", "A@1", "A@1"), doses=[1, 10, 1, 10, 100])
    a1, a10, b, e10, e100 = screen.delta.astype(float)
    held(baselines(screen, asked("A", doses=[10])), "additive", a10)
    held(baselines(screen, asked("A", doses=[3])), "additive", (a1 + a10) / 2)
    held(baselines(screen, asked("A+B", doses=[10])), "additive", a10 + b)
    held(baselines(screen, asked("A", doses=[10])), "elsewhere", e10)
    held(baselines(screen, asked("A", doses=[1])), "elsewhere", (e10 + e100) / 2)
    held(baselines(screen, asked("A", doses=[10])), "train_mean", (a1 + a10 + b) / 3)


def slow_linear(screen, targets, penalty=PENALTY):
    """min |Y - b - G W P'|² + penalty (|G W|² + |W P'|² + penalty |W|²), as one least-squares problem in vec(W)."""
    delta = screen.delta.astype(float)
    expression = delta + screen.control[screen.conditions.group]
    _, size, right = np.linalg.svd(expression - expression.mean(axis=0), full_matrices=False)
    k = min(COMPONENTS, int((size > 1e-8 * size[0]).sum()))
    g = (right[:k] * size[:k, None]).T  # genes × components
    genes = list(screen.genes)

    def sums(conditions):
        return np.array([
            np.sum([g[genes.index(p)] for p in parts if p in genes], axis=0) if set(parts) & set(genes) else np.zeros(k)
            for parts in conditions.parts
        ])  # fmt: skip

    p, b, root = sums(screen.conditions), delta.mean(axis=0), penalty**0.5 * np.eye(k)
    one, two = np.vstack([g, root]), np.vstack([p, root])
    y = np.zeros((len(one), len(two)))
    y[: len(g), : len(p)] = (delta - b).T
    w = np.linalg.lstsq(np.kron(one, two), y.ravel(), rcond=None)[0].reshape(k, k)
    return b + sums(targets) @ w.T @ g.T


@pytest.mark.parametrize("n_genes", [6, 14])
def test_linear_beside_least_squares(measured, n_genes):
    genes = [*"ABCDE", *(f"G{j}" for j in range(n_genes))]
    screen = measured(("A", "B", "C", "A+B", "D", "drug"), n_genes=len(genes), genes=genes)
    targets = asked("A", "E", "B+C", "A+drug", "unheard")
    found = baselines(screen, targets)["linear"]
    np.testing.assert_allclose(found, slow_linear(screen, targets), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(found[4], screen.delta.astype(float).mean(axis=0), atol=1e-6)  # no column of the data


def test_linear_where_there_is_little(measured):
    genes = ["A", "B", "G0", "G1"]
    one = measured(("A",), n_genes=4, genes=genes)
    held(baselines(one, asked("B")), "linear", one.delta[0])
    no_gene = measured(("x", "y"), n_genes=4, genes=genes)
    held(baselines(no_gene, asked("z")), "linear", no_gene.delta.mean(axis=0))
    same = measured(("A", "B"), n_genes=4, genes=genes)
    same = replace(same, delta=same.delta[[0, 0]])
    held(baselines(same, asked("A+B")), "linear", same.delta[0])
