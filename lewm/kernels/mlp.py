"""The ViT's MLP in training as two Triton kernels: y = gelu(x @ w1.T + b1) @ w2.T + b2.

Over many rows an MLP is bound by memory: its hidden layer is four times as wide as its input, and as separate kernels
each pass over it reads and writes it anew. Here, as in flash attention with w1 for keys and w2 for values, a program
keeps a tile of rows and goes through the hidden units in chunks, from one product to the next without leaving the chip:

- ``forward_kernel`` stores, besides y, the hidden layer before its activation, h, for the backward pass alone;
- ``backward_kernel`` reads dy and h, and stores dx, what the gradients of the weights are products of (dh and
  a = gelu(h)), and partial sums for the gradients of the biases. Two library products and two small sums finish.

Nothing is added atomically, so results are the same from run to run.

Shapes: R rows, W width, H hidden units. Rows are held as tiles of 64 columns because Triton's tiles are powers of two;
tuples hold the tiles of one row.
"""

# Kernels get their types when Triton compiles them, and build tuples in unrolled loops.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lewm.kernels.common import column_sums, is_hopper, jit, product_precision

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # As on most machines without a GPU; ``supports`` then answers False.
    triton = None

__all__ = ["Tiling", "choose_tilings", "fused_mlp", "mlp_without_gradient", "supports", "worthwhile"]

SLICE = 64  # columns of a tile
WIDEST = 384  # of the rows whose tiles fit the registers
FEWEST_ROWS = 128 * 132  # that are worth the kernels: a tile for each processor of an H100 or H200


@dataclass(frozen=True)
class Tiling:
    """How a kernel divides its work.

    rows: of a program.  chunk: hidden units that it handles at a time.  warps, stages: as in Triton.  part: rows whose
    contributions to the gradient of b1 are added up in the kernel; with 16, no warp has to wait for another.
    """

    rows: int
    chunk: int
    warps: int
    stages: int
    part: int = 16


def choose_tilings(width: int) -> tuple[Tiling, Tiling]:
    """The tilings of the forward and the backward kernel for rows of a width.

    None spills registers, and all fit the 227 KiB of shared memory that a program has on a Hopper.
    """
    if width <= 192:
        return Tiling(128, 64, 8, 3), Tiling(128, 32, 8, 4)
    return Tiling(64, 32, 8, 3), Tiling(64, 32, 8, 3)


def supports(width: int, mlp_width: int, device: torch.device | None = None) -> bool:
    """Whether there are kernels for an MLP; with a device, also whether they run there (they are made for Hoppers)."""
    fits = width % SLICE == mlp_width % SLICE == 0 and 0 < width <= WIDEST and mlp_width > 0
    return triton is not None and fits and (device is None or is_hopper(device))


def worthwhile(x: Tensor, mlp_width: int) -> bool:
    """Whether ``fused_mlp`` can do an MLP of x (..., W), and is made for such a one.

    That is a training step's: in bfloat16; with gradients, without which storing h is wasted; and with rows enough for
    a tile for each of the GPU's processors, between which an MLP of few rows is divided better by the library.
    """
    made_for = (
        torch.is_grad_enabled() and product_precision(x) == torch.bfloat16 and x.numel() >= FEWEST_ROWS * x.shape[-1]
    )
    return made_for and supports(x.shape[-1], mlp_width, x.device)


_jit = partial(jit, varying=["rows"])


@_jit
def _load_rows(pointer, row, mask, WIDTH: constexpr):
    """Some rows of a matrix (R, WIDTH), as tiles (rows, 64)."""
    at = pointer + row[:, None].to(tl.int64) * WIDTH + tl.arange(0, 64)[None, :]
    tiles = ()
    for i in tl.static_range(WIDTH // 64):
        tiles = tiles + (tl.load(at + i * 64, mask=mask[:, None], other=0.0),)  # noqa: RUF005
    return tiles


@_jit
def _store_rows(pointer, row, mask, tiles, WIDTH: constexpr):
    """Store tiles (rows, 64) as rows of a matrix (R, WIDTH)."""
    at = pointer + row[:, None].to(tl.int64) * WIDTH + tl.arange(0, 64)[None, :]
    for i in tl.static_range(WIDTH // 64):
        tl.store(at + i * 64, tiles[i].to(pointer.dtype.element_ty), mask=mask[:, None])


@_jit
def _load_w1(w1, unit, WIDTH: constexpr):
    """The weights (H, WIDTH) into some hidden units, as tiles (units, 64)."""
    at = w1 + unit[:, None] * WIDTH + tl.arange(0, 64)[None, :]
    tiles = ()
    for i in tl.static_range(WIDTH // 64):
        tiles = tiles + (tl.load(at + i * 64),)  # noqa: RUF005
    return tiles


@_jit
def _load_w2(w2, unit, WIDTH: constexpr, HIDDEN: constexpr):
    """The weights (WIDTH, HIDDEN) out of some hidden units, as tiles (64, units)."""
    at = w2 + tl.arange(0, 64)[:, None] * HIDDEN + unit[None, :]
    tiles = ()
    for i in tl.static_range(WIDTH // 64):
        tiles = tiles + (tl.load(at + i * 64 * HIDDEN),)  # noqa: RUF005
    return tiles


@_jit
def _zeros(ROWS: constexpr, WIDTH: constexpr):
    """Tiles (rows, 64) to add to."""
    tiles = ()
    for _ in tl.static_range(WIDTH // 64):
        tiles = tiles + (tl.zeros([ROWS, 64], tl.float32),)  # noqa: RUF005
    return tiles


@_jit
def _exp2(x, near, FAST: constexpr):
    """2^x; the fast form, which only GPUs have, takes numbers below 2^-126 for zero.

    near: a tensor whose distribution over threads the result shall have. That the instruction seems to read it keeps
    the compiler from doing all the work twice, once for each distribution in which it wants to use the result.
    """
    if FAST:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f,f", [x, near], tl.float32, True, 1)
    else:
        return tl.exp2(x)


@_jit
def _tail(size, near, FAST: constexpr):
    """P(z > size) of a standard normal z, for size >= 0.

    Its logarithm is close to a polynomial; this one has the smallest largest relative error (3.2e-6, where the tail is
    above 1e-8; bfloat16 rounds a thousand times as coarsely), and falls without end beyond.
    """
    power = 6.090763197e-05 - 1.793757578e-06 * size
    power = -0.0009260316122 + power * size
    power = 0.008493644729 + power * size
    power = -0.0539372875 + power * size
    power = -0.4584814914 + power * size
    power = -1.151246261 + power * size
    power = -0.9999955013 + power * size
    return _exp2(power, near, FAST)


@_jit
def _gelu(h, FAST: constexpr):
    """h * P(z < h) for a standard normal z."""
    size = tl.abs(h)
    return tl.maximum(h, 0.0) - size * _tail(size, h, FAST)


@_jit
def _gelu_and_slope(h, near, FAST: constexpr):
    """GELU and its derivative, distributed over threads like ``near``."""
    size = tl.abs(h)
    tail = _tail(size, near, FAST)
    density = _exp2(-1.3257480647361595 - 0.7213475204444817 * size * size, near, FAST)
    below = tail - size * density  # the derivative at -|h|
    return tl.maximum(h, 0.0) - size * tail, tl.where(h < 0, below, 1 - below)


@_jit
def forward_kernel(
    x, w1, b1, w2, b2, h, y, rows,
    WIDTH: constexpr, HIDDEN: constexpr, ROWS: constexpr, CHUNK: constexpr, KEPT: constexpr,
):  # fmt: skip
    """x, y: (rows, WIDTH).  w1, b1, w2, b2: as in ``nn.Linear``.  h: (rows, HIDDEN).  ROWS: of a program.

    KEPT: whether h is stored, for a backward pass.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    dtype = x.dtype.element_ty
    x_tiles = _load_rows(x, row, mask, WIDTH)
    acc = _zeros(ROWS, WIDTH)
    for start in range(0, HIDDEN, CHUNK):
        unit = start + tl.arange(0, CHUNK)
        w1_tiles, w2_tiles = _load_w1(w1, unit, WIDTH), _load_w2(w2, unit, WIDTH, HIDDEN)
        hidden = tl.zeros([ROWS, CHUNK], tl.float32)
        for i in tl.static_range(WIDTH // 64):
            hidden = tl.dot(x_tiles[i], tl.trans(w1_tiles[i]), hidden, input_precision="ieee")
        hidden += tl.load(b1 + unit).to(tl.float32)[None, :]
        if KEPT:
            tl.store(h + row[:, None].to(tl.int64) * HIDDEN + unit[None, :], hidden.to(dtype), mask=mask[:, None])
        active = _gelu(hidden, dtype == tl.bfloat16).to(dtype)
        products = ()
        for i in tl.static_range(WIDTH // 64):
            product = tl.dot(active, tl.trans(w2_tiles[i]), acc[i], input_precision="ieee")
            products = products + (product,)  # noqa: RUF005
        acc = products
    out = ()
    for i in tl.static_range(WIDTH // 64):
        bias = tl.load(b2 + i * 64 + tl.arange(0, 64)).to(tl.float32)
        out = out + (acc[i] + bias[None, :],)  # noqa: RUF005
    _store_rows(y, row, mask, out, WIDTH)


@_jit
def backward_kernel(
    dy, h, w1, w2, dx, dh, a, db1, db2, rows,
    WIDTH: constexpr, HIDDEN: constexpr, ROWS: constexpr, CHUNK: constexpr, PART: constexpr,
):  # fmt: skip
    """dy, dx: (rows, WIDTH).  h, dh, a: (rows, HIDDEN).

    db1, db2: float32, what each part of PART rows, (parts, HIDDEN), or each program, (programs, WIDTH), contributes.
    """
    tile = tl.program_id(0)
    row = tile * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    dtype = dy.dtype.element_ty
    dy_tiles = _load_rows(dy, row, mask, WIDTH)  # beyond the last row zeros, and so is what follows from them
    for i in tl.static_range(WIDTH // 64):
        tl.store(db2 + tile * WIDTH + i * 64 + tl.arange(0, 64), tl.sum(dy_tiles[i].to(tl.float32), 0))
    part = tile * (ROWS // PART) + tl.arange(0, ROWS // PART)
    acc = _zeros(ROWS, WIDTH)
    for start in range(0, HIDDEN, CHUNK):
        unit = start + tl.arange(0, CHUNK)
        at = row[:, None].to(tl.int64) * HIDDEN + unit[None, :]
        hidden = tl.load(h + at, mask=mask[:, None], other=0.0).to(tl.float32)
        w1_tiles, w2_tiles = _load_w1(w1, unit, WIDTH), _load_w2(w2, unit, WIDTH, HIDDEN)
        slope = tl.zeros([ROWS, CHUNK], tl.float32)
        for i in tl.static_range(WIDTH // 64):
            slope = tl.dot(dy_tiles[i], w2_tiles[i], slope, input_precision="ieee")
        active, gelu_slope = _gelu_and_slope(hidden, slope, dtype == tl.bfloat16)
        slope *= gelu_slope
        tl.store(a + at, active.to(dtype), mask=mask[:, None])
        sums = tl.sum(tl.reshape(slope, (ROWS // PART, PART, CHUNK)), 1)
        tl.store(db1 + part[:, None] * HIDDEN + unit[None, :], sums)
        slope = slope.to(dtype)
        tl.store(dh + at, slope, mask=mask[:, None])
        products = ()
        for i in tl.static_range(WIDTH // 64):
            products = products + (tl.dot(slope, w1_tiles[i], acc[i], input_precision="ieee"),)  # noqa: RUF005
        acc = products
    _store_rows(dx, row, mask, acc, WIDTH)


def _arguments(width: int, hidden: int, tiling: Tiling) -> dict[str, int]:
    """The compile-time arguments that both kernels have."""
    sizes = {"WIDTH": width, "HIDDEN": hidden, "ROWS": tiling.rows, "CHUNK": math.gcd(tiling.chunk, hidden)}
    return sizes | {"num_warps": tiling.warps, "num_stages": tiling.stages}


@torch.library.custom_op("lewm::mlp_forward", mutates_args=())
def _mlp_forward(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> tuple[Tensor, Tensor]:
    """x (R, W) -> y (R, W) and h (R, H)."""
    h = x.new_empty(len(x), len(w1))
    return _forward(x, w1, b1, w2, b2, h), h


def _forward(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, h: Tensor | None) -> Tensor:
    """x (R, W) -> y (R, W). h: takes the hidden layer, (R, H), None: nobody wants it."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    x, w1, b1, w2, b2 = (t.contiguous() for t in (x, w1, b1, w2, b2))
    (rows, width), (tiling, _) = x.shape, choose_tilings(x.shape[1])
    arguments = _arguments(width, len(w1), tiling) | {"KEPT": h is not None}
    forward_kernel[(triton.cdiv(rows, tiling.rows),)](x, w1, b1, w2, b2, y if h is None else h, y, rows, **arguments)
    return y


def mlp_without_gradient(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """``fused_mlp`` of x (R, W) that no gradient is asked of: weights are in the type of x, biases in float32."""
    return _forward(x, w1, b1, w2, b2, None)


@_mlp_forward.register_fake
def _(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return x.new_empty(x.shape), x.new_empty(len(x), len(w1))


@torch.library.custom_op("lewm::mlp_backward", mutates_args=())
def _mlp_backward(dy: Tensor, h: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dy (R, W), h (R, H) -> dx (R, W), dh and a (R, H), and the gradients of b1 and b2, in float32."""
    (rows, width), hidden = dy.shape, len(w1)
    _, tiling = choose_tilings(width)
    tiles = triton.cdiv(rows, tiling.rows)
    dx, dh, a = dy.new_empty(rows, width), h.new_empty(h.shape), h.new_empty(h.shape)
    parts = tiles * (tiling.rows // tiling.part)
    db1, db2 = (dy.new_empty(shape, dtype=torch.float32) for shape in ((parts, hidden), (tiles, width)))
    dy, h, w1, w2 = (t.contiguous() for t in (dy, h, w1, w2))
    arguments = _arguments(width, hidden, tiling) | {"PART": tiling.part}
    backward_kernel[(tiles,)](dy, h, w1, w2, dx, dh, a, db1, db2, rows, **arguments)
    return dx, dh, a, column_sums(db1), column_sums(db2)


@_mlp_backward.register_fake
def _(dy: Tensor, h: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # noqa: ARG001
    db1, db2 = (dy.new_empty(n, dtype=torch.float32) for n in (h.shape[1], dy.shape[1]))
    return dy.new_empty(dy.shape), h.new_empty(h.shape), h.new_empty(h.shape), db1, db2


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w1, _, w2, _ = inputs
    ctx.save_for_backward(x, w1, w2, output[1])
    ctx.set_materialize_grads(False)  # h has no gradient, and zeros in its place would be large


def _differentiate(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor, ...]:
    """The gradients of ``_mlp_forward``'s inputs; those of the weights as the library's products."""
    x, w1, w2, h = ctx.saved_tensors
    dx, dh, a, db1, db2 = _mlp_backward(dy, h, w1, w2)
    return dx, dh.t() @ x, db1, dy.t() @ a, db2


_mlp_forward.register_autograd(_differentiate, setup_context=_save_for_backward)


def fused_mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """gelu(x @ w1.T + b1) @ w2.T + b2 for x (..., W), w1 (H, W), b1 (H,), w2 (W, H), b2 (W,), if ``supports`` says so.

    Computed in autocast's precision, or else in that of x. Gradients have the precision of what they belong to.
    """
    dtype = product_precision(x)
    rows = x.to(dtype).reshape(-1, x.shape[-1])
    y, _ = _mlp_forward(rows, w1.to(dtype), b1.float(), w2.to(dtype), b2.float())
    return y.view(x.shape)
