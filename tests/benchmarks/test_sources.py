"""Whatever the source, the rows that are timed are the rows of the matrix, in order and as buffers of training."""

from __future__ import annotations

import anndata as ad
import pytest


@pytest.mark.filterwarnings("ignore")
def test_every_source_gives_the_cells_it_is_timed_for(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script("_record"), "RESULTS", tmp_path)
    sources = script("sources")
    where = sources.write(tmp_path, ad.AnnData(script("loading").synthetic(4200, 30)), [])
    assert list(where) == ["h5ad", "zarr 2", "zarr 3"]
    for opened in where.values():
        assert [sources.read(opened(), 4096, shuffled) for shuffled in (False, True)] == [4096, 4096]
    rows = sources.rows_of({"h5ad": where["h5ad"]}, 4096, 1)
    assert [row["what"] for row in rows] == ["h5ad: rows", "h5ad: blocks"]
    assert all(row["cells_per_cpu_second"] > 0 for row in rows)
