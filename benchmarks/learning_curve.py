"""What more cells or more steps would bring the set encoder, and with it zero-shot embedding.

    python benchmarks/learning_curve.py --prepared FOLDER --data FOLDER [--cells 3000 10000 30000]
        [--steps 100 400 1600] [--seeds 0 1 2]
    python benchmarks/learning_curve.py --prepared FOLDER --data FOLDER --mouse NAME ... [--corpus FOLDER]
        [--steps 400] [--seeds 0 1 2]

The set encoder is trained as `scripts/train_mini.py` trains it, its linear part from the corpus SVD of the same cells:

- over cells: on that many drawn from the corpus (30,000 stands for all there are), for the middle number of steps;
- over steps: on all cells, for that many.

Scored by `scores` of `_sets.py` on sets that are not in the corpus. To each measure, mean over the sets, a line in the
logarithm of the number is fitted over all seeds; what it says of ten times the most is an extrapolation, with the
standard error of the fit.

With `--mouse` no curve is made, but two arms: trained on all cells of the corpus, and on these and the cells of some
sets of mice, read by their human orthologs and packed as the corpus is. Corpus SVD, decoder and weights of studies
follow from the cells of each arm; steps, cells a batch and seeds are the same. Both are scored on human sets that
neither was trained on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import anndata as ad
import numpy as np
import torch
from _ablation_arms import ARMS, Arm, Cells, ThinnedViews, load_cells, stream
from _judge import across, judge, of_row, over_seeds, share_of_cells
from _record import RESULTS, record
from _scripts import AnchorConfig, AnchorModule
from _sets import SETS, load_set, scored, scores, typed
from _timing import report

import scdiva as sd
from scdiva._rng import step_generator
from scdiva.data.packed import PackedCells
from scdiva.data.packing import pack_files
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.tokenizer import Vocabulary
from scdiva.train import LinearMap, fit_linear_map

BATCH = 256
MEASURES = ("accuracy", "average_bio")
MAX_CELLS = 2000
"""Cells of a set that are scored."""
LINEAR_DIM = 128
WITHOUT, WITH = "without mouse", "with mouse"
OTHER_TISSUES = (
    "darmanis_brain_320",
    "pollen2015_fetal_cortex_367",
    "panc8_small_500",
    "sc_mixology_cell_lines",
    "pbmc3k_raw",
)
"""Human sets that both arms are scored on: brain twice, pancreas, lung cancer lines; and blood, which may lose."""
MIN_GENES = 200
"""Cells with fewer known genes are not trained on, as `scripts/train_mini.py` has it."""


def drawn(cells: Cells, n: int, seed: int) -> Cells:
    """Some of the cells, drawn alike from all studies; studies stay runs of rows."""
    if n >= cells.n_obs:
        return cells
    rows = np.sort(np.random.default_rng(seed).permutation(cells.n_obs)[:n])
    at = np.concatenate([np.arange(cells.indptr[row], cells.indptr[row + 1]) for row in rows])
    indptr = np.concatenate([[0], np.cumsum(cells.lengths[rows])])
    return Cells(indptr, cells.tokens[at], cells.values[at], cells.study[rows], cells.study_names, cells.measured)


def trained(
    cells: Cells, vocabulary: Vocabulary, start: LinearMap, steps: int, seed: int, arm: Arm = ARMS["set"]
) -> ScDiVa:
    """A model whose set encoder is trained alone, by default as the bundled one's."""
    config = ScDiVaConfig(
        n_genes=vocabulary.n_genes, dim=16, n_layers=1, n_heads=1, ffn_dim=16, tie_gene_head=True,
        anchor="encoder", anchor_residual=False, **{"anchor_linear_dim": LINEAR_DIM, **arm.model},
    )  # fmt: skip
    model = ScDiVa(config, generator=step_generator(seed, 0, "weights"))
    training = AnchorConfig(
        steps=steps, batch_size=BATCH, learning_rate=1e-3, warmup_steps=min(50, max(1, steps // 16)),
        weight_decay=0.01, precision="fp32", seed=seed, **arm.training,
    )  # fmt: skip
    sizes = np.bincount(cells.study, minlength=len(cells.study_names))
    module = (ThinnedViews if arm.thinning else AnchorModule)(model, training, start, sizes)
    if arm.trains_table:
        module.model.anchor.table.requires_grad_(True)
    batches = stream(cells, BATCH, config.input_length, seed)
    made = module.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    for step in range(steps):
        loss, _ = module.compute_loss(batches(step), step_generator(seed, step, "train/0"))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), training.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.vocabulary = vocabulary
    return model.eval()


def judged(model: ScDiVa, folder: Path, seed: int, sets: tuple[str, ...] = SETS) -> dict:
    """Scores of the whole state and of its linear part, mean over the sets and of each."""
    by_set = {}
    for name in sets:
        adata, labels = load_set(folder, name)
        rows = np.sort(np.random.default_rng(0).permutation(len(labels))[:MAX_CELLS])
        found = both_parts(model, adata[rows].copy(), labels[rows], seed)
        by_set[name] = {key: round(value, 4) for key, value in found.items()}
    keys = [*MEASURES, *(f"linear_{key}" for key in MEASURES)]
    return {key: round(float(np.mean([one[key] for one in by_set.values()])), 4) for key in keys} | {"sets": by_set}


def both_parts(model: ScDiVa, cells: ad.AnnData, labels: np.ndarray, seed: int) -> dict[str, float]:
    """Scores of the state of some cells, and of its linear part."""
    state = sd.tl.embed(cells, model, copy=True).obsm["X_scdiva"]
    whole = scores(state, labels, seed)
    linear = scores(state[:, : model.config.anchor_linear_dim], labels, seed)
    return {key: whole[key] for key in MEASURES} | {f"linear_{key}": linear[key] for key in MEASURES}


def joined(cells: Cells, more: Cells) -> Cells:
    """The studies of both, those of the second after those of the first."""
    return Cells(
        np.concatenate([cells.indptr, cells.indptr[-1] + more.indptr[1:]]),
        np.concatenate([cells.tokens, more.tokens]),
        np.concatenate([cells.values, more.values]),
        np.concatenate([cells.study, len(cells.study_names) + more.study]),
        [*cells.study_names, *more.study_names],
        np.vstack([cells.measured, more.measured]),
    )


def packed_alike(corpus: Path, files: Sequence[Path], vocabulary: Vocabulary) -> Cells:
    """The cells of other files, of any species, packed as those of a packed corpus are."""
    like = PackedCells(corpus, vocabulary)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "more.h5"
        pack_files(
            files, vocabulary, file, max_length=like.max_length, entropy_floor=like.entropy_floor, min_genes=MIN_GENES
        ).close()
        like.close()
        return load_cells(file, vocabulary)


def mouse_rows(found: dict[tuple[str, str], list[dict]], notes: dict[str, dict]) -> list[dict]:
    """A row of each set and arm: its scores over the seeds, and of the arm how many cells it was trained on."""
    rows = []
    for (name, arm), runs in found.items():
        row = {"set": name, "arm": arm, "n_cells": runs[0]["n_cells"], "n_seeds": len(runs), **notes[arm]}
        for key in [*MEASURES, *(f"linear_{key}" for key in MEASURES)]:
            row |= over_seeds(key, [run[key] for run in runs])
        rows.append(row)
    return rows


def goals(rows: list[dict]) -> list[dict]:
    """Whether cells of mice help: the lead of the arm with them over that without, of each set and on average.

    The mean is judged twice: over seeds, for these sets; and over the sets, for others like them.
    """
    at = {(row["set"], row["arm"]): row for row in rows if "arm" in row}
    names = [name for name, arm in at if arm == WITH and (name, WITHOUT) in at]
    found = []
    for key, of in zip(MEASURES, (share_of_cells, of_row), strict=True):
        pairs = {name: [at[name, arm] for arm in (WITH, WITHOUT)] for name in names}
        found += [
            judge(f"{name}: {key} with mouse cells above without", *(of(row, key) for row in pair), at_least=0.0)
            for name, pair in pairs.items()
        ]
        if len(names) > 1:
            sides = []
            for side in zip(*pairs.values(), strict=True):
                each = [mean(run) for run in zip(*(row[f"{key}_seeds"] for row in side), strict=True)]
                sides.append({**over_seeds(key, each), "n_seeds": len(each)})
            said = f"mean {key} with mouse cells above without"
            means = {"ours": sides[0][key], "rival": sides[1][key]}
            leads = across([one[key] - other[key] for one, other in pairs.values()], "sets")
            found.append(judge(f"these sets: {said}", *(of_row(row, key) for row in sides), at_least=0.0, **means))
            found.append(judge(f"sets in general: {said}", leads, at_least=0.0, **means))
    return found


def mouse(arguments: argparse.Namespace, vocabulary: Vocabulary, everything: Cells, steps: int) -> None:
    """Train with cells of mice and without, and record how both do on human sets; after each seed."""
    files = [arguments.data / f"{name}.h5ad" for name in arguments.mouse]
    arms = {WITHOUT: everything}
    arms[WITH] = joined(everything, packed_alike(arguments.prepared / "train.h5", files, vocabulary))
    names = tuple(arguments.sets or OTHER_TISSUES)
    if known := sorted({*names} & {*arms[WITH].study_names}):
        raise SystemExit(f"{', '.join(known)}: trained on, so not to be scored")
    sets = {}
    for name in names:
        folder = arguments.data if (arguments.data / f"{name}.h5ad").exists() else arguments.corpus
        adata, labels = load_set(folder, name)
        rows = np.sort(np.random.default_rng(0).permutation(scored(typed(labels)))[:MAX_CELLS])
        sets[name] = adata[rows].copy(), labels[rows]
    starts = {arm: fit_linear_map(cells, LINEAR_DIM) for arm, cells in arms.items()}
    found: dict[tuple[str, str], list[dict]] = {}
    notes: dict[str, dict] = {}
    for seed in arguments.seeds:
        for arm, cells in arms.items():
            begun = time.process_time()
            model = trained(cells, vocabulary, starts[arm], steps, seed)
            seconds = round(time.process_time() - begun, 1)
            notes[arm] = {"trained_on": cells.n_obs, "studies": len(cells.study_names), "cpu_seconds": seconds}
            for name, (adata, labels) in sets.items():
                run = {"n_cells": len(labels), **both_parts(model, adata, labels, seed)}
                found.setdefault((name, arm), []).append(run)
                print(seed, arm, name, {key: round(value, 4) for key, value in run.items()}, flush=True)
        rows = mouse_rows(found, notes)
        record(
            arguments.name or "learning_curve_mouse", [*rows, *goals(rows)], batch_size=BATCH, max_cells=MAX_CELLS,
            steps=steps, mouse=arguments.mouse, seeds=list(arguments.seeds), studies=everything.study_names,
        )  # fmt: skip
    report(goals(rows))


def extrapolated(numbers: list[int], values: list[float]) -> dict[str, float]:
    """Least squares of values on the logarithm; slope of a tenfold number, and what ten times the most would give."""
    x = np.log10(numbers)
    design = np.column_stack([np.ones_like(x), x])
    weight, *_ = np.linalg.lstsq(design, np.asarray(values), rcond=None)
    rest = np.asarray(values) - design @ weight
    variance = float(rest @ rest) / max(len(x) - 2, 1)
    error = np.sqrt(np.diag(variance * np.linalg.inv(design.T @ design)))
    return {
        "per_tenfold": round(float(weight[1]), 4),
        "per_tenfold_se": round(float(error[1]), 4),
        "at_ten_times": round(float(weight[0] + weight[1] * (max(x) + 1)), 4),
    }


def fits(rows: list[dict]) -> list[dict]:
    """A line through each curve, for each measure."""
    found = []
    for curve in ("cells", "steps"):
        of = [row for row in rows if row["curve"] == curve]
        if len({row[curve] for row in of}) < 2:
            continue
        for key in [*MEASURES, *(f"linear_{key}" for key in MEASURES)]:
            if curve == "steps" and key.startswith("linear_"):
                continue  # the linear part is not trained
            line = extrapolated([row[curve] for row in of], [row[key] for row in of])
            found.append({"fit": curve, "measure": key, "most": max(row[curve] for row in of), **line})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepared", type=Path, required=True, help="the packed corpus")
    parser.add_argument("--data", type=Path, required=True, help="folder of the benchmark h5ad files")
    parser.add_argument("--cells", nargs="+", type=int, default=(3000, 10000, 30000))
    parser.add_argument("--steps", nargs="+", type=int, default=(100, 400, 1600))
    parser.add_argument("--mouse", nargs="+", help="sets of mice that are trained on in one arm of two")
    parser.add_argument("--corpus", type=Path, help="folder of scored studies that --data lacks; with --mouse")
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--sets", nargs="+", help="that are scored")
    parser.add_argument("--name", help="of the results file")
    arguments = parser.parse_args()

    sd.settings.progress = False
    torch.set_num_threads(1)
    vocabulary = Vocabulary.read(arguments.prepared / "vocabulary.safetensors")
    everything = load_cells(arguments.prepared / "train.h5", vocabulary)
    middle = sorted(arguments.steps)[len(arguments.steps) // 2]
    if arguments.mouse:
        mouse(arguments, vocabulary, everything, middle)
        return 0
    sets, result = tuple(arguments.sets or SETS), arguments.name or "learning_curve"
    work = [("cells", min(n, everything.n_obs), middle) for n in arguments.cells]
    work += [("steps", everything.n_obs, steps) for steps in arguments.steps]
    rows: list[dict] = []
    for seed in arguments.seeds:
        done: dict[tuple[int, int], dict] = {}
        starts: dict[int, LinearMap] = {}
        for curve, n_cells, steps in work:
            if (n_cells, steps) not in done:
                begun, some = time.process_time(), drawn(everything, n_cells, seed)
                if n_cells not in starts:
                    starts[n_cells] = fit_linear_map(some, LINEAR_DIM)
                model = trained(some, vocabulary, starts[n_cells], steps, seed)
                seconds = round(time.process_time() - begun, 1)
                done[n_cells, steps] = {"cpu_seconds": seconds, **judged(model, arguments.data, seed, sets)}
            row = {"curve": curve, "cells": n_cells, "steps": steps, "seed": seed, **done[n_cells, steps]}
            rows.append(row)
            print({key: value for key, value in row.items() if key != "sets"}, flush=True)
            # after each: a long run that is cut off leaves what it has
            record(result, [*rows, *fits(rows)], batch_size=BATCH, max_cells=MAX_CELLS, sets=sets)
    print(f"written: {RESULTS.name}/{result}.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
