"""What methods that act are made of: a situation, heads upon it, and what offline learning of values needs.

A situation is what a decision rests on: the frames seen so far, at most ``history`` of them, as one vector.

Shapes: B batch, T frames seen, N tokens of a frame, F numbers of a frame, X numbers of a situation, A action block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

LOG_STD = (-5.0, 2.0)  # bounds of an actor's spread
LARGEST_WEIGHT = 100.0  # of an action, by its advantage
TOKEN_NUMBERS = 16  # that are kept of each token of a frame


# -- what is seen --------------------------------------------------------------------------------------------------


class LaidOut(nn.Module):
    """Tokens of a frame (..., N, F) -> one vector (..., width).

    Each token is reduced to a few numbers, and all are laid side by side. A mean would lose where things are.
    """

    def __init__(self, tokens: int, size: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.reduce = nn.Linear(size, TOKEN_NUMBERS)
        self.out = nn.Linear(tokens * TOKEN_NUMBERS, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(F.gelu(self.reduce(self.norm(tokens))).flatten(-2))


def situation_size(frame_size: int, history: int) -> int:
    """X, for frames of so many numbers."""
    return history * (frame_size + (history > 1))


def situation(seen_BTF: torch.Tensor, history: int) -> torch.Tensor:
    """What has been seen, oldest first, T <= history -> (B, X). Zeros stand for what came before, and a mark tells."""
    if history > 1:
        marked = F.pad(seen_BTF, (0, 1), value=1.0)
        seen_BTF = F.pad(marked, (0, 0, history - seen_BTF.shape[1], 0))
    return seen_BTF.flatten(1)


# -- heads ---------------------------------------------------------------------------------------------------------


def mlp(inputs: int, width: int, depth: int, outputs: int, dropout: float = 0.0) -> nn.Sequential:
    """Hidden layers with LayerNorm and GELU: (..., inputs) -> (..., outputs)."""
    layers: list[nn.Module] = []
    for layer in range(depth):
        layers += [nn.Linear(width if layer else inputs, width), nn.LayerNorm(width), nn.GELU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class GaussianActor(nn.Module):
    """What to do in a situation, (..., X) -> the mean (..., A), with a spread that is the same everywhere."""

    def __init__(self, inputs: int, width: int, depth: int, outputs: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.head = mlp(inputs, width, depth, outputs, dropout)
        self.log_std = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)

    def surprise(self, x: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        """-log π(a | x) for each number of a block, on average: (...,), of blocks (..., A)."""
        log_std = self.log_std.clamp(*LOG_STD)
        error = (block - self(x).float()) / log_std.exp()
        return (error.square() / 2 + log_std + math.log(2 * math.pi) / 2).mean(-1)


class Values(nn.Module):
    """Some independent values of the same thing, (..., inputs) -> (count, ...)."""

    def __init__(self, inputs: int, width: int, depth: int, count: int = 1) -> None:
        super().__init__()
        self.heads = nn.ModuleList(mlp(inputs, width, depth, 1) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([head(x).squeeze(-1) for head in self.heads])

    def least(self, x: torch.Tensor) -> torch.Tensor:
        """The most careful of them, (...,)."""
        return self(x).amin(0)


class SteeredMLP(nn.Module):
    """An MLP whose layers a second input steers through AdaLN-zero: (..., X) and (..., S) -> (..., outputs).

    Shift, scale and gate are zero at first: every layer begins as the identity.
    """

    def __init__(self, inputs: int, steering: int, width: int, depth: int, outputs: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs, width)
        self.steering = nn.ModuleList(nn.Linear(steering, 3 * width) for _ in range(depth))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.dropout = nn.Dropout(dropout)
        self.leave = nn.Sequential(nn.LayerNorm(width), nn.GELU(), nn.Linear(width, outputs))
        for linear in self.steering:
            nn.init.zeros_(cast(nn.Linear, linear).weight)
            nn.init.zeros_(cast(nn.Linear, linear).bias)

    def forward(self, x: torch.Tensor, steer: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for steering, layer in zip(self.steering, self.layers, strict=True):
            shift, scale, gate = steering(steer).chunk(3, dim=-1)
            x = x + gate * self.dropout(F.gelu(layer(self.norm(x) * (1 + scale) + shift)))
        return self.leave(x)


def waves(count: torch.Tensor, size: int, longest: float = 1000.0) -> torch.Tensor:
    """Numbers (...,) of 1 and more as sines and cosines, (..., size), of wavelengths from 4 to about ``longest``."""
    shares = torch.arange(size // 2, device=count.device) / (size // 2)
    angles = count.float()[..., None] * (2 * math.pi / (4 * (longest / 4) ** shares))
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


# -- learning values offline ---------------------------------------------------------------------------------------


def expectile_loss(difference: torch.Tensor, expectile: float) -> torch.Tensor:
    """|expectile - 1(u < 0)| u^2: its mean is least at that expectile of what is regressed to."""
    return torch.where(difference < 0, 1 - expectile, expectile) * difference.square()


def advantage_weight(advantage: torch.Tensor, inverse_temperature: float) -> torch.Tensor:
    """exp(β A), at most 100, without a gradient."""
    return (inverse_temperature * advantage.detach()).exp().clamp(max=LARGEST_WEIGHT)


@torch.no_grad()
def follow(targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor], rate: float) -> None:
    """Move targets towards their sources, in place, by a share ``rate`` of what is between them."""
    torch._foreach_lerp_(list(targets), list(sources), rate)
