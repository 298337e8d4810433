"""The vision transformer that turns a frame into one vector (paper, section "Model Architecture").

A plain pre-norm ViT whose output is the final [CLS] token. It computes the same function as Hugging Face's
``ViTModel`` (exact GELU, LayerNorm epsilon 1e-12), which the official checkpoints were trained with.

Shapes: N images, P tokens ([CLS] and the patches), W width; frames are (N, R, R, 3) uint8. Perhaps only
some patches of a frame become tokens, those least like the background: K of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lewm.config import EncoderConfig
from lewm.kernels import attention as attention_kernels
from lewm.kernels import mlp as mlp_kernels
from lewm.model.encoder import IMAGENET_MEAN, IMAGENET_STD, Encoder
from lewm.model.view import view
from lewm.types import Array

LAYER_NORM_EPS = 1e-12
INIT_STD = 0.02
CHANGED_LEVELS = 1.0  # grey levels by which a patch differs on average before it is worth a remark


class PatchEmbedding(nn.Module):
    """uint8 frames to patch tokens, with the ImageNet normalisation folded into the projection."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.project = nn.Linear(config.patch_size**2 * 3, config.width)
        # (x/255 - mean)/std = (x - 128) * scale + shift. Integers from -128 to 127 are exact even in bfloat16, so
        # pixels are never rounded; and they are centred, so that rounded weights cost no more than they would have.
        mean, std = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
        self.register_buffer("scale", 1 / (255 * std), persistent=False)
        self.register_buffer("shift", (128 / 255 - mean) / std, persistent=False)

    def cut(self, pixels: torch.Tensor) -> torch.Tensor:
        """(N, R, R, 3) uint8 -> the pixels of each patch, (N, patches, 3 * patch size squared) uint8."""
        n, size = pixels.shape[0], self.patch_size
        side = pixels.shape[1] // size
        return pixels.view(n, side, size, side, size, 3).transpose(2, 3).reshape(n, side * side, size * size * 3)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Pixels of patches, as ``cut`` returns them -> (N, patches, W)."""
        weight = self.project.weight.unflatten(1, (-1, 3))
        bias = self.project.bias + (weight * self.shift).sum((1, 2))
        x, weight = patches.to(self.scale.dtype) - 128, (weight * self.scale).flatten(1)
        if patches.is_cuda and (odd := -weight.shape[1] % 8):
            # The libraries' fast products want rows of bfloat16 to begin on multiples of 16 bytes.
            x, weight = F.pad(x, (0, odd)), F.pad(weight, (0, odd))
        return F.linear(x, weight, bias)


class SelfAttention(nn.Module):
    """Multi-head attention over all tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.fused = True  # where the kernels can do it
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_NPW: torch.Tensor) -> torch.Tensor:
        n, p, w = x_NPW.shape
        if self.fused and attention_kernels.supports(x_NPW, self.heads):
            qkv = F.linear(x_NPW, self.qkv.weight, self.qkv.bias.detach())
            return self.out(attention_kernels.attention(qkv, self.qkv.bias, self.heads))
        q, k, v = self.qkv(x_NPW).view(n, p, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.out(x.transpose(1, 2).reshape(n, p, w))

    def first_token(self, x_NPW: torch.Tensor) -> torch.Tensor:
        """What ``forward`` gives for the first token, (N, W): one query, but every key and value."""
        n, p, w = x_NPW.shape
        weight, bias, head = self.qkv.weight, self.qkv.bias, w // self.heads
        q = F.linear(x_NPW[:, 0], weight[:w], bias[:w]).view(n, self.heads, 1, head)
        k, v = F.linear(x_NPW, weight[w:], bias[w:]).view(n, p, 2, self.heads, head).permute(2, 0, 3, 1, 4)
        # Written out: fused kernels are made for many queries.
        weights = ((q * head**-0.5) @ k.transpose(-1, -2)).softmax(dim=-1)
        return self.out((weights.to(v.dtype) @ v).view(n, w))


class MLP(nn.Sequential):
    """Linear, GELU, linear."""

    fused = True  # where the kernels can do it

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    @property
    def hidden(self) -> nn.Linear:
        return cast(nn.Linear, self[0])

    @property
    def out(self) -> nn.Linear:
        return cast(nn.Linear, self[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., W) -> (..., W)."""
        hidden, out = self.hidden, self.out
        if self.fused and mlp_kernels.worthwhile(x, hidden.out_features):
            return mlp_kernels.fused_mlp(x, hidden.weight, hidden.bias, out.weight, out.bias)
        return super().forward(x)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)
        self.attention = SelfAttention(config.width, config.heads)
        self.mlp_norm = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)
        self.mlp = MLP(config.width, config.mlp_width)

    def forward(self, x_NPW: torch.Tensor, change_NPW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, and what is still to be added to them, before the block -> the same after it.

        Blocks are compiled one by one; a sum that is left to the next one is computed together with its norm.
        """
        x_NPW = x_NPW + change_NPW
        x_NPW = x_NPW + self.attention(self.attention_norm(x_NPW))
        return x_NPW, self.mlp(self.mlp_norm(x_NPW))

    def first_token(self, x_NPW: torch.Tensor, change_NPW: torch.Tensor) -> torch.Tensor:
        """The first token, (N, W), of the sum of what ``forward`` gives, for a fraction of the work."""
        x_NPW = x_NPW + change_NPW
        x_NW = x_NPW[:, 0] + self.attention.first_token(self.attention_norm(x_NPW))
        return x_NW + self.mlp(self.mlp_norm(x_NW))


class ViT(Encoder):
    """Frames to [CLS] embeddings.

    With ``config.kept_patches`` it looks at the patches that differ most from ``background``, (R, R, 3) uint8: a frame
    without what moves, to be set before training. Where a world changes in few places, the others say nothing. Patches
    within ``config.background_noise`` of it are the background: which of them fill the places that what has changed
    leaves over must not depend on how a driver draws a line.
    """

    background: torch.Tensor

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.image_size, self.patch_size, self.kept_patches = config.image_size, config.patch_size, config.kept_patches
        self.background_noise = config.background_noise
        self.patches = PatchEmbedding(config)
        if config.kept_patches:
            size = (config.image_size, config.image_size, 3)
            self.register_buffer("background", torch.zeros(size, dtype=torch.uint8))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.positions = nn.Parameter(torch.zeros(1, 1 + config.patches, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)
        self._initialise()

    def _initialise(self) -> None:
        for parameter in (self.cls_token, self.positions):
            nn.init.trunc_normal_(parameter, std=INIT_STD)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=INIT_STD)
                nn.init.zeros_(module.bias)

    def use_kernels(self, enabled: bool) -> None:
        """Whether attention and MLPs take kernels of our own, where these can do it; at first both do."""
        for module in self.modules():
            if isinstance(module, SelfAttention | MLP):
                module.fused = enabled

    def compiled(self, compile: Callable[[Any], Any]) -> Self:
        """Blocks of a kind share their code, so that twelve of them take the compiler no longer than one."""
        fast = view(self)
        fast.embed = compile(self.embed)  # type: ignore[method-assign]
        fast.summary = compile(self.summary)  # type: ignore[method-assign]
        fast.blocks = nn.ModuleList(compile(block) for block in self.blocks)
        return fast

    def heavy_layers(self) -> Iterable[nn.Module]:
        return (module for module in self.blocks.modules() if isinstance(module, nn.Linear))

    def remarks(self, frames: Array) -> list[str]:
        """A sentence if frames, uint8 (N, R, R, 3), show more than is looked at."""
        if not self.kept_patches:
            return []
        # What differs by less than the noise is background to the encoder as well.
        threshold = max(CHANGED_LEVELS, self.background_noise)
        counts = changed_patches(frames, self.background.cpu().numpy(), self.patch_size, threshold)
        crowded = int((counts > self.kept_patches).sum())
        if not crowded:
            return []
        return [
            f"{crowded} of {len(frames)} frames differ from the background in more patches (up to {counts.max()}) than "
            f"the {self.kept_patches} that are looked at. Consider a larger method.encoder.kept-patches."
        ]

    def embed(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, R, R, 3) uint8 -> [CLS] and patch tokens (N, P, W), and the positions to add to them, (1 or N, P, W)."""
        patches, positions = self.patches.cut(pixels), cast(torch.Tensor, self.positions)
        if self.kept_patches:
            kept_NK = self.least_like_background(patches)
            patches = patches.gather(1, kept_NK.unsqueeze(-1).expand(-1, -1, patches.shape[-1]))
            positions = self._positions_of(kept_NK, positions)
        x = self.patches(patches)
        # In the precision of the patches: under autocast the sum would be float32, and every layer would carry it on.
        cls = self.cls_token.to(x.dtype)
        x = torch.cat([cls.expand(len(x), -1, -1), x], dim=1)
        return x, positions.to(x.dtype)

    def least_like_background(self, patches: torch.Tensor) -> torch.Tensor:
        """The patches to keep of (N, patches, V) uint8, int64 (N, K); of equally different ones the first."""
        background = self.patches.cut(self.background.unsqueeze(0)).to(torch.int16)
        difference = (patches.to(torch.int16) - background).abs().sum(-1, dtype=torch.int32)
        count, numbers = patches.shape[1:]
        difference = difference.masked_fill(difference <= self.background_noise * numbers, 0)
        # Whole numbers without ties: what is kept of a frame depends neither on its batch nor on the device.
        rank = difference * count - torch.arange(count, dtype=torch.int32, device=patches.device)
        return rank.topk(self.kept_patches).indices

    def _positions_of(self, kept_NK: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Positions of [CLS] and of the kept patches, (N, 1 + K, W), of all of them, (1, 1 + patches, W)."""
        # A product with ones and zeros, because its gradient is a product too: quick, and summed in a fixed order.
        everywhere = torch.arange(positions.shape[1] - 1, device=kept_NK.device)
        chosen_NKP = (kept_NK.unsqueeze(-1) == everywhere).to(positions.dtype)
        first = positions[:, :1].expand(len(kept_NK), -1, -1)
        kept = chosen_NKP @ positions[0, 1:]
        return torch.cat([first.to(kept.dtype), kept], dim=1)

    def summary(self, x_NPW: torch.Tensor, change_NPW: torch.Tensor) -> torch.Tensor:
        """The last block and the norm, (N, P, W) and what is to be added -> (N, W).

        Only the [CLS] token is read, so no other is computed.
        """
        *_, last_block = self.blocks
        return self.norm(cast(Block, last_block).first_token(x_NPW, change_NPW))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """(N, R, R, 3) uint8 -> (N, W)."""
        x, change = self.embed(pixels)
        *earlier_blocks, _ = self.blocks
        for block in earlier_blocks:
            x, change = block(x, change)
        return self.summary(x, change)


def changed_patches(frames: Array, empty: Array, patch_size: int, threshold: float = CHANGED_LEVELS) -> Array:
    """How many patches of each frame are not background: uint8 (N, R, R, 3), (R, R, 3) -> int (N,).

    A patch counts if its pixels differ from the background's by more than ``threshold`` grey levels on average.
    """
    side = empty.shape[0] // patch_size
    difference = np.abs(frames - empty.astype(np.int16))
    patches = difference.reshape(len(frames), side, patch_size, side, patch_size, 3).mean((2, 4, 5))
    return (patches > threshold).sum((1, 2))
