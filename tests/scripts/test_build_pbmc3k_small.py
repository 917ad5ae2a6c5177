"""The script that selects the bundled cells."""

from __future__ import annotations

import anndata as ad
import numpy as np
import scipy.sparse as sp


def test_rare_types_are_kept_whole_and_counts_as_they_are(script, tmp_path):
    module = script("build_pbmc3k_small")
    rng = np.random.default_rng(1)
    types = rng.permutation(np.repeat(["many", "some", "rare", module.UNLABELLED], [400, 100, 9, 30]))
    source = ad.AnnData(sp.csr_matrix(rng.poisson(0.3, (539, 40)).astype(np.float32)), obs={"cell_type": types})
    rows = module.selected(types)
    assert (np.diff(rows) > 0).all()
    assert (module.selected(types) == rows).all()
    for file in ("one.npz", "two.npz"):
        module.write(source[rows], tmp_path / file)
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()
    with np.load(tmp_path / "one.npz") as arrays:
        counts = sp.csc_matrix((arrays["counts"], arrays["rows"], arrays["indptr"]), shape=(159, 40))
        kept = source[arrays["cells"]]
        assert (kept.obs["cell_type"] == arrays["cell_type"]).all()
    assert kept.obs["cell_type"].value_counts().to_dict() == {"many": 100, "some": 50, "rare": 9}
    assert (counts != kept.X).nnz == 0
