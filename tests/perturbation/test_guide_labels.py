"""A screen whose labels are guides: fitted, predicted, scored and split as if they were genes, once that is said."""

from __future__ import annotations

import re
import warnings

import anndata as ad
import numpy as np
import pandas as pd
import pytest

import scdiva as sd


@pytest.fixture
def by_guide(perturbed_cells):
    """A screen and the same one with two guides of each gene in turn, those of the control too."""
    plain = perturbed_cells(("control", "0", "1", "2", "3", "0+1"), n=20)
    guides = plain.copy()
    guides.obs["perturbation"] = [
        "+".join(f"{part}_{i % 2 + 1}" for part in label.split("+"))
        for i, label in enumerate(plain.obs["perturbation"])
    ]
    return plain, guides


def mapping_of(data):
    """Gene of each guide: `"KLF1_1"` is `"KLF1"`."""
    parts = {part for label in data.obs["perturbation"].unique() for part in label.split("+")}
    return {part: part.rpartition("_")[0] for part in parts}


def fit(data, one, **options):
    return sd.tl.fit_perturbation(data, "perturbation", model=one, rng=0, **options)


def test_guides_are_fitted_as_their_genes(one, by_guide, genes, tmp_path):
    plain, guides = by_guide
    expected = fit(plain, one)
    fitted = fit(guides, one, guides=mapping_of(guides))
    assert fitted.screen.conditions.parts == expected.screen.conditions.parts
    assert fitted.screen.labels == expected.screen.labels
    np.testing.assert_array_equal(fitted.screen.delta, expected.screen.delta)
    again = sd.models.load(fitted.save(tmp_path / "fitted"))
    one_of, other = (
        sd.tl.predict_perturbation(of, model=model, predict=[genes[0], f"{genes[0]}+{genes[2]}"], rng=0)
        for of, model in ((plain, expected), (guides, again))
    )
    np.testing.assert_array_equal(one_of.X, other.X)
    assert one_of.obs["scdiva_control_cell"].tolist() == other.obs["scdiva_control_cell"].tolist()
    with pytest.raises(ValueError, match="never is 'control'"):
        fit(guides, one, guides={})
    guides.obs["perturbation"] = guides.obs["perturbation"].replace({"control_1": "control", "control_2": "control"})
    assert len(fit(guides, one, guides={}).screen.conditions) == 10


def test_observed_guides_are_those_of_the_prediction(one, by_guide, genes, tmp_path):
    _, guides = by_guide
    predicted = sd.tl.predict_perturbation(
        guides, "perturbation", model=one, guides=mapping_of(guides), predict=[genes[3], genes[0]], rng=0
    )
    for form in (predicted, guides):
        form.write_h5ad(tmp_path / "form.h5ad")
        scores = sd.tl.score_perturbation(ad.read_h5ad(tmp_path / "form.h5ad"), guides)
        of_genes = scores[(scores["method"] == "scdiva") & (scores["reference"] == "control")]
        assert dict(zip(of_genes["condition"], of_genes["n_cells"], strict=True)) == {genes[3]: 20, genes[0]: 20}


def test_all_guides_of_a_gene_are_held_out_together(by_guide):
    _, guides = by_guide
    sd.pp.split_perturbations(guides, "perturbation", by="single", n_splits=2, rng=0, guides=mapping_of(guides))
    gene = guides.obs["perturbation"].str.replace(r"_\d", "", regex=True)
    assert pd.crosstab(gene, guides.obs["scdiva_split"]).min(axis=1).max() == 0
    note = guides.uns["scdiva"]["scdiva_split"]
    assert dict(zip(note["guides"]["label"], note["guides"]["gene"], strict=True))["control_1"] == "control"


def test_perturbations_are_known_as_the_genes_of_the_data_are(one, perturbed_cells, genes, tmp_path):
    """Of a screen of another species: the same predictions as of the human genes that its own stand for."""
    plain = perturbed_cells(n=20)
    own = {gene: f"own{i:02}" for i, gene in enumerate(sorted(genes))}
    table = {name: gene for gene, name in own.items()}
    other = plain.copy()
    other.var_names = [own[gene] for gene in genes]
    other.obs["perturbation"] = [
        "+".join(own.get(part, part) for part in label.split("+")) for label in plain.obs["perturbation"]
    ]
    expected = sd.tl.predict_perturbation(plain, model=fit(plain, one), predict=[genes[9], f"{genes[0]}+{genes[7]}"])
    sd.pp.match_genes(other, one.vocabulary, species=table)
    fitted = fit(other, one)
    assert not len(fitted.notes["labels"])
    asked = [own[genes[9]], f"{own[genes[0]]}+{own[genes[7]]}"]
    for model in (fitted, fitted.save(tmp_path / "fitted")):
        found = sd.tl.predict_perturbation(other, model=model, predict=asked)
        for key in ("scdiva_mean", "scdiva_sd"):
            np.testing.assert_allclose(found.varm[key], expected.varm[key], rtol=1e-6)
    guides = other.copy()
    guides.obs["perturbation"] = guides.obs["perturbation"].str.replace(r"(own\d\d)", r"\1_2", regex=True)
    assert fit(guides, one, guides={f"{name}_2": name for name in table}).screen.labels == fitted.screen.labels
    with pytest.raises(ValueError, match="neither in the screen nor"):
        sd.tl.predict_perturbation(other, model=fitted, predict="own99")


def test_several_controls_count_as_one(one, perturbed_cells, genes, tmp_path):
    """Fitted, predicted, kept, scored, split and drawn as if all had one label."""
    plain = perturbed_cells(("control", "0", "1", "2", "0+1"), n=20)
    several = plain.copy()
    names = plain.obs["perturbation"].astype(str).to_numpy(dtype=object)
    names[np.flatnonzero(names == "control")[::3]] = "NTC_1"
    names[np.flatnonzero(names == "control")[::2]] = "neg-ctrl"
    several.obs["perturbation"] = names
    controls = ["control", "NTC_1", "neg-ctrl"]
    with pytest.raises(ValueError, match=r"control=\['control', 'NTC_1', 'neg-ctrl'\]"):
        fit(several, one)
    expected, fitted = fit(plain, one), fit(several, one, control=controls)
    np.testing.assert_array_equal(fitted.screen.delta, expected.screen.delta)
    again = sd.models.load(fitted.save(tmp_path / "fitted"))
    assert again.design.control == tuple(controls)
    asked = {"predict": [genes[0], f"{genes[0]}+{genes[2]}"], "rng": 0}
    by_one = sd.tl.predict_perturbation(plain, model=expected, **asked)
    for model in (fitted, again):
        found = sd.tl.predict_perturbation(several, control=controls[::-1], model=model, **asked)
        np.testing.assert_array_equal(found.X, by_one.X)
    with pytest.raises(ValueError, match="fitted with control="):
        sd.tl.predict_perturbation(several, control="NTC_1", model=fitted, **asked)
    found.write_h5ad(tmp_path / "found.h5ad")
    found = ad.read_h5ad(tmp_path / "found.h5ad")
    pd.testing.assert_frame_equal(
        sd.tl.score_perturbation(found, several), sd.tl.score_perturbation(by_one, plain), check_dtype=False
    )
    for data, control in ((plain, "control"), (several, controls)):
        sd.pp.split_perturbations(data, "perturbation", control, by="single", n_splits=2, rng=0)
    assert several.obs["scdiva_split"].tolist() == plain.obs["scdiva_split"].tolist()


def test_a_gene_whose_name_contains_the_separator(one, perturbed_cells, genes, tmp_path):
    """The same numbers as with another separator; its name is known to what follows."""
    plain = perturbed_cells(("control", "0", "1", "0+1", "2"), n=20)
    dashed = plain.copy()
    name, other = f"{genes[0]}-X", genes[1]
    dashed.var_names = [name if gene == genes[0] else gene for gene in dashed.var_names]
    labels = plain.obs["perturbation"].astype(str).str.split("+")
    dashed.obs["perturbation"] = ["-".join(name if part == genes[0] else part for part in parts) for parts in labels]
    fitted = fit(dashed, one, separator="-")
    assert fitted.screen.conditions.part_names == tuple(sorted([name, other, genes[2]]))
    again = sd.models.load(fitted.save(tmp_path / "fitted"))
    for model in (fitted, again):
        found = sd.tl.predict_perturbation(dashed, model=model, predict=[f"{other}-{name}", f"{name}-{genes[2]}"])
        notes = found.uns["scdiva"]["perturbation"]
        assert (notes["n_parts"].tolist(), notes["n_seen"].tolist()) == ([2, 2], [2, 2])
        found.write_h5ad(tmp_path / "found.h5ad")
        scores = sd.tl.score_perturbation(ad.read_h5ad(tmp_path / "found.h5ad"), dashed)
        assert set(scores["condition"]) == {f"{other}-{name}"}
        assert set(scores["n_cells"]) == {20}


def test_a_part_that_is_named_twice_is_refused(one, perturbed_cells, genes):
    data = perturbed_cells(("control", "0", "1", "2", "0+1"), n=20)
    twice = f"{genes[2]}+{genes[2]}"
    with pytest.raises(ValueError, match=f"names '{genes[2]}' twice: pass '{genes[2]}'"):
        sd.tl.predict_perturbation(data, "perturbation", model=one, predict=[twice])
    data.obs["perturbation"] = data.obs["perturbation"].astype(str).replace(genes[2], twice)  # two guides of a gene
    found = sd.tl.predict_perturbation(data, "perturbation", model=one, predict=[twice])
    assert found.uns["scdiva"]["perturbation"]["n_parts"].tolist() == [1]


def test_a_warning_names_guides_of_one_gene(one, by_guide):
    plain, guides = by_guide
    guides.obs["perturbation"] = guides.obs["perturbation"].replace({"control_1": "control", "control_2": "control"})
    mapping = dict(sorted((part, gene) for part, gene in mapping_of(guides).items() if part != "control"))
    message = rf"8 labels .* guides of 4 genes.*guides={re.escape(str(mapping))}"
    with pytest.warns(UserWarning, match=message):
        assert len(fit(guides, one).screen.conditions) == 10
    with pytest.warns(UserWarning, match="6 labels .* guides of 3 genes"):
        fit(guides, one, guides=dict([*mapping.items()][:2]))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".* labels in")
        for data, given in ((plain, None), (guides, {}), (guides, mapping)):
            fit(data, one, guides=given)
