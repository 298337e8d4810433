"""Attention of the planning rollout in several kernels, between which a library multiplies; for many rows."""

# Kernels get their types when Triton compiles them, and build tuples in unrolled loops.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lewm.kernels.common import jit
from lewm.kernels.rollout_launch import HEAD, WIDTH, Buffers, Launch, Strided, Tokens
from lewm.kernels.rollout_tiles import (
    await_predecessor,
    clear,
    find_tokens,
    load_rows,
    load_tokens,
    load_weight_rows,
    narrow,
    narrow_numbers,
    pointers,
    store_residual,
    store_rows,
)
from lewm.kernels.rollout_tiling import Tiling
from lewm.kernels.rollout_weights import AttentionWeights

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:
    triton = None

# Numbers that change from call to call, for whose values kernels must not be compiled anew.
_jit = partial(jit, varying=["candidates", "samples", "shared", "rows"])
_SMALL = Tiling(16, 1)


@_jit
def normalise_tokens(new, out, rows, NEW: constexpr, MOD_WIDTH: constexpr, ROWS: constexpr, OVERLAP: constexpr):
    """What attention does to tokens before its projections; out: (rows, 192), NEW for each candidate."""
    await_predecessor(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    candidate, token, mask = row // NEW, row % NEW, (row < rows)[:, None]
    x_at, position_at, mod_at = find_tokens(new, candidate, token, MOD_WIDTH)
    tokens = load_tokens(x_at, position_at, mod_at, mask)
    store_rows(pointers(out, row, 192), narrow_numbers(tokens, out.dtype.element_ty), mask, False)


@_jit
def mix_tokens(
    qkv, q_bias, past, samples, shared, out, candidates,
    NEW: constexpr, OUTPUTS: constexpr, HEADS: constexpr, ROWS: constexpr, OVERLAP: constexpr,
):  # fmt: skip
    """Attention between the projections: qkv (candidates, NEW, 3 * INNER) -> out (candidates, OUTPUTS, INNER).

    A row of a program is one head of one candidate.  past, samples, shared: as for ``attend_token``.
    """
    INNER: constexpr = HEADS * 64
    PAST: constexpr = len(past)
    await_predecessor(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    candidate, mask = row // HEADS, (row // HEADS < candidates)[:, None]
    columns = (row % HEADS * 64)[:, None] + tl.arange(0, 64)[None, :]
    own = pointers(qkv, candidate, NEW * 3 * INNER) + columns
    keys, values = (), ()
    for i in tl.static_range(PAST):
        earlier = candidate // tl.where(i < shared, samples, 1)
        at = pointers(past[i].start, earlier, past[i].stride) + columns
        keys, values = keys + (tl.load(at, mask=mask),), values + (tl.load(at + INNER, mask=mask),)  # noqa: RUF005
    for i in tl.static_range(NEW):
        at = own + (3 * i + 1) * INNER
        keys, values = keys + (tl.load(at, mask=mask),), values + (tl.load(at + INNER, mask=mask),)  # noqa: RUF005
    bias = tl.load(q_bias + columns)
    for token in tl.static_range(NEW - OUTPUTS, NEW):
        q = tl.load(own + token * 3 * INNER, mask=mask).to(tl.float32) + bias
        scores, most = (), tl.full([ROWS], float("-inf"), tl.float32)
        for i in tl.static_range(PAST + token + 1):
            score = tl.sum(q * keys[i], 1)
            scores, most = scores + (score,), tl.maximum(most, score)  # noqa: RUF005
        shares, total = (), tl.zeros([ROWS], tl.float32)
        for i in tl.static_range(PAST + token + 1):
            share = tl.exp2(scores[i] - most)
            shares, total = shares + (share,), total + share  # noqa: RUF005
        scale = 1 / total
        mixed = tl.zeros([ROWS, 64], tl.float32)
        for i in tl.static_range(PAST + token + 1):
            mixed += (shares[i] * scale)[:, None] * values[i]
        at = pointers(out, candidate * OUTPUTS + token - (NEW - OUTPUTS), INNER) + columns
        tl.store(at, mixed.to(out.dtype.element_ty), mask=mask)


@_jit
def project_back(
    mixed, new, weights, out, spare, rows,
    OUTPUTS: constexpr, MOD_WIDTH: constexpr, HEADS: constexpr, ROWS: constexpr, OVERLAP: constexpr,
):  # fmt: skip
    """The way back from attention, gate and residual, for OUTPUTS tokens of each candidate: -> out (rows, 192).

    mixed: what each of them has read.  new: from the first of them on.
    """
    await_predecessor(OVERLAP)
    clear(spare)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (row < rows)[:, None]
    y = load_rows(pointers(weights.out.bias, row, 0), mask)
    mixed_at = pointers(mixed.start, row, mixed.stride) + tl.arange(0, 64)[None, :]
    for head in range(HEADS):
        h = tl.load(mixed_at + head * 64, mask=mask, other=0.0)
        y = narrow(h, load_weight_rows(weights.out.weight, head * 64 + tl.arange(0, 64)), y)
    x_at, position_at, mod_at = find_tokens(new, row // OUTPUTS, row % OUTPUTS, MOD_WIDTH)
    store_residual(pointers(out, row, 192), mod_at + 2 * 192, x_at, position_at, y, mask, mask, False)


def attend_apart(
    tokens: Tokens, weights: AttentionWeights, qkv: Tensor, outputs: int, buffers: Buffers, launch: Launch
) -> Tensor:
    """Attention sub-layer of new tokens -> the last ``outputs`` of them (rows, outputs, D).

    qkv: (rows, n, 3 * inner), filled with their keys, values and such queries as are read.
    """
    _project_qkv(tokens, weights.qkv.weight, qkv, outputs, launch)
    if outputs == 0:
        return tokens.x
    out, spare = buffers.rotate()
    mixed = _mix(tokens, weights.qkv.bias, qkv, outputs, launch)
    rows, tiling = len(mixed), launch.tiling("output", len(mixed))
    sizes = {"OUTPUTS": outputs, "MOD_WIDTH": tokens.mod.stride(1), "HEADS": len(weights.out.weight) // HEAD}
    arguments = Strided(mixed, mixed.stride(0)), tokens.last(outputs).new(), weights, out, spare, rows
    project_back[triton.cdiv(rows, tiling.rows), 1](*arguments, **sizes, **launch.options(tiling))
    return out[:rows].view(len(tokens.x), outputs, WIDTH)


def _project_qkv(tokens: Tokens, weight: Tensor, qkv: Tensor, outputs: int, launch: Launch) -> None:
    """Fill qkv (rows, n, 3 * inner), with queries only where they are read."""
    rows, count, inner = len(qkv), tokens.count, qkv.shape[2] // 3
    normed = qkv.new_empty(rows, count, WIDTH)
    sizes = {"NEW": count, "MOD_WIDTH": tokens.mod.stride(1)}
    grid = (triton.cdiv(rows * count, _SMALL.rows),)
    normalise_tokens[grid](tokens.new(), normed, rows * count, **sizes, **launch.options(_SMALL))
    sees_others = count + len(tokens.past) > 1
    if outputs == count and sees_others:
        torch.mm(normed.flatten(0, 1), weight, out=qkv.flatten(0, 1))
    else:
        torch.mm(normed.flatten(0, 1), weight[:, inner:], out=qkv.flatten(0, 1)[:, inner:])
    if 0 < outputs < count:
        torch.mm(normed[:, -1], weight[:, :inner], out=qkv[:, -1, :inner])


def _mix(tokens: Tokens, bias: Tensor, qkv: Tensor, outputs: int, launch: Launch) -> Tensor:
    """What the last ``outputs`` tokens read, from qkv (rows, n, 3 * inner) -> (rows * outputs, inner)."""
    rows, inner = len(qkv), qkv.shape[2] // 3
    if tokens.count + len(tokens.past) == 1:
        return qkv[:, 0, 2 * inner :]
    mixed = qkv.new_empty(rows * outputs, inner)
    sizes = {"NEW": tokens.count, "OUTPUTS": outputs, "HEADS": inner // HEAD}
    grid = (triton.cdiv(rows * sizes["HEADS"], _SMALL.rows),)
    mix_tokens[grid](qkv, bias, *tokens.earlier(), mixed, rows, **sizes, **launch.options(_SMALL))
    return mixed
