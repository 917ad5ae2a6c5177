"""The state head inside the network: what it adds to logits and values, with every anchor."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from scdiva._constants import MASK, N_SPECIAL
from scdiva.models.heads import hidden_gene_logits

ANCHORS = ("learned", "encoder")
LENGTHS = (6, 1, 11)


@pytest.fixture
def packed():
    """Cells of which some genes are masked, some show a gene without its value, and one is masked wholly."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.cat([torch.randperm(30, generator=g)[:n] for n in LENGTHS]) + N_SPECIAL
    values = torch.rand(len(tokens), generator=g) * 3 + 0.1
    true = tokens.clone()
    tokens[[0, 3, 6, 8, 9, 15]] = MASK
    value_mask = tokens == MASK
    value_mask[[2, 10]] = True
    return true, tokens, values, torch.tensor([0, 6, 7, 18], dtype=torch.int32), value_mask


def array(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


@pytest.mark.parametrize("anchor", ANCHORS)
def test_logits_and_values_are_the_formulas(network, packed, anchor):
    model = network(anchor=anchor, state_head=True, state_rank=3)
    true, tokens, values, cu, value_mask = packed
    out = model(tokens, values, cu, value_mask=value_mask)
    state = array(out.cell_state if anchor == "learned" else out.anchor)
    head, n_genes = model.state_head, model.config.n_genes
    logits = array(model.logits(out, tokens == MASK))
    predicted, blind = array(model.values(out, true)), array(model.values(out, tokens))
    stream = array(model.heads.value(out.hidden))[:, 0]
    row = 0
    for cell, (start, stop) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        inside = range(start, stop)
        z, n_visible = state[cell], sum(not value_mask[i] for i in inside)
        w1, b1 = array(head.read[0].weight), array(head.read[0].bias)
        w2, b2 = array(head.read[2].weight), array(head.read[2].bias)
        inner = w1 @ np.append(z / np.sqrt(np.mean(z**2) + np.finfo(np.float32).eps), np.log1p(n_visible)) + b1
        u = np.append(w2 @ (inner / (1 + np.exp(-inner))) + b2, 1.0)
        log_odds, of_gene = array(head.gene) @ u, array(head.value) @ u
        share = sum(int(tokens[i]) == MASK for i in inside) / len(inside)
        for i in inside:
            assert predicted[i] == pytest.approx(stream[i] + of_gene[true[i] - N_SPECIAL], abs=1e-5)
            visible = int(tokens[i]) != MASK  # of a masked gene nobody knows which it is
            assert blind[i] == pytest.approx(predicted[i] if visible else stream[i], abs=1e-5)
            if not visible:
                expected = array(model.gene_weight) @ array(out.hidden)[i] - np.log(share + np.exp(-log_odds))
                np.testing.assert_allclose(logits[row], expected, atol=1e-4)
                row += 1
    assert logits.shape == (row, n_genes)


@pytest.mark.parametrize("anchor", ANCHORS)
def test_a_new_head_changes_neither_stream_nor_state(network, packed, anchor):
    """With zero weights, it adds only the masked fraction, which is the same for all genes."""
    with_head, without = network(anchor=anchor, state_head=True), network(anchor=anchor)
    with_head.load_state_dict(without.state_dict(), strict=False)
    with torch.no_grad():
        with_head.state_head.gene.zero_()
        with_head.state_head.value.zero_()
    true, tokens, values, cu, value_mask = packed
    out, plain = (m(tokens, values, cu, value_mask=value_mask) for m in (with_head, without))
    assert torch.equal(out.hidden, plain.hidden)
    assert torch.equal(out.cell_state, plain.cell_state)
    logits, expected = with_head.logits(out, tokens == MASK), without.logits(plain, tokens == MASK)
    torch.testing.assert_close(logits.log_softmax(1), expected.log_softmax(1))
    torch.testing.assert_close(with_head.values(out, true), without.values(plain, true))


def test_empty_cells_hide_nothing(network):
    model = network(state_head=True)
    cu = torch.tensor([0, 0, 2, 2], dtype=torch.int32)
    out = model(torch.tensor([MASK, 4]), torch.ones(2), cu)
    assert out.hidden_share.tolist() == [0, 0.5, 0]
    assert out.head_hidden.isfinite().all()


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
    logits = hidden_gene_logits(log_odds, torch.tensor([share], dtype=torch.float64))[0].numpy()
    off = logits - np.log(posterior)
    np.testing.assert_allclose(off, off[0], atol=1e-9)


def test_logits_stay_finite_where_nothing_is_hidden():
    logits = hidden_gene_logits(torch.tensor([[-60.0, 0.0, 60.0]]), torch.tensor([0.0]))
    torch.testing.assert_close(logits, torch.tensor([[-60.0, 0.0, 60.0]]))
    logits = hidden_gene_logits(torch.tensor([[-80.0, 0.0, 200.0]]), torch.tensor([1.0]))
    torch.testing.assert_close(logits, torch.nn.functional.logsigmoid(torch.tensor([[-80.0, 0.0, 200.0]])))
