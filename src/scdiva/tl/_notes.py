"""What every call notes of itself: which model it was given, and the seed of its random numbers."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from scdiva._constants import OBSM_EMBEDDING, OBSM_INTEGRATED
from scdiva._rng import generator
from scdiva._settings import settings

if TYPE_CHECKING:
    import numpy as np
    import torch

    from scdiva.models import ScDiVa


def embedding_key(model: ScDiVa) -> str:
    """Name the key of `obsm` that embeddings of a model have if no other is asked for.

    Those of a model that has integrated batches stand where `tl.integrate` put those of the cells it was fitted on.
    """
    return OBSM_EMBEDDING if model.integration is None else OBSM_INTEGRATED


def model_name(model: object) -> str:
    """Say what a call notes of the model that it was given: a name or path, or the class of a loaded one."""
    return str(model) if isinstance(model, str | PathLike) else type(model).__name__


def seed_of(rng: int | np.random.Generator | torch.Generator | None) -> int:
    """Draw the seed of a call from what was given as `rng`; a generator goes on from where it stands.

    It is noted as text, as it is beyond the integers that JSON and h5ad readers agree on.
    """
    import torch

    source = generator(rng, default_seed=settings.seed)
    return int(torch.randint(2**62, (1,), generator=source, device=source.device))


def given_seed(rng: int | np.random.Generator | torch.Generator | None) -> int:
    """Give the seed of a call, an int as it was given; a generator draws one and goes on."""
    source = generator(rng, default_seed=settings.seed)
    return seed_of(source) if source is rng else source.initial_seed()
