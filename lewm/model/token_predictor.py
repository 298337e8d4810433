"""A predictor over all tokens of some frames: a transformer that is causal over frames (Zhou et al. 2024, DINO-WM).

A frame is N tokens of F features. An embedded action block joins each of them, so that a token is F + E numbers wide.
Tokens attend to all tokens of their own frame and of earlier ones; what stands at a frame predicts the next.

Attention is one call for each frame, over the tokens up to its end: nothing is masked, and nothing is computed in vain.

Shapes: M windows, T frames, N tokens of a frame, F features, E size of an embedded action, W = F + E, h heads, w wide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import nn

from lewm.config import PredictorConfig
from lewm.model.flops import product
from lewm.model.predictor import MLP
from lewm.model.view import view


class TokenAttention(nn.Module):
    """Attention in which tokens see those of their own frame and of earlier ones."""

    def __init__(self, width: int, config: PredictorConfig) -> None:
        super().__init__()
        self.heads = config.heads
        inner = config.heads * config.head_width
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * inner, bias=False)
        self.out = nn.Linear(inner, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_MTNW: torch.Tensor, seen: torch.Tensor | None, read: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention makes of the last ``read`` of new frames, (M, read, N, W), and all keys and values.

        seen: keys and values of the frames before them, (M, tokens, 2, h, w), None: there are none.
        """
        m, frames, n, _ = x_MTNW.shape
        qkv = self.qkv(self.norm(x_MTNW)).view(m, frames * n, 3, self.heads, -1)
        x, known = attend(qkv, seen, n, read, self.dropout.p if self.dropout.training else 0.0)
        return self.dropout(self.out(x.unflatten(1, (read, n)))), known


def attend(
    qkv: torch.Tensor, seen: torch.Tensor | None, n: int, read: int, dropout: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the last ``read`` of some frames of ``n`` tokens see, (M, read * N, h * w), and all keys and values.

    qkv: queries, keys and values of the frames, (M, T * N, 3, h, w).  seen: as for ``TokenAttention``.
    """
    queries, known = qkv[:, -read * n :, 0].transpose(1, 2), qkv[:, :, 1:]
    if seen is not None:
        known = torch.cat([seen, known], dim=1)
    keys, values = known.transpose(1, 3).unbind(2)
    total = known.shape[1]
    ends = range(total - (read - 1) * n, total + 1, n)  # of what each frame sees
    answers = [
        F.scaled_dot_product_attention(query, keys[:, :, :end], values[:, :, :end], dropout_p=dropout)
        for query, end in zip(queries.split(n, dim=2), ends, strict=True)
    ]
    return torch.cat([answer.transpose(1, 2) for answer in answers], dim=1).flatten(-2), known


class TokenBlock(nn.Module):
    """Pre-norm transformer block over frames of tokens."""

    def __init__(self, width: int, config: PredictorConfig) -> None:
        super().__init__()
        self.attention = TokenAttention(width, config)
        self.mlp = MLP(width, config)

    def forward(self, x_MTNW: torch.Tensor) -> torch.Tensor:
        """All frames of windows, (M, T, N, W) -> the same."""
        return self.extend(x_MTNW, None, x_MTNW.shape[1])[0]

    def extend(self, x_MTNW: torch.Tensor, seen: torch.Tensor | None, read: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The last ``read`` of new frames behind the block, and keys and values: see ``TokenAttention``."""
        attended, known = self.attention(x_MTNW, seen, read)
        x_MTNW = x_MTNW[:, -read:] + attended
        return x_MTNW + self.mlp(x_MTNW), known


class TokenPredictor(nn.Module):
    """Tokens of T frames and the action blocks taken at them -> the tokens of the next frames.

    Args:
        frames: the most that it sees at once.
        tokens, features: N and F.
        block_dim: A, size of a z-scored action block.
        action_width: E, what a block becomes before it joins every token of its frame.
        config: the transformer's sizes.
    """

    def __init__(
        self, frames: int, tokens: int, features: int, block_dim: int, action_width: int, config: PredictorConfig
    ) -> None:
        super().__init__()
        width = features + action_width
        self.features, self.config = features, config
        self.action_embedder = nn.Linear(block_dim, action_width)
        self.positions = nn.Parameter(torch.randn(1, frames, tokens, width))
        self.blocks = nn.ModuleList(TokenBlock(width, config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width)

    @property
    def frames(self) -> int:
        """The most that it sees at once."""
        return self.positions.shape[1]

    def layers(self) -> list[TokenBlock]:
        """Its blocks, first to last."""
        return [cast(TokenBlock, block) for block in self.blocks]

    def compiled(self, compile: Callable[[Any], Any]) -> Self:
        """A view whose blocks are compiled."""
        fast = view(self)
        fast.blocks = nn.ModuleList(compile(block) for block in self.blocks)
        return fast

    def forward(self, z_MTNF: torch.Tensor, actions_MTA: torch.Tensor) -> torch.Tensor:
        """Predictions of the frame after each of T <= ``frames`` frames, (M, T, N, F)."""
        x_MTNW = self.place(z_MTNF, self.action_embedder(actions_MTA), 0)
        for block in self.blocks:
            x_MTNW = block(x_MTNW)
        return self.read(x_MTNW)

    def place(self, z_MTNF: torch.Tensor, action_MTE: torch.Tensor, slot: int) -> torch.Tensor:
        """Frames and embedded actions as tokens of a window from its place ``slot`` on, (M, T, N, W)."""
        frames, tokens = z_MTNF.shape[1:3]
        x_MTNW = torch.cat([z_MTNF, action_MTE.unsqueeze(2).expand(-1, -1, tokens, -1)], dim=-1)
        return x_MTNW + self.positions[:, slot : slot + frames]

    def read(self, x_MTNW: torch.Tensor) -> torch.Tensor:
        """What tokens behind the last block predict, (M, T, N, F): of the next action they say nothing that counts."""
        return self.norm(x_MTNW)[..., : self.features]

    def flops(self, frames: int) -> int:
        """Floating-point operations of matrix products in ``forward``, for one window of so many frames."""
        tokens, width = self.positions.shape[2:]
        inner = self.config.heads * self.config.head_width
        of_a_token = product(width, 4 * inner) + 2 * product(width, self.config.mlp_width)
        pairs = tokens**2 * frames * (frames + 1) // 2  # a token sees its own frame and those before
        of_a_layer = frames * tokens * of_a_token + 2 * pairs * product(1, inner)
        return self.config.depth * of_a_layer + frames * product(*self.action_embedder.weight.shape)
