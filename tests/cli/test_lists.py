"""Lists of texts are texts, on the command line and in a file of options, whatever YAML would make of them."""

from __future__ import annotations

import pytest

from scdiva.cli._parser import options_of


@pytest.mark.parametrize("where", ["option", "yaml"])
@pytest.mark.parametrize(
    ("command", "option", "written", "expected"),
    [
        ("generate", "groups", "0", "0"),
        ("generate", "groups", "[0]", ["0"]),
        ("generate", "groups", "[0, 1]", ["0", "1"]),
        ("generate", "groups", '["0", 1.50]', ["0", "1.50"]),
        (
            "generate",
            "groups",
            "[no, yes, ON, 1e3, 0x1F, 2024-01-01]",
            ["no", "yes", "ON", "1e3", "0x1F", "2024-01-01"],
        ),
        ("generate", "groups", "null", None),
        ("generate", "between", "[0, 1]", ("0", "1")),
        ("generate", "fixed", "{5: 1, NO: 0.5}", {"5": 1.0, "NO": 0.5}),
        ("generate", "fraction", "[0, 0.5]", [0.0, 0.5]),
        ("generate", "n_cells", "4", 4),
        ("grn", "sources", "[NO, LYZ]", ["NO", "LYZ"]),
        ("grn", "layers", "[0, 1]", [0, 1]),
        ("perturb", "predict", "[CD3D+LYZ, 5]", ["CD3D+LYZ", "5"]),
        ("perturb", "guides", "{1: A, no: B}", {"1": "A", "no": "B"}),
        ("perturb", "dose", "1", 1.0),
        ("integrate", "batch_key", "[1, off]", ["1", "off"]),
        ("embed", "overwrite", "yes", True),
    ],
)
def test_values_are_read_as_their_option_has_them(tmp_path, where, command, option, written, expected):
    more = ["--perturbation_key", "p"] if command == "perturb" else []
    more += ["--batch_key", "b"] if command == "integrate" and option != "batch_key" else []
    more += ["--n_cells", "3"] if command == "generate" and option != "n_cells" else []
    if where == "option":
        more += [f"--{option}", written]
    else:
        (tmp_path / "o.yaml").write_text(f"{option}: {written}\n")
        more += ["--config", str(tmp_path / "o.yaml")]
    found = options_of([command, "c.h5ad", "-o", "o.h5ad", *more])[1][option]
    assert found == expected
    assert type(found) is type(expected)
