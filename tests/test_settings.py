from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scdiva._settings import Settings, logger, multiplies_bf16, settings, torch_threads_kept


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.0),
        ("seed", True),
        ("device", "gpu"),
        ("device", None),
        ("device", "cuda:first"),
        ("device", "auto:1"),
        ("batch_size", 0),
        ("precision", "fp16"),
        ("progress", 1),
        ("threads", 0),
        ("threads", "two"),
        ("data_dir", 3),
        ("data_url", "example.org/data"),
        ("verbosity", "loud"),
        ("verbosity", 7),
        ("verbosity", True),
        ("verbosity", ["info"]),
    ],
)
def test_bad_values_are_refused_and_leave_the_old_one(name, value):
    before = getattr(settings, name)
    with pytest.raises(ValueError, match=f"settings.{name} must be"):
        setattr(settings, name, value)
    assert getattr(settings, name) == before


def test_a_misspelt_setting_is_refused():
    with pytest.raises(AttributeError, match=r"no 'batchsize'; it has .*batch_size"):
        settings.batchsize = 3


def test_override_leaves_the_loggers_own_level():
    logger = logging.getLogger("scdiva")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        with settings.override(progress=False):
            pass
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(before)


def test_override_ends_with_its_block_even_on_an_error():
    before = settings.batch_size
    assert before is None

    def fails_halfway():
        with settings.override(batch_size=7, progress=False):
            assert (settings.batch_size, settings.progress) == (7, False)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails_halfway()
    assert settings.batch_size == before
    with pytest.raises(ValueError, match="threads"), settings.override(batch_size=9, threads=-1):
        pass
    assert settings.batch_size == before


def test_verbosity_sets_what_the_logger_passes():
    settings.verbosity = "info"
    assert logger.level == logging.INFO


@pytest.mark.parametrize(
    ("number", "name"), [(0, "error"), (1, "warning"), (2, "info"), (3, "hint"), (4, "debug"), (20, "info")]
)
def test_verbosity_takes_the_numbers_of_other_packages(number, name):
    settings.verbosity = number
    assert settings.verbosity == name
    assert logger.level == (15 if name == "hint" else getattr(logging, name.upper()))


def test_the_handler_prints_only_where_the_user_has_no_logging_of_their_own():
    (handler,) = logger.handlers
    record = logger.makeRecord("scdiva", logging.WARNING, "f", 1, "said once", (), None)
    root = logging.getLogger()
    before = root.handlers[:]
    try:
        root.handlers[:] = []
        assert handler.filter(record)
        root.handlers[:] = [logging.NullHandler()]
        assert not handler.filter(record)
    finally:
        root.handlers[:] = before


def test_auto_device_is_one_that_torch_has():
    import torch

    assert settings.resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert settings.resolve_device("cpu") == "cpu"
    with settings.override(device="cpu"):
        assert settings.resolve_device() == "cpu"
    with pytest.raises(ValueError, match=r"settings\.device must be"):
        settings.resolve_device("gpu")


def test_an_absent_device_is_an_error_not_a_fallback():
    import torch

    absent = [
        d for d, there in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available())) if not there
    ]
    assert absent, "a machine with both CUDA and MPS does not exist"
    for device in absent:
        with pytest.raises(ValueError, match=f"device='{device}'"):
            settings.resolve_device(device)


def test_precision_follows_the_device_and_is_never_replaced_in_silence():
    import torch

    on_cpu = "bf16" if multiplies_bf16("cpu") else "fp32"
    assert settings.resolve_precision(None, "cpu") == settings.resolve_precision("auto", "cpu") == on_cpu
    assert settings.resolve_precision("auto", "mps") == "fp32"
    with settings.override(precision="bf16"):
        assert settings.resolve_precision(None, "cpu") == "bf16"
        assert settings.resolve_precision("fp32", "cpu") == "fp32"
    assert settings.resolve_precision("bf16", "cpu") == "bf16"
    with pytest.raises(ValueError, match=r"precision='bf16'.*mps.*precision='fp32'"):
        settings.resolve_precision("bf16", "mps")
    for unknown in ("half", "int8"):
        with pytest.raises(ValueError, match=r"settings\.precision must be"):
            settings.resolve_precision(unknown, "cpu")
    flags = Path("/proc/cpuinfo")
    if flags.exists() and not torch.cuda.is_available() and torch.backends.cpu.get_cpu_capability() != "AVX2":
        assert multiplies_bf16("cpu") == any(f" {flag}" in flags.read_text() for flag in ("avx512_bf16", "amx_bf16"))


def test_a_cpu_of_avx2_is_no_place_for_bf16():
    """Torch held to AVX2, whatever else the CPU could: `bf16` takes far longer there than `fp32`."""
    ask = "from scdiva._settings import multiplies_bf16, settings as s; "
    ask += "print(multiplies_bf16('cpu'), s.resolve_precision('auto', 'cpu'))"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    answer = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["False", "fp32"]


def test_settings_are_checked_when_made():
    with pytest.raises(ValueError, match="batch_size"):
        Settings(batch_size=0)


@pytest.fixture
def cells():
    from scdiva.datasets import toy

    return toy(24, 60)


@pytest.mark.filterwarnings("ignore:.*known genes.*:UserWarning")
class TestTakesEffect:
    """Each setting in a call that leaves the argument out, against the same call with another value."""

    def test_seed(self, cells):
        from scdiva.tl import generate

        drawn = {}
        for seed in (0, 1):
            with settings.override(seed=seed):
                drawn[seed] = [generate(cells, 2).X.toarray() for _ in range(2)]
            assert (drawn[seed][0] == drawn[seed][1]).all()
        assert drawn[0][0].shape != drawn[1][0].shape or (drawn[0][0] != drawn[1][0]).any()

    def test_device(self, cells):
        import torch

        from scdiva.tl import embed

        absent = next(d for d, there in (("cuda", torch.cuda.is_available()), ("mps", False)) if not there)
        with settings.override(device=absent), pytest.raises(ValueError, match=f"device='{absent}' was asked for"):
            embed(cells)

    @pytest.mark.parametrize("call", ["embed", "annotate", "integrate", "generate", "impute"])
    def test_what_a_call_is_told_goes_before_the_setting(self, cells, call):
        """Also where nothing could run on the device of the setting. Generating and imputing run on the CPU."""
        import torch

        from scdiva import tl
        from scdiva.models import load_model

        known = str(cells.var_names[load_model(device="cpu").vocabulary.match(list(cells.var_names)).tokens > 0][0])
        given = {
            "embed": ((), {"device": "cpu"}),
            "annotate": (("cell_type", cells.copy()), {"device": "cpu", "method": "knn"}),
            "integrate": (("cell_type",), {"device": "cpu", "steps": 1}),
            "generate": ((2,), {}),
            "impute": (([known],), {}),
        }
        absent = "mps" if torch.cuda.is_available() else "cuda"
        with settings.override(device=absent):
            args, options = given[call]
            getattr(tl, call)(cells, *args, **options)

    @pytest.mark.parametrize("call", ["generate", "impute"])
    def test_a_model_on_a_gpu_stays_there(self, cells, call):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
        from scdiva import tl
        from scdiva.models import load_model

        model = load_model(device="cuda")
        getattr(tl, call)(cells, *((2,) if call == "generate" else ()), model=model)
        assert next(model.parameters()).is_cuda

    @pytest.mark.parametrize("call", ["embed", "fit_perturbation"])
    def test_threads(self, cells, call, monkeypatch):
        from concurrent.futures import ThreadPoolExecutor

        from scdiva import tl
        from scdiva.models import inference

        pools = []

        def counted(n, *args, **kwargs):
            pools.append(n)
            return ThreadPoolExecutor(n, *args, **kwargs)

        monkeypatch.setattr(inference, "ThreadPoolExecutor", counted)
        cells.obs["perturbation"] = ["control", "A", "B"] * 8
        with settings.override(threads=3, device="cpu"):
            if call == "embed":
                tl.embed(cells)
            else:
                tl.fit_perturbation(cells, "perturbation")
        assert set(pools) == {1, 3}  # one thread reads ahead

    def test_progress(self, cells, monkeypatch, capsys):
        from scdiva.tl import embed

        for name in ("DELAY", "LOG_INTERVAL"):
            monkeypatch.setattr(f"scdiva._settings.{name}", 0.0)
        for progress in (True, False):
            with settings.override(progress=progress):
                embed(cells)
            assert ("running the model" in capsys.readouterr().err) is progress

    def test_verbosity(self, cells, monkeypatch):
        from scdiva.tl import embed, generate

        said = []
        (handler,) = logger.handlers
        monkeypatch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
        monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
        for verbosity, wanted in (("warning", False), ("info", True)):
            said.clear()
            with settings.override(verbosity=verbosity):
                generate(cells, 2)
            assert any("drew 2 cells" in line for line in said) is wanted
        levels = ("error", "warning", "info", "hint", "debug")
        for number in range(5):
            said.clear()
            with settings.override(verbosity=number):
                embed(cells)
            found = [
                any(words in line for line in said)
                for words in (
                    f"adata.X: {cells.n_obs} cells",
                    "tl.embed added obsm['X_scdiva']",
                    "running the model on",
                )
            ]
            assert found == [number >= levels.index(level) for level in ("info", "hint", "debug")]


def test_torch_keeps_its_threads():
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    with torch_threads_kept():
        torch.set_num_threads(before + 1)  # as numba's threads do when they start
    assert torch.get_num_threads() == before


def test_a_number_holds_within_the_block_and_no_longer():
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    with torch_threads_kept(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(RuntimeError), torch_threads_kept(before + 1):
        raise RuntimeError
    assert torch.get_num_threads() == before
