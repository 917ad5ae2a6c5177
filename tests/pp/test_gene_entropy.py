from __future__ import annotations

import pickle

import numpy as np
import pytest
import scipy.sparse as sp

from scdiva.datasets import toy
from scdiva.pp import corpus_entropy, gene_entropy
from scdiva.tokenizer.entropy import BIN_EDGES
from scdiva.tokenizer.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def human() -> Vocabulary:
    return Vocabulary.human()


def slow_entropy(counts: np.ndarray) -> np.ndarray:
    """Entropy of each column of v = log(1 + 1e4 c / C) from dense numpy histograms, zero apart."""
    v = np.log1p(counts / counts.sum(1, keepdims=True) * 1e4).astype(np.float32)
    out = []
    for column in v.T:
        positive = np.histogram(-column[column > 0].astype(np.float64), bins=-BIN_EDGES[::-1])[0]
        p = np.concatenate([[np.sum(column == 0)], positive]) / len(column)
        p = p[p > 0]
        out.append(-(p * np.log(p)).sum())
    return np.array(out)


def test_equals_dense_histograms(human):
    adata = toy(90, 60)
    before = adata.copy()
    assert gene_entropy(adata, human) is None
    entropy = adata.var["scdiva_entropy"]
    assert entropy.dtype == np.float32
    np.testing.assert_allclose(entropy, slow_entropy(before.X.toarray()), rtol=1e-5)
    assert (adata.X != before.X).nnz == 0
    assert adata.uns["scdiva"]["scdiva_entropy"]["n_cells"] == 90
    assert adata.uns["scdiva"]["scdiva_entropy"]["vocabulary"] == human.fingerprint


def test_unknown_genes_have_none_and_shared_ones_one(human):
    adata = toy(50, 60)
    names = list(adata.var_names)
    human = human.subset(np.sort(human.match(names[2:]).tokens))  # the last gene of which is measured
    adata.var_names = ["NOGENE", adata.var["ensembl_id"].iloc[2], *names[2:]]
    gene_entropy(adata, human)
    entropy = adata.var["scdiva_entropy"].to_numpy()
    assert np.isnan(entropy[0])
    assert entropy[1] == entropy[2]
    x = adata.X.toarray()
    x[:, 2] += x[:, 1]
    x[:, 1] = 0
    np.testing.assert_allclose(entropy[2:], slow_entropy(x)[2:], rtol=1e-5)


def test_raw_genes_find_their_columns(human):
    adata = toy(40, 50)
    expected = gene_entropy(adata, human, copy=True).var["scdiva_entropy"]
    small = adata[:, ::-3].copy()
    small.raw = adata
    small.X = np.zeros(small.shape)
    gene_entropy(small, human, use_raw=True)
    np.testing.assert_array_equal(small.var["scdiva_entropy"], expected[::-3])


def test_a_failed_call_leaves_adata_alone(human):
    bad = toy(40, 50)
    bad.X = bad.X * -1
    with pytest.raises(ValueError, match="negative"):
        gene_entropy(bad, human)
    assert "scdiva_entropy" not in bad.var
    assert "scdiva" not in bad.uns


@pytest.mark.parametrize("block_rows", [7, 4096])
def test_a_corpus_of_files_equals_memory(human, tmp_path, block_rows):
    adata = toy(60, 50)
    parts = [adata[:13].copy(), adata[13:41, 5:].copy(), adata[41:].copy()]
    parts[1].X = sp.csc_matrix(parts[1].X)
    paths = []
    for i, part in enumerate(parts):
        paths.append(tmp_path / f"{i}.h5ad")
        part.write_h5ad(paths[-1])
    of_files = corpus_entropy(paths, human, block_rows=block_rows)
    assert of_files.fingerprint == human.fingerprint
    assert of_files == corpus_entropy(parts[::-1], human) == pickle.loads(pickle.dumps(of_files))
    assert of_files == corpus_entropy(paths[0], human) + corpus_entropy(paths[1:], human)
    gene_entropy(adata, human)
    entropy, tokens = corpus_entropy(adata, human).entropy(), human.match(adata.var_names).tokens
    np.testing.assert_array_equal(entropy[tokens], adata.var["scdiva_entropy"])


def test_the_message_names_the_file(human, tmp_path):
    adata = toy(40, 50)
    adata.X = adata.X.toarray()
    adata.X[3, 4] = np.nan
    adata.write_h5ad(tmp_path / "bad.h5ad")
    with pytest.raises(ValueError, match=r"bad\.h5ad: .*1 NaN values .*cell '.*', gene '.*'"):
        corpus_entropy([tmp_path / "bad.h5ad"], human)
    with pytest.raises(ValueError, match=r"data set 0: adata\.X holds 1 NaN"):
        corpus_entropy([adata], human)
    with pytest.raises(ValueError, match="no files"):
        corpus_entropy([], human)
