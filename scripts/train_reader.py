"""Train the reader of a model (`scdiva.models.reader`), which predicts counts of masked genes.

    PYTHONPATH=src python scripts/train_reader.py --corpus FOLDER [--exclude STUDY ...] [--steps 10000] [--resume]
    PYTHONPATH=src python scripts/train_reader.py --prepared FOLDER --seconds 300 --sizes 1x 4x 16x --accelerator gpu
    PYTHONPATH=src python scripts/train_reader.py --init OUT/readers.safetensors --steps 0     # write the model folder

A batch contains cells of one study. The first cells are predicted, the others are their context. Of the genes, 10 to
40% are masked in all predicted cells, and up to 256 of these are queried. In 40% of the batches the counts of the
predicted cells are split in two halves at random: one half is given, the other predicted. In half of the batches a
random panel of genes is used. The loss is the negative log-likelihood of the counts, divided by the square root of
that under the mean rates of the context cells, since studies differ in depth.

`--sizes` trains readers of about 1, 4 and 16 times the weights one after the other, by `--seconds` each for an equal
share of the time. A reader continues from the weights in `--init`, the one of size 1x otherwise from those of the
model. OUT/readers.safetensors contains the weights of all sizes, and as metadata the runs, with the score on the
validation studies before and after: the negative log-likelihood in nats per count, that under the mean rates of the
context cells (`base`), and the loss.

All other weights of the model stay as they are; OUT/model is the model with the reader of size 1x. Needs no AnnData
with `--prepared`, a folder of `train.h5`, `vocabulary.safetensors` and optionally `validation.h5`; genes that the model
lacks have no code. `--seconds` sets the number of steps by the measured rate; a run by steps continues with `--resume`.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from mini_objectives import QueryConfig, StudyBatches, StudyDataModule, n_query_cells
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from train_mini import MIN_GENES_PER_CELL, clean, with_part
from train_paper import fit_and_record

from scdiva._constants import N_SPECIAL, TARGET_SUM
from scdiva._rng import step_generator
from scdiva.data.batch import CellBatch
from scdiva.data.packed import PackedCells
from scdiva.data.packing import pack_files
from scdiva.diffusion import cell_of_token
from scdiva.diffusion.masking import counts_of
from scdiva.models import ScDiVa, load_model, save_model
from scdiva.models.reader import (
    LOG_SIZE,
    PSEUDO_COUNT,
    Cells,
    Reader,
    Study,
    cells_of,
    count_loss,
    gene_codes,
    study_of,
)
from scdiva.tokenizer import Vocabulary
from scdiva.train import TaskModule

PANEL_RATE, MIN_PANEL = 0.5, 0.15
"""Share of the batches with a random panel of genes, and the minimum share of genes in it."""
MASKED = 0.1, 0.4
"""Range of the share of masked genes."""
HALVES_RATE = 0.4
LEAST_LOSS = 0.05
SIZES = {"1x": (1, 1), "4x": (2, 2), "16x": (4, 2)}
"""Scale and depth of the readers: 136,624, 561,040 and 2,006,480 weights with gene codes of `scdiva-mini`. The
learning rate is divided by the scale."""
MEASURED = 10, 40
"""Steps between which the rate of a run by time is first measured."""
SCORED_BATCHES = 48
"""Batches of the validation studies, the same for all readers."""
FILE = "readers.safetensors"
Runs = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class ReaderConfig(QueryConfig):
    """Training of a reader; `batch_size` counts predicted cells, `queries` genes that are queried in each."""

    steps: int = 10_000
    batch_size: int = 40
    context_cells: int = 400
    queries: int = 256
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    log_every: int = 50
    checkpoint_every: int = 500


class Task(NamedTuple):
    """Cells to predict, and the answers.

    Attributes
    ----------
    study, cells
        Inputs of the reader.
    codes
        `(Q, code_dim)`, codes of the queried genes.
    counts, total
        `(B, Q)`, counts to predict, and `(B,)`, all counts of the cells of which they are a part.
    """

    study: Study
    cells: Cells
    codes: Tensor
    counts: Tensor
    total: Tensor


def halves(counts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Split counts at random: each single count belongs to either half with probability 0.5."""
    if counts.is_cuda:
        seed = int(torch.randint(2**63 - 1, (), generator=generator))
        generator = torch.Generator(counts.device).manual_seed(seed)
    one = torch.binomial(counts.double(), torch.full_like(counts, 0.5, dtype=torch.float64), generator=generator)
    one = one.to(counts.dtype)
    return one, counts - one


def dense_counts(batch: CellBatch) -> tuple[Tensor, Tensor]:
    """Counts of all genes that a cell of the batch expresses, float32 `(B, G)`, and the numbers of these genes."""
    counts = counts_of(batch.values, batch.cu_seqlens)
    genes, column = torch.unique(batch.tokens.long() - N_SPECIAL, return_inverse=True)
    dense = torch.zeros(batch.n_cells, len(genes), device=genes.device)
    dense[cell_of_token(batch.cu_seqlens, len(column)), column] = counts.of_token.float()
    return dense, genes


def draw_task(batch: CellBatch, table: Tensor, config: ReaderConfig, generator: torch.Generator) -> Task:
    """Mask genes of the first cells of a batch of one study, and draw the queries, by a generator on the CPU.

    `table` contains the gene codes, `(n_genes, code_dim)`, on the device of the batch.
    """

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    counts, genes = dense_counts(batch)
    if uniform(0, 1) < PANEL_RATE:
        panel = torch.rand(len(genes), generator=generator) < uniform(MIN_PANEL, 1)
        panel[:2] = True
        counts, genes = counts[:, panel], genes[panel]
    order = torch.randperm(len(genes), generator=generator)  # the tokens of a cell are its first genes
    counts, genes = counts[:, order], genes[order]
    n = n_query_cells(batch.n_cells, config.batch_size)
    n_masked = min(max(1, round(uniform(*MASKED) * len(genes))), len(genes) - 1)
    weight = (counts[:, :n_masked] > 0).float().sum(dim=0).sqrt() + 1e-6
    columns = torch.multinomial(weight.cpu(), min(config.queries, n_masked), generator=generator)
    inputs = targets = counts[:n]
    if uniform(0, 1) < HALVES_RATE:
        inputs, targets = halves(inputs, generator)
    visible = slice(n_masked, None)

    def values(cell_counts: Tensor) -> tuple[Tensor, Tensor]:
        total = cell_counts.sum(dim=1).clamp_min(1)
        return torch.log1p(TARGET_SUM * cell_counts[:, visible] / total[:, None]), total

    codes, queried = table[genes[visible]], table[genes[columns]]
    around, around_total = values(counts[n:])
    study = study_of(around, codes, counts[n:, columns], around_total)
    visible_values, total = values(inputs)
    target_total = targets.sum(dim=1).clamp_min(1)
    return Task(study, cells_of(study, visible_values, codes, total), queried, targets[:, columns], target_total)


class ReaderModule(TaskModule):
    """Train a reader on batches of one study each; `table` as for :func:`draw_task`."""

    config: ReaderConfig
    model: Reader

    def __init__(self, reader: Reader, config: ReaderConfig, table: Tensor) -> None:
        super().__init__(reader, config)
        self.table: Tensor
        self.register_buffer("table", table, persistent=False)

    def compute_loss(self, batch: CellBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Scaled loss of a batch; its parts are `nll`, in nats per count, and `base`, that of the mean rates."""
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            task = draw_task(batch, self.table, self.config, generator)
        log_rate, log_size = self.model(task.cells, task.codes, task.study)
        with torch.autocast(self.device.type, enabled=False):
            log_total = task.total.log()[:, None]
            nll = count_loss(task.counts, log_rate.float() + log_total, log_size.float()).mean()
            pooled = ((task.study.counts.sum(dim=0) + PSEUDO_COUNT) / task.study.total.sum()).log() + log_total
            base = count_loss(task.counts, pooled, torch.full_like(pooled, LOG_SIZE)).mean()
            return nll / base.clamp_min(LEAST_LOSS).sqrt(), {"nll": nll.detach(), "base": base}

    @torch.no_grad()
    def score(self, batches: list[CellBatch], device: str) -> dict[str, float]:
        """Mean loss of batches and its parts, with the same random numbers each time."""
        self.to(device)
        rows = []
        for number, batch in enumerate(batches):
            loss, parts = self.compute_loss(batch.to(device), step_generator(0, number, "validation/0"))
            rows.append(torch.stack([loss, *parts.values()]))
        self.cpu()
        return dict(zip(("loss", *parts), torch.stack(rows).mean(dim=0).tolist(), strict=True)) if rows else {}


def codes_of(model: ScDiVa, genes: Vocabulary) -> Tensor:
    """Gene codes of the model for each gene of a vocabulary, `(n_genes, code_dim)`; 0 for genes that it lacks."""
    assert model.anchor is not None
    tokens = torch.from_numpy(model.vocabulary.match(genes.ensembl_ids, "human").tokens).long()
    return gene_codes(model.anchor.table.weight)[tokens.clamp_min(0)] * (tokens >= 0)[:, None]


def read_readers(file: Path) -> tuple[dict[str, dict[str, Tensor]], Runs]:
    """Weights and runs of the readers in a file, by size."""
    with safe_open(file, "pt") as stored:
        texts = stored.metadata()  # in any order
        runs = {size: json.loads(texts[size]) for size in SIZES if size in texts}
        weights: dict[str, dict[str, Tensor]] = {size: {} for size in runs}
        for name in stored.keys():  # noqa: SIM118 not a dict
            size, _, tensor_name = name.partition("/")
            weights[size][tensor_name] = stored.get_tensor(name)
    return weights, runs


def write_readers(file: Path, weights: dict[str, dict[str, Tensor]], runs: Runs) -> None:
    """Write readers in half precision, for :func:`read_readers`."""
    tensors = {f"{size}/{name}": value.half() for size in weights for name, value in weights[size].items()}
    save_file(tensors, file, {size: json.dumps(runs[size]) for size in weights})


def prepare(model: ScDiVa, corpus: Path, excluded: Sequence[str], folder: Path) -> None:
    """Pack the corpus in the vocabulary of the model."""
    files = [file for file in clean(corpus, folder / "clean") if file.stem not in excluded]
    length = model.config.input_length
    pack_files(files, model.vocabulary, folder / "train.h5", max_length=length, min_genes=MIN_GENES_PER_CELL).close()
    model.vocabulary.write(folder / "vocabulary.safetensors")


def train(
    reader: Reader, model: ScDiVa, prepared: Path, config: ReaderConfig, out: Path, seconds: float | None,
    arguments: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """Train a reader for `seconds`, or by steps if they are None; return what to record of the run."""
    start_time, batches, genes = time.monotonic(), [], Vocabulary.read(prepared / "vocabulary.safetensors")
    device = "cuda" if arguments.accelerator != "cpu" and torch.cuda.is_available() else "cpu"
    module = ReaderModule(reader.train(), config, codes_of(model, genes))
    if (prepared / "validation.h5").exists():
        cells = PackedCells(prepared / "validation.h5", genes)
        stream = StudyBatches(cells, config.batch_size, config.context_cells, seed=0)
        batches = [stream.batch(number) for number in range(2 if arguments.toy else SCORED_BATCHES)]
    before = module.score(batches, device)
    run = fit_and_record(
        module, StudyDataModule(prepared / "train.h5", genes, config), out, accelerator=arguments.accelerator,
        measured=(1, 3) if arguments.toy else MEASURED,
        end=seconds and seconds + 2 * start_time - time.monotonic(),  # the second score takes as long as the first
        resume_from=out if arguments.resume and (out / "last.ckpt").exists() else None,
    )  # fmt: skip
    size = {"parameters": sum(weight.numel() for weight in reader.parameters()), "excluded": list(arguments.exclude)}
    return {**size, **run, "before": before, "after": module.score(batches, device)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="scdiva-mini", help="model with a set encoder and a state head")
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument("--out", type=Path, default=Path("runs/reader"))
    parser.add_argument("--prepared", type=Path, help="folder of the packed corpus; default OUT/prepared")
    parser.add_argument("--exclude", nargs="+", default=(), metavar="STUDY", help="studies to leave out of the corpus")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1x"])
    parser.add_argument("--init", type=Path, help="readers.safetensors of an earlier run, to continue")
    parser.add_argument("--steps", type=int, default=ReaderConfig.steps, help="0: only write the files")
    parser.add_argument("--seconds", type=float, help="train for so long; then --steps is ignored")
    parser.add_argument("--batch-size", type=int, default=ReaderConfig.batch_size, help="predicted cells of a batch")
    parser.add_argument("--resume", action="store_true", help="continue a run by steps from its last checkpoint")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument(
        "--toy", action="store_true", help="score few batches and measure few steps, to try it on a CPU"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.resume and arguments.seconds is not None:
        parser.error("--resume continues a run by steps: pass --init to continue by --seconds")
    warnings.filterwarnings("ignore", message=".*are left out.*")
    start_time, out, loaded = time.monotonic(), arguments.out, load_model(arguments.model, device="cpu")
    prepared, metadata = arguments.prepared or out / "prepared", loaded.metadata or {}
    trains = arguments.steps > 0 or arguments.seconds is not None
    if trains and not (prepared / "vocabulary.safetensors").exists():
        prepare(loaded, arguments.corpus, arguments.exclude, prepared)
    model = loaded if loaded.reader is not None else with_part(loaded, "reader", arguments.seed)
    weights, runs = read_readers(arguments.init) if arguments.init else ({}, {})
    runs = {"1x": metadata.get("reader", []), **runs}
    for number, size in enumerate(arguments.sizes):
        reader, (scale, depth), before = model.reader, SIZES[size], runs.setdefault(size, [])
        if size != "1x":
            torch.manual_seed(arguments.seed)
            reader = Reader(model.config.anchor_linear_dim, scale, depth)
        if size in weights:
            reader.load_state_dict(weights[size])
        if trains:
            seconds = arguments.seconds
            if seconds is not None:
                seconds = (start_time + seconds - time.monotonic()) / (len(arguments.sizes) - number)
            config = ReaderConfig(
                steps=arguments.steps if seconds is None else 1_000_000, batch_size=arguments.batch_size,
                seed=arguments.seed + sum(run["steps"] for run in before),  # a continued reader gets other batches
                learning_rate=ReaderConfig.learning_rate / scale,
            )  # fmt: skip
            run = train(reader, loaded, prepared, config, out / size, seconds, arguments)
            runs[size] = [*before, run]
            print(size, {name: run[name] for name in ("parameters", "steps", "seconds", "before", "after")}, flush=True)
        out.mkdir(parents=True, exist_ok=True)
        weights[size] = reader.state_dict()
        write_readers(out / FILE, weights, runs)
        if size == "1x":
            metadata = {**metadata, "reader": runs[size]}
            save_model(model, loaded.vocabulary, out / "model", metadata=metadata, dtype="float16", overwrite=True)


if __name__ == "__main__":
    main()
