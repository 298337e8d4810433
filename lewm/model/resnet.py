"""ResNet-18 (He et al., 2016), the paper's other backbone: the network of torchvision without its classifier.

Tensors have torchvision's names, so its weights load. Shapes: N images, C channels, pixels last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from lewm.model.encoder import IMAGENET_MEAN, IMAGENET_STD, Encoder
from lewm.model.view import view

CHANNELS = (64, 128, 256, 512)  # of the four stages, of two blocks each


class BasicBlock(nn.Module):
    """Two convolutions with a way around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, channels_in, h, w) -> (N, channels, h / stride, w / stride)."""
        change = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(change)) + self.downsample(x))


class ResNet18(Encoder):
    """Frames of any size to the mean of the last stage's features, (N, 512)."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        mean, std = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
        self.register_buffer("scale", 1 / (255 * std), persistent=False)
        self.register_buffer("shift", -mean / std, persistent=False)
        self.conv1 = nn.Conv2d(3, CHANNELS[0], 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(CHANNELS[0])
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = (CHANNELS[0], *CHANNELS)
        for stage, channels in enumerate(CHANNELS):
            stride = 1 if stage == 0 else 2
            blocks = BasicBlock(widths[stage], channels, stride), BasicBlock(channels, channels, 1)
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self.embed = self._embed  # a plain attribute, so that a compiled version can take its place

    def compiled(self, compile: Callable[[Any], Any]) -> Self:
        """The whole network as one graph, unless its BatchNorms talk to other processes in between."""
        alone = all(type(m) is nn.BatchNorm2d for m in self.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
        fast = view(self)
        fast.embed = compile(self._embed) if alone else self._embed
        return fast

    def heavy_layers(self) -> Iterable[nn.Module]:
        return (module for module in self.modules() if isinstance(module, nn.Conv2d))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.embed(pixels)

    def _embed(self, pixels: torch.Tensor) -> torch.Tensor:
        x = (pixels.to(self.scale.dtype) * self.scale + self.shift).permute(0, 3, 1, 2)  # stored with channels last
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        for stage in range(len(CHANNELS)):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        return x.mean((2, 3))
