"""Reading networks stored in AnnData."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from scdiva.networks.network import genes_of, network_of

from .conftest import about

NAMES = ["SPI1", "CSF1R", "LYZ", "CST3", "alone"]


@pytest.fixture
def adata():
    adata = ad.AnnData(np.ones((2, 5), np.float32), var=pd.DataFrame(index=NAMES))
    weights = np.zeros((5, 5), np.float32)
    weights[0, 1:4] = [0.5, -0.2, 0.3]
    adata.varp["net"] = sp.csr_matrix(weights)
    adata.varp["by_a_b"], adata.varp["by_c"] = sp.csc_matrix(2 * weights), -weights
    genes = {"sources": np.array(["SPI1"]), "targets": np.array(NAMES[:4])}
    adata.uns["scdiva"] = {
        "net": about(NAMES, ["net"], signed=True, **genes),
        "by": about(NAMES, ["by_a_b", "by_c"], ["a/b", "c"], signed=True, reference="rest", **genes),
        "one": about(NAMES, ["by_c"], ["c"], "embedding", **genes),
    }
    return adata


def test_a_network_of_all_cells(adata):
    network = network_of(adata, "net", None)
    assert network.weights.format == "csr"
    np.testing.assert_array_equal(network.weights.toarray(), adata.varp["net"].toarray())
    assert network.names.tolist() == NAMES
    assert network.sources.tolist() == [True, False, False, False, False]
    assert network.targets.tolist() == [True, True, True, True, False]
    assert (network.method, network.group, network.reference) == ("attention", "", "")
    assert network.signed
    assert network.directed
    assert network.title == "Attention, all layers, all heads"
    assert network.unit == "excess attention rank"
    np.testing.assert_array_equal(network.strength(np.array([-2.0, 1.0])), [2.0, 1.0])


def test_a_network_of_a_group(adata, tmp_path):
    adata.write_h5ad(tmp_path / "a.h5ad")
    for data in (adata, ad.read_h5ad(tmp_path / "a.h5ad")):
        network = network_of(data, "by", "a/b")
        np.testing.assert_array_equal(network.weights.toarray(), 2 * data.varp["net"].toarray())
        assert network.title == "Attention, all layers, all heads, a/b"
        assert network.unit == "difference of\nexcess attention rank\na/b − rest"
        only = network_of(data, "one", None)  # the one that there is
        np.testing.assert_array_equal(only.weights.toarray(), -data.varp["net"].toarray())
        assert only.group == "c"
        assert not only.signed
        assert not only.directed
        assert only.unit == "similarity of genes (z-score)"
        np.testing.assert_array_equal(only.strength(np.array([-2.0, 1.0])), [-2.0, 1.0])


def test_slices_of_genes_keep_their_names(adata):
    network = network_of(adata[:, [3, 0]].copy(), "net", None)
    assert network.sources.tolist() == [False, True]
    np.testing.assert_array_equal(network.weights.toarray(), np.array([[0, 0], [0.3, 0]], np.float32))


@pytest.mark.parametrize(
    ("key", "group", "message"),
    [
        ("gone", None, r"network 'gone': call scdiva.tl.grn\(.*key_added='gone'"),
        ("other", None, "has no network 'other'"),
        ("net", "c", "group='c', .*'net' is of all.*groupby="),
        ("by", None, "group=None .*'by' .*: a/b, c"),
        ("by", "a_b", "group='a_b' must be one"),
        ("one", "a/b", "group='a/b' must be one"),
        ("lost", None, "adata.varp .*'lost', .*'by_a_b', 'by_c': call scdiva.tl.grn"),
    ],
)
def test_what_is_not_there_is_named(adata, key, group, message):
    adata.uns["scdiva"] |= {"other": {"method": "x"}, "lost": about(NAMES, ["lost"])}
    with pytest.raises(KeyError, match=message):
        network_of(adata, key, group)
    del adata.uns["scdiva"]
    with pytest.raises(KeyError, match="has no network"):
        network_of(adata, key, group)


def test_genes_are_found_in_the_order_asked_for(adata):
    network = network_of(adata, "net", None)
    assert genes_of(network, ["LYZ", "SPI1", "LYZ"], "net").tolist() == [2, 0]
    with pytest.warns(UserWarning, match="2 of 3 genes .*'net' .*: alone, CD3E"):
        assert genes_of(network, ["alone", "CST3", "CD3E"], "net").tolist() == [3]
    with pytest.raises(KeyError, match=r"1 genes .SPI2. .*'net' of 4.*SPI1.*min_fraction"):
        genes_of(network, ["SPI2"], "net")
    with pytest.raises(KeyError, match="none of 0 genes"):
        genes_of(network, [], "net")
    with pytest.raises(TypeError, match="genes='SPI1' must be a list"):
        genes_of(network, "SPI1", "net")
