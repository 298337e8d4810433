"""The vision transformer that turns a frame into one vector (paper, section "Model Architecture").

A plain pre-norm ViT whose output is the final [CLS] token. It computes the same function as Hugging Face's
``ViTModel`` (exact GELU, LayerNorm epsilon 1e-12), which the official checkpoints were trained with.

Shapes: N images, P tokens ([CLS] and the patches), W width; frames are (N, R, R, 3) uint8.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from lewm.config import EncoderConfig

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
LAYER_NORM_EPS = 1e-12
INIT_STD = 0.02


class PatchEmbedding(nn.Module):
    """uint8 frames to patch tokens, with the ImageNet normalisation inside."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.project = nn.Linear(config.patch_size**2 * 3, config.width)
        # x/255 -> (x - mean)/std, written as one multiply and one add.
        mean, std = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
        self.register_buffer("scale", 1 / (255 * std), persistent=False)
        self.register_buffer("shift", -mean / std, persistent=False)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """(N, R, R, 3) uint8 -> (N, patches, W)."""
        n, size = pixels.shape[0], self.patch_size
        side = pixels.shape[1] // size
        x = pixels.to(self.scale.dtype).mul_(self.scale).add_(self.shift)
        x = x.view(n, side, size, side, size, 3).transpose(2, 3).reshape(n, side * side, size * size * 3)
        return self.project(x)


class SelfAttention(nn.Module):
    """Multi-head attention over all tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_NPW: torch.Tensor) -> torch.Tensor:
        n, p, w = x_NPW.shape
        q, k, v = self.qkv(x_NPW).view(n, p, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.out(x.transpose(1, 2).reshape(n, p, w))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)
        self.attention = SelfAttention(config.width, config.heads)
        self.mlp_norm = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, config.mlp_width), nn.GELU(), nn.Linear(config.mlp_width, config.width)
        )

    def forward(self, x_NPW: torch.Tensor) -> torch.Tensor:
        x_NPW = x_NPW + self.attention(self.attention_norm(x_NPW))
        return x_NPW + self.mlp(self.mlp_norm(x_NPW))


class ViT(nn.Module):
    """Frames to [CLS] embeddings."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.image_size = config.image_size
        patches = (config.image_size // config.patch_size) ** 2
        self.patches = PatchEmbedding(config)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.positions = nn.Parameter(torch.zeros(1, 1 + patches, config.width))
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

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """(N, R, R, 3) uint8 -> (N, W)."""
        x = self.patches(pixels)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        # The norm acts on each token alone and only the first one is read.
        return self.norm(x[:, 0])
