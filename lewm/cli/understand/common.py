"""What the verbs of `lewm understand` share: options, places, and how findings are printed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import tyro

from lewm.cli.frame import console, parse, print_table, say
from lewm.cli.progress import progress_bar
from lewm.errors import ConfigError

if TYPE_CHECKING:
    from lewm.understand.findings import Findings
    from lewm.understand.subject import Subject


@dataclass(frozen=True, kw_only=True)
class SubjectArgs:
    """Options of every verb."""

    checkpoint: tyro.conf.Positional[str]  # A model or run folder, a name ("pusht") or a hub id.
    data: Path | None = None  # Episodes to look at; None: some are collected that no training has seen.
    out: Path | None = None  # The folder of all that is found; None: understanding/NAME here.
    episodes: int = 200  # How many are collected where no --data is given.
    demos: Path | None = None  # Demonstrations that those are to replay (pusht): what its shipped model was trained on.
    seed: int = 0  # Everything random derives from it.
    device: str = "auto"  # auto: cuda, then mps, then cpu.

    @property
    def folder(self) -> Path:
        """Where findings go."""
        return self.out or Path("understanding") / Path(self.checkpoint).resolve().name


A = TypeVar("A", bound=SubjectArgs)


def parse_checked(kind: type[A], arguments: list[str], prog: str) -> A:
    """Parse a verb's arguments, and refuse what no verb can do with."""
    args = parse(kind, arguments, prog)
    if not 0 <= args.seed < 2**63:
        raise ConfigError(f"seed must be between 0 and {2**63 - 1:,}, got {args.seed}.")
    return args


def episodes_for(args: SubjectArgs, subject: Subject) -> Path:
    """The dataset that a verb looks at: the one that is named, or held-out episodes, collected behind a bar."""
    if args.data is not None:
        return args.data
    from lewm.understand.episodes import held_out_episodes

    path = args.folder / ("episodes.h5" if args.seed == 0 else f"episodes-{args.seed}.h5")
    with progress_bar(console, "collect") as on_progress:
        return held_out_episodes(subject, path, args.episodes, args.seed, args.demos, on_progress)


def show(findings: Findings, folder: Path, earlier: Findings | None = None) -> None:
    """Print tables and sentences, and where the files are. earlier: what had been found before the question."""
    if findings == earlier:
        say(f"This was asked before; remove {folder / findings.verb}.json to ask again.")
    for table in findings.tables:
        print_table(table)
    for sentence in findings.sentences:
        say(sentence)
    say(f"Findings: {folder / findings.verb}.md, .json and .png")
