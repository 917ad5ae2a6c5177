"""The annotation head beside a slow and obvious reference, one cell at a time in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

from scdiva.annotation.annotator import CLIP, METHODS, AnnotationHead, HeadSizes, Neighbors

N_TOKENS, STATE_DIM = 20, 5
SIZES = {
    "linear": {"own_dim": 3, "n_genes": 6},
    "probe": {},
    "knn": {"n_known": 30, "n_neighbors": 4},
}


def make_head(method: str, n_labels: int = 4, **more) -> AnnotationHead:
    """A head in which all parameters and buffers are set."""
    sizes = HeadSizes(method, n_labels, STATE_DIM, N_TOKENS, **SIZES[method] | more)
    head, draw = AnnotationHead(sizes), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in head.state_dict().items():
            if name == "gene_tokens":
                value.copy_(torch.tensor([3, 5, 8, 12, 13, 19])[: sizes.n_genes])
            elif name == "classifier.label":
                value.copy_(torch.randint(n_labels, value.shape, generator=draw))
            elif name.endswith("scale") or name in ("temperature", "gene_weight", "state_factor", "gene_factor"):
                value.copy_(torch.rand(value.shape, generator=draw) + 0.3)
            elif name in ("centroids", "classifier.known"):
                value.copy_(nn.functional.normalize(torch.randn(value.shape, generator=draw), dim=1))
            else:
                width = value.shape[1] if method == "probe" and name.endswith("weight") else 1
                value.copy_(torch.randn(value.shape, generator=draw) / width**0.5)
    return head.eval().requires_grad_(False)


def make_cells(n: int = 9, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """State, tokens and values of each; one cell has no gene."""
    draw, cells = np.random.default_rng(seed), []
    for i in range(n):
        tokens = 3 + draw.permutation(N_TOKENS - 3)[: 0 if i == 4 else draw.integers(1, 12)]
        cells.append((draw.normal(size=STATE_DIM), tokens, draw.uniform(0.2, 4, len(tokens)).astype(np.float32)))
    return cells


def as_tensors(cells) -> tuple[torch.Tensor, ...]:
    states, tokens, values = zip(*cells, strict=True)
    bounds = np.concatenate([[0], np.cumsum([len(one) for one in tokens])])
    return (
        torch.from_numpy(np.stack(states)).float(),
        torch.from_numpy(np.concatenate(tokens)),
        torch.from_numpy(np.concatenate(values)),
        torch.from_numpy(bounds.astype(np.int32)),
    )


def unit(x: np.ndarray) -> np.ndarray:
    return x / max(np.linalg.norm(x), 1e-12)


def numbers(head: AnnotationHead) -> dict[str, np.ndarray]:
    return {name: value.double().numpy() for name, value in head.state_dict().items()}


def slow(head: AnnotationHead, cell, measured=None) -> tuple[np.ndarray, float]:
    """Probabilities and novelty of one cell, as the docstring says it."""
    s, p = head.sizes, numbers(head)
    state, tokens, values = cell
    u = unit(state)
    if s.own_dim:
        gene_sum = sum((v * p["own.weight"][t] for t, v in zip(tokens, values, strict=True)), np.zeros(s.own_dim))
        u = np.concatenate([u, unit(gene_sum)]) / np.sqrt(2)
    x = u if s.method == "knn" else (u - p["feature_mean"]) / p["feature_scale"]
    genes = []
    for k in range(s.n_genes):
        here = [v for t, v in zip(tokens, values, strict=True) if t == p["gene_tokens"][k]]
        gene = ((here[0] if here else 0.0) - p["gene_mean"][k]) / p["gene_scale"][k]
        is_measured = measured is None or measured[k]
        genes.append(min(max(gene, -CLIP), CLIP) * p["gene_weight"][0] if is_measured else 0.0)
    x = np.concatenate([x, genes])
    of_novelty = None
    if s.method == "linear":
        of_novelty = p["novelty_classifier.weight"] @ x + p["novelty_classifier.bias"]
        genes = []
        for k in range(s.n_genes):
            here = [v for t, v in zip(tokens, values, strict=True) if t == p["gene_tokens"][k]]
            is_measured = measured is None or measured[k]
            genes.append(((here[0] if here else 0.0) if is_measured else p["gene_mean"][k]) * p["gene_factor"][0])
        x = np.concatenate([(u - p["feature_mean"])[:STATE_DIM] * p["state_factor"][0], genes])
    if s.method == "knn":
        k = min(s.n_neighbors, s.n_known // s.n_labels)
        near = np.argsort(((p["classifier.known"] - u) ** 2).sum(axis=1))[:k]
        votes = np.bincount(p["classifier.label"][near].astype(int), minlength=s.n_labels)
        logits = np.log((votes + 1 / s.n_labels) / (k + 1))
    elif s.method == "probe":
        h = x
        for number in (0, 2, 4):
            h = p[f"classifier.{number}.weight"] @ h + p[f"classifier.{number}.bias"]
            h = h / (1 + np.exp(-h)) if number < 4 else h
        logits = h
    else:
        logits = p["classifier.weight"] @ x + p["classifier.bias"]
    e = np.exp((logits - logits.max()) / p["temperature"][0])
    share, logits = e / e.sum(), logits if of_novelty is None else of_novelty
    c = logits.argmax()
    cosines = p["centroids"] @ unit(state)
    by_logit = (logits[c] - p["logit_mean"][c]) / p["logit_scale"][c]
    by_cosine = ((cosines - p["cosine_mean"]) / p["cosine_scale"]).max()
    return share, -(by_logit + by_cosine) / 2 - p["novelty_mean"][0]


@pytest.mark.parametrize("method", METHODS)
def test_it_is_the_slow_reference(method):
    head, cells = make_head(method), make_cells()
    probability, novelty = head(*as_tensors(cells))
    for i, cell in enumerate(cells):
        expected = slow(head, cell)
        np.testing.assert_allclose(probability[i], expected[0], atol=1e-5)
        np.testing.assert_allclose(novelty[i], expected[1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(probability.sum(dim=1), 1, rtol=1e-6)


def test_genes_that_are_not_measured_count_as_average():
    head, cells = make_head("linear"), make_cells()
    measured = torch.tensor([True, False, True, True, False, True])
    result = head(*as_tensors(cells), measured)
    for i, cell in enumerate(cells):
        expected = slow(head, cell, measured.numpy())
        np.testing.assert_allclose(result[0][i], expected[0], atol=1e-5)
    x = head.novelty_inputs(head.features(*as_tensors(cells)), head.genes(*as_tensors(cells)[1:]), measured)
    assert not x[:, head.sizes.dim :][:, ~measured].any()
    average = head.gene_mean.expand(9, -1)
    assert not head.novelty_inputs(head.features(*as_tensors(cells)), average)[:, head.sizes.dim :].any()


def test_a_gene_far_off_its_mean_is_clipped():
    head = make_head("linear")
    genes = head.gene_mean + torch.tensor([[1e6], [-1e6]]) * head.gene_scale
    x = head.novelty_inputs(torch.zeros(2, head.sizes.dim), genes)[:, head.sizes.dim :]
    torch.testing.assert_close(x, torch.tensor([[CLIP], [-CLIP]]) * head.gene_weight.expand(2, 6))


@pytest.mark.parametrize("k", [1, 4, 10])
def test_votes_are_those_of_sklearn(k, monkeypatch):
    from scdiva.annotation import annotator as annotation

    draw = np.random.default_rng(0)
    points, label, x = draw.normal(size=(30, 5)), draw.integers(0, 3, 30), draw.normal(size=(40, 5))
    voters = Neighbors(30, 5, 3, k)
    voters.known.copy_(torch.from_numpy(points))
    voters.label.copy_(torch.from_numpy(label))
    shares = KNeighborsClassifier(k).fit(points, label).predict_proba(x)
    expected = (k * shares + 1 / 3) / (k + 1)  # one pseudo-cell votes equally for all labels
    logits = voters(torch.from_numpy(x).float())
    np.testing.assert_allclose(logits.exp(), expected, rtol=1e-5)
    monkeypatch.setattr(annotation, "QUERY_BLOCK", 7)
    torch.testing.assert_close(voters(torch.from_numpy(x).float()), logits)


def test_no_more_neighbours_vote_than_labels_have_cells_on_average():
    assert Neighbors(40, 5, 4, 15).n_neighbors == 10
    assert Neighbors(3, 5, 2, 15).n_neighbors == 1
    assert Neighbors(400, 5, 4, 15).n_neighbors == 15
