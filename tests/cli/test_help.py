"""`--help` lists the commands, and explains each option with its docstring."""

from __future__ import annotations

import inspect
import re

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
    assert [one.dest for one in command_parser(name)._actions if not one.help] == []
    assert re.findall(r"``|:\w+:`|\bNone\b|\w=True|[Ss]ee above|A loaded model|\]_", out) == []
    assert f"options of {name}:" in out


def test_a_shell_can_complete_all_options():
    subparsers = next(one for one in cli.parser()._actions if one.dest == "command")
    for name, parser in subparsers.choices.items():
        expected = {option for one in command_parser(name)._actions for option in one.option_strings}
        assert {option for one in parser._actions for option in one.option_strings} == expected
        assert len(expected) > 5
