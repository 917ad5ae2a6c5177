"""Imputation, reconstruction and generation, compared with scVI, neighbours, marginals and resampling.

    python benchmarks/imputation.py --data FOLDER [--sets pbmc3k_raw ...] [--part impute masked population]
        [--arms ours knn ...] [--seeds 0 1 2] [--again]

- impute: a tenth of the counts above zero is removed and imputed. Spearman correlation per cell and per gene, error.
  knn averages 30 neighbours; magic is MAGIC with its defaults (`pip install magic-impute`).
- masked: 30% of the genes of test cells (a fifth of the dataset) are masked; `tl.reconstruct` with true ranks (`ours`)
  or without ranks (`ours_no_places`), compared with the marginal frequencies of the training cells.
- population: cells from `tl.generate` compared with held-out cells: AUROC of a random forest and of a logistic
  regression that separate both, correlation agreement of genes. `independent` draws each gene alone; `other_real` are
  other real cells.
"""

from __future__ import annotations

from collections.abc import Callable

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
from _run import Result, fingerprint, fitted_scvi, log_normalised, measure, parser_of
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.neighbors import kneighbors_graph
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import scdiva as sd
from scdiva import _constants as C
from scdiva._constants import N_SPECIAL
from scdiva.metrics import marginal_recall
from scdiva.models import load_model

NAME = "imputation"
TYPE, UNLABELLED = "cell_type", "unlabelled"
SETS = {"kang_pbmc_12k_1287g": 4000, "pbmc3k_raw": 6000} | dict.fromkeys((
    "baron2016_mouse_pancreas", "darmanis_brain_320", "han2018_mca_stomach_intestine", "mouse_brain_zeisel_550",
    "mouse_pancreas_bastidasponce_739", "panc8_small_500", "perturbench_devel_norman_mcfaline_5961_500g",
    "sc_mixology_cell_lines",
), 1000)  # fmt: skip
"""Maximum number of cells of each dataset; only the first two are used for reconstruction and generation."""
N_TEST = 40
"""Test cells whose masked genes are predicted."""
PARTS = {
    "impute": ("ours", "knn", "magic", "gene_means", "type_means", "scvi"),
    "masked": ("ours", "ours_no_places", "marginals", "type_means"),
    "population": ("ours", "independent", "other_real"),
}
ARMS = tuple(dict.fromkeys(arm for arms in PARTS.values() for arm in arms))
LEAST_CELLS, MASKED, TEST, HOLES, NEIGHBORS, COMPONENTS = 10, 0.3, 0.2, 0.1, 30, 50
MOST_GENES, LEAST_RATE, VARIABLE, CORRELATED = 300, 1e-6, 2000, 200


def prepared(adata: ad.AnnData, model: str, max_cells: int) -> ad.AnnData:
    """Counts of at most so many labelled cells, and of the genes that the model knows, each once."""
    tokens = load_model(model).vocabulary.match(adata.var_names).tokens
    _, first = np.unique(tokens, return_index=True)
    columns = np.sort(first[tokens[first] >= N_SPECIAL])
    types = adata.obs[TYPE].astype(str).to_numpy()
    rows = np.flatnonzero(adata.obs[TYPE].notna().to_numpy() & (types != UNLABELLED))
    rows = np.sort(np.random.default_rng(0).permutation(rows)[:max_cells])
    cells = ad.AnnData(sp.csr_matrix(adata.X, dtype=np.float32)[rows][:, columns], var=adata.var[[]].iloc[columns])
    cells.obs_names = adata.obs_names[rows]
    cells.obs[TYPE] = types[rows]
    return cells[cells.X.getnnz(axis=1) > 0].copy()


def often_detected(adata: ad.AnnData) -> ad.AnnData:
    """The genes that ten cells express."""
    return adata[:, adata.X.getnnz(axis=0) >= LEAST_CELLS].copy()


def grouped_spearman(group: np.ndarray, true: np.ndarray, predicted: np.ndarray) -> float:
    """Mean over groups of the rank correlation within; groups in which either is constant are ignored."""
    ranks = pd.DataFrame({"true": true, "predicted": predicted}).groupby(group).rank()
    return float(ranks.groupby(group).corr().xs("true", level=1)["predicted"].mean())


# imputation


def with_holes(adata: ad.AnnData, seed: int) -> tuple[ad.AnnData, np.ndarray, np.ndarray, np.ndarray]:
    """Counts without a tenth of the entries; rows, columns and log-normalised values of these. No cell is emptied."""
    counts = adata.X.tocoo()
    order = np.random.default_rng(seed).permutation(counts.nnz)
    kept = np.zeros(counts.nnz, dtype=bool)
    kept[order[round(HOLES * counts.nnz) :]] = True
    kept |= np.isin(counts.row, np.setdiff1d(np.arange(adata.n_obs), counts.row[kept]))
    left = adata.copy()
    left.X = sp.csr_matrix((counts.data[kept], (counts.row[kept], counts.col[kept])), shape=adata.shape)
    rows, columns = counts.row[~kept], counts.col[~kept]
    totals = np.asarray(left.X.sum(axis=1)).ravel()
    return left, rows, columns, np.log1p(1e4 * counts.data[~kept] / totals[rows])


def impute(adata: ad.AnnData, arm: str, model: str, seed: int) -> Result:
    """Expected log-normalised expression of cells with holes, and of values above zero where an arm predicts it."""
    left = with_holes(often_detected(adata), seed)[0]
    if arm == "ours":
        how = {"model": model, "keep_observed": False, "rng": seed, "copy": True}
        layers = [sd.tl.impute(left, expressed=above, **how).layers[C.IMPUTED] for above in (False, True)]
        return {"imputed": layers[0], "expressed": layers[1]}
    if arm == "scvi":
        network = fitted_scvi(left, seed, list(left.var_names), batch_key=None)
        return {"imputed": np.log1p(1e4 * np.asarray(network.get_normalized_expression(return_numpy=True)))}
    values = log_normalised(left).X
    if arm == "magic":
        from magic import MAGIC

        return {"imputed": np.asarray(MAGIC(random_state=seed, n_jobs=1, verbose=0).fit_transform(values.toarray()))}
    if arm == "knn":
        pca = PCA(min(COMPONENTS, min(values.shape) - 1), svd_solver="arpack", random_state=0)
        graph = kneighbors_graph(pca.fit_transform(values), min(NEIGHBORS, left.n_obs - 1), include_self=True)
        return {"imputed": np.log1p(graph @ np.expm1(values.toarray()) / graph.sum(axis=1)[:, :1])}
    kinds, group = groups(left, arm == "type_means")
    counts = values.expm1()
    means = np.stack([np.asarray(counts[group == kind].mean(axis=0)).ravel() for kind in range(len(kinds))])
    return {"imputed": np.log1p(means)[group]}


def groups(adata: ad.AnnData, by_type: bool) -> tuple[np.ndarray, np.ndarray]:
    """Cell types and the number of each cell's type; one group without `by_type`."""
    names = adata.obs[TYPE].to_numpy().astype(str) if by_type else np.zeros(adata.n_obs, dtype=int)
    kinds, group = np.unique(names, return_inverse=True)
    return kinds, group


def impute_scores(adata: ad.AnnData, result: Result, seed: int) -> dict:
    """Rank correlations within cells and within the 300 genes with most holes, and the error over all holes.

    Holes are above zero while imputed values are expectations that include zeros. `rmse_shown` is therefore computed
    from the expected value above zero, for arms without one under a Poisson distribution.
    """
    left, rows, columns, truth = with_holes(often_detected(adata), seed)
    predicted = np.asarray(result["imputed"])[rows, columns].astype(float)
    if "expressed" in result:
        expressed = np.asarray(result["expressed"])[rows, columns].astype(float)
    else:
        depth = 1e4 / np.asarray(left.X.sum(axis=1)).ravel()[rows]
        rate = np.maximum(np.expm1(predicted) / depth, LEAST_RATE)
        expressed = np.log1p(depth * rate / -np.expm1(-rate))
    genes = np.argsort(-np.bincount(columns, minlength=left.n_vars), kind="stable")[:MOST_GENES]
    of_gene = np.isin(columns, genes)
    return {
        "n_cells": left.n_obs, "n_genes": left.n_vars, "n_entries": len(predicted),
        "spearman_cell": grouped_spearman(rows, truth, predicted),
        "spearman_gene": grouped_spearman(columns[of_gene], truth[of_gene], predicted[of_gene]),
        "rmse_shown": float(np.sqrt(np.mean((expressed - truth) ** 2))),
        "rmse": float(np.sqrt(np.mean((predicted - truth) ** 2))),
    }  # fmt: skip


# masked genes


def reconstruct(adata: ad.AnnData, arm: str, model: str, seed: int) -> Result:
    """Scores of `tl.reconstruct`, or the recall of the most frequent genes of the training cells."""
    order = np.random.default_rng(0).permutation(adata.n_obs)
    n_test = round(TEST * len(order))
    test, train = order[:n_test][:N_TEST], np.sort(order[n_test:])
    cells = adata[test].copy()
    sd.tl.reconstruct(cells, model, rng=seed, mask_ratio=MASKED, use_ranks=arm != "ours_no_places")
    if arm.startswith("ours"):
        scores = cells.uns[C.UNS][C.RECONSTRUCTED]["scores"]
        names = ("masked_recall", "masked_match", "l_dist", "l_dist_chance", "coverage", "bleu", "value_spearman")
        return {"n_cells": cells.n_obs, **{name: float(scores[name]) for name in names if np.isfinite(scores[name])}}
    ranks, hidden = (cells.layers[f"{C.RECONSTRUCTED}_{name}"].tocsr() for name in (C.TRUE_RANK, C.MASKED))
    kinds, group = groups(adata, arm == "type_means")
    detected = adata.X > 0
    share = np.stack([np.asarray(detected[train[group[train] == k]].mean(axis=0)).ravel() for k in range(len(kinds))])
    recall = []
    for row, kind in enumerate(group[test]):
        genes = ranks.indices[ranks.indptr[row] : ranks.indptr[row + 1]].astype(np.int64)
        masked = np.asarray(hidden[row].toarray()).ravel()[genes].astype(bool)
        recall.append(marginal_recall(genes[masked], genes[~masked], share[kind]))
    return {"n_cells": len(recall), "masked_recall": float(np.nanmean(recall))}


# generation


def halves(adata: ad.AnnData) -> tuple[ad.AnnData, ad.AnnData]:
    """Half of the cells to generate from, and the held-out half."""
    cells = often_detected(adata)
    order = np.random.default_rng(0).permutation(cells.n_obs)
    cut = len(order) // 2
    return cells[np.sort(order[:cut])].copy(), cells[np.sort(order[cut:])].copy()


def generate(adata: ad.AnnData, arm: str, model: str, seed: int) -> Result:
    """Log-normalised expression of a population."""
    train = halves(adata)[0]
    if arm == "ours":
        return {"cells": sp.csr_matrix(sd.tl.generate(train, train.n_obs, model, rng=seed).X)}
    if arm == "independent":
        drawn, rng = sp.csc_matrix(train.X, copy=True), np.random.default_rng(seed)
        for start, stop in zip(drawn.indptr[:-1], drawn.indptr[1:], strict=True):
            drawn.indices[start:stop] = rng.choice(train.n_obs, stop - start, replace=False)
        drawn.has_sorted_indices = False
        train = ad.AnnData(drawn.tocsr())
        train = train[train.X.getnnz(axis=1) > 0].copy()
    return {"cells": log_normalised(train).X}


def generate_scores(adata: ad.AnnData, result: Result, seed: int) -> dict:
    """AUROC of classifiers that separate generated from held-out cells (0.5: not separable); agreement of genes."""
    real, generated, rng = log_normalised(halves(adata)[1]).X, result["cells"], np.random.default_rng(seed)
    parts, n = (real, generated), min(real.shape[0], generated.shape[0])
    stacked = sp.vstack([part[np.sort(rng.permutation(part.shape[0])[:n])] for part in parts], format="csr")
    is_real, folds = np.repeat([1, 0], n), StratifiedKFold(5, shuffle=True, random_state=seed)

    def variable_genes(matrix: sp.csr_matrix, n_top: int) -> np.ndarray:
        square = np.asarray(matrix.multiply(matrix).mean(axis=0)).ravel()
        variance = square - np.asarray(matrix.mean(axis=0)).ravel() ** 2
        return np.sort(np.argsort(-variance, kind="stable")[:n_top])

    def auroc(model: object, features: np.ndarray) -> float:
        return float(cross_val_score(model, features, is_real, cv=folds, scoring="roc_auc").mean())

    components = PCA(min(COMPONENTS, n - 1), svd_solver="arpack", random_state=0).fit_transform(stacked)
    genes, pairs = variable_genes(real, CORRELATED), np.triu_indices(CORRELATED, 1)
    linear = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    with np.errstate(divide="ignore", invalid="ignore"):
        tables = [np.nan_to_num(np.corrcoef(part[:, genes].toarray(), rowvar=False))[pairs] for part in parts]
    return {
        "n_cells": generated.shape[0],
        "forest": auroc(RandomForestClassifier(200, random_state=seed), components),
        "logistic": auroc(linear, stacked[:, variable_genes(stacked, VARIABLE)].toarray()),
        "correlations": float(np.corrcoef(*tables)[0, 1]),
        "mean_pearson": float(np.corrcoef(*(np.asarray(part.mean(axis=0)).ravel() for part in parts))[0, 1]),
    }


FITS = {"impute": impute, "masked": reconstruct, "population": generate}
SCORES: dict[str, Callable[..., dict]] = {
    "impute": impute_scores, "masked": lambda adata, result, seed: result, "population": generate_scores,
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    options = parser_of(__doc__, tuple(SETS), ARMS, tuple(PARTS)).parse_args(argv)
    for name in options.sets:
        adata = prepared(ad.read_h5ad(options.data / f"{name}.h5ad"), options.model, min(SETS[name], options.max_cells))
        for part in options.part if name in list(SETS)[:2] else ("impute",):
            for arm in (arm for arm in PARTS[part] if arm in options.arms):
                measure(
                    NAME, {"part": part, "set": name, "arm": arm}, {"cells": fingerprint(adata, (TYPE,))}, FITS[part],
                    (adata, arm, options.model),
                    lambda result, seed, a=adata, score=SCORES[part]: score(a, result, seed), options,
                )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
