"""Attention networks beside a loop over the cells and their queries."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import scdiva as sd
from scdiva.networks.methods import PRIOR_CELLS


@pytest.fixture
def cells(adata):
    cells = adata[:45].copy()
    cells.obs["kind"] = np.array(["A", "B", "C"])[np.arange(45) % 7 % 3]
    return cells


@pytest.fixture
def by_hand(ranked):
    def excess(cells, model, rows=None, layers=None, heads=None) -> np.ndarray:
        """Sources (keys) × targets (queries); NaN for genes that no cell holds, and for a gene with itself."""
        of_target = [[] for _ in range(cells.n_vars)]  # for each cell that holds it, a rank of every source
        of_any = []
        for row, (columns, tokens, values) in enumerate(ranked(cells, model)):
            if rows is not None and not rows[row]:
                continue
            n = len(columns)
            with torch.no_grad():
                bounds = torch.tensor([0, n], dtype=torch.int32)
                found = list(model.attention_weights(tokens, values, bounds))
            chosen = [w.double().numpy() for layer, _, w in found if layers is None or layer in layers]
            mean = np.mean([w[slice(None) if heads is None else heads] for w in chosen], axis=(0, 1))
            mean = mean[1:, 1:]  # without [LAT]
            for query in range(n):
                ranks = np.zeros(cells.n_vars)
                for key in range(n):
                    ranks[columns[key]] = (mean[query] <= mean[query, key]).sum() / n
                of_target[columns[query]].append(ranks)
                of_any.append(ranks)
        usual = np.mean(of_any, axis=0)
        result = np.full((cells.n_vars, cells.n_vars), np.nan)
        for target, ranks in enumerate(of_target):
            if ranks:
                # cells that attend as to any query stand beside those read
                result[:, target] = np.mean([*ranks, *[usual] * PRIOR_CELLS], axis=0) - usual
        result[usual == 0] = np.nan  # a source that no cell holds
        np.fill_diagonal(result, np.nan)
        return result

    return excess


def attend(cells, model, **options):
    sd.tl.grn(cells, "attention", model=model, **{"n_targets": None, "min_fraction": 0} | options)


def close(found, expected):
    """Alike but for the ranks of keys that differ by a rounding."""
    np.testing.assert_allclose(found, expected, atol=5e-4)
    assert np.nanmean(np.abs(found - expected)) < 2e-5


def test_is_a_loop_over_cells(cells, one, edges, by_hand):
    attend(cells, one)
    found = edges(cells)
    close(found, by_hand(cells, one))
    assert np.nanmin(found) < -0.02 < 0.02 < np.nanmax(found)
    assert np.nanmax(np.abs(found - found.T)) > 0.02  # directed
    assert not cells.uns["scdiva"]["scdiva_grn"]["signed"]


def test_of_groups_and_against_another(cells, one, edges, by_hand):
    kind = cells.obs["kind"].to_numpy()
    of_a, others = by_hand(cells, one, kind == "A"), by_hand(cells, one, kind == "B")
    attend(cells, one, groupby="kind", groups="A")
    close(edges(cells, "scdiva_grn_A"), of_a)
    attend(cells, one, groupby="kind", groups="A", reference="B", key_added="d")
    close(edges(cells, "d_A"), np.where(of_a == others, np.nan, of_a - others))
    assert cells.uns["scdiva"]["d"]["signed"]
    assert cells.varp["d_A"].data.min() < 0 < cells.varp["d_A"].data.max()


@pytest.mark.parametrize(("layers", "heads"), [(1, None), ([0, 2], [1]), (None, 0)])
def test_layers_and_heads_are_chosen(cells, build, edges, by_hand, layers, heads):
    model = build(n_layers=3)
    attend(cells, model, layers=layers, heads=heads)
    of_layers, of_heads = ([given] if isinstance(given, int) else given for given in (layers, heads))
    close(edges(cells), by_hand(cells, model, layers=of_layers, heads=of_heads))
    attend(cells, model, key_added="all")
    assert np.nanmax(np.abs(edges(cells) - edges(cells, "all"))) > 3e-3
    about = cells.uns["scdiva"]["scdiva_grn"]
    assert about["layers"].tolist() == sorted(of_layers or [])
    assert about["heads"].tolist() == sorted(of_heads or [])


def test_layers_above_the_last_one_chosen_are_not_computed(cells, build, monkeypatch):
    model = build(n_layers=3)
    run = []
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, number=number: run.append(number))
    attend(cells, model, layers=1)
    assert set(run) == {0}  # its output is the input of layer 1, whose weights need no pass


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"layers": 5}, ValueError, "the model has 2 layers, 0 to 1; layers names 5"),
        ({"heads": [0, -1]}, ValueError, "the model has 2 heads, 0 to 1; heads names -1"),
        ({"layers": []}, ValueError, "layers is empty"),
        ({"layers": 1.5}, TypeError, "float"),
        ({"layers": 0, "method": "embedding"}, ValueError, 'Pass method="attention"'),
    ],
)
def test_layers_and_heads_that_are_not_there(cells, build, options, error, said):
    before = cells.copy()
    with pytest.raises(error, match=said):
        sd.tl.grn(cells, model=build(), **{"method": "attention"} | options)
    assert cells.uns.keys() == before.uns.keys()
    assert not cells.varp
