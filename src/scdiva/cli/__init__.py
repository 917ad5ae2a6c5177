"""The command line: `scdiva pretrain --config file.yaml`, `scdiva entropy FILES -o vocabulary.parquet`.

Every option of a run is a field of a dataclass or an argument of a function here, so the command line, the YAML file
and Python say the same things by the same names. Heavy packages are imported when work begins: `scdiva --help` answers
at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from scdiva.cli._entropy import entropy
from scdiva.cli._pretrain import pretrain
from scdiva.train.config import PretrainingConfig

__all__ = ["entropy", "main", "pretrain"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv
        Arguments without the program's name; None reads the process's.

    Returns
    -------
    0, or 1 after an error in what was asked (said in one line), or 130 after Ctrl-C. An option that there is not, or
    that makes no sense by itself, ends the process with 2.
    """
    from scdiva.cli._parser import options_of

    command, options = options_of(None if argv is None else list(argv))
    try:
        if command == "entropy":
            written = entropy(**options)
        else:
            training = PretrainingConfig(**options.pop("training"))
            written = pretrain(training=training, **options)
    except (ValueError, KeyError, OSError, FloatingPointError, ImportError) as error:
        sys.stderr.write(f"scdiva {command}: {error.args[0] if isinstance(error, KeyError) else error}\n")
        return 1
    except KeyboardInterrupt:
        how = f" Go on with the same options and --resume true (out: {options['out']})" if command == "pretrain" else ""
        sys.stderr.write(f"scdiva {command}: stopped.{how}\n")
        return 130
    from scdiva.train.launch import is_first_process

    if is_first_process():
        sys.stdout.write(f"{written}\n")
    return 0
