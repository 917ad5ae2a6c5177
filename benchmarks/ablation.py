"""Which parts of the model and of its training earn their place: one change each, at equal compute.

    python benchmarks/ablation.py --prepared FOLDER --corpus FOLDER [--arms NAME ...] [--seeds 0 1 2] [--seconds 8]

Every arm of `_ablation_arms.py` is trained for the same compute on one thread: the base of its family for so many CPU
seconds, as found once, the others for as many steps as cost the same, by a short trial of both in turn; learning-rate
schedules end with them. Transformer arms get the set encoder that the base of the set encoders
became with the same seed, and train the transformer alone, as `scripts/train_mini.py` does.

No labelled study that is scored, and no study of the same publication, is trained on; the linear start is fitted anew
without them. Genes are the 6,000 found in the most training cells (entropies are those of the packed corpus), as the
network has to be small to learn anything in seconds. Two judgements:

- of the cell state, what `tl.embed` gives for the held-out labelled cells: 15-NN accuracy and the mean of NMI, ARI and
  ASW, mean over the sets. Arms of the family "diffusion" leave the state to the set encoder and are not asked.
- of the denoiser, on the validation studies: nats per masked gene, squared error of masked values and of values that
  alone are hidden. Same cells, same genes, same masks for all arms, each in the arm's order: the first 256 genes in the
  order of the base, and, for the identity, also 256 genes drawn from all of the cell, as these favour no order.

A row is written as soon as it is done, all arms of one seed before the next seed; rows that are there with the same
settings are not made again. Thinned counts are drawn from values that are already log-normalised: a cell's smallest
value is taken as a count of one, which is true of counts and an approximation where numbers are no counts.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import NamedTuple

import anndata as ad
import numpy as np
import torch
from _ablation_arms import (
    ARMS,
    BASES,
    DIFFUSION,
    MODEL,
    REMOVED,
    SET,
    SET_TRAINING,
    TRAINING,
    Arm,
    Batches,
    Cells,
    Judged,
    ThinnedViews,
    denominator,
    hidden,
    load_cells,
    model_config,
    order_of,
    random_map,
    ranked,
    restricted,
    stream,
    thinned_stream,
)
from _record import RESULTS, commit, record
from _scripts import AnchorConfig, AnchorModule
from _sets import load_set, scored, scores, typed

import scdiva as sd
from scdiva._constants import MASK, N_SPECIAL
from scdiva._rng import step_generator
from scdiva.diffusion import masked_cross_entropy
from scdiva.models import ScDiVa
from scdiva.models.network import init_gene_embedding
from scdiva.tokenizer import Vocabulary
from scdiva.train import LinearMap, PretrainingConfig, PretrainingModule, TaskModule, fit_linear_map
from scdiva.train.linear_map import set_linear_map
from scdiva.train.runner import resolve_precision

SCORED = (
    "zheng_pbmc14k_scminer_3500",
    "pbmc4k_soupx",
    "pollen2014_c1_299",
    "pollen2015_fetal_cortex_367",
    "zilionis_scgate_300",
)
NOT_TRAINED_ON = (
    *SCORED,
    "mudan_reference_pbmc_sorted",
    "garnett_zheng_pbmc_800",
    "mudan_pbmcA",
    "zheng_aml027_pre_bmmc",
)
"""What is scored, and the other studies of the publication that the first of them is from."""
MAX_CELLS = 500
"""Labelled cells of a set that are scored."""
VALIDATION_CELLS = 128
N_GENES = 6000
"""Those found in the most training cells. The gene head is most of a small network's work: a third of the vocabulary
lets it see twice as many cells."""
SECONDS = 8.0
TRIAL_STEPS = 12
MEASURES = ("accuracy", "average_bio", "identity", "value", "value_shown", "identity_drawn")


def autocast(config: AnchorConfig | PretrainingConfig) -> torch.autocast | nullcontext:
    half = resolve_precision(config.precision, "cpu") == "bf16-mixed"
    return torch.autocast("cpu", torch.bfloat16) if half else nullcontext()


def train(module: TaskModule, batches: Batches) -> Iterator[float]:
    """Train on the CPU, a step each time that the next is asked for; yields its CPU seconds."""
    made = module.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    for step in itertools.count():
        begun = time.process_time()
        with autocast(module.config):
            loss, _ = module.compute_loss(batches(step), step_generator(module.config.seed, step, "train/0"))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), module.config.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield time.process_time() - begun


class Plan(NamedTuple):
    """A model, the module that trains it for so many steps, and what it is trained on."""

    model: ScDiVa
    make: Callable[[int], TaskModule]
    batches: Batches


def trial(plan: Plan) -> Iterator[float]:
    """Training of a copy, at the start of a long schedule."""
    return train(copy.deepcopy(plan.make(10**6)), plan.batches)


def base_steps(family: str, work: Work) -> int:
    """Steps of a family's base that fit, found once and kept: other arms, seeds and calls are measured by it."""
    file = work.folder / f"steps_{settings(ARMS[BASES[family]], work)}.json"
    if not file.exists():
        steps = trial(plan_of(ARMS[BASES[family]], 0, work))
        file.write_text(json.dumps(max(1, round(work.seconds / median(itertools.islice(steps, 2 * TRIAL_STEPS))))))
    return int(json.loads(file.read_text()))


def steps_that_fit(arm: Arm, plan: Plan, seed: int, work: Work) -> int:
    """Steps of an arm that cost what its base's cost, both timed in turn: who else is on the machine slows both."""
    base, steps = ARMS[BASES[arm.family]], base_steps(arm.family, work)
    if arm == base:
        return steps
    own, reference = trial(plan), trial(plan_of(base, seed, work))
    # the first steps allocate and fill buffers
    both = [(next(own), next(reference)) for _ in range(TRIAL_STEPS)][TRIAL_STEPS // 4 :]
    return max(1, round(steps * median(other for _, other in both) / median(mine for mine, _ in both)))


def trained(arm: Arm, seed: int, work: Work) -> tuple[ScDiVa, dict]:
    """The trained model of an arm, and what it took."""
    plan = plan_of(arm, seed, work)
    if arm.untrained:
        return plan.model, {"steps": 0, "cells_seen": 0, "cpu_seconds": 0.0}
    steps = steps_that_fit(arm, plan, seed, work)
    module = plan.make(steps)
    seconds = sum(itertools.islice(train(module, plan.batches), steps))
    return plan.model, {"steps": steps, "cells_seen": steps * module.config.batch_size, "cpu_seconds": seconds}


class Work(NamedTuple):
    """What all arms share."""

    vocabulary: Vocabulary
    cells: Cells
    start: LinearMap
    folder: Path
    sets: dict[str, tuple[ad.AnnData, np.ndarray]]
    judged: dict[str, Judged]
    seconds: float


def open_work(prepared: Path, corpus: Path, seconds: float) -> Work:
    """Read everything once; the linear map without the held-out studies is kept beside the packed corpus."""
    everything = Vocabulary.read(prepared / "vocabulary.safetensors")
    cells, validation = (
        load_cells(prepared / f"{part}.h5", everything, NOT_TRAINED_ON) for part in ("train", "validation")
    )
    often = np.argsort(-np.bincount(cells.tokens, minlength=cells.n_tokens), kind="stable")
    tokens = np.sort(often[often >= N_SPECIAL][:N_GENES])
    vocabulary, cells, validation = everything.subset(tokens), restricted(cells, tokens), restricted(validation, tokens)
    folder = prepared / "ablation"
    folder.mkdir(exist_ok=True)
    n_dims = model_config(ARMS["set"], vocabulary).anchor_linear_dim
    file = folder / f"linear_map_{digest([vocabulary.fingerprint, cells.study_names, n_dims])}.npz"
    if not file.exists():
        np.savez(file, **fit_linear_map(cells, n_dims)._asdict())  # type: ignore[arg-type]
    with np.load(file) as saved:
        start = LinearMap(**saved)
    judged = {key: hidden(validation, VALIDATION_CELLS, drawn=bool(key)) for key in ("", "_drawn")}
    sets = {name: held_out(corpus, name) for name in SCORED}
    return Work(vocabulary, cells, start, folder, sets, judged, seconds)


def held_out(corpus: Path, name: str) -> tuple[ad.AnnData, np.ndarray]:
    """Labelled cells of a study, the same ones for all arms and seeds."""
    adata, labels = load_set(corpus, name)
    rows = scored(typed(labels))
    rows = np.sort(np.random.default_rng(0).permutation(rows)[:MAX_CELLS])
    return adata[rows].copy(), labels[rows]


def digest(of: object) -> str:
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:12]


def settings(arm: Arm, work: Work) -> str:
    """What a row depends on but for its seed and the code."""
    judged = [SCORED, NOT_TRAINED_ON, MAX_CELLS, VALIDATION_CELLS]
    trained = [MODEL, SET_TRAINING, TRAINING, work.seconds, TRIAL_STEPS, work.vocabulary.fingerprint]
    return digest([{**asdict(arm), "what": ""}, trained, judged])


def plan_of(arm: Arm, seed: int, work: Work) -> Plan:
    return (plan_set_encoder if arm.family == SET else plan_transformer)(arm, seed, work)


def plan_set_encoder(arm: Arm, seed: int, work: Work) -> Plan:
    """A model whose set encoder is trained alone."""
    model = ScDiVa(model_config(arm, work.vocabulary), generator=step_generator(seed, 0, "weights"))
    anchor, start = model.anchor, work.start if arm.start == "svd" else random_map(work.start, work.cells, seed)
    set_linear_map(anchor, start)

    def make(steps: int) -> AnchorModule:
        config = AnchorConfig(
            steps=steps, warmup_steps=min(50, max(1, steps // 16)), seed=seed, **{**SET_TRAINING, **arm.training}
        )
        module = (ThinnedViews if arm.thinning else AnchorModule)(model, config, start, np.bincount(work.cells.study))
        if arm.trains_table:
            anchor.table.requires_grad_(True)
            anchor.bias.requires_grad_(True)
        if not arm.study:  # they start from zero, and so add nothing
            module.decoder.study_bias.requires_grad_(False)
        return module

    batches = stream(work.cells, SET_TRAINING["batch_size"], model.config.anchor_length, seed)
    return Plan(model, make, batches)


def base_set_encoder(seed: int, work: Work) -> tuple[dict, dict]:
    """Weights of the set encoder that all transformer arms of a seed get, and what its training took; made once."""
    file = work.folder / f"set_encoder_{settings(ARMS['set'], work)}_{seed}.pt"
    if not file.exists():
        model, taken = trained(ARMS["set"], seed, work)
        torch.save([model.anchor.state_dict(), taken], file)
    return tuple(torch.load(file, weights_only=True))


def plan_transformer(arm: Arm, seed: int, work: Work) -> Plan:
    """A model whose set encoder, if it has one, is that of the seed, and whose transformer is trained."""
    model = ScDiVa(model_config(arm, work.vocabulary), generator=step_generator(seed, 0, "weights"))
    if arm.start == "svd":
        vectors = work.start.weight[N_SPECIAL:, : model.config.dim]
        init_gene_embedding(model, vectors, generator=step_generator(seed, 0, "genes"))
    if model.config.anchor == "encoder":
        model.anchor.load_state_dict(base_set_encoder(seed, work)[0])
        model.anchor.requires_grad_(False)

    def make(steps: int) -> PretrainingModule:
        config = PretrainingConfig(
            steps=steps, warmup_steps=max(1, steps // 20), seed=seed, **{**TRAINING, **arm.training}
        )
        return PretrainingModule(model, config, len(work.cells.study_names), work.start.frequency)

    config, divide_by = make(1).config, denominator(arm, work.vocabulary, work.cells)
    if arm.thinning:
        batches = thinned_stream(work.cells, config, divide_by)
    else:
        same = arm.order == "entropy" and "entropy_floor" not in arm.model
        cells = work.cells if same else ranked(work.cells, divide_by)
        batches = stream(cells, config.batch_size, config.context, seed)
    return Plan(model, make, batches)


def state_scores(model: ScDiVa, arm: Arm, seed: int, work: Work) -> dict:
    """Scores of the cell state, mean over the held-out sets and of each."""
    model.vocabulary = work.vocabulary
    by_set = {}
    for name, (adata, labels) in work.sets.items():
        state = sd.tl.embed(adata, model, copy=True).obsm["X_scdiva"]
        if arm.untrained:
            state = state[:, : model.config.anchor_linear_dim]
        found = scores(state, labels, seed)
        by_set[name] = {key: round(found[key], 4) for key in ("accuracy", "average_bio", "n_cells")}
    means = {key: float(np.mean([one[key] for one in by_set.values()])) for key in ("accuracy", "average_bio")}
    return {**means, "sets": by_set}


@torch.no_grad()
def denoising(model: ScDiVa, arm: Arm, work: Work) -> dict[str, float]:
    """Errors of the denoiser on the masked genes of the validation cells."""
    found = {}
    divide_by = denominator(arm, work.vocabulary, work.cells)
    for key, judged in work.judged.items():
        order = order_of(judged.tokens, judged.values, judged.cu_seqlens, divide_by)
        tokens, values, masked, value_mask = (
            one[order] for one in (judged.tokens, judged.values, judged.masked, judged.value_mask)
        )
        with autocast(PretrainingConfig(precision=TRAINING["precision"])):
            out = model(
                tokens.masked_fill(masked, MASK), values.masked_fill(value_mask, 0.0), judged.cu_seqlens,
                value_mask=value_mask,
            )  # fmt: skip
            _, nll = masked_cross_entropy(out.hidden[masked], model.gene_weight, tokens[masked] - N_SPECIAL)
            error = (model.values(out, tokens).float() - values).square()
        found[f"identity{key}"] = float(nll.float().mean())
        found[f"value{key}"] = float(error[masked].mean())
        found[f"value_shown{key}"] = float(error[value_mask & ~masked].mean())
    return found


def make_row(name: str, seed: int, work: Work) -> dict:
    """Train an arm and judge it."""
    arm = ARMS[name]
    row: dict = {"family": arm.family, "arm": name, "what": arm.what, "seed": seed, "settings": settings(arm, work)}
    if name == BASES[SET]:
        weights, taken = base_set_encoder(seed, work)
        model = ScDiVa(model_config(arm, work.vocabulary))
        model.anchor.load_state_dict(weights)
    else:
        model, taken = trained(arm, seed, work)
    row |= taken
    if arm.family != DIFFUSION:
        row |= state_scores(model, arm, seed, work)
    if arm.family != SET:
        row |= denoising(model, arm, work)
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


def rows_there(work: Work) -> list[dict]:
    """Rows of earlier calls; those of other settings can't stand in one table with new ones."""
    file = RESULTS / "ablation.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    there = [row for row in rows if row["arm"] in ARMS and row["settings"] == settings(ARMS[row["arm"]], work)]
    return [*there, *(row for row in rows if row["arm"] in REMOVED)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepared", type=Path, required=True, help="the packed corpus")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of the corpus, for labels of held-out cells")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="CPU seconds that each arm is trained")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    sd.settings.progress, sd.settings.threads = False, 1
    warnings.filterwarnings("ignore", category=UserWarning)
    code, work = commit(), open_work(arguments.prepared, arguments.corpus, arguments.seconds)
    rows, names = {(row["arm"], row["seed"]): row for row in rows_there(work)}, [*ARMS, *REMOVED]
    for seed in arguments.seeds:
        for name in arguments.arms:
            if (name, seed) in rows:
                continue
            begun = time.process_time()
            row = rows[name, seed] = make_row(name, seed, work)
            said = [f"{key} {row[key]:.4g}" for key in MEASURES if key in row]
            print(
                f"seed {seed} {name:22s} {row['steps']:4d} steps, {row['cells_seen']:6,d} cells, "
                f"{row['cpu_seconds']:.1f} of {time.process_time() - begun:.1f} s: {', '.join(said)}",
                flush=True,
            )
            ordered = sorted(rows.values(), key=lambda row: (names.index(row["arm"]), row["seed"]))
            record(
                "ablation", ordered, commit=code, seconds=work.seconds, bases=BASES, sets=SCORED,
                not_trained_on=NOT_TRAINED_ON, n_cells=work.cells.n_obs, n_studies=len(work.cells.study_names),
            )  # fmt: skip


if __name__ == "__main__":
    main()
