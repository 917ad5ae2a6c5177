"""The card says of each part of the training what was recorded of it."""

from __future__ import annotations

import json

import pytest

from scdiva.models.pretrained import find_model


@pytest.fixture
def bundled():
    folder = find_model("scdiva-mini")
    return folder, json.loads((folder / "config.json").read_text())["metadata"]


def rows(text, header):
    """Cells of each row of the table under this header."""
    table = text.split(header)[1].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_each_part_has_a_column_and_a_curve(script, bundled):
    folder, metadata = bundled
    text = script("model_card").card(folder, metadata, 8_864_719, 19_623)
    columns = rows(text, "|  | set encoder | transformer | state head | transformer, at length |")
    assert {len(row) for row in columns} == {5}
    seen = {row[0]: row[1:] for row in columns}
    names = ("anchor", "transformer", "state_head", "transformer_long")
    assert seen["cells seen"] == [f"{metadata[name]['cells_seen']:,}" for name in names]
    assert seen["validation loss"] == [f"{metadata[name]['validation'][-1]['loss']:.3f}" for name in names]
    assert seen["genes per cell"] == ["all", "128", "all", "1,024"]
    for name in names:
        last = metadata[name]["validation"][-1]
        assert f"| {last['step']:,} | {last['loss']:.3f} |" in text
    assert "its loss and the first run's cannot be compared" in text
    assert metadata["note"] in text
