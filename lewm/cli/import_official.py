"""`lewm import-official`: convert the authors' checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from lewm.cli.frame import parse, say
from lewm.types import DataFacts


@dataclass(frozen=True)
class ImportArgs:
    """Convert the authors' weights.pt and config.json into a lewm checkpoint, tensor by tensor."""

    weights: tyro.conf.Positional[Path]  # The official state dict.
    config: tyro.conf.Positional[Path]  # The config.json beside it.
    out: tyro.conf.Positional[Path]  # A new folder.
    env: str | None = None  # The environment that they were trained in.
    dataset: Path | None = None  # The dataset of these weights: planning needs its action statistics.
    frame_skip: int = 5  # Primitive actions per block.


def run(arguments: list[str]) -> None:
    """Convert, and say where it is."""
    args = parse(ImportArgs, arguments, "import-official")
    import numpy as np
    import torch

    from lewm.data.stats import action_stats, recorded_actions
    from lewm.data.store import EpisodeStore
    from lewm.envs.registry import env_entry
    from lewm.methods import official

    facts = DataFacts(environment=args.env and env_entry(args.env).gym_id)
    if args.dataset:
        with EpisodeStore(args.dataset) as store:
            episodes = np.arange(store.num_episodes)
            recorded = torch.from_numpy(recorded_actions(store.actions, store.lengths, episodes))
            environment = facts.environment or store.environment
            facts = DataFacts(action_stats(store.actions), recorded, episodes=len(episodes), environment=environment)
    out = official.import_official(args.weights, args.config, args.out, facts, args.frame_skip)
    say(f"Imported to {out}. Look at it with `lewm info {out}`.")
    if facts.actions is None:
        say("It has no action statistics yet, so it cannot plan: import with --dataset to add them.")
