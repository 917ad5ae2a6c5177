from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
import torch

from scdiva._constants import N_SPECIAL
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.models.inference import open_encoder, read_out, runs_transformer, width_of


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build(**fields) -> ScDiVa:
    config = ScDiVaConfig(
        n_genes=80, dim=64, n_layers=3, n_heads=2, ffn_dim=96, max_length=60,
        anchor_linear_dim=8, anchor_learned_dim=4, anchor_hidden=16, **fields,
    )  # fmt: skip
    model = ScDiVa(config, generator=seeded(0)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # weights of zero would hide parts of the network
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=seeded(1)))
    return model


@pytest.fixture(scope="module")
def model():
    return build(anchor="learned")


@pytest.fixture(scope="module")
def cells():
    """Forty cells, one to fifty genes long."""
    lengths = torch.randint(1, 51, (40,), generator=seeded(2)).tolist()
    packed = []
    for i, n in enumerate(lengths):
        tokens = torch.randperm(80, generator=seeded(i))[:n] + N_SPECIAL
        packed.append((tokens, torch.rand(n, generator=seeded(i)) * 4, torch.tensor([0, n], dtype=torch.int32)))
    return packed


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def encoded(model, cells, **options) -> np.ndarray:
    with open_encoder(model, **options) as encode:
        return np.concatenate(list(encode(lambda cell: cell, cells)))


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_number_of_workers_changes_no_bit(model, cells, precision):
    states = [encoded(model, cells, precision=precision, threads=threads) for threads in (1, 2, 3)]
    assert states[0].dtype == np.float32
    assert states[0].shape == (40, 64)
    for state in states[1:]:
        np.testing.assert_array_equal(state, states[0])


def test_low_precision_is_close_and_is_what_runs(cells):
    cells = cells[:12]
    for model in (build(anchor="learned"), build(anchor="encoder", anchor_residual=True)):
        full = encoded(model, cells)
        with torch.inference_mode():
            expected = np.concatenate([model.encode(*cell).numpy() for cell in cells])
        np.testing.assert_allclose(full, expected, atol=1e-5)
        low = cosine(full.astype(np.float64), encoded(model, cells, precision="bf16").astype(np.float64))
        assert 0.9995 <= low.min() <= 1 - 1e-8


@pytest.mark.parametrize("residual", [True, False])
def test_cells_of_one_batch_are_read_out_apart(cells, residual):
    """As on a GPU; cells of up to fifty genes, of which the transformer sees thirty."""
    model = build(anchor="encoder", anchor_residual=residual)
    object.__setattr__(model.config, "max_length", 30)
    lengths = torch.tensor([len(tokens) for tokens, _, _ in cells])
    assert (lengths > 30).any()
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
    batch = (torch.cat([cell[0] for cell in cells]), torch.cat([cell[1] for cell in cells]), bounds)
    with torch.inference_mode():
        together, alone = (read_out(model, batch, "embedding"), [read_out(model, cell, "embedding") for cell in cells])
    np.testing.assert_allclose(together, torch.cat(alone), atol=1e-4)
    assert together.shape == (40, width_of(model))
    assert runs_transformer(model) == residual
    assert runs_transformer(model, lambda *_: torch.zeros(1))


def state_of(model) -> tuple:
    tensors = {name: (t.data_ptr(), t.dtype, t.device) for name, t in model.state_dict().items()}
    return tensors, [id(module) for module in model.modules()], model.training, torch.get_num_threads()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_model_and_threads_are_left_as_they_were(cells, two_threads, precision):
    model = build(anchor="learned").train()
    before = state_of(model)
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    encoded(model, cells[:3], precision=precision)
    assert state_of(model) == before
    with open_encoder(model, precision=precision, threads=2) as encode, pytest.raises(ValueError, match="packed int64"):
        list(encode(lambda cell: (cell[0].float(), *cell[1:]), cells))
    with contextlib.suppress(KeyboardInterrupt), open_encoder(model, precision=precision) as encode:
        raise KeyboardInterrupt
    assert state_of(model) == before
    assert all(torch.equal(weights[name], t) for name, t in model.state_dict().items())


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_a_worker_surfaces_at_once(model, cells, two_threads, kind):
    numbers = []

    def make(number):
        numbers.append(number)
        if number == 3:
            raise kind("the third")
        return cells[number % 40]

    with open_encoder(model, threads=2) as encode, pytest.raises(kind, match="the third"):
        list(encode(make, range(3000)))
    assert len(numbers) < 60  # of 3,000; how many depends on when the other worker looks
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("fields", [{"anchor": "learned"}, {"anchor": "encoder", "anchor_residual": False}])
def test_an_integrated_model_is_read_through_its_head(cells, fields):
    model = build(integrated=True, adapted=5, integrated_hidden=9, **fields)
    torch.nn.init.normal_(model.dataset_components.state_map, generator=torch.Generator().manual_seed(0))
    assert (width_of(model), width_of(model, "state")) == (5, model.state_dim)
    with torch.inference_mode():
        for cell in cells[:5]:
            expected = model.integration(model.dataset_components(model.encode(*cell), *cell))
            torch.testing.assert_close(read_out(model, cell, "embedding"), expected)
            torch.testing.assert_close(read_out(model, cell, "state"), model.encode(*cell))
    np.testing.assert_allclose(np.linalg.norm(encoded(model, cells[:5]), axis=1), 1, rtol=1e-5)


def test_a_function_reads_out_what_it_likes(model, cells, two_threads):
    """It is given the tensors of a batch, whatever they are, on the device, in the workers."""
    thread_names = set()

    def weighted(network, tokens, values, bounds, weight):
        assert not torch.is_grad_enabled()
        thread_names.add(threading.current_thread().name.split("_")[0])
        return network.encode(tokens, values, bounds).double() * weight

    batches = [(*cell, torch.tensor(float(i))) for i, cell in enumerate(cells)]
    states = encoded(model, cells)
    for threads in (1, 3):
        with open_encoder(model, threads=threads, what=weighted) as encode:
            outputs = list(encode(lambda batch: batch, batches))
        assert {part.dtype for part in outputs} == {np.dtype(np.float32)}
        np.testing.assert_allclose(np.concatenate(outputs), states * np.arange(40)[:, None], rtol=1e-5)
    assert thread_names == {"scdiva"}
    assert runs_transformer(build(anchor="encoder", anchor_residual=False), weighted)
    with open_encoder(model, what=lambda *_: torch.ones(2, 3, 4)) as encode:
        assert next(encode(lambda cell: cell, cells[:1])).shape == (2, 3, 4)
    with open_encoder(model, what=weighted) as encode, pytest.raises(TypeError, match="weight"):
        list(encode(lambda cell: cell, cells))
