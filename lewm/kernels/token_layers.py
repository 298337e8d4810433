"""The layers of a ``TokenPredictor`` for planning on a GPU: its own numbers, to bfloat16, with less traffic of memory.

Tokens are narrow (122 numbers) beside what their layers compute (3,072 and 2,048), so a layer's time is that of moving
them. One kernel adds what a layer found to the tokens, normalises these, and rounds them for the next product. Rows are
padded with zeros to the sizes that fast products want. Weights are a frozen copy.

Shapes as in ``model/token_predictor.py``; P is W with the padding, R rows: M * T * N tokens.
"""

# Kernels get their types when Triton compiles them.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

from lewm.kernels import mlp
from lewm.kernels.common import HAS_TRITON, is_hopper, jit

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # as on most machines without a GPU; ``worthwhile`` then answers False
    pass

GRAIN = 8  # rows of bfloat16 are to begin on multiples of 16 bytes
ROWS = 8  # of a program that normalises
# (qkv, seen, tokens of a frame, frames to read) -> answers (M, read * N, h * w), keys and values.
Attend = Callable[[torch.Tensor, "torch.Tensor | None", int, int], tuple[torch.Tensor, torch.Tensor]]


@jit
def add_norm_kernel(
    x, found, weight, bias, out, rows, eps,
    WIDTH: constexpr, PADDED: constexpr, HAS_FOUND: constexpr, ROWS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """x, found, out: (rows, PADDED).  weight, bias: (WIDTH,).  x += found, and out is x normalised."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < PADDED)
    at = row * PADDED + column
    values = tl.load(x + at, mask=inside, other=0.0)
    if HAS_FOUND:
        values += tl.load(found + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + at, values, mask=inside)
    real = column < WIDTH
    centred = tl.where(real, values - tl.sum(values, 1)[:, None] / WIDTH, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1)[:, None] / WIDTH + eps)
    gain, shift = tl.load(weight + column, mask=real, other=0.0), tl.load(bias + column, mask=real, other=0.0)
    tl.store(out + at, (centred * scale * gain + shift).to(out.dtype.element_ty), mask=inside)


def add_norm(x_RP: torch.Tensor, found_RP: torch.Tensor | None, norm: Any, dtype: torch.dtype) -> torch.Tensor:
    """Add to tokens, float32 and contiguous, in place; normalised they are the answer, (R, P) in ``dtype``.

    norm: an ``nn.LayerNorm`` of their first W numbers; behind these are zeros.
    """
    (rows, padded), width = x_RP.shape, norm.weight.numel()
    out_RP = torch.empty_like(x_RP, dtype=dtype)
    sizes = {"WIDTH": width, "PADDED": padded, "ROWS": ROWS, "BLOCK": triton.next_power_of_2(padded)}
    found, grid = x_RP if found_RP is None else found_RP, (triton.cdiv(rows, ROWS),)
    kept = {"HAS_FOUND": found_RP is not None}
    add_norm_kernel[grid](x_RP, found, norm.weight, norm.bias, out_RP, rows, norm.eps, **sizes, **kept)
    return out_RP


class TokenLayers:
    """All layers, from tokens that are placed to those that are read.

    Args:
        blocks: each with ``attention`` (norm, qkv, out) and ``mlp`` (norm, linear, GELU, dropout, linear, dropout).
        attend: what becomes of queries, keys and values.
        dtype: of products.
    """

    def __init__(self, blocks: Iterable[Any], attend: Attend, dtype: torch.dtype) -> None:
        blocks = list(blocks)
        width, hidden = blocks[0].mlp[1].in_features, blocks[0].mlp[1].out_features
        even = width + -width % mlp.SLICE
        self._fused = mlp.supports(even, hidden)
        self._odd = (even if self._fused else width + -width % GRAIN) - width
        self._layers = [_Layer(block, self._odd, dtype, self._fused) for block in blocks]
        self._attend, self._dtype = attend, dtype

    def __call__(self, x_MTNW: torch.Tensor, seen: list[torch.Tensor | None], keep: bool) -> torch.Tensor:
        """The last frame behind all layers, (M, 1, N, W).

        seen: keys and values of each layer so far; with ``keep``, those of the new frames join.
        """
        m, frames, n, width = x_MTNW.shape
        x_RP = F.pad(x_MTNW, (0, self._odd)).flatten(0, 2)
        found_RP: torch.Tensor | None = None  # by a layer, and not added to the tokens yet
        for number, layer in enumerate(self._layers):
            read = 1 if number == len(self._layers) - 1 else frames
            qkv = F.linear(add_norm(x_RP, found_RP, layer.attention_norm, self._dtype), layer.qkv)
            qkv = qkv.view(m, frames * n, 3, layer.heads, -1)
            answers, known = self._attend(qkv, seen[number], n, read)
            seen[number] = known if keep else None
            if read < frames:
                x_RP = x_RP.view(m, frames, n, -1)[:, -read:].flatten(0, 2)
            found_RP = F.linear(answers.flatten(0, 1), layer.out, layer.out_bias)
            found_RP = layer.mlp(add_norm(x_RP, found_RP, layer.mlp_norm, self._dtype))
        assert found_RP is not None
        return (x_RP + found_RP)[:, :width].view(m, 1, n, width)


class _Layer:
    """Weights of one layer, padded, and its MLP."""

    def __init__(self, block: Any, odd: int, dtype: torch.dtype, fused: bool) -> None:
        def padded(tensor: torch.Tensor, *sides: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return F.pad(tensor.detach(), sides).to(kind)

        attention, (_, first, _, _, second, _) = block.attention, block.mlp
        self.heads, self.attention_norm, self.mlp_norm = attention.heads, attention.norm, block.mlp[0]
        self.qkv = padded(attention.qkv.weight, 0, odd)
        self.out, self.out_bias = padded(attention.out.weight, 0, 0, 0, odd), padded(attention.out.bias, 0, odd)
        kind = torch.float32 if fused else dtype  # of biases
        self._into, self._into_bias = padded(first.weight, 0, odd), padded(first.bias, kind=kind)
        self._from, self._from_bias = padded(second.weight, 0, 0, 0, odd), padded(second.bias, 0, odd, kind=kind)
        self._fused = fused

    def mlp(self, x_RP: torch.Tensor) -> torch.Tensor:
        """Linear, GELU, linear."""
        if self._fused:
            return mlp.mlp_without_gradient(x_RP, self._into, self._into_bias, self._from, self._from_bias)
        return F.linear(F.gelu(F.linear(x_RP, self._into, self._into_bias)), self._from, self._from_bias)


def worthwhile(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the layers run on a device, and are made for such products."""
    return HAS_TRITON and is_hopper(device) and dtype == torch.bfloat16
