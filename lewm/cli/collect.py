"""`lewm collect`: generate a dataset with an environment's expert."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from lewm.cli.frame import console, parse
from lewm.cli.progress import progress_bar
from lewm.config import CollectConfig


@dataclass(frozen=True, kw_only=True)
class CollectArgs(CollectConfig):
    """Generate a dataset with an environment's expert. The same command resumes; more episodes append."""

    env: tyro.conf.Positional[str]  # The environment; `lewm envs` lists them.
    out: Path | None = None  # The dataset file; None: data/ENV.h5.
    seed: int = 0  # Each episode is a function of this seed and its number.


def run(arguments: list[str]) -> None:
    """Collect behind a progress bar."""
    args = parse(CollectArgs, arguments, "collect")
    collect_with_progress(args.env, args.out or Path("data") / f"{args.env}.h5", args, args.seed, console)


def collect_with_progress(env: str, out: Path, settings: CollectConfig, seed: int, console: Console) -> None:
    """Collect a dataset behind a progress bar, and say what came of it."""
    from lewm.data.collect import collect

    started = time.monotonic()
    with progress_bar(console, "collect") as on_progress:
        report = collect(env, out, settings, seed, on_progress)
    rate = report.frames * report.new_episodes / report.episodes / (time.monotonic() - started)
    counts = f"{report.episodes:,} episodes ({report.new_episodes:,} new), {report.frames:,} frames"
    speed = f", {rate:,.0f} frames/s" if report.new_episodes else ""
    console.print(f"{report.path}: {counts}, {report.gb_per_million_frames:.2f} GB per million{speed}", markup=False)
    console.print(f"{report.successes:,} of {report.episodes:,} episodes reached their goal", markup=False)
