import anndata as ad
import numpy as np
import pytest

from scdiva import datasets
from scdiva.tokenizer import Vocabulary


def test_toy_is_what_it_says(tmp_path):
    adata = datasets.toy(n_cells=50, n_genes=80, n_types=3, n_batches=2)
    assert adata.shape == (50, 80)
    assert adata.X.dtype == np.float32
    assert adata.X.format == "csr"
    assert (adata.X.data == np.rint(adata.X.data)).all()
    assert adata.X.sum(axis=1).min() > 0
    assert sorted(adata.obs["cell_type"].value_counts()) == [16, 17, 17]
    assert list(adata.obs["batch"].cat.categories) == ["batch 1", "batch 2"]
    match = Vocabulary.human().match(adata.var_names)
    assert (match.how == "symbol").all()
    assert adata.var_names.is_unique
    adata.write_h5ad(tmp_path / "toy.h5ad")
    truth = ad.read_h5ad(tmp_path / "toy.h5ad").uns["truth"]
    np.testing.assert_array_equal(truth["module"], adata.uns["truth"]["module"])
    assert list(truth["markers"]["type A"]) == list(adata.uns["truth"]["markers"]["type A"])


def test_the_same_seed_gives_the_same_cells():
    first, second, other = datasets.toy(20, 40), datasets.toy(20, 40), datasets.toy(20, 40, rng=1)
    assert (first.X != second.X).nnz == 0
    assert first.obs.equals(second.obs)
    assert not first.var_names.equals(other.var_names)
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
            seen = counts[cells].sum(axis=0) / total[cells].sum()
            large = expected > 0.01
            assert large.sum() > 10
            np.testing.assert_allclose(seen[large], expected[large], rtol=0.15)
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
