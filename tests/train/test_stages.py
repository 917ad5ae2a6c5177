"""Parts of a model trained alone: the set encoder and the state head."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from scdiva._constants import N_SPECIAL
from scdiva._rng import step_generator
from scdiva.data.batch import from_ragged
from scdiva.data.datamodule import CellDataModule
from scdiva.diffusion import mask_tokens, stratified_times
from scdiva.train import AnchorConfig, AnchorModule, LinearMap, StateHeadConfig, StateHeadModule, fit, fit_linear_map
from scdiva.train.runner import batches_seen
from scdiva.train.stages import PRIOR_CELLS, start_state_head

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
        (some_map(32), r"is \(32, 8\).*table is \(33, 8\).*n_dims=8"),
        (some_map(33, 6), r"is \(33, 6\)"),
        (some_map()._replace(frequency=np.ones(3)), r"frequency must be finite and \(33,\)"),
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


def with_head(tiny, **fields):
    """A model whose state head says something."""
    model = tiny(state_head=True, state_rank=4, **fields)
    with torch.no_grad():
        model.state_head.gene.normal_(generator=rng(3))
        model.state_head.value.normal_(generator=rng(4))
    return model


def slow(model, batch, seen, measured) -> tuple[Tensor, Tensor]:
    """Mean over cells that hide genes of the mean loss of a hidden gene, and of the squared error of its value."""
    identity, value = [], []
    bounds = batch.cu_seqlens.tolist()
    for start, stop in itertools.pairwise(bounds):
        hidden = [i for i in range(start, stop) if seen.masked[i]]
        shown = [i for i in range(start, stop) if not seen.masked[i]]
        if not hidden:
            continue
        cu = torch.tensor([0, stop - start], dtype=torch.int32)
        state = model.encode_anchor(seen.tokens[start:stop], seen.values[start:stop], cu)
        read = model.state_head(state, torch.tensor([len(shown)]))[0]
        log_odds = model.state_head.gene @ read
        share = len(hidden) / (stop - start)
        logits = {g: -torch.log(share + torch.exp(-log_odds[g])) for g in measured}
        free = [logits[g] for g in measured if g not in {int(batch.tokens[i]) - N_SPECIAL for i in shown}]
        total = torch.logsumexp(torch.stack(free), dim=0)
        genes = [int(batch.tokens[i]) - N_SPECIAL for i in hidden]
        identity.append(sum(total - logits[g] for g in genes) / len(genes))
        errors = [model.state_head.value[g] @ read - batch.values[i] for g, i in zip(genes, hidden, strict=True)]
        value.append(sum(error**2 for error in errors) / len(errors))
    return sum(identity) / len(identity), sum(value) / len(value)


@pytest.mark.parametrize("some", [False, True])
def test_the_loss_is_its_formula(tiny, batch, some):
    model = with_head(tiny)
    present = np.unique(batch.tokens.numpy())
    measured = np.unique(np.append(present, [5, 9]))[::-1] if some else None  # in any order
    module = StateHeadModule(model, StateHeadConfig(value_weight=0.3, min_time=0.2), measured)
    loss, parts = module.compute_loss(batch, rng(2))
    g = rng(2)
    times = stratified_times(batch.n_cells, g, 0.2)
    seen = mask_tokens(batch.tokens, batch.values, batch.cu_seqlens, times, g)
    every = range(30) if measured is None else (measured - N_SPECIAL).tolist()
    identity, value = slow(model, batch, seen, every)
    assert float(parts["identity"]) == pytest.approx(float(identity.detach()), rel=1e-5)
    assert float(parts["value"]) == pytest.approx(float(value.detach()), rel=1e-5)
    weights = list(model.state_head.parameters())
    found = torch.autograd.grad(loss, weights)
    expected = torch.autograd.grad(identity + 0.3 * value, weights)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_genes_without_a_column_learn_nothing(tiny, batch):
    model = with_head(tiny)
    present = np.unique(batch.tokens.numpy())
    absent = np.setdiff1d(np.arange(30), present - N_SPECIAL)
    assert len(absent)
    StateHeadModule(model, StateHeadConfig(), present).compute_loss(batch, rng(1))[0].backward()
    assert (model.state_head.gene.grad[absent] == 0).all()
    assert (model.state_head.gene.grad[present - N_SPECIAL] != 0).any(dim=1).all()


def test_only_the_head_is_trained(tiny, stream, tmp_path):
    model = with_head(tiny)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = StateHeadConfig(steps=60, learning_rate=0.03, warmup_steps=2, log_every=1, validate_every=20)
    module = StateHeadModule(model, config)
    batch = next(iter(stream().val_dataloader()))
    first = float(module.compute_loss(batch, rng(1))[0].detach())
    fit(module, stream(), out_dir=tmp_path, accelerator="cpu", progress=False)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if name.startswith("state_head.")}
    assert float(module.compute_loss(batch, rng(1))[0].detach()) < first - 0.5


@pytest.mark.parametrize("fields", [{}, {"state_head": True, "anchor": "learned"}])
def test_a_model_without_head_or_state_is_refused(tiny, fields):
    with pytest.raises(ValueError, match='needs state_head=True and anchor="encoder"'):
        StateHeadModule(tiny(**fields), StateHeadConfig())


def test_biases_start_from_how_often_and_how_much(tiny, batch):
    model = with_head(tiny)
    before = model.state_head.gene.detach().clone()
    start_state_head(model, batch.tokens.numpy(), batch.values.numpy(), batch.n_cells)
    tokens, values = batch.tokens.tolist(), batch.values.tolist()
    of_genes, of_values = model.state_head.gene.detach(), model.state_head.value.detach()
    for gene in range(30):
        own = [v for t, v in zip(tokens, values, strict=True) if t == gene + N_SPECIAL]
        odds = (len(own) + PRIOR_CELLS) / (batch.n_cells - len(own) + PRIOR_CELLS)
        assert float(of_genes[gene, -1]) == pytest.approx(np.log(odds), rel=1e-5)
        mean = np.mean(own) if own else np.mean(values)
        assert float(of_values[gene, -1]) == pytest.approx(mean, rel=1e-5)
    assert torch.equal(of_genes[:, :-1], before[:, :-1])


def test_the_start_is_better_than_none(tiny, batch):
    model = tiny(state_head=True)
    module = StateHeadModule(model, StateHeadConfig())
    before = module.compute_loss(batch, rng(1))[1]
    start_state_head(model, batch.tokens.numpy(), batch.values.numpy(), batch.n_cells)
    after = module.compute_loss(batch, rng(1))[1]
    assert all(float(after[name]) < float(before[name]) for name in ("identity", "value"))


@pytest.mark.parametrize(("field", "value"), [("min_time", 0.0), ("min_time", 1.0), ("value_weight", -1), ("steps", 0)])
def test_values_without_sense_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        StateHeadConfig(**{field: value})
    assert StateHeadConfig(**dataclasses.asdict(StateHeadConfig(steps=7))).steps == 7
