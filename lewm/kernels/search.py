"""What a search does besides imagining futures, as Triton kernels: drawing candidates, and refitting to the elites.

In PyTorch these are some twenty kernels, which for one environment take as long as a third of the futures. Where there
is no Triton, ``plan/noise.py`` and ``plan/cem.py`` do the same with tensor operations.
"""

# Kernels get their types when Triton compiles them.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch

from lewm.kernels.common import jit

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:
    triton = None

WORDS = 256  # of noise that a program makes
COLUMNS = 16  # of the plans that a program refits


def available(tensor: torch.Tensor) -> bool:
    """Whether the kernels can work on a tensor."""
    return triton is not None and tensor.is_cuda


def normal(keys_B: torch.Tensor, start: torch.Tensor, count: int) -> torch.Tensor:
    """``noise.normal`` with ``start`` an int64 scalar on the device: (B,) -> float32 (B, count)."""
    noise = torch.empty(len(keys_B), count, device=keys_B.device)
    _normal_kernel[len(keys_B), triton.cdiv(count, 2 * WORDS)](keys_B, start, noise, count, WORDS=WORDS)
    return noise


def sample(
    mean_BN: torch.Tensor, std_BN: torch.Tensor, keys_B: torch.Tensor, iteration: torch.Tensor, samples: int
) -> torch.Tensor:
    """Plans (B, S, N) around a mean, which is the first of them; the noise is that of ``Problem.noise``."""
    b, n = mean_BN.shape
    plans = mean_BN.new_empty(b, samples, n)
    grid = b, triton.cdiv(samples * n, 2 * WORDS)
    _sample_kernel[grid](mean_BN, std_BN, keys_B, iteration, plans, samples * n, n, WORDS=WORDS)
    return plans


def refit(plans_BSN: torch.Tensor, cost_BS: torch.Tensor, elites: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation (B, N) of the ``elites`` plans of lowest cost."""
    b, s, n = plans_BSN.shape
    mean, std = plans_BSN.new_empty(2, b, n).unbind(0)
    samples = triton.next_power_of_2(s)
    _refit_kernel[b, triton.cdiv(n, COLUMNS)](
        plans_BSN.contiguous(), cost_BS.contiguous(), mean, std, s, n, elites, SAMPLES=samples, COLUMNS=COLUMNS
    )
    return mean, std


@jit
def _normal(key, word):
    """Two standard normal numbers from a word of a stream: SplitMix64, then Box-Muller. ``noise.py`` explains."""
    bits = key.to(tl.uint64, bitcast=True) + (word + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    bits = bits ^ (bits >> 31)
    u = ((bits >> 40).to(tl.float32) + 1) * (2.0**-24)
    angle = (bits & 0xFFFFFF).to(tl.float32) * (6.283185307179586 * 2.0**-24)
    radius = tl.sqrt(-2 * tl.log(u))
    return radius * tl.cos(angle), radius * tl.sin(angle)


@jit
def _normal_kernel(keys, start, out, count, WORDS: constexpr):
    """``count`` numbers of each stream, from ``start`` on."""
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    first, second = _normal(tl.load(keys + tl.program_id(0)), word + tl.load(start) // 2)
    at = out + tl.program_id(0) * count + 2 * word
    tl.store(at, first, mask=2 * word < count)
    tl.store(at + 1, second, mask=2 * word + 1 < count)


@jit
def _store_plan(plans, mean, std, noise, number, count, numbers):
    """Number ``number`` of all plans of an episode, ``numbers`` each."""
    mask = number < count
    middle = tl.load(mean + number % numbers, mask=mask)
    spread = tl.load(std + number % numbers, mask=mask)
    tl.store(plans + number, tl.where(number < numbers, middle, middle + spread * noise), mask=mask)


@jit
def _sample_kernel(mean, std, keys, iteration, plans, count, numbers, WORDS: constexpr):
    """Plans of each episode, ``count`` numbers in all."""
    b = tl.program_id(0)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    first, second = _normal(tl.load(keys + b), word + tl.load(iteration) * ((count + 1) // 2))
    mean, std, plans = mean + b * numbers, std + b * numbers, plans + b * count
    _store_plan(plans, mean, std, first, 2 * word, count, numbers)
    _store_plan(plans, mean, std, second, 2 * word + 1, count, numbers)


@jit
def _refit_kernel(plans, cost, mean, std, samples, numbers, elites, SAMPLES: constexpr, COLUMNS: constexpr):
    """Some columns of one episode's plans. Of candidates that cost as much as the worst elite, the first are elites."""
    index = tl.arange(0, SAMPLES)
    value = tl.load(cost + tl.program_id(0) * samples + index, mask=index < samples, other=float("inf"))
    value = tl.where(value == value, value, float("inf"))  # a plan without a finite cost is no good one
    # As integers that are ordered like the numbers; what is no candidate at all comes last.
    bits = value.to(tl.int32, bitcast=True)
    rank = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64) + 0x80000000
    rank = tl.where(index < samples, rank, 0x1FFFFFFFF)
    # The elites' largest, bit by bit: the largest number that fewer than ``elites`` are below.
    worst = tl.zeros([], tl.int64)
    for i in range(32):
        higher = worst + (tl.full([], 1, tl.int64) << (31 - i))
        worst = tl.where(tl.sum((rank < higher).to(tl.int32), 0) < elites, higher, worst)
    is_below, is_equal = rank < worst, rank == worst
    places = elites - tl.sum(is_below.to(tl.int32), 0)
    is_elite = is_below | (is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= places))
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = plans + (tl.program_id(0) * samples + index)[:, None] * numbers + column[None, :]
    values = tl.load(at, mask=is_elite[:, None] & (column < numbers)[None, :], other=0.0)
    middle = tl.sum(values, 0) / elites
    offset = tl.where(is_elite[:, None], values - middle[None, :], 0.0)
    spread = tl.sqrt(tl.sum(offset * offset, 0) / (elites - 1))
    at = tl.program_id(0) * numbers + column
    tl.store(mean + at, middle, mask=column < numbers)
    tl.store(std + at, spread, mask=column < numbers)
