"""Unknown options and invalid values end the process before anything is read."""

from __future__ import annotations

import pytest
import yaml

from scdiva import cli


def refused(arguments, capsys) -> str:
    """The error of a command that ends with code 2."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("where", ["option", "yaml"])
@pytest.mark.parametrize("key", ["training.stepz", "model.n_layer", "model.n_genes", "validation_study"])
def test_an_unknown_option_is_refused(options, capsys, key, where):
    file, run = options
    arguments = ["pretrain", "--config", str(file)]
    if where == "yaml":
        content = yaml.safe_load(file.read_text())
        *part, name = key.split(".")
        (content[part[0]] if part else content)[name] = 3
        file.write_text(yaml.safe_dump(content))
    else:
        arguments += [f"--{key}", "3"]
    assert key.split(".")[-1] in refused(arguments, capsys)
    assert not run.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--training.steps", "many"], "training.steps"),
        (["--model.anchor", "mean"], "model.anchor"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--resum=1"], "resum"),
    ],
)
def test_invalid_values_are_refused(options, capsys, arguments, message):
    assert message in refused(["pretrain", "--config", str(options[0]), *arguments], capsys)


def test_required_options_are_named(capsys):
    assert "--out" in refused(["embed", "a.h5ad"], capsys)
    assert "--batch_key" in refused(["integrate", "a.h5ad", "-o", "b.h5ad"], capsys)
    assert "b" in refused(["embed", "a", "b", "-o", "c"], capsys)
