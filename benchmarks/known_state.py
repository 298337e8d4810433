"""How well could Cube be planned by a model that is given the state, instead of seeing frames?

    python benchmarks/known_state.py [--episodes 2000] [--exploration 0 0.8] [--mistakes 0] [--train-steps 8000] \
        [--pairs 60] [--workers 2] [--settings schedule=whole solver=icem,action_limit=1,noise_exponent=2]

What this model cannot do is not for want of seeing: the data or the search is to blame. What it can, and a model of
frames cannot, is the price of perception. For each share of exploration (as `--mistakes` an option of `lewm collect`)
it generates episodes without frames, and trains a small network to predict where gripper and cube are a block of
actions later. With each setting, fields of `lewm.config.PlanConfig`, it then plans by the paper's protocol: 50
actions, and the goal is the state 25 steps later. The pairs are those to choose settings on, none of the frozen ones
(docs/evaluation.md).
"""

from __future__ import annotations

import functools
import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import tyro
from plan_settings import parse_setting
from rich.console import Console
from solvers import BUDGET, SEED
from torch import nn

from lewm.config import PlanConfig
from lewm.data.generate import generate_episode
from lewm.data.stats import action_stats
from lewm.envs.base import WorldEnv
from lewm.envs.cube import CUBE_POSITION, EFFECTOR_POSITION, EFFECTOR_YAW, GRIPPER_CLOSED
from lewm.envs.registry import make_env
from lewm.evaluate.manifest import TUNING_EPISODE, build_manifest
from lewm.evaluate.policies import Episode
from lewm.evaluate.runner import run_episodes
from lewm.evaluate.stats import Rate
from lewm.plan.cost import OBJECTIVES, ControlEffort, Objective, TotalCost
from lewm.plan.schedule import next_turn
from lewm.plan.solver import Problem, Stopping, solve
from lewm.plan.solvers import make_solver
from lewm.progress import progress_bar
from lewm.rng import derive_seed
from lewm.types import Array, EpisodeResult, EpisodeSpec

ENV, RESOLUTION = "cube", 8  # of frames that nobody draws
GOAL_OFFSET, BLOCK = 25, 5  # steps to the goal, and actions of a block
FEATURES, ACTION_DIM, WIDTH = 9, 5, 512
BLOCK_DIM = BLOCK * ACTION_DIM
PEAK_LR, WEIGHT_DECAY, BATCH = 2e-3, 1e-3, 512
TESTED = 20  # one episode in so many is kept from training, to measure the error on
HELD_DISTANCE, HELD_CLOSED = 0.03, 0.3  # the gripper holds the cube if it is nearer, in m, and closed further
SMOOTH = "solver=icem,action_limit=1,noise_exponent=2"
SETTINGS = ("schedule=whole", "action_limit=1", SMOOTH, f"{SMOOTH},schedule=shrinking,warm_start=true")
PROGRESS = Console(stderr=True, highlight=False, soft_wrap=True)  # the table shall be alone in what is printed


def features(states: Array) -> Array:
    """What the model is given of states (..., state_dim): float32 (..., 9), the gripper's pose and the cube's place."""
    yaw, closed = states[..., EFFECTOR_YAW, None], states[..., GRIPPER_CLOSED, None]
    parts = states[..., EFFECTOR_POSITION], np.sin(yaw), np.cos(yaw), closed, states[..., CUBE_POSITION]
    return np.concatenate(parts, axis=-1).astype(np.float32)


def is_held(state: Array) -> bool:
    """Whether the gripper holds the cube in a state (state_dim,)."""
    distance = np.linalg.norm(state[EFFECTOR_POSITION] - state[CUBE_POSITION])
    return bool(distance < HELD_DISTANCE and state[GRIPPER_CLOSED] > HELD_CLOSED)


class Windows(NamedTuple):
    """Features (N, 9) before and after blocks of raw actions (N, 25), float32."""

    before: Array
    blocks: Array
    after: Array


def joined(parts: Sequence[Windows]) -> Windows:
    """The windows of several episodes."""
    return Windows(*map(np.concatenate, zip(*parts, strict=True)))


def generate(episodes: int, shares: tuple[float, float], workers: int) -> list[Windows]:
    """The windows of each of ``episodes``, with ``shares`` of exploration and mistakes, made by several processes."""
    spawn = multiprocessing.get_context("spawn")  # a process that is forked while torch's threads run can hang
    found = []
    with progress_bar(PROGRESS, "episodes") as show, ProcessPoolExecutor(workers, spawn) as pool:
        for windows in pool.map(functools.partial(episode_windows, shares), range(episodes)):
            found.append(windows)
            show(len(found), episodes)
    return found


def episode_windows(shares: tuple[float, float], index: int) -> Windows:
    """Every window of an episode: any two of its states that are a block apart."""
    what = (ENV, RESOLUTION, SEED, index)
    exploration, mistakes = shares
    episode = generate_episode(*what, draw=False, env=process_env(), exploration=exploration, mistakes=mistakes)
    seen, starts = features(episode["state"]), np.arange(len(episode["state"]) - BLOCK)
    blocks = episode["action"][starts[:, None] + np.arange(BLOCK)]
    return Windows(seen[starts], blocks.reshape(len(starts), BLOCK_DIM), seen[starts + BLOCK])


@functools.cache
def process_env() -> WorldEnv:
    """The environment of this process."""
    return make_env(ENV, RESOLUTION)


class Scale:
    """Z-scores by the statistics of rows (N, n); ``repeat``: of so many rows side by side."""

    def __init__(self, rows: Array, repeat: int = 1) -> None:
        stats = action_stats(rows)  # as good for other rows than actions
        self.mean, self.std = torch.tensor(stats.mean).repeat(repeat), torch.tensor(stats.std).repeat(repeat)

    def normalise(self, raw: torch.Tensor | Array) -> torch.Tensor:
        return (torch.as_tensor(raw) - self.mean) / self.std

    def denormalise(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled * self.std + self.mean


class StateModel(nn.Module):
    """Predicts features a block later. Features and blocks are z-scored, by the data it is to be trained on."""

    def __init__(self, windows: Windows) -> None:
        super().__init__()
        self.features = Scale(windows.before)
        self.actions = Scale(windows.blocks.reshape(-1, ACTION_DIM), repeat=BLOCK)
        first, last = nn.Linear(FEATURES + BLOCK_DIM, WIDTH), nn.Linear(WIDTH, FEATURES)
        hidden = (layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.SiLU()))
        self.change = nn.Sequential(first, nn.SiLU(), *hidden, last)

    def forward(self, z: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        """Features (..., D), blocks (..., A) -> features (..., D) after them."""
        return z + self.change(torch.cat([z, block], dim=-1))

    def rollout(self, z_BD: torch.Tensor, actions_BSHA: torch.Tensor) -> torch.Tensor:
        """Where candidate plans lead, after each block: (B, S, H, D)."""
        z_BSD = z_BD.unsqueeze(1).expand(-1, actions_BSHA.shape[1], -1)
        return torch.stack([z_BSD := self(z_BSD, block_BSA) for block_BSA in actions_BSHA.unbind(2)], dim=2)

    def scaled(self, windows: Windows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Features before (N, D), blocks (N, A), features after (N, D)."""
        before_ND, after_ND = map(self.features.normalise, (windows.before, windows.after))
        return before_ND, self.actions.normalise(windows.blocks), after_ND


def train(windows: Windows, steps: int) -> StateModel:
    """A model of these windows."""
    torch.manual_seed(SEED)
    model = StateModel(windows)
    before_ND, blocks_NA, after_ND = model.scaled(windows)
    optimizer = torch.optim.AdamW(model.parameters(), PEAK_LR, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=steps)
    with progress_bar(PROGRESS, "training") as show:
        for step in range(1, steps + 1):
            rows = torch.randint(len(before_ND), (BATCH,))
            loss = (model(before_ND[rows], blocks_NA[rows]) - after_ND[rows]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            show(step, steps)
    return model.eval().requires_grad_(False)


def prediction_error(model: StateModel, windows: Windows) -> torch.Tensor:
    """Mean squared error of each feature (D,), in parts of its variance."""
    before_ND, blocks_NA, after_ND = model.scaled(windows)
    return (model(before_ND, blocks_NA) - after_ND).square().mean(0)


class StatePolicy:
    """Model-predictive control for all episodes of a run at once. It looks at no frames, so that none are drawn."""

    history = 0

    def __init__(self, model: StateModel, config: PlanConfig) -> None:
        self.model, self.config, self.solver = model, config, make_solver(config)
        self.objectives: list[Objective] = [OBJECTIVES[config.objective], ControlEffort(config.effort)]
        self.stopping = Stopping(config.stop_spread, config.budget_ms and config.budget_ms / 1000)
        limit_A = torch.full((BLOCK_DIM,), float(config.action_limit or torch.inf))
        self.low_A, self.high_A = model.actions.normalise(-limit_A), model.actions.normalise(limit_A)
        self._rest_BHA: torch.Tensor | None = None  # what the last plans had left to do

    @torch.no_grad()
    def decide(self, episodes: Sequence[Episode]) -> list[Array]:
        """Raw actions (n*K, action_dim) for each episode; all have come equally far."""
        turn = next_turn(self.config, episodes[0].steps // BLOCK)
        plans_BHA = solve(self.solver, self._problem(episodes, turn.horizon), self.stopping)
        self._rest_BHA = plans_BHA[:, turn.execute :]
        raw_BHA = self.model.actions.denormalise(plans_BHA[:, : turn.execute])
        return list(raw_BHA.reshape(len(episodes), -1, ACTION_DIM).numpy())

    def _problem(self, episodes: Sequence[Episode], horizon: int) -> Problem:
        z_BD = self.model.features.normalise(features(np.stack([e.states[-1] for e in episodes])))
        goal_BD = self.model.features.normalise(features(np.array([e.spec.goal for e in episodes])))
        cost = TotalCost(functools.partial(self.model.rollout, z_BD), goal_BD, self.objectives)
        keys_B = torch.tensor([derive_seed(SEED, e.spec.index, e.steps) for e in episodes])
        start_BHA = torch.zeros(len(episodes), horizon, BLOCK_DIM)
        if self.config.warm_start and self._rest_BHA is not None:
            start_BHA[:, : self._rest_BHA.shape[1]] = self._rest_BHA
        return Problem(cost, horizon, BLOCK_DIM, keys_B, start_BHA, self.low_A, self.high_A, BLOCK)


def cut_pairs(count: int) -> tuple[EpisodeSpec, ...]:
    """Pairs of held-out episodes that no frozen pair is from."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.json"
        return build_manifest(ENV, count, GOAL_OFFSET, path, first_episode=TUNING_EPISODE).pairs


HEADER = f"{'exploration':>11} {'success':>30} {'to be grasped first':>30} {'held at the start':>30}  setting"


def row(exploration: float, setting: str, results: Sequence[EpisodeResult]) -> str:
    """A line of the table; what is solved at the start needs no grasp, and counts in the first rate only."""
    unsolved = [(is_held(result.states[0]), result.success) for result in results if not result.solved_at_start]
    rates = [Rate.of(result.success for result in results)]
    rates += [Rate.of(success for held, success in unsolved if held == wanted) for wanted in (False, True)]
    return f"{exploration:>11g} {rates[0]!s:>30} {rates[1]!s:>30} {rates[2]!s:>30}  {setting}"


def check(counts: dict[str, int], shares: Sequence[float], plans: dict[str, PlanConfig]) -> None:
    """Refuse what cannot work before anything is generated."""
    if min(counts.values()) < 1 or counts["episodes"] < 2:
        raise SystemExit(f"Expected 1 or more of each, and 2 episodes, one of them to test on; got {counts}.")
    if len(shares) < 2 or not plans or not all(0 <= share < 1 for share in shares):
        expected = "one or more --settings, one or more shares of --exploration and one of --mistakes, in [0, 1)"
        raise SystemExit(f"Expected {expected}; got {list(plans)} and {shares}.")
    if unknown := [setting for setting, plan in plans.items() if plan.schedule == "soonest"]:
        raise SystemExit(f"{unknown[0]!r}: the schedule soonest is not offered here. Choose another one.")


def main(
    episodes: int = 2000,
    exploration: tuple[float, ...] = (0.0, 0.8),
    mistakes: float = 0.0,
    train_steps: int = 8000,
    pairs: int = 60,
    workers: int = 2,
    settings: tuple[str, ...] = SETTINGS,
) -> None:
    """Print a table with one row per share of exploration and setting. workers: processes that simulate."""
    plans = {setting: parse_setting(setting) for setting in settings}
    counts = {"episodes": episodes, "train-steps": train_steps, "pairs": pairs, "workers": workers}
    check(counts, (*exploration, mistakes), plans)
    specs = cut_pairs(pairs)
    solved = process_env().is_success(np.array([s.start for s in specs]), np.array([s.goal for s in specs]))
    print(f"{ENV}, {pairs} pairs, solved at the start: {Rate.of(solved.tolist())}", flush=True)
    shared = {"resolution": RESOLUTION, "frame_skip": BLOCK, "budget": BUDGET, "workers": min(workers, pairs)}
    for share in exploration:
        found = generate(episodes, (share, mistakes), workers)
        trained = joined([windows for i, windows in enumerate(found) if i % TESTED])
        model, tested = train(trained, train_steps), joined(found[::TESTED])
        error_D = prediction_error(model, tested)
        error = f"{error_D.mean():.4f} of the variance, of the cube's place {error_D[6:].mean():.4f}"
        data = f"exploration {share:g}, mistakes {mistakes:g}: {len(trained.before)} windows"
        print(f"\n{data}; held-out error {error}\n{HEADER}", flush=True)
        for setting, plan in plans.items():
            with progress_bar(PROGRESS, "planning") as show:
                results = run_episodes(StatePolicy(model, plan), ENV, specs, on_progress=show, **shared)
            print(row(share, setting, results), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
