"""The card says of each part of the training what was recorded of it."""

from __future__ import annotations

import json

from scdiva.models.hub import find_model


def test_each_part_has_a_column_and_a_curve(script):
    folder = find_model("scdiva-mini")
    metadata = json.loads((folder / "config.json").read_text())["metadata"]
    text = script("model_card").card(folder, metadata, 9_623_369, 19_623)
    seen = {}
    for line in text.split("| set encoder |")[1].split("\n\n")[0].splitlines()[2:]:
        name, *columns = (cell.strip() for cell in line.strip("|").split("|"))
        seen[name] = columns
    names = ("anchor", "transformer", "state_head", "transformer_long", "query_head")
    last = [metadata[name]["validation"][-1] for name in names[:-1]]
    assert seen["cells seen"] == [f"{metadata[name]['cells_seen']:,}" for name in names]
    assert seen["validation loss"] == [*(f"{look['loss']:.3f}" for look in last), ""]
    assert seen["genes per cell"] == ["all", "128", "all", "1,024", "all"]
    assert all(f"| {look['step']:,} | {look['loss']:.3f} |" in text for look in last)
    assert metadata["query_head"]["command"] in text
