"""What half of a cell's counts says of the other half, in studies that nothing was trained on.

    python scripts/train_mini.py --exclude HELD_OUT ... --steps 1 --long-steps 1 --batch-size 2 --out runs/held_out
    python scripts/train_denoiser.py --model runs/held_out/model --prepared runs/held_out/prepared --out runs/denoiser
    python benchmarks/denoising.py --corpus FOLDER --base runs/held_out --heads NAME=FILE[+FILE] ... [--seen]

Cells of twelve studies of the corpus, held out with all of their publications, are thinned to half of their counts
(binomial). An arm sees that half, less 15% of its genes, and is asked (a) whether a gene not detected there is in
the other half: as many genes that are as measured genes that neither half shows, at most 1,024 a cell; (b) the
log-normalised value of the genes that were taken away, known to be expressed. No arm knows a rank.

Arms: `unigram`, how often the corpus expresses a gene; `means`, gene means of 200 other cells of the study;
`neighbors`, the 30 nearest of all other cells; `state_head`, the model's own, to which a transformer of masked
diffusion adds; `population`, the same, corrected gene by gene on all other cells, as `tl.impute` does but for its
slopes in depth; `head_linear` and `head_mlp`, from the cell state to genes, trained on the same queries of the training
studies; `head_offsets`, the latter with an offset for each gene fitted to the queries of the 200 other cells; a query
head `NAME`, alone and, nothing fitted, with the 200 other cells as its context (`NAME, context`), of two files the
first for presence and the second for values; transformers of `denoising_controls.py`, at masked positions; `scvi`, its
defaults, fitted to the study. The log-odds of every arm are shifted in each cell so that its queries balance, as by
design they do; nothing else is fitted to them.

With `--seen` heads are asked the same of studies that they were trained on, of 250 cells and more: what they know there
and in no other study does not carry over.

Goals are judged by a bootstrap over the studies.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from _denoising_arms import (
    Answer,
    Answers,
    Corpus,
    Head,
    Study,
    neighbors,
    own_state_head,
    population,
    queries,
    scvi,
    state_head,
    state_head_offsets,
    study_means,
    transformer,
    unigram,
)
from _record import RESULTS, record, replaced, rows_so_far
from _scripts import Asked, StudyBatches, draw_queries, load_head, n_query_cells
from _timing import goal, report
from scipy.stats import rankdata
from sklearn.metrics import average_precision_score

from scdiva._constants import N_SPECIAL
from scdiva._rng import step_generator
from scdiva.data.packed import PackedCells
from scdiva.data.packing import pack_files
from scdiva.diffusion.thinning import Counts, counts_of
from scdiva.models import ScDiVa, load_model
from scdiva.populations.corrections import shift_to

HELD_OUT = (
    "accordion_bone_marrow_1482",
    "breast_scdeconr_ref",
    "citefuse_eccite_pbmc_500",
    "copykat_breast_tumor_302",
    "infercnv_colon_10x_partial",
    "kang_pbmc_stim_2000",
    "pbmc4k_soupx",
    "pisces_pbmc_1000",
    "scillus_GSE128531_skin",
    "streak_malt_2100",
    "vision_metastasis_cp007_604",
    "zilionis_scgate_300",
)
SAME_PUBLICATION = ("numbat_ATC2_173",)
"""Of one publication with a study that is held out: neither trained on nor scored."""
HEAD = "query head"
"""Name of the head that others, whose names begin with it, are held against."""
PRESENCE, VALUES = "query head, errors of random size", "query head, values by transformer"
"""Names of the head that says presence where values are another's, and of such pairs."""
SPLIT = "query head, studies split"
"""Name of a head that is trained as the former, on parts of studies."""
CONTROLS = {
    "true": "masked diffusion, true ranks",
    "none": "masked diffusion, no ranks",
    "behind": "masked diffusion, masked genes last",
    "random": "masked diffusion, random ranks",
}
"""Names of the arms of denoising_controls.py."""
CONTEXT = 200
MOST = 1024
LEAST_CELLS = 12
"""Cells that a gene's values are asked of, for a rank correlation within it."""
HEAD_STEPS = 2500
LEAST_SEEN = 250
"""Cells of a study that was trained on, to be asked."""


def held_out_cells(corpus: Path, base: Path, model: ScDiVa) -> PackedCells:
    """The held-out studies in the vocabulary of the model, packed once."""
    file = base / "held_out.h5"
    if not file.exists():
        files = [corpus / f"{name}.h5ad" for name in HELD_OUT]
        pack_files(files, model.vocabulary, file, max_length=model.config.input_length, min_genes=200).close()
    return PackedCells(file, model.vocabulary)


def part(cells: PackedCells, rows: np.ndarray) -> tuple[torch.Tensor, Counts, torch.Tensor]:
    """Tokens, counts and boundaries of some cells."""
    indptr, tokens, values = cells.read_ranges([(int(row), int(row) + 1) for row in rows])
    bounds = torch.from_numpy(indptr).int()
    return torch.from_numpy(tokens).long(), counts_of(torch.from_numpy(values), bounds), bounds


def study_of(cells: PackedCells, number: int, n_cells: int, seed: int) -> Study:
    """Cells to ask about, those around, and the queries."""
    name = cells.study_names[number]
    rows = np.random.default_rng([seed, number]).permutation(np.flatnonzero(cells.study == number))
    n_around = min(CONTEXT, len(rows) // 2)
    around, asked = np.sort(rows[:n_around]), np.sort(rows[n_around : n_around + n_cells])
    measured = torch.from_numpy(np.flatnonzero(cells.measured[number]))

    def drawn(which: np.ndarray, stream: str) -> Asked:
        generator = step_generator(seed, number, stream)
        return draw_queries(*part(cells, which), measured, generator, thinned=True, most=MOST)

    others = np.setdiff1d(rows, asked)
    parts = (part(cells, which) for which in (around, others, asked))
    return Study(name, drawn(asked, "asked"), *parts, drawn(around, "offsets"))


def corpus_of(cells: PackedCells, n_genes: int) -> Corpus:
    """Detection and mean value of each gene over the training cells."""
    _, tokens, values = cells.read(0, cells.n_obs)
    n = np.bincount(tokens, minlength=n_genes + N_SPECIAL)[N_SPECIAL:]
    total = np.bincount(tokens, values, minlength=n_genes + N_SPECIAL)[N_SPECIAL:]
    mean = np.where(n > 0, total / np.maximum(n, 1), values.mean())
    rate = (n + 0.5) / (cells.n_obs + 1)
    return Corpus(torch.from_numpy(rate).float(), torch.from_numpy(mean).float())


def trained_head(model: ScDiVa, corpus: Corpus, cells: PackedCells, seed: int, *, mlp: bool) -> Head:
    """A state head trained on the queries of the training studies."""
    stream = StudyBatches(cells, 24, 16, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Head(corpus, model.config.state_dim, mlp=mlp)
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, HEAD_STEPS)
    measured = [torch.from_numpy(np.flatnonzero(row)) for row in cells.measured]
    for step in range(HEAD_STEPS):
        batch, generator = stream.batch(step), step_generator(seed, step, "queries")
        counts = counts_of(batch.values, batch.cu_seqlens)
        n = n_query_cells(batch.n_cells, 24)
        cut = int(batch.cu_seqlens[n])
        assert batch.study is not None
        asked = draw_queries(
            batch.tokens[:cut], Counts(counts.of_token[:cut], counts.of_cell[:n]), batch.cu_seqlens[: n + 1],
            measured[int(batch.study[0])], generator, thinned=True, most=320,
        )  # fmt: skip
        odds, values = head.of(model, asked)
        loss = F.binary_cross_entropy_with_logits(odds, asked.present) + F.mse_loss(values, asked.value)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return head.eval()


def balanced(odds: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
    """Shift the log-odds of each cell so that they expect half of its queries."""
    shifted = odds.double().numpy().copy()
    for number in np.unique(cell.numpy()):
        of = cell.numpy() == number
        shifted[of] += shift_to(shifted[of][None], np.array([of.sum() / 2]))[0]
    return torch.from_numpy(shifted)


def spearman_within(predicted: np.ndarray, value: np.ndarray, gene: np.ndarray) -> float:
    """Mean over genes of the rank correlation over cells; NaN if no gene has enough."""
    order = np.argsort(gene, kind="stable")
    found = []
    for at in np.split(order, np.flatnonzero(np.diff(gene[order])) + 1):
        if len(at) >= LEAST_CELLS and np.ptp(value[at]) > 0:
            a, b = rankdata(predicted[at]), rankdata(value[at])
            found.append(float(np.corrcoef(a, b)[0, 1]) if np.ptp(a) > 0 else 0.0)
    return float(np.mean(found)) if found else float("nan")


def scores(answers: Answers, asked: Asked) -> dict[str, float]:
    """Log-loss (nats a balanced query), average precision; rank correlation within genes and error of values."""
    odds, values = balanced(answers[0], asked.cell), answers[1].double().numpy()
    target = asked.value.numpy()
    rho = spearman_within(values, target, asked.value_token.numpy())
    return {
        "log_loss": float(F.binary_cross_entropy_with_logits(odds, asked.present.double())),
        "average_precision": float(average_precision_score(asked.present.numpy(), odds.numpy())),
        **({} if np.isnan(rho) else {"spearman": rho}),
        "rmse": float(np.sqrt(np.square(values - target).mean())),
    }


def bootstrap(leads: Iterable[float], n: int = 4000) -> tuple[float, float]:
    """95% interval of a mean over studies."""
    values = np.array(list(leads))
    drawn = np.random.default_rng(0).choice(values, (n, len(values))).mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def lead(what: str, leads: Sequence[float], least: float = 0.0, **details: object) -> dict:
    """Make a row of the mean lead over the studies, and of how many of them lead by more than is asked for."""
    return goal(
        what, round(float(np.mean(leads)), 4), least, interval=bootstrap(leads), over=f"{len(leads)} studies",
        n_ahead=int((np.array(leads) > least).sum()), **details,
    )  # fmt: skip


def goals(rows: list[dict], heads: Iterable[str], studies: Sequence[str] = HELD_OUT) -> list[dict]:
    """By how much each query head and each control is ahead of what it is to beat."""
    at = {(row["arm"], row["set"]): row for row in rows}
    pairs = [pair for name in heads for pair in pairs_of(name)]
    for ours, theirs in itertools.product(CONTROLS.values(), ("state_head", "head_mlp", CONTROLS["true"])):
        pairs += [(ours, theirs, key, sign, 0.0) for key, sign in (("log_loss", -1), ("spearman", 1)) if ours != theirs]
    found = []
    for ours, theirs, key, sign, least in pairs:
        sets = [one for one in studies if key in at.get((ours, one), {}) and key in at.get((theirs, one), {})]
        if len(sets) < 2:
            continue
        leads = [sign * (at[ours, one][key] - at[theirs, one][key]) for one in sets]
        found.append(lead(f"{ours}: {key} ahead of {theirs}", leads, least))
    return found


def pairs_of(name: str) -> list[tuple[str, str, str, int, float]]:
    """What a query head is held against: the two arms, the score, its sign, and the lead that is asked for."""
    pairs = [
        (name, "head_mlp", "log_loss", -1, 0.01),
        (name, "head_mlp", "spearman", 1, 0.01),
        (name, "state_head", "log_loss", -1, 0.0),
        (name, "state_head", "spearman", 1, 0.0),
        (f"{name}, context", "head_offsets", "log_loss", -1, 0.01),
        (f"{name}, context", "neighbors", "log_loss", -1, 0.0),
        (f"{name}, context", "scvi", "log_loss", -1, 0.0),
        (f"{name}, context", "scvi", "spearman", 1, 0.0),
        (f"{name}, context", "population", "log_loss", -1, 0.0),
        (f"{name}, context", "population", "spearman", 1, 0.0),
    ]
    for about in ("", ", context") if name.startswith(f"{HEAD} ") else ():  # what was added to it
        pairs += [(name + about, HEAD + about, key, sign, 0.0) for key, sign in (("log_loss", -1), ("spearman", 1))]
    keys = (("spearman", 1),) if name.startswith(VALUES) else (("log_loss", -1), ("spearman", 1)) * (name == SPLIT)
    for about in ("", ", context"):
        pairs += [(name + about, PRESENCE + about, key, sign, 0.0) for key, sign in keys]
    return pairs


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True, help="folder of train_mini.py without these studies")
    parser.add_argument("--heads", nargs="*", default=[], metavar="NAME=FILE[+FILE]")
    parser.add_argument("--transformers", nargs="*", default=[], metavar="FOLDER", help="of denoising_controls.py")
    parser.add_argument("--arms", nargs="*", help="of the others; default all that are at hand")
    parser.add_argument("--studies", nargs="+", default=list(HELD_OUT))
    parser.add_argument("--seen", action="store_true", help="ask the studies that heads were trained on")
    parser.add_argument("--cells", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", help="file of results; default denoising, with --seen denoising_seen")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = load_model(arguments.base / "model")
    trained = PackedCells(arguments.base / "prepared" / "train.h5", model.vocabulary)
    if shared := set(trained.study_names) & {*HELD_OUT, *SAME_PUBLICATION}:
        raise SystemExit(f"{arguments.base} was trained on {', '.join(sorted(shared))}, which are held out here")
    corpus = corpus_of(trained, model.config.n_genes)
    arms: dict[str, Answer] = {
        "unigram": unigram(corpus),
        "means": study_means(corpus),
        "neighbors": neighbors(corpus, model),
        "state_head": own_state_head(model),
        "population": population(model),
    }
    wanted = set(
        arguments.arms if arguments.arms is not None else [*arms, "head_linear", "head_mlp", "head_offsets", "scvi"]
    )
    if wanted & {"head_linear"}:
        arms["head_linear"] = state_head(model, trained_head(model, corpus, trained, arguments.seed, mlp=False))
    if wanted & {"head_mlp", "head_offsets"}:
        head = trained_head(model, corpus, trained, arguments.seed, mlp=True)
        arms |= {"head_mlp": state_head(model, head), "head_offsets": state_head_offsets(model, head)}
    if importlib.util.find_spec("scvi"):
        arms["scvi"] = scvi(arguments.seed)
    arms = {name: answer for name, answer in arms.items() if name in wanted}
    result = arguments.result or ("denoising_seen" if arguments.seen else "denoising")
    file = RESULTS / f"{result}.json"
    notes = json.loads(file.read_text())["heads"] if file.exists() else {}  # of heads that were scored earlier too
    for entry in arguments.heads:
        name, _, file = entry.partition("=")
        modules = [load_head(model, Path(one)) for one in file.split("+")]
        spent = torch.load(file.split("+")[-1], weights_only=True).get("trained", {})
        notes[name] = {**modules[-1].config.to_dict(), **{f"{key}_in_all": value for key, value in spent.items()}}
        arms |= {f"{name}{', context' * around}": queries(modules, context=around) for around in (False, True)}

    for folder in arguments.transformers:
        one = load_model(folder)
        control = one.metadata["control"]
        notes[CONTROLS[control]] = one.metadata
        arms[CONTROLS[control]] = transformer(one, model.vocabulary, behind=control == "behind")

    cells, studies, rows = trained, arguments.studies, rows_so_far(result)
    if arguments.seen:
        studies = [name for number, name in enumerate(cells.study_names) if (cells.study == number).sum() >= LEAST_SEEN]
    else:
        cells = held_out_cells(arguments.corpus, arguments.base, model)
    for number, name in enumerate(cells.study_names):
        if name not in studies:
            continue
        study = study_of(cells, number, arguments.cells, arguments.seed)
        for arm, answer in arms.items():
            begun = time.process_time()
            found = {key: round(value, 5) for key, value in scores(answer(study), study.asked).items()}
            row = {
                "set": name, "arm": arm, "n_cells": len(study.asked.seen[2]) - 1, "n_queries": len(study.asked.cell),
                **found, "cpu_seconds": round(time.process_time() - begun, 2),
            }  # fmt: skip
            rows = replaced(rows, row, ("set", "arm"))
            print(json.dumps(row), flush=True)
    heads = sorted({row["arm"].removesuffix(", context") for row in rows if row["arm"].endswith(", context")})
    judged = goals(rows, heads, studies if arguments.seen else HELD_OUT)
    record(result, [*rows, *judged], held_out=list(HELD_OUT), context=CONTEXT, heads=notes)
    return report(judged)


if __name__ == "__main__":
    raise SystemExit(main())
