"""The tables of embedding.py: means of each group with differences to PCA, and the scores of each dataset."""

from __future__ import annotations

from statistics import mean

from _markdown import table
from _run import bootstrap
from embedding import ARMS, BASE, MEASURES, differences

NAMES = {
    "pca20": "PCA, 20 components",
    "pca50": "PCA, scaled, 50 components",
    "scvi": "scVI",
    "scvi_batch": "scVI, `batch_key`",
    "embed": "`tl.embed`",
    "adapt": "`tl.adapt`",
    "adapt_batch": "`tl.adapt`, `batch_key`",
}
WORDS = (
    "Labelled datasets of at most 3,000 cells, drawn once. PCA with 20 components is of the 2,000 highly variable "
    "genes, log-normalised and not scaled; PCA with 50 components of the same genes, scaled. scVI (default "
    "architecture, at most 200 epochs, early stopping) is fitted to the counts of these genes. `tl.embed` fits "
    "nothing, `tl.adapt` runs with its defaults. `batch_key` is `batch`, in datasets where half of the types or more "
    "have cells of two batches. Accuracy is that of 15 nearest neighbours in five folds; NMI and ARI are of Leiden "
    "clusters at the resolution with the highest NMI, ASW is the silhouette of the types scaled to 0 to 1. "
    "Differences to PCA with 20 components are paired by dataset, and their 95% intervals are bootstraps over "
    "datasets, as if these were independent, though three of the benchmark are of Kang et al. and three of the blood "
    "group of Zheng et al. No benchmark dataset is in the corpus of scdiva-mini. **Of the ten studies of the design "
    "groups eight are, and one more (vangalen2019) is of a publication that is**, so that their rows of `tl.embed` "
    "and `tl.adapt` flatter the model; choices are made there with models that were trained without them. Few "
    "datasets give wide intervals."
)


def of_groups(rows: list[dict]) -> str:
    """Of each group and arm: means over datasets, mean and lowest difference to PCA with 20 components."""
    lines = []
    for group in dict.fromkeys(row["group"] for row in rows):
        for arm in ARMS:
            some = [row for row in rows if (row["group"], row["arm"]) == (group, arm)]
            if not some:
                continue
            line = [group, NAMES[arm], str(len(some))]
            for key in MEASURES:
                line.append(f"{mean(row[key] for row in some):.3f}")
                apart = differences(rows, group, arm, key)
                if arm == BASE or len(apart) < 2:
                    line += ["", ""]
                    continue
                low, high = bootstrap(list(apart.values()))
                line += [f"{mean(apart.values()):+.3f} ({low:+.3f} to {high:+.3f})", f"{min(apart.values()):+.3f}"]
            lines.append(line)
    header = ["datasets", "embedding", "number"]
    for said in MEASURES.values():
        header += [said, "less that of PCA, 20", "lowest"]
    return table(header, lines)


def of_datasets(rows: list[dict]) -> str:
    """A line for each dataset: accuracy and cluster mean of each arm."""
    at = {(row["set"], row["arm"]): row for row in rows}
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
    lines = []
    for group, name in dict.fromkeys((row["group"], row["set"]) for row in rows):
        some = [at.get((name, arm)) for arm in arms]
        first = next(row for row in some if row is not None)
        scores = ["" if row is None else f"{row['accuracy']:.3f} / {row['average_bio']:.3f}" for row in some]
        lines.append([f"{name} ({first['n_cells']:,} cells, {first['n_types']} types)", group, *scores])
    return table(["dataset", "group", *(NAMES[arm] for arm in arms)], lines)


def embedding_tables(result: dict) -> list[str]:
    rows = [row for row in result["rows"] if "arm" in row]
    # rows of a dataset stand together, whatever was run last
    order = {name: i for i, name in enumerate(("benchmark", "design, blood and marrow", "design, other tissues"))}
    rows.sort(key=lambda row: (order[row["group"]], row["set"]))
    epochs = [row for row in rows if "epochs" in row]
    stopped = [row["set"] for row in epochs if row["time_limit"]]
    said = f" scVI reached its time limit on {', '.join(stopped)}." if stopped else ""
    by_dataset = f"15-NN accuracy / mean of NMI, ARI and ASW of each dataset.{said}\n"
    return [of_groups(rows), by_dataset, of_datasets(rows)]
