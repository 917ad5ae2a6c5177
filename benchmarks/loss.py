"""Chunked cross-entropy of masked positions beside full logits: time and memory of forward + backward.

    python benchmarks/loss.py [--positions 3072] [--genes 41818] [--repeats 5]

Half of the positions are masked. `full` computes the logits of every position and weights the unmasked ones with 0;
`masked` computes full logits of the masked positions only, an honest second rival; `chunked` is
`scdiva.diffusion.masked_cross_entropy`. One thread, arms in turn, best CPU time.

Memory is the peak of tensors above the start, from the profiler's record of torch's allocator, the gradients of hidden
states and head included. Beside it, as a check that shares nothing with it, stands the peak of resident memory of a
process for each arm alone, which also holds what oneDNN allocates by itself.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _judge import judge_times
from _memory import peak_bytes, resident_peak
from _record import record
from _timing import fast_here, goal, interleaved, report

from scdiva.diffusion import masked_cross_entropy

DIM = 512
DTYPES = {"float32": None, "bfloat16 autocast": torch.bfloat16}


def make_arms(positions: int, genes: int, dtype: str) -> dict[str, Callable[[], None]]:
    """Forward and backward of each arm on the same numbers."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(positions, DIM, generator=generator).requires_grad_()
    weight = (torch.randn(genes, DIM, generator=generator) * 0.02).requires_grad_()
    targets = torch.randint(genes, (positions,), generator=generator)
    masked = torch.randperm(positions, generator=generator) < positions // 2
    row_weight = masked / masked.sum()

    def full() -> torch.Tensor:
        return (F.cross_entropy(F.linear(hidden, weight), targets, reduction="none") * row_weight).sum()

    def only_masked() -> torch.Tensor:
        nll = F.cross_entropy(F.linear(hidden[masked], weight), targets[masked], reduction="none")
        return (nll * row_weight[masked]).sum()

    def chunked() -> torch.Tensor:
        return masked_cross_entropy(hidden[masked], weight, targets[masked], row_weight[masked])[0]

    def trained(loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            with torch.autocast("cpu", dtype=DTYPES[dtype], enabled=DTYPES[dtype] is not None):
                value = loss()
            value.backward()
            hidden.grad = weight.grad = None  # before the next run, whose memory must not begin with them

        return run

    return {"full": trained(full), "masked": trained(only_masked), "chunked": trained(chunked)}


def resident_apart(arm: str, dtype: str, positions: int, genes: int) -> float:
    """Peak resident MiB of an arm in a process of its own."""
    sizes = ["--positions", str(positions), "--genes", str(genes)]
    command = [sys.executable, __file__, *sizes, "--arm", arm, "--dtype", dtype]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 2**20


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=3072)
    parser.add_argument("--genes", type=int, default=41_818)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--arm", help="run one arm once and print its peak of resident bytes")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.arm:
        print(resident_peak(make_arms(options.positions, options.genes, options.dtype)[options.arm]))
        return 0

    goals, rows = [], []
    for dtype in fast_here(DTYPES):
        arms = make_arms(options.positions, options.genes, dtype)
        rounds = interleaved(arms, repeats=options.repeats)
        seconds = {name: min(spent) for name, spent in rounds.items()}
        mebibytes = {name: peak_bytes(run) / 2**20 for name, run in arms.items()}
        resident = {name: resident_apart(name, dtype, options.positions, options.genes) for name in arms}
        rows += [
            {
                "what": f"{dtype}, {name}",
                "cpu_seconds": round(seconds[name], 3),
                "peak_mib": round(mebibytes[name]),
                "resident_mib": round(resident[name]),
            }
            for name in arms
        ]
        for rival in ("full", "masked"):
            memory, time = mebibytes["chunked"] / mebibytes[rival], seconds["chunked"] / seconds[rival]
            whats = [f"{dtype}: {kind}, chunked / {rival}" for kind in ("memory", "time")]
            if (dtype, rival) == ("float32", "full"):
                goals.append(goal(whats[0], memory, at_most=0.25, counted=True))
                goals.append(judge_times(whats[1], rounds["chunked"], rounds[rival], at_most=0.65))
            else:
                rows += [{"what": whats[0], "value": memory}, {"what": whats[1], "value": time}]
    rows = goals + rows
    record("loss", rows, positions=options.positions, masked=options.positions // 2, genes=options.genes, dim=DIM)
    return report(rows)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
