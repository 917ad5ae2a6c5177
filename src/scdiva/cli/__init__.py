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

from scdiva._files import printable

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

    command, options = options_of(list(sys.argv[1:] if argv is None else argv))
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *where, **more: _say(command, f"warning: {message}")
            written = _run(command, dict(options))
    except _EXPECTED as error:
        if options["verbosity"] == "debug":
            traceback.print_exc()
        message = str(error.args[0] if isinstance(error, KeyError) and error.args else error) or type(error).__name__
        # arguments are written as options
        _say(command, re.sub(r"\b(\w+)=True\b", lambda one: f"--{one[1]}" if one[1] in options else one[0], message))
        return 1
    except KeyboardInterrupt:
        how = {
            "pretrain": f" Go on with the same options and --resume true (out: {options.get('out')})",
            **dict.fromkeys(("embed", "pack"), " The same command goes on where it stopped."),
        }
        _say(command, f"stopped.{how.get(command, '')}")
        return 130
    if written is not None:
        sys.stdout.write(f"{printable(str(written))}\n")
    return 0


def _run(command: str, options: dict[str, Any]) -> Any:
    """Run a command; give what is printed, of several processes that pretrain together in the first alone."""
    from scdiva._settings import settings
    from scdiva.cli._calls import CALLS, SETTINGS, info, run_call
    from scdiva.tokenizer.names import read_species
    from scdiva.train import _pretrain
    from scdiva.train.config import PretrainingConfig

    if command == "pretrain":  # it shows its progress itself
        with settings.override(verbosity=options.pop("verbosity")):
            preset, fields = options["preset"], options.pop("training", {})
            training = PretrainingConfig(**fields) if preset is None else PretrainingConfig.preset(preset, **fields)
            folder = _pretrain.pretrain(**options, training=training)
            from scdiva.train.runner import is_first_process

            return folder if is_first_process() else None
    with settings.override(**{name: options.pop(name) for name in SETTINGS if name in options}):
        if command == "pack":
            from scdiva.data.packing import pack_files

            return getattr(pack_files(**options | {"species": read_species(options["species"])}), "path", None)
        return run_call(CALLS[command], options) if command in CALLS else info(**options)


def _say(command: str, text: str) -> None:
    """Write to stderr, in one line."""
    sys.stderr.write(f"scdiva {command}: {printable(' '.join(text.split()))}\n")
