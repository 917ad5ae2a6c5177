"""Command line: `scdiva embed cells.h5ad -o embedded.h5ad` and other commands.

The options of a command are the arguments of a Python function, by the same names and with the same defaults.
"""

from __future__ import annotations

import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scdiva._checks import printable

if TYPE_CHECKING:
    from argparse import ArgumentParser

__all__ = ["main", "parser"]

_EXPECTED = (ValueError, KeyError, OSError, TypeError, RuntimeError, FloatingPointError, ImportError, MemoryError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv
        Arguments without the program's name. None: `sys.argv`.

    Returns
    -------
    0; 1 after an error, with one line on stderr (and the traceback with `--verbosity debug`); 130 after Ctrl-C. Invalid
    options end the process with 2.
    """
    from scdiva.cli._parser import parse

    command, options = parse(list(sys.argv[1:] if argv is None else argv))
    verbosity = options.get("verbosity")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *where, **more: _print_error(command, f"warning: {message}")
            result = _run(command, dict(options))
    except _EXPECTED as error:
        if verbosity == "debug":
            traceback.print_exc()
        message = str(error.args[0] if isinstance(error, KeyError) and error.args else error) or type(error).__name__
        _print_error(command, re.sub(r"\b(\w+)=True\b", r"--\1", message))  # arguments are options here
        return 1
    except KeyboardInterrupt:
        remedy = {
            "pretrain": f" Continue with the same options and --resume true (out: {options.get('out')})",
            **dict.fromkeys(("embed", "pack"), " The same command continues where it stopped."),
        }
        _print_error(command, f"stopped.{remedy.get(command, '')}")
        return 130
    if result is not None:
        sys.stdout.write(f"{printable(str(result))}\n")
    return 0


def parser() -> ArgumentParser:
    """Parser of all commands and options, for shell completion: `shtab --shell=bash scdiva.cli.parser`."""
    from scdiva.cli._parser import all_commands

    return all_commands()


def _run(command: str, options: dict[str, Any]) -> Any:
    """Run a command and return its output; in distributed pretraining, only in the first process."""
    from scdiva._settings import settings
    from scdiva.cli._calls import info, run_call
    from scdiva.cli._parser import SETTINGS
    from scdiva.tokenizer.names import read_species

    progress = {"progress": options["progress"]} if command == "pretrain" and "progress" in options else {}
    with settings.override(**{name: options.pop(name) for name in SETTINGS if name in options}):
        if command == "pretrain":
            from scdiva.train import _pretrain
            from scdiva.train.config import PretrainingConfig

            preset, fields = options.get("preset"), options.pop("training", {})
            training = PretrainingConfig(**fields) if preset is None else PretrainingConfig.preset(preset, **fields)
            folder = _pretrain.pretrain(**{"train": None} | options | progress, training=training)
            from scdiva.train.runner import is_first_process

            return folder if is_first_process() else None
        if command == "pack":
            from scdiva.data.packing import pack_files

            options["species"] = read_species(options.get("species"))
            packed = pack_files(**options)
            return "all files can be packed" if options.get("check") else getattr(packed, "path", None)
        return info(**options) if command == "info" else run_call(command, options)


def _print_error(command: str, text: str) -> None:
    """Write one line to stderr."""
    sys.stderr.write(f"scdiva {command}: {printable(' '.join(text.split()))}\n")
