"""Success rates and their Wilson intervals."""

from __future__ import annotations

import math

import pytest

from lewm.evaluate.stats import Rate


# From the closed form in Wilson (1927); the first two are also those of Newcombe (1998), Table I.
@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 10, 0.0, 0.2775),
        (7, 10, 0.3968, 0.8922),
        (50, 50, 0.9287, 1.0),
        (1, 1, 0.2065, 1.0),
    ],
)
def test_wilson_interval(successes: int, total: int, low: float, high: float):
    assert Rate(successes, total).interval == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("total", [1, 7, 50, 200])
def test_interval_holds_the_rate_and_solves_wilsons_equation(total: int):
    for successes in range(total + 1):
        rate = Rate(successes, total)
        low, high = rate.interval
        assert 0 <= low <= rate.value + 1e-12
        assert rate.value - 1e-12 <= high <= 1
        # An end of the interval is a true rate p from which the observed one is 1.96 standard errors away.
        for p in (low, high):
            assert abs(rate.value - p) == pytest.approx(1.959964 * math.sqrt(p * (1 - p) / total), abs=1e-6)


def test_text_and_json_forms():
    rate = Rate(45, 50)
    assert str(rate) == "90.0 % [78.6, 95.7] (45/50)"
    assert rate.to_dict() == {
        "successes": 45,
        "episodes": 50,
        "rate": 0.9,
        "interval_95": pytest.approx([0.7864, 0.9565], abs=5e-5),
    }
