"""The methods of `tl.grn` beside formulas: numpy's correlation, a loop over attention, sklearn's ridge regression."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from sklearn.linear_model import Ridge

import scdiva as sd
from scdiva._constants import N_SPECIAL
from scdiva.models.inference import read_out
from scdiva.networks.methods import PRIOR_CELLS, RIDGE, attention_ranks, whitened
from scdiva.tokenizer.vocabulary import Vocabulary


@pytest.fixture
def cells(adata):
    cells = adata[:45].copy()
    cells.obs["kind"] = np.array(["A", "B"])[np.arange(45) % 7 % 2]
    return cells


@pytest.fixture
def columns(cells, one):
    """Column numbers of the genes in the vocabularies of the models."""
    return np.flatnonzero(one.vocabulary.match(list(cells.var_names)).tokens >= 0)


def expression(cells, rows=slice(None)) -> np.ndarray:
    counts = np.asarray(sp.csr_matrix(cells.X).todense(), dtype=np.float64)
    return np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True))[rows]


def standardised(matrix):
    return (matrix - matrix.mean()) / matrix.std()


def cosines(model) -> np.ndarray:
    """Of the genes' whitened embeddings: inner products by the inverse of the covariance."""
    table = model.embedding.gene.weight.detach().double().numpy()[N_SPECIAL:]
    table = table - table.mean(axis=0)
    inner = table @ np.linalg.pinv(table.T @ table) @ table.T
    return inner / np.sqrt(np.outer(np.diag(inner), np.diag(inner)))


@pytest.fixture
def by_hand(columns, ranked):
    """All genes × all genes; NaN where one is unknown or in no cell, and for a gene with itself."""

    def off_diagonal(cells, matrix, subset):
        result = np.full((cells.n_vars, cells.n_vars), np.nan)
        result[np.ix_(subset, subset)] = matrix
        np.fill_diagonal(result, np.nan)
        return result

    def correlation(cells, model, rows=slice(None)):
        values = expression(cells, rows)
        varying = columns[values[:, columns].std(axis=0) > 0]
        return off_diagonal(cells, np.corrcoef(values[:, varying].T), varying)

    def embedding(cells, model, rows=slice(None), subset=columns):
        """Mean of the likeness of embeddings, and the covariance of what a regression on the states predicts."""
        genes = model.vocabulary.match(list(cells.var_names[subset])).tokens - N_SPECIAL
        values = expression(cells, rows)[:, subset]
        states = sd.tl.embed(cells, model, copy=True).obsm["X_scdiva"].astype(np.float64)[rows]
        values = (values - values.mean(axis=0)) / values.std(axis=0)
        largest = np.linalg.eigvalsh(np.cov(states.T, bias=True)).max()
        predicted = Ridge(alpha=len(states) * RIDGE * largest).fit(states, values).predict(states)
        scores = standardised(cosines(model)[np.ix_(genes, genes)]), standardised(np.cov(predicted.T, bias=True))
        return off_diagonal(cells, np.mean(scores, axis=0), subset)

    def attention(cells, model, rows=slice(None), layers=None, heads=None):
        """Excess rank of sources (keys) among the genes that targets (queries) attend to."""
        of_target = [[] for _ in range(cells.n_vars)]  # for each cell that holds it, a rank of every source
        of_any, row_numbers = [], set(np.arange(cells.n_obs)[rows])
        for row, (held, tokens, values) in enumerate(ranked(cells, model)):
            if row not in row_numbers:
                continue
            with torch.no_grad():
                weights = list(model.attention_weights(tokens, values, torch.tensor([0, len(held)], dtype=torch.int32)))
            chosen = [w.double().numpy() for layer, _, w in weights if layers is None or layer in layers]
            mean = np.mean([w[slice(None) if heads is None else heads] for w in chosen], axis=(0, 1))
            mean = mean[1:, 1:]  # without [LAT]
            for query, target in enumerate(held):
                ranks = np.zeros(cells.n_vars)
                ranks[held] = [(mean[query] <= weight).sum() / len(held) for weight in mean[query]]
                of_target[target].append(ranks)
                of_any.append(ranks)
        usual = np.mean(of_any, axis=0)
        result = np.full((cells.n_vars, cells.n_vars), np.nan)
        for target, ranks in enumerate(of_target):
            if ranks:  # cells that attend as to any query stand beside those read
                result[:, target] = np.mean([*ranks, *[usual] * PRIOR_CELLS], axis=0) - usual
        result[usual == 0] = np.nan  # a source that no cell holds
        np.fill_diagonal(result, np.nan)
        return result

    return {"correlation": correlation, "embedding": embedding, "attention": attention}


def infer(cells, model, method, **options):
    sd.tl.grn(cells, method, model=model, **{"n_targets": None, "min_fraction": 0} | options)
    return cells.uns["scdiva"][options.get("key_added", "scdiva_grn")]


def close(actual, expected, method):
    """Alike but for ranks of keys that differ by a rounding, of attention."""
    np.testing.assert_allclose(
        actual, expected, atol={"correlation": 1e-6, "embedding": 1e-3, "attention": 5e-4}[method]
    )
    assert method != "attention" or np.nanmean(np.abs(actual - expected)) < 2e-5


@pytest.mark.parametrize(
    ("method", "kind"), [("correlation", "one"), ("attention", "one"), ("embedding", "one"), ("embedding", "plain")]
)
def test_is_its_formula(cells, request, edges, by_hand, method, kind):
    model = request.getfixturevalue(kind)
    about = infer(cells, model, method)
    close(edges(cells), by_hand[method](cells, model), method)
    assert (about["method"], about["signed"]) == (method, method == "correlation")
    weights = edges(cells)
    assert np.nanmin(weights) < 0 < np.nanmax(weights)
    assert (np.nanmax(np.abs(weights - weights.T)) > 0.02) == (method == "attention")  # which is directed


@pytest.mark.parametrize("method", ["correlation", "attention", "embedding"])
def test_of_groups_and_against_another(cells, one, edges, by_hand, method):
    is_a = (cells.obs["kind"] == "A").to_numpy()
    of_a, of_b = (by_hand[method](cells, one, rows) for rows in (is_a, ~is_a))
    infer(cells, one, method, groupby="kind")
    close(edges(cells, "scdiva_grn_A"), of_a, method)
    close(edges(cells, "scdiva_grn_B"), of_b, method)
    about = infer(cells, one, method, groupby="kind", reference="A", key_added="d")
    assert [key for key in cells.varp if key.startswith("d")] == ["d_B"]
    close(edges(cells, "d_B"), np.where(of_a == of_b, np.nan, of_b - of_a), method)
    assert about["signed"]


def test_sources_and_targets_are_a_part_of_the_genes(cells, columns, plain, edges, by_hand):
    """Standard deviations are over the genes that take part, whichever way the edges go."""
    names, sources, targets = cells.var_names, columns[[2, 5, 9]], columns[[1, 2, 30, 31]]
    infer(cells, plain, "embedding", sources=list(names[sources]), targets=list(names[targets]))
    mask = np.zeros((60, 60), dtype=bool)
    mask[np.ix_(sources, targets)] = True
    expected = by_hand["embedding"](cells, plain, subset=np.union1d(sources, targets))
    close(edges(cells), np.where(mask, expected, np.nan), "embedding")


def test_whitened_vectors(one, vocabulary):
    table = vocabulary.table.copy()
    table.loc[table.index[4], "entropy"] = np.nan
    one.vocabulary = Vocabulary(table)
    try:
        white = whitened(one)
    finally:
        one.vocabulary = vocabulary
    with_entropy = np.r_[np.zeros(N_SPECIAL, bool), np.arange(len(table)) != 4]
    assert (white[~with_entropy] == 0).all()
    np.testing.assert_allclose(np.linalg.norm(white[with_entropy], axis=1), 1)
    full = whitened(one)[N_SPECIAL:]
    np.testing.assert_allclose(full @ full.T, cosines(one), atol=1e-9)


def test_a_gene_that_does_not_vary_goes_by_the_model_alone(cells, columns, plain, edges):
    """The same count in each cell, and cells of one depth."""
    counts = cells.X.toarray()
    counts[:, columns[0]] = 1
    counts[:, columns[1]] += counts.sum(axis=1).max() - counts.sum(axis=1)
    cells.X = counts
    infer(cells, plain, "embedding")
    weights = edges(cells)[columns[0], columns[1:]]
    genes = plain.vocabulary.match(list(cells.var_names[columns])).tokens - N_SPECIAL
    static = standardised(cosines(plain)[np.ix_(genes, genes)])
    assert np.isfinite(weights).all()
    assert np.ptp(weights - static[0, 1:] / 2) < 1e-4  # what the states add is the same for all


@pytest.mark.parametrize(("layers", "heads"), [(1, None), ([0, 2], [1]), (None, 0)])
def test_layers_and_heads_are_chosen(cells, build, edges, by_hand, layers, heads):
    model = build(n_layers=3)
    about = infer(cells, model, "attention", layers=layers, heads=heads)
    of_layers, of_heads = ([option] if isinstance(option, int) else option for option in (layers, heads))
    close(edges(cells), by_hand["attention"](cells, model, layers=of_layers, heads=of_heads), "attention")
    assert about["layers"].tolist() == sorted(of_layers or [])
    assert about["heads"].tolist() == sorted(of_heads or [])


def test_layers_above_the_last_one_chosen_are_not_computed(cells, build):
    model = build(n_layers=3)
    run = []
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, number=number: run.append(number))
    infer(cells, model, "attention", layers=1)
    assert set(run) == {0}  # its output is the input of layer 1, whose weights need no pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 5}, "the model has 2 layers, 0 to 1; layers names 5"),
        ({"heads": [0, -1]}, "the model has 2 heads, 0 to 1; heads names -1"),
        ({"layers": []}, "layers is empty"),
        ({"layers": 0, "method": "embedding"}, 'Pass method="attention"'),
    ],
)
def test_layers_and_heads_that_are_not_there(cells, one, options, message):
    with pytest.raises(ValueError, match=message):
        sd.tl.grn(cells, model=one, **{"method": "attention"} | options)
    assert not cells.varp


@pytest.mark.parametrize("state_head", [False, True])
def test_ranks_of_the_genes_that_the_transformer_sees(network, state_head):
    model = network(n_layers=2, max_length=20, state_head=state_head)
    tokens = torch.randperm(30, generator=torch.Generator().manual_seed(0)) + N_SPECIAL
    values = torch.linspace(4, 1, 30)
    longer, truncated = ((tokens[:n], values[:n], torch.tensor([0, n], dtype=torch.int32)) for n in (30, 20))
    ranks = read_out(model, longer, attention_ranks)
    assert torch.equal(ranks, read_out(model, truncated, attention_ranks))
    assert ranks.shape == (20, 20)
    alone = tokens[:1], values[:1], torch.tensor([0, 1], dtype=torch.int32)
    assert read_out(model, alone, attention_ranks).tolist() == [[1.0]]
