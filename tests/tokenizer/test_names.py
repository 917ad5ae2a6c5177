import numpy as np
import pytest

from scdiva.tokenizer.names import ensembl_id, looks_like_mouse, r_name, repeated_name, usual_spelling
from scdiva.tokenizer.vocabulary import Vocabulary


def test_ensembl_id():
    ids = {"ENSG00000141510.18": "ENSG00000141510", "ENSG00000182378.15_PAR_Y": "ENSG00000182378"}
    ids |= {"ENSG00000141510": "ENSG00000141510", "ENSMUSG00000059552.3": "ENSMUSG00000059552"}
    ids |= dict.fromkeys(["ENST00000269305", "ENSG0000014151", "TP53"])
    assert {name: ensembl_id(name) for name in ids} == ids


# What R 4 gives for make.names of these.
@pytest.mark.parametrize(
    ("name", "expected"),
    [("HLA-A", "HLA.A"), ("7SK", "X7SK"), ("TP53", "TP53"), (".5A", "X.5A"), ("a b", "a.b"), ("_x", "X_x")],
)
def test_r_name(name, expected):
    assert r_name(name) == expected


def test_usual_spelling():
    spelled = {"C12ORF57": "C12orf57", "CXORF40A": "CXorf40A", "Sep-07": "SEPT7", "7-Sep": "SEPT7"}
    spelled |= {"Sep-15": "SEPT15", "Mar-05": "MARCH5", "Dec-01": "DEC1"}
    spelled |= dict.fromkeys(["C12orf57", "Mar-01", "2-Mar", "SEPT7"])
    assert {name: usual_spelling(name) for name in spelled} == spelled


@pytest.mark.parametrize(
    ("name", "expected"), [("PSMA2.1", "PSMA2"), ("HLA-A-1", "HLA-A"), ("PSMA2", None), ("HLA-A", None)]
)
def test_repeated_name(name, expected):
    assert repeated_name(name) == expected


def test_mouse_is_recognised():
    assert looks_like_mouse(["Gapdh", "mt-Co1", "0610007P14Rik", "H2-Aa", "Gm1992", "Cd8a"])
    assert looks_like_mouse(["ENSMUSG00000059552.3", "ENSMUSG00000051951"])
    assert looks_like_mouse(["ENSRNOG00000010756"])
    assert looks_like_mouse(["Gapdh"] * 3 + ["GAPDH"] * 7)


def test_human_is_not_mouse():
    assert not looks_like_mouse([])
    for form in ("Gene{:03d}", "Gene{}", "Feature{}", "Peak{}", "Marker{}", "Hashtag{}", "Chr1-{}-99"):
        assert not looks_like_mouse(form.format(i) for i in range(500))
    assert not looks_like_mouse(["GAPDH", "MT-CO1", "C1orf162", "ENSG00000141510"])
    assert not looks_like_mouse(["Gapdh"] * 2 + ["GAPDH"] * 8)
    assert not looks_like_mouse(["Act5C", "Gapdh1", "Rpl5", "dpp", "wg", "hh", "en", "ftz", "Hml", "Pxn"])  # a fly
    human = Vocabulary.human()
    assert not looks_like_mouse(human.symbols)
    # any thousand human genes, also those that hold most open reading frames
    frames = [symbol for symbol in human.symbols if "orf" in symbol]
    assert len(frames) > 100
    assert not looks_like_mouse(frames)
    assert not looks_like_mouse(np.random.default_rng(0).choice(human.symbols, 1000))
