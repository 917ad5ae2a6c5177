"""Gene networks compared with known edges, correlations, mutual information and a random forest.

    python benchmarks/networks.py --data FOLDER --tables FOLDER [--sets pbmc3k_raw ...] [--arms attention ...]
        [--part edges stability] [--seeds 0 1 2] [--again]

`--tables` is a folder of TRRUST (`trrust_hs.csv`) and DoRothEA (`dorothea_hs_ABC.csv`), each with the columns tf and
target. Genes that the model knows and that more than 1% of the cells express are used.

Ours are the methods of `tl.grn`: embedding, attention, correlation. Rivals: spearman; mutual_information (quantile bins
of expressing cells, zero is its own bin); forest (GENIE3: a random forest for each target); expression (product of the
means, which contains no information on pairs); random.

- edges: average precision and early precision of each table's factors by its targets, divided by the share of known
  edges (1 for a random ranking), with an interval over factors and compared with a null distribution in which the
  targets of each factor are exchanged for others of similar expression.
- stability: agreement of graphs of two halves of the cells.
"""

from __future__ import annotations

from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
from _tasks import Found, fingerprint, log_normalised, measure, parser_of
from scipy.special import xlogy
from scipy.stats import rankdata, spearmanr

import scdiva as sd
from scdiva._constants import UNKNOWN
from scdiva.tokenizer import load_vocabulary

NAME = "networks"
SETS = ("pbmc3k_raw", "kang_pbmc_12k_1287g", "sc_mixology_cell_lines")
REFERENCES = {"trrust": "trrust_hs.csv", "dorothea": "dorothea_hs_ABC.csv"}
OURS = ("embedding", "attention", "correlation")
ARMS = (*OURS, "spearman", "mutual_information", "forest", "expression", "random")
SIGNED = ("correlation", "spearman")
"""Arms whose edges are ranked by absolute weight."""
MIN_FRACTION, N_BINS, N_NULL, N_BOOTSTRAP = 0.01, 4, 200, 200
STABLE = {"sources": 40, "targets": 400, "cells": 2000}
FOREST = {"n_estimators": 100, "max_features": "sqrt", "max_depth": 10}
TYPE, KEY = "cell_type", "scdiva_grn"


def prepared(adata: ad.AnnData, model: str) -> ad.AnnData:
    """Counts and types of all cells; in var the `token` of each gene, UNKNOWN for a gene that is not used."""
    counts = sp.csr_matrix(adata.X, dtype=np.float32)
    tokens = load_vocabulary(model).match(adata.var_names).tokens
    once = ~pd.Series(tokens).duplicated(keep=False).to_numpy()
    used = once & (counts.getnnz(axis=0) > MIN_FRACTION * adata.n_obs)
    obs = pd.DataFrame({TYPE: adata.obs[TYPE].astype(str).to_numpy()}, index=adata.obs_names)
    var = pd.DataFrame({"token": np.where(used, tokens, UNKNOWN)}, index=adata.var_names.astype(str))
    return ad.AnnData(counts, obs=obs, var=var)


def edges(file: Path, adata: ad.AnnData, model: str) -> pd.DataFrame:
    """`source` and `target`, as the dataset names them, of a table's edges between genes that are used."""
    table, used = pd.read_csv(file), adata.var[adata.var["token"] != UNKNOWN]
    name_of = pd.Series(used.index.to_numpy(), index=used["token"].to_numpy())

    def named(column: str) -> np.ndarray:
        return name_of.reindex(load_vocabulary(model).match(table[column].astype(str)).tokens).to_numpy()

    found = pd.DataFrame({"source": named("tf"), "target": named("target")}).dropna()
    found = found[found["source"] != found["target"]].drop_duplicates(ignore_index=True)
    if found.empty:
        raise ValueError(f"{file.name}: no edge connects genes that are expressed in this dataset.")
    return found


def known_matrix(frame: pd.DataFrame, sources: list[str], targets: list[str]) -> np.ndarray:
    """Which edges are known, sources by targets."""
    known = np.zeros((len(sources), len(targets)), dtype=bool)
    known[pd.Index(sources).get_indexer(frame["source"]), pd.Index(targets).get_indexer(frame["target"])] = True
    return known


def fit(adata: ad.AnnData, arm: str, sources: list[str], targets: list[str], model: str, seed: int) -> Found:
    """Weights of the edges, sources by targets."""
    if arm in OURS:
        sd.tl.grn(
            adata, method=arm, sources=sources, targets=targets, n_targets=None, min_fraction=0.0, model=model,
            key_added=KEY,
        )  # fmt: skip
        rows, columns = (adata.var_names.get_indexer(names) for names in (sources, targets))
        return {"weights": sp.csr_matrix(adata.varp[KEY])[rows][:, columns].toarray()}
    if arm == "random":
        return {"weights": np.random.default_rng(seed).random((len(sources), len(targets)), dtype=np.float32)}
    values = log_normalised(adata).X
    x, y = (values[:, adata.var_names.get_indexer(names)].toarray() for names in (sources, targets))
    if arm == "expression":
        return {"weights": np.outer(x.mean(axis=0), y.mean(axis=0))}
    if arm == "spearman":
        x, y = (rankdata(some, axis=0) for some in (x, y))
        x, y = (some - some.mean(axis=0) for some in (x, y))
        return {"weights": (x.T @ y) / np.maximum(np.outer(*(np.linalg.norm(some, axis=0) for some in (x, y))), 1e-12)}
    if arm == "mutual_information":
        return {"weights": mutual_information(binned(x), binned(y))}
    return {"weights": forest(x, y, sources, targets, seed)}


def binned(values: np.ndarray) -> np.ndarray:
    """The bin of each value: 0 for zero, 1 to `N_BINS` by quantiles of the gene's positive values."""
    found = np.zeros(values.shape, dtype=np.int8)
    for gene, column in enumerate(values.T):
        if (there := column > 0).any():
            inner = np.quantile(column[there], np.arange(1, N_BINS) / N_BINS)
            found[there, gene] = 1 + np.searchsorted(inner, column[there], side="left")
    return found


def mutual_information(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Plug-in mutual information of bins, in nats, of every column of x with every column of y."""
    n, bins = len(x), np.arange(N_BINS + 1)
    first = (x[:, :, None] == bins).reshape(n, -1).astype(np.float32)
    blocks = []
    for start in range(0, y.shape[1], 100):
        some = y[:, start : start + 100]
        second = (some[:, :, None] == bins).reshape(n, -1).astype(np.float32)
        joint = (first.T @ second).reshape(x.shape[1], len(bins), some.shape[1], len(bins)) / n
        p, q = joint.sum(axis=3)[:, :, :1], joint.sum(axis=1)[:1]
        marginal = xlogy(p, p).sum(axis=1) + xlogy(q, q).sum(axis=2)
        blocks.append(xlogy(joint, joint).sum(axis=(1, 3)) - marginal)
    return np.maximum(np.concatenate(blocks, axis=1), 0)


def forest(x: np.ndarray, y: np.ndarray, sources: list[str], targets: list[str], seed: int) -> np.ndarray:
    """GENIE3: importance of each source, not normalised, in a random forest for each target."""
    from sklearn.ensemble import RandomForestRegressor

    found = np.zeros((len(sources), len(targets)), dtype=np.float32)
    for number, name in enumerate(targets):
        target, others = y[:, number], np.flatnonzero(np.array(sources) != name)
        if target.std() > 0:
            fitted = RandomForestRegressor(**FOREST, n_jobs=1, random_state=seed)
            fitted.fit(x[:, others], target / target.std())
            gains = [tree.tree_.compute_feature_importances(normalize=False) for tree in fitted.estimators_]
            found[others, number] = np.mean(gains, axis=0)
    return found


def precisions(known: np.ndarray, times: np.ndarray, last: np.ndarray) -> tuple[float, float]:
    """Average precision, and precision among the best edges, as many as are known, each over the share of known edges.

    `known` and how often each edge counts (`times`) are in order of falling weight; `last` are the ends of runs of
    equal weight, which are counted together.
    """
    n, found = np.cumsum(times)[last], np.cumsum(known * times)[last]
    total = found[-1]
    average = (np.diff(found, prepend=0) * found / np.maximum(n, 1)).sum() / total
    early = np.interp(total, np.append(0, n), np.append(0, found)) / total
    share = total / n[-1]
    return float(average / share), float(early / share)


def edge_scores(weights: np.ndarray, known: np.ndarray, self_edges: np.ndarray, means: np.ndarray, seed: int) -> dict:
    """Both ratios, their 95% bootstrap intervals over sources, and the null distribution matched by expression."""
    rng, keep = np.random.default_rng(seed), ~self_edges
    tenth = np.floor((rankdata(means) - 0.5) * 10 / len(means)).astype(int)
    row_of, column_of = np.nonzero(keep)
    order = np.argsort(-weights[keep], kind="stable")
    row_of, column_of = row_of[order], column_of[order]
    ranked = weights[row_of, column_of]
    last = np.flatnonzero(np.append(np.diff(ranked) != 0, True))
    columns = [np.flatnonzero(tenth == group) for group in range(10)]

    def score(truth: np.ndarray, times: np.ndarray) -> tuple[float, float]:
        return precisions(truth[row_of, column_of], times[row_of], last)

    def exchanged() -> np.ndarray:
        drawn = np.zeros_like(known)
        for some in columns:
            for row, n in enumerate(known[:, some].sum(axis=1)):
                if n:
                    drawn[row, rng.choice(some[keep[row, some]], n, replace=False)] = True
        return drawn

    once = np.ones(len(known), dtype=int)
    seen = score(known & keep, once)
    null = np.array([score(exchanged(), once) for _ in range(N_NULL)])
    draws = [rng.multinomial(len(known), once / len(known)) for _ in range(N_BOOTSTRAP)]
    drawn = np.array([score(known & keep, times) for times in draws if known[times > 0].any()])
    found: dict = {"n_known": int(known.sum()), "n_sources": len(known), "n_targets": known.shape[1]}
    for column, name in enumerate(("auprc_ratio", "early_precision")):
        low, high = np.quantile(drawn[:, column], [0.025, 0.975])
        above = int((null[:, column] >= seen[column]).sum())
        found |= {
            name: seen[column], f"{name}_low": round(float(low), 4), f"{name}_high": round(float(high), 4),
            f"{name}_null_mean": round(float(null[:, column].mean()), 4),
            f"{name}_null_high": round(float(np.quantile(null[:, column], 0.95)), 4),
            f"{name}_p": round((1 + above) / (1 + N_NULL), 4),
        }  # fmt: skip
    return found


def fit_halves(adata: ad.AnnData, arm: str, sources: list[str], targets: list[str], model: str, seed: int) -> Found:
    """Weights from two halves of some cells."""
    rows = np.random.default_rng(seed).permutation(adata.n_obs)[: STABLE["cells"]]
    halves = (np.sort(half) for half in np.array_split(rows, 2))
    graphs = [fit(adata[half].copy(), arm, sources, targets, model, seed)["weights"] for half in halves]
    return {"graphs": graphs}


def agreement(first: np.ndarray, second: np.ndarray) -> dict[str, float]:
    """Rank correlation of two graphs, and the Jaccard index of their best 1% of edges."""
    n = max(1, first.size // 100)
    best = [set(np.argsort(-graph.ravel(), kind="stable")[:n]) for graph in (first, second)]
    shared = len(best[0] & best[1])
    return {
        "spearman": float(spearmanr(first.ravel(), second.ravel()).statistic),
        "jaccard": shared / (2 * n - shared),
    }


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, SETS, ARMS, ("edges", "stability"))
    parser.add_argument("--tables", type=Path, required=True, help="folder of the tables of known edges")
    options = parser.parse_args(argv)
    for name in options.sets:
        adata = prepared(ad.read_h5ad(options.data / f"{name}.h5ad"), options.model)
        means = pd.Series(np.asarray(log_normalised(adata).X.mean(axis=0)).ravel(), adata.var_names)
        known = {one: edges(options.tables / file, adata, options.model) for one, file in REFERENCES.items()}
        same = {"cells": fingerprint(adata, (TYPE,))}
        for arm in options.arms:
            size = np.abs if arm in SIGNED else np.asarray
            for reference, frame in known.items() if "edges" in options.part else ():
                sources, targets = (sorted(frame[key].unique()) for key in ("source", "target"))
                place = {"part": "edges", "set": name, "arm": arm, "reference": reference}
                once, given = arm not in ("forest", "random"), (adata, arm, sources, targets, options.model)
                truth = known_matrix(frame, sources, targets)
                itself, mean = np.array(sources)[:, None] == np.array(targets), means[targets].to_numpy()

                def score(found: Found, seed: int, size=size, rest=(truth, itself, mean)) -> dict:
                    return edge_scores(size(found["weights"].astype(float)), *rest, seed)

                measure(NAME, place, same, fit, given, score, options, once=once)
            if "stability" in options.part and arm != "forest":
                rng = np.random.default_rng(0)
                frame = pd.concat(known.values())
                sources, targets = (
                    sorted(rng.permutation(sorted(frame[key].unique()))[: STABLE[f"{key}s"]].tolist())
                    for key in ("source", "target")
                )
                measure(
                    NAME, {"part": "stability", "set": name, "arm": arm, "what": "halves"}, same, fit_halves,
                    (adata, arm, sources, targets, options.model),
                    lambda found, seed, size=size: agreement(*(size(graph) for graph in found["graphs"])), options,
                )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
