"""Which studies a model was not trained on."""

from __future__ import annotations

import scdiva as sd
from scdiva.data.packing import pack_files
from scdiva.models import save_model


def test_held_out_studies_are_labelled_and_not_in_training(script, tmp_path):
    model = sd.models.load_model()
    (tmp_path / "base" / "prepared").mkdir(parents=True)
    (tmp_path / "corpus").mkdir()
    save_model(model, model.vocabulary, tmp_path / "base" / "model")
    for name, types in (("known", "ab"), ("new", "ab"), ("one_type", "a"), ("unlabelled", ("a", "None"))):
        cells = sd.datasets.toy(120, 100)
        cells.obs["cell_type"] = [types[i % len(types)] for i in range(120)]
        cells.write_h5ad(tmp_path / "corpus" / f"{name}.h5ad")
    cells = tmp_path / "corpus" / "known.h5ad"
    pack_files([cells], model.vocabulary, tmp_path / "base" / "prepared" / "train.h5").close()
    assert list(script("adapting").held_out(tmp_path / "corpus", tmp_path / "base")) == ["new"]
