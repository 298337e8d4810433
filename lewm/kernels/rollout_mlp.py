"""MLPs of the planning rollout as Triton kernels: the predictor's, the projector and the embedder of actions."""

# Kernels get their types when Triton compiles them.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from lewm.kernels.common import jit
from lewm.kernels.rollout_launch import WIDTH, Buffers, Launch, Spare, Strided
from lewm.kernels.rollout_tiles import (
    await_predecessor,
    clear,
    gelu,
    load_columns,
    load_rows,
    load_weight_rows,
    modulated_norm,
    narrow,
    narrow_numbers,
    pointers,
    standardise,
    store_residual,
    store_rows,
    widen,
)
from lewm.kernels.rollout_tiling import Tiling
from lewm.kernels.rollout_weights import KernelWeights, MLPWeights

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:
    triton = None

# Numbers that change from call to call, for whose values kernels must not be compiled anew.
_jit = partial(jit, varying=["rows", "tokens"])


@_jit
def transform_tokens(
    x, mod, weights, out, spare, rows, tokens, MOD_WIDTH: constexpr, CHUNKS: constexpr, CHUNK: constexpr,
    GROUPS: constexpr, FAST: constexpr, ROWS: constexpr, OVERLAP: constexpr,
):  # fmt: skip
    """MLP sub-layer of x (rows, 192), ``tokens`` rows for each candidate. Without ``mod``: a norm and an MLP, no more.

    mod: of each candidate's first token, the next ones' MOD_WIDTH apart.  out: of each row.  CHUNKS: of CHUNK hidden
    units, of a program; GROUPS of programs share a tile of ROWS tokens.
    """
    HIDDEN: constexpr = CHUNKS * GROUPS * CHUNK
    group = tl.program_id(1)
    if CHUNKS == 1:
        units = group * CHUNK + tl.arange(0, CHUNK)
        into, back = load_columns(weights.hidden.weight, HIDDEN, units), load_weight_rows(weights.out.weight, units)
    await_predecessor(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (row < rows)[:, None]
    x_at = pointers(x, row, 192)
    if mod is not None:
        mod_at = pointers(mod.start, row // tokens, mod.stride) + (row % tokens * MOD_WIDTH)[:, None]
        normed = modulated_norm(load_rows(x_at, mask), mod_at, mask)
    else:
        normed = standardise(load_rows(x_at, mask), 1e-5)
    clear(spare)
    dtype: constexpr = weights.hidden.weight.dtype.element_ty
    normed = narrow_numbers(normed, dtype)
    y = load_rows(pointers(weights.out.bias, row, 0), mask & (group == 0))
    for i in range(CHUNKS):
        units = (group * CHUNKS + i) * CHUNK + tl.arange(0, CHUNK)
        if CHUNKS > 1:
            into = load_columns(weights.hidden.weight, HIDDEN, units)
        h = gelu(widen(normed, into) + tl.load(weights.hidden.bias + units)[None, :], FAST)
        if CHUNKS > 1:
            back = load_weight_rows(weights.out.weight, units)
        y = narrow(h.to(dtype), back, y)
    out_at = pointers(out.start, row, out.stride)
    if mod is not None:
        store_residual(out_at, mod_at + 2 * 192, x_at, None, y, mask, mask & (group == 0), GROUPS > 1)
    else:
        store_rows(out_at, y, mask, GROUPS > 1)


@_jit
def embed_actions(
    actions, weights, out, rows,
    ACTION: constexpr, PADDED: constexpr, HIDDEN: constexpr, ROWS: constexpr, OVERLAP: constexpr,
):  # fmt: skip
    """The embedder of action blocks and the activation behind it: actions (rows, ACTION) -> out (rows, 192).

    PADDED: a power of two, at least ACTION.
    """
    await_predecessor(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (row < rows)[:, None]
    number = tl.arange(0, PADDED)
    dtype: constexpr = weights.hidden.weight.dtype.element_ty
    at = pointers(actions, row, ACTION) + number[None, :]
    action = tl.load(at, mask=mask & (number < ACTION)[None, :], other=0.0).to(dtype)
    y = load_rows(pointers(weights.out.bias, row, 0), mask)
    for i in range(HIDDEN // 128):
        units = i * 128 + tl.arange(0, 128)
        into_at = weights.hidden.weight + number[:, None] * HIDDEN + units[None, :]
        into = tl.load(into_at, mask=(number < ACTION)[:, None], other=0.0)
        h = tl.dot(action, into, input_precision="ieee") + tl.load(weights.hidden.bias + units)[None, :]
        y = narrow((h * tl.sigmoid(h)).to(dtype), load_weight_rows(weights.out.weight, units), y)
    y = y[0] * tl.sigmoid(y[0]), y[1] * tl.sigmoid(y[1]), y[2] * tl.sigmoid(y[2])
    store_rows(pointers(out, row, 192), narrow_numbers(y, dtype), mask, False)


def transform(x: Tensor, mod: Tensor, weights: MLPWeights, buffers: Buffers, launch: Launch) -> Tensor:
    """MLP sub-layer: x (rows, n, D), contiguous, and its modulation (rows, n, 3*D) -> (rows, n, D)."""
    out, spare = buffers.rotate()
    out = out[: x.shape[0] * x.shape[1]]
    _transform(x, mod, weights, out, spare, launch)
    return out.view_as(x)


def project(x: Tensor, weights: MLPWeights, out: Tensor, launch: Launch) -> None:
    """The last norm and the projector: tokens x (rows, 1, D), contiguous -> what they predict, in out (rows, D)."""
    _transform(x, None, weights, out, None, launch)


def _transform(
    x: Tensor, mod: Tensor | None, weights: MLPWeights, out: Tensor, spare: Spare | None, launch: Launch
) -> None:
    """Launch ``transform_tokens``; out: (rows * n, D)."""
    rows, tokens = x.shape[0] * x.shape[1], x.shape[1]
    tiling = launch.tiling("mlp", rows)
    chunks = len(weights.out.weight) // tiling.chunk
    groups = math.gcd(tiling.groups, chunks)
    strided, mod_width = (None, 0) if mod is None else (Strided(mod, mod.stride(0)), mod.stride(1))
    sizes = {"MOD_WIDTH": mod_width, "CHUNKS": chunks // groups, "CHUNK": tiling.chunk, "GROUPS": groups}
    arguments = x, strided, weights, Strided(out, out.stride(0)), spare, rows, tokens
    grid = triton.cdiv(rows, tiling.rows), groups
    transform_tokens[grid](*arguments, **sizes, FAST=launch.fast_gelu, **launch.options(tiling))


def modulate(actions: Tensor, weights: KernelWeights, launch: Launch) -> Tensor:
    """Action blocks (..., A) -> all layers' shifts, scales and gates (..., layers*6*D)."""
    numbers, weight = actions.shape[-1], weights.modulation.weight
    embedded = actions.new_empty(*actions.shape[:-1], WIDTH, dtype=weight.dtype)
    rows = embedded.shape[:-1].numel()
    tiling = Tiling(16, 1, warps=8, stages=3) if actions.numel() < 50_000 else Tiling(64, 1)
    sizes = {"ACTION": numbers, "PADDED": max(16, triton.next_power_of_2(numbers))}
    sizes |= {"HIDDEN": len(weights.embedder.out.weight)}
    if rows > 0:
        grid = (triton.cdiv(rows, tiling.rows),)
        embed_actions[grid](actions.contiguous(), weights.embedder, embedded, rows, **sizes, **launch.options(tiling))
    return F.linear(embedded, *weights.modulation)
