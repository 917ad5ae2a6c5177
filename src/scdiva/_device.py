"""Non-blocking host-to-device copies."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device; from CPU to CUDA asynchronously, through page-locked memory."""
    if x.device.type != "cpu" or not str(device).startswith("cuda"):
        return x.to(device)
    return (x if x.is_pinned() else x.pin_memory()).to(device, non_blocking=True)
