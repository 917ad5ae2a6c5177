"""`tl.reconstruct`: what is written, what stays, what is refused, and that no sample is malformed."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scdiva as sd
from scdiva.data.cells import log_normalised
from scdiva.data.genes import column_tokens
from scdiva.generation.reconstruction import N_PARTS, Reconstruction
from scdiva.tokenizer.serialize import score_denominator

KEY = "scdiva_reconstructed"
DTYPES = {"": np.float32, "_rank": np.int32, "_true": np.float32, "_true_rank": np.int32, "_masked": bool}


def reconstructed(adata, model, **arguments):
    """Reconstruct a copy; the copy. Precision is named, since fixtures are made before the settings of a test hold."""
    return sd.tl.reconstruct(adata, model, copy=True, **{"rng": 3, "precision": "fp32"} | arguments)


def of_single_cells(model, mask_ratio, n_steps, by_rank):
    genes = torch.arange(3, 58)
    denominator = torch.from_numpy(score_denominator(model.vocabulary.entropy, model.config.entropy_floor))
    return Reconstruction(genes, denominator, mask_ratio, n_steps, by_rank, mask_free="folds", seed=1)


def layers(adata, key=KEY):
    return {ending: adata.layers[key + ending].toarray() for ending in DTYPES}


@pytest.fixture(scope="module")
def subset(adata):
    return adata[:12].copy()


@pytest.fixture(scope="module")
def done(subset, headed):
    return reconstructed(subset, headed)


def test_what_is_documented_is_written(subset, headed):
    data = subset.copy()
    assert sd.tl.reconstruct(data, headed, mask_ratio=0.4, n_steps=2, rng=3) is None
    for ending, dtype in DTYPES.items():
        layer = data.layers[KEY + ending]
        assert isinstance(layer, sp.csr_matrix)
        assert layer.dtype == dtype
        assert layer.has_sorted_indices
    notes = data.uns["scdiva"][KEY]
    assert (notes["mask_ratio"], notes["n_steps"], notes["use_ranks"]) == (0.4, 2, False)
    assert (notes["input"], notes["model"]) == ("counts", "ScDiVa")
    assert {"masked_recall", "marginal_recall", "l_dist", "bleu", "n_masked"} <= set(notes["scores"])


def test_the_true_layers_are_the_cell_as_it_was(done, subset, headed):
    """Of a cell longer than the model reads, the first so many genes; places are a ranking of them from 1."""
    arrays, values = layers(done), log_normalised(subset)[0].toarray()
    limit = headed.config.max_length
    for i in range(subset.n_obs):
        true = arrays["_true"][i] > 0
        assert true.sum() == min(limit, (values[i, :55] > 0).sum())
        np.testing.assert_allclose(arrays["_true"][i, true], values[i, true], rtol=1e-5)
        for ending in ("_rank", "_true_rank"):
            ranks = arrays[ending][i]
            assert sorted(ranks[ranks > 0]) == list(range(1, true.sum() + 1))
        assert not arrays["_masked"][i][~true].any()
        assert arrays["_masked"][i].sum() == max(1, round(0.3 * true.sum()))


@pytest.mark.parametrize("use_ranks", [False, True])
def test_visible_genes_never_change_and_only_measured_ones_appear(subset, headed, use_ranks):
    arrays = layers(reconstructed(subset, headed, use_ranks=use_ranks))
    visible = (arrays["_true_rank"] > 0) & ~arrays["_masked"]
    np.testing.assert_array_equal(arrays[""][visible], arrays["_true"][visible])
    if use_ranks:
        np.testing.assert_array_equal(arrays["_rank"][visible], arrays["_true_rank"][visible])
    assert not arrays["_rank"][:, 55:].any()  # five genes are not known to the model


@pytest.mark.parametrize("how", [{}, {"use_ranks": True}, {"use_ranks": True, "mask_free": "stream"}])
def test_with_nothing_masked_every_position_is_predicted(subset, headed, how):
    """A copy would score 0, 1 and 1; the scores are those of what is written."""
    data = reconstructed(subset, headed, mask_ratio=0, **how)
    arrays = layers(data)
    assert not arrays["_masked"].any()
    assert (arrays[""] != arrays["_true"]).any(axis=1).all()
    scores, notes = data.uns["scdiva"][KEY]["scores"], data.uns["scdiva"][KEY]
    assert notes["mask_free"] == how.get("mask_free", "folds")
    assert np.isnan([scores["masked_recall"], scores["marginal_recall"]]).all()
    recall, distance = [], []
    for true, predicted in zip(arrays["_true_rank"], arrays["_rank"], strict=True):
        in_both = (true > 0) & (predicted > 0)
        recall.append(in_both.sum() / (true > 0).sum())
        distance.append(np.abs(true - predicted)[in_both].mean())
    assert [scores["visible_recall"], scores["coverage"]] == pytest.approx([np.mean(recall)] * 2)
    assert scores["l_dist"] == pytest.approx(np.mean(distance))
    assert scores["l_dist"] > 0
    assert scores["bleu"] < 1


@pytest.mark.parametrize("use_ranks", [False, True])
def test_a_part_is_predicted_without_its_own_genes(subset, headed, use_ranks):
    """Predictions at masked positions do not depend on the values of the genes at these positions."""
    length, row = 30, 4
    fill = of_single_cells(headed, 0.0, 1, use_ranks)
    drawn = torch.randperm(length, generator=sd._rng.step_generator(1, row, "reconstruct"))
    part = drawn.argsort() % N_PARTS
    assert torch.bincount(part).tolist() == [3] * N_PARTS
    tokens, values = torch.arange(3, 3 + length), torch.linspace(4.0, 0.5, length)
    outputs = []
    for genes in (tokens, torch.where(part == 0, tokens + 27, tokens)):  # the first part, so that no gene is taken yet
        bounds = torch.tensor([0, length], dtype=torch.int32)
        with torch.inference_mode():
            outputs.append(fill(headed, genes, values, bounds, torch.tensor([row])))
    if use_ranks:
        torch.testing.assert_close(outputs[0][part == 0], outputs[1][part == 0], rtol=0, atol=0)
    else:  # ranks are new: the likeliest three genes of the part are there in both
        assert len(set(outputs[0][:, 0].tolist()) & set(outputs[1][:, 0].tolist())) >= 3
    assert not torch.equal(outputs[0], outputs[1])


def test_several_reconstructions_are_those_of_several_calls(subset, headed):
    combined = reconstructed(subset, headed, mask_ratio=[0, 0.3, 0.3], n_steps=[1, 1, 4], use_ranks=True)
    for number, (ratio, steps) in enumerate([(0, 1), (0.3, 1), (0.3, 4)]):
        one = reconstructed(subset, headed, mask_ratio=ratio, n_steps=steps, use_ranks=True)
        for ending in DTYPES:
            assert (combined.layers[f"{KEY}_{number + 1}{ending}"] != one.layers[KEY + ending]).nnz == 0
        notes, single_notes = combined.uns["scdiva"][f"{KEY}_{number + 1}"], one.uns["scdiva"][KEY]
        assert (notes["mask_ratio"], notes["n_steps"]) == (ratio, steps)
        assert notes["scores"] == pytest.approx(single_notes["scores"], nan_ok=True)
    assert KEY not in combined.layers
    fig = sd.pl.reconstruction(combined, return_fig=True)
    titles = [ax.get_title().split("\n")[0] for ax in fig.axes[:3]]
    assert titles == ["nothing masked", "30% masked, 1 step", "30% masked, 4 steps"]
    plt.close(fig)


def test_a_cell_depends_neither_on_the_others_nor_on_the_order_of_genes(subset, headed, done):
    part = reconstructed(subset[:5].copy(), headed)
    order = np.random.default_rng(0).permutation(subset.n_vars)
    turned = reconstructed(subset[:, order].copy(), headed)
    for ending, layer in layers(done).items():
        np.testing.assert_array_equal(layers(part)[ending], layer[:5])
        np.testing.assert_array_equal(layers(turned)[ending], layer[:, order])


@settings(max_examples=25, deadline=None)
@given(
    plan=st.tuples(st.floats(0.001, 1), st.integers(1, 6)) | st.just((0, 1)),
    use_ranks=st.booleans(),
    rng=st.integers(0, 99),
)
def test_no_sample_is_malformed(subset, headed, plan, **how):
    """A place has one gene that is measured, no gene has two places, and no value is negative or not finite."""
    data = reconstructed(subset[:3].copy(), headed, mask_ratio=plan[0], n_steps=plan[1], **how)
    arrays = layers(data)
    for i in range(3):
        length = (arrays["_true_rank"][i] > 0).sum()
        assert sorted(arrays["_rank"][i][arrays["_rank"][i] > 0]) == list(range(1, length + 1))
    stored = data.layers[KEY]
    assert stored.nnz == data.layers[KEY + "_rank"].nnz
    assert np.isfinite(stored.data).all()
    assert (stored.data >= 0).all()
    assert not arrays["_rank"][:, 55:].any()


@pytest.mark.parametrize("n_steps", [1, 4])
def test_without_ranks_nothing_depends_on_the_ranks_of_masked_genes(headed, n_steps):
    """Two cells that show the same genes and hide others, as many, at other ranks, are reconstructed alike."""
    length = 30
    visible, values = np.arange(3, 24), np.linspace(4.0, 0.5, 21, dtype=np.float32)
    by_ranks = {}
    for use_ranks in (False, True):
        fill = of_single_cells(headed, 0.3, n_steps, use_ranks)
        outputs = []
        for row, hidden_genes in ((0, np.arange(24, 33)), (1, np.arange(40, 49))):
            bounds, at = torch.tensor([0, length], dtype=torch.int32), torch.tensor([row])
            probe = fill(headed, torch.arange(3, 3 + length), torch.ones(length), bounds, at)
            hidden = probe[:, 2].bool().numpy()
            tokens, gene_values = np.empty(length, dtype=np.int64), np.empty(length, dtype=np.float32)
            tokens[~hidden], gene_values[~hidden] = visible, values
            tokens[hidden], gene_values[hidden] = hidden_genes, 1.0
            with torch.inference_mode():
                outputs.append(fill(headed, torch.from_numpy(tokens), torch.from_numpy(gene_values), bounds, at)[:, :2])
        by_ranks[use_ranks] = outputs
    torch.testing.assert_close(by_ranks[False][0], by_ranks[False][1], rtol=0, atol=0)
    assert not torch.equal(by_ranks[True][0], by_ranks[True][1])


def test_without_ranks_the_cell_is_ranked_by_its_own_values(subset, headed):
    """Visible genes keep their values and their order; what compares rank by rank is not defined."""
    data = reconstructed(subset, headed)
    arrays, scores = layers(data), data.uns["scdiva"][KEY]["scores"]
    visible = (arrays["_true_rank"] > 0) & ~arrays["_masked"]
    recall = []
    for i in range(data.n_obs):
        genes = np.flatnonzero(visible[i])
        assert (np.argsort(arrays["_rank"][i, genes]) == np.argsort(arrays["_true_rank"][i, genes])).all()
        recall.append((arrays["_rank"][i, arrays["_masked"][i]] > 0).mean())
    assert scores["masked_recall"] == pytest.approx(np.mean(recall))
    assert scores["visible_recall"] == 1
    assert np.isnan([scores["masked_match"], scores["masked_value_spearman"], scores["visible_match"]]).all()
    assert np.isfinite([scores["l_dist"], scores["bleu"], scores["value_spearman"]]).all()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"mask_ratio": np.nan}, "mask_ratio must be in"),
        ({"mask_ratio": [0.1, 2]}, r"mask_ratio must be in \[0, 1\], got 2"),
        ({"mask_ratio": [0.1, 0.2], "n_steps": [1, 2, 3]}, "mask_ratio has 2 values and n_steps 3"),
        ({"n_steps": []}, "n_steps 0: give one value each"),
        ({"mask_ratio": 0, "n_steps": 4}, "pass n_steps=1, not 4"),
        ({"mask_ratio": 0, "mask_free": "stream"}, "pass use_ranks=True"),
        ({"layer": "blank"}, "1 of 12 cells .*counts .*cell0"),
    ],
)
def test_a_refused_call_leaves_all_as_it_was(subset, headed, hashed, arguments, match):
    data = subset.copy()
    data.layers["blank"] = sp.csr_matrix(data.X.toarray() * (np.arange(12) > 0)[:, None])
    was = hashed(data)
    with pytest.raises(ValueError, match=match):
        sd.tl.reconstruct(data, headed, **arguments)
    assert hashed(data) == was


def test_a_model_without_a_state_head_keeps_ranks(subset, one, hashed):
    data, was = subset.copy(), hashed(subset)
    with pytest.raises(ValueError, match=r"state_head=False.*leave out use_ranks=False"):
        sd.tl.reconstruct(data, one, use_ranks=False)
    assert hashed(data) == was
    assert reconstructed(subset, one).uns["scdiva"][KEY]["use_ranks"] is True


def test_the_baseline_knows_the_other_cells_alone(subset, headed, done):
    token = column_tokens(subset.var, headed.vocabulary)
    by_token = np.argsort(token)[(token < 0).sum() :]  # of genes equally frequent the first is taken
    arrays = {ending: layer[:, by_token] for ending, layer in layers(done).items()}
    expressed, recall = arrays["_true_rank"] > 0, []
    for i, hidden in enumerate(arrays["_masked"]):
        often = np.delete(expressed, i, axis=0).sum(axis=0)
        recall.append(sd.metrics.marginal_recall(np.flatnonzero(hidden), np.flatnonzero(expressed[i] & ~hidden), often))
    assert done.uns["scdiva"][KEY]["scores"]["marginal_recall"] == pytest.approx(np.mean(recall))


def test_without_ranks_a_query_head_reads_the_other_cells(adata, querying):
    full = adata[:40].copy()
    before = reconstructed(full, querying)
    values = before.layers[KEY]
    # a cell that is asked about is not among those that it is predicted from
    fewer = full.copy()
    hidden = before.layers[KEY + "_masked"].toarray()[5]
    changed = fewer.X.toarray()
    changed[6:] = changed[:-6]
    fewer.X = changed
    after = reconstructed(fewer, querying)
    assert (after.layers[KEY + "_masked"].toarray()[5] == hidden).all()
    assert (values[5] != after.layers[KEY][5]).nnz
    # with ranks the transformer predicts from the cell alone
    for use_ranks, subset in ((True, full[:20].copy()), (False, full[:12].copy())):
        same = subset.copy()
        same.X = sp.csr_matrix(np.vstack([subset.X.toarray()[:1], subset.X.toarray()[::-1][:-1]]))
        one, two = (reconstructed(cells, querying, use_ranks=use_ranks).layers[KEY][0] for cells in (subset, same))
        assert not (one != two).nnz
