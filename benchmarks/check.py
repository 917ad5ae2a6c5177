"""Recompute three results, drawn at random, with scikit-learn and the calls of `scdiva.tl` only.

    python benchmarks/check.py --data FOLDER [--seed 0]

An accuracy of an embedding, a macro-F1 of a query and a correlation of changes in a cell type; each must agree
with the recorded number to 0.005.
"""

import argparse
import json
from pathlib import Path

import anndata as ad
import numpy as np
import scipy.sparse as sp
from sklearn.metrics import f1_score
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.neighbors import KNeighborsClassifier

import scdiva as sd


def rows(name, **where):
    recorded = json.loads((Path(__file__).parent / "results" / f"{name}.json").read_text())["rows"]
    return [row for row in recorded if where.items() <= row.items()]


def cells(folder, name, n):
    adata = ad.read_h5ad(folder / f"{name}.h5ad")
    adata = adata[np.sort(np.random.default_rng(0).permutation(adata.n_obs)[:n])].copy()
    adata.X = sp.csr_matrix(adata.X, dtype=np.float32)
    return adata


def embedding(folder, rng):
    pool = [row for arm in ("embed", "adapt") for row in rows("embedding", arm=arm, group="benchmark")]
    row = pool[rng.integers(len(pool))]
    adata = cells(folder, row["set"], 3000)
    model = sd.tl.adapt(adata, rng=0) if row["arm"] == "adapt" else "scdiva-mini"
    z = sd.tl.embed(adata, model, copy=True).obsm["X_scdiva"].astype(float)
    types = adata.obs["cell_type"].astype(str)
    unknown = ("", "nan", "None", "ND", "Other", "unknown", "Unknown", "unlabelled")
    mask = ((types.map(types.value_counts()) >= 5) & ~types.isin(unknown)).to_numpy()
    z, types, folds = z[mask], types[mask].to_numpy(), StratifiedKFold(5, shuffle=True, random_state=0)
    right = cross_val_predict(KNeighborsClassifier(15), z, types, cv=folds) == types
    return f"embedding, {row['set']}, {row['arm']}", row["accuracy"], np.mean(right)


def annotation(folder, rng):
    splits = {"kang_ifnb_2800": "batch", "kang_scgen_valid_1975": "batch", "panc8_small_500": "assay"}
    pool = [(row["set"], *one) for name in splits for row in rows("annotation", part="full", arm="ours", set=name)
            for one in row["by_query"].items()]  # fmt: skip
    name, query, recorded = pool[rng.integers(len(pool))]
    adata = cells(folder, name, 6000)
    held_out = (adata.obs[splits[name]] == query).to_numpy()
    reference, test = adata[~held_out].copy(), adata[held_out].copy()
    sd.tl.annotate(test, "cell_type", reference, batch_key="batch", rng=0)
    truth, predicted = (test.obs[key].astype(str).to_numpy() for key in ("cell_type", "scdiva_label"))
    mask = np.isin(truth, reference.obs["cell_type"].astype(str))
    f1 = f1_score(truth[mask], predicted[mask], labels=np.unique(truth[mask]), average="macro")
    return f"annotation, {name}, {query}", recorded["macro_f1"], f1


def perturbation(folder, rng):
    (row,) = rows("perturbation", set="kang_ifnb", arm="ours")
    unit = sorted(row["units"])[rng.integers(len(row["units"]))]
    group = unit.removeprefix("IFN-beta in ")
    adata = cells(folder, "kang_ifnb_2800", None)
    size = adata.obs.groupby(["cell_type", "perturbation"], observed=True).size().unstack().min(axis=1)
    adata = adata[adata.obs["cell_type"].isin(size.index[size >= 20])].copy()
    values = adata.X.multiply(1e4 / adata.X.sum(axis=1)).tocsr().log1p()
    perturbed, inside = adata.obs["perturbation"] != "control", adata.obs["cell_type"] == group
    control, observed = (values[(inside & rows).to_numpy()].mean(axis=0).A1 for rows in (~perturbed, perturbed))
    train = adata[~(perturbed & inside)].copy()
    predicted = sd.tl.predict_perturbation(
        train, "perturbation", "control", predict=["IFN-beta"], groupby="cell_type", groups=[group], rng=0
    )
    change = predicted.varm["scdiva_mean"][:, 0] - control
    return f"perturbation, kang_ifnb, {group}", row["units"][unit], np.corrcoef(change, observed - control)[0, 1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the benchmark h5ad files")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    options, failed = parser.parse_args(), 0
    for claim in (embedding, annotation, perturbation):
        what, recorded, recomputed = claim(options.data, np.random.default_rng(options.seed))
        failed += abs(recorded - recomputed) > 0.005
        print(f"{what}: recorded {recorded:.4f}, recomputed {recomputed:.4f}", flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
