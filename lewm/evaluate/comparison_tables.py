"""A comparison as tables of text, which the terminal and a Markdown page show alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lewm.evaluate.comparison import Compared, Contest, Kinds, nearest_imagined, rates, time_ratio
from lewm.evaluate.comparison_files import MARK, PROTOCOLS, Entry
from lewm.evaluate.stats import Rate

NONE = "–"


@dataclass(frozen=True)
class Table:
    """Cells of text under a title."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(compared: Compared) -> Iterator[Table]:
    """All tables of a comparison, the most important first."""
    if len({contest.first.environment for contest in compared.contests}) > 1:
        yield _overview(compared.contests)
    for contest in compared.contests:
        yield _success(contest)
        if compared.tests_of(contest):
            yield _tests(compared, contest)
        yield from (_by_kind(kinds) for kinds in compared.kinds if kinds.contest is contest)
        if groups := contest.equal_arithmetic():
            yield _equal_arithmetic(contest, groups)


def sentences(compared: Compared) -> Iterator[str]:
    """What has to be said beside the tables."""
    yield "Success in percent, with Wilson's interval at 95 %: by the paper's protocol, and by the strict one."
    if compared.tests:
        count = max(Counter(test.protocol for test in compared.tests).values())
        yield (
            "p: how often luck alone would divide the episodes that only one of two solved as unevenly (McNemar's "
            "test, exact). "
            f"p (Holm): corrected for the {count} test{'s' * (count > 1)} by one protocol."
        )
    entries = [entry for contest in compared.contests for entry in contest.entries]
    if any(entry.planner is None for entry in entries):
        yield "Methods that act have no planning, and so no time and no arithmetic of it."
    if compared.kinds:
        yield "Nearest imagined: the median of the lowest distance that an episode's plans promised."
    if any(len({entry.device for entry in contest.entries}) > 1 for contest in compared.contests):
        yield "Times are compared on the same device only."
    contests = compared.contests
    several = any(sum(e.flops_per_plan is not None for e in contest.entries) > 1 for contest in contests)
    if several and not any(contest.equal_arithmetic() for contest in contests):
        yield "No two of these plan with equal arithmetic; `lewm eval --fixed-flops` makes such a pair."
    yield from compared.notes


def markdown(compared: Compared) -> str:
    """The tables as a page."""
    parts = [f"{MARK}: this page is written anew by the next one -->"]
    for table in tables(compared):
        parts += [f"### {table.title}", as_markdown(table)]
    return "\n\n".join([*parts, "\n".join(f"- {sentence}" for sentence in sentences(compared))]) + "\n"


def as_markdown(table: Table) -> str:
    """One table without its title."""
    rows = [table.header, ("---",) * len(table.header), *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def percent(rate: Rate) -> str:
    """A rate with its interval, as short as it can be."""
    if not rate.total:
        return NONE
    low, high = (100 * bound for bound in rate.interval)
    return f"{100 * rate.value:.1f} [{low:.1f}, {high:.1f}]"


def seconds(value: float | None) -> str:
    """A time in the unit that suits it."""
    if value is None:
        return NONE
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def _overview(contests: Sequence[Contest]) -> Table:
    """Every method in every world, by the paper's protocol."""
    names = list(dict.fromkeys(entry.name for contest in contests for entry in contest.entries))
    bounds = list(dict.fromkeys(name for contest in contests for name in contest.bounds()))
    repeated = len({contest.world for contest in contests}) < len(contests)
    cells: dict[str, list[str]] = {name: [] for name in [*names, *bounds]}
    for contest in contests:
        outcomes = {entry.name: entry.outcomes for entry in contest.entries} | contest.bounds()
        for name, row in cells.items():
            row.append(percent(rates(outcomes[name])["paper"]) if name in outcomes else NONE)
    header = ("", *((contest.title if repeated else contest.world) for contest in contests))
    return Table("Success by world", header, tuple((name, *row) for name, row in cells.items()))


def _success(contest: Contest) -> Table:
    header = ("", *PROTOCOLS, "planner", "time per plan", "times the first's", "FLOPs per plan")
    rows = [_success_row(entry, contest.first) for entry in contest.entries]
    for name, outcomes in contest.bounds().items():
        rows.append((name, *map(percent, rates(outcomes).values()), "", "", "", ""))
    return Table(contest.title, header, tuple(rows))


def _success_row(entry: Entry, first: Entry) -> tuple[str, ...]:
    found = map(percent, rates(entry.outcomes).values())
    if entry.planner is None:
        return (entry.name, *found, "acts", NONE, NONE, NONE)
    ratio, flops = time_ratio(entry, first), entry.flops_per_plan
    how = seconds(entry.seconds_per_plan), NONE if ratio is None else f"{ratio:.2f}"
    return (entry.name, *found, entry.planner, *how, NONE if flops is None else f"{flops:.2e}")


def _tests(compared: Compared, contest: Contest) -> Table:
    header = ("", "protocol", "only this one solves", f"only {contest.first.name}", "p", "p (Holm)")
    rows = []
    for test in compared.tests_of(contest):
        found = test.found
        counts = str(found.only_second), str(found.only_first)
        rows.append((test.entry.name, test.protocol, *counts, f"{found.p_value:.3g}", f"{test.adjusted:.3g}"))
    return Table(f"{contest.title}: against {contest.first.name}, pair by pair", header, tuple(rows))


def _by_kind(kinds: Kinds) -> Table:
    contest, groups = kinds.contest, kinds.places.values()
    shown = {entry.name: entry.outcomes for entry in contest.entries} | contest.bounds()
    rows = [
        (name, protocol, *(percent(rates(outcomes, places)[protocol]) for places in groups))
        for protocol in PROTOCOLS
        for name, outcomes in shown.items()
    ]
    for entry in contest.entries:
        near = [nearest_imagined(entry, places) for places in groups]
        if any(distance is not None for distance in near):
            cells = (NONE if distance is None else f"{distance:.3g}" for distance in near)
            rows.append((entry.name, "nearest imagined", *cells))
    header = ("", "", *(f"{kind} ({len(places)})" for kind, places in kinds.places.items()))
    return Table(f"{contest.title}: by {kinds.key}", header, tuple(rows))


def _equal_arithmetic(contest: Contest, groups: Sequence[Sequence[Entry]]) -> Table:
    header = ("FLOPs per episode", "", *PROTOCOLS)
    rows = [
        (f"{entry.flops_per_episode:.2e}", entry.name, *map(percent, rates(entry.outcomes).values()))
        for group in groups
        for entry in group
    ]
    return Table(f"{contest.title}: at equal planning arithmetic (within 10 %)", header, tuple(rows))
