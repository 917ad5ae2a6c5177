"""Reconstruction, generation and imputation by models that predict through their transformer alone."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import scdiva as sd
from scdiva._constants import N_SPECIAL
from scdiva.data.batch import read_cells
from scdiva.data.cells import log_normalised, open_cells
from scdiva.diffusion.sampler import predict_in_parts
from scdiva.generation import imputation, sampling
from scdiva.generation.sampling import denoiser_of

KINDS = {
    "learned": {"anchor": "learned"},
    "residual": {"anchor": "encoder", "anchor_residual": True},
    "both": {"anchor": "learned", "state_head": True, "state_rank": 6},
}
"""As in the paper; with a set encoder and no state head; with a state head that reads the transformer's state."""
CALLS = {
    "masked": lambda cells, model, **how: reconstructed(cells, model, **how),
    "steps": lambda cells, model, **how: reconstructed(cells, model, n_steps=3, **how),
    "folds": lambda cells, model, **how: reconstructed(cells, model, mask_ratio=0, **how),
    "stream": lambda cells, model, **how: reconstructed(cells, model, mask_ratio=0, mask_free="stream", **how),
    "imputed": lambda cells, model, **how: imputed(cells, model, **how),
    "given genes": lambda cells, model, **how: drawn(cells, model, **how),
    "given a state": lambda cells, model, **how: drawn(cells, model, prompt="state", **how),
    "given nothing": lambda cells, model, **how: drawn(cells, model, from_state=False, **how),
}


def reconstructed(cells, model, **how):
    done = sd.tl.reconstruct(cells, model, copy=True, **{"rng": 3} | how)
    return np.concatenate([done.layers[f"scdiva_reconstructed{end}"].toarray() for end in ("", "_rank")])


def imputed(cells, model, **how):
    done = sd.tl.impute(cells, model=model, copy=True, **{"rng": 3} | how)
    return np.concatenate([done.layers["scdiva_imputed"], done.layers["scdiva_imputed_sd"]])[:, :55]


def drawn(cells, model, n_cells=4, **how):
    generated = sd.tl.generate(cells, n_cells, model, **{"rng": 3, "n_steps": 3} | how)
    return np.concatenate([generated.X.toarray(), generated.layers["counts"].toarray()])


@pytest.fixture(scope="module")
def sample(adata):
    return adata[:20].copy()


@pytest.fixture(scope="module", params=KINDS)
def model(request, build):
    return build(**KINDS[request.param])


@pytest.mark.parametrize("call", CALLS)
def test_blocks_are_run(sample, model, call):
    """With other weights in the blocks the result is another one, and with broken ones an error or none."""
    noised = copy.deepcopy(model)
    with torch.no_grad():
        for number, weight in enumerate(noised.blocks.parameters()):
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
    one, noised_result = CALLS[call](sample, model), CALLS[call](sample, noised)
    assert np.isfinite(one).all()
    assert (one != noised_result).mean() > 0.01


@pytest.mark.parametrize("call", CALLS)
def test_threads_change_nothing_and_the_seed_changes_it(sample, build, call):
    model = build(**KINDS["learned"])
    one = CALLS[call](sample, model)
    with sd.settings.override(threads=3):
        np.testing.assert_array_equal(one, CALLS[call](sample, model))
    if call != "stream":  # nothing is drawn
        assert (one != CALLS[call](sample, model, rng=4)).any()


def test_masked_genes_keep_their_ranks(sample, model):
    done = sd.tl.reconstruct(sample, model, copy=True, rng=3)
    rank, true, masked = (
        done.layers[f"scdiva_reconstructed{end}"].toarray() for end in ("_rank", "_true_rank", "_masked")
    )
    visible = (true > 0) & ~masked
    np.testing.assert_array_equal(rank[visible], true[visible])
    for cell in range(sample.n_obs):
        hidden = set(true[cell][masked[cell]])
        assert set(rank[cell][(rank[cell] > 0) & ~visible[cell]]) == hidden
    assert np.isfinite(done.uns["scdiva"]["scdiva_reconstructed"]["scores"]["masked_match"])


def test_a_cell_depends_on_no_other(sample, build):
    model = build(**KINDS["learned"])
    for how in ({}, {"mask_ratio": 0}, {"mask_ratio": 0, "mask_free": "stream"}):
        all_cells, part = reconstructed(sample, model, **how), reconstructed(sample[:5].copy(), model, **how)
        np.testing.assert_array_equal(np.concatenate([half[:5] for half in np.split(all_cells, 2)]), part)


def test_the_value_at_each_rank_is_read_off_the_stream(sample, build):
    """With one pass over the unmasked cell: the value head at each position, whatever the gene."""
    model = build(**KINDS["learned"])
    done = sd.tl.reconstruct(sample, model, mask_ratio=0, mask_free="stream", copy=True)
    source = open_cells(sample, model.vocabulary, max_length=40, entropy_floor=model.config.entropy_floor)
    for _, (indptr, tokens, values) in source.windows(4096):
        part = slice(indptr[2], indptr[3])
        inputs = torch.tensor(tokens[part].astype(np.int64)), torch.tensor(values[part])
        out = model(*inputs, torch.tensor([0, part.stop - part.start], dtype=torch.int32))
        expected = model.heads.value(out.hidden).squeeze(-1).clamp_min(0).detach().numpy()
    rank, decoded = (done.layers[f"scdiva_reconstructed{end}"].toarray()[2] for end in ("_rank", ""))
    genes = np.flatnonzero(rank)
    np.testing.assert_allclose(decoded[genes[np.argsort(rank[genes])]], expected, rtol=1e-4, atol=1e-5)


# imputation


def test_imputed_genes_are_the_same_alone_and_among_others(sample, model):
    all_genes = imputed(sample, model)
    for columns in ([12], [40, 3]):
        done = sd.tl.impute(sample, list(sample.var_names[columns]), model, rng=3, copy=True)
        mean, spread = np.split(all_genes[:, columns], 2)
        np.testing.assert_allclose(done.obsm["scdiva_imputed"], mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(done.obsm["scdiva_imputed_sd"], spread, rtol=1e-5, atol=1e-6)


def test_observed_values_are_kept_and_counts_add_up(adata, model):
    values = log_normalised(adata)[0].toarray()[:, :55]
    detected = values > 0
    with_observed, spread = np.split(imputed(adata, model), 2)
    np.testing.assert_allclose(with_observed[detected], values[detected], rtol=1e-5)
    assert (spread[detected] == 0).all()
    free, free_spread = np.split(imputed(adata, model, keep_observed=False), 2)
    np.testing.assert_array_equal(free[~detected], with_observed[~detected])
    assert (free_spread > 0).all()
    # up to a tenth or two of the logarithm: of genes in few cells, the model's own expectation counts for more
    ratio = np.log(np.expm1(free).sum(axis=0) / np.expm1(values).sum(axis=0))
    assert np.abs(ratio[detected.sum(axis=0) > 60]).max() < 0.5


def test_a_gene_does_not_influence_its_own_imputation_where_it_was_detected(sample, build):
    """Its own part is masked: its value changes nothing of what is predicted there."""
    model = build(**KINDS["learned"])
    length, genes = 30, torch.arange(3, 58)
    tokens, values, part = torch.arange(3, 33), torch.linspace(4, 0.5, 30), torch.arange(length) % 4
    results = []
    for inputs in (values, values + 0.4 * (part == 1)):
        denoise = denoiser_of(model, genes=genes)
        with torch.inference_mode():
            predicted = predict_in_parts(denoise, tokens, inputs, part)
        results.append(torch.stack(imputation.chance_and_value(predicted, tokens - N_SPECIAL)))
    own_part = part == 1
    torch.testing.assert_close(results[0][:, :30][:, own_part], results[1][:, :30][:, own_part], rtol=0, atol=0)
    assert not torch.allclose(results[0][:, :30][:, ~own_part], results[1][:, :30][:, ~own_part])
    assert not torch.allclose(results[0][:, 30:], results[1][:, 30:])


# generation


def rows_of(generated, adata):
    return adata.obs_names.get_indexer(generated.obs["scdiva_source"])


def test_a_cell_drawn_is_laid_out_as_by_the_state_head(adata, model, headed):
    generated = sd.tl.generate(adata, 3, model, groupby="cell_type", n_steps=4, rng=3)
    by_state_head = sd.tl.generate(adata, 3, headed, groupby="cell_type", rng=3)
    assert generated.shape == by_state_head.shape
    assert list(generated.obs) == list(by_state_head.obs)
    assert list(generated.layers) == list(by_state_head.layers)
    assert generated.uns["scdiva"]["generate"].keys() == by_state_head.uns["scdiva"]["generate"].keys()
    assert (generated.uns["scdiva"]["generate"]["prompt"], generated.uns["scdiva"]["generate"]["n_steps"]) == (
        "genes",
        4,
    )
    counts, x, rows = generated.layers["counts"].toarray(), generated.X.toarray(), rows_of(generated, adata)
    totals = np.expm1(log_normalised(adata)[0][:, :55].toarray()).sum(1)[rows]
    np.testing.assert_allclose(x, np.log1p(totals[:, None] * counts / counts.sum(1, keepdims=True)), rtol=1e-4)
    lengths = (adata.X[rows][:, :55].toarray() > 0).sum(1)
    np.testing.assert_array_equal((x > 0).sum(1), np.minimum(lengths, 40))
    assert (adata.obs["cell_type"].to_numpy()[rows] == generated.obs["cell_type"].to_numpy()).all()


def test_fixed_genes_have_their_values_in_every_cell(adata, model):
    gene, absent_gene = adata.var_names[[3, 7]]
    for how in ({}, {"prompt": "state"}, {"from_state": False}):
        x = sd.tl.generate(adata, 6, model, fixed={gene: 2.0, absent_gene: 0}, n_steps=3, rng=3, **how).to_df()
        np.testing.assert_allclose(x[gene], 2.0, rtol=1e-6)
        assert (x[absent_gene] == 0).all()


def test_a_prompt_has_its_scores_order_and_a_share_of_each_cell():
    draw = np.random.default_rng(0)
    denominator = draw.uniform(0.5, 2, 100)

    def cell(tokens):
        values = draw.uniform(0.2, 4, len(tokens)).astype(np.float32)
        order = np.argsort(-values / denominator[tokens])
        return tokens[order], values[order]

    first, second = cell(np.arange(3, 43)), cell(np.arange(50, 70))
    tokens, values, rank = sampling.prompt_of(first, second, 0.25, 0.4, {80: 1.0, 90: 0.0}, denominator, draw)
    assert (np.diff(values / denominator[tokens]) <= 0).all()
    assert (np.diff(rank) >= 0).all()
    assert (np.isin(tokens, first[0]).sum(), np.isin(tokens, second[0]).sum()) == (12, 2)
    assert 80 in tokens
    assert 90 not in tokens
    # of one cell alone, each gene stands where it stood
    tokens, values, rank = sampling.prompt_of(first, first, 0.0, 0.4, {}, denominator, draw)
    at = sampling.positions_of(rank, 40)
    np.testing.assert_array_equal(first[0][at], tokens)
    np.testing.assert_array_equal(first[1][at], values)
    # a fixed gene stands where its score would
    value = np.float32(first[1][9] / denominator[first[0][9]] * denominator[80] * 0.999)
    _, _, rank = sampling.prompt_of(first, first, 0.0, 0.0, {80: value}, denominator, draw)
    assert sampling.positions_of(rank, 40).tolist() == [10]


def test_scores_of_drawn_values_fall_with_the_rank_and_shown_ones_stay():
    draw = np.random.default_rng(0)
    denominator, visible = draw.uniform(0.5, 2, 50), draw.random(50) < 0.3
    true = np.linspace(3, 0.3, 50) * denominator
    values = np.where(visible, true, true + draw.normal(0, 0.4, 50)).clip(0.05)
    ordered = sampling.values_in_order(values, visible, denominator)
    np.testing.assert_array_equal(ordered[visible], values[visible])
    assert (np.diff(ordered / denominator) <= 1e-4).all()
    assert np.abs(ordered - true).mean() < 0.5 * np.abs(values - true).mean()
    assert (ordered > 0).all()


def test_the_spread_of_values_is_that_around_what_is_predicted(build, adata):
    """A value head that always says 2: genes have the root mean squared difference from it."""
    model = copy.deepcopy(build(**KINDS["learned"]))
    with torch.no_grad():
        for weight in model.heads.value.parameters():
            weight.zero_()
        [*model.heads.value.parameters()][-1].fill_(2.0)
    cells, _ = read_cells(open_cells(adata, model), np.zeros(adata.n_obs, dtype=np.int64), all_genes=True)
    spread = sampling.value_spread(model, cells, 0)
    values = cells.matrix(int(cells.measured.max()) + 1)[:, cells.measured].toarray()
    plain = np.sqrt([np.square(column[column > 0] - 2).mean() for column in values.T])
    assert np.corrcoef(spread, plain)[0, 1] > 0.8
    assert abs(spread.mean() / plain.mean() - 1) < 0.15


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"prompt": "none"}, "prompt"),
        ({"prompt": "genes", "from_state": False}, "from_state=False gives no source: leave out prompt"),
    ],
)
def test_what_generation_refuses(adata, build, hashed, how, match):
    was = hashed(adata)
    with pytest.raises(ValueError, match=match):
        sd.tl.generate(adata, 2, build(**KINDS["learned"]), **how)
    assert hashed(adata) == was
