from __future__ import annotations

import math

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from scdiva import get

KEY = "scdiva_reconstructed"
ENDINGS = ("", "_rank", "_true", "_true_rank", "_masked")


@pytest.fixture
def annotated() -> ad.AnnData:
    """Four cells with the keys of an annotation: a tie in the third, no known gene in the last."""
    adata = ad.AnnData(np.zeros((4, 1), np.float32), obs=pd.DataFrame(index=["c1", "c2", "c3", "c4"]))
    adata.obsm["scdiva_label_probability"] = np.array(
        [[0.7, 0.1, 0.2], [0.1, 0.5, 0.4], [0.4, 0.2, 0.4], [np.nan] * 3], np.float32
    )
    adata.uns["scdiva"] = {"scdiva_label": {"labels": np.array(["T cell", "B cell", "NK"])}}
    return adata


def test_the_most_probable_labels_come_first_cell_by_cell(annotated, tmp_path):
    frame = get.annotation_df(annotated, top_k=2)
    assert list(frame) == ["cell", "rank", "label", "probability"]
    assert frame.astype({"label": str}).to_numpy().tolist() == [
        ["c1", 1, "T cell", np.float32(0.7)],
        ["c1", 2, "NK", np.float32(0.2)],
        ["c2", 1, "B cell", np.float32(0.5)],
        ["c2", 2, "NK", np.float32(0.4)],
        ["c3", 1, "T cell", np.float32(0.4)],
        ["c3", 2, "NK", np.float32(0.4)],
    ]
    assert (frame["rank"].dtype, frame["probability"].dtype) == (np.int32, np.float32)
    assert list(frame["label"].cat.categories) == ["T cell", "B cell", "NK"]
    annotated.write_h5ad(tmp_path / "cells.h5ad")
    pd.testing.assert_frame_equal(get.annotation_df(ad.read_h5ad(tmp_path / "cells.h5ad"), top_k=2), frame)


def test_one_label_or_all_and_some_cells(annotated):
    one = get.annotation_df(annotated)
    assert one["cell"].tolist() == ["c1", "c2", "c3"]
    assert one["label"].tolist() == ["T cell", "B cell", "T cell"]
    every = get.annotation_df(annotated, top_k=99)
    assert len(every) == 9
    np.testing.assert_allclose(every.groupby("cell")["probability"].sum(), 1.0, rtol=1e-6)
    part = get.annotation_df(annotated[["c3", "c1"]], top_k=99)
    expected = pd.concat([every[every["cell"] == name] for name in ("c3", "c1")], ignore_index=True)
    pd.testing.assert_frame_equal(part, expected)
    assert len(get.annotation_df(annotated[["c4"]])) == 0
    annotated.obsm["coarse_probability"] = np.array([[0.9, 0.1]] * 4)
    annotated.uns["scdiva"]["coarse"] = {"labels": ["lymphoid", "myeloid"]}
    assert get.annotation_df(annotated, key="coarse")["label"].tolist() == ["lymphoid"] * 4


def test_perturbations_are_tested_gene_by_gene(screen, by_hand, tmp_path):
    predicted = by_hand(screen(groups=("k562", "a172")), "line")
    predicted.varm["scdiva_sd"] = np.random.default_rng(0).uniform(0.05, 0.3, predicted.varm["scdiva_sd"].shape)
    frame = get.perturbation_df(predicted)
    numbers = ["control", "mean", "delta", "sd", "z", "p", "padj"]
    assert list(frame.columns) == ["condition", "perturbation", "group", "gene", *numbers]
    assert all(frame[name].dtype == np.float64 for name in numbers)
    names = predicted.uns["scdiva"]["perturbation"]["condition"].tolist()
    assert frame["condition"].drop_duplicates().tolist() == frame["condition"].cat.categories.tolist() == names
    for at in (0, 7):
        part = frame[frame["condition"] == names[at]]
        assert part["perturbation"].unique().tolist() == [names[at].split(" in ")[0]]
        assert part["group"].unique().tolist() == [names[at].split(" in ")[1]]
        genes = predicted.var_names.get_indexer(part["gene"])
        assert sorted(genes) == list(range(40))
        delta = predicted.varm["scdiva_mean"][genes, at] - predicted.varm["scdiva_control"][genes, at]
        np.testing.assert_allclose(part["delta"], delta, atol=1e-6)
        np.testing.assert_allclose(part["z"], delta / predicted.varm["scdiva_sd"][genes, at], rtol=1e-4)
        assert part["z"].abs().is_monotonic_decreasing
        normal = [math.erfc(abs(z) / math.sqrt(2)) for z in part["z"]]
        np.testing.assert_allclose(part["p"], normal, rtol=1e-9, atol=1e-300)
        # the largest p first, padj = min over the larger ones of p · m / rank
        np.testing.assert_allclose(
            part["padj"], [min(1, *(normal[j] * 40 / (j + 1) for j in range(i, 40))) for i in range(40)], rtol=1e-9
        )
    predicted.write_h5ad(tmp_path / "predicted.h5ad")
    pd.testing.assert_frame_equal(get.perturbation_df(ad.read_h5ad(tmp_path / "predicted.h5ad")), frame)


def test_conditions_and_top_genes_are_chosen(screen, by_hand):
    predicted = by_hand(screen())
    frame = get.perturbation_df(predicted)
    selection = get.perturbation_df(predicted, condition=["A+B", "A"], top=3)
    assert selection["condition"].tolist() == ["A+B"] * 3 + ["A"] * 3
    expected = pd.concat([frame[frame["condition"] == name].head(3) for name in ("A+B", "A")], ignore_index=True)
    pd.testing.assert_frame_equal(selection, expected)
    one = get.perturbation_df(predicted, condition="A", top=99)
    assert len(one) == 40
    assert one["group"].unique().tolist() == [""]


@pytest.fixture
def with_network() -> ad.AnnData:
    """Eight genes with a network of a few edges, of which two tie, and one of a group."""
    adata = ad.AnnData(np.ones((3, 8), np.float32), var=pd.DataFrame(index=list("ABCDEFGH")))
    rows, columns = [0, 0, 0, 1, 3, 3], [1, 2, 5, 0, 0, 6]
    weights = np.array([0.5, -2.0, 0.25, 1.0, -0.5, 0.75], np.float32)
    adata.varp["scdiva_grn"] = sp.csr_matrix((weights, (rows, columns)), shape=(8, 8))
    adata.varp["by_a_b"] = 2 * adata.varp["scdiva_grn"]
    about = {"method": "correlation", "signed": True, "reference": "", "groups": np.array([], dtype=object)}
    about |= {"keys": np.array(["scdiva_grn"]), "sources": np.array(list("ABD")), "targets": np.array(list("ABCEFG"))}
    by = {"groups": np.array(["a/b"]), "keys": np.array(["by_a_b"]), "signed": False}
    adata.uns["scdiva"] = {"scdiva_grn": about, "by": about | by}
    return adata


def test_edges_are_listed_the_strongest_first(with_network, tmp_path):
    frame = get.grn_df(with_network)
    assert list(frame) == ["source", "target", "weight"]
    assert frame.to_numpy().tolist() == [
        ["A", "C", -2.0], ["B", "A", 1.0], ["D", "G", 0.75], ["A", "B", 0.5], ["D", "A", -0.5], ["A", "F", 0.25],
    ]  # fmt: skip
    assert frame["weight"].dtype == np.float64
    assert all(isinstance(name, str) for name in frame["source"])
    assert list(frame.index) == list(range(6))
    with_network.write_h5ad(tmp_path / "cells.h5ad")
    pd.testing.assert_frame_equal(get.grn_df(ad.read_h5ad(tmp_path / "cells.h5ad")), frame)
    by = get.grn_df(with_network, key="by", group="a/b")  # not signed: the largest first
    assert by["weight"].tolist() == [2.0, 1.5, 1.0, 0.5, -1.0, -4.0]


def test_edges_of_some_genes(with_network):
    frame = get.grn_df(with_network)
    pd.testing.assert_frame_equal(get.grn_df(with_network, top=2), frame.head(2))
    pd.testing.assert_frame_equal(get.grn_df(with_network, top=99), frame)
    part = frame[frame["source"].isin(["A", "D"]) & frame["target"].isin(["A", "B", "C"])].reset_index(drop=True)
    selection = get.grn_df(with_network, sources=["D", "A"], targets=["A", "B", "C"])
    pd.testing.assert_frame_equal(selection, part)
    assert get.grn_df(with_network, sources="B")["target"].tolist() == ["A"]
    with pytest.warns(UserWarning, match="1 of 2 genes .*'scdiva_grn' .*: H"):
        assert get.grn_df(with_network, targets=["H", "F"])["source"].tolist() == ["A"]
    empty = get.grn_df(with_network, sources=["B"], targets=["C"])
    assert (len(empty), list(empty)) == (0, ["source", "target", "weight"])


def test_decoupler_takes_the_edges_unchanged():
    """Its univariate linear model, beside the t statistics of scipy's regression."""
    import decoupler
    import scanpy as sc
    from scipy.stats import linregress

    import scdiva as sd

    cells = sc.datasets.pbmc68k_reduced()[:120].copy()
    sd.tl.grn(cells, "correlation", sources="tf", n_targets=20, use_raw=True)
    net = get.grn_df(cells)
    before = net.copy()
    decoupler.mt.ulm(cells, net=net, raw=True)
    pd.testing.assert_frame_equal(net, before)
    scores = cells.obsm["score_ulm"]
    assert scores.shape == (120, net["source"].nunique())
    x = pd.DataFrame(cells.raw.X.toarray(), columns=cells.raw.var_names)
    x = x.loc[:, (x > 0).any()]  # it leaves out genes that no cell has
    of_one = net[net["source"] == "SPI1"].set_index("target")["weight"].reindex(x.columns, fill_value=0.0)
    for cell in (0, 57):
        fit = linregress(of_one, x.iloc[cell])
        np.testing.assert_allclose(scores["SPI1"].iloc[cell], fit.slope / fit.stderr, rtol=1e-3)
    # and a table of what is known, as decoupler's resources have it, is what tl.regulon compares with
    table = pd.DataFrame({"source": "SPI1", "target": x.columns[:30], "weight": np.tile([1.0, -1.0], 15)})
    decoupler.mt.ulm(cells, net=table, raw=True)
    assert cells.obsm["score_ulm"].shape == (120, 1)
    marks = sd.tl.regulon(cells, "SPI1", known=table, use_raw=True).set_index("target")["known"]
    marked = table.set_index("target")["weight"].reindex(marks.index)
    pd.testing.assert_series_equal(marks, marked, check_names=False)


def test_reconstructions_are_listed_rank_by_rank(tmp_path):
    adata = ad.AnnData(np.ones((2, 3), np.float32))
    adata.obs_names, adata.var_names = ["a", "b"], ["X", "Y", "Z"]
    for ending, rows in {
        "_true_rank": np.array([[2, 1, 0], [0, 0, 1]], np.int32),
        "_true": np.array([[1.0, 2.0, 0], [0, 0, 3.0]], np.float32),
        "_rank": np.array([[0, 1, 2], [0, 0, 0]], np.int32),  # the gene predicted in "b" is no column
        "": np.array([[0, 2.5, 0.5], [0, 0, 0]], np.float32),
        "_masked": np.array([[True, False, False], [False, False, True]]),
    }.items():
        adata.layers["mine" + ending] = sp.csr_matrix(rows)
    adata.uns["scdiva"] = {"mine": {"mask_ratio": 0.5, "n_steps": 1}}
    frame = get.reconstruction_df(adata, key="mine")
    expected = pd.DataFrame(
        {
            "obs_name": pd.Categorical(["a", "a", "b"]),
            "rank": np.array([1, 2, 1], np.int32),
            "gene": pd.Categorical(["Y", "X", "Z"]),
            "reconstructed_gene": pd.Categorical(["Y", "Z", None], ["X", "Y", "Z"]),
            "value": np.array([2, 1, 3], np.float32),
            "reconstructed_value": np.array([2.5, 0.5, np.nan], np.float32),
            "masked": [False, True, True],
        }
    )
    pd.testing.assert_frame_equal(frame, expected)
    adata.write_h5ad(tmp_path / "cells.h5ad")
    pd.testing.assert_frame_equal(get.reconstruction_df(ad.read_h5ad(tmp_path / "cells.h5ad"), key="mine"), expected)
    adata.var_names = ["X", "Y", "X"]
    with pytest.raises(ValueError, match=r"adata.var_names_make_unique\(\)"):
        get.reconstruction_df(adata, key="mine")


@pytest.mark.parametrize(("min_cells", "min_recall"), [(1, 0.0), (5, 0.5), (8, 0.7), (3, 1.0)])
def test_reconstructed_genes_come_back_in_enough_cells(reconstruct, min_cells, min_recall):
    adata = reconstruct()
    hidden = adata.layers["scdiva_reconstructed_masked"].toarray()
    back = adata.layers["scdiva_reconstructed_rank"].toarray() > 0
    expected = [
        name
        for name, was, is_ in zip(adata.var_names, hidden.T, back.T, strict=True)
        if was.sum() >= min_cells and is_[was].mean() >= min_recall
    ]
    assert get.reconstructed_genes(adata, min_cells=min_cells, min_recall=min_recall) == expected
    assert 0 < len(expected) <= (80 if min_recall == 0 else 70)


@pytest.fixture
def masked(reconstruct):
    return reconstruct()


@pytest.fixture
def unmasked(reconstruct):
    return reconstruct(mask_ratio=0.0)


def test_reconstructions_are_read_as_a_loop_reads_them(masked):
    """Also a value of zero, an empty cell, and a rank whose gene is no column."""
    layers = {end: masked.layers[KEY + end].toarray() for end in ENDINGS}
    for layer in layers.values():
        layer[1] = 0
    missing, zero = (np.flatnonzero(layers["_rank"][0] == rank)[0] for rank in (3, 5))
    layers["_rank"][0, missing] = layers[""][0, zero] = 0
    rows = []
    for i in range(3):
        for rank in range(1, (layers["_true_rank"][i] > 0).sum() + 1):
            (gene,) = np.flatnonzero(layers["_true_rank"][i] == rank)
            columns = np.flatnonzero(layers["_rank"][i] == rank)
            decoded_gene, value = (
                (masked.var_names[columns[0]], layers[""][i, columns[0]]) if len(columns) else (np.nan, np.nan)
            )
            true, hidden = layers["_true"][i, gene], layers["_masked"][i, gene]
            rows.append((masked.obs_names[i], rank, masked.var_names[gene], decoded_gene, true, value, hidden))
    for end, layer in layers.items():
        masked.layers[KEY + end] = sp.csr_matrix(layer)
    frame = get.reconstruction_df(masked[:3])
    expected = pd.DataFrame(rows, columns=list(frame))
    assert len(expected) > 50
    pd.testing.assert_frame_equal(frame.astype(object), expected.astype(object))


def test_layers_that_do_not_belong_together_are_refused(masked):
    layers = {end: masked.layers[KEY + end].toarray() for end in ENDINGS}
    true, back = layers["_true_rank"][3], layers["_rank"][3]
    gene, decoded_gene, absent = np.argmax(true == 5), np.argmax(back == 1), np.argmin(true)
    for ending, at, value, message in [
        ("_true_rank", gene, 0, "skips or repeats ranks in 1 of 40 cells .first: '.*3'"),
        ("_true_rank", gene, 2, "skips or repeats ranks in 1 of 40"),
        ("_rank", decoded_gene, true.max() + 1, "_rank.* holds other genes or ranks"),
        ("_rank", decoded_gene, 2, "_rank.* holds other genes or ranks"),
        ("_masked", absent, True, "_masked.* holds other genes or ranks"),
    ]:
        adata, layer = masked.copy(), layers[ending].copy()
        layer[3, at] = value
        adata.layers[KEY + ending] = sp.csr_matrix(layer)
        with pytest.raises(ValueError, match=message):
            get.reconstruction_df(adata)
    with pytest.raises(ValueError, match=r"ranks in \d+ of 40 cells"):
        get.reconstruction_df(masked[:, :30])


# --- refusals ---------------------------------------------------------------------------------------------------------
def without(part, key):
    def change(adata):
        del getattr(adata, part)[key]

    return change


def two_labels(adata):
    adata.uns["scdiva"]["scdiva_label"]["labels"] = ["a", "b"]


def two_conditions(adata):
    adata.varm["scdiva_mean"] = adata.varm["scdiva_mean"][:, :2]


@pytest.fixture
def predicted(screen, by_hand):
    return by_hand(screen())


REFUSED = [
    ("annotated", get.annotation_df, {"key": "mine"}, KeyError, r"'mine_probability': call .*key_added='mine'"),
    ("annotated", get.annotation_df, {"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
    ("annotated", get.annotation_df, {}, ValueError, r"shape \(4, 3\), .*4 cells and 2 labels", two_labels),
    ("annotated", get.annotation_df, {}, KeyError, r"\['scdiva_label'\] .*labels", without("uns", "scdiva")),
    ("predicted", get.perturbation_df, {"condition": ["A", "D", "E"]}, KeyError, r"2 of 3 conditions .*'D'.*'A', 'B'"),
    ("predicted", get.perturbation_df, {"top": 0}, ValueError, "top must"),
    ("predicted", get.perturbation_df, {"condition": []}, ValueError, "condition is empty"),
    ("predicted", get.perturbation_df, {}, ValueError, r"5 conditions .*'scdiva_mean'\] has 2 of 40", two_conditions),
    ("predicted", get.perturbation_df, {}, KeyError, "no 'perturbation'.*predict_pert", without("uns", "scdiva")),
    ("annotated", get.gene_embedding_df, {}, KeyError, "no .X_scdiva.*call scdiva.tl.gene_embedding"),
    ("with_network", get.grn_df, {"key": "mine"}, KeyError, r"'mine': call scdiva.tl.grn\(.*key_added='mine'"),
    ("with_network", get.grn_df, {"group": "a/b"}, KeyError, "leave group out"),
    ("with_network", get.grn_df, {"sources": ["H"]}, KeyError, "none of 1 genes"),
    ("with_network", get.grn_df, {"top": 0}, ValueError, "top must be at least 1, got 0"),
    ("masked", get.reconstruction_df, {"key": "mine"}, KeyError, r"call scdiva.tl.reconstruct\(.*key_added='mine'"),
    ("masked", get.reconstruction_df, {}, KeyError, rf"uns\['scdiva'\] has no '{KEY}'", without("uns", "scdiva")),
    *(
        ("masked", get.reconstruction_df, {}, KeyError, rf"layers has no '{KEY}{end}'", without("layers", KEY + end))
        for end in ENDINGS
    ),
    ("unmasked", get.reconstructed_genes, {}, ValueError, r"masked in 10 cells, .*0: .*min_cells"),
    ("masked", get.reconstructed_genes, {"min_cells": 0}, ValueError, r"min_cells .*got 0"),
    *(
        ("masked", get.reconstructed_genes, {"min_recall": wrong}, ValueError, "min_recall must be between 0 and 1")
        for wrong in (-0.1, 1.1, math.nan)
    ),
]


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_there_or_makes_no_sense_is_named(request, case):
    fixture, call, options, error, message, *change = case
    adata = request.getfixturevalue(fixture)
    for one in change:
        one(adata)
    with pytest.raises(error, match=message):
        call(adata, **options)
