"""Write the card of a model from what its training recorded and the benchmarks measured.

    python scripts/model_card.py src/scdiva/checkpoints/scdiva-mini

Weights, vocabulary and configuration stay as they are, bit for bit; the card and the checksums are written anew.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from pathlib import Path

from scdiva.models import load_model, save_model
from scdiva.models.hub import find_model

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import tables
from _denoising_table import curve as denoising_curve
from _denoising_table import of_arms, of_tasks
from _markdown import table


def curve(looks: list[dict[str, float]]) -> str:
    """A table of the losses at each look at the validation studies."""
    names = ["loss", *(name for name in ("genes", "contrast", "identity", "value") if name in looks[0])]
    return table(["step", *names], [[f"{look['step']:,}", *(f"{look[name]:.3f}" for name in names)] for look in looks])


PARTS = {
    "anchor": "set encoder",
    "transformer": "transformer",
    "state_head": "state head",
    "transformer_long": "transformer, at length",
    "query_head": "query head",
}


def last_loss(part: dict) -> str:
    """The loss at the last look at the validation studies; nothing for a part that was trained without looks."""
    return f"{part['validation'][-1]['loss']:.3f}" if "validation" in part else ""


def training_table(metadata: dict) -> str:
    """What each part of the training saw, a column a part."""
    parts = {name: metadata[name] for name in PARTS if name in metadata}
    context = dict.fromkeys(("anchor", "state_head", "query_head"), "all")
    rows = [
        ["cells seen", *(f"{part['cells_seen']:,}" for part in parts.values())],
        [
            "steps × batch",
            *(f"{part['training']['steps']:,} × {part['training']['batch_size']}" for part in parts.values()),
        ],
        ["genes per cell", *(context.get(name) or f"{p['training']['context']:,}" for name, p in parts.items())],
        ["time", *(f"{part['seconds'] / 60:.0f} min" for part in parts.values())],
        ["validation loss", *(last_loss(part) for part in parts.values())],
    ]
    return table(["", *(PARTS[name] for name in parts)], rows)


def later_losses(metadata: dict) -> str:
    """What the parts after the first transformer's say of the validation studies; nothing where there are none."""
    if "transformer_long" not in metadata:
        return ""
    head, long = (metadata[name]["validation"][-1] for name in ("state_head", "transformer_long"))
    training = metadata["transformer_long"]["training"]
    return f"""
The state head alone, which knows no rank, is at {head["identity"]:.2f} nats and {head["value"]:.3f}. The transformer trained on at length
is at {long["identity"]:.2f} nats and {long["value"]:.3f}, on {metadata["transformer_long"]["validation_cells"]} cells of these studies and up to {training["context"]:,} genes of each. Its task is another one: it is
given what the cell's state says of each gene and what the rank does, and a squared error counts
{training["value_weight"]:g} times, not {metadata["transformer"]["training"]["value_weight"]:g}. So its loss and the first run's cannot be compared.
{metadata.get("note", "")}
"""  # noqa: E501


def later_curves(metadata: dict) -> str:
    """Curves of the same parts."""
    if "transformer_long" not in metadata:
        return ""
    long = metadata["transformer_long"]
    return f"""
State head (nats per masked gene, from the cell's state alone; squared error of its value; their sum):

{curve(metadata["state_head"]["validation"])}

Transformer, at length (as the first run's, on {long["validation_cells"]} cells, given state and rank):

{curve(long["validation"])}
"""


def query_head(metadata: dict) -> str:
    """What a query head does, how such heads were judged, and which lost; nothing for a model without one."""
    result, hours, tasks = (tables.load(name) for name in ("denoising", "denoising_hours", "head_tasks"))
    if "query_head" not in metadata or result is None or hours is None or tasks is None:
        return ""
    part = metadata["query_head"]
    own = [
        row
        for row in result["rows"]
        if "met" not in row or row["what"].startswith(("query head:", "query head, context:"))
    ]
    return f"""## Query head

`scdiva.tl.impute` and `scdiva.tl.reconstruct` ask the query head what a cell expresses, given up to {part["training"]["context_cells"]}
other cells of the user's. It was trained last, on the saved half-precision weights of set encoder and state head, in
{part["seconds"] / 60:.0f} minutes: `{part["command"]}`. Its design was judged on studies held out with their publications, by
a head, set encoder and state head that were trained without these. Means over the studies; `query head` is the design of this
model, and the benchmarks page explains all arms and has their goals:

{of_arms({**result, "rows": own})}

### Transformers that lost

In that table, arms with a transformer read the visible genes of the cell for each query. Of these, `values by transformer` wins in
values. Its budget, and its lead in Spearman over the head that it shares presence with:

{denoising_curve(result)}

A longer run, begun anew on a set encoder and state head that were trained anew without these studies; the first row is a larger
transformer on a GPU:

{denoising_curve(hours)}

What is left of that in calls is the rank correlation of imputed values within genes. So no call runs a transformer by default.

{of_tasks(tasks).replace("###", "####")}
"""  # noqa: E501


def embedding_scores(result: dict) -> str:
    """The tables of the benchmark datasets; the others are in the corpus of the model."""
    rows = [row for row in result["rows"] if row.get("group", "benchmark") == "benchmark"]
    return tables.embedding({**result, "rows": rows})


def card(folder: Path, metadata: dict, n_parameters: int, n_genes: int) -> str:
    corpus, anchor, transformer = metadata["corpus"], metadata["anchor"], metadata["transformer"]
    losses = transformer["validation"][-1]
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    result = tables.load("embedding")
    scores = "" if result is None else f"{embedding_scores(result)}\n{tables.origin(result)}\n"
    return f"""# {folder.name}

A small ScDiVa model of human cells: {n_parameters / 1e6:.1f} M parameters, {n_genes:,} genes. Made by `scripts/train_mini.py` of
scdiva, from no one else's weights.

## What it is for

Zero-shot embeddings (`scdiva.tl.embed`) of human single-cell RNA-seq, above all of blood and marrow, and as a start for
training on your own data. The embedding is the state of a set encoder started from a truncated SVD of the corpus, and
{anchor["training"]["steps"]:,} steps of training added nothing measurable over that linear start. No cell of the sets that it is
scored on is in the corpus, but sister studies are: `kang_pbmc_stim_2000` is of the experiment of `kang_pbmc_12k` and
`kang_ifnb`, and `mudan_pbmcA` and the sorted sets are sister data of `pbmc68k`. The transformer behind the set encoder was
trained for masked genes and values, not for the embedding, and no call runs it by default: `scdiva.tl.reconstruct(use_ranks=True)`
predicts masked genes at their ranks with it. What a cell expresses is predicted by the state head, and from other cells by the query head.

## Training

{training_table(metadata)}
Corpus: {corpus["n_cells"]:,} cells ({corpus["n_tokens"]:,} gene values) of {len(corpus["studies"])} public studies, most of them blood and marrow, some
skin, lymphoma, brain, colon, stem cells and cell lines. Held out for validation: {", ".join(corpus["validation_studies"])}.
On these the first run of the transformer is at {losses["identity"]:.2f} nats for the identity of a masked gene (a uniform guess: {math.log(n_genes):.2f}) and {losses["value"]:.3f} for the squared
error of its value (log-normalised). The corpus SVD explains {anchor["variance_explained"]:.0%} of the standardised variance.
{later_losses(metadata)}
Machine: {metadata["machine"]}, torch {metadata["torch"]}. Command: `{metadata["command"]}`. Every setting stands in
`config.json`.

Studies: {", ".join(corpus["studies"])}.

`make train-mini` repeats the parts; on another machine, or with another number of threads, the last bits differ. SHA-256 of
`model.safetensors`: `{weights}`.

### Validation curves

Set encoder (nats per cell: its genes from its state; one view of a cell among the cells of its study):

{curve(anchor["validation"])}

Transformer (nats per masked gene; squared error of a masked value; their weighted sum):

{curve(transformer["validation"])}
{later_curves(metadata)}
## How good it is

Scored on datasets whose cells are not in the corpus, beside PCA of each; a sister study of the three Kang datasets is in it.
The set encoder's design was chosen while looking at these sets, so read small differences with care. A goal is met where
all of its 95% interval, over datasets, is on the good side, missed where none of it is, and within noise otherwise.

{scores}
{query_head(metadata)}
## Limits

- Tissues that the corpus lacks (pancreas, liver, kidney, lung, ...) are embedded by directions learned elsewhere: PCA on
  your own data may be better, as in the table.
- What training added to the linear start can't be measured: on one set of five accuracy is higher by more than seeds
  spread, though not by more than as many cells could; elsewhere it is within the spread of seeds or below. Whether more cells would change that is not known: the learning curves on the benchmarks
  page rose with cells and not with steps, but are of an earlier form of the set encoder.
- Few cells, one small run: do not expect what models trained on millions of cells know.
- Batches are not corrected for beyond what the training does by itself.
- Human genes; mouse cells are read through orthologs. For research, not for diagnosis.

## Licence

BSD-3-Clause. The cells are public; sources are named in the repository's data notes and the studies' publications.
"""  # noqa: E501


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder")
    folder = find_model(parser.parse_args().model)
    model = load_model(folder, device="cpu")
    text = card(folder, model.metadata, model.n_parameters, model.config.n_genes)
    save_model(model, model.vocabulary, folder, text, model.metadata, dtype="float16", overwrite=True)
    print(folder / "README.md")


if __name__ == "__main__":
    main()
