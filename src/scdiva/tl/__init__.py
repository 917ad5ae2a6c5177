"""Tools: what the model makes of cells."""

from scdiva.tl._adapt import adapt
from scdiva.tl._embed import embed
from scdiva.tl._embed_file import embed_file

__all__ = ["adapt", "embed", "embed_file"]
