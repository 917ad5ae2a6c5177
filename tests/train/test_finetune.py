"""Fine-tuning of a whole network: losses, trained and fixed weights, interruption, memory and numerical failure."""

from __future__ import annotations

import copy
import signal

import numpy as np
import pytest
import torch
from torch import nn

from scdiva import settings
from scdiva._constants import N_SPECIAL
from scdiva.annotation.annotator import AnnotationHead, HeadSizes
from scdiva.annotation.fit import AnnotationObjective
from scdiva.data.batch import InMemoryCells
from scdiva.integration.objective import IntegrationObjective
from scdiva.tokenizer.vocabulary import Vocabulary
from scdiva.train import finetune as T
from scdiva.train.config import FinetuneConfig
from scdiva.train.finetune_module import FinetuneModule, finetune

N_GENES, N_LABELS = 30, 3


@pytest.fixture(autouse=True)
def _quiet():
    with settings.override(progress=False):
        yield


def make_cells(n: int = 96) -> tuple[InMemoryCells, np.ndarray]:
    """Cells of three types, each with ten marker genes, by rank; and their labels."""
    draw = np.random.default_rng(0)
    labels = draw.permutation(np.arange(n) % N_LABELS)
    marker = np.arange(N_GENES) // 10 == labels[:, None]
    dense = draw.gamma(2, np.where(marker, 0.8, 0.4)) * (draw.random((n, N_GENES)) < np.where(marker, 0.8, 0.3))
    dense[:, 0] += 0.1
    tokens, values, lengths = [], [], []
    for row in dense:
        order = np.argsort(-row)[: (row > 0).sum()]
        tokens.append(order + N_SPECIAL)
        values.append(row[order])
        lengths.append(len(order))
    indptr, batch = np.concatenate([[0], np.cumsum(lengths)]), np.zeros(n, dtype=np.int64)
    values = np.concatenate(values).astype(np.float32)
    return InMemoryCells(indptr, np.concatenate(tokens), values, batch, np.arange(N_GENES) + N_SPECIAL, 1), labels


CELLS, LABELS = make_cells()


def make_head(dim: int = 16) -> AnnotationHead:
    """A head of new weights."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return AnnotationHead(HeadSizes("probe", N_LABELS, dim, N_GENES + N_SPECIAL))


@pytest.fixture(scope="session")
def genes():
    return Vocabulary.human().subset(np.arange(N_GENES) + N_SPECIAL)


@pytest.fixture
def model(tiny, genes):
    """A model whose cell state comes from its transformer; no weight is zero."""
    network = tiny(anchor="learned", n_layers=2, max_length=N_GENES, tie_gene_head=True)
    network.vocabulary = genes
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return network.eval()


def configured(**fields) -> FinetuneConfig:
    seed = fields.pop("seed", 0)
    return T.planned({"epochs": 2, "context": 12} | fields, len(LABELS), seed, "fp32")


def tune(model, config, objective=AnnotationObjective, checkpoint_dir=None, labels=LABELS):
    """Fine-tune a copy; the copy, the head and the losses."""
    network, head = T.network_for(model, config, config.seed), make_head()
    task = objective(CELLS, labels, head, context=network.config.input_length)
    history = finetune(network, task, config, device="cpu", checkpoint_dir=checkpoint_dir)
    return network, head, history


def weights(*modules: nn.Module) -> dict[str, torch.Tensor]:
    return {f"{i}.{name}": w.clone() for i, module in enumerate(modules) for name, w in module.state_dict().items()}


def same(first, second) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def changed(before: nn.Module, after: nn.Module) -> set[str]:
    now = after.state_dict()
    assert before.state_dict().keys() == now.keys(), "the layout of the stock model"
    return {name for name, value in before.state_dict().items() if not torch.equal(value, now[name])}


def test_cross_entropy_is_the_slow_reference(model):
    labels = np.where(np.arange(96) < 60, 0, LABELS)  # of unlike frequency
    head, rows = make_head(), np.array([3, 70, 71, 80, 95, 12])
    objective = AnnotationObjective(CELLS, labels, head, context=5)
    moments = weights(head)
    loss, parts = objective(model, rows, 0.5, torch.Generator())
    assert same(weights(head), moments)
    features = []
    for row in rows:
        start = CELLS.indptr[row]
        cell = slice(start, min(CELLS.indptr[row + 1], start + 5))  # the five top-ranked genes
        bounds = torch.tensor([0, cell.stop - start], dtype=torch.int32)
        state = model.encode(torch.from_numpy(CELLS.tokens[cell]), torch.from_numpy(CELLS.values[cell]), bounds)[0]
        features.append(state.detach().double() / state.detach().double().norm())
    features = torch.stack(features)
    log_p = head.classifier.double()((features - features.mean(dim=0)) / features.std(dim=0)).log_softmax(dim=1)
    true, weight = labels[rows], torch.tensor([1 / (labels == label).sum() for label in labels[rows]])
    expected = -(weight * log_p[np.arange(6), true]).sum() / weight.sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert float(parts["accuracy"]) == pytest.approx((log_p.argmax(dim=1).numpy() == true).mean())


def test_every_weight_of_the_state_is_trained(model):
    before = weights(model)
    network, head, history = tune(model, configured(epochs=20, learning_rate=3e-3))
    assert same(weights(model), before), "the given model is not changed"
    unused = {"embedding.hidden_value", *(name for name in model.state_dict() if name.startswith("heads."))}
    assert changed(model, network) == model.state_dict().keys() - unused
    assert {name.split(".")[0] for name in changed(make_head(), head)} == {"classifier"}
    assert np.mean(history["loss"][-3:]) < 0.7 * np.mean(history["loss"][:3])
    assert np.mean(history["accuracy"][-3:]) > np.mean(history["accuracy"][:3])
    assert {len(losses) for losses in history.values()} == {60}
    assert network.config.max_length == 12
    assert not network.training
    assert all(p.requires_grad for p in network.parameters())


def test_frozen_blocks_and_embeddings_keep_their_bits(model):
    changed_names = changed(model, tune(model, configured(freeze=1))[0])
    assert changed_names
    assert not [name for name in changed_names if name.startswith(("embedding.", "blocks.0."))]
    assert {name for name in model.state_dict() if name.startswith("blocks.1.")} <= changed_names
    assert changed(model, tune(model, configured(freeze=2))[0]) == {"norm.weight"}


@pytest.mark.parametrize("freeze", [0, 1])
def test_low_rank_updates_are_merged_into_the_blocks_linear_layers(model, freeze):
    network = tune(model, configured(lora=2, freeze=freeze))[0]
    linears = {
        f"blocks.{number}.{name}.weight"
        for number in range(freeze, 2)
        for name, layer in model.blocks[number].named_modules()
        if isinstance(layer, nn.Linear)
    }
    assert changed(model, network) == linears
    for name in linears:
        update = (network.state_dict()[name] - model.state_dict()[name]).double()
        size = torch.linalg.svdvals(update)
        assert size[2:].max() < 1e-3 * size[0]


def test_a_low_rank_layer_is_the_layer_plus_twice_the_product():
    draw = torch.Generator().manual_seed(0)
    layer = nn.Linear(7, 5, bias=False).requires_grad_(False)
    before = layer.weight.clone()
    low = T.LowRankLinear(layer, 2, draw)
    x = torch.randn(4, 7, generator=draw)
    assert torch.equal(low(x), x @ before.T), "it starts as the layer"
    with torch.no_grad():
        low.up.copy_(torch.randn(5, 2, generator=draw))
    expected = before + 2 * torch.einsum("or,ri->oi", low.up, low.down)
    torch.testing.assert_close(low(x), x @ expected.T)
    low(x).square().sum().backward()
    assert layer.weight.grad is None
    assert low.merged() is layer
    torch.testing.assert_close(layer.weight, expected)


def test_new_layers_learn_at_ten_times_the_rate(model):
    config = configured(learning_rate=1e-4)
    objective = AnnotationObjective(CELLS, LABELS, make_head(), context=12)
    module = FinetuneModule(T.network_for(model, config, 0), objective, config)
    optimizer = module.configure_optimizers()["optimizer"]
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    first = 1 / max(1, config.warmup_steps)
    of_values = module.model.embedding.value_out.weight
    assert {rate[id(p)] / first for p in module.model.parameters() if p is not of_values} == {1e-4}
    assert {rate[id(p)] / first for p in objective.parameters()} == {1e-3}
    assert len(rate) == len(list(module.parameters()))


@pytest.mark.parametrize(("width", "rate"), [(192, 1e-3), (8, 5e-4)])
def test_the_default_learning_rate_falls_with_the_width_of_wide_models(model, width, rate, monkeypatch):
    monkeypatch.setattr(T, "WIDTH", width)
    assert model.config.dim == 16
    assert T.finetune_config(True, model, AnnotationObjective, context=12)["learning_rate"] == pytest.approx(rate)


def test_the_width_of_blocks_that_are_not_trained_has_no_influence(tiny, genes, monkeypatch):
    monkeypatch.setattr(T, "WIDTH", 8)
    by_set_encoder = tiny(anchor="encoder")
    by_set_encoder.vocabulary = genes
    assert T.finetune_config(True, by_set_encoder, AnnotationObjective)["learning_rate"] == 1e-3


def test_epochs_become_steps():
    config = T.planned({"epochs": 3, "context": 9}, 100, 5, "bf16")
    assert (config.steps, config.batch_size, config.checkpoint_every) == (9, 32, 3)
    assert (config.context, config.seed, config.precision, config.warmup_steps) == (9, 5, "bf16", 2)
    assert T.planned({"epochs": 2}, 5, 0, "fp32").batch_size == 5
    # about 8,000 examples, at least one epoch, and no more steps for fewer cells than a batch
    for n, steps in ((2000, 4 * 62), (100_000, 3125), (32, 250), (2, 250)):
        assert T.planned({"epochs": None}, n, 0, "fp32").steps == steps


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"freeze": 3}, "freeze=3 is more than the 2 blocks"),
        ({"freeze": 2, "lora": 1}, "leaves no block"),
        ({"lora": 17}, "lora=17 is more than the width of the model, 16"),
        ({"epochs": 1.5}, "epochs must be a whole number; got 1.5"),
        ({"context": 31}, "context=31 is more than the 30 genes"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"lr": 0.0}, "^lr must be finite and positive"),
        ({"lr": "fast"}, "^lr must be a number"),
    ],
)
def test_arguments_out_of_range_are_refused(model, arguments, match):
    with pytest.raises((TypeError, ValueError), match=match):
        T.finetune_config(True, model, AnnotationObjective, **arguments)
    with pytest.raises(ValueError, match="Pass finetune=True"):
        T.finetune_config(False, model, AnnotationObjective, **arguments)


class Halted(AnnotationObjective):
    """Stops in the middle of the second of three epochs, in the way of `how`."""

    how = "signal"

    def forward(self, network, rows, progress, generator):
        if 0.4 < progress < 0.5:
            if self.how == "crash":
                raise RuntimeError("the machine is gone")
            signal.raise_signal(signal.SIGINT)
        return super().forward(network, rows, progress, generator)


@pytest.mark.parametrize("how", ["signal", "crash"])
@pytest.mark.parametrize("fields", [{}, {"lora": 2}])
def test_an_interrupted_run_ends_with_the_same_bits(model, tmp_path, how, fields, monkeypatch):
    monkeypatch.setattr(Halted, "how", how)
    config = configured(epochs=3, **fields)
    network, head, history = tune(model, config)
    expected = weights(network, head)
    with pytest.raises(KeyboardInterrupt if how == "signal" else RuntimeError):
        tune(model, config, Halted, tmp_path / "run")
    step = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["global_step"]
    assert step == (5 if how == "signal" else 3), "a kill loses at most one epoch"
    network, head, resumed = tune(model, config, checkpoint_dir=tmp_path / "run")
    assert same(weights(network, head), expected)
    assert resumed == history
    network, head, resumed = tune(model, config, checkpoint_dir=tmp_path / "run")  # a finished run
    assert same(weights(network, head), expected)
    assert resumed == history


def test_the_seed_determines_every_bit_and_global_streams_go_on(model):
    stream, legacy = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    one, again, other_seed = (weights(*tune(model, configured(seed=seed))[:2]) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), stream)
    assert np.array_equal(np.random.get_state()[1], legacy)  # noqa: NPY002
    assert same(one, again)
    assert not same(one, other_seed)


class Boundless(AnnotationObjective):
    """Its loss is infinite."""

    def forward(self, network, rows, progress, generator):
        loss, parts = super().forward(network, rows, progress, generator)
        return loss + torch.inf, parts


def test_a_loss_that_is_not_finite_names_the_step_and_a_rate(model, tmp_path):
    with pytest.raises(FloatingPointError, match=r"step \d+\. The AnnData.*lr=0\.001 in place of 1e\+30; if"):
        tune(model, configured(epochs=4, learning_rate=1e30))
    with pytest.raises(FloatingPointError, match=r"lr=0\.0003 in place of 0\.001 and another checkpoint_dir; if"):
        tune(model, configured(epochs=1), Boundless, tmp_path)


@pytest.mark.fault("out of memory")
@pytest.mark.parametrize("anchor", ["encoder", "learned"])
def test_memory_shortage_that_no_parts_relieve_is_one_error(tiny, genes, anchor, monkeypatch, caplog):
    """A set encoder can't run over a batch in parts; blocks can, down to one cell."""

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    network = tiny(anchor=anchor, n_layers=1, max_length=N_GENES, anchor_residual=False)
    network.vocabulary, before = genes, weights(network)
    monkeypatch.setattr(type(network), "encode", full)
    monkeypatch.setattr("scdiva._settings.logger.propagate", True)
    with pytest.raises(MemoryError, match=r'cpu is out of memory after 0 of 6 steps of 32 .*device="cpu"') as error:
        tune(network, configured())
    assert ("context" in str(error.value)) == (anchor == "learned")
    assert len(caplog.records) == (0 if anchor == "encoder" else 5)
    assert same(before, weights(network))


@pytest.mark.parametrize("lora", [None, 2])
def test_a_checkpoint_of_another_run_is_refused_before_cells_are_read(model, tmp_path, lora):
    """By task, arguments and weights; the run's own is accepted."""
    tune(model, configured(epochs=1, **({"lora": lora} if lora else {})), checkpoint_dir=tmp_path)
    arguments = {"model": model, "task": AnnotationObjective, "context": 12, "lora": lora, "checkpoint_dir": tmp_path}
    assert T.finetune_config(True, **arguments)["context"] == 12
    altered = copy.deepcopy(model)
    with torch.no_grad():
        altered.blocks[0].ffn_norm.weight[0] += 1
    for change, words in (
        ({"task": IntegrationObjective}, "another task than integrate"),
        ({"model": altered}, "other weights"),
        ({"lr": 1e-4}, "lr=0.001, not 0.0001.* or pass lr=0.001 to continue it"),
        ({"freeze": 1}, "freeze=0, not 1"),
        ({"context": 10}, "context=12, not 10"),
        ({"lora": 3}, f"lora={lora or 0}, not 3"),
    ):
        with pytest.raises(ValueError, match=words):
            T.finetune_config(True, **arguments | change)


def test_heads_fitted_on_the_former_state_are_left_out(tiny, genes):
    adapted = tiny(adapted=20, integrated=True, anchor_residual=False)
    adapted.vocabulary = genes
    adapted.metadata = {"adaptation": {"n_components": 20}, "name": "kept"}
    network = T.network_for(adapted, configured(), 0)
    assert network.dataset_components is None
    assert network.integration is None
    assert network.metadata == {"name": "kept"}
    cells = CELLS.take(np.arange(9)).packed
    assert torch.equal(network.encode(*cells), adapted.encode(*cells))
