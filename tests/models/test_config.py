from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from scdiva._constants import N_SPECIAL
from scdiva.models import ScDiVa, ScDiVaConfig, load_model


def n_parameters(config: ScDiVaConfig) -> int:
    with torch.device("meta"):
        return ScDiVa(config).n_parameters


def test_paper_preset_holds_the_papers_tables():
    c = ScDiVaConfig.paper()
    assert (c.n_layers, c.dim, c.n_heads, c.ffn_dim, c.n_genes) == (12, 512, 8, 2048, 41_818)
    assert (c.max_length, c.norm_eps, c.rope_base) == (1200, 1e-5, 10_000.0)
    assert (c.anchor, c.position, c.tie_gene_head, c.entropy_floor) == (
        "learned",
        "rope",
        False,
        0.0,
    )


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
    assert bundled == replace(ScDiVaConfig.preset("mini"), query_head=True)
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


def test_each_option_adds_what_it_says():
    paper = ScDiVaConfig.paper()
    base = n_parameters(paper)
    assert base - n_parameters(replace(paper, tie_gene_head=True)) == 41_818 * 512
    encoder = (41_818 + N_SPECIAL) * 128 + 128 + (128 * 512 + 512) + (512 * 512 + 512) + (512 * 64 + 64)
    assert n_parameters(replace(paper, anchor="encoder")) - base == encoder + 192 * 512
    assert n_parameters(replace(paper, anchor="encoder", anchor_residual=True)) - base == encoder + 2 * 192 * 512
    assert n_parameters(replace(paper, position="none")) == base
    width = 512 + 20
    head = (41_818 + N_SPECIAL) * 20 + (width * 256 + 256) + (256 * 256 + 256) + (256 * width + width)
    assert n_parameters(replace(paper, integrated=True)) - base == head
    assert n_parameters(replace(paper, integrated_own_dim=3, integrated_hidden=7)) == base  # without the head nothing


def test_round_trip_through_json():
    config = ScDiVaConfig(n_genes=7, anchor="learned", rope_base=500)
    assert ScDiVaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.rope_base == 500.0
    assert isinstance(config.rope_base, float)


def test_from_dict_refuses_what_it_does_not_know_and_guesses_nothing():
    values = ScDiVaConfig().to_dict()
    with pytest.raises(ValueError, match=r"dimm .*'dim'.*widht"):
        ScDiVaConfig.from_dict(values | {"widht": 3, "dimm": 4})
    del values["norm_eps"], values["anchor"]
    with pytest.raises(ValueError, match="missing: anchor, norm_eps"):
        ScDiVaConfig.from_dict(values)


def test_files_of_options_that_were_removed_are_refused_by_name():
    stored = ScDiVaConfig().stored()
    assert stored["time_conditioning"] is False  # as older versions want it, and as hashes were
    assert ScDiVaConfig.from_dict(stored) == ScDiVaConfig.from_dict(ScDiVaConfig().to_dict()) == ScDiVaConfig()
    with pytest.raises(ValueError, match=r"time_conditioning was removed.*got True"):
        ScDiVaConfig.from_dict(stored | {"time_conditioning": True})
    with pytest.raises(ValueError, match=r"anchor .*got 'pooled'"):
        ScDiVaConfig.from_dict(stored | {"anchor": "pooled"})


def test_sizes_that_follow():
    c = ScDiVaConfig(
        n_genes=10, dim=32, n_heads=4, anchor_linear_dim=6, anchor_learned_dim=2, max_length=50, anchor_length=90
    )
    assert (c.n_tokens, c.head_dim, c.state_dim, c.input_length) == (13, 8, 8, 90)
    assert (replace(c, anchor="learned").input_length, replace(c, anchor="learned").state_dim) == (50, 32)


def test_is_frozen():
    with pytest.raises(FrozenInstanceError):
        ScDiVaConfig().dim = 3


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"n_genes": 0}, ValueError, "n_genes must be at least 1, got 0"),
        ({"dim": 64.0}, TypeError, "dim must be a whole number"),
        ({"n_layers": True}, TypeError, "n_layers must be a whole number"),
        ({"norm_eps": 0.0}, ValueError, "norm_eps"),
        ({"rope_base": float("nan")}, ValueError, "rope_base must be finite"),
        ({"rope_base": "1e4"}, TypeError, "rope_base must be a number"),
        ({"entropy_floor": -0.1}, ValueError, "entropy_floor"),
        ({"tie_gene_head": 1}, TypeError, "tie_gene_head"),
        ({"integrated": 1}, TypeError, "integrated must be True or False"),
        ({"integrated_own_dim": 0}, ValueError, "integrated_own_dim .*got 0"),
        ({"integrated_hidden": 2.5}, TypeError, "integrated_hidden must be a whole number"),
        ({"anchor": "mean"}, ValueError, "anchor .*'learned', 'encoder'; got 'mean'"),
        ({"position": None}, ValueError, "position must be one of"),
        ({"attention_backend": "flash"}, ValueError, "attention_backend must be one of"),
        ({"dim": 30, "n_heads": 4}, ValueError, "4 doesn't divide 30"),
        ({"dim": 12, "n_heads": 4}, ValueError, "12 / 4 is not"),
    ],
)
def test_impossible_configurations_are_refused(fields, error, said):
    with pytest.raises(error, match=said):
        ScDiVaConfig(**fields)


def test_odd_heads_are_fine_without_rope():
    assert ScDiVaConfig(dim=12, n_heads=4, position="none").head_dim == 3


def test_config_is_there_without_torch():
    code = (
        "import sys, scdiva.models as m; m.ScDiVaConfig.paper(); assert 'torch' not in sys.modules; "
        "assert 'ScDiVa' in dir(m) and 'load_model' in dir(m)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_unknown_names_are_attribute_errors():
    import scdiva.models

    with pytest.raises(AttributeError, match="no attribute 'ScDiva'"):
        _ = scdiva.models.ScDiva


def test_a_query_head_needs_a_state_head_and_an_anchor_made_of_genes():
    for wrong in ({}, {"state_head": True, "anchor": "learned"}):
        with pytest.raises(ValueError, match="query_head"):
            ScDiVaConfig(query_head=True, **wrong)
    config = ScDiVaConfig(query_head=True, state_head=True)
    assert ScDiVaConfig.from_dict(config.to_dict()) == config
    assert "query_head" not in ScDiVaConfig(state_head=True).to_dict(), "files of before stay as they were"
