"""Planning noise: a pure function of (key, position), and as good as Gaussian."""

from __future__ import annotations

import math

import pytest
import torch

from lewm.plan.noise import normal


def keys(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_a_keys_numbers_do_not_depend_on_its_companions():
    values = (0, 1, 7, 2**62 + 5, -3)
    together = normal(keys(*values), 10, 33)
    assert together.shape == (5, 33)
    assert together.dtype == torch.float32
    for i, value in enumerate(values):
        assert torch.equal(together[i : i + 1], normal(keys(value), 10, 33))


@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 7), (2, 1), (40, 59), (98, 2), (64, 36)])
def test_any_part_of_a_stream_can_be_asked_for(start: int, count: int):
    whole = normal(keys(5, 6), 0, 100)
    assert torch.equal(normal(keys(5, 6), start, count), whole[:, start : start + count])


def test_a_million_numbers_look_gaussian():
    x = normal(keys(12345), 0, 1_000_000)[0].double()
    n = len(x)
    # Five standard errors of each statistic; the numbers are fixed, so this passes always or never.
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / n)
    assert 4.5 < x.abs().max() < 6
    # Kolmogorov-Smirnov against the normal distribution, at the 1 % level.
    cdf = torch.special.ndtr(x.sort().values)
    steps = torch.arange(n, dtype=torch.float64) / n
    assert (cdf - steps).abs().max() * math.sqrt(n) < 1.63


@pytest.mark.parametrize("lag", [1, 2, 3, 256])
def test_positions_of_a_stream_are_uncorrelated(lag: int):
    x = normal(keys(99), 0, 1_000_000)[0].double()
    for y in (x, x.square() - 1):  # the squares too: Box-Muller pairs share a radius
        correlation = (y[lag:] * y[:-lag]).mean() / y.square().mean()
        assert abs(correlation) < 5 / math.sqrt(len(x))


def test_neighbouring_keys_give_independent_streams():
    count = 16_384
    x = normal(torch.arange(64), 0, count).double()
    for y in (x, x.square()):
        correlation = torch.corrcoef(y) - torch.eye(64, dtype=torch.float64)
        assert correlation.abs().max() < 5 / math.sqrt(count)
