"""The window of a rollout: every token is known when it is read, and none is computed twice without need."""

import itertools

import pytest

from lewm.kernels.rollout_window import walk


@pytest.mark.parametrize("history", [1, 2, 3, 4])
@pytest.mark.parametrize("context", [1, 2, 3, 5])
def test_each_step_knows_the_window_that_ends_where_it_predicts(history: int, context: int):
    known: set[int] = set()
    steps = list(walk(context, 6, history))
    assert len(steps) == 6
    for number, step in enumerate(steps):
        if step.begins:
            known = set()
        new = [*step.shared, *step.own]
        assert not known & set(new), "computed twice"
        known |= set(new)
        end = context + number
        assert known == set(range(max(0, end - history), end))
        assert step.start == min(known)
        assert step.own[-1] == end - 1


@pytest.mark.parametrize("history", [1, 2, 3, 4])
@pytest.mark.parametrize("context", [1, 2, 3, 5])
def test_real_frames_are_shared_but_the_last_on_which_plans_begin(history: int, context: int):
    for step in walk(context, 6, history):
        assert all(token < context - 1 for token in step.shared)
        assert all(token >= context - 1 for token in step.own)


@pytest.mark.parametrize("context", [1, 2, 3])
def test_a_window_grows_until_it_is_full(context: int):
    steps = list(walk(context, 4, history=3))
    for step, after in itertools.pairwise(steps):
        assert step.grows != after.begins
    assert [step.grows for step in steps] == [context + number < 3 for number in range(4)]
