"""Action statistics against the plain definition, and where that has none."""

from __future__ import annotations

import numpy as np
import pytest

from lewm.data.stats import action_stats
from lewm.errors import DataError


def test_statistics_ignore_the_rows_without_an_action() -> None:
    actions = np.array([[1, 10], [np.nan, np.nan], [3, 30], [5, 20]], np.float32)
    stats = action_stats(actions)
    assert stats.mean == pytest.approx((3, 20))
    assert stats.std == pytest.approx((np.sqrt(8 / 3), np.sqrt(200 / 3)))


def test_a_large_offset_does_not_spoil_the_deviation() -> None:
    actions = np.float32(10_000) + np.random.default_rng(0).normal(0, 1, (200_000, 1)).astype(np.float32)
    assert action_stats(actions).std[0] == pytest.approx(1, abs=0.01)


def test_a_constant_dimension_is_only_centred() -> None:
    actions = np.stack([np.full(1000, 0.1), np.arange(1000)], axis=1).astype(np.float32)
    stats = action_stats(actions)
    assert stats.std[0] == 1.0
    assert stats.mean[0] == pytest.approx(0.1)
    assert stats.std[1] > 1


@pytest.mark.parametrize("actions", [np.zeros((0, 2), np.float32), np.full((3, 2), np.nan, np.float32)])
def test_no_action_at_all_is_an_error(actions: np.ndarray) -> None:
    with pytest.raises(DataError, match="has an action"):
        action_stats(actions)
