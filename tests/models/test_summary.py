"""What models show of themselves in a notebook: true, whole and never markup of somebody else."""

from __future__ import annotations

import copy
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import scdiva as sd
from scdiva.models import network as networks


class Cells(HTMLParser):
    """Rows of a table, by the text of their head; refuses tags that the table does not need."""

    def __init__(self, text):
        super().__init__()
        self.found, self._open = [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        assert tag in ("div", "strong", "table", "tr", "th", "td")
        assert all(name == "style" for name, _ in attrs)
        self._open.append(tag)
        if tag in ("th", "td"):
            self.found.append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-1] in ("th", "td"):
            self.found[-1] += data


def rows(thing):
    found = Cells(thing._repr_html_()).found
    return dict(zip(found[::2], found[1::2], strict=True))


pytestmark = pytest.mark.filterwarnings("ignore:.*known genes.*:UserWarning")


@pytest.fixture(scope="module")
def cells():
    adata = sd.datasets.toy(60, 80, rng=3)
    adata.obs["perturbation"] = ["control", "A", "B", "A+B", "C", "B+C"] * 10
    return adata


def test_a_loaded_model_says_what_it_is():
    model = sd.models.load()
    said = rows(model)
    assert said["size"] == f"{sum(p.numel() for p in model.parameters()):,} parameters"
    assert model.vocabulary.fingerprint[:12] in said["genes"]
    assert "19,623" in said["genes"]
    assert said["comes from"].startswith("scdiva-mini, saved by scdiva ")
    assert said["species"] == "human"
    assert said["trained on"] == "29,022 cells of 31 studies"
    assert "transformer 2,500 steps" in said["training"]
    assert said["device"] == "cpu"
    assert repr(model) == "ScDiVa(9,623,369 parameters, 19,623 genes, 4 layers of width 128, on cpu)"
    assert "Linear" in torch.nn.Module.__repr__(model)


def test_the_hash_is_of_the_weights_as_they_are():
    model = sd.models.load()
    changed = copy.deepcopy(model)
    assert rows(changed)["SHA-256"] == rows(model)["SHA-256"]
    with torch.no_grad():
        changed.norm.weight[0] += 1e-3
    assert rows(changed)["SHA-256"] != rows(model)["SHA-256"]


def test_a_large_model_is_not_hashed_for_a_look_at_it(network, monkeypatch):
    assert "SHA-256" in rows(network())
    monkeypatch.setattr(networks, "MOST_HASHED", 10)
    monkeypatch.setattr(networks, "fingerprint", lambda model: pytest.fail("read all weights"))
    assert "SHA-256" not in rows(network())


def test_a_bare_network_says_what_it_knows():
    bare = sd.models.ScDiVa(
        sd.models.ScDiVaConfig(n_genes=12, dim=8, n_layers=1, n_heads=2, ffn_dim=8, anchor="learned")
    )
    said = rows(bare)
    assert said["genes"] == "12"
    assert not {"species", "trained on", "training", "SHA-256", "comes from"} & set(said)


def test_what_is_fitted_says_so(cells):
    annotator = sd.tl.annotate(cells.copy(), "cell_type", cells.copy(), method="centroid")
    said = rows(annotator)
    assert said["method"] == "centroid"
    assert said["labels"] == "4: type A, type B, type C, type D"
    assert said["trained on"] == "60 labelled cells"
    assert said["held-out accuracy"] == f"{annotator.notes['accuracy']:.3f} on {annotator.notes['n_held_out']} cells"
    fitted = sd.tl.fit_perturbation(cells, "perturbation")
    more = rows(fitted)
    assert more["conditions"].startswith("5 of 1 group")
    assert more["fitted on"] == "50 perturbed and 10 control cells"
    assert said["SHA-256 of the model"] == more["SHA-256 of the model"] == rows(sd.models.load())["SHA-256"]


def test_names_are_never_markup(network, cells):
    evil = "<script>alert('x')</script>&amp;"
    model = network()
    object.__setattr__(model, "origin", evil)
    model.metadata = {"species": evil, "corpus": {"n_cells": 3, "studies": [evil]}, evil: {"steps": 2}}
    said = rows(model)  # which refuses such a tag
    assert said["comes from"] == said["species"] == evil
    assert evil in said["training"]
    named = cells.copy()
    named.obs["cell_type"] = np.array([evil, "<b>other"])[np.arange(60) % 2]
    assert evil in rows(sd.tl.annotate(named.copy(), "cell_type", named, method="centroid"))["labels"]


@pytest.mark.parametrize("metadata", [{"corpus": "pbmc", "steps": "many"}, {"corpus": None, "studies": 3}, {}])
def test_odd_metadata_are_left_out(network, metadata):
    model = network()
    model.metadata = metadata
    assert not {"trained on", "training"} & set(rows(model))


def test_long_entries_are_cut():
    (text,) = [cell for cell in Cells(networks.table("T", {"a": "x" * 5000, "b": None})).found if "x" in cell]
    assert len(text) == networks.LONGEST


def test_other_species_are_told_by_their_ids(network):
    vocabulary = network().vocabulary
    assert vocabulary.species == "human"
    table = vocabulary.table.assign(ensembl_id=[f"ENSMUSG{i:011d}" for i in range(vocabulary.n_genes)])
    assert type(vocabulary)(table).species == "mouse"
    table = vocabulary.table.assign(ensembl_id=[f"ENSDARG{i:011d}" for i in range(vocabulary.n_genes)])
    assert type(vocabulary)(table).species is None
