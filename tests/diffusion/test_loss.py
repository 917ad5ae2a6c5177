"""The chunked loss against full logits, and the dual loss against its formula written out cell by cell."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from scdiva._constants import N_SPECIAL
from scdiva.diffusion import Corrupted, dual_loss, log_likelihood, loss_weights, mask_tokens, masked_cross_entropy
from scdiva.diffusion.loss import ALIGNED, gene_logits

aten = torch.ops.aten


def head(n: int = 37, n_genes: int = 23, dim: int = 8, dtype=torch.float64, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, dim, generator=g, dtype=dtype, requires_grad=True)
    weight = torch.randn(n_genes, dim, generator=g, dtype=dtype, requires_grad=True)
    targets = torch.randint(n_genes, (n,), generator=g)
    row_weight = torch.rand(n, generator=g, dtype=dtype) + 0.1
    return hidden, weight, targets, row_weight


@pytest.mark.parametrize("chunk", [1, 8, 36, 37, 1000])
@pytest.mark.parametrize("scale", [1.0, -3.7, 0.0, 2.0**24])
@pytest.mark.parametrize("weighted", [True, False])
def test_equals_full_logits_in_value_and_gradients(chunk, scale, weighted):
    hidden, weight, targets, row_weight = head()
    if not weighted:
        row_weight = None
    loss, nll = masked_cross_entropy(hidden, weight, targets, row_weight, chunk=chunk)
    grads = torch.autograd.grad(scale * loss, (hidden, weight))

    full = F.cross_entropy(hidden @ weight.T, targets, reduction="none")
    expected = (full if row_weight is None else full * row_weight).sum()
    expected_grads = torch.autograd.grad(scale * expected, (hidden, weight))
    assert nll.dtype == torch.float64
    assert not nll.requires_grad
    torch.testing.assert_close(nll, full.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    for got, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_rows_of_zeros_below_the_head_change_nothing(monkeypatch):
    """As on CUDA, where a row of logits is a multiple of 64; here of 5, and shapes are those of the weights."""
    hidden, weight, targets, row_weight = head()
    expected = [gene_logits(hidden, weight), *masked_cross_entropy(hidden, weight, targets, row_weight, chunk=8)]
    expected += torch.autograd.grad(expected[0].square().sum() + expected[1], (hidden, weight))
    monkeypatch.setitem(ALIGNED, "cpu", 5)
    actual = [gene_logits(hidden, weight), *masked_cross_entropy(hidden, weight, targets, row_weight, chunk=8)]
    assert actual[0].stride() == (25, 1)
    actual += torch.autograd.grad(actual[0].square().sum() + actual[1], (hidden, weight))
    for computed, reference in zip(actual, expected, strict=True):
        assert computed.shape == reference.shape
        torch.testing.assert_close(computed, reference, rtol=1e-12, atol=1e-12)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.largest = 0
        self.matmuls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.matmuls += func in (aten.mm.default, aten.mm.out, aten.addmm_.default)
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def test_never_holds_rows_by_vocabulary():
    n, n_genes, dim, chunk = 640, 900, 4, 32
    hidden, weight, targets, row_weight = head(n, n_genes, dim)
    with LargestTensor() as tracker:
        loss, _ = masked_cross_entropy(hidden, weight, targets, row_weight, chunk=chunk)
        loss.backward()
    assert tracker.largest <= max(chunk * n_genes, n * dim, n_genes * dim)
    assert tracker.matmuls == 3 * n // chunk  # logits and the two gradients: no logit is computed twice
    with LargestTensor() as tracker, torch.no_grad():
        masked_cross_entropy(hidden, weight, targets, row_weight, chunk=chunk)
    assert tracker.matmuls == n // chunk  # and without gradients, only the logits


def test_no_masked_position_is_a_zero_loss_with_zero_gradients():
    hidden, weight, targets, _ = head(n=0)
    loss, nll = masked_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert float(loss.detach()) == 0
    assert nll.shape == (0,)
    assert not weight.grad.any()


def distance(got, want):
    """Of two tensors, relative to the length of the second."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def wide_head():
    """Loss weights as they are, of about 1e-4, and a vocabulary wide enough for small probabilities."""
    hidden, weight, targets, row_weight = head(n=700, n_genes=3000, dim=64, dtype=torch.float32)
    return hidden, (weight.detach() * 0.1).requires_grad_(), targets, row_weight / 5000


def full_loss(hidden, weight, targets, row_weight):
    return (F.cross_entropy((hidden @ weight.T).to(row_weight.dtype), targets, reduction="none") * row_weight).sum()


def value_and_gradients(function, hidden, weight, targets, row_weight, scale=1.0, **options):
    loss = function(hidden, weight, targets, row_weight, **options)
    loss = loss[0] if isinstance(loss, tuple) else loss
    return [loss.detach(), *(g / scale for g in torch.autograd.grad(loss * scale, (hidden, weight)))]


def exact(hidden, weight, targets, row_weight):
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    return value_and_gradients(full_loss, *wide, targets, row_weight.double())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-3), (torch.float16, 6e-4)])
def test_autocast_is_no_further_from_exact_than_full_logits_are(dtype, tolerance):
    arguments = wide_head()
    reference = exact(*arguments)
    errors = {}
    for function in (masked_cross_entropy, full_loss):
        with torch.autocast("cpu", dtype=dtype):
            got = value_and_gradients(function, *arguments, scale=2.0**14)
        assert [x.dtype for x in got] == [torch.float32] * 3
        errors[function] = [distance(a, b) for a, b in zip(got, reference, strict=True)]
    assert max(errors[masked_cross_entropy]) < tolerance
    assert all(a <= 1.2 * b + 1e-7 for a, b in zip(*errors.values(), strict=True))
    assert errors[masked_cross_entropy][1] > 1e-5  # the products did run in the small dtype


def test_no_second_derivative_is_refused_not_dropped():
    """Without a refusal, a penalty on the gradient would be a constant to autograd, and train nothing."""
    hidden, weight, targets, row_weight = head()
    loss, _ = masked_cross_entropy(hidden, weight, targets, row_weight)
    with pytest.raises(RuntimeError, match=r"second derivative: .*create_graph=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss * hidden.sum(), weight, create_graph=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.full((37,), 23)}, "37 targets .*23 genes"),
        ({"targets": torch.full((37,), -1)}, "are not genes"),
        ({"targets": torch.zeros(36, dtype=torch.int64)}, "one entry for each"),
        ({"row_weight": torch.ones(3)}, "one entry for each"),
        ({"row_weight": torch.ones(37, requires_grad=True)}, r"pass row_weight.detach\(\)"),
    ],
)
def test_bad_input_is_refused(change, message):
    hidden, weight, targets, row_weight = head()
    arguments = {"hidden": hidden, "weight": weight, "targets": targets, "row_weight": row_weight, "chunk": 4} | change
    with pytest.raises(ValueError, match=message):
        masked_cross_entropy(**arguments)


def corrupted_batch(value_mask_rate: float):
    lengths = [5, 1, 9, 4]
    g = torch.Generator().manual_seed(4)
    total = sum(lengths)
    tokens = torch.randint(N_SPECIAL, N_SPECIAL + 23, (total,), generator=g)
    values = torch.rand(total, generator=g, dtype=torch.float64) * 4
    cu = torch.tensor([0, 5, 6, 15, 19], dtype=torch.int32)
    times = torch.tensor([0.5, 0.001, 0.8, 0.6])  # the cell of one gene ends up with nothing masked
    return tokens, values, cu, mask_tokens(tokens, values, cu, times, g, value_mask_rate=value_mask_rate)


def test_nothing_masked_is_zero_not_nan():
    tokens, values, cu, _ = corrupted_batch(0.0)
    nothing = torch.zeros_like(tokens, dtype=torch.bool)
    hidden, weight, _, _ = head(n=tokens.numel())
    unmasked = Corrupted(tokens, values, nothing, nothing)
    loss, parts = dual_loss(hidden, weight, values + 1, tokens, values, unmasked, cu)
    assert float(loss.detach()) == 0
    assert all(float(part) == 0 for part in parts.values())


def test_its_expectation_is_the_likelihood_bound(toy):
    """E_t of the identity term, times -L, is what log_likelihood estimates: the same cell through both."""
    table = toy.random_table(1)
    cell, n = (2, 0, 3), 40_000
    tokens, values, cu = toy.pack([cell] * n)
    g = torch.Generator().manual_seed(6)
    times = torch.rand(n, generator=g)
    corrupted = mask_tokens(tokens, values, cu, times, g)
    logits, _ = toy.table_denoiser(table)(corrupted.tokens, corrupted.values, cu, corrupted.masked)
    nll = F.cross_entropy(logits, tokens[corrupted.masked] - N_SPECIAL, reduction="none")
    weights = loss_weights(corrupted.masked, cu)
    n_used = int(corrupted.masked.view(n, 3).any(1).sum())
    per_position = torch.zeros(tokens.numel(), dtype=torch.float64)
    per_position[corrupted.masked] = nll * weights[corrupted.masked] * n_used
    per_cell = per_position.view(n, 3).sum(1)
    loss = float(per_cell.sum() / n_used)
    bound, _ = log_likelihood(toy.table_denoiser(table), tokens, values, cu, 4, exclude_shown=False, generator=g)
    # bound by the observed spread of each
    error = float((per_cell.var() / n_used + bound.var() / n / 9).sqrt())
    assert loss == pytest.approx(-float(bound.mean()) / 3, abs=5 * error)
    assert error < 0.05


LENGTHS, N_GENES, DIM = (7, 1, 12, 5), 20, 6


@pytest.fixture
def case():
    """Arguments of the loss for a small batch, and which masked positions are scored."""
    g = torch.Generator().manual_seed(0)
    cu = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    tokens = torch.cat([torch.randperm(N_GENES, generator=g)[:n] for n in LENGTHS]) + N_SPECIAL
    values = torch.rand(len(tokens), generator=g) * 3
    times = torch.tensor([0.6, 0.9, 0.7, 0.5])
    corrupted = mask_tokens(tokens, values, cu, times, g, value_mask_rate=0.3)
    hidden = torch.randn(len(tokens), DIM, generator=g, requires_grad=True)
    weight = torch.randn(N_GENES, DIM, generator=g, requires_grad=True)
    predicted = torch.rand(len(tokens), generator=g, requires_grad=True)
    scored = torch.rand(len(tokens), generator=g) < 0.6
    return (hidden, weight, predicted, tokens, values, corrupted, cu), scored


def slow_dual_loss(arguments, scored, logits):
    """Mean over cells of the mean cross-entropy of their scored positions; of the values all that are hidden."""
    hidden, weight, predicted, tokens, values, corrupted, cu = arguments
    identity, value, row = [], [], 0
    for a, b in itertools.pairwise(cu.tolist()):
        terms, errors = [], []
        for i in range(a, b):
            if corrupted.masked[i] and scored[i]:
                terms.append(
                    F.cross_entropy(weight @ hidden[i] if logits is None else logits[row], tokens[i] - N_SPECIAL)
                )
                row += 1
            if corrupted.value_mask[i]:
                errors.append((predicted[i] - values[i]) ** 2)
        identity += [sum(terms) / len(terms)] if terms else []
        value += [sum(errors) / len(errors)] if errors else []
    return torch.stack(identity).mean(), torch.stack(value).mean()


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("with_logits", [True, False])
def test_loss_and_gradients_are_those_of_plain_cross_entropy(case, partial, with_logits):
    arguments, scored = case
    corrupted = arguments[5]
    targets = corrupted.masked & scored if partial else corrupted.masked
    logits = None
    if with_logits:
        logits = torch.randn(int(targets.sum()), N_GENES, generator=torch.Generator().manual_seed(4)).requires_grad_()
    loss, parts = dual_loss(*arguments, value_weight=2.0, scored=scored if partial else None, logits=logits)
    identity, value = slow_dual_loss(arguments, targets, logits)
    assert float(parts["identity"]) == pytest.approx(float(identity.detach()), rel=1e-5)
    assert float(parts["value"]) == pytest.approx(float(value.detach()), rel=1e-5)
    assert int(parts["n_masked"]) == int(targets.sum())
    inputs = [arguments[2], logits] if with_logits else list(arguments[:3])
    actual = torch.autograd.grad(loss, inputs)
    expected = torch.autograd.grad(identity + 2.0 * value, inputs)
    for computed, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(computed, reference, rtol=1e-4, atol=1e-6)


def test_scoring_some_is_unbiased(case):
    """Over many draws the scored positions give the loss of all."""
    arguments, _ = case
    with torch.no_grad():
        full_loss = float(dual_loss(*arguments)[1]["identity"])
        masked, cu = arguments[5].masked, arguments[6]
        draws = []
        for seed in range(400):
            # one of each cell's masked positions: the strictest draw
            scored = torch.zeros_like(masked)
            g = torch.Generator().manual_seed(seed)
            for a, b in itertools.pairwise(cu.tolist()):
                positions = masked[a:b].nonzero().squeeze(1)
                if len(positions):
                    scored[a + positions[torch.randint(len(positions), (1,), generator=g)]] = True
            draws.append(float(dual_loss(*arguments, scored=scored)[1]["identity"]))
    error = torch.tensor(draws)
    assert abs(float(error.mean()) - full_loss) < 5 * float(error.std()) / len(draws) ** 0.5
