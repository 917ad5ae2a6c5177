"""The command line's options, read off signatures and dataclasses, and what they mean, off docstrings."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jsonargparse import ActionConfigFile, ArgumentParser, DefaultHelpFormatter

from scdiva._nearest import or_nearest
from scdiva._version import __version__
from scdiva.cli._calls import CALLS, add_call, add_settings
from scdiva.cli._entropy import entropy
from scdiva.cli._help import arguments, summary
from scdiva.cli._info import info
from scdiva.cli._pretrain import pretrain
from scdiva.models.config import ScDiVaConfig
from scdiva.train.config import PretrainingConfig

COMMANDS = {
    **{name: call.line for name, call in CALLS.items()},
    "entropy": "Count the entropy of each gene over files, into a vocabulary to pretrain with.",
    "pretrain": "Pretrain a model on files and save it.",
    "info": "Tell what a model is, or what a file of cells holds.",
}
"""Each command, and what it does in a line."""


_UNKNOWN = re.compile(r"(?:Group '([^']+)' does not accept option|Option) '([^']+)'")
"""How the parser speaks of a key in a file that there is not."""


class _Help(DefaultHelpFormatter):
    """Help that names each option once."""

    def _get_type_str(self, action: Any) -> str | None:
        kind = super()._get_type_str(action)
        return None if kind is None or "Literal" in kind else kind  # choices are named before

    def _format_action_invocation(self, action: Any) -> str:
        names = [name for name in action.option_strings if not name.endswith("+")]
        if not names or action.nargs == 0 or str(action.nargs) == "==SUPPRESS==":
            return super()._format_action_invocation(action)
        return f"{', '.join(names)} {self._format_args(action, self._get_default_metavar_for_optional(action))}"


class _Parser(ArgumentParser):
    """A parser that says in one line what is wrong, and which option may have been meant; none is abbreviated."""

    def __init__(self, command: str, description: str, usage: str) -> None:
        super().__init__(
            prog=f"scdiva {command}",
            description=description,
            usage=f"scdiva {command} {usage} [options]",
            formatter_class=_Help,
            allow_abbrev=False,
        )

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what is wrong and end the process with code 2.

        Parameters
        ----------
        message, ex
            What the parser found.
        """
        unknown = [".".join(filter(None, names)) for names in _UNKNOWN.findall(message)]
        if message.startswith("unrecognized arguments"):
            unknown = re.findall(r"--([\w.-]+)", message) or message.split(":", 1)[1].split()
        if unknown:
            known = [action.dest for action in self._actions]
            message = "no option " + ", ".join(f"{name}{or_nearest(name, known)}" for name in unknown)
        message = re.sub(r'Parser key "([^"]+)":\s*', r"--\1: ", message.strip())
        message = re.sub(
            r"\s*\n\s*(- )?", " ", re.sub(r"Expected an? <class '(\w+)'>", r"Expected \1", message)
        ).rstrip(".")
        sys.stderr.write(f"{self.prog}: {message}. See --help.\n")
        self.exit(2)


def command_parser(command: str, preset: str | None = None) -> ArgumentParser:
    """Make the parser of a command.

    Parameters
    ----------
    command
        Its name.
    preset
        Whose configuration gives the defaults of model and training, for `pretrain`.
    """
    if command in CALLS:
        call = CALLS[command]
        said = f"{call.line} In Python: scdiva.tl.{call.name}. {summary(call.function)}"
        parser = _Parser(command, said, "FILE -o OUT")
        _add_config(parser)
        add_call(parser, command)
        return parser
    if command == "pretrain":
        return _pretrain_parser(preset)
    return _entropy_parser() if command == "entropy" else _info_parser()


def _pretrain_parser(preset: str | None) -> ArgumentParser:
    parser = _Parser("pretrain", summary(pretrain), "--train FILES --out FOLDER")
    _add_config(parser)
    parser.add_function_arguments(pretrain, skip={"model", "training"}, as_group=False)
    add_settings(parser, ["verbosity"])
    parser.add_class_arguments(PretrainingConfig, "training", instantiate=False)
    # the number of genes is the vocabulary's, hence no option
    parser.add_class_arguments(ScDiVaConfig, "model", skip={"n_genes"}, instantiate=False)
    _explain(parser, arguments(pretrain))
    _explain(parser, arguments(PretrainingConfig), "training.")
    _explain(parser, arguments(ScDiVaConfig), "model.")
    if preset is not None:
        start = {"training": PretrainingConfig.preset(preset).to_dict(), "model": ScDiVaConfig.preset(preset).to_dict()}
        del start["model"]["n_genes"]
        parser.set_defaults({f"{part}.{name}": value for part, of in start.items() for name, value in of.items()})
    return parser


def _entropy_parser() -> ArgumentParser:
    parser = _Parser("entropy", summary(entropy), "FILES -o OUT")
    parser.add_argument("files", nargs="*", type=str, default=[])
    parser.add_argument("-o", "--out", type=str, required=True)
    parser.add_function_arguments(entropy, skip={"files", "out"}, as_group=False)
    _explain(parser, arguments(entropy))
    add_settings(parser, ["progress", "verbosity"])
    return parser


def _info_parser() -> ArgumentParser:
    parser = _Parser("info", summary(info), "WHAT")
    parser.add_argument("what", type=str)
    parser.add_function_arguments(info, skip={"what"}, as_group=False)
    _explain(parser, arguments(info))
    add_settings(parser, ["verbosity"])
    return parser


def _add_config(parser: ArgumentParser) -> None:
    parser.add_argument("--config", action=ActionConfigFile)
    said = {
        "config": "A YAML file with any of the options below; what the command line says goes before it.",
        "print_config": "Print such a file with the options as they are, and end.",
    }
    _explain(parser, said)


def _explain(parser: ArgumentParser, said: dict[str, str], prefix: str = "") -> None:
    for action in parser._actions:
        name = action.dest.removeprefix(prefix)
        if action.dest == f"{prefix}{name}" and name in said:
            action.help = said[name]


def options_of(argv: Sequence[str] | None) -> tuple[str, dict[str, Any]]:
    """Read the command line.

    Parameters
    ----------
    argv
        Arguments without the program's name; None reads the process's.

    Returns
    -------
    The command and its options, by name.
    """
    command, *rest = list(sys.argv[1:] if argv is None else argv) or [""]
    if command not in COMMANDS:
        _overview(command)
    parser = command_parser(command)
    rest = _spelled_out(parser, rest, bare="--file" if command in CALLS else None)
    if command == "pretrain" and (preset := _preset(parser, rest)) is not None:
        try:
            parser = command_parser(command, preset)
        except ValueError as error:
            parser.error(str(error))
    found: dict[str, Any] = parser.parse_args(rest).as_dict()
    found.pop("config", None)
    return command, found


def _preset(parser: ArgumentParser, words: list[str]) -> str | None:
    """Find the preset, which may stand in a configuration file, and gives the defaults under everything that is said.

    The words that print the options end the process, before the preset's are known, and print also where what is
    required is not said: they are left out here, and that is made up, under all that is said.
    """
    quiet = [word for word in words if word.split("=")[0] != "--print_config"]
    preset: str | None = parser.parse_args(["--train", "[x]", "--out", "x", *quiet]).preset
    return preset


def _spelled_out(parser: ArgumentParser, words: list[str], bare: str | None) -> list[str]:
    """Say outright what may be left out: `true` of a switch, and before a word that belongs to no option, its option.

    Parameters
    ----------
    parser
        Knows which options are switches, and which take no word.
    words
        The command's words.
    bare
        The option; None leaves such words as they are.
    """
    kinds = {name: action for action in parser._actions for name in action.option_strings}
    said: list[str] = []
    found = None
    while words:
        word, *words = words
        if not word.startswith("-") or word == "-":
            if bare is not None:
                if found is not None:
                    parser.error(f"one file is read, but beside {found!r} there is {word!r}")
                found = word
                said.append(bare)
            said.append(word)
            continue
        said.append(word)
        action = kinds.get(word)
        if (action is not None and action.nargs == 0) or "=" in word:
            continue
        if action is None:  # is going to be refused, with the word that was meant for it
            said += [words.pop(0)] if words and not words[0].startswith("-") else []
            continue
        if getattr(action, "_typehint", None) is bool and (not words or words[0].lower() not in ("true", "false")):
            said.append("true")
        elif words and action.dest != "print_config":
            said.append(words.pop(0))
    return said


def _overview(word: str) -> NoReturn:
    """Answer what is asked of no command, and end the process."""
    if word == "--version":
        sys.stdout.write(f"scdiva {__version__}\n")
        raise SystemExit(0)
    if word in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        lines = [f"  {name:<{width}}  {line}" for name, line in COMMANDS.items()]
        sys.stdout.write(
            "usage: scdiva COMMAND [options]\n\nSingle-cell embeddings from masked discrete diffusion.\n\ncommands:\n"
            + "\n".join(lines)
            + "\n\noptions:\n  -h, --help  Show this, or with a command its options.\n"
            "  --version   Show the version.\n\n"
            "Options may also stand in a YAML file, by the same names: --config run.yaml.\n"
            "Example: scdiva embed cells.h5ad -o embedded.h5ad\n"
        )
        raise SystemExit(0)
    what = "option" if word.startswith("-") else "command"
    known = ["--help", "--version"] if what == "option" else list(COMMANDS)
    said = f"no {what} {word}{or_nearest(word, known)}" if word else f"name a command: {', '.join(COMMANDS)}"
    sys.stderr.write(f"scdiva: {said}. See --help.\n")
    raise SystemExit(2)
