"""What training keeps for backward: bytes per token, by part of the network, and packed beside padded cells.

    python benchmarks/activations.py

The paper preset on a CPU, loss included, half of the genes masked. Tensors saved for backward are caught with
`torch.autograd.graph.saved_tensors_hooks` and counted once a storage; parameters don't count. A storage belongs to the
part (norms, SwiGLU, attention, embedding, loss) during which it was first saved: the result of a norm, which the linear
layer after it saves, counts there. Bytes per token are the difference between two cells of 900 genes and one, so what
does not grow with tokens (bfloat16 copies of weights, the head's gradient, which the loss has ahead) drops out; it is
part of the MiB of whole batches. With Triton and `torch.compile` on a GPU the parts differ.

Packed beside padded: cells at the quantiles of a log-normal distribution of gene counts (median 900, σ 0.35, cut at
1,200), against as many cells of 1,200.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from math import exp

import torch
from _record import record
from _timing import fast_here, report
from torch import Tensor, nn

from scdiva.diffusion import dual_loss, mask_tokens
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.nn import Attention, GeneValueEmbedding, SwiGLU

PARTS: dict[type[nn.Module], str] = {
    nn.RMSNorm: "norms", SwiGLU: "SwiGLU", Attention: "attention", GeneValueEmbedding: "embedding",
}  # fmt: skip
SIGMA = 0.35
DTYPES = {"float32": None, "bfloat16 autocast": torch.bfloat16}


def saved_bytes(work: Callable[[], object], model: nn.Module) -> Counter[str]:
    """Bytes that `work` saves for backward, each storage once, by the part of `model` that was running."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    running, found, seen = ["rest"], Counter(), set()

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen | parameters:
            seen.add(storage.data_ptr())
            found[running[-1]] += storage.nbytes()
        return tensor

    hooks = []
    for module in model.modules():
        if part := PARTS.get(type(module)):
            hooks.append(module.register_forward_pre_hook(lambda *_, part=part: running.append(part)))
            hooks.append(module.register_forward_hook(lambda *_: running.pop() and None))
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        result = work()  # held to the end: as long as the graph lives, no address is given out twice
    for hook in hooks:
        hook.remove()
    del result
    return found


def cell_lengths(n_cells: int, *, median: int = 900, longest: int = 1200) -> list[int]:
    """Genes of cells at the quantiles of a log-normal distribution, cut at `longest`."""
    normal = statistics.NormalDist()
    return [min(longest, round(median * exp(SIGMA * normal.inv_cdf((i + 0.5) / n_cells)))) for i in range(n_cells)]


def training_bytes(model: ScDiVa, lengths: list[int], dtype: torch.dtype | None) -> Counter[str]:
    """Bytes that a training step on cells of these lengths saves for backward, by part."""
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    tokens = torch.randint(3, model.config.n_tokens, (total,), generator=generator)
    values = torch.rand(total, generator=generator) * 4
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    times = torch.full((len(lengths),), 0.5)
    corrupted = mask_tokens(tokens, values, cu_seqlens, times, generator)

    def step() -> Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            out = model(corrupted.tokens, corrupted.values, cu_seqlens, value_mask=corrupted.value_mask)
            predicted = model.values(out, tokens)
            known = tokens, values, corrupted, cu_seqlens
            return dual_loss(out.hidden, model.gene_weight, predicted, *known)[0]

    found = saved_bytes(step, model)
    found["loss"] = found.pop("rest", 0)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny network and short cells, to see that it runs")
    small = parser.parse_args(arguments).small
    torch.set_num_threads(1)
    config = ScDiVaConfig.paper()
    length, longest, n_cells = 900, config.max_length, 4
    if small:
        config = ScDiVaConfig(n_genes=50, dim=16, n_layers=2, n_heads=2, ffn_dim=32, anchor="learned")
        length, longest, n_cells = 9, 12, 3
    model = ScDiVa(config, generator=torch.Generator().manual_seed(0))
    rows = []
    for name in fast_here(DTYPES):
        dtype = DTYPES[name]
        one, two = (training_bytes(model, [length] * n, dtype) for n in (1, 2))
        per_token = {part: (two[part] - one[part]) / length for part in two}
        whole = sum(per_token.values())
        rows += [
            {
                "what": f"{name}, {part}",
                "bytes_per_token": round(amount),
                "share": f"{amount / whole:.1%}",
            }
            for part, amount in sorted(per_token.items(), key=lambda item: -item[1])
        ]
        # what a layer adds: the network without embedding, last norm and loss
        shallow = ScDiVa(
            ScDiVaConfig(**{**config.to_dict(), "n_layers": 1}), generator=torch.Generator().manual_seed(0)
        )
        one, two = (sum(training_bytes(shallow, [length] * n, dtype).values()) for n in (1, 2))
        block = (whole - (two - one) / length) / (config.n_layers - 1)
        rows.append({"what": f"{name}, one block", "bytes_per_token": round(block)})
        rows.append({"what": f"{name}, whole network and loss", "bytes_per_token": round(whole)})
        lengths = cell_lengths(n_cells, median=length, longest=longest)
        packed = sum(training_bytes(model, lengths, dtype).values())
        padded = sum(training_bytes(model, [longest] * n_cells, dtype).values())
        rows.append({
            "what": f"{name}, {n_cells} cells, mean {statistics.mean(lengths):.0f} genes: packed / padded to {longest}",
            "value": packed / padded, "packed_mib": round(packed / 2**20), "padded_mib": round(padded / 2**20),
        })  # fmt: skip
    record("activations", rows, genes_per_cell=length)
    return report(rows)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
