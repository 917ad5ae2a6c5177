"""Scores of answers that know all, or nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scdiva._constants import N_SPECIAL


def test_scores_of_answers_that_know_all_or_nothing(script):
    denoising = script("denoising")
    genes = torch.arange(4) + N_SPECIAL
    seen = torch.zeros(0, dtype=torch.long), torch.zeros(0), torch.zeros(2, dtype=torch.int32)
    asked = denoising.Asked(
        seen, torch.zeros(4, dtype=torch.long), genes, torch.tensor([1.0, 0, 1, 0]),
        torch.zeros(2, dtype=torch.long), genes[:2], torch.tensor([1.0, 3.0]), True,
    )  # fmt: skip
    perfect = denoising.scores((torch.tensor([9.0, -9, 9, -9]), torch.tensor([1.0, 3.0])), asked)
    assert perfect == pytest.approx(
        {"log_loss": 0, "average_precision": 1, "rmse": 0}, abs=0.01
    )  # no gene has Spearman
    nothing = denoising.scores((torch.zeros(4), torch.tensor([2.0, 2.0])), asked)
    assert (nothing["log_loss"], nothing["rmse"]) == (pytest.approx(np.log(2)), pytest.approx(1))
