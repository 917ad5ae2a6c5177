from __future__ import annotations

import numpy as np
import pytest

from scdiva.datasets import gene_family, transcription_factors
from scdiva.tokenizer import Vocabulary


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
    one, two, both = (set(gene_family(name)) for name in ("HLA class I", "HLA class II", "HLA"))
    assert one | two == both
    assert not one & two
    with pytest.raises(ValueError, match=r"name must be .*'HLA-DR'"):
        gene_family("HLA-DR")
