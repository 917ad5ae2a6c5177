"""Sampling: no gene twice, the schedule of the paper, the distribution of the toy, and every option."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from scdiva._constants import MASK, N_SPECIAL, PAD
from scdiva.diffusion import sample
from scdiva.diffusion.sampler import assign_genes, gumbel, likeliest_genes

N_GENES = 40


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Fixed:
    """Denoiser with the same favourite genes everywhere; records what it is shown."""

    def __init__(self, n_genes: int = N_GENES, spread: float = 3.0):
        self.logits = torch.randn(n_genes, generator=rng(0)) * spread
        self.calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, tokens, values, cu_seqlens, value_mask):
        assert value_mask[tokens == MASK].all()
        assert (values[value_mask] == 0).all()
        self.calls.append((tokens.clone(), value_mask.clone()))
        n = int((tokens == MASK).sum())
        # a slight slope, so that positions differ in confidence; the offset falls with it and changes no probability
        slope = torch.linspace(1.0, 1.5, max(n, 1))[:n, None]
        return (self.logits - 20) * slope, torch.arange(tokens.numel()).float() - 2.0


def partly_masked(lengths=(12, 1, 30, 7), share=0.7, seed=1):
    g = rng(seed)
    tokens, cu = [], [0]
    for length in lengths:
        genes = torch.randperm(N_GENES, generator=g)[:length] + N_SPECIAL
        tokens.append(torch.where(torch.rand(length, generator=g) < share, MASK, genes))
        cu.append(cu[-1] + length)
    tokens = torch.cat(tokens)
    return tokens, torch.where(tokens == MASK, 0.0, 1.0), torch.tensor(cu, dtype=torch.int32)


@pytest.mark.parametrize("n_steps", [1, 4, 32])
@pytest.mark.parametrize("remasking", ["low_confidence", "random"])
def test_fills_everything_without_repeating_a_gene(n_steps, remasking):
    tokens, values, cu = partly_masked((12, 1, 30, N_GENES), 1.0 if n_steps == 4 else 0.7)
    before = tokens.clone(), values.clone()
    denoiser = Fixed()
    out, again, redrawn = (
        sample(denoise, tokens, values, cu, n_steps=n_steps, remasking=remasking, generator=rng(seed))
        for denoise, seed in ((denoiser, 2), (Fixed(), 2), (Fixed(), 3))
    )
    assert torch.equal(out.tokens, again.tokens)
    assert torch.equal(out.tokens, redrawn.tokens) == (remasking == "low_confidence")
    visible = tokens != MASK
    assert torch.equal(out.tokens[visible], tokens[visible])
    assert torch.equal(out.values[visible], values[visible])
    for a, b in itertools.pairwise(cu.tolist()):
        cell = out.tokens[a:b]
        assert cell.min() >= N_SPECIAL
        assert cell.unique().numel() == cell.numel()
    assert (out.values >= 0).all()  # the denoiser said -2 for the first positions
    assert torch.equal(out.values[~visible], (torch.arange(tokens.numel()).float() - 2).clamp_min(0)[~visible])
    assert len(denoiser.calls) <= n_steps
    assert torch.equal(tokens, before[0])
    assert torch.equal(values, before[1])


def test_low_confidence_reveals_the_quota():
    n, n_steps = 24, 6
    tokens, cu = torch.full((n,), MASK), torch.tensor([0, n])
    denoiser = Fixed()
    sample(denoiser, tokens, torch.zeros(n), cu, n_steps=n_steps, generator=rng(4))
    # (t_k - t_{k-1}) / t_k of what is hidden leaves t_{k-1} of the whole: 24, 20, 16, ...
    assert [int((state == MASK).sum()) for state, _ in denoiser.calls] == [24, 20, 16, 12, 8, 4]
    first = (denoiser.calls[1][0] != MASK).nonzero().squeeze(1)
    favourites = denoiser.logits.topk(4).indices + N_SPECIAL
    assert set(denoiser.calls[1][0][first].tolist()) == set(favourites.tolist())


def test_random_reveals_the_posterior_share():
    """Each reverse step reveals (t_k - t_{k-1}) / t_k of the hidden tokens: binomial, 5 standard deviations."""
    n_cells, length, n_steps = 3000, 10, 5
    tokens = torch.full((n_cells * length,), MASK)
    cu = torch.arange(0, n_cells * length + 1, length)
    denoiser = Fixed(spread=0.5)
    sample(denoiser, tokens, torch.zeros(tokens.numel()), cu, n_steps=n_steps, remasking="random", generator=rng(5))
    hidden = [int((state == MASK).sum()) for state, _ in denoiser.calls] + [0]
    assert len(hidden) == n_steps + 1
    for k, (now, then) in enumerate(itertools.pairwise(hidden)):
        t, s = (n_steps - k) / n_steps, (n_steps - k - 1) / n_steps
        share = (t - s) / t
        assert abs((now - then) - now * share) <= 5 * math.sqrt(now * share * (1 - share)) + 1e-9


def test_ancestral_samples_follow_the_exact_distribution(toy):
    """24 possible cells, their probabilities enumerated over all orders; chi-square of 4,000 ancestral samples."""
    table = toy.random_table(7)
    exact = np.array([np.mean(np.exp(toy.order_log_probabilities(table, cell))) for cell in toy.CELLS])
    n = 4000
    tokens, values, cu = toy.pack([(0, 1, 2)] * n)
    out = sample(
        toy.table_denoiser(table),
        torch.full_like(tokens, MASK),
        values,
        cu,
        n_steps=300,  # so fine that two positions of a cell are hardly ever revealed together
        remasking="random",
        generator=rng(6),
    )
    cells = [tuple(row) for row in (out.tokens - N_SPECIAL).view(n, 3).tolist()]
    counts = np.array([cells.count(cell) for cell in toy.CELLS])
    assert counts.sum() == n
    chi_square = ((counts - n * exact) ** 2 / (n * exact)).sum()
    assert chi_square < 23 + 5 * math.sqrt(2 * 23)


def test_assignment_is_sampling_without_replacement():
    """Two rows of one softmax: P(a, b) = p_a · p_b / (1 - p_a), row of higher priority first."""
    logits = torch.tensor([1.0, 0.0, -0.5])
    p = torch.softmax(logits.double(), 0)
    n = 20_000
    cells = torch.arange(n).repeat_interleave(2)
    priority = torch.tensor([0.0, 1.0]).repeat(n)
    chosen = assign_genes(logits.repeat(2 * n, 1), cells, priority, rng(8)).view(n, 2)
    for a in range(3):
        for b in range(3):
            count = int(((chosen[:, 1] == a) & (chosen[:, 0] == b)).sum())
            expected = 0.0 if a == b else float(p[a] * p[b] / (1 - p[a]))
            assert abs(count - n * expected) <= 5 * math.sqrt(n * expected * (1 - expected))


def test_gumbel_noise_has_a_float64_tail():
    noise = gumbel(torch.Size([200_000]), rng(10), torch.device("cpu"))
    assert noise.dtype == torch.float64
    assert torch.isfinite(noise).all()
    # mean is Euler's constant, variance π² / 6
    assert abs(float(noise.mean()) - 0.5772156649) < 5 * math.sqrt(math.pi**2 / 6 / 200_000)


def test_allowed_genes_and_their_end():
    tokens = torch.full((6,), MASK)
    cu = torch.tensor([0, 3, 6])
    allowed = torch.zeros(N_GENES, dtype=torch.bool)
    allowed[[4, 9, 17]] = True
    out = sample(Fixed(), tokens, torch.zeros(6), cu, allowed=allowed, generator=rng(0))
    assert sorted(out.tokens[:3].tolist()) == [4 + 3, 9 + 3, 17 + 3]
    assert sorted(out.tokens[3:].tolist()) == [4 + 3, 9 + 3, 17 + 3]
    # a cell that shows two of the three has one left for two positions, whatever the others have
    tokens[3:] = torch.tensor([MASK, MASK, 4 + 3])
    tokens = torch.cat([tokens, torch.tensor([9 + 3])])
    with pytest.raises(ValueError, match="no gene left"):
        sample(Fixed(), tokens, torch.zeros(7), torch.tensor([0, 3, 7]), allowed=allowed, generator=rng(0))


def test_result_is_sorted_by_score_when_asked():
    tokens, values, cu = partly_masked()
    denominator = torch.rand(N_GENES + N_SPECIAL, generator=rng(3)) + 0.1
    out = sample(Fixed(), tokens, values, cu, score_denominator=denominator, generator=rng(2))
    plain = sample(Fixed(), tokens, values, cu, generator=rng(2))
    for a, b in itertools.pairwise(cu.tolist()):
        cell = list(zip(plain.tokens[a:b].tolist(), plain.values[a:b], strict=True))
        cell.sort(key=lambda pair: (-float(pair[1] / denominator[pair[0]]), pair[0]))
        assert out.tokens[a:b].tolist() == [token for token, _ in cell]
        assert out.values[a:b].tolist() == [float(value) for _, value in cell]


# --- the most probable masked genes -----------------------------------------------------------------------------------
@pytest.mark.parametrize("share", [0.3, 0.5, 1.0])
def test_likeliest_genes_against_all_assignments(share):
    """The genes with the largest sums of probabilities, on the places that make the product largest."""
    lengths, n_genes = (4, 1, 3), 6
    logits = torch.randn(sum(lengths), n_genes, generator=rng(3)) * 2
    logits[0, 2] = logits[5, 1] = -torch.inf
    cells = torch.repeat_interleave(torch.tensor([0, 3, 4]), torch.tensor(lengths))
    rows, genes = likeliest_genes(logits, cells, share, torch.arange(len(cells)))
    assert rows.tolist() == sorted(rows.tolist())
    start = 0
    for length in lengths:
        p = torch.softmax(logits[start : start + length].double(), dim=1).numpy()
        number = round(length * share)
        chosen = sorted(np.argsort(-p.sum(axis=0))[:number].tolist())
        in_cell = (rows >= start) & (rows < start + length)
        assert sorted(genes[in_cell].tolist()) == chosen
        best = max(
            (math.prod(p[position, gene] for position, gene in zip(positions, chosen, strict=True)), positions)
            for positions in itertools.permutations(range(length), number)
        )[1]
        assert dict(zip(genes[in_cell].tolist(), (rows[in_cell] - start).tolist(), strict=True)) == dict(
            zip(chosen, best, strict=True)
        )
        start += length


@pytest.mark.parametrize("n_genes", [2, 5])
def test_likeliest_genes_needs_a_gene_for_each_row(n_genes):
    logits = torch.full((3, n_genes), -torch.inf)
    logits[:, :2] = 0.0
    with pytest.raises(ValueError, match="no gene left"):
        likeliest_genes(logits, torch.zeros(3, dtype=torch.int64), 1.0, torch.arange(3))


@pytest.mark.parametrize("remasking", ["low_confidence", "random"])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_one_row_of_logits_for_a_cell_is_as_good_as_one_for_each_of_its_genes(remasking, n_steps):
    tokens, values, cu = partly_masked()
    table, of_genes = (torch.randn(4, N_GENES, generator=rng(number)) for number in (21, 22))
    cells = torch.repeat_interleave(torch.arange(4), cu.diff())

    def draw(*, by_cell):
        def denoiser(tokens, values, cu_seqlens, value_mask):
            return table if by_cell else table[cells[tokens == MASK]], torch.zeros(len(tokens)), of_genes

        denominator = torch.ones(N_GENES + N_SPECIAL)
        return sample(
            denoiser, tokens, values, cu, n_steps=n_steps, remasking=remasking, score_denominator=denominator,
            by_cell=by_cell, generator=rng(2),
        )  # fmt: skip

    one, each = draw(by_cell=True), draw(by_cell=False)
    assert torch.equal(one.tokens, each.tokens)
    assert torch.equal(one.values, each.values)


# --- values that depend on the gene -----------------------------------------------------------------------------------
class OfGenes(Fixed):
    """Adds to the value of a masked position what a table says of cell and gene."""

    table = torch.randn(4, N_GENES, generator=rng(11)) * 5

    def __call__(self, *arguments):
        return *super().__call__(*arguments), self.table


@pytest.mark.parametrize("remasking", ["low_confidence", "random"])
def test_values_of_the_chosen_genes_are_added_by_cell(remasking):
    tokens, values, cu = partly_masked()
    out = sample(OfGenes(), tokens, values, cu, n_steps=3, remasking=remasking, generator=rng(2))
    cells = torch.repeat_interleave(torch.arange(4), cu.diff())
    for i in (tokens == MASK).nonzero().squeeze(1).tolist():
        expected = i - 2.0 + float(OfGenes.table[cells[i], out.tokens[i] - N_SPECIAL])
        assert float(out.values[i]) == pytest.approx(max(expected, 0.0), abs=1e-5)


def test_values_are_drawn_where_asked():
    """Each gene is drawn once, from what is expected of it; what was given is not."""
    tokens, values, cu = partly_masked()
    calls = []

    def draw(expected, cells, genes):
        calls.extend(zip(cells.tolist(), (genes + N_SPECIAL).tolist(), expected.tolist(), strict=True))
        return expected + 100

    out = sample(Fixed(), tokens, values, cu, n_steps=3, draw_values=draw, generator=rng(2))
    plain = sample(Fixed(), tokens, values, cu, n_steps=3, generator=rng(2))
    masked = tokens == MASK
    assert torch.equal(out.values[~masked], values[~masked])
    assert torch.equal(out.values[masked], plain.values[masked] + 100)
    cells = torch.repeat_interleave(torch.arange(4), cu.diff())[masked]
    expected = zip(cells.tolist(), out.tokens[masked].tolist(), plain.values[masked].tolist(), strict=True)
    assert sorted(calls) == sorted(expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_steps": 0}, "n_steps"),
        ({"remasking": "topk"}, "'low_confidence', 'random'"),
        ({"tokens": torch.tensor([3, PAD, MASK])}, "neither PAD nor LAT"),
        ({"cu_seqlens": torch.tensor([0, 2])}, "rise from 0"),
        ({"denoiser": lambda *_: (torch.zeros(2, N_GENES), torch.zeros(3))}, "one row of logits"),
        ({"denoiser": lambda *_: (torch.full((1, N_GENES), torch.nan), torch.zeros(3))}, "40 logits that are NaN"),
        ({"denoiser": lambda *_: (torch.zeros(1, N_GENES), torch.zeros(2))}, "3 values"),
        (
            {"denoiser": lambda *_: (torch.zeros(1, N_GENES), torch.full((3,), torch.inf))},
            "finite at",
        ),
    ],
)
def test_bad_input_is_refused(change, message):
    arguments = {
        "denoiser": Fixed(),
        "tokens": torch.tensor([3, 4, MASK]),
        "values": torch.ones(3),
        "cu_seqlens": torch.tensor([0, 3]),
        "generator": rng(0),
    } | change
    with pytest.raises(ValueError, match=message):
        sample(**arguments)
