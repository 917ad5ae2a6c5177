"""`--help` lists the commands, and explains each option with its docstring."""

from __future__ import annotations

import inspect

import pytest

import scdiva as sd
from scdiva import cli
from scdiva.cli._parser import COMMANDS, command_parser

OBJECTS = {"adata", "path", "training", "model"}
"""Arguments that are options of another name, or groups of options."""


def ended(capsys, *words):
    """Exit code, stdout and stderr of a command that ends the process."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(words))
    return stopped.value.code, *capsys.readouterr()


def test_the_commands_are_listed(capsys):
    code, out, _ = ended(capsys, "--help")
    assert code == 0
    assert all(name in out for name in COMMANDS)
    assert ended(capsys, "--version")[:2] == (0, f"scdiva {sd.__version__}\n")


@pytest.mark.parametrize("words", [[], ["embd"], ["generate", "cells.h5ad"], ["--versio"]])
def test_other_commands_are_refused(capsys, words):
    code, _, err = ended(capsys, *words)
    assert code == 2
    assert "embed" in err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_is_an_option_with_help(capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "400")
    code, out, _ = ended(capsys, name, "--help")
    assert code == 0
    for argument in inspect.signature(COMMANDS[name][0]).parameters.keys() - OBJECTS:
        assert f"--{argument}" in out
    plain = [one for one in command_parser(name)._actions if one.dest.partition(".")[0] not in ("training", "model")]
    assert all(one.help for one in plain)
