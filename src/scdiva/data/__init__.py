"""Conversion of AnnData or files to batches of cells. Names are imported on first access: `pp` needs no torch."""

from __future__ import annotations

from scdiva._lazy import lazily

_WHERE = {
    "open_matrix": "matrix",
    "row_blocks": "matrix",
    "CellBatch": "batch",
    "CellSource": "cells",
    "open_cells": "cells",
    "PackedCells": "packed",
    "pack_files": "packing",
    "CellDataModule": "datamodule",
    "open_soma": "soma",
}

__all__ = list(_WHERE)
__getattr__, __dir__ = lazily(__name__, _WHERE)
