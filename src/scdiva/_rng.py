"""Where every random number comes from: the one place that turns a user's `rng` into a torch generator.

torch is imported when a generator is made, so that this module costs nothing to import.
"""

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
    """Make a torch generator of what a caller gave as `rng`.

    Parameters
    ----------
    rng
        An int seeds a new generator, on the CPU, whose draws are the same everywhere; a torch generator is returned as
        it is, on whatever device, and goes on from where it stands; a numpy generator gives the seed (one draw, so that
        it goes on too); None takes `default_seed`.
    default_seed
        Seed for `rng=None`; callers with a user pass `settings.seed`.

    Returns
    -------
    A generator. Neither torch's nor numpy's global state is touched.

    Raises
    ------
    TypeError
        If `rng` is none of these (a bool or a float among them).
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
    """Seed of one step of one stream of random numbers, a pure function of its arguments.

    Neighbouring steps and seeds give unrelated numbers (SHA-256), on every platform and in every process.

    Parameters
    ----------
    seed
        Seed of the run.
    step
        Which step.
    stream
        What the numbers are for, such as `"mask"`; streams are independent of each other.

    Returns
    -------
    An int in 0 ... 2**63 - 1.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{stream}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def step_generator(seed: int, step: int, stream: str) -> torch.Generator:
    """Make a CPU generator seeded by :func:`step_seed`.

    Training draws its masks from here, so that a resumed run continues as if it had never stopped.

    Parameters
    ----------
    seed, step, stream
        See :func:`step_seed`.
    """
    return generator(step_seed(seed, step, stream))


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
