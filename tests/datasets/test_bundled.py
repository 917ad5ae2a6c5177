"""Simulated cells, cells and lists of genes that are part of the package."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest

from scdiva import datasets
from scdiva.datasets import gene_family, transcription_factors
from scdiva.tokenizer import Vocabulary

SIZES = {
    "B": 86, "CD14+ Mono": 120, "CD8 T": 67, "DC": 32, "FCGR3A+ Mono": 50, "Memory CD4 T": 120, "NK": 50,
    "Naive CD4 T": 174, "Platelet": 14,
}  # fmt: skip


MARKERS = {"B": "MS4A1", "CD14+ Mono": "LYZ", "NK": "GNLY", "Platelet": "PPBP", "DC": "FCER1A", "CD8 T": "CD8A"}


def test_real_cells_have_counts_types_and_markers(tmp_path):
    adata = datasets.pbmc3k_small()
    assert adata.shape == (713, 32738)
    assert adata.X.format == "csr"
    assert adata.X.has_sorted_indices
    assert adata.X.dtype == np.float32
    assert (adata.X.data == np.rint(adata.X.data)).all()
    assert adata.X.data.min() == 1
    assert adata.var_names.is_unique
    assert adata.obs_names.is_unique
    assert adata.obs["cell_type"].value_counts().to_dict() == SIZES
    share = adata.X.multiply(1 / adata.X.sum(axis=1)).tocsr()
    for cell_type, gene in MARKERS.items():
        of_gene = np.asarray(share[:, adata.var_names.get_loc(gene)].todense()).ravel()
        assert adata.obs["cell_type"].iloc[of_gene.argsort()[-10:]].value_counts().index[0] == cell_type
    assert "10x Genomics" in adata.uns["source"]
    assert "CC BY 4.0" in adata.uns["license"]
    adata.write_h5ad(tmp_path / "cells.h5ad")
    assert (ad.read_h5ad(tmp_path / "cells.h5ad").X != adata.X).nnz == 0


def test_toy_is_what_it_says(tmp_path):
    adata = datasets.toy(n_cells=50, n_genes=80, n_types=3, n_batches=2)
    assert (adata.shape, adata.X.dtype, adata.X.format) == ((50, 80), np.float32, "csr")
    assert (adata.X.data == np.rint(adata.X.data)).all()
    assert adata.X.sum(axis=1).min() > 0
    assert sorted(adata.obs["cell_type"].value_counts()) == [16, 17, 17]
    assert list(adata.obs["batch"].cat.categories) == ["batch 1", "batch 2"]
    assert (Vocabulary.human().match(adata.var_names).how == "symbol").all()
    assert adata.var_names.is_unique
    adata.write_h5ad(tmp_path / "toy.h5ad")
    truth = ad.read_h5ad(tmp_path / "toy.h5ad").uns["truth"]
    np.testing.assert_array_equal(truth["module"], adata.uns["truth"]["module"])
    assert list(truth["markers"]["type A"]) == list(adata.uns["truth"]["markers"]["type A"])


def test_the_same_seed_gives_the_same_cells():
    first, second, reseeded = datasets.toy(20, 40), datasets.toy(20, 40), datasets.toy(20, 40, rng=1)
    assert (first.X != second.X).nnz == 0
    assert first.obs.equals(second.obs)
    assert not first.var_names.equals(reseeded.var_names)
    by_generator = datasets.toy(20, 40, rng=np.random.default_rng(0))
    assert (first.X != by_generator.X).nnz == 0


def test_counts_follow_the_truth():
    adata = datasets.toy(n_cells=3000, n_genes=60, n_types=2, n_batches=2, rng=3)
    truth, counts = adata.uns["truth"], adata.X.toarray().astype(float)
    codes, batch = adata.obs["cell_type"].cat.codes.to_numpy(), adata.obs["batch"].cat.codes.to_numpy()
    assert [len(m) for m in truth["markers"].values()] == [5, 5]
    for i, name in enumerate(["type A", "type B"]):
        assert list(adata.var_names[truth["module"] == i]) == list(truth["markers"][name])
    # Shares in each (type, batch) against the softmax of the stated program. The sampling error of a share of 1% over
    # 750 cells of about 300 counts, with gene variance m + m²/4, is under 3% of it.
    total = counts.sum(axis=1, keepdims=True)
    for t in range(2):
        for b in range(2):
            cells = (codes == t) & (batch == b)
            weight = np.exp(truth["baseline"] + truth["program"][t] + truth["batch_effect"][b])
            expected = weight / weight.sum()
            share = counts[cells].sum(axis=0) / total[cells].sum()
            large = expected > 0.01
            assert large.sum() > 10
            np.testing.assert_allclose(share[large], expected[large], rtol=0.15)
    # overdispersion: variance m + m²/4 (and that of depth), not a Poisson's
    cells = (codes == 0) & (batch == 0)
    mean, variance = counts[cells].mean(axis=0), counts[cells].var(axis=0)
    large = mean > 10
    # var(d p Γ) = m + m² ((1 + 1/4) exp(0.3²) - 1), the log-normal depth included
    expected = mean + mean**2 * (1.25 * np.exp(0.3**2) - 1)
    assert 0.85 < np.median(variance[large] / expected[large]) < 1.15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_cells": 0}, "n_cells must be at least 1, got 0"),
        ({"n_cells": 3}, "3 cells can't show 4 types"),
        ({"n_genes": 7}, "need 8 genes, got 7"),
        ({"n_genes": 100_000}, "at most"),
    ],
)
def test_toy_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        datasets.toy(**arguments)


def test_pbmc68k_reduced():
    adata = datasets.pbmc68k_reduced()
    assert adata.shape == (700, 765)
    assert adata.raw.X.min() >= 0
    assert adata.obs["bulk_labels"].nunique() == 10


def test_transcription_factors_are_lamberts():
    names = transcription_factors()
    assert len(names) == len(set(names)) == 1633
    assert names == sorted(names)
    assert {"SPI1", "GATA1", "TP53", "FOXP3", "PAX5", "MYC", "CEBPA", "STAT1", "ZNF143"} <= set(names)
    assert not {"HBG1", "GAPDH", "CD19", "EP300", "HDAC1"} & set(names)  # neither targets nor cofactors
    match = Vocabulary.human().match(names)
    assert (match.how == "symbol").all()
    assert len(np.unique(match.tokens)) == 1633
    names.clear()
    assert len(transcription_factors()) == 1633


@pytest.mark.parametrize(
    ("name", "n", "inside", "outside"),
    [
        ("HLA", (18, 30), ["HLA-A", "HLA-DRA", "HLA-DPB1", "HLA-DMA"], ["B2M", "HLA-DPA2", "HCG4"]),
        ("HLA class I", (6, 6), ["HLA-A", "HLA-B", "HLA-C", "HLA-E", "HLA-F", "HLA-G"], ["HLA-DRA"]),
        ("HLA class II", (12, 20), ["HLA-DRA", "HLA-DRB1", "HLA-DQA1", "HLA-DMB", "HLA-DOA"], ["HLA-A", "CD74"]),
        ("TNF", (40, 60), ["TNF", "TNFSF10", "TNFRSF1A", "LTA", "LTBR", "CD40LG", "FAS"], ["TNFAIP3", "FASN"]),
        ("interleukin", (70, 110), ["IL6", "IL1B", "IL2RA", "IL10RB", "IL1RL1", "IL6ST"], ["ILF2", "IL4I1", "ILK"]),
        ("CD", (60, 110), ["CD4", "CD8A", "CD79B", "CD200R1"], ["CDK1", "CD2AP", "CD40LG", "CD5L", "CDC20"]),
    ],
)  # fmt: skip
def test_families(name, n, inside, outside):
    names = gene_family(name)
    assert names == sorted(set(names))
    assert n[0] <= len(names) <= n[1]
    assert set(inside) <= set(names)
    assert not set(outside) & set(names)
    table = Vocabulary.human().table.set_index("symbol").loc[names]
    assert (table["biotype"] == "protein_coding").all()


def test_classes_are_parts_of_hla_and_no_other_is_one():
    class_1, class_2, hla = (set(gene_family(name)) for name in ("HLA class I", "HLA class II", "HLA"))
    assert class_1 | class_2 == hla
    assert not class_1 & class_2
    with pytest.raises(ValueError, match=r"name must be .*'HLA-DR'"):
        gene_family("HLA-DR")
