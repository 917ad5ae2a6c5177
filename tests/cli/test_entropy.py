from __future__ import annotations

import numpy as np
import pytest

from scdiva import cli
from scdiva.pp import corpus_entropy
from scdiva.tokenizer.entropy import EntropyHistogram
from scdiva.tokenizer.vocabulary import Vocabulary


def run(*arguments) -> int:
    return cli.main(["entropy", *map(str, arguments)])


def test_one_pass_over_a_folder(files, tmp_path, capsys):
    out = tmp_path / "counted.parquet"
    assert run(files, "-o", out, "--vocabulary", files / "genes.parquet", "--min_genes", 47) == 0
    assert capsys.readouterr().out.strip() == str(out)
    genes = Vocabulary.read(files / "genes.parquet")
    expected = corpus_entropy([files / f"{name}.h5ad" for name in "abc"], genes, min_genes=47)
    assert 0 < expected.n_cells < 80
    np.testing.assert_array_equal(Vocabulary.read(out).table["entropy"], expected.entropy()[3:])
    # the same as leaving the cells out by hand
    import anndata as ad

    kept = []
    for name in "abc":
        adata = ad.read_h5ad(files / f"{name}.h5ad")
        kept.append(adata[np.asarray((adata.X > 0).sum(axis=1)).ravel() >= 47].copy())
    assert corpus_entropy(kept, genes) == expected


def test_parts_add_up_to_one_pass(files, tmp_path):
    genes = ("--vocabulary", files / "genes.parquet", "--min_genes", 0)
    parts = []
    for name in "ab":
        parts.append(tmp_path / f"{name}.npz")
        assert run(files / f"{name}.h5ad", "-o", tmp_path / "part.parquet", "--histogram", parts[-1], *genes) == 0
    whole = tmp_path / "whole.npz"
    merged = ("--merge", f"[{parts[0]}, {parts[1]}]")
    assert run(files / "c.h5ad", "-o", tmp_path / "whole.parquet", *merged, "--histogram", whole, *genes) == 0
    expected = corpus_entropy([files / f"{name}.h5ad" for name in "abc"], files / "genes.parquet")
    assert EntropyHistogram.load(whole) == expected
    assert run("-o", tmp_path / "again.parquet", "--merge", f"[{whole}]", *genes) == 0
    assert Vocabulary.read(tmp_path / "again.parquet") == Vocabulary.read(tmp_path / "whole.parquet")
    np.testing.assert_array_equal(Vocabulary.read(tmp_path / "again.parquet").table["entropy"], expected.entropy()[3:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to count"),
        (["nowhere.h5ad"], "nowhere.h5ad"),
        (["FILES/a.h5ad", "--min_genes", "500"], "no cell has 500 known genes"),
        (["--merge", "[FILES/other.npz]"], "other.npz: histograms of different vocabularies"),
        (["--merge", "[FILES/other.npz, FILES/other.npz]"], "given twice"),
        (["FILES/a.h5ad", "--histogram", "nowhere/h.npz"], "no folder 'nowhere'"),
    ],
)
def test_what_cannot_be_counted_is_said_in_a_line(files, tmp_path, capsys, arguments, message):
    EntropyHistogram(7, "x").save(files / "other.npz")
    arguments = [one.replace("FILES", str(files)) for one in arguments]
    assert run(*arguments, "-o", tmp_path / "out.parquet", "--vocabulary", files / "genes.parquet") == 1
    said = capsys.readouterr().err.strip()
    assert message in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out.parquet").exists()
