"""`lewm compare`: is one evaluation better than another, or just luckier?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.table import Table

from lewm.cli.frame import console, parse, say


@dataclass(frozen=True)
class CompareArgs:
    """Compare two evaluations of the same pairs, episode by episode."""

    first: tyro.conf.Positional[Path]  # Results that `lewm eval` wrote.
    second: tyro.conf.Positional[Path]  # Others, of the same pairs.


def run(arguments: list[str]) -> None:
    """Compare, and print a table."""
    args = parse(CompareArgs, arguments, "compare")
    from lewm.evaluate import results

    table = Table("", "first", "second", "only first", "only second", "p", box=None, header_style="bold")
    for protocol, found in results.compare(args.first, args.second).items():
        rates = (f"{100 * rate.value:.1f} % ({rate.successes}/{rate.total})" for rate in (found.first, found.second))
        table.add_row(protocol, *rates, str(found.only_first), str(found.only_second), f"{found.p_value:.3g}")
    console.print(table)
    say("p: how often luck alone would divide the episodes that only one of them solved as unevenly (McNemar, exact).")
