"""Load a saved model, annotator or perturbation model."""

from __future__ import annotations

import os
from typing import Any, cast, overload

from scdiva._constants import DEFAULT_MODEL
from scdiva.annotation.annotator import Annotator
from scdiva.models.pretrained import given_fitted, load_model
from scdiva.models.scdiva import ScDiVa
from scdiva.perturbation.model import PerturbationModel


@overload
def load(*, device: str | None = None) -> ScDiVa: ...
@overload
def load(model: Any, *, device: str | None = None) -> Any: ...
def load(
    model: str | os.PathLike[str] | ScDiVa | Annotator | PerturbationModel = DEFAULT_MODEL, *, device: str | None = None
) -> ScDiVa | Annotator | PerturbationModel:
    """Load a saved model, annotator or perturbation model.

    Parameters
    ----------
    model
        A folder, the name of a bundled model, or ``"hf://owner/name"``. Loaded objects are returned.
    device
        Torch device of the model. None: `settings.device`.

    Returns
    -------
    :class:`ScDiVa` (also of `tl.integrate` and `tl.adapt`), :class:`Annotator` or :class:`PerturbationModel`.

    Raises
    ------
    FileNotFoundError
        If the folder or one of its files does not exist.
    ValueError
        If a file is damaged, was changed, or has a newer format; the message names it.
    TypeError
        If `model` is of another type.

    Examples
    --------
    >>> import scdiva as sd
    >>> cells = sd.datasets.toy(120, 100)
    >>> reference, query = cells[:80].copy(), cells[80:].copy()
    >>> annotator = sd.tl.annotate(query, "cell_type", reference)
    >>> folder = annotator.save("blood")
    >>> sd.models.load("blood").labels
    ('type A', 'type B', 'type C', 'type D')
    """
    kinds: tuple[type[Annotator | PerturbationModel], ...] = (Annotator, PerturbationModel)
    for cls in kinds:
        if (fitted := given_fitted(cls, model, device)) is not None:
            return fitted
    return load_model(cast(ScDiVa, model), device=device)
