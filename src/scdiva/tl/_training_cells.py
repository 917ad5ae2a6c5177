"""The cells of a screen in memory."""

from __future__ import annotations

from typing import Any

from scdiva.data.cells import open_cells


def training_cells(data: Any, model: Any, batch: Any, reading: Any, *, whole: bool = False, least: int = 20) -> Any:
    """See :func:`scdiva.train.adaptation.read_cells`."""
    from scdiva.train.adaptation import read_cells

    return read_cells(open_cells(data, model, reading, empty="nan"), batch, whole=whole, trains=not whole, least=least)
