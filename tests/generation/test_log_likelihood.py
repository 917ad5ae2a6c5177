"""`tl.log_likelihood`: what is written, what stays, what is refused, and what it tells of cells."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import torch

import scdiva as sd
from scdiva.generation.log_likelihood import is_outlier

KEY = "scdiva_log_likelihood"
COLUMNS = [KEY, f"{KEY}_se", f"{KEY}_per_gene", f"{KEY}_outlier"]


def scored(adata, model="scdiva-mini", **arguments):
    """The columns written to a copy. Precision is named, since fixtures are made before the settings of a test hold."""
    how = {"rng": 3, "precision": "fp32"} | arguments
    return sd.tl.log_likelihood(adata, model, copy=True, **how).obs[COLUMNS]


@pytest.fixture(scope="module")
def subset(adata):
    return adata[:25].copy()


def test_what_is_documented_is_written(subset, headed):
    data = subset.copy()
    assert sd.tl.log_likelihood(data, headed, n_samples=4, rng=3) is None
    assert list(data.obs) == [*subset.obs, *COLUMNS]
    assert [data.obs[column].dtype for column in COLUMNS] == [np.float64] * 3 + [bool]
    bound, error, by_gene = (data.obs[column].to_numpy() for column in COLUMNS[:3])
    assert (bound < 0).all()
    assert (error > 0).all()
    lengths = np.minimum((subset.X[:, :55].toarray() > 0).sum(1), headed.config.max_length)
    np.testing.assert_allclose(by_gene, bound / lengths)
    notes = data.uns["scdiva"][KEY]
    assert (notes["n_samples"], notes["input"]) == (4, "counts")


def test_the_bound_is_that_of_the_whole_vocabulary_with_unmeasured_genes_ruled_out(subset, headed, one):
    """The bound over measured genes equals that over all genes with logits of -inf for unmeasured ones.

    A model with a state head returns one row of logits for each cell; here there is one for each masked gene.
    """
    from scdiva._rng import generator, step_generator
    from scdiva.data.cells import open_cells
    from scdiva.diffusion import log_likelihood
    from scdiva.generation.sampling import denoiser_of

    data = subset[:4, 10:].copy()  # ten genes of the vocabulary are not measured
    config = headed.config
    source = open_cells(data, headed.vocabulary, max_length=config.input_length, entropy_floor=config.entropy_floor)
    seed = int(torch.randint(2**62, (1,), generator=generator(3, default_seed=0)))
    ((_, (indptr, tokens, values)),) = source.windows(4)
    genes = torch.from_numpy(source.measured_tokens.astype(np.int64))
    assert len(genes) == 45
    for model in (headed, one):  # the second has no state head
        scores = scored(data, model, n_samples=2)
        for row in range(4):
            cell = slice(indptr[row], min(indptr[row + 1], indptr[row] + config.max_length))
            denoise = denoiser_of(model, stream=model is one)

            def of_measured(*packed, denoise=denoise):
                every = denoise(*packed)[0].expand(int(packed[3].sum()), -1)  # of one cell, perhaps one row for all
                return torch.full_like(every, -torch.inf).index_copy_(1, genes - 3, every[:, genes - 3]), None

            bound = log_likelihood(
                of_measured,
                torch.from_numpy(tokens[cell].astype(np.int64)),
                torch.from_numpy(values[cell]),
                torch.tensor([0, cell.stop - cell.start], dtype=torch.int32),
                2,
                generator=step_generator(seed, row, "likelihood"),
            )
            np.testing.assert_allclose(scores[KEY].iloc[row], bound.bound.item(), rtol=1e-4)
            np.testing.assert_allclose(scores[f"{KEY}_se"].iloc[row], bound.standard_error.item(), rtol=1e-2, atol=1e-3)


def test_a_cell_depends_neither_on_the_others_nor_on_the_order_of_genes(subset, headed):
    full, part = scored(subset, headed), scored(subset[:5].copy(), headed)
    np.testing.assert_array_equal(part[KEY], full[KEY].iloc[:5])
    assert not part[f"{KEY}_outlier"].any()  # of fewer than twenty cells nothing is unusual
    order = np.random.default_rng(0).permutation(subset.n_vars)
    np.testing.assert_allclose(scored(subset[:, order].copy(), headed)[KEY], full[KEY], rtol=1e-4)


def test_a_planted_odd_cell_is_an_outlier(blood):
    """One cell that shows other genes than blood cells do, as many and with the same values."""
    values = blood.X.toarray()
    values[7] = np.random.default_rng(1).permutation(values[7])
    cells = ad.AnnData(sp.csr_matrix(values), var=blood.var)
    scores = scored(cells)
    assert scores[f"{KEY}_outlier"].iloc[7]
    assert scores[f"{KEY}_outlier"].sum() <= 2


def test_cells_are_compared_with_those_of_as_many_genes():
    """A line through the logarithm of the number of genes; four deviations below it is unusual, above it is not."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(100, 3000, 300)
    by_gene = 2 - 0.7 * np.log(lengths) + draw.normal(scale=0.05, size=300)
    assert is_outlier(by_gene, lengths).sum() <= 1
    by_gene[[4, 9]] += [-0.5, 0.5]
    flags = is_outlier(by_gene, lengths)
    assert flags[4]
    assert not flags[9]
    assert flags.sum() <= 2
    assert not is_outlier(by_gene[:19] * 100, lengths[:19]).any()
    assert not is_outlier(np.linspace(-1, 1, 30), np.full(30, 7)).any()  # all of one length: no line


@pytest.mark.parametrize(
    ("arguments", "match"),
    [({"n_samples": 3}, "n_samples .*even.*got 3"), ({"layer": "blank"}, "1 of 25 cells .*vocabulary")],
)
def test_a_refused_call_leaves_all_as_it_was(subset, headed, hashed, arguments, match):
    data = subset.copy()
    data.layers["blank"] = data.X.toarray() * ((np.arange(25) > 0)[:, None] | (np.arange(60) > 54))
    was = hashed(data)
    with pytest.raises(ValueError, match=match):
        sd.tl.log_likelihood(data, headed, **arguments)
    assert hashed(data) == was


def test_models_without_a_state_to_read_run_their_transformer(subset, one, build):
    for model in (one, build(anchor="learned", state_head=True)):
        assert np.isfinite(scored(subset, model, n_samples=2)[KEY]).all()
