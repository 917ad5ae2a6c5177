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
from scdiva.models.layers import Block
from scdiva.tokenizer.vocabulary import Vocabulary
from scdiva.train import finetune as T
from scdiva.train.config import FinetuneConfig

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
    made = tiny(anchor="learned", n_layers=2, max_length=N_GENES, tie_gene_head=True)
    made.vocabulary = genes
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return made.eval()


def configured(**fields) -> FinetuneConfig:
    seed = fields.pop("seed", 0)
    return T.planned({"epochs": 2, "context": 12} | fields, len(LABELS), seed, "fp32")


def tune(model, config, objective=AnnotationObjective, checkpoint_dir=None, labels=LABELS):
    """Fine-tune a copy; the copy, the head and the losses."""
    network, head = T.network_for(model, config, config.seed), make_head()
    made = objective(CELLS, labels, head, context=network.config.input_length)
    history = T.finetune(network, made, config, device="cpu", checkpoint_dir=checkpoint_dir)
    return network, head, history


def weights(*modules: nn.Module) -> dict[str, torch.Tensor]:
    return {f"{i}.{name}": w.clone() for i, module in enumerate(modules) for name, w in module.state_dict().items()}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


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
        stop = min(CELLS.indptr[row + 1], start + 5)  # the five top-ranked genes
        cell = torch.from_numpy(CELLS.tokens[start:stop]), torch.from_numpy(CELLS.values[start:stop])
        state = model.encode(*cell, torch.tensor([0, stop - start], dtype=torch.int32))[0].detach().double()
        features.append((state / state.norm()).numpy())
    total = weight_sum = right = 0.0
    for row, feature in zip(rows, features, strict=True):
        x = torch.from_numpy((feature - np.mean(features, axis=0)) / np.std(features, axis=0, ddof=1))
        for number in (0, 2, 4):
            layer = head.classifier[number]
            x = layer.weight.double() @ x + layer.bias
            x = x / (1 + torch.exp(-x)) if number < 4 else x
        log_p = (x - torch.logsumexp(x, 0)).detach().numpy()
        weight = 1 / (labels == labels[row]).sum()
        total, weight_sum = total - weight * log_p[labels[row]], weight_sum + weight
        right += log_p.argmax() == labels[row]
    assert loss.item() == pytest.approx(total / weight_sum, rel=1e-5)
    assert float(parts["accuracy"]) == pytest.approx(right / 6)


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
    found = changed(model, tune(model, configured(freeze=1))[0])
    assert found
    assert not [name for name in found if name.startswith(("embedding.", "blocks.0."))]
    assert {name for name in model.state_dict() if name.startswith("blocks.1.")} <= found
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
    module = T.FinetuneModule(T.network_for(model, config, 0), objective, config)
    optimizer = module.configure_optimizers()["optimizer"]
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    first = 1 / max(1, config.warmup_steps)
    assert {rate[id(p)] / first for p in module.model.parameters()} == {1e-4}
    assert {rate[id(p)] / first for p in objective.parameters()} == {1e-3}
    assert len(rate) == len(list(module.parameters()))


def test_epochs_become_steps(model):
    config = T.planned({"epochs": 3, "context": 9}, 100, 5, "bf16")
    assert (config.steps, config.batch_size, config.checkpoint_every) == (9, 32, 3)
    assert (config.context, config.seed, config.precision, config.warmup_steps) == (9, 5, "bf16", 2)
    assert T.planned({"epochs": None}, 2000, 0, "fp32").steps == 4 * 62  # 8,000 examples
    assert T.planned({"epochs": None}, 100_000, 0, "fp32").steps == 3125  # at least one epoch
    assert T.planned({"epochs": 2}, 5, 0, "fp32").batch_size == 5
    assert T.planned({"epochs": None}, 32, 0, "fp32").steps == 250
    assert T.planned({"epochs": None}, 2, 0, "fp32").steps == 250  # not 4,000 steps of two examples


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"freeze": 3}, ValueError, "freeze=3 is more than the 2 blocks"),
        ({"freeze": 2, "lora": 1}, ValueError, "leaves no block"),
        ({"lora": 17}, ValueError, "lora=17 is more than the width of the model, 16"),
        ({"epochs": 1.5}, TypeError, "epochs must be a whole number; got 1.5"),
        ({"context": 31}, ValueError, "context=31 is more than the 30 genes"),
        ({"context": 0}, ValueError, "context"),
        ({"epochs": 0}, ValueError, "epochs must be at least 1"),
        ({"lr": 0.0}, ValueError, "^lr must be finite and positive"),
        ({"lr": "fast"}, TypeError, "^lr must be a number"),
        ({"lora": 1.5}, TypeError, "lora"),
    ],
)
def test_arguments_out_of_range_are_refused(model, arguments, error, match):
    with pytest.raises(error, match=match):
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
    one, again, other = (weights(*tune(model, configured(seed=seed))[:2]) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), stream)
    assert np.array_equal(np.random.get_state()[1], legacy)  # noqa: NPY002
    assert same(one, again)
    assert not same(one, other)


class Boundless(AnnotationObjective):
    """Its loss is infinite."""

    def forward(self, network, rows, progress, generator):
        loss, parts = super().forward(network, rows, progress, generator)
        return loss + torch.inf, parts


def test_a_loss_that_is_not_finite_names_the_step_and_a_rate(model, tmp_path):
    with pytest.raises(FloatingPointError, match=r"step \d+\. The AnnData.*lr=0\.0003 in place of 1e\+30; if"):
        tune(model, configured(epochs=4, learning_rate=1e30))
    with pytest.raises(FloatingPointError, match=r"lr=0\.0001 in place of 0\.0003 and another checkpoint_dir; if"):
        tune(model, configured(epochs=1), Boundless, tmp_path)


@pytest.mark.fault("out of memory")
def test_memory_shortage_halves_the_batch_with_one_warning(model, monkeypatch, caplog):
    """Memory for twenty cells at a time: batches of 32 run in two parts, and the result is that of whole batches."""
    config = configured(epochs=1)
    expected = weights(tune(model, config)[0])
    forward = Block.forward

    def scarce(block, x, cu_seqlens, *args):
        if len(cu_seqlens) - 1 > 20 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(block, x, cu_seqlens, *args)

    monkeypatch.setattr(Block, "forward", scarce)
    monkeypatch.setattr("scdiva._settings.logger.propagate", True)
    network = tune(model, config)[0]
    for name, value in weights(network).items():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-4)
    warned = [record.message for record in caplog.records if "out of memory" in record.message]
    assert len(warned) == 1
    assert "in 2 parts" in warned[0]
    assert warned[0].endswith("A smaller context needs less memory")
    assert network.blocks.micro_batches == 1


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


def test_a_checkpoint_of_another_run_is_refused_before_cells_are_read(model, tmp_path):
    """By task, arguments and weights, with and without low-rank updates; the run's own is accepted."""

    def asked(**given):
        task, of = given.pop("task", AnnotationObjective), given.pop("model", model)
        return T.finetune_config(True, of, task, checkpoint_dir=tmp_path, **({"context": 12} | given))

    other = copy.deepcopy(model)
    with torch.no_grad():
        other.blocks[0].ffn_norm.weight[0] += 1
    for lora in (None, 2):
        fields = {"lora": lora} if lora else {}
        tune(model, configured(epochs=1, **fields), checkpoint_dir=tmp_path)
        assert asked(lora=lora)["context"] == 12
        refused = [
            ({"task": IntegrationObjective}, "another task than integrate"),
            ({"model": other}, "other weights"),
        ]
        refused += [({"lr": 1e-4}, "lr=0.0003, not 0.0001"), ({"freeze": 1}, "freeze=0, not 1")]
        for given, words in [
            *refused,
            ({"context": 10}, "context=12, not 10"),
            ({"lora": 3}, f"lora={lora or 0}, not 3"),
        ]:
            with pytest.raises(ValueError, match=words):
                asked(**({"lora": lora} | given))
        (tmp_path / "last.ckpt").unlink()


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
