"""Which of Cube's pairs does an evaluation solve: those in which the gripper holds the cube, or has to grasp it?

    python benchmarks/cube_pairs.py runs/cube/evaluations/paper_shrinking_tuned_200.json

Pairs that are solved at the start are left out. `nearest imagined`: the median of the lowest cost of an episode's
plans; where it is small and the pairs fail, the model imagines what does not happen.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tyro
from known_state import is_held

from lewm.evaluate.stats import Rate


def main(evaluation: tyro.conf.Positional[Path]) -> None:
    """Print a table with one row per kind of pair."""
    if not evaluation.is_file():
        raise SystemExit(f"{evaluation} is not there. `lewm eval cube --out {evaluation}` makes such a file.")
    episodes = [each for each in json.loads(evaluation.read_text())["episodes"] if not each["solved_at_start"]]
    print(f"{'at the start':15s}{'at the goal':15s}{'success':>30s}{'nearest imagined':>18s}")
    for start in (True, False):
        for goal in (True, False):
            wanted = (start, goal)
            found = [e for e in episodes if (is_held(np.array(e["start"])), is_held(np.array(e["goal"]))) == wanted]
            names = ["held" if held else "free" for held in wanted]
            nearest = np.median([min(e["plan_costs"]) for e in found]) if found else np.nan
            print(f"{names[0]:15s}{names[1]:15s}{Rate.of(e['success'] for e in found)!s:>30s}{nearest:18.1f}")


if __name__ == "__main__":
    tyro.cli(main)
