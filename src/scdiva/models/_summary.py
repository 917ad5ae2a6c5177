"""What a model says of itself in a notebook and in a line: one table for all, every text of it escaped."""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from scdiva.models.annotator import Annotator
    from scdiva.models.config import ScDiVaConfig
    from scdiva.models.scdiva import ScDiVa
    from scdiva.tokenizer.vocabulary import Vocabulary

LONGEST = 200
"""Characters of an entry that are shown."""
MOST_HASHED = 50_000_000
"""Parameters of the largest model whose hash is shown: it takes a tenth of a second for ten million."""
"""Species by the beginning of its Ensembl ids."""


def table(title: str, rows: Mapping[str, object]) -> str:
    """Lay out a title and rows as HTML for a notebook.

    Parameters
    ----------
    title
        Name of the class.
    rows
        What is said of it, by name. Entries that are None are left out, long ones cut.

    Returns
    -------
    HTML in which nothing of `title` and `rows` is markup.
    """
    lines = "".join(
        f"<tr><th style='text-align:left'>{html.escape(_cut(name))}</th>"
        f"<td style='text-align:left'>{html.escape(_cut(value))}</td></tr>"
        for name, value in rows.items()
        if value is not None
    )
    return f"<div><strong>{html.escape(_cut(title))}</strong><table>{lines}</table></div>"


def model_line(model: ScDiVa) -> str:
    """Say in a line what a network is; torch's account of its layers is `torch.nn.Module.__repr__(model)`."""
    c = model.config
    return (
        f"ScDiVa({model.n_parameters:,} parameters, {c.n_genes:,} genes, {c.n_layers} layers of width {c.dim}, "
        f"on {_device(model)})"
    )


def model_html(model: ScDiVa) -> str:
    """Show a network in a notebook."""
    return table("ScDiVa", model_rows(model))


def annotator_html(annotator: Annotator) -> str:
    """Show an annotator in a notebook."""
    return table("Annotator", annotator_rows(annotator))


def config_html(config: ScDiVaConfig) -> str:
    """Show a configuration in a notebook."""
    return table("ScDiVaConfig", config.to_dict())


def model_rows(model: ScDiVa) -> dict[str, object]:
    """Describe a network, with or without a vocabulary, as far as it knows itself."""
    c = model.config
    metadata = getattr(model, "metadata", None) or {}
    vocabulary: Vocabulary | None = getattr(model, "vocabulary", None)
    hashed = vocabulary is not None and _device(model) != "meta" and model.n_parameters <= MOST_HASHED
    return {
        "comes from": getattr(model, "origin", None),
        "size": f"{model.n_parameters:,} parameters",
        "architecture": f"{c.n_layers} layers of width {c.dim}, {c.n_heads} heads; anchor {c.anchor!r}",
        "reads of a cell": f"{c.input_length:,} genes, {c.max_length:,} of them in the transformer",
        "cell state": f"{c.state_dim} numbers",
        "genes": f"{c.n_genes:,}" if vocabulary is None else _vocabulary(vocabulary),
        "species": metadata.get("species", None if vocabulary is None else vocabulary.species),
        "trained on": corpus_said(metadata),
        "training": steps_said(metadata),
        "integrates batches": None if model.integration is None else "yes",
        "SHA-256": f"{fingerprint(model)[:16]} of configuration, genes and weights" if hashed else None,
        "device": _device(model),
    }


def annotator_rows(annotator: Annotator) -> dict[str, object]:
    """Describe an annotator."""
    notes = annotator.notes
    accuracy, held, labelled = notes.get("accuracy"), notes.get("n_held_out"), notes.get("n_labelled")
    tested = isinstance(held, int) and held > 0 and isinstance(accuracy, float)
    return {
        "method": annotator.method,
        "labels": f"{len(annotator.labels)}: {', '.join(annotator.names)}",
        "label column": notes.get("labels_key"),
        "genes read": f"{len(annotator.tokens):,}",
        "trained on": f"{labelled:,} labelled cells" if isinstance(labelled, int) else None,
        "held-out accuracy": f"{accuracy:.3f} on {held:,} cells" if tested else None,
        **of_model(annotator.model),
    }


def _vocabulary(vocabulary: Vocabulary) -> str:
    """Say how many genes, and which vocabulary."""
    return f"{vocabulary.n_genes:,}, fingerprint {vocabulary.fingerprint[:12]}"


def corpus_said(metadata: Mapping[str, Any]) -> str | None:
    """Say what a model was trained on, as far as its metadata tell."""
    corpus = metadata.get("corpus")
    corpus = corpus if isinstance(corpus, Mapping) else {}
    cells = corpus.get("n_cells", metadata.get("n_training_cells"))
    studies = corpus.get("studies", metadata.get("studies"))
    said = [f"{cells:,} cells"] if isinstance(cells, int) else []
    said += [f"{len(studies):,} studies"] if isinstance(studies, list | tuple) else []
    return " of ".join(said) or None


def steps_said(metadata: Mapping[str, Any]) -> str | None:
    """Say how many steps a model was trained, part by part where it was trained in parts."""
    said = [f"{metadata['steps']:,} steps"] if isinstance(metadata.get("steps"), int) else []
    for part, notes in metadata.items():
        if isinstance(notes, Mapping) and isinstance(notes.get("steps"), int):
            said.append(f"{part.replace('_', ' ')} {notes['steps']:,} steps")
    return ", ".join(said) or None


def fingerprint(model: ScDiVa) -> str:
    """SHA-256 of a model: its configuration, genes with their entropies, and every weight."""
    import torch

    digest = hashlib.sha256(json.dumps(model.config.stored(), sort_keys=True).encode())
    digest.update(model.vocabulary.fingerprint.encode())
    digest.update(np.ascontiguousarray(model.vocabulary.entropy).tobytes())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def of_model(model: ScDiVa) -> dict[str, object]:
    """Describe the network of what was fitted on it."""
    rows = model_rows(model)
    names = {"comes from": "model", "size": "model size", "genes": "vocabulary", "SHA-256": "SHA-256 of the model"}
    return {names.get(name, name): rows[name] for name in (*names, "species", "device")}


def _device(model: ScDiVa) -> str:
    return str(next(model.parameters()).device)


def _cut(value: object) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
