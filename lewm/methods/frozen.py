"""Frozen encoders, whose features can stand in place of pixels: any model here that encodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import nn

from lewm.errors import CheckpointError, ConfigError
from lewm.methods.files import identity, load


class _Encodes(Protocol):
    def encode(self, pixels: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class FrozenEncoder:
    """A network that is never trained here. name: how it was asked for.  digest: of all that it is.

    shape: of the features of one frame.  image_size: of the frames that it takes.
    """

    name: str
    digest: str
    module: nn.Module
    shape: tuple[int, ...]
    image_size: int

    def to(self, device: torch.device) -> FrozenEncoder:
        """The same on another device, where it then is."""
        self.module.to(device)
        return self

    @torch.no_grad()
    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Frames uint8 (N, R, R, 3), on its device -> features float32 (N, *shape)."""
        return cast(_Encodes, self.module).encode(pixels).float()


def frozen_encoder(name: str, digest: str | None = None, device: str | torch.device = "cpu") -> FrozenEncoder:
    """The encoder of a model: a folder, a run, a name, a hub id. digest: what it must be, None: whatever it is."""
    model = load(name, device)
    if not hasattr(model, "encode"):
        raise ConfigError(f"method.features: {name} is of the method {model.settings.NAME!r}, which does not encode.")
    found = identity(model)
    if digest not in (None, found):
        raise CheckpointError(
            f"{name} is not the encoder whose features this model has seen (digest {found[:12]} here, "
            f"{str(digest)[:12]} then). Put that one there again, or train anew with this one."
        )
    model.requires_grad_(False)
    black = torch.zeros(1, model.image_size, model.image_size, 3, dtype=torch.uint8, device=model.device)
    shape = tuple(cast(_Encodes, model).encode(black).shape[1:])
    return FrozenEncoder(name, found, model, shape, model.image_size)
