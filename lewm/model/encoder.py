"""Encoders: what turns a frame into one vector. They are interchangeable in every method that has one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import nn

from lewm.config import EncoderConfig
from lewm.types import Array

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Encoder(nn.Module, ABC):
    """Frames (N, R, R, 3) uint8 -> (N, W), W the ``out_width`` of its settings."""

    @abstractmethod
    def compiled(self, compile: Callable[[Any], Any]) -> Self:
        """A view with the parts that are worth it compiled; it shares every parameter and buffer."""

    @abstractmethod
    def heavy_layers(self) -> Iterable[nn.Module]:
        """The layers whose products may be bfloat16 in planning, and are where the time goes."""

    def use_kernels(self, enabled: bool) -> None:
        """Whether to take kernels of our own where they fit; at first they are taken."""

    def remarks(self, frames: Array) -> list[str]:
        """What frames of the data, uint8 (N, R, R, 3), say against its settings."""
        del frames
        return []


def make_encoder(config: EncoderConfig, background: Array | None = None) -> Encoder:
    """The encoder that the settings name. background: uint8 (R, R, 3), for one that leaves background out."""
    from lewm.model.resnet import ResNet18
    from lewm.model.vit import ViT

    if config.kind == "resnet18":
        return ResNet18()
    vit = ViT(config)
    if config.kept_patches and background is not None:
        vit.background.copy_(torch.from_numpy(background))
    return vit
