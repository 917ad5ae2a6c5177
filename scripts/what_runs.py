"""Measure which part of a model each public call uses, and write the table of the user guide.

    python scripts/what_runs.py

For each call and each bundled kind of model: how often transformer blocks were run, and whether the result changes when
the weights of a part are replaced by noise. The table is written into `docs/method.md`.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import torch
from torch import nn

import scdiva as sd
from scdiva.models import ScDiVa, load_model
from scdiva.models.layers import SwiGLU

PAGE = Path(__file__).parents[1] / "docs" / "method.md"
BEGIN, END = "<!-- table: python scripts/what_runs.py -->\n", "<!-- end of table -->\n"
MODELS = ("scdiva-mini", "scdiva-paper-mini")
PARTS: dict[str, Callable[[ScDiVa], list[nn.Module | nn.Parameter | None]]] = {
    "transformer": lambda model: [model.blocks],
    "set encoder": lambda model: [model.anchor],
    "state head": lambda model: [model.state_head],
    "query head": lambda model: [model.query_head],
    "reader": lambda model: [model.reader],
    "gene embeddings and heads": lambda model: [
        model.heads, None if model.config.tie_gene_head is False else model.embedding.gene,
    ],
}  # fmt: skip
N_CELLS = 48
TUNE: dict[str, Any] = {"finetune": True, "epochs": 1, "context": 32}


def cells() -> ad.AnnData:
    """Toy cells of two batches, four types and five conditions."""
    adata = sd.datasets.toy(N_CELLS, 100, n_batches=2, rng=0)
    genes = list(adata.var_names[:3])
    adata.obs["perturbation"] = np.resize(["control", genes[0], genes[1], f"{genes[0]}+{genes[1]}", genes[2]], N_CELLS)
    return adata


def _annotated(adata: ad.AnnData, model: ScDiVa, **options: Any) -> np.ndarray:
    reference, query = adata[: N_CELLS // 2].copy(), adata[N_CELLS // 2 :].copy()
    sd.tl.annotate(query, "cell_type", reference, model=model, rng=0, **options)
    return query.obsm["scdiva_label_probability"]


def _predicted(adata: ad.AnnData, model: ScDiVa, **options: Any) -> np.ndarray:
    sd.tl.predict_perturbation(adata, "perturbation", model=model, rng=0, **options)
    return adata.uns["scdiva_perturbation"]["mean"]


def _written(call: Callable[..., Any], slot: str, key: str, **options: Any) -> Callable[..., np.ndarray]:
    def run(adata: ad.AnnData, model: ScDiVa) -> np.ndarray:
        call(adata, model=model, **options)
        result = getattr(adata, slot)[key]
        return result.toarray() if hasattr(result, "toarray") else np.asarray(result)

    return run


def _reconstructed(**options: Any) -> Callable[..., np.ndarray]:
    return _written(sd.tl.reconstruct, "layers", "scdiva_reconstructed", rng=0, **options)


def _integrated(adata: ad.AnnData, model: ScDiVa, **options: Any) -> np.ndarray:
    options = options or {"steps": 20}
    sd.tl.integrate(adata, "batch", "cell_type", model=model, rng=0, **options)
    return adata.obsm["X_scdiva_integrated"]


def _adapted(adata: ad.AnnData, model: ScDiVa) -> np.ndarray:
    sd.tl.embed(adata, sd.tl.adapt(adata, model=model, rng=0))
    return adata.obsm["X_scdiva"]


def _generated(adata: ad.AnnData, model: ScDiVa, **options: Any) -> np.ndarray:
    if model.config.by_transformer:
        options["n_steps"] = 4
    return sd.tl.generate(adata, 5, model=model, rng=0, **options).X.toarray()


CALLS: dict[str, Callable[[ad.AnnData, ScDiVa], np.ndarray]] = {
    "embed": _written(sd.tl.embed, "obsm", "X_scdiva"),
    "gene_embedding": _written(sd.tl.gene_embedding, "varm", "X_scdiva"),
    "log_likelihood": _written(sd.tl.log_likelihood, "obs", "scdiva_log_likelihood", rng=0, n_samples=2),
    "reconstruct": _reconstructed(),
    "reconstruct(use_ranks=True)": _reconstructed(use_ranks=True),
    "reconstruct(mask_ratio=0)": _reconstructed(mask_ratio=0.0),
    "impute": _written(sd.tl.impute, "layers", "scdiva_imputed", rng=0, keep_observed=False),
    "generate": lambda adata, model: _generated(adata, model, groupby="cell_type"),
    "generate(from_state=False)": lambda adata, model: _generated(adata, model, from_state=False),
    "adapt": _adapted,
    "integrate": _integrated,
    "integrate(finetune=True)": lambda adata, model: _integrated(adata, model, **TUNE),
    'annotate(method="linear")': _annotated,
    'annotate(method="knn")': lambda adata, model: _annotated(adata, model, method="knn"),
    'annotate(method="probe")': lambda adata, model: _annotated(adata, model, method="probe"),
    "annotate(finetune=True)": lambda adata, model: _annotated(adata, model, **TUNE),
    "predict_perturbation": _predicted,
    "predict_perturbation(finetune=True)": lambda adata, model: _predicted(adata, model, **TUNE),
    'grn(method="embedding")': _written(sd.tl.grn, "varp", "scdiva_grn", method="embedding"),
    'grn(method="attention")': _written(sd.tl.grn, "varp", "scdiva_grn", method="attention"),
}


def run(call: str, model: ScDiVa) -> tuple[np.ndarray, int]:
    """Run a call on fresh cells: its result, and the number of times that a transformer block was run."""
    blocks: list[nn.Module] = []
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, *_: blocks.append(module) if isinstance(module, SwiGLU) else None  # one per block
    )
    try:
        options = {"progress": False, "device": "cpu", "precision": "fp32"}
        with warnings.catch_warnings(action="ignore"), sd.settings.override(**options):
            return np.asarray(CALLS[call](cells(), model), dtype=np.float64), len(blocks)
    finally:
        hook.remove()


def noised(model: ScDiVa, part: str) -> ScDiVa | None:
    """Copy a model with the weights of a part replaced by noise of their own size; None if it lacks the part."""
    new = ScDiVa(model.config)
    new.load_state_dict(model.state_dict())
    new.vocabulary, new.metadata = model.vocabulary, model.metadata
    modules = [module for module in PARTS[part](new.eval()) if module is not None]
    if not modules:
        return None
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in modules:
            for weight in module.parameters():
                weight.copy_(
                    torch.randn(weight.shape, generator=generator) * weight.std().nan_to_num(1.0).clamp_min(0.02)
                )
    return new


def changed(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two results differ."""
    return one.shape != other.shape or not np.allclose(one, other, rtol=1e-6, atol=1e-8, equal_nan=True)


def measured(call: str, model: ScDiVa) -> tuple[int, list[str]]:
    """Number of block runs of a call, and the parts of the model whose weights its result depends on."""
    result, n_runs = run(call, model)
    used = []
    for part in PARTS:
        other = noised(model, part)
        if other is not None and changed(result, run(call, other)[0]):
            used.append(part)
    return n_runs, used


def table() -> str:
    """The Markdown table."""
    lines = [
        "| call | " + " | ".join(f"{name}: block runs | {name}: parts used" for name in MODELS) + " |",
        "|---|" + "--:|---|" * len(MODELS),
    ]
    for call in CALLS:
        cell = []
        for name in MODELS:
            n_runs, used = measured(call, load_model(name))
            cell += [str(n_runs) if n_runs else "none", ", ".join(used) or "none"]
            print(f"{call} {name}: {n_runs} block runs; {', '.join(used)}", file=sys.stderr, flush=True)
        lines.append(f"| `{call}` | " + " | ".join(cell) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    start, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(start + BEGIN + "\n" + table() + "\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
