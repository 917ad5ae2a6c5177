"""The folder of what a call has fitted on a user's cells: a model folder, and three files beside it.

::

    model/                   the model, as :mod:`scdiva.models.pretrained` writes it
    KIND.json                format version and settings
    KIND.safetensors         arrays
    SHA256SUMS               of these two and of model/SHA256SUMS
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scdiva._version import __version__
from scdiva.models._folder import CHECKSUMS, refuse_other_kind, sha256, write_sums, written_beside
from scdiva.models.pretrained import save_model
from scdiva.models.scdiva import ScDiVa

MODEL = "model"
FORMAT_VERSION = 1


def _files(kind: str) -> tuple[str, str, str]:
    return f"{kind}.json", f"{kind}.safetensors", f"{MODEL}/{CHECKSUMS}"


def _name(kind: str, *, article: bool = False) -> str:
    """Name it for a message."""
    name = kind.replace("_", " ")
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}" if article else name


def is_fitted(path: str | os.PathLike[str], kind: str) -> bool:
    """Whether a folder holds what was fitted, of this kind."""
    return (Path(path).expanduser() / _files(kind)[0]).is_file()


def save_fitted(
    path: str | os.PathLike[str],
    kind: str,
    model: ScDiVa,
    settings: dict[str, Any],
    tensors: dict[str, Tensor],
    *,
    overwrite: bool,
) -> Path:
    """Write a folder, which is there whole or not at all.

    Parameters
    ----------
    path
        The folder to make.
    kind
        What it holds, such as `"annotator"`.
    model, settings, tensors
        What to write.
    overwrite
        Whether one of its kind that stands there is replaced. Anything else never is.

    Raises
    ------
    FileExistsError
        If something stands there already, and it is not of this kind or `overwrite` is False.
    """
    from safetensors.torch import save

    folder = Path(path).expanduser()
    if folder.exists() and not (overwrite and is_fitted(folder, kind)):
        hint = "pass overwrite=True" if is_fitted(folder, kind) else f"it is no {_name(kind)}; choose another path"
        raise FileExistsError(f"{folder} exists already: {hint}")
    head = {"format": f"scdiva {_name(kind)}", "format_version": FORMAT_VERSION, "scdiva_version": __version__}
    said, weights, _ = _files(kind)
    with written_beside(folder, overwrite) as part:
        save_model(model, model.vocabulary, part / MODEL)
        text = json.dumps(head | plain(settings), indent=2, allow_nan=False)
        (part / said).write_text(text + "\n", encoding="utf-8")
        (part / weights).write_bytes(save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}))
        write_sums(part, _files(kind))
    return folder


class FittedFolder:
    """A folder that was saved, its files held against their sums.

    Parameters
    ----------
    path
        The folder.
    kind
        What it has to hold.
    writer
        What writes such folders, for messages.

    Attributes
    ----------
    settings
        As they were saved; NaN and arrays are not yet put back (:func:`arrays`).

    Raises
    ------
    FileNotFoundError
        If a file is missing.
    ValueError
        If one is damaged, was changed, or is of another format.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str, writer: str) -> None:
        self.kind, self.folder = kind, Path(path).expanduser()
        files = _files(kind)
        refuse_other_kind(self.folder, kind)
        for name in (*files, CHECKSUMS):
            if not (self.folder / name).is_file():
                raise FileNotFoundError(
                    f"{self.folder} lacks {name}: {_name(kind, article=True)}'s folder holds what {writer} writes"
                )
        sums_of = self.folder / CHECKSUMS
        lines = [line.split("  ", 1) for line in sums_of.read_text(encoding="utf-8", errors="replace").splitlines()]
        sums = {line[-1]: line[0] for line in lines}
        if sorted(sums) != sorted(files) or len(lines) != len(files):
            raise ValueError(f"{sums_of} must list {', '.join(files)}, each once, and nothing else")
        data = {name: (self.folder / name).read_bytes() for name in files}
        for name, blob in data.items():
            if sha256(blob) != sums[name]:
                raise ValueError(
                    f"{self.folder / name} does not match {CHECKSUMS}: it is damaged or was changed; save it again"
                )
        self.model_folder, self.weights = self.folder / MODEL, self.folder / files[1]
        self._said, self._blob = self.folder / files[0], data[files[1]]
        try:
            self.settings = json.loads(data[files[0]].decode("utf-8"))
            if self.settings["format"] != f"scdiva {_name(kind)}" or self.settings["format_version"] != FORMAT_VERSION:
                raise ValueError(f"format {self.settings['format']!r}, version {self.settings['format_version']}")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise self.wrong(error) from error

    def wrong(self, error: object) -> ValueError:
        """Give the error to raise for settings that make no sense."""
        what = _name(self.kind, article=True)
        return ValueError(f"{self._said} does not describe {what} that scdiva {__version__} reads: {error}")

    def tensors(self, expected: dict[str, tuple[int, ...]], of: str) -> dict[str, Tensor]:
        """Read the arrays.

        Parameters
        ----------
        expected
            Name and shape of each that has to be there, -1 for any length.
        of
            What they are of, for messages.

        Raises
        ------
        ValueError
            If they are damaged, others, or not finite.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            stored = load(self._blob)
        except (SafetensorError, ValueError, KeyError) as error:
            raise ValueError(f"{self.weights} is damaged or no safetensors file: {error}") from error
        fits = stored.keys() == expected.keys() and all(
            value.dim() == len(expected[name])
            and all(n in (m, -1) for m, n in zip(value.shape, expected[name], strict=True))
            for name, value in stored.items()
        )
        if not fits:
            raise ValueError(f"{self.weights} does not hold the tensors of {of} that {self._said.name} describes")
        if any(not bool(torch.isfinite(value).all()) for value in stored.values() if value.is_floating_point()):
            raise ValueError(f"{self.weights} holds NaN or infinite values")
        return stored


def shapes(module: nn.Module, prefix: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of a module's tensors, as they are saved under a prefix."""
    return {f"{prefix}{name}": tuple(value.shape) for name, value in module.state_dict().items()}


def put_into(module: nn.Module, stored: dict[str, Tensor], prefix: str) -> None:
    """Fill a module that was made on the meta device; it is not trained further."""
    given = {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}
    module.to_empty(device="cpu").load_state_dict(given)
    module.requires_grad_(False).eval()


def plain(value: Any) -> Any:
    """Turn notes into JSON values; NaN is null."""
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, np.ndarray):
        return [plain(part) for part in value.tolist()]
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


def arrays(value: Any) -> Any:
    """Turn notes back: null is NaN, lists are arrays."""
    if isinstance(value, dict):
        return {name: arrays(part) for name, part in value.items()}
    if isinstance(value, list):
        return np.array([np.nan if part is None else part for part in value])
    return np.nan if value is None else value
