"""`tl.regulon` on networks made by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import scdiva as sd

from .conftest import about

WEIGHTS = {1: 0.2, 4: -0.9, 7: 0.5, 9: 0.5, 12: 0.1, 30: -0.3}
"""Of edges from gene 3."""


@pytest.fixture
def cells(adata):
    """Toy cells in two groups, with a network of all cells and one of each group, of which the second is doubled."""

    def make(method="attention", signed=False, reference=""):
        cells = adata.copy()
        cells.obs["kind"] = pd.Categorical.from_codes(np.arange(90) % 7 % 2, ["T/NK", "B"])
        matrix = sp.dok_matrix((60, 60), dtype=np.float32)
        for target, weight in WEIGHTS.items():
            matrix[3, target] = weight
        matrix[5, 3] = 1.0
        cells.varp["whole"], cells.varp["by_T_NK"], cells.varp["by_B"] = (sp.csr_matrix(matrix) * k for k in (1, 1, 2))
        how = {"method": method, "signed": signed, "reference": reference}
        how["sources"] = np.asarray(cells.var_names, dtype=object)[[3, 5]]
        cells.uns["scdiva"] = {
            "whole": about(cells.var_names, ["whole"], **how),
            "by": about(cells.var_names, ["by_T_NK", "by_B"], ["T/NK", "B"], **how),
        }
        return cells

    return make


def correlations(cells, rows=slice(None)) -> np.ndarray:
    counts = cells.X.toarray().astype(np.float64)
    return np.corrcoef(np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True))[rows].T)


def test_lists_the_strongest_targets(cells):
    data = cells("correlation", signed=True)
    name = data.var_names
    regulon = sd.tl.regulon(data, name[3], key="whole", n_targets=4)
    assert list(regulon) == ["source", "target", "weight", "correlation", "sign"]
    assert regulon["source"].tolist() == [name[3]] * 4
    assert regulon["target"].tolist() == name[[4, 7, 9, 30]].tolist()  # of equal ones the first column
    np.testing.assert_allclose(regulon["weight"], [-0.9, 0.5, 0.5, -0.3], rtol=1e-6)
    np.testing.assert_allclose(regulon["correlation"], correlations(data)[3, [4, 7, 9, 30]], atol=1e-5)
    assert regulon["sign"].tolist() == [-1, 1, 1, -1]
    assert (regulon["weight"].dtype, regulon["correlation"].dtype, regulon["sign"].dtype) == (
        "float64",
        "float64",
        "int64",
    )
    assert len(sd.tl.regulon(data, name[3], key="whole")) == 6
    frame = sd.get.grn_df(data, key="whole", sources=[name[3]])
    pd.testing.assert_frame_equal(regulon[["source", "target", "weight"]], frame.head(4), check_dtype=False)


def test_where_weights_have_no_sign_the_correlation_tells_it(cells):
    for method, reference in (("attention", ""), ("embedding", ""), ("correlation", "B")):
        data = cells(method, reference=reference)
        regulon = sd.tl.regulon(data, data.var_names[3], key="whole")
        assert regulon["target"].tolist() == data.var_names[[7, 9, 1, 12, 30, 4]].tolist()
        expected = correlations(data)[3, [7, 9, 1, 12, 30, 4]]
        assert regulon["sign"].tolist() == np.sign(expected).tolist()
        assert set(regulon["sign"]) == {-1, 1}
    differences = cells("correlation", signed=True, reference="B")
    regulon = sd.tl.regulon(differences, differences.var_names[3], key="whole")
    assert regulon["sign"].tolist() == np.sign(regulon["correlation"]).tolist() != np.sign(regulon["weight"]).tolist()
    data.X = sp.csr_matrix(data.X.multiply(np.arange(60) != 7))
    regulon = sd.tl.regulon(data, data.var_names[3], key="whole")
    assert regulon.loc[0, ["correlation", "sign"]].tolist() == [0.0, 0]


def test_of_a_group_in_its_own_cells(cells):
    data = cells()
    rows = (data.obs["kind"] == "T/NK").to_numpy()
    for group, mask, weight in (("T/NK", rows, 0.5), ("B", ~rows, 1.0)):
        regulon = sd.tl.regulon(data, data.var_names[3], key="by", group=group, n_targets=2)
        np.testing.assert_allclose(regulon["weight"], weight)
        np.testing.assert_allclose(regulon["correlation"], correlations(data, mask)[3, [7, 9]], atol=1e-5)
    with pytest.raises(KeyError, match="must be one of those"):
        sd.tl.regulon(data, data.var_names[3], key="by")


@pytest.mark.parametrize("columns", [("source", "mor"), ("tf", "mor"), ("source", "weight")])
def test_known_targets_are_marked(cells, columns):
    data = cells()
    factor, sign = columns
    name = data.var_names
    rows = [
        (3, 1, 1.0), (3, 4, -0.4), (3, 7, 0.0), (3, 9, 1.0), (3, 9, -1.0), (3, 12, np.nan), (5, 30, 1.0), (4, 3, 1.0),
        (3, 7, 0.0), (3, 1, 0.0),
    ]  # fmt: skip
    interactions = pd.DataFrame(rows, columns=["i", "j", sign])
    interactions[factor], interactions["target"] = name[interactions["i"]], name[interactions["j"]]
    marks = sd.tl.regulon(data, name[3], key="whole", known=interactions).set_index("target")["known"]
    assert marks[name[[1, 4, 7, 9, 12]]].tolist() == [1.0, -1.0, 0.0, 0.0, 0.0]
    assert np.isnan(marks[name[30]])
    assert marks.dtype == np.float64
    plain = sd.tl.regulon(data, name[3], key="whole", known=interactions[[factor, "target"]])["known"]
    assert plain.isna().sum() == 1
    assert (plain.dropna() == 0).all()
    none = sd.tl.regulon(data, name[3], key="whole", known=interactions[interactions["i"] == 4])
    assert none["known"].isna().all()


def test_layers_and_raw(cells):
    data = cells()
    expected = sd.tl.regulon(data, data.var_names[3], key="whole")
    data.raw = data[:, ::-1]
    data.layers["counts"] = data.X.copy()
    data.X = data.X.toarray() - 3.0
    for options in ({"use_raw": True}, {"layer": "counts"}):
        regulon = sd.tl.regulon(data, data.var_names[3], key="whole", **options)
        pd.testing.assert_frame_equal(regulon, expected, atol=1e-5)
    data.X = data.layers["counts"]
    data.raw = data[:, np.arange(60) != 7]
    with pytest.raises(ValueError, match=r"1 genes .*matrix.*use_raw="):
        sd.tl.regulon(data, data.var_names[3], key="whole", use_raw=True)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"source": 4}, KeyError, r"source .*'whole': call scdiva.tl.grn\(.*sources=\['"),
        ({"group": "B"}, KeyError, "leave group out"),
        ({"known": pd.DataFrame({"gene": ["A"]})}, ValueError, "known .*source .*target; .*gene"),
    ],
)
def test_what_is_not_there_is_refused(cells, hashed, change, kind, message):
    data = cells()
    before = hashed(data)
    with pytest.raises(kind, match=message):
        sd.tl.regulon(data, data.var_names[change.pop("source", 3)], **{"key": "whole"} | change)
    assert hashed(data) == before
