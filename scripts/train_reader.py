"""Train the reader of a model (`scdiva.models.reader`), which predicts counts of masked genes.

    PYTHONPATH=src python scripts/train_reader.py --corpus FOLDER [--exclude STUDY ...] [--steps 10000] [--resume]
    PYTHONPATH=src python scripts/train_reader.py --prepared FOLDER --seconds 300 --accelerator gpu

A batch contains cells of one study. The first cells are predicted, the others are their context. Of the genes, 10 to
40% are masked in all predicted cells, and up to 256 of these are queried. In 40% of the batches the counts of the
predicted cells are split in two halves at random: one half is given, the other predicted. In half of the batches a
random panel of genes is used. The loss is the negative log-likelihood of the counts, divided by the square root of
that under the mean rates of the context cells, since studies differ in depth.

All other weights of the model stay as they are. The new model folder is OUT/model. Needs no AnnData with `--prepared`,
a folder of `train.h5` in the vocabulary of the model. `--seconds` sets the number of steps by the measured rate; a run
by steps continues with `--resume`.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from mini_objectives import QueryConfig, StudyDataModule, n_query_cells
from torch import Tensor
from train_mini import MIN_GENES_PER_CELL, clean
from train_paper import MEASURED, ByTime

from scdiva._constants import N_SPECIAL, TARGET_SUM
from scdiva._rng import step_generator
from scdiva.data.batch import CellBatch
from scdiva.data.packing import pack_files
from scdiva.diffusion import cell_of_token
from scdiva.diffusion.masking import counts_of
from scdiva.models import ScDiVa, load_model, save_model
from scdiva.models.reader import LOG_SIZE, PSEUDO_COUNT, Cells, Study, cells_of, count_loss, gene_codes, study_of
from scdiva.train import TaskModule, fit

PANEL_RATE, MIN_PANEL = 0.5, 0.15
"""Share of the batches with a random panel of genes, and the minimum share of genes in it."""
MASKED = 0.1, 0.4
"""Range of the share of masked genes."""
HALVES_RATE = 0.4
LEAST_LOSS = 0.05


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
    one = torch.binomial(counts.double(), torch.full_like(counts, 0.5, dtype=torch.float64), generator=generator)
    one = one.to(counts.dtype)
    return one, counts - one


def dense_counts(batch: CellBatch) -> tuple[Tensor, Tensor]:
    """Counts of all genes that a cell of the batch expresses, float32 `(B, G)`, and the numbers of these genes."""
    counts = counts_of(batch.values, batch.cu_seqlens)
    genes, column = torch.unique(batch.tokens.long() - N_SPECIAL, return_inverse=True)
    dense = torch.zeros(batch.n_cells, len(genes))
    dense[cell_of_token(batch.cu_seqlens, len(column)), column] = counts.of_token.float()
    return dense, genes


def draw_task(batch: CellBatch, table: Tensor, config: ReaderConfig, generator: torch.Generator) -> Task:
    """Mask genes of the first cells of a batch of one study, and draw the queries.

    Parameters
    ----------
    batch
        On the CPU.
    table
        `(n_genes, code_dim)`, gene codes, on the device of the result.
    config, generator
        Of the training.
    """
    device = table.device

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    counts, genes = dense_counts(batch)
    if uniform(0, 1) < PANEL_RATE:
        kept = torch.rand(len(genes), generator=generator) < uniform(MIN_PANEL, 1)
        kept[:2] = True
        counts, genes = counts[:, kept], genes[kept]
    order = torch.randperm(len(genes), generator=generator)  # the tokens of a cell are its first genes
    counts, genes = counts[:, order], genes[order]
    n = n_query_cells(batch.n_cells, config.batch_size)
    n_masked = min(max(1, round(uniform(*MASKED) * len(genes))), len(genes) - 1)
    weight = (counts[:, :n_masked] > 0).float().sum(dim=0).sqrt() + 1e-6
    asked = torch.multinomial(weight, min(config.queries, n_masked), generator=generator)
    given = wanted = counts[:n]
    if uniform(0, 1) < HALVES_RATE:
        given, wanted = halves(given, generator)
    visible = slice(n_masked, None)

    def values(some: Tensor) -> tuple[Tensor, Tensor]:
        total = some.sum(dim=1).clamp_min(1)
        return torch.log1p(TARGET_SUM * some[:, visible] / total[:, None]).to(device), total.to(device)

    codes, queried = table[genes[visible].to(device)], table[genes[asked].to(device)]
    around, around_total = values(counts[n:])
    study = study_of(around, codes, counts[n:, asked].to(device), around_total)
    seen, total = values(given)
    of_wanted = wanted.sum(dim=1).clamp_min(1).to(device)
    return Task(study, cells_of(study, seen, codes, total), queried, wanted[:, asked].to(device), of_wanted)


class ReaderModule(TaskModule):
    """Train the reader of a model on batches of one study each.

    Parameters
    ----------
    model
        With a reader; all other weights are frozen.
    config
        See :class:`ReaderConfig`.
    """

    config: ReaderConfig
    model: ScDiVa

    def __init__(self, model: ScDiVa, config: ReaderConfig) -> None:
        super().__init__(model, config)
        assert model.reader is not None
        assert model.anchor is not None
        model.requires_grad_(False)
        model.reader.requires_grad_(True)
        self.table: Tensor
        self.register_buffer("table", gene_codes(model.anchor.table.weight)[N_SPECIAL:], persistent=False)

    def compute_loss(self, batch: CellBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Scaled loss of a batch; its parts are `nll`, in nats per count, and `base`, that of the mean rates."""
        assert self.model.reader is not None
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            task = draw_task(batch.on_host(), self.table, self.config, generator)
        log_rate, log_size = self.model.reader(task.cells, task.codes, task.study)
        with torch.autocast(self.device.type, enabled=False):
            log_total = task.total.log()[:, None]
            nll = count_loss(task.counts, log_rate.float() + log_total, log_size.float()).mean()
            pooled = ((task.study.counts.sum(dim=0) + PSEUDO_COUNT) / task.study.total.sum()).log() + log_total
            base = count_loss(task.counts, pooled, torch.full_like(pooled, LOG_SIZE)).mean()
            return nll / base.clamp_min(LEAST_LOSS).sqrt(), {"nll": nll.detach(), "base": base}


def with_reader(model: ScDiVa, seed: int = 0) -> ScDiVa:
    """The model with a reader: its own, or a new one."""
    if model.reader is not None:
        return model
    new = ScDiVa(replace(model.config, reader=True), generator=step_generator(seed, 0, "reader"))
    missing, unexpected = new.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected
    assert all(name.startswith("reader.") for name in missing)
    return new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="scdiva-mini", help="model with a set encoder and a state head")
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument("--out", type=Path, default=Path("runs/reader"))
    parser.add_argument("--prepared", type=Path, help="folder of the packed corpus; default OUT/prepared")
    parser.add_argument("--exclude", nargs="+", default=(), metavar="STUDY", help="studies to leave out of the corpus")
    parser.add_argument("--steps", type=int, default=ReaderConfig.steps)
    parser.add_argument("--seconds", type=float, help="train for so long; then --steps is ignored")
    parser.add_argument("--batch-size", type=int, default=ReaderConfig.batch_size, help="predicted cells of a batch")
    parser.add_argument("--resume", action="store_true", help="continue a run by steps from its last checkpoint")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*are left out.*")
    begun, out, loaded = time.monotonic(), arguments.out, load_model(arguments.model, device="cpu")
    train = (arguments.prepared or out / "prepared") / "train.h5"
    if not train.exists():
        files = [file for file in clean(arguments.corpus, train.parent / "clean") if file.stem not in arguments.exclude]
        length = loaded.config.input_length
        pack_files(files, loaded.vocabulary, train, max_length=length, min_genes=MIN_GENES_PER_CELL).close()
    before = (loaded.metadata or {}).get("reader", [])
    config = ReaderConfig(
        steps=arguments.steps if arguments.seconds is None else 1_000_000, batch_size=arguments.batch_size,
        seed=arguments.seed + sum(run["steps"] for run in before),  # a continued reader gets other batches
    )  # fmt: skip
    module = ReaderModule(with_reader(loaded, arguments.seed), config)
    callbacks = []
    if arguments.seconds is not None:
        callbacks.append(ByTime(arguments.seconds - (time.monotonic() - begun), MEASURED))
    resume = out if arguments.resume and (out / "last.ckpt").exists() else None
    data = StudyDataModule(train, loaded.vocabulary, config)
    trainer = fit(
        module, data, out_dir=out, resume_from=resume, accelerator=arguments.accelerator, callbacks=callbacks,
        progress=False,
    )  # fmt: skip
    run = {
        "steps": trainer.global_step, "seconds": round(time.monotonic() - begun), "excluded": list(arguments.exclude),
        "device": trainer.strategy.root_device.type, "training": module.config.to_dict(),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }  # fmt: skip
    metadata = {**(loaded.metadata or {}), "reader": [*before, run]}
    model = module.model.cpu()
    print(save_model(model, loaded.vocabulary, out / "model", metadata=metadata, dtype="float16", overwrite=True))


if __name__ == "__main__":
    main()
