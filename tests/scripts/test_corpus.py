"""The table of a corpus by tissue: its sums, its place in a card, and the cards of the package."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from scdiva.models import load_model
from scdiva.models.storage import find_model


@pytest.fixture
def corpus(script):
    return script("corpus")


def test_the_table_replaces_an_earlier_one_and_the_model_still_loads(corpus, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(find_model("scdiva-mini"), folder)
    before = (folder / "README.md").read_text()
    corpus.set_table(folder, {"blood": [2, 1000, 5], "skin": [1, 1, 1]})
    card = (folder / "README.md").read_text()
    assert card.count(corpus.HEADING) == 1
    assert "| blood | 2 | 1,000 | 5 |\n| skin | 1 | 1 | 1 |\n| all | 3 | 1,001 | 6 |\n\n### Validation curves" in card
    assert card.split(corpus.HEADING)[0] == before.split(corpus.HEADING)[0]
    assert load_model(folder).n_parameters > 0  # the checksums are those of the files
    (folder / "README.md").write_text("# Mine\n")
    corpus.set_table(folder, {"blood": [2, 1000, 5]})
    assert (folder / "README.md").read_text().startswith("# Mine\n\n### Corpus by tissue\n\n| tissue")


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
