"""Gaussian noise as a pure function of (key, position).

A solver draws its candidates here instead of from a generator with a state. Each episode has its own key, so its
numbers are the same alone or in a batch of fifty, on any device, and need no host synchronisation.
"""

from __future__ import annotations

import math

import torch

from lewm.kernels import search as kernels

# SplitMix64 (Steele, Lea, Flood 2014): a Weyl sequence through a 64-bit mixing function. int64 wraps as uint64 does.
_WEYL = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_BITS_24 = (1 << 24) - 1


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; int64's own is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def normal(keys_B: torch.Tensor, start: int | torch.Tensor, count: int) -> torch.Tensor:
    """Standard normal numbers start..start+count-1 of each key's stream: int64 (B,) -> float32 (B, count).

    Two numbers come from each 64-bit word (Box-Muller), so ``start`` is even.
    """
    if kernels.available(keys_B) and isinstance(start, torch.Tensor):
        return kernels.normal(keys_B, start, count)
    words = torch.arange(1, 1 + (count + 1) // 2, device=keys_B.device) + start // 2
    bits = _mix(keys_B.unsqueeze(1) + words * _WEYL)
    u = ((bits >> 40) & _BITS_24).float().add_(1).mul_(2.0**-24)  # in (0, 1]: its logarithm is finite
    angle = (bits & _BITS_24).float().mul_(2 * math.pi * 2.0**-24)
    radius = u.log_().mul_(-2).sqrt_()
    pairs = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)
    return pairs.flatten(1)[:, :count]
