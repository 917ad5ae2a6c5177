from __future__ import annotations

import numpy as np
import pytest
import torch

from scdiva._rng import generator, step_generator, step_seed


def draw(g: torch.Generator) -> list[float]:
    return torch.rand(4, generator=g).tolist()


def test_ints_and_none_seed_a_new_generator():
    assert draw(generator(3)) == draw(generator(np.int64(3))) == draw(torch.Generator().manual_seed(3))
    assert draw(generator(None)) == draw(generator(0))
    assert draw(generator(None, default_seed=5)) == draw(generator(5))


def test_a_torch_generator_goes_on():
    g = torch.Generator().manual_seed(1)
    assert generator(g) is g


def test_a_numpy_generator_goes_on_and_decides():
    one, two = np.random.default_rng(4), np.random.default_rng(4)
    first = draw(generator(one))
    assert first == draw(generator(two))
    assert first != draw(generator(one))


def test_global_state_is_untouched():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    draw(generator(7))
    step_generator(1, 2, "mask")
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # noqa: NPY002


@pytest.mark.parametrize("rng", ["0", 1.0, True, [1]])
def test_other_types_are_refused(rng):
    with pytest.raises(TypeError, match="rng must be"):
        generator(rng)


@pytest.mark.parametrize("rng", [-1, 2**63])
def test_seeds_out_of_range_are_refused(rng):
    with pytest.raises(ValueError, match="seed must be"):
        generator(rng)


def test_steps_are_pure_and_unrelated():
    assert draw(step_generator(0, 1, "mask")) == draw(step_generator(0, 1, "mask"))
    seeds = {step_seed(s, step, stream) for s in range(5) for step in range(50) for stream in ("a", "b")}
    assert len(seeds) == 500
    # written down, so that a change which would break the resuming of runs is noticed
    assert step_seed(0, 0, "mask") == 7825967613872827972
