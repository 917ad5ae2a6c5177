"""The version, spelled once."""

__version__ = "0.2.0"
