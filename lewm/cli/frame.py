"""What all verbs share: parsing their arguments, and printing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import tyro
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from lewm.errors import ConfigError
from lewm.retired import advice

if TYPE_CHECKING:
    from lewm.evaluate.comparison_tables import Table as CellTable
    from lewm.evaluate.stats import Rate

T = TypeVar("T")
console = Console(highlight=False, soft_wrap=True)


def parse(kind: type[T], arguments: list[str], prog: str, default: T | None = None) -> T:
    """Parse a verb's arguments; tyro names the options nearest to an unknown one, and we what became of an old one."""
    for argument in arguments:
        if sentence := advice(argument.partition("=")[0]):
            raise ConfigError(sentence)
    kwargs: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(kind, prog=f"lewm {prog}", args=arguments, **kwargs)


def wants_help(arguments: list[str]) -> bool:
    """Whether the arguments ask what there is."""
    return "-h" in arguments or "--help" in arguments


def take_positional(arguments: list[str], verb: str, name: str, meaning: str) -> tuple[str, list[str]]:
    """Split off the argument that decides what the others' defaults are."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    usage = f"usage: lewm {verb} {name} [options]; {name} is {meaning}"
    if wants_help(arguments):
        console.print(escape(f"{usage}.\n`lewm {verb} {name} --help` lists the options."))
        raise SystemExit(0)
    raise ConfigError(f"{name} is missing. {usage}.")


def take_option(arguments: list[str], name: str, default: str) -> tuple[str, list[str]]:
    """Split off ``--name VALUE`` or ``--name=VALUE``, which decides what the others' defaults are; the last counts."""
    value, rest = default, list[str]()
    remaining = iter(arguments)
    for argument in remaining:
        flag, equals, given = argument.partition("=")
        if flag != name:
            rest.append(argument)
        else:
            value = given if equals else next(remaining, "")
            if not value:
                raise ConfigError(f"{name} needs a value.")
    return value, rest


def say(message: str) -> None:
    """Print a message as it is."""
    console.print(message, markup=False)


def print_rates(rates: Mapping[str, Rate]) -> None:
    """The final table of an evaluation."""
    from lewm.evaluate.results import LABELS

    table = Table("", "success", "95 % interval", "episodes", box=None, header_style="bold")
    for name, rate in rates.items():
        low, high = rate.interval
        interval = f"{100 * low:.1f} to {100 * high:.1f} %"
        table.add_row(LABELS[name], f"{100 * rate.value:.1f} %", interval, f"{rate.successes} of {rate.total}")
    console.print(table)


def print_grid(rows: Iterable[Iterable[str]]) -> None:
    """Rows in columns, without lines."""
    table = Table.grid(padding=(0, 3))
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_table(table: CellTable) -> None:
    """As wide as it has to be: a terminal shows lines that are too long better than cells that are cut."""
    shown = Table(*map(escape, table.header), box=None, header_style="bold")
    for row in table.rows:
        shown.add_row(*map(escape, row))
    wanted = Measurement.get(console, console.options.update(width=1000), shown).maximum
    wide = Console(width=max(console.width, wanted), highlight=False)
    wide.print(f"[bold]{escape(table.title)}[/]", shown, "", sep="\n")
