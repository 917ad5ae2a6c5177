"""The GPU section on `fit`: training of the paper's model with its loader, on packed cells of varied lengths."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from _gpu import (
    Setting,
    count_compilations,
    free_memory,
    host_waits,
    peak_gib,
    profiled,
    spread_lengths,
    synchronize,
    train_flops,
)
from _gpu_attention import keep_plan
from _gpu_model import cells_of, model_config, module_of, rate_row, vocabulary
from _timing import goal
from pytorch_lightning.callbacks import Callback
from torch import Tensor

from scdiva._constants import N_SPECIAL
from scdiva.data.batch import CellBatch
from scdiva.data.datamodule import CellDataModule
from scdiva.tokenizer.serialize import score_denominator
from scdiva.train import fit

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from carry_corpus import write_packed

PROFILED = 3
"""Steps whose profile is kept."""


class Span(Callback):
    """What `fit` does between two steps, timed and counted; then where the host waits in the steps after them."""

    def __init__(self, setting: Setting, steps: tuple[int, ...], compilations: Callable[[], dict[str, int]]) -> None:
        self.setting, self.compilations = setting, compilations
        self.first, self.last, self.end = steps
        self.begun = time.perf_counter()
        self.bounds: list[Tensor] = []
        self.marks: list[float] = []
        self.waited = 0
        self._stack, self._profile = ExitStack(), ExitStack()

    def on_train_batch_start(self, trainer: object, module: object, batch: CellBatch, number: int) -> None:
        if number in (self.first, self.last):
            synchronize(self.setting)
            self.marks.append(time.perf_counter())
            if number == self.first:
                self.before = self.compilations()
                free_memory(self.setting)
            else:
                self.again = {name: n - self.before[name] for name, n in self.compilations().items()}
                self.peak = peak_gib(self.setting)
                self.waits = self._stack.enter_context(host_waits(self.setting))
        if self.first <= number < self.last:
            self.bounds.append(batch.cu_seqlens)

    def on_train_batch_end(self, trainer: object, module: object, out: object, batch: object, number: int) -> None:
        self.waited += self.last <= number < self.end
        if number + 1 == self.end:
            self._stack.close()
            self.profile = self._profile.enter_context(profiled(self.setting, on_host=True))
        elif number + 1 == self.end + PROFILED:  # before the checkpoint at the end of the run
            self._profile.close()


def packed_corpus(setting: Setting, folder: Path, n_cells: int) -> Path:
    """Random cells of typical lengths as a packed corpus of one study: what training reads."""
    genes = vocabulary(setting.cuda)
    indptr, tokens, values = cells_of(setting, spread_lengths(n_cells, setting.length - 1))
    floor, n_tokens = model_config(setting).entropy_floor, genes.n_genes + N_SPECIAL
    content = {
        "indptr": indptr, "tokens": tokens.astype(np.uint16), "values": values, "study": np.zeros(n_cells, np.int32),
        "measured": np.ones((1, n_tokens), bool), "denominator": score_denominator(genes.entropy, floor),
    }  # fmt: skip
    attributes = {
        "scdiva_packed": 1, "fingerprint": genes.fingerprint, "n_tokens": n_tokens, "max_length": setting.length - 1,
        "entropy_floor": floor,
    }  # fmt: skip
    write_packed(folder / "train.h5", content, {"attributes": attributes, "study_names": ["drawn"]})
    return folder / "train.h5"


def fitting(setting: Setting) -> Iterator[dict]:
    """`fit` with its loader on packed cells of varied lengths: cells/s, what compiles again, where the host waits."""
    keep_plan(setting)
    config, (first, last, end) = model_config(setting), (12, 42, 52) if setting.cuda else (2, 4, 6)
    n_cells, batch_size = (20_000, 64) if setting.cuda else (64, 4)
    module = module_of(
        setting, steps=end + PROFILED + 1, batch_size=batch_size, context=setting.length - 1, autotune=False
    )
    span = Span(setting, (first, last, end), count_compilations())
    with tempfile.TemporaryDirectory() as folder:
        data = CellDataModule(
            [packed_corpus(setting, Path(folder), n_cells)], vocabulary=vocabulary(setting.cuda),
            batch_size=batch_size, context=setting.length - 1, entropy_floor=config.entropy_floor,
        )  # fmt: skip
        accelerator = "gpu" if setting.cuda else "cpu"
        fit(module, data, out_dir=Path(folder) / "run", accelerator=accelerator, callbacks=[span], progress=False)
        data.close()
    begun, ended = span.marks
    lengths = torch.cat([bounds.cpu().diff() for bounds in span.bounds])
    flops = train_flops(config, lengths + 1, float(lengths.sum()) / 2)
    yield {"what": "fit: seconds from the call to the first timed step", "seconds": round(begun - span.begun, 1)}
    about = {"median_genes": int(lengths.median()), "batch_size": batch_size, "peak_gib": span.peak}
    yield rate_row(setting, "fit, packed cells", len(lengths), flops, ended - begun, **about)
    if setting.matmul:
        share = flops / (ended - begun) / setting.matmul
        row = goal("fit, packed cells: share of the bf16 matrix product rate", share, at_least=0.5)
        yield {**row, "profile": "; ".join(span.profile)}
    compiled_again = span.again["graphs"] + span.again["kernels"]
    said = f"fit: graphs and kernels compiled again over {last - first} batches of varied lengths"
    yield goal(said, compiled_again, at_most=0, counted=True, **span.again)
    a_step = sum(span.waits.values()) / span.waited
    where = dict(span.waits.most_common(8))
    yield goal("fit: waits of the host for the device, a step", a_step, at_most=1, counted=True, where=where)
