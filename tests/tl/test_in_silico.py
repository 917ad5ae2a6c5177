"""`tl.in_silico_perturbation`: what it returns, what that depends on, and what it refuses."""

from __future__ import annotations

import warnings

import anndata as ad
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch

import scdiva as sd
from scdiva.data.cells import log_normalised
from scdiva.perturbation import in_silico

OF_CONDITIONS = {
    "condition": "O", "perturbation": "O", "group": "O", "dose": "f", "n_parts": "i", "n_seen": "i", "trained": "b",
    "base": "O",
}  # fmt: skip
OF_THE_CALL = {
    "perturbation_key", "control", "groupby", "dose_key", "separator", "trained_on_interventions", "kind", "model",
    "seed", "seconds",
}  # fmt: skip
TYPE_A, TYPE_B = "type A", "type B"


def perturb(data, genes, model, **arguments):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the model was trained on no intervention", UserWarning)
        return sd.tl.in_silico_perturbation(data, genes, model=model, **{"rng": 0, "n_cells": 6} | arguments)


def ours(predicted) -> dict:
    return predicted.uns["scdiva"]["perturbation"]


def alike(one, other, places: float = 0.0):
    np.testing.assert_allclose(one.X, other.X, atol=places, rtol=0)
    assert one.obs["scdiva_control_cell"].tolist() == other.obs["scdiva_control_cell"].tolist()
    assert one.varm.keys() == other.varm.keys()
    for key in one.varm:
        np.testing.assert_allclose(one.varm[key], other.varm[key], atol=places, rtol=0)


def start(found, data) -> np.ndarray:
    """Expression of the cells that the perturbed ones were made from."""
    return log_normalised(data)[0][data.obs_names.get_indexer(found.obs["scdiva_control_cell"])].toarray()


@pytest.fixture(autouse=True)
def unwritten(adata):
    """The cells are those of all tests: what was written into them is taken out again."""
    yield
    for key in ("scdiva", "scdiva_in_silico"):
        adata.uns.pop(key, None)


@pytest.fixture
def runs(monkeypatch):
    """The cells that a model was asked about, with what it said."""
    seen, plain = [], in_silico.masked_values

    def record(model, cell):
        seen.append((cell, plain(model, cell)))
        return seen[-1][1]

    monkeypatch.setattr(in_silico, "masked_values", record)
    return seen


@pytest.mark.parametrize("kind", ["knockout", "overexpression"])
def test_what_is_documented_is_there_and_nothing_else(one, adata, genes, kind, contents, weights, same, tmp_path):
    before, theirs, state = contents(adata), weights(one), torch.random.get_rng_state()
    of_numpy = np.random.get_state()[1].copy()  # noqa: NPY002 the user's
    asked = [genes[3], f"{genes[7]}+{genes[1]}"]
    one.train()
    try:
        found = perturb(adata, asked, one, kind=kind, groupby="cell_type", groups=[TYPE_B, TYPE_A], n_cells=3)
        assert one.training
    finally:
        one.eval()
    kept = adata.uns.pop("scdiva_in_silico")
    assert set(adata.uns.pop("scdiva")) == {"written"}
    assert contents(adata) == before  # and nothing else was written
    assert same(weights(one), theirs)
    assert all(p.requires_grad and p.grad is None and p.device.type == "cpu" for p in one.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (np.random.get_state()[1] == of_numpy).all()  # noqa: NPY002
    assert (found.shape, found.X.dtype) == ((12, 60), np.float32)
    assert np.isfinite(found.X).all()
    assert found.X.min() >= 0
    pd.testing.assert_frame_equal(found.var, adata.var)
    assert set(found.obs) == {"scdiva_condition", "scdiva_control_cell", "perturbation", "cell_type"}
    assert found.obs_names.is_unique
    names = [f"{name} in {group}" for group in (TYPE_B, TYPE_A) for name in asked]
    assert list(found.obs["scdiva_condition"].cat.categories) == names
    assert found.obs["scdiva_condition"].tolist() == [name for name in names for _ in range(3)]
    assert list(found.obs["perturbation"].cat.categories) == asked
    assert list(found.obs["cell_type"].cat.categories) == [TYPE_B, TYPE_A]
    assert (adata.obs["cell_type"][found.obs["scdiva_control_cell"]].to_numpy() == found.obs["cell_type"]).all()
    assert set(found.varm) == {"scdiva_mean", "scdiva_sd", "scdiva_control"}
    assert {(value.shape, value.dtype.name) for value in found.varm.values()} == {((60, 4), "float32")}
    assert not {*found.obsm, *found.obsp, *found.layers} - {None}
    assert {key: set(value) for key, value in found.uns.items()} == {"scdiva": {"perturbation"}}
    notes = ours(found)
    assert set(notes) == {*OF_CONDITIONS, *OF_THE_CALL}
    assert {key: notes[key].dtype.kind for key in OF_CONDITIONS} == OF_CONDITIONS
    assert notes["condition"].tolist() == names
    assert notes["perturbation"].tolist() == asked * 2
    assert notes["group"].tolist() == [TYPE_B] * 2 + [TYPE_A] * 2
    assert notes["dose"].tolist() == [1.0] * 4
    assert notes["n_parts"].tolist() == [1, 2] * 2
    assert notes["n_seen"].tolist() == [0] * 4
    assert notes["base"].tolist() == ["none"] * 4
    assert not notes["trained"].any()
    assert notes["trained_on_interventions"] is False
    assert [notes[key] for key in ("perturbation_key", "control", "groupby", "dose_key", "separator", "kind")] == [
        "perturbation", "", "cell_type", "", "+", kind,
    ]  # fmt: skip
    assert set(kept) == set(notes) | {"genes", "mean", "change", "sd", "control_mean", "baselines"}
    np.testing.assert_array_equal(kept["mean"], found.varm["scdiva_mean"].T)
    np.testing.assert_array_equal(kept["change"], (found.varm["scdiva_mean"] - found.varm["scdiva_control"]).T)
    assert (notes["model"], notes["seed"].isdigit(), notes["seconds"] > 0) == ("ScDiVa", True, True)
    found.write_h5ad(tmp_path / "found.h5ad")
    read = ad.read_h5ad(tmp_path / "found.h5ad")
    alike(read, found)
    pd.testing.assert_frame_equal(read.obs, found.obs)
    assert set(ours(read)) == set(notes)
    assert not ours(read)["trained_on_interventions"]
    frame = sd.get.perturbation_df(read, top=5)
    assert len(frame) == 20
    assert set(frame["group"]) == {TYPE_A, TYPE_B}
    figure = sd.pl.perturbation(read, names[0], return_fig=True)
    assert figure.axes
    plt.close(figure)


def test_it_always_says_that_it_saw_no_intervention(one, adata, genes):
    for _ in range(2):
        with pytest.warns(UserWarning, match="trained on no intervention: .* scdiva.tl.predict_perturbation") as found:
            sd.tl.in_silico_perturbation(adata, genes[0], model=one, n_cells=1)
        assert [warning.filename for warning in found if warning.category is UserWarning] == [__file__]


def test_means_and_errors_are_those_of_the_cells(one, adata, genes):
    found = perturb(adata, [genes[3], genes[8]], one, groupby="cell_type", groups=TYPE_A)
    cells = start(found, adata)
    for i, name in enumerate(ours(found)["condition"]):
        rows = (found.obs["scdiva_condition"] == name).to_numpy()
        np.testing.assert_allclose(found.varm["scdiva_mean"][:, i], found.X[rows].mean(axis=0), atol=1e-6)
        np.testing.assert_allclose(found.varm["scdiva_control"][:, i], cells[rows].mean(axis=0), atol=1e-6)
        spread = (found.X[rows] - cells[rows]).std(axis=0, ddof=1) / 6**0.5
        np.testing.assert_allclose(found.varm["scdiva_sd"][:, i], spread, atol=1e-6)
    assert perturb(adata, genes[3], one, n_cells=1).varm["scdiva_sd"].max() == 0


@pytest.mark.parametrize("kind", ["knockout", "overexpression"])
def test_a_cell_changes_by_what_the_model_says_of_it_before_and_after(one, adata, genes, kind, runs):
    source, token = genes[3], int(one.vocabulary.match([genes[3]]).tokens[0])
    found = perturb(adata, source, one, kind=kind)
    cells = start(found, adata)
    at = genes.index(source)
    top = np.quantile([v for v in log_normalised(adata)[0][:, at].toarray().ravel() if v > 0], 0.95)
    place = {int(t): j for j, t in enumerate(one.vocabulary.match(genes).tokens) if t >= 0}
    rows = [i for i in range(6) if kind == "overexpression" or cells[i, at] > 0]
    assert len(runs) == 2 * len(rows)
    for i, (before, said), (after, then) in zip(rows, runs[::2], runs[1::2], strict=True):
        for t, value, turn in zip(*before, strict=True):
            assert value == pytest.approx(cells[i, place[int(t)]], abs=1e-4)
            assert (turn == -1) == (t == token)
        assert (token in after.tokens) == (kind == "overexpression")
        expected = cells[i].copy()
        for t in set(said) & set(then):
            expected[place[t]] += then[t] - said[t]
        expected[at] = 0.0 if kind == "knockout" else max(cells[i, at], top)
        np.testing.assert_allclose(found.X[i], np.maximum(expected, 0), atol=1e-4)
    if kind == "knockout":
        assert (found.X[:, at] == 0).all()


def test_a_cell_without_the_gene_is_not_changed_by_its_knock_out(one, adata, genes, runs):
    counts = adata.copy()
    dense = counts.X.toarray()
    dense[::2, 3], dense[1::2, 3] = 0, 4
    counts.X = sp.csr_matrix(dense)
    found = perturb(counts, genes[3], one, n_cells=12)
    cells = start(found, counts)
    without = cells[:, 3] == 0
    assert 0 < without.sum() < 12
    np.testing.assert_allclose(found.X[without], cells[without], atol=1e-6)
    assert (np.abs(found.X - cells)[~without].max(axis=1) > 1e-4).all()
    # nor does a gene that it does not express
    assert ((found.X == 0) | (cells > 0)).all()
    assert len(runs) == 2 * (~without).sum()  # of the others nothing is asked


def test_what_is_as_high_already_is_not_changed_by_raising_it(one, adata, genes):
    found = perturb(adata, genes[3], one, kind="overexpression", n_cells=90)
    values = log_normalised(adata)[0][:, 3].toarray().ravel()
    top = np.quantile(values[values > 0], 0.95)
    cells = start(found, adata)
    high = cells[:, 3] >= top + 1e-6
    assert 0 < high.sum() < 10
    np.testing.assert_allclose(found.X[high], cells[high], atol=1e-5)
    np.testing.assert_allclose(found.X[~high, 3], top, atol=1e-4)


def test_unknown_genes_stay(one, adata, genes):
    found = perturb(adata, [genes[3]], one)
    np.testing.assert_allclose(found.X[:, 55:], start(found, adata)[:, 55:], atol=1e-6)


def test_every_column_of_a_gene_is_knocked_out(one, adata, genes):
    """One under its symbol, one under its Ensembl id."""
    again = adata[:, [3]].copy()
    again.var_names = again.var["ensembl_id"].astype(str).tolist()
    twice = ad.concat([adata, again], axis="var", merge="first")
    found = perturb(twice, genes[3], one)
    assert start(found, twice)[:, [3, 60]].min(axis=0).max() >= 0
    assert found.X[:, [3, 60]].max() == 0
    assert start(found, twice)[:, 60].max() > 0


@pytest.mark.parametrize("kind", ["knockout", "overexpression"])
def test_the_order_of_parts_does_not_matter_nor_what_else_is_asked(one, adata, genes, kind):
    a, b, c = genes[2], genes[9], genes[4]
    pair = perturb(adata, f"{a}+{b}", one, kind=kind)
    for other in (f"{b}+{a}", f" {b} + {a}", f"{a}+{b}+{a}"):
        found = perturb(adata, other, one, kind=kind)
        alike(found, pair)
        assert ours(found)["condition"].tolist() == [other]
        assert ours(found)["n_parts"].tolist() == [2]
    alike(perturb(adata, f"{b}/{a}", one, kind=kind, separator="/"), pair)
    many = perturb(adata, [c, f"{a}+{b}", a], one, kind=kind)
    np.testing.assert_array_equal(many.X[6:12], pair.X)
    np.testing.assert_array_equal(many.varm["scdiva_mean"][:, [1]], pair.varm["scdiva_mean"])
    columns = [genes.index(a), genes.index(b)]
    if kind == "knockout":
        assert pair.X[:, columns].max() == 0
    assert np.abs(pair.X - many.X[12:]).max() > 1e-4


def test_groups_do_not_depend_on_which_others_are_asked_for(one, adata, genes):
    together = perturb(adata, genes[3], one, groupby="cell_type")
    assert ours(together)["group"].tolist() == sorted(adata.obs["cell_type"].unique())
    alone = perturb(adata, genes[3], one, groupby="cell_type", groups=TYPE_B)
    alike(alone, perturb(adata, genes[3], one, groupby="cell_type", groups=[TYPE_B]))
    np.testing.assert_array_equal(alone.X, together[together.obs["cell_type"] == TYPE_B].X)
    every = perturb(adata, genes[3], one, n_cells=1000)
    assert sorted(every.obs["scdiva_control_cell"]) == sorted(adata.obs_names)
    assert ours(every)["condition"].tolist() == [genes[3]]
    assert ours(every)["groupby"] == ""


def test_the_same_seed_gives_the_same(one, adata, genes):
    first, second, other = (perturb(adata, genes[3], one, rng=rng) for rng in (5, 5, 6))
    alike(first, second)
    assert first.obs["scdiva_control_cell"].tolist() != other.obs["scdiva_control_cell"].tolist()
    with sd.settings.override(seed=5):
        alike(perturb(adata, genes[3], one, rng=None), first)
    drawn = np.random.default_rng(1)
    assert ours(perturb(adata, genes[3], one, rng=drawn))["seed"] != ours(first)["seed"]


def test_other_models(build, adata, genes):
    found = perturb(adata, f"{genes[3]}+{genes[8]}", build(anchor="learned"))
    assert found.X[:, [3, 8]].max() == 0
    assert np.isfinite(found.X).all()


def test_genes_beyond_what_the_model_reads_at_once(build, adata, genes, runs):
    """The rarest gene of a cell is far behind what a model of five genes reads, with or without a set encoder."""
    model = build(anchor="learned")
    model.config = type(model.config)(**model.config.to_dict() | {"max_length": 5})
    cell = adata[[0]].copy()
    last = int(np.argmin(np.where(cell.X.toarray()[0, :55] > 0, cell.X.toarray()[0, :55], np.inf)))
    found = perturb(cell, genes[last], model)
    assert found.X[0, last] == 0
    (before, _), (after, _) = runs
    assert (len(before.tokens), len(after.tokens)) == (5, 4)
    with pytest.raises(ValueError, match="6 genes are perturbed together, more than the 5 that the model reads"):
        perturb(cell, "+".join(genes[:6]), model)


def test_the_same_cells_in_other_forms(one, adata, genes, tmp_path):
    asked = [genes[3], f"{genes[8]}+{genes[1]}"]
    expected = perturb(adata, asked, one, groupby="cell_type", groups=TYPE_A)
    adata.write_h5ad(tmp_path / "data.h5ad")
    backed = ad.read_h5ad(tmp_path / "data.h5ad", backed="r")
    dense, log, raw = adata.copy(), adata.copy(), adata.copy()
    dense.X = dense.X.toarray()
    log.layers["log"] = log_normalised(adata)[0].astype(np.float32)
    raw.raw = adata
    logs = adata.copy()
    logs.X = log.layers["log"]
    view = ad.concat([adata, adata[:9]], keys=["", " again"], index_unique="", merge="same")[: adata.n_obs]
    for form, arguments in (
        (backed, {}), (dense, {}), (log, {"layer": "log"}), (logs, {"input": "lognorm"}),
        (raw[:, :9].copy(), {"use_raw": True}), (view, {}),
    ):  # fmt: skip
        found = perturb(form, asked, one, groupby="cell_type", groups=TYPE_A, **arguments)
        alike(found, expected, 1e-4)
        assert list(found.var_names) == genes
    backed.file.close()


def test_ensembl_ids(one, adata, genes):
    ids = adata.var["ensembl_id"].astype(str).tolist()
    expected = perturb(adata, f"{genes[3]}+{genes[8]}", one)
    named = adata.copy()
    named.var_names = ids
    for asked in (f"{genes[3]}+{genes[8]}", f"{ids[3]}+{ids[8]}"):
        found = perturb(named, asked, one)
        alike(found, expected)
        assert list(found.var_names) == ids
        alike(perturb(adata, asked, one, gene_ids="ensembl_id"), expected)


def test_cells_without_a_known_gene_are_left_out(one, adata, genes):
    empty = adata.copy()
    mask = np.ones(empty.shape, dtype=np.float32)
    mask[:80, :55] = 0
    empty.X = sp.csr_matrix(empty.X.multiply(mask))
    empty.X.eliminate_zeros()
    empty = empty[70:].copy()
    with pytest.warns(UserWarning, match="10 of 20 cells are left out"):
        found = perturb(empty, genes[3], one, n_cells=50)
    assert sorted(found.obs["scdiva_control_cell"]) == sorted(adata.obs_names[80:])


@pytest.mark.parametrize(
    ("asked", "arguments", "error", "match"),
    [
        (["ALB", "no gene", "none either"], {}, ValueError, "2 of 3 .* not in the model's vocabulary, .* 'no gene'"),
        ([], {}, ValueError, "genes names no perturbation"),
        (["0", " "], {}, ValueError, "' ' has an empty part"),
        (["0", ""], {}, ValueError, "genes holds '', which is no perturbation"),
        ("0+", {}, ValueError, r"'.*\+' has an empty part"),
        (["0+1", "2", "1+0"], {}, ValueError, "genes holds '.*' more than once; the order of parts does not count"),
        ("0", {"groups": [TYPE_A]}, ValueError, "groups are given without a column: groupby="),
        (
            "0", {"groupby": "cell_type", "groups": ["z", TYPE_A, "y"]}, ValueError,
            r"2 of 3 groups are not in adata.obs\['cell_type'\], the first is 'z'; there are 'type A', 'type B'",
        ),
        ("0", {"groupby": "cell_type", "groups": []}, ValueError, "groups names no group"),
        ("0", {"groupby": "cell_type", "groups": [TYPE_A] * 2}, ValueError, "groups holds 'type A' more than once"),
        ("0", {"groupby": "nowhere"}, KeyError, "nowhere"),
        ("0", {"groupby": "perturbation"}, ValueError, "copy the groups to a column of another name"),
        ("0", {"kind": "activation"}, ValueError, "kind must be one of .* got 'activation'"),
        ("0", {"n_cells": 0}, ValueError, "n_cells must be at least 1, got 0"),
        ("0", {"n_cells": 2.5}, TypeError, "float"),
        ("0", {"layer": "nowhere"}, KeyError, "nowhere"),
        ("0", {"use_raw": True}, (KeyError, ValueError), "raw"),
        ("0", {"gene_ids": "nowhere"}, KeyError, "nowhere"),
        ("0", {"device": "abacus"}, ValueError, "abacus"),
        ("0", {"rng": -1}, ValueError, "-1"),
        ("0", {"model": "no such model"}, FileNotFoundError, "no such model"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_and_nothing_changed(
    one, adata, genes, asked, arguments, error, match, contents
):
    def named(name):
        return "+".join(genes[int(part)] if part.isdigit() else part for part in name.split("+"))

    before, state = contents(adata), torch.random.get_rng_state()
    asked = named(asked) if isinstance(asked, str) else [named(name) for name in asked]
    with pytest.raises(error, match=match):
        perturb(adata, asked, **{"model": one} | arguments)
    assert contents(adata) == before
    assert torch.equal(torch.random.get_rng_state(), state)


def test_data_that_make_no_sense_are_refused(one, adata, genes):
    with pytest.raises(TypeError, match="AnnData"):
        perturb(np.zeros((3, 3)), genes[0], one)
    twice = adata.copy()
    twice.var_names = [genes[1], *genes[1:]]
    with pytest.raises(ValueError, match="1 of 60 genes of adata repeat a name"):
        perturb(twice, genes[3], one)
    ids = adata.var["ensembl_id"].astype(str)
    with pytest.raises(ValueError, match="names one gene twice"):
        perturb(adata, f"{genes[3]}+{ids.iloc[3]}", one)
    never = adata.copy()
    never.X = sp.csr_matrix(never.X.multiply(~np.isin(np.arange(60), [3, 8])))
    never.X.eliminate_zeros()
    with pytest.raises(ValueError, match=f"2 of 3 perturbations raise what none .* first is '{genes[3]}'"):
        perturb(never, [genes[1], genes[3], genes[8]], one, kind="overexpression")
    with pytest.raises(ValueError, match=f"1 of 2 perturbations take away .* the first is '{genes[3]}'"):
        perturb(never, [genes[3], f"{genes[1]}+{genes[8]}"], one)
    missing = adata.copy()
    missing.obs["cell_type"] = missing.obs["cell_type"].where(np.arange(90) > 1)
    with pytest.raises(ValueError, match="missing for 2 of 90 cells"):
        perturb(missing, genes[3], one, groupby="cell_type")
