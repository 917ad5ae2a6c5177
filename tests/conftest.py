"""Settings of all tests; simulated screens, predictions, models and reconstructions."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sys
import warnings

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch

import scdiva as sd
from scdiva import settings
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.tokenizer.vocabulary import load_vocabulary

with contextlib.suppress(ImportError):  # a wheel is tried without it
    import hypothesis

    # no deadline, because the machine may be busy
    hypothesis.settings.register_profile("any machine", deadline=None)
    hypothesis.settings.load_profile("any machine")

# Tests for which numba compiles UMAP run in the same process.
TOGETHER = {
    "tests/pl/test_umap.py": "umap",
    "tests/pl/test_umap_comparisons.py::test_both_maps_are_computed_once_and_kept": "umap",
    "tests/annotation/test_annotate.py::test_clusters_of_the_embedding_or_of_a_column_vote": "umap",
    "tests/embedding/test_embed.py::test_scanpy_finds_neighbours_of_more_than_8_191_cells": "umap",
    "tests/generation/test_generate.py::test_the_map_and_a_file_take_the_cells": "umap",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """As `--dist loadfile`, with the groups of `TOGETHER`."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return TOGETHER.get(nodeid, TOGETHER.get(file, file))

    return Scheduling(config, log)


threads_at_first: list[int] = []


@pytest.fixture(autouse=True)
def _settings_as_before():
    """Restore settings after each test."""
    with settings.override():
        yield


@pytest.fixture(autouse=True)
def _threads_stay():
    """Restore torch's number of threads, which numba changes; tests would take up to a hundred times as long."""
    yield
    if "torch" in sys.modules:
        import torch

        if not threads_at_first:
            threads_at_first.append(torch.get_num_threads())
        if torch.get_num_threads() != threads_at_first[0]:
            torch.set_num_threads(threads_at_first[0])


LABELS = ("control", "A", "B", "C", "A+B", "C+B")


@pytest.fixture(scope="session")
def screen():
    """Counts of perturbed cells, of one group or several."""

    def make(labels=LABELS, groups=("",), n=12, n_genes=40, rng=0):
        rng = np.random.default_rng(rng)
        base = rng.normal(size=n_genes)
        shift = {part: rng.normal(scale=1.5, size=n_genes) * (rng.random(n_genes) < 0.3) for part in "ABC"}
        of_group = {group: rng.normal(scale=0.3, size=n_genes) for group in groups}
        rows = [(label, group) for label, group in itertools.product(labels, groups) for _ in range(n)]
        rate = np.stack([sum((shift.get(p, 0.0) for p in label.split("+")), base) + of_group[g] for label, g in rows])
        counts = rng.poisson(5 * np.exp(rate)).astype(np.float32)
        obs = pd.DataFrame(rows, columns=["perturbation", "line"], index=[f"c{i}" for i in range(len(rows))])
        return ad.AnnData(counts, obs=obs, var=pd.DataFrame(index=[f"G{i}" for i in range(n_genes)]))

    return make


@pytest.fixture(scope="session")
def by_hand():
    """Predict a screen: the observed means with noise, and baselines from plain means.

    `elsewhere` is defined only with groups, `additive` only for combinations, and `linear` never.
    """

    def predict(adata, groupby=None, noise=0.1, rng=0):
        from scdiva.data.cells import log_normalised

        values = log_normalised(adata)[0].toarray()
        label, n_genes = adata.obs["perturbation"].to_numpy(), adata.n_vars
        group = adata.obs[groupby].to_numpy() if groupby else np.full(adata.n_obs, "")
        names = [p for p in dict.fromkeys(label) if p != "control"]
        pairs = [(p, g) for p in names for g in dict.fromkeys(group) if ((label == p) & (group == g)).any()]
        mean = {
            (p, g): values[(label == p) & (group == g)].mean(0)
            for p, g in [*pairs, *(("control", g) for _, g in pairs)]
        }
        singles = {g: np.mean([m for (p, h), m in mean.items() if h == g and len(p) == 1], axis=0) for _, g in pairs}
        nothing = np.full(n_genes, np.nan)

        def additive(p, g):
            control = mean["control", g]
            return sum((mean[part, g] - control for part in p.split("+")), control) if "+" in p else nothing

        def elsewhere(p, g):
            means = [m for (q, h), m in mean.items() if q == p and h != g]
            return np.mean(means, axis=0) if means else nothing

        columns = {
            "scdiva_mean": [mean[p, g] for p, g in pairs],
            "scdiva_sd": [np.full(n_genes, 0.1) for _ in pairs],
            "scdiva_control": [mean["control", g] for _, g in pairs],
            "scdiva_baseline_no_change": [mean["control", g] for _, g in pairs],
            "scdiva_baseline_train_mean": [singles[g] for _, g in pairs],
            "scdiva_baseline_matching_mean": [singles[g] for _, g in pairs],
            "scdiva_baseline_additive": [additive(p, g) for p, g in pairs],
            "scdiva_baseline_linear": [nothing for _ in pairs],
            "scdiva_baseline_elsewhere": [elsewhere(p, g) for p, g in pairs],
        }
        varm = {key: np.stack(vectors, axis=1).astype(np.float32) for key, vectors in columns.items()}
        varm["scdiva_mean"] += noise * np.random.default_rng(rng).normal(size=varm["scdiva_mean"].shape).astype("f4")
        obs = pd.DataFrame(
            pairs, columns=["perturbation", groupby or "line"], index=[f"p{i}" for i in range(len(pairs))]
        )
        n_parts = np.array([len(p.split("+")) for p, _ in pairs])
        record = {
            "perturbation_key": "perturbation", "control": "control", "groupby": groupby or "", "dose_key": "",
            "separator": "+", "condition": np.array([f"{p} in {g}" if g else p for p, g in pairs], dtype=object),
            "perturbation": np.array([p for p, _ in pairs], dtype=object),
            "group": np.array([g for _, g in pairs], dtype=object), "dose": np.full(len(pairs), np.nan),
            "n_parts": n_parts, "n_seen": n_parts, "trained": n_parts == 1,
        }  # fmt: skip
        return ad.AnnData(
            varm["scdiva_mean"].T.copy(),
            obs=obs,
            var=adata.var.copy(),
            varm=varm,
            uns={"scdiva": {"perturbation": record}},
        )

    return predict


@pytest.fixture(scope="session")
def measured():
    """A random screen as arrays; labels are perturbations, followed by @ and the number of the group."""

    def make(labels=("A", "B", "C", "A+B", "B+C"), n_genes=12, state_dim=6, doses=None, rng=0, genes=None):
        from scdiva.perturbation.screen import Conditions, Screen

        draw = np.random.default_rng(rng)
        label_groups = [(label.split("@")[0], int(label.partition("@")[2] or 0)) for label in labels]
        n, n_groups = len(label_groups), max(group for _, group in label_groups) + 1
        conditions = Conditions(
            tuple(tuple(sorted(label.split("+"))) for label, _ in label_groups),
            np.array([group for _, group in label_groups], dtype=np.int64),
            np.ones(n) if doses is None else np.array(doses, dtype=np.float64),
        )
        return Screen(
            tuple(genes or (f"G{j}" for j in range(n_genes))),
            tuple(f"line {i}" for i in range(n_groups)),
            conditions,
            tuple(label for label, _ in label_groups),
            delta=draw.normal(size=(n, n_genes)).astype(np.float32),
            n_cells=draw.integers(5, 50, n),
            control=draw.gamma(2.0, 0.5, (n_groups, n_genes)).astype(np.float32),
            n_control=draw.integers(10, 90, n_groups),
            states=draw.normal(size=(n_groups, state_dim)).astype(np.float32),
            variance=draw.gamma(2.0, 0.2, n_genes).astype(np.float32),
            level=draw.gamma(4.0, 0.5, n_genes).astype(np.float32),
        )

    return make


@pytest.fixture(scope="session")
def network():
    """A small model of 30 real genes, no weight of it zero; its vocabulary beside it."""

    def make(seed=0, n_genes=30, **fields):
        import torch

        from scdiva.datasets import toy
        from scdiva.models import ScDiVa, ScDiVaConfig
        from scdiva.tokenizer.vocabulary import load_vocabulary

        human = load_vocabulary("human")
        vocabulary = human.subset(np.sort(human.match(list(toy(4, 30, rng=2).var_names[:n_genes])).tokens))
        settings = {
            "n_genes": vocabulary.n_genes, "dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 24, "max_length": 20,
            "anchor": "encoder", "anchor_linear_dim": 4, "anchor_learned_dim": 2, "anchor_hidden": 8,
        } | fields  # fmt: skip
        model = ScDiVa(ScDiVaConfig(**settings), generator=torch.Generator().manual_seed(seed)).eval()
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):  # away from the zeros that hide a path
                draw = torch.Generator().manual_seed(100 * seed + number)
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
        model.vocabulary = vocabulary
        return model

    return make


@pytest.fixture(scope="session")
def reconstruct():
    """Write a simulated result of `scdiva.tl.reconstruct` into cells, by default toy cells.

    Genes are ranked by decreasing value. A masked gene is recovered with probability `recall`, at another masked rank,
    or else replaced by a gene that the cell does not express. Values have an error, which decreases with the number of
    steps.
    """

    def make(adata=None, key="scdiva_reconstructed", mask_ratio=0.3, n_steps=1, recall=0.6, rng=0):
        from scdiva.data.cells import log_normalised
        from scdiva.datasets import toy

        adata = toy(40, 80) if adata is None else adata
        draw = np.random.default_rng(rng)
        values = log_normalised(adata)[0].toarray()
        layers = {name: np.zeros(adata.shape, np.float32) for name in ("", "_rank", "_true", "_true_rank", "_masked")}
        for i, row in enumerate(values):
            true = np.argsort(-row, kind="stable")[: (row > 0).sum()]
            absent = list(draw.permutation(np.flatnonzero(row == 0)))
            hidden = np.sort(draw.permutation(len(true))[: round(mask_ratio * len(true))])
            back = true.copy()
            near = hidden[np.argsort(hidden + draw.normal(scale=0.1 * len(true), size=len(hidden)))]
            for position, source in zip(hidden, near, strict=True):
                back[position] = absent.pop() if absent and draw.random() > recall else true[source]
            assert len(set(back)) == len(back)
            layers["_true"][i, true] = row[true]
            layers["_true_rank"][i, true] = np.arange(len(true)) + 1
            layers["_masked"][i, true[hidden]] = 1
            layers["_rank"][i, back] = np.arange(len(true)) + 1
            error = draw.normal(scale=0.6 / np.sqrt(1 + np.log2(n_steps)), size=len(true))
            layers[""][i, back] = np.maximum(row[true] + error * np.isin(np.arange(len(true)), hidden), 0.01)
            swapped = np.isin(back, true)
            layers[""][i, back[swapped]] = np.maximum(row[back] + error, 0.01)[swapped]
        types = {"": "f4", "_rank": "i4", "_true": "f4", "_true_rank": "i4", "_masked": bool}
        for ending, dtype in types.items():
            adata.layers[key + ending] = sp.csr_matrix(layers[ending].astype(dtype))
        note = {"mask_ratio": mask_ratio, "n_steps": n_steps, "scores": {}}
        adata.uns["scdiva"] = {**adata.uns.get("scdiva", {}), key: note}
        return adata

    return make


SETTINGS = {"device": "cpu", "precision": "fp32"}
"""Of all tests and fixtures: results of CPUs with and without bfloat16 arithmetic are equal."""


@pytest.fixture(scope="session", autouse=True)
def _same_settings():
    with sd.settings.override(**SETTINGS):
        yield


@pytest.fixture(autouse=True)
def _quiet(_same_settings):
    with sd.settings.override(progress=False, **SETTINGS):
        yield


@pytest.fixture(scope="session")
def adata():
    return sd.datasets.toy(90, 60, rng=1)


@pytest.fixture(scope="session")
def vocabulary(adata):
    human = load_vocabulary("human")
    tokens = human.match(list(adata.var_names[:55])).tokens  # five genes stay unknown
    return human.subset(np.sort(tokens[tokens >= 0]))


@pytest.fixture(scope="session")
def build(vocabulary):
    def build_model(**fields):
        config = ScDiVaConfig(
            n_genes=vocabulary.n_genes, dim=16, n_heads=2, ffn_dim=24, max_length=40,
            anchor_linear_dim=8, anchor_learned_dim=4, anchor_hidden=8, **{"n_layers": 2, **fields},
        )  # fmt: skip
        model = ScDiVa(config, generator=torch.Generator().manual_seed(0)).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # away from the zeros that hide a path
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        model.vocabulary = vocabulary
        return model

    return build_model


@pytest.fixture(scope="session")
def one(build):
    """A model whose state needs its transformer, too."""
    return build(anchor="encoder", anchor_residual=True)


@pytest.fixture(scope="session")
def learned(build):
    """A model of the paper's kind: the cell state comes from the transformer."""
    return build(anchor="learned")


@pytest.fixture(scope="session")
def altered():
    """Change settings and tensors of a saved annotator or perturbation model, and its checksums with them."""
    import json

    from safetensors.torch import load_file, save_file

    from scdiva.models.storage import write_sums

    def alter(folder, settings=None, tensors=None):
        (file,) = folder.glob("*.json")
        if settings is not None:
            content = json.loads(file.read_text())
            settings(content)
            file.write_text(json.dumps(content))
        if tensors is not None:
            content = load_file(file.with_suffix(".safetensors"))
            tensors(content)
            save_file(content, file.with_suffix(".safetensors"))
        write_sums(folder, [file.name, f"{file.stem}.safetensors", "model/SHA256SUMS"])
        return folder

    return alter


@pytest.fixture(scope="module")
def cells():
    """Cells of three batches."""
    return sd.datasets.toy(240, 60, n_batches=3, rng=1)


@pytest.fixture(scope="module")
def plain(build):
    """A model whose state is its set encoder's alone."""
    return build(anchor="encoder", anchor_residual=False)


def _bytes_of(value):
    """Every byte of what an AnnData object may hold, and of its type and shape."""
    if isinstance(value, ad.AnnData):
        yield str(value.shape).encode()
        parts = ("X", "layers", "obs", "var", "uns", "obsm", "varm", "obsp", "varp", "raw")
        for part in parts:
            yield part.encode()
            yield from _bytes_of(getattr(value, part))
    elif value is None:
        yield b"None"
    elif sp.issparse(value):
        yield f"{value.format} {value.shape}".encode()
        arrays = (value.data, value.indices, value.indptr) if hasattr(value, "indptr") else (value.tocoo().data,)
        for array in arrays:
            yield from _bytes_of(np.asarray(array))
    elif isinstance(value, pd.DataFrame):
        yield from _bytes_of(value.index)
        for name in value.columns:
            yield repr((name, str(value[name].dtype))).encode()
            yield from _bytes_of(value[name])
    elif isinstance(value, pd.Series | pd.Index):
        if isinstance(value.dtype, pd.CategoricalDtype):
            yield repr((list(value.array.categories), bool(value.array.ordered))).encode()
            yield from _bytes_of(np.asarray(value.array.codes))
        else:
            yield repr(list(value)).encode()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}".encode()
        yield repr(value.tolist()).encode() if value.dtype.kind in "OV" else np.ascontiguousarray(value).tobytes()
    elif hasattr(value, "compute"):  # dask
        yield from _bytes_of(value.compute())
    elif hasattr(value, "to_memory"):  # backed
        yield from _bytes_of(value.to_memory())
    elif hasattr(value, "items"):
        for key, item in sorted(value.items(), key=lambda pair: str(pair[0])):
            yield repr(key).encode()
            yield from _bytes_of(item)
    elif hasattr(value, "X") and hasattr(value, "var"):  # raw
        for part in ("X", "var", "varm"):
            yield from _bytes_of(getattr(value, part))
    else:
        yield repr(value).encode()


@pytest.fixture(scope="session")
def hashed():
    """SHA-256 of all that an AnnData object, a table or a mapping of them holds, each part with its type and shape."""

    def digest(value):
        total = hashlib.sha256(f"view: {getattr(value, 'is_view', None)}".encode())
        for part in _bytes_of(value):
            total.update(len(part).to_bytes(8, "big") + part)
        return total.hexdigest()

    return digest


@pytest.fixture(scope="session")
def weights():
    """A copy of a model's weights."""
    return lambda model: {name: value.clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="session")
def same():
    """Whether two models' weights are the same to the bit."""
    return lambda first, second: (
        first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())
    )


@pytest.fixture(scope="session")
def perturbed_cells(adata):
    """Counts of a screen of real genes. Labels name genes by number ("0+3"), control and labels as they are."""

    def make(labels=("control", "0", "1", "2", "3", "4", "0+1", "1+2"), groups=("",), n=10, rng=0, doses=None):
        genes = list(adata.var_names)
        draw = np.random.default_rng(rng)
        shift = draw.normal(scale=1.2, size=(len(genes) + 5, len(genes))) * (draw.random(len(genes)) < 0.4)
        base, of_group = draw.normal(size=len(genes)), draw.normal(scale=0.3, size=(len(groups), len(genes)))
        rows, rates = [], []
        for label in labels:
            parts = [part for part in label.split("+") if part not in ("control", "ctrl")]
            name = "+".join(genes[int(p)] if p.isdigit() else p for p in label.split("+"))
            for (number, group), dose in itertools.product(enumerate(groups), doses if doses and parts else (0.0,)):
                change = sum((shift[int(p) if p.isdigit() else len(genes) + len(p) % 5] for p in parts), 0 * base)
                rates += n * [base + of_group[number] + (change * np.log2(1 + dose) if dose else change)]
                rows += n * [(name, group, dose)]
        counts = draw.poisson(5 * np.exp(np.stack(rates))).astype(np.float32)
        obs = pd.DataFrame(rows, columns=["perturbation", "line", "dose"], index=[f"c{i}" for i in range(len(rows))])
        return ad.AnnData(sp.csr_matrix(counts), obs=obs, var=pd.DataFrame({"n": range(len(genes))}, index=genes))

    return make


@pytest.fixture(scope="session")
def genes(adata):
    """Names of the genes of the toy cells; the vocabulary lacks the last five."""
    return list(adata.var_names)


@pytest.fixture(scope="session")
def edges():
    """A network that `scdiva.tl.grn` wrote, as a matrix of all genes: NaN where there is no edge."""

    def matrix(adata, key="scdiva_grn"):
        graph = adata.varp[key].tocoo()
        weights = np.full(graph.shape, np.nan)
        weights[graph.row, graph.col] = graph.data
        return weights

    return matrix


@pytest.fixture(scope="session")
def ranked():
    """Genes of each cell by rank, as columns of adata, with tokens and values as far as the transformer sees them."""

    def cells_of(adata, model):
        from scdiva.data.cells import open_cells

        c = model.config
        source = open_cells(adata, model.vocabulary, max_length=c.input_length, entropy_floor=c.entropy_floor)
        column = {int(token): i for i, token in enumerate(source.tokens) if token >= 0}
        for _, (indptr, tokens, values) in source.windows(4096):
            for start, stop in itertools.pairwise(indptr):
                visible = slice(start, min(stop, start + c.max_length))
                token_ids = tokens[visible].astype(np.int64)
                yield np.array([column[t] for t in token_ids]), torch.tensor(token_ids), torch.tensor(values[visible])

    return cells_of


@pytest.fixture
def grouped(adata):
    """Thirty-six cells in three groups, one of which has a slash in its name."""
    cells = adata[:36].copy()
    cells.obs["kind"] = pd.Categorical.from_codes(np.arange(36) % 7 % 3, ["CD4/CD8", "β δ", "plain"])
    return cells


@pytest.fixture
def infer(one):
    """Call `scdiva.tl.grn` for all edges."""

    def run(cells, method="correlation", **options):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ad.ImplicitModificationWarning)
            return sd.tl.grn(cells, method, **{"model": one, "n_targets": None, "min_fraction": 0} | options)

    return run


@pytest.fixture(scope="session")
def headed(build):
    """A model with a state head, of random weights: what it says of cells it learns from them."""
    return build(anchor="encoder", state_head=True, state_rank=6)


@pytest.fixture(scope="session")
def querying(build):
    """The same with a query head, of random weights too."""
    model = build(anchor="encoder", state_head=True, state_rank=6, query_head=True)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        model.query_head.out.weight.normal_(std=0.3)
        model.query_head.line.weight.normal_(std=0.1)
        model.query_head.out.bias[1] = 6  # values are above zero
    return model


@pytest.fixture(scope="session")
def reading(build):
    """A model with a state head and a reader, of random weights."""
    model = build(anchor="encoder", state_head=True, state_rank=6, reader=True)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        model.reader.out.weight.normal_(std=0.1)
    return model


@pytest.fixture(scope="session")
def blood():
    """Every fourteenth of scanpy's blood cells, log-normalised as they are in `.raw`; never written to."""
    import scanpy as sc

    cells = sc.datasets.pbmc68k_reduced()[::14].copy()
    return ad.AnnData(cells.raw.X.copy(), obs=cells.obs, var=cells.raw.var)


@pytest.fixture(scope="session")
def tiny():
    """Make a tiny model; the same weights each time."""

    def make(**fields) -> ScDiVa:
        settings = {
            "n_genes": 30, "dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 24, "max_length": 16,
            "anchor_linear_dim": 8, "anchor_learned_dim": 6, "anchor_hidden": 12, "anchor": "encoder",
        } | fields  # fmt: skip
        return ScDiVa(ScDiVaConfig(**settings), generator=torch.Generator().manual_seed(1))

    return make
