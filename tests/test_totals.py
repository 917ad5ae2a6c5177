"""Log-normalised expression gives the results of the counts, whatever total its cells were scaled to."""

from __future__ import annotations

import functools
import inspect

import matplotlib.pyplot as plt
import numpy as np
import pytest
import scipy.sparse as sp

import scdiva as sd

N_CELLS, N_GENES = 96, 120
pytestmark = pytest.mark.filterwarnings("ignore")


def cells():
    adata = sd.datasets.toy(N_CELLS, N_GENES, rng=1)
    a, b, c = map(str, adata.var_names[:3])
    adata.obs["perturbation"] = np.resize(["control", a, b, f"{a}+{b}", c, f"{b}+{c}"], N_CELLS)
    adata.obs["state"] = np.resize(["now", "wanted"], N_CELLS)
    adata.obsm["X_other"] = np.random.default_rng(0).normal(size=(N_CELLS, 8))
    return adata


def scaled(adata, totals):
    """log1p of the counts of each cell, scaled to a total."""
    result, counts = adata.copy(), adata.X.toarray().astype(np.float64)
    shares = counts / counts.sum(axis=1, keepdims=True)
    result.X = sp.csr_matrix(np.log1p(shares * np.broadcast_to(totals, N_CELLS)[:, None]).astype(np.float32))
    return result


def parts(result):
    return result if isinstance(result, list) else [result]


def gene(adata, i=0):
    return str(adata.var_names[i])


def written(call, *keys):
    """What a call writes into obs, obsm, varm, varp, layers, var or uns."""

    def values(adata):
        call(adata)
        return [np.asarray(_dense(getattr(adata, key.split("/")[0])[key.split("/")[1]])) for key in keys]

    return values


def _dense(values):
    return values.toarray() if hasattr(values, "toarray") else values


def predicted(adata, **how):
    sd.tl.predict_perturbation(adata, **how)
    record = adata.uns["scdiva_perturbation"]
    return [record["mean"], record["change"], record["control_mean"], record["sd"], *record["baselines"].values()]


def drawn(figure):
    """All numbers that a figure shows: points, lines, boxes and colours."""
    numbers = []
    for axes in figure.axes:
        numbers += [np.asarray(line.get_xydata(), dtype=float) for line in axes.lines]
        for part in axes.collections:
            numbers.append(np.ma.filled(np.ma.asarray(part.get_offsets()).astype(float), np.nan))
            if part.get_array() is not None:
                numbers.append(np.ma.filled(part.get_array().astype(float), np.nan))
    plt.close(figure)
    return numbers


@functools.cache
def fitted():
    return sd.tl.fit_perturbation(cells(), "perturbation", rng=0)


@functools.cache
def prediction():
    return sd.tl.predict_perturbation(cells(), model=fitted(), rng=0)


def table(frame):
    return frame.select_dtypes("number").to_numpy(dtype=float)


CALLS = {
    "tl.adapt": lambda a: (sd.tl.embed(a, sd.tl.adapt(a, rng=0)), a.obsm["X_scdiva"])[1],
    "tl.annotate": written(lambda a: sd.tl.annotate(a, "cell_type", cells()), "obsm/scdiva_label_probability"),
    "tl.annotate, reference": lambda a: written(
        lambda query: sd.tl.annotate(query, "cell_type", a), "obsm/scdiva_label_probability"
    )(cells()),
    "tl.corrected_expression": written(
        lambda a: sd.tl.corrected_expression(a, "batch", [gene(a), gene(a, 5)], use_rep="X_other"),
        "obsm/scdiva_corrected",
    ),
    "tl.embed": written(sd.tl.embed, "obsm/X_scdiva"),
    "tl.fit_perturbation": lambda a: sd.tl.fit_perturbation(a, "perturbation", rng=0).screen.delta,
    "tl.gene_embedding": written(sd.tl.gene_embedding, "varm/X_scdiva"),
    "tl.generate": lambda a: _dense(sd.tl.generate(a, 5, rng=0).X),
    "tl.grn": written(sd.tl.grn, "varp/scdiva_grn"),
    "tl.grn, correlation": written(lambda a: sd.tl.grn(a, "correlation"), "varp/scdiva_grn"),
    "tl.impute": written(lambda a: sd.tl.impute(a, [gene(a), gene(a, 5)], rng=0), "obsm/scdiva_imputed"),
    "tl.integrate": written(lambda a: sd.tl.integrate(a, "batch", steps=2, rng=0), "obsm/X_scdiva_integrated"),
    "tl.log_likelihood": written(lambda a: sd.tl.log_likelihood(a, n_samples=2, rng=0), "obs/scdiva_log_likelihood"),
    "tl.predict_perturbation": lambda a: predicted(a, perturbation_key="perturbation", rng=0),
    "tl.predict_perturbation, fitted on counts": lambda a: predicted(a, model=fitted(), rng=0),
    "tl.rank_perturbations": lambda a: table(
        sd.tl.rank_perturbations(a, "state", "now", target="wanted", model=fitted()).sort_values("perturbation")
    ),
    "tl.reconstruct": written(lambda a: sd.tl.reconstruct(a, rng=0), "layers/scdiva_reconstructed"),
    "tl.regulon": lambda a: (sd.tl.grn(a), table(sd.tl.regulon(a, gene(a)).sort_values("target")))[1],
    "tl.score_perturbation": lambda a: table(  # rounding decides ties among ranks
        sd.tl.score_perturbation(prediction(), a).drop(columns="discrimination")
    ),
    "pp.match_genes": lambda a: sd.pp.match_genes(a, copy=True).uns["scdiva"]["match"]["share_counts"],
    "pp.corpus_entropy": lambda a: sd.pp.corpus_entropy([a]).entropy(),
    "pp.entropy_serialize": written(sd.pp.entropy_serialize, "layers/scdiva_rank"),
    "pp.gene_entropy": written(sd.pp.gene_entropy, "var/scdiva_entropy"),
    "pl.delta_scatter": lambda a: drawn(sd.pl.delta_scatter(prediction(), gene(a), a, n_names=0, return_fig=True)),
    "pl.discrimination": lambda a: drawn(sd.pl.discrimination(prediction(), a, return_fig=True)),
    "pl.hit_rate": lambda a: drawn(sd.pl.hit_rate(prediction(), a, return_fig=True)),
    "pl.marker_heatmap": lambda a: drawn(sd.pl.marker_heatmap(a, "cell_type", return_fig=True)),
    "pl.perturbation": lambda a: drawn(sd.pl.perturbation(prediction(), gene(a), a, return_fig=True)),
}
"""Calls that read expression, and the numbers that they give."""
ELSEWHERE = {"tl.embed_file"}
"""Those whose result is a file: what `tl.embed` writes."""


def test_every_call_that_reads_expression_is_here():
    names = {name.partition(",")[0] for name in CALLS} | ELSEWHERE
    for module in ("tl", "pp", "pl"):
        for name in getattr(sd, module).__all__:
            if "input" in inspect.signature(getattr(getattr(sd, module), name)).parameters:
                assert f"{module}.{name}" in names


@pytest.mark.parametrize("name", CALLS)
def test_the_total_that_cells_were_scaled_to_changes_nothing(name):
    counts = cells()
    depth = float(np.median(np.asarray(counts.X.sum(axis=1))))
    of_each = np.where(counts.obs["perturbation"] == "control", 1e4, np.resize([1e3, depth, 1e6], N_CELLS))
    expected = parts(CALLS[name](counts.copy()))
    actual = parts(CALLS[name](scaled(counts, of_each)))
    assert len(actual) == len(expected) > 0
    for actual_part, expected_part in zip(actual, expected, strict=True):
        np.testing.assert_allclose(actual_part, expected_part, rtol=1e-3, atol=1e-3)
