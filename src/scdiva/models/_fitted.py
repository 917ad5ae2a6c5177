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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from torch import Tensor

from scdiva._files import output_path, printable
from scdiva._version import __version__
from scdiva.models._folder import (
    CHECKSUMS,
    FORMAT_VERSION,
    MODEL,
    in_words,
    kind_of,
    read_checked,
    read_json,
    read_sums,
    write_sums,
    written_beside,
)
from scdiva.models.pretrained import load_model, read_tensors
from scdiva.models.scdiva import ScDiVa


class Fitted:
    """What a call fits on a user's cells: a model, settings and arrays beside it, saved to a folder and loaded back.

    Attributes
    ----------
    kind
        What it is, in the names of its files.
    model
        The model that it was fitted with.
    """

    kind: ClassVar[str]
    model: ScDiVa

    def _about(self) -> dict[str, object]:
        """Say what it is, by name; None is left out."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """Say what it is in lines, the network's last."""
        said = {**self._about(), "model": self.model}
        lines = [printable(f"    {name}: {value!s:.200}") for name, value in said.items() if value is not None]
        return "\n".join([type(self).__name__, *lines])

    def _contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Give settings, which :func:`plain` takes, and arrays: all but the model."""
        raise NotImplementedError

    @classmethod
    def _restored(cls, model: ScDiVa, settings: dict[str, Any], tensors: dict[str, Tensor]) -> Self:
        """Make one of what a folder holds.

        Raises
        ------
        KeyError, TypeError, AttributeError, ValueError
            If that does not fit together.
        """
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write it to a folder, which is there whole or not at all; :func:`scdiva.models.load` reads it.

        Parameters
        ----------
        path
            The folder to make.
        overwrite
            Whether one of the same kind that stands there is replaced. Anything else never is.

        Returns
        -------
        The folder.

        Raises
        ------
        FileExistsError
            If something stands there already, and it is not of this kind, contains files that scdiva did not write, or
            `overwrite` is False.
        ValueError
            If `path` is a URL.
        """
        from safetensors.torch import save

        folder = output_path(path, "path")
        settings, tensors = self._contents()
        head = {"format": _format(self.kind), "format_version": FORMAT_VERSION, "scdiva_version": __version__}
        described, weights, _ = files = _files(self.kind)
        with written_beside(folder, overwrite, self.kind) as part:
            self.model.save(part / MODEL)
            text = json.dumps(head | plain(settings), indent=2, allow_nan=False)
            (part / described).write_text(text + "\n", encoding="utf-8")
            (part / weights).write_bytes(save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}))
            write_sums(part, files)
        return folder


AnyFitted = TypeVar("AnyFitted", bound=Fitted)


def load_fitted(cls: type[AnyFitted], path: str | os.PathLike[str], device: str | None = None) -> AnyFitted:
    """Load what :meth:`Fitted.save` wrote.

    Parameters
    ----------
    cls
        What the folder has to hold.
    path
        The folder.
    device
        Torch device of its model; None takes `scdiva.settings.device`.

    Raises
    ------
    FileNotFoundError
        If a file is missing.
    ValueError
        If one is damaged, was changed, or is of another format.
    """
    folder = Path(path).expanduser()
    described, weights, _ = files = _files(cls.kind)
    sums = read_sums(folder, files, cls.kind)
    data = {name: read_checked(folder, name, sums) for name in files}
    settings = read_json(folder / described, data[described], _format(cls.kind))
    tensors = read_tensors(folder / weights, data[weights])
    model = load_model(folder / MODEL, device=device)
    try:
        return cls._restored(model, settings, tensors)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{folder} holds no {in_words(cls.kind)} that scdiva {__version__} reads: {error}") from error


def given_fitted(cls: type[AnyFitted], model: object, device: str | None) -> AnyFitted | None:
    """Give what a call got as `model=` if it is fitted, itself or as a folder, which is loaded; None if it is neither.

    Parameters
    ----------
    cls
        What it may be.
    model
        What the call got.
    device
        As for :func:`load_fitted`.
    """
    if isinstance(model, cls):
        return model
    if isinstance(model, str | os.PathLike) and kind_of(Path(model).expanduser()) == cls.kind:
        return load_fitted(cls, model, device)
    return None


def _files(kind: str) -> tuple[str, str, str]:
    return f"{kind}.json", f"{kind}.safetensors", f"{MODEL}/{CHECKSUMS}"


def _format(kind: str) -> str:
    return f"scdiva {in_words(kind)}"


def check_shapes(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse arrays of other names or shapes than expected; -1 stands for any length."""
    fits = tensors.keys() == expected.keys() and all(
        value.dim() == len(expected[name])
        and all(n in (m, -1) for m, n in zip(value.shape, expected[name], strict=True))
        for name, value in tensors.items()
    )
    if not fits:
        raise ValueError("it does not hold the tensors that its settings describe")


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
