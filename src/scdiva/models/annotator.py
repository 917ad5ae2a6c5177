"""A fitted annotator: a model, the head on it, and the names of the labels; saved to a folder and loaded back.

The folder holds a model folder, as :mod:`scdiva.models.pretrained` writes it, and three files beside it::

    model/                   the model that the head reads
    annotator.json           format version, labels, parents, genes, sizes, what was found in fitting
    annotator.safetensors    the head
    SHA256SUMS               of these two and of model/SHA256SUMS
"""

from __future__ import annotations

import json
import operator
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scdiva._version import __version__
from scdiva.models._folder import CHECKSUMS, sha256, written_beside
from scdiva.models.inference import pooled_dim
from scdiva.models.pretrained import load_model, save_model
from scdiva.models.scdiva import ScDiVa
from scdiva.nn.annotation import ZERO_SHOT, AnnotationHead, HeadSizes

FORMAT, FORMAT_VERSION = "scdiva annotator", 1
SETTINGS, WEIGHTS, MODEL = "annotator.json", "annotator.safetensors", "model"
_FILES = (SETTINGS, WEIGHTS, f"{MODEL}/{CHECKSUMS}")
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
        Names of the labels, as columns of the probabilities.
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
    """

    model: ScDiVa
    head: AnnotationHead
    labels: tuple[str, ...]
    tokens: NDArray[np.int32]
    novelty: NDArray[np.float32]
    parents: dict[str, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """How it annotates."""
        return self.head.sizes.method

    def __repr__(self) -> str:
        """Say what it is in a line."""
        return f"Annotator(method={self.method!r}, {len(self.labels)} labels, {len(self.tokens)} genes)"

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
        from safetensors.torch import save

        folder = Path(path).expanduser()
        if folder.exists() and not (overwrite and is_annotator(folder)):
            hint = "pass overwrite=True" if is_annotator(folder) else "it is no annotator; choose another path"
            raise FileExistsError(f"{folder} exists already: {hint}")
        settings = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "scdiva_version": __version__,
            "sizes": asdict(self.head.sizes),
            "labels": list(self.labels),
            "parents": self.parents,
            "notes": _plain(self.notes),
        }
        tensors = {f"head.{name}": value.detach().cpu().contiguous() for name, value in self.head.state_dict().items()}
        tensors |= {"tokens": torch.from_numpy(self.tokens), "novelty": torch.from_numpy(self.novelty)}
        with written_beside(folder, overwrite) as part:
            save_model(self.model, self.model.vocabulary, part / MODEL)
            (part / SETTINGS).write_text(json.dumps(settings, indent=2, allow_nan=False) + "\n", encoding="utf-8")
            (part / WEIGHTS).write_bytes(save(tensors))
            sums = [f"{sha256((part / name).read_bytes())}  {name}\n" for name in _FILES]
            (part / CHECKSUMS).write_text("".join(sums), encoding="utf-8")
        return folder


def is_annotator(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a saved annotator."""
    return (Path(path).expanduser() / SETTINGS).is_file()


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
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    folder = Path(path).expanduser()
    for name in (*_FILES, CHECKSUMS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} lacks {name}: an annotator's folder holds what Annotator.save writes")
    lines = [line.split("  ", 1) for line in (folder / CHECKSUMS).read_text(encoding="utf-8").splitlines()]
    sums = {line[-1]: line[0] for line in lines}
    if sorted(sums) != sorted(_FILES) or len(lines) != len(_FILES):
        raise ValueError(f"{folder / CHECKSUMS} must list {', '.join(_FILES)}, each once, and nothing else")
    data = {name: (folder / name).read_bytes() for name in _FILES}
    for name, blob in data.items():
        if sha256(blob) != sums[name]:
            raise ValueError(f"{folder / name} does not match {CHECKSUMS}: it is damaged or was changed; save it again")
    try:
        settings = json.loads(data[SETTINGS].decode("utf-8"))
        if settings["format"] != FORMAT or settings["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format {settings['format']!r}, version {settings['format_version']}")
        sizes, labels = HeadSizes(**settings["sizes"]), tuple(map(str, settings["labels"]))
        parents = {str(name): str(parent) for name, parent in settings["parents"].items()}
        notes = _arrays(dict(settings["notes"]))
        wrong = [name for name, most in _MOST.items() if not 0 <= operator.index(getattr(sizes, name)) <= most]
        if wrong or len(labels) != sizes.n_labels or len(labels) < 2:
            raise ValueError(f"{wrong[0] if wrong else 'labels'} out of range")
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{folder / SETTINGS} does not describe an annotator that scdiva {__version__} reads: {error}"
        ) from error
    model = load_model(folder / MODEL, device=device)
    width = pooled_dim(model, "lat" if sizes.method in ZERO_SHOT else "state")
    if (sizes.n_tokens, sizes.state_dim) != (model.config.n_tokens, width):
        raise ValueError(f"{folder / SETTINGS} describes a head for another model than {MODEL}")
    try:
        stored = load(data[WEIGHTS])
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"{folder / WEIGHTS} is damaged or no safetensors file: {error}") from error
    with torch.device("meta"):  # nothing of the sizes that a file names is set aside before they prove true
        head = AnnotationHead(sizes)
    tokens, novelty = stored.get("tokens"), stored.get("novelty")
    given = {name.removeprefix("head."): value for name, value in stored.items() if name.startswith("head.")}
    expected = {name: tuple(value.shape) for name, value in head.state_dict().items()}
    if tokens is None or novelty is None or {name: tuple(value.shape) for name, value in given.items()} != expected:
        raise ValueError(f"{folder / WEIGHTS} does not hold the tensors of the head that {SETTINGS} describes")
    if any(not bool(torch.isfinite(value).all()) for value in stored.values() if value.is_floating_point()):
        raise ValueError(f"{folder / WEIGHTS} holds NaN or infinite values")
    head.to_empty(device="cpu").load_state_dict(given)
    head.requires_grad_(False).eval()
    return Annotator(model, head, labels, tokens.numpy(), novelty.numpy(), parents, notes)


def _plain(value: Any) -> Any:
    """Turn notes into JSON values; NaN is null."""
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, np.ndarray):
        return [_plain(part) for part in value.tolist()]
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _arrays(value: Any) -> Any:
    """Turn notes back: null is NaN, lists are arrays."""
    if isinstance(value, dict):
        return {name: _arrays(part) for name, part in value.items()}
    if isinstance(value, list):
        return np.array([np.nan if part is None else part for part in value])
    return np.nan if value is None else value
