"""A search that finds lower costs and reaches fewer goals: tried and left out (docs/cube.md).

    runs/tuning_manifests.sh cube 200 runs/tuning
    python benchmarks/greedy.py --model pretrained/cube --env cube --manifest runs/tuning/cube_tuning_strict.json

iCEM draws candidates around the mean of its elites: where these disagree, it ends somewhere between them. ``Greedy``
draws around each of the elites instead, forgets none until better ones are found, and lets the spread fall as the
search goes on, so it follows several ways down at the same time. Both plan with the environment's tuned settings.
`imagined`: the median distance from the goal at which the episodes' first plans are imagined to end; they start alike.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from solvers import run

from lewm.config import PlanConfig
from lewm.envs.registry import env_entry
from lewm.errors import LewmError
from lewm.evaluate.episodes import Task
from lewm.evaluate.manifest import load_manifest
from lewm.evaluate.stats import Rate
from lewm.methods.lewm import LeWM
from lewm.plan.icem import ICEM, colour
from lewm.plan.planner import Planner
from lewm.plan.solver import Problem, Search
from lewm.plan.tuned import tuned_plan
from lewm.types import EpisodeSpec

BUDGET = 50
FIRST_SPREAD, LAST_SPREAD = 0.5, 0.05  # in z-scored actions


class Greedy(ICEM):
    """As many candidates around each of the best plans so far, ever nearer to them. Memory: as iCEM's."""

    def __init__(self, config: PlanConfig) -> None:
        super().__init__(config)
        self.kept = config.elites

    def step(self, problem: Problem, search: Search) -> Search:
        mean_BHA, kept_BEHA, kept_cost_BE, colouring = search.memory
        samples, recorded = self.config.samples, self.config.recorded
        done = (search.iteration - recorded).clamp_min(0) / max(1, self.iterations - 1 - recorded)
        spread = FIRST_SPREAD * (LAST_SPREAD / FIRST_SPREAD) ** done
        centres_BSHA = kept_BEHA[:, torch.arange(samples, device=mean_BHA.device) % self.kept]
        noise_BSHA = colour(problem.noise(samples, search.iteration), colouring)
        noise_BSHA[:, 0] = 0  # the plan to begin from is a candidate too
        plans_BSHA = problem.bound(centres_BSHA + spread * noise_BSHA)
        if recorded:
            plans_BSHA = self._recorded_first(problem, search, plans_BSHA)
        cost_BS = torch.cat([problem.cost(plans_BSHA), kept_cost_BE], dim=1)
        cost_BE, best_BE = cost_BS.topk(self.kept, dim=1, largest=False)
        kept_BEHA = torch.take_along_dim(torch.cat([plans_BSHA, kept_BEHA], 1), best_BE[:, :, None, None], dim=1)
        memory = (mean_BHA, kept_BEHA, cost_BE, colouring)
        return search.next(kept_BEHA[:, 0], torch.zeros_like(mean_BHA) + spread, memory)


def row(name: str, planner: Planner, env: str, specs: Sequence[EpisodeSpec]) -> str:
    """Run the pairs once: a line of the table."""
    workers = os.cpu_count() or 1 if env_entry(env).slow else 1
    results, _ = run(planner, Task(env, specs, BUDGET, workers))
    imagined = np.median([result.plans[0].cost for result in results])
    return f"{name:10s}{Rate.of(result.success for result in results)!s:>30}{imagined:10.2f}"


def main(
    model: Path, env: str, manifest: Path, pairs: int = 32, precision: Literal["auto", "float32", "bf16"] = "auto"
) -> None:
    """Print a row for iCEM and one for the greedy search."""
    try:
        world_model, plan = LeWM.from_pretrained(model), tuned_plan(env, PlanConfig(precision=precision))
        specs = load_manifest(env, manifest).first(pairs)
    except LewmError as error:
        raise SystemExit(f"Error: {error}") from error
    print(f"{env}, {pairs} pairs, {plan.schedule} plans, {world_model.device}")
    print(f"{'':10s}{'success':>30s}{'imagined':>10s}")
    for name, solver in {"icem": ICEM(plan), "greedy": Greedy(plan)}.items():
        print(row(name, Planner(world_model, solver, plan), env, specs), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
