"""What uniform random actions reach on the frozen pairs: the floor under every success rate.

    python benchmarks/random_policy.py                                   # all environments, both manifests, 200 pairs
    python benchmarks/random_policy.py --env cube --manifest paper --pairs 16 --frames 3 --resolution 224 --workers 1 2

Prints one table. The second command draws as many frames as a planner would look at, so that its seconds (making the
environments included) show what the environments of an evaluation cost, and what a second process gains.
"""

from __future__ import annotations

import argparse
import time

from lewm.envs import env_names
from lewm.evaluate.episodes import Task, run_episodes
from lewm.evaluate.manifest import PACKAGED, load_manifest
from lewm.evaluate.policies import RandomPolicy
from lewm.evaluate.stats import Rate
from lewm.types import EpisodeResult

BUDGET = 50
BATCH = 50  # environments that exist at the same time: each of MuJoCo's takes memory
HEADER = ("environment", "manifest", "solved at the start", "paper", "strict", "workers", "seconds")


def random_episodes(env: str, manifest: str, workers: int, options: argparse.Namespace) -> list[EpisodeResult]:
    """The first pairs of a manifest, each with random actions to the end of its budget."""
    policy = RandomPolicy(options.seed)
    policy.history, policy.image_size = options.frames, options.resolution
    specs = load_manifest(env, manifest).first(options.pairs)
    tasks = [Task(env, specs[first : first + BATCH], BUDGET, workers) for first in range(0, len(specs), BATCH)]
    return [result for task in tasks for result in run_episodes(policy, task)]


def row(env: str, manifest: str, workers: int, options: argparse.Namespace) -> tuple[str, ...]:
    """One line of the table."""
    begin = time.perf_counter()
    results = random_episodes(env, manifest, workers, options)
    seconds = time.perf_counter() - begin
    solved = Rate.of(result.solved_at_start for result in results)
    paper, strict = Rate.of(result.success for result in results), Rate.of(result.strict_success for result in results)
    counts = f"{solved.successes}/{solved.total}"
    return env, manifest, counts, str(paper), str(strict), str(workers), f"{seconds:.1f}"


def main() -> None:
    """Run every combination that was asked for, one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", nargs="+", default=["tworoom", "pusht", "reacher", "cube"], choices=env_names())
    parser.add_argument("--manifest", nargs="+", default=list(PACKAGED), help="paper, strict, or files of your own")
    parser.add_argument("--pairs", type=int, default=200, help="taken from the start of each manifest")
    parser.add_argument("--frames", type=int, default=0, help="that a policy would look back to; 0: none on the way")
    parser.add_argument("--resolution", type=int, default=8)
    parser.add_argument("--workers", type=int, nargs="+", default=[1], help="processes; several: one after the other")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}")
    for env in options.env:
        for manifest in options.manifest:
            for workers in options.workers:
                print(f"| {' | '.join(row(env, manifest, workers, options))} |", flush=True)


if __name__ == "__main__":
    main()
