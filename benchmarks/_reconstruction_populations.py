"""What reconstruction.py does with populations: cells that are drawn, and how likely cells are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import anndata as ad
import numpy as np
import scipy.sparse as sp
from _grn_sets import log_normalised
from _population_metrics import copies, correlation_agreement, discriminator_auroc, gene_statistics, mmd
from _reconstruction_cells import TYPE, Work, often

import scdiva as sd
from scdiva import _constants as C

OF_TYPE, LEAST_OF_TYPE = 60, 30
VARIABLE = 2000
SAMPLES = 8


def halves(work: Work) -> tuple[ad.AnnData, ad.AnnData]:
    """Half of the cells to learn from, and the other half to be like; genes that ten cells express."""

    def make() -> tuple[ad.AnnData, ad.AnnData]:
        adata = often(work.adata)
        order = np.random.default_rng(0).permutation(adata.n_obs)
        half = len(order) // 2
        return adata[np.sort(order[:half])].copy(), adata[np.sort(order[half:])].copy()

    return work.once("halves", make)


def compared(work: Work, made: Any, seed: int) -> dict[str, float]:
    """Scores of a population beside the held-out cells, and of copies of training cells."""
    train, held = (work.once(("log", n), lambda part=part: log_normalised(part)) for n, part in enumerate(halves(work)))
    apart = mmd(held, made, rng=seed)
    moments, near = gene_statistics(held, made), copies(train, made)
    return {
        "n_cells": made.shape[0],
        "forest": discriminator_auroc(held, made, rng=seed),
        "logistic": discriminator_auroc(held, made, classifier="logistic", rng=seed),
        "mmd": apart.mmd,
        "mmd_floor": apart.floor,
        "mean_pearson": moments.mean_pearson,
        "variance_pearson": moments.variance_pearson,
        "zeros_pearson": moments.zeros_pearson,
        "correlations": correlation_agreement(held, made),
        "exact_copies": near.exact,
        "share_closer": near.share_closer,
        "distance_ratio": near.ratio,
    }


def shuffled(counts: sp.csr_matrix, rng: np.random.Generator) -> sp.csr_matrix:
    """Each gene's counts given to other cells at random: genes as they are, and none knows of another."""
    found = sp.csc_matrix(counts, copy=True)
    for start, stop in zip(found.indptr[:-1], found.indptr[1:], strict=True):
        found.indices[start:stop] = rng.choice(counts.shape[0], stop - start, replace=False)
    found.has_sorted_indices = False
    return found.tocsr()


def other_cells(work: Work, seed: int) -> dict[str, float]:
    """The training cells themselves: real, but others than those compared with; of course no copies are looked for."""
    train = work.once("train log", lambda: log_normalised(halves(work)[0]))
    scores = compared(work, train, seed)
    return {
        key: value for key, value in scores.items() if key not in ("exact_copies", "share_closer", "distance_ratio")
    }


def independent(work: Work, seed: int) -> dict[str, float]:
    """Each gene drawn on its own from the training cells."""
    train = halves(work)[0]
    drawn = shuffled(train.X, np.random.default_rng(seed))
    drawn = drawn[drawn.getnnz(axis=1) > 0]
    return compared(work, log_normalised(ad.AnnData(drawn)), seed)


def drawn_cells(n_cells: Callable[[Work], int], **how: Any) -> Callable[[Work, int], dict[str, float]]:
    """Cells drawn by `tl.generate` from the training cells."""

    def run(work: Work, seed: int) -> dict[str, float]:
        begun = time.perf_counter()
        made = sd.tl.generate(halves(work)[0], n_cells(work), work.model, rng=seed, **how)
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, **compared(work, made.X, seed)}

    return run


def by_type(work: Work, seed: int) -> dict[str, Any]:
    """Cells drawn of each type, named by a classifier of real training cells; beside held-out real cells."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    train, held = halves(work)
    kinds, numbers = np.unique(train.obs[TYPE].to_numpy(), return_counts=True)
    kinds = kinds[numbers >= LEAST_OF_TYPE].tolist()
    begun = time.perf_counter()
    made = sd.tl.generate(train, OF_TYPE, work.model, groupby=TYPE, groups=kinds, rng=seed)
    seconds = time.perf_counter() - begun
    values = log_normalised(train)
    square = np.asarray(values.multiply(values).mean(axis=0)).ravel()
    variance = square - np.asarray(values.mean(axis=0)).ravel() ** 2
    genes = np.sort(np.argsort(-variance, kind="stable")[:VARIABLE])
    classify = make_pipeline(StandardScaler(with_mean=False), LogisticRegression(max_iter=1000))
    classify.fit(values[:, genes], train.obs[TYPE].to_numpy())

    def own(cells: Any, names: np.ndarray) -> dict[str, float]:
        right = classify.predict(cells[:, genes]) == names
        return {kind: float(right[names == kind].mean()) for kind in kinds if (names == kind).any()}

    of_drawn = own(made.X, made.obs[TYPE].astype(str).to_numpy())
    of_real = own(log_normalised(held), held.obs[TYPE].to_numpy())
    return {
        "seconds": seconds, "n_cells": made.n_obs,
        "own_type": float(np.mean(list(of_drawn.values()))), "real_own_type": float(np.mean(list(of_real.values()))),
        "each": of_drawn, "real_each": of_real,
    }  # fmt: skip


POPULATION: dict[str, tuple[Callable[[Work, int], dict], int]] = {
    "other_real": (other_cells, 1),
    "independent": (independent, 3),
    "ours": (drawn_cells(lambda work: halves(work)[0].n_obs), 3),
    "by_type": (by_type, 1),
    "ours_few": (drawn_cells(lambda work: work.sizes.generated), 3),
    "no_state": (drawn_cells(lambda work: work.sizes.alone, from_state=False), 1),
}


# likelihood


def other_genes(counts: sp.csr_matrix, rng: np.random.Generator) -> sp.csr_matrix:
    """The counts of each cell given to random genes of those measured."""
    found = sp.csr_matrix(counts, copy=True)
    for start, stop in zip(found.indptr[:-1], found.indptr[1:], strict=True):
        found.indices[start:stop] = rng.choice(counts.shape[1], stop - start, replace=False)
    found.has_sorted_indices = False
    found.sort_indices()
    return found


def doublets(adata: ad.AnnData, n: int, rng: np.random.Generator) -> sp.csr_matrix:
    """Two random cells of different types summed, thinned to the mean of their totals."""
    types, found = adata.obs[TYPE].to_numpy(), []
    while len(found) < n:
        one, two = rng.choice(adata.n_obs, 2, replace=False)
        if types[one] != types[two]:
            both = sp.csr_matrix(adata.X[one] + adata.X[two])
            both.data = rng.binomial(both.data.astype(np.int64), 0.5).astype(np.float32)
            both.eliminate_zeros()
            found.append(both)
    return sp.vstack(found, format="csr")


def likely(work: Work, seed: int) -> dict[str, float]:
    """Bounds of real cells, of the same with other genes, and of doublets."""
    from sklearn.metrics import roc_auc_score

    adata, rng = often(work.adata), np.random.default_rng(seed)
    n = min(work.sizes.likely, adata.n_obs)
    real = adata.X[np.sort(rng.permutation(adata.n_obs)[:n])]
    kinds = {"real": real, "shuffled": other_genes(real, rng), "doublets": doublets(adata, n, rng)}
    cells = ad.AnnData(sp.vstack(list(kinds.values()), format="csr"), var=adata.var.copy())
    begun = time.perf_counter()
    sd.tl.log_likelihood(cells, work.model, n_samples=SAMPLES, rng=seed)
    seconds = (time.perf_counter() - begun) / cells.n_obs
    bound = cells.obs[f"{C.OBS_LIKELIHOOD}_{C.PER_GENE}"].to_numpy().reshape(len(kinds), n)
    n_genes = cells.X.getnnz(axis=1).reshape(len(kinds), n).mean(axis=1)
    is_real = np.repeat([1, 0], n)
    return {
        "n_cells": n, "seconds_per_cell": seconds,
        **{f"bound_{kind}": float(bound[i].mean()) for i, kind in enumerate(kinds)},
        **{f"bound_{kind}_error": float(bound[i].std(ddof=1) / n**0.5) for i, kind in enumerate(kinds)},
        **{f"genes_{kind}": float(n_genes[i]) for i, kind in enumerate(kinds)},
        "auroc_shuffled": float(roc_auc_score(is_real, np.concatenate([bound[0], bound[1]]))),
        "auroc_doublets": float(roc_auc_score(is_real, np.concatenate([bound[0], bound[2]]))),
    }  # fmt: skip


LIKELIHOOD: dict[str, tuple[Callable[[Work, int], dict], int]] = {"ours_no_transformer": (likely, 3)}
