from __future__ import annotations

import anndata as ad
import matplotlib.pyplot as plt
import numpy as np
import pytest
import scipy.sparse as sp

from scdiva.data.cells import log_normalised
from scdiva.datasets import toy
from scdiva.pl import _umap, generated


@pytest.fixture
def cells():
    """Real counts of 90 toy cells, and 30 of them with noise, log-normalised to ten thousand."""
    real = toy(90, 60)
    made = real[::3].copy()
    noise = np.random.default_rng(0).normal(1, 0.2, made.shape)
    counts = np.expm1(np.maximum(log_normalised(made)[0].toarray() * noise, 0))
    made.X = sp.csr_matrix(np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True)).astype(np.float32))
    made.obs_names = [f"made{i}" for i in range(30)]
    return real, made


@pytest.fixture
def mapped(monkeypatch):
    """Put the first two components in the place of UMAP; what it was given is kept."""
    given = []
    monkeypatch.setattr(_umap, "umap_of", lambda z, seed: given.append((z, seed)) or z[:, :2])
    return given


def test_looks_as_it_did(cells, mapped, looks_as_it_did):
    looks_as_it_did(generated(*cells, color="cell_type", return_fig=True), "generated")


def reference_projection(real: np.ndarray, made: np.ndarray, n: int) -> np.ndarray:
    """All cells in the first components of the real ones, by a singular value decomposition."""
    mean = real.mean(axis=0)
    components = np.linalg.svd(real - mean, full_matrices=False)[2][:n]
    return (np.concatenate([real, made]) - mean) @ components.T


def test_the_map_is_made_of_components_of_the_real_cells(cells, mapped):
    real, made = cells
    generated(real, made, rng=3)
    ((z, seed),) = mapped
    assert z.shape == (120, 30)
    expected = reference_projection(log_normalised(real)[0].toarray(), made.X.toarray(), 4)
    turned = np.sign((z[:90, :4] * expected[:90]).sum(axis=0))
    np.testing.assert_allclose(z[:, :4], expected * turned, atol=1e-3)
    assert seed == 3


def test_cells_normalised_over_more_genes_than_are_here_are_drawn_on_the_same_scale(cells, mapped):
    """As when a panel is cut out of log-normalised data: its values stand for fewer than ten thousand counts."""
    real, made = cells
    part = real.copy()
    part.X = log_normalised(real)[0].astype(np.float32)
    part.X.data = np.log1p(0.2 * np.expm1(part.X.data))
    generated(real, made)
    generated(part, made)
    (first, _), (second, _) = mapped
    turned = np.sign((first * second).sum(axis=0))
    np.testing.assert_allclose(second[:, :10] * turned[:10], first[:, :10], atol=0.01)


def test_genes_are_matched_by_name_and_nothing_is_written(cells, mapped):
    real, made = cells
    before = real.copy(), made.copy()
    generated(real, made, color="cell_type")
    generated(real, made[:, ::-1].copy(), color="cell_type")
    logged = ad.AnnData(log_normalised(real)[0].toarray(), obs=real.obs, var=real.var)
    generated(logged, made)
    first, *others = (z for z, _ in mapped)
    for z in others:
        np.testing.assert_allclose(z, first, atol=1e-4)
    for cells_, was in zip((real, made), before, strict=True):
        assert (cells_.X != was.X).nnz == 0
        assert list(cells_.obsm) == list(was.obsm)
        assert cells_.uns.keys() == was.uns.keys()


def colours_at(ax) -> dict[tuple, tuple]:
    dots = ax.collections[0]
    return {tuple(p): tuple(c) for p, c in zip(dots.get_offsets(), dots.get_facecolors()[:, :3], strict=True)}


def test_cells_have_the_colours_of_their_origin_and_group(cells, mapped):
    real, made = cells
    real.uns["cell_type_colors"] = ["red", "lime", "blue", "black"]
    made.obs["cell_type"] = made.obs["cell_type"].astype(str).replace("type B", "new type")
    made.obs.iloc[4, made.obs.columns.get_loc("cell_type")] = np.nan
    names = ["type A", "type B", "type C", "type D", "new type"]
    del real.uns["cell_type_colors"]
    left, right = generated(real, made, color="cell_type", return_fig=True).axes
    z = mapped[0][0]
    origin, group = colours_at(left), colours_at(right)
    groups = [*real.obs["cell_type"].astype(str), *made.obs["cell_type"]]
    seen: dict = {}
    for i, place in enumerate(map(tuple, z[:, :2])):
        assert origin[place] == ((153 / 255,) * 3 if i < 90 else (209 / 255, 73 / 255, 91 / 255))
        seen.setdefault(groups[i] if isinstance(groups[i], str) else "", set()).add(group[place])
    assert seen.pop("") == {(212 / 255,) * 3}
    assert set(seen) == set(names)
    assert all(len(these) == 1 for these in seen.values())
    assert len(set.union(*seen.values())) == 5
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["real (90)", "generated (30)"]
    assert {text.get_text() for text in right.texts} == set(names)


def test_what_cannot_be_drawn_is_refused(cells, mapped, tmp_path):
    real, made = cells
    name = real.var_names[7]
    fewer = made[:, made.var_names != name].copy()
    twice = made.copy()
    twice.var_names = [made.var_names[1], *made.var_names[1:]]
    negative = made.copy()
    negative.X = made.X.toarray() - 1
    for pair, options, error, words in [
        (
            (real[:, fewer.var_names], made),
            {},
            ValueError,
            f"1 genes of the generated cells are not among those of the real ones .first: '{name}'",
        ),
        ((real, twice), {}, ValueError, r"call generated.var_names_make_unique\(\)"),
        ((real, negative), {}, ValueError, r"generated\.X .*negative"),
        ((real, real), {}, ValueError, r"generated\.X .*count"),
        ((real[:4], made), {}, ValueError, "4 real and 30 generated cells"),
        ((real, made[:0]), {}, ValueError, "90 real and 0 generated cells"),
        ((real[:, :2], made[:, :2]), {}, ValueError, "2 genes in common"),
        ((real, made), {"save": tmp_path / "picture"}, ValueError, "picture format"),
        ((real, "made.h5ad"), {}, TypeError, "expected an AnnData object, got str"),
    ]:
        with pytest.raises(error, match=words):
            generated(*pair, **options)
    for cells_, what in ((real, "real"), (made, "generated")):
        kept = cells_.obs.pop("cell_type")
        with pytest.raises(KeyError, match=f"obs of the {what} cells .*'cell_type'"):
            generated(real, made, color="cell_type")
        cells_.obs["cell_type"] = kept
    assert mapped == []
    assert plt.get_fignums() == []


def test_cells_that_generate_made_are_drawn_with_those_they_were_made_from(cells, mapped):
    real, made = cells
    fewer = made[:, 10:].copy()  # genes that the model does not know are not generated
    generated(real, fewer)
    generated(real[:, fewer.var_names].copy(), fewer)
    np.testing.assert_array_equal(mapped[0][0], mapped[1][0])
