"""`models.load` gives back whatever was saved; what is in the folders is tested with each kind."""

from __future__ import annotations

import pytest

import scdiva as sd
from scdiva.models import Annotator, PerturbationModel, ScDiVa


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of each kind, and what was saved."""
    folder, cells = tmp_path_factory.mktemp("saved"), sd.datasets.toy(120, 100)
    cells.obs["perturbation"] = ["control", "A", "B"] * 40
    with sd.settings.override(progress=False, device="cpu"):
        made = {
            "model": sd.models.load(),
            "annotator": sd.tl.annotate(cells[:40].copy(), "cell_type", cells[40:].copy(), method="knn"),
            "screen": sd.tl.fit_perturbation(cells, "perturbation"),
            "integrated": sd.tl.integrate(cells, "batch", steps=1),
            "adapted": sd.tl.adapt(cells),
        }
    return {name: (fitted, fitted.save(folder / name)) for name, fitted in made.items()}


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("model", ScDiVa),
        ("annotator", Annotator),
        ("screen", PerturbationModel),
        ("integrated", ScDiVa),
        ("adapted", ScDiVa),
    ],
)
def test_a_folder_gives_back_what_was_saved(saved, name, cls):
    fitted, folder = saved[name]
    for given in (folder, str(folder), fitted):
        found = sd.models.load(given, device="cpu")
        assert type(found) is cls
        assert repr(found) == repr(fitted)
    assert sd.models.load(fitted) is fitted


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="got int"):
        sd.models.load(3)
