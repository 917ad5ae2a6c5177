from __future__ import annotations

import pytest

from scdiva.kernels._triton_configs import HEAD_DIMS, KERNELS, Plan, candidates, default_plan, shared_bytes

DEVICES = {"H100": ((9, 0), 232448), "A100": ((8, 0), 166912), "RTX 3090": ((8, 6), 101376), "tiny": ((8, 9), 49152)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_plan_fits_its_device(device, head_dim, itemsize):
    capability, limit = DEVICES[device]
    plan = default_plan(head_dim, itemsize, capability, limit)
    for kernel in KERNELS:
        tiles = plan.of(kernel)
        fitting = candidates(kernel, head_dim, itemsize, limit, capability)
        assert tiles in fitting
        if device != "tiny":
            assert all(shared_bytes(kernel, each, head_dim, itemsize) <= limit for each in fitting)


def test_on_hopper_the_plan_is_one_of_four_warps_as_timed_on_an_h100():
    plan = default_plan(64, 2, *DEVICES["H100"])
    assert (plan.forward, plan.dkdv, plan.dq) == ((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3))


def test_where_nothing_fits_the_smallest_is_left():
    assert candidates("forward", 128, 2, 1) == [min(candidates("forward", 128, 2, 10**9), key=lambda t: t.block_q)]


def test_a_plan_by_an_earlier_version_is_read():
    plan = default_plan(64, 2, *DEVICES["H100"])
    assert Plan.from_dict(plan.to_dict()) == plan
    assert Plan.from_dict({**plan.to_dict(), "rotate_once": False}) == plan
