"""How much of an embedding survives when cells are sequenced less deep.

    python benchmarks/thinning.py --data FOLDER [--prepared FOLDER] [--sets ...] [--seeds 0 1 2] [--keep scvi ...]
        [--strict]

Of every count c, Binomial(c, depth) are kept, depth 1, 0.5, 0.2, 0.1 and 0.05. Each seed parts the labelled cells of a
set in two halves, stratified by label, and thins the second. Two questions to each arm:

- cosine of a thinned cell's embedding to its full-depth one, mean over cells: as it stands, and after the mean of all
  full-depth embeddings is taken off both. Only the second compares arms: a common offset, which PCA has not, makes any
  two cells look alike.
- accuracy of a 15-NN that was fitted on the first half at full depth and is asked for the labels of the thinned half.

Arms: scdiva and the corpus SVD (`--prepared`, of train_mini.py) see nothing of the set; PCA is fitted on all of its
cells at full depth and thinned cells are projected; scVI is fitted alike, once for each set, and thinned cells go
through its encoder. With `--keep`, rows of arms that know nothing of the model (svd, pca, scvi) are taken over from the
last results, if those were of the same seeds, and say which commit made them. An arm whose package or data is missing
is left out, and the result says why. The last rows are goals; a missed one fails the call only with `--strict`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import anndata as ad
import numpy as np
from _judge import judge, of_row, over_seeds, share_of_cells
from _record import kept_rows, record
from _rivals import NO_CORPUS, NO_SCVI, Arm, corpus_svd, fit_pca, fit_scvi, has_scvi, scdiva_arm
from _sets import load_set, scored, thinned
from _timing import report
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier

import scdiva as sd
from scdiva.models import ScDiVa

SETS = ("pbmc3k_raw", "kang_ifnb_2800")
DEPTHS = (1.0, 0.5, 0.2, 0.1, 0.05)
JUDGED_DEPTH = 0.1
JUDGED = {"cosine": "cosine", "cosine_centred": "centred cosine", "accuracy": "accuracy"}
NEIGHBORS = 15


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Mean over rows of the cosine between rows of two arrays."""
    product = (one * other).sum(axis=1)
    return float((product / np.maximum(np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1), 1e-12)).mean())


def halves(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows to fit on and rows to ask about, labelled cells of types with two cells or more."""
    rows = scored(labels)
    names, counts = np.unique(labels[rows], return_counts=True)
    rows = rows[np.isin(labels[rows], names[counts >= 2])]
    fitted, asked = train_test_split(rows, test_size=0.5, random_state=seed, stratify=labels[rows])
    return np.sort(fitted), np.sort(asked)


def survive(
    arms: dict[str, Arm], adata: ad.AnnData, labels: np.ndarray, seed: int, depths: tuple[float, ...] = DEPTHS
) -> list[dict]:
    """Figures of every arm and depth, for one seed; all arms see the same thinned cells."""
    fitted, asked = halves(labels, seed)
    full = {arm: embed(adata) for arm, embed in arms.items()}
    knn = {arm: KNeighborsClassifier(NEIGHBORS).fit(x[fitted], labels[fitted]) for arm, x in full.items()}
    rows = []
    for depth in depths:
        cells = thinned(adata[asked], depth, seed)
        for arm, embed in arms.items():
            found, reference, centre = embed(cells), full[arm][asked], full[arm].mean(axis=0)
            rows.append({
                "arm": arm, "depth": depth, "n_cells": len(asked),
                "cosine": cosine(found, reference),
                "cosine_centred": cosine(found - centre, reference - centre),
                "accuracy": float((knn[arm].predict(found) == labels[asked]).mean()),
            })  # fmt: skip
    return rows


def summarised(name: str, runs: list[list[dict]]) -> list[dict]:
    """Mean and standard deviation over the seeds of each row."""
    rows = []
    for alike in zip(*runs, strict=True):
        row: dict = {"set": name, **{key: alike[0][key] for key in ("arm", "depth", "n_cells")}, "n_seeds": len(runs)}
        for key in ("cosine", "cosine_centred", "accuracy"):
            row |= over_seeds(key, [one[key] for one in alike])
        rows.append(row)
    return rows


def goals(rows: list[dict]) -> list[dict]:
    """At a tenth of the depth, scdiva above the best rival in each set and measure."""
    found = []
    for name in dict.fromkeys(row["set"] for row in rows):
        at = {row["arm"]: row for row in rows if row["set"] == name and row["depth"] == JUDGED_DEPTH}
        rivals = [arm for arm in at if arm != "scdiva"]
        for key, measure in JUDGED.items():
            best = max(rivals, key=lambda arm: at[arm][key])
            score = share_of_cells if key == "accuracy" else of_row
            pair = (score(at[arm], key) for arm in ("scdiva", best))
            what = f"{name}: {measure} at {JUDGED_DEPTH:.0%} depth above the best rival's"
            found.append(judge(what, *pair, at_least=0.0, best_rival=best))
    return found


def arms_of(adata: ad.AnnData, model: ScDiVa, svd: Arm | None, kept: set[str]) -> dict[str, Arm]:
    """The arms that can be had here and are not kept, those that are fitted on the set fitted on it."""
    arms = {"scdiva": scdiva_arm(model)}
    if svd is not None and "svd" not in kept:
        arms["svd"] = svd
    if "pca" not in kept:
        arms["pca"] = fit_pca(adata)
    if has_scvi() and "scvi" not in kept:
        arms["scvi"] = fit_scvi(adata, 0)
    return arms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the benchmark h5ad files")
    parser.add_argument("--prepared", type=Path, default=Path("runs/mini/prepared"), help="the packed corpus")
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--model", default="scdiva-mini")
    parser.add_argument("--keep", nargs="+", default=(), choices=("svd", "pca", "scvi"), help="arms not to make anew")
    parser.add_argument("--strict", action="store_true", help="fail where a goal is missed")
    arguments = parser.parse_args()

    sd.settings.progress = False
    model, svd = sd.models.load_model(arguments.model), corpus_svd(arguments.prepared)
    old = kept_rows("thinning", arguments.keep, seeds=list(arguments.seeds))
    there, rows = {row["arm"] for row in old}, []
    left_out = {
        **({} if svd or "svd" in there else {"svd": NO_CORPUS}),
        **({} if has_scvi() or "scvi" in there else {"scvi": NO_SCVI}),
    }
    for name in arguments.sets:
        adata, labels = load_set(arguments.data, name)
        kept = [row for row in old if row["set"] == name]
        arms = arms_of(adata, model, svd, {row["arm"] for row in kept})
        found = summarised(name, [survive(arms, adata, labels, seed) for seed in arguments.seeds])
        rows += sorted(found + kept, key=lambda row: -row["depth"])
        for row in found:
            print(
                f"{name:16s} {row['arm']:7s} {row['depth']:4.0%} cosine {row['cosine']:.3f}, "
                f"centred {row['cosine_centred']:.3f}, accuracy {row['accuracy']:.3f}",
                flush=True,
            )
    judged = goals(rows)
    missed = report(judged)
    for arm, why in left_out.items():
        print(f"{arm} left out: {why}")
    path = record("thinning", [*rows, *judged], model=arguments.model, seeds=list(arguments.seeds), left_out=left_out)
    print(f"written: {path.name}")
    return int(arguments.strict and missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
