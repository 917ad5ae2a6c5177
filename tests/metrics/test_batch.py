from __future__ import annotations

import sys

import numpy as np
import pandas as pd
import pytest

import scdiva as sd
from scdiva.metrics import (
    avg_batch,
    avg_bio,
    bras,
    graph_connectivity,
    leiden_agreement,
    nearest_neighbors,
    pcr_comparison,
    shuffle_control,
    silhouette_batch,
)


@pytest.fixture(scope="module")
def cells():
    """(after, before, batch, label) of 150 cells: three types, three batches, far apart before and a little after."""
    rng = np.random.default_rng(0)
    labels, batch = np.repeat(["a", "b", "c"], 50), rng.choice(["x", "y", "z"], 150, p=[0.5, 0.3, 0.2])
    shift = rng.normal(size=(3, 5))[np.unique(batch, return_inverse=True)[1]]
    z = rng.normal(size=(150, 5)) + 4.0 * np.eye(3, 5)[np.repeat(range(3), 50)]
    return (z + 0.4 * shift).astype(np.float32), (z + 3 * shift).astype(np.float32), batch, labels


def cosine(z):
    unit = z / np.linalg.norm(z, axis=1, keepdims=True)
    return 1 - unit @ unit.T


def euclidean(z):
    return np.sqrt(((z[:, None] - z[None]) ** 2).sum(axis=2))


def batch_silhouettes(distance, batch, labels, to_others):
    """1 - |s| of the batches within each label, averaged over the label, then over labels; from loops over pairs."""
    per_label = []
    for name in np.unique(labels):
        own = np.flatnonzero(labels == name)
        if len(np.unique(batch[own])) == 1:
            continue
        widths = []
        for i in own:
            same = own[(batch[own] == batch[i]) & (own != i)]
            others = [own[batch[own] == other] for other in np.unique(batch[own]) if other != batch[i]]
            a, b = distance[i, same].mean() if len(same) else 0.0, to_others([distance[i, rows] for rows in others])
            widths.append(1 - abs(b - a) / max(a, b) if len(same) else 1.0)
        per_label.append(np.mean(widths))
    return np.mean(per_label)


def test_batch_silhouette_is_its_definition(cells):
    z, _, batch, labels = cells
    batch = np.where(labels == "c", "x", batch)  # one label of one batch, which says nothing
    expected = batch_silhouettes(euclidean(z), batch, labels, lambda each: min(d.mean() for d in each))
    assert silhouette_batch(z, batch, labels) == pytest.approx(expected)
    some = np.where(np.arange(150) % 7 == 0, "unknown", labels)
    known = some != "unknown"
    assert silhouette_batch(z, batch, some) == pytest.approx(silhouette_batch(z[known], batch[known], labels[known]))


def test_bras_is_its_definition(scib, cells):
    z, _, batch, labels = cells
    expected = batch_silhouettes(cosine(z), batch, labels, lambda each: np.concatenate(each).mean())
    assert bras(z, batch, labels) == pytest.approx(expected, abs=1e-4)


def between(z, batch):
    """Share of the sum of squares that lies between batches: principal component regression over all components."""
    z = z - z.mean(axis=0)
    means = np.stack([z[batch == name].mean(axis=0) for name in batch])
    return (means**2).sum() / (z**2).sum()


def test_pcr_is_the_share_of_variance_between_batches(scib, cells):
    after, before, batch, _ = cells
    expected = (between(before, batch) - between(after, batch)) / between(before, batch)
    assert 0.2 < expected < 0.99
    assert pcr_comparison(before, after, batch) == pytest.approx(expected, abs=1e-4)
    assert pcr_comparison(after, before, batch) == 0.0
    with pytest.raises(ValueError, match="before has 149 cells and after 150"):
        pcr_comparison(before[1:], after, batch)


def test_the_papers_definition(cells):
    """1 - mean silhouette of the batches over all cells, with its sign."""
    z, _, batch, _ = cells
    distance, widths = euclidean(z), []
    for i in range(150):
        a = distance[i, batch == batch[i]].sum() / ((batch == batch[i]).sum() - 1)
        b = min(distance[i, batch == other].mean() for other in "xyz" if other != batch[i])
        widths.append((b - a) / max(a, b))
    assert avg_batch(z, batch, definition="paper") == {
        "avg_batch": pytest.approx(1 - np.mean(widths)),
        "asw_batch": pytest.approx(1 - np.mean(widths)),
    }


def test_scgpts_definition(cells):
    z, _, batch, labels = cells
    asw, connected = silhouette_batch(z, batch, labels), graph_connectivity(z, labels, definition="scgpt")
    assert avg_batch(z, batch, labels) == {
        "avg_batch": pytest.approx((asw + connected) / 2),
        "asw_batch": pytest.approx(asw),
        "graph_connectivity": connected,
    }


def test_scib_definitions_are_those_of_the_benchmarker(scib):
    """It takes what tl.integrate leaves as it is, and finds the same on the same neighbours.

    Save for the clusters, which are Leiden's here and k-means' there.
    """
    from scib_metrics.benchmark import Benchmarker, BioConservation

    adata = sd.datasets.toy(150, 120, n_types=3, n_batches=3, rng=2)
    with sd.settings.override(progress=False, device="cpu"):
        sd.tl.embed(adata)
        sd.tl.integrate(adata, "batch", steps=30, batch_size=64, rng=0)
    benchmarker = Benchmarker(
        adata,
        "batch",
        "cell_type",
        ["X_scdiva_integrated"],
        bio_conservation_metrics=BioConservation(nmi_ari_cluster_labels_kmeans=False),
        pre_integrated_embedding_obsm_key="X_scdiva",
        progress_bar=False,
    )
    benchmarker.prepare(
        lambda x, k: scib.nearest_neighbors.NeighborsResults(**nearest_neighbors(x, k)._asdict())  # exact, as ours
    )
    benchmarker.benchmark()
    theirs = benchmarker.get_results(clean_names=False).loc["X_scdiva_integrated"]

    before, after = adata.obsm["X_scdiva"], adata.obsm["X_scdiva_integrated"]
    batch, labels = adata.obs["batch"], adata.obs["cell_type"]
    ours = avg_batch(after, batch, labels, before=before, definition="scib")
    for key, name in {"bras": "bras", "ilisi": "ilisi_knn", "pcr": "pcr_comparison"}.items():
        assert ours[key] == pytest.approx(theirs[name], abs=1e-4)
    assert ours["graph_connectivity"] == pytest.approx(theirs["graph_connectivity"])
    assert ours["kbet"] == pytest.approx(theirs["kbet_per_label"], abs=0.02)  # its diffusion map has no seed
    assert ours["avg_batch"] == pytest.approx(theirs["Batch correction"], abs=0.005)

    ours = avg_bio(after, labels, batch=batch, definition="scib")
    for key, name in {"asw": "silhouette_label", "isolated_labels": "isolated_labels", "clisi": "clisi_knn"}.items():
        assert ours[key] == pytest.approx(theirs[name], abs=1e-4)
    found = leiden_agreement(after, labels)
    assert (ours["nmi"], ours["ari"]) == (found["nmi"], found["ari"])
    assert ours["avg_bio"] == pytest.approx(np.mean([v for key, v in ours.items() if key != "avg_bio"]))


def test_a_shuffle_scores_what_mixed_batches_score(cells):
    """Batches far apart score below their shuffle; batches given at random score as their shuffle does."""
    after, before, batch, labels = cells
    for definition in ("paper", "scgpt"):
        control = shuffle_control(before, batch, labels, definition=definition)
        assert avg_batch(before, batch, labels, definition=definition)["avg_batch"] < control["avg_batch"] - 0.1
        random = np.random.default_rng(5).permutation(batch)
        mixed = avg_batch(after, random, labels, definition=definition)["avg_batch"]
        assert mixed == pytest.approx(
            shuffle_control(after, random, labels, definition=definition)["avg_batch"], abs=0.03
        )
    assert shuffle_control(before, batch, labels, rng=1) == shuffle_control(before, batch, labels, rng=1)
    assert shuffle_control(before, batch, labels, rng=1) != shuffle_control(before, batch, labels, rng=2)


def test_a_shuffle_within_labels_keeps_what_each_batch_holds(scib):
    """Batch x is all of type a but ten cells: only a shuffle over all cells makes neighbourhoods alike."""
    rng = np.random.default_rng(0)
    labels, batch = np.repeat(["a", "b"], 100), np.repeat(["x", "y"], 100)
    batch[[*range(10), *range(190, 200)]] = ["y"] * 10 + ["x"] * 10
    z = rng.normal(size=(200, 3)) + 20.0 * (labels == "b")[:, None]
    within = shuffle_control(z, batch, labels, before=z, definition="scib")
    anywhere = shuffle_control(z, batch, labels, before=z, definition="scib", within_labels=False)
    assert set(within) == {"avg_batch", "bras", "ilisi", "kbet", "graph_connectivity", "pcr"}
    assert within["ilisi"] < 0.5 < anywhere["ilisi"]
    assert within["pcr"] < 0.1 < 0.9 < anywhere["pcr"]  # batch explains what type explains


def test_bad_input_is_refused(cells):
    after, before, batch, labels = cells
    with pytest.raises(ValueError, match="'paper', 'scgpt' or 'scib'"):
        avg_batch(after, batch, labels, definition="scIB")
    with pytest.raises(ValueError, match="pass labels"):
        avg_batch(after, batch)
    with pytest.raises(ValueError, match="pass before"):
        shuffle_control(after, batch, labels, definition="scib")
    with pytest.raises(ValueError, match="before has 149 cells and embedding 150"):
        avg_batch(after, batch, labels, before=before[1:], definition="scib")
    with pytest.raises(ValueError, match="confounded"):
        silhouette_batch(after, labels, labels)
    for missing in (None, np.nan):
        with pytest.raises(ValueError, match=r"2 of 150 cells have no batch \(the first is number 1\)"):
            avg_batch(after, ["x", missing, "y", missing] + ["x", "y"] * 73, labels)
    with pytest.raises(ValueError, match="All 150 cells are of the batch 'x'"):
        avg_batch(after, ["x"] * 150, definition="paper")
    with pytest.raises(ValueError, match=r"shape \(149,\), but there are 150 cells"):
        avg_batch(after, batch[1:], labels)


def test_only_scibs_definition_needs_scib_metrics(cells, monkeypatch):
    after, before, batch, labels = cells
    monkeypatch.setitem(sys.modules, "scib_metrics", None)
    avg_batch(after, batch, labels)
    avg_batch(after, batch, definition="paper")
    for call in (
        lambda: avg_batch(after, batch, labels, before=before, definition="scib"),
        lambda: bras(after, batch, labels),
        lambda: pcr_comparison(before, after, batch),
    ):
        with pytest.raises(ImportError, match=r"pip install 'scdiva\[metrics\]'"):
            call()


@pytest.mark.parametrize("kind", ["category", "int", "bool", "string"])
def test_batches_of_any_type(cells, kind):
    after, _, batch, labels = cells
    two = np.where(batch == "x", "x", "y")
    given = {
        "category": lambda: pd.Series(two).astype("category"),
        "int": lambda: (two == "x").astype(int),
        "bool": lambda: two == "x",
        "string": lambda: pd.Series(two, dtype="string"),
    }[kind]()
    assert avg_batch(after, given, labels) == avg_batch(after, two, labels)
