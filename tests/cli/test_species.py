"""`--species`: a species, or the file of a table; of integrate and annotate, `pp.match_genes` on the file."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest

import scdiva as sd
from scdiva import cli

pytestmark = pytest.mark.filterwarnings("ignore:(these are genes|only|the data have)")


@pytest.fixture
def rat(cells, tmp_path):
    """Cells under names of their own, and the file of their table."""
    adata = ad.read_h5ad(cells / "cells.h5ad")
    human = adata.var_names
    adata.var_names = [f"Rt{i}-ps" for i in range(adata.n_vars)]
    adata.write_h5ad(tmp_path / "rat.h5ad")
    lines = ["rat\thuman", *(f"{a}\t{b}" for a, b in zip(adata.var_names[1:], human[1:], strict=True)), "Rt0-ps\t"]
    (tmp_path / "rat.tsv").write_text("\n".join(lines))
    (tmp_path / "rat.csv").write_text("\n".join(lines).replace("\t", ","))
    return tmp_path


def test_a_table_is_read_from_a_file(rat, cells, small):
    for table in ("rat.tsv", "rat.csv"):
        out = rat / f"{table}.h5ad"
        words = ["embed", str(rat / "rat.h5ad"), "-o", str(out), "--model", str(small), "--species", str(rat / table)]
        assert cli.main(words) == 0
        expected = ad.read_h5ad(cells / "cells.h5ad")
        expected.var["human"] = ["", *expected.var_names[1:]]
        sd.pp.match_genes(expected, gene_ids="human")
        sd.tl.embed(expected, small)
        embedded = ad.read_h5ad(out)
        np.testing.assert_array_equal(embedded.obsm["X_scdiva"], expected.obsm["X_scdiva"])
        assert embedded.uns["scdiva"]["X_scdiva"]["species"] == "table"


def test_a_file_that_went_through_match_genes_is_read_so(rat, cells, small):
    adata = ad.read_h5ad(rat / "rat.h5ad")
    human = ad.read_h5ad(cells / "cells.h5ad").var_names
    sd.pp.match_genes(adata, species=dict(zip(adata.var_names, human, strict=True)))
    adata.write_h5ad(rat / "rat.h5ad")
    for file, out in ((cells / "cells.h5ad", "human.h5ad"), (rat / "rat.h5ad", "own.h5ad")):
        words = ["integrate", str(file), "-o", str(rat / out), "--batch_key", "batch", "--steps", "2"]
        assert cli.main([*words, "--model", str(small)]) == 0
    expected, actual = (ad.read_h5ad(rat / out).obsm["X_scdiva_integrated"] for out in ("human.h5ad", "own.h5ad"))
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("species", "content", "message"),
    [
        (
            "mause",
            None,
            "human, mouse, or a file with a table of orthologs, and there is no file 'mause' (did you mean",
        ),
        ("three.tsv", "a\tb\tc\n", "has 3 columns, not two, gene and human gene"),
        ("empty.tsv", "", "can't be read as a table of orthologs"),
        ("twice.tsv", "Rt1\tCD4\nRt1\tCD8A\n", "gives 'Rt1' two human genes"),
    ],
)
def test_what_is_no_table_is_refused(rat, capsys, monkeypatch, species, content, message):
    monkeypatch.chdir(rat)
    if content is not None:
        (rat / species).write_text(content)
    assert cli.main(["embed", "rat.h5ad", "-o", "out.h5ad", "--species", species]) == 1
    assert message in capsys.readouterr().err
    assert not (rat / "out.h5ad").exists()
