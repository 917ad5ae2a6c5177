from __future__ import annotations

import itertools
import warnings

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch

import scdiva as sd
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.tokenizer.vocabulary import load_vocabulary


@pytest.fixture(autouse=True)
def _quiet():
    with sd.settings.override(progress=False, device="cpu", precision="fp32"):
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


@pytest.fixture(scope="module")
def cells():
    """Cells of three batches."""
    return sd.datasets.toy(240, 60, n_batches=3, rng=1)


@pytest.fixture(scope="module")
def plain(build):
    """A model whose state is its set encoder's alone."""
    return build(anchor="encoder", anchor_residual=False)


@pytest.fixture(scope="session")
def contents():
    """All that an AnnData object holds, to be compared."""

    def contents_of(adata):
        return {
            "X": adata.X.toarray().tobytes(),
            "obs": adata.obs.to_csv(),
            "var": adata.var.to_csv(),
            "uns": repr(adata.uns),
            **{
                f"{part}/{key}": np.asarray(value).tobytes()
                for part in ("obsm", "layers", "varm")
                for key, value in getattr(adata, part).items()
            },
            **{
                f"{part}/{key}": sp.csr_matrix(value).toarray().tobytes()
                for part in ("obsp", "varp")
                for key, value in getattr(adata, part).items()
            },
        }

    return contents_of


@pytest.fixture(scope="session")
def weights():
    """A copy of a model's weights."""
    return lambda model: {name: value.clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="session")
def same():
    """Whether two models' weights are the same to the bit."""
    return lambda one, other: (
        one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
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
            named = "+".join(genes[int(p)] if p.isdigit() else p for p in label.split("+"))
            for (number, group), dose in itertools.product(enumerate(groups), doses if doses and parts else (0.0,)):
                change = sum((shift[int(p) if p.isdigit() else len(genes) + len(p) % 5] for p in parts), 0 * base)
                rates += n * [base + of_group[number] + (change * np.log2(1 + dose) if dose else change)]
                rows += n * [(named, group, dose)]
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
        found = np.full(graph.shape, np.nan)
        found[graph.row, graph.col] = graph.data
        return found

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
                seen = slice(start, min(stop, start + c.max_length))
                there = tokens[seen].astype(np.int64)
                yield np.array([column[t] for t in there]), torch.tensor(there), torch.tensor(values[seen])

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
def blood():
    """Every fourteenth of scanpy's blood cells, log-normalised as they are in `.raw`; never written to."""
    import scanpy as sc

    cells = sc.datasets.pbmc68k_reduced()[::14].copy()
    return ad.AnnData(cells.raw.X.copy(), obs=cells.obs, var=cells.raw.var)
