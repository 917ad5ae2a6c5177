"""What one count is in a cell, what the other half holds, and what is predicted from both."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scdiva._constants import N_SPECIAL
from scdiva._rng import step_generator
from scdiva.diffusion.thinning import Counts, keep_counts, log_normalised


@pytest.fixture
def study(script):
    """Cells of 60 genes, thinned to half, and the counts that were kept."""
    draw = np.random.default_rng(0)
    counts = draw.poisson(draw.gamma(1, 3, 60), (20, 60))
    cell, gene = counts.nonzero()
    bounds = torch.from_numpy(np.searchsorted(cell, np.arange(21))).int()
    whole = Counts(torch.from_numpy(counts[cell, gene]).double(), torch.from_numpy(counts.sum(axis=1)).double())
    tokens, measured = torch.from_numpy(gene + N_SPECIAL), torch.arange(60) + N_SPECIAL
    arms = script("_denoising_arms")
    asked = arms.Asked(*script("_scripts").draw_queries(
        tokens, whole, bounds, measured, step_generator(0, 0, "asked"), thinned=True, most=1024
    ))  # fmt: skip
    generator = step_generator(0, 0, "asked")
    torch.rand(len(tokens), generator=generator)  # which of the visible genes are masked
    kept = keep_counts(whole, bounds, torch.full(tokens.shape, 0.5), generator)
    cells = tokens, whole, bounds
    return arms.Study("toy", asked, cells, cells, cells, asked), torch.from_numpy(cell), kept


def test_one_count_and_the_other_half_are_those_of_the_draw(script, study):
    limits, (some, cell, kept) = script("value_limits"), study
    tokens, whole, bounds = some.whole
    asked = list(zip(some.asked.value_cell.tolist(), some.asked.value_token.tolist(), strict=True))
    at = {pair: i for i, pair in enumerate(zip(cell.tolist(), tokens.tolist(), strict=True))}
    rows = [at[pair] for pair in asked]
    np.testing.assert_allclose(some.asked.value, log_normalised(kept, bounds)[rows], rtol=1e-5)
    np.testing.assert_allclose(
        limits.one_count(some), torch.log1p(1e4 / kept.of_cell)[some.asked.value_cell], rtol=1e-5
    )
    left = whole.of_token - kept.of_token
    np.testing.assert_array_equal(limits.other_half(some), left[rows])
    assert left[rows].max() > 1


def test_values_are_fitted_to_other_studies_and_rise_with_what_is_known(script, monkeypatch):
    limits = script("value_limits")
    monkeypatch.setattr(limits, "LEAST_VALUES", 20)
    draw = np.random.default_rng(0)
    known = {name: draw.normal(size=(400, 1)) for name in "abc"}
    excess = {name: np.maximum(part[:, 0], 0) for name, part in known.items()}
    excess["a"] = excess["a"] + 9  # its own values are not read
    found = limits.fitted(known, excess, "a")
    common = np.abs(known["a"][:, 0]) < 1.5  # at the ends a leaf spans a wide range
    np.testing.assert_allclose(found[common], np.maximum(known["a"][common, 0], 0), atol=0.2)
    assert (np.diff(found[known["a"][:, 0].argsort()]) >= 0).all()


def test_leads_are_differences_of_rows(script):
    limits = script("value_limits")
    arms = [
        head + about + given
        for head in (limits.HEAD, limits.READER)
        for about in ("", ", context")
        for given in ("", *limits.GIVEN)
    ]
    rows = [
        {"set": name, "arm": arm, "spearman": 0.1 * number, "rmse": 1 - 0.1 * number}
        for number, arm in enumerate(arms)
        for name in ("one", "two")
    ]
    found = {row["what"]: row for row in limits.goals(rows)}
    lead = found["values by transformer, context: rmse ahead of query head, context"]
    assert (lead["value"], lead["n_ahead"], lead["met"]) == (pytest.approx(0.6), 2, True)
    assert f"query head, context{limits.GIVEN[1]}: spearman ahead of query head, context{limits.GIVEN[0]}" in found
