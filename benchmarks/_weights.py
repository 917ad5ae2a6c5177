"""Which weights a row of results was made with, and whether they are those that are shipped.

A row names a fingerprint for each part of the model that its arm reads, so that a new transformer leaves the rows of
the set encoder as they are.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from scdiva._constants import DEFAULT_MODEL
from scdiva.models.hub import find_model

FILE = "model.safetensors"
PARTS = {"anchor": "encoder", "state_head": "state_head", "query_head": "query_head", "embedding.gene": "genes"}
"""Parts of the model by the beginning of a tensor's name; every other tensor is the transformer's."""
ENCODER = ("encoder",)
GENES = ("encoder", "genes")
FILLING = ("encoder", "state_head")
QUERIES = ("encoder", "state_head", "query_head")
WHOLE = ("encoder", "genes", "state_head", "transformer")
NONE = ()

READS: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "embedding": (ENCODER, dict.fromkeys(("pca20", "pca50", "scvi", "scvi_batch"), NONE)),
    "thinning": (ENCODER, dict.fromkeys(("svd", "pca", "scvi"), NONE)),
    "pooling": (WHOLE, {"state": ENCODER}),
    "sister_studies": (ENCODER, {}),
    "transform_batch": (ENCODER, dict.fromkeys(("mean_shift", "uncorrected", "own_half"), NONE)),
    "integration": (
        ENCODER,
        dict.fromkeys(("own_components", "pca", "combat", "harmony", "scvi", "scanvi", "scarches", "apart"), NONE),
    ),
    "annotation": (
        ENCODER, dict.fromkeys(("logistic", "logistic_balanced", "svm", "centroid", "knn", "scanvi"), NONE),
    ),
    "rejection": (ENCODER, {}),
    "perturbation": (
        WHOLE,
        {
            "ours": GENES,
            **dict.fromkeys(
                ("gears", "no_change", "train_mean", "matching_mean", "additive", "linear", "elsewhere"), NONE
            ),
        },
    ),
    "perturbation_attempts": (GENES, {}),
    "grn": (
        WHOLE,
        {
            "embedding": GENES,
            **dict.fromkeys(
                ("correlation", "spearman", "mutual_information", "forest", "cooccurrence", "expression", "random"),
                NONE,
            ),
        },
    ),
    "reconstruction": (
        WHOLE,
        {
            **dict.fromkeys(
                ("marginals", "type_means", "knn", "diffused", "gene_means", "scvi", "other_real", "independent"), NONE
            ),
            **dict.fromkeys(("population ours", "by_type", "ours_few", "no_state_32", "ours_no_transformer"), FILLING),
            **dict.fromkeys(("impute ours", "ours_no_places"), QUERIES),
        },
    ),
    "denoising": (FILLING, dict.fromkeys(("unigram", "means", "scvi"), NONE)),
    "denoising_seen": (FILLING, {}),
    "scaling": (NONE, {"embedding": ENCODER}),
    "ablation": (WHOLE, {}),
    "learning_curve": (ENCODER, {}),
    "learning_curve_mouse": (ENCODER, {}),
    "attempts": (ENCODER, {}),
}  # fmt: skip
"""By result: what an arm reads if nothing else is said, and what arms read that differ. An arm that is new here counts
as one that reads the model. Results that are not named read no shipped weights; those of speed draw theirs."""
OWN_WEIGHTS = {
    "ablation": "each arm trains its own weights",
    "learning_curve": "each point trains its own set encoder; the encoder that is shipped is a later one",
    "learning_curve_mouse": "each arm trains its own set encoder",
    "attempts": "each arm trains its own set encoder",
    "denoising": "set encoder and state head trained as the bundled ones, without the studies that are scored",
    "denoising_seen": "set encoder and state head trained as the bundled ones, without the studies that are held out",
    "sister_studies left_out": "a set encoder trained as the bundled one's, without kang_pbmc_stim_2000",
}
"""Results, or arms of them, whose weights are others by design, and why."""


def fingerprints(blob: bytes) -> dict[str, str]:
    """The fingerprint of each part of a `model.safetensors`: of names, shapes and values, whatever they are stored as.

    The first 16 hexadecimal digits of a SHA-256 over the part's tensors in the order of their names, as float32.
    """
    from safetensors.numpy import load  # a GPU machine may have none, and times no weights that are shipped

    digests: dict[str, hashlib._Hash] = {}
    for name, tensor in sorted(load(blob).items()):
        part = next((part for start, part in PARTS.items() if name.startswith(f"{start}.")), "transformer")
        digest = digests.setdefault(part, hashlib.sha256())
        digest.update(f"{name} {tensor.shape}\n".encode())
        digest.update(np.ascontiguousarray(tensor, dtype="<f4").tobytes())
    return {part: digest.hexdigest()[:16] for part, digest in sorted(digests.items())}


@functools.cache
def of_model(model: str | os.PathLike[str] = DEFAULT_MODEL) -> dict[str, str]:
    """The fingerprints of a model's weights: a bundled name, or a folder."""
    return fingerprints((Path(find_model(model)) / FILE).read_bytes())


def arm_of(row: dict) -> str:
    """What a row is of, in its result."""
    return next((str(row[key]) for key in ("arm", "call", "pooling", "trained") if key in row), "")


def parts_read(name: str, row: dict) -> tuple[str, ...]:
    """The parts of the model that a row of a result was made with; none for a goal, or an arm without the model."""
    if name not in READS or "met" in row:
        return NONE
    default, arms = READS[name]
    arm = arm_of(row)
    return arms.get(f"{row.get('part')} {arm}", arms.get(arm, default))


def own_weights(name: str, row: dict) -> str | None:
    """Why a row has weights of its own by design; None where it has not."""
    return OWN_WEIGHTS.get(f"{name} {arm_of(row)}", OWN_WEIGHTS.get(name))


def stamped(name: str, rows: Iterable[dict], model: str | os.PathLike[str]) -> list[dict]:
    """The rows, each that says nothing of its weights with their fingerprints, or with why they are others."""
    found = []
    for row in rows:
        parts = parts_read(name, row)
        if parts and not row.keys() & {"weights", "weights_note"}:
            if why := own_weights(name, row):
                row = {**row, "weights_note": why}
            else:
                weights = of_model(model)
                row = {**row, "weights": {part: weights[part] for part in parts if part in weights}}
        found.append(row)
    return found


def place(row: dict) -> str:
    """A row's name in an error."""
    keys = (
        "part",
        "set",
        "arm",
        "attempt",
        "call",
        "pooling",
        "task",
        "trained",
        "left_out",
        "reference",
        "family",
        "what",
        "depth",
    )
    return " ".join(str(row[key]) for key in keys if key in row) or "a row"


def refused(name: str, rows: Iterable[dict], shipped: dict[str, str]) -> list[str]:
    """Rows of other weights than those shipped, or of weights that they don't name, unless they say why."""
    found = []
    for row in rows:
        parts = parts_read(name, row)
        if row.get("weights_note"):
            continue
        weights = row.get("weights", {})
        if missing := [part for part in parts if part not in weights and part in shipped]:
            found.append(f"{name}: {place(row)}: no fingerprint of {', '.join(missing)}")
        elif other := [part for part, digest in weights.items() if shipped.get(part) != digest]:
            found.append(f"{name}: {place(row)}: another {', '.join(other)} than the one shipped")
    return found


def notes(rows: Iterable[dict]) -> str:
    """Why rows have other weights than those shipped, a sentence for each reason; empty where none has."""
    arms: dict[str, list[str]] = {}
    for row in rows:
        if note := row.get("weights_note"):
            arms.setdefault(note, []).append(arm_of(row))
    found = []
    for note, some in arms.items():
        named = ", ".join(f"`{arm}`" for arm in dict.fromkeys(some) if arm)
        whose = f" ({named})" if named and len(set(some)) <= 6 else ""
        found.append(f"Rows of other weights than those shipped{whose}: {note}.\n")
    return "".join(found)
