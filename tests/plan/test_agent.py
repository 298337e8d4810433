"""The agent: what it remembers, what it hands out, and what it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import cv2
import numpy as np
import pytest
import torch

import lewm
from lewm import Agent, LeWM, PlanConfig, Planner
from lewm.config import ScheduleName
from lewm.data.formats.convert import fit_frames
from lewm.envs.registry import make_env
from lewm.errors import PlanningError
from lewm.plan.inputs import Request
from lewm.plan.policy import Memory
from lewm.types import Array, Plan

SIZE, SKIP, DIM, HISTORY = 8, 2, 3, 3
CONFIG = PlanConfig(horizon=2, samples=16, iterations=2, elites=4)


def numbered(number: int, size: int = SIZE) -> Array:
    """A frame that can be told from others."""
    return np.full((size, size, 3), number, np.uint8)


class Scribe:
    """In place of a planner: writes down what it is asked for. Action i of plan n is (n, i, -n)."""

    history, frame_skip, action_dim, image_size, batch_size = HISTORY, SKIP, DIM, SIZE, 50
    training = False

    def __init__(self, **config: Any) -> None:
        self.config = PlanConfig(horizon=3, **config)
        self.model: Any = self
        self.requests: list[Request] = []

    def plan_many(self, requests: Sequence[Request]) -> list[Plan]:
        self.requests.extend(requests)
        return [self._plan(request) for request in requests]

    def _plan(self, request: Request) -> Plan:
        blocks = request.horizon or self.config.horizon
        steps = np.arange(blocks * SKIP, dtype=np.float32)
        number = np.full_like(steps, request.place[1])
        return Plan(np.stack([number, steps, -number], axis=1), 1.5, np.arange(blocks, dtype=np.float32))


class Follower:
    """A toy method that acts: towards the goal's grey level, by the newest frame's, and by how many frames it sees."""

    history, frame_skip, action_dim, image_size = HISTORY, SKIP, DIM, SIZE
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def act(self, frames_BTRRC: torch.Tensor, goals: torch.Tensor) -> torch.Tensor:
        assert frames_BTRRC.dtype == goals.dtype == torch.uint8
        self.seen.append((frames_BTRRC, goals))
        now, wanted = frames_BTRRC[:, -1].float().mean((1, 2, 3)), goals.float().mean((1, 2, 3))
        numbers = torch.stack([wanted - now, now, torch.full_like(now, frames_BTRRC.shape[1])], dim=1)
        return numbers.unsqueeze(1).repeat(1, SKIP, 1)


def walk(agent: Agent, frames: Sequence[Array]) -> Array:
    """The actions (n, ...) that follow these frames."""
    return np.stack([agent.act(frame) for frame in frames])


# -- what it remembers ------------------------------------------------------------------------------------------------


def test_memory_hands_out_the_last_frames_and_the_blocks_between_them():
    memory = Memory(numbered(0), 0, history=3)
    memory.add(numbered(0)[None], np.zeros((0, 5, 2), np.float32))
    assert len(memory.context().executed) == 0
    for i in range(1, 6):
        # Block i leads from frame i-1 to frame i.
        memory.add(numbered(i)[None], np.full((1, 5, 2), i, np.float32))
        context = memory.context()
        first = max(0, i - 2)
        assert context.frames[:, 0, 0, 0].tolist() == list(range(first, i + 1))
        assert context.executed[:, 0, 0].tolist() == list(range(first + 1, i + 1))
        assert context.executed.shape[1:] == (5, 2)
    assert (memory.blocks, memory.followed) == (5, 25)


def test_memory_of_one_frame_keeps_no_blocks():
    memory = Memory(numbered(0), 0, history=1)
    memory.add(numbered(0)[None], np.zeros((0, 5, 2), np.float32))
    memory.add(numbered(1)[None], np.ones((1, 5, 2), np.float32))
    assert memory.context().frames[:, 0, 0, 0].tolist() == [1]
    assert len(memory.context().executed) == 0


@pytest.mark.parametrize(("drawn", "known"), [(3, [3, 4, 5]), (2, [4, 5]), (1, [5])])
def test_frames_that_were_left_out_are_a_gap(drawn: int, known: list[int]):
    """Five blocks are executed at once, and only the last frames are drawn: what came before is not their past."""
    memory = Memory(numbered(9), 0, history=3)
    memory.add(numbered(0)[None], np.zeros((0, 5, 2), np.float32))
    blocks = np.arange(1, 6, dtype=np.float32)[:, None, None] * np.ones((1, 5, 2), np.float32)
    memory.add(np.stack([numbered(i) for i in range(6 - drawn, 6)]), blocks)
    assert memory.context().frames[:, 0, 0, 0].tolist() == known
    assert memory.context().executed[:, :1, :1].ravel().tolist() == known[1:]
    assert memory.blocks == 5


@pytest.mark.parametrize(("drawn", "known"), [(3, [3, 4, 5]), (1, [5])])
def test_what_is_sensed_is_remembered_with_its_frame(drawn: int, known: list[int]):
    memory = Memory(numbered(9), 0, history=3, goal_proprio=np.array([7.0]))
    memory.add(numbered(0)[None], np.zeros((0, 5, 2), np.float32), np.array([[0.0]]))
    assert memory.context().proprio.tolist() == [[0.0]]
    seen = list(range(6 - drawn, 6))
    memory.add(np.stack([numbered(i) for i in seen]), np.zeros((5, 5, 2), np.float32), np.array(seen)[:, None])
    assert memory.context().proprio.tolist() == [[value] for value in known]
    memory.add(numbered(6)[None], np.zeros((1, 5, 2), np.float32), np.array([[6]]))
    assert memory.context().proprio.tolist() == [[value] for value in [*known, 6][-3:]]
    assert memory.goal_proprio.tolist() == [7.0]


def test_each_world_senses_itself():
    scribe = Scribe(schedule="receding")
    agent = Agent(scribe)
    agent.policy.proprio_dim = 2
    agent.reset(np.stack([numbered(98), numbered(99)]), proprio=[[1, 2], [3, 4]])
    agent.act(np.stack([numbered(0), numbered(1)]), np.array([[5, 6], [7, 8]]))
    assert [request.goal_proprio.tolist() for request in scribe.requests] == [[1, 2], [3, 4]]
    assert [request.context.proprio.tolist() for request in scribe.requests] == [[[5, 6]], [[7, 8]]]
    with pytest.raises(PlanningError, match=r"2 numbers with each image.*expected shape \(2, 2\), got shape \(2,\)"):
        agent.reset(np.stack([numbered(98), numbered(99)]), proprio=[1, 2])


@pytest.mark.parametrize("schedule", ["whole", "receding"])
def test_a_plan_starts_from_the_frames_at_the_ends_of_blocks_and_the_blocks_between(schedule: ScheduleName):
    scribe = Scribe(schedule=schedule)
    agent = Agent(scribe)
    agent.reset(numbered(99))
    actions = walk(agent, [numbered(i) for i in range(13)])
    length = 6 if schedule == "whole" else 2
    starts = range(0, 13, length)
    assert [request.place for request in scribe.requests] == [(0, n) for n in range(len(starts))]
    for start, request in zip(starts, scribe.requests, strict=True):
        at = list(range(start % 2, start + 1, 2))[-HISTORY:]
        assert request.context.frames[:, 0, 0, 0].tolist() == at
        between = [actions[i : i + 2] for i in at[:-1]]
        np.testing.assert_array_equal(request.context.executed.reshape(-1, 2, 3), np.reshape(between, (-1, 2, 3)))
        assert request.goal[0, 0, 0] == 99
    np.testing.assert_array_equal(actions[:, 1], [i % length for i in range(13)])
    np.testing.assert_array_equal(actions[:, 0], [i // length for i in range(13)])


def test_horizons_shrink_and_searches_begin_from_what_is_left():
    scribe = Scribe(schedule="shrinking", warm_start=True)
    agent = Agent(scribe)
    agent.reset(numbered(0))
    walk(agent, [numbered(i) for i in range(8)])
    assert [request.horizon for request in scribe.requests] == [3, 2, 1, 3]
    starts = [request.start for request in scribe.requests]
    assert starts[0] is None
    assert [start[:, 1].tolist() for start in starts[1:]] == [[2, 3, 4, 5], [2, 3], []]


def test_actions_are_clipped_and_remembered_so():
    for bounds in ((-0.5, 0.75), gym_box(-0.5, 0.75)):
        scribe = Scribe(schedule="receding")
        agent = Agent(scribe, bounds=bounds)
        agent.reset(numbered(0))
        actions = walk(agent, [numbered(i) for i in range(5)])
        assert (actions.min(), actions.max()) == (-0.5, 0.75)
        np.testing.assert_array_equal(scribe.requests[2].context.executed[1], actions[2:4])
    unbounded = Agent(Scribe(schedule="receding"))
    unbounded.reset(numbered(0))
    assert walk(unbounded, [numbered(i) for i in range(5)]).min() == -2


def gym_box(low: float, high: float) -> Any:
    return make_env("tworoom", 8).action_space.__class__(low, high, (DIM,), np.float32)


def test_what_the_caller_does_with_its_arrays_changes_nothing():
    scribe, buffer = Scribe(schedule="receding"), numbered(0)
    agent, goal = Agent(scribe), numbered(7)
    agent.reset(goal)
    goal[:] = 0
    for i in range(5):
        buffer[:] = i
        agent.act(buffer)[:] = 50
    assert scribe.requests[-1].context.frames[:, 0, 0, 0].tolist() == [0, 2, 4]
    assert scribe.requests[-1].context.executed.max() < 50
    assert scribe.requests[-1].goal.max() == 7


def test_resets_are_counted_and_numbers_can_be_given():
    scribe = Scribe()
    agent = Agent(scribe, seed=3)
    for goals, episode in ((1, None), (1, None), (2, None), (1, 17), (2, [5, 4]), (1, None)):
        agent.reset(np.stack([numbered(0)] * goals) if goals > 1 else numbered(0), episode)
        agent.act(np.stack([numbered(1)] * goals) if goals > 1 else numbered(1))
    assert [request.place for request in scribe.requests] == [(n, 0) for n in (0, 1, 2, 3, 17, 5, 4, 7)]
    keys = {request.key for request in scribe.requests}
    other = Scribe()
    again = Agent(other, seed=4)
    again.reset(numbered(0))
    again.act(numbered(1))
    assert len(keys | {other.requests[0].key}) == 9, "each has a stream of its own"


# -- the first decision -----------------------------------------------------------------------------------------------

# What becomes a method of the debug model; a further one is a further line.
METHODS: dict[str, Callable[[LeWM], Any]] = {
    "cem": lambda model: Planner(model, config=CONFIG),
    "icem": lambda model: Planner(model, config=replace(CONFIG, solver="icem", schedule="shrinking", warm_start=True)),
    "soonest": lambda model: Planner(model, config=replace(CONFIG, schedule="soonest")),
    "adam": lambda model: Planner(model, config=replace(CONFIG, solver="adam", schedule="receding")),
    "actor": lambda model: Follower(),  # noqa: ARG005
}


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
def test_the_first_decision_is_the_same_whatever_action_the_start_row_holds(
    debug_model: LeWM, make: Callable[[LeWM], Any]
):
    """A row of a dataset holds an action: the one that came after it there, which an agent is not to be told.

    Neither is what was done in the world before the episode: the world is asked for it here, by whoever plays rows.
    """
    env = make_env("tworoom", resolution=28)
    frame, goal = env.render_states(np.array([[60.0, 60.0], [150.0, 120.0]]))
    decisions = []
    for row_action in ([0.0, 0.0], [1.0, -1.0], [0.25, 0.125], [np.nan, np.nan]):
        method = make(debug_model)
        agent = Agent(method)
        skip, dim = agent.policy.frame_skip, agent.policy.action_dim
        agent.reset(goal, episode=8)
        agent.observe(0, frame[None])
        agent.observe(0, frame[None], np.resize(np.float32(row_action), (1, skip, dim)))  # played before the episode
        agent.reset(goal, episode=0)
        decisions.append(walk(agent, [frame] * skip))
    for other in decisions[1:]:
        np.testing.assert_array_equal(decisions[0], other)
    ways_in = {*inspect.signature(Agent.reset).parameters, *inspect.signature(Agent.act).parameters}
    assert ways_in == {"self", "goal", "episode", "frame", "proprio"}, "an action could come in by another one"


def test_a_fresh_episode_knows_nothing_of_the_last_one(debug_model: LeWM):
    env = make_env("tworoom", resolution=28)
    frames = env.render_states(np.linspace([60.0, 60.0], [60.0, 120.0], 30))
    used, fresh = (Agent(debug_model, replace(CONFIG, schedule="shrinking", warm_start=True)) for _ in range(2))
    used.reset(frames[0], episode=4)
    walk(used, frames[:13])
    for agent in (used, fresh):
        agent.reset(frames[-1], episode=1)
    np.testing.assert_array_equal(walk(used, frames[5:20]), walk(fresh, frames[5:20]))


# -- one world and many, frames of any size ---------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["whole", "soonest"])
def test_a_batch_does_what_its_worlds_do_alone(debug_model: LeWM, schedule: ScheduleName):
    env = make_env("tworoom", resolution=28)
    paths = [env.render_states(np.linspace([60.0, 60.0], [60.0, 80.0 + 30 * i], 12)) for i in range(3)]
    goals, settings = np.stack([path[-1] for path in paths]), replace(CONFIG, schedule=schedule, warm_start=True)
    batch, alone = Agent(debug_model, settings), Agent(debug_model, settings)
    batch.reset(goals)
    together = walk(batch, list(np.stack(paths, axis=1)))
    assert together.shape == (12, 3, 2)
    assert together.dtype == np.float32
    for i, path in enumerate(paths):
        alone.reset(goals[i])
        np.testing.assert_array_equal(walk(alone, path), together[:, i])
    one = Agent(debug_model, settings)
    one.reset(goals[:1])
    np.testing.assert_array_equal(walk(one, list(paths[0][:, None]))[:, 0], together[:, 0])


def test_a_batch_of_an_actor_does_what_its_worlds_do_alone():
    agent, alone = Agent(Follower()), Agent(Follower())
    goals = np.stack([numbered(10), numbered(200)])
    agent.reset(goals)
    together = walk(agent, [np.stack([numbered(i), numbered(100 + i)]) for i in range(9)])
    for world, begin in enumerate((0, 100)):
        alone.reset(goals[world])
        np.testing.assert_array_equal(walk(alone, [numbered(begin + i) for i in range(9)]), together[:, world])
    np.testing.assert_array_equal(together[:, 0, 1], [0, 0, 2, 2, 4, 4, 6, 6, 8], "blocks of two actions")
    np.testing.assert_array_equal(together[:, 0, 2], [1, 1, 2, 2, 3, 3, 3, 3, 3], "up to three frames")


@pytest.mark.parametrize("size", [8, 5, 17, 224])
def test_frames_of_any_size_are_resized_as_the_data_was(size: int):
    rng = np.random.default_rng(size)
    frames, goal = rng.integers(0, 256, (3, size, size, 3), np.uint8), rng.integers(0, 256, (31, 31, 3), np.uint8)
    follower = Follower()
    agent = Agent(follower)
    agent.reset(goal)
    walk(agent, [frames[0], frames[1], frames[2]])
    seen, wanted = follower.seen[-1]
    assert seen.shape == (1, 2, SIZE, SIZE, 3)
    np.testing.assert_array_equal(seen[0, 1], cv2.resize(frames[2], (SIZE, SIZE), interpolation=cv2.INTER_AREA))
    np.testing.assert_array_equal(seen[0], fit_frames(frames[[0, 2]], SIZE))
    np.testing.assert_array_equal(wanted[0], fit_frames(goal[None], SIZE)[0])


# -- looking at plans -------------------------------------------------------------------------------------------------


def test_what_is_left_of_the_plan_can_be_looked_at():
    agent = Agent(Scribe())
    assert agent.plan is None
    agent.reset(numbered(0))
    assert agent.plan is None
    for i in range(8):
        action = agent.act(numbered(i))
        plan = agent.plan
        assert isinstance(plan, Plan)
        done = i % 6 + 1
        assert plan.actions[:, 1].tolist() == list(range(done, 6))
        assert plan.distances.tolist() == list(range(done // 2, 3))
        assert (plan.cost, action[1]) == (1.5, done - 1)
    agent.reset(np.stack([numbered(0)] * 2))
    assert agent.plan == [None, None]
    agent.act(np.stack([numbered(0)] * 2))
    assert [len(plan.actions) for plan in agent.plan] == [5, 5]


def test_an_actor_has_no_plan():
    agent = Agent(Follower())
    agent.reset(numbered(0))
    agent.act(numbered(1))
    assert agent.plan is None


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (numbered(1).astype(np.float32) / 255, r"frame must be an image of uint8.*got float32 of shape \(8, 8, 3\)"),
        (numbered(1).astype(np.int64), "got int64"),
        (np.zeros((8, 6, 3), np.uint8), r"square.*got uint8 of shape \(8, 6, 3\)"),
        (np.zeros((3, 8, 8), np.uint8), "colours last"),
        (np.zeros((8, 8), np.uint8), r"got uint8 of shape \(8, 8\)"),
        (np.zeros((0, 8, 8, 3), np.uint8), r"\(0, 8, 8, 3\)"),
        (np.zeros((1, 8, 8, 3), np.uint8), r"reset for one world, \(S, S, 3\); the frame has shape \(1, 8, 8, 3\)"),
        ("frame", "got <U5"),
    ],
)
def test_frames_that_are_none_are_refused(frame: Any, message: str):
    agent = Agent(Follower())
    agent.reset(numbered(0))
    with pytest.raises(PlanningError, match=message):
        agent.act(frame)
    assert agent.act(numbered(3))[1] == 3, "it goes on as if nothing had been"


def test_a_batch_wants_a_frame_for_each_world():
    agent = Agent(Follower())
    agent.reset(np.stack([numbered(0)] * 3))
    for frames in (numbered(0), np.stack([numbered(0)] * 2)):
        with pytest.raises(PlanningError, match=r"reset for 3 worlds, \(N, S, S, 3\)"):
            agent.act(frames)


def test_nothing_works_before_a_goal_is_given():
    agent = Agent(Follower())
    for call in (
        lambda: agent.act(numbered(0)),
        lambda: agent.decide([0]),
        lambda: agent.observe(0, numbered(0)[None]),
    ):
        with pytest.raises(PlanningError, match=r"no goal yet\. Call reset\(goal\) first"):
            call()
    with pytest.raises(PlanningError, match="goal must be an image"):
        agent.reset(numbered(0).astype(float))


@pytest.mark.parametrize("episode", [-1, [0, 1], [], 0.5])
def test_episode_numbers_that_do_not_fit_are_refused(episode: Any):
    with pytest.raises(PlanningError, match="1 goals need as many episode numbers"):
        Agent(Follower()).reset(numbered(0), episode)


@pytest.mark.parametrize("bounds", [(1.0, -1.0), ([0, 0], [1, 1]), gym_box(0, 1).__class__(-1, 1, (2, DIM))])
def test_bounds_that_do_not_fit_are_refused(bounds: Any):
    with pytest.raises(PlanningError, match="bounds must be an action space of 3 numbers"):
        Agent(Follower(), bounds=bounds)


def test_blocks_and_frames_that_do_not_fit_are_refused():
    agent, frame = Agent(Follower()), numbered(0)[None]
    agent.reset(numbered(0))
    with pytest.raises(PlanningError, match=r"1 to 1 frames.*begins with a frame and no block"):
        agent.observe(0, np.concatenate([frame, frame]))
    agent.observe(0, frame)
    for executed, frames in ((None, frame), (np.zeros((1, SKIP, 2)), frame), (np.zeros((1, SKIP, DIM)), frame[:0])):
        with pytest.raises(PlanningError, match=r"Expected blocks of shape \(n, 2, 3\)"):
            agent.observe(0, frames, executed)


def test_a_method_that_can_neither_plan_nor_act_is_refused():
    with pytest.raises(PlanningError, match=r"object can neither plan nor act.*planning_rollout.*act\(frames, goals\)"):
        Agent(object())


def test_settings_are_given_once(debug_model: LeWM):
    with pytest.raises(PlanningError, match="Planner has settings of its own already"):
        Agent(Planner(debug_model, config=CONFIG), CONFIG)


def test_a_method_in_training_is_refused(debug_model: LeWM):
    with pytest.raises(PlanningError, match="training mode"):
        Agent(debug_model.train())
    follower = Follower()
    follower.training = True  # type: ignore[attr-defined]
    with pytest.raises(PlanningError, match="Follower is in training mode"):
        Agent(follower)


def test_an_actor_that_returns_something_else_is_named():
    class Short(Follower):
        def act(self, frames_BTRRC: torch.Tensor, goals: torch.Tensor) -> torch.Tensor:
            return super().act(frames_BTRRC, goals)[:, 0]

    agent = Agent(Short())
    agent.reset(numbered(0))
    with pytest.raises(PlanningError, match=r"Short\.act was to return blocks of shape \(1, 2, 3\), got \(1, 3\)"):
        agent.act(numbered(0))


def test_it_has_a_name_at_the_top():
    assert lewm.Agent is Agent
