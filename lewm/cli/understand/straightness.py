"""`lewm understand straightness`: how straight latent paths become, of several runs in one figure."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import tyro

from lewm.cli.frame import console, parse, say
from lewm.cli.progress import progress_bar
from lewm.cli.understand.common import show
from lewm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class StraightnessArgs:
    """Show how straight latent paths become over training, of several runs, and how straight models' paths are now."""

    # Runs or models; NAME=RUN says what one is called.
    runs: tyro.conf.Positional[tuple[str, ...]]
    data: Path | None = None  # Episodes to measure the models on as they are now. Without: what runs have recorded.
    episodes: int = 50  # How many are collected for a model that has recorded nothing, where no --data is given.
    series: bool = False  # On these episodes, measure the small models too that a run keeps (--train.keep-every).
    out: Path | None = None  # The folder of all that is found; None: understanding/NAME, of the first.
    device: str = "auto"  # auto: cuda, then mps, then cpu.


def run(arguments: list[str]) -> None:
    """Read what was recorded, measure what was not, and draw all of it."""
    args = parse(StraightnessArgs, arguments, "understand straightness")
    if not args.runs:
        raise ConfigError("RUN is missing. usage: lewm understand straightness RUN [RUN ...] [--data FILE].")
    from lewm.understand.findings import check_outputs, write_findings
    from lewm.understand.straightness import compare_straightness, draw
    from lewm.understand.subject import open_episodes, open_subject

    named = _named(args.runs)
    folder = args.out or Path("understanding") / named[0][0]
    check_outputs(folder, "straightness", [args.data] if args.data else [])
    data = args.data or _collected(named, folder, args)
    opened = open_episodes(data, open_subject(named[0][1], args.device)) if data else nullcontext()
    with opened as store, progress_bar(console, "straightness") as on_progress:
        found = compare_straightness(named, store, args.series, args.device, on_progress)
    write_findings(folder, found, draw)
    show(found, folder)


def _named(sources: tuple[str, ...]) -> list[tuple[str, str]]:
    """What each is called, and where it is; two of one name are told apart by their whole paths."""
    pairs = [(name, source) if source else ("", name) for name, _, source in (text.partition("=") for text in sources)]
    short = [name or Path(source).name for name, source in pairs]
    return [
        (name if short.count(name) == 1 else source, source) for name, (_, source) in zip(short, pairs, strict=True)
    ]


def _collected(named: list[tuple[str, str]], folder: Path, args: StraightnessArgs) -> Path | None:
    """Held-out episodes, if a model has no recorded measurements, or if its series is asked for; else None."""
    from lewm.understand.episodes import held_out_episodes
    from lewm.understand.straightness import recorded_curves, run_of
    from lewm.understand.subject import open_subject

    silent = [s for _, s in named if (run := run_of(s)) is None or not any(True for _ in recorded_curves(run))]
    if not silent and not args.series:
        return None
    subject = open_subject((silent or [named[0][1]])[0], args.device)
    if silent:
        say(f"{silent[0]} has recorded nothing over training: it is measured on held-out episodes as it is now.")
    with progress_bar(console, "collect") as on_progress:
        return held_out_episodes(subject, folder / "episodes.h5", args.episodes, on_progress=on_progress)
