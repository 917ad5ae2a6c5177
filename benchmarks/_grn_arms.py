"""The arms of grn.py. A job runs in a process of its own, which this file is when it is called:

    python benchmarks/_grn_arms.py job.json

A job names the prepared cells (`_grn_sets.prepared`), the arm, which cells to take (`rows`; all without it), its
`sources` and `targets` and a `seed`. The process writes the weights (npz, `weights`: sources by targets; of modules
`genes`, `modules` and `strength`) and prints, as JSON, its seconds and its peak resident memory. Importing libraries
and reading the file are not in the seconds.
"""

from __future__ import annotations

import anndata as ad
import numpy as np
import scipy.sparse as sp
from _grn_scores import OURS
from _grn_sets import TOKEN, log_normalised
from _process import Watch, do
from scipy.special import xlogy
from scipy.stats import rankdata

import scdiva as sd
from scdiva._constants import UNKNOWN
from scdiva.networks.methods import attention_weights

KEY = "scdiva_grn"
N_BINS = 4
"""Quantile bins of a gene among the cells that express it; those that do not are a bin of their own."""
FOREST = {"n_estimators": 100, "max_features": "sqrt", "max_depth": 10}
BLOCK = 100


def values(adata: ad.AnnData, genes: list[str]) -> np.ndarray:
    """Log-normalised values of these genes, all genes in the total, float32 of shape (cells, genes)."""
    return log_normalised(adata)[:, adata.var_names.get_indexer(genes)].toarray()


def ours(adata: ad.AnnData, job: dict) -> np.ndarray:
    """`tl.grn` by its defaults, all pairs kept: which genes take part was settled on all cells."""
    sd.tl.grn(
        adata, method=job["arm"], sources=job["sources"], targets=job["targets"], n_targets=None, min_fraction=0.0,
        model=job["model"], key_added=KEY,
    )  # fmt: skip
    rows, columns = (adata.var_names.get_indexer(job[key]) for key in ("sources", "targets"))
    return sp.csr_matrix(adata.varp[KEY])[rows][:, columns].toarray()


def spearman(adata: ad.AnnData, job: dict) -> np.ndarray:
    """Correlation of ranks, ties sharing their mean; 0 for a gene that is the same in all cells."""

    def standard(genes: list[str]) -> np.ndarray:
        ranks = rankdata(values(adata, genes), axis=0).astype(np.float32)
        ranks -= ranks.mean(axis=0)
        length = np.linalg.norm(ranks, axis=0)
        return ranks / np.where(length > 0, length, 1)

    return standard(job["sources"]).T @ standard(job["targets"])


def mutual_information(adata: ad.AnnData, job: dict) -> np.ndarray:
    """Plug-in mutual information in nats: `N_BINS` quantile bins of expressing cells, and those that do not express."""
    sources, targets = (binned(values(adata, job[key])) for key in ("sources", "targets"))
    ours_, n = _indicators(sources), len(sources)
    blocks = []
    for start in range(0, targets.shape[1], BLOCK):
        some = targets[:, start : start + BLOCK]
        joint = (ours_.T @ _indicators(some)).reshape(sources.shape[1], N_BINS + 1, some.shape[1], N_BINS + 1) / n
        of_source, of_target = joint.sum(axis=3)[:, :, :1], joint.sum(axis=1)[:1]
        apart = xlogy(of_source, of_source).sum(axis=1) + xlogy(of_target, of_target).sum(axis=2)
        blocks.append(xlogy(joint, joint).sum(axis=(1, 3)) - apart)
    return np.maximum(np.concatenate(blocks, axis=1), 0)


def binned(matrix: np.ndarray) -> np.ndarray:
    """The bin of each value: 0 for zero, 1 to `N_BINS` by quantiles of the gene's values above zero."""
    found = np.zeros(matrix.shape, dtype=np.int8)
    for gene, column in enumerate(matrix.T):
        there = column > 0
        if there.any():
            inner = np.quantile(column[there], np.arange(1, N_BINS) / N_BINS)
            found[there, gene] = 1 + np.searchsorted(inner, column[there], side="left")
    return found


def _indicators(bins: np.ndarray) -> np.ndarray:
    """float32 of shape (cells, genes * bins): 1 where a cell is in a gene's bin."""
    return (bins[:, :, None] == np.arange(N_BINS + 1)).reshape(len(bins), -1).astype(np.float32)


def forest(adata: ad.AnnData, job: dict) -> np.ndarray:
    """GENIE3: how much of a target's variance splits on each source take off, in a random forest for each target."""
    from sklearn.ensemble import RandomForestRegressor

    features, targets = (values(adata, job[key]) for key in ("sources", "targets"))
    place = {name: number for number, name in enumerate(job["sources"])}
    found = np.zeros((len(place), targets.shape[1]), dtype=np.float32)
    for number, name in enumerate(job["targets"]):
        target = targets[:, number]
        others = np.delete(np.arange(len(place)), place[name]) if name in place else np.arange(len(place))
        if target.std() > 0 and len(others):
            fitted = RandomForestRegressor(**FOREST, n_jobs=1, random_state=job["seed"])
            fitted.fit(features[:, others], target / target.std())
            # as in GENIE3 not scaled to a sum of 1, so that targets which no source tells anything of weigh less
            gains = [tree.tree_.compute_feature_importances(normalize=False) for tree in fitted.estimators_]
            found[others, number] = np.mean(gains, axis=0)
    return found


def cooccurrence(adata: ad.AnnData, job: dict) -> np.ndarray:
    """What attention would be if all keys had one rank: which genes are expressed in the same cells, and no more."""
    there = log_normalised(adata)
    there.data[:] = 1
    sources, targets = (there[:, adata.var_names.get_indexer(job[key])] for key in ("sources", "targets"))
    length = there[:, (adata.var[TOKEN] != UNKNOWN).to_numpy()].getnnz(axis=1)
    both, holding = (sources.T @ targets).toarray(), targets.getnnz(axis=0)
    return np.nan_to_num(attention_weights(None, both, holding, sources.T @ length, length.sum()))


def expression(adata: ad.AnnData, job: dict) -> np.ndarray:
    """Product of the mean expressions, which knows nothing of any pair."""
    sources, targets = (values(adata, job[key]).mean(axis=0) for key in ("sources", "targets"))
    return np.outer(sources, targets)


def chance(adata: ad.AnnData, job: dict) -> np.ndarray:
    """Random numbers."""
    return np.random.default_rng(job["seed"]).random((len(job["sources"]), len(job["targets"])), dtype=np.float32)


ARMS = {
    **dict.fromkeys(OURS, ours), "spearman": spearman, "mutual_information": mutual_information, "forest": forest,
    "cooccurrence": cooccurrence, "expression": expression, "random": chance,
}  # fmt: skip
"""An arm takes the cells and the job; it gives the weights of its sources' edges to its targets."""


def modules(adata: ad.AnnData, job: dict) -> dict[str, np.ndarray]:
    """Modules of the graph over all genes that take part, `tl.grn` and `tl.grn_modules` by their defaults."""
    sd.tl.grn(adata, method=job["arm"], sources=job["targets"], targets=job["targets"], min_fraction=0.0,
              model=job["model"], key_added=KEY)  # fmt: skip
    sd.tl.grn_modules(adata, key=KEY, rng=job["seed"], key_added="module")
    graph = abs(sp.csr_matrix(adata.varp[KEY]))
    strength = np.asarray(graph.sum(axis=0)).ravel() + np.asarray(graph.sum(axis=1)).ravel()
    there = adata.var["module"].notna().to_numpy()
    names = adata.var["module"][there].astype(str).to_numpy(dtype="U")
    genes = adata.var_names[there].to_numpy(dtype="U")
    return {"genes": genes, "modules": names, "strength": strength[there]}


def run(job: dict) -> tuple[dict[str, np.ndarray], dict]:
    """Do a job; gives the weights or modules, and what they cost."""
    adata = ad.read_h5ad(job["file"])
    if job.get("rows") is not None:
        adata = adata[job["rows"]].copy()
    watch = Watch()
    if job["part"] == "modules":
        found = modules(adata, job)
    else:
        found = {"weights": ARMS[job["arm"]](adata, job).astype(np.float32)}
    return found, watch.cost()


if __name__ == "__main__":
    do(run)
