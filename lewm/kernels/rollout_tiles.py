"""What the Triton kernels of the planning rollout are made of: functions of tiles, on the GPU.

A row has 192 numbers, held as a tuple of three tiles (rows, 64) because Triton's tiles are powers of two. Where rows
begin in memory is a tensor of pointers (rows, 1), and so is a mask of rows.
"""

# Kernels get their types when Triton compiles them.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from lewm.kernels.common import jit

try:
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # As on most machines without a GPU; ``rollout_triton.supports`` then answers False.
    pass


@jit
def await_predecessor(OVERLAP: constexpr):
    """Wait for the kernel before this one, and let the one after it start. Precedes all reading of what kernels write,
    and all writing."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@jit
def pointers(start, row, stride):
    """Where rows (rows,) begin, of which there is one every ``stride`` numbers."""
    return start + row[:, None].to(tl.int64) * stride


@jit
def load_rows(at, mask):
    """Rows in float32."""
    at += tl.arange(0, 64)[None, :]
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + 64, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(at + 128, mask=mask, other=0.0).to(tl.float32)
    return a, b, c


@jit
def store_tile(at, tile, mask, ADD: constexpr):
    """Store a tile, or add it if other programs add to the same one."""
    if ADD:
        tl.atomic_add(at, tile, mask=mask, sem="relaxed")
    else:
        tl.store(at, tile, mask=mask)


@jit
def store_rows(at, rows, mask, ADD: constexpr):
    """Store rows, or add them if other programs add to the same ones."""
    at += tl.arange(0, 64)[None, :]
    store_tile(at, rows[0], mask, ADD)
    store_tile(at + 64, rows[1], mask, ADD)
    store_tile(at + 128, rows[2], mask, ADD)


@jit
def _store_gated(out, gate, x, position, y, mask, x_mask, ADD: constexpr):
    """One tile of ``store_residual``, from pointers at its numbers."""
    y *= tl.load(gate, mask=mask, other=0.0).to(tl.float32)
    y += tl.load(x, mask=x_mask, other=0.0)
    if position is not None:
        y += tl.load(position, mask=x_mask, other=0.0)
    store_tile(out, y, mask, ADD)


@jit
def store_residual(out, gate, x, position, y, mask, x_mask, ADD: constexpr):
    """x + position + gate * y, tile by tile to save registers; all but y are pointers.

    x_mask: rows for which this program is the one to add x, if others add to the same rows.
    """
    column = tl.arange(0, 64)[None, :]
    out, gate, x = out + column, gate + column, x + column
    if position is not None:
        position += column
        _store_gated(out, gate, x, position, y[0], mask, x_mask, ADD)
        _store_gated(out + 64, gate + 64, x + 64, position + 64, y[1], mask, x_mask, ADD)
        _store_gated(out + 128, gate + 128, x + 128, position + 128, y[2], mask, x_mask, ADD)
    else:
        _store_gated(out, gate, x, None, y[0], mask, x_mask, ADD)
        _store_gated(out + 64, gate + 64, x + 64, None, y[1], mask, x_mask, ADD)
        _store_gated(out + 128, gate + 128, x + 128, None, y[2], mask, x_mask, ADD)


@jit
def clear(spare):
    """Zero a buffer, of which each program of the two-dimensional grid takes its share."""
    if spare is not None:
        first = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 1024
        while first < spare.size:
            at = first + tl.arange(0, 1024)
            tl.store(spare.start + at, tl.zeros([1024], tl.float32), mask=at < spare.size)
            first += tl.num_programs(0) * tl.num_programs(1) * 1024


@jit
def standardise(x, eps):
    """LayerNorm without its affine part."""
    a, b, c = x
    mean = tl.sum(a + b + c, 1) / 192
    variance = tl.sum(a * a + b * b + c * c, 1) / 192 - mean * mean
    inverse = tl.rsqrt(tl.maximum(variance, 0.0) + eps)
    offset = (mean * inverse)[:, None]
    inverse = inverse[:, None]
    return a * inverse - offset, b * inverse - offset, c * inverse - offset


@jit
def modulated_norm(x, mod, mask):
    """AdaLN's modulation between two norms; ``mod`` points at the shifts, the scales follow them."""
    shift, scale = load_rows(mod, mask), load_rows(mod + 192, mask)
    a, b, c = standardise(x, 1e-6)
    a = a * (1 + scale[0]) + shift[0]
    b = b * (1 + scale[1]) + shift[1]
    c = c * (1 + scale[2]) + shift[2]
    return standardise((a, b, c), 1e-5)


@jit
def find_tokens(new, candidate, token, MOD_WIDTH: constexpr):
    """Pointers at new tokens of candidates, at their positions and at their modulations, which lie MOD_WIDTH apart."""
    x_at = pointers(new.x.start, candidate, new.x.stride) + (token * 192)[:, None]
    mod_at = pointers(new.mod.start, candidate, new.mod.stride) + (token * MOD_WIDTH)[:, None]
    return x_at, pointers(new.positions, token, 192), mod_at


@jit
def load_tokens(x, position, mod, mask):
    """What attention reads of tokens: x + position, normalised and modulated. All arguments are pointers."""
    a, b, c = load_rows(x, mask)
    p_a, p_b, p_c = load_rows(position, mask)
    return modulated_norm((a + p_a, b + p_b, c + p_c), mod, mask)


@jit
def narrow_numbers(x, dtype: constexpr):
    """Rows in the type of products."""
    return x[0].to(dtype), x[1].to(dtype), x[2].to(dtype)


@jit
def load_columns(weight, stride, columns):
    """Some columns of a weight (192, stride), tiles (64, columns)."""
    at = weight + tl.arange(0, 64)[:, None] * stride + columns[None, :]
    return tl.load(at), tl.load(at + 64 * stride), tl.load(at + 128 * stride)


@jit
def load_weight_rows(weight, rows):
    """Some rows of a weight (_, 192)."""
    at = weight + rows[:, None] * 192 + tl.arange(0, 64)[None, :]
    return tl.load(at), tl.load(at + 64), tl.load(at + 128)


@jit
def widen(x, weight):
    """Rows times columns of a weight."""
    y = tl.dot(x[0], weight[0], input_precision="ieee")
    y = tl.dot(x[1], weight[1], y, input_precision="ieee")
    return tl.dot(x[2], weight[2], y, input_precision="ieee")


@jit
def narrow(h, weight, x):
    """Rows x, plus columns h of a wider layer times their rows of a weight."""
    a = tl.dot(h, weight[0], x[0], input_precision="ieee")
    b = tl.dot(h, weight[1], x[1], input_precision="ieee")
    c = tl.dot(h, weight[2], x[2], input_precision="ieee")
    return a, b, c


@jit
def gelu(x, FAST: constexpr):
    """GELU; the fast form is within 1e-3, well below the rounding of bfloat16, and much less work."""
    if FAST:
        # The tanh approximation, its two coefficients refitted for the smallest largest error (2.7e-4).
        inner = x * (0.80015708 + 0.03470089 * x * x)
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [inner], tl.float32, True, 1)
    else:
        t = tl.erf(x * 0.7071067811865476)
    return 0.5 * x * (1 + t)
