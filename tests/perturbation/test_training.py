"""A network is trained on what the base leaves, kept where it helps, and never shown what is held out."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from scdiva.data.batch import from_ragged
from scdiva.metrics.perturbation import WMSE_ALPHA
from scdiva.models import PerturbationModel
from scdiva.perturbation import fit as F
from scdiva.perturbation import training as P
from scdiva.perturbation.fit import METHODS, predict_left_out
from scdiva.perturbation.screen import KINDS, Examples, Similarities, similarities_of
from scdiva.train import loop
from scdiva.train.adaptation import AdaptationCells
from scdiva.train.config import PerturbationConfig
from scdiva.train.loop import Limits

STRATEGIES = ("head", "lora", "full")
SCREEN = ("A", "B", "C", "D", "E", "A+B", "B+C", "C+D", "A@1", "B@1", "A+B@1")


@pytest.fixture(autouse=True)
def _few_conditions_suffice(monkeypatch):
    monkeypatch.setattr(P, "LEAST", 4)


def config(**fields) -> PerturbationConfig:
    return PerturbationConfig(**{"hidden": 16, "rank": 4, "learning_rate": 3e-3, "warmup_steps": 5} | fields)


def control_cells(n=40, n_groups=1, seed=0) -> AdaptationCells:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(3, 20, n)
    tokens = np.concatenate([draw.permutation(30)[:length] + 3 for length in lengths])
    values = draw.gamma(2, 1, len(tokens)).astype(np.float32)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    return AdaptationCells(indptr, tokens, values, np.arange(n) * n_groups // n, np.arange(30) + 3, n_groups)


@pytest.fixture(scope="module")
def model(network):
    """A model whose token embeddings tell two kinds of genes apart."""
    made = network()
    with torch.no_grad():
        for number, token in enumerate(made.vocabulary.match(list(made.vocabulary.symbols[:8])).tokens):
            made.embedding.gene.weight[int(token), 0] = 1.0 if number % 2 else -1.0
    return made


@pytest.fixture(scope="module")
def pairs(measured, model):
    """Single genes and pairs. Effects add up, but two genes of one kind raise a program, and two of both lower it."""
    genes = [str(name) for name in model.vocabulary.symbols[:8]]
    draw = np.random.default_rng(0)
    effect, program = dict(zip(genes, draw.normal(size=(8, 12)), strict=True)), 3 * draw.normal(size=12)
    labels = [*genes, *("+".join(pair) for pair in itertools.combinations(genes, 2))]
    screen = measured(tuple(labels))
    rows = []
    for parts in screen.conditions.parts:
        change = sum(effect[gene] for gene in parts)
        if len(parts) == 2:
            change = change + program * (1 if (genes.index(parts[0]) - genes.index(parts[1])) % 2 == 0 else -1)
        rows.append(change)
    return replace(screen, delta=np.array(rows, dtype=np.float32))


def fit(model, screen, controls=None, strategy="head", residual="auto", max_epochs=8, **fields):
    controls = control_cells(n_groups=len(screen.groups)) if controls is None else controls
    limits = Limits(max_epochs, 4, np.inf)
    return network_of(model, screen, controls, strategy, residual, config(**fields), limits)


def network_of(model, screen, controls, strategy, residual, settings, limits) -> SimpleNamespace:
    """What becomes of a screen, as `fit` would have it with other sizes of the network."""
    left_out = list(F.predict_left_out(screen, similarities_of(model, screen), settings.seed))
    base = dict.fromkeys((*KINDS, "measured"), residual or "no_change")
    base = F.best_base(F.scored(screen, left_out)) if residual == "auto" else base
    examples = F.left_over(screen, left_out, base)
    found = P.train_network(
        model, screen, controls, examples, strategy, settings, limits, alone=residual is None, progress=False
    )
    return SimpleNamespace(**dict(zip(("model", "head", "notes"), found, strict=True)), base=base)


def fitted_by(model, screen, **fields) -> PerturbationModel:
    """`fit` itself."""
    opened = PerturbationModel(model, screen, {}, None, "p", "control", notes={"seconds": 0.0})
    given = {
        "residual": "auto", "loss": "wmse", "strategy": "none", "max_epochs": 1, "patience": 1, "minutes": None,
        "batch_size": 8, "learning_rate": 1e-3,
    }  # fmt: skip
    return F.fit(opened, control_cells(n_groups=len(screen.groups)), F.FitOptions(**given | fields), 0, "cpu")


def test_a_network_that_helps_is_kept_and_helps_with_a_pair_that_was_not_measured(model, pairs):
    new = next(i for i, parts in enumerate(pairs.conditions.parts) if len(parts) == 2)
    known = pairs.only(np.delete(np.arange(len(pairs.conditions)), new))
    cells = control_cells()
    found = fit(model, known, cells, residual="expected", loss="mse")
    assert found.notes["network"] == "kept"
    assert found.notes["loss_with"] < 0.7 * found.notes["loss_without"]
    assert found.model is model
    fitted = PerturbationModel(found.model, known, found.base, found.head, "p", "control", notes=found.notes)
    target = pairs.conditions.only(np.array([new]))
    base = fitted.mean_change(target, pairs.states[:0]).change[0]
    batch = cells.take(np.arange(20))
    with_network = base + fitted.added(batch.packed, list(target.parts) * 20, np.ones(20)).numpy().mean(axis=0)
    missed = [np.square(p - pairs.delta[new]).mean() for p in (base, with_network)]
    assert missed[1] < 0.7 * missed[0]


def test_a_network_that_does_not_help_is_dropped(model, measured, contents_of):
    screen = measured(tuple(model.vocabulary.symbols[:8]))  # nothing of one gene's change is in another's
    before = contents_of(model)
    found = fit(model, screen)
    assert found.notes["network"] == "did not help"
    assert found.head is None
    assert found.notes["loss_with"] > (1 - P.GAIN) * found.notes["loss_without"]
    assert contents_of(model) == before
    assert found.model is model


@pytest.fixture(scope="module")
def contents_of():
    """All there is to a model."""

    def contents(model):
        return (
            {name: value.numpy().tobytes() for name, value in model.state_dict().items()},
            [p.requires_grad for p in model.parameters()],
            model.training,
        )

    return contents


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_given_model_and_the_users_stream_stay_as_they_were(model, pairs, contents_of, strategy, monkeypatch):
    monkeypatch.setattr(loop, "WARM_CHECKS", 0)  # else the head alone may learn all there is to learn
    before, stream, legacy = contents_of(model), torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    found = fit(model, pairs, strategy=strategy, residual="additive", max_epochs=3, loss="mse")
    assert contents_of(model) == before
    assert torch.equal(torch.random.get_rng_state(), stream)
    assert np.array_equal(np.random.get_state()[1], legacy)  # noqa: NPY002
    assert found.notes["network"] == "kept"
    changed = {
        name for name, value in found.model.state_dict().items() if not torch.equal(value, model.state_dict()[name])
    }
    assert found.model.state_dict().keys() == model.state_dict().keys()
    assert all(name.startswith("blocks.") for name in changed) or strategy == "full"
    assert bool(changed) == (strategy != "head")
    assert not any(p.requires_grad for p in found.head.parameters())
    assert not found.head.training
    assert not found.model.training


def test_a_failure_leaves_the_model_as_it_was(model, pairs, contents_of):
    before = contents_of(model)
    with pytest.raises(FloatingPointError, match="Lower learning_rate"):
        fit(model, pairs, residual="additive", learning_rate=1e30, warmup_steps=0)
    assert contents_of(model) == before


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_seed_determines_every_bit(model, pairs, strategy, monkeypatch):
    monkeypatch.setattr(loop, "WARM_CHECKS", 1)
    heads, few = [], pairs.only(np.arange(16))
    for seed in (3, 3, 4):
        found = fit(model, few, control_cells(20), strategy=strategy, residual="additive", max_epochs=1, seed=seed)
        heads.append((found.notes["loss_with"], found.notes["history"]["validation_loss"].tolist()))
    assert heads[0] == heads[1] != heads[2]


def test_without_a_network(model, pairs):
    for strategy in ("none", "auto"):
        found = fitted_by(model, pairs, strategy=strategy)
        assert found.head is None
        assert found.model is model
        assert (found.notes["network"], found.notes["strategy"]) == ("not asked for", "none")
        assert set(found.notes) == {"validation", "strategy", "network", "seed", "seconds"}
    assert set(found.base) == {*KINDS, "measured"}


@pytest.mark.parametrize(
    ("residual", "named"), [(None, "no_change"), ("additive", "additive"), ("expected", "expected")]
)
def test_the_base_is_what_was_asked_for(model, pairs, residual, named):
    found = fitted_by(model, pairs, strategy="auto", residual=residual)
    assert found.base == dict.fromkeys((*KINDS, "measured"), named)
    assert (found.head is None) == (residual is not None)


@pytest.mark.parametrize("labels", [("A",), ("A", "B"), ("A", "B+C"), ("A", "A@1"), ("A", "B", "A@1")])
def test_too_few_conditions_for_a_network(model, measured, labels):
    for residual in ("auto", "elsewhere"):
        found = fit(model, measured(labels), residual=residual)
        assert (found.head, found.notes["network"]) == (None, "too few conditions")


def test_a_network_that_was_to_predict_alone_is_kept_or_refused(model, measured, pairs):
    """Dropped it would leave "no change" for a prediction."""
    nothing_to_learn = measured(tuple(model.vocabulary.symbols[:8]))
    assert fit(model, nothing_to_learn).notes["network"] == "did not help"
    found = fit(model, nothing_to_learn, residual=None)
    assert found.notes["network"] == "kept"
    assert found.head is not None
    with pytest.raises(ValueError, match=r"residual=None leaves the prediction to the network alone.*too few"):
        fit(model, measured(("A",)), residual=None)


def test_a_screen_that_is_small_has_no_network(model, pairs, monkeypatch):
    monkeypatch.undo()
    assert fit(model, pairs.only(np.arange(min(P.LEAST - 1, 12)))).notes["network"] == "too few conditions"


def test_a_group_whose_perturbations_are_all_held_out_is_no_obstacle(model, measured):
    screen = measured((*tuple("ABCDEF"), "G@1"))
    assert fit(model, screen, control_cells(n_groups=2)).notes["network"] in ("did not help", "kept")


def test_ctrl_c_leaves_a_usable_result(model, pairs, contents_of, monkeypatch):
    before, step, n = contents_of(model), P.PerturbationModule.compute_loss, 0

    def interrupted(self, batch, generator):
        nonlocal n
        n += self.training
        if self.training and n == 60:
            raise KeyboardInterrupt
        return step(self, batch, generator)

    monkeypatch.setattr(P.PerturbationModule, "compute_loss", interrupted)
    found = fit(model, pairs, residual="additive", max_epochs=1000, loss="mse")
    assert found.notes["stopped"] == "interrupted"
    assert found.notes["network"] == "kept"
    assert contents_of(model) == before
    assert all(torch.isfinite(value).all() for value in found.head.state_dict().values())


def test_time_is_kept(model, pairs, monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(loop.time, "monotonic", lambda: float(next(now)))
    limits = Limits(10**4, 10**4, 50.0)
    found = network_of(model, pairs, control_cells(), "head", "additive", config(), limits)
    assert found.notes["stopped"] == "minutes"
    assert found.notes["steps"] < 100


def identity(screen) -> Similarities:
    return Similarities(screen.part_names, np.eye(len(screen.part_names)), np.eye(len(screen.groups)))


@pytest.mark.parametrize("seed", range(4))
def test_nothing_that_is_held_out_is_trained_on(measured, seed):
    screen = measured(SCREEN)
    left_out = list(predict_left_out(screen, identity(screen), seed))
    found = F.left_over(screen, left_out, dict.fromkeys(KINDS, "expected"))
    assert found.residual.dtype == np.float32
    held, trained = set(found.row[found.held_out]), set(found.row[~found.held_out])
    assert held
    assert trained
    assert not held & trained
    parts = screen.conditions.parts
    last = {kind: max(one.fold for one in left_out if one.kind == kind) for kind in KINDS}
    for kind in KINDS:
        of = {one.row for one in left_out if one.kind == kind and one.fold == last[kind]}
        assert of <= held
        if kind == "combination":  # in no other group either
            assert not {parts[i] for i in of} & {parts[i] for i in trained}
        if kind == "single":  # nor with others
            assert not {part for i in of for part in parts[i]} & {part for i in trained for part in parts[i]}
    predicted = {(one.row, one.predicted.tobytes()): one for one in left_out}
    for row, residual in zip(found.row, found.residual, strict=True):
        left = [
            screen.delta[row] - o.predicted[METHODS.index("expected")] for (r, _), o in predicted.items() if r == row
        ]
        assert any(np.array_equal(residual, one) for one in left)


def test_what_the_base_is_not_defined_for_is_not_learned(measured):
    screen = measured(SCREEN)
    left_out = list(predict_left_out(screen, identity(screen), 0))
    found = F.left_over(screen, left_out, dict.fromkeys(KINDS, "elsewhere"))
    assert np.isfinite(found.residual).all()
    assert len(found.row) < len(left_out)


def test_weights_of_the_papers_error(measured):
    """Eq. wmse_weights: w_j = (v_j + alpha) / sum_k (v_k + alpha), v the mean of the group's control cells."""
    screen = measured(("A", "B@1", "A+B@1"))
    found = P.loss_weights(screen, np.array([2, 0]), "wmse")
    for row, group in ((0, 1), (1, 0)):
        v = screen.control[group].astype(float)
        total = sum(x + WMSE_ALPHA for x in v)
        np.testing.assert_allclose(found[row], [(x + WMSE_ALPHA) / total for x in v], rtol=1e-6)


@pytest.mark.parametrize("loss", ["wmse", "de", "mse"])
def test_weights_are_positive_and_sum_to_one(measured, loss):
    screen = measured(("A", "B", "C@1"))
    delta = screen.delta.copy()
    delta[1] = 0
    delta[2, :6] = 0
    screen = replace(screen, delta=delta)
    found = P.loss_weights(screen, np.arange(3), loss)
    assert found.shape == (3, 12)
    assert (found > 0).all()
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-6)
    if loss == "mse":
        np.testing.assert_allclose(found, 1 / 12)
    if loss == "de":
        t = np.abs(delta[0]) / np.sqrt(screen.variance / screen.n_cells[0])
        np.testing.assert_allclose(found[0], 0.5 / 12 + 0.5 * t / t.sum(), rtol=1e-4)
        np.testing.assert_allclose(found[1], 1 / 12, rtol=1e-6)


def test_the_loss_is_the_weighted_error_of_conditions_of_the_cells_own_group(model, measured):
    screen = measured(("x", "y", "z@1", "w@1"), doses=[1, 2, 1, 1])
    draw = np.random.default_rng(0)
    rows, held = np.array([0, 1, 2, 3]), np.array([False, True, False, True])
    residual = draw.normal(size=(4, 12)).astype(np.float32)
    settings = config(loss="wmse")
    head = P._head(model, screen, Examples(rows, residual, held), settings)
    module = P.PerturbationModule(model, head, settings, screen, Examples(rows, residual, held))
    cells = control_cells(n_groups=3)
    np.testing.assert_array_equal(P._usable(cells, screen, Examples(rows, residual, held), True), range(27))
    batch = from_ragged(
        np.array([0, 2, 5, 6]), np.array([3, 4, 5, 6, 7, 8]), np.ones(6, dtype=np.float32), np.array([0, 1, 1])
    )
    weight = P.loss_weights(screen, rows, "wmse")
    for training, own in ((True, [0, 2, 2]), (False, [1, 3, 3])):
        module.train(training)
        loss, _ = module.compute_loss(batch, torch.Generator().manual_seed(0))
        expected = np.mean([np.sum(weight[i] * residual[i].astype(float) ** 2) for i in own])  # the head adds nothing
        assert loss.item() == pytest.approx(expected, rel=1e-5)
    model.eval()


def test_the_head_starts_with_the_directions_that_are_to_be_learned(model, measured):
    screen = measured(tuple("ABCDEF"))
    residual = np.random.default_rng(0).normal(size=(6, 12)).astype(np.float32)
    held = np.arange(6) > 3
    head = P._head(model, screen, Examples(np.arange(6), residual, held), config(rank=6))
    own = head.directions.detach().numpy().astype(float)
    _, _, right = np.linalg.svd(residual[~held])
    for k in range(4):  # those of what is trained on, not of what is held out
        assert abs(own[:, k] @ right[k]) / np.linalg.norm(own[:, k]) == pytest.approx(1, abs=1e-4)
    assert not head.mlp[-1].weight.any()
