"""Which of Reacher's pairs does an evaluation solve: those of rough torques, as in the released data, or of smooth?

    python benchmarks/reacher_pairs.py runs/reacher/evaluations/paper_whole_cem_200.json

For results on the frozen pairs (`--manifest paper`): there, pair i is cut from held-out episode i, which is simulated
again to see its torques. `turned`: the median angle by which the joint that turns more does so between start and goal.
`nearest imagined`: the median of the lowest cost of an episode's plans, of solved pairs and of the others; where it is
high, the search has found no way.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from lewm.data.generate import HELD_OUT_SEED, generate_episode
from lewm.envs import make_env
from lewm.evaluate.stats import Rate

KINDS = ("rough", "smooth")


def kind(index: int, env: Any) -> str:
    """Whether torques of a held-out episode go on as they were."""
    torques = generate_episode("reacher", env.resolution, HELD_OUT_SEED, index, draw=False, env=env)["action"][:-1]
    follows = np.corrcoef(torques[:-1].ravel(), torques[1:].ravel())[0, 1]
    return KINDS[bool(follows > 0.3)]


def turned(episode: dict[str, Any]) -> float:
    """The larger of the two joints' angles between start and goal, in radians."""
    return float(np.abs(np.subtract(episode["goal"][:2], episode["start"][:2])).max())


def nearest_imagined(episodes: list[dict[str, Any]]) -> str:
    """The median of the lowest costs of these episodes' plans."""
    return f"{np.median([min(each['plan_costs']) for each in episodes]):.1f}" if episodes else "–"


def main(evaluation: tyro.conf.Positional[Path]) -> None:
    """Print a table with one row per kind of pair."""
    if not evaluation.is_file():
        raise SystemExit(f"{evaluation} is not there. `lewm eval reacher --out {evaluation}` makes such a file.")
    document = json.loads(evaluation.read_text())
    about_reacher = document.get("environment") == "lewm/Reacher-v0"
    if not about_reacher or document["config"]["eval"]["manifest"] not in (None, "paper"):
        raise SystemExit(f"{evaluation} is not about Reacher's frozen pairs (`lewm eval reacher --manifest paper`).")
    env = make_env("reacher", resolution=28)
    episodes = [(kind(episode["index"], env), episode) for episode in document["episodes"]]
    print(f"{'torques':10s}{'success':>30s}{'random policy':>30s}{'turned':>8s}{'nearest imagined':>18s}{'failed':>8s}")
    for name in KINDS:
        found = [episode for its_kind, episode in episodes if its_kind == name]
        if not found:
            continue
        rates = (str(Rate.of(e[column] for e in found)) for column in ("success", "random_policy_success"))
        solved, failed = (nearest_imagined([e for e in found if e["success"] is is_so]) for is_so in (True, False))
        angle = np.median([turned(e) for e in found])
        print(f"{name:10s}{next(rates):>30s}{next(rates):>30s}{angle:8.2f}{solved:>18s}{failed:>8s}")
    env.close()


if __name__ == "__main__":
    tyro.cli(main)
