"""The command line's options, read off signatures and dataclasses, with their help, off docstrings.

jsonargparse could read the types of a call itself, and imports all that they name: torch, anndata and the model before
`--help` answers. So types are read from the source here, and of what is imported for type checkers alone only AnnData
is known: a file.
"""

from __future__ import annotations

import ast
import collections.abc
import functools
import inspect
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import GenericAlias, UnionType
from typing import Any, Literal, NoReturn, get_args, get_origin

from jsonargparse import ActionConfigFile, ArgumentParser, DefaultHelpFormatter

from scdiva import tl
from scdiva._checks import or_nearest
from scdiva._settings import Settings, settings
from scdiva._version import __version__
from scdiva.cli._calls import CALLS, SETTINGS, TABLES
from scdiva.cli._entropy import entropy
from scdiva.cli._info import info
from scdiva.models.config import ScDiVaConfig
from scdiva.train._pretrain import pretrain
from scdiva.train.config import PretrainingConfig

COMMANDS = {
    **{name: call.line for name, call in CALLS.items()},
    "entropy": "Count the entropy of each gene over files, into a vocabulary to pretrain with.",
    "pretrain": "Pretrain a model on files and save it.",
    "info": "Describe a model, or a file of cells.",
}
"""Each command, and what it does in a line."""

_OURS = {
    "file": "The .h5ad or .zarr to read, which may also stand without --file. It is not changed.",
    "out": "The file to write: a .zarr folder if its name ends so, else .h5ad. It is there whole or not at all.",
    "overwrite": "Replace what stands at --out, and at --save.",
    "save": "A folder to keep in what was fitted, for --model of later calls.",
    "config": "A YAML file with any of the options below; the command line takes precedence.",
    "print_config": "Print such a file with the options as they are, and end.",
}
"""Help of options that no docstring has."""
_SPECIES = (
    " On the command line: human, mouse, or a FILE of two columns, gene and human gene, separated by commas if its "
    "name ends in .csv, else by tabs."
)
"""Help of `--species`, after the docstring's."""
_UNKNOWN = re.compile(r"(?:Group '([^']+)' does not accept option|Option) '([^']+)'")
"""The parser's message about an unknown key in a file."""
_SECTION = re.compile(r"^(\w[\w ]*)\n-{3,}\n", flags=re.M)
_ROLE = re.compile(r":\w+:`~?(?:([^`<]+) <[^`]*>|(?:[\w.]+\.)?([\w]+))`")
_VALUES = {"None": "null", "True": "true", "False": "false"}
"""How values are written on a command line and in YAML."""
_LED_ON = re.compile(r":func:`(?:scdiva\.\w+\.)?(\w+)`")


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
    """A parser whose errors are one line and name the nearest option; none is abbreviated."""

    def __init__(self, command: str, description: str, usage: str) -> None:
        super().__init__(
            prog=f"scdiva {command}",
            description=description,
            usage=f"scdiva {command} {usage} [options]",
            formatter_class=_Help,
            allow_abbrev=False,
        )

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Write what is wrong and end the process with code 2.

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
        return _call_parser(command)
    if command == "pretrain":
        return _pretrain_parser(preset)
    function, bare, usage = (entropy, "files", "FILES -o OUT") if command == "entropy" else (info, "what", "WHAT")
    parser = _Parser(command, summary(function), usage)
    if command == "entropy":
        parser.add_argument("files", nargs="*", type=str, default=[])
        parser.add_argument("-o", "--out", type=str, required=True)
    else:
        parser.add_argument("what", type=str)
    _add_arguments(parser, function, (bare, "out"))
    _explain(parser, arguments(function))
    _add_settings(parser, ["progress", "verbosity"] if command == "entropy" else ["verbosity"])
    return parser


def _call_parser(command: str) -> ArgumentParser:
    call = CALLS[command]
    description = f"{call.line} In Python: scdiva.tl.{call.name}. {summary(call.function)}"
    parser = _Parser(command, description, "FILE -o OUT")
    _add_config(parser)
    parser.add_argument("--file", type=str, required=True)
    parser.add_argument("-o", "--out", type=str, required=True)
    parser.add_argument("--overwrite", type=bool, default=False)
    if call.fits:
        parser.add_argument("--save", type=str | None, default=None)
    _add_arguments(parser, call.function, ("adata", "path", "out", "overwrite", "copy"))
    _explain(parser, arguments(call.function, {name: getattr(tl, name) for name in tl.__all__}) | _OURS)
    if call.table:
        _explain(parser, {"out": f"{_OURS['out']} A name in {', '.join(TABLES)}: the edges alone, as a table."})
    _add_settings(parser, [name for name in SETTINGS if name not in inspect.signature(call.function).parameters])
    return parser


def _pretrain_parser(preset: str | None) -> ArgumentParser:
    parser = _Parser("pretrain", summary(pretrain), "--train FILES --out FOLDER")
    _add_config(parser)
    _add_arguments(parser, pretrain, ("model", "training"))
    _add_settings(parser, ["verbosity"])
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


def _add_config(parser: ArgumentParser) -> None:
    parser.add_argument("--config", action=ActionConfigFile)
    _explain(parser, _OURS)


def _add_arguments(parser: ArgumentParser, function: Callable[..., Any], skipped: Sequence[str]) -> None:
    """Add the arguments of a function, by their names, types and defaults."""
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in skipped:
            needed = parameter.default is parameter.empty
            start = {"required": True} if needed else {"default": parameter.default}
            parser.add_argument(f"--{name}", type=sayable(parameter.annotation, function), **start)


def _add_settings(parser: ArgumentParser, names: Sequence[str]) -> None:
    for name in names:
        kind = sayable(Settings.__annotations__[name], Settings)
        parser.add_argument(f"--{name}", type=kind, default=getattr(settings, name))
    _explain(parser, {name: text for name, text in arguments(Settings).items() if name in names})


def _explain(parser: ArgumentParser, texts: Mapping[str, str], prefix: str = "") -> None:
    """Give options their help."""
    for action in parser._actions:
        name = action.dest.removeprefix(prefix)
        if action.dest == f"{prefix}{name}" and name in texts:
            action.help = texts[name] + (_SPECIES if name == "species" else "")


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
    """Find the preset, which may stand in a configuration file, and gives the defaults of all other options.

    The words that print the options end the process, before the preset's are known, and print also where what is
    required is not given: they are left out here, and placeholders stand before all that is given.
    """
    quiet = [word for word in words if word.split("=")[0] != "--print_config"]
    preset: str | None = parser.parse_args(["--train", "[x]", "--out", "x", *quiet]).preset
    return preset


def _spelled_out(parser: ArgumentParser, words: list[str], bare: str | None) -> list[str]:
    """Complete what may be left out: `true` of a switch, and before a word that belongs to no option, its option.

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
    complete: list[str] = []
    found = None
    while words:
        word, *words = words
        if not word.startswith("-") or word == "-":
            if bare is not None:
                if found is not None:
                    parser.error(f"one file is read, but beside {found!r} there is {word!r}")
                found = word
                complete.append(bare)
            complete.append(word)
            continue
        complete.append(word)
        action = kinds.get(word)
        if (action is not None and action.nargs == 0) or "=" in word:
            continue
        if action is None:  # is going to be refused, with the word that was meant for it
            complete += [words.pop(0)] if words and not words[0].startswith("-") else []
            continue
        if getattr(action, "_typehint", None) is bool and (not words or words[0].lower() not in ("true", "false")):
            complete.append("true")
        elif words and action.dest != "print_config":
            complete.append(words.pop(0))
    return complete


def _overview(word: str) -> NoReturn:
    """Show the overview or the version, or refuse an unknown command, and end the process."""
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
    message = f"no {what} {word}{or_nearest(word, known)}" if word else f"name a command: {', '.join(COMMANDS)}"
    sys.stderr.write(f"scdiva: {message}. See --help.\n")
    raise SystemExit(2)


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
    names = vars(inspect.getmodule(owner))
    kinds: list[Any] = []
    for part in _union(ast.parse(annotation, mode="eval").body):
        text = ast.unparse(part)
        try:
            kind = eval(text, dict(names))
            for one in get_args(kind) if isinstance(kind, UnionType) else [kind]:
                kinds += _plain(one)
        except (NameError, AttributeError):  # imported for type checkers alone: an object
            kinds += [str] if text == "AnnData" else []
    return functools.reduce(operator.or_, sorted(dict.fromkeys(kinds), key=lambda kind: kind is str))


def _union(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [*_union(node.left), *_union(node.right)]
    return [node]


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


def arguments(thing: Any, others: Mapping[str, Callable[..., Any]] | None = None) -> dict[str, str]:
    """Describe each argument of a function, or each field of a dataclass.

    Parameters
    ----------
    thing
        Function or class with a numpydoc docstring; of a class those it comes from are read too.
    others
        Functions by name to which a description may refer ("as in :func:`embed`"): their description of the argument is
        given instead.

    Returns
    -------
    Text without markup, by name. Of several names described together each gets the common text.
    """
    found: dict[str, str] = {}
    for one in reversed(inspect.getmro(thing)) if inspect.isclass(thing) else [thing]:
        for names, text in _entries(inspect.getdoc(one) or ""):
            led_on = _LED_ON.search(text)
            function = (others or {}).get(led_on[1]) if led_on else None
            there = arguments(function, others) if function is not None and function is not thing else {}
            if len(names) == 1 and "see :func:" not in " ".join(text.lower().split()):
                there = {}  # a remark on what is described here
            found |= {name: there.get(name, plain(text)) for name in names}
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


def _entries(docstring: str) -> list[tuple[list[str], str]]:
    """Split the sections of arguments into names and description."""
    parts = _SECTION.split(docstring)
    found = []
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title in ("Parameters", "Attributes"):
            for entry in re.split(r"\n(?=\S)", body.strip("\n")):
                names, _, text = entry.partition("\n")
                found.append((re.split(r", *", names.split(" : ")[0].strip()), text))
    return found
