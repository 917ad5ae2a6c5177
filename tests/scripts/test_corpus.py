"""The table of a corpus by tissue: its sums, its place in a card, and the cards of the package."""

from __future__ import annotations

import numpy as np
import pytest

from scdiva.models import load_model
from scdiva.models.storage import find_model


@pytest.fixture
def corpus(script):
    return script("corpus")


@pytest.mark.parametrize("name", ["scdiva-mini", "scdiva-paper-mini"])
def test_the_cards_of_the_package_sum_to_their_corpora(corpus, name):
    recorded = load_model(name).metadata["corpus"]
    assert set(recorded["studies"]) <= set(corpus.STUDIES.index)
    table = (find_model(name) / "README.md").read_text().split(corpus.HEADING)[1].split("\n\n")[0]
    rows = {cells[0]: cells[1:] for line in table.splitlines()[2:] for cells in [line.strip("| ").split(" | ")]}
    numbers = {tissue: [int(number.replace(",", "")) for number in row] for tissue, row in rows.items()}
    total = numbers.pop("all")
    assert total == [len(recorded["studies"]), recorded["n_cells"], recorded["n_tokens"]]
    assert np.sum(list(numbers.values()), axis=0).tolist() == total
    tissues = corpus.STUDIES["tissue"][recorded["studies"]].value_counts()
    assert {tissue: row[0] for tissue, row in numbers.items()} == tissues.to_dict()
