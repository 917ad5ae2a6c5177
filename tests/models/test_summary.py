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


def of(model):
    found = Cells(networks.table("model", networks.of_model(model))).found
    return dict(zip(found[::2], found[1::2], strict=True))


def test_a_loaded_model_says_what_it_is():
    model = sd.models.load()
    said = of(model)
    assert said["model size"] == f"{sum(p.numel() for p in model.parameters()):,} parameters"
    assert model.vocabulary.fingerprint[:12] in said["vocabulary"]
    assert "19,623" in said["vocabulary"]
    assert said["model"].startswith("scdiva-mini, saved by scdiva ")
    assert (said["species"], said["device"]) == ("human", "cpu")
    assert repr(model) == "ScDiVa(9,623,369 parameters, 19,623 genes, 4 layers of width 128, on cpu)"
    assert "Linear" in torch.nn.Module.__repr__(model)


def test_the_hash_is_of_the_weights_as_they_are(network, monkeypatch):
    model, name = network(), "SHA-256 of the model"
    changed = copy.deepcopy(model)
    assert of(changed)[name] == of(model)[name]
    with torch.no_grad():
        changed.norm.weight[0] += 1e-3
    assert of(changed)[name] != of(model)[name]
    monkeypatch.setattr(networks, "MOST_HASHED", 10)  # a large one is not hashed for a look at it
    monkeypatch.setattr(networks, "fingerprint", lambda model: pytest.fail("read all weights"))
    assert name not in of(model)


def test_what_is_fitted_says_so(cells):
    annotator = sd.tl.annotate(cells.copy(), "cell_type", cells.copy(), method="knn")
    said = rows(annotator)
    assert said["method"] == "knn"
    assert said["labels"] == "4: type A, type B, type C, type D"
    assert said["trained on"] == "60 labelled cells"
    assert said["held-out accuracy"] == f"{annotator.notes['accuracy']:.3f} on {annotator.notes['n_held_out']} cells"
    fitted = sd.tl.fit_perturbation(cells, "perturbation")
    more = rows(fitted)
    assert more["conditions"].startswith("5 of 1 group")
    assert more["fitted on"] == "50 perturbed and 10 control cells"
    assert said["SHA-256 of the model"] == more["SHA-256 of the model"] == of(sd.models.load())["SHA-256 of the model"]


def test_names_are_never_markup(network, cells):
    evil = "<script>alert('x')</script>&amp;"
    model = network()
    object.__setattr__(model, "origin", evil)
    model.metadata = {"species": evil}
    said = of(model)  # which refuses such a tag
    assert said["model"] == said["species"] == evil
    named = cells.copy()
    named.obs["cell_type"] = np.array([evil, "<b>other"])[np.arange(60) % 2]
    assert evil in rows(sd.tl.annotate(named.copy(), "cell_type", named, method="knn"))["labels"]


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
