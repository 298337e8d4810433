"""Triton kernels of the planning rollout; ``rollout_triton.py`` explains and launches them.

Rows of the residual stream have 192 numbers, held as three tiles of 64 because Triton's tiles are powers of two.
"""

# Kernels get their types when Triton compiles them.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from functools import partial

from lewm.model.kernels import jit

try:
    import triton
    import triton.language as tl
except ImportError:  # As on most machines without a GPU; ``rollout_triton.supports`` then answers False.
    triton = None

__all__ = [
    "HEAD",
    "WIDTH",
    "attention_kernel",
    "embed_kernel",
    "mix_kernel",
    "mlp_kernel",
    "norm_kernel",
    "output_kernel",
    "triton",
]

WIDTH = 192
HEAD = 64
# Arguments that change from call to call, for whose values kernels must not be compiled anew.
_SIZES = ["x_stride", "mod_stride", "out_stride", "stride_0", "divisor_0", "stride_1", "divisor_1", "spare_size"]
_SIZES += ["candidates", "tokens", "rows", "mixed_stride"]
_jit = partial(jit, varying=_SIZES)


@_jit
def _await_predecessor(OVERLAP: tl.constexpr):
    """Wait for the kernel before this one, and let the one after it start. Precedes all reading of what kernels write,
    and all writing."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@_jit
def _load_rows(pointer, rows, mask, stride):
    """Rows of 192 numbers as three float32 tiles (rows, 64)."""
    at = pointer + rows[:, None].to(tl.int64) * stride + tl.arange(0, 64)[None, :]
    a = tl.load(at, mask=mask[:, None], other=0.0).to(tl.float32)
    b = tl.load(at + 64, mask=mask[:, None], other=0.0).to(tl.float32)
    c = tl.load(at + 128, mask=mask[:, None], other=0.0).to(tl.float32)
    return a, b, c


@_jit
def _store_rows(pointer, rows, mask, a, b, c, SPLIT: tl.constexpr):
    """Store rows of 192 numbers, or add them if other programs add to the same rows."""
    at = pointer + rows[:, None].to(tl.int64) * 192 + tl.arange(0, 64)[None, :]
    if SPLIT:
        tl.atomic_add(at, a, mask=mask[:, None], sem="relaxed")
        tl.atomic_add(at + 64, b, mask=mask[:, None], sem="relaxed")
        tl.atomic_add(at + 128, c, mask=mask[:, None], sem="relaxed")
    else:
        tl.store(at, a, mask=mask[:, None])
        tl.store(at + 64, b, mask=mask[:, None])
        tl.store(at + 128, c, mask=mask[:, None])


@_jit
def _store_gated(out, gate, x, positions, mask, x_mask, y, SPLIT: tl.constexpr):
    """One tile of ``_store_residual``, from pointers at its numbers."""
    y *= tl.load(gate, mask=mask, other=0.0).to(tl.float32)
    y += tl.load(x, mask=x_mask, other=0.0)
    if positions is not None:
        y += tl.load(positions, mask=x_mask, other=0.0)
    if SPLIT:
        tl.atomic_add(out, y, mask=mask, sem="relaxed")
    else:
        tl.store(out, y, mask=mask)


@_jit
def _store_residual(
    out, out_rows, mod, mod_rows, x, x_rows, positions, token, mask, x_mask, a, b, c,
    MOD_WIDTH: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """x + positions + gate * (a, b, c), tile by tile to save registers; ``mod`` points at the shifts.

    ``x_mask``: rows for which this program is the one to add x, if others add to the same rows.
    """
    column = tl.arange(0, 64)[None, :]
    out += out_rows[:, None].to(tl.int64) * 192 + column
    gate = mod + 2 * 192 + mod_rows[:, None].to(tl.int64) * MOD_WIDTH + column
    x += x_rows[:, None].to(tl.int64) * 192 + column
    mask, x_mask = mask[:, None], x_mask[:, None]
    if positions is not None:
        positions += token[:, None] * 192 + column
        _store_gated(out, gate, x, positions, mask, x_mask, a, SPLIT)
        _store_gated(out + 64, gate + 64, x + 64, positions + 64, mask, x_mask, b, SPLIT)
        _store_gated(out + 128, gate + 128, x + 128, positions + 128, mask, x_mask, c, SPLIT)
    else:
        _store_gated(out, gate, x, None, mask, x_mask, a, SPLIT)
        _store_gated(out + 64, gate + 64, x + 64, None, mask, x_mask, b, SPLIT)
        _store_gated(out + 128, gate + 128, x + 128, None, mask, x_mask, c, SPLIT)


@_jit
def _clear(pointer, size):
    """Zero ``size`` numbers, of which each program of the two-dimensional grid takes its share."""
    start = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 1024
    while start < size:
        at = start + tl.arange(0, 1024)
        tl.store(pointer + at, tl.zeros([1024], tl.float32), mask=at < size)
        start += tl.num_programs(0) * tl.num_programs(1) * 1024


@_jit
def _standardise(a, b, c, eps):
    """LayerNorm without its affine part."""
    mean = tl.sum(a + b + c, 1) / 192
    variance = tl.sum(a * a + b * b + c * c, 1) / 192 - mean * mean
    inverse = tl.rsqrt(tl.maximum(variance, 0.0) + eps)
    offset = (mean * inverse)[:, None]
    inverse = inverse[:, None]
    return a * inverse - offset, b * inverse - offset, c * inverse - offset


@_jit
def _modulated_norm(a, b, c, mod, mod_rows, mask, MOD_WIDTH: tl.constexpr):
    """AdaLN's modulation between two norms; ``mod`` points at the shifts, the scales follow them."""
    shift_a, shift_b, shift_c = _load_rows(mod, mod_rows, mask, MOD_WIDTH)
    scale_a, scale_b, scale_c = _load_rows(mod + 192, mod_rows, mask, MOD_WIDTH)
    a, b, c = _standardise(a, b, c, 1e-6)
    a, b, c = a * (1 + scale_a) + shift_a, b * (1 + scale_b) + shift_b, c * (1 + scale_c) + shift_c
    return _standardise(a, b, c, 1e-5)


@_jit
def _load_columns(weight, stride, columns):
    """Some columns of a weight (192, stride) as three tiles (64, columns)."""
    at = weight + tl.arange(0, 64)[:, None] * stride + columns[None, :]
    return tl.load(at), tl.load(at + 64 * stride), tl.load(at + 128 * stride)


@_jit
def _load_weight_rows(weight, rows):
    """Some rows of a weight (_, 192) as three tiles (rows, 64)."""
    at = weight + rows[:, None] * 192 + tl.arange(0, 64)[None, :]
    return tl.load(at), tl.load(at + 64), tl.load(at + 128)


@_jit
def _widen(a, b, c, weight):
    """Tokens (rows, 192) times columns of a weight."""
    y = tl.dot(a, weight[0], input_precision="ieee")
    y = tl.dot(b, weight[1], y, input_precision="ieee")
    return tl.dot(c, weight[2], y, input_precision="ieee")


@_jit
def _narrow(h, weight, a, b, c):
    """Add columns h of a hidden layer, times their rows of a weight, to three tiles (rows, 64)."""
    a = tl.dot(h, weight[0], a, input_precision="ieee")
    b = tl.dot(h, weight[1], b, input_precision="ieee")
    c = tl.dot(h, weight[2], c, input_precision="ieee")
    return a, b, c


@_jit
def _gelu(x, FAST: tl.constexpr):
    """GELU; the fast form is within 1e-3, well below the rounding of bfloat16, and much less work."""
    if FAST:
        # The tanh approximation, its two coefficients refitted for the smallest largest error (2.7e-4).
        inner = x * (0.80015708 + 0.03470089 * x * x)
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [inner], tl.float32, True, 1)
    else:
        t = tl.erf(x * 0.7071067811865476)
    return 0.5 * x * (1 + t)


@_jit
def _attend_past(q, past, rows, stride, mask, columns, most, total, v, INNER: tl.constexpr):
    """Let a softmax over scores with maximum ``most``, normaliser ``total`` and sum ``v`` see an earlier token too."""
    k_past = tl.zeros(v.shape, past.dtype.element_ty)
    v_past = tl.zeros(v.shape, past.dtype.element_ty)
    at = past + rows[:, None].to(tl.int64) * stride + columns[None, :]
    # Always true. But a load inside a branch is not buffered ahead, for which shared memory has no room left.
    if tl.num_programs(0) > 0:
        k_past = tl.load(at, mask=mask[:, None], other=0.0)
        v_past = tl.load(at + INNER, mask=mask[:, None], other=0.0)
    score = tl.sum(q * k_past, 1)
    new_most = tl.maximum(most, score)
    fade, weight = tl.exp2(most - new_most), tl.exp2(score - new_most)
    return new_most, total * fade + weight, v * fade[:, None] + weight[:, None] * v_past


@_jit
def attention_kernel(
    x, x_stride, positions, mod, mod_stride, qkv, q_bias, out_weight, out_bias, kv,
    past_0, stride_0, divisor_0, past_1, stride_1, divisor_1, out, spare, spare_size, candidates,
    HEADS: tl.constexpr, INNER: tl.constexpr, MOD_WIDTH: tl.constexpr, NEW: tl.constexpr, PAST: tl.constexpr,
    OUTPUTS: tl.constexpr, KEEP: tl.constexpr, SPLIT: tl.constexpr, CLEAR: tl.constexpr, OVERLAP: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Attention sub-layer of ``NEW`` tokens for each of ``candidates``, which see ``PAST`` earlier ones.

    x: token t of candidate i is row i * x_stride + t; ``mod`` likewise.  positions: (NEW, 192), added to x.  kv: their
    keys and values (candidates, NEW, 2 * INNER), written if KEEP.  past_j: those of an earlier token, at
    i // divisor * stride.  out: each candidate's last OUTPUTS tokens.  HEADS: for one program.
    """
    group = tl.program_id(1)
    local = tl.arange(0, ROWS)
    columns = group * HEADS * 64 + tl.arange(0, 64)
    if HEADS == 1:
        w_v = _load_columns(qkv + 2 * INNER, 3 * INNER, columns)
        if KEEP or NEW + PAST > 1:
            w_k = _load_columns(qkv + INNER, 3 * INNER, columns)
        if OUTPUTS > 0:
            if NEW + PAST > 1:
                w_q = _load_columns(qkv, 3 * INNER, columns)
            w_out = _load_weight_rows(out_weight, columns)
    _await_predecessor(OVERLAP)
    candidate, token = tl.program_id(0) * (ROWS // NEW) + local // NEW, local % NEW
    mask = (local < ROWS // NEW * NEW) & (candidate < candidates)
    x_rows, mod_rows = candidate * x_stride + token, candidate * mod_stride + token
    a, b, c = _load_rows(x, x_rows, mask, 192)
    pos_a, pos_b, pos_c = _load_rows(positions, token, mask, 192)
    a, b, c = _modulated_norm(a + pos_a, b + pos_b, c + pos_c, mod, mod_rows, mask, MOD_WIDTH)
    if CLEAR:
        _clear(spare, spare_size)
    dtype = mod.dtype.element_ty
    a, b, c = a.to(dtype), b.to(dtype), c.to(dtype)
    visible = (local[:, None] // NEW == local[None, :] // NEW) & (local[:, None] >= local[None, :])
    acc_a, acc_b, acc_c = _load_rows(out_bias, local * 0, mask & (group == 0), 192)
    for i in range(HEADS):
        columns = (group * HEADS + i) * 64 + tl.arange(0, 64)
        if HEADS > 1:
            w_v = _load_columns(qkv + 2 * INNER, 3 * INNER, columns)
        v = _widen(a, b, c, w_v)
        if KEEP or NEW + PAST > 1:
            if HEADS > 1:
                w_k = _load_columns(qkv + INNER, 3 * INNER, columns)
            k = _widen(a, b, c, w_k)
        if KEEP:
            kv_at = kv + (candidate * NEW + token)[:, None].to(tl.int64) * (2 * INNER) + columns[None, :]
            tl.store(kv_at, k.to(dtype), mask=mask[:, None])
            tl.store(kv_at + INNER, v.to(dtype), mask=mask[:, None])
        if OUTPUTS > 0:
            if NEW + PAST > 1:
                if HEADS > 1:
                    w_q = _load_columns(qkv, 3 * INNER, columns)
                q = _widen(a, b, c, w_q) + tl.load(q_bias + columns)[None, :]
                if NEW == 1:
                    most = tl.sum(q * k, 1)
                    total = tl.full([ROWS], 1.0, tl.float32)
                else:
                    scores = tl.dot(q.to(dtype), tl.trans(k.to(dtype)), input_precision="ieee")
                    scores = tl.where(visible, scores, float("-inf"))
                    most = tl.max(scores, 1)
                    weights = tl.exp2(scores - most[:, None])
                    total = tl.sum(weights, 1)
                    v = tl.dot(weights.to(dtype), v.to(dtype), input_precision="ieee")
                if PAST > 0:
                    rows = candidate // divisor_0
                    most, total, v = _attend_past(q, past_0, rows, stride_0, mask, columns, most, total, v, INNER)
                if PAST > 1:
                    rows = candidate // divisor_1
                    most, total, v = _attend_past(q, past_1, rows, stride_1, mask, columns, most, total, v, INNER)
                v = v / total[:, None]
            if HEADS > 1:
                w_out = _load_weight_rows(out_weight, columns)
            acc_a, acc_b, acc_c = _narrow(v.to(dtype), w_out, acc_a, acc_b, acc_c)
    if OUTPUTS > 0:
        mask = mask & (token >= NEW - OUTPUTS)
        _store_residual(
            out, candidate * OUTPUTS + token - (NEW - OUTPUTS), mod, mod_rows, x, x_rows, positions, token,
            mask, mask & (group == 0), acc_a, acc_b, acc_c, MOD_WIDTH, SPLIT,
        )  # fmt: skip


@_jit
def mlp_kernel(
    x, tokens, mod, mod_stride, hidden_weight, hidden_bias, out_weight, out_bias, out, out_stride, spare, spare_size,
    rows, CHUNKS: tl.constexpr, HIDDEN: tl.constexpr, MOD_WIDTH: tl.constexpr, ADALN: tl.constexpr, FAST: tl.constexpr,
    SPLIT: tl.constexpr, CLEAR: tl.constexpr, OVERLAP: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """MLP sub-layer of ``rows`` tokens, ``tokens`` for each candidate; without ADALN, norm and MLP alone.

    x: (rows, 192).  mod: token t of candidate i is row i * mod_stride + t.  out: row r of x is its row r * out_stride.
    CHUNKS: of CHUNK hidden units, for one program.
    """
    group = tl.program_id(1)
    columns = group * CHUNKS * CHUNK + tl.arange(0, CHUNK)
    if CHUNKS == 1:
        w_hidden = _load_columns(hidden_weight, HIDDEN, columns)
        w_out = _load_weight_rows(out_weight, columns)
    _await_predecessor(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    mod_rows = row // tokens * mod_stride + row % tokens
    a, b, c = _load_rows(x, row, mask, 192)
    if ADALN:
        a, b, c = _modulated_norm(a, b, c, mod, mod_rows, mask, MOD_WIDTH)
    else:
        a, b, c = _standardise(a, b, c, 1e-5)
    if CLEAR:
        _clear(spare, spare_size)
    dtype = hidden_weight.dtype.element_ty
    a, b, c = a.to(dtype), b.to(dtype), c.to(dtype)
    acc_a, acc_b, acc_c = _load_rows(out_bias, row * 0, mask & (group == 0), 192)
    for i in range(CHUNKS):
        columns = (group * CHUNKS + i) * CHUNK + tl.arange(0, CHUNK)
        if CHUNKS > 1:
            w_hidden = _load_columns(hidden_weight, HIDDEN, columns)
        h = _gelu(_widen(a, b, c, w_hidden) + tl.load(hidden_bias + columns)[None, :], FAST)
        if CHUNKS > 1:
            w_out = _load_weight_rows(out_weight, columns)
        acc_a, acc_b, acc_c = _narrow(h.to(dtype), w_out, acc_a, acc_b, acc_c)
    if ADALN:
        _store_residual(
            out, row * out_stride, mod, mod_rows, x, row, None, None, mask, mask & (group == 0), acc_a, acc_b, acc_c,
            MOD_WIDTH, SPLIT,
        )  # fmt: skip
    else:
        _store_rows(out, row * out_stride, mask, acc_a, acc_b, acc_c, SPLIT)


@_jit
def embed_kernel(
    actions, hidden_weight, hidden_bias, out_weight, out_bias, out, rows,
    ACTION: tl.constexpr, HIDDEN: tl.constexpr, PADDED: tl.constexpr, OVERLAP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The embedder of action blocks and the activation behind it: actions (rows, ACTION) -> out (rows, 192)."""
    _await_predecessor(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    number = tl.arange(0, PADDED)
    dtype = hidden_weight.dtype.element_ty
    at = actions + row[:, None].to(tl.int64) * ACTION + number[None, :]
    action = tl.load(at, mask=mask[:, None] & (number < ACTION)[None, :], other=0.0).to(dtype)
    a, b, c = _load_rows(out_bias, row * 0, mask, 192)
    for i in range(HIDDEN // 128):
        columns = i * 128 + tl.arange(0, 128)
        weight_at = hidden_weight + number[:, None] * HIDDEN + columns[None, :]
        weight = tl.load(weight_at, mask=(number < ACTION)[:, None], other=0.0)
        h = tl.dot(action, weight, input_precision="ieee") + tl.load(hidden_bias + columns)[None, :]
        a, b, c = _narrow((h * tl.sigmoid(h)).to(dtype), _load_weight_rows(out_weight, columns), a, b, c)
    a, b, c = a * tl.sigmoid(a), b * tl.sigmoid(b), c * tl.sigmoid(c)
    _store_rows(out, row, mask, a.to(dtype), b.to(dtype), c.to(dtype), False)


@_jit
def norm_kernel(
    x, x_stride, positions, mod, mod_stride, out, rows, NEW: tl.constexpr, MOD_WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What ``attention_kernel`` does to x before its projections; out: (rows, 192), NEW for each candidate."""
    _await_predecessor(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    candidate, token = row // NEW, row % NEW
    a, b, c = _load_rows(x, candidate * x_stride + token, mask, 192)
    pos_a, pos_b, pos_c = _load_rows(positions, token, mask, 192)
    mod_rows = candidate * mod_stride + token
    a, b, c = _modulated_norm(a + pos_a, b + pos_b, c + pos_c, mod, mod_rows, mask, MOD_WIDTH)
    dtype = out.dtype.element_ty
    _store_rows(out, row, mask, a.to(dtype), b.to(dtype), c.to(dtype), False)


@_jit
def mix_kernel(
    qkv, q_bias, past_0, stride_0, divisor_0, past_1, stride_1, divisor_1, out, candidates,
    HEADS: tl.constexpr, INNER: tl.constexpr, NEW: tl.constexpr, PAST: tl.constexpr, OUTPUTS: tl.constexpr,
    OVERLAP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Attention between the projections: qkv (candidates, NEW, 3 * INNER) -> out (candidates, OUTPUTS, INNER).

    A row of a program is one head of one candidate; it sees up to three tokens, past_j as in ``attention_kernel``.
    """
    _await_predecessor(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    candidate = row // HEADS
    columns = (row % HEADS * 64)[:, None] + tl.arange(0, 64)[None, :]
    mask = (candidate < candidates)[:, None]
    own = qkv + candidate[:, None].to(tl.int64) * (NEW * 3 * INNER) + columns
    at_0, at_1, at_2 = own + INNER, own + (4 - 3 * PAST) * INNER, own + (7 - 3 * PAST) * INNER
    if PAST > 0:
        at_0 = past_0 + (candidate // divisor_0)[:, None].to(tl.int64) * stride_0 + columns
    if PAST > 1:
        at_1 = past_1 + (candidate // divisor_1)[:, None].to(tl.int64) * stride_1 + columns
    k_0, v_0 = tl.load(at_0, mask=mask), tl.load(at_0 + INNER, mask=mask)
    k_1, v_1, k_2, v_2 = k_0, v_0, k_0, v_0
    if NEW + PAST > 1:
        k_1, v_1 = tl.load(at_1, mask=mask), tl.load(at_1 + INNER, mask=mask)
    if NEW + PAST > 2:
        k_2, v_2 = tl.load(at_2, mask=mask), tl.load(at_2 + INNER, mask=mask)
    bias = tl.load(q_bias + columns)
    for token in tl.static_range(NEW - OUTPUTS, NEW):
        q = tl.load(own + token * 3 * INNER, mask=mask).to(tl.float32) + bias
        score_0, score_1, score_2 = tl.sum(q * k_0, 1), tl.sum(q * k_1, 1), tl.sum(q * k_2, 1)
        if PAST + token < 1:
            score_1 = tl.full([ROWS], float("-inf"), tl.float32)
        if PAST + token < 2:
            score_2 = tl.full([ROWS], float("-inf"), tl.float32)
        most = tl.maximum(score_0, tl.maximum(score_1, score_2))
        weight_0, weight_1, weight_2 = tl.exp2(score_0 - most), tl.exp2(score_1 - most), tl.exp2(score_2 - most)
        scale = 1 / (weight_0 + weight_1 + weight_2)
        mixed = (weight_0 * scale)[:, None] * v_0 + (weight_1 * scale)[:, None] * v_1
        mixed += (weight_2 * scale)[:, None] * v_2
        out_rows = candidate[:, None].to(tl.int64) * OUTPUTS + (token - NEW + OUTPUTS)
        tl.store(out + out_rows * INNER + columns, mixed.to(out.dtype.element_ty), mask=mask)


@_jit
def output_kernel(
    mixed, mixed_stride, x, x_stride, positions, mod, mod_stride, out_weight, out_bias, out, spare, spare_size, rows,
    HEADS: tl.constexpr, MOD_WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, CLEAR: tl.constexpr, OVERLAP: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """x + gate * (mixed @ out_weight + out_bias), with OUTPUTS rows per candidate; x and ``mod`` start at its first."""
    _await_predecessor(OVERLAP)
    if CLEAR:
        _clear(spare, spare_size)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    acc_a, acc_b, acc_c = _load_rows(out_bias, row * 0, mask, 192)
    mixed_at = mixed + row[:, None].to(tl.int64) * mixed_stride + tl.arange(0, 64)[None, :]
    for head in range(HEADS):
        h = tl.load(mixed_at + head * 64, mask=mask[:, None], other=0.0)
        weight = _load_weight_rows(out_weight, head * 64 + tl.arange(0, 64))
        acc_a, acc_b, acc_c = _narrow(h, weight, acc_a, acc_b, acc_c)
    candidate, token = row // OUTPUTS, row % OUTPUTS
    _store_residual(
        out, row, mod, candidate * mod_stride + token, x, candidate * x_stride + token, positions, token, mask, mask,
        acc_a, acc_b, acc_c, MOD_WIDTH, False,
    )  # fmt: skip
