from __future__ import annotations

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import scdiva as sd
from scdiva._settings import Settings, logger, multiplies_bf16, one_blas_thread, settings, torch_threads_kept
from scdiva.models import inference, load_model

ABSENT = "mps" if torch.cuda.is_available() else "cuda"
"""A device that is not there."""
BAD = {
    "seed": (-1, 2**63, 1.0, True),
    "device": ("gpu", None, "cuda:first", "auto:1"),
    "batch_size": (0,),
    "precision": ("fp16", "half"),
    "progress": (1,),
    "threads": (0, "two"),
    "data_dir": (3,),
    "data_url": ("example.org/data",),
    "verbosity": ("loud", 7, True, ["info"]),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_values_are_refused_and_leave_the_old_one(name, value):
    before = getattr(settings, name)
    with pytest.raises(ValueError, match=f"settings.{name} must be"):
        setattr(settings, name, value)
    with pytest.raises(ValueError, match=name):
        Settings(**{name: value})
    assert getattr(settings, name) == before


def test_a_misspelt_setting_is_refused():
    with pytest.raises(AttributeError, match=r"no 'batchsize'; it has .*batch_size"):
        settings.batchsize = 3


def test_override_leaves_the_loggers_own_level():
    before = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        with settings.override(progress=False):
            pass
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(before)


def test_override_ends_with_its_block_even_on_an_error():
    def fails_halfway():
        with settings.override(batch_size=7, progress=False):
            assert (settings.batch_size, settings.progress) == (7, False)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails_halfway()
    with pytest.raises(ValueError, match="threads"), settings.override(batch_size=9, threads=-1):
        pass
    assert settings.batch_size is None


@pytest.mark.parametrize(
    ("number", "name"), [(0, "error"), (1, "warning"), (2, "info"), (3, "hint"), (4, "debug"), (20, "info")]
)
def test_verbosity_takes_the_numbers_of_other_packages(number, name):
    settings.verbosity = number
    assert settings.verbosity == name
    assert logger.level == (15 if name == "hint" else getattr(logging, name.upper()))


def test_the_handler_prints_only_where_the_user_has_no_logging_of_their_own(monkeypatch):
    (handler,) = logger.handlers
    record = logger.makeRecord("scdiva", logging.WARNING, "f", 1, "said once", (), None)
    for handlers in ([], [logging.NullHandler()]):
        monkeypatch.setattr(logging.getLogger(), "handlers", handlers)
        assert bool(handler.filter(record)) is not bool(handlers)


def test_a_device_is_one_that_torch_has_and_never_replaced():
    assert settings.resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert settings.resolve_device() == settings.resolve_device("cpu") == "cpu"  # set for all tests
    with pytest.raises(ValueError, match=r"settings\.device must be"):
        settings.resolve_device("gpu")
    with pytest.raises(ValueError, match=f"device='{ABSENT}'"):
        settings.resolve_device(ABSENT)


def test_precision_follows_the_device_and_is_never_replaced_in_silence():
    on_cpu = "bf16" if multiplies_bf16("cpu") else "fp32"
    with settings.override(precision="auto"):
        assert settings.resolve_precision(None, "cpu") == settings.resolve_precision("auto", "cpu") == on_cpu
    assert settings.resolve_precision("auto", "mps") == "fp32"
    with settings.override(precision="bf16"):
        assert settings.resolve_precision(None, "cpu") == "bf16"
        assert settings.resolve_precision("fp32", "cpu") == "fp32"
    with pytest.raises(ValueError, match=r"precision='bf16'.*mps.*precision='fp32'"):
        settings.resolve_precision("bf16", "mps")
    with pytest.raises(ValueError, match=r"settings\.precision must be"):
        settings.resolve_precision("half", "cpu")


def test_a_cpu_of_avx2_is_no_place_for_bf16():
    """Torch held to AVX2, whatever else the CPU could: `bf16` takes far longer there than `fp32`."""
    ask = "from scdiva._settings import multiplies_bf16, settings as s; "
    ask += "print(multiplies_bf16('cpu'), s.resolve_precision('auto', 'cpu'))"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    answer = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["False", "fp32"]


# --- settings that replace omitted arguments --------------------------------------------------------------------------
@pytest.fixture
def cells():
    return sd.datasets.toy(24, 60)


def test_the_seed_takes_effect(cells):
    drawn = {}
    for seed in (0, 1):
        with settings.override(seed=seed):
            drawn[seed] = [sd.tl.generate(cells, 2).X.toarray() for _ in range(2)]
        assert (drawn[seed][0] == drawn[seed][1]).all()
    assert drawn[0][0].shape != drawn[1][0].shape or (drawn[0][0] != drawn[1][0]).any()


CALLS = {
    "embed": lambda a: sd.tl.embed(a, device="cpu"),
    "annotate": lambda a: sd.tl.annotate(a, "cell_type", a.copy(), device="cpu", method="knn"),
    "integrate": lambda a: sd.tl.integrate(a, "cell_type", device="cpu", steps=1),
    "generate": lambda a: sd.tl.generate(a, 2),
    "impute": lambda a: sd.tl.impute(a),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_a_call_is_told_goes_before_the_device_of_the_settings(cells, call):
    """Also where nothing could run on that device. Generating and imputing run on the CPU."""
    with settings.override(device=ABSENT):
        CALLS[call](cells)
        with pytest.raises(ValueError, match=f"device='{ABSENT}' was asked for"):
            sd.tl.embed(cells)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("call", ["generate", "impute"])
def test_a_model_on_a_gpu_stays_there(cells, call):
    model = load_model(device="cuda")
    getattr(sd.tl, call)(cells, *((2,) if call == "generate" else ()), model=model)
    assert next(model.parameters()).is_cuda


@pytest.mark.parametrize("call", [sd.tl.embed, lambda a: sd.tl.fit_perturbation(a, "perturbation")])
def test_threads_take_effect(cells, call, monkeypatch):
    pools = []

    def counted(n, *args, **kwargs):
        pools.append(n)
        return ThreadPoolExecutor(n, *args, **kwargs)

    monkeypatch.setattr(inference, "ThreadPoolExecutor", counted)
    cells.obs["perturbation"] = ["control", "A", "B"] * 8
    with settings.override(threads=3):
        call(cells)
    assert set(pools) == {1, 3}  # one thread reads ahead


def test_verbosity_takes_effect(cells, monkeypatch):
    messages = []
    (handler,) = logger.handlers
    monkeypatch.setattr(handler, "emit", lambda record: messages.append(record.getMessage()))
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    lines = {"info": f"adata.X: {cells.n_obs} cells", "hint": "added obsm['X_scdiva']", "debug": "running the model on"}
    levels = ("error", "warning", "info", "hint", "debug")
    for number in range(5):
        messages.clear()
        with settings.override(verbosity=number):
            sd.tl.embed(cells)
        for level, words in lines.items():
            assert any(words in line for line in messages) is (number >= levels.index(level))


def test_torch_keeps_its_threads():
    before = torch.get_num_threads()
    with torch_threads_kept():
        torch.set_num_threads(before + 1)  # as numba's threads do when they start
    assert torch.get_num_threads() == before
    with torch_threads_kept(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(RuntimeError), torch_threads_kept(before + 1):
        raise RuntimeError
    assert torch.get_num_threads() == before


def test_a_block_uses_one_thread_of_blas():
    from threadpoolctl import threadpool_info, threadpool_limits

    def threads():
        return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}

    with threadpool_limits(2, user_api="blas"):
        with one_blas_thread():
            assert threads() == {1}
        with one_blas_thread(False):
            assert threads() == {2}
        assert threads() == {2}
