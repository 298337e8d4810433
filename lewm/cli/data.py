"""`lewm data`: check, convert or show a dataset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.markup import escape
from rich.table import Table

from lewm.cli.frame import console, parse, print_grid, say, take_positional
from lewm.errors import ConfigError, DataError, unknown_name


@dataclass(frozen=True)
class DataCheckArgs:
    """Read a whole dataset file, say what it holds and list what is wrong with it: status 1 if anything is."""

    file: tyro.conf.Positional[Path]  # An HDF5 dataset, collected here or official.
    contact_sheet: Path | None = None  # Where to draw some of its frames; None: FILE.contact.png.


def data_check(arguments: list[str]) -> None:
    """Read everything, verify checksums, show statistics and a contact sheet"""
    args = parse(DataCheckArgs, arguments, "data check")
    from lewm.cli.progress import progress_bar
    from lewm.data.formats.check import check

    sheet = args.contact_sheet or args.file.with_name(f"{args.file.name}.contact.png")
    with progress_bar(console, "check") as on_progress:
        report = check(args.file, sheet, on_progress)
    print_grid((f"[bold]{name}[/]", escape(value)) for name, value in report.facts.items())
    table = Table("action", "mean", "std", "min", "max", "at min or max", box=None, header_style="bold")
    for number, (*values, at_bounds) in enumerate(report.actions):
        table.add_row(str(number), *(f"{value:.4g}" for value in values), f"{100 * at_bounds:.1f} %")
    console.print(table)
    say(report.contact_sheet)
    if report.problems:
        raise DataError("\n- ".join([f"{args.file} has problems ({len(report.problems)}):", *report.problems]))
    say("No problems found.")


@dataclass(frozen=True)
class DataConvertArgs:
    """Convert a dataset from and to HDF5, LeRobot (v3) and folders of PNG and NPZ (docs/guide/convert-data.md)."""

    source: tyro.conf.Positional[Path]  # An HDF5 file, a LeRobot dataset or a plain folder.
    target: tyro.conf.Positional[Path]  # A new file or folder.
    to: Literal["hdf5", "folder", "lerobot"] | None = None  # None: by the target's suffix.
    camera: str | None = None  # The LeRobot feature to take frames from, if there are several.
    resolution: int | None = None  # Side of the new frames; None: as they are.
    crop: bool = False  # Cut frames that are not square to their middle.
    fps: int = 10  # Rows per second of a LeRobot target.
    video_quality: Literal["lossless", "compact"] = "lossless"  # Of a LeRobot target; compact: plays in browsers.


def data_convert(arguments: list[str]) -> None:
    """From and to HDF5, LeRobot and plain folders"""
    args = parse(DataConvertArgs, arguments, "data convert")
    from lewm.cli.progress import progress_bar
    from lewm.data.formats.convert import convert

    options: dict[str, Any] = {"camera": args.camera, "resolution": args.resolution, "crop": args.crop}
    options |= {"fps": args.fps, "quality": args.video_quality}
    with progress_bar(console, "convert") as on_progress:
        form = convert(args.source, args.target, args.to, **options, on_progress=on_progress)
    say(f"Converted to {args.target} ({form}).")


@dataclass(frozen=True)
class DataShowArgs:
    """Write one episode of a dataset as a film."""

    file: tyro.conf.Positional[Path]  # An HDF5 dataset.
    episode: int = 0  # Its number, from 0.
    out: Path | None = None  # A .gif or .mp4 file; None: a GIF beside the dataset.
    fps: int = 10  # Frames per second.


def data_show(arguments: list[str]) -> None:
    """Write an episode as GIF or MP4"""
    args = parse(DataShowArgs, arguments, "data show")
    from lewm.data.formats.show import show

    say(f"Film: {show(args.file, args.episode, args.out, args.fps)}")


COMMANDS: dict[str, Callable[[list[str]], None]] = {"check": data_check, "convert": data_convert, "show": data_show}


def run(arguments: list[str]) -> None:
    """Run one of the data commands."""
    name, rest = take_positional(arguments, "data", "COMMAND", f"one of {', '.join(COMMANDS)}")
    if name not in COMMANDS:
        raise ConfigError(unknown_name("data command", name, COMMANDS))
    COMMANDS[name](rest)
