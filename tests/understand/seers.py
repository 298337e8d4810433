"""Subjects whose embeddings are known: made by hand, of what can be seen in TwoRoom's frames."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from lewm.methods.frozen import FrozenEncoder
from lewm.understand.subject import Subject, open_subject


class Seer(nn.Module):
    """Encodes a frame by what a function makes of the dot's place, (N, 2) in parts of the frame."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.make = make

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 frames (N, R, R, 3) -> (N, D)."""
        red = (pixels[..., 0].float() - pixels[..., 1].float()).clamp_min(0)
        grid = (torch.arange(red.shape[-1]) + 0.5) / red.shape[-1]
        mass = red.sum((1, 2)).clamp_min(1e-6)
        places = torch.stack([(red.sum(1) * grid).sum(1), (red.sum(2) * grid).sum(1)], dim=-1) / mass[:, None]
        return self.make(places)


def seer(run: Path, name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Subject:
    """A TwoRoom model of a run, whose eyes are replaced."""
    subject, module = open_subject(run, "cpu"), Seer(make)
    size = subject.model.image_size
    shape = tuple(module.encode(torch.zeros(1, size, size, 3, dtype=torch.uint8)).shape[1:])
    return replace(subject, digest=f"{name:0<64}", encoder=FrozenEncoder(name, f"{name:0<64}", module, shape, size))


def place(places_N2: torch.Tensor) -> torch.Tensor:
    """An encoder that sees where the dot is, and nothing else."""
    return places_N2


def blind(places_N2: torch.Tensor) -> torch.Tensor:
    """An encoder that sees nothing."""
    return torch.zeros_like(places_N2)


def shuffled(places_N2: torch.Tensor) -> torch.Tensor:
    """An encoder that tells states apart, with neighbours anywhere."""
    turned = 1e4 * places_N2 @ torch.tensor([[1.7, -2.3], [0.9, 3.1]])
    return torch.sin(turned) + torch.sin(37.0 * turned.flip(1))
