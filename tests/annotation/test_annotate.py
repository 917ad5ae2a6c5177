"""`tl.annotate`: what it writes, what it refuses, and that a failed call leaves everything as it was."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

import scdiva as sd
from scdiva._labels import label_numbers
from scdiva.annotation import annotate as _annotate
from scdiva.annotation.annotate import ancestors, majority_labels, name_cells, warn_of_shift
from scdiva.annotation.fit import cells_to_read

from .conftest import SHORT

KEYS = ("scdiva_label", "scdiva_label_confidence", "scdiva_label_novelty")
NOTES = {
    "labels", "method", "labels_key", "temperature", "ece", "accuracy", "n_held_out", "reliability", "max_novelty",
    "max_novelty_from", "n_genes", "n_cells", "groups",
    "n_labelled", "own_directions", "model", "seed", "seconds", "finetuned", "loss",
}  # fmt: skip
NOTES_OF_TRAINING = {"steps", "history", "loss_before", "accuracy_before"}
pytestmark = [pytest.mark.filterwarnings("ignore:fine-tuning did not lower"), pytest.mark.usefixtures("short_probe")]


def annotate(data, reference, model, method="linear", **arguments):
    """Annotate a copy; the copy."""
    return fit(data, reference, model, method, **arguments)[1]


@pytest.mark.parametrize("method", SHORT)
def test_what_is_documented_is_written(plain, query, reference, method, hashed):
    data, before = query.copy(), hashed(reference)
    annotator = sd.tl.annotate(data, "cell_type", reference, model=plain, batch_key="batch", rng=3, **SHORT[method])
    assert hashed(reference) == before
    assert list(data.obs) == [*query.obs, *KEYS]
    assert set(data.uns["scdiva"]) == {"scdiva_label", "written"}
    notes, names = data.uns["scdiva"]["scdiva_label"], ["type A", "type B", "type C", "type D"]
    assert set(notes) == NOTES | (NOTES_OF_TRAINING if method == "finetune" else set())
    probability, labels = data.obsm["scdiva_label_probability"], data.obs["scdiva_label"]
    assert (probability.dtype, probability.shape) == (np.float32, (80, 4))
    np.testing.assert_allclose(probability.sum(axis=1), 1, rtol=1e-5)
    assert isinstance(labels.dtype, pd.CategoricalDtype)
    assert list(labels.cat.categories) == [name for name in names if name in set(labels)]
    assert (labels == np.array(names)[probability.argmax(axis=1)]).all()
    for key in KEYS[1:]:
        assert data.obs[key].dtype == np.float32
        assert np.isfinite(data.obs[key]).all()
    np.testing.assert_array_equal(data.obs[KEYS[1]], probability.max(axis=1))
    assert list(notes["labels"]) == names == list(annotator.labels)
    assert notes["finetuned"] == (method == "finetune")
    assert notes["method"] == ("probe" if method == "finetune" else method)
    assert (notes["labels_key"], notes["model"]) == ("cell_type", "ScDiVa")
    assert (notes["n_genes"], notes["n_labelled"]) == (60 if method == "linear" else 55, 160)
    assert 0 <= notes["ece"] <= 1
    assert {len(column) for column in notes["reliability"].values()} == {15}
    assert notes["reliability"]["n_cells"].sum() == notes["n_held_out"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"labels_key": None}, "Name the column with the labels"),
        ({"labels_key": "hole"}, r"reference\.obs\['hole'\].*3 of 160"),
        ({"labels_key": "one"}, r"reference\.obs\['one'\].*160 cells.*1"),
        ({"labels_key": "twice", "reference": None, "key_added": "twice"}, "would be overwritten"),
        ({"labels_key": "new_majority", "reference": None, "key_added": "new"}, "holds the labels"),
        ({"key_added": "new", "majority_voting": "new_cluster"}, "holds the clusters"),
        ({"method": "knn", "finetune": True}, 'finetune=True trains .* method="probe"'),
        ({"finetune": True, "lora": 4}, "lora: the cell state .* set encoder"),
        ({"parents": {"type A": "x", "x": "type A"}}, "parents goes in a circle: type A > x > type A"),
        ({"parents": {"type A": "type B"}}, "'type B' as a group"),
        ({"labels_key": "with unknown", "reject": 0.1}, "unlabeled_category='unknown'"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_changed(plain, query, reference, arguments, match, hashed, weights, same):
    data, labelled = query.copy(), reference.copy()
    types = labelled.obs["cell_type"].astype(str)
    labelled.obs["hole"], labelled.obs["one"] = types.where(~np.isin(np.arange(160), [5, 7, 9]), None), "a"
    labelled.obs["with unknown"] = types.replace("type A", "unknown")
    data.obs["twice"] = np.resize(["x", "y"], 80)
    for one in (data, labelled):
        one.uns["scdiva"] = {"kept": 1}
    before, weights_before = (hashed(data), hashed(labelled)), weights(plain)
    call = {"labels_key": "cell_type", "reference": labelled, "model": plain, "rng": 0} | arguments
    with pytest.raises(ValueError, match=match):
        sd.tl.annotate(data, **call)
    assert (hashed(data), hashed(labelled)) == before
    assert same(weights(plain), weights_before)


@pytest.mark.parametrize("fault", ["NaN", "negative", "text", "genes", "layer", "raw"])
def test_a_fault_of_the_reference_is_said_of_it(plain, query, reference, fault):
    """The error suggests a fix for the reference; the query is valid."""
    query, reference = query.copy(), reference.copy()
    query.raw, query.layers["counts"] = query.copy(), query.X
    sound = reference.X
    if fault in ("NaN", "negative"):
        reference.X = reference.X.toarray()
        reference.X[0, 0] = np.nan if fault == "NaN" else -1
        reference.layers["counts"] = sound
    elif fault == "text":
        reference.X = reference.X.toarray().astype(str)
    elif fault == "genes":
        reference.var_names = [f"x{i}" for i in range(reference.n_vars)]
    reading = {"layer": {"layer": "counts"}, "raw": {"use_raw": True}}
    with pytest.raises((KeyError, TypeError, ValueError), match="reference") as error:
        annotate(query, reference, plain, **reading.get(fault, {}))
    message = error.value.args[0]
    assert not re.search(r"\badata\b", message)
    if fault != "genes":
        names = {"reference": reference, "np": np}
        exec(re.search(r": (reference\S* = .+?)(, or|\.$| \(for)", message)[1], names)
        annotate(query, names["reference"], plain, **reading.get(fault, {}))


def test_genes_must_overlap(plain, query, reference, hashed):
    data = query.copy()
    with pytest.raises(ValueError, match=r"30 known genes .*30 of adata's 30, 60 of .*60"):
        annotate(data[:, :30].copy(), reference, plain)
    annotator = sd.tl.annotate(data, "cell_type", reference, model=plain, rng=0)
    half = query[:, :30].copy()
    before = hashed(half)
    with pytest.raises(ValueError, match=r"adata has 30 of the 60 .*50"):
        sd.tl.annotate(half, model=annotator)
    assert hashed(half) == before


def test_an_annotator_takes_no_labels(plain, query, reference, hashed):
    data = query.copy()
    annotator = sd.tl.annotate(data, "cell_type", reference, model=plain, method="knn", rng=0)
    before = hashed(data)
    for more in ({"labels_key": "cell_type"}, {"reference": reference}, {"method": "probe"}, {"epochs": 2}):
        with pytest.raises(ValueError, match=f"This annotator is fitted: leave {next(iter(more))} out"):
            sd.tl.annotate(data, model=annotator, **more)
    with pytest.raises(ValueError, match="lacks, the first is 'T'"):
        sd.tl.annotate(data, model=annotator, parents={"T": "x"})
    with pytest.raises(FileNotFoundError, match="blod"):
        sd.tl.annotate(data, model="blod")
    assert hashed(data) == before


def test_what_fails_late_changes_nothing(plain, query, reference, monkeypatch, hashed):
    def fails(*_):
        raise MemoryError

    data = query.copy()
    before = hashed(data)
    monkeypatch.setattr(_annotate, "name_cells", fails)
    with pytest.raises(MemoryError):
        sd.tl.annotate(data, "cell_type", reference, model=plain)
    assert hashed(data) == before


@pytest.mark.parametrize("method", ["linear", "finetune"])
def test_cells_without_genes_get_nothing(plain, query, reference, method):
    data = query.copy()
    matrix = data.X.toarray()
    matrix[[0, 60]] = 0
    data.X = sp.csr_matrix(matrix)
    annotated = annotate(data, reference, plain, method=method, reject=0.3)
    assert annotated.obs["scdiva_label"].isna().to_numpy().nonzero()[0].tolist() == [0, 60]
    for values in (annotated.obs[KEYS[1]], annotated.obs[KEYS[2]], annotated.obsm["scdiva_label_probability"][:, 0]):
        assert np.flatnonzero(np.isnan(np.asarray(values))).tolist() == [0, 60]
    rows = np.setdiff1d(np.arange(80), [0, 60])
    expected = annotate(query, reference, plain, method=method, reject=0.3).obsm["scdiva_label_probability"]
    np.testing.assert_allclose(annotated.obsm["scdiva_label_probability"][rows], expected[rows], atol=1e-5)


def test_a_path_as_reference_is_refused_by_that_name(plain, query):
    with pytest.raises(TypeError, match=r"^reference: .* got str.*reference = anndata\.read_h5ad\(path\)\.$"):
        sd.tl.annotate(query, "cell_type", "ref.h5ad", model=plain)


def test_one_fault_is_told_of_once():
    """Few genes in both query and reference; the name for unlabelled cells in a different case."""
    cells = sd.datasets.toy(160, 100)
    query, reference = cells[:60].copy(), cells[60:].copy()
    with pytest.warns(UserWarning, match="genes that the model knows") as caught:
        sd.tl.annotate(query.copy(), "cell_type", reference, rng=0)
    assert len([one for one in caught if "that the model knows" in str(one.message)]) == 1
    labelled = reference.copy()
    labelled.obs["cell_type"] = np.where(np.arange(100) < 9, "Unknown", labelled.obs["cell_type"].astype(str))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="unlabeled_category='Unknown'"):
            sd.tl.annotate(query.copy(), "cell_type", labelled, unlabeled_category="unknown")


def test_majority_labels_are_the_most_frequent_of_each_cluster():
    rng = np.random.default_rng(0)
    labels = pd.Categorical(rng.choice(["a", "b", None], 300), ["c", "b", "a"])
    clusters = rng.integers(-1, 40, 300)
    clusters[:3] = 77  # no cell with a label
    labels[:3] = np.nan
    majority = majority_labels(labels, clusters)
    for cluster in set(clusters):
        votes = [name for name in labels[clusters == cluster] if isinstance(name, str)]
        expected = max(("b", "a"), key=votes.count) if votes and cluster >= 0 else None
        assert set(majority[clusters == cluster].dropna()) == ({expected} if expected else set())
    assert list(majority.categories) == ["b", "a"]


def test_clusters_of_the_embedding_or_of_a_column_vote(query, reference, plain):
    query = query.copy()
    query.obs["scdiva_label_cluster"] = "mine"  # only voting over clusters of its own writes this key
    annotated = annotate(query, reference, plain)
    assert set(annotated.obs["scdiva_label_cluster"]) == {"mine"}
    assert "scdiva_label_majority" not in annotated.obs
    del query.obs["scdiva_label_cluster"]
    query.obs["mine"] = np.resize(["x", "y", "z"], query.n_obs)
    annotator = sd.tl.annotate(query, "cell_type", reference, model=plain, rng=3, majority_voting=True)
    clusters = query.obs["scdiva_label_cluster"].cat.codes.to_numpy()
    assert len(set(clusters)) > 1
    expected = majority_labels(query.obs["scdiva_label"].array, clusters)
    assert list(query.obs["scdiva_label_majority"]) == list(expected)
    assert query.uns["scdiva"]["scdiva_label"]["majority_voting"] == "leiden"
    sd.tl.annotate(query, model=annotator, majority_voting="mine")
    assert "scdiva_label_cluster" not in query.obs  # of the earlier call
    for name in "xyz":
        of_cluster = query.obs[query.obs["mine"] == name]
        assert set(of_cluster["scdiva_label_majority"]) == {of_cluster["scdiva_label"].value_counts().idxmax()}
    with pytest.raises(KeyError, match="no column 'min'"):
        sd.tl.annotate(query, model=annotator, majority_voting="min")
    with pytest.raises(ValueError, match="at least 10 cells, and 9"):
        annotate(query[:9].copy(), reference, plain, majority_voting=True)


def fit(data, reference, model, method="linear", **arguments):
    """Annotate a copy; the annotator and the copy."""
    data = data.copy()
    return sd.tl.annotate(data, "cell_type", reference, model=model, **{"rng": 3} | SHORT[method] | arguments), data


def again(data, annotator, **arguments):
    data = data.copy()
    sd.tl.annotate(data, model=annotator, **arguments)
    return data


def assert_alike(first, second, atol=0.0):
    """The same annotation of the same cells."""
    if atol == 0:
        pd.testing.assert_frame_equal(first.obs[list(KEYS)], second.obs[list(KEYS)])
    actual, expected = (data.obsm["scdiva_label_probability"] for data in (first, second))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)
    np.testing.assert_allclose(first.obs[KEYS[2]], second.obs[KEYS[2]], rtol=0, atol=20 * atol)


@pytest.mark.parametrize("method", ["linear", "knn"])
def test_labelled_and_unlabelled_cells_in_one_object(plain, cells, query, reference, method):
    """The scANVI convention, missing values and two separate objects give the same result."""
    new = (cells.obs["batch"] == "batch 3").to_numpy()
    with_unknown, missing = cells.copy(), cells.copy()
    with_unknown.obs["cell_type"] = np.where(new, "Unknown", cells.obs["cell_type"].astype(str))
    missing.obs["cell_type"] = cells.obs["cell_type"].where(~new)
    labels = with_unknown.obs["cell_type"].copy()
    annotator, one = fit(with_unknown, None, plain, method=method, unlabeled_category="Unknown")
    _, two = fit(missing, None, plain, method=method)
    assert_alike(one, two)
    pd.testing.assert_series_equal(one.obs["cell_type"], labels)
    assert annotator.labels == ("type A", "type B", "type C", "type D")
    assert one.uns["scdiva"]["scdiva_label"]["n_labelled"] == 160
    assert one.obs["scdiva_label"].notna().all()
    if method == "knn":  # its result does not depend on unlabelled cells
        assert_alike(one[new], fit(query, reference, plain, method=method)[1], atol=1e-6)


def test_all_labelled_warns(plain, query):
    with pytest.warns(UserWarning, match="all 80 cells .*adata.obs"):
        fit(query, None, plain, method="knn")


@pytest.mark.parametrize("method", ["linear", "knn", "finetune"])
def test_a_cells_annotation_does_not_depend_on_its_company(plain, query, reference, method):
    annotator, annotated = fit(query, reference, plain, method=method)
    rows = np.random.default_rng(0).permutation(80)[:13]
    assert_alike(again(query[rows], annotator), annotated[rows], atol=1e-5)
    assert_alike(again(query[5], annotator), annotated[5], atol=1e-5)


@pytest.mark.parametrize("method", SHORT)
def test_later_queries_are_annotated_alike(plain, query, reference, method, tmp_path):
    """With the returned annotator, its folder and the loaded annotator: bit-identical to the first call."""
    annotator, first = fit(query, reference, plain, method=method, reject=0.2, parents={"type A": "low"}, backoff=0.7)
    folder = annotator.save(tmp_path / "annotator")
    for one in (annotator, folder, str(folder), sd.models.load(folder)):
        later = again(query, one, reject=0.2, backoff=0.7)
        assert_alike(later, first)
        notes = [data.uns["scdiva"]["scdiva_label"] for data in (later, first)]
        assert notes[0].keys() == notes[1].keys()
        assert all(notes[0][key] == notes[1][key] for key in ("method", "labels_key", "temperature", "ece", "seed"))
    assert (again(query, annotator).obs["scdiva_label"] != "unknown").all()


def test_other_genes_are_not_read(plain, query, reference):
    """Genes in only one dataset, known to the model or not, and names that are not genes are ignored."""
    columns = np.r_[0:26, 30:56]
    _, expected = fit(query[:, columns].copy(), reference[:, columns].copy(), plain)
    assert expected.uns["scdiva"]["scdiva_label"]["n_genes"] == 52
    renamed = [data.copy() for data in (query, reference)]
    for data in renamed:
        data.var_names = [*data.var_names[:56], "no gene", *data.var_names[57:]]
    for query_part, reference_part in [
        (query[:, columns], reference),
        (query, reference[:, columns]),
        (query[:, np.r_[0:26, 30:60]], reference[:, columns]),
        [data[:, np.r_[0:26, 30:57]] for data in renamed],
    ]:
        assert_alike(fit(query_part.copy(), reference_part.copy(), plain)[1], expected, atol=1e-5)


def test_human_genes_that_the_model_lacks_are_read(plain, query, reference):
    """Labels that differ only in such genes; an embedding without these genes is no better than chance."""
    rng, accuracy = np.random.default_rng(0), {}
    data = [one.copy() for one in (query, reference)]
    for one in data:
        label = rng.integers(0, 2, one.n_obs)
        one.obs["cell_type"] = np.array(["without", "with"])[label]
        counts = one.X.toarray() if hasattr(one.X, "toarray") else np.array(one.X)
        counts[:, 55:60] = rng.poisson(1 + 6 * label[:, None], (one.n_obs, 5))
        one.X = counts.astype(np.float32)
    assert (plain.vocabulary.match(list(query.var_names[55:])).tokens < 0).all()
    for method in ("linear", "probe"):
        annotated = fit(data[0], data[1], plain, method=method)[1]
        accuracy[method] = (annotated.obs["scdiva_label"] == annotated.obs["cell_type"]).mean()
    assert accuracy["linear"] > 0.9
    assert accuracy["probe"] < 0.8


def test_cells_without_a_gene_of_the_model_have_no_label(plain, query, reference):
    """In the query, and as cells of the reference, which are then not read."""
    copies = [data.copy() for data in (query, reference)]
    for data in copies:
        data.X = data.X.toarray()
        data.X[:3, :55] = 0
        data.X[:3, 55] = 7
    annotator, annotated = fit(*copies, plain, majority_voting="leiden")
    assert annotated.obs[[*KEYS, "scdiva_label_majority"]].iloc[:3].isna().all(axis=None)
    assert np.isnan(annotated.obsm["scdiva_label_probability"][:3]).all()
    assert annotated.obs["scdiva_label"].iloc[3:].notna().all()
    assert_alike(annotated[3:], fit(query[3:].copy(), copies[1][3:].copy(), plain)[1], atol=1e-5)
    assert annotator.notes["n_labelled"] == reference.n_obs - 3


def test_a_later_query_of_fewer_genes(plain, query, reference):
    annotator, _ = fit(query, reference, plain)
    later = again(query[:, :52].copy(), annotator)
    assert (later.obs["scdiva_label"] == query.obs["cell_type"]).mean() > 0.85
    annotator.tokens = np.arange(3, 300, dtype=np.int32)  # a wider reference, of which this has a part
    with pytest.warns(UserWarning, match="adata has 55 of the 297"):
        again(query, annotator)


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_about_as_many_known_cells_are_rejected_as_asked_for(plain, query, reference, share):
    annotator, data = fit(query, reference, plain, reject=share)
    threshold = data.uns["scdiva"]["scdiva_label"]["max_novelty"]
    assert (annotator.novelty > threshold).mean() == pytest.approx(share, abs=0.02)
    rejected = (data.obs["scdiva_label"] == "unknown").to_numpy()
    np.testing.assert_array_equal(rejected, data.obs[KEYS[2]] > threshold)
    assert rejected.mean() == pytest.approx(share, abs=0.2)  # of another batch
    assert data.obs["scdiva_label"].cat.categories[-1] == "unknown"
    assert np.isfinite(data.obs[KEYS[1]]).all()
    assert again(query, annotator, reject=0.999).obs["scdiva_label"].eq("unknown").mean() > 0.9


@pytest.mark.parametrize("kind", ["type A", "type C"])
def test_a_type_that_the_reference_lacks_is_rejected(plain, query, reference, kind):
    labelled = reference[reference.obs["cell_type"] != kind].copy()
    _, data = fit(query, labelled, plain, reject=0.05)
    new = (query.obs["cell_type"] == kind).to_numpy()
    assert roc_auc_score(new, data.obs[KEYS[2]]) > 0.75
    rejected = (data.obs["scdiva_label"] == "unknown").to_numpy()
    assert rejected[new].mean() > rejected[~new].mean() + 0.1


@pytest.mark.parametrize("method", ["linear", "knn"])
def test_the_threshold_is_that_of_held_out_batches(plain, query, reference, method):
    """Where the reference has one batch, or none is named, it is that of held-out cells."""
    alone = reference[reference.obs["batch"] == "batch 1"].copy()
    for labelled, key, source in [
        (reference, None, "cells"),
        (reference, "batch", "batches"),
        (alone, "batch", "cells"),
    ]:
        annotator, data = fit(query, labelled, plain, method=method, batch_key=key, reject=0.1)
        assert data.uns["scdiva"]["scdiva_label"]["max_novelty_from"] == f"held-out {source}"
        assert data.uns["scdiva"]["scdiva_label"]["max_novelty"] == np.quantile(annotator.novelty, 0.9)
        assert f"held-out {source}" in repr(annotator)


def test_a_share_far_above_the_rate_warns():
    """Held-out cells have a standard normal novelty, a query of 1,000 cells the same, or a shifted one."""
    draw = np.random.default_rng(0)
    held, same = np.sort(draw.normal(size=2000)), draw.normal(size=1000)
    annotator = SimpleNamespace(novelty=held, notes={})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rate in (0.01, 0.05, 0.5, 0.9):
            warn_of_shift(same, rate, annotator)
        for values in (same + 0.3, np.array([3.0, 0.1]), np.zeros(0)):  # 9% are unknown, one of two, none
            warn_of_shift(values, 0.05, annotator)
    threshold = np.quantile(held, 0.95)
    for shift in (1.0, 2.0):
        novelty = same + shift
        above = (novelty[novelty <= threshold] > np.median(held[held <= threshold])).mean()
        with pytest.warns(UserWarning, match=rf"^{(novelty > threshold).sum()} of 1000 .*{above:.0%} of the other"):
            warn_of_shift(novelty, 0.05, annotator)
    with pytest.warns(UserWarning, match=r"1000 of 1000 .*reject=0\.1") as caught:
        warn_of_shift(same + 9, 0.5, SimpleNamespace(novelty=held, notes={"max_novelty_from": "held-out batches"}))
    assert "batch_key" not in str(caught[0].message)


def test_a_label_without_a_gene_is_named(plain, query, reference):
    labelled, matrix = reference.copy(), reference.X.toarray()
    matrix[(reference.obs["cell_type"] == "type C").to_numpy()] = 0
    labelled.X = sp.csr_matrix(matrix)
    with (
        pytest.raises(ValueError, match=r"cell of 1 label.*'type C'"),
        pytest.warns(UserWarning, match="left out"),
    ):
        fit(query, labelled, plain)


def test_of_an_integrated_model_neighbours_read_the_embedding(plain, cells, query, reference):
    model = sd.tl.integrate(cells.copy(), "batch", model=plain, steps=3, rng=0)
    for method in SHORT:
        annotator, data = fit(query, reference, model, method=method)
        width = model.integration.dim if method == "knn" else plain.state_dim
        assert annotator.head.sizes.state_dim == width
        assert_alike(again(query, annotator), data)
        if method == "finetune":  # its embedding is the state that it was fine-tuned on
            assert annotator.model.integration is None
    # the state before the head is that of the model without one
    assert_alike(fit(query, reference, model)[1], fit(query, reference, plain)[1])


@pytest.mark.parametrize("method", ["linear", "knn"])
def test_a_model_whose_state_comes_through_the_transformer(build, query, reference, method, tmp_path):
    model = build(anchor="learned")
    labelled = reference[np.arange(0, 160, 4)].copy()
    annotator, data = fit(query[:20].copy(), labelled, model, method=method)
    later = again(query[:20], annotator.save(tmp_path / "one"))
    assert_alike(later, data)


LABELS = ("B", "CD4", "CD8", "mono", "stem")


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.01, 1), min_size=5, max_size=5), min_size=1, max_size=6),
    st.floats(0.05, 1),
    st.dictionaries(st.sampled_from(LABELS), st.sampled_from("xyz")),
    st.sampled_from([{}, {"x": "top"}, {"x": "y", "y": "top", "z": "top"}]),
)
def test_backing_off_is_the_slow_way(rows, backoff, below, above):
    parents = below | {name: group for name, group in above.items() if name in set(below.values())}
    if "y" in parents.values():
        parents |= {name: group for name, group in above.items() if name == "y"}
    probability = np.array(rows) / np.sum(rows, axis=1, keepdims=True)
    names, confidence = name_cells(probability, LABELS, parents, backoff)
    chains = dict(zip(LABELS, ancestors(LABELS, parents), strict=True))
    for row, name, value in zip(probability, names, confidence, strict=True):
        best = LABELS[int(row.argmax())]
        expected, p = best, row.max()
        for group in chains[best]:
            if p >= backoff:
                break
            expected, p = group, sum(row[k] for k, label in enumerate(LABELS) if group in chains[label])
        assert name == expected
        assert value == pytest.approx(min(p, 1.0))


def test_groups_are_categories_after_the_labels(plain, query, reference):
    parents = {"type A": "low", "type B": "low", "type C": "high", "type D": "high", "low": "cell", "high": "cell"}
    _, data = fit(query, reference, plain, method="knn", parents=parents, backoff=1.0, reject=0.05)
    assert set(data.obs["scdiva_label"]) <= {"cell", "unknown"}
    assert data.obs[KEYS[1]].min() > 0.999
    _, data = fit(query, reference, plain, method="knn", parents=parents, backoff=0.6)
    order = [*(f"type {x}" for x in "ABCD"), "low", "high", "cell"]
    assert list(data.obs["scdiva_label"].cat.categories) == [x for x in order if x in set(data.obs["scdiva_label"])]
    assert {"low", "high"} & set(data.obs["scdiva_label"])


def test_fine_tuning_on_one_cell_of_each_label_has_no_held_out_cell(plain, query, reference):
    labelled = reference.copy()
    types = labelled.obs["cell_type"].astype(str)
    labelled.obs["cell_type"] = types.where(~types.duplicated(), "none")
    annotator, data = fit(query, labelled, plain, method="finetune", unlabeled_category="none", epochs=3)
    notes = data.uns["scdiva"]["scdiva_label"]
    assert (notes["n_held_out"], notes["temperature"], notes["steps"]) == (0, 1.0, 3)
    assert np.isnan([notes["accuracy"], notes["loss"], notes["accuracy_before"], notes["loss_before"]]).all()
    assert not len(annotator.novelty)
    assert data.obs["scdiva_label"].notna().all()


def test_cells_beyond_the_sample_are_mapped(plain, cells, monkeypatch):
    data, every = cells.copy(), np.arange(cells.n_obs)
    data.obs["cell_type"] = data.obs["cell_type"].astype(str).where(every % 3 > 0, "none")
    for name, limit in {"MOST_READ": 60, "MOST_UNLABELLED_READ": 30, "LEAST_OF_LABEL": 5}.items():
        monkeypatch.setattr(f"scdiva.annotation.fit.{name}", limit)
    annotator, mapped = fit(data, None, plain, unlabeled_category="none")
    selected = cells_to_read(label_numbers(data, "cell_type", "none")[0], int(annotator.notes["seed"]))
    assert 50 < selected.sum() < 100
    monkeypatch.undo()
    assert annotator.notes["n_labelled"] == (selected & (every % 3 > 0)).sum()
    _, expected = fit(cells, data[selected].copy(), plain, unlabeled_category="none")
    assert mapped.obs["scdiva_label"].notna().all()
    assert_alike(mapped, expected)
