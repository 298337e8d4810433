"""What all kernels of the network share: how they are compiled, and what they are made for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

try:
    import triton
except ImportError:  # as on most machines without a GPU
    triton = None

HAS_TRITON = triton is not None


@torch.compiler.assume_constant_result
def is_hopper(device: torch.device) -> bool:
    """Whether a device is an NVIDIA GPU of the Hopper generation: tiles are cut to its shared memory and registers."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def product_precision(x: torch.Tensor) -> torch.dtype:
    """The type to compute in: autocast's, or else that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def column_sums(x_RC: torch.Tensor) -> torch.Tensor:
    """(R, C) -> (C,): what many programs of a kernel contribute each, added up.

    As a product with ones: CUDA's own sum over rows takes twice as long for a thousand of them, and more for more.
    """
    return torch.mv(x_RC.t(), x_RC.new_ones(len(x_RC)))


def jit(function: Callable[..., Any], varying: Sequence[str] = ()) -> Any:
    """``triton.jit`` where there is Triton. varying: arguments whose values must not make it compile a kernel anew."""
    return function if triton is None else triton.jit(function, do_not_specialize=list(varying))
