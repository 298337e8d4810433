"""Minutes of training until planning succeeds: one run per seed, with success at some of its checkpoints.

    python benchmarks/speedrun.py --data data/pusht.h5 --out runs/speedrun [--seeds 0 1 2] [--checkpoints 4]
        [--schedules shrinking whole] [--preset pusht] [-- options of `lewm train`]

The clock runs from the start of the training command to the moment a checkpoint is complete on disk: starting Python,
reading the dataset and compiling count, making the dataset and evaluating do not. Every seed compiles from scratch: its
compilers' caches are folders of its own. Each checkpoint is exported to bf16 and evaluated on the environment's 200
frozen pairs, by the paper's protocol, with every schedule. Wilson's 95 % intervals.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lewm import checkpoint
from lewm.evaluate.results import read_rates
from lewm.presets import preset

LOOK_EVERY = 0.2  # seconds between two looks for new checkpoints


def lewm(*arguments: object, **environment: str) -> None:
    done = subprocess.run([sys.executable, "-m", "lewm", *map(str, arguments)], env=os.environ | environment)
    if done.returncode:
        raise SystemExit(done.returncode)  # what went wrong has been said


def empty_caches(folder: Path) -> dict[str, str]:
    """Where the compilers of one run keep their code: nothing is there yet."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}


def train(arguments: argparse.Namespace, seed: int, run: Path) -> list[dict[str, Any]]:
    """Train one seed; returns step, folder and seconds on the clock of each checkpoint."""
    if (run / "config.json").exists():
        raise SystemExit(f"{run} holds a run already: a clock cannot be started in the middle of one.")
    steps = arguments.steps or preset(arguments.preset).train.steps
    options = ("--train.steps", steps, "--train.checkpoint-every", -(-steps // arguments.checkpoints))
    kept = run.with_name(f"{run.name}_checkpoints")
    with tempfile.TemporaryDirectory() as caches, keeping(run / "checkpoints", kept):
        started = time.time()
        lewm(
            *("train", arguments.preset, "--data", arguments.data, "--out", run, "--seed", seed),
            *(*options, *arguments.options),
            **empty_caches(Path(caches)),
        )
    found = []
    for folder in checkpoint.of_run(kept):
        finished = max(path.stat().st_mtime for path in folder.iterdir())
        row = {"seed": seed, "step": checkpoint.step_of(folder), "folder": folder, "seconds": finished - started}
        found.append(row)
    return found


@contextlib.contextmanager
def keeping(checkpoints: Path, kept: Path) -> Iterator[None]:
    """While the context lasts, link every checkpoint that appears into another folder: a run keeps only its newest."""
    ended = threading.Event()

    def look() -> None:
        for folder in checkpoint.of_run(checkpoints):
            if not (kept / folder.name).exists():
                try:
                    shutil.copytree(folder, kept / folder.name, copy_function=os.link)
                except OSError:  # it went while it was linked
                    shutil.rmtree(kept / folder.name, ignore_errors=True)

    def watch() -> None:
        while not ended.wait(LOOK_EVERY):
            look()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        look()  # at what came in the last moment


def evaluate(row: dict[str, Any], arguments: argparse.Namespace, out: Path) -> list[dict[str, Any]]:
    """A checkpoint's rows, one per schedule, with its success."""
    model, folder = out / f"model_{row['step']}", row.pop("folder")
    lewm("export", folder, model)
    rows = []
    for schedule in arguments.schedules:
        results = out / f"evaluation_{row['step']}_{schedule}.json"
        lewm("eval", model, "--out", results, "--eval.episodes", arguments.pairs, "--plan.schedule", schedule)
        rate = read_rates(results)["policy"].to_dict()
        measured = {name: rate[name] for name in ("successes", "episodes", "rate", "interval_95")}
        rows.append({**row, "schedule": schedule, **measured})
    return rows or [row]


def describe(row: dict[str, Any]) -> str:
    if "schedule" not in row:
        return f"| {row['seed']} | {row['step']:,} | {row['seconds'] / 60:.2f} | – | not evaluated |"
    low, high = (100 * bound for bound in row["interval_95"])
    return (
        f"| {row['seed']} | {row['step']:,} | {row['seconds'] / 60:.2f} | {row['schedule']} | "
        f"{row['successes']}/{row['episodes']} = {100 * row['rate']:.1f} % [{low:.1f}, {high:.1f}] |"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", default="pusht")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=None, help="instead of the preset's")
    parser.add_argument("--checkpoints", type=int, default=4, help="to evaluate, evenly spaced, per run")
    parser.add_argument("--schedules", nargs="*", default=["shrinking"], help="none: only train, time and export")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("options", nargs="*", help="for `lewm train`, after --")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    rows = []
    for seed in arguments.seeds:
        run = arguments.out / f"seed_{seed}"
        found = train(arguments, seed, run)
        print(f"Seed {seed}: trained in {found[-1]['seconds']:.0f} s")
        for row in found:
            rows += evaluate(row, arguments, arguments.out / f"seed_{seed}_figures")
        (arguments.out / "speedrun.json").write_text(json.dumps(rows, indent=2))
    print("\n| seed | step | minutes | schedule | success |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        print(describe(row))


if __name__ == "__main__":
    main()
