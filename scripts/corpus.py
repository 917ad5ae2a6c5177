"""Tissue and publication of each study of the corpus, from `corpus.csv`."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

STUDIES = pd.read_csv(Path(__file__).with_suffix(".csv"), index_col="study")
"""Columns `tissue` and `publication`, by study."""
