"""What trains parts of the bundled model, from the folder of scripts."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from mini_stages import AnchorConfig, AnchorModule
from query_head import Context as TrainedContext
from query_training import Asked, QueryConfig, QueryModule, StudyBatches, draw_queries, n_query_cells
from train_denoiser import load_head, with_head

__all__ = [
    "AnchorConfig",
    "AnchorModule",
    "Asked",
    "QueryConfig",
    "QueryModule",
    "StudyBatches",
    "TrainedContext",
    "draw_queries",
    "load_head",
    "n_query_cells",
    "with_head",
]
