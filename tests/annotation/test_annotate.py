"""`tl.annotate`: what it writes, what it refuses, and that a failed call leaves everything as it was."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch

import scdiva as sd
from scdiva.annotation import annotate as _annotate
from scdiva.annotation.annotate import majority_labels

from .conftest import SHORT

KEYS = ("scdiva_label", "scdiva_label_confidence", "scdiva_label_novelty")
NOTES = {
    "labels", "method", "labels_key", "temperature", "ece", "accuracy", "n_held_out", "reliability", "max_novelty",
    "max_novelty_from", "n_genes", "n_cells", "groups",
    "n_labelled", "own_directions", "model", "seed", "seconds", "finetuned", "loss",
}  # fmt: skip
NOTES_OF_TRAINING = {"steps", "history", "loss_before", "accuracy_before"}
pytestmark = [pytest.mark.filterwarnings("ignore:fine-tuning did not lower"), pytest.mark.usefixtures("short_probe")]


@pytest.fixture(scope="module")
def query(cells):
    """Cells of the third batch, without labels; never written to."""
    data = cells[cells.obs["batch"] == "batch 3"].copy()
    del data.obs["cell_type"]
    return data


def annotate(data, reference, model, method="linear", **arguments):
    """Annotate a copy; the copy."""
    data = data.copy()
    sd.tl.annotate(data, "cell_type", reference, model=model, **{"rng": 3} | SHORT[method] | arguments)
    return data


@pytest.mark.parametrize("method", SHORT)
def test_what_is_documented_is_written_and_nothing_else(plain, query, reference, method, contents, weights, same):
    data, before, given = query.copy(), weights(plain), contents(reference)
    state, legacy = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    annotator = sd.tl.annotate(data, "cell_type", reference, model=plain, batch_key="batch", rng=3, **SHORT[method])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], legacy)  # noqa: NPY002
    assert same(weights(plain), before)
    assert contents(reference) == given
    was, found = contents(query), contents(data)
    assert found.keys() - was.keys() == {"obsm/scdiva_label_probability"}
    assert {part: found[part] for part in ("X", "var")} == {part: was[part] for part in ("X", "var")}
    assert list(data.obs) == [*query.obs, *KEYS]
    pd.testing.assert_frame_equal(data.obs[list(query.obs)], query.obs)
    assert data.uns.keys() - query.uns.keys() == {"scdiva"}
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
    assert (notes["method"], notes["labels_key"], notes["model"]) == (
        "probe" if method == "finetune" else method, "cell_type", "ScDiVa",
    )  # fmt: skip
    assert (notes["n_genes"], notes["n_labelled"]) == (55, 160)
    assert 0 <= notes["ece"] <= 1
    assert np.isnan(notes["max_novelty"])
    assert {len(column) for column in notes["reliability"].values()} == {15}
    assert notes["reliability"]["n_cells"].sum() == notes["n_held_out"]


@pytest.mark.parametrize("method", SHORT)
def test_the_seed_determines_every_bit(plain, query, reference, method):
    one, two = (annotate(query, reference, plain, method=method) for _ in range(2))
    pd.testing.assert_frame_equal(one.obs, two.obs)
    np.testing.assert_array_equal(one.obsm["scdiva_label_probability"], two.obsm["scdiva_label_probability"])
    other = annotate(query, reference, plain, method=method, rng=4)
    notes = [d.uns["scdiva"]["scdiva_label"] for d in (one, other)]
    assert notes[0]["seed"] != notes[1]["seed"]
    assert not np.array_equal(one.obs["scdiva_label_novelty"], other.obs["scdiva_label_novelty"])


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"labels_key": None}, ValueError, "Name the column with the labels"),
        ({"labels_key": "nowhere"}, KeyError, r"reference\.obs.*'nowhere'.*'cell_type'"),
        ({"labels_key": "hole"}, ValueError, r"reference\.obs\['hole'\].*3 of 160"),
        ({"labels_key": "one"}, ValueError, r"reference\.obs\['one'\].*160 cells.*1"),
        ({"labels_key": "none"}, ValueError, r"labels 0 cells with 0 type\(s\)"),
        ({"labels_key": "twice", "reference": None, "key_added": "twice"}, ValueError, "would be overwritten"),
        ({"labels_key": "new_majority", "reference": None, "key_added": "new"}, ValueError, "holds the labels"),
        ({"key_added": "new", "majority_voting": "new_cluster"}, ValueError, "holds the clusters"),
        ({"batch_key": "nowhere"}, KeyError, r"reference\.obs has no column 'nowhere'"),
        ({"method": "forest"}, ValueError, "method .*'linear', 'knn', .*got 'forest'"),
        ({"method": "knn", "finetune": True}, ValueError, 'finetune=True trains .* method="probe"'),
        ({"epochs": 3, "lora": 2}, ValueError, "epochs, lora.* finetune=True"),
        ({"checkpoint_dir": "run"}, ValueError, "checkpoint_dir.* finetune=True"),
        ({"finetune": True, "epochs": 0}, ValueError, "epochs must be at least 1"),
        ({"finetune": True, "lora": 4}, ValueError, "lora: the cell state .* set encoder"),
        ({"reject": 1.0}, ValueError, "reject must be"),
        ({"backoff": 1.1}, ValueError, "backoff must be"),
        ({"n_neighbors": 0}, ValueError, "n_neighbors must be at least 1"),
        ({"parents": {"type A": "x", "x": "type A"}}, ValueError, "parents goes in a circle: type A > x > type A"),
        ({"parents": {"T": "x"}}, ValueError, "1 label.*reference.*'T'"),
        ({"parents": {"type A": "type B"}}, ValueError, "'type B' as a group"),
        ({"parents": {"type A": "unknown"}, "reject": 0.1}, ValueError, "'unknown' is a label .* or a group"),
        ({"labels_key": "with unknown", "reject": 0.1}, ValueError, "unlabeled_category='unknown'"),
        ({"labels_key": "singles", "reject": 0.1}, ValueError, "reject .*held out"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_changed(
    plain, query, reference, arguments, error, match, contents, weights, same
):
    data, known = query.copy(), reference.copy()
    types, numbers = known.obs["cell_type"].astype(str).to_numpy(), np.arange(160)
    known.obs["hole"] = np.where(np.isin(numbers, [5, 7, 9]), None, types)
    known.obs["one"], known.obs["none"], known.obs["foreign"] = "a", None, types
    data.obs["foreign"] = data.obs["twice"] = np.resize(["x", "y"], 80)
    known.obs["with unknown"] = np.where(types == "type A", "unknown", types)
    known.obs["singles"] = np.where(numbers == 3, "a", np.where(numbers == 8, "b", "no"))
    for one in (data, known):
        one.uns["scdiva"] = {"kept": 1}
    before, given = (contents(data), contents(known)), weights(plain)
    if arguments.get("labels_key") == "singles":
        arguments = arguments | {"unlabeled_category": "no"}
    call = {"labels_key": "cell_type", "reference": known, "model": plain, "rng": 0} | arguments
    with pytest.raises(error, match=match):
        sd.tl.annotate(data, **call)
    assert contents(data) == before[0]
    assert contents(known) == before[1]
    assert same(weights(plain), given)


@pytest.mark.parametrize("fault", ["NaN", "negative", "text", "genes", "layer", "raw"])
def test_a_fault_of_the_reference_is_said_of_it(plain, query, reference, fault):
    """With a remedy that mends the reference; `query` is sound."""
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
    with pytest.raises((KeyError, TypeError, ValueError), match="reference") as said:
        annotate(query, reference, plain, **reading.get(fault, {}))
    message = said.value.args[0]
    assert not re.search(r"\badata\b", message)
    if fault != "genes":
        names = {"reference": reference, "np": np}
        exec(re.search(r": (reference\S* = .+?)(, or|\.$| \(for)", message)[1], names)
        annotate(query, names["reference"], plain, **reading.get(fault, {}))


def test_genes_must_overlap(plain, query, reference, contents):
    data = query.copy()
    with pytest.raises(ValueError, match=r"30 genes .*30 of adata's 30, 55 of .*60"):
        annotate(data[:, :30].copy(), reference, plain)
    annotator = sd.tl.annotate(data, "cell_type", reference, model=plain, rng=0)
    few = query[:, :30].copy()
    before = contents(few)
    with pytest.raises(ValueError, match=r"adata has 30 of the 55 .*50"):
        sd.tl.annotate(few, model=annotator)
    assert contents(few) == before


def test_an_annotator_takes_no_labels(plain, query, reference, contents):
    data = query.copy()
    annotator = sd.tl.annotate(data, "cell_type", reference, model=plain, method="knn", rng=0)
    before = contents(data)
    for more in (
        {"labels_key": "cell_type"},
        {"reference": reference},
        {"batch_key": "batch"},
        {"unlabeled_category": "?"},
        {"method": "probe"},
        {"finetune": True},
        {"epochs": 2},
        {"checkpoint_dir": "here"},
    ):
        with pytest.raises(ValueError, match=f"This annotator is fitted: leave {next(iter(more))} out"):
            sd.tl.annotate(data, model=annotator, **more)
    with pytest.raises(ValueError, match="lacks, the first is 'T'"):
        sd.tl.annotate(data, model=annotator, parents={"T": "x"})
    assert contents(data) == before


def test_what_fails_late_changes_nothing(plain, query, reference, monkeypatch, contents):
    def fails(*_):
        raise MemoryError

    data = query.copy()
    before = contents(data)
    monkeypatch.setattr(_annotate, "name_cells", fails)
    with pytest.raises(MemoryError):
        sd.tl.annotate(data, "cell_type", reference, model=plain)
    assert contents(data) == before


@pytest.mark.parametrize("method", SHORT)
def test_cells_without_genes_get_nothing(plain, query, reference, method):
    data = query.copy()
    matrix = data.X.toarray()
    matrix[[0, 60]] = 0
    data.X = sp.csr_matrix(matrix)
    found = annotate(data, reference, plain, method=method, reject=0.3)
    assert found.obs["scdiva_label"].isna().to_numpy().nonzero()[0].tolist() == [0, 60]
    for values in (found.obs[KEYS[1]], found.obs[KEYS[2]], found.obsm["scdiva_label_probability"][:, 0]):
        assert np.flatnonzero(np.isnan(np.asarray(values))).tolist() == [0, 60]
    rest = np.setdiff1d(np.arange(80), [0, 60])
    expected = annotate(query, reference, plain, method=method, reject=0.3).obsm["scdiva_label_probability"]
    np.testing.assert_allclose(found.obsm["scdiva_label_probability"][rest], expected[rest], atol=1e-5)


def test_a_path_as_reference_is_refused_by_that_name(plain, query):
    with pytest.raises(TypeError, match=r"^reference: .* got str.*reference = anndata\.read_h5ad\(path\)\.$"):
        sd.tl.annotate(query, "cell_type", "ref.h5ad", model=plain)


def test_one_fault_is_told_of_once():
    """Few genes of both query and reference; a word for no label in another case."""
    cells = sd.datasets.toy(160, 100)
    query, reference = cells[:60].copy(), cells[60:].copy()
    with pytest.warns(UserWarning, match="genes that the model knows") as said:
        sd.tl.annotate(query.copy(), "cell_type", reference, rng=0)
    assert len([one for one in said if "that the model knows" in str(one.message)]) == 1
    known = reference.copy()
    known.obs["cell_type"] = np.where(np.arange(100) < 9, "Unknown", known.obs["cell_type"].astype(str))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="unlabeled_category='Unknown'"):
            sd.tl.annotate(query.copy(), "cell_type", known, unlabeled_category="unknown")


def test_majority_labels_are_the_most_frequent_of_each_cluster():
    rng = np.random.default_rng(0)
    labels = pd.Categorical(rng.choice(["a", "b", None], 300), ["c", "b", "a"])
    clusters = rng.integers(-1, 40, 300)
    clusters[:3] = 77  # no cell with a label
    labels[:3] = np.nan
    found = majority_labels(labels, clusters)
    for cluster in set(clusters):
        votes = [name for name in labels[clusters == cluster] if isinstance(name, str)]
        most = max(("b", "a"), key=votes.count) if votes and cluster >= 0 else None
        assert set(found[clusters == cluster].dropna()) == ({most} if most else set())
    assert list(found.categories) == ["b", "a"]


def test_clusters_of_the_embedding_or_of_a_column_vote(query, reference, plain):
    query = query.copy()
    query.obs["scdiva_label_cluster"] = "mine"  # only voting over clusters of its own writes this key
    own = annotate(query, reference, plain)
    assert set(own.obs["scdiva_label_cluster"]) == {"mine"}
    assert "scdiva_label_majority" not in own.obs
    del query.obs["scdiva_label_cluster"]
    found = annotate(query, reference, plain, majority_voting=True)
    again = annotate(query, reference, plain, majority_voting="leiden")
    for key in KEYS:
        pd.testing.assert_series_equal(found.obs[key], own.obs[key])
    pd.testing.assert_frame_equal(found.obs, again.obs)
    clusters = found.obs["scdiva_label_cluster"].cat.codes.to_numpy()
    expected = majority_labels(found.obs["scdiva_label"].array, clusters)
    assert list(found.obs["scdiva_label_majority"]) == list(expected)
    assert found.uns["scdiva"]["scdiva_label"]["majority_voting"] == "leiden"

    query = query.copy()
    query.obs["mine"] = np.resize(["x", "y", "z"], query.n_obs)
    annotator = sd.tl.annotate(query, "cell_type", reference, model=plain, rng=3, majority_voting=True)
    sd.tl.annotate(query, model=annotator, majority_voting="mine")
    assert "scdiva_label_cluster" not in query.obs  # of the earlier call
    for name in "xyz":
        of_cluster = query.obs[query.obs["mine"] == name]
        assert set(of_cluster["scdiva_label_majority"]) == {of_cluster["scdiva_label"].value_counts().idxmax()}
    with pytest.raises(KeyError, match="no column 'min'"):
        sd.tl.annotate(query, model=annotator, majority_voting="min")
    with pytest.raises(ValueError, match="at least 10 cells, and 9"):
        annotate(query[:9].copy(), reference, plain, majority_voting=True)
