"""`python -m scdiva` is the command line, so that a launcher such as torchrun can start it."""

from __future__ import annotations

import sys

from scdiva.cli import main

if __name__ == "__main__":
    sys.exit(main())
