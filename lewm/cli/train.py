"""`lewm train`: train a method on a dataset."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.markup import escape

from lewm.cli.frame import console, parse, print_grid, say, take_option, take_positional, wants_help
from lewm.config import Config, LoaderConfig, MethodConfig, TrainConfig
from lewm.errors import LewmError
from lewm.methods.registry import method_names
from lewm.presets import PRESETS, preset

# The settings that most runs change, and what for. `lewm train PRESET --help` has all of them.
COMMON = {
    "--data FILE": "the dataset, from `lewm collect` or the authors",
    "--out DIR": "the run's folder; a run that is there is continued",
    "--method NAME": "what to train (below)",
    "--env NAME": "another world than the preset's",
    "--seed N": "everything random derives from it",
    "--device cuda": "auto takes CUDA, then MPS, then the CPU",
    "--train.steps N": "optimiser steps",
    "--train.batch-size N": "windows per step, of all processes together",
    "--train.lr X": "peak learning rate",
    "--train.checkpoint-every N": "steps between checkpoints",
    "--train.keep-every N": "steps between small models that stay, in RUN/series",
    "--method.encoder.kind resnet18": "another encoder",
    "--loader.cache ram": "where decoded frames are kept",
}
EXAMPLES = (
    "lewm train tworoom --data data/tworoom.h5",
    "lewm train pusht --data data/pusht.h5 --out runs/pusht --train.steps 6000",
    "torchrun --nproc-per-node 8 -m lewm train cube --data data/cube.h5",
)


@dataclass(frozen=True)
class TrainArgs:
    """Every setting of the preset that training depends on can be changed; the values shown are the preset's."""

    out: Path  # The run's folder.
    train: TrainConfig
    method: MethodConfig
    loader: LoaderConfig
    env: str  # The environment.
    data: Path | None = None  # The dataset file.
    seed: int = 0  # Everything random derives from it.
    device: str = "auto"  # auto: cuda, then mps, then cpu.
    resume: Literal["auto", "never"] = "auto"  # auto: continue the run in --out, if there is one.

    @staticmethod
    def like(config: Config, out: Path) -> TrainArgs:
        """What can be changed of a run."""
        return TrainArgs(out, config.train, config.method, config.loader, config.env, config.data, config.seed)

    def of(self, config: Config) -> Config:
        """A run with these settings, and what later verbs take from ``config``."""
        names = ("out", "train", "method", "loader", "env", "data", "seed", "device")
        return replace(config, **{name: getattr(self, name) for name in names})


def run(arguments: list[str]) -> None:
    """Train behind a progress bar, or along with other processes."""
    if wants_help(arguments):
        _explain()
    name, rest = take_positional(arguments, "train", "PRESET", f"one of {', '.join(PRESETS)}")
    method, rest = take_option(rest, "--method", "lewm")
    config = preset(name, method)
    # Not runs/PRESET: `lewm demo` keeps a dataset and a report in runs/demo, beside a run of its own.
    folder = f"train_{name}" if method == "lewm" else f"train_{name}_{method}"
    args = parse(TrainArgs, rest, f"train {name}", TrainArgs.like(config, Path("runs") / folder))
    from lewm.cli.progress import training_bar
    from lewm.envs.registry import env_entry
    from lewm.train import loop
    from lewm.train.distributed import launched_rank

    config = replace(args.of(config), env=env_entry(args.env).gym_id)
    if launched_rank() > 0:
        _train_along(config, args.resume, launched_rank())
        return
    with training_bar(console) as monitor:
        result = loop.train(config, args.resume, monitor)
    say(f"{result.steps} steps; checkpoint: {result.checkpoint}")


def _explain() -> None:
    """What most people want to know, before everything else there is."""
    console.print("[bold]Train a method on a dataset.[/] The same command continues an interrupted run.\n")
    print_grid((f"  [bold]{escape(flag)}[/]", escape(meaning)) for flag, meaning in COMMON.items())
    examples = "\n".join(f"  {example}" for example in EXAMPLES)
    say(f"\nMethods: {', '.join(method_names())}. Presets: {', '.join(PRESETS)}. Examples:\n{examples}\n")


def _train_along(config: Config, resume: str, rank: int) -> None:
    """A process of several that is not the first, which speaks for all: quiet but for errors of its own."""
    from lewm.train import loop

    try:
        loop.train(config, resume)
    except LewmError as error:
        raise type(error)(f"Process {rank}: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
