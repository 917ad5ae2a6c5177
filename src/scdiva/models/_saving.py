"""`model.save(path)`: a loaded model to a folder, as annotators and perturbation models are saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scdiva.models.scdiva import ScDiVa


def save(self: ScDiVa, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write the model, its vocabulary and its metadata to a folder, which is there whole or not at all.

    What :func:`scdiva.models.save_model` does with `model.vocabulary`; that one also takes a card of your own, other
    metadata, and a smaller type of numbers.

    Parameters
    ----------
    path
        The folder to make.
    overwrite
        Whether a model that stands there is replaced. Anything else never is.

    Returns
    -------
    The folder.

    Raises
    ------
    FileExistsError
        If something stands there already, and it is no model or `overwrite` is False.
    ValueError
        If the model has no vocabulary, or weights are not finite.

    Examples
    --------
    >>> import scdiva as sd
    >>> model = sd.models.load_model()
    >>> folder = model.save("my-model")
    >>> sd.models.load_model("my-model").config == model.config
    True
    """
    from scdiva.models.pretrained import save_model

    vocabulary = getattr(self, "vocabulary", None)
    if vocabulary is None:
        raise ValueError("this model has no vocabulary: set `model.vocabulary` to the genes that it was built for")
    return save_model(self, vocabulary, path, metadata=getattr(self, "metadata", None), overwrite=overwrite)
