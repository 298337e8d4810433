"""Planning with a world model: what a plan starts from, what it promises, and what is refused."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from lewm.config import GradientConfig, IcemConfig, PlanConfig, ScheduleName, SolverName
from lewm.envs.registry import make_env
from lewm.errors import ConfigError, PlanningError
from lewm.methods.lewm import LeWM
from lewm.plan.cost import Objective, squared_distance, terminal_distance
from lewm.plan.inputs import Encoded, Request
from lewm.plan.planner import Planner
from lewm.presets import preset
from lewm.types import Array, Context, EncoderFunction, Plan, RolloutFunction

CONFIG = PlanConfig(horizon=2, samples=16, iterations=3, elites=4)
POSITIONS = np.array([[50.0, 50.0], [60.0, 55.0], [70.0, 60.0], [150.0, 120.0], [170.0, 60.0], [40.0, 180.0]])


@pytest.fixture
def frames() -> Array:
    """Six TwoRoom frames, (6, 28, 28, 3)."""
    return make_env("tworoom", resolution=28).render_states(POSITIONS)


@pytest.fixture
def model(debug_model: LeWM) -> LeWM:
    """A model on which actions have a clear effect: after a few steps of training theirs is hardly above rounding."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in debug_model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return debug_model


@pytest.fixture
def planner(model: LeWM) -> Planner:
    return Planner(model, config=CONFIG)


def blocks(count: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).uniform(-1, 1, (count, 5, 2)).astype(np.float32)


def assert_same(one: Plan, other: Plan) -> None:
    """Bitwise."""
    np.testing.assert_array_equal(one.actions, other.actions)
    np.testing.assert_array_equal(one.distances, other.distances)
    assert one.cost == other.cost


class ActionWorld:
    """A world whose embedding after an action block is that z-scored block itself: a plan's truth is known.

    A goal image asks for the z-scored block that its first four pixels hold, in sixteenths from -8 up.
    """

    history, frame_skip, action_dim, image_size = 3, 2, 2, 8
    device = torch.device("cpu")
    mean, std = torch.tensor([100.0, -3.0]), torch.tensor([10.0, 0.5])

    def __init__(self) -> None:
        self.encoded: list[torch.Tensor] = []
        self.rollouts: list[torch.Tensor] = []
        self.past_BTA = torch.empty(0)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        self.encoded.append(pixels)
        return pixels[..., 0, :4, 0].float() / 16 - 8

    def planning_encoder(self, precision: str) -> EncoderFunction:  # noqa: ARG002
        return self.encode

    def planning_rollout(self, precision: str, differentiable: bool) -> RolloutFunction:  # noqa: ARG002
        return self.rollout

    def rollout(self, z_BTD: torch.Tensor, past_BTA: torch.Tensor, actions_BSHA: torch.Tensor) -> torch.Tensor:
        assert past_BTA.shape == (z_BTD.shape[0], z_BTD.shape[1] - 1, 4)
        self.past_BTA = past_BTA
        self.rollouts.append(actions_BSHA.clone())
        return actions_BSHA

    def normalise_actions(self, raw: torch.Tensor) -> torch.Tensor:
        return ((raw - self.mean) / self.std).flatten(-2)

    def denormalise_actions(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks.unflatten(-1, (2, 2)) * self.std + self.mean

    def image(self, block: tuple[float, ...]) -> Array:
        image = np.zeros((8, 8, 3), np.uint8)
        image[0, :4, 0] = (np.array(block) + 8) * 16
        return image


def test_search_is_in_z_scored_space_and_the_plan_in_raw_actions():
    world, target = ActionWorld(), (1.5, -0.5, -1.0, 0.25)
    planner = Planner(world, config=PlanConfig(horizon=2, samples=400, elites=40, iterations=15))
    plan = planner.plan(world.image((0.0, 0.0, 0.0, 0.0)), world.image(target))
    first_candidates = world.rollouts[0]
    assert abs(first_candidates.mean()) < 0.1
    assert abs(first_candidates.std() - 1) < 0.1
    # Only the last block decides where the plan ends.
    np.testing.assert_allclose(plan.actions[2:], [[115.0, -3.25], [90.0, -2.875]], atol=0.1)


def test_executed_actions_reach_the_model_z_scored():
    world = ActionWorld()
    frames, executed = np.stack([world.image((0.0,) * 4)] * 2), np.array([[[110.0, -3.0], [80.0, -2.5]]], np.float32)
    Planner(world, config=CONFIG).plan(frames, frames[0], executed)
    assert world.past_BTA.tolist() == [[[1.0, 0.0, -2.0, 1.0]]]


def test_cost_and_distances_are_those_of_the_returned_actions():
    world, target = ActionWorld(), (0.5, 0.5, 0.5, 0.5)
    plan = Planner(world, config=CONFIG).plan(world.image((0.0,) * 4), world.image(target))
    z_HA = world.normalise_actions(torch.from_numpy(plan.actions).view(2, 2, 2))
    expected = (z_HA - torch.tensor(target)).square().sum(-1)
    np.testing.assert_allclose(plan.distances, expected, rtol=1e-3, atol=1e-4)
    assert plan.cost == plan.distances[-1]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_plan_starts_from_one_to_history_frames(planner: Planner, frames: Array, length: int):
    plan = planner.plan(frames[:length], frames[5], blocks(length - 1))
    assert plan.actions.shape == (CONFIG.horizon * 5, 2)
    assert plan.actions.dtype == np.float32
    assert plan.distances.shape == (CONFIG.horizon,)
    assert np.isfinite(plan.actions).all()
    assert plan.cost >= 0


def test_a_single_frame_needs_no_time_axis(planner: Planner, frames: Array):
    assert_same(planner.plan(frames[0], frames[5]), planner.plan(frames[:1], frames[5]))


def test_everything_given_counts(planner: Planner, frames: Array):
    """Another frame, goal, executed action or key, another plan; and nothing else matters."""
    reference = planner.plan(frames[:2], frames[5], blocks(1), key=3)
    assert_same(reference, planner.plan(frames[:2], frames[5], blocks(1), key=3))
    others = [
        planner.plan(frames[1:3], frames[5], blocks(1), key=3),
        planner.plan(frames[:2], frames[4], blocks(1), key=3),
        planner.plan(frames[:2], frames[5], blocks(1, seed=1), key=3),
        planner.plan(frames[:2], frames[5], blocks(1), key=4),
    ]
    assert all(other.cost != reference.cost for other in others)


def test_executed_actions_may_be_float64(planner: Planner, frames: Array):
    plan = planner.plan(frames[:2], frames[5], blocks(1).astype(np.float64))
    assert_same(plan, planner.plan(frames[:2], frames[5], blocks(1)))


def mixed_requests(frames: Array) -> list[Request]:
    """Of several context lengths, horizons and starts."""
    lengths, horizons, starts = (1, 3, 2, 3, 1), (None, 1, 2, 3, None), (None, None, 1, 2, 3)
    return [
        Request(
            Context(frames[i : i + length], blocks(length - 1, seed=i)),
            frames[5 - i],
            key=10 + i,
            horizon=horizon,
            start=start and blocks(start, seed=50 + i).reshape(-1, 2),
        )
        for i, (length, horizon, start) in enumerate(zip(lengths, horizons, starts, strict=True))
    ]


@pytest.mark.parametrize("batch_size", [1, 2, 50])
def test_many_plans_are_bitwise_those_made_one_by_one(model: LeWM, frames: Array, batch_size: int):
    planner = Planner(model, config=replace(CONFIG, batch_size=batch_size))
    requests = mixed_requests(frames)
    together = planner.plan_many(requests)
    assert [len(plan.actions) for plan in together] == [10, 5, 10, 15, 10]
    for plan, request in zip(together, requests, strict=True):
        assert_same(plan, planner.plan_many([request])[0])
    # A request without wishes is what ``plan`` asks.
    assert_same(together[0], planner.plan(frames[0], frames[5], key=10))


@pytest.mark.parametrize("schedule", ["whole", "soonest"])
@pytest.mark.parametrize("solver", ["cem", "icem", "mppi", "adam"])
def test_requests_solved_in_one_padded_batch_agree_with_those_solved_alone(
    model: LeWM, frames: Array, solver: SolverName, schedule: ScheduleName
):
    """As on a GPU: episodes of equal context length share a batch, and rounding is all that differs."""
    planner = Planner(model, config=replace(CONFIG, solver=solver, schedule=schedule, gradient=GradientConfig(4)))
    requests = [Request(Context(frames[i : i + 2], blocks(1, seed=i)), frames[i], key=i) for i in range(4)]
    alone = planner.plan_many(requests)
    order = [3, 1, 0, 0]  # the last request repeated
    for i, plan in zip(order, planner.plan_together([requests[i] for i in order]), strict=True):
        np.testing.assert_allclose(alone[i].actions, plan.actions, atol=1e-4)
        assert alone[i].cost == pytest.approx(plan.cost, rel=1e-3)


@pytest.mark.parametrize("solver", ["cem", "icem", "mppi", "sgd", "rmsprop", "adam"])
def test_every_solver_plans_towards_the_goal(solver: str):
    world, target = ActionWorld(), (1.5, -0.5, -1.0, 0.25)
    config = PlanConfig(solver=solver, horizon=2, samples=128, elites=16, iterations=30)
    plan = Planner(world, config=config).plan(world.image((0.0,) * 4), world.image(target))
    assert plan.cost < 0.05
    np.testing.assert_allclose(plan.actions[2:], [[115.0, -3.25], [90.0, -2.875]], atol=3)


def test_a_goal_is_encoded_once():
    world = ActionWorld()
    planner, start = Planner(world, config=CONFIG), Context(world.image((0.0,) * 4)[None], blocks(0))
    requests = [Request(start, world.image((block,) * 4)) for block in (1.0, 2.0, 1.0)]
    first, _, again = planner.plan_many(requests)
    assert_same(first, again)
    planner.plan_many(requests)
    goals = [pixels for pixels in world.encoded if pixels.ndim == 4]  # contexts have a time axis besides
    assert [int(pixels[0, 0, 0, 0]) for pixels in goals] == [(1 + 8) * 16, (2 + 8) * 16]


def test_goals_that_are_nearly_the_same_are_told_apart(debug_model: LeWM, frames: Array):
    other = frames[1].copy()
    other[5] = 0  # a row that is not among those by which goals are looked up
    planner = Planner(debug_model, config=CONFIG)
    together = planner.inputs.goals([frames[1], other])
    assert not torch.equal(together[0], together[1])
    assert torch.equal(together[0], planner.inputs.goals([frames[1]])[0])


def test_a_search_begins_from_the_start_that_is_given():
    """Two blocks of a longer horizon are given, in raw actions; the third is filled with mean actions."""
    world = ActionWorld()
    given = np.array([[110.0, -3.0], [100.0, -2.5], [90.0, -3.5], [100.0, -3.0]], np.float32)
    image = world.image((0.0,) * 4)
    request = Request(Context(image[None], blocks(0)), image, horizon=3, start=given)
    Planner(world, config=CONFIG).plan_many([request])
    # Candidate 0 of the first iteration is the start itself.
    assert world.rollouts[0][0, 0].tolist() == [[1.0, 0.0, 0.0, 1.0], [-1.0, -1.0, 0.0, 0.0], [0.0] * 4]


def test_a_limit_on_raw_actions_holds():
    world = ActionWorld()
    planner = Planner(world, config=replace(CONFIG, action_limit=98.0))
    plan = planner.plan(world.image((0.0,) * 4), world.image((2.0, 0.0, 2.0, 0.0)))
    assert plan.actions.max() <= 98.0 + 1e-4
    assert all(bool((candidates[..., ::2] <= -0.2 + 1e-6).all()) for candidates in world.rollouts)


@pytest.mark.parametrize("solver", ["cem", "icem", "mppi"])
@pytest.mark.parametrize("limit", [1.0, 1])
def test_a_limit_on_raw_actions_is_a_number_of_any_kind(model: LeWM, frames: Array, limit: float, solver: str):
    config = replace(CONFIG, solver=solver, init_std=5.0)
    assert np.abs(Planner(model, config=config).plan(frames[0], frames[3]).actions).max() > 1
    limited = Planner(model, config=replace(config, action_limit=limit)).plan(frames[0], frames[3])
    assert np.abs(limited.actions).max() <= 1 + 1e-4


def test_objectives_are_chosen_by_name_or_given():
    world, goal = ActionWorld(), (1.0, 1.0, 1.0, 1.0)
    start, goal_image = world.image((0.0,) * 4), world.image(goal)
    config = PlanConfig(horizon=2)

    def plan(objectives: list[Objective] | None = None, **changes: object) -> Array:
        planner = Planner(world, config=replace(config, **changes), objectives=objectives)
        return world.normalise_actions(torch.from_numpy(planner.plan(start, goal_image).actions).view(2, 2, 2)).numpy()

    np.testing.assert_allclose(plan()[1], goal, atol=0.1)
    assert np.abs(plan(objective="nearest") - goal).max(1).min() < 0.1
    # A wish of one's own, beside one of ours.
    first_block_is_two = lambda z, _goal, _actions: (z[:, :, 0] - 2).square().sum(-1)  # noqa: E731
    np.testing.assert_allclose(plan([terminal_distance, first_block_is_two]), [[2.0] * 4, goal], atol=0.1)


@pytest.mark.parametrize(("reach", "blocks_needed"), [(3.0, 1), (1.0, 2), (0.6, 3)])
def test_the_soonest_schedule_follows_the_shortest_plan_that_arrives(reach: float, blocks_needed: int):
    """In this world one moves at most ``reach`` per block and number; the goal is 1.5 away."""
    world = ActionWorld()
    world.rollout = lambda _z, _past, actions: actions.clamp(-reach, reach).cumsum(2)
    planner = Planner(world, config=PlanConfig(horizon=4, schedule="soonest"))
    plan = planner.plan(world.image((0.0,) * 4), world.image((1.5,) * 4))
    assert len(plan.actions) == 2 * blocks_needed
    assert plan.distances.shape == (blocks_needed,)
    assert plan.cost == pytest.approx(plan.distances[-1])
    assert plan.cost < 0.1


def test_the_soonest_schedule_imagines_no_block_that_does_not_count():
    world = ActionWorld()
    Planner(world, config=PlanConfig(horizon=3, samples=20, elites=5, iterations=2, schedule="soonest")).plan(
        world.image((0.0,) * 4), world.image((1.0,) * 4)
    )
    searched, outcome = [(1, 20, 1, 4), (1, 20, 2, 4), (1, 20, 3, 4)], [(1, 3, 3, 4)]
    assert [tuple(asked.shape) for asked in world.rollouts] == searched * 2 + outcome


@pytest.mark.parametrize("solver", ["cem", "icem", "mppi", "adam"])
def test_the_soonest_schedule_finds_what_a_search_for_each_horizon_finds(model: LeWM, solver: SolverName):
    """Each of which imagines the longest plans, and counts the distance at its own horizon."""
    config = replace(CONFIG, solver=solver, horizon=3, gradient=GradientConfig(4))
    generator = torch.Generator().manual_seed(0)
    width, block = model.settings.embed_dim, model.settings.block_dim
    sizes = ((2, 2, width), (2, 1, block), (2, width))
    seen = [torch.randn(size, generator=generator) for size in sizes]
    keys, start = torch.arange(6), torch.randn(6, 3, block, generator=generator)
    together, _ = Planner(model, config=replace(config, schedule="soonest")).search.run(Encoded(*seen, keys, start))

    for step, blocks_counted in enumerate((1, 2, 3)):

        def distance(z_BSHD: torch.Tensor, goal_BD: torch.Tensor, _: torch.Tensor, step: int = step) -> torch.Tensor:
            return squared_distance(z_BSHD[:, :, step], goal_BD.unsqueeze(1))

        own = slice(2 * step, 2 * step + 2)
        planner = Planner(model, config=config, objectives=[distance])
        alone, _ = planner.search.run(Encoded(*seen, keys[own], start[own]))
        torch.testing.assert_close(together[own, :blocks_counted], alone[:, :blocks_counted], atol=1e-4, rtol=1e-4)


def test_the_soonest_schedule_refuses_other_objectives():
    with pytest.raises(PlanningError, match="objective of its own"):
        Planner(ActionWorld(), config=PlanConfig(schedule="soonest"), objectives=[terminal_distance])


@pytest.mark.parametrize("schedule", ["whole", "soonest"])
def test_a_time_budget_ends_a_plan_in_time(schedule: str):
    world = ActionWorld()
    quick = world.rollout
    world.rollout = lambda *arguments: (time.sleep(0.02), quick(*arguments))[1]
    config = PlanConfig(horizon=2, iterations=500, budget_ms=100, schedule=schedule)
    planner, started = Planner(world, config=config), time.perf_counter()
    plan = planner.plan(world.image((0.0,) * 4), world.image((1.0,) * 4))
    assert time.perf_counter() - started < 0.5
    assert plan.cost < 2


@pytest.mark.parametrize("solver", ["sgd", "rmsprop", "adam"])
def test_a_gradient_solver_on_a_model_without_gradients_is_refused_before_any_search(solver: str):
    world = ActionWorld()
    world.rollout = lambda _z, _past, actions: actions.detach()
    with pytest.raises(PlanningError, match=r"Gradient needs gradients.*cem, icem or mppi"):
        Planner(world, config=replace(CONFIG, solver=solver))


@pytest.mark.parametrize("size", [14, 56])
def test_a_goal_of_the_wrong_size_is_refused(planner: Planner, frames: Array, size: int):
    with pytest.raises(PlanningError, match=f"goal must be uint8 images of 28 x 28 x 3.*{size}, {size}, 3"):
        planner.plan(frames[0], np.zeros((size, size, 3), np.uint8))


def test_a_goal_of_the_wrong_type_is_refused(planner: Planner, frames: Array):
    with pytest.raises(PlanningError, match=r"goal must be uint8.*float32"):
        planner.plan(frames[0], frames[1].astype(np.float32) / 255)


def test_a_goal_with_a_leading_axis_is_refused(planner: Planner, frames: Array):
    with pytest.raises(PlanningError, match=r"goal must be.*\(1, 28, 28, 3\)"):
        planner.plan(frames[0], frames[1:2])


def test_frames_of_the_wrong_size_are_refused(planner: Planner, frames: Array):
    with pytest.raises(PlanningError, match="frames must be uint8 images of 28 x 28 x 3"):
        planner.plan(np.zeros((2, 14, 14, 3), np.uint8), frames[0], blocks(1))


@pytest.mark.parametrize("count", [0, 4])
def test_the_number_of_frames_is_checked(planner: Planner, frames: Array, count: int):
    with pytest.raises(PlanningError, match=f"1 to 3 frames, got {count}"):
        planner.plan(frames[:count], frames[5], blocks(max(0, count - 1)))


@pytest.mark.parametrize("executed", [None, blocks(1), blocks(3), blocks(2)[:, :, :1], blocks(2)[:, :4]])
def test_executed_actions_must_fit_the_frames(planner: Planner, frames: Array, executed: Array | None):
    with pytest.raises(PlanningError, match=r"3 frames need executed actions of shape \(2, 5, 2\), got"):
        planner.plan(frames[:3], frames[5], executed)


def test_a_model_in_training_mode_is_refused(debug_model: LeWM):
    with pytest.raises(PlanningError, match=r"training mode.*model\.eval\(\)"):
        Planner(debug_model.train())


def test_a_model_without_action_statistics_is_refused_before_any_search():
    with pytest.raises(PlanningError, match="no action statistics"):
        Planner(LeWM(preset("debug").method).eval(), config=CONFIG)


# -- recorded actions -------------------------------------------------------------------------------------------

RECORDED = PlanConfig(
    solver="icem", horizon=2, samples=20, elites=5, iterations=3, schedule="shrinking", icem=IcemConfig(recorded=1)
)


class RecordedWorld(ActionWorld):
    """With 30 sequences of 6 raw actions, around the mean by one standard deviation and far above it."""

    recorded_actions: torch.Tensor | None = torch.cat(
        [ActionWorld.mean + ActionWorld.std * torch.tensor(far).view(1, 1, 1).expand(15, 6, 2) for far in (1.0, 6.0)]
    )


@pytest.mark.parametrize(
    ("schedule", "horizon", "rollouts"), [("shrinking", 2, [2]), ("shrinking", 1, [1]), ("soonest", 2, [1, 2])]
)
def test_the_first_candidates_are_the_models_recorded_actions(
    schedule: ScheduleName, horizon: int, rollouts: list[int]
):
    world = RecordedWorld()
    planner = Planner(world, config=replace(RECORDED, schedule=schedule))
    request = Request(Context(world.image((0.0,) * 4)[None], np.zeros((0, 0, 0), np.float32)), world.image((1.0,) * 4))
    (plan,) = planner.plan_many([replace(request, horizon=horizon)])
    for first, blocks_imagined in zip(world.rollouts, rollouts, strict=False):
        assert first.shape[1:] == (20, blocks_imagined, 4)
        assert set(first[:, 1:].flatten().tolist()) == {1.0, 6.0}
    np.testing.assert_allclose(plan.actions, [[110.0, -2.5]] * len(plan.actions), rtol=1e-5)


def test_recorded_actions_obey_the_limit_on_actions():
    world = RecordedWorld()
    Planner(world, config=replace(RECORDED, action_limit=120)).plan(world.image((0.0,) * 4), world.image((1.0,) * 4))
    assert world.rollouts[0].flatten(0, 2)[:, 0].max() == 2.0


@pytest.mark.parametrize("recorded", [None, torch.zeros(0, 6, 2)])
def test_a_model_without_recorded_actions_is_refused_before_any_search(
    recorded: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(RecordedWorld, "recorded_actions", recorded)
    with pytest.raises(PlanningError, match="asks for recorded actions, and this model has none"):
        Planner(RecordedWorld(), config=RECORDED)
    Planner(RecordedWorld(), config=replace(RECORDED, icem=IcemConfig()))


@pytest.mark.parametrize("solver", ["cem", "mppi", "adam"])
def test_only_icem_tries_recorded_actions(solver: SolverName):
    with pytest.raises(ConfigError, match=rf"plan\.icem\.recorded is for the solver icem, got 1 with {solver}\."):
        Planner(RecordedWorld(), config=replace(RECORDED, solver=solver))


def test_plans_longer_than_what_was_recorded_are_refused():
    Planner(RecordedWorld(), config=replace(RECORDED, horizon=3))
    with pytest.raises(PlanningError, match="a plan of 4 blocks has 8 actions, the model's recorded sequences have 6"):
        Planner(RecordedWorld(), config=replace(RECORDED, horizon=4))
