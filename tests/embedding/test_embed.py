from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import torch

import scdiva as sd
from scdiva.data import batch
from scdiva.models import save_model


@pytest.fixture(scope="module", params=("learned", "encoder"))
def model(request, build):
    return build(anchor=request.param, anchor_residual=True)


def embedded(adata, model, **options):
    return sd.tl.embed(adata, model, copy=True, **options).obsm["X_scdiva"]


def test_writes_what_it_says_in_place(adata, one):
    cells = adata.copy()
    cells.uns["scdiva"] = {"mine": 1}
    assert sd.tl.embed(cells, one) is None
    z = cells.obsm["X_scdiva"]
    assert (z.shape, z.dtype) == ((90, one.state_dim), np.float32)
    assert np.isfinite(z).all()
    notes = cells.uns["scdiva"]["X_scdiva"]
    assert (notes["model"], notes["input"]) == ("ScDiVa", "counts")
    assert 0.8 < notes["share_counts"] < 1
    assert cells.uns["scdiva"]["mine"] == 1
    copy = sd.tl.embed(adata, one, copy=True, key_added="X_mine")
    assert (list(copy.obsm), list(adata.obsm)) == (["X_mine"], [])


def test_equals_a_forward_pass_written_out(adata, one, vocabulary):
    """One cell from raw counts to state: normalise, rank, run, by hand."""
    z = embedded(adata, one)
    counts = np.asarray(adata.X[7].todense(), dtype=np.float64).ravel()
    tokens = vocabulary.match(list(adata.var_names)).tokens
    v = np.log1p(counts / counts.sum() * 1e4).astype(np.float32)
    score = v / (np.maximum(vocabulary.entropy[tokens], one.config.entropy_floor) + 1e-6)
    ranked = [i for i in np.argsort(-score, kind="stable") if tokens[i] >= 0 and v[i] > 0]
    with torch.no_grad():
        state = one.encode(
            torch.tensor(tokens[ranked].astype(np.int64)), torch.tensor(v[ranked]),
            torch.tensor([0, len(ranked)], dtype=torch.int32),
        )  # fmt: skip
    np.testing.assert_allclose(z[7], state[0].numpy(), atol=1e-5)


def test_a_cell_is_embedded_alike_whatever_is_beside_it(adata, model):
    z = embedded(adata, model)
    scale = np.abs(z).max()
    assert scale > 1e-3
    for batch_size in (1, 7, 100_000):
        np.testing.assert_array_equal(embedded(adata, model, batch_size=batch_size), z)
    rows = np.random.default_rng(0).permutation(90)
    np.testing.assert_array_equal(embedded(adata[rows].copy(), model), z[rows])
    np.testing.assert_array_equal(embedded(adata[11:30].copy(), model), z[11:30])
    columns = np.random.default_rng(1).permutation(adata.n_vars)
    np.testing.assert_array_equal(embedded(adata[:, columns].copy(), model), z)
    assert np.abs(z[0] - z[1]).max() > 1e-3 * scale  # not one row for all


def test_a_folder_gives_what_the_model_gives(adata, one, vocabulary, tmp_path):
    folder = save_model(one, vocabulary, tmp_path / "model")
    np.testing.assert_array_equal(embedded(adata, folder), embedded(adata, one))
    cells = sd.tl.embed(adata, str(folder), copy=True)
    assert cells.uns["scdiva"]["X_scdiva"]["model"] == str(folder)


def test_the_bundled_model_knows_real_cells():
    """15 nearest neighbours predict published cell types better than those of PCA, and nothing warns."""
    import scanpy as sc

    cells = sd.datasets.pbmc3k_small()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        sd.tl.embed(cells)
    labels = cells.obs["cell_type"].astype(str)
    accuracy = sd.metrics.knn_cross_validation(cells.obsm["X_scdiva"], labels)["accuracy"]
    sc.pp.normalize_total(cells)
    sc.pp.log1p(cells)
    sc.pp.highly_variable_genes(cells, n_top_genes=2000)
    sc.pp.pca(cells, n_comps=20)
    assert accuracy > 0.88
    assert accuracy > sd.metrics.knn_cross_validation(cells.obsm["X_pca"], labels)["accuracy"]


LOCKED = (Path(__file__).parents[2] / "constraints.txt").read_text().split()


@pytest.mark.skipif(
    all(f"{name}=={version(name)}" in LOCKED for name in ("scanpy", "pynndescent", "numba")),
    reason="half a minute of compilation, for versions that are known to work",
)
def test_scanpy_finds_neighbours_of_more_than_8_191_cells():
    """There scanpy's neighbours are pynndescent's, with which some versions of scanpy fail."""
    import scanpy as sc

    rng = np.random.default_rng(0)
    group = np.arange(8400) % 3
    z = (rng.normal(size=(8400, 8)) + 20 * np.eye(8)[group]).astype(np.float32)
    cells = ad.AnnData(sp.csr_matrix((8400, 1), dtype=np.float32), obsm={"X_scdiva": z})
    sc.pp.neighbors(cells, use_rep="X_scdiva")
    i, j = cells.obsp["connectivities"].nonzero()
    assert len(i) > 8400 * 15
    assert (group[i] == group[j]).all()


def test_without_transformer_cells_share_batches_and_change_little(adata, build):
    model = build(anchor="encoder", anchor_residual=False)
    z = embedded(adata, model)
    for batch_size in (1, 13, 2000):
        np.testing.assert_allclose(embedded(adata, model, batch_size=batch_size), z, atol=1e-6)
    rows = np.random.default_rng(0).permutation(90)
    np.testing.assert_allclose(embedded(adata[rows].copy(), model), z[rows], atol=1e-6)


def test_precision_is_the_calls_or_the_settings_and_is_written_down(adata, one, build):
    z = embedded(adata, one)
    norm = np.linalg.norm
    cells = sd.tl.embed(adata, one, precision="bf16", copy=True)
    low = cells.obsm["X_scdiva"]
    assert ((low * z).sum(1) / norm(low, axis=1) / norm(z, axis=1)).min() >= 0.9995
    assert np.abs(low - z).max() > 1e-6
    assert cells.uns["scdiva"]["X_scdiva"]["precision"] == "bf16"
    with sd.settings.override(precision="bf16"):
        np.testing.assert_array_equal(embedded(adata, one), low)
    light = sd.tl.embed(adata, build(anchor="encoder", anchor_residual=False), precision="bf16", copy=True)
    assert light.uns["scdiva"]["X_scdiva"]["precision"] == "fp32"
    with pytest.raises(ValueError, match="precision must be"):
        embedded(adata, one, precision="fp16")


def test_threads_may_share_a_model(adata, one):
    z = embedded(adata, one)
    with ThreadPoolExecutor(4) as pool:
        for embedding in pool.map(lambda cells: embedded(adata, one, batch_size=cells), (1, 9, 30, 170)):
            np.testing.assert_array_equal(embedding, z)


@pytest.mark.parametrize("kind", ["one", "plain", "learned"])
def test_a_model_reads_its_own_genes_among_others(adata, kind, request):
    """Human genes outside the vocabulary do not change the embedding, also of cells with very many genes."""
    from scdiva.data.cells import open_cells
    from scdiva.models.inference import embed_all, resolve_run_config

    model, run_config = request.getfixturevalue(kind), resolve_run_config(None, "cpu", "fp32")
    of_vocabulary, every = (open_cells(adata, model, all_genes=all_genes) for all_genes in (False, True))
    assert (every.tokens >= model.config.n_tokens).any()
    assert every.lengths.max() > model.config.max_length
    np.testing.assert_allclose(
        embed_all(model, every, run_config), embed_all(model, of_vocabulary, run_config), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("kind", ["one", "plain"])
def test_some_cells_are_run_with_tensors_beside_them(adata, one, plain, kind, monkeypatch):
    """By windows of a few cells; a function is given the tensors of the rows that a batch holds."""
    from scdiva.models.inference import open_cells_for_model, resolve_run_config, run_cells

    model = one if kind == "one" else plain
    z = embedded(adata, model)
    run_config = resolve_run_config(None, "cpu", "fp32")
    _, source, _ = open_cells_for_model(model, adata, run_config)
    source.block_rows = 8
    monkeypatch.setattr("scdiva.data.batch.WINDOW", 16)
    only = np.random.default_rng(0).random(90) < 0.3
    only[16:32] = False  # a window without any
    requested = []

    def numbers(rows):
        requested.extend(rows.tolist())
        return (torch.from_numpy(rows),)

    def scaled(network, tokens, values, bounds, number):
        return network.encode(tokens, values, bounds) * number[:, None]

    for what, beside in (("embedding", None), (scaled, numbers)):
        visited = []
        for rows, ragged, results in run_cells(model, source, run_config._replace(what=what), only=only, beside=beside):
            assert len(ragged[0]) == len(rows) + 1
            for cells, result in results:
                visited += rows[cells].tolist()
                expected = z[rows[cells]] * (1 if beside is None else rows[cells][:, None])
                np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
        assert sorted(visited) == np.flatnonzero(only).tolist()
    assert sorted(requested) == np.flatnonzero(only).tolist()
    assert list(run_cells(model, source, run_config, only=np.zeros(90, dtype=bool))) == []


def test_on_cuda_batches_are_large_and_from_some_number_of_cells_on_compiled(adata, one, monkeypatch):
    """What CUDA is asked for, done on the CPU; compiled blocks are run eagerly."""
    from scdiva.models import Blocks, inference

    opened, budgets, compiled = [], [], []
    open_encoder, fill_batches, compile_each = inference.open_encoder, batch.fill_batches, Blocks.compile_each

    def on_cpu(model, *, device, **options):
        opened.append((device, options["compiled"]))
        return open_encoder(model, device="cpu", **options)

    def filled(lengths, budget, max_cells):
        budgets.append(budget)
        return fill_batches(lengths, budget, max_cells)

    def marked(blocks):
        compiled.append(blocks)
        compile_each(blocks)

    monkeypatch.setattr(inference, "open_encoder", on_cpu)
    monkeypatch.setattr(batch, "fill_batches", filled)
    monkeypatch.setattr(Blocks, "compile_each", marked)
    source = inference.open_cells_for_model(one, adata, inference.resolve_run_config(None, "cpu", "fp32"))[1]
    expected = inference.embed_all(one, source, inference.resolve_run_config(None, "cpu", "bf16"))
    assert set(budgets) == {batch.BATCH_TOKENS}
    assert not compiled
    for least, is_compiled in ((91, False), (90, True)):
        monkeypatch.setattr(inference, "COMPILED_CELLS", least)
        budgets.clear()
        with torch.compiler.set_stance("force_eager"):
            embedding = inference.embed_all(one, source, inference.RunConfig(None, "cuda", "bf16", "embedding"))
        np.testing.assert_allclose(embedding, expected, rtol=0.02, atol=0.02)
        assert opened[-1] == ("cuda", is_compiled)
        assert set(budgets) == {131_072}
        assert bool(compiled) == is_compiled
        assert one.blocks[0]._compiled_call_impl is None, "the model is left as it was"
