"""How often a public call passes over the user's matrix, and how often it encodes the same cells: once each.

The matrix is one chunk of dask, which counts how often it is computed, so whatever reads it is counted, in any
way; a matrix up to `scdiva.data.cells.KEPT_BYTES` is kept by the scan, so that the run does not read it again.
(Larger ones are passed over once to be checked and once to be run: which unit values are in is known at the end of the
first pass.) A cell is encoded when the set encoder sees all of its genes; thinned or masked cells are others.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter

import dask.array as da
import numpy as np
import pytest
import torch

import scdiva as sd
from scdiva.models.layers import SetEncoder
from scdiva.train.objectives import thinned

N_CELLS, N_GENES = 120, 150
pytestmark = pytest.mark.filterwarnings("ignore")


class Passes:
    """Counts how often the one chunk of a matrix is computed."""

    def __init__(self) -> None:
        self.n = 0

    def matrix(self, values):
        def block(part):
            self.n += 1
            return part

        dense = da.from_array(values.toarray(), chunks=values.shape)
        return dense.map_blocks(block, meta=np.zeros((0, 0), dtype=np.float32))


@pytest.fixture
def encoded(monkeypatch):
    """How often each cell was encoded, by its tokens and values."""
    counter: Counter = Counter()
    forward = SetEncoder.forward

    def counted(self, tokens, values, cu_seqlens, visible):
        if bool(visible.all()) and not torch.is_grad_enabled():
            bounds = cu_seqlens.tolist()
            for start, stop in itertools.pairwise(bounds):
                order = tokens[start:stop].argsort()
                cell = tokens[start:stop][order], values[start:stop][order]
                counter[tuple(part.numpy().tobytes() for part in cell)] += stop > start
        return forward(self, tokens, values, cu_seqlens, visible)

    times = itertools.count()

    def without_one(batch, *_):
        """Thin cells: each loses one gene, another one each time, where chance might leave a small cell whole."""
        dropped = torch.zeros(batch.tokens.numel(), dtype=torch.bool)
        dropped[batch.cu_seqlens[:-1].long() + next(times)] = True
        return thinned(batch, dropped)

    monkeypatch.setattr(SetEncoder, "forward", counted)
    monkeypatch.setattr("scdiva.integration.objective.thinned_at_random", without_one)
    return counter


def drawn(passes: Passes):
    """Toy cells with perturbations and states, whose matrix counts its reads."""
    adata = sd.datasets.toy(N_CELLS, N_GENES, rng=1)
    a, b, c = map(str, adata.var_names[:3])
    adata.obs["perturbation"] = np.resize(["control", a, b, f"{a}+{b}", c, f"{b}+{c}"], N_CELLS)
    adata.obs["state"] = np.resize(["now", "wanted"], N_CELLS)
    adata.X = passes.matrix(adata.X)
    return adata


def other_cells(n_cells: int = 60):
    """Other cells of the same genes, whose matrix nobody counts."""
    return sd.datasets.toy(N_CELLS + 1, N_GENES, rng=1)[:n_cells].copy()


def corrected(adata):
    adata.obsm["X_scdiva_integrated"] = np.random.default_rng(0).normal(size=(N_CELLS, 8))
    return lambda: sd.tl.corrected_expression(adata, "batch", gene(adata))


def ranked(adata):
    small = other_cells(N_CELLS)
    small.obs["perturbation"] = adata.obs["perturbation"].to_numpy()
    fitted = sd.tl.fit_perturbation(small, "perturbation")
    return lambda: sd.tl.rank_perturbations(adata, "state", "now", target="wanted", model=fitted)


def scored(adata):
    small = other_cells(N_CELLS)
    small.obs["perturbation"] = adata.obs["perturbation"].to_numpy()
    double = str(adata.obs["perturbation"].iloc[3])
    predicted = sd.tl.predict_perturbation(
        small[small.obs["perturbation"] != double].copy(), "perturbation", predict=[double]
    )
    return lambda: sd.tl.score_perturbation(predicted, adata)


def partly_labelled(adata):
    adata.obs["cell_type"] = adata.obs["cell_type"].where(np.arange(N_CELLS) % 2 == 0)
    return adata


def regulated(adata):
    sd.tl.grn(adata)
    return lambda: sd.tl.regulon(adata, gene(adata))


def gene(adata):
    return str(adata.var_names[0])


CALLS = {
    "pp.match_genes": sd.pp.match_genes,
    "pp.gene_entropy": sd.pp.gene_entropy,
    "pp.corpus_entropy": sd.pp.corpus_entropy,
    "pp.entropy_serialize": lambda a: sd.pp.entropy_serialize(a, "scdiva-mini"),
    "tl.embed": sd.tl.embed,
    "tl.integrate": lambda a: sd.tl.integrate(a, "batch", steps=3),
    "tl.integrate, labels": lambda a: sd.tl.integrate(a, "batch", "cell_type", steps=3),
    "tl.annotate, query": lambda a: sd.tl.annotate(a, "cell_type", other_cells(), method="linear"),
    "tl.annotate, reference": lambda a: sd.tl.annotate(other_cells(), "cell_type", a, method="linear"),
    "tl.annotate, one object": lambda a: sd.tl.annotate(partly_labelled(a), "cell_type"),
    "tl.annotate, neighbours": lambda a: sd.tl.annotate(other_cells(), "cell_type", a, method="knn"),
    "tl.adapt": sd.tl.adapt,
    "tl.impute": lambda a: sd.tl.impute(a, [gene(a)]),
    "tl.generate": lambda a: sd.tl.generate(a, 3, groupby="cell_type"),
    "tl.reconstruct": lambda a: sd.tl.reconstruct(a, n_steps=2),
    "tl.log_likelihood": lambda a: sd.tl.log_likelihood(a, n_samples=2),
    "tl.gene_embedding": sd.tl.gene_embedding,
    "tl.grn": sd.tl.grn,
    "tl.grn, correlation": lambda a: sd.tl.grn(a, "correlation"),
    "tl.grn, attention": lambda a: sd.tl.grn(a, "attention", sources=[gene(a)]),
    "tl.fit_perturbation": lambda a: sd.tl.fit_perturbation(a, "perturbation"),
    "tl.predict_perturbation": lambda a: sd.tl.predict_perturbation(
        a, "perturbation", predict=[f"{gene(a)}+{a.var_names[2]}"]
    ),
    "pl.marker_heatmap": lambda a: sd.pl.marker_heatmap(a, "cell_type"),
}
PREPARED = {
    "tl.corrected_expression": corrected,
    "tl.rank_perturbations": ranked,
    "tl.regulon": regulated,
    "tl.score_perturbation": scored,
}
"""Calls that need what another call made first, of other cells."""


@pytest.mark.parametrize("name", [*CALLS, *PREPARED])
def test_a_call_reads_its_cells_once_and_encodes_them_once(encoded, name):
    passes = Passes()
    adata = drawn(passes)
    call = PREPARED[name](adata) if name in PREPARED else lambda: CALLS[name](adata)
    passes.n = 0
    encoded.clear()
    call()
    assert passes.n == 1
    assert max(encoded.values(), default=0) <= 1


WRONG = {
    "layer": "nowhere", "input": "x", "gene_ids": "nowhere", "species": "unicorn", "duplicates": "x", "empty": "x",
    "vocabulary": "nowhere", "model": "nowhere", "device": "abacus", "precision": "x", "batch_size": 0, "rng": "x",
    "key_added": "a/b", "batch_key": "nowhere", "labels_key": "nowhere", "groupby": "nowhere", "groups": ["nowhere"],
    "perturbation_key": "nowhere", "control": "nowhere", "dose_key": "nowhere", "state_key": "nowhere",
    "start": "nowhere", "target": "nowhere", "genes": ["nowhere"], "sources": ["nowhere"], "targets": ["nowhere"],
    "predict": ["control"], "dose": -1.0, "candidates": ["nowhere"], "guides": {"nowhere": "x"},
    "fixed": {"nowhere": 1.0}, "parents": {"x": "y"}, "source": "nowhere",
    "steps": 0, "n_steps": 0, "n_samples": 0, "n_targets": 0, "n_neighbors": 0, "n_cells": 0, "n_genes": 0,
    "block_rows": 0, "max_length": 0, "mask_ratio": 2.0, "min_fraction": 2.0, "fraction": 2.0, "backoff": -1.0,
    "reject": 2.0, "method": "x", "metric": "x", "gene_symbols": "nowhere", "condition": "nowhere",
    "basis": "nowhere", "group": "nowhere", "n_names": -1, "save": "/proc/nowhere/plot.png",
}  # fmt: skip
"""A value that each argument of a public call refuses, wherever it is called so."""
GIVEN = {
    "pp.match_genes": {}, "pp.gene_entropy": {}, "pp.corpus_entropy": {}, "pp.entropy_serialize": {}, "tl.embed": {},
    "tl.integrate": {"batch_key": "batch", "labels_key": "cell_type"}, "tl.adapt": {}, "tl.impute": {},
    "tl.annotate": {"labels_key": "cell_type"}, "tl.generate": {"n_cells": 3, "groupby": "cell_type"},
    "tl.reconstruct": {}, "tl.log_likelihood": {}, "tl.gene_embedding": {}, "tl.grn": {"groupby": "cell_type"},
    "tl.fit_perturbation": {"perturbation_key": "perturbation"}, "pl.marker_heatmap": {"key": "cell_type"},
    "tl.predict_perturbation": {"perturbation_key": "perturbation"}, "pl.umap": {"color": "gene"},
    "tl.rank_perturbations": {"state_key": "state", "start": "now", "target": "wanted"}, "tl.score_perturbation": {},
    "tl.regulon": {"source": "gene"}, "pl.delta_scatter": {"condition": "double"}, "pl.discrimination": {},
    "pl.perturbation": {"condition": "double"}, "pl.hit_rate": {},
}  # fmt: skip

AFTER = {"tl.grn": ("sources", "targets")}
"""What is judged by the cells: which genes are expressed widely enough."""


@pytest.fixture(scope="module")
def fitted():
    """A fitted screen, and what it predicts of a double perturbation that it was not given."""
    small = drawn(Passes())
    small.X = other_cells(N_CELLS).X
    double = str(small.obs["perturbation"].iloc[3])
    small = small[small.obs["perturbation"] != double].copy()
    model = sd.tl.fit_perturbation(small, "perturbation")
    return model, sd.tl.predict_perturbation(small, predict=[double], model=model), double


@pytest.mark.parametrize("name", GIVEN)
def test_an_argument_that_is_refused_is_refused_before_any_cell_is_read(encoded, fitted, name):
    passes = Passes()
    adata = drawn(passes)
    if name == "tl.regulon":
        sd.tl.grn(adata)
    objects = {"gene": gene(adata), "double": fitted[2]}
    call = getattr(getattr(sd, name[:2]), name[3:])
    asks = inspect.signature(call).parameters
    arguments = {key: objects.get(value, value) for key, value in GIVEN[name].items() if key in asks}
    arguments |= {key: adata for key in ("adata", "data", "observed") if key in asks}
    arguments |= {"predicted": fitted[1]} if "predicted" in asks else {}
    arguments |= {"model": fitted[0]} if name == "tl.rank_perturbations" else {}
    arguments |= {"reference": other_cells()} if name == "tl.annotate" else {}
    wrong = {key: value for key, value in WRONG.items() if key in asks}
    for key in AFTER.get(name, ()):
        del wrong[key]
    assert wrong
    for key, value in wrong.items():
        passes.n = 0
        encoded.clear()
        with pytest.raises(Exception, match=r".") as caught:
            call(**arguments | {key: value})
        assert isinstance(caught.value, KeyError | ValueError | TypeError | OSError), key
        assert (passes.n, sum(encoded.values())) == (0, 0), f"{key}={value!r}: {caught.value}"


@pytest.fixture(scope="module")
def fitted_by_line():
    return sd.tl.fit_perturbation(by_line(Passes()), "perturbation", groupby="line", dose_key="dose")


def by_line(passes: Passes):
    """Cells of two lines and doses, all conditions in each."""
    adata = drawn(passes)
    adata.obs["line"] = np.repeat(["one", "two"], N_CELLS // 2)
    adata.obs["dose"] = np.resize(np.repeat([1.0, 2.0], 6), N_CELLS)
    return adata


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"predict": ["nowhere"]}, "1 of 1 perturbed genes or labels .*'nowhere'"),
        ({"predict": []}, "predict is empty"),
        ({"groups": ["nowhere"]}, "'nowhere'.*there are 'one', 'two'"),
        ({"groups": ["one", "one"]}, "groups holds 'one' more than once"),
        ({"dose": [1.0, 0.0]}, "dose must be a number above 0"),
    ],
)
def test_what_is_to_be_predicted_is_judged_before_any_cell_is_read(fitted_by_line, fits, options, match):
    passes = Passes()
    adata = by_line(passes)
    design = {"perturbation_key": "perturbation", "groupby": "line", "dose_key": "dose"}
    with pytest.raises(ValueError, match=match):
        sd.tl.predict_perturbation(adata, **(design if fits else {"model": fitted_by_line}) | options)
    assert passes.n == 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"candidates": ["nowhere"]}, "1 of 1 perturbed genes or labels .*'nowhere'"),
        ({"candidates": ["control"]}, "candidates has 'control'"),
        ({"dose": 0.0}, "dose must be a number above 0"),
        ({"dose": [1.0, 2.0]}, "dose must be a number"),
    ],
)
def test_what_is_to_be_ranked_is_judged_before_any_cell_is_read(fitted_by_line, options, match):
    passes = Passes()
    adata = by_line(passes)[: N_CELLS // 2]
    with pytest.raises((TypeError, ValueError), match=match):
        sd.tl.rank_perturbations(adata, "state", "now", target="wanted", model=fitted_by_line, **options)
    assert passes.n == 0


def test_genes_of_a_screen_are_missed_before_any_cell_is_read(fitted_by_line):
    passes = Passes()
    fewer = by_line(passes)[: N_CELLS // 2, :-3]
    with pytest.raises(ValueError, match=r"3 of 150 genes of the screen are not in adata\.var_names"):
        sd.tl.predict_perturbation(fewer, model=fitted_by_line)
    with pytest.raises(ValueError, match=r"3 of 150 genes of the screen are not in adata\.var_names"):
        sd.tl.rank_perturbations(fewer, "state", "now", target="wanted", model=fitted_by_line)
    assert passes.n == 0


def test_rejecting_is_refused_before_any_cell_is_read_where_it_can_mean_nothing():
    passes = Passes()
    adata, reference = drawn(passes), drawn(passes)
    reference.obs["cell_type"] = reference.obs["cell_type"].astype(str)
    labels = dict.fromkeys(set(reference.obs["cell_type"]), "unknown")
    once = reference[~reference.obs["cell_type"].duplicated()]
    with pytest.raises(ValueError, match="'unknown' is a label of the reference, or a group of parents"):
        sd.tl.annotate(adata, "cell_type", reference, parents=labels, reject=0.1)
    with pytest.raises(ValueError, match="each label has only one"):
        sd.tl.annotate(adata, "cell_type", once, reject=0.1)
    assert passes.n == 0
