"""Small data sets: one with known truth, one of real cells."""

from scdiva.datasets._pbmc68k import pbmc68k_reduced
from scdiva.datasets._toy import toy

__all__ = ["pbmc68k_reduced", "toy"]
