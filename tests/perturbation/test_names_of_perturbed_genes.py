"""A perturbed gene by any of its names: alias, Ensembl id, symbol of another species."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch

import scdiva as sd
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.perturbation.conditions import ScreenDesign, read_perturbations
from scdiva.tokenizer.vocabulary import load_vocabulary

KLF1 = ["KLF1", "EKLF", "ENSG00000105610"]


@pytest.fixture(scope="module")
def human(screen):
    """A model that knows the genes of the screen."""
    every = load_vocabulary("human")
    tokens = every.match(list(screen().var_names)).tokens
    vocabulary = every.subset(np.sort(tokens[tokens >= 0]))
    model = ScDiVa(
        ScDiVaConfig(n_genes=vocabulary.n_genes, dim=16, n_heads=2, ffn_dim=24, max_length=40, n_layers=1),
        generator=torch.Generator().manual_seed(0),
    ).eval()
    model.vocabulary = vocabulary
    return model


@pytest.fixture(scope="module")
def screen(adata):
    """Cells in which KLF1, GATA1 and both are perturbed; labels are written as `names` says."""

    def make(names=(), labels=("control", "KLF1", "GATA1", "GATA1+TAL1")):
        rng = np.random.default_rng(0)
        genes = ["KLF1", "GATA1", "TAL1", "STAT1", *adata.var_names[:30]]
        label = np.repeat(labels, 12)
        mean = np.ones((len(label), len(genes)))
        for i, one in enumerate(labels):
            mean[label == one, 2 * i : 2 * i + 6] += 2 * i
        parts = [one.split("+") for one in label]
        obs = pd.DataFrame({"p": ["+".join(dict(names).get(part, part) for part in of) for of in parts]})
        obs.index = [f"c{i}" for i in range(len(label))]
        return ad.AnnData(rng.poisson(mean).astype(np.float32), obs=obs, var=pd.DataFrame(index=genes))

    return make


pytestmark = pytest.mark.filterwarnings("ignore:the data have", "ignore:these are mouse", "ignore:only ")


def predict(data, model, names, **arguments):
    key = None if isinstance(model, sd.models.PerturbationModel) else "p"
    return sd.tl.predict_perturbation(data, key, predict=names, model=model, n_cells=5, rng=0, **arguments)


@pytest.mark.parametrize("measured", KLF1)
def test_a_measured_gene_is_known_by_any_of_its_names(human, screen, measured, tmp_path):
    expected = predict(screen(), human, ["KLF1", "KLF1+GATA1", "TAL1"])
    notes = expected.uns["scdiva"]["perturbation"]
    assert notes["n_seen"].tolist() == [1, 2, 0]
    assert notes["trained"].tolist() == [True, False, False]
    data = screen({"KLF1": measured})
    fitted = sd.tl.fit_perturbation(data, "p", model=human, rng=0)
    for asked in KLF1:
        names = [asked, f"{asked}+GATA1", "TAL1"]
        for model in (human, fitted, sd.models.load(fitted.save(tmp_path / asked))):
            found = predict(data, model, names)
            assert list(found.obs["p"].cat.categories) == names
            for key in ("n_seen", "trained"):
                np.testing.assert_array_equal(found.uns["scdiva"]["perturbation"][key], notes[key])
            for key in ("scdiva_mean", "scdiva_sd"):
                np.testing.assert_allclose(found.varm[key], expected.varm[key], rtol=1e-5)


def test_plots_find_a_condition_by_any_name_of_its_genes(human, screen):
    predicted = predict(screen(), human, ["EKLF+GATA1", "TAL1"])
    for name in ("EKLF+GATA1", "GATA1+KLF1", "ENSG00000105610+GATA1"):
        fig = sd.pl.perturbation(predicted, name, return_fig=True)
        assert fig.axes[0].get_title().startswith("EKLF+GATA1: ")
    with pytest.raises(KeyError, match="must name one of the 2 predicted"):
        sd.pl.perturbation(predicted, "KLF1")


def test_a_gene_asked_for_by_two_names_is_asked_for_twice(human, screen):
    fitted = sd.tl.fit_perturbation(screen(), "p", model=human, rng=0)
    for names in (["EKLF", "KLF1"], ["STAT1", "ENSG00000115415"]):
        with pytest.raises(ValueError, match="more than once"):
            predict(screen(), fitted, names)
    with pytest.raises(ValueError, match=r"'EKLF\+KLF1', which names 'KLF1' twice: pass 'KLF1'"):
        predict(screen(), fitted, "EKLF+KLF1")


def test_a_mouse_gene_is_known_by_the_human_symbol(human, screen):
    mouse = screen(labels=("control", "Klf1", "Gata1"))
    mouse.var_names = [
        "Klf1",
        "Gata1",
        "Tal1",
        "Stat1",
        *(f"{name[0]}{name[1:].lower()}" for name in mouse.var_names[4:]),
    ]
    sd.pp.match_genes(mouse, human.vocabulary, species="mouse")
    fitted = sd.tl.fit_perturbation(mouse, "p", model=human, rng=0)
    found = predict(mouse, fitted, ["KLF1", "STAT1"])
    assert found.uns["scdiva"]["perturbation"]["n_seen"].tolist() == [1, 0]
    np.testing.assert_array_equal(
        found.varm["scdiva_mean"][:, 0], predict(mouse, fitted, "Klf1").varm["scdiva_mean"][:, 0]
    )


def test_pairs_of_candidates_are_ranked_once(human, screen):
    data = screen()
    data.obs["state"] = data.obs["p"]
    fitted = sd.tl.fit_perturbation(data, "p", model=human, rng=0)
    ranked = sd.tl.rank_perturbations(
        data, "state", start="control", target="GATA1", model=fitted, candidates=["EKLF+GATA1"], combinations=True
    )
    assert ranked["perturbation"].tolist() == ["EKLF+GATA1"]
    assert ranked["n_seen"].tolist() == [2]


def test_observed_cells_are_found_by_another_name(human, screen):
    predicted = predict(screen(), human, ["STAT1", "KLF1"])
    labels = ("control", "STAT1", "KLF1")
    expected = sd.tl.score_perturbation(predicted, screen(labels=labels))
    for names in ({"STAT1": "ENSG00000115415"}, {"STAT1": "ENSG00000115415", "KLF1": "EKLF"}):
        pd.testing.assert_frame_equal(sd.tl.score_perturbation(predicted, screen(names, labels)), expected)
    mixed = predict(screen(), human, ["EKLF+STAT1", "KLF1"])  # one gene by two names
    scores = sd.tl.score_perturbation(mixed, screen(labels=("control", "KLF1+STAT1", "KLF1")))
    assert set(scores["condition"]) == {"EKLF+STAT1", "KLF1"}
    twice = screen(labels=(*labels, "EKLF"))
    with pytest.warns(UserWarning, match="'EKLF' and 'KLF1'.: cells of 'EKLF' are ignored"):
        scores = sd.tl.score_perturbation(predicted, twice)
    assert set(scores["n_cells"]) == {12}


def test_two_labels_of_one_gene_are_refused_with_what_joins_them(screen):
    vocabulary = load_vocabulary("human")
    data = screen(labels=("control", "KLF1", "EKLF", "EKLF+GATA1", "GATA1"))

    def read(guides, data=data):
        return read_perturbations(data, ScreenDesign("p"), guides, vocabulary).parts

    with pytest.raises(ValueError, match=r"both 'KLF1' and 'EKLF'.* guides=\{'EKLF': 'KLF1'\}"):
        sd.pp.split_perturbations(data, "p", by="single")
    with_guide = data.copy()
    with_guide.obs["p"] = with_guide.obs["p"].replace("EKLF", "x")
    joined = ((), ("GATA1",), ("KLF1",), ("GATA1", "KLF1"))
    assert read({"EKLF": "KLF1"}) == joined
    with pytest.raises(ValueError, match="both 'KLF1' and 'EKLF'") as caught:
        read({"x": "EKLF"}, with_guide)
    names = {"guides": {"x": "EKLF"}}
    exec(str(caught.value).partition("Pass ")[2].partition(" to make")[0], names)
    assert read(names["guides"], with_guide) == joined
    for guides in ({}, {"EKLF": "EKLF"}):
        assert read(guides) == ((), ("EKLF",), ("GATA1",), ("KLF1",), ("EKLF", "GATA1"))
    fitted = sd.tl.fit_perturbation(data, "p", guides={})
    with pytest.raises(ValueError, match=r"the gene of 2 labels that were measured, 'EKLF' and 'KLF1'"):
        predict(data, fitted, "ENSG00000105610")


def test_a_fitted_model_says_how_labels_become_its_control(human, screen):
    fitted = sd.tl.fit_perturbation(screen(), "p", model=human, rng=0)
    data = screen(labels=("control", "NT7", "KLF1"))
    with pytest.raises(ValueError, match="look like negative controls") as caught:
        predict(data, fitted, "GATA1", guides={"KLF1": "KLF1"})
    exec(str(caught.value).partition("rename them: ")[2].partition("; ")[0], {"adata": data})
    assert predict(data, fitted, "GATA1", guides={"KLF1": "KLF1"}).n_obs == 5
    assert set(data.obs["p"]) == {"control", "KLF1"}
