"""A model as a denoiser gives its own logits and values, and places; and counts drawn for expected values."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from scdiva._constants import MASK, N_SPECIAL
from scdiva.diffusion import cell_of_token, rank_log_prior
from scdiva.generation.sampling import denoiser_of, draw_counts, total_count
from scdiva.models.heads import hidden_gene_logits

LENGTHS = (6, 1, 11)
CU = torch.tensor([0, 6, 7, 18], dtype=torch.int32)
GENES = torch.tensor([5, 3, 30, 12, 9])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


DENOMINATOR = torch.rand(33, generator=seeded(8)) + 0.3


@pytest.fixture
def packed():
    """Ranked cells of which some genes are masked and some show a gene without its value."""
    g, tokens, values = seeded(0), [], []
    for n in LENGTHS:
        genes = torch.randperm(30, generator=g)[:n] + N_SPECIAL
        gene_values = torch.log1p(torch.randint(1, 5, (n,), generator=g).float())
        order = (gene_values / DENOMINATOR[genes]).argsort(descending=True)
        tokens.append(genes[order])
        values.append(gene_values[order])
    tokens, values = torch.cat(tokens), torch.cat(values)
    tokens[[0, 3, 8, 9, 15]] = MASK
    value_mask = tokens == MASK
    value_mask[[2, 10]] = True
    return tokens, values.masked_fill(value_mask, 0.0), CU, value_mask


def of_model(model, packed):
    """What the model says of masked positions, of shown genes whose values are hidden, and of genes by cell."""
    tokens, values, cu, value_mask = packed
    out = model(tokens, values, cu, value_mask=value_mask)
    return model.logits(out, tokens == MASK), model.values(out, tokens), out


@torch.no_grad()
@pytest.mark.parametrize("anchor", ["learned", "encoder"])
def test_without_a_state_head_it_is_the_model(network, packed, anchor):
    model = network(anchor=anchor)
    logits, values = denoiser_of(model)(*packed)
    expected_logits, expected_values, _ = of_model(model, packed)
    torch.testing.assert_close(logits, expected_logits)
    torch.testing.assert_close(values, expected_values)


@torch.no_grad()
@pytest.mark.parametrize("anchor", ["learned", "encoder"])
@pytest.mark.parametrize("with_ranks", [False, True])
def test_with_a_state_head_it_is_the_model_and_places(network, packed, anchor, with_ranks):
    model = network(anchor=anchor, state_head=True)
    tokens, values, cu, value_mask = packed
    logits, predicted, of_genes = denoiser_of(model, denominator=DENOMINATOR if with_ranks else None)(*packed)
    expected, expected_values, out = of_model(model, packed)
    if with_ranks:
        expected = expected + rank_log_prior(
            *(tokens, values, tokens == MASK, ~value_mask, cu), model.state_head.values(out.head_hidden), DENOMINATOR
        )
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(of_genes, model.state_head.values(out.head_hidden))
    hidden = value_mask | (tokens == MASK)  # elsewhere nothing is asked
    torch.testing.assert_close(predicted[hidden], expected_values[hidden])
    # what is added to a masked position once its gene is chosen is what the model says when given the gene
    chosen = torch.full_like(tokens, 7)
    masked = tokens == MASK
    cells = cell_of_token(cu, len(tokens))
    torch.testing.assert_close(
        (predicted + of_genes[cells, chosen - N_SPECIAL])[masked], model.values(out, chosen)[masked]
    )


@torch.no_grad()
@pytest.mark.parametrize(("state_head", "stream"), [(False, True), (True, True), (True, False)])
def test_some_genes_only(network, packed, state_head, stream):
    model = network(state_head=state_head)
    options = {"stream": stream, "denominator": DENOMINATOR if state_head else None}
    every = denoiser_of(model, **options)(*packed)
    visible = packed[0][packed[0] != MASK]
    genes = torch.cat([GENES, visible]).unique()  # values of shown genes are asked for too
    numbers = (torch.searchsorted(genes, packed[0]) + N_SPECIAL).masked_fill(packed[0] == MASK, MASK)
    of_genes = denoiser_of(model, genes=genes, **options)(numbers, *packed[1:])
    columns = genes - N_SPECIAL
    torch.testing.assert_close(of_genes[0], every[0][:, columns])
    torch.testing.assert_close(of_genes[1], every[1])
    if state_head:
        torch.testing.assert_close(of_genes[2], every[2][:, columns])


@torch.no_grad()
def test_without_the_stream_the_state_alone_speaks(network, packed):
    model = network(state_head=True)
    tokens, value_mask = packed[0], packed[3]
    _, _, out = of_model(model, packed)
    model.blocks = None  # would fail if it were run
    logits, predicted, of_genes = denoiser_of(model, stream=False)(*packed)
    of_state = hidden_gene_logits(model.state_head.log_odds(out.head_hidden), out.hidden_share)
    torch.testing.assert_close(logits, of_state)  # a row for each cell: all of its masked genes are predicted alike
    torch.testing.assert_close(of_genes, model.state_head.values(out.head_hidden))
    without_value = value_mask & (tokens != MASK)
    torch.testing.assert_close(
        predicted[without_value], of_genes[out.cells[without_value], tokens[without_value] - N_SPECIAL]
    )


@pytest.mark.parametrize("options", [{"denominator": DENOMINATOR}, {"stream": False}])
def test_what_needs_a_state_head_says_so(network, options):
    with pytest.raises(ValueError, match=r"no state head.*state_head=True"):
        denoiser_of(network(), **options)


def test_a_learned_anchor_needs_the_stream(network):
    with pytest.raises(ValueError, match="transformer: pass stream=True"):
        denoiser_of(network(anchor="learned", state_head=True), stream=False)


N = 20_000


@pytest.mark.parametrize(
    ("depth", "mean", "spread"),
    [(1e4, 1.5, 0.5), (1e4, 2.5, 0.6), (1e4, 1.1, 0.4), (2e3, 2.4, 0.5), (2e3, 3.5, 0.3), (5e4, 1.0, 0.4)],
)
def test_means_and_spreads_are_met(depth, mean, spread):
    counts = draw_counts(np.full(N, mean), np.full(N, spread), depth, np.random.default_rng(0))
    values = np.log1p(1e4 * counts / depth)
    assert values.mean() == pytest.approx(mean, abs=0.05)
    assert values.std() == pytest.approx(spread, abs=0.1)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(-3, 9), st.floats(0, 4)), max_size=30),
    st.floats(1e2, 1e6),
    st.integers(0, 99),
)
def test_every_count_is_one_or_more(pairs, depth, seed):
    expected, spread = np.array(pairs).reshape(-1, 2).T
    counts = draw_counts(expected, spread, depth, np.random.default_rng(seed))
    assert counts.dtype == np.int64
    assert counts.shape == expected.shape
    assert (counts >= 1).all()


def test_draws_are_a_function_of_the_source():
    expected = np.linspace(0.5, 4, 200)
    one, again, redrawn = (
        draw_counts(expected, np.full(200, 0.5), 5e3, np.random.default_rng(seed)) for seed in (1, 1, 2)
    )
    assert (one == again).all()
    assert (one != redrawn).any()


@given(st.lists(st.integers(1, 500), min_size=1, max_size=50), st.integers(50, 100_000))
def test_depth_is_that_of_which_the_least_value_is_one_count(counts, depth):
    values = np.log1p(1e4 * np.array([1, *counts]) / depth)
    assert total_count(values) == pytest.approx(depth)
