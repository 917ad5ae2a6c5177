"""The command line: `scdiva embed cells.h5ad -o embedded.h5ad`, and so on, down to `scdiva info`.

Every option is an argument of a function, or a field of a dataclass, and its `--help` is its docstring's
description: the command line, the YAML file and Python use the same names. Heavy packages are imported when
work begins: `--help` answers at once.
"""

from __future__ import annotations

import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

__all__ = ["main"]

_EXPECTED = (ValueError, KeyError, OSError, TypeError, RuntimeError, FloatingPointError, ImportError, MemoryError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv
        Arguments without the program's name; None reads the process's.

    Returns
    -------
    0, or 1 after an error (one line on stderr; with `--verbosity debug` the traceback too),
    or 130 after Ctrl-C. An option that there is not, or that makes no sense by itself, ends the process with 2.
    """
    from scdiva.cli._parser import options_of

    command, options = options_of(argv)
    out, debug = options.get("out"), options.get("verbosity") == "debug"
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *where, **more: _say(command, f"warning: {message}")
            written = _run(command, options)
    except _EXPECTED as error:
        if debug:
            traceback.print_exc()
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        _say(command, _as_options(str(message) or type(error).__name__, options))
        return 1
    except KeyboardInterrupt:
        how = {
            "pretrain": f" Go on with the same options and --resume true (out: {out})",
            "embed": " The same command goes on where it stopped.",
        }
        _say(command, f"stopped.{how.get(command, '')}")
        return 130
    if _writes(command):
        sys.stdout.write(f"{written}\n")
    return 0


def _run(command: str, options: dict[str, Any]) -> Any:
    from scdiva._settings import settings
    from scdiva.cli._calls import CALLS, SETTINGS, run_call
    from scdiva.cli._entropy import entropy
    from scdiva.cli._info import info
    from scdiva.train._pretrain import pretrain
    from scdiva.train.config import PretrainingConfig

    kept = {name: options[name] for name in SETTINGS if name in options}
    with settings.override(**kept):
        if command in CALLS:
            return run_call(command, {name: value for name, value in options.items() if name not in kept})
        if command == "pretrain":
            training = PretrainingConfig(**options["training"])
            del options["verbosity"]
            return pretrain(**options | {"training": training})
        options = {name: value for name, value in options.items() if name not in kept}
        return entropy(**options) if command == "entropy" else info(**options)


def _writes(command: str) -> bool:
    """Whether this process prints what was written: of several that pretrain together the first does."""
    if command != "pretrain":
        return True
    from scdiva.train.runner import is_first_process

    return is_first_process()


def _say(command: str, text: str) -> None:
    """Write to stderr, in one line."""
    sys.stderr.write(f"scdiva {command}: {' '.join(text.split())}\n")


def _as_options(text: str, options: dict[str, Any]) -> str:
    """Write arguments in a message as options."""
    return re.sub(r"\b(\w+)=True\b", lambda match: f"--{match[1]}" if match[1] in options else match[0], text)
