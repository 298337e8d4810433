"""All horizons at once: each is judged on its arrival, and the shortest good plan is chosen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lewm.plan.soonest import ArrivalCost, soonest


@pytest.mark.parametrize(
    ("distances", "chosen"),
    [
        ([1.0], 1),
        ([9.0, 4.0, 2.0, 1.0], 4),
        # Half as far again as the best counts as good, and the first that is good is chosen.
        ([9.0, 1.5, 1.2, 1.0], 2),
        ([9.0, 1.51, 1.2, 1.0], 3),
        # Waiting would come no nearer, nor would overshooting.
        ([1.0, 1.0, 1.0, 1.0], 1),
        ([0.1, 3.0, 5.0, 9.0], 1),
        ([0.0, 0.0, 1.0, 1.0], 1),
    ],
)
def test_soonest_is_the_shortest_plan_that_is_nearly_the_best(distances: list[float], chosen: int):
    assert soonest(np.array(distances, np.float32)) == chosen


def test_each_horizon_is_judged_on_its_arrival():
    def cost(actions_BSHA: torch.Tensor) -> torch.Tensor:
        return actions_BSHA.sum((2, 3))

    actions_BSHA = torch.tensor([1.0, 10.0, 100.0]).view(1, 1, 3, 1) * torch.arange(1.0, 7).view(6, 1, 1, 1)
    expected = torch.tensor([[1.0], [2.0], [33.0], [44.0], [555.0], [666.0]])  # two episodes, three horizons
    torch.testing.assert_close(ArrivalCost(cost)(actions_BSHA), expected)
