"""A small model, and networks made by hand."""

from __future__ import annotations

import numpy as np


def about(names, keys, groups=(), method="attention", **more) -> dict:
    """Entry of `adata.uns["scdiva"]` for a network made by hand."""
    names = np.asarray(names, dtype=object)
    return {
        "method": method, "signed": False, "reference": "", "groupby": "kind" if groups else "",
        "groups": np.array(groups, dtype=object), "keys": np.array(keys, dtype=object), "sources": names,
        "targets": names,
    } | more  # fmt: skip
