"""Lists of texts are read as texts, on the command line and in a YAML file."""

from __future__ import annotations

import pytest

from scdiva.cli._parser import parse


@pytest.mark.parametrize("where", ["option", "yaml"])
@pytest.mark.parametrize(
    ("command", "option", "written", "expected"),
    [
        ("integrate", "batch_key", "0", "0"),
        ("integrate", "batch_key", "[0]", ["0"]),
        ("integrate", "batch_key", '["0", 1.50]', ["0", "1.50"]),
        (
            "integrate",
            "batch_key",
            "[no, yes, ON, 1e3, 0x1F, 2024-01-01]",
            ["no", "yes", "ON", "1e3", "0x1F", "2024-01-01"],
        ),
        ("integrate", "labels_key", "null", None),
        ("integrate", "labels_key", "no", "no"),
        ("integrate", "steps", "4", 4),
        ("integrate", "lr", "1e-3", 0.001),
        ("embed", "species", "{5: A, NO: B}", {"5": "A", "NO": "B"}),
        ("annotate", "parents", "{1: A, no: B}", {"1": "A", "no": "B"}),
        ("embed", "shard", "[0, 4]", (0, 4)),
        ("embed", "overwrite", "yes", True),
        ("embed", "overwrite", "no", False),
        ("embed", "use_raw", "off", False),
        ("pretrain", "resume", "on", True),
        ("pretrain", "validation_studies", "[0.5, 1]", ["0.5", "1"]),
        ("pack", "paths", "[1, off]", ["1", "off"]),
        ("pretrain", "train", "[1, off]", ["1", "off"]),
        ("pretrain", "validation_studies", "0.1", 0.1),
        ("pretrain", "validation_studies", "[1, no]", ["1", "no"]),
    ],
)
def test_values_are_read_as_their_option_has_them(tmp_path, where, command, option, written, expected):
    more = {
        "integrate": ["--file", "c.h5ad"] + ["--batch_key", "b"] * (option != "batch_key"),
        "pack": ["--vocabulary", "v"],
        "pretrain": [],
    }.get(command, ["--file", "c.h5ad"])
    if where == "option":
        more += [f"--{option}", written]
    else:
        (tmp_path / "o.yaml").write_text(f"{option}: {written}\n")
        more += ["--config", str(tmp_path / "o.yaml")]
    value = parse([command, "-o", "o.h5ad", *more])[1][option]
    assert value == expected
    assert type(value) is type(expected)
