"""GRASP, a planner that was tried and left out (docs/planning.md), and what it was measured against.

    python benchmarks/grasp.py --model runs/demo/training --count 100

GRASP (gradient relaxed stochastic planner, Psenka et al. 2026, arXiv:2602.00475) treats the states along a plan as
variables beside its actions. With states z_1..z_{H-1} free, z_0 what was seen and z_H the goal, a joint step descends

    sum_t |pred(z_t, a_t) - z_{t+1}|²  +  weight * sum_t |pred(z_t, a_t) - goal|²

in which every step of the plan is predicted at the same time, from states that need not follow from one another. The
gradient that reaches the states a prediction starts from is cut, or damped; noise on the states explores. Now and then
the states are replaced by a rollout of the actions, after some descent through that rollout; the search ends with more
of it. The answer is the plan of lowest cost among those that were rolled out.

Prints success and seconds per plan beside CEM and Adam with about the same arithmetic, for goals 25, 50 and 75 steps
away: whole plans, twice as many actions as the goal is steps away, the same pairs for every solver. ``--tune`` takes
pairs of other episodes instead, those on which the settings here were chosen.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
import tyro
from solvers import run

from lewm.config import PlanConfig
from lewm.evaluate.episodes import Task
from lewm.evaluate.flops import GRADIENT_FACTOR
from lewm.evaluate.manifest import TUNING_EPISODE, build_manifest
from lewm.evaluate.stats import Rate
from lewm.methods.lewm import LeWM
from lewm.plan.cost import TotalCost, squared_distance
from lewm.plan.noise import normal
from lewm.plan.planner import Planner
from lewm.plan.solver import Problem, Search
from lewm.types import EpisodeSpec

ENV = "tworoom"
OFFSETS = (25, 50, 75)
BATCH = 25
# Where the random numbers for states begin in an episode's stream: far from those for actions.
_STATE_NOISE = 1 << 40
_DECAYS = (0.9, 0.999)
_EPSILON = 1e-8

Predict = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Settings:
    """How GRASP searches: ``rounds`` times joint steps and then steps through the rollout; more of these at the end.

    init_std, lr: as in ``PlanConfig``, for the actions.
    state_rate: how far a state moves towards its prediction in a joint step, 1: all the way.
    state_gradient: share of the gradient that reaches the states a prediction starts from; GRASP's is 0.
    noise: standard deviation of the noise on states, per joint step; falls to 0 over the rounds.
    goal_weight: of every prediction's distance to the goal, relative to the dynamics.
    """

    restarts: int = 8
    rounds: int = 2
    joint: int = 10
    through: int = 4
    final: int = 24
    init_std: float = 0.3
    lr: float = 0.1
    state_rate: float = 0.5
    state_gradient: float = 0.0
    noise: float = 0.3
    goal_weight: float = 1.0
    straight: bool = True  # States begin on the line from here to the goal, not on a rollout.

    def steps(self) -> list[bool]:
        """Every step of a search; True: a joint step, False: one through the rollout."""
        return ([True] * self.joint + [False] * self.through) * self.rounds + [False] * self.final

    def rollouts(self) -> int:
        """The search's arithmetic, in rollouts; before each round's joint steps but the first, one of the actions."""
        return self.restarts * (GRADIENT_FACTOR * len(self.steps()) + self.rounds - self.straight)


class Grasp:
    """GRASP on R = ``settings.restarts`` plans at once, started as ``lewm.plan.gradient`` starts them.

    predict: embeddings and action blocks (n, T, ...) of windows of at most ``history`` steps -> predictions (n, T, D).
    Memory of a search: current plans (B, R, H, A) and states z_1..z_{H-1} (B, R, H-1, D); Adam's running means of the
    gradients and of their squares for both kinds of steps, (2, 2, B, R, H, A); cost of the best plan so far, (B,).
    """

    needs_gradient = True

    def __init__(self, predict: Predict, history: int, settings: Settings) -> None:
        self.predict, self.history, self.settings = predict, history, settings
        self.steps = settings.steps()
        self.iterations = len(self.steps)

    def begin(self, problem: Problem) -> Search:
        mean_BHA = problem.first_mean()
        search = Search.begin(mean_BHA, self.settings.init_std)
        noise_BRHA = problem.noise(self.settings.restarts, search.iteration)
        others_BRHA = mean_BHA.unsqueeze(1) + self.settings.init_std * noise_BRHA[:, 1:]
        plans_BRHA = problem.bound(torch.cat([mean_BHA.unsqueeze(1), others_BRHA], dim=1))
        states_BRHD = self._line(problem) if self.settings.straight else _rolled_out(problem, plans_BRHA)
        moments = plans_BRHA.new_zeros(2, 2, *plans_BRHA.shape)
        best_cost_B = torch.full_like(plans_BRHA[:, 0, 0, 0], torch.inf)
        return replace(search, memory=(plans_BRHA, states_BRHD, moments, best_cost_B))

    def step(self, problem: Problem, search: Search) -> Search:
        now = int(search.iteration)
        plans_BRHA, states_BRHD, moments, best_cost_B = search.memory
        best_BHA = search.mean_BHA
        if self.steps[now]:
            if now and not self.steps[now - 1]:
                states_BRHD = _rolled_out(problem, plans_BRHA)
            gradient_BRHA, states_BRHD = self._joint(problem, plans_BRHA, states_BRHD, search.iteration)
        else:
            gradient_BRHA, cost_BR = _through_rollout(problem, plans_BRHA)
            lowest_B, index_B = cost_BR.min(1)
            found_BHA = torch.take_along_dim(plans_BRHA, index_B[:, None, None, None], dim=1)[:, 0]
            best_BHA = torch.where((lowest_B < best_cost_B)[:, None, None], found_BHA, best_BHA)
            best_cost_B = torch.minimum(lowest_B, best_cost_B)
        uphill_BRHA, moments = self._adam(gradient_BRHA, moments, now)
        moved_BRHA = problem.bound(plans_BRHA - self._lr(now) * uphill_BRHA)
        spread_BHA = (moved_BRHA - plans_BRHA).square().mean(1).sqrt()
        return search.next(best_BHA, spread_BHA, (moved_BRHA, states_BRHD, moments, best_cost_B))

    def _joint(
        self, problem: Problem, plans_BRHA: torch.Tensor, states_BRHD: torch.Tensor, iteration: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient for the actions (B, R, H, A), and the states after this step."""
        settings, (_, goal_BD) = self.settings, _context(problem)
        with torch.enable_grad():
            actions = plans_BRHA.detach().requires_grad_()
            states = states_BRHD.detach().requires_grad_()
            goal = goal_BD[:, None, None]
            predicted = self._predict_all(problem, actions, torch.lerp(states_BRHD, states, settings.state_gradient))
            wanted = torch.cat([states, goal.expand(-1, states.shape[1], -1, -1)], dim=2)
            gap = squared_distance(predicted, wanted) + settings.goal_weight * squared_distance(predicted, goal)
            uphill_actions, uphill_states = torch.autograd.grad(gap.sum(), (actions, states))
        count = states[0].numel()
        noise_BN = normal(problem.keys_B, _STATE_NOISE + iteration * (count + count % 2), count)
        cooling = 1 - int(iteration) / max(1, self.iterations - settings.final)
        # Half of the gradient of a squared distance is the way back to the prediction.
        moved = states_BRHD - settings.state_rate / 2 * uphill_states
        moved += settings.noise * cooling * noise_BN.view_as(states)
        return uphill_actions, moved

    def _predict_all(self, problem: Problem, actions_BRHA: torch.Tensor, states_BRHD: torch.Tensor) -> torch.Tensor:
        """What follows from each state of a plan, seen with those before it, all at the same time: (B, R, H, D)."""
        (z_BTD, past_BTA), _ = _context(problem)
        shared = functools.partial(torch.Tensor.expand, size=(-1, actions_BRHA.shape[1], -1, -1))
        z = torch.cat([shared(z_BTD.unsqueeze(1)), states_BRHD], dim=2)
        actions = torch.cat([shared(past_BTA.unsqueeze(1)), actions_BRHA], dim=2)
        length = min(self.history, z.shape[2])
        windows = z.unfold(2, length, 1).transpose(-1, -2), actions.unfold(2, length, 1).transpose(-1, -2)
        predicted = self.predict(*(window.flatten(0, 2) for window in windows)).view_as(windows[0])
        # Of the first window every prediction counts, as it sees all there is; of the others only the last.
        all_steps = torch.cat([predicted[:, :, 0], predicted[:, :, 1:, -1]], dim=2)
        return all_steps[:, :, z_BTD.shape[1] - 1 :]

    def _line(self, problem: Problem) -> torch.Tensor:
        """States on the straight line from here to the goal, (B, R, H-1, D)."""
        (z_BTD, _), goal_BD = _context(problem)
        share = torch.arange(1, problem.horizon, device=goal_BD.device)[:, None] / problem.horizon
        line_BHD = torch.lerp(z_BTD[:, -1:], goal_BD.unsqueeze(1), share)
        return line_BHD.unsqueeze(1).repeat(1, self.settings.restarts, 1, 1)

    def _lr(self, now: int) -> float:
        """Size of a step on actions: falls to 0 in the last, so that these settle."""
        return self.settings.lr * min(1.0, (self.iterations - now) / max(1, self.settings.final))

    def _adam(self, gradient: torch.Tensor, moments: torch.Tensor, now: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which way is up, about 1 in size; each kind of step has running means of its own, as their scales differ."""
        kind = int(self.steps[now])
        count = self.steps[: now + 1].count(self.steps[now])
        moments = moments.clone()
        for moment, value, decay in zip(moments[kind], (gradient, gradient.square()), _DECAYS, strict=True):
            moment.lerp_(value, 1 - decay)
        first, second = (m / (1 - decay**count) for m, decay in zip(moments[kind], _DECAYS, strict=True))
        return first / (second.sqrt() + _EPSILON), moments


def _context(problem: Problem) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """What a planner's problem starts from: embeddings (B, T, D), the blocks between them (B, T-1, A); its goal."""
    cost = cast("TotalCost", problem.cost)
    return cast("functools.partial[torch.Tensor]", cost.rollout).args, cost.goal_BD


def _rolled_out(problem: Problem, plans_BRHA: torch.Tensor) -> torch.Tensor:
    """The states that plans really lead through, but for the last: (B, R, H-1, D)."""
    return cast("TotalCost", problem.cost).rollout(plans_BRHA)[:, :, :-1]


def _through_rollout(problem: Problem, plans_BRHA: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of the cost (B, R, H, A), and the cost (B, R)."""
    with torch.enable_grad():
        leaf_BRHA = plans_BRHA.detach().requires_grad_()
        cost_BR = problem.cost(leaf_BRHA)
        (gradient_BRHA,) = torch.autograd.grad(cost_BR.sum(), leaf_BRHA)
    return gradient_BRHA, cost_BR.detach()


@dataclass(frozen=True)
class Contender:
    """A way of planning. rollouts: its arithmetic per plan; a step with a gradient counts as three."""

    name: str
    plan: PlanConfig
    rollouts: int
    settings: Settings | None = None  # Of GRASP; None: the solver that ``plan`` names.

    def planner(self, model: LeWM, horizon: int) -> Planner:
        solver = Grasp(model.predict, model.history, self.settings) if self.settings else None
        return Together(model, solver, replace(self.plan, horizon=horizon))


class Together(Planner):
    """Solves a batch together on a CPU too: gradients of a few small plans are mostly calls, not arithmetic."""

    batch_size = BATCH


def contenders() -> list[Contender]:
    """CEM and Adam as they are, and "calm", their starts chosen as GRASP's settings were; about 1280 rollouts each.

    CEM also with five times as many, as its rollouts are the quicker ones.
    """
    cem = PlanConfig(samples=128, elites=16, iterations=10)
    adam = PlanConfig(solver="adam", restarts=16, iterations=27)
    # A step of GRASP asks which one it is, which a CUDA graph cannot; and it calls the model's own float32 predictor.
    plain = PlanConfig(cuda_graph=False, precision="float32")
    cem_rollouts, adam_rollouts = cem.samples * cem.iterations, GRADIENT_FACTOR * adam.restarts * adam.iterations
    return [
        Contender("cem 128 x 10", cem, cem_rollouts),
        Contender("cem 128 x 10, calm", replace(cem, init_std=0.5), cem_rollouts),
        Contender("cem 128 x 50", replace(cem, iterations=50), 5 * cem_rollouts),
        Contender("adam 16 x 27", adam, adam_rollouts),
        Contender("adam 16 x 27, calm", replace(adam, lr=0.1, init_std=0.3), adam_rollouts),
        Contender("grasp", plain, Settings().rollouts(), Settings()),
    ]


def measure(contender: Contender, model: LeWM, specs: Sequence[EpisodeSpec], offset: int) -> str:
    """A line of the table: success within twice the steps, the first plans' median cost, seconds per plan."""
    planner = contender.planner(model, offset // model.frame_skip)
    results, times = run(planner, Task(ENV, specs, 2 * offset))
    success = Rate.of(result.success for result in results)
    cost = np.median([result.plans[0].cost for result in results])
    seconds = sum(times) / len(times)
    return f"{offset:>6} {contender.name:<20} {contender.rollouts:>8} {success!s:>30} {cost:>8.2f} {seconds:>8.3f}"


def pairs(count: int, offset: int, tune: bool) -> tuple[EpisodeSpec, ...]:
    """Pairs to report on, or to choose settings on; no episode is in both."""
    with tempfile.TemporaryDirectory() as folder:
        first = TUNING_EPISODE if tune else 0
        return build_manifest(ENV, count, offset, Path(folder) / "pairs.json", first_episode=first).pairs


def main(
    model: Path = Path("runs/demo/training"),
    count: int = 100,
    offsets: tuple[int, ...] = OFFSETS,
    only: str = "",
    tune: bool = False,
    threads: int = 1,
) -> None:
    """Print the table for a trained TwoRoom model.

    count: pairs per goal offset.  only: contenders whose names begin so.  tune: on pairs of other episodes.
    """
    torch.set_num_threads(threads)
    world_model = LeWM.from_pretrained(model)
    print(f"{'offset':>6} {'':<20} {'rollouts':>8} {'success':>30} {'cost':>8} {'s/plan':>8}")
    for offset in offsets:
        specs = pairs(count, offset, tune)
        for contender in contenders():
            if contender.name.startswith(only):
                print(measure(contender, world_model, specs, offset), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
