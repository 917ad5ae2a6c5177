from __future__ import annotations

import re
import time

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch

import scdiva as sd
from scdiva._constants import N_SPECIAL
from scdiva.tl import _gene_embedding
from scdiva.tokenizer.vocabulary import Vocabulary

NAMES = ["CD4/CD8", "β δ", "plain"]


@pytest.fixture
def cells(adata):
    """Toy cells in three groups, one of which has a category that no cell has."""
    cells = adata.copy()
    cells.obs["kind"] = pd.Categorical.from_codes(np.arange(90) % 3, [*NAMES, "nobody"])
    return cells


@pytest.fixture(scope="module")
def light(build):
    return build(anchor="encoder", anchor_residual=False)


def without_two_groups(cells):
    cells.obs = cells.obs.assign(kind=cells.obs["kind"].where(np.arange(90) > 1))


def by_hand(cells, model, kind="kind"):
    """Means of hidden states gene by gene, in float64, cells taken one at a time through the network."""
    from scdiva.data.cells import open_cells

    c = model.config
    source = open_cells(cells, model.vocabulary, max_length=c.input_length, entropy_floor=c.entropy_floor, empty="nan")
    found: dict = {}
    for rows, (indptr, tokens, values) in source.windows(4096):
        for i, row in enumerate(rows):
            part = slice(indptr[i], indptr[i + 1])
            t = torch.tensor(tokens[part].astype(np.int64))
            with torch.no_grad():
                out = model.read(t, torch.tensor(values[part]), torch.tensor([0, len(t)], dtype=torch.int32))
            for token, h in zip(t[: c.max_length].tolist(), out.hidden.double().numpy(), strict=True):
                found.setdefault((token, str(cells.obs[kind].iloc[row])), []).append(h)
    return found


def test_static_embeddings_are_rows_of_the_table(adata, one, vocabulary):
    cells = adata.copy()
    sd.tl.embed(cells, one)
    embedding = cells.uns["scdiva"]["X_scdiva"]
    assert sd.tl.gene_embedding(cells, one) is None
    genes = cells.varm["X_scdiva"]
    assert (genes.shape, genes.dtype) == ((cells.n_vars, 16), np.float32)
    row = {symbol: i for i, symbol in enumerate(vocabulary.symbols)}
    table = one.embedding.gene.weight[N_SPECIAL:].detach().numpy()
    for name, vector in zip(cells.var_names, genes, strict=True):
        np.testing.assert_array_equal(vector, table[row[name]] if name in row else np.nan)
    assert 0 < np.isnan(genes[:, 0]).sum() < 10
    assert cells.uns["scdiva"]["X_scdiva"] is embedding  # that of the cells
    said = cells.uns["scdiva"]["X_scdiva_genes"]
    assert said["model"] == "ScDiVa"
    assert 0.8 < said["share_counts"] < 1
    assert not {"precision", "pooling"} & set(said)


def test_genes_are_found_by_name_and_never_by_position(adata, one, vocabulary):
    genes = sd.tl.gene_embedding(adata, one, copy=True).varm["X_scdiva"]
    order = np.random.default_rng(0).permutation(adata.n_vars)
    moved = adata[:, order].copy()
    moved.var["symbol"] = list(moved.var_names)
    moved.var_names = [f"row{i}" for i in range(moved.n_vars)]
    sd.tl.gene_embedding(moved, one, gene_ids="symbol")
    np.testing.assert_array_equal(moved.varm["X_scdiva"], genes[order])
    twice = ad.concat([adata, adata[:, :2]], axis=1, merge="first")
    ids = dict(zip(vocabulary.symbols, vocabulary.ensembl_ids, strict=True))
    twice.var_names = [*adata.var_names, *(ids.get(name, name) for name in adata.var_names[:2])]
    both = sd.tl.gene_embedding(twice, one, copy=True).varm["X_scdiva"]
    np.testing.assert_array_equal(both[-2:], both[:2])
    assert np.isfinite(both[:2]).all()


def test_raw_may_hold_other_genes(adata, one):
    genes = sd.tl.gene_embedding(adata, one, copy=True).varm["X_scdiva"]
    some = adata[:, 5:30][:, ::-1].copy()
    some.var_names = ["not there", *some.var_names[1:]]
    some.raw = adata
    sd.tl.gene_embedding(some, one, use_raw=True)
    np.testing.assert_array_equal(some.varm["X_scdiva"][1:], genes[5:30][::-1][1:])
    assert np.isnan(some.varm["X_scdiva"][0]).all()
    repeated = adata.copy()
    repeated.var_names = ["A1BG", "A1BG", *repeated.var_names[2:]]
    some.raw = repeated
    with pytest.raises(ValueError, match="repeat names"):
        sd.tl.gene_embedding(some, one, use_raw=True)


def test_a_gene_that_no_corpus_saw_has_no_embedding(adata, build, vocabulary):
    model = build(anchor="learned")
    table = vocabulary.table.copy()
    table.loc[table.index[4], "entropy"] = np.nan
    model.vocabulary = Vocabulary(table)
    genes = sd.tl.gene_embedding(adata, model, copy=True).varm["X_scdiva"]
    expected = sd.tl.gene_embedding(adata, build(anchor="learned"), copy=True).varm["X_scdiva"]
    lost = np.isnan(genes).all(axis=1) & ~np.isnan(expected).all(axis=1)
    assert list(adata.var_names[lost]) == [table["symbol"].iloc[4]]


@pytest.mark.parametrize("kind", ["one", "light", "learned"])
def test_contextual_embeddings_are_means_over_the_cells_of_a_group(cells, one, light, build, kind):
    model = {"one": one, "light": light}.get(kind) or build(anchor="learned")
    if kind == "light":  # cells longer than what the transformer sees
        model = build(anchor="encoder", anchor_residual=False)
        object.__setattr__(model.config, "max_length", 8)
    sd.tl.gene_embedding(cells, model, groupby="kind")
    mean, n = cells.varm["X_scdiva_groups"], cells.varm["X_scdiva_groups_n_cells"]
    assert (mean.shape, mean.dtype) == ((cells.n_vars, 3, 16), np.float32)
    assert (n.shape, n.dtype) == ((cells.n_vars, 3), np.int32)
    assert list(cells.uns["scdiva"]["X_scdiva_groups"]["groups"]) == NAMES
    tokens = model.vocabulary.match(list(cells.var_names)).tokens
    hidden = by_hand(cells, model)
    for gene, token in enumerate(tokens):
        for g, name in enumerate(NAMES):
            seen = hidden.get((token, name), [])
            assert n[gene, g] == len(seen)
            expected = np.mean(seen, axis=0) if seen else np.full(16, np.nan)
            np.testing.assert_allclose(mean[gene, g], expected, atol=2e-5)
    assert n.max() > 5
    assert (n == 0).any()


def test_windows_workers_and_portions_change_little_or_nothing(cells, one, monkeypatch):
    mean = sd.tl.gene_embedding(cells, one, groupby="kind", copy=True).varm["X_scdiva_groups"]
    for held, threads in ((1, 1), (100, 3)):
        monkeypatch.setattr(_gene_embedding, "_HELD_TOKENS", held)
        with sd.settings.override(threads=threads):
            again = sd.tl.gene_embedding(cells, one, groupby="kind", copy=True).varm["X_scdiva_groups"]
        np.testing.assert_array_equal(again, mean)
    rows = np.random.default_rng(0).permutation(90)
    again = sd.tl.gene_embedding(cells[rows].copy(), one, groupby="kind", copy=True).varm["X_scdiva_groups"]
    np.testing.assert_allclose(again, mean, atol=1e-5)  # a sum in another order
    monkeypatch.setattr("scdiva.data.batch.WINDOW", 20)
    monkeypatch.setattr("scdiva.data.cells.BLOCK_ROWS", 8)
    again = sd.tl.gene_embedding(cells, one, groupby="kind", copy=True).varm["X_scdiva_groups"]
    np.testing.assert_allclose(again, mean, atol=1e-5)


def test_few_batches_wait_at_a_time(cells, one, monkeypatch):
    """Hidden states of a window's cells are never held at once."""
    from scdiva.models import inference

    made, taken, waiting = [], [], []
    read_out, run = inference.read_out, _gene_embedding.run_cells

    def noted(*args):
        made.append(1)
        waiting.append(len(made) - len(taken))
        return read_out(*args)

    def noted_run(*args, **options):
        for rows, ragged, results in run(*args, **options):
            yield rows, ragged, slowly(results)

    def slowly(results):
        for result in results:
            taken.append(1)
            if len(taken) in (1, 20):  # time for the workers to run ahead
                time.sleep(0.4)
            yield result

    monkeypatch.setattr(inference, "read_out", noted)
    monkeypatch.setattr(_gene_embedding, "run_cells", noted_run)
    longest = int(sp.csr_matrix(cells.X).getnnz(axis=1).max()) + 1
    monkeypatch.setattr(_gene_embedding, "_HELD_TOKENS", 2 * longest)
    sd.tl.gene_embedding(cells, one, groupby="kind")
    assert len(made) == len(taken) == 90
    assert max(waiting) <= 8  # cells of about half the longest's genes, and one more


def test_h5ad_and_zarr_hold_it_and_slices_cut_it(cells, one, tmp_path):
    sd.tl.gene_embedding(cells, one)
    sd.tl.gene_embedding(cells, one, groupby="kind")
    cells.write_h5ad(tmp_path / "a.h5ad")
    cells.write_zarr(tmp_path / "a.zarr")
    for back in (ad.read_h5ad(tmp_path / "a.h5ad"), ad.read_zarr(tmp_path / "a.zarr")):
        for key in ("X_scdiva", "X_scdiva_groups", "X_scdiva_groups_n_cells"):
            np.testing.assert_array_equal(back.varm[key], cells.varm[key])
        frame = sd.get.gene_embedding_df(back, group="CD4/CD8")
        pd.testing.assert_frame_equal(frame, sd.get.gene_embedding_df(cells, group="CD4/CD8"))
    few = cells[:, 3:9].copy()
    np.testing.assert_array_equal(few.varm["X_scdiva_groups"], cells.varm["X_scdiva_groups"][3:9])


def test_frames_hold_the_genes_that_have_an_embedding(cells, one):
    for options in ({}, {"group": "plain"}):
        with pytest.raises(KeyError, match=r"tl\.gene_embedding"):
            sd.get.gene_embedding_df(cells, **options)
    sd.tl.gene_embedding(cells, one, key_added="mine")
    sd.tl.gene_embedding(cells, one, key_added="mine", groupby="kind")
    frame = sd.get.gene_embedding_df(cells, key="mine")
    known = ~np.isnan(cells.varm["mine"][:, 0])
    assert list(frame.index) == list(cells.var_names[known])
    np.testing.assert_array_equal(frame.to_numpy(), cells.varm["mine"][known])
    frame = sd.get.gene_embedding_df(cells, key="mine", group="β δ")
    n = cells.varm["mine_groups_n_cells"][:, 1]
    assert list(frame.index) == list(cells.var_names[n > 0])
    np.testing.assert_array_equal(frame.to_numpy(), cells.varm["mine_groups"][n > 0, 1])
    with pytest.raises(KeyError, match=r"no group 'nobody'.*'plain'"):
        sd.get.gene_embedding_df(cells, key="mine", group="nobody")
    with pytest.raises(KeyError, match=r"key='mine', group="):
        sd.get.gene_embedding_df(cells, key="mine_groups")


@pytest.mark.parametrize(
    ("spoil", "groupby", "kind", "said"),
    [
        (lambda c: None, "kinds", KeyError, "did you mean 'kind'"),
        (lambda c: None, "?", KeyError, "no column .*; it has .*'kind'"),
        (without_two_groups, "kind", ValueError, "2 of 90"),
        (lambda c: c.obs.__setitem__("kind", list(c.obs_names)), "kind", ValueError, "90"),
        (lambda c: c.obs.__setitem__("kind", pd.Categorical([1, "1", 2] * 30)), "kind", ValueError, "one spelling"),
        (lambda c: setattr(c, "X", c.X.toarray() - 1), "kind", ValueError, "negative"),
        (lambda c: setattr(c, "X", c.X.toarray() - 1), None, ValueError, "negative"),
        (lambda c: setattr(c, "var_names", [f"G{i}" for i in range(c.n_vars)]), None, ValueError, "known genes"),
        (lambda c: c.uns.__setitem__("scdiva", 3), None, ValueError, "keeps a dictionary"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_and_changes_nothing(cells, one, monkeypatch, spoil, groupby, kind, said):
    monkeypatch.setattr(_gene_embedding, "MAX_GROUPS", 50)
    spoil(cells)
    uns = dict(cells.uns)
    with pytest.raises(kind, match=said):
        sd.tl.gene_embedding(cells, one, groupby=groupby)
    assert not cells.varm
    assert dict(cells.uns) == uns


def test_cells_without_group_are_left_out_as_said(cells, one):
    without_two_groups(cells)
    with pytest.raises(ValueError, match="2 of 90") as error:
        sd.tl.gene_embedding(cells, one, groupby="kind")
    mend = re.search(r"leave them out with (.*\.copy\(\))", str(error.value))[1]
    rest = eval(mend, {"adata": cells})
    sd.tl.gene_embedding(rest, one, groupby="kind")
    assert rest.n_obs == 88
    assert rest.varm["X_scdiva_groups_n_cells"].sum() > 0


def test_too_many_groups_are_refused(cells, one, monkeypatch):
    monkeypatch.setattr(_gene_embedding, "MAX_GROUPS", 2)
    with pytest.raises(ValueError, match=r"3 values.*more than the 2"):
        sd.tl.gene_embedding(cells, one, groupby="kind")


def test_empty_cells_have_no_part(cells, one):
    cells.X = sp.csr_matrix(cells.X.multiply(~np.isin(np.arange(90), [4, 80])[:, None]))
    with pytest.raises(ValueError, match="2 of 90 cells"):
        sd.tl.gene_embedding(cells, one, groupby="kind")
    sd.tl.gene_embedding(cells, one, groupby="kind", empty="nan")
    rest = sd.tl.gene_embedding(cells[np.delete(np.arange(90), [4, 80])].copy(), one, groupby="kind", copy=True)
    n = cells.varm["X_scdiva_groups_n_cells"]
    np.testing.assert_array_equal(n, rest.varm["X_scdiva_groups_n_cells"])
    np.testing.assert_allclose(cells.varm["X_scdiva_groups"], rest.varm["X_scdiva_groups"], atol=1e-5)


def test_a_copy_leaves_the_original_alone(cells, one):
    uns = dict(cells.uns)
    copy = sd.tl.gene_embedding(cells, one, groupby="kind", copy=True)
    assert set(copy.varm) == {"X_scdiva_groups", "X_scdiva_groups_n_cells"}
    assert not cells.varm
    assert dict(cells.uns) == uns


def test_precision_is_written_down(cells, light):
    full = sd.tl.gene_embedding(cells, light, groupby="kind", copy=True).varm["X_scdiva_groups"]
    sd.tl.gene_embedding(cells, light, groupby="kind", precision="bf16")
    assert cells.uns["scdiva"]["X_scdiva_groups"]["precision"] == "bf16"
    assert 1e-6 < np.nanmax(np.abs(cells.varm["X_scdiva_groups"] - full)) < 0.1
