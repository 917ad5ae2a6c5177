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
def few(adata):
    return adata[:12].copy()


@pytest.fixture(scope="module")
def done(few, headed):
    return reconstructed(few, headed)


def test_what_is_documented_is_written(few, headed):
    data = few.copy()
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


def test_the_true_layers_are_the_cell_as_it_was(done, few, headed):
    """Of a cell longer than the model reads, the first so many genes; places are a ranking of them from 1."""
    found, values = layers(done), log_normalised(few)[0].toarray()
    most = headed.config.max_length
    for i in range(few.n_obs):
        true = found["_true"][i] > 0
        assert true.sum() == min(most, (values[i, :55] > 0).sum())
        np.testing.assert_allclose(found["_true"][i, true], values[i, true], rtol=1e-5)
        for ending in ("_rank", "_true_rank"):
            ranks = found[ending][i]
            assert sorted(ranks[ranks > 0]) == list(range(1, true.sum() + 1))
        assert not found["_masked"][i][~true].any()
        assert found["_masked"][i].sum() == max(1, round(0.3 * true.sum()))


@pytest.mark.parametrize("use_ranks", [False, True])
def test_visible_genes_never_change_and_only_measured_ones_appear(few, headed, use_ranks):
    found = layers(reconstructed(few, headed, use_ranks=use_ranks))
    shown = (found["_true_rank"] > 0) & ~found["_masked"]
    np.testing.assert_array_equal(found[""][shown], found["_true"][shown])
    if use_ranks:
        np.testing.assert_array_equal(found["_rank"][shown], found["_true_rank"][shown])
    assert not found["_rank"][:, 55:].any()  # five genes are not known to the model


@pytest.mark.parametrize("how", [{}, {"use_ranks": True}, {"use_ranks": True, "mask_free": "stream"}])
def test_with_nothing_masked_every_position_is_predicted(few, headed, how):
    """A copy would score 0, 1 and 1; the scores are those of what is written."""
    data = reconstructed(few, headed, mask_ratio=0, **how)
    found = layers(data)
    assert not found["_masked"].any()
    assert (found[""] != found["_true"]).any(axis=1).all()
    scores, notes = data.uns["scdiva"][KEY]["scores"], data.uns["scdiva"][KEY]
    assert notes["mask_free"] == how.get("mask_free", "folds")
    assert np.isnan([scores["masked_recall"], scores["marginal_recall"]]).all()
    recall, distance = [], []
    for true, made in zip(found["_true_rank"], found["_rank"], strict=True):
        there = (true > 0) & (made > 0)
        recall.append(there.sum() / (true > 0).sum())
        distance.append(np.abs(true - made)[there].mean())
    assert [scores["visible_recall"], scores["coverage"]] == pytest.approx([np.mean(recall)] * 2)
    assert scores["l_dist"] == pytest.approx(np.mean(distance))
    assert scores["l_dist"] > 0
    assert scores["bleu"] < 1


@pytest.mark.parametrize("use_ranks", [False, True])
def test_a_part_is_predicted_without_its_own_genes(few, headed, use_ranks):
    """Where the values of genes at masked positions change, so does nothing that is predicted at them."""
    length, row = 30, 4
    fill = of_single_cells(headed, 0.0, 1, use_ranks)
    drawn = torch.randperm(length, generator=sd._rng.step_generator(1, row, "reconstruct"))
    part = drawn.argsort() % N_PARTS
    assert torch.bincount(part).tolist() == [3] * N_PARTS
    tokens, values = torch.arange(3, 3 + length), torch.linspace(4.0, 0.5, length)
    made = []
    for genes in (tokens, torch.where(part == 0, tokens + 27, tokens)):  # the first part, so that no gene is taken yet
        bounds = torch.tensor([0, length], dtype=torch.int32)
        with torch.inference_mode():
            made.append(fill(headed, genes, values, bounds, torch.tensor([row])))
    if use_ranks:
        torch.testing.assert_close(made[0][part == 0], made[1][part == 0], rtol=0, atol=0)
    else:  # ranks are new: the likeliest three genes of the part are there in both
        assert len(set(made[0][:, 0].tolist()) & set(made[1][:, 0].tolist())) >= 3
    assert not torch.equal(made[0], made[1])


def test_several_reconstructions_are_those_of_several_calls(few, headed):
    several = reconstructed(few, headed, mask_ratio=[0, 0.3, 0.3], n_steps=[1, 1, 4], use_ranks=True)
    for number, (ratio, steps) in enumerate([(0, 1), (0.3, 1), (0.3, 4)]):
        one = reconstructed(few, headed, mask_ratio=ratio, n_steps=steps, use_ranks=True)
        for ending in DTYPES:
            assert (several.layers[f"{KEY}_{number + 1}{ending}"] != one.layers[KEY + ending]).nnz == 0
        mine, theirs = several.uns["scdiva"][f"{KEY}_{number + 1}"], one.uns["scdiva"][KEY]
        assert (mine["mask_ratio"], mine["n_steps"]) == (ratio, steps)
        assert mine["scores"] == pytest.approx(theirs["scores"], nan_ok=True)
    assert KEY not in several.layers
    fig = sd.pl.reconstruction(several, return_fig=True)
    titles = [ax.get_title().split("\n")[0] for ax in fig.axes[:3]]
    assert titles == ["nothing masked", "30% masked, 1 step", "30% masked, 4 steps"]
    plt.close(fig)


def test_a_cell_depends_neither_on_the_others_nor_on_the_order_of_genes(few, headed, done):
    part = reconstructed(few[:5].copy(), headed)
    order = np.random.default_rng(0).permutation(few.n_vars)
    turned = reconstructed(few[:, order].copy(), headed)
    for ending, whole in layers(done).items():
        np.testing.assert_array_equal(layers(part)[ending], whole[:5])
        np.testing.assert_array_equal(layers(turned)[ending], whole[:, order])


@settings(max_examples=25, deadline=None)
@given(
    plan=st.tuples(st.floats(0.001, 1), st.integers(1, 6)) | st.just((0, 1)),
    use_ranks=st.booleans(),
    rng=st.integers(0, 99),
)
def test_no_sample_is_malformed(few, headed, plan, **how):
    """A place has one gene that is measured, no gene has two places, and no value is negative or not finite."""
    data = reconstructed(few[:3].copy(), headed, mask_ratio=plan[0], n_steps=plan[1], **how)
    found = layers(data)
    for i in range(3):
        length = (found["_true_rank"][i] > 0).sum()
        assert sorted(found["_rank"][i][found["_rank"][i] > 0]) == list(range(1, length + 1))
    stored = data.layers[KEY]
    assert stored.nnz == data.layers[KEY + "_rank"].nnz
    assert np.isfinite(stored.data).all()
    assert (stored.data >= 0).all()
    assert not found["_rank"][:, 55:].any()


@pytest.mark.parametrize("n_steps", [1, 4])
def test_without_ranks_nothing_depends_on_the_ranks_of_masked_genes(headed, n_steps):
    """Two cells that show the same genes and hide others, as many, at other ranks, are reconstructed alike."""
    length = 30
    visible, values = np.arange(3, 24), np.linspace(4.0, 0.5, 21, dtype=np.float32)
    found = {}
    for use_ranks in (False, True):
        fill = of_single_cells(headed, 0.3, n_steps, use_ranks)
        made = []
        for row, others in ((0, np.arange(24, 33)), (1, np.arange(40, 49))):
            bounds, at = torch.tensor([0, length], dtype=torch.int32), torch.tensor([row])
            probe = fill(headed, torch.arange(3, 3 + length), torch.ones(length), bounds, at)
            hidden = probe[:, 2].bool().numpy()
            tokens, shown = np.empty(length, dtype=np.int64), np.empty(length, dtype=np.float32)
            tokens[~hidden], shown[~hidden] = visible, values
            tokens[hidden], shown[hidden] = others, 1.0
            with torch.inference_mode():
                made.append(fill(headed, torch.from_numpy(tokens), torch.from_numpy(shown), bounds, at)[:, :2])
        found[use_ranks] = made
    torch.testing.assert_close(found[False][0], found[False][1], rtol=0, atol=0)
    assert not torch.equal(found[True][0], found[True][1])


def test_without_ranks_the_cell_is_ranked_by_its_own_values(few, headed):
    """Visible genes keep their values and their order; what compares rank by rank is not defined."""
    data = reconstructed(few, headed)
    found, scores = layers(data), data.uns["scdiva"][KEY]["scores"]
    shown = (found["_true_rank"] > 0) & ~found["_masked"]
    recall = []
    for i in range(data.n_obs):
        genes = np.flatnonzero(shown[i])
        assert (np.argsort(found["_rank"][i, genes]) == np.argsort(found["_true_rank"][i, genes])).all()
        recall.append((found["_rank"][i, found["_masked"][i]] > 0).mean())
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
def test_a_refused_call_leaves_all_as_it_was(few, headed, hashed, arguments, match):
    data = few.copy()
    data.layers["blank"] = sp.csr_matrix(data.X.toarray() * (np.arange(12) > 0)[:, None])
    was = hashed(data)
    with pytest.raises(ValueError, match=match):
        sd.tl.reconstruct(data, headed, **arguments)
    assert hashed(data) == was


def test_a_model_without_a_state_head_keeps_ranks(few, one, hashed):
    data, was = few.copy(), hashed(few)
    with pytest.raises(ValueError, match=r"state_head=False.*leave out use_ranks=False"):
        sd.tl.reconstruct(data, one, use_ranks=False)
    assert hashed(data) == was
    assert reconstructed(few, one).uns["scdiva"][KEY]["use_ranks"] is True


def test_the_baseline_knows_the_other_cells_alone(few, headed, done):
    token = column_tokens(few.var, headed.vocabulary)
    by_token = np.argsort(token)[(token < 0).sum() :]  # of genes equally frequent the first is taken
    found = {ending: layer[:, by_token] for ending, layer in layers(done).items()}
    there, recall = found["_true_rank"] > 0, []
    for i, hidden in enumerate(found["_masked"]):
        often = np.delete(there, i, axis=0).sum(axis=0)
        recall.append(sd.metrics.marginal_recall(np.flatnonzero(hidden), np.flatnonzero(there[i] & ~hidden), often))
    assert done.uns["scdiva"][KEY]["scores"]["marginal_recall"] == pytest.approx(np.mean(recall))


def test_without_ranks_a_query_head_reads_the_other_cells(adata, querying):
    whole = adata[:40].copy()
    before = reconstructed(whole, querying)
    values = before.layers[KEY]
    # a cell that is asked about is not among those that it is predicted from
    fewer = whole.copy()
    hidden = before.layers[KEY + "_masked"].toarray()[5]
    changed = fewer.X.toarray()
    changed[6:] = changed[:-6]
    fewer.X = changed
    after = reconstructed(fewer, querying)
    assert (after.layers[KEY + "_masked"].toarray()[5] == hidden).all()
    assert (values[5] != after.layers[KEY][5]).nnz
    # with ranks the transformer predicts from the cell alone
    for use_ranks, few in ((True, whole[:20].copy()), (False, whole[:12].copy())):
        same = few.copy()
        same.X = sp.csr_matrix(np.vstack([few.X.toarray()[:1], few.X.toarray()[::-1][:-1]]))
        one, two = (reconstructed(cells, querying, use_ranks=use_ranks).layers[KEY][0] for cells in (few, same))
        assert not (one != two).nnz
