"""Batches by step: the right ones, whatever the order, and errors that arrive where they are asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lewm.errors import DataError
from lewm.train.prefetch import Batches
from lewm.types import Batch


def load(step: int) -> Batch:
    if step == 3:
        raise DataError("step 3 is damaged")
    indices = np.array([10 * step, 10 * step + 1])
    return Batch(torch.from_numpy(indices).float(), torch.from_numpy(indices).to(torch.uint8))


@pytest.fixture
def batches() -> Batches:
    batches = Batches(load, 6, torch.device("cpu"))
    batches.ahead = 2  # as on a GPU, without its streams
    return batches


@pytest.mark.parametrize("steps", [[0, 1, 2], [4, 5], [2, 0, 1, 5]])
def test_each_step_gets_its_windows(batches: Batches, steps: list[int]) -> None:
    for step in steps:
        assert batches(step).actions.tolist() == [10 * step, 10 * step + 1]
    batches.close()


def test_no_batch_after_the_last_is_prepared_and_none_twice() -> None:
    prepared: list[int] = []

    def noted(step: int) -> Batch:
        prepared.append(step)
        return load(step)

    batches = Batches(noted, 6, torch.device("cpu"))
    batches.ahead = 2
    batches(4)
    batches.wait()
    assert sorted(prepared) == [4, 5]
    batches(5)
    batches.close()
    assert sorted(prepared) == [4, 5]


def test_an_error_belongs_to_its_step(batches: Batches) -> None:
    batches(1)
    batches.wait()
    assert batches(2).actions.tolist() == [20, 21]
    with pytest.raises(DataError, match="step 3 is damaged"):
        batches(3)
    batches.close()
