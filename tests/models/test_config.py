from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from scdiva._constants import N_SPECIAL
from scdiva.models import ScDiVa, ScDiVaConfig, load_model


def n_parameters(config: ScDiVaConfig) -> int:
    with torch.device("meta"):
        return ScDiVa(config).n_parameters


def test_paper_preset_has_the_hand_counted_parameters():
    block = 4 * 512 * 512 + 3 * 512 * 2048 + 2 * 512  # Q, K, V, O; gate, up, down; two norms
    listed = (
        12 * block
        + 512  # final norm
        + 41_818 * 512  # gene embedding
        + (512 + 512)  # value MLP, first layer
        + (512 * 512 + 512)  # second layer
        + 41_818 * 512  # gene head
        + (512 + 1)  # value head
    )
    assert listed == 93_430_273  # the 93.43 M of what the paper lists
    specials = N_SPECIAL * 512 + 512  # PAD, MASK, LAT; the hidden value
    count = n_parameters(ScDiVaConfig.paper())
    assert count == listed + specials
    assert 93_400_000 < count < 93_600_000


def test_presets():
    assert ScDiVaConfig.preset("paper") == ScDiVaConfig.paper()
    bundled = load_model(device="cpu").config
    assert bundled == replace(ScDiVaConfig.preset("mini"), query_head=True, reader=True)
    sizes = [n_parameters(ScDiVaConfig.preset(name)) for name in ("mini", "base", "base-lat", "paper")]
    assert sizes == [8_864_719, 30_399_285, 24_643_573, 93_432_321]
    lat = ScDiVaConfig.preset("base-lat")
    assert replace(lat, anchor="encoder") == ScDiVaConfig.preset("base")
    assert (lat.anchor, lat.state_head, lat.state_dim) == ("learned", True, lat.dim)
    assert ScDiVaConfig.preset("base", n_genes=50, dim=32).dim == 32
    with pytest.raises(ValueError, match=r"'paper', 'base', 'base-lat', 'mini'; got 'minni'.*'mini'"):
        ScDiVaConfig.preset("minni")
    with pytest.raises(ValueError, match=r"ScDiVaConfig .*n_layer .*'n_layers'"):
        ScDiVaConfig.preset("base", n_layer=3)


def test_round_trip_through_json():
    config = ScDiVaConfig(n_genes=7, anchor="learned", rope_base=500)
    assert ScDiVaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.rope_base == 500.0
    assert isinstance(config.rope_base, float)


def test_from_dict_refuses_what_it_does_not_know_and_guesses_nothing():
    values, stored = ScDiVaConfig().to_dict(), ScDiVaConfig().stored()
    assert stored["time_conditioning"] is False  # as older versions want it, and as hashes were
    assert ScDiVaConfig.from_dict(stored) == ScDiVaConfig.from_dict(values) == ScDiVaConfig()
    for wrong, message in (
        (values | {"widht": 3, "dimm": 4}, r"dimm .*'dim'.*widht"),
        (
            {name: value for name, value in values.items() if name not in ("norm_eps", "anchor")},
            "missing: anchor, norm",
        ),
        (stored | {"time_conditioning": True}, r"time_conditioning was removed.*got True"),
        (stored | {"anchor": "pooled"}, r"anchor .*got 'pooled'"),
    ):
        with pytest.raises(ValueError, match=message):
            ScDiVaConfig.from_dict(wrong)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"n_genes": 0}, ValueError, "n_genes must be at least 1, got 0"),
        ({"dim": 64.0}, TypeError, "dim must be a whole number"),
        ({"rope_base": float("nan")}, ValueError, "rope_base must be finite"),
        ({"entropy_floor": -0.1}, ValueError, "entropy_floor"),
        ({"tie_gene_head": 1}, TypeError, "tie_gene_head"),
        ({"anchor": "mean"}, ValueError, "anchor .*'learned', 'encoder'; got 'mean'"),
        ({"dim": 30, "n_heads": 4}, ValueError, "4 doesn't divide 30"),
        ({"dim": 12, "n_heads": 4}, ValueError, "12 / 4 is not"),
        ({"integrated": True}, ValueError, "integrated=True requires adapted"),
    ],
)
def test_impossible_configurations_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        ScDiVaConfig(**fields)


def test_a_query_head_needs_a_state_head_and_an_anchor_made_of_genes():
    for wrong in ({}, {"state_head": True, "anchor": "learned"}):
        with pytest.raises(ValueError, match="query_head"):
            ScDiVaConfig(query_head=True, **wrong)
    config = ScDiVaConfig(query_head=True, state_head=True)
    assert ScDiVaConfig.from_dict(config.to_dict()) == config
    assert "query_head" not in ScDiVaConfig(state_head=True).to_dict(), "files of before stay as they were"
