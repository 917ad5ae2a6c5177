"""From AnnData or files to batches of cells. Names are loaded when first used, so that `pp` stays free of torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_WHERE = {
    "open_matrix": "blocks",
    "row_blocks": "blocks",
    "CellBatch": "batch",
    "CellSource": "cells",
    "open_cells": "cells",
    "PackedCells": "packed",
    "pack_files": "packing",
    "CellDataModule": "datamodule",
    "open_soma": "soma",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
