"""Where to compute."""

from __future__ import annotations

import torch

from lewm.errors import ConfigError


def resolve_device(device: str | torch.device) -> torch.device:
    """``"auto"`` is CUDA, then MPS, then the CPU."""
    if device == "auto":
        mps = "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device("cuda" if torch.cuda.is_available() else mps)
    try:
        torch.empty(0, device=device)
        return torch.device(device)
    except (RuntimeError, AssertionError) as error:  # torch raises either, for unknown names and missing devices
        raise ConfigError(f"Device {str(device)!r} cannot be used here: {error}".splitlines()[0]) from error
