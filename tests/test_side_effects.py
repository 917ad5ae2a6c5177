"""What a call leaves as it was: other parts of adata, the model, global random streams; and what its seed decides."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import scdiva as sd

CALLS = {
    "adapt": (lambda a, m, rng: sd.tl.adapt(a, m, rng=rng), ""),
    "annotate": (lambda a, m, rng: sd.tl.annotate(a, "partly", model=m, rng=rng), "obsm/scdiva_label_probability"),
    "embed": (lambda a, m, rng: sd.tl.embed(a, m), "obsm/X_scdiva"),
    "generate": (lambda a, m, rng: sd.tl.generate(a, 4, m, groupby="cell_type", rng=rng), ""),
    "gene_embedding": (lambda a, m, rng: sd.tl.gene_embedding(a, m), "varm/X_scdiva"),
    "impute": (
        lambda a, m, rng: sd.tl.impute(a, model=m, rng=rng),
        "layers/scdiva_imputed layers/scdiva_imputed_sd",
    ),
    "integrate": (
        lambda a, m, rng: sd.tl.integrate(a, "batch", "cell_type", model=m, steps=6, rng=rng),
        "obsm/X_scdiva_integrated",
    ),
    "log_likelihood": (lambda a, m, rng: sd.tl.log_likelihood(a, m, n_samples=2, rng=rng), ""),
    "reconstruct": (
        lambda a, m, rng: sd.tl.reconstruct(a, m, n_steps=2, rng=rng),
        " ".join(f"layers/scdiva_reconstructed{end}" for end in ("", "_rank", "_true", "_true_rank", "_masked")),
    ),
}
"""Calls, and what they write into obsm, varm and layers."""


@pytest.fixture(scope="module")
def cells():
    cells = sd.datasets.toy(60, 60, rng=1)
    cells.obs["partly"] = cells.obs["cell_type"].where(np.arange(60) % 3 > 0)
    return cells


def run(cells, model, name, rng=3, threads=1):
    """Result of a call on a copy, and the copy."""
    data = cells.copy()
    with sd.settings.override(threads=threads, precision="fp32"):
        return CALLS[name][0](data, model, rng), data


def parts_of(data, hashed) -> dict:
    """Hash of each part of an AnnData object."""
    parts = "layers", "obsm", "varm", "obsp", "varp"
    return {name: hashed(getattr(data, name)) for name in ("X", "obs", "var", "uns")} | {
        f"{part}/{key}": hashed(value)
        for part in parts
        for key, value in getattr(data, part).items()
        if key is not None  # X, which anndata 0.13 lists among the layers
    }


def bits(result, data, hashed) -> dict:
    """All that a call returned or wrote, but for its notes, among which is the runtime."""
    contents = parts_of(data, hashed)
    del contents["uns"]
    if isinstance(result, torch.nn.Module):
        contents |= {name: value.numpy().tobytes() for name, value in result.state_dict().items()}
    elif result is not None and hasattr(result, "layers"):
        contents["X of the result"] = result.X.toarray().tobytes()
    return contents


@pytest.mark.parametrize("name", CALLS)
def test_nothing_else_is_changed(cells, headed, hashed, weights, same, name):
    before, was = weights(headed), parts_of(cells, hashed)
    state, legacy = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    _, data = run(cells, headed, name)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], legacy)  # noqa: NPY002
    assert same(weights(headed), before)
    assert not headed.training
    assert all(p.requires_grad for p in headed.parameters())
    contents = parts_of(data, hashed)
    assert contents.keys() - was.keys() == set(CALLS[name][1].split())
    assert (contents["X"], contents["var"]) == (was["X"], was["var"])
    assert data.obs[list(cells.obs)].equals(cells.obs)
    assert set(data.uns) <= {*cells.uns, "scdiva"}


@pytest.mark.parametrize("name", CALLS)
def test_the_seed_decides_every_bit_on_any_number_of_threads(cells, headed, hashed, name):
    one, again, other_seed = (
        bits(*run(cells, headed, name, **how), hashed) for how in ({}, {"threads": 3}, {"rng": 4})
    )
    assert one == again
    assert (one == other_seed) == (name in ("adapt", "embed", "gene_embedding"))  # which draw nothing of few cells
