"""The page of the paper's comparison, from a folder of results; called by comparison.sh.

    python runs/paper/page.py write runs/comparison --page docs/notebook/comparison.md
    python runs/paper/page.py best runs/comparison/pusht/tuning/*/lewm.json

`write` puts tables between the page's markers, `<!-- begin NAME -->` and `<!-- end NAME -->`; a page that is not there
begins as page.md. `best` prints the name of the planner, the folder of the file that has the most successes.

What nobody has evaluated is a dash. In place of the row lewm stand figures of the model that comes with lewm, from its
card (pretrained/), until there are results of its own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from lewm.errors import ConfigError, LewmError
from lewm.evaluate.comparison import Compared, Contest, compare, rates, time_ratio
from lewm.evaluate.comparison_files import Entry, read_entry
from lewm.evaluate.comparison_tables import NONE, Table, as_markdown, percent, seconds
from lewm.evaluate.results import by_name
from lewm.evaluate.stats import Rate
from lewm.files import completing, read_json

HERE = Path(__file__).parent
MODELS = HERE.parents[1] / "pretrained"
NOTHING = "Nothing has been measured yet."
FIRST = "lewm"  # the row that the others are tested against
FROZEN = "the frozen pairs, paper"  # a column beside those of tuning pairs


@dataclass(frozen=True)
class Results:
    """What a folder holds. rows, worlds, planners: names, in the order of the tables.

    blocks: evaluations by block, world and label, which is a row's name with its seed.  published: (success, source)
    by row and world.  tries: what else was trained to choose settings, each with its row and options.
    tuning: evaluations of rows and tries by world, by planner on tuning pairs or ``FROZEN``, and by label.
    """

    folder: Path
    rows: list[str]
    worlds: list[str]
    planners: list[str]
    blocks: dict[str, dict[str, dict[str, Entry]]]
    published: dict[tuple[str, str], tuple[str, str]]
    tries: dict[str, tuple[str, str]]
    tuning: dict[str, dict[str, dict[str, Entry]]]

    @staticmethod
    def read(folder: Path, tables: Path) -> Results:
        lines = {name: _lines(tables / f"{name}.tsv") for name in ("methods", "worlds", "planners")}
        rows, worlds, planners = ([line[0] for line in each] for each in lines.values())
        blocks: dict[str, dict[str, dict[str, Entry]]] = {}
        for block in ("paper", "best", "equal"):
            blocks[block] = {world: _entries(folder / world / block, rows) for world in worlds}
        for world in worlds:  # a method that acts has no planner to choose
            acting = {name: entry for name, entry in blocks["paper"][world].items() if entry.planner is None}
            if blocks["best"][world]:
                blocks["best"][world] = _in_order(blocks["best"][world] | acting, rows)
        published = {(row, world): (success, source) for row, world, success, source in _lines(HERE / "published.tsv")}
        tries = {name: (row, options) for name, row, options in _lines(HERE / "tries.tsv") if row in rows}
        trained = [name for row in rows for name in (row, *(each for each, (of, _) in tries.items() if of == row))]
        tuning: dict[str, dict[str, dict[str, Entry]]] = {}
        for world in worlds:
            places = {planner: folder / world / "tuning" / planner for planner in planners}
            places[FROZEN] = folder / world / "paper"
            tuning[world] = {column: _entries(place, trained) for column, place in places.items()}
        return Results(folder, rows, worlds, planners, blocks, published, tries, tuning)

    def measured(self) -> list[str]:
        """The worlds of which there are evaluations."""
        return [world for world in self.worlds if any(by_world[world] for by_world in self.blocks.values())]


def write(results: tyro.conf.Positional[Path], page: Path, tables: Path = HERE) -> None:
    """Write the page, all of it or nothing. results: the folder.  tables: of methods.tsv, worlds.tsv, planners.tsv."""
    found = Results.read(results, tables)
    text = (page if page.is_file() else HERE / "page.md").read_text(encoding="utf-8")
    sections: dict[str, Callable[[], str]] = {
        "paper": lambda: _block(found, "paper"),
        "summary": lambda: _summary(found),
        "best": lambda: _block(found, "best"),
        "equal": lambda: _block(found, "equal"),
        "strict": lambda: _block(found, "paper", protocol="strict"),
        "reacher": lambda: _reacher(found),
        "times": lambda: _times(found),
        "tried": lambda: _tried(found),
        "commands": lambda: _commands(found),
    }
    for name in re.findall(r"<!-- begin (\S+) -->", text):
        if name not in sections:
            raise ConfigError(f"{page} has a marker {name!r}; there are {', '.join(sections)}.")
        marks = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, _, rest = text.partition(marks[0])
        _, end, after = rest.partition(marks[1])
        if not end:
            raise ConfigError(f"{page} has no {marks[1]}. Put it where the table ends.")
        text = f"{before}{marks[0]}\n{sections[name]()}\n{marks[1]}{after}"
    with completing(page) as temporary:
        temporary.write_text(text, encoding="utf-8")


def best(files: tyro.conf.Positional[tuple[Path, ...]]) -> None:
    """Print the planner with the most successes by the paper's protocol, the first of equals."""
    successes = {path.parent.name: rates(read_entry(path).outcomes)["paper"].successes for path in files}
    print(max(successes, key=lambda planner: successes[planner]))


# -- reading -------------------------------------------------------------------------------------------------------


def _lines(path: Path) -> list[list[str]]:
    """The rows of a table whose columns are apart by "|"."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip() and line.lstrip()[0] != "#"]
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def _entries(folder: Path, rows: Sequence[str]) -> dict[str, Entry]:
    entries = {path.stem: read_entry(path, path.stem) for path in sorted(folder.glob("*.json"))}
    return _in_order({name: entry for name, entry in entries.items() if _row(name) in rows}, rows)


def _in_order(entries: dict[str, Entry], rows: Sequence[str]) -> dict[str, Entry]:
    return dict(sorted(entries.items(), key=lambda item: (rows.index(_row(item[0])), item[0])))


def _row(label: str) -> str:
    """The row of a label, which may name a seed."""
    return label.partition(".seed")[0]


# -- tables --------------------------------------------------------------------------------------------------------


def _block(results: Results, block: str, protocol: str = "paper") -> str:
    """Rows by worlds; each cell with its interval, its pairs, and the published number. What is missing is said."""
    by_world = results.blocks[block]
    if not any(by_world.values()):
        return NOTHING
    notes = [f"{NONE} has not been evaluated yet."]
    for world, entries in by_world.items():
        if entries and not any(_row(label) == FIRST for label in entries):
            notes.append(f"There is no {FIRST} in {world} pair by pair, so nothing is marked there.")
    return f"{as_markdown(_table(results, block, protocol))}\n\n{' '.join(notes)}"


def _table(results: Results, block: str, protocol: str = "paper", marked: bool = True) -> Table:
    by_world = results.blocks[block]
    compared = compare([entry for world in by_world.values() for entry in world.values()])
    against_first = [contest for contest in compared.contests if marked and _row(contest.first.name) == FIRST]
    tests = [test for contest in against_first for test in compared.tests_of(contest) if test.protocol == protocol]
    special = {id(test.entry) for test in tests if test.adjusted < 0.05}

    def cell(row: str, world: str) -> str:
        mine = [entry for label, entry in by_world[world].items() if _row(label) == row]
        parts = [_cell(entry, protocol, id(entry) in special, block == "best") for entry in mine]
        if not parts and row == FIRST and block == "paper" and (card := _card(world)):
            parts = [f"{percent(card[protocol])} ({card[protocol].total}, card)"]
        return "<br>".join([*(parts or [NONE]), *_published(results, row, world, protocol)])

    body = [(row, *(cell(row, world) for world in results.worlds)) for row in results.rows]
    body += _bounds(results, compared, by_world, protocol)
    return Table(block, ("", *results.worlds), tuple(body))


def _summary(results: Results) -> str:
    """What was evaluated by the paper's protocol and with its planner, of worlds and rows that are there."""
    by_world, worlds = results.blocks["paper"], [world for world in results.worlds if results.blocks["paper"][world]]
    measured = {_row(label) for world in by_world.values() for label in world}
    rows = [row for row in results.rows if row in measured or row == FIRST]
    return as_markdown(_table(replace(results, rows=rows, worlds=worlds), "paper", marked=False)) if worlds else NOTHING


def _card(world: str) -> dict[str, Rate]:
    """Success by protocol of the model that comes with lewm, on the paper's pairs with the paper's planner."""
    found = _evaluations(world)
    if not found:
        return {}
    counts = by_name(found[0]["rates"])
    return {"paper": Rate(*counts["policy"]), "strict": Rate(*counts["policy_strict"])}


def _evaluations(world: str) -> list[dict[str, Any]]:
    """Those of a card that changed nothing of planning, on the paper's pairs."""
    path = MODELS / world / "config.json"
    found = read_json(path)["evaluations"] if path.is_file() else []
    by_paper = [each for each in found if each["settings"].get("eval.manifest") == "paper"]
    return [each for each in by_paper if not any(name.startswith("plan.") for name in each["settings"])]


def _cell(entry: Entry, protocol: str, differs: bool, with_planner: bool) -> str:
    rate = rates(entry.outcomes)[protocol]
    seed = f"seed {entry.name.partition('.seed')[2]}: " if ".seed" in entry.name else ""
    how = f", {entry.planner}" if with_planner and entry.planner else ""
    return f"{seed}{percent(rate)}{'†' * differs} ({rate.total}{how})"


def _published(results: Results, row: str, world: str, protocol: str) -> list[str]:
    if protocol != "paper" or (row, world) not in results.published:
        return []
    success, source = results.published[row, world]
    return [f"published: {success} ({source})"]


def _bounds(
    results: Results, compared: Compared, by_world: dict[str, dict[str, Entry]], protocol: str
) -> list[tuple[str, ...]]:
    """Floor and ceiling, of the first contest of each world."""
    contests: dict[str, Contest] = {}
    for world, entries in by_world.items():
        for contest in compared.contests:
            if entries and contest.first is next(iter(entries.values())):
                contests[world] = contest
    names = dict.fromkeys(name for contest in contests.values() for name in contest.bounds())
    rows = []
    for name in names:
        cells = []
        for world in results.worlds:
            outcomes = contests[world].bounds().get(name) if world in contests else None
            rate = rates(outcomes)[protocol] if outcomes else None
            parts = [NONE if rate is None else f"{percent(rate)} ({rate.total})"]
            cells.append("<br>".join([*parts, *_published(results, name, world, protocol)]))
        rows.append((name, *cells))
    return rows


def _reacher(results: Results) -> str:
    entries = list(results.blocks["paper"].get("reacher", {}).values())
    if not entries:
        return NOTHING
    parts = []
    for kinds in compare(entries, ["velocity"]).kinds:
        shown = {entry.name: entry.outcomes for entry in kinds.contest.entries} | kinds.contest.bounds()
        header = ("", *(f"{kind} ({len(places)} pairs)" for kind, places in kinds.places.items()))
        body = [
            (name, *(percent(rates(outcomes, places)["paper"]) for places in kinds.places.values()))
            for name, outcomes in shown.items()
        ]
        parts.append(as_markdown(Table("", header, tuple(body))))
    return "\n\n".join(parts)


def _times(results: Results) -> str:
    by_world = results.blocks["paper"]
    labels = list(dict.fromkeys(label for world in by_world.values() for label in world))
    if not labels:
        return NOTHING

    def cell(label: str, world: str) -> str:
        entry, first = by_world[world].get(label), by_world[world].get(FIRST)
        if entry is None or entry.planner is None:
            return NONE if entry is None else "acts"
        ratio = time_ratio(entry, first) if first else None
        return seconds(entry.seconds_per_plan) + ("" if ratio is None else f" ({ratio:.1f})")

    body = [(label, *(cell(label, world) for world in results.measured())) for label in labels]
    devices = sorted({entry.device for world in by_world.values() for entry in world.values()})
    return as_markdown(Table("", ("", *results.measured()), tuple(body))) + f"\n\nMeasured on {', '.join(devices)}."


def _tried(results: Results) -> str:
    """Every planner and every setting that was tried for every method, on tuning pairs, and what else was."""
    parts = [(HERE / "tried.md").read_text(encoding="utf-8").strip()]
    for world, found in results.tuning.items():
        on_tuning = {label for column, each in found.items() if column != FROZEN for label in each}
        tried = {name for name in results.tries if name in found[FROZEN]}
        known = on_tuning | tried | {results.tries[name][0] for name in tried}
        labels = dict.fromkeys([*(label for label in found[FROZEN] if label in known), *sorted(on_tuning)])
        if labels:
            header = (f"{world}, of tuning pairs", *results.planners, FROZEN)
            body = tuple((_described(results, label), *_tries(label, found)) for label in labels)
            parts.append(as_markdown(Table("", header, body)))
    return "\n\n".join(parts)


def _described(results: Results, label: str) -> str:
    """A row's name, or what was tried for it."""
    if label not in results.tries:
        return label
    row, options = results.tries[label]
    return f"{label}: {row} with `{options}`"


def _tries(label: str, found: dict[str, dict[str, Entry]]) -> Iterator[str]:
    """The successes with each planner, where the one that was chosen stands out, and those of the frozen pairs."""
    tried = {column: rates(each[label].outcomes)["paper"] for column, each in found.items() if label in each}
    planners = [column for column in tried if column != FROZEN]
    chosen = max(planners, key=lambda planner: tried[planner].successes) if len(planners) > 1 else None
    for column in found:
        text = f"{tried[column].successes} of {tried[column].total}" if column in tried else NONE
        yield f"**{text}**" if column == chosen else text


def _commands(results: Results) -> str:
    """One line for each training and each evaluation."""
    rows: list[tuple[str, ...]] = []
    for world in results.worlds:
        for done in sorted((results.folder / world / "runs").glob("*.done")):
            rows.append((world, done.stem, "trained", done.read_text(encoding="utf-8").strip()))
        if FIRST not in results.blocks["paper"][world]:
            rows += [(world, FIRST, "card", _card_command(world, each)) for each in _evaluations(world)[:1]]
        asked = [(block, by_world[world]) for block, by_world in results.blocks.items()]
        asked += [(f"tuning, {column}", each) for column, each in results.tuning[world].items() if column != FROZEN]
        tried = {label: e for label, e in results.tuning[world][FROZEN].items() if label in results.tries}
        for what, entries in [*asked, ("paper", tried)]:
            for label, entry in entries.items():
                if what != "best" or entry.planner is not None:
                    rows.append((world, label, what, entry.command or "not recorded"))
    table = Table("", ("world", "row", "what", "command"), tuple((*line[:3], f"`{line[3]}`") for line in rows))
    return as_markdown(table) if rows else NOTHING


def _card_command(world: str, evaluation: dict[str, Any]) -> str:
    return f"lewm eval {world} --eval.episodes {evaluation['settings']['eval.episodes']}"


if __name__ == "__main__":
    try:
        tyro.extras.subcommand_cli_from_dict({"write": write, "best": best})
    except LewmError as error:
        sys.exit(f"Error: {error}")
