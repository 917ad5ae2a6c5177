"""The command line's options, read off signatures and dataclasses, with their help, off docstrings.

jsonargparse could read the types of a call itself, and imports all that they name: torch, anndata and the model before
`--help` answers. So types are read from the source here, and of what is imported for type checkers alone only AnnData
is known: a file.
"""

from __future__ import annotations

import argparse
import ast
import collections.abc
import dataclasses
import functools
import inspect
import operator
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import GenericAlias, UnionType
from typing import Any, Literal, NoReturn, get_args, get_origin

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, set_loader

from scdiva import tl
from scdiva._checks import or_nearest
from scdiva._files import check_regular, parse_yaml
from scdiva._settings import Settings, settings
from scdiva._version import __version__
from scdiva.cli._calls import CALLS, SETTINGS, TABLE, info
from scdiva.data.packing import pack_files
from scdiva.models.config import ScDiVaConfig
from scdiva.train._pretrain import pretrain
from scdiva.train.config import PretrainingConfig

COMMANDS = {
    **{name: call.line for name, call in CALLS.items()},
    "pack": "Serialise files into a corpus to train on, part by part.",
    "pretrain": "Pretrain a model on files and save it.",
    "info": "Describe a model, or a file of cells.",
}
"""Each command, and what it does in a line."""

_OURS = {
    "file": "The .h5ad or .zarr to read, which may also stand first, without --file. It is not changed.",
    "out": "The file to write: a .zarr folder if its name ends so, else .h5ad. It is there whole or not at all.",
    "overwrite": "Replace what stands at --out, and at --save.",
    "save": "A folder to keep in what was fitted, for --model of later calls.",
    "config": "A YAML file with any of the options below; the command line takes precedence.",
}
"""Help of options that no docstring has."""
_SPECIES = (
    " On the command line: human, mouse, or a FILE of two columns, gene and human gene, separated by commas if its "
    "name ends in .csv, else by tabs."
)
"""Help of `--species`, after the docstring's."""
_UNKNOWN = re.compile(r"(?:Group '([^']+)' does not accept option|Option) '([^']+)'")
"""The parser's message about an unknown key in a file."""
_UNION = re.compile(
    r"Does not validate against any of the Union subtypes Subtypes: \[(.*?)\] Errors:.*Given value: (.*)"
)
"""The parser's message about a value that is of none of several types."""
_TYPES = {"float": "a number", "int": "a whole number", "bool": "true or false", "str": "text", "NoneType": "null"}
MOST_CONFIG = 1 << 20
"""Bytes of the largest `--config` that is read."""
_SECTION = re.compile(r"^(\w[\w ]*)\n-{3,}\n", flags=re.M)
_ROLE = re.compile(r":\w+:`~?(?:([^`<]+) <[^`]*>|(?:[\w.]+\.)?([\w]+))`")
_VALUES = {"None": "null", "True": "true", "False": "false"}
"""How values are written on a command line and in YAML."""
_LED_ON = re.compile(r"As (?:for|in) (\w+)\.?$")
"""What a description says that refers to another call's."""


class _Texts(yaml.SafeLoader):  # type: ignore[misc]
    """Reads values as they are written: clusters 0 and 1, a gene NO. Options that are numbers convert them."""


_NULL = "tag:yaml.org,2002:null"
_Texts.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag == _NULL]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _load(text: str, path: str = "") -> Any:
    return parse_yaml(path or "the value", text.encode(), _Texts)


set_loader("texts", _load, (ValueError,))


def _expected(found: re.Match[str]) -> str:
    """Say what a value must be, and what it is."""
    kinds = [_TYPES.get(kind, kind) for kind in re.split(r",\s*", found[1])]
    return f"must be {' or '.join(kinds)}; got {found[2]}"


class _Parser(ArgumentParser):
    """A parser whose errors are one line and name the nearest option; none is abbreviated."""

    def __init__(self, command: str, description: str, usage: str) -> None:
        usage = f"scdiva {command} {usage} [options]"
        super().__init__(
            prog=f"scdiva {command}", description=description, usage=usage, allow_abbrev=False, parser_mode="texts"
        )
        if command != "info":
            self.add_argument("--config", action=ActionConfigFile, help=_OURS["config"])

    def parse_path(self, path: str | os.PathLike[str], *how: Any, **more: Any) -> Any:
        """Read the file of `--config`, unless it is too large."""
        try:
            check_regular(path, MOST_CONFIG)
        except ValueError as error:
            raise TypeError(str(error)) from error
        return super().parse_path(path, *how, **more)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Write what is wrong and end the process with code 2.

        Parameters
        ----------
        message, ex
            What the parser found.
        """
        unknown = [".".join(filter(None, names)) for names in _UNKNOWN.findall(message)]
        if message.startswith("unrecognized arguments"):
            unknown = re.findall(r"--([\w.-]+)", message)
            if not unknown:
                extra = message.split(":", 1)[1].split()
                message = f"{extra[0]} is not an option. Write several values as one list, such as '[A, {extra[0]}]'"
        if unknown:
            known = [action.dest for action in self._actions]
            message = "no option " + ", ".join(f"{name}{or_nearest(name, known)}" for name in unknown)
        message = re.sub(r'Parser key "([^"]+)":\s*', r"--\1: ", " ".join(message.split()))
        message = re.sub(r"<class '(\w+)'>", r"\1", message)
        message = _UNION.sub(_expected, message)
        sys.stderr.write(f"{self.prog}: {message.rstrip('.')}. See --help.\n")
        self.exit(2)

    def add(self, name: str, kind: Any, default: Any, text: str = "") -> None:
        """Add an option.

        Parameters
        ----------
        name, kind, text
            The option, without its dashes, its type, and its help.
        default
            What it is if it is not given; `inspect.Parameter.empty` if it must be.
        """
        how: dict[str, Any] = {"required": True} if default is inspect.Parameter.empty else {"default": default}
        if kind is bool:  # may stand alone
            how |= {"nargs": "?", "const": True}
        names = ["-o", "--out"] if name == "out" else [f"--{name}"]
        self.add_argument(*names, type=kind, help=text + (_SPECIES if name == "species" else ""), **how)

    def add_function(self, function: Callable[..., Any], texts: Mapping[str, str], skipped: Sequence[str]) -> None:
        """Add the arguments of a function, by their names, types and defaults.

        Parameters
        ----------
        function
            The function.
        texts
            Their help.
        skipped
            Those that are no options.
        """
        for name, parameter in inspect.signature(function).parameters.items():
            if name not in skipped:
                self.add(name, sayable(parameter.annotation, function), parameter.default, texts[name])

    def add_fields(self, cls: type, prefix: str, skipped: Sequence[str] = ()) -> None:
        """Add the fields of a dataclass; those that are not said are left to it.

        Parameters
        ----------
        cls
            The dataclass.
        prefix
            Of the options, such as `"model."`.
        skipped
            Fields that are no options.
        """
        texts = arguments(cls)
        for field in dataclasses.fields(cls):
            if field.name not in skipped:
                self.add(f"{prefix}{field.name}", sayable(str(field.type), cls), argparse.SUPPRESS, texts[field.name])


def command_parser(command: str) -> _Parser:
    """Make the parser of a command.

    Parameters
    ----------
    command
        Its name.
    """
    kept: Sequence[str] = ("verbosity",)
    if command == "info":
        parser = _Parser(command, summary(info), "WHAT")
        parser.add_function(info, arguments(info), ())
    elif command == "pack":
        parser = _Parser(command, summary(pack_files), "--paths FILES --vocabulary NAME -o FOLDER")
        parser.add_function(pack_files, arguments(pack_files), ())
        kept = ("progress", "verbosity")
    elif command == "pretrain":
        parser = _Parser(command, summary(pretrain), "--train FILES | --soma URI --out FOLDER")
        texts = arguments(pretrain)
        parser.add("train", sayable("Sequence[str] | str | None", pretrain), None, texts["train"])
        parser.add_function(pretrain, texts, ("train", "model", "training"))
        parser.add_fields(PretrainingConfig, "training.")
        parser.add_fields(ScDiVaConfig, "model.", ("n_genes",))  # that number is the vocabulary's
    else:
        call = CALLS[command]
        taken, texts = inspect.signature(call.function).parameters, arguments(call.function)
        for name, text in texts.items():
            led_on = _LED_ON.match(text)
            if led_on and led_on[1] in tl.__all__:
                texts[name] = arguments(getattr(tl, led_on[1])).get(name, text)
        parser = _Parser(
            command, f"{call.line} In Python: scdiva.tl.{call.name}. {summary(call.function)}", "FILE -o OUT"
        )
        parser.add("file", str, inspect.Parameter.empty, _OURS["file"])
        table = f" A name in {TABLE}: the edges alone, as a table." if TABLE in call.endings else ""
        parser.add("out", str, inspect.Parameter.empty, _OURS["out"] + table)
        parser.add("overwrite", bool, False, _OURS["overwrite"])
        if call.fits:
            parser.add("save", str | None, None, _OURS["save"])
        parser.add_function(call.function, texts, ("adata", "path", "out", "overwrite", "copy"))
        kept = [name for name in SETTINGS if name not in taken]
    for name in kept:
        kind = sayable(Settings.__annotations__[name], Settings)
        parser.add(name, kind, getattr(settings, name), arguments(Settings)[name])
    return parser


def options_of(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Read the command line.

    Parameters
    ----------
    words
        Arguments without the program's name.

    Returns
    -------
    The command and its options, by name.
    """
    command, *rest = words or [""]
    if command in ("-h", "--help", "--version"):
        lines = "\n".join(f"  {name:<10} {line}" for name, line in COMMANDS.items())
        top = argparse.ArgumentParser(
            "scdiva",
            "scdiva COMMAND [options]",
            f"Single-cell embeddings from masked discrete diffusion.\n\ncommands:\n{lines}",
            "Example: scdiva embed cells.h5ad -o embedded.h5ad. With a command, --help shows its options.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        top.add_argument("--version", action="version", version=f"scdiva {__version__}")
        top.parse_args([command])
    if command not in COMMANDS:
        wrong = f"no command {command}{or_nearest(command, COMMANDS)}" if command else "name a command"
        sys.stderr.write(f"scdiva: {wrong}: one of {', '.join(COMMANDS)}. See --help.\n")
        raise SystemExit(2)
    parser = command_parser(command)
    rest = [re.sub(r"^--[\w-]+", lambda option: "--" + option[0][2:].replace("-", "_"), word) for word in rest]
    if rest and not rest[0].startswith("-"):
        rest = [{"info": "--what", "pack": "--paths"}.get(command, "--file"), *rest]
    found: dict[str, Any] = parser.parse_args(rest).as_dict()
    found.pop("config", None)
    return command, found


def sayable(annotation: str, owner: Any) -> Any:
    """Find that part of an argument's type which can be written on a command line.

    Parameters
    ----------
    annotation
        The type, as the source has it.
    owner
        Function or class whose module the names are of.

    Returns
    -------
    A union of what is no object: numbers, text, literals, and lists and dicts of these. A list goes before a text,
    since any word is a text. Cells (AnnData) are named by their file.
    """
    names = dict(vars(inspect.getmodule(owner)))
    kinds: list[Any] = []
    parts = [ast.parse(annotation, mode="eval").body]
    while parts:
        part = parts.pop()
        if isinstance(part, ast.BinOp):
            parts += [part.right, part.left]
            continue
        try:
            kind = eval(ast.unparse(part), names)
            for one in get_args(kind) if isinstance(kind, UnionType) else [kind]:
                kinds += _plain(one)
        except (NameError, AttributeError):  # imported for type checkers alone: an object
            kinds += [str] if ast.unparse(part) == "AnnData" else []
    return functools.reduce(operator.or_, sorted(dict.fromkeys(kinds), key=lambda kind: kind is str))


def _plain(kind: Any) -> list[Any]:
    origin, inner = get_origin(kind), get_args(kind)
    if kind in (str, int, float, bool, None, type(None)) or origin in (Literal, tuple, list, dict):
        return [type(None) if kind is None else kind]
    if origin is collections.abc.Sequence:
        return [GenericAlias(list, inner)]
    return [GenericAlias(dict, inner)] if origin is collections.abc.Mapping else []


def summary(thing: Any) -> str:
    """Give the first paragraph of a docstring.

    Parameters
    ----------
    thing
        A function or class.
    """
    return plain((inspect.getdoc(thing) or "").split("\n\n")[0])


def arguments(thing: Any) -> dict[str, str]:
    """Describe each argument of a function, or each field of a dataclass.

    Parameters
    ----------
    thing
        Function or class with a numpydoc docstring; of a class those it comes from are read too.

    Returns
    -------
    Text without markup, by name. Of several names described together each gets the common text.
    """
    found: dict[str, str] = {}
    for one in reversed(inspect.getmro(thing)) if inspect.isclass(thing) else [thing]:
        parts = _SECTION.split(inspect.getdoc(one) or "")
        for title, body in zip(parts[1::2], parts[2::2], strict=True):
            for entry in re.split(r"\n(?=\S)", body.strip("\n")) if title in ("Parameters", "Attributes") else ():
                names, _, text = entry.partition("\n")
                found |= dict.fromkeys(re.split(r", *", names.split(" : ")[0].strip()), plain(text))
    return found


def plain(text: str) -> str:
    """Take the markup out of a description, put it on one line, and write values as a command line does.

    Parameters
    ----------
    text
        reStructuredText as docstrings hold it.
    """
    text = _ROLE.sub(lambda role: (role[1] or role[2]).strip(), text)
    text = re.sub(r"\s*\[\d+\]_", "", text).replace("``", "").replace("`", "")
    for value, written in _VALUES.items():
        text = re.sub(rf"\b{value}\b", written, text)
    return " ".join(text.split())
