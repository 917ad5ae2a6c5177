"""What is misspelt is refused in one line, with the nearest name, wherever it stands."""

from __future__ import annotations

import re

import pytest
import yaml

from scdiva import cli


def refused(arguments, capsys) -> str:
    """What is said, once it has been seen to be one line and code 2."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    return said


UNKNOWN = [
    ("training", "stepz", "training.steps"),
    ("training", "anchor_objectives", "training.anchor_objective"),
    ("model", "n_layer", "model.n_layers"),
    (None, "validation_study", "validation_studies"),
]


@pytest.mark.parametrize(("part", "name", "meant"), UNKNOWN)
@pytest.mark.parametrize("where", ["option", "yaml"])
def test_an_unknown_key_is_refused_with_the_nearest_one(options, capsys, part, name, meant, where):
    file, run = options
    key = name if part is None else f"{part}.{name}"
    arguments = ["pretrain", "--config", str(file)]
    if where == "yaml":
        content = yaml.safe_load(file.read_text())
        (content if part is None else content[part])[name] = 3
        file.write_text(yaml.safe_dump(content))
    else:
        arguments += [f"--{key}", "3"]
    said = refused(arguments, capsys)
    assert re.search(rf"no option {re.escape(key)} .*{re.escape(repr(meant))}.*--help", said), said
    assert not run.exists()


def test_several_at_once_and_one_like_none(options, capsys):
    said = refused(["pretrain", "--config", str(options[0]), "--resum=1", "--qqqqqq", "2"], capsys)
    assert "no option resum (did you mean 'resume'?)" in said
    assert "qqqqqq. See" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--training.steps", "many"], "training.steps"),
        (["--model.n_genes", "5"], "no option model.n_genes"),
        (["--model.anchor", "mean"], "model.anchor"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_values_that_make_no_sense_are_refused(options, capsys, arguments, message):
    assert message in refused(["pretrain", "--config", str(options[0]), *arguments], capsys)


def test_other_commands_say_their_own(capsys):
    assert refused(["info", "a", "--modell", "x"], capsys).startswith("scdiva info: no option modell (did")
    assert "b is not an option" in refused(["embed", "a", "b", "-o", "c"], capsys)
    said = refused(["annotate", "a.h5ad", "-o", "c", "--labels_key", "type", "--reject", "[x]"], capsys)
    assert "--reject: must be a number or null; got ['x']. See" in said
    assert "pretrain" in refused(["pretrainn"], capsys)
