"""A fitted annotator: a model, the head on it, and the names of the labels."""

from __future__ import annotations

import operator
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scdiva.annotation.head import AnnotationHead, HeadSizes
from scdiva.models._fitted import Fitted, arrays, check_shapes
from scdiva.models._folder import MODEL
from scdiva.models.inference import width_of
from scdiva.models.scdiva import ScDiVa

_MOST = {"n_labels": 100_000, "own_dim": 4096, "n_genes": 200_000, "n_known": 10_000_000, "n_neighbors": 10_000_000}
"""Largest sizes that are believed of a file."""


@dataclass(eq=False, repr=False)
class Annotator(Fitted):
    """What `tl.annotate` fits; `tl.annotate(query, model=annotator)` annotates later cells with it.

    Attributes
    ----------
    model
        What makes the states that the head reads.
    head
        The classifier, and what it was calibrated by.
    labels
        The labels, as columns of the probabilities: text, or numbers or truth values where the reference has these.
    parents
        Label or group of labels to the group above it; empty without a hierarchy.
    tokens
        Genes that were read of the reference, as tokens of the model's vocabulary, int32, ascending. Later cells are
        read as if they had no others.
    novelty
        Novelties of held-out cells of the reference, float32, ascending: `reject` takes its quantile as the threshold.
        `notes["max_novelty_from"]` says whether their whole batches were held out.
    notes
        What was found in fitting: `labels_key`, `seed`, `temperature`, `n_held_out`, `accuracy`, `ece`, and
        `reliability`.
    dtype
        Type of the labels: that of the reference's, such as `"int64"`, or `"object"`, text.
    ordered
        Whether the reference's labels are ordered categories; `labels` has their order.
    """

    kind: ClassVar[str] = "annotator"
    model: ScDiVa
    head: AnnotationHead
    labels: tuple[Any, ...]
    tokens: NDArray[np.int32]
    novelty: NDArray[np.float32]
    parents: dict[str, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    dtype: str = "object"
    ordered: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The labels as text."""
        return tuple(map(str, self.labels))

    @property
    def method(self) -> str:
        """How it annotates."""
        return self.head.sizes.method

    def _about(self) -> dict[str, object]:
        notes = self.notes
        accuracy, held, labelled = notes.get("accuracy"), notes.get("n_held_out"), notes.get("n_labelled")
        tested = isinstance(held, int) and held > 0 and isinstance(accuracy, float)
        kind = "that were not trained on" if notes.get("finetuned") else "each predicted by a fit without it"
        return {
            "method": self.method,
            "labels": f"{len(self.labels)}: {', '.join(self.names)}",
            "label column": notes.get("labels_key"),
            "genes read": f"{len(self.tokens):,}",
            "fitted on": f"{labelled:,} labelled cells" if isinstance(labelled, int) else None,
            "rejection calibrated on": notes.get("max_novelty_from"),
            "held-out accuracy": f"{accuracy:.3f} on {held:,} labelled cells, {kind}" if tested else None,
        }

    def _contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        settings = {
            "sizes": asdict(self.head.sizes),
            "labels": list(self.labels),
            "dtype": self.dtype,
            "ordered": self.ordered,
            "parents": self.parents,
            "notes": self.notes,
        }
        tensors = {f"head.{name}": value for name, value in self.head.state_dict().items()}
        tensors |= {"tokens": torch.from_numpy(self.tokens), "novelty": torch.from_numpy(self.novelty)}
        return settings, tensors

    @classmethod
    def _restored(cls, model: ScDiVa, settings: dict[str, Any], tensors: dict[str, Tensor]) -> Self:
        sizes = HeadSizes(**settings["sizes"])
        labels = settings["labels"]
        dtype, ordered = str(settings["dtype"]), bool(settings["ordered"])
        if np.dtype(dtype).kind not in "biuf":
            dtype, labels = "object", list(map(str, labels))
        labels = tuple(np.asarray(labels, dtype=dtype).tolist())
        parents = {str(name): str(parent) for name, parent in settings["parents"].items()}
        notes = arrays(dict(settings["notes"]))
        if wrong := [name for name, most in _MOST.items() if not 0 <= operator.index(getattr(sizes, name)) <= most]:
            raise ValueError(f"{wrong[0]} out of range")
        if len(labels) != sizes.n_labels or len(labels) < 2:
            raise ValueError("labels out of range")
        width = width_of(model, "embedding" if sizes.method == "knn" else "state")
        if (sizes.n_tokens, sizes.state_dim) != (model.config.n_tokens, width):
            raise ValueError(f"its head is for another model than {MODEL}")
        with torch.device("meta"):  # nothing of the sizes that a file names is set aside before they prove true
            head = AnnotationHead(sizes)
        shapes = {f"head.{name}": tuple(value.shape) for name, value in head.state_dict().items()}
        check_shapes(tensors, {**shapes, "tokens": (-1,), "novelty": (-1,)})
        head.to_empty(device="cpu").load_state_dict({name.removeprefix("head."): tensors[name] for name in shapes})
        head.requires_grad_(False).eval()
        tokens, novelty = tensors["tokens"].numpy(), tensors["novelty"].numpy()
        return cls(model, head, labels, tokens, novelty, parents, notes, dtype, ordered)
