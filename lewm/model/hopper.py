"""What the kernels of this package are made for: Hopper GPUs, and products in narrow precision."""

from __future__ import annotations

import torch


@torch.compiler.assume_constant_result
def is_hopper(device: torch.device) -> bool:
    """Whether a device is an NVIDIA GPU of the Hopper generation: tiles are cut to its shared memory and registers."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def product_precision(x: torch.Tensor) -> torch.dtype:
    """The type to compute in: autocast's, or else that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
