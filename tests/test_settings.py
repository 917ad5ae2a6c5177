from __future__ import annotations

import logging
from pathlib import Path

import pytest

from scdiva._settings import Settings, logger, multiplies_bf16, settings


@pytest.fixture(autouse=True)
def _settings_as_before():
    with settings.override():
        yield


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", -1),
        ("seed", 1.0),
        ("seed", True),
        ("device", "gpu"),
        ("device", None),
        ("batch_size", 0),
        ("precision", "fp16"),
        ("progress", 1),
        ("threads", 0),
        ("threads", "two"),
        ("verbosity", "loud"),
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
    with settings.override(precision="int8"):
        assert settings.resolve_precision(None, "cpu") == "int8"
        assert settings.resolve_precision("fp32", "cpu") == "fp32"
    assert settings.resolve_precision("bf16", "cpu") == "bf16"
    for precision, device, way_out in (
        ("int8", "cuda:0", "precision='auto', or device='cpu'"),
        ("bf16", "mps", "precision='fp32'"),
    ):
        with pytest.raises(ValueError, match=f"precision='{precision}' was asked for.*{device}.*{way_out}"):
            settings.resolve_precision(precision, device)
    with pytest.raises(ValueError, match=r"settings\.precision must be"):
        settings.resolve_precision("half", "cpu")
    flags = Path("/proc/cpuinfo")
    if flags.exists() and not torch.cuda.is_available():
        assert multiplies_bf16("cpu") == any(f" {flag}" in flags.read_text() for flag in ("avx512_bf16", "amx_bf16"))


def test_settings_are_checked_when_made():
    with pytest.raises(ValueError, match="batch_size"):
        Settings(batch_size=0)
