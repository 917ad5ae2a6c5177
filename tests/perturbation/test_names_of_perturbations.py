"""A screen with other labels is the same screen: guides, several controls, Ensembl ids, genes of another species."""

from __future__ import annotations

import re
import warnings

import anndata as ad
import numpy as np
import pandas as pd
import pytest

import scdiva as sd
from scdiva.perturbation.response import similarities_of

from .conftest import predict


@pytest.fixture(scope="module")
def plain(perturbed_cells):
    """Never written to."""
    return perturbed_cells(("control", "0", "1", "2", "3", "0+1"), n=20)


@pytest.fixture(scope="module")
def ids(one, genes):
    """Ensembl ids of the first genes."""
    of = dict(zip(one.vocabulary.symbols, one.vocabulary.ensembl_ids, strict=True))
    return [of[gene] for gene in genes[:5]]


def fit(data, one, **options):
    return sd.tl.fit_perturbation(data, "perturbation", model=one, rng=0, **options)


def relabelled(data, name_of):
    """Copy the cells; each part of a label is written by its new name."""
    cells = data.copy()
    labels = data.obs["perturbation"].astype(str)
    cells.obs["perturbation"] = ["+".join(name_of(part, i) for part in of.split("+")) for i, of in enumerate(labels)]
    return cells


def by_guide(plain, one, genes, ids):
    """Two guides of each gene in turn, those of the control too."""
    names = [*genes[:4], "control"]
    guides = {f"{name}_{number}": name for name in names for number in (1, 2)}
    return relabelled(plain, lambda part, i: f"{part}_{i % 2 + 1}"), {"guides": guides}, str


def by_control(plain, one, genes, ids):
    controls = ["control", "NTC_1", "neg-ctrl"]
    cells = relabelled(plain, lambda part, i: controls[i % 3] if part == "control" else part)
    return cells, {"control": controls}, str


def by_id(plain, one, genes, ids):
    return relabelled(plain, lambda part, i: ids[0] if part == genes[0] else part), {}, str


def by_species(plain, one, genes, ids):
    """Genes of a species whose orthologs are in a table."""
    species_names = {gene: f"own{i:02}" for i, gene in enumerate(sorted(genes))}
    cells = relabelled(plain, lambda part, i: species_names.get(part, part))
    cells.var_names = [species_names[gene] for gene in genes]
    sd.pp.match_genes(cells, one.vocabulary, species={name: gene for gene, name in species_names.items()})
    return cells, {}, lambda label: "+".join(species_names[part] for part in label.split("+"))


@pytest.mark.parametrize("change", [by_guide, by_control, by_id, by_species])
def test_a_screen_with_other_labels_is_the_same_screen(plain, one, genes, ids, change, tmp_path):
    """Fitted, saved, predicted, written, scored and split as the one whose labels are symbols."""
    cells, options, name_of = change(plain, one, genes, ids)
    labels = [genes[0], f"{genes[0]}+{genes[1]}", f"{genes[0]}+{genes[2]}", genes[9]]
    expected, fitted = fit(plain, one), fit(cells, one, **options)
    assert not len(fitted.notes["labels"])  # all are genes
    of_plain = predict(plain, expected, labels)
    for model in (fitted, sd.models.load(fitted.save(tmp_path / "fitted"))):
        predicted = predict(
            cells, model, [name_of(label) for label in labels], control=options.get("control", "control")
        )
        for key in ("n_seen", "trained"):
            np.testing.assert_array_equal(*(p.uns["scdiva"]["perturbation"][key] for p in (predicted, of_plain)))
        for key in ("scdiva_mean", "scdiva_sd"):
            np.testing.assert_allclose(predicted.varm[key], of_plain.varm[key], rtol=1e-5)
    predicted.write_h5ad(tmp_path / "found.h5ad")
    label_columns = ["condition", "perturbation"]
    scores = [sd.tl.score_perturbation(ad.read_h5ad(tmp_path / "found.h5ad"), cells)]
    scores.append(sd.tl.score_perturbation(of_plain, plain))
    assert set(scores[1]["condition"]) == set(labels[:2])
    scores = [part.drop(columns=label_columns) for part in scores]
    pd.testing.assert_frame_equal(*scores, check_dtype=False, rtol=1e-4)
    if change in (by_guide, by_control):  # all guides of a gene are held out together
        how = {"by": "single", "n_splits": 2, "rng": 0, "copy": True}
        one_of = sd.pp.split_perturbations(plain, "perturbation", **how)
        cells = sd.pp.split_perturbations(cells, "perturbation", **how, **options)
        assert cells.obs["scdiva_split"].tolist() == one_of.obs["scdiva_split"].tolist()


def test_the_first_column_of_a_repeated_gene_is_used(plain, one, genes, ids):
    repeat = plain[:, [7]].copy()
    repeat.var_names = [f"{genes[0]}-1"]
    data = ad.concat([plain, repeat], axis=1, merge="same")
    data = relabelled(data, lambda part, i: ids[0] if part == genes[0] else part)
    screen = fit(data, one).screen
    no_states = np.zeros((0, screen.states.shape[1]), dtype=np.float32)
    columns = similarities_of(one, screen, screen.conditions, no_states, None).columns
    assert columns == {ids[0]: 0, **{gene: number for number, gene in enumerate(genes[:4]) if number}}


def test_a_gene_whose_name_contains_the_separator(one, plain, genes, tmp_path):
    name, partner = f"{genes[0]}-X", genes[1]
    dashed = relabelled(plain, lambda part, i: name if part == genes[0] else part)
    dashed.var_names = [name if gene == genes[0] else gene for gene in dashed.var_names]
    dashed.obs["perturbation"] = dashed.obs["perturbation"].str.replace("+", "-")
    fitted = fit(dashed, one, separator="-")
    assert fitted.screen.conditions.part_names == tuple(sorted([name, partner, genes[2], genes[3]]))
    for model in (fitted, sd.models.load(fitted.save(tmp_path / "fitted"))):
        predicted = predict(dashed, model, [f"{partner}-{name}", f"{name}-{genes[2]}"])
        notes = predicted.uns["scdiva"]["perturbation"]
        assert (notes["n_parts"].tolist(), notes["n_seen"].tolist()) == ([2, 2], [2, 2])
        predicted.write_h5ad(tmp_path / "found.h5ad")
        scores = sd.tl.score_perturbation(ad.read_h5ad(tmp_path / "found.h5ad"), dashed)
        assert set(scores["condition"]) == {f"{partner}-{name}"}
        assert set(scores["n_cells"]) == {20}


def test_one_gene_by_several_names(one, plain, genes, ids):
    fitted = fit(plain, one)
    predicted = predict(plain, fitted, [f"{ids[0]}+{genes[1]}", genes[2]])
    assert sd.pl.perturbation(predicted, f"{genes[1]}+{genes[0]}", return_fig=True).axes[0].get_title()
    ranked = sd.tl.rank_perturbations(
        plain.copy(), "perturbation", "control", target=genes[1], model=fitted, combinations=True,
        candidates=[f"{ids[0]}+{genes[1]}"],
    )  # fmt: skip
    assert len(ranked) == 6  # the pairs of four genes: the one that is named comes once
    for names, match in (
        ([ids[0], genes[0]], "more than once"),
        ([ids[4], genes[4]], "more than once"),  # not measured
        (f"{ids[0]}+{genes[0]}", f"names '{genes[0]}' twice: pass '{genes[0]}'"),
        (f"{genes[2]}+{genes[2]}", f"names '{genes[2]}' twice"),
    ):
        with pytest.raises(ValueError, match=match):
            predict(plain, fitted, names)
    ambiguous = fit(relabelled(plain, lambda part, i: ids[0] if part == genes[0] and i % 2 else part), one, guides={})
    with pytest.raises(ValueError, match=f"the gene of 2 labels that were measured, '{genes[0]}' and '{ids[0]}'"):
        predict(plain, ambiguous, one.vocabulary.table.set_index("symbol")["previous"][genes[0]])
    # observed under two names
    twice = relabelled(plain, lambda part, i: ids[2] if part == genes[2] and i % 2 else part)
    with pytest.warns(UserWarning, match=f"'{ids[2]}' and '{genes[2]}'.: cells of '{ids[2]}' are ignored"):
        scores = sd.tl.score_perturbation(predicted, twice)
    assert scores.groupby("condition")["n_cells"].first().to_dict()[genes[2]] == 10


def test_a_label_of_the_screen_may_name_a_gene_twice(one, plain, genes):
    """Two guides of one gene."""
    twice = f"{genes[2]}+{genes[2]}"
    data = plain.copy()
    data.obs["perturbation"] = data.obs["perturbation"].astype(str).replace(genes[2], twice)
    assert predict(data, fit(data, one), twice).uns["scdiva"]["perturbation"]["n_parts"].tolist() == [1]


def test_a_warning_names_guides_of_one_gene(one, plain, genes):
    guides = relabelled(plain, lambda part, i: part if part == "control" else f"{part}_{i % 2 + 1}")
    mapping = {f"{gene}_{number}": gene for gene in sorted(genes[:4]) for number in (1, 2)}
    with pytest.warns(UserWarning, match=rf"8 labels .* guides of 4 genes.*guides={re.escape(str(mapping))}"):
        assert len(fit(guides, one).screen.conditions) == 10
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".* labels in")
        for data, argument in ((plain, None), (guides, {}), (guides, mapping)):
            fit(data, one, guides=argument)


def test_a_fitted_model_says_how_labels_become_its_control(one, plain, genes):
    fitted = fit(plain, one)
    data = relabelled(plain, lambda part, i: "NT7" if part == "control" and i % 2 else part)
    with pytest.raises(ValueError, match="look like negative controls") as caught:
        predict(data, fitted, genes[1], guides={genes[0]: genes[0]})
    exec(str(caught.value).partition("rename them: ")[2].partition("; ")[0], {"adata": data})
    assert set(data.obs["perturbation"]) == set(plain.obs["perturbation"])
    with pytest.raises(ValueError, match="fitted with control="):
        predict(data, fitted, genes[1], control="NT7")
    assert predict(data, fitted, genes[1], guides={}).n_obs == 20  # which keeps all labels
