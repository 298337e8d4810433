"""`lewm export`: write a run's model for others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from lewm.cli.frame import parse, say


@dataclass(frozen=True)
class ExportArgs:
    """Make of a run a small folder to publish: bf16 weights, description and a model card. Repeat it as you like."""

    run: tyro.conf.Positional[str]  # A run folder: its newest checkpoint; or any model folder.
    out: tyro.conf.Positional[Path]  # The folder to write; what else is in it stays.
    evaluations: tuple[Path, ...] = ()  # Results of `lewm eval OUT`, for the card; they join those that it has.


def run(arguments: list[str]) -> None:
    """Export, and say what came of it."""
    args = parse(ExportArgs, arguments, "export")
    from lewm import checkpoint
    from lewm.export.writer import export_run

    out = export_run(args.run, args.out, args.evaluations)
    size, evaluations = (out / checkpoint.WEIGHTS).stat().st_size / 1e6, checkpoint.load_document(out)["evaluations"]
    say(f"Exported to {out}: {size:.1f} MB of weights, {len(evaluations)} evaluations in the card.")
