"""The predictor: a causal transformer over embeddings, steered by actions through AdaLN-zero.

Given z_1..z_T and the action blocks taken at each of them, token t predicts z_{t+1}. The actions enter every
block as a shift, a scale and a gate (adaptive layer normalisation) whose weights start at zero, so that each
block is the identity at first and the influence of the actions grows during training.

Departure from a textbook AdaLN block, taken over from the released code so that its checkpoints load:
attention and MLP each begin with a second, affine LayerNorm after the modulation.

Checkpoints number the layers of MLPs, so those are sequences; code calls the layers by their names.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from lewm.config import JEPAConfig, PredictorConfig


class ActionMLP(nn.Sequential):
    """Reduced action blocks (..., bottleneck) -> (..., D)."""

    def __init__(self, bottleneck: int, width: int) -> None:
        super().__init__(nn.Linear(bottleneck, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    @property
    def hidden(self) -> nn.Linear:
        return cast(nn.Linear, self[0])

    @property
    def out(self) -> nn.Linear:
        return cast(nn.Linear, self[2])


class ActionEmbedder(nn.Module):
    """z-scored action blocks (..., A) -> (..., D)."""

    def __init__(self, block_dim: int, bottleneck: int, width: int) -> None:
        super().__init__()
        self.reduce = nn.Linear(block_dim, bottleneck)
        self.mlp = ActionMLP(bottleneck, width)

    def forward(self, actions: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.reduce(actions))


class CausalAttention(nn.Module):
    """Attention in which token t sees tokens 1..t.

    Written out instead of calling a fused kernel: with at most a handful of tokens, the products are so small
    that a kernel's set-up costs more than its arithmetic.
    """

    def __init__(self, width: int, config: PredictorConfig) -> None:
        super().__init__()
        self.heads, self.head_width = config.heads, config.head_width
        inner = config.heads * config.head_width
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * inner, bias=False)
        self.out = nn.Linear(inner, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        b, t, _ = x_BTD.shape
        qkv = self.qkv(self.norm(x_BTD)).view(b, t, 3, self.heads, self.head_width)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = (q * self.head_width**-0.5) @ k.transpose(-1, -2)
        future = torch.ones(t, t, dtype=torch.bool, device=x_BTD.device).triu(1)
        weights = self.dropout(scores.masked_fill(future, float("-inf")).softmax(dim=-1))
        x = (weights @ v).transpose(1, 2).reshape(b, t, self.heads * self.head_width)
        return self.dropout(self.out(x))


class Modulation(nn.Sequential):
    """Embedded actions (..., D) -> two shifts, scales and gates (..., 6*D), all of them zero at first."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.SiLU(), nn.Linear(width, 6 * width))
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    @property
    def linear(self) -> nn.Linear:
        return cast(nn.Linear, self[1])


class MLP(nn.Sequential):
    """Tokens (..., D) -> (..., D): norm, linear, GELU, linear."""

    def __init__(self, width: int, config: PredictorConfig) -> None:
        super().__init__(
            nn.LayerNorm(width),
            nn.Linear(width, config.mlp_width),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.mlp_width, width),
            nn.Dropout(config.dropout),
        )

    @property
    def norm(self) -> nn.LayerNorm:
        return cast(nn.LayerNorm, self[0])

    @property
    def hidden(self) -> nn.Linear:
        return cast(nn.Linear, self[1])

    @property
    def out(self) -> nn.Linear:
        return cast(nn.Linear, self[4])


class AdaLNBlock(nn.Module):
    """Transformer block whose two branches are shifted, scaled and gated by the action embedding."""

    def __init__(self, width: int, config: PredictorConfig) -> None:
        super().__init__()
        self.modulation = Modulation(width)
        self.attention_norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.attention = CausalAttention(width, config)
        self.mlp_norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.mlp = MLP(width, config)

    def forward(self, x_BTD: torch.Tensor, action_BTD: torch.Tensor) -> torch.Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(action_BTD).chunk(6, dim=-1)
        x_BTD = x_BTD + gate_a * self.attention(self.attention_norm(x_BTD) * (1 + scale_a) + shift_a)
        return x_BTD + gate_m * self.mlp(self.mlp_norm(x_BTD) * (1 + scale_m) + shift_m)


class Predictor(nn.Module):
    """Embeddings and embedded actions (B, T, D), T <= history -> raw predictions (B, T, D)."""

    def __init__(self, config: JEPAConfig) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, config.history, config.embed_dim))
        self.blocks = nn.ModuleList(
            AdaLNBlock(config.embed_dim, config.predictor) for _ in range(config.predictor.depth)
        )
        self.norm = nn.LayerNorm(config.embed_dim)

    def forward(self, z_BTD: torch.Tensor, action_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = z_BTD + self.positions[:, : z_BTD.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD, action_BTD)
        return self.norm(x_BTD)
