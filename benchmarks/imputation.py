"""Imputation, reconstruction, generation and denoising, compared with scVI, neighbours, marginals and resampling.

    python benchmarks/imputation.py --data FOLDER [--sets pbmc3k_raw ...] [--part impute masked population]
        [--arms ours knn ...] [--seeds 0 1 2] [--again]
    python benchmarks/imputation.py --data CORPUS --part denoising --base runs/held_out --head runs/denoiser/head.pt

- impute: a tenth of the counts above zero is removed and imputed. Spearman correlation per cell and per gene, error.
- masked: 30% of the genes of test cells (a fifth of the dataset) are masked; `tl.reconstruct` with true ranks (`ours`)
  or without ranks (`ours_no_places`), compared with the marginal frequencies of the training cells.
- population: cells from `tl.generate` compared with held-out cells: AUROC of a random forest and of a logistic
  regression that separate both, correlation agreement of genes. `independent` draws each gene alone; `other_real` are
  other real cells.
- denoising: studies that were held out from training with their publications (`train_mini.py --exclude`,
  `train_denoiser.py`). Cells are thinned to half of their counts; log-loss of the presence of genes that are not
  detected, and Spearman correlation of masked values.

Slow arms use the cells in `SETS`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from _record import commit, record, replaced, rows_so_far
from _tasks import Found, fingerprint, log_normalised, measure, parser_of
from scipy.stats import rankdata

import scdiva as sd
from scdiva import _constants as C
from scdiva._constants import N_SPECIAL
from scdiva.metrics import marginal_recall
from scdiva.models import load_model

NAME = "imputation"
TYPE, UNLABELLED = "cell_type", "unlabelled"
SETS: dict[str, tuple[int, int]] = {"kang_pbmc_12k_1287g": (4000, 150), "pbmc3k_raw": (6000, 40)}
"""Cells of each dataset, and the test cells whose masked genes are predicted."""
PARTS = {
    "impute": ("ours", "knn", "gene_means", "type_means", "scvi"),
    "masked": ("ours", "ours_no_places", "marginals", "type_means"),
    "population": ("ours", "independent", "other_real"),
}
ARMS = tuple(dict.fromkeys(arm for arms in PARTS.values() for arm in arms))
LEAST_CELLS, MASKED, TEST, HOLES, NEIGHBORS, COMPONENTS = 10, 0.3, 0.2, 0.1, 30, 50
MOST_GENES, LEAST_RATE, VARIABLE, CORRELATED = 300, 1e-6, 2000, 200


def prepared(adata: ad.AnnData, model: str, most: int) -> ad.AnnData:
    """Counts of at most so many labelled cells, and of the genes that the model knows, each once."""
    tokens = load_model(model).vocabulary.match(adata.var_names).tokens
    _, first = np.unique(tokens, return_index=True)
    columns = np.sort(first[tokens[first] >= N_SPECIAL])
    types = adata.obs[TYPE].astype(str).to_numpy()
    rows = np.flatnonzero(adata.obs[TYPE].notna().to_numpy() & (types != UNLABELLED))
    rows = np.sort(np.random.default_rng(0).permutation(rows)[:most])
    found = ad.AnnData(sp.csr_matrix(adata.X, dtype=np.float32)[rows][:, columns], var=adata.var[[]].iloc[columns])
    found.obs_names = adata.obs_names[rows]
    found.obs[TYPE] = types[rows]
    return found[found.X.getnnz(axis=1) > 0].copy()


def often(adata: ad.AnnData) -> ad.AnnData:
    """The genes that ten cells express."""
    return adata[:, adata.X.getnnz(axis=0) >= LEAST_CELLS].copy()


def grouped_spearman(group: np.ndarray, true: np.ndarray, predicted: np.ndarray) -> float:
    """Mean over groups of the rank correlation within; groups in which either is constant are ignored."""
    order, found = np.argsort(group, kind="stable"), []
    for part in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        a, b = rankdata(true[part]), rankdata(predicted[part])
        if len(part) > 1 and np.ptp(a) > 0 and np.ptp(b) > 0:
            found.append(np.corrcoef(a, b)[0, 1])
    return float(np.mean(found)) if found else float("nan")


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


def impute(adata: ad.AnnData, arm: str, model: str, seed: int) -> Found:
    """Expected log-normalised expression of cells with holes, and of values above zero where an arm predicts it."""
    left = with_holes(often(adata), seed)[0]
    if arm == "ours":
        how = {"model": model, "keep_observed": False, "rng": seed, "copy": True}
        layers = [sd.tl.impute(left, expressed=above, **how).layers[C.IMPUTED] for above in (False, True)]
        return {"imputed": layers[0], "expressed": layers[1]}
    if arm == "scvi":
        import scvi

        scvi.settings.seed = seed
        counts = ad.AnnData(left.X.copy())
        scvi.model.SCVI.setup_anndata(counts)
        network = scvi.model.SCVI(counts)
        network.train(accelerator="cpu", enable_progress_bar=False)
        return {"imputed": np.log1p(1e4 * np.asarray(network.get_normalized_expression(return_numpy=True)))}
    values = log_normalised(left).X
    if arm == "knn":
        from sklearn.decomposition import PCA
        from sklearn.neighbors import kneighbors_graph

        place = PCA(min(COMPONENTS, min(values.shape) - 1), svd_solver="arpack", random_state=0).fit_transform(values)
        graph = kneighbors_graph(place, min(NEIGHBORS, len(place) - 1), include_self=True)
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


def impute_scores(adata: ad.AnnData, found: Found, seed: int) -> dict:
    """Rank correlations within cells and within the 300 genes with most holes, and the error over all holes.

    Holes are above zero while imputed values are expectations that include zeros. `rmse_shown` is therefore computed
    from the expected value above zero, for arms without one under a Poisson distribution.
    """
    left, rows, columns, truth = with_holes(often(adata), seed)
    predicted = np.asarray(found["imputed"])[rows, columns].astype(float)
    if "expressed" in found:
        shown = np.asarray(found["expressed"])[rows, columns].astype(float)
    else:
        depth = 1e4 / np.asarray(left.X.sum(axis=1)).ravel()[rows]
        rate = np.maximum(np.expm1(predicted) / depth, LEAST_RATE)
        shown = np.log1p(depth * rate / -np.expm1(-rate))
    genes = np.argsort(-np.bincount(columns, minlength=left.n_vars), kind="stable")[:MOST_GENES]
    of_gene = np.isin(columns, genes)
    return {
        "n_cells": left.n_obs, "n_genes": left.n_vars, "n_entries": len(predicted),
        "spearman_cell": grouped_spearman(rows, truth, predicted),
        "spearman_gene": grouped_spearman(columns[of_gene], truth[of_gene], predicted[of_gene]),
        "rmse_shown": float(np.sqrt(np.mean((shown - truth) ** 2))),
        "rmse": float(np.sqrt(np.mean((predicted - truth) ** 2))),
    }  # fmt: skip


# masked genes


def reconstruct(adata: ad.AnnData, n_cells: int, arm: str, model: str, seed: int) -> Found:
    """What `tl.reconstruct` scores of itself, or the recall of the most frequent genes of the training cells."""
    order = np.random.default_rng(0).permutation(adata.n_obs)
    n_test = round(TEST * len(order))
    test, train = order[:n_test][:n_cells], np.sort(order[n_test:])
    cells = adata[test].copy()
    sd.tl.reconstruct(cells, model, rng=seed, mask_ratio=MASKED, use_ranks=arm != "ours_no_places")
    if arm.startswith("ours"):
        scores = cells.uns[C.UNS][C.RECONSTRUCTED]["scores"]
        kept = ("masked_recall", "masked_match", "l_dist", "l_dist_chance", "coverage", "bleu", "value_spearman")
        return {"n_cells": cells.n_obs, **{name: float(scores[name]) for name in kept if np.isfinite(scores[name])}}
    place, hidden = (cells.layers[f"{C.RECONSTRUCTED}_{name}"].tocsr() for name in (C.TRUE_RANK, C.MASKED))
    kinds, group = groups(adata, arm == "type_means")
    there = adata.X > 0
    share = np.stack([np.asarray(there[train[group[train] == k]].mean(axis=0)).ravel() for k in range(len(kinds))])
    recall = []
    for row, kind in enumerate(group[test]):
        genes = place.indices[place.indptr[row] : place.indptr[row + 1]].astype(np.int64)
        masked = np.asarray(hidden[row].toarray()).ravel()[genes].astype(bool)
        recall.append(marginal_recall(genes[masked], genes[~masked], share[kind]))
    return {"n_cells": len(recall), "masked_recall": float(np.nanmean(recall))}


# generation


def halves(adata: ad.AnnData) -> tuple[ad.AnnData, ad.AnnData]:
    """Half of the cells to generate from, and the held-out half."""
    some = often(adata)
    order = np.random.default_rng(0).permutation(some.n_obs)
    cut = len(order) // 2
    return some[np.sort(order[:cut])].copy(), some[np.sort(order[cut:])].copy()


def generate(adata: ad.AnnData, arm: str, model: str, seed: int) -> Found:
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


def generate_scores(adata: ad.AnnData, found: Found, seed: int) -> dict:
    """AUROC of classifiers that separate generated from held-out cells (0.5: not separable); agreement of genes."""
    from sklearn.decomposition import PCA
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    real, made, rng = log_normalised(halves(adata)[1]).X, found["cells"], np.random.default_rng(seed)
    n = min(real.shape[0], made.shape[0])
    both = sp.vstack([part[np.sort(rng.permutation(part.shape[0])[:n])] for part in (real, made)], format="csr")
    is_real, folds = np.repeat([1, 0], n), StratifiedKFold(5, shuffle=True, random_state=seed)

    def variable(matrix: sp.csr_matrix, most: int) -> np.ndarray:
        square = np.asarray(matrix.multiply(matrix).mean(axis=0)).ravel()
        variance = square - np.asarray(matrix.mean(axis=0)).ravel() ** 2
        return np.sort(np.argsort(-variance, kind="stable")[:most])

    def auroc(model: object, features: np.ndarray) -> float:
        return float(cross_val_score(model, features, is_real, cv=folds, scoring="roc_auc").mean())

    components = PCA(min(COMPONENTS, n - 1), svd_solver="arpack", random_state=0).fit_transform(both)
    genes, pairs = variable(real, CORRELATED), np.triu_indices(CORRELATED, 1)
    linear = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    with np.errstate(divide="ignore", invalid="ignore"):
        tables = [np.nan_to_num(np.corrcoef(part[:, genes].toarray(), rowvar=False))[pairs] for part in (real, made)]
    return {
        "n_cells": made.shape[0],
        "forest": auroc(RandomForestClassifier(200, random_state=seed), components),
        "logistic": auroc(linear, both[:, variable(both, VARIABLE)].toarray()),
        "correlations": float(np.corrcoef(*tables)[0, 1]),
        "mean_pearson": float(np.corrcoef(*(np.asarray(part.mean(axis=0)).ravel() for part in (real, made)))[0, 1]),
    }


# denoising of studies that were held out from training

CONTEXT, MOST, AROUND = 200, 1024, 10


def denoising_rows(corpus: Path, base: Path, head: Path, studies: list[str], seed: int) -> list[dict]:
    """A row for each study and arm: frequencies of other cells, nearest cells, query head without and with context."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
    from query_training import draw_queries
    from train_denoiser import load_head

    from scdiva._rng import step_generator
    from scdiva.data.packed import PackedCells
    from scdiva.data.packing import pack_files
    from scdiva.diffusion.masking import cell_of_token
    from scdiva.diffusion.thinning import counts_of
    from scdiva.diffusion.thinning import log_normalised as normalised

    model = load_model(base / "model")
    trained = PackedCells(base / "prepared" / "train.h5", model.vocabulary)
    if shared := set(trained.study_names) & set(studies):
        raise SystemExit(f"{base} was trained on {', '.join(sorted(shared))}: name studies that were held out.")
    file = base / f"{'_'.join(studies)[:80]}.h5"
    if not file.exists():
        files = [corpus / f"{name}.h5ad" for name in studies]
        pack_files(files, model.vocabulary, file, max_length=model.config.input_length, min_genes=200).close()
    cells, module, rows = PackedCells(file, model.vocabulary), load_head(model, head), []
    for number, name in enumerate(cells.study_names):
        order = np.random.default_rng([seed, number]).permutation(np.flatnonzero(cells.study == number))
        cut = min(CONTEXT, len(order) // 2)
        measured = torch.from_numpy(np.flatnonzero(cells.measured[number]))

        def part(which: np.ndarray) -> tuple:
            indptr, tokens, values = cells.read_ranges([(int(row), int(row) + 1) for row in np.sort(which)])
            bounds = torch.from_numpy(indptr).int()
            return torch.from_numpy(tokens).long(), counts_of(torch.from_numpy(values), bounds), bounds

        around, others = part(order[:cut]), part(np.concatenate([order[:cut], order[cut + CONTEXT :]]))
        generator = step_generator(seed, number, "asked")
        asked = draw_queries(*part(order[cut : cut + CONTEXT]), measured, generator, thinned=True, most=MOST)
        tokens, counts, bounds = others
        of = cell_of_token(bounds, len(tokens))
        missed, values = (torch.full((len(bounds) - 1, model.config.n_genes), float(fill)) for fill in (1, 0))
        missed[of, tokens - N_SPECIAL] = torch.exp2(-counts.of_token).float()
        values[of, tokens - N_SPECIAL] = normalised(counts, bounds)

        def weighted(weights: torch.Tensor, missed=missed, values=values, asked=asked) -> tuple:
            """Log-odds that a gene missed in one half is in the other, and mean values, of weighted cells."""
            late, none, there = weights @ (missed * (values > 0)), weights @ missed, weights @ (values > 0).float()
            odds, mean = ((late + 0.5) / (none + 1)).logit(), (weights @ values) / there.clamp_min(1e-6)
            at = [cell if len(weights) > 1 else torch.zeros_like(cell) for cell in (asked.cell, asked.value_cell)]
            return odds[at[0], asked.token - N_SPECIAL], mean[at[1], asked.value_token - N_SPECIAL]

        with torch.inference_mode():
            shown = asked.seen, (tokens, normalised(counts, bounds), bounds)
            states = [model.encode_anchor(*given) for given in shown]
            mine, theirs = (F.normalize(state) for state in states)
            near = (mine @ theirs.T).topk(min(NEIGHBORS, len(theirs)), dim=1).indices
            nearest = torch.zeros(len(mine), len(theirs)).scatter_(1, near, 1.0) + AROUND / len(theirs)
            answers = {
                "means": weighted(torch.ones(1, len(theirs))), "neighbors": weighted(nearest),
                "query head": module.answer(asked, None), "query head, context": module.answer(asked, around),
            }  # fmt: skip
        for arm, answer in answers.items():
            row = {"part": "denoising", "set": name, "arm": arm, "commit": commit(), "n_cells": len(asked.seen[2]) - 1}
            rows.append({**row, "n_queries": len(asked.cell), **denoising_scores(answer, asked)})
    return rows


def denoising_scores(answer: tuple, asked: object) -> dict[str, float]:
    """Log-loss of presence, odds balanced in each cell as queries are; correlation and error of values."""
    from scdiva.generation.state_head import shift_to

    odds, cell = answer[0].double().numpy().copy(), asked.cell.numpy()
    for number in np.unique(cell):
        of = cell == number
        odds[of] += shift_to(odds[of][None], np.array([of.sum() / 2]))[0]
    values, truth = answer[1].double().numpy(), asked.value.numpy()
    rho = grouped_spearman(asked.value_token.numpy(), truth, values)
    return {
        "log_loss": float(F.binary_cross_entropy_with_logits(torch.from_numpy(odds), asked.present.double())),
        **({"spearman": rho} if np.isfinite(rho) else {}),
        "rmse": float(np.sqrt(np.square(values - truth).mean())),
    }


FITS: dict[str, Callable[..., Found]] = {"impute": impute, "population": generate}
SCORES: dict[str, Callable[..., dict]] = {"impute": impute_scores, "population": generate_scores}


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, tuple(SETS), ARMS, (*PARTS, "denoising"))
    parser.set_defaults(part=list(PARTS))
    parser.add_argument("--base", type=Path, help="folder of train_mini.py without the held-out studies")
    parser.add_argument("--head", type=Path, help="head.pt of train_denoiser.py on that model")
    parser.add_argument("--studies", nargs="+", default=[], help="held-out studies of the corpus in --data")
    options = parser.parse_args(argv)
    if "denoising" in options.part:
        for row in denoising_rows(options.data, options.base, options.head, options.studies, options.seeds[0]):
            record(NAME, replaced(rows_so_far(NAME), row, ("part", "set", "arm")), model=options.model)
            print(row, flush=True)
    for name in options.sets if set(options.part) & set(PARTS) else []:
        most, n_cells = SETS[name]
        most = min(most, options.max_cells)
        adata = prepared(ad.read_h5ad(options.data / f"{name}.h5ad"), options.model, most)
        for part in (part for part in options.part if part in PARTS):
            for arm in (arm for arm in PARTS[part] if arm in options.arms):
                place, same = {"part": part, "set": name, "arm": arm}, {"cells": fingerprint(adata, (TYPE,))}
                if part == "masked":
                    arguments = (adata, n_cells, arm, options.model)
                    measure(NAME, place, same, reconstruct, arguments, lambda found, seed: found, options)
                    continue
                score = SCORES[part]
                measure(
                    NAME, place, same, FITS[part], (adata, arm, options.model),
                    lambda found, seed, a=adata, score=score: score(a, found, seed), options,
                )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
