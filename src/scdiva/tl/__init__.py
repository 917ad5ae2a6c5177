"""Tools: what the model makes of cells."""

from ._embed import embed

__all__ = ["embed"]
