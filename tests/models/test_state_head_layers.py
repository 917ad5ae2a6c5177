"""The state head against its formulas, and its logits against the posterior of the process."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from scdiva.models.heads import StateHead, hidden_gene_logits

STATE, RANK, GENES = 5, 3, 7


@pytest.fixture
def head() -> StateHead:
    generator = torch.Generator().manual_seed(0)
    made = StateHead(STATE, RANK, GENES).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def array(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def test_log_odds_and_values_are_the_formulas(head):
    state = torch.randn(4, STATE, generator=torch.Generator().manual_seed(1)).double()
    n_visible = torch.tensor([0, 1, 12, 300])
    read = head(state, n_visible)
    w1, b1, w2, b2 = (array(head.read[i].__getattr__(name)) for i in (0, 2) for name in ("weight", "bias"))
    for i, z in enumerate(array(state)):
        inner = w1 @ np.append(z / np.sqrt(np.mean(z**2)), np.log(1 + int(n_visible[i]))) + b1
        u = w2 @ (inner / (1 + np.exp(-inner))) + b2
        np.testing.assert_allclose(array(read)[i], [*u, 1.0], rtol=1e-6)
        for gene in range(GENES):
            d, e = array(head.gene)[gene], array(head.value)[gene]
            assert array(head.log_odds(read))[i, gene] == pytest.approx(u @ d[:RANK] + d[RANK], rel=1e-6)
            assert array(head.values(read))[i, gene] == pytest.approx(u @ e[:RANK] + e[RANK], rel=1e-6)


@given(
    st.lists(st.floats(0.001, 0.999), min_size=2, max_size=6),
    st.floats(0.01, 1.0),
)
def test_logits_of_a_hidden_gene_are_its_posterior(probability, share):
    """By Bayes: a gene that is not shown is expressed and hidden, `t p`, or not expressed, `1 - p`.

    The gene at one of the hidden places is one of those that are expressed and hidden. Logits are its probability up to
    a constant of the cell.
    """
    p = np.array(probability)
    posterior = []
    for one in p:
        outcomes = {(1, 1): one * share, (1, 0): one * (1 - share), (0, 0): 1 - one}  # (expressed, hidden)
        not_shown = outcomes[1, 1] + outcomes[0, 0]
        posterior.append(outcomes[1, 1] / not_shown)
    log_odds = torch.from_numpy(np.log(p) - np.log1p(-p))[None]
    found = array(hidden_gene_logits(log_odds, torch.tensor([share], dtype=torch.float64)))[0]
    off = found - np.log(posterior)
    np.testing.assert_allclose(off, off[0], atol=1e-9)


def test_logits_stay_finite_where_nothing_is_hidden():
    logits = hidden_gene_logits(torch.tensor([[-60.0, 0.0, 60.0]]), torch.tensor([0.0]))
    torch.testing.assert_close(logits, torch.tensor([[-60.0, 0.0, 60.0]]))
    logits = hidden_gene_logits(torch.tensor([[-80.0, 0.0, 200.0]]), torch.tensor([1.0]))
    torch.testing.assert_close(logits, torch.nn.functional.logsigmoid(torch.tensor([[-80.0, 0.0, 200.0]])))
