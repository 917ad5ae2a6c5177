"""Parts of a model trained alone: the set encoder and the state head."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from mini_stages import (
    AnchorConfig,
    AnchorModule,
    contrast_loss,
)

from scdiva._constants import N_SPECIAL
from scdiva._rng import step_generator
from scdiva.data.batch import from_ragged
from scdiva.data.datamodule import CellDataModule
from scdiva.train import LinearMap, fit, fit_linear_map
from scdiva.train.runner import batches_seen

SIZES = np.array([90, 10])
FULL_TOTAL = 5.0


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_map(n_tokens: int = 33, n_dims: int = 8) -> LinearMap:
    draw = np.random.default_rng(0)
    weight = draw.normal(size=(n_tokens, n_dims)).astype(np.float32)
    weight[:N_SPECIAL] = 0
    frequency = draw.uniform(size=n_tokens)
    frequency[:N_SPECIAL] = 0
    bias = draw.normal(size=n_dims).astype(np.float32)
    return LinearMap(weight, bias, np.full(n_dims, 0.1), frequency / frequency.sum(), FULL_TOTAL)


@pytest.fixture
def settings():
    """Make a configuration for a few steps."""

    def make(**fields) -> AnchorConfig:
        chosen = {
            "steps": 12, "batch_size": 16, "warmup_steps": 2, "learning_rate": 1e-2, "precision": "fp32",
            "log_every": 1, "validate_every": 6, "checkpoint_every": 6,
        } | fields  # fmt: skip
        return AnchorConfig(**chosen)

    return make


@pytest.fixture
def module(tiny, settings):
    """Make a module of a tiny model; its decoder, which starts from zeros, is given weights."""

    def make(**fields) -> AnchorModule:
        made = AnchorModule(tiny(), settings(**fields), some_map(), SIZES)
        torch.nn.init.normal_(made.decoder.linear.weight, generator=rng(1))
        torch.nn.init.normal_(made.decoder.study_bias.weight, generator=rng(2))
        return made

    return make


# --- the loss --------------------------------------------------------------------------------------------------------
def slow_state(anchor, tokens: list[int], values: list[float]) -> np.ndarray:
    """The learned part of one cell, of length 1."""
    p = {name: tensor.detach().numpy() for name, tensor in anchor.named_parameters()}
    x = p["bias"] * min(1.0, sum(values) / FULL_TOTAL) + sum(
        (v * p["table.weight"][t] for t, v in zip(tokens, values, strict=True)), np.zeros(8)
    )
    h = x / max(np.linalg.norm(x), 1e-12) * math.sqrt(8)
    for layer in (0, 2, 4):
        h = p[f"mlp.{layer}.weight"] @ h + p[f"mlp.{layer}.bias"]
        h = h / (1 + np.exp(-h)) if layer < 4 else h
    return h / np.linalg.norm(h)


def slow_view(cells: list[tuple[list[int], list[float]]], config: AnchorConfig, generator: torch.Generator):
    """One view of the cells: draws in the documented order, genes left out one by one."""
    times = (torch.rand(len(cells), generator=generator) * config.max_time).tolist()
    luck = iter(torch.rand(sum(len(tokens) for tokens, _ in cells), generator=generator).tolist())
    panel = torch.ones(33, dtype=torch.bool)
    if float(torch.rand((), generator=generator)) < config.panel_rate:
        share = config.min_panel ** float(torch.rand((), generator=generator))
        panel = torch.rand(33, generator=generator) < share
    view = []
    for (tokens, values), t in zip(cells, times, strict=True):
        kept = [next(luck) >= t and bool(panel[token]) for token in tokens]
        view.append(
            ([x for x, k in zip(tokens, kept, strict=True) if k], [x for x, k in zip(values, kept, strict=True) if k])
        )
    return view


def slow_loss(module: AnchorModule, batch, generator: torch.Generator) -> tuple[float, float, float]:
    c = module.config
    bounds = batch.cu_seqlens.tolist()
    cells = [(batch.tokens[a:b].tolist(), batch.values[a:b].tolist()) for a, b in itertools.pairwise(bounds)]
    study = [0] * len(cells) if batch.study is None else batch.study.tolist()
    one, other = ([slow_state(module.model.anchor, *cell) for cell in slow_view(cells, c, generator)] for _ in range(2))

    per_study = SIZES**-c.study_power
    per_study = per_study * SIZES.sum() / (per_study * SIZES).sum()
    linear, offsets = module.decoder.linear, module.decoder.study_bias.weight.detach().numpy()
    genes = weights = 0.0
    for (tokens, values), z, s in zip(cells, one, study, strict=True):
        logits = linear.weight.detach().numpy() @ (z * math.sqrt(6)) + linear.bias.detach().numpy()
        logits = logits + (offsets[s] if s >= 0 else offsets.mean(0))
        log_p = logits - math.log(np.exp(logits).sum())
        counts = np.expm1(values)
        target = 0.5 * counts / counts.sum() + 0.5 * np.array(values) / np.sum(values)
        w = per_study[s] if s >= 0 else 1.0
        genes -= w * sum(t * log_p[g - N_SPECIAL] for g, t in zip(tokens, target, strict=True))
        weights += w
    contrast = 0.0
    for i in range(len(cells)):
        peers = [j for j in range(len(cells)) if study[j] == study[i]]
        for a, b in ((one, other), (other, one)):
            s = {j: float(a[i] @ b[j]) / c.contrast_temperature for j in peers}
            contrast += math.log(sum(math.exp(x) for x in s.values())) - s[i]
    genes, contrast = genes / weights, contrast / (2 * len(cells))
    return c.genes_weight * genes + c.contrast_weight * contrast, genes, contrast


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"panel_rate": 1.0, "min_panel": 0.4},
        {"panel_rate": 0.0, "study_power": 1.0},
        {"study_power": 0.0, "genes_weight": 0.7, "contrast_weight": 3.0, "contrast_temperature": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("study", [[0, 1, 0, 0, 1, 1], [0, -1, 1, -1, 0, -1]])
def test_loss_is_its_formula(module, batch, fields, study):
    made = module(**fields).double()
    batch = dataclasses.replace(batch, study=torch.tensor(study), values=batch.values.double())
    loss, parts = made.compute_loss(batch, rng(3))
    expected, genes, contrast = slow_loss(made, batch, rng(3))
    assert float(loss.detach()) == pytest.approx(expected, rel=2e-6)  # study weights are kept in float32
    assert float(parts["genes"]) == pytest.approx(genes, rel=2e-6)
    assert float(parts["contrast"]) == pytest.approx(contrast, rel=1e-9)
    assert set(parts) == {"genes", "contrast"}


def test_contrast_is_its_formula_with_negatives_of_one_study():
    one, other = torch.randn(5, 4, generator=rng(6)), torch.randn(5, 4, generator=rng(7))
    study = [0, 1, 0, 0, 2]
    tau, total = 0.2, 0.0
    for i in range(5):
        peers = [j for j in range(5) if study[j] == study[i]]
        for a, b in ((one, other), (other, one)):
            s = [float(torch.cosine_similarity(a[i], b[j], dim=0)) / tau for j in peers]
            own = float(torch.cosine_similarity(a[i], b[i], dim=0)) / tau
            total += math.log(sum(math.exp(x) for x in s)) - own
    assert float(contrast_loss(one, other, torch.tensor(study), tau)) == pytest.approx(total / 10, rel=1e-5)
    # alone in its study, a cell has nothing to be told from
    assert float(contrast_loss(one, other, torch.arange(5), tau)) == pytest.approx(0, abs=1e-6)
    assert float(contrast_loss(one[:0], other[:0], torch.tensor(study)[:0], tau)) == 0
    # without studies all others are negatives
    everything = contrast_loss(one, other, None, tau)
    assert float(everything) == pytest.approx(float(contrast_loss(one, other, torch.zeros(5), tau)))
    assert float(everything) > 0.1


def test_randomness_is_the_generators(module, batch):
    made = module()
    losses = [float(made.compute_loss(batch, step_generator(0, step, "x"))[0].detach()) for step in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1]
    before = torch.get_rng_state()
    made.compute_loss(batch, rng())
    assert torch.equal(before, torch.get_rng_state())


# --- the views -------------------------------------------------------------------------------------------------------
def full_cells(n_cells: int):
    """Cells that have all 30 genes."""
    tokens = np.tile(np.arange(N_SPECIAL, 33), n_cells)
    return from_ragged(np.arange(n_cells + 1) * 30, tokens, np.ones(len(tokens), np.float32))


def kept(view) -> torch.Tensor:
    """Which genes each cell of a view has, bool (n_cells, 30)."""
    table = torch.zeros(view.n_cells, 33, dtype=torch.bool)
    for i, (a, b) in enumerate(itertools.pairwise(view.cu_seqlens.tolist())):
        table[i, view.tokens[a:b]] = True
    return table[:, N_SPECIAL:]


def test_a_view_leaves_out_each_gene_with_its_cells_probability(module):
    """t ~ U(0, T): T/2 of the genes on average, shares spread over cells as t is, genes within a cell independent."""
    n = 4000
    shares = kept(module(panel_rate=0.0, max_time=0.8)._view(full_cells(n), rng())).float()
    left_out = 1 - shares.mean(1)
    assert float(left_out.mean()) == pytest.approx(0.4, abs=0.015)
    # variance of t, and of a share of 30 draws given t: E[t (1 - t)] / 30
    expected = 0.8**2 / 12 + (0.4 - 0.8**2 / 3) / 30
    assert float(left_out.var()) == pytest.approx(expected, rel=0.06)
    assert float((left_out > 0.95).float().mean()) < 0.005
    np.testing.assert_allclose(shares.mean(0), 0.6, atol=0.04)


def test_a_panel_is_one_for_all_cells_and_of_a_log_uniform_share(module):
    made, cells = module(panel_rate=1.0, max_time=1e-9, min_panel=0.05), full_cells(2)
    generator, shares = rng(), []
    for _ in range(2500):
        table = kept(made._view(cells, generator))
        assert torch.equal(table[0], table[1])
        shares.append(float(table[0].float().mean()))
    # mean of m^u with u ~ U(0, 1)
    assert np.mean(shares) == pytest.approx((1 - 0.05) / -math.log(0.05), abs=0.02)
    assert np.median(shares) == pytest.approx(math.sqrt(0.05), abs=0.03)


def test_panels_come_at_their_rate(module):
    made, cells, generator = module(panel_rate=0.3, max_time=1e-9, min_panel=1e-9), full_cells(1), rng()
    # so small a panel holds all genes in less than one case of a hundred
    whole = [int(made._view(cells, generator).tokens.numel()) == 30 for _ in range(1500)]
    assert np.mean(whole) == pytest.approx(0.7, abs=0.04)


def test_a_cell_that_loses_all_its_genes_is_legal(module, batch):
    made = module(panel_rate=1.0, min_panel=1e-6, max_time=1.0)
    for seed in range(20):
        loss, _ = made.compute_loss(batch, rng(seed))
        loss.backward()
        assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in made.parameters() if p.requires_grad)


# --- what is trained -------------------------------------------------------------------------------------------------
def test_the_linear_part_is_the_map(module):
    anchor, given = module().model.anchor, some_map()
    np.testing.assert_array_equal(anchor.table.weight.detach(), given.weight)
    np.testing.assert_array_equal(anchor.bias.detach(), given.bias)
    assert anchor.full_total.item() == given.full_total


def test_the_learned_part_and_the_decoder_get_gradients_and_nothing_else(module, batch):
    made = module()
    loss, _ = made.compute_loss(batch, rng())
    loss.backward()
    reached = {name for name, p in made.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert reached == {name for name, p in made.named_parameters() if p.requires_grad}
    assert reached == {
        name for name, _ in made.named_parameters() if name.startswith(("model.anchor.mlp.", "decoder."))
    }


def test_other_anchors_are_refused(tiny, settings):
    with pytest.raises(ValueError, match="anchor='learned'; only anchor=\"encoder\" is trained alone"):
        AnchorModule(tiny(anchor="learned"), settings(), some_map(), SIZES)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (some_map(33, 6), r"is \(33, 6\).*table is \(33, 8\).*n_dims=8"),
    ],
)
def test_a_map_that_does_not_fit_is_refused_and_changes_nothing(tiny, settings, wrong, said):
    model, untouched = tiny(), tiny()
    with pytest.raises(ValueError, match=said):
        AnchorModule(model, settings(), wrong, SIZES)
    assert all(p.requires_grad for p in model.parameters())
    for one, other in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(one, other)


# --- training on a packed corpus -------------------------------------------------------------------------------------
@pytest.fixture
def fresh(tiny, settings, corpus, vocabulary):
    """Make a module for the corpus; the same weights each time."""

    def make(**fields) -> AnchorModule:
        model = tiny(n_genes=vocabulary.n_genes, max_length=40)
        return AnchorModule(model, settings(**fields), fit_linear_map(corpus, 8), np.bincount(corpus.study))

    return make


@pytest.fixture
def run(fresh, corpus, vocabulary):
    """Train from new objects; everything that a new process would have."""

    def start(out, *, fields=None, **options) -> AnchorModule:
        made = fresh(**(fields or {}))
        data = CellDataModule(
            [corpus.path], vocabulary=vocabulary, batch_size=16, context=40, seed=0, block_rows=8, n_blocks=8
        )
        fit(made, data, out_dir=out, accelerator="cpu", progress=False, **options)
        data.close()
        return made

    return start


def test_training_lowers_both_losses_and_changes_the_learned_part_alone(run, fresh, corpus, tmp_path):
    """All cells, in the same views before and after."""
    fields = {"steps": 240, "max_time": 0.5}
    before, after = fresh(**fields), run(tmp_path, fields=fields)
    cells = from_ragged(*corpus.read(0, corpus.n_obs), corpus.study.astype(np.int64))
    with torch.no_grad():
        (one, was), (other, now) = (made.compute_loss(cells, rng()) for made in (before, after))
    assert other < one - 0.1
    assert now["genes"] < was["genes"] - 0.05
    assert now["contrast"] < was["contrast"] - 0.1
    untouched = before.state_dict()
    for name, tensor in after.state_dict().items():
        assert torch.equal(tensor, untouched[name]) != name.startswith(("model.anchor.mlp.", "decoder.")), name


def test_a_resumed_run_is_the_run(run, tmp_path):
    straight = run(tmp_path / "straight")
    half = run(tmp_path / "halves", max_steps=7)
    assert batches_seen(tmp_path / "halves" / "last.ckpt") == 7
    torch.rand(3)  # global state must not matter
    resumed = run(tmp_path / "halves", resume_from=tmp_path / "halves")
    assert resumed.batches_seen == 12
    for (name, one), two, early in zip(
        straight.named_parameters(), resumed.parameters(), half.parameters(), strict=True
    ):
        assert (one - two).abs().max() <= 1e-6, name
        assert torch.equal(one, early) != one.requires_grad, name


def test_a_checkpoint_of_another_task_is_refused(run, tmp_path, tiny, config, stream):
    from scdiva.train import PretrainingModule

    fit(PretrainingModule(tiny(), config(steps=1)), stream(), out_dir=tmp_path, accelerator="cpu", progress=False)
    with pytest.raises(ValueError, match="holds PretrainingModule, not AnchorModule"):
        run(tmp_path, resume_from=tmp_path)
