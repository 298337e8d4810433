"""Success and planning time of every solver at several budgets, and of every schedule, on frozen pairs.

    python benchmarks/solvers.py --model runs/demo/training --env tworoom --episodes 50

Prints one table of solvers (whole plans, as in the paper) and one of schedules (CEM). Each row is one run; its interval
says how far another fifty pairs could move it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import tyro

from lewm.config import SCHEDULES, GradientConfig, PlanConfig, SolverName
from lewm.evaluate.episodes import Task, run_episodes
from lewm.evaluate.journal import Notes
from lewm.evaluate.manifest import load_manifest
from lewm.evaluate.policies import AgentPolicy, NotedPlanner
from lewm.evaluate.stats import Rate
from lewm.methods.lewm import LeWM
from lewm.plan.agent import Agent
from lewm.plan.planner import Planner
from lewm.types import EpisodeResult, EpisodeSpec

BUDGET = 50
SEED = 0
SCHEDULE_CEM = PlanConfig(samples=128, elites=16, iterations=10)
SAMPLING: tuple[SolverName, ...] = ("cem", "icem", "mppi")
GRADIENT: tuple[SolverName, ...] = ("sgd", "rmsprop", "adam")
SAMPLED = ((16, 5), (32, 10), (128, 10), (300, 30))  # candidates and iterations
DESCENDED = ((1, 30), (4, 30), (16, 30))  # restarts and iterations


@dataclass(frozen=True)
class Row:
    """One configuration's result. finally_there: the goal is reached after the last action, not just some time."""

    name: str
    success: Rate
    finally_there: Rate
    seconds_per_plan: float
    plans: int

    def __str__(self) -> str:
        return (
            f"{self.name:<40} {self.success!s:>30} {self.finally_there!s:>30} "
            f"{1000 * self.seconds_per_plan:>12.1f} {self.plans:>6}"
        )


HEADER = f"{'':<40} {'success':>30} {'at the goal in the end':>30} {'ms per plan':>12} {'plans':>6}"


def run(planner: Planner, task: Task) -> tuple[list[EpisodeResult], list[float]]:
    """What a planner does, and the seconds of each of its plans."""
    notes = Notes()
    agent = Agent(NotedPlanner(planner, notes), seed=SEED)
    return run_episodes(AgentPolicy(agent), task), notes.seconds


def measure(name: str, model: LeWM, plan: PlanConfig, env: str, specs: Sequence[EpisodeSpec], workers: int = 1) -> Row:
    """Run the pairs once with one way of planning. workers: processes that hold the environments."""
    results, seconds = run(Planner(model, config=plan), Task(env, specs, BUDGET, workers))
    success = Rate.of(result.success for result in results)
    finally_there = Rate.of(bool(result.reached[-1]) for result in results)
    return Row(name, success, finally_there, sum(seconds) / len(seconds), len(seconds))


def solver_rows(model: LeWM, env: str, specs: Sequence[EpisodeSpec]) -> Iterable[Row]:
    """Sampling solvers by candidates x iterations, gradient solvers by restarts x iterations."""
    for solver in SAMPLING:
        for samples, iterations in SAMPLED:
            plan = PlanConfig(solver=solver, samples=samples, iterations=iterations, elites=max(4, samples // 10))
            yield measure(f"{solver} {samples} x {iterations}", model, plan, env, specs)
    for solver in GRADIENT:
        for restarts, iterations in DESCENDED:
            plan = PlanConfig(solver=solver, iterations=iterations, gradient=GradientConfig(restarts))
            yield measure(f"{solver} {restarts} x {iterations}", model, plan, env, specs)


def schedule_rows(model: LeWM, env: str, specs: Sequence[EpisodeSpec]) -> Iterable[Row]:
    """Every schedule, replanning after each block where it replans; two of them also with a warm start."""
    for schedule in SCHEDULES:
        yield measure(schedule, model, replace(SCHEDULE_CEM, schedule=schedule), env, specs)
    for schedule in SCHEDULES[1:3]:
        plan = replace(SCHEDULE_CEM, schedule=schedule, warm_start=True)
        yield measure(f"{schedule}, warm start", model, plan, env, specs)


def print_table(title: str, rows: Iterable[Row]) -> None:
    """Print rows as they come."""
    print(f"{title}\n{HEADER}")
    for row in rows:
        print(row, flush=True)


def main(
    model: Path = Path("runs/demo/training"),
    env: str = "tworoom",
    episodes: int = 50,
    table: Literal["solvers", "schedules", "both"] = "both",
    threads: int = 2,
) -> None:
    """Print the tables for a model trained for an environment."""
    torch.set_num_threads(threads)
    world_model = LeWM.from_pretrained(model)
    specs = load_manifest(env).first(episodes)
    for name, rows in (("solvers", solver_rows), ("schedules", schedule_rows)):
        if table in (name, "both"):
            print_table(f"{name} ({env}, {episodes} pairs, {world_model.device})", rows(world_model, env, specs))


if __name__ == "__main__":
    tyro.cli(main)
