"""A fitted annotator: a model, the head on it, and the names of the labels; saved to a folder and loaded back.

See :mod:`scdiva.models._fitted` for the folder.
"""

from __future__ import annotations

import operator
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scdiva.models._fitted import MODEL, FittedFolder, arrays, is_fitted, put_into, save_fitted, shapes
from scdiva.models._summary import annotator_html
from scdiva.models.inference import pooled_dim
from scdiva.models.pretrained import load_model
from scdiva.models.scdiva import ScDiVa
from scdiva.nn.annotation import ZERO_SHOT, AnnotationHead, HeadSizes

KIND = "annotator"
_MOST = {"n_labels": 100_000, "own_dim": 4096, "n_genes": 200_000, "hidden": 65_536, "n_known": 10_000_000,
         "n_neighbors": 10_000_000}  # fmt: skip
"""Largest sizes that are believed of a file."""


@dataclass(eq=False)
class Annotator:
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
        Novelties of held-out cells of the reference, float32, ascending: what `reject` is measured by.
    notes
        What was found in fitting: `labels_key`, `seed`, `temperature`, `n_held_out`, `accuracy`, `ece`, `reliability`,
        and of a fine-tuned one `history`.
    dtype
        Type of the labels: that of the reference's, such as `"int64"`, or `"object"`, text.
    ordered
        Whether the reference's labels are ordered categories; `labels` has their order.
    """

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

    def __repr__(self) -> str:
        """Say what it is in a line."""
        return f"Annotator(method={self.method!r}, {len(self.labels)} labels, {len(self.tokens)} genes)"

    def _repr_html_(self) -> str:
        return annotator_html(self)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write it to a folder, which is there whole or not at all.

        Parameters
        ----------
        path
            The folder to make.
        overwrite
            Whether an annotator that stands there is replaced. Anything else never is.

        Returns
        -------
        The folder.

        Raises
        ------
        FileExistsError
            If something stands there already, and it is no annotator or `overwrite` is False.
        """
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
        return save_fitted(path, KIND, self.model, settings, tensors, overwrite=overwrite)


def is_annotator(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a saved annotator."""
    return is_fitted(path, KIND)


def load_annotator(path: str | os.PathLike[str], *, device: str | None = None) -> Annotator:
    """Load an annotator that was saved.

    Parameters
    ----------
    path
        The folder.
    device
        Torch device of its model; None takes `scdiva.settings.device`.

    Returns
    -------
    The annotator.

    Raises
    ------
    FileNotFoundError
        If there is no annotator, or a file of it is missing.
    ValueError
        If a file is damaged, was changed, or is of a newer format; the message names it.

    Examples
    --------
    >>> import scdiva as sd
    >>> cells = sd.datasets.toy(120, 100)
    >>> reference, query = cells[:80].copy(), cells[80:].copy()
    >>> annotator = sd.tl.annotate(query, "cell_type", reference)
    >>> folder = annotator.save("blood")
    >>> sd.models.load_annotator("blood").labels
    ('type A', 'type B', 'type C', 'type D')
    """
    found = FittedFolder(path, KIND, "Annotator.save")
    try:
        settings = found.settings
        sizes, labels = HeadSizes(**settings["sizes"]), settings["labels"]
        dtype, ordered = str(settings.get("dtype", "object")), bool(settings.get("ordered", False))
        if np.dtype(dtype).kind not in "biuf":  # of earlier versions too
            dtype, labels = "object", list(map(str, labels))
        labels = tuple(np.asarray(labels, dtype=dtype).tolist())
        parents = {str(name): str(parent) for name, parent in settings["parents"].items()}
        notes = arrays(dict(settings["notes"]))
        wrong = [name for name, most in _MOST.items() if not 0 <= operator.index(getattr(sizes, name)) <= most]
        if wrong or len(labels) != sizes.n_labels or len(labels) < 2:
            raise ValueError(f"{wrong[0] if wrong else 'labels'} out of range")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise found.wrong(error) from error
    model = load_model(found.model_folder, device=device)
    width = pooled_dim(model, "lat" if sizes.method in ZERO_SHOT else "state")
    if (sizes.n_tokens, sizes.state_dim) != (model.config.n_tokens, width):
        raise ValueError(f"{found.folder} describes a head for another model than {MODEL}")
    with torch.device("meta"):  # nothing of the sizes that a file names is set aside before they prove true
        head = AnnotationHead(sizes)
    stored = found.tensors({**shapes(head, "head."), "tokens": (-1,), "novelty": (-1,)}, "the head")
    put_into(head, stored, "head.")
    tokens, novelty = stored["tokens"].numpy(), stored["novelty"].numpy()
    return Annotator(model, head, labels, tokens, novelty, parents, notes, dtype, ordered)
