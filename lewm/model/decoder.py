"""The paper's light decoder: what an embedding shows, as a frame (appendix "Decoder (Visualization Only)").

    token  = GELU(LayerNorm(Linear(z)))                          the only key and value
    q      = LayerNorm(q + attention(q, token)),  q = LayerNorm(q + MLP(q))          three times, from learned queries
    patch  = background + Linear(LayerNorm(q))                   one query for each patch

With a single key, attention's softmax is 1: every query is given the same vector, a linear map of the token. That map
is all that is computed here. It is also why such a decoder starts slowly, so three things depart from the authors'
snippet: it draws what differs from a background, with which it begins; the queries begin as positions, not near 0; and
what differs from the background counts more in the loss, or the decoder may stay at the background.

Shapes: N frames, D embedding, P patches, W width of the decoder.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from lewm.types import Array

LAYERS, MLP_RATIO = 3, 4
LARGEST_PATCH, FEWEST_PATCHES = 16, 7  # pixels, and patches along a side: 14 x 14 of 16 pixels at 224, as published
FOREGROUND_LEVELS = 16  # grey levels by which a pixel differs from the background, and counts more
FOREGROUND_WEIGHT = 6.0
FRAMES_AT_ONCE = 64


class Decoder(nn.Module):
    """Draws frames (R, R, 3) of embeddings (D,).

    background: uint8 (R, R, 3), what frames look like without what moves; None: grey.  width: W; None: the published
    256, or 128 for frames of less than half the published size.
    """

    background: torch.Tensor

    def __init__(
        self, embed_dim: int, image_size: int, background: Array | None = None, width: int | None = None
    ) -> None:
        super().__init__()
        self.image_size, self.patch = image_size, patch_size(image_size)
        side = image_size // self.patch
        self.width = width or (256 if image_size >= 112 else 128)
        grey = torch.full((image_size, image_size, 3), 128, dtype=torch.uint8)
        self.register_buffer("background", grey if background is None else torch.from_numpy(background.copy()))
        self.token = nn.Sequential(nn.Linear(embed_dim, self.width), nn.LayerNorm(self.width), nn.GELU())
        self.queries = nn.Parameter(positions(side, self.width))
        self.layers = nn.ModuleList(_Layer(self.width) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(self.width)
        self.pixels = nn.Linear(self.width, self.patch * self.patch * 3)
        nn.init.zeros_(self.pixels.weight)
        nn.init.zeros_(self.pixels.bias)

    def forward(self, z_ND: torch.Tensor) -> torch.Tensor:
        """What differs from the background, by patch: float32 (N, P, numbers of a patch), 1 is white."""
        token_N1W = self.token(z_ND).unsqueeze(1)
        q_NPW = self.queries.expand(len(z_ND), -1, -1)
        for layer in self.layers:
            q_NPW = layer(q_NPW, token_N1W)
        difference: torch.Tensor = self.pixels(self.norm(q_NPW)).float()
        return difference

    @torch.no_grad()
    def frames(self, z: torch.Tensor) -> torch.Tensor:
        """Frames uint8 (..., R, R, 3) of embeddings (..., D), on their device."""
        drawn = [self._drawn(part) for part in z.flatten(0, -2).split(FRAMES_AT_ONCE)]
        return torch.cat(drawn).view(*z.shape[:-1], self.image_size, self.image_size, 3)

    def _drawn(self, z_ND: torch.Tensor) -> torch.Tensor:
        patches = self(z_ND) + cut(self.background.unsqueeze(0), self.patch).float() / 255
        return join((255 * patches).round().clamp(0, 255).to(torch.uint8), self.patch)

    def loss(self, z_ND: torch.Tensor, frames: torch.Tensor, weight: float = FOREGROUND_WEIGHT) -> torch.Tensor:
        """Mean square error of drawn frames against uint8 (N, R, R, 3).

        A pixel that differs from the background in any colour has ``weight`` times the weight of others.
        """
        wanted_NPC = cut(frames, self.patch).float() - cut(self.background.unsqueeze(0), self.patch)
        moves_NPp = wanted_NPC.abs().unflatten(-1, (-1, 3)).amax(-1, keepdim=True) > FOREGROUND_LEVELS
        weights_NPp = 1 + (weight - 1) * moves_NPp.float()
        errors = (self(z_ND) - wanted_NPC / 255).square().unflatten(-1, (-1, 3))
        return (errors * weights_NPp).sum() / (3 * weights_NPp.sum())


class _Layer(nn.Module):
    """Cross-attention to a single key, and an MLP, each followed by LayerNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attended = nn.Linear(width, width)  # what attention makes of its only value
        self.norm = nn.LayerNorm(width)
        hidden = MLP_RATIO * width
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.mlp_norm = nn.LayerNorm(width)

    def forward(self, q_NPW: torch.Tensor, token_N1W: torch.Tensor) -> torch.Tensor:
        q_NPW = self.norm(q_NPW + self.attended(token_N1W))
        out: torch.Tensor = self.mlp_norm(q_NPW + self.mlp(q_NPW))
        return out


def patch_size(image_size: int) -> int:
    """Side of a patch in pixels: as published at 224, smaller where frames are, so that there are enough of them."""
    fits = [p for p in range(1, LARGEST_PATCH + 1) if image_size % p == 0 and image_size // p >= FEWEST_PATCHES]
    return max(fits, default=1)


def positions(side: int, width: int) -> torch.Tensor:
    """Sines and cosines of the places of side x side patches, (P, W), with a spread of 1: where queries begin."""
    frequencies = math.pi * torch.exp2(torch.linspace(-1, math.log2(side), -(-width // 4)))
    place = torch.linspace(-1, 1, side) if side > 1 else torch.zeros(1)
    waves = torch.cat([(place[:, None] * frequencies).sin(), (place[:, None] * frequencies).cos()], dim=1)
    rows, columns = waves.repeat_interleave(side, 0), waves.repeat(side, 1)
    return math.sqrt(2) * torch.cat([rows, columns], dim=1)[:, :width].contiguous()


def cut(frames: torch.Tensor, patch: int) -> torch.Tensor:
    """Frames (N, R, R, 3) -> patches (N, P, patch * patch * 3)."""
    n, side = len(frames), frames.shape[1] // patch
    return frames.view(n, side, patch, side, patch, 3).transpose(2, 3).reshape(n, side * side, patch * patch * 3)


def join(patches: torch.Tensor, patch: int) -> torch.Tensor:
    """The reverse of ``cut``."""
    n, side = len(patches), math.isqrt(patches.shape[1])
    return patches.view(n, side, side, patch, patch, 3).transpose(2, 3).reshape(n, side * patch, side * patch, 3)
