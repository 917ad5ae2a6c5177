"""The card says of each part of the training what was recorded of it."""

from __future__ import annotations

import json

import pytest

from scdiva.models.hub import find_model


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
    text = script("model_card").card(folder, metadata, 9_623_369, 19_623)
    columns = rows(text, "|  | set encoder | transformer | state head | transformer, at length | query head |")
    assert {len(row) for row in columns} == {6}
    seen = {row[0]: row[1:] for row in columns}
    names = ("anchor", "transformer", "state_head", "transformer_long", "query_head")
    assert seen["cells seen"] == [f"{metadata[name]['cells_seen']:,}" for name in names]
    last = [metadata[name]["validation"][-1] for name in names[:-1]]
    assert seen["validation loss"] == [*(f"{look['loss']:.3f}" for look in last), ""]
    assert seen["genes per cell"] == ["all", "128", "all", "1,024", "all"]
    for look in last:
        assert f"| {look['step']:,} | {look['loss']:.3f} |" in text
    assert metadata["query_head"]["command"] in text
    assert metadata["note"] in text
