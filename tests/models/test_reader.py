"""The reader against slow formulas, and what its predictions do not depend on."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from scipy.stats import nbinom

from scdiva.models import ScDiVa, ScDiVaConfig, load_model, save_model
from scdiva.models.reader import (
    COMPONENTS,
    HEADS,
    INFERENCE_GENES,
    Reader,
    cells_of,
    cells_of_rows,
    count_loss,
    gene_codes,
    study_of,
)

N_GENES, N_QUERIES, CODE = 60, 9, 12


@pytest.fixture(scope="module", params=[(1, 1), (2, 3)], ids=["small", "wide and deep"])
def task(request):
    """A reader of random weights, and counts of 24 context cells and 5 predicted ones."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.poisson(3 * torch.rand(29, N_GENES + N_QUERIES, generator=generator), generator=generator)
    total = counts.sum(dim=1)
    values = torch.log1p(1e4 * counts / total[:, None])[:, :N_GENES]
    codes = gene_codes(torch.randn(N_GENES + N_QUERIES, CODE, generator=generator))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        reader = Reader(CODE, *request.param).eval()
        torch.nn.init.normal_(reader.out.weight, std=0.3)
        torch.nn.init.normal_(reader.component_weight)
    return reader, counts[:, N_GENES:], total, values, codes


def predicted(task, rows=slice(24, None), queries=slice(None), values=None, own_rows=None):
    reader, counts, total, all_values, codes = task
    values = all_values if values is None else values
    study = study_of(all_values[:24], codes[:N_GENES], counts[:24, queries], total[:24])
    cells = cells_of(study, values[rows], codes[:N_GENES], total[rows])
    with torch.no_grad():
        return reader(cells, codes[N_GENES:][queries], study, own_rows)


def test_sparse_cells_are_read_as_dense_ones(task):
    reader, counts, total, values, codes = task
    values = values.clone()
    values[25] = 0  # a cell without visible genes
    study = study_of(values[:24], codes[:N_GENES], counts[:24], total[:24])
    assert INFERENCE_GENES > N_GENES
    dense = cells_of(study, values[24:], codes[:N_GENES], total[24:])
    sparse = cells_of_rows(study, sp.csr_matrix(values[24:].numpy()), codes[:N_GENES], total[24:])
    with torch.no_grad():
        from_dense, from_sparse = (reader(cells, codes[N_GENES:], study) for cells in (dense, sparse))
    for a, b in zip(from_dense, from_sparse, strict=True):
        rows = [0, 2, 3, 4]
        torch.testing.assert_close(a[rows], b[rows], rtol=1e-4, atol=1e-5)
        assert torch.isfinite(b).all()


def test_loss_is_that_of_a_negative_binomial_distribution():
    counts, mean, size = np.meshgrid([0, 1, 7, 400], [0.01, 2.0, 900.0], [0.1, 3.0])
    loss = count_loss(*(torch.from_numpy(part) for part in (counts.astype(float), np.log(mean), np.log(size))))
    np.testing.assert_allclose(loss, -nbinom.logpmf(counts, size, size / (size + mean)), rtol=1e-6)


def test_components_are_those_of_the_svd(task):
    _, counts, total, values, codes = task
    study = study_of(values[:24], codes[:N_GENES], counts[:24], total[:24])
    centred = (values[:24] - values[:24].mean(dim=0)).double().numpy()
    left, singular, _ = np.linalg.svd(centred, full_matrices=False)
    components, k = study.components.numpy(), 23
    np.testing.assert_allclose(np.abs(components[:, :k]), np.abs(left[:, :k]) * 24**0.5, atol=5e-3)
    np.testing.assert_allclose(study.share[:k], singular[:k] ** 2 / (singular[:k] ** 2).sum(), rtol=1e-3)
    assert components.shape == (24, COMPONENTS)
    assert not components[:, k:].any()
    cells = cells_of(study, values[:24], codes[:N_GENES], total[:24])
    np.testing.assert_allclose(cells.components, components, atol=2e-3)


def test_attention_weights_follow_the_formula(task):
    reader, counts, total, values, codes = task
    study = study_of(values[:24], codes[:N_GENES], counts[:24], total[:24])
    cells = cells_of(study, values[24:], codes[:N_GENES], total[24:])
    weights = reader.weigh(cells, study).detach()
    for head in range(HEADS):
        weight = F.softplus(reader.component_weight[head]) * study.share
        for cell in range(5):
            near = []
            for context_cell in range(24):
                squared = (cells.components[cell] - study.components[context_cell]).square()
                distance = (weight * squared).sum() / (2 * weight.sum()) * reader.distance_sharpness[head].exp()
                width = reader.state_query.out_features // HEADS
                part = slice(width * head, width * head + width)
                query, key = (
                    reader.state_query(cells.state[cell])[part],
                    reader.state_key(study.state[context_cell])[part],
                )
                cosine = F.cosine_similarity(query, key, dim=0)
                near.append(cosine * reader.state_sharpness[head].exp() - distance)
            np.testing.assert_allclose(
                weights[cell, head], torch.stack(near).softmax(dim=0).detach(), rtol=2e-3, atol=1e-5
            )


def test_without_training_a_prediction_is_a_shrunk_mean_of_similar_cells(task):
    reader, counts, total, values, codes = task
    plain = copy.deepcopy(reader)
    plain.load_state_dict({**reader.state_dict(), "out.weight": torch.zeros(2, reader.out.in_features)})
    with torch.no_grad():
        plain.line[:] = F.one_hot(torch.tensor(2), len(plain.line))
    log_rate, _ = predicted((plain, *task[1:]))
    study = study_of(values[:24], codes[:N_GENES], counts[:24], total[:24])
    weights = plain.weigh(cells_of(study, values[24:], codes[:N_GENES], total[24:]), study)[:, 2]
    pooled = (counts[:24].sum(dim=0) + 0.2) / total[:24].sum()
    number, prior = 1 / weights.square().sum(dim=1, keepdim=True), F.softplus(torch.ones(())) * total[:24].mean()
    of_all = weights @ total[:24]
    expected = (number * (weights @ counts[:24]) + prior * pooled) / (number * of_all[:, None] + prior)
    np.testing.assert_allclose(log_rate, expected.log().detach(), rtol=1e-4)


def test_a_prediction_depends_neither_on_other_queries_nor_on_other_cells(task):
    all_outputs = predicted(task)
    for part, alone in zip(all_outputs, predicted(task, slice(25, 26), slice(3, 5)), strict=True):
        np.testing.assert_allclose(part[1:2, 3:5], alone, rtol=1e-4, atol=1e-5)


def test_the_order_of_genes_only_selects_the_tokens(task):
    """Below `MAX_GENES` expressed genes, all are tokens: a set."""
    reader, counts, total, values, codes = task
    order = torch.randperm(N_GENES, generator=torch.Generator().manual_seed(2))
    shuffled_task = reader, counts, total, values[:, order], torch.cat([codes[:N_GENES][order], codes[N_GENES:]])
    for part, shuffled in zip(predicted(task), predicted(shuffled_task), strict=True):
        np.testing.assert_allclose(part, shuffled, rtol=1e-3, atol=1e-4)


def test_a_cell_in_the_context_does_not_see_its_own_counts(task):
    reader, counts, *inputs = task
    changed = counts.clone()
    changed[4] += 50
    own_rows = torch.tensor([3, 4, -1])
    one, two = (predicted((reader, matrix, *inputs), slice(3, 6), own_rows=own_rows)[0] for matrix in (counts, changed))
    assert not torch.allclose(one[0], two[0], atol=1e-3)
    log_pooled = predicted((reader, counts, *inputs), slice(3, 6))[0]
    assert not torch.allclose(one[1], log_pooled[1], atol=1e-3)
    # the dispersion and the information of a gene are those of all cells, so the prediction is equal only nearly
    assert (one[1] - two[1]).abs().mean() < 0.3 * (one[0] - two[0]).abs().mean()


def test_a_cell_without_visible_genes_has_a_prediction(task):
    empty = task[3].clone()
    empty[24] = 0
    assert all(torch.isfinite(part).all() for part in predicted(task, values=empty))


def test_a_reader_is_saved_with_the_model(tmp_path, vocabulary):
    config = {"n_genes": vocabulary.n_genes, "dim": 8, "n_heads": 2, "n_layers": 1, "ffn_dim": 8, "max_length": 8}
    with pytest.raises(ValueError, match="reader needs state_head=True"):
        ScDiVaConfig(**config, reader=True)
    model = ScDiVa(ScDiVaConfig(**config, anchor_linear_dim=4, state_head=True, reader=True))
    loaded = load_model(save_model(model, vocabulary, tmp_path / "model"))
    for name, weight in model.reader.state_dict().items():
        assert torch.equal(weight, loaded.reader.state_dict()[name]), name
    assert "reader" not in ScDiVaConfig(**config).to_dict(), "files of models without one stay as they were"
