"""Attention over a [CLS] token and a power of two of patches, as Triton kernels with gradients.

257 tokens fill two tiles of 128 and one entry of a third, so kernels for any length do half as much again as they need.
These treat the first token apart, with a few vector operations, and the patches as whole tiles. They read queries, keys
and values where the projection has left them, and write gradients where its backward wants them: nothing is rearranged
in memory. Sums are taken in a fixed order, so that equal inputs give equal gradients.

Shapes: N frames, P tokens (the first and P - 1 patches), H heads of E numbers; qkv is (N, P, 3 H E), as (3, H, E).
"""

# Kernels get their types when Triton compiles them.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lewm.kernels.common import column_sums, is_hopper, jit, product_precision

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:
    triton = None

PATCHES = (16, 32, 64, 128, 256)
HEAD_WIDTHS = (16, 32, 64, 128)
NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Tiling:
    """How a kernel divides its work. rows, columns: queries and keys at a time.  warps, stages: as in Triton."""

    rows: int
    columns: int
    warps: int
    stages: int


def choose_tilings(patches: int) -> tuple[Tiling, Tiling]:
    """The tilings of the forward and the backward kernel; the latter has all queries at once."""
    if patches >= 128:
        return Tiling(64, 64, 4, 3), Tiling(patches, 64, 8, 2)
    tile = min(patches, 64)
    return Tiling(tile, tile, 4, 2), Tiling(patches, tile, 4, 1)


def supports(x: torch.Tensor, heads: int) -> bool:
    """Whether the kernels can take what a projection makes of tokens (N, P, H E), in autocast's precision."""
    fits = x.shape[1] - 1 in PATCHES and x.shape[2] // heads in HEAD_WIDTHS
    return triton is not None and fits and product_precision(x) in NARROW and is_hopper(x.device)


def attention(qkv: torch.Tensor, bias: torch.Tensor, heads: int) -> torch.Tensor:
    """Every token's weighted mean of the values: (N, P, 3 H E) -> (N, P, H E).

    bias: (3 H E,), already in qkv, where it was added without a gradient. It gets its gradient here, where all of what
    it is the sum of is at hand.
    """
    out, _ = _attention(qkv, bias, heads)
    return out


@torch.library.custom_op("lewm::attention", mutates_args=())
def _attention(qkv: torch.Tensor, bias: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG001
    return forward(qkv.contiguous(), heads)


@_attention.register_fake
def _(qkv: torch.Tensor, bias: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG001
    n, p, w = qkv.shape
    return qkv.new_empty(n, p, w // 3), qkv.new_empty(n, heads, p, dtype=torch.float32)


@torch.library.custom_op("lewm::attention_backward", mutates_args=())
def _attention_backward(
    grad: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, log_sums: torch.Tensor, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return backward(grad.contiguous(), qkv.contiguous(), out, log_sums, heads)


@_attention_backward.register_fake
def _(_grad: torch.Tensor, qkv: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return qkv.new_empty(qkv.shape), qkv.new_empty(qkv.shape[2], dtype=torch.float32)


def _keep_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.heads = inputs[2]
    ctx.save_for_backward(inputs[0], *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
    d_qkv, d_bias = _attention_backward(grad, *ctx.saved_tensors, ctx.heads)
    return d_qkv, d_bias, None


_attention.register_autograd(_gradients, setup_context=_keep_for_backward)


def forward(qkv: torch.Tensor, heads: int, tiling: Tiling | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``attention`` gives, and the logarithms (N, H, P) of the sums by which weights were divided, in base 2."""
    n, p, w = qkv.shape
    out, log_sums = qkv.new_empty(n, p, w // 3), qkv.new_empty(n, heads, p, dtype=torch.float32)
    tiling = tiling or choose_tilings(p - 1)[0]
    # The last program of a head is for the first token.
    grid = (n * heads * ((p - 1) // tiling.rows + 1),)
    _forward_kernel[grid](qkv, out, log_sums, ROWS=tiling.rows, **_constants(qkv, heads, tiling))
    return out, log_sums


def backward(
    grad: torch.Tensor,
    qkv: torch.Tensor,
    out: torch.Tensor,
    log_sums: torch.Tensor,
    heads: int,
    tiling: Tiling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of qkv and of its bias, (3 H E,), from that of ``forward``'s output, (N, P, H E).

    qkv, out, log_sums: what ``forward`` took and gave.
    """
    n, p, w = qkv.shape
    d_qkv, sums = torch.empty_like(qkv), qkv.new_empty(n, w, dtype=torch.float32)
    constants = _constants(qkv, heads, tiling or choose_tilings(p - 1)[1])
    _backward_kernel[(n * heads,)](grad, qkv, out, log_sums, d_qkv, sums, **constants)
    return d_qkv, column_sums(sums)


def _constants(qkv: torch.Tensor, heads: int, tiling: Tiling) -> dict[str, Any]:
    """What both kernels are compiled for."""
    sizes = {"PATCHES": qkv.shape[1] - 1, "HEADS": heads, "E": qkv.shape[2] // (3 * heads)}
    return sizes | {"COLUMNS": tiling.columns, "num_warps": tiling.warps, "num_stages": tiling.stages}


@jit
def _forward_kernel(
    qkv, out, log_sums, PATCHES: constexpr, HEADS: constexpr, E: constexpr, ROWS: constexpr, COLUMNS: constexpr
):
    """A tile of a head's patches, or its first token. Weights are computed as powers of two."""
    SCALE_2: constexpr = E**-0.5 / 0.6931471805599453  # the logarithm of 2
    TOKEN: constexpr = 3 * HEADS * E  # from a token to the next
    PARTS: constexpr = PATCHES // ROWS + 1
    part, index = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    frame, head = (index // HEADS).to(tl.int64), index % HEADS
    query = qkv + frame * (PATCHES + 1) * TOKEN + head * E
    key, value = query + HEADS * E, query + 2 * HEADS * E
    out += frame * (PATCHES + 1) * HEADS * E + head * E
    log_sums += (frame * HEADS + head) * (PATCHES + 1)
    e, rows, columns = tl.arange(0, E), tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    first_key, first_value = tl.load(key + e).to(tl.float32), tl.load(value + e).to(tl.float32)
    if part < PARTS - 1:
        token = 1 + part * ROWS + rows
        q = tl.load(query + token[:, None] * TOKEN + e[None, :])
        # The first token comes first; its weight is 1 until a larger one comes.
        largest = tl.sum(q.to(tl.float32) * first_key[None, :], 1) * SCALE_2
        total = tl.full((ROWS,), 1.0, tl.float32)
        mean = tl.zeros((ROWS, E), tl.float32) + first_value[None, :]
        for start in range(0, PATCHES, COLUMNS):
            at = (1 + start + columns)[:, None] * TOKEN + e[None, :]
            scores = tl.dot(q, tl.trans(tl.load(key + at))) * SCALE_2
            new = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.exp2(scores - new[:, None])
            shrink = tl.exp2(largest - new)
            total = total * shrink + tl.sum(weights, 1)
            v = tl.load(value + at)
            mean = tl.dot(weights.to(v.dtype), v, mean * shrink[:, None])
            largest = new
        tl.store(out + token[:, None] * (HEADS * E) + e[None, :], (mean / total[:, None]).to(out.dtype.element_ty))
        tl.store(log_sums + token, largest + tl.log2(total))
    else:
        q_first = tl.load(query + e).to(tl.float32)
        best = tl.sum(q_first * first_key, 0) * SCALE_2
        sum_first = 1.0
        mean_first = first_value
        for start in range(0, PATCHES, COLUMNS):
            at = (1 + start + columns)[:, None] * TOKEN + e[None, :]
            row = tl.sum(tl.load(key + at).to(tl.float32) * q_first[None, :], 1) * SCALE_2
            best_new = tl.maximum(best, tl.max(row, 0))
            row = tl.exp2(row - best_new)
            shrink_first = tl.exp2(best - best_new)
            sum_first = sum_first * shrink_first + tl.sum(row, 0)
            mean_first = mean_first * shrink_first + tl.sum(tl.load(value + at).to(tl.float32) * row[:, None], 0)
            best = best_new
        tl.store(out + e, (mean_first / sum_first).to(out.dtype.element_ty))
        tl.store(log_sums, best + tl.log2(sum_first))


@jit
def _backward_kernel(
    grad, qkv, out, log_sums, gradient, sums, PATCHES: constexpr, HEADS: constexpr, E: constexpr, COLUMNS: constexpr
):
    """One head of a frame: all queries against one tile of keys after the other.

    With weights w = softmax(s), s the scores, and g the gradient of a query's output: that of a value is w g, and that
    of a score w (g · value - g · output). The bias of the values gets the sum of all g, as weights add up to 1, and
    that of the keys nothing: it adds the same to all scores of a query.
    """
    SCALE: constexpr = E**-0.5
    SCALE_2: constexpr = SCALE / 0.6931471805599453
    TOKEN: constexpr = 3 * HEADS * E
    frame, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    query = qkv + frame * (PATCHES + 1) * TOKEN + head * E
    key, value = query + HEADS * E, query + 2 * HEADS * E
    d_query = gradient + frame * (PATCHES + 1) * TOKEN + head * E
    d_key, d_value = d_query + HEADS * E, d_query + 2 * HEADS * E
    grad += frame * (PATCHES + 1) * HEADS * E + head * E
    out += frame * (PATCHES + 1) * HEADS * E + head * E
    log_sums += (frame * HEADS + head) * (PATCHES + 1)
    number = gradient.dtype.element_ty
    e, columns, token = tl.arange(0, E), tl.arange(0, COLUMNS), 1 + tl.arange(0, PATCHES)
    at_query, at_out = token[:, None] * TOKEN + e[None, :], token[:, None] * (HEADS * E) + e[None, :]
    # The first token against itself.
    q_first, g_first = tl.load(query + e).to(tl.float32), tl.load(grad + e).to(tl.float32)
    k_first, v_first = tl.load(key + e).to(tl.float32), tl.load(value + e).to(tl.float32)
    log_sum_first = tl.load(log_sums)
    g_out_first = tl.sum(g_first * tl.load(out + e).to(tl.float32), 0)
    w_first = tl.exp2(tl.sum(q_first * k_first, 0) * SCALE_2 - log_sum_first)
    d_score_first = w_first * (tl.sum(g_first * v_first, 0) - g_out_first)
    d_q_first = d_score_first * k_first
    # The patches' queries against it.
    g = tl.load(grad + at_out)
    g_out = tl.sum(g.to(tl.float32) * tl.load(out + at_out).to(tl.float32), 1)
    q, log_sum = tl.load(query + at_query), tl.load(log_sums + token)
    w = tl.exp2(tl.sum(q.to(tl.float32) * k_first[None, :], 1) * SCALE_2 - log_sum)
    d_score = w * (tl.sum(g.to(tl.float32) * v_first[None, :], 1) - g_out)
    d_v_first = w_first * g_first + tl.sum(w[:, None] * g.to(tl.float32), 0)
    d_k_first = d_score_first * q_first + tl.sum(d_score[:, None] * q.to(tl.float32), 0)
    sums += frame * TOKEN + head * E + e
    tl.store(sums + HEADS * E, tl.zeros((E,), tl.float32))
    tl.store(sums + 2 * HEADS * E, tl.sum(g.to(tl.float32), 0) + g_first)
    tl.store(d_value + e, d_v_first.to(number))
    tl.store(d_key + e, (d_k_first * SCALE).to(number))
    d_q = d_score[:, None] * k_first[None, :]
    # All queries against the patches' keys.
    for start in range(0, PATCHES, COLUMNS):
        at = (1 + start + columns)[:, None] * TOKEN + e[None, :]
        k, v = tl.load(key + at), tl.load(value + at)
        weights = tl.exp2(tl.dot(q, tl.trans(k)) * SCALE_2 - log_sum[:, None])
        d_values = tl.dot(tl.trans(weights.to(number)), g)
        d_scores = (weights * (tl.dot(g, tl.trans(v)) - g_out[:, None])).to(number)
        d_keys = tl.dot(tl.trans(d_scores), q)
        d_q = tl.dot(d_scores, k, d_q)
        row = tl.exp2(tl.sum(k.to(tl.float32) * q_first[None, :], 1) * SCALE_2 - log_sum_first)
        d_row = row * (tl.sum(v.to(tl.float32) * g_first[None, :], 1) - g_out_first)
        d_q_first += tl.sum(d_row[:, None] * k.to(tl.float32), 0)
        tl.store(d_value + at, (d_values + row[:, None] * g_first[None, :]).to(number))
        tl.store(d_key + at, ((d_keys + d_row[:, None] * q_first[None, :]) * SCALE).to(number))
    tl.store(d_query + at_query, (d_q * SCALE).to(number))
    tl.store(d_query + e, (d_q_first * SCALE).to(number))
    tl.store(sums, (tl.sum(d_q, 0) + d_q_first) * SCALE)
