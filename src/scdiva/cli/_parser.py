"""The command line's options, read off signatures and dataclasses."""

from __future__ import annotations

import re
import sys
from typing import Any, NoReturn

from jsonargparse import ActionConfigFile, ArgumentParser

from scdiva._nearest import or_nearest
from scdiva.cli._entropy import entropy
from scdiva.cli._pretrain import pretrain
from scdiva.models.config import ScDiVaConfig
from scdiva.train.config import PretrainingConfig


class _Parser(ArgumentParser):
    """A parser that says in one line what is wrong, and which option may have been meant; none is abbreviated."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what is wrong and end the process with code 2.

        Parameters
        ----------
        message, ex
            What the parser found.
        """
        parser: ArgumentParser = self
        command = re.match(r"Subcommand '(\w+)'", message)
        if command is not None and command[1] in PARSERS:
            parser = command_parser(command[1])
        unknown = re.findall(r"does not accept option '([^']+)'", message)
        if message.startswith("unrecognized arguments"):
            unknown = re.findall(r"--([\w.]+)", message) or message.split(":", 1)[1].split()
        if unknown:
            known = [action.dest for action in parser._actions]
            message = "no option " + ", ".join(f"{name}{or_nearest(name, known)}" for name in unknown)
        message = re.sub(r"\s*\n\s*(- )?", " ", message.strip())
        sys.stderr.write(f"{parser.prog.replace(' [options]', '')}: {message}. See --help.\n")
        self.exit(2)


def command_parser(command: str, preset: str | None = None) -> ArgumentParser:
    """Make the parser of a command.

    Parameters
    ----------
    command
        Its name.
    preset
        Whose configuration gives the defaults of model and training.
    """
    return PARSERS[command](preset)


def _pretrain_parser(preset: str | None) -> ArgumentParser:
    parser = _Parser(prog="scdiva pretrain", description="Pretrain a model on h5ad and zarr files and save it.")
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of the options below.")
    parser.add_function_arguments(pretrain, skip={"model", "training"}, as_group=True)
    parser.add_class_arguments(PretrainingConfig, "training", instantiate=False)
    # the number of genes is the vocabulary's, hence no option
    parser.add_class_arguments(ScDiVaConfig, "model", skip={"n_genes"}, instantiate=False)
    if preset is not None:
        start = {"training": PretrainingConfig.preset(preset).to_dict(), "model": ScDiVaConfig.preset(preset).to_dict()}
        del start["model"]["n_genes"]
        parser.set_defaults({f"{part}.{name}": value for part, of in start.items() for name, value in of.items()})
    return parser


def _entropy_parser(preset: str | None) -> ArgumentParser:
    parser = _Parser(
        prog="scdiva entropy", description="Count the entropy of each gene over files and write a vocabulary with it."
    )
    parser.add_argument("files", nargs="*", type=str, help=".h5ad or .zarr files, and folders of them")
    parser.add_argument("-o", "--out", type=str, required=True, help="vocabulary to write, a parquet file")
    parser.add_function_arguments(entropy, skip={"files", "out"}, as_group=True)
    return parser


PARSERS = {"pretrain": _pretrain_parser, "entropy": _entropy_parser}


def options_of(argv: list[str] | None) -> tuple[str, dict[str, Any]]:
    """Read the command line.

    Parameters
    ----------
    argv
        Arguments without the program's name; None reads the process's.

    Returns
    -------
    The command and its options, by name.
    """
    options = _program(None).parse_args(argv)
    # A preset, which may stand in a configuration file, gives the defaults under everything that is said.
    preset = options[options.command].get("preset")
    if preset is not None:
        try:
            parser = _program(preset)
        except ValueError as error:
            command_parser(options.command).error(str(error))
        options = parser.parse_args(argv)
    found: dict[str, Any] = options[options.command].as_dict()
    found.pop("config", None)
    return options.command, found


def _program(preset: str | None) -> ArgumentParser:
    parser = _Parser(prog="scdiva", description="Single-cell embeddings from masked discrete diffusion.")
    commands = parser.add_subcommands(dest="command", required=True)
    for command in PARSERS:
        of_command = command_parser(command, preset)
        commands.add_subcommand(command, of_command, help=of_command.description)
    return parser
