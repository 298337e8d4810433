"""Attention of the planning rollout as one Triton kernel; ``rollout_triton`` explains it."""

# Kernels get their types when Triton compiles them.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math
from functools import partial

from torch import Tensor

from lewm.kernels.common import jit
from lewm.kernels.rollout_launch import HEAD, WIDTH, Buffers, Launch, Tokens
from lewm.kernels.rollout_tiles import (
    await_predecessor,
    clear,
    find_tokens,
    load_columns,
    load_rows,
    load_tokens,
    load_weight_rows,
    narrow,
    narrow_numbers,
    pointers,
    store_residual,
    widen,
)
from lewm.kernels.rollout_weights import AttentionWeights

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:
    triton = None

# Numbers that change from call to call, for whose values kernels must not be compiled anew.
_jit = partial(jit, varying=["candidates", "samples", "shared"])


@_jit
def _query_weight(weights, head, INNER: constexpr):
    """One head's columns of the weight that makes queries."""
    return load_columns(weights.qkv.weight, 3 * INNER, head * 64 + tl.arange(0, 64))


@_jit
def _key_weight(weights, head, INNER: constexpr):
    """One head's columns of the weight that makes keys."""
    return load_columns(weights.qkv.weight + INNER, 3 * INNER, head * 64 + tl.arange(0, 64))


@_jit
def _value_weight(weights, head, INNER: constexpr):
    """One head's columns of the weight that makes values."""
    return load_columns(weights.qkv.weight + 2 * INNER, 3 * INNER, head * 64 + tl.arange(0, 64))


@_jit
def _back_weight(weights, head):
    """One head's rows of the weight that leads back."""
    return load_weight_rows(weights.out.weight, head * 64 + tl.arange(0, 64))


@_jit
def _project_query(tokens, weight, bias, head):
    """One head's queries of tokens."""
    return widen(tokens, weight) + tl.load(bias + head * 64 + tl.arange(0, 64))[None, :]


@_jit
def _keep(kv, row, head, k, v, mask, INNER: constexpr):
    """Store one head's keys and values as rows of kv (_, 2 * INNER)."""
    at = pointers(kv, row, 2 * INNER) + (head * 64 + tl.arange(0, 64))[None, :]
    tl.store(at, k.to(kv.dtype.element_ty), mask=mask)
    tl.store(at + INNER, v.to(kv.dtype.element_ty), mask=mask)


@_jit
def _see_past(q, most, total, v, past, candidate, samples, shared, head, mask, INNER: constexpr):
    """Let a softmax over scores with maximum ``most``, normaliser ``total`` and sum ``v`` see earlier tokens too.

    past: keys and values of each.  shared: the first so many are one for all ``samples`` candidates of an environment.
    """
    for i in tl.static_range(len(past)):
        row = candidate // tl.where(i < shared, samples, 1)
        at = pointers(past[i].start, row, past[i].stride) + (head * 64 + tl.arange(0, 64))[None, :]
        k_past = tl.zeros(v.shape, past[i].start.dtype.element_ty)
        v_past = tl.zeros(v.shape, past[i].start.dtype.element_ty)
        # Always true. But a load inside a branch is not buffered ahead, for which shared memory has no room left.
        if tl.num_programs(0) > 0:
            k_past = tl.load(at, mask=mask, other=0.0)
            v_past = tl.load(at + INNER, mask=mask, other=0.0)
        score = tl.sum(q * k_past, 1)
        new_most = tl.maximum(most, score)
        fade, weight = tl.exp2(most - new_most), tl.exp2(score - new_most)
        most, total, v = new_most, total * fade + weight, v * fade[:, None] + weight[:, None] * v_past
    return v / total[:, None]


@_jit
def attend_token(
    new, weights, past, samples, shared, kv, out, spare, candidates,
    HEADS: constexpr, GROUPS: constexpr, ROWS: constexpr, OVERLAP: constexpr,
):  # fmt: skip
    """Attention sub-layer of one new token of each of ``candidates``, which sees itself and earlier ones.

    new: the tokens.  past, samples, shared: the earlier ones, as for ``_see_past``.  kv: where keys and values are
    stored, (candidates, 2 * INNER), None: nobody will see them.  out: (candidates, 192), None: tokens are not followed
    any further.  HEADS: of a program; GROUPS of programs share a tile of ROWS tokens.
    """
    INNER: constexpr = HEADS * GROUPS * 64
    BACK: constexpr = out is not None
    QUERY: constexpr = BACK and len(past) > 0
    KEY: constexpr = QUERY or kv is not None
    group = tl.program_id(1)
    if HEADS == 1:
        w_value = _value_weight(weights, group, INNER)
        if KEY:
            w_key = _key_weight(weights, group, INNER)
        if QUERY:
            w_query = _query_weight(weights, group, INNER)
        if BACK:
            w_back = _back_weight(weights, group)
    await_predecessor(OVERLAP)
    candidate = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (candidate < candidates)[:, None]
    x_at, position_at, mod_at = find_tokens(new, candidate, candidate * 0, 0)
    dtype: constexpr = weights.qkv.weight.dtype.element_ty
    token = narrow_numbers(load_tokens(x_at, position_at, mod_at, mask), dtype)
    clear(spare)
    y = load_rows(pointers(weights.out.bias, candidate, 0), mask & (group == 0))
    for i in range(HEADS):
        head = group * HEADS + i
        if HEADS > 1:
            w_value = _value_weight(weights, head, INNER)
        v = widen(token, w_value)
        if KEY:
            if HEADS > 1:
                w_key = _key_weight(weights, head, INNER)
            k = widen(token, w_key)
        if kv is not None:
            _keep(kv, candidate, head, k, v, mask, INNER)
        if QUERY:
            if HEADS > 1:
                w_query = _query_weight(weights, head, INNER)
            q = _project_query(token, w_query, weights.qkv.bias, head)
            one = tl.full([ROWS], 1.0, tl.float32)
            v = _see_past(q, tl.sum(q * k, 1), one, v, past, candidate, samples, shared, head, mask, INNER)
        if BACK:
            if HEADS > 1:
                w_back = _back_weight(weights, head)
            y = narrow(v.to(dtype), w_back, y)
    if BACK:
        out_at = pointers(out, candidate, 192)
        store_residual(out_at, mod_at + 2 * 192, x_at, position_at, y, mask, mask & (group == 0), GROUPS > 1)


@_jit
def attend_window(
    new, weights, past, samples, shared, kv, out, spare, candidates,
    NEW: constexpr, OUTPUTS: constexpr, MOD_WIDTH: constexpr,
    HEADS: constexpr, GROUPS: constexpr, ROWS: constexpr, OVERLAP: constexpr,
):  # fmt: skip
    """Attention sub-layer of ``NEW`` tokens, more than one, of each of ``candidates``; they see one another.

    As ``attend_token``, but with NEW neighbouring rows of a tile for each candidate.  kv: (candidates, NEW, 2 * INNER).
    out: (candidates, OUTPUTS, 192), the last of them.  MOD_WIDTH: from a token's modulation to the next one's.
    """
    INNER: constexpr = HEADS * GROUPS * 64
    BACK: constexpr = out is not None
    KEY: constexpr = BACK or kv is not None
    group = tl.program_id(1)
    if HEADS == 1:
        w_value = _value_weight(weights, group, INNER)
        if KEY:
            w_key = _key_weight(weights, group, INNER)
        if BACK:
            w_query, w_back = _query_weight(weights, group, INNER), _back_weight(weights, group)
    await_predecessor(OVERLAP)
    row = tl.arange(0, ROWS)
    candidate, token = tl.program_id(0) * (ROWS // NEW) + row // NEW, row % NEW
    mask = ((row < ROWS // NEW * NEW) & (candidate < candidates))[:, None]
    x_at, position_at, mod_at = find_tokens(new, candidate, token, MOD_WIDTH)
    dtype: constexpr = weights.qkv.weight.dtype.element_ty
    tokens = narrow_numbers(load_tokens(x_at, position_at, mod_at, mask), dtype)
    clear(spare)
    visible = (row[:, None] // NEW == row[None, :] // NEW) & (row[:, None] >= row[None, :])
    y = load_rows(pointers(weights.out.bias, row, 0), mask & (group == 0))
    for i in range(HEADS):
        head = group * HEADS + i
        if HEADS > 1:
            w_value = _value_weight(weights, head, INNER)
        v = widen(tokens, w_value)
        if KEY:
            if HEADS > 1:
                w_key = _key_weight(weights, head, INNER)
            k = widen(tokens, w_key)
        if kv is not None:
            _keep(kv, candidate * NEW + token, head, k, v, mask, INNER)
        if BACK:
            if HEADS > 1:
                w_query = _query_weight(weights, head, INNER)
            q = _project_query(tokens, w_query, weights.qkv.bias, head)
            scores = tl.dot(q.to(dtype), tl.trans(k.to(dtype)), input_precision="ieee")
            scores = tl.where(visible, scores, float("-inf"))
            most = tl.max(scores, 1)
            shares = tl.exp2(scores - most[:, None])
            v = tl.dot(shares.to(dtype), v.to(dtype), input_precision="ieee")
            v = _see_past(q, most, tl.sum(shares, 1), v, past, candidate, samples, shared, head, mask, INNER)
            if HEADS > 1:
                w_back = _back_weight(weights, head)
            y = narrow(v.to(dtype), w_back, y)
    if BACK:
        out_at = pointers(out, candidate * OUTPUTS + token - (NEW - OUTPUTS), 192)
        mask = mask & (token >= NEW - OUTPUTS)[:, None]
        store_residual(out_at, mod_at + 2 * 192, x_at, position_at, y, mask, mask & (group == 0), GROUPS > 1)


def attend(
    tokens: Tokens, weights: AttentionWeights, kv: Tensor, outputs: int, buffers: Buffers, launch: Launch
) -> Tensor:
    """Attention sub-layer of new tokens -> the last ``outputs`` of them (rows, outputs, D).

    kv: (rows, n, 2 * inner), filled with their keys and values, or (rows, n, 0).
    """
    rows, count, heads = len(tokens.x), tokens.count, len(weights.out.weight) // HEAD
    tiling = launch.tiling("attention_past" if tokens.past else "attention", rows * count)
    groups = math.gcd(tiling.groups, heads)
    out, spare = buffers.rotate() if outputs > 0 else (None, None)
    grid = triton.cdiv(rows, tiling.rows // count), groups
    arguments = (tokens.new(), weights, *tokens.earlier(), kv if kv.numel() > 0 else None, out, spare, rows)
    constants = {"HEADS": heads // groups, "GROUPS": groups} | launch.options(tiling)
    if count == 1:
        attend_token[grid](*arguments, **constants)
    else:
        constants |= {"NEW": count, "OUTPUTS": outputs, "MOD_WIDTH": tokens.mod.stride(1)}
        attend_window[grid](*arguments, **constants)
    return tokens.x if out is None else out[: rows * outputs].view(rows, outputs, WIDTH)
