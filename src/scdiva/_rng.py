"""Random number generators from a user's `rng`, and seeds of independent streams. torch is imported on use."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from scdiva._settings import settings

if TYPE_CHECKING:
    import torch


def generator(
    rng: int | np.integer | torch.Generator | np.random.Generator | None = None, *, default_seed: int = 0
) -> torch.Generator:
    """Convert `rng` to a torch generator; the global state of torch and numpy is neither read nor changed.

    Parameters
    ----------
    rng
        int: seed of a new CPU generator. A torch generator is returned unchanged, on any device. A numpy generator
        draws the seed. None: `default_seed`.
    default_seed
        Seed for `rng=None`; public calls pass `settings.seed`.

    Raises
    ------
    TypeError
        If `rng` is of another type, such as bool or float.
    ValueError
        If the seed is negative or does not fit into 63 bits.
    """
    import torch

    if isinstance(rng, torch.Generator):
        return rng
    if isinstance(rng, np.random.Generator):
        seed = int(rng.integers(2**63 - 1))
    elif rng is None:
        seed = default_seed
    elif isinstance(rng, (int, np.integer)) and not isinstance(rng, bool):
        seed = int(rng)
    else:
        raise TypeError(
            f"rng must be an int, a torch.Generator, a numpy.random.Generator or None, got {type(rng).__name__}."
        )
    if not 0 <= seed < 2**63:
        raise ValueError(f"A seed must be in 0 ... 2**63 - 1, got {seed}.")
    return torch.Generator("cpu").manual_seed(seed)


def step_seed(seed: int, step: int, stream: str) -> int:
    """Seed in 0 ... 2**63 - 1 of a step of a stream, such as `"mask"`: a SHA-256 hash of the arguments."""
    digest = hashlib.sha256(f"{seed}/{step}/{stream}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def step_generator(seed: int, step: int, stream: str) -> torch.Generator:
    """CPU generator seeded by :func:`step_seed`, so that a resumed run draws the same numbers."""
    return generator(step_seed(seed, step, stream))


def seed_of(rng: int | np.random.Generator | torch.Generator | None) -> int:
    """Draw the seed of a call from `rng`; it is recorded as text, because it exceeds the integers of JSON and h5ad."""
    import torch

    source = generator(rng, default_seed=settings.seed)
    return int(torch.randint(2**62, (1,), generator=source, device=source.device))


def given_seed(rng: int | np.random.Generator | torch.Generator | None) -> int:
    """Seed of a call: an int is returned unchanged, a generator draws one."""
    source = generator(rng, default_seed=settings.seed)
    return seed_of(source) if source is rng else source.initial_seed()
