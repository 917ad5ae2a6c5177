from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

from scdiva.get._frames import parameters_of, recovered_of

KEY = "scdiva_reconstructed"


def broken(adata: ad.AnnData, ending: str, change) -> ad.AnnData:
    """Change a layer of a copy, as a dense matrix."""
    adata = adata.copy()
    dense = adata.layers[KEY + ending].toarray()
    change(dense)
    adata.layers[KEY + ending] = sp.csr_matrix(dense)
    return adata


def test_every_place_and_every_gene_is_read_as_a_loop_reads_it(reconstruct):
    adata = reconstruct()[[5, 2, 9]]
    layer = {end: adata.layers[KEY + end].toarray() for end in ("", "_rank", "_true", "_true_rank", "_masked")}
    expected = []
    for i in range(3):
        for place in range(1, (layer["_true_rank"][i] > 0).sum() + 1):
            (gene,) = np.flatnonzero(layer["_true_rank"][i] == place)
            (other,) = np.flatnonzero(layer["_rank"][i] == place)
            true, hidden = layer["_true"][i, gene], layer["_masked"][i, gene]
            rank = layer["_rank"][i, gene]
            value = layer[""][i, gene] if rank else np.nan
            expected.append((i, gene, place, rank, true, value, hidden, other, layer[""][i, other]))
    found = recovered_of(adata, KEY)
    assert len(found.cell) > 100
    for part, column in zip(found, zip(*expected, strict=True), strict=True):
        np.testing.assert_array_equal(part, column)


def test_what_no_column_holds_leaves_its_place_empty(reconstruct):
    adata = reconstruct()
    before = recovered_of(adata, KEY)
    at = int(np.argmax(before.masked))
    gene = before.gene_there[at]
    adata = broken(adata, "_rank", lambda dense: dense.__setitem__((before.cell[at], gene), 0))
    genes = recovered_of(adata, KEY)
    assert genes.gene_there[at] == -1
    assert np.isnan(genes.value_there[at])
    assert (genes.gene_there == -1).sum() == np.isnan(genes.value_there).sum() == 1
    lost = (genes.cell == before.cell[at]) & (genes.gene == gene)
    assert (genes.reconstructed_rank[lost] == 0).all()
    assert np.isnan(genes.reconstructed_value[lost]).all()


def test_a_value_of_zero_and_an_empty_cell_are_no_holes(reconstruct):
    adata = reconstruct()
    at = recovered_of(adata, KEY)
    zeroed = broken(adata, "", lambda dense: dense.__setitem__((at.cell[0], at.gene_there[0]), 0))
    assert recovered_of(zeroed, KEY).value_there[0] == 0
    assert recovered_of(zeroed, KEY).gene_there[0] == at.gene_there[0]
    for ending in ("", "_rank", "_true", "_true_rank", "_masked"):
        adata = broken(adata, ending, lambda dense: dense.__setitem__(slice(0, 2), 0))
    assert set(recovered_of(adata, KEY).cell) == set(range(2, adata.n_obs))
    assert len(recovered_of(adata[:2], KEY).value) == 0


def test_what_is_missing_is_named(reconstruct):
    adata = reconstruct()
    assert parameters_of(adata, KEY)["mask_ratio"] == 0.3
    with pytest.raises(KeyError, match=r"'mine': call scdiva.tl.reconstruct\(.*key_added='mine'\)"):
        recovered_of(adata, "mine")
    for ending in ("", "_rank", "_true", "_true_rank", "_masked"):
        part = adata.copy()
        del part.layers[KEY + ending]
        with pytest.raises(KeyError, match=rf"layers has no '{KEY}{ending}'"):
            recovered_of(part, KEY)
    del adata.uns["scdiva"]
    with pytest.raises(KeyError, match=rf"uns\['scdiva'\] has no '{KEY}'"):
        recovered_of(adata, KEY)


def test_layers_that_do_not_belong_together_are_refused(reconstruct):
    adata = reconstruct()
    at = recovered_of(adata, KEY)
    first, name = at.gene[at.cell == 3], adata.obs_names[3]

    with pytest.raises(ValueError, match=f"ranks in 1 of 40 cells .first: {name!r}"):
        recovered_of(broken(adata, "_true_rank", lambda dense: dense.__setitem__((3, first[4]), 0)), KEY)
    with pytest.raises(ValueError, match="skips or repeats ranks in 1 of 40"):
        recovered_of(broken(adata, "_true_rank", lambda dense: dense.__setitem__((3, first[4]), 2)), KEY)
    with pytest.raises(ValueError, match=r"ranks in \d+ of 40 cells"):
        recovered_of(adata[:, :30], KEY)
    n, other = len(first), at.gene_there[at.cell == 3]
    with pytest.raises(ValueError, match=r"_rank.* holds other genes or ranks"):
        recovered_of(broken(adata, "_rank", lambda dense: dense.__setitem__((3, other[0]), n + 1)), KEY)
    with pytest.raises(ValueError, match=r"_rank.* holds other genes or ranks"):
        recovered_of(broken(adata, "_rank", lambda dense: dense.__setitem__((3, other[0]), 2)), KEY)
    absent = np.flatnonzero(adata.layers[KEY + "_true_rank"].toarray()[3] == 0)[0]
    with pytest.raises(ValueError, match=r"_masked.* holds other genes or ranks"):
        recovered_of(broken(adata, "_masked", lambda dense: dense.__setitem__((3, absent), True)), KEY)
